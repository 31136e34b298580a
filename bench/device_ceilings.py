"""Ceilings of a device, of bench/device.py: matrix products and copies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from device_parts import Clock, Task, Told, figures, reason

LEAST_S = {"cuda": 0.3, "cpu": 0.02}  # of repeating a product or a copy
SIDE = {"cuda": 8192, "cpu": 256}
ROWS = {"cuda": (512, 4096), "cpu": (64,)}
COPIED_BYTES = {"cuda": 2**29, "cpu": 2**22}


def ceilings(task: Task, told: Told) -> None:
    """Matrix products of a large square and of the shape's own linears, and copies."""
    clock, side = Clock(task.device), SIDE[task.device]
    forms = ("bf16", "fp8", "fp8 fast", "tf32", "fp32")
    products = [(f"{form} square", form, side, side, side) for form in forms]
    linears = sorted(set(linear_shapes(task.shape)))
    for rows in ROWS[task.device]:
        products += [
            (f"{form} linear", form, rows, *linear) for linear in linears for form in ("bf16", "fp8 fast", "tf32")
        ]
    kinds = ("host to device, pinned", "device to host, pinned", "host to device, pageable", "device to device")
    for name, _, m, k, n in products:
        told.plan("ceilings", f"{name} {m}×{k}×{n}", name=name, of=f"{m}×{k}×{n}")
    for kind in kinds:
        told.plan("ceilings", kind, name=kind, of=f"{COPIED_BYTES[task.device]:,} bytes")

    def measure(key: str, make: Callable[[], Callable[[], Any]], per_call: dict[str, float], **row: Any) -> None:
        if told.left_s() < 1:
            return  # planned, and null with the part's reason
        try:
            found = figures(clock.repeated(make(), LEAST_S[task.device]))
        except Exception as fault:
            told.row("ceilings", key, None, reason(fault), **row)
            return
        rates = {name: float(f"{amount / found['median_ms']:.4g}") for name, amount in per_call.items()}
        told.row("ceilings", key, found | rates, **row)

    def measure_products(chosen: list[tuple[str, str, int, int, int]]) -> None:
        for name, form, m, k, n in chosen:
            of, operations = f"{m}×{k}×{n}", {"tflops": 2e-9 * m * k * n}
            measure(f"{name} {of}", partial(product, form, m, k, n, task.device), operations, name=name, of=of)

    # The squares and the copies first: floors are made of them.
    measure_products(products[: len(forms)])
    for kind in kinds:
        # On the device itself every byte is read and written.
        amount = COPIED_BYTES[task.device] * (2 if kind == "device to device" else 1)
        of = f"{COPIED_BYTES[task.device]:,} bytes"
        measure(kind, partial(copying, kind, task.device), {"gb_per_s": amount / 1e6}, name=kind, of=of)
    measure_products(products[len(forms) :])


def product(form: str, m: int, k: int, n: int, device: str) -> Callable[[], Any]:
    """A call that multiplies random [m, k] and [k, n]; its weights take turns, so that they do not lie in a cache."""
    if device == "cpu" and form == "tf32":
        raise ValueError("this form is for CUDA devices")
    dtype = torch.float8_e4m3fn if form.startswith("fp8") else torch.bfloat16 if form == "bf16" else torch.float32
    cache = torch.cuda.get_device_properties(0).L2_cache_size if device == "cuda" else 0
    copies = max(1, min(16, math.ceil(3 * cache / (k * n * dtype.itemsize))))
    left = torch.randn(m, k, device=device).to(dtype)
    weights = [torch.randn(n, k, device=device).to(dtype) for _ in range(copies)]
    turns = itertools.cycle(weights)
    if form.startswith("fp8"):
        scale = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            left, next(turns).T, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=form == "fp8 fast"
        )
    torch.set_float32_matmul_precision("high" if form == "tf32" else "highest")
    return lambda: torch.matmul(left, next(turns).T)


def copying(kind: str, device: str) -> Callable[[], Any]:
    """A call that copies COPIED_BYTES."""
    size = COPIED_BYTES[device]
    if device == "cpu" and kind != "device to device":
        raise ValueError("there is one memory here")
    on_device = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    if kind == "device to device":
        target = torch.empty_like(on_device)
        return lambda: target.copy_(on_device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=kind.endswith("pinned"))
    host.random_(0, 256)
    target, source = (host, on_device) if kind.startswith("device to host") else (on_device, host)
    return lambda: target.copy_(source, non_blocking=True)


def linear_shapes(shape: str) -> list[tuple[int, int]]:
    """Inputs and outputs of every linear of the shape's backbone."""
    from clef_export.backbone import Backbone
    from clef_export.config import parse_config

    from clef_trt.benchmark.models import read_shape

    with torch.device("meta"):
        backbone = Backbone(parse_config(*read_shape(shape)).text)
    return [(m.in_features, m.out_features) for m in backbone.modules() if isinstance(m, torch.nn.Linear)]
