"""What the benchmarks share: releases of named shapes, records of random tokens, the card of a run, memory."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = Path(__file__).parent / "shapes"


def make_release(shape: str, folder: Path, seed: int | None) -> None:
    """A release of one shape: random weights, or without a seed sparse files with holes in their place."""
    from clef_export.random_release import byte_tokenizer, write_release

    value, tokenizer = json.loads((SHAPES / f"{shape}.json").read_text()), byte_tokenizer()
    for name in ("image", "video"):
        value["config"][f"{name}_token_id"] = tokenizer.token_to_id(f"<|{name}_pad|>")
    for name in ("vision_start", "vision_end"):
        value["config"][f"{name}_token_id"] = tokenizer.token_to_id(f"<|{name}|>")
    write_release(folder, value["config"], value["joint_head_config"], tokenizer, seed)


def random_record(tokens: int, vocabulary: int, seed: int, questions: int = 2, options: int = 4) -> Any:
    """An encoding of random token ids, with its questions and options of three tokens each at its end."""
    from clef_trt.types import EncodedQuestion, Encoding

    ids = np.random.default_rng(seed).integers(0, vocabulary, tokens)
    names = tuple(str(option) for option in range(options))
    start = tokens - 3 * questions * (options + 1)
    if start < 0:
        raise SystemExit(f"{questions} questions of {options} options do not fit into {tokens} tokens")
    asked = []
    for number in range(questions):
        first = start + 3 * number * (options + 1)
        spans = tuple((first + 3 * i, first + 3 * i + 3) for i in range(options + 1))
        asked.append(EncodedQuestion(f"q{number}", "choice", spans[0], spans[1:], names))
    return Encoding(ids, tuple(asked), 0)


def machine_card(what: str, *packages: str) -> dict[str, Any]:
    """What a result must be read with: machine, versions, commit."""
    cpu = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "what": what,
        "machine": platform.machine(),
        "cpu": cpu[0] if cpu else None,
        "cpu_features": [
            name for name in ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8") if name in flags
        ],
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or None,
        **{name: version(name) for name in ("clef-trt", *packages)},
    }


def resident_mb(field: str = "VmHWM") -> int:
    """Memory of this process from /proc/self/status; ru_maxrss would start at the parent's peak."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(field)) // 1000


def summary(seconds: list[float]) -> dict[str, float]:
    """Median and spread of repeated runs."""
    return {
        "median_s": round(float(np.median(seconds)), 4),
        "min_s": round(min(seconds), 4),
        "max_s": round(max(seconds), 4),
        "runs": len(seconds),
    }
