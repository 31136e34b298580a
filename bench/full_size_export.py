"""Exports of the published sizes without their weights: time, memory, and that the graph is the right one.

Makes sparse releases of the 9B and 27B configurations (holes instead of weights), plain and laid out as a hub cache of
symlinks, and exports each in a process of its own.

    python bench/full_size_export.py [--shapes 9b 27b] [--precisions fp32 bf16 fp8] [--json FILE]

BF16 and FP8 graphs are also parsed by TensorRT for RTX, where it is installed. FP8 takes a synthetic ranges file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from clef_trt.benchmark.machine import machine_card, resident_mb
from clef_trt.benchmark.models import make_release, shapes

# Numbers in the published files: backbone (layers, norm, both embeddings, vision) and joint head.
PUBLISHED_PARAMETERS = {"9b": 9_409_813_744 + 121_762_820}


def hub_cache(release: Path, cache: Path) -> Path:
    """The release as a hub cache lays it out: blobs by hash, and a snapshot of relative symlinks to them."""
    blobs, snapshot = cache / "blobs", cache / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(release.iterdir())):
        blob = blobs / f"{number:064x}"
        path.rename(blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def export_once(release: Path, bundle: Path, precision: str) -> dict[str, Any]:
    """Export, measured: seconds and this process's peak of resident memory."""
    os.environ["XDG_CACHE_HOME"] = str(bundle.parent / "cache")  # hashes are computed, not remembered
    start = time.perf_counter()
    from clef_export.pipeline import export
    from clef_export.precision import Precision
    from clef_export.ranges import synthetic_ranges
    from clef_export.release import open_release

    ranges = synthetic_ranges(open_release(release).config) if precision == "fp8" else None
    chosen = Precision(precision, ranges)
    manifest = export(
        release,
        bundle,
        precision=chosen,
        progress=lambda text: print(f"  [{time.perf_counter() - start:6.1f} s] {text}"),
    )
    seconds, peak_mb = time.perf_counter() - start, resident_mb()
    if precision == "fp8":  # its weights lie in two folders, where ONNX's checker looks in one
        parsed = parse_with_tensorrt(bundle)
    else:
        for graph in manifest.graphs.values():
            check_with_weights((bundle / graph.file).absolute(), Path(manifest.weights.root))
        parsed = parse_with_tensorrt(bundle) if precision == "bf16" else None
    return {
        "seconds": round(seconds, 1),
        "peak_resident_gb": round(peak_mb / 1e3, 2),
        "parameters": manifest.weights.parameters,
        "weights_gb": round(manifest.weights.stored_bytes / 1e9, 1),
        "written_gb": round(sum(path.stat().st_size for path in bundle.iterdir()) / 1e9, 2),
        "tensorrt_layers": parsed,
        "graph_mb": round((bundle / "text.onnx").stat().st_size / 1e6, 2),
    }


def parse_with_tensorrt(bundle: Path) -> dict[str, int] | None:
    """Layers of each graph as TensorRT for RTX parses it; None where it is not installed."""
    try:
        import tensorrt_rtx_bindings as trt
    except ImportError:
        return None
    from clef_trt.bundle import open_bundle
    from clef_trt.network import parse_graph

    opened = open_bundle(bundle)
    return {name: parse_graph(opened, name, trt, 16384).network.num_layers for name in opened.manifest.graphs}


def check_with_weights(graph: Path, root: Path) -> None:
    """The exported file itself through ONNX's checker, its weights found from their root, and full shape inference."""
    import onnx

    model = onnx.load(graph, load_external_data=False)
    os.chdir(root)
    onnx.checker.check_model(model, full_check=True)


def measure(shape: str, layout: str, precision: str) -> dict[str, Any]:
    """One shape in one layout."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        release = folder / "release"
        make_release(shape, release, seed=None)
        if layout == "hub cache":
            release = hub_cache(release, folder / "models--example--clef")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            result = pool.submit(export_once, release, folder / "bundle", precision).result()
    expected = PUBLISHED_PARAMETERS.get(shape)
    if expected is not None and result["parameters"] != expected:
        raise SystemExit(f"{shape}: {result['parameters']:,} parameters in the graph, {expected:,} published")
    return {"shape": shape, "layout": layout, "precision": precision} | result


def main() -> None:
    """Print a card, a table and, where asked, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["9b", "27b"], choices=sorted(shapes()))
    parser.add_argument("--precisions", nargs="+", default=["fp32"], choices=["fp32", "bf16", "fp8"])
    parser.add_argument("--layouts", nargs="+", default=["folder", "hub cache"], choices=["folder", "hub cache"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    card = machine_card(
        "export of sparse full-size releases, ONNX checker and strict shape inference included",
        "torch", "onnx", "onnxscript",
    )  # fmt: skip
    print(json.dumps(card, indent=1))
    rows = [
        measure(shape, layout, precision)
        for shape in options.shapes
        for precision in options.precisions
        for layout in options.layouts
    ]
    print(
        f"{'shape':8}{'layout':12}{'precision':>10}{'seconds':>9}{'peak GB':>9}"
        f"{'weights GB':>12}{'graph MB':>10}  parameters"
    )
    for row in rows:
        print(
            f"{row['shape']:8}{row['layout']:12}{row['precision']:>10}{row['seconds']:9.1f}{row['peak_resident_gb']:9.2f}"
            f"{row['weights_gb']:12.1f}{row['graph_mb']:10.2f}  {row['parameters']:,}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"card": card, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
