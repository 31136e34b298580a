"""Bodies of the `clef` operators as ONNX local functions in plain ONNX operators, computing in float32 or as noted.

These are the general ones: a Scan over chunks for the delta rule, attention tiled by query (ONNX Runtime's own causal
attention holds the whole [B, H, S, S] matrix). Graphs for ONNX Runtime's CPU provider carry faster ones where it has
them (`clef_export.cpu`), and a TensorRT build puts its own in their place (`tensorrt_functions`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper, parser

DOMAIN, DOMAIN_VERSION, OPSET = "clef", 1, 23
CHUNK = 64  # tokens whose delta rule is computed at once
QUERY_TILE = 256  # queries attended at once
# Added to the scores of masked keys: finite, so that a row with every key masked stays finite too.
MASKED = -1e30


def general_functions() -> list[onnx.FunctionProto]:
    """The bodies that run on any engine."""
    return [gated_delta_rule(), causal_attention(), masked_attention(), full_attention()]


def block_masks(size: int) -> np.ndarray:
    """float32 [log2(size), size, size]: step i selects the lower-left 2^i block of every block of 2^(i+1) rows."""
    row, column = np.arange(size)[:, None], np.arange(size)[None, :]
    steps = [2**i for i in range(size.bit_length() - 1)]
    masks = [((row // m) % 2 == 1) & ((column // m) % 2 == 0) & (row // (2 * m) == column // (2 * m)) for m in steps]
    return np.stack(masks).astype(np.float32)


def gated_delta_rule() -> onnx.FunctionProto:
    """`operators.gated_delta_rule`: everything inside a chunk at once, then a Scan over chunks with the state."""
    return chunked_delta_rule("""
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


def chunked_delta_rule(chunks_to_outputs: str) -> onnx.FunctionProto:
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
    return function("GatedDeltaRule", "query, key, value, decay, beta", body, constants)


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


def causal_attention(continued: bool = False) -> onnx.FunctionProto:
    """`operators.causal_attention`, one tile of queries at a time over the keys that tile can see.

    `continued`: ContinuedAttention, after tokens whose keys and values [B, Hkv, …, D] come as two sequences of tensors,
    further inputs; with those of this call they are further outputs.
    """
    # A sequence shares its tensors from call to call, where one tensor that grows would be copied, and leave holes of
    # every size in the engine's memory. Inference of shapes loses the rank of a sequence's tensors.
    if continued:
        past = """
        next_keys = SequenceInsert(past_keys, key)
        next_values = SequenceInsert(past_values, value)
        of_four_axes = Constant <value_ints = [0, 0, 0, 0]> ()
        joined_keys = ConcatFromSequence <axis = 2> (next_keys)
        all_keys = Reshape(joined_keys, of_four_axes)
        joined_values = ConcatFromSequence <axis = 2> (next_values)
        all_values = Reshape(joined_values, of_four_axes)
        key_float = Cast <to = 1> (all_keys)
        value_float = Cast <to = 1> (all_values)
        key_length = Shape <start = 2, end = 3> (all_keys)"""
    else:
        past = """
        key_float = Cast <to = 1> (key)
        value_float = Cast <to = 1> (value)
        key_length = Shape <start = 2, end = 3> (key)"""
    body = f"""{past}
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
        past_length = Sub(key_length, length)
        end_of_tiles = Add(past_length, tiled)
        first_scalar = Squeeze(past_length)
        end_scalar = Squeeze(end_of_tiles)
        starts = Range(first_scalar, end_scalar, tile_scalar)
        places = Range(zero_scalar, tile_scalar, one_scalar)
        place_column = Unsqueeze(places, one)
        key_length_scalar = Squeeze(key_length)
        masked = Constant <value_float = {MASKED}> ()
        unmasked = Constant <value_float = 0.0> ()
        outputs = Scan <num_scan_inputs = 2, body = one_tile (
            int64[] start, float[] query_tile
        ) => (float[] attended) {{
            reach = Add(start, tile_scalar)
            end = Min(reach, key_length_scalar)
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
    if not continued:
        return function("CausalAttention", "query, key, value", body)
    inputs, outputs = "query, key, value, past_keys, past_values", "output, next_keys, next_values"
    return function("ContinuedAttention", inputs, body, outputs=outputs)


def masked_attention() -> onnx.FunctionProto:
    """`operators.masked_attention`, one tile of queries at a time over all keys."""
    bias = """
        bias_axes = Constant <value_ints = [1, 2]> ()
        key_bias_float = Cast <to = 1> (key_bias)
        bias = Unsqueeze(key_bias_float, bias_axes)"""
    biased = """
            scores = Add(raw, bias)"""
    return function("MaskedAttention", "query, key, value, key_bias", bias + _over_all_keys(biased))


def full_attention() -> onnx.FunctionProto:
    """`operators.full_attention`, one tile of queries at a time over all keys."""
    return function("FullAttention", "query, key, value", _over_all_keys("\n            scores = Identity(raw)"))


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


def function(
    name: str,
    inputs: str,
    body: str,
    constants: Mapping[str, np.ndarray | np.generic] | None = None,
    outputs: str = "output",
    imports: Mapping[str, int] | None = None,
) -> onnx.FunctionProto:
    """A function of the `clef` domain from ONNX's text syntax; `imports`: the opsets it uses beside ONNX's own."""
    opsets = ", ".join(f'"{domain}" : {version}' for domain, version in ({"": OPSET} | dict(imports or {})).items())
    text = f'<opset_import: [{opsets}], domain: "{DOMAIN}">\n{name} ({inputs}) => ({outputs}) {{{body}\n}}'
    made = parser.parse_function(text)
    for node in made.node:  # ONNX Runtime's profile names what it inlined by this
        node.name = f"{name}/{node.output[0]}"
    for key, array in (constants or {}).items():
        node = onnx.helper.make_node("Constant", [], [key], value=numpy_helper.from_array(np.asarray(array)))
        made.node.insert(0, node)
    return made
