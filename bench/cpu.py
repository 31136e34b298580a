"""ONNX Runtime on the CPU against the published code in eager torch: time, memory and growth.

Random weights of a named shape, backbone and head, whole passes of random tokens. Systems take turns in one process, so
that a drift of the machine meets all of them; ratios are what to read.

    python bench/cpu.py [--shape 0.8b] [--work DIR] [--threads 2] [--json FILE] [--plot FILE.png]

--work keeps the release and the bundles for another run (about 7 GB at 0.8b).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from clef_trt.benchmark.machine import machine_card, resident_mb
from clef_trt.benchmark.models import make_release, read_shape, shapes
from clef_trt.benchmark.spread import summary

CASES = [(128, 1, 7), (512, 1, 7), (2048, 1, 5), (8192, 1, 2), (128, 8, 5)]  # tokens, batch, runs
GROWTH = [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
TURNS = 2  # of growth, after a warm-up
PRECISIONS = ("fp32", "int8")


def prepare(shape: str, work: Path) -> tuple[Path, dict[str, Path]]:
    """The release and its bundles, made where they are missing."""
    from clef_export.pipeline import export
    from clef_export.precision import Precision

    release = work / f"release-{shape}"
    if not release.exists():
        make_release(shape, release, seed=0)
    bundles = {name: work / f"bundle-{shape}-{name}" for name in PRECISIONS}
    for name, folder in bundles.items():
        if not folder.exists():
            print(f"exporting {name}", file=sys.stderr)
            export(release, folder, precision=Precision(name))
    return release, bundles


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


def ours(bundle: Path, threads: int, profile: str | None = None) -> Callable[[list[Any]], Any]:
    """A pass on ONNX Runtime."""
    from clef_trt.batch import collate
    from clef_trt.bundle import open_bundle
    from clef_trt.engine import OnnxRuntimeEngine

    opened = open_bundle(bundle)
    engine = OnnxRuntimeEngine(opened, "text", threads, profile=profile)
    hidden = opened.manifest.model.sizes["hidden"]

    def run(records: list[Any]) -> Any:
        return engine.run(collate(records, [], hidden))["logits"]

    run.engine = engine  # type: ignore[attr-defined]
    return run


def eager(release: Path, dtype: str) -> Callable[[list[Any]], Any]:
    """A pass of the published code."""
    import torch
    from clef_export.reference import Reference

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = Reference(release, getattr(torch, dtype))
    return lambda records: reference.logits([reference.with_media(record, []) for record in records])


def compare(
    systems: dict[str, Callable[[list[Any]], Any]], vocabulary: int, cases: list[tuple[int, int, int]]
) -> list[dict[str, Any]]:
    """Every system over every case, taking turns."""
    rows = []
    for tokens, batch, runs in cases:
        records = [random_record(tokens, vocabulary, seed) for seed in range(batch)]
        seconds: dict[str, list[float]] = {name: [] for name in systems}
        for turn in range(runs + 1):
            for name, run in systems.items():
                start = time.perf_counter()
                run(records)
                if turn:  # the first is a warm-up
                    seconds[name].append(time.perf_counter() - start)
        for name, taken in seconds.items():
            row = {"tokens": tokens, "batch": batch, "system": name} | summary(taken)
            for other in ("eager float32", "eager bfloat16"):
                ratios = np.divide(seconds[other], taken)
                row[f"times faster than {other}"] = round(float(np.median(ratios)), 2)
            rows.append(row)
            print(
                f"{tokens:6} x {batch}  {name:16}{row['median_s']:9.3f} s  [{row['min_s']:.3f}, {row['max_s']:.3f}]"
                f"{row['times faster than eager float32']:7.2f}x{row['times faster than eager bfloat16']:7.2f}x",
                flush=True,
            )
    return rows


def grow(bundle: Path, threads: int, vocabulary: int, lengths: list[int]) -> list[dict[str, Any]]:
    """A row per length: time per token with and without full attention, by kind of operator, and memory.

    The lengths take turns, in ascending order, so that a drift of the machine meets all of them; memory is the peak
    after the first pass of a length.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = ours(bundle, threads, profile=f"{folder}/profile")
        opened_mb = resident_mb()
        records = {tokens: [random_record(tokens, vocabulary, 0)] for tokens in lengths}
        peaks_mb, ran = {}, []
        for turn in range(TURNS + 1):
            for tokens in lengths:
                run(records[tokens])
                ran.append((turn, tokens))
                peaks_mb.setdefault(tokens, resident_mb())
        events = json.loads(Path(run.engine.end_profiling()).read_text())  # type: ignore[attr-defined]
    passes = sorted((event for event in events if event["name"] == "model_run"), key=lambda event: event["ts"])
    starts = [event["ts"] for event in passes]
    attention_us = [0.0] * len(passes)
    kinds: dict[int, Counter[str]] = {tokens: Counter() for tokens in lengths}
    for event in events:
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            number = bisect_right(starts, event["ts"]) - 1
            # The nodes of an operator's body are named by it; those within its Scan have no name of their own.
            attention_us[number] += event["dur"] if "ContinuedAttention/" in event["name"] else 0
            turn, tokens = ran[number]
            if turn and event["args"]["op_name"] not in ("Loop", "Scan"):  # what they hold is counted by itself
                kinds[tokens][event["args"]["op_name"]] += event["dur"] / TURNS / tokens
    rows: list[dict[str, Any]] = []
    outside: dict[int, np.ndarray] = {}
    for tokens in lengths:
        mine = [number for number, (turn, length) in enumerate(ran) if turn and length == tokens]
        whole = np.array([passes[number]["dur"] for number in mine], float)
        outside[tokens] = whole - np.array([attention_us[number] for number in mine])
        row = {
            "tokens": tokens,
            "us_per_token": round(float(np.median(whole)) / tokens, 1),
            "us_per_token_outside_attention": round(float(np.median(outside[tokens])) / tokens, 1),
            "us_per_further_token_outside_attention": None,
            "us_per_token_by_operator": {kind: round(value, 1) for kind, value in kinds[tokens].most_common(14)},
            "opened_mb": opened_mb,
            "peak_mb": peaks_mb[tokens],
        }
        if rows:
            before = rows[-1]["tokens"]
            further = (outside[tokens] - outside[before]) / (tokens - before)
            row["us_per_further_token_outside_attention"] = round(float(np.median(further)), 1)
        rows.append(row)
    return rows


def main() -> None:
    """Print tables and, where asked, write one JSON object and a plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.8b", choices=sorted(shapes()))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--compare", metavar="TOKENS", type=int, nargs="*", help="lengths compared (default: all)")
    parser.add_argument("--grow-up-to", metavar="TOKENS", type=int, default=16384, help="the longest record of growth")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--grow", metavar="BUNDLE", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    vocabulary = read_shape(options.shape)[0]["text_config"]["vocab_size"]
    if options.grow:
        lengths = [length for length in GROWTH if length <= options.grow_up_to]
        print(json.dumps(grow(options.grow, options.threads, vocabulary, lengths)))
        return
    import torch

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        release, bundles = prepare(options.shape, work)
        growth = {name: grown(options, bundle) for name, bundle in bundles.items()}
        systems = {f"eager {name}": eager(release, name) for name in ("float32", "bfloat16")}
        systems |= {f"ours {name}": ours(bundle, options.threads) for name, bundle in bundles.items()}
        rows = compare(
            systems, vocabulary, [case for case in CASES if options.compare is None or case[0] in options.compare]
        )
    card = machine_card(__doc__.splitlines()[0], "torch", "transformers", "onnxruntime") | {
        "shape": options.shape,
        "threads": options.threads,
    }
    result = {"card": card, "rows": rows, "growth": growth}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot is not None:
        plot(growth, options.plot)


def grown(options: argparse.Namespace, bundle: Path) -> list[dict[str, Any]]:
    """`grow` in a process of its own, whose memory nothing else fills."""
    command = [sys.executable, __file__, "--shape", options.shape, "--threads", str(options.threads)]
    command += ["--grow-up-to", str(options.grow_up_to), "--grow", str(bundle)]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    rows: list[dict[str, Any]] = json.loads(run.stdout)
    for row in rows:
        further = row["us_per_further_token_outside_attention"]
        print(
            f"{bundle.name} {row['tokens']:6} tokens: {row['us_per_token']:8.1f} us a token; outside attention "
            f"{row['us_per_token_outside_attention']:8.1f}, a further one {further or float('nan'):8.1f}; "
            f"peak {row['peak_mb']} MB",
            flush=True,
        )
    return rows


def plot(growth: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Time per token against tokens, with and without full attention."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, rows), colour in zip(growth.items(), ("tab:blue", "tab:orange"), strict=True):
        tokens = [row["tokens"] for row in rows]
        axes.plot(tokens, [row["us_per_token"] / 1000 for row in rows], "-o", color=colour, label=name)
        outside = [row["us_per_token_outside_attention"] / 1000 for row in rows]
        axes.plot(tokens, outside, "--", color=colour, label=f"{name}, full attention left out")
    axes.set(xscale="log", xlabel="tokens", ylabel="ms per token", ylim=(0, None))
    axes.set_xticks(GROWTH, [str(tokens) for tokens in GROWTH])
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
