"""Operator by operator: the forms that ONNX Runtime's CPU provider offers, their time, and what each costs in accuracy.

Shapes are those of the 0.8B model at 512 tokens; forms of one operator take turns. The error of a form is the root mean
square of its difference from float64, relative to the result, for activations with a few channels 30 times the others.
With --bundle, settings of the engine over a whole pass follow, each in a process of its own.

    python bench/cpu_operators.py [--tokens 512] [--bundle DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from clef_export.config import TextConfig, parse_config
from clef_export.cpu import int8_product, linear_attention, row_codes, turned_row_codes
from clef_export.int8 import hadamard
from cpu import random_record
from onnx import numpy_helper, parser

from clef_trt.benchmark.machine import machine_card, resident_mb
from clef_trt.benchmark.models import read_shape
from clef_trt.benchmark.spread import summary
from clef_trt.functions import causal_attention, gated_delta_rule

Feeds = dict[str, np.ndarray]
TURNS, RUNS = 5, 5  # turns of every form, runs in a turn
SETTLE_S = 0.02  # threads of the form before spin for a while
HEADER = '<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1, "clef" : 1]>\n'
TYPES = {"float32": "float", "int8": "int8", "uint8": "uint8", "int64": "int64"}


def session(body: str, inputs: Feeds, constants: Feeds, functions: list[onnx.FunctionProto]) -> Any:
    """A graph of one operator with output y."""

    def declared(tensors: Feeds) -> str:
        return ", ".join(f"{TYPES[a.dtype.name]}[{','.join(map(str, a.shape))}] {name}" for name, a in tensors.items())

    rank = ",".join("abcd"[: len(next(iter(inputs.values())).shape)])
    model = parser.parse_model(
        f"{HEADER}g ({declared(inputs)}) => (float[{rank}] y) <{declared(constants)}> {{ {body} }}"
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    model.functions.extend(functions)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Form:
    """One way to compute an operator."""

    def __init__(
        self,
        name: str,
        body: str,
        constants: Feeds | None = None,
        functions: list[onnx.FunctionProto] | None = None,
        arrange: Callable[[Feeds], Feeds] = lambda feeds: feeds,
    ) -> None:
        self.name, self.body, self.constants, self.functions, self.arrange = (
            name, body, constants or {}, functions or [], arrange,
        )  # fmt: skip


def race(operator: str, inputs: Feeds, forms: list[Form], expected: np.ndarray | None = None) -> list[dict[str, Any]]:
    """Rows of one operator: every form's time beside the first one's, and its error."""
    ready = []
    for form in forms:
        feeds = form.arrange(inputs)
        ready.append((form, session(form.body, feeds, form.constants, form.functions), feeds))
    seconds: dict[str, list[float]] = {form.name: [] for form in forms}
    results = {}
    for _ in range(TURNS):
        for form, runnable, feeds in ready:
            time.sleep(SETTLE_S)
            results[form.name] = runnable.run(None, feeds)[0]  # wakes its threads
            for _ in range(RUNS):
                start = time.perf_counter()
                runnable.run(None, feeds)
                seconds[form.name].append(time.perf_counter() - start)
    reference = results[forms[0].name] if expected is None else expected
    rows = []
    for form in forms:
        difference = results[form.name].reshape(reference.shape) - reference
        row = {"operator": operator, "form": form.name} | summary(seconds[form.name])
        row["times faster than the first"] = round(
            float(np.median(np.divide(seconds[forms[0].name], seconds[form.name]))), 2
        )
        row["relative_error"] = float(f"{np.sqrt(np.mean(difference**2) / np.mean(reference**2)):.2g}")
        rows.append(row)
        print(
            f"{operator:34}{form.name:44}{row['median_s'] * 1000:8.2f} ms{row['times faster than the first']:7.2f}x"
            f"  error {row['relative_error']:.1e}",
            flush=True,
        )
    return rows


def linears(tokens: int, inputs: int, outputs: int) -> list[dict[str, Any]]:
    """One product of an activation with outlier channels."""
    source = np.random.default_rng(0)
    x = source.standard_normal((1, tokens, inputs)).astype(np.float32)
    x[..., :: inputs // 8] *= 30
    weight = source.standard_normal((outputs, inputs)).astype(np.float32) / np.sqrt(np.float32(inputs))
    scales = np.abs(weight).max(1) / np.float32(127)
    codes = np.ascontiguousarray(np.rint(weight / scales[:, None]).astype(np.int8).T)
    matrix = hadamard(128)
    turned = (weight.reshape(-1, 128) @ matrix).reshape(weight.shape)
    turned_scales = np.abs(turned).max(1) / np.float32(127)
    turned_codes = np.ascontiguousarray(np.rint(turned / turned_scales[:, None]).astype(np.int8).T)
    forms = [Form("MatMul, float32", "y = MatMul(x, w)", {"w": np.ascontiguousarray(weight.T)})]
    for block in (32, 128):
        parts = weight.reshape(outputs, -1, block)
        part_scales = np.abs(parts).max(-1, keepdims=True) / np.float32(127)
        forms.append(
            Form(
                f"MatMulNBits, 8 bits, blocks of {block}",
                f"y = com.microsoft.MatMulNBits <K = {inputs}, N = {outputs}, bits = 8, block_size = {block}, "
                "accuracy_level = 4> (x, w, s)",
                {"w": (np.rint(parts / part_scales) + 128).astype(np.uint8), "s": part_scales.ravel()},
            )
        )
    forms += [
        Form(
            "int8, one activation scale per tensor",
            "q, a, z = DynamicQuantizeLinear(x) y = com.microsoft.MatMulIntegerToFloat(q, w, a, s, z)",
            {"w": codes, "s": scales},
        ),
        Form(
            "int8, one activation scale per token",
            "q, r = clef.RowCodes(x) y = clef.Int8Product(q, r, w, s)",
            {"w": codes, "s": scales},
            [row_codes(), int8_product()],
        ),
        Form(
            "the same, behind a Hadamard matrix",
            "q, r = clef.TurnedRowCodes(x, h) y = clef.Int8Product(q, r, w, s)",
            {"w": turned_codes, "s": turned_scales, "h": matrix},
            [turned_row_codes(), int8_product()],
        ),
    ]
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    return race(f"linear {inputs} to {outputs}", {"x": x}, forms, expected)


def delta_rule(tokens: int, config: TextConfig) -> list[dict[str, Any]]:
    """The recurrence of one delta layer, in the layout of its neighbours [B, S, H, D]."""
    source = np.random.default_rng(0)
    heads, dim = config.linear_num_value_heads, config.linear_value_head_dim
    q, k, v = source.standard_normal((3, 1, tokens, heads, dim)).astype(np.float32)
    feeds = {
        "q": q,
        "k": k,
        "v": v,
        "g": -source.random((1, tokens, heads), np.float32),
        "b": source.random((1, tokens, heads), np.float32),
    }
    state = {"state": np.zeros((1, heads, dim, dim), np.float32)}
    from_zero = "y = clef.GatedDeltaRule(q, k, v, g, b)"
    from_state = "y, t = clef.ContinuedDeltaRule(q, k, v, g, b, state)"

    def packed(tensors: Feeds) -> Feeds:
        return {name: array[0] for name, array in tensors.items()} | state

    return race(
        "delta rule", feeds,
        [
            Form("chunks of 64 and a Scan", from_zero, functions=[gated_delta_rule()]),
            Form("LinearAttention", from_state, state, [linear_attention(config)]),
            Form(
                "GatedDeltaNet",
                "y, s = com.microsoft.GatedDeltaNet <qk_l2_norm = 1> (q, k, v, , g, b, state)",
                arrange=packed,
            ),
        ],
    )  # fmt: skip


def convolution(tokens: int, channels: int) -> list[dict[str, Any]]:
    """The causal convolution of a delta layer with its SiLU, from and to [B, S, C]."""
    source = np.random.default_rng(0)
    x = source.standard_normal((1, tokens, channels)).astype(np.float32)
    weight = source.standard_normal((channels, 1, 4)).astype(np.float32)
    turned = "t = Transpose <perm = [0, 2, 1]> (x)"
    back = "y = Transpose <perm = [0, 2, 1]> (c)"
    taps = {f"w{i}": np.ascontiguousarray(weight[:, 0, i]) for i in range(4)}
    shifts = (
        "pads = Constant <value_ints = [0, 3, 0, 0, 0, 0]> () p = Pad(x, pads) one = Constant <value_ints = [1]> () "
        "n = Shape <start = 1, end = 2> (x) "
        + "".join(
            f"b{i} = Constant <value_ints = [{i}]> () e{i} = Add(n, b{i}) s{i} = Slice(p, b{i}, e{i}, one) "
            f"m{i} = Mul(s{i}, w{i}) "
            for i in range(4)
        )
        + "a = Add(m0, m1) b = Add(m2, m3) c = Add(a, b) g = Sigmoid(c) y = Mul(c, g)"
    )
    causal = 'c, s = com.microsoft.CausalConvWithState <activation = "silu">'
    return race(
        "causal convolution", {"x": x},
        [
            Form(
                "Conv between two transposes",
                f"{turned} u = Conv <group = {channels}, pads = [3, 0]> (t, w) g = Sigmoid(u) c = Mul(u, g) {back}",
                {"w": weight},
            ),
            Form("CausalConvWithState, channels first", f"{turned} {causal}(t, w) {back}", {"w": weight}),
            Form(
                "CausalConvWithState, channels last",
                'y, s = com.microsoft.CausalConvWithState <activation = "silu", channels_last = 1> (x, w)',
                {"w": weight},
            ),
            Form("four shifted products", shifts, taps),
        ],
    )  # fmt: skip


def attention(tokens: int, config: TextConfig) -> list[dict[str, Any]]:
    """Causal attention with grouped heads, [B, H, S, D]."""
    source = np.random.default_rng(0)
    shape = (1, config.num_attention_heads, tokens, config.head_dim)
    key_shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    q = source.standard_normal(shape).astype(np.float32)
    k, v = source.standard_normal((2, *key_shape)).astype(np.float32)
    return race(
        "causal attention", {"q": q, "k": k, "v": v},
        [
            Form("Attention (holds all scores)", "y = Attention <is_causal = 1> (q, k, v)"),
            Form("tiles of queries", "y = clef.CausalAttention(q, k, v)", functions=[causal_attention()]),
        ],
    )  # fmt: skip


SETTINGS: dict[str, dict[str, Any]] = {
    "ours": {},
    "buffers reused": {"enable_mem_reuse": True},
    "memory patterns": {"enable_mem_pattern": True},
    "no arena": {"enable_cpu_mem_arena": False},
    "extended graph optimisation": {"graph_optimization_level": "ORT_ENABLE_EXTENDED"},
}


def one_setting(bundle: Path, name: str, tokens: int) -> dict[str, Any]:
    """A whole pass with one setting changed, in this process."""
    from clef_trt.batch import collate
    from clef_trt.bundle import open_bundle
    from clef_trt.engine import OnnxRuntimeEngine

    made = onnxruntime.SessionOptions

    class Changed(made):  # type: ignore[misc, valid-type]
        """The engine's options, changed after it has set them: when it asks for the last of them."""

        def add_session_config_entry(self, key: str, value: str) -> None:
            super().add_session_config_entry(key, value)
            for field, chosen in SETTINGS[name].items():
                known = onnxruntime.GraphOptimizationLevel
                setattr(self, field, getattr(known, chosen) if isinstance(chosen, str) else chosen)

    onnxruntime.SessionOptions = Changed  # type: ignore[misc]
    opened = open_bundle(bundle)
    engine = OnnxRuntimeEngine(opened, "text", 2)
    inputs = collate([random_record(tokens, 1000, 0)], [], opened.manifest.model.sizes["hidden"])
    seconds = []
    for turn in range(8):
        start = time.perf_counter()
        engine.run(inputs)
        if turn:
            seconds.append(time.perf_counter() - start)
    return {"setting": name, "tokens": tokens} | summary(seconds) | {"peak_mb": resident_mb()}


def main() -> None:
    """Print the tables and, where asked, write one JSON object."""
    parser_ = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser_.add_argument("--tokens", type=int, default=512)
    parser_.add_argument("--bundle", type=Path)
    parser_.add_argument("--json", type=Path)
    parser_.add_argument("--setting", help=argparse.SUPPRESS)
    options = parser_.parse_args()
    if options.setting:
        print(json.dumps(one_setting(options.bundle, options.setting, options.tokens)))
        return
    config = parse_config(*read_shape("0.8b")).text
    hidden, inner = config.hidden_size, config.intermediate_size
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    channels += config.linear_num_value_heads * config.linear_value_head_dim
    rows = [
        *linears(options.tokens, hidden, inner),
        *linears(options.tokens, inner, hidden),
        *delta_rule(options.tokens, config),
        *convolution(options.tokens, channels),
        *attention(options.tokens, config),
    ]
    settings = []
    for name in SETTINGS if options.bundle else ():
        for tokens in (options.tokens, 4 * options.tokens):
            command = [
                sys.executable,
                __file__,
                "--setting",
                name,
                "--bundle",
                str(options.bundle),
                "--tokens",
                str(tokens),
            ]
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            settings.append(json.loads(run.stdout))
            print(settings[-1], flush=True)
    card = machine_card(__doc__.splitlines()[0], "onnxruntime") | {"tokens": options.tokens, "threads": 2}
    if options.json is not None:
        options.json.write_text(json.dumps({"card": card, "rows": rows, "settings": settings}, indent=1) + "\n")


if __name__ == "__main__":
    main()
