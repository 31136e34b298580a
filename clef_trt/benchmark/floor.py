"""The floor of a pass: the arithmetic of its linears at the rate this machine reaches on one large product.

Counted: two operations per parameter of the backbone's linears (projections of attention and delta rule, MLP) and
token. Not counted: attention and delta rule themselves, norms, the convolution, embeddings, the head, the vision tower,
padding, and reading the weights, which bounds short passes. So no system reaches the floor; the distance to it says how
much of a pass is not the arithmetic that the model cannot do without.

The rate is the best of some seconds' fraction of products [512, 1024] × [1024, 3584] on a CPU, and 8192³ on a GPU, by
the library the system computes with, in its precision. ONNX Runtime's int8 rate is that of its fastest form: signed
weights, one scale per tensor of activations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ClefError, EngineError, MissingExtraError

ROWS, INNER, COLUMNS = 512, 1024, 3584
CUDA_SIDE = 8192
LEAST_S, LEAST_RUNS = 0.5, 5
PEAKS = (
    *("torch-fp32", "torch-bf16", "onnxruntime-fp32", "onnxruntime-int8"),
    *("torch-cuda-fp32", "torch-cuda-bf16", "torch-cuda-fp8"),
)


def linear_parameters(release: Path) -> int:
    """Parameters of the backbone's linears, from the release's config.json."""
    from clef_export.config import read_config

    text = read_config(release).text
    hidden = text.hidden_size
    values = text.linear_num_value_heads * text.linear_value_head_dim
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    per_kind = {
        # in_proj_qkv, in_proj_z, in_proj_b and in_proj_a, out_proj
        "linear_attention": hidden * (2 * keys + values + values + 2 * text.linear_num_value_heads + values),
        # q_proj with its gate, k_proj and v_proj, o_proj
        "full_attention": hidden * text.head_dim * (3 * text.num_attention_heads + 2 * text.num_key_value_heads),
    }
    mlp = 3 * hidden * text.intermediate_size
    return sum(per_kind[kind] + mlp for kind in text.layer_types)


def measure_peaks(names: set[str], threads: int) -> dict[str, dict[str, Any]]:
    """Per name of PEAKS: `gflops`, None where it cannot be measured, and then the `reason`."""
    result: dict[str, dict[str, Any]] = {}
    for name in sorted(names):
        library, _, precision = name.rpartition("-")
        try:
            if library == "onnxruntime":
                product, operations = _onnxruntime(precision, threads)
            else:
                product, operations = _torch(name, threads)
            result[name] = {"gflops": round(operations / _best_s(product) / 1e9, 1), "reason": None}
        except (ClefError, RuntimeError) as fault:
            result[name] = {"gflops": None, "reason": str(fault)}
    return result


def _best_s(product: Callable[[], Any]) -> float:
    """Seconds of the fastest run, after one to warm up."""
    product()
    best, runs, end = float("inf"), 0, time.perf_counter() + LEAST_S
    while runs < LEAST_RUNS or time.perf_counter() < end:
        start = time.perf_counter()
        product()
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return best


def _torch(name: str, threads: int) -> tuple[Callable[[], Any], int]:
    try:
        import torch
    except ImportError as fault:
        raise MissingExtraError("the rate of torch", "export", fault) from None
    precision = name.rpartition("-")[2]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[precision]
    if "cuda" not in name:
        torch.set_num_threads(threads)
        a, b = torch.randn(ROWS, INNER).to(dtype), torch.randn(COLUMNS, INNER).to(dtype)

        def product() -> None:
            with torch.inference_mode():
                torch.nn.functional.linear(a, b)

        return product, 2 * ROWS * INNER * COLUMNS
    if not torch.cuda.is_available():
        raise EngineError("torch has no CUDA here, or there is no card: the floor of this system is unknown")
    a, b = (torch.randn(CUDA_SIDE, CUDA_SIDE, device="cuda").to(dtype) for _ in range(2))
    scale = torch.ones((), device="cuda")

    def on_card() -> None:
        if precision == "fp8":
            torch._scaled_mm(a, b.T, scale, scale, out_dtype=torch.bfloat16)
        else:
            torch.matmul(a, b.T)
        torch.cuda.synchronize()

    return on_card, 2 * CUDA_SIDE**3


def _onnxruntime(precision: str, threads: int) -> tuple[Callable[[], Any], int]:
    try:
        from onnx import numpy_helper, parser
    except ImportError as fault:
        raise MissingExtraError("the rate of ONNX Runtime", "export", fault) from None
    import onnxruntime

    body = {
        "fp32": "y = MatMul(x, w)",
        "int8": "q, a, z = DynamicQuantizeLinear(x) y = com.microsoft.MatMulIntegerToFloat(q, w, a, s, z)",
    }[precision]
    source = np.random.default_rng(0)
    weight = source.standard_normal((INNER, COLUMNS)).astype(np.float32)
    constants = {"w": weight}
    if precision == "int8":
        constants = {"w": np.clip(np.rint(weight * 32), -127, 127).astype(np.int8), "s": np.array(1 / 32, np.float32)}
    declared = ", ".join(
        f"{'int8' if array.dtype == np.int8 else 'float'}[{','.join(map(str, array.shape))}] {name}"
        for name, array in constants.items()
    )
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'
        f"g (float[{ROWS},{INNER}] x) => (float[{ROWS},{COLUMNS}] y) <{declared}> {{ {body} }}"
    )
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = source.standard_normal((ROWS, INNER)).astype(np.float32)
    return lambda: session.run(None, {"x": x}), 2 * ROWS * INNER * COLUMNS
