"""The systems that can be measured: their names, what each needs, and what they have in common."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import EngineError, SettingError
from .workload import Call

# Of one call, in the order they happen. A stage that a system does not show is null in the result. `encode` includes
# checking the request and, of pictures, their headers; `batch` the padded tensors and, in eager code on a GPU, copying.
STAGES = ("encode", "vision", "batch", "copy_in", "engine", "copy_out", "answer")
EAGER = ("eager-fp32", "eager-bf16", "eager-compile", "eager-cuda-bf16")
OURS = (
    "onnxruntime-fp32",
    "onnxruntime-int8",
    "onnxruntime-cuda",
    "tensorrt-bf16",
    "tensorrt-fp8",
    "tensorrt-rtx-bf16",
    "tensorrt-rtx-fp8",
)
NAMED_ONLY = ("eager-compile", "eager-cuda-bf16")  # measured where they are asked for by name
URL = "url:"


@dataclass(frozen=True)
class Outcome:
    """What a call returned, and where its time went."""

    probabilities: list[list[np.ndarray]]  # per request, per question: of its options, in encoded order
    stages_s: dict[str, float]


class System(Protocol):
    """One way to decide requests."""

    name: str
    arithmetic: str | None  # the peak that bounds it, by the names of `floor.PEAKS`

    def open(self) -> float:
        """Get ready to decide; returns the seconds it took. Raises ClefError where that is not possible here."""

    def run(self, bodies: Call) -> Outcome:
        """Decide requests together, from their bodies to their answers."""

    def info(self) -> dict[str, Any]:
        """Versions and settings in effect."""

    def close(self) -> None:
        """Give memory back."""


@dataclass(frozen=True)
class Sources:
    """What systems are opened from; also handed to a process of its own, as JSON."""

    release: Path | None
    bundles: dict[str, Path]  # by precision
    threads: int
    urls: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)  # of those servers; never shown
    in_flight: int = 1


class Stopwatch:
    """Seconds between laps, added up by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """The time since the last lap belongs to `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


def default_names() -> list[str]:
    """The systems that are tried where none is named."""
    return [name for name in (*EAGER, *OURS) if name not in NAMED_ONLY]


def check_names(names: list[str], urls: dict[str, str]) -> None:
    """Raises SettingError for a system that does not exist."""
    known = [*EAGER, *OURS, *(URL + name for name in urls)]
    if unknown := [name for name in names if name not in known]:
        raise SettingError(f"unknown systems {unknown}; there are {', '.join(known)}")


def needed_precision(name: str) -> str | None:
    """The precision that must be exported for a system; None where it takes no bundle, or only one with a plan."""
    return {"onnxruntime-fp32": "fp32", "onnxruntime-int8": "int8", "onnxruntime-cuda": "fp32"}.get(name)


def make_system(name: str, sources: Sources) -> System:
    """A system, not opened yet; raises ClefError with the reason where it cannot be opened here."""
    if name.startswith(URL):
        from .served import Served

        key = name.removeprefix(URL)
        return Served(name, sources.urls[key], sources.keys.get(key), sources.in_flight)
    if name in EAGER:
        from .eager import Eager

        if sources.release is None:
            raise EngineError("there is no release to run the published code on: name one with --model")
        dtype = "bfloat16" if name.endswith("bf16") else "float32"
        device = "cuda" if "cuda" in name else "cpu"
        return Eager(name, sources.release, dtype, device, sources.threads, compiled=name == "eager-compile")
    from .ours import Ours

    engine, precision = _engine(name)
    if precision not in sources.bundles:
        raise EngineError(f"there is no {precision} bundle{_how(engine, precision)}")
    return Ours(name, sources.bundles[precision], engine, sources.threads)


def reason(fault: BaseException) -> str:
    """A fault in one line."""
    text = " ".join(str(fault).split()) or type(fault).__name__
    return text if len(text) <= 300 else text[:299] + "…"


def _engine(name: str) -> tuple[str, str]:
    """The engine's name for `choose.open_engine`, and the precision of its bundle."""
    if name == "onnxruntime-cuda":
        return "onnxruntime-cuda", "fp32"
    engine, _, precision = name.rpartition("-")
    return engine.replace("-", "_"), precision


def _how(engine: str, precision: str) -> str:
    if not engine.startswith("tensorrt"):
        return ""
    return f" with a plan of {engine}: export {precision}, clef-trt build on its card, and name the bundle (--bundle)"
