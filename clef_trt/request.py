"""A request body as Python values → a validated Request, or every fault in it with its place."""

from __future__ import annotations

from typing import Any

from .errors import Fault, RequestError
from .media import MediaItem, MediaReader
from .types import QUESTION_TYPES, Limits, Question, Request

REQUEST_KEYS = ("model", "state", "questions", "images", "videos")
# Sent by clients of other services; they change nothing here. `stream` may only be false.
IGNORED_KEYS = ("id", "temperature", "stream")
QUESTION_KEYS = ("type", "instructions", "criteria")
NOUL_DESCRIPTIONS = {
    "true": "The proposition is true or the answer is yes.",
    "false": "The proposition is false or the answer is no.",
}

Loc = tuple[str | int, ...]


def parse_request(body: Any, media: MediaReader | None = None, limits: Limits = Limits()) -> Request:
    """The request in a mapping `{"model", "state", "questions"}`, with `images` and `videos` where there is any.

    Of pictures only the headers are read, by `media`; None refuses them. Raises RequestError with every fault found.
    """
    faults: list[Fault] = []
    if not isinstance(body, dict):
        raise RequestError([_wrong((), body, "an object with model, state and questions")])
    faults += [_unknown((), key, REQUEST_KEYS) for key in body if key not in (*REQUEST_KEYS, *IGNORED_KEYS)]
    if body.get("stream", False) is not False:
        faults.append(_wrong(("stream",), body["stream"], "false: an answer comes in one piece"))
    for key in ("model", "state", "questions"):
        if key not in body:
            faults.append(Fault((key,), "is missing", "missing"))
    if "model" in body and not _is_text(body["model"]):
        faults.append(_wrong(("model",), body["model"], "a non-empty string of Unicode text"))
    questions = _questions(body.get("questions", {}), limits, faults) if "questions" in body else ()
    items = _media(body, media, faults)
    if faults:
        raise RequestError(faults)
    return Request(body["model"], body["state"], questions, items)


def _media(body: dict[Any, Any], media: MediaReader | None, faults: list[Fault]) -> tuple[MediaItem, ...]:
    images, videos = body.get("images"), body.get("videos")
    if media is None:
        for key in ("images", "videos"):
            if body.get(key):
                faults.append(Fault((key,), "is not possible here: no media reader was given", "unsupported"))
        return ()
    try:
        return tuple(media.open(images, videos))
    except RequestError as error:
        faults += error.faults
        return ()


def _questions(value: Any, limits: Limits, faults: list[Fault]) -> tuple[Question, ...]:
    loc: Loc = ("questions",)
    if not isinstance(value, dict) or not value:
        faults.append(_wrong(loc, value, "an object with at least one question"))
        return ()
    if len(value) > limits.questions:
        faults.append(Fault(loc, f"has {len(value)} questions; at most {limits.questions} are allowed", "too_many"))
        return ()
    questions = []
    for key, body in value.items():
        if not isinstance(key, str):
            faults.append(_wrong(loc, key, "strings as the questions' ids"))
            continue
        question = _question(key, body, limits, faults)
        if question is not None:
            questions.append(question)
    return tuple(questions)


def _question(key: str, body: Any, limits: Limits, faults: list[Fault]) -> Question | None:
    loc: Loc = ("questions", key)
    if not isinstance(body, dict):
        faults.append(_wrong(loc, body, f"an object with {', '.join(QUESTION_KEYS)}"))
        return None
    faults += [_unknown(loc, name, QUESTION_KEYS) for name in body if name not in QUESTION_KEYS]
    instructions = body.get("instructions")
    if not isinstance(instructions, str | dict | list | None):
        faults.append(_wrong((*loc, "instructions"), instructions, "a string, object, array or null"))
    if key == "" and instructions in (None, ""):
        faults.append(Fault(loc, "has neither an id nor instructions: there is no question to decide", "empty"))
    kind = body.get("type")
    if not isinstance(kind, str) or kind not in QUESTION_TYPES:
        what = "is missing" if "type" not in body else f"is {_shown(kind)}"
        faults.append(Fault((*loc, "type"), f"{what}; expected one of {', '.join(QUESTION_TYPES)}", "type"))
        return None
    read = {"noul": _noul_options, "choice": _choice_options, "score": _score_options}[kind]
    criteria = body.get("criteria")
    options = read(criteria, (*loc, "criteria"), limits, faults)
    return Question(key, kind, instructions, options, criteria)


def _noul_options(criteria: Any, loc: Loc, _: Limits, faults: list[Fault]) -> tuple[tuple[str, Any], ...]:
    if criteria is None:
        criteria = {}
    if not isinstance(criteria, dict):
        faults.append(_wrong(loc, criteria, "an object with the keys true and false, or nothing"))
        return ()
    faults += [_unknown(loc, name, tuple(NOUL_DESCRIPTIONS)) for name in criteria if name not in NOUL_DESCRIPTIONS]
    return tuple((NOUL_DESCRIPTIONS | criteria).items())[:2]


def _choice_options(criteria: Any, loc: Loc, limits: Limits, faults: list[Fault]) -> tuple[tuple[str, Any], ...]:
    if not isinstance(criteria, dict) or not criteria:
        faults.append(_wrong(loc, criteria, "an object of option: description, with at least one option"))
        return ()
    if len(criteria) > limits.options:
        faults.append(Fault(loc, f"has {len(criteria)} options; at most {limits.options} are allowed", "too_many"))
        return ()
    for option in criteria:
        if not isinstance(option, str):
            faults.append(_wrong(loc, option, "strings as the options' names"))
            return ()
    return tuple(sorted(criteria.items(), key=lambda item: item[0]))


def _score_options(criteria: Any, loc: Loc, limits: Limits, faults: list[Fault]) -> tuple[tuple[str, Any], ...]:
    if not isinstance(criteria, list | tuple) or not criteria:
        faults.append(_wrong(loc, criteria, "an array of level descriptions, lowest first, with at least one level"))
        return ()
    if len(criteria) > limits.levels:
        faults.append(Fault(loc, f"has {len(criteria)} levels; at most {limits.levels} are allowed", "too_many"))
        return ()
    return tuple((str(index), level) for index, level in enumerate(criteria))


def _is_text(value: Any) -> bool:
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _wrong(loc: Loc, value: Any, expected: str) -> Fault:
    return Fault(loc, f"is {_shown(value)}; expected {expected}", "type")


def _unknown(loc: Loc, key: Any, known: tuple[str, ...]) -> Fault:
    place = key if isinstance(key, str) else _shown(key)
    return Fault((*loc, place), f"is not known here; expected {', '.join(known)}", "unknown_key")


def _shown(value: Any) -> str:
    """A value as an error shows it: by kind, with its text where it is short; never a control character."""
    kinds = {
        type(None): "null",
        dict: "an object",
        list: "an array",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else "a long string"
    if isinstance(value, dict | list) and not value:
        return f"{kinds[type(value)].replace('an ', 'an empty ')}" if type(value) in kinds else "empty"
    return kinds.get(type(value), f"a {type(value).__name__}")
