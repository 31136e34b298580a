"""The card of a run: what figures must be read with. And the memory of this process."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8")


def machine_card(what: str, *packages: str) -> dict[str, Any]:
    """Machine, versions of `packages` (None where one is not installed), commit and date."""
    cpuinfo = _read("/proc/cpuinfo").splitlines()
    models = [line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")]
    flags = next((line.split() for line in cpuinfo if line.startswith("flags")), [])
    return {
        "what": what,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "machine": platform.machine(),
        "cpu": models[0] if models else None,
        "cpu_features": [name for name in CPU_FEATURES if name in flags],
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": _gpus(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **_commit(),
        **{name: _version(name) for name in ("clef-trt", *packages)},
    }


def resident_mb(field: str = "VmHWM") -> int:
    """Memory of this process from /proc/self/status; ru_maxrss would start at the parent's peak."""
    status = _read("/proc/self/status").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(field)) // 1000


def load_average() -> list[float]:
    """Processes that wanted to run, over 1, 5 and 15 minutes: more than ours is somebody else's."""
    return [round(load, 2) for load in os.getloadavg()]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, str]]:
    """Name, driver and memory of each card, as nvidia-smi tells; empty where there is none."""
    fields = ("name", "driver_version", "memory.total")
    told = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader")
    lines = (line.split(", ") for line in (told or "").splitlines())
    return [dict(zip(fields, line, strict=True)) for line in lines if len(line) == len(fields)]


def _commit() -> dict[str, Any]:
    """The commit of the checkout this file is tracked in, and whether the code differs from it; None where in none."""
    folder = str(Path(__file__).parent.parent)
    if _output("git", "-C", folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return {"commit": None, "changed_since_commit": None}
    commit = _output("git", "-C", folder, "rev-parse", "--short", "HEAD")
    changed = _output("git", "--no-optional-locks", "-C", folder, "status", "--porcelain", "--", ".", "../export")
    return {"commit": commit or None, "changed_since_commit": None if changed is None else bool(changed)}


def _output(*command: str) -> str | None:
    """What a command prints, None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
