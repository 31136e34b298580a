"""The cost of embedding: a call through the C++ host less the same call in plain Python, and what threads gain.

A small random model and a short request, so that the engine's own time hides little. Calls are made in turns, first one
and then the other way round, in one process on one opened bundle. Then one thread decides short requests while
another's long pass is inside the engine, and 8 threads decide 10,000 requests, each answer compared with the one the
request gets alone. Needs g++ and pybind11.

    python bench/embed.py [--repeats 2000] [--soak 10000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
BOUND_MS = 0.2  # the median of embedded less plain
SETTINGS = {"threads": 1}  # with more, idle workers of the engine spin on the core of the other thread
WAYS = ("embedded", "submitted", "probabilities", "python")
LONG_WORDS = 12000


def compiled(source: Path, folder: Path) -> Path:
    """The program of a source file."""
    told = subprocess.run([sys.executable, "-m", "clef_trt.cpp", "--embed"], check=True, capture_output=True, text=True)
    target = folder / source.stem
    subprocess.run(["g++", "-std=c++17", "-O2", source, "-o", target, *told.stdout.split()], check=True)
    return target


def output(*command: Any) -> dict[str, Any]:
    """The JSON that a program prints."""
    run = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def statistics(values: list[float]) -> dict[str, float]:
    """Quartiles, median and p95."""
    points = np.percentile(values, (25, 50, 75, 95))
    return {name: round(float(v), 4) for name, v in zip(("p25", "median", "p75", "p95"), points, strict=True)}


def measure(folder: Path, repeats: int, soak: int) -> dict[str, Any]:
    """All measurements over a bundle made in `folder`."""
    from clef_export.pipeline import export
    from clef_export.random_release import byte_tokenizer, small_config, write_release

    config, head = small_config()
    write_release(folder / "release", config, head, byte_tokenizer(), seed=0)
    export(folder / "release", folder / "bundle")
    question = {"q": {"type": "noul", "instructions": "Is it?"}}
    short, long, lines = folder / "short.json", folder / "long.json", folder / "requests.jsonl"
    short.write_text(json.dumps({"model": "m", "state": "A door.", "questions": question}))
    long.write_text(json.dumps({"model": "m", "state": "x " * (LONG_WORDS // 2), "questions": question}))
    some = [{"model": "m", "state": f"number {i} " * (i + 1), "questions": question} for i in range(16)]
    lines.write_text("".join(json.dumps(request) + "\n" for request in some))
    given = json.dumps(SETTINGS)
    seen = output(
        compiled(ROOT / "bench" / "embed.cpp", folder), sys.executable, folder / "bundle", given, short, long, repeats
    )
    difference = np.subtract(seen["embedded_ms"], seen["python_ms"])
    load = compiled(ROOT / "clef_trt" / "cpp" / "examples" / "host_load.cpp", folder)
    return {
        **{f"{way}_ms": statistics(seen[f"{way}_ms"]) for way in WAYS},
        # Of pairs of calls that follow each other, and of the medians: the two should agree.
        "binding_ms": statistics(difference.tolist()),
        "binding_of_medians_ms": round(float(np.median(seen["embedded_ms"]) - np.median(seen["python_ms"])), 4),
        "within_bound": bool(np.median(difference) <= BOUND_MS),
        "long_pass_ms": seen["long_ms"],
        "short_decisions_meanwhile": seen["short_meanwhile"],
        "short_decisions_alone_in_that_time": seen["short_alone"],
        "soak": output(load, sys.executable, folder / "bundle", lines, 8, soak, given),
    }


def main() -> None:
    """Print a card, the figures and, where asked, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--soak", type=int, default=10000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from clef_trt.benchmark.machine import load_average, machine_card

    card = machine_card("the C++ host against plain Python", "onnxruntime", "numpy", "pybind11")
    card |= {"settings": SETTINGS, "repeats": options.repeats, "load_average_before": load_average()}
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.repeats, options.soak)
    card["load_average_after"] = load_average()
    print(json.dumps(card, indent=1))
    print(f"\n{'ms':16}{'median':>9}{'p25':>9}{'p75':>9}{'p95':>9}")
    for way in (*WAYS, "binding"):
        row = result[f"{way}_ms"]
        print(f"{way:16}{row['median']:9.4f}{row['p25']:9.4f}{row['p75']:9.4f}{row['p95']:9.4f}")
    print(f"the binding's median {'keeps' if result['within_bound'] else 'MISSES'} the bound of {BOUND_MS} ms")
    print(
        f"while one thread's pass was in the engine for {result['long_pass_ms']:.0f} ms another decided "
        f"{result['short_decisions_meanwhile']} requests; alone it decides "
        f"{result['short_decisions_alone_in_that_time']} in that time"
    )
    print(f"soak: {result['soak']}")
    if options.json is not None:
        options.json.write_text(json.dumps({"card": card, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
