"""The gate: the same requests through the published reference and through a bundle's engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from clef_trt.answer import softmax
from clef_trt.clef import Clef
from clef_trt.errors import VerificationError

from .pipeline import hash_weights, source_sha256
from .reference import Reference
from .release import open_release


@dataclass(frozen=True)
class Report:
    """Agreement of an engine with its reference over some requests."""

    requests: int
    questions: int
    same_top_option: float  # share of questions
    max_logit_difference: float
    max_probability_difference: float
    mean_probability_difference: float
    noise_logit_difference: float  # the reference against itself, its requests padded into one batch

    def __str__(self) -> str:
        return (
            f"{self.requests} requests, {self.questions} questions: same top option {self.same_top_option:.2%}, "
            f"max |Δlogit| {self.max_logit_difference:.2g} (the reference against itself in another batch: "
            f"{self.noise_logit_difference:.2g}), max |Δp| {self.max_probability_difference:.2g}, "
            f"mean |Δp| {self.mean_probability_difference:.2g}"
        )


def verify(
    clef: Clef,
    release: str | Path,
    requests: Sequence[dict[str, Any]],
    *,
    max_logit_difference: float = 1e-4,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compare `clef` (opened with control_tokens="reference") with the reference on the release it was made from.

    Of pictures the model is compared, over our tiling of them. Raises VerificationError when the release is another
    one, token ids differ, or a logit differs by more than `max_logit_difference`.
    """
    if not requests:
        raise VerificationError("no requests to verify with")
    opened = open_release(release)
    if source_sha256(opened, hash_weights(opened, progress)) != clef.manifest.source.sha256:
        raise VerificationError(f"{release} is not the checkpoint that the bundle was exported from")
    progress(f"loading the reference: about {4 * clef.manifest.weights.parameters / 1e9:.1f} GB in float32")
    reference = Reference(opened.folder)
    records, expected = [], []
    for index, request in enumerate(requests):
        encoding = clef.encode(request)
        if encoding.media:
            records.append(reference.with_media(encoding, clef.patches(encoding)))
        else:
            records.append(reference.encode(request, clef.max_length))
        if encoding.input_ids.tolist() != list(records[-1].input_ids):
            raise VerificationError(f"request {index}: the token ids differ from the reference's")
        expected += reference.logits(records[-1:])
        progress(f"reference: {index + 1} of {len(requests)} requests")
    found = clef.logits(requests)
    padded = reference.logits(records[:4])
    report = compare(expected, found, noise=largest_difference(expected[:4], padded))
    if not report.max_logit_difference <= max_logit_difference:
        raise VerificationError(f"{report}\na logit differs by more than {max_logit_difference:g}")
    return report


Logits = Sequence[Sequence[np.ndarray]]


def compare(expected: Logits, found: Logits, noise: float) -> Report:
    """The report over logits per request and question."""
    pairs = [pair for a, b in zip(expected, found, strict=True) for pair in zip(a, b, strict=True)]
    differences = np.concatenate([np.abs(np.subtract(softmax(a), softmax(b))) for a, b in pairs])
    return Report(
        requests=len(expected),
        questions=len(pairs),
        same_top_option=float(np.mean([a.argmax() == b.argmax() for a, b in pairs])),
        max_logit_difference=largest_difference(expected, found),
        max_probability_difference=float(differences.max()),
        mean_probability_difference=float(differences.mean()),
        noise_logit_difference=noise,
    )


def largest_difference(expected: Logits, found: Logits) -> float:
    """max |Δlogit|; NaN where either holds one."""
    pairs = [pair for a, b in zip(expected, found, strict=True) for pair in zip(a, b, strict=True)]
    return float(np.max([np.abs(a - b).max() for a, b in pairs]))
