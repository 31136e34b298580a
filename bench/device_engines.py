"""Compiled engines on a small release that is exported here, of bench/device.py."""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path

from device_parts import Task, Told, reason, tell

ENGINES = {  # system → precision of its bundle, recipe of its plan
    "onnxruntime-fp32": ("fp32", None),
    "onnxruntime-cuda": ("fp32", None),
    "tensorrt-bf16": ("bf16", "h200-bf16"),
    "tensorrt-rtx-bf16": ("bf16", "rtx-bf16"),
}
ENGINE_TOKENS = (512, 2048)
ENGINE_TURNS = 20


def engines(task: Task, told: Told) -> None:
    """Every compiled engine that imports, over a small release that is exported here."""
    from clef_trt.benchmark.measure import rows, take_turns
    from clef_trt.benchmark.models import TINY, Model, prepare_bundle, prepare_release, text_tools
    from clef_trt.benchmark.systems import Sources, make_system
    from clef_trt.benchmark.workload import Generator, Size

    for name, tokens in itertools.product(ENGINES, ENGINE_TOKENS):
        told.plan("engines", f"{name}, {tokens} tokens", system=name, tokens=tokens, shape=TINY)
    with tempfile.TemporaryDirectory() as folder:
        model = Model(TINY, prepare_release(TINY, Path(folder), tell))
        generator = Generator(*text_tools(model))
        turns = ENGINE_TURNS if task.device == "cuda" else 3
        workloads = [(tokens, generator.synthetic(Size(tokens), turns + 1)) for tokens in ENGINE_TOKENS]
        for name, (precision, recipe) in ENGINES.items():
            try:
                if task.device == "cpu" and name != "onnxruntime-fp32":
                    raise ValueError("no CUDA device was asked for")
                if recipe is not None:
                    check_target(recipe)
                prepare_bundle(model, precision, Path(folder), tell)
                build_s = None if recipe is None else build_plan(model.bundles[precision], recipe)
                system = make_system(name, Sources(model.release, model.bundles, threads=1))
                open_s = system.open()
            except Exception as fault:
                for tokens, _ in workloads:
                    told.row("engines", f"{name}, {tokens} tokens", None, reason(fault), system=name, tokens=tokens)
                continue
            for tokens, workload in workloads:
                row = rows(workload, take_turns([system], workload, tell), {})[0]
                told.row(
                    "engines", f"{name}, {tokens} tokens", row, row["reason"], open_s=open_s, build_s=build_s,
                    shape=TINY, info=system.info(), tokens=tokens,
                )  # fmt: skip
            system.close()


def check_target(recipe: str) -> None:
    """Raises MissingExtraError where the target's package cannot be imported."""
    from clef_trt.recipe import read_recipe
    from clef_trt.tensorrt_package import MODULES, import_tensorrt

    import_tensorrt(MODULES[read_recipe(recipe).target])


def build_plan(bundle: Path, recipe: str) -> float:
    """Seconds to build the plans of a recipe into the bundle."""
    from clef_trt.build import build
    from clef_trt.bundle import open_bundle
    from clef_trt.recipe import read_recipe

    start = time.perf_counter()
    build(open_bundle(bundle), read_recipe(recipe), profiles=["1024", "4096"], progress=tell)
    return time.perf_counter() - start
