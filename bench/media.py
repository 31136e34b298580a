"""JPEG → patches on one core: clef_trt.media against transformers' Pillow processor.

Both get the same data URL and end with the same kind of array of float32 patches. They take turns within one process,
in alternating order, after two rounds to warm up; the garbage collector is off meanwhile. Left out: the placeholders'
text, copying to a device. The pictures are drawn: smooth colour with some noise, saved as JPEG of quality 88.

    python bench/media.py [--repeats N] [--json FILE]     (FILE - is standard output)
"""

from __future__ import annotations

import os

THREADS = 1
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = str(THREADS)  # before numpy is loaded

import argparse  # noqa: E402
import base64  # noqa: E402
import ctypes  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import platform  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from importlib.metadata import version  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

from clef_trt.media import MediaReader, _write_patches  # noqa: E402
from clef_trt.processor import read_processors  # noqa: E402
from clef_trt.resample import Resampler  # noqa: E402

ROOT = Path(__file__).parent.parent
CONFIG = json.loads((ROOT / "tests" / "golden" / "narrow" / "processor_config.json").read_text())
# (width, height): what the ratio to transformers has to be. Sides that are multiples of 32 are not resized.
TARGETS: dict[tuple[int, int], float | None] = {
    (320, 256): None,
    (1024, 1024): 2.0,
    (1155, 866): 1.3,
    (1920, 1080): None,
    (3000, 2000): None,
}
COLUMNS = "{:>11} {:>8} {:>9} {:>9} {:>15} {:>9} {:>9} {:>15} {:>7} {:>7} {:>8} {:>9} {:>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", metavar="FILE", help="where to write the results as JSON; - is standard output")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    # With the results as JSON on standard output, the tables go to standard error.
    tables = sys.stderr if options.json == "-" else sys.stdout

    reader, transformers = MediaReader(CONFIG), transformers_processor()
    card = machine() | {"repeats": options.repeats}
    print(*(f"{key}: {value}" for key, value in card.items()), sep="\n", file=tables)
    heads = (
        "picture",
        "JPEG kB",
        "ours ms",
        "p95",
        "min–max",
        "theirs ms",
        "p95",
        "min–max",
        "ratio",
        "of min",
        "target",
    )
    print("\n" + COLUMNS.format(*heads, "identical", "off by"), file=tables)
    rows = []
    for size, target in TARGETS.items():
        row = compare(size, target, reader, transformers, options.repeats)
        rows.append(row)
        ours, theirs = row["ours_ms"], row["transformers_ms"]
        print(
            COLUMNS.format(
                row["picture"],
                f"{row['jpeg_bytes'] / 1e3:.0f}",
                *columns_of(ours),
                *columns_of(theirs),
                f"{row['ratio']:.2f}",
                f"{row['ratio_of_minima']:.2f}",
                "–" if target is None else f"{target} {'✓' if row['ratio'] >= target else '✗'}",
                "yes" if row["identical_to_torch_resize"] else "NO",
                f"{row['levels_off_from_transformers']}",
            ),
            file=tables,
        )
    print(
        "\nidentical: bit for bit what torch's antialiased uint8 resize (which torchvision calls) gives, normalised.\n"
        "off by: the largest difference, in levels of 0 to 255, from transformers' Pillow processor, which resizes "
        "otherwise.\n"
        "ratio: of the medians; of min: of the fastest repeats, which other work on the machine disturbs less.\n"
        "\nWhere our time goes: median ms of each stage by itself, and its share of the whole\n"
        "(JPEG decoder alone: Pillow's load of the same file). The stages add up to less than the whole:\n"
        "repeated by themselves they reuse memory, while the two that take turns get fresh pages each time.",
        file=tables,
    )
    stages = list(rows[0]["profile_ms"])
    print("{:>11}".format("picture"), *(f"{stage:>26}" for stage in stages), file=tables)
    for row in rows:
        total = row["ours_ms"]["median"]
        shares = (f"{ms:.2f} ({ms / total:.0%})" for ms in row["profile_ms"].values())
        print(f"{row['picture']:>11}", *(f"{share:>26}" for share in shares), file=tables)

    if options.json:
        text = json.dumps({"benchmark": "media", "machine": card, "rows": rows})
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n")


def compare(
    size: tuple[int, int], target: float | None, reader: MediaReader, transformers: Any, repeats: int
) -> dict[str, Any]:
    """One row of the results."""
    jpeg = draw(*size)
    url = "data:image/jpeg;base64," + base64.b64encode(jpeg).decode()

    def ours() -> np.ndarray:
        (item,) = reader.open([url], None)
        return reader.patches(item)

    def theirs() -> np.ndarray:
        patches: np.ndarray = transformers(images=[url], return_tensors="np")["pixel_values"]
        return patches

    off = np.abs(levels_of(ours()) - levels_of(theirs())).max()
    times = measured({"ours": ours, "transformers": theirs}, repeats)
    row: dict[str, Any] = {
        "picture": f"{size[0]}×{size[1]}",
        "jpeg_bytes": len(jpeg),
        "patches": list(ours().shape),
        "ours_ms": statistics_of(times["ours"]),
        "transformers_ms": statistics_of(times["transformers"]),
        "target_ratio": target,
        "identical_to_torch_resize": bool(np.array_equal(ours(), by_torch(jpeg, url, reader))),
        "levels_off_from_transformers": int(off),
    }
    for name, of in (("ratio", "median"), ("ratio_of_minima", "min")):
        row[name] = round(row["transformers_ms"][of] / row["ours_ms"][of], 3)
    row["profile_ms"] = profile(url, jpeg, reader, repeats)
    return row


def profile(url: str, jpeg: bytes, reader: MediaReader, repeats: int) -> dict[str, float]:
    """Median milliseconds of each stage measured by itself, and of the JPEG decoder without anything of ours."""
    (item,) = reader.open([url], None)
    (picture,) = item.frames
    pixels, (_, rows, columns) = picture.pixels(), item.grid
    target = (rows * 16, columns * 16)
    resized = Resampler(picture.size, target)(pixels)
    processor = read_processors(CONFIG)[0]
    stages: dict[str, Callable[[], object]] = {
        "base64 and header": lambda: reader.open([url], None),
        "JPEG → RGB array": picture.pixels,
        "resize": lambda: Resampler(picture.size, target)(pixels),
        "normalise and order": lambda: _write_patches(
            resized, processor, np.empty((rows * columns, 3, 2, 256), np.float32)
        ),
        "JPEG decoder alone": lambda: Image.open(io.BytesIO(jpeg)).load(),
    }
    return {name: statistics_of(times)["median"] for name, times in measured(stages, repeats).items()}


def measured(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every repeat; the functions take turns, in alternating order."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    gc.collect()
    gc.disable()
    for repeat in range(-2, repeats):  # two to warm up
        order = list(functions.items())
        for name, function in order if repeat % 2 else reversed(order):
            start = time.perf_counter()
            result = function()
            elapsed = (time.perf_counter() - start) * 1e3
            del result
            if repeat >= 0:
                times[name].append(elapsed)
    gc.enable()
    return times


def levels_of(patches: np.ndarray) -> np.ndarray:
    """Patches as levels of 0 to 255; the golden configuration's mean and std are 127.5."""
    return np.rint(patches * 127.5 + 127.5)


def statistics_of(times: list[float]) -> dict[str, float]:
    values = {"median": np.median(times), "p95": np.percentile(times, 95), "min": min(times), "max": max(times)}
    return {name: round(float(value), 3) for name, value in values.items()}


def columns_of(times: dict[str, float]) -> tuple[str, str, str]:
    return f"{times['median']:.2f}", f"{times['p95']:.2f}", f"{times['min']:.2f}–{times['max']:.2f}"


def by_torch(jpeg: bytes, url: str, reader: MediaReader) -> np.ndarray:
    """The same patches, resized by torch."""
    (item,) = reader.open([url], None)
    _, rows, columns = item.grid
    pixels = np.array(Image.open(io.BytesIO(jpeg)).convert("RGB"))
    levels = torch.from_numpy(pixels).permute(2, 0, 1)[None]
    if pixels.shape[:2] != (rows * 16, columns * 16):
        levels = torch.nn.functional.interpolate(levels, (rows * 16, columns * 16), mode="bicubic", antialias=True)
    values = ((levels[0].float() - 127.5) / 127.5).numpy()
    blocks = values.reshape(3, rows // 2, 2, 16, columns // 2, 2, 16).transpose(1, 4, 2, 5, 0, 3, 6)
    return np.repeat(blocks[:, :, :, :, :, None], 2, 5).reshape(rows * columns, -1)


def draw(width: int, height: int) -> bytes:
    """A JPEG of soft patches of colour with a little noise."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (height // 48 + 2, width // 48 + 2, 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = np.clip(soft + rng.integers(-6, 7, soft.shape), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(noisy).save(out, "JPEG", quality=88)
    return out.getvalue()


def transformers_processor() -> Any:
    module = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    settings = {key: value for key, value in CONFIG["image_processor"].items() if key != "image_processor_type"}
    return module.Qwen2VLImageProcessorPil(**settings)


def machine() -> dict[str, Any]:
    """What the numbers depend on; None where it cannot be told."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    cpuinfo = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
    return {
        "commit": commit.stdout.strip() or None,
        "cpu": models[0] if models else platform.processor() or None,
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "pillow", "transformers", "torch")},
        "threads asked for": THREADS,
        "BLAS threads of numpy in effect": blas_threads(),
        "threads of torch in effect": torch.get_num_threads(),
    }


def blas_threads() -> int | None:
    """The threads numpy's OpenBLAS uses, asked of the library itself."""
    for library in Path(np.__file__).parent.parent.glob("numpy.libs/*openblas*"):
        for suffix in ("64_", ""):
            ask = getattr(ctypes.CDLL(str(library)), f"scipy_openblas_get_num_threads{suffix}", None)
            if ask is not None:
                return int(ask())
    return None


if __name__ == "__main__":
    main()
