"""Logits → probabilities → answers, rounded only at the very end."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

import numpy as np

from .types import Encoding, Question, Request

CONFIDENCES = ("max", "jev", "entropy")
DECIMALS = 4


def softmax(logits: np.ndarray) -> list[float]:
    """Float32 softmax over one question's options, widened to double."""
    exponentials = np.exp(logits - logits.max())
    probabilities: list[float] = (exponentials / exponentials.sum()).tolist()
    return probabilities


def response(request: Request, encoding: Encoding, logits: Sequence[np.ndarray], confidence: str) -> dict[str, Any]:
    """The SystemOne response body: model, answers in request order, usage."""
    answers = {
        question.id: answer(question, dict(zip(encoded.option_ids, softmax(values), strict=True)), confidence)
        for question, encoded, values in zip(request.questions, encoding.questions, logits, strict=True)
    }
    usage = {
        "input_tokens": encoding.tokens,
        "output_tokens": 0,
        "truncated_state_tokens": encoding.truncated_state_tokens,
    }
    return {"model": request.model, "answers": answers, "usage": usage}


def answer(question: Question, probabilities: dict[str, float], confidence: str) -> dict[str, Any]:
    """One answer. Of options that tie, a choice takes the first in request order."""
    if question.type == "noul":
        return {"type": "noul", "noul": round(probabilities["true"], DECIMALS)}
    ordered = probabilities
    if question.type == "choice":
        ordered = {option: probabilities[option] for option in question.criteria}
    values = list(ordered.values())
    sure = round(_confidence(confidence, question.type, values), DECIMALS)
    rounded = {option: round(value, DECIMALS) for option, value in ordered.items()}
    if question.type == "choice":
        choice = max(ordered, key=ordered.__getitem__)
        return {"type": "choice", "choice": choice, "confidence": sure, "probabilities": rounded}
    score = round(sum(level * value for level, value in enumerate(values)), DECIMALS)
    legend = {str(level): description for level, description in enumerate(question.criteria)}
    return {"type": "score", "score": score, "confidence": sure, "legend": legend, "probabilities": rounded}


def _confidence(formula: str, kind: str, values: list[float]) -> float:
    """How sure an answer is, in [0, 1].

    `max`: the largest probability, as the published code. `jev`: for K options (K·max − 1)/(K − 1), for K levels
    max(0, 1 − Σ p·|i − mode| / mean|i − (K−1)/2|). `entropy`: 1 − H/ln K, as Cloudflare's hosted route.
    """
    options = len(values)
    if options == 1 or formula == "max":
        return max(values)
    if formula == "entropy":
        return max(0.0, 1 + sum(value * log(value) for value in values if value > 0) / log(options))
    if kind == "choice":
        return (options * max(values) - 1) / (options - 1)
    mode = values.index(max(values))
    spread = sum(value * abs(level - mode) for level, value in enumerate(values))
    widest = sum(abs(level - (options - 1) / 2) for level in range(options)) / options
    return max(0.0, 1 - spread / widest)
