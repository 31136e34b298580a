"""Ranges for FP8: how large the activations and weights of the large linears get, over requests run in eager torch."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clef_trt.errors import ExportError

from .config import ReleaseConfig

FORMAT_VERSION = 1
E4M3_MAX = 448.0
FLOAT32_MAX = float(torch.finfo(torch.float32).max)
MAX_LENGTH = 16384  # tokens of a record: what Clef.load takes unless told otherwise
NO_SHA256 = "0" * 64
MIXERS = {
    "full_attention": [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")],
    "linear_attention": [f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")],
}
MLP = [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
READ_THE_LAYERS_INPUT = ("gate_proj", "up_proj", "q_proj", "k_proj", "v_proj", "in_proj_qkv", "in_proj_z")
READ_THEIR_OWN = ("down_proj", "o_proj", "out_proj")


@dataclass(frozen=True)
class ActivationRange:
    """|x| over everything that was seen of one activation; a percentile is exact to one bin, and never too small."""

    max: float
    percentiles: dict[str, float]  # "99.9" → the value that 99.9 % of all |x| do not exceed
    values: int


@dataclass(frozen=True)
class WeightRange:
    """|w| of one linear's weight."""

    max: float


@dataclass(frozen=True)
class Ranges:
    """A ranges file: activations and weights of the large linears, and what they were collected from."""

    source_sha256: str  # as in a manifest: the release
    requests: int
    tokens: int
    requests_sha256: str  # of the token ids that the model read
    activations: dict[str, ActivationRange]  # see `activation_of`
    weights: dict[str, WeightRange]  # see `large_linears`

    @property
    def synthetic(self) -> bool:
        """Made by `synthetic_ranges`: of no requests, and of no release."""
        return self.requests == 0

    def scale(self, activation: str, choice: str = "max") -> float:
        """What one step of E4M3 stands for: amax / 448, and 1.0 where amax is 0.

        choice: "max", or a percentile of the file such as "99.9". Raises ExportError for unknown names.
        """
        found = _known(self.activations, activation, "activation")
        return _scale(_known({"max": found.max} | found.percentiles, choice, "choice of range"))

    def weight_scale(self, linear: str) -> float:
        """As `scale`, of a linear's weight."""
        return _scale(_known(self.weights, linear, "linear").max)


def _scale(amax: float) -> float:
    return amax / E4M3_MAX if amax else 1.0


def _known(values: dict[str, Any], name: str, what: str) -> Any:
    if name not in values:
        raise ExportError(f"ranges: {name!r} is no {what} of this file; it has {', '.join(values)}")
    return values[name]


def large_linears(config: ReleaseConfig) -> list[str]:
    """The linears that become FP8, in the names of TextModel and in the order of the layers."""
    return [
        f"backbone.layers.{layer}.{name}"
        for layer, kind in enumerate(config.text.layer_types)
        for name in (*MIXERS[kind], *MLP)
    ]


def activation_of(linear: str) -> str:
    """The name of the activation that a large linear reads; linears that read the same one share its range."""
    parent, _, name = linear.rpartition(".")
    if name in READ_THE_LAYERS_INPUT:
        return f"{parent}.input"
    if name in READ_THEIR_OWN:
        return f"{linear}.input"
    raise ExportError(f"{linear} is no large linear; those are {', '.join((*READ_THE_LAYERS_INPUT, *READ_THEIR_OWN))}")


def synthetic_ranges(config: ReleaseConfig) -> Ranges:
    """Ranges of no requests, for exports whose numbers mean nothing: every activation 8.0, every weight 0.5."""
    linears = large_linears(config)
    activation = ActivationRange(8.0, {"99.9": 8.0, "99.99": 8.0}, values=0)
    activations = {activation_of(linear): activation for linear in linears}
    return Ranges(NO_SHA256, 0, 0, NO_SHA256, activations, {linear: WeightRange(0.5) for linear in linears})


def write_ranges(ranges: Ranges, path: Path) -> None:
    """Write a ranges file, whole or not at all; an existing one is replaced."""
    write_whole(path, {"format_version": FORMAT_VERSION} | dataclasses.asdict(ranges))


def read_ranges(path: Path) -> Ranges:
    """A ranges file; raises ExportError, with the place, where it is not exactly one."""
    ranges: Ranges = read_checked(path, Ranges)
    for sha256 in (ranges.source_sha256, ranges.requests_sha256):
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            raise ExportError(f"{path} holds {sha256!r}; expected a SHA-256 in hexadecimal")
    for name, activation in ranges.activations.items():
        for percent, value in activation.percentiles.items():
            if not re.fullmatch(r"\d{1,2}(\.\d+)?", percent) or value > activation.max:
                raise ExportError(f"{path}: {name}: percentile {percent!r} is {value}, with a max of {activation.max}")
    if ranges.synthetic != (ranges.source_sha256 == NO_SHA256):
        raise ExportError(f"{path} is of {ranges.requests} requests and of release {ranges.source_sha256}")
    if len({tuple(activation.percentiles) for activation in ranges.activations.values()}) != 1:
        raise ExportError(f"{path}: there are no activations, or not all of the same percentiles")
    if wrong := sorted({activation_of(linear) for linear in ranges.weights} ^ ranges.activations.keys()):
        raise ExportError(f"{path}: a weight or an activation is missing, of {', '.join(wrong)}")
    return ranges


def read_checked(path: Path, kind: Any) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise ExportError(f"{path} cannot be read as JSON: {fault}") from None
    version = value.pop("format_version", None) if isinstance(value, dict) else None
    if version != FORMAT_VERSION:
        raise ExportError(f"{path} has format version {version!r}; expected {FORMAT_VERSION}: collect the ranges again")
    return _checked(kind, value, str(path))


def _checked(kind: Any, value: Any, where: str) -> Any:
    """`value` as a dataclass, dict, list, str, or number: all numbers here are finite and not negative."""
    arguments = typing.get_args(kind)
    if kind in (int, float):
        allowed = int if kind is int else (int, float)
        if not isinstance(value, allowed) or isinstance(value, bool) or not 0 <= value <= FLOAT32_MAX:
            raise ExportError(f"{where} is {value!r}; expected a finite {kind.__name__} of at least 0")
        return kind(value)
    json_type = dict if dataclasses.is_dataclass(kind) else typing.get_origin(kind) or kind
    if not isinstance(value, json_type):
        raise ExportError(f"{where} is of type {type(value).__name__}; expected {json_type.__name__}")
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        missing, unknown = sorted(hints.keys() - value.keys()), sorted(value.keys() - hints.keys())
        if missing or unknown:
            raise ExportError(f"{where}: missing keys {missing}, unknown keys {unknown}; it has {', '.join(hints)}")
        return kind(**{name: _checked(hint, value[name], f"{where}: {name}") for name, hint in hints.items()})  # type: ignore[operator]
    if json_type is dict:
        return {name: _checked(arguments[1], item, f"{where}: {name}") for name, item in value.items()}
    return [_checked(arguments[0], item, where) for item in value] if json_type is list else value


def write_whole(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=None if "counts" in value else 1, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
