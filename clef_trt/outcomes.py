"""Outcomes of a run: columns of a few bytes each, the partial report on disk, and the report made of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from . import __version__
from .errors import SettingError
from .labelled import Outcome, Survey, digest
from .metrics import BINS, INTERVAL_PERCENT, Answers, summaries
from .types import QUESTION_TYPES

FORMAT_VERSION = 1


class Outcomes:
    """The outcomes so far of a surveyed file."""

    def __init__(self, labelled: Survey) -> None:
        def column(dtype: Any) -> np.ndarray:
            return np.zeros(labelled.answers, dtype)

        self._slots = labelled.questions
        self.names = [""] * len(labelled.questions)  # of the question ids told apart
        self.count = self.requests = self.unlabelled = self.cut = 0
        self._right = 0
        self.answers = Answers(
            request=column(np.int32),
            question=column(np.int16),
            type=column(np.uint8),
            label=column(np.uint64),
            predicted=column(np.uint64),
            confidence=column(np.float64),
            brier=column(np.float64),
            level_error=column(np.float64),
            score_error=column(np.float64),
        )

    @property
    def right(self) -> float:
        """The share of answers so far that is right."""
        return self._right / max(self.count, 1)

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """Per request: the tokens its state was cut by, then its outcomes.

        Raises ValueError, TypeError or IndexError for anything else, which only a partial report may hold.
        """
        for cut, *outcomes in rows:
            for outcome in outcomes:
                self._add(Outcome(*outcome))
            self.cut += cut > 0
            self.requests += bool(outcomes)
            self.unlabelled += not outcomes

    def _add(self, outcome: Outcome) -> None:
        columns, i = self.answers, self.count
        slot = self._slots.get(digest(outcome.question), -1)
        if slot >= 0:
            self.names[slot] = outcome.question
        score = outcome.score_error is not None
        columns.request[i] = self.requests
        columns.question[i] = slot
        columns.type[i] = QUESTION_TYPES.index(outcome.type)
        columns.label[i] = digest(f"{outcome.type} {outcome.label}")
        columns.predicted[i] = digest(f"{outcome.type} {outcome.predicted}")
        columns.confidence[i] = outcome.confidence
        columns.brier[i] = outcome.brier
        columns.level_error[i] = abs(int(outcome.label) - int(outcome.predicted)) if score else np.nan
        columns.score_error[i] = outcome.score_error if score else np.nan
        self._right += outcome.label == outcome.predicted
        self.count += 1


def partial_path(report: Path) -> Path:
    """Where the outcomes of an unfinished run lie."""
    return report.with_name(f"{report.name}.partial")


def check_free(report: Path) -> None:
    """Raises SettingError where the report exists already or its folder does not."""
    if report.exists() or not report.parent.is_dir():
        raise SettingError(f"{report} exists already, or its folder does not; choose another name, or remove it")


def open_partial(path: Path) -> BinaryIO:
    """A partial report to read and append to, empty where there was none."""
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    except OSError as fault:
        raise SettingError(f"{path} cannot be written: {fault.strerror}") from None


def resume(file: BinaryIO, path: Path, target_sha256: str, labelled: Survey, outcomes: Outcomes) -> int:
    """Take over the batches that `file` holds, cut off a half-written last line, and stand at its end.

    Returns how many requests are done. The first line says of what it is; a file without one gets it. Raises
    SettingError for a file of another target or other requests.
    """
    known = {"target_sha256": target_sha256, "labelled_sha256": labelled.sha256}
    header = json.dumps({"format_version": FORMAT_VERSION} | known).encode() + b"\n"
    first = file.readline()
    if first != header and header.startswith(first):  # nothing, or interrupted within its first line
        file.seek(0)
        file.truncate()
        file.write(header)
        file.flush()
        return 0
    _check_header(first, path, known)
    end, done = len(first), 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        try:
            rows = json.loads(line)
            outcomes.add(rows)
            done += len(rows)
        except (ValueError, TypeError, IndexError):
            raise SettingError(f"{path} holds a line that is none of this run; remove it to begin again") from None
        end += len(line)
    if done > labelled.requests:
        raise SettingError(f"{path} holds {done} requests of {labelled.requests}; remove it to begin again")
    file.seek(end)
    file.truncate()
    return done


def append(file: BinaryIO, rows: Sequence[Sequence[Any]]) -> None:
    """One batch as one line, so that an interrupt leaves whole batches, and the next run makes the same ones."""
    file.write(json.dumps(rows, separators=(",", ":")).encode() + b"\n")
    file.flush()


def _check_header(line: bytes, path: Path, known: dict[str, str]) -> None:
    try:
        header = json.loads(line)
        if header["format_version"] != FORMAT_VERSION:
            raise ValueError
        differing = [name for name, value in known.items() if header[name] != value]
    except (ValueError, TypeError, KeyError):
        raise SettingError(f"{path} is no partial report of this version; remove it, or name another report") from None
    for name in differing:
        what = {"target_sha256": "another target, or other settings of it", "labelled_sha256": "other requests"}[name]
        raise SettingError(
            f"{path} was begun with {what}: its {name} is {header[name]}, now it is {known[name]}; "
            "go on with what it was begun with, name another report, or remove it"
        )


def summed_up(
    outcomes: Outcomes,
    labelled: Survey,
    target: dict[str, Any],
    *,
    wanted_precision: float,
    bootstrap: int,
    seed: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """The content of REPORT.json; what its figures mean is told in `metrics.summaries`."""
    answers = outcomes.answers
    everything, types, questions = summaries(
        answers,
        [np.zeros(len(answers.request), np.int64), answers.type.astype(np.int64), answers.question.astype(np.int64)],
        wanted_precision=wanted_precision,
        resamples=bootstrap,
        seed=seed,
        progress=progress,
    )
    return {
        "format_version": FORMAT_VERSION,
        "clef_trt": __version__,
        "target": target,
        "labelled": {
            "file": str(labelled.path),
            "sha256": labelled.sha256,
            "requests": labelled.requests,
            "requests_without_a_label": outcomes.unlabelled,  # not run
            "requests_cut_to_fit": outcomes.cut,
        },
        "settings": {
            "wanted_precision": wanted_precision,
            "bins": BINS,
            "bootstrap": bootstrap,
            "seed": seed,
            "interval_percent": INTERVAL_PERCENT,
        },
        "all": everything[0],
        "types": {QUESTION_TYPES[i]: summary for i, summary in enumerate(types) if summary["answers"]},
        "questions": dict(zip(outcomes.names, questions, strict=True)),
        "questions_left_out": labelled.left_out,
    }


def write_report(report: Path, value: dict[str, Any]) -> None:
    """Write it whole or not at all."""
    temporary = report.with_name(f".{report.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=1, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, report)
    except OSError as fault:
        raise SettingError(f"{report} cannot be written: {fault.strerror}; its outcomes are kept") from None
    finally:
        temporary.unlink(missing_ok=True)
