"""Labelled requests: read line by line, and what an answer is worth against its label."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .errors import SHOWN_FAULTS, EngineError, Fault, RequestError, printable
from .strict_json import read_json
from .types import QUESTION_TYPES

KEYS = ("request", "answers")
MOST_QUESTIONS = 100  # question ids told apart: a file may hold generated ids, no two alike
SHOWN_OPTIONS = 8
ROUNDING = 1e-6  # a probability or level of a target may lie beyond its ends by as much


@dataclass(frozen=True)
class Labelled:
    """One line of the file: a request body, and of some of its questions the name of the right option.

    The name is "true" or "false", an option of a choice, or the number of a level.
    """

    line: int
    request: dict[str, Any]
    labels: dict[str, str]


@dataclass(frozen=True)
class Survey:
    """A file of labelled requests, read once and without a fault; its requests are read again when they are run."""

    path: Path
    sha256: str
    requests: int
    answers: int  # labelled questions of all requests
    questions: dict[int, int]  # digest of a question id → its index; the MOST_QUESTIONS most frequent, in file order
    left_out: int  # other question ids


class Outcome(NamedTuple):
    """What one answer is worth; a line of a partial report holds these as JSON arrays."""

    question: str
    type: str
    label: str  # name of the right option, as in Labelled
    predicted: str
    confidence: float  # probability of the predicted option
    brier: float  # Σ over options (p − [option is right])²
    score_error: float | None  # |expected level − right level| of a score


def survey(path: Path, check: Callable[[dict[str, Any]], object] = lambda _: None) -> Survey:
    """Read the file through before anything is run: its hash, its counts, and every fault in it.

    check: raises RequestError for a request body that the target would refuse. Memory: 8 bytes per labelled question.
    Raises RequestError with the line and question of each fault (of the first SHOWN_FAULTS).
    """
    faults: list[Fault] = []
    ids = array("Q")
    requests, state = 0, hashlib.sha256()
    for number, line in _lines(path):
        state.update(line)
        if not line.strip():
            continue
        requests += 1
        try:
            labelled = _parsed(line, number)
            check(labelled.request)
        except RequestError as error:
            faults += _placed(error, number)
            if len(faults) >= SHOWN_FAULTS:
                break
        else:
            ids.extend(digest(name) for name in labelled.labels)
    if faults:
        raise RequestError(faults)
    if not ids:
        raise RequestError([Fault((), f"{path} holds no labelled answer: there is nothing to evaluate", "empty")])
    found, first, counts = np.unique(np.frombuffer(ids, np.uint64), return_index=True, return_counts=True)
    frequent = np.lexsort((first, -counts))[:MOST_QUESTIONS]
    in_order = found[frequent[np.argsort(first[frequent])]].tolist()
    slots = {value: index for index, value in enumerate(in_order)}
    return Survey(path, state.hexdigest(), requests, len(ids), slots, len(found) - len(slots))


def read(path: Path, skip: int = 0) -> Iterator[Labelled]:
    """The labelled requests of a file, one at a time, after the first `skip`. Raises RequestError."""
    requests = ((number, line) for number, line in _lines(path) if line.strip())
    for index, (number, line) in enumerate(requests):
        if index < skip:
            continue
        try:
            labelled = _parsed(line, number)
        except RequestError as error:
            raise RequestError(_placed(error, number)) from None
        yield labelled


def judge(labelled: Labelled, response: Any) -> list[Outcome]:
    """The outcome of every labelled question; raises EngineError, with the place, for a response without its answer."""
    answers = response.get("answers") if isinstance(response, dict) else None
    outcomes = []
    for name, label in labelled.labels.items():
        answer = answers.get(name) if isinstance(answers, dict) else None
        try:
            outcomes.append(_outcome(name, labelled.request["questions"][name], label, answer))
        except _UnusableError as fault:
            where = f"line {labelled.line}, question {printable(name)!r}"
            raise EngineError(f"{where}: the target's answer {_shown(answer)} {fault}") from None
    return outcomes


def digest(text: str) -> int:
    """64 bits of a text: told apart by them, many texts take 8 bytes each."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


class _UnusableError(ValueError):
    """An answer that cannot be judged; the text says what was expected."""


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            yield from enumerate(file, 1)
    except OSError as fault:
        raise RequestError([Fault((), f"{path} cannot be read: {fault.strerror}", "file")]) from None


def _placed(error: RequestError, line: int) -> list[Fault]:
    return [Fault((f"line {line}", *fault.loc), fault.message, fault.kind) for fault in error.faults]


def _parsed(line: bytes, number: int) -> Labelled:
    value = read_json(line, "the line")
    if not isinstance(value, dict) or set(value) != set(KEYS):
        came = f"an object with the keys {_some(value)}" if isinstance(value, dict) else _shown(value)
        raise RequestError([Fault((), f'is {came}; expected {{"request": …, "answers": …}}', "type")])
    request, answers = value["request"], value["answers"]
    questions = request.get("questions") if isinstance(request, dict) else None
    if not isinstance(questions, dict):
        raise RequestError([Fault(("request",), "is no request body: expected an object with questions", "type")])
    if not isinstance(answers, dict):
        raise RequestError([Fault(("answers",), f"is {_shown(answers)}; expected an object id: right answer", "type")])
    labels, faults = {}, []
    for name, label in answers.items():
        try:
            if name not in questions:
                raise _UnusableError(f"is no question of this request; its questions are {_some(questions)}")
            options = _options(questions[name])
            labels[name] = _label(questions[name]["type"], options, label)
        except _UnusableError as fault:
            faults.append(Fault(("answers", name), str(fault), "label"))
    if faults:
        raise RequestError(faults)
    return Labelled(number, request, labels)


def _options(question: Any) -> list[str]:
    """The names of a question's options, in the order of the request."""
    kind = question.get("type") if isinstance(question, dict) else None
    criteria = question.get("criteria") if isinstance(question, dict) else None
    if kind == "noul":
        return ["true", "false"]
    if kind == "choice" and isinstance(criteria, dict) and criteria:
        return list(criteria)
    if kind == "score" and isinstance(criteria, list) and criteria:
        return [str(level) for level in range(len(criteria))]
    raise _UnusableError(f"is of a question with no type of {', '.join(QUESTION_TYPES)}, or without options")


def _label(kind: str, options: list[str], label: Any) -> str:
    if kind == "noul":
        if isinstance(label, bool):
            return str(label).lower()
        raise _UnusableError(f"is {_shown(label)}; expected true or false")
    if kind == "choice":
        if isinstance(label, str) and label in options:
            return label
        raise _UnusableError(f"is {_shown(label)}; expected one of the options {_some(options)}")
    if type(label) is int and 0 <= label < len(options):
        return str(label)
    raise _UnusableError(f"is {_shown(label)}; expected the number of a level, 0 to {len(options) - 1}")


def _outcome(name: str, question: dict[str, Any], label: str, answer: Any) -> Outcome:
    kind, options = question["type"], _options(question)
    if not isinstance(answer, dict) or answer.get("type") != kind:
        raise _UnusableError(f"is none to a {kind}")
    if kind == "noul":
        true = _number(answer.get("noul"), "noul", 1)
        # Rounded, so that 1 − 0.4764 and a 0.5236 from elsewhere are one probability.
        probabilities = {"true": true, "false": round(1 - true, 9)}
        predicted: Any = "true" if true >= 0.5 else "false"
    else:
        given = answer.get("probabilities")
        if not isinstance(given, dict) or set(given) != set(options):
            raise _UnusableError(f"has no probability for each of {_some(options)}, or others")
        probabilities = {option: _number(given[option], "probabilities", 1) for option in options}
        # Of options that tie, the first: what a choice says itself, from probabilities not yet rounded.
        predicted = max(probabilities, key=probabilities.__getitem__) if kind == "score" else answer.get("choice")
        if not isinstance(predicted, str) or predicted not in probabilities:
            raise _UnusableError(f"chooses {_shown(predicted)}; expected one of {_some(options)}")
    score_error = None
    if kind == "score":
        score_error = abs(_number(answer.get("score"), "score", len(options) - 1) - int(label))
    brier = math.fsum((p - (option == label)) ** 2 for option, p in probabilities.items())
    return Outcome(name, kind, label, predicted, probabilities[predicted], brier, score_error)


def _number(value: Any, what: str, most: int) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and -ROUNDING <= value <= most + ROUNDING:
        return float(value)
    raise _UnusableError(f"has {_shown(value)} in {what}; expected a number from 0 to {most}")


def _shown(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return printable(json.dumps(value, ensure_ascii=False), 80)


def _some(names: Any) -> str:
    shown = [printable(str(name)) for name in list(names)[:SHOWN_OPTIONS]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "") if shown else "(none)"
