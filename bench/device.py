"""What a CUDA machine can do and what eager code makes of it: ceilings, passes at the 9B shape, the delta rule's share.

Every part runs in a process of its own with a share of the time, and is killed where it overruns it; what was measured
before stays, what was not reached is null with its reason. Weights are random and made on the device. The project need
not be installed.

    bench/device.sh [--shape 9b] [--device cuda] [--tokens N …] [--budget-s 430] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from device_parts import PARTS, Task, use_checkout

use_checkout()

from clef_trt import __version__  # noqa: E402
from clef_trt.benchmark import present  # noqa: E402
from clef_trt.benchmark.machine import machine_card  # noqa: E402

KIND = "device"
TOKENS = [256, 512, 1024, 2048, 4096, 8192, 16384]
BATCHED = (512, 8)  # tokens, records
BUDGET_S = 430.0
GRACE_S = 8.0  # for a part to end by itself before it is killed
# Relative; what a part leaves goes to those behind it.
SHARES = {"ceilings": 60, "eager": 160, "compile": 150, "engines": 60}
SHOWN_KEYS = 6  # of rows that lack figures for one reason
SECTIONS = ("ceilings", "rows", "pieces", "engines")
LEFT_OUT = (
    "copies of inputs and logits, encoding and answering: a pass is from ids on the device to logits on the device",
    "the published head, which loops over questions: both backbones feed the project's head (export/head.py)",
    "CUDA graphs: eager passes hold the launches of every operator",
    "the vision tower; padding: all records of a batch are of one length",
    "compiled engines at this shape: they run a small release, exported and built here",
)


def main() -> None:
    """Print card and tables, and write the JSON object."""
    options = parse()
    start = time.monotonic()
    card = machine_card(
        "ceilings, eager passes and the delta rule's share on one device",
        *("torch", "transformers", "triton", "onnxruntime", "tensorrt", "tensorrt-rtx-cu13-bindings"),
        *("flash-linear-attention", "causal-conv1d"),
    )
    card |= {"clef-trt": __version__, "asked": vars(options) | {"json": str(options.json) if options.json else None}}
    result: dict[str, Any] = {"kind": KIND, "card": card, "parts": []} | {name: [] for name in SECTIONS}
    cases = [(tokens, 1) for tokens in sorted(set(options.tokens))]
    if not options.no_batched:
        cases.append(BATCHED if options.shape != "tiny" else (128, 2))
    remaining = [name for name in SHARES if name in options.parts]
    while remaining:
        name = remaining[0]
        left_s = options.budget_s - (time.monotonic() - start)
        seconds = left_s * SHARES[name] / sum(SHARES[other] for other in remaining)
        task = Task(name, options.shape, options.device, cases, seconds, options.backend)
        lines, why = run_part(task)
        part_s = options.budget_s - left_s
        result["parts"].append(
            {"name": name, "allowed_s": round(seconds, 1), "seconds": round(time.monotonic() - start - part_s, 1)}
            | {"reason": why}
        )
        collect(result, lines)
        remaining.pop(0)
    add_floors(result)
    result["left_out"] = list(LEFT_OUT)
    card["seconds"] = round(time.monotonic() - start, 1)
    print(text(result), flush=True)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def parse() -> argparse.Namespace:
    """The options."""
    out = os.environ.get("OUT")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="9b", choices=("tiny", "0.8b", "9b"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="N", help="of a record")
    parser.add_argument("--no-batched", action="store_true", help="leave out the case of several records")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="for all parts (default: %(default)s)")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=tuple(PARTS), help="default: all")
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, default=Path(out) / "device.json" if out else None, help="default: under $OUT, if set"
    )
    options = parser.parse_args()
    if min(options.tokens) < 64:
        parser.error("--tokens: at least 64, for the questions and options of a record")
    return options


def run_part(task: Task) -> tuple[list[tuple[str, dict[str, Any]]], str | None]:
    """What a part told before it ended, and why it did not end well."""
    why = None
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.jsonl"
        command = [sys.executable, str(Path(__file__).parent / "device_parts.py"), task.dumps(), str(out)]
        process = subprocess.Popen(command, start_new_session=True)
        try:
            status = process.wait(max(task.seconds, 0) + GRACE_S)
            if status:
                why = f"the process ended with status {status}"
        except subprocess.TimeoutExpired:
            why = f"killed after its {task.seconds:.0f} s"
        finally:
            # Compilers' workers with it; after a good end there is nobody left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        told = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    lines = []
    for line in told:
        with contextlib.suppress(ValueError):  # the last line of a process that was killed may be cut
            section, row = json.loads(line)
            lines.append((section, row))
    ended = [row["reason"] for section, row in lines if section == "end"]
    return [line for line in lines if line[0] != "end"], ended[0] if ended else why


def collect(result: dict[str, Any], lines: list[tuple[str, dict[str, Any]]]) -> None:
    """Rows into their sections. A planned row that never came is null, with the reason of its part."""
    planned: dict[str, dict[str, Any]] = {}
    for section, row in lines:
        if section == "planned":
            planned[row["key"]] = row
        elif section == "in_effect":
            result["card"].setdefault("in_effect", {}).update(row)
        elif section == "shape":
            result["shape"] = row
        else:
            planned.pop(row.get("key", ""), None)
            result[section].append(row)
    why = result["parts"][-1]["reason"] or "not reached"
    for row in planned.values():
        result[row["section"]].append(row["row"] | {"key": row["key"], "median_ms": None, "reason": why})


def add_floors(result: dict[str, Any]) -> None:
    """The floor of each pass: the arithmetic of the linears at the rate of the large square product measured here."""
    rate = {
        precision: max(
            (row["tflops"] for row in result["ceilings"] if row["name"] in names and row.get("tflops")), default=None
        )
        for precision, names in (("bf16", ("bf16 square",)), ("fp8", ("fp8 square", "fp8 fast square")))
    }
    shape = result.setdefault("shape", None)
    result["peaks_tflops"] = rate
    copied = [r["gb_per_s"] for r in result["ceilings"] if r["name"] == "device to device" and r.get("gb_per_s")]
    bytes_gb = None if shape is None else 2 * shape["linear_parameters"] / 1e9
    result["weights_read_ms"] = float(f"{1e3 * bytes_gb / copied[0]:.4g}") if copied and bytes_gb else None
    for row in result["rows"]:
        row["floor_ms"] = row["fp8_floor_ms"] = row["times_floor"] = None
        if shape is None:
            continue
        tflop = 2 * shape["linear_parameters"] * row["tokens"] * row["batch"] / 1e12
        if rate["fp8"]:
            row["fp8_floor_ms"] = float(f"{1e3 * tflop / rate['fp8']:.4g}")
        if rate["bf16"]:
            row["floor_ms"] = float(f"{1e3 * tflop / rate['bf16']:.4g}")
            if row["median_ms"] is not None:
                row["times_floor"] = float(f"{row['median_ms'] * rate['bf16'] / tflop / 1e3:.4g}")


def text(result: dict[str, Any]) -> str:
    """Card, tables, and what was not measured."""
    parts = [present.card(result["card"])]
    for title, heads, rows in tables(result):
        parts += [f"\n{title}", present.aligned(heads, rows)] if rows else []
    return "\n".join([*parts, *missing(result)])


def tables(result: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, heads and cells of each table; rows without figures are told by `missing`."""
    ms, figure = present.milliseconds, present.figure
    found = {name: [row for row in result[name] if row["median_ms"] is not None] for name in SECTIONS}
    ceilings = [
        [
            *(row["name"], row["of"], f"{row['median_ms']:.4f}", f"{row['p95_ms']:.4f}"),
            *(figure(row.get("tflops"), ".1f"), figure(row.get("gb_per_s"), ".1f")),
        ]
        for row in found["ceilings"]
    ]
    passes = [
        [row["system"], str(row["tokens"]), str(row["batch"])]
        + [ms(row[f"{name}_ms"]) for name in ("median", "p95", "min", "max")]
        + [f"{row['tokens_per_s']:,.0f}", ms(row["floor_ms"]), figure(row["times_floor"], ".2f")]
        + ["{median:.2f} [{low:.2f}, {high:.2f}]".format(**row["times_faster"]) if row["times_faster"] else "–"]
        + [figure(row["same_top_option"], ".1%"), figure(row["memory_mb"], ",d"), figure(row["first_s"], ".1f")]
        for row in sorted(found["rows"], key=lambda row: (row["batch"], row["tokens"]))
    ]
    pieces = [
        [
            *(row["piece"], str(row["tokens"]), str(row["batch"]), f"{row['median_ms']:.3f}", str(row["layers"])),
            *(ms(row["total_ms"]), *(figure(row["shares"].get(name), ".1%") for name in ("transformers", "ours"))),
        ]
        for row in found["pieces"]
    ]
    engines = [
        [row["system"], str(row["tokens"]), *(ms(row[f"{name}_ms"]) for name in ("median", "p95", "min", "max"))]
        for row in found["engines"]
    ]
    heads = ["system", "tokens", "batch", "median ms", "p95", "min", "max", "tokens/s", "floor ms", "× floor"]
    heads += ["faster than transformers", "same top", "peak MB", "first s"]
    parted = ["piece", "tokens", "batch", "one layer ms", "layers", "all ms", "of transformers", "of ours"]
    return [
        ("Ceilings", ["what", "of", "median ms", "p95", "TFLOP/s", "GB/s"], ceilings),
        ("Passes", heads, passes),
        ("Pieces of a pass", parted, pieces),
        ("Engines, on a small release", ["system", "tokens", "median ms", "p95", "min", "max"], engines),
    ]


def missing(result: dict[str, Any]) -> list[str]:
    """Every part that did not end well, and every row without figures, by their reasons."""
    lines = [f"  part {part['name']}: {part['reason']}" for part in result["parts"] if part["reason"]]
    by_reason: dict[str, list[str]] = {}
    for row in (row for name in SECTIONS for row in result[name] if row["median_ms"] is None):
        by_reason.setdefault(row["reason"], []).append(row["key"])
    for why, keys in by_reason.items():
        more = f" and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
        lines.append(f"  {'; '.join(keys[:SHOWN_KEYS])}{more}: {why}")
    return ["\nnot measured:", *lines] if lines else []


if __name__ == "__main__":
    main()
