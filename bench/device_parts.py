"""The parts of bench/device.py, each run in a process of its own: what they share.

A part tells what it will measure before it begins, so that whoever reads its lines knows what is missing.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
PARTS = {  # module and function; imported only where they run, as the parent needs no torch
    "ceilings": ("device_ceilings", "ceilings"),
    "eager": ("device_passes", "eager"),
    "compile": ("device_compiled", "compiled"),
    "engines": ("device_engines", "engines"),
}
BATCH_S = 1e-3  # calls between two events: shorter, and the events would be measured


@dataclasses.dataclass(frozen=True)
class Task:
    """What one part is to do, and in how many seconds from the start of its process."""

    part: str
    shape: str
    device: str
    cases: list[tuple[int, int]]  # tokens, records
    seconds: float
    backend: str  # of torch.compile

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> Task:
        """From JSON."""
        values = json.loads(text)
        return cls(**values | {"cases": [tuple(case) for case in values["cases"]]})


class Told:
    """Where a part's rows go, and how much of its time is left."""

    def __init__(self, write: Callable[[str, dict[str, Any]], None], seconds: float) -> None:
        self.write, self._end = write, time.monotonic() + seconds
        self._open: set[str] = set()  # planned, and not told yet

    def left_s(self) -> float:
        """Seconds until this part should have ended."""
        return self._end - time.monotonic()

    def plan(self, section: str, key: str, **row: Any) -> None:
        """A row that will come; where it does not, it is null."""
        self._open.add(key)
        self.write("planned", {"section": section, "key": key, "row": row})

    def row(self, section: str, key: str, figures: dict[str, Any] | None, why: str | None = None, **row: Any) -> None:
        """A row: its figures, or null and why."""
        self._open.discard(key)
        self.write(section, row | {"key": key, "median_ms": None} | (figures or {}) | {"reason": why})

    def complete(self) -> bool:
        """Whether every planned row was told."""
        return not self._open


class Clock:
    """Seconds of work on a device: by events on a CUDA device, by the host's clock on a CPU."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch, self.device = torch, device

    def seconds(self, run: Callable[[], Any], calls: int = 1) -> float:
        """Of one call, from `calls` in a row."""
        if self.device == "cpu":
            start = time.perf_counter()
            for _ in range(calls):
                run()
            return (time.perf_counter() - start) / calls
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls

    def repeated(self, run: Callable[[], Any], least_s: float, least: int = 5, most: int = 200) -> list[float]:
        """Seconds of a call, again and again, after three calls to warm up."""
        for _ in range(3):
            once = self.seconds(run)
        calls = max(1, min(64, math.ceil(BATCH_S / max(once, 1e-7))))
        taken: list[float] = []
        end = time.monotonic() + least_s
        while len(taken) < least or (time.monotonic() < end and len(taken) < most):
            taken.append(self.seconds(run, calls))
        return taken


def figures(seconds: list[float]) -> dict[str, Any]:
    """Median and spread of repeated calls, in milliseconds."""
    values = {
        "median_ms": np.median(seconds),
        "p95_ms": np.percentile(seconds, 95),
        "min_ms": min(seconds),
        "max_ms": max(seconds),
    }
    return {name: float(f"{1e3 * float(value):.5g}") for name, value in values.items()} | {"runs": len(seconds)}


def reason(fault: BaseException) -> str:
    """A fault in one line."""
    text = f"{type(fault).__name__}: {' '.join(str(fault).split())}"
    return text if len(text) <= 300 else text[:299] + "…"


def use_checkout() -> None:
    """The packages of this checkout, where they are not installed."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    if importlib.util.find_spec("clef_export") is None:
        folder = ROOT / "export"
        spec = importlib.util.spec_from_file_location(
            "clef_export", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules["clef_export"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["clef_export"])


def torch_settings(device: str) -> dict[str, Any]:
    """What torch runs with."""
    import torch

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "device": "cpu",
        "float32 products": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "CUDA of torch": torch.version.cuda,
            "cuDNN": torch.backends.cudnn.version(),
            "compute capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "device memory GB": round(properties.total_memory / 1e9, 1),
            "L2 MB": round(properties.L2_cache_size / 1e6, 1),
        }
    return found


def tell(line: str) -> None:
    """What is going on, for whoever watches."""
    print(line, file=sys.stderr, flush=True)


def run(task: Task, told: Told) -> None:
    """A part, its fault told as its reason."""
    try:
        use_checkout()
        # What libraries warn of inside is not this benchmark's to mend.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if task.device == "cuda":
                import torch

                if not torch.cuda.is_available():
                    raise RuntimeError("torch has no CUDA here, or there is no card")
            told.write("in_effect", torch_settings(task.device))
            module, function = PARTS[task.part]
            getattr(importlib.import_module(module), function)(task, told)
        why = None if told.complete() else "its time was over"
    except Exception as fault:
        why = reason(fault)
    told.write("end", {"reason": why})


def main() -> None:
    """One part: TASK as JSON, and the FILE that gets a line for each row."""
    task = Task.loads(sys.argv[1])
    with Path(sys.argv[2]).open("w", encoding="utf-8") as file:

        def write(section: str, row: dict[str, Any]) -> None:
            file.write(json.dumps([section, row]) + "\n")
            file.flush()  # this process may be killed

        run(task, Told(write, task.seconds))


if __name__ == "__main__":
    main()
