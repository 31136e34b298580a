"""The operators that stay whole in the traced graph, and what each computes.

While torch exports, each becomes one node of the private ONNX domain `clef` (its body: `functions`), so that a graph
can be given another body for another engine, or a plugin, without being traced again. Otherwise it computes in eager
torch, for parity tests and the collection of FP8 ranges.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from clef_trt.functions import CHUNK, block_masks


def _node(name: str, inputs: tuple[Tensor, ...], like: Tensor) -> Tensor:
    """A symbolic node of the `clef` domain whose output has the type and shape of `like`."""
    return torch.onnx.ops.symbolic(f"clef::{name}", inputs, dtype=like.dtype, shape=like.shape, version=1)


def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule of Qwen3.5 from a zero state, with L2-normalised queries and keys, in its chunked form.

    query, key [B, S, Hk, Dk]; value [B, S, Hv, Dv]; decay (log space, <= 0) and beta [B, S, Hv] -> [B, S, Hv, Dv] in
    value's dtype, computed in float32. Hv is a multiple of Hk; each key head serves Hv / Hk consecutive value heads.
    """
    if torch.compiler.is_exporting():
        return _node("GatedDeltaRule", (query, key, value, decay, beta), like=value)
    batch, length, key_heads, key_dim = query.shape
    value_heads, value_dim = value.shape[2:]
    group, pad = value_heads // key_heads, -length % CHUNK
    chunks = (length + pad) // CHUNK

    def chunked(x: Tensor, *heads: int) -> Tensor:  # [B, S, H, D] -> [chunks, B, *heads, C, D]
        x = functional.pad(x.float(), (0, 0, 0, 0, 0, pad)).reshape(batch, chunks, CHUNK, *heads, x.shape[-1])
        return x.permute(1, 0, *range(3, 3 + len(heads)), 2, x.dim() - 1)

    q = chunked(_l2_normalised(query) * key_dim**-0.5, key_heads, 1)
    k = chunked(_l2_normalised(key), key_heads, 1)
    v = chunked(value, key_heads, group)
    total = chunked(decay.unsqueeze(-1), key_heads, group).cumsum(-2)  # [chunks, B, Hk, group, C, 1]
    b = chunked(beta.unsqueeze(-1), key_heads, group)

    lower = torch.ones(CHUNK, CHUNK, device=query.device).tril()
    gamma = (total - total.transpose(-1, -2)).masked_fill(lower == 0, float("-inf")).exp()
    a = b * (k @ k.transpose(-1, -2)) * gamma * lower.tril(-1)
    inverse = _unit_lower_inverse(a)
    u, w = inverse @ (b * v), inverse @ (b * total.exp() * k)
    scores = (q @ k.transpose(-1, -2)) * gamma
    q, k = q * total.exp(), k * (total[..., -1:, :] - total).exp()
    state = query.new_zeros(batch, key_heads, group, key_dim, value_dim, dtype=torch.float32)
    outputs = []
    for i in range(chunks):
        new = u[i] - w[i] @ state
        outputs.append(q[i] @ state + scores[i] @ new)
        state = total[i, ..., -1:, :].exp() * state + k[i].transpose(-1, -2) @ new
    out = torch.stack(outputs, 1).permute(0, 1, 4, 2, 3, 5)  # [B, chunks, C, Hk, group, Dv]
    return out.reshape(batch, length + pad, value_heads, value_dim)[:, :length].to(value.dtype).contiguous()


def _l2_normalised(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)^-1 for strictly lower a [..., C, C], by joining the inverses of blocks of 1, 2, 4, … rows.

    Exact in log2(C) steps and stable on correlated keys, where the product (I - a)(I + a²)(I + a⁴)… overflows.
    """
    inverse = torch.eye(CHUNK, device=a.device, dtype=a.dtype).expand_as(a)
    for mask in torch.from_numpy(block_masks(CHUNK)).to(a):
        inverse = inverse - inverse @ (a * mask) @ inverse
    return inverse


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention where query i sees keys 0 … i, scaled by D^-1/2.

    query [B, H, S, D]; key, value [B, Hkv, S, D], each key head serving H / Hkv consecutive query heads -> as query.
    """
    if torch.compiler.is_exporting():
        return _node("CausalAttention", (query, key, value), like=query)
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor) -> Tensor:
    """Softmax attention over the keys of each record, scaled by D^-1/2.

    query [B, H, N, D]; key, value [B, H, S, D]; key_bias [B, S], added to the scores: 0 or MASKED -> as query.
    """
    if torch.compiler.is_exporting():
        return _node("MaskedAttention", (query, key, value, key_bias), like=query)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=key_bias[:, None, None, :])


def full_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention of every query over every key, scaled by D^-1/2; all [B, H, P, D]."""
    if torch.compiler.is_exporting():
        return _node("FullAttention", (query, key, value), like=query)
    return functional.scaled_dot_product_attention(query, key, value)
