"""What a precision makes of the traced graphs: the dtype of the trace, and the linears it quantises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch

from clef_trt.errors import ExportError

from . import fp8, int8
from .linears import Linear, find_linears
from .ranges import NO_SHA256, Ranges, large_linears
from .release import Release, StoredTensor
from .weights import write_own

# float32 is the reference; BF16 and FP8 are for TensorRT, int8 for ONNX Runtime on the CPU.
TRACED_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "int8": torch.float32}


@dataclass(frozen=True)
class Precision:
    """A precision with what it needs."""

    name: str
    ranges: Ranges | None = None  # of the activations, for fp8
    choice: str = "max"  # which range: "max" or a percentile of the ranges file

    @property
    def dtype(self) -> torch.dtype:
        """Of the trace."""
        return TRACED_DTYPES[self.name]

    @property
    def quantised_file(self) -> str | None:
        """The file of the weights that are made, if any."""
        return f"{self.name}.safetensors" if self.name in ("fp8", "int8") else None


def check_precision(precision: Precision, source_sha256: Callable[[], str]) -> None:
    """Raises ExportError for an unknown precision, fp8 without ranges, or ranges of another release."""
    if precision.name not in TRACED_DTYPES:
        raise ExportError(f"precision is {precision.name!r}; expected one of {', '.join(TRACED_DTYPES)}")
    if (precision.ranges is not None) != (precision.name == "fp8"):
        need = "needs the ranges of its activations (--ranges FILE; make them with: clef-trt ranges)"
        raise ExportError(f"fp8 {need}" if precision.name == "fp8" else f"{precision.name} takes no ranges")
    collected_from = None if precision.ranges is None else precision.ranges.source_sha256
    if collected_from not in (None, NO_SHA256) and collected_from != source_sha256():
        raise ExportError("the ranges were collected from another release than this one")


def quantised_linears(precision: Precision, model: ir.Model, release: Release) -> list[Linear]:
    """The linears of a traced text graph that the precision quantises."""
    return [] if precision.quantised_file is None else find_linears(model, large_linears(release.config))


def quantise(
    precision: Precision,
    model: ir.Model,
    linears: list[Linear],
    release: Release,
    tensors: dict[str, StoredTensor],
    folder: Path,
    progress: Callable[[str], None],
) -> None:
    """Write the quantised weights into `folder` and rewrite the graph; `tensors` are the parameters' stored ones."""
    if precision.quantised_file is None:
        return
    path = folder / precision.quantised_file
    if precision.name == "int8":
        groups = int8.groups(linears)
        places = write_own(list(int8.int8_weights(release.root, groups, tensors)), path, progress)
        int8.quantise(model, groups, places)
        return
    scales: dict[str, float] = {}
    places = write_own(list(fp8.fp8_weights(release.root, linears, tensors, scales)), path, progress)
    assert precision.ranges is not None, "check_precision"
    fp8.quantise(model, linears, precision.ranges, precision.choice, scales, places)
