"""Answers by hand-worked values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clef_trt.answer import answer, softmax
from clef_trt.request import parse_request
from clef_trt.types import Question


def question(**body: Any) -> Question:
    return parse_request({"model": "m", "state": "", "questions": {"q": body}}).questions[0]


CHOICE = question(type="choice", criteria={"zeta": None, "alpha": None, "mid": None})
SCORE = question(type="score", criteria=["low", {"x": 1}, "high"])


def test_noul_is_the_probability_of_true() -> None:
    assert answer(question(type="noul"), {"true": 0.71236, "false": 0.28764}, "max") == {"type": "noul", "noul": 0.7124}


def test_choice_in_request_order_and_the_first_of_a_tie() -> None:
    found = answer(CHOICE, {"alpha": 0.4, "mid": 0.2, "zeta": 0.4}, "max")
    assert found == {
        "type": "choice",
        "choice": "zeta",
        "confidence": 0.4,
        "probabilities": {"zeta": 0.4, "alpha": 0.4, "mid": 0.2},
    }
    assert list(found["probabilities"]) == ["zeta", "alpha", "mid"]


def test_score_is_the_mean_level_and_keeps_the_legend() -> None:
    found = answer(SCORE, {"0": 0.2, "1": 0.3, "2": 0.5}, "max")
    assert found == {
        "type": "score",
        "score": 1.3,
        "confidence": 0.5,
        "legend": {"0": "low", "1": {"x": 1}, "2": "high"},
        "probabilities": {"0": 0.2, "1": 0.3, "2": 0.5},
    }


@pytest.mark.parametrize(
    ("formula", "kind", "values", "expected"),
    [
        ("max", CHOICE, [0.5, 0.3, 0.2], 0.5),
        ("jev", CHOICE, [0.5, 0.3, 0.2], (3 * 0.5 - 1) / 2),
        # mode 0: Σ p·|i − mode| = 0.3 + 0.4 = 0.7; mean |i − 1| over three levels = 2/3
        ("jev", SCORE, [0.5, 0.3, 0.2], max(0.0, 1 - 0.7 / (2 / 3))),
        ("jev", SCORE, [0.9, 0.1, 0.0], 1 - 0.1 / (2 / 3)),
        ("entropy", CHOICE, [1.0, 0.0, 0.0], 1.0),
        ("entropy", SCORE, [1 / 3, 1 / 3, 1 / 3], 0.0),
        # −Σ p ln p of (0.5, 0.3, 0.2) is 1.0296530; ln 3 is 1.0986123
        ("entropy", CHOICE, [0.5, 0.3, 0.2], 1 - 1.0296530 / 1.0986123),
    ],
)
def test_confidence(formula: str, kind: Question, values: list[float], expected: float) -> None:
    options = dict(zip([option for option, _ in kind.options], values, strict=True))
    assert answer(kind, options, formula)["confidence"] == pytest.approx(expected, abs=6e-5)


def test_the_hosted_entropy_figure() -> None:
    """Four options, 0.981 for the best: the hosted service reports 0.924."""
    four = question(type="choice", criteria={"a": None, "b": None, "c": None, "d": None})
    rest = (1 - 0.981) / 3
    found = answer(four, {"a": 0.981, "b": rest, "c": rest, "d": rest}, "entropy")
    assert found["confidence"] == pytest.approx(0.924, abs=0.01)


@pytest.mark.parametrize("formula", ["max", "jev", "entropy"])
def test_one_option_is_certain(formula: str) -> None:
    one = question(type="choice", criteria={"only": None})
    assert answer(one, {"only": 1.0}, formula)["confidence"] == 1.0
    assert answer(question(type="score", criteria=["only"]), {"0": 1.0}, formula)["score"] == 0.0


def test_softmax_is_float32_and_never_overflows() -> None:
    assert softmax(np.array([1000.0, 1000.0], np.float32)) == [0.5, 0.5]
    logits = np.linspace(-3, 3, 255, dtype=np.float32)
    probabilities = softmax(logits)
    assert all(p == np.float32(p) for p in probabilities)
    assert abs(sum(round(p, 4) for p in probabilities) - 1) < 0.0128
