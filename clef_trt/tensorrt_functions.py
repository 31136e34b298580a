"""Bodies of the `clef` operators for TensorRT: its fused Attention, and a delta rule without a loop."""

from __future__ import annotations

import onnx

from .functions import CHUNK, chunked_delta_rule, function


def tensorrt_functions(max_tokens: int) -> list[onnx.FunctionProto]:
    """The bodies for a TensorRT engine whose longest profile has `max_tokens`."""
    return [
        parallel_delta_rule(max_tokens),
        fused_attention("CausalAttention", causal=True, biased=False),
        fused_attention("MaskedAttention", causal=False, biased=True),
        fused_attention("FullAttention", causal=False, biased=False),
    ]


def fused_attention(name: str, causal: bool, biased: bool) -> onnx.FunctionProto:
    """Any of the attentions as ONNX's one Attention node, in the type of its inputs: what TensorRT has kernels for."""
    bias = """
        bias_axes = Constant <value_ints = [1, 2]> ()
        bias = Unsqueeze(key_bias, bias_axes)"""
    body = f"""{bias if biased else ""}
        output = Attention <is_causal = {int(causal)}> (query, key, value{", bias" if biased else ""})"""
    return function(name, "query, key, value" + (", key_bias" if biased else ""), body)


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
    return chunked_delta_rule(f"""
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
