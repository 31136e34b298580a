"""What one more option, question, record or image costs: ONNX Runtime on the CPU, passes of random tokens.

Along each axis everything else stays as it is, tokens included. The sizes of an axis take turns, so that a drift of the
machine meets all of them. Growth in tokens is measured by bench/cpu.py.

    python bench/growth.py [--shape 0.8b] [--precision int8] [--work DIR] [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cpu import PRECISIONS, prepare, random_record

from clef_trt.batch import collate
from clef_trt.benchmark.machine import machine_card
from clef_trt.benchmark.models import read_shape, shapes
from clef_trt.benchmark.spread import summary
from clef_trt.bundle import Bundle, open_bundle
from clef_trt.contract import Tensors
from clef_trt.engine import OnnxRuntimeEngine
from clef_trt.grid import vision_inputs

TOKENS = 1024  # of a record, while its schema grows
TURNS = 5
Axis = tuple[str, str, list[tuple[int, Tensors]]]  # what grows, graph, inputs by size


def text_axes(bundle: Bundle, vocabulary: int) -> list[Axis]:
    """Options of one question, questions of two options, records of a batch."""
    hidden = bundle.manifest.model.sizes["hidden"]

    def inputs(tokens: int, batch: int = 1, **schema: int) -> Tensors:
        return collate([random_record(tokens, vocabulary, seed, **schema) for seed in range(batch)], [], hidden)

    return [
        ("options", "text", [(n, inputs(TOKENS, questions=1, options=n)) for n in (2, 16, 64, 128, 255)]),
        ("questions", "text", [(n, inputs(TOKENS, questions=n, options=2)) for n in (1, 8, 16, 32, 64)]),
        ("records of 128 tokens", "text", [(n, inputs(128, batch=n)) for n in (1, 2, 4, 8, 16, 32)]),
    ]


def image_axes(bundle: Bundle, merge_size: int) -> list[Axis]:
    """Images of 256 tokens in one pass, and the tokens of one image."""
    model = bundle.manifest.model
    values = model.sizes["patch_values"]

    def inputs(images: int, tokens: int) -> Tensors:
        side = round(tokens**0.5) * merge_size
        pixels = np.random.default_rng(0).standard_normal((images, side * side, values), np.float32)
        return vision_inputs(pixels, side, side, merge_size, model.vision_table_side)

    return [
        ("images of 256 tokens", "vision", [(n, inputs(n, 256)) for n in (1, 2, 4)]),
        ("tokens of one image", "vision", [(n, inputs(1, n)) for n in (64, 256, 1024, 4096)]),
    ]


def measured(axis: Axis, run: Callable[[Tensors], Any]) -> list[dict[str, Any]]:
    """A row per size: its time, per unit, and what a further unit costs since the size before."""
    name, _, sizes = axis
    taken: dict[int, list[float]] = {size: [] for size, _ in sizes}
    for turn in range(TURNS + 1):
        for size, inputs in sizes:
            start = time.perf_counter()
            run(inputs)
            if turn:  # the first is a warm-up
                taken[size].append(time.perf_counter() - start)
    rows: list[dict[str, Any]] = []
    for size, seconds in taken.items():
        row = {"axis": name, "size": size} | summary(seconds)
        row["ms_per_unit"] = round(row["median_s"] * 1e3 / size, 4)
        if rows:
            # Within a turn the sizes ran one after the other: their differences leave out the machine's drift.
            before = rows[-1]["size"]
            further = np.median(np.subtract(seconds, taken[before])) / (size - before)
            row["ms_per_further_unit"] = round(float(further) * 1e3, 4)
        rows.append(row)
        print(
            f"{name:24}{size:6}{row['median_s'] * 1e3:12.1f} ms  [{row['min_s'] * 1e3:.1f}, {row['max_s'] * 1e3:.1f}]"
            f"{row['ms_per_unit']:12.3f} ms each{row.get('ms_per_further_unit', float('nan')):12.3f} ms a further one",
            flush=True,
        )
    return rows


def main() -> None:
    """Print a table and, where asked, write one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.8b", choices=sorted(shapes()))
    parser.add_argument("--precision", default="int8", choices=PRECISIONS)
    parser.add_argument("--work", type=Path, help="keeps the release and the bundles for another run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = read_shape(options.shape)[0]
    with tempfile.TemporaryDirectory() as folder:
        _, bundles = prepare(options.shape, options.work or Path(folder))
        bundle = open_bundle(bundles[options.precision])
        axes = text_axes(bundle, config["text_config"]["vocab_size"])
        axes += image_axes(bundle, config["vision_config"]["spatial_merge_size"])
        engines = {graph: OnnxRuntimeEngine(bundle, graph, options.threads) for graph in ("text", "vision")}
        rows = [row for axis in axes for row in measured(axis, engines[axis[1]].run)]
    card = machine_card(__doc__.splitlines()[0], "onnxruntime")
    card |= {"shape": options.shape, "precision": options.precision, "threads": options.threads, "turns": TURNS}
    if options.json is not None:
        options.json.write_text(json.dumps({"card": card, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
