"""Bodies of the `clef` operators for ONNX Runtime's CPU provider, where its own operators measure faster."""

from __future__ import annotations

import numpy as np
import onnx

from clef_trt.functions import causal_attention, function, general_functions

from .config import TextConfig
from .int8 import CODES
from .tiles import tile_functions

MICROSOFT = "com.microsoft"


def cpu_functions(config: TextConfig) -> list[onnx.FunctionProto]:
    """The bodies that float32 and int8 graphs carry, their backbone being a loop over tiles of tokens (`tiles`)."""
    backbone = [linear_attention(config), causal_attention(continued=True), *tile_functions()]
    return [*general_functions(), *backbone, row_codes(), turned_row_codes(), int8_product()]


def linear_attention(config: TextConfig) -> onnx.FunctionProto:
    """ContinuedDeltaRule as ONNX Runtime's LinearAttention: token by token, with the state in the cache.

    `operators.gated_delta_rule` from a state float32 [B, Hv, Dk, Dv], which is a further input and output.

    It takes the heads as they lie in memory, where the chunked form has to transpose everything twice. L2 norms are RMS
    norms: x / sqrt(sum x² + e) = x / sqrt(mean x² + e/D) / sqrt(D).
    """
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    group = value_heads // key_heads
    repeat = """
            {0}_column = Unsqueeze({0}_normed, head_axis)
            {0}_heads = Tile({0}_column, repeats)
            {0}_packed = Reshape({0}_heads, packed)"""
    pack = "\n            {0}_packed = Reshape({0}_normed, packed)"
    return function(
        "ContinuedDeltaRule",
        "query, key, value, decay, beta, state",
        f"""
            packed = Constant <value_ints = [0, 0, -1]> ()
            head_axis = Constant <value_ints = [3]> ()
            repeats = Constant <value_ints = [1, 1, 1, {group}, 1]> ()
            query_normed = RMSNormalization <axis = -1, epsilon = {1e-6 / key_dim}> (query, query_scale)
            key_normed = RMSNormalization <axis = -1, epsilon = {1e-6 / key_dim}> (key, key_scale)
            {"".join((repeat if group > 1 else pack).format(name) for name in ("query", "key"))}
            value_packed = Reshape(value, packed)
            output_packed, next_state = {MICROSOFT}.LinearAttention <
                q_num_heads = {value_heads}, kv_num_heads = {value_heads}, scale = 1.0, update_rule = "gated_delta"
            > (query_packed, key_packed, value_packed, state, decay, beta)
            heads = Constant <value_ints = [0, 0, {value_heads}, {value_dim}]> ()
            output = Reshape(output_packed, heads)""",
        {
            "query_scale": np.full(key_dim, 1 / key_dim, np.float32),
            "key_scale": np.full(key_dim, key_dim**-0.5, np.float32),
        },
        outputs="output, next_state",
        imports={MICROSOFT: 1},
    )


ROW_CODES = f"""
            last_axis = Constant <value_ints = [-1]> ()
            smallest = Constant <value_float = 1e-30> ()
            most = Constant <value_float = {float(CODES)}> ()
            highest = ReduceMax(x, last_axis)
            lowest = ReduceMin(x, last_axis)
            opposite = Neg(lowest)
            largest = Max(highest, opposite, smallest)
            inverse = Div(most, largest)
            scaled = Mul(x, inverse)
            unit = Constant <value_float = 1.0> ()
            codes = QuantizeLinear(scaled, unit, zero_point)
            row_scales = Div(largest, most)"""
ZERO_POINT = {"zero_point": np.uint8(CODES + 1)}


def row_codes() -> onnx.FunctionProto:
    """x [..., K] -> codes uint8 [..., K] and row_scales [..., 1]: x is about (codes - (CODES + 1)) * row_scales."""
    return function("RowCodes", "x", ROW_CODES, ZERO_POINT, outputs="codes, row_scales")


def turned_row_codes() -> onnx.FunctionProto:
    """`row_codes` of x [B, S, K] times a block-diagonal matrix, whose one block [C, C] is given; C divides K."""
    turn = """
            kept = Constant <value_ints = [0, 0, -1]> ()
            channels = Shape <start = 0, end = 1> (matrix)
            by_block = Concat <axis = 0> (kept, channels)
            blocks = Reshape(activation, by_block)
            turned = MatMul(blocks, matrix)
            x = Reshape(turned, kept)"""
    return function("TurnedRowCodes", "activation, matrix", turn + ROW_CODES, ZERO_POINT, outputs="codes, row_scales")


def int8_product() -> onnx.FunctionProto:
    """Codes [..., K] and their row_scales [..., 1] times weight int8 [K, N] with weight_scales [N] -> [..., N]."""
    body = f"""
            unit = Constant <value_float = 1.0> ()
            product = {MICROSOFT}.MatMulIntegerToFloat(codes, weight, unit, weight_scales, zero_point)
            output = Mul(product, row_scales)"""
    return function("Int8Product", "codes, row_scales, weight, weight_scales", body, ZERO_POINT, imports={MICROSOFT: 1})
