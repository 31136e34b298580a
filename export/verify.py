"""The gate: the same requests through a reference and through an engine, and limits on how far they may drift apart.

The reference is the published code in float32, or the engine of another bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clef_trt.answer import softmax
from clef_trt.clef import Clef
from clef_trt.errors import VerificationError

from .pipeline import hash_weights, source_sha256
from .reference import Reference
from .release import open_release

Logits = Sequence[Sequence[np.ndarray]]  # per request, per question
Progress = Callable[[str], None]
NOISE_REQUESTS = 4


@dataclass(frozen=True)
class Agreement:
    """How two sets of logits agree over some questions; differences are the largest or the mean of absolute ones."""

    questions: int
    same_top_option: float  # share of questions
    max_logit_difference: float
    max_probability_difference: float
    mean_probability_difference: float

    def __str__(self) -> str:
        return (
            f"{self.questions} questions: same top option {self.same_top_option:.2%}, "
            f"max |Δlogit| {self.max_logit_difference:.2g}, max |Δp| {self.max_probability_difference:.2g}, "
            f"mean |Δp| {self.mean_probability_difference:.2g}"
        )


@dataclass(frozen=True)
class Report:
    """Agreement of an engine with its reference: in all, by question type, and of the reference with itself."""

    requests: int
    total: Agreement
    by_type: dict[str, Agreement]
    noise: dict[str, Agreement]  # by what was changed

    def __str__(self) -> str:
        lines = [f"{self.requests} requests, {self.total}"]
        lines += [f"  {kind}: {agreement}" for kind, agreement in self.by_type.items()]
        lines += [f"  the reference against itself {change}: {agreement}" for change, agreement in self.noise.items()]
        return "\n".join(lines)


@dataclass(frozen=True)
class DriftLimits:
    """What the gate allows. The defaults are those of float32; None leaves a figure unjudged."""

    max_logit_difference: float | None = 1e-4
    same_top_option: float | None = None
    max_probability_difference: float | None = None
    mean_probability_difference: float | None = None

    def check(self, report: Report) -> None:
        """Raises VerificationError, with the whole report, naming every figure outside its limit (NaN is outside)."""
        total = report.total
        faults = [
            f"{name.replace('_', ' ')} is {getattr(total, name):.3g}, allowed up to {limit:g}"
            for name in ("max_logit_difference", "max_probability_difference", "mean_probability_difference")
            if (limit := getattr(self, name)) is not None and not getattr(total, name) <= limit
        ]
        if self.same_top_option is not None and not total.same_top_option >= self.same_top_option:
            faults.append(f"same top option in {total.same_top_option:.2%}, required {self.same_top_option:.2%}")
        if faults:
            raise VerificationError("\n".join([str(report), *faults]))


def verify_with_reference(
    clef: Clef,
    release: str | Path,
    requests: Sequence[dict[str, Any]],
    limits: DriftLimits = DriftLimits(),
    progress: Progress = lambda _: None,
) -> Report:
    """Compare `clef` (opened with control_tokens="reference") with the published code on the release it was made from.

    Of pictures the model is compared, over our tiling of them. Raises VerificationError when the release is another
    one, token ids differ, or a limit is exceeded.
    """
    _require_requests(requests)
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
    types = _types(clef, requests)
    noise = {"in one padded batch": _agreement(expected[:NOISE_REQUESTS], reference.logits(records[:NOISE_REQUESTS]))}
    if clef.manifest.precision != "fp32":
        progress("the reference in BF16")
        rounded = Reference(opened.folder, torch.bfloat16)
        noise["in BF16"] = _agreement(expected, [rounded.logits([record])[0] for record in records])
    report = _report(types, expected, clef.logits(requests), noise)
    limits.check(report)
    return report


def verify_pair(
    reference: Clef, clef: Clef, requests: Sequence[dict[str, Any]], limits: DriftLimits = DriftLimits()
) -> Report:
    """Compare two engines. Raises VerificationError when their checkpoints differ or a limit is exceeded."""
    _require_requests(requests)
    if reference.manifest.source.sha256 != clef.manifest.source.sha256:
        raise VerificationError("the two bundles were exported from different checkpoints")
    expected = reference.logits(requests)
    alone = [reference.logits([request])[0] for request in requests[:NOISE_REQUESTS]]
    noise = {"one by one": _agreement(expected[:NOISE_REQUESTS], alone)}
    report = _report(_types(clef, requests), expected, clef.logits(requests), noise)
    limits.check(report)
    return report


def _require_requests(requests: Sequence[dict[str, Any]]) -> None:
    if not requests:
        raise VerificationError("no requests to verify with")


def _types(clef: Clef, requests: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [[question.type for question in clef.encode(request).questions] for request in requests]


def _report(types: list[list[str]], expected: Logits, found: Logits, noise: dict[str, Agreement]) -> Report:
    kinds = sorted({kind for record in types for kind in record})
    by_type = {kind: _agreement(_of_type(kind, types, expected), _of_type(kind, types, found)) for kind in kinds}
    return Report(len(expected), _agreement(expected, found), by_type, noise)


def _of_type(kind: str, types: list[list[str]], logits: Logits) -> list[list[np.ndarray]]:
    return [
        [values for values, own in zip(record, kinds, strict=True) if own == kind]
        for record, kinds in zip(logits, types, strict=True)
    ]


def _agreement(expected: Logits, found: Logits) -> Agreement:
    pairs = [pair for a, b in zip(expected, found, strict=True) for pair in zip(a, b, strict=True)]
    differences = np.concatenate([np.abs(np.subtract(softmax(a), softmax(b))) for a, b in pairs])
    return Agreement(
        questions=len(pairs),
        same_top_option=float(np.mean([a.argmax() == b.argmax() for a, b in pairs])),
        max_logit_difference=float(np.max([np.abs(a - b).max() for a, b in pairs])),
        max_probability_difference=float(differences.max()),
        mean_probability_difference=float(differences.mean()),
    )
