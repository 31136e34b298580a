"""Bodies of the `clef` operators as ONNX local functions in plain ONNX operators, computing in float32 or as noted.

A graph carries the general bodies, which ONNX Runtime runs: a Scan over chunks for the delta rule, attention tiled by
query (ONNX Runtime's own causal attention holds the whole [B, H, S, S] matrix). A TensorRT build puts others in their
place: its fused Attention, and a delta rule without a loop (`parallel_delta_rule` says why).
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper, parser

DOMAIN, DOMAIN_VERSION, OPSET = "clef", 1, 23
CHUNK = 64  # tokens whose delta rule is computed at once
QUERY_TILE = 256  # queries attended at once
# Added to the scores of masked keys: finite, so that a row with every key masked stays finite too.
MASKED = -1e30


def general_functions() -> list[onnx.FunctionProto]:
    """The bodies that a graph carries."""
    return [gated_delta_rule(), causal_attention(), masked_attention(), full_attention()]


def tensorrt_functions(max_tokens: int) -> list[onnx.FunctionProto]:
    """The bodies for a TensorRT engine whose longest profile has `max_tokens`."""
    return [
        parallel_delta_rule(max_tokens),
        fused_attention("CausalAttention", causal=True, biased=False),
        fused_attention("MaskedAttention", causal=False, biased=True),
        fused_attention("FullAttention", causal=False, biased=False),
    ]


def block_masks(size: int) -> np.ndarray:
    """float32 [log2(size), size, size]: step i selects the lower-left 2^i block of every block of 2^(i+1) rows."""
    row, column = np.arange(size)[:, None], np.arange(size)[None, :]
    steps = [2**i for i in range(size.bit_length() - 1)]
    masks = [((row // m) % 2 == 1) & ((column // m) % 2 == 0) & (row // (2 * m) == column // (2 * m)) for m in steps]
    return np.stack(masks).astype(np.float32)


def fused_attention(name: str, causal: bool, biased: bool) -> onnx.FunctionProto:
    """Any of the attentions as ONNX's one Attention node, in the type of its inputs: what TensorRT has kernels for."""
    bias = """
        bias_axes = Constant <value_ints = [1, 2]> ()
        bias = Unsqueeze(key_bias, bias_axes)"""
    body = f"""{bias if biased else ""}
        output = Attention <is_causal = {int(causal)}> (query, key, value{", bias" if biased else ""})"""
    return _function(name, "query, key, value" + (", key_bias" if biased else ""), body)


def gated_delta_rule() -> onnx.FunctionProto:
    """`operators.gated_delta_rule`: everything inside a chunk at once, then a Scan over chunks with the state."""
    return _delta_rule("""
        state_shape = Concat <axis = 0> (batch, key_heads, group, key_dim, value_dim)
        initial = ConstantOfShape <value = float[1] {0.0}> (state_shape)
        final_state, chunk_outputs = Scan <num_scan_inputs = 6, body = step (
            float[] state, float[] u_i, float[] w_i, float[] scores_i, float[] q_i, float[] k_i, float[] decay_i
        ) => (float[] next_state, float[] out_i) {
            ws = MatMul(w_i, state)
            new = Sub(u_i, ws)
            out_state = MatMul(q_i, state)
            out_chunk = MatMul(scores_i, new)
            out_i = Add(out_state, out_chunk)
            kept = Mul(state, decay_i)
            update = MatMul(k_i, new)
            next_state = Add(kept, update)
        }> (initial, u, w, scores, q_decayed, k_update, chunk_decay)""")


def parallel_delta_rule(max_tokens: int) -> onnx.FunctionProto:
    """`operators.gated_delta_rule` without a loop, for at most `max_tokens` tokens.

    The state obeys S_n = M_n S_(n-1) + B_n with M = e^G I - K'W and B = K'U, so all states are prefix products, found
    in log2(chunks) steps of doubling: n takes in the result that ends at n - 1, n - 2, n - 4, … TensorRT runs a loop as
    one launch after another, and TensorRT for RTX 1.7 crashes on any loop behind an Attention. M before the first chunk
    is never used, because the state starts at zero: what is shifted in may be zeros.
    """
    steps = max((-(-max_tokens // CHUNK) - 1).bit_length(), 1)
    doubling = "".join(
        f"""
        b_shift{i} = Constant <value_ints = [{2**i}, 0]> ()
        b_padded{i} = Pad(b{i}, b_shift{i}, , zero)
        b_before{i} = Slice(b_padded{i}, zero, chunks, zero)
        m_padded{i} = Pad(m{i}, b_shift{i}, , zero)
        m_before{i} = Slice(m_padded{i}, zero, chunks, zero)
        b_carried{i} = MatMul(m{i}, b_before{i})
        b{i + 1} = Add(b{i}, b_carried{i})
        m{i + 1} = MatMul(m{i}, m_before{i})"""
        for i in range(steps)
    )
    return _delta_rule(f"""
        zero_scalar = Constant <value_int = 0> ()
        one_scalar = Constant <value_int = 1> ()
        key_dim_scalar = Squeeze(key_dim)
        places = Range(zero_scalar, key_dim_scalar, one_scalar)
        place_column = Unsqueeze(places, one)
        diagonal = Equal(places, place_column)
        unit = Cast <to = 1> (diagonal)
        kept = Mul(chunk_decay, unit)
        kw = MatMul(k_update, w)
        m0 = Sub(kept, kw)
        b0 = MatMul(k_update, u)
        {doubling}
        one_back = Constant <value_ints = [1, 0]> ()
        states_padded = Pad(b{steps}, one_back, , zero)
        states = Slice(states_padded, zero, chunks, zero)
        ws = MatMul(w, states)
        new = Sub(u, ws)
        out_state = MatMul(q_decayed, states)
        out_chunk = MatMul(scores, new)
        chunk_outputs = Add(out_state, out_chunk)""")


def _delta_rule(chunks_to_outputs: str) -> onnx.FunctionProto:
    """The delta rule around its recurrence from chunk to chunk, which is given.

    Axes of the chunked tensors: [chunks, batch, key heads, value heads per key head, token in chunk, dim].
    """
    steps = CHUNK.bit_length() - 1
    inverse = "\n".join(
        f"""
        a{i} = Mul(a, block_mask{i})
        ax{i} = MatMul(a{i}, x{i - 1})
        xax{i} = MatMul(x{i - 1}, ax{i})
        x{i} = Sub(x{i - 1}, xax{i})"""
        for i in range(1, steps)
    )
    body = f"""
        batch = Shape <start = 0, end = 1> (value)
        length = Shape <start = 1, end = 2> (value)
        value_heads = Shape <start = 2, end = 3> (value)
        value_dim = Shape <start = 3, end = 4> (value)
        key_heads = Shape <start = 2, end = 3> (key)
        key_dim = Shape <start = 3, end = 4> (key)
        group = Div(value_heads, key_heads)
        one = Constant <value_ints = [1]> ()
        zero = Constant <value_ints = [0]> ()
        last_axis = Constant <value_ints = [-1]> ()
        chunk = Constant <value_ints = [{CHUNK}]> ()
        chunk_less_one = Constant <value_ints = [{CHUNK - 1}]> ()
        rounded = Add(length, chunk_less_one)
        chunks = Div(rounded, chunk)
        padded = Mul(chunks, chunk)
        missing = Sub(padded, length)
        pads = Concat <axis = 0> (zero, missing)
        key_shape = Concat <axis = 0> (batch, chunks, chunk, key_heads, one, key_dim)
        value_shape = Concat <axis = 0> (batch, chunks, chunk, key_heads, group, value_dim)
        gate_shape = Concat <axis = 0> (batch, chunks, chunk, key_heads, group, one)

        epsilon = Constant <value_float = 1e-6> ()
        key_dim_float = Cast <to = 1> (key_dim)
        root = Sqrt(key_dim_float)
        scale = Reciprocal(root)
        {_l2_normalised("query", "q")}
        {_l2_normalised("key", "k")}
        q_scaled = Mul(q_inverse_norm, scale)
        q_normed = Mul(q_float, q_scaled)
        k_normed = Mul(k_float, k_inverse_norm)
        v_float = Cast <to = 1> (value)
        {_chunked("q_normed", "q", "key_shape")}
        {_chunked("k_normed", "k", "key_shape")}
        {_chunked("v_float", "v", "value_shape")}
        {_chunked("decay", "g", "gate_shape")}
        {_chunked("beta", "b", "gate_shape")}

        token_axis = Constant <value_int = 4> ()
        total = CumSum(g, token_axis)
        total_row = Transpose <perm = [0, 1, 2, 3, 5, 4]> (total)
        difference = Sub(total, total_row)
        masked = Constant <value_float = {MASKED}> ()
        causal_difference = Where(lower, difference, masked)
        gamma = Exp(causal_difference)
        decayed = Exp(total)
        last_token = Constant <value_ints = [{CHUNK - 1}]> ()
        final = Gather <axis = 4> (total, last_token)
        left = Sub(final, total)
        remaining = Exp(left)
        chunk_decay = Exp(final)

        k_columns = Transpose <perm = [0, 1, 2, 3, 5, 4]> (k)
        kk = MatMul(k, k_columns)
        kk_gamma = Mul(kk, gamma)
        a = Mul(kk_gamma, b)
        a0 = Mul(a, block_mask0)
        x0 = Sub(identity, a0)
        {inverse}
        inverse = Identity(x{steps - 1})
        b_decayed = Mul(b, decayed)
        bv = Mul(b, v)
        bk = Mul(b_decayed, k)
        u = MatMul(inverse, bv)
        w = MatMul(inverse, bk)
        qk = MatMul(q, k_columns)
        scores = Mul(qk, gamma)
        q_decayed = Mul(q, decayed)
        k_remaining = Mul(k, remaining)
        k_update = Transpose <perm = [0, 1, 2, 3, 5, 4]> (k_remaining)
{chunks_to_outputs}

        by_token = Transpose <perm = [1, 0, 4, 2, 3, 5]> (chunk_outputs)
        padded_shape = Concat <axis = 0> (batch, padded, value_heads, value_dim)
        joined = Reshape(by_token, padded_shape)
        cut = Slice(joined, zero, length, one)
        output = CastLike(cut, value)"""
    constants = {f"block_mask{i}": mask for i, mask in enumerate(block_masks(CHUNK))}
    constants["identity"] = np.eye(CHUNK, dtype=np.float32)
    constants["lower"] = np.tri(CHUNK, dtype=bool)
    return _function("GatedDeltaRule", "query, key, value, decay, beta", body, constants)


def _l2_normalised(source: str, name: str) -> str:
    """`name`_float and its `name`_inverse_norm over the last axis."""
    return f"""
        {name}_float = Cast <to = 1> ({source})
        {name}_square = Mul({name}_float, {name}_float)
        {name}_sum = ReduceSum({name}_square, last_axis)
        {name}_sum_eps = Add({name}_sum, epsilon)
        {name}_norm = Sqrt({name}_sum_eps)
        {name}_inverse_norm = Reciprocal({name}_norm)"""


def _chunked(source: str, name: str, shape: str) -> str:
    """[B, S, …] padded to whole chunks, then [chunks, B, Hk, group, C, D] as `name`."""
    return f"""
        {name}_padded = Pad({source}, pads, , one)
        {name}_split = Reshape({name}_padded, {shape})
        {name} = Transpose <perm = [1, 0, 3, 4, 2, 5]> ({name}_split)"""


def _tiling(length: str) -> str:
    """Sizes of the query tiles for `length` queries: tiles, tile (tokens each), tiled (their product), tile_pads."""
    return f"""
        zero = Constant <value_ints = [0]> ()
        one = Constant <value_ints = [1]> ()
        largest_less_one = Constant <value_ints = [{QUERY_TILE - 1}]> ()
        largest = Constant <value_ints = [{QUERY_TILE}]> ()
        rounded = Add({length}, largest_less_one)
        tiles = Div(rounded, largest)
        spread = Add({length}, tiles)
        spread_less_one = Sub(spread, one)
        tile = Div(spread_less_one, tiles)
        tiled = Mul(tiles, tile)
        missing = Sub(tiled, {length})
        tile_pads = Concat <axis = 0> (zero, missing)"""


def causal_attention() -> onnx.FunctionProto:
    """`operators.causal_attention`, one tile of queries at a time over the keys that tile can see."""
    body = f"""
        batch = Shape <start = 0, end = 1> (key)
        key_heads = Shape <start = 1, end = 2> (key)
        heads = Shape <start = 1, end = 2> (query)
        length = Shape <start = 2, end = 3> (query)
        dim = Shape <start = 3, end = 4> (query)
        group = Div(heads, key_heads)
        {_tiling("length")}
        two = Constant <value_ints = [2]> ()
        dim_float = Cast <to = 1> (dim)
        root = Sqrt(dim_float)
        query_float = Cast <to = 1> (query)
        key_float = Cast <to = 1> (key)
        value_float = Cast <to = 1> (value)
        scaled = Div(query_float, root)
        padded = Pad(scaled, tile_pads, , two)
        split_shape = Concat <axis = 0> (batch, key_heads, group, tiles, tile, dim)
        split = Reshape(padded, split_shape)
        by_tile = Transpose <perm = [3, 0, 1, 2, 4, 5]> (split)
        rows = Mul(group, tile)
        tile_shape = Concat <axis = 0> (tiles, batch, key_heads, rows, dim)
        query_tiles = Reshape(by_tile, tile_shape)
        zero_scalar = Constant <value_int = 0> ()
        one_scalar = Constant <value_int = 1> ()
        tile_scalar = Squeeze(tile)
        tiled_scalar = Squeeze(tiled)
        starts = Range(zero_scalar, tiled_scalar, tile_scalar)
        places = Range(zero_scalar, tile_scalar, one_scalar)
        place_column = Unsqueeze(places, one)
        length_scalar = Squeeze(length)
        masked = Constant <value_float = {MASKED}> ()
        unmasked = Constant <value_float = 0.0> ()
        outputs = Scan <num_scan_inputs = 2, body = one_tile (
            int64[] start, float[] query_tile
        ) => (float[] attended) {{
            reach = Add(start, tile_scalar)
            end = Min(reach, length_scalar)
            end_axis = Reshape(end, one)
            visible_keys = Slice(key_float, zero, end_axis, two)
            visible_values = Slice(value_float, zero, end_axis, two)
            key_columns = Transpose <perm = [0, 1, 3, 2]> (visible_keys)
            raw = MatMul(query_tile, key_columns)
            key_places = Range(zero_scalar, end, one_scalar)
            query_places = Add(place_column, start)
            seen = LessOrEqual(key_places, query_places)
            bias = Where(seen, unmasked, masked)
            grouped_shape = Concat <axis = 0> (batch, key_heads, group, tile, end_axis)
            grouped = Reshape(raw, grouped_shape)
            biased = Add(grouped, bias)
            weights = Softmax <axis = -1> (biased)
            flat_shape = Concat <axis = 0> (batch, key_heads, rows, end_axis)
            flat = Reshape(weights, flat_shape)
            attended = MatMul(flat, visible_values)
        }}> (starts, query_tiles)
        output_split_shape = Concat <axis = 0> (tiles, batch, key_heads, group, tile, dim)
        output_split = Reshape(outputs, output_split_shape)
        by_head = Transpose <perm = [1, 2, 3, 0, 4, 5]> (output_split)
        joined_shape = Concat <axis = 0> (batch, heads, tiled, dim)
        joined = Reshape(by_head, joined_shape)
        cut = Slice(joined, zero, length, two)
        output = CastLike(cut, query)"""
    return _function("CausalAttention", "query, key, value", body)


def masked_attention() -> onnx.FunctionProto:
    """`operators.masked_attention`, one tile of queries at a time over all keys."""
    bias = """
        bias_axes = Constant <value_ints = [1, 2]> ()
        key_bias_float = Cast <to = 1> (key_bias)
        bias = Unsqueeze(key_bias_float, bias_axes)"""
    biased = """
            scores = Add(raw, bias)"""
    return _function("MaskedAttention", "query, key, value, key_bias", bias + _over_all_keys(biased))


def full_attention() -> onnx.FunctionProto:
    """`operators.full_attention`, one tile of queries at a time over all keys."""
    return _function("FullAttention", "query, key, value", _over_all_keys("\n            scores = Identity(raw)"))


def _over_all_keys(scores: str) -> str:
    return f"""
        batch = Shape <start = 0, end = 1> (query)
        heads = Shape <start = 1, end = 2> (query)
        length = Shape <start = 2, end = 3> (query)
        dim = Shape <start = 3, end = 4> (query)
        {_tiling("length")}
        two = Constant <value_ints = [2]> ()
        dim_float = Cast <to = 1> (dim)
        root = Sqrt(dim_float)
        query_float = Cast <to = 1> (query)
        key_float = Cast <to = 1> (key)
        value_float = Cast <to = 1> (value)
        scaled = Div(query_float, root)
        padded = Pad(scaled, tile_pads, , two)
        split_shape = Concat <axis = 0> (batch, heads, tiles, tile, dim)
        split = Reshape(padded, split_shape)
        query_tiles = Transpose <perm = [2, 0, 1, 3, 4]> (split)
        key_columns = Transpose <perm = [0, 1, 3, 2]> (key_float)
        outputs = Scan <num_scan_inputs = 1, body = one_tile (float[] query_tile) => (float[] attended) {{
            raw = MatMul(query_tile, key_columns){scores}
            weights = Softmax <axis = -1> (scores)
            attended = MatMul(weights, value_float)
        }}> (query_tiles)
        by_head = Transpose <perm = [1, 2, 0, 3, 4]> (outputs)
        joined_shape = Concat <axis = 0> (batch, heads, tiled, dim)
        joined = Reshape(by_head, joined_shape)
        cut = Slice(joined, zero, length, two)
        output = CastLike(cut, query)"""


def _function(name: str, inputs: str, body: str, constants: dict[str, np.ndarray] | None = None) -> onnx.FunctionProto:
    text = f'<opset_import: ["" : {OPSET}], domain: "{DOMAIN}">\n{name} ({inputs}) => (output) {{{body}\n}}'
    function = parser.parse_function(text)
    for key, array in (constants or {}).items():
        node = onnx.helper.make_node("Constant", [], [key], value=numpy_helper.from_array(array))
        function.node.insert(0, node)
    return function
