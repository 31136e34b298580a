"""Labelled answers → how right they are and how honest their probabilities: numpy only, no files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .types import QUESTION_TYPES

BINS = 15  # of equal width, as Guo et al. 2017 use
METRICS = ("accuracy", "macro_f1", "brier", "ece")  # those that get an interval
INTERVAL_PERCENT = 95


@dataclass(frozen=True, eq=False)
class Answers:
    """One entry per labelled answer, in the order of their requests; every array is [answers]."""

    request: np.ndarray  # int, rising from 0 without a gap: answers of one request are resampled together
    question: np.ndarray  # int, which question id, −1 for those that are not told apart
    type: np.ndarray  # int, index into types.QUESTION_TYPES
    label: np.ndarray  # any integer; equal where type and option are equal
    predicted: np.ndarray  # the same integers
    confidence: np.ndarray  # float64, probability of the predicted option
    brier: np.ndarray  # float64, Σ over options (p − [option is right])²
    level_error: np.ndarray  # float64, |predicted level − right level|; NaN where the answer is no score
    score_error: np.ndarray  # float64, |expected level − right level|; NaN where the answer is no score

    @property
    def correct(self) -> np.ndarray:
        """[answers] bool"""
        right: np.ndarray = self.label == self.predicted
        return right


def bins(confidence: np.ndarray) -> np.ndarray:
    """The bin of each probability, 0 … BINS − 1: bin i is (i/BINS, (i+1)/BINS], and 0 lies in the first.

    A probability within 1e-9 of an edge lies on it: 0.2 is 3/15 whatever the last bit says.
    """
    found: np.ndarray = np.clip(np.ceil(confidence * BINS - 1e-9).astype(np.int64) - 1, 0, BINS - 1)
    return found


def reliability(confidence: np.ndarray, correct: np.ndarray) -> list[dict[str, Any]]:
    """Per bin with answers: its edges, how many, their mean probability and their accuracy (a reliability diagram)."""
    which = bins(confidence)
    counts = np.bincount(which, minlength=BINS)
    sure, right = (np.bincount(which, values, BINS) for values in (confidence, correct))
    return [
        {
            "from": round(i / BINS, 4),
            "to": round((i + 1) / BINS, 4),
            "answers": int(counts[i]),
            "confidence": float(sure[i] / counts[i]),
            "accuracy": float(right[i] / counts[i]),
        }
        for i in np.flatnonzero(counts)
    ]


def decided_alone(confidence: np.ndarray, correct: np.ndarray, wanted: float) -> tuple[float, float | None]:
    """The largest share of answers, taken by falling probability, whose accuracy is at least `wanted`.

    Returns that share and the probability from which answers are taken, (0, None) where there is none. Answers of
    equal probability are taken together: a threshold cannot tell them apart.
    """
    order = np.argsort(-confidence, kind="stable")
    falling = confidence[order]
    precision = np.cumsum(correct[order]) / np.arange(1, len(order) + 1)
    last_of_tie = np.append(falling[1:] < falling[:-1], True)
    enough = np.flatnonzero(last_of_tie & (precision >= wanted - 1e-12))
    if not enough.size:
        return 0.0, None
    return float((enough[-1] + 1) / len(order)), float(falling[enough[-1]])


class Tallies:
    """The metrics of every group of answers for any weights of the requests, so that a resample costs three sums.

    Answers that agree in groups, label, prediction and bin fall into one cell; sums over cells are all that accuracy,
    macro-F1, Brier score and ECE need.
    """

    def __init__(self, answers: Answers, partitions: Sequence[np.ndarray]) -> None:
        """partitions: each [answers] int, the group of every answer in that partition, −1 for none."""
        codes = np.unique(np.concatenate([answers.label, answers.predicted]), return_inverse=True)[1]
        label, predicted = codes[: len(answers.label)], codes[len(answers.label) :]
        binned = bins(answers.confidence)
        confusions, self._confusion = _cells(*partitions, label, predicted)
        binnings, self._bin = _cells(*partitions, binned)
        self._confusions, self._bins = len(confusions), len(binnings)
        self._request, self._brier = answers.request, answers.brier
        self._gap = answers.correct - answers.confidence
        self._views = [
            _View.of(
                int(groups.max(initial=-1)) + 1,
                (groups[confusions], label[confusions], predicted[confusions]),
                (groups[binnings], binned[binnings]),
            )
            for groups in partitions
        ]

    def metrics(self, weights: np.ndarray) -> list[np.ndarray]:
        """Per partition [METRICS, groups]; weights [requests] float64, NaN for a group all of whose requests have 0."""
        weight = weights[self._request]
        counts = np.bincount(self._confusion, weight, self._confusions)
        briers, gaps = (np.bincount(self._bin, weight * of, self._bins) for of in (self._brier, self._gap))
        return [view.metrics(counts, briers, gaps) for view in self._views]


@dataclass(frozen=True, eq=False)
class _View:
    """Where the cells of `Tallies` fall in one partition. Cells without a group fall into a last one, cut off."""

    groups: int
    group: np.ndarray  # [confusion cells]
    right: np.ndarray  # [confusion cells] indices of those whose prediction is right
    label_class: np.ndarray  # [confusion cells] index into the classes of all groups
    predicted_class: np.ndarray  # [confusion cells]
    class_group: np.ndarray  # [classes]
    bin_cell: np.ndarray  # [bin cells] group · BINS + bin

    @classmethod
    def of(
        cls, groups: int, confusion: tuple[np.ndarray, np.ndarray, np.ndarray], binned: tuple[np.ndarray, np.ndarray]
    ) -> _View:
        """confusion: group, label, prediction of its cells; binned: group and bin of its."""
        group, bin_group = (np.where(which < 0, groups, which) for which in (confusion[0], binned[0]))
        twice = np.concatenate([group, group])
        first, classes = _cells(twice, np.concatenate(confusion[1:]))
        label_class, predicted_class = classes[: len(group)], classes[len(group) :]
        right = np.flatnonzero(label_class == predicted_class)
        return cls(groups, group, right, label_class, predicted_class, twice[first], bin_group * BINS + binned[1])

    def metrics(self, counts: np.ndarray, briers: np.ndarray, gaps: np.ndarray) -> np.ndarray:
        """[METRICS, groups]"""
        every = self.groups + 1
        answers = np.bincount(self.group, counts, every)
        right = np.bincount(self.group[self.right], counts[self.right], every)
        brier = np.bincount(self.bin_cell // BINS, briers, every)
        gap = np.abs(np.bincount(self.bin_cell, gaps, every * BINS)).reshape(every, BINS).sum(1)
        classes = len(self.class_group)
        # F1 = 2·TP/(2·TP + FP + FN), and labels and predictions of a class together are 2·TP + FP + FN
        support = np.bincount(self.label_class, counts, classes) + np.bincount(self.predicted_class, counts, classes)
        hits = np.bincount(self.label_class[self.right], counts[self.right], classes)
        f1 = np.divide(2 * hits, support, out=np.zeros(classes), where=support > 0)
        occurring = np.bincount(self.class_group, support > 0, every)
        with np.errstate(invalid="ignore"):
            macro_f1 = np.bincount(self.class_group, f1, every) / occurring
            return np.stack([right / answers, macro_f1, brier / answers, gap / answers])[:, : self.groups]


def _cells(*codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of entries that agree in every code (int from −1): the index of the first of each cell, and each one's cell."""
    combined = np.zeros(len(codes[0]), np.int64)
    for code in codes:
        combined = combined * (int(code.max(initial=-1)) + 2) + code + 1
    _, first, cell = np.unique(combined, return_index=True, return_inverse=True)
    return first, cell


def intervals(
    tallies: Tallies,
    requests: int,
    resamples: int,
    seed: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[np.ndarray]:
    """Per partition [2, METRICS, groups]: the ends of the percentile bootstrap interval of INTERVAL_PERCENT.

    Requests are drawn with replacement, not answers: those of one request depend on each other. Resamples in which a
    group does not occur do not count for it; NaN where it occurs in none. A resample's ECE is on average larger than
    that of its answers, as any noise adds to it: where the ECE is near 0 its interval may lie wholly above.
    """
    random = np.random.default_rng(seed)
    drawn: list[list[np.ndarray]] = []
    for done in range(resamples):
        if done and done % 250 == 0:
            progress(f"{done} of {resamples} resamples")
        picks = random.integers(0, requests, requests)
        drawn.append(tallies.metrics(np.bincount(picks, minlength=requests).astype(np.float64)))
    beyond = (100 - INTERVAL_PERCENT) / 2
    result = []
    for values in map(np.stack, zip(*drawn, strict=True)):  # [resamples, METRICS, groups]
        never = np.isnan(values).all(0)
        values[:, never] = 0.0  # numpy warns of columns without a number
        result.append(np.where(never, np.nan, np.nanpercentile(values, [beyond, 100 - beyond], axis=0)))
    return result


def summaries(
    answers: Answers,
    partitions: Sequence[np.ndarray],
    *,
    wanted_precision: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[list[dict[str, Any]]]:
    """Per partition, per group, what the report says of its answers; {"answers": 0} for a group without any.

    accuracy: the share that is right. macro_f1: the mean of F1 over the classes (type and option) that occur in labels
    or predictions, as scikit-learn's f1_score(average="macro"). brier: the mean of Σ over options (p − [right])², from
    0 to 2 (Brier 1950), which is scikit-learn's brier_score_loss(scale_by_half=False) for every type alike; where all
    answers are nouls, brier_binary is the mean of (P(true) − [true])², its half and scikit-learn's binary score. ece:
    Σ over bins of (share of answers) · |accuracy − mean probability| of the predicted option (Guo et al. 2017, naming
    it expected calibration error). level_error, score_error: of scores, mean absolute errors in levels of the
    predicted and of the expected level. decided_alone and reliability: see the functions. Intervals: see `intervals`.
    """
    tallies = Tallies(answers, partitions)
    requests = int(answers.request.max(initial=-1)) + 1
    points = tallies.metrics(np.ones(requests))
    ends = intervals(tallies, requests, resamples, seed, progress) if resamples else [None] * len(partitions)
    result = []
    for groups, values, bounds in zip(partitions, points, ends, strict=True):
        order = np.argsort(groups, kind="stable")
        edges = np.searchsorted(groups[order], np.arange(values.shape[1] + 1))
        found: list[dict[str, Any]] = []
        for group in range(values.shape[1]):
            chosen = order[edges[group] : edges[group + 1]]
            summary: dict[str, Any] = {"answers": len(chosen)}
            found.append(summary)
            if not len(chosen):
                continue
            for i, name in enumerate(METRICS):
                interval = None if bounds is None else [_number(end) for end in bounds[:, i, group]]
                summary[name] = {"value": float(values[i, group]), "interval": interval}
            if (answers.type[chosen] == QUESTION_TYPES.index("noul")).all():
                summary["brier_binary"] = summary["brier"]["value"] / 2
            for name in ("level_error", "score_error"):
                errors = getattr(answers, name)[chosen]
                if not np.isnan(errors).all():
                    summary[name] = float(np.nanmean(errors))
            sure, correct = answers.confidence[chosen], answers.correct[chosen]
            share, threshold = decided_alone(sure, correct, wanted_precision)
            summary["decided_alone"] = {"share": share, "from_probability": threshold}
            summary["reliability"] = reliability(sure, correct)
        result.append(found)
    return result


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
