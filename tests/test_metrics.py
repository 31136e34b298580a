"""Metrics against scikit-learn, hand-worked values and their own definitions written out."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, brier_score_loss, f1_score

from clef_trt.metrics import BINS, Answers, Tallies, bins, decided_alone, intervals, reliability, summaries

NOUL, CHOICE, SCORE = range(3)


def random_answers(seed: int, requests: int = 200, options: int = 4) -> tuple[Answers, list[np.ndarray]]:
    """Answers of all types, 1 to 4 a request, with their probabilities; labels are drawn from them, roughly."""
    random = np.random.default_rng(seed)
    request = np.repeat(np.arange(requests), random.integers(1, 5, requests))
    kinds = random.integers(0, 3, len(request))
    rows: list[tuple[Any, ...]] = []
    probabilities = []
    for kind in kinds:
        count = 2 if kind == NOUL else options
        p = random.dirichlet(np.full(count, 0.6)).round(4)
        label = int(random.choice(count, p=p / p.sum()))
        predicted = int(p.argmax())
        level_error = abs(label - predicted) if kind == SCORE else np.nan
        score_error = abs(float(p @ np.arange(count)) - label) if kind == SCORE else np.nan
        brier = float(((p - np.eye(count)[label]) ** 2).sum())
        rows.append((kind * 10 + label, kind * 10 + predicted, p[predicted], brier, level_error, score_error))
        probabilities.append(p)
    label, predicted, *floats = (np.array(column) for column in zip(*rows, strict=True))
    question = random.integers(-1, 3, len(request))
    return Answers(request, question, kinds, label, predicted, *floats), probabilities


def ece(confidence: np.ndarray, correct: np.ndarray) -> float:
    """By its definition, bin by bin."""
    total = 0.0
    for low in range(BINS):
        chosen = (confidence > low / BINS + 1e-12) & (confidence <= (low + 1) / BINS + 1e-12)
        if chosen.any():
            total += chosen.mean() * abs(correct[chosen].mean() - confidence[chosen].mean())
    return total


@pytest.mark.parametrize("seed", range(5))
def test_points_are_those_of_scikit_learn(seed: int) -> None:
    answers, probabilities = random_answers(seed)
    partitions = [np.zeros(len(answers.label), int), answers.type, answers.question]
    found = summaries(answers, partitions, resamples=0)
    assert [len(groups) for groups in found] == [1, 3, 3]
    for groups, partition in zip(found, partitions, strict=True):
        for group, summary in enumerate(groups):
            chosen = partition == group
            label, predicted = answers.label[chosen], answers.predicted[chosen]
            assert summary["answers"] == chosen.sum()
            assert summary["accuracy"] == {"value": pytest.approx(accuracy_score(label, predicted)), "interval": None}
            assert summary["macro_f1"]["value"] == pytest.approx(
                f1_score(label, predicted, average="macro", zero_division=0)
            )
            assert summary["ece"]["value"] == pytest.approx(
                ece(answers.confidence[chosen], answers.correct[chosen]), abs=1e-12
            )
    noul, choice, score = found[1]
    for kind, summary in ((CHOICE, choice), (SCORE, score)):
        of_kind = np.flatnonzero(answers.type == kind)
        p = np.stack([probabilities[i] for i in of_kind])
        onehot = np.eye(p.shape[1])[answers.label[of_kind] - 10 * kind]
        assert summary["brier"]["value"] == pytest.approx(((p - onehot) ** 2).sum(1).mean())
        p /= p.sum(1, keepdims=True)  # scikit-learn asks for sums of 1; ours are rounded to 4 decimals
        assert summary["brier"]["value"] == pytest.approx(
            brier_score_loss(onehot.argmax(1), p, scale_by_half=False, labels=range(p.shape[1])), abs=2e-4
        )
        assert "brier_binary" not in summary
    of_noul = np.flatnonzero(answers.type == NOUL)
    second = np.array([probabilities[i][1] for i in of_noul])
    right = brier_score_loss(answers.label[of_noul] == 1, second)
    assert noul["brier_binary"] == pytest.approx(right, abs=1e-9)
    assert noul["brier"]["value"] == pytest.approx(2 * right, abs=1e-9)
    assert "level_error" not in noul
    of_score = answers.type == SCORE
    assert score["level_error"] == pytest.approx(np.abs(answers.label - answers.predicted)[of_score].mean())
    assert score["score_error"] == pytest.approx(answers.score_error[of_score].mean())
    assert found[0][0]["score_error"] == pytest.approx(score["score_error"])


def test_macro_f1_counts_classes_that_only_one_side_has() -> None:
    """Labels a a b, predictions a c c: F1 is 2/3, 0 and 0."""
    answers, _ = random_answers(0, requests=1)
    one = np.array([1.0] * 3)
    labels, predictions = np.array([2**63, 2**63, 5], np.uint64), np.array([2**63, 7, 7], np.uint64)
    answers = Answers(np.arange(3), one, one.astype(int), labels, predictions, one, one, one, one)
    summary = summaries(answers, [np.zeros(3, int)], resamples=0)[0][0]
    assert summary["macro_f1"]["value"] == pytest.approx((2 / 3) / 3)
    assert summary["macro_f1"]["value"] == pytest.approx(
        f1_score(["a", "a", "b"], ["a", "c", "c"], average="macro", zero_division=0)
    )


def test_bins_hold_their_upper_edge() -> None:
    edges = np.arange(BINS + 1) / BINS
    assert bins(edges).tolist() == [0, *range(BINS)]
    assert bins(np.array([0.2, 0.2001, 0.6, 1 - 0.4, 0.8, 1.0])).tolist() == [2, 3, 8, 8, 11, 14]


def test_reliability_table() -> None:
    rows = reliability(np.array([0.99, 0.97, 0.5, 0.51, 0.52]), np.array([True, False, True, True, False]))
    names = ("from", "to", "answers", "confidence", "accuracy")
    first = (0.4667, 0.5333, 3, pytest.approx(0.51), pytest.approx(2 / 3))
    last = (0.9333, 1.0, 2, pytest.approx(0.98), 0.5)
    assert rows == [dict(zip(names, row, strict=True)) for row in (first, last)]


@pytest.mark.parametrize(
    ("confidence", "correct", "wanted", "expected"),
    [
        ([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1], 0.75, (1.0, 0.6)),  # the share grows again after a mistake
        ([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 0], 1.0, (0.5, 0.8)),
        ([0.6, 0.9, 0.7, 0.8], [0, 1, 0, 1], 1.0, (0.5, 0.8)),  # in any order
        ([0.9, 0.9, 0.9, 0.6], [1, 1, 0, 1], 0.9, (0.0, None)),  # no threshold cuts a tie
        ([0.9, 0.9, 0.9, 0.6], [1, 1, 0, 1], 2 / 3, (1.0, 0.6)),
        ([0.9], [0], 0.5, (0.0, None)),
        ([0.9] * 19 + [0.95], [1] * 18 + [0, 1], 0.95, (1.0, 0.9)),  # 19/20 is enough for 0.95
    ],
)
def test_share_decided_alone(
    confidence: list[float], correct: list[int], wanted: float, expected: tuple[float, float | None]
) -> None:
    assert decided_alone(np.array(confidence), np.array(correct, bool), wanted) == expected


def test_weights_are_repetitions() -> None:
    """A resample's metrics are those of the answers written out as often as their request was drawn."""
    answers, _ = random_answers(3, requests=40)
    partitions = [np.zeros(len(answers.label), int), answers.type, answers.question]
    weights = np.random.default_rng(1).integers(0, 4, 40)
    repeated = np.repeat(np.arange(len(answers.label)), weights[answers.request])
    columns = [np.asarray(getattr(answers, name))[repeated] for name in Answers.__dataclass_fields__]
    written_out = Answers(np.arange(len(repeated)), *columns[1:])
    found = Tallies(answers, partitions).metrics(weights.astype(float))
    ones = np.ones(len(repeated))
    expected = Tallies(written_out, [partition[repeated] for partition in partitions]).metrics(ones)
    for some, others in zip(found, expected, strict=True):
        np.testing.assert_allclose(some, others, atol=1e-12)


def test_intervals_resample_requests_and_are_seeded() -> None:
    """Ten answers a request that are all right or all wrong: the interval is as wide as that of the requests alone."""
    random = np.random.default_rng(0)
    right = random.random(400) < 0.7
    ten = np.repeat(np.arange(400), 10)
    predicted = np.where(right, 0, 1)[ten]
    zeros, same = np.zeros(4000), np.full(4000, 0.7)
    answers = Answers(ten, ten % 10, zeros.astype(int), zeros.astype(int), predicted, same, same, zeros, zeros)
    everything = [zeros.astype(int)]
    found = intervals(Tallies(answers, everything), 400, 1000, 5)[0][:, 0, 0]
    half_width = 1.96 * np.sqrt(right.mean() * (1 - right.mean()) / 400)
    np.testing.assert_allclose(found, [right.mean() - half_width, right.mean() + half_width], atol=0.01)
    again, other = (intervals(Tallies(answers, everything), 400, 1000, seed)[0][:, 0, 0] for seed in (5, 6))
    assert (found == again).all()
    assert (found != other).any()


def test_a_group_of_one_request_among_many_has_an_interval_and_no_warning() -> None:
    answers, _ = random_answers(2, requests=30)
    question = np.where(answers.request == 7, 1, -1)  # and no answer is of group 0
    everyone, rare = summaries(answers, [np.zeros(len(question), int), question], resamples=5)
    assert rare[0] == {"answers": 0}
    interval = rare[1]["accuracy"]["interval"]
    assert interval == [rare[1]["accuracy"]["value"]] * 2 or interval == [None, None]
    assert everyone[0]["accuracy"]["interval"][0] < everyone[0]["accuracy"]["interval"][1]


def test_a_hundred_thousand_requests_take_seconds() -> None:
    random = np.random.default_rng(0)
    requests = 100_000
    request = np.repeat(np.arange(requests), 3)
    kinds = np.tile(np.arange(3), requests)
    label, predicted = (kinds * 10 + random.integers(0, 2 + 2 * (kinds > 0)) for _ in range(2))
    p = random.random(3 * requests).round(4)
    answers = Answers(request, kinds, kinds, label, predicted, p, p, p, p)
    start = time.process_time()
    found = summaries(answers, [np.zeros(len(kinds), int), kinds, kinds], resamples=20)
    assert time.process_time() - start < 5
    assert found[0][0]["accuracy"]["interval"][0] < found[0][0]["accuracy"]["value"]
