"""The Qwen3.5 text backbone as torch modules made for tracing; parameters carry the checkpoint's names.

Written in the dtype of its parameters, with float32 islands where the reference has them (norm statistics, gates,
rotary angles, the recurrent state inside the operator).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import TextConfig
from .operators import causal_attention, gated_delta_rule


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + weight), in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, 1.0 + self.weight.float(), self.eps).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """x / rms(x) * weight * SiLU(gate): the norm of the delta layers, whose weight is not offset by one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = functional.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return (normed * functional.silu(gate.float())).to(x.dtype)


class MLP(nn.Module):
    """SiLU-gated feed-forward."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Attention(nn.Module):
    """Grouped-query causal attention with per-head norms, partial rotary embedding and an output gate."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.head_dim, hidden, bias = config.head_dim, config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, 2 * config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        query = rotated(self.q_norm(query), cos, sin).transpose(1, 2)
        key = rotated(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin).transpose(1, 2)
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        attended = causal_attention(query, key, value).transpose(1, 2)
        return self.o_proj((attended * torch.sigmoid(gate)).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, S, H, D] with its first 2R dimensions turned by rotate-half; cos, sin [B, S, 1, R]."""
    first, second, rest = x.split([cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


class GatedDeltaNet(nn.Module):
    """A gated delta rule layer: projections, causal depthwise convolution, the rule, gated norm."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.key_heads, self.value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.kernel = config.linear_conv_kernel_dim
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.splits = [keys, keys, values]
        self.in_proj_qkv = nn.Linear(config.hidden_size, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, self.value_heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, self.value_heads, bias=False)
        self.conv1d = nn.Conv1d(2 * keys + values, 2 * keys + values, self.kernel, groups=2 * keys + values, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(self.value_heads))
        self.norm = GatedRMSNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = functional.pad(self.in_proj_qkv(x).transpose(1, 2), (self.kernel - 1, 0))
        query, key, value = functional.silu(self.conv1d(mixed)).transpose(1, 2).split(self.splits, -1)
        beta = torch.sigmoid(self.in_proj_b(x)).float()
        step = functional.softplus(self.in_proj_a(x).float() + self.dt_bias.float())
        out = gated_delta_rule(
            query.unflatten(-1, (self.key_heads, self.key_dim)),
            key.unflatten(-1, (self.key_heads, self.key_dim)),
            value.unflatten(-1, (self.value_heads, self.value_dim)),
            -self.A_log.float().exp() * step,
            beta,
        )
        gate = self.in_proj_z(x).unflatten(-1, (self.value_heads, self.value_dim))
        return self.out_proj(self.norm(out, gate).flatten(2))


class DecoderLayer(nn.Module):
    """One layer: a token mixer of its kind and the MLP, each behind a norm and a residual."""

    def __init__(self, config: TextConfig, kind: str) -> None:
        super().__init__()
        if kind == "full_attention":
            self.self_attn = Attention(config)
        else:
            self.linear_attn = GatedDeltaNet(config)
        self.kind = kind
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + (self.self_attn(normed, cos, sin) if self.kind == "full_attention" else self.linear_attn(normed))
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Token ids (and rows for media tokens) to final hidden states [B, S, hidden]."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, kind) for kind in config.layer_types)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: Tensor, position_ids: Tensor, media_embeddings: Tensor, media_rows: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        media = functional.embedding(media_rows.clamp(min=0), media_embeddings)
        x = torch.where((media_rows >= 0).unsqueeze(-1), media.to(x.dtype), x)
        cos, sin = self.rotary_tables(position_ids, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def rotary_tables(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B, S, 1, R/2] of M-RoPE; position_ids [3, B, S] (time, height, width).

        Interleaved sections: of the first 3 * section[1] frequencies 1, 4, … turn with height, of the first
        3 * section[2] 2, 5, … with width, all others with time. The axis is chosen by a gather, not by a product with
        a selection matrix, which would round positions in TF32.
        """
        pairs = self.config.rotary_dim // 2
        _, height, width = self.config.mrope_section
        axes = [1 if i % 3 == 1 and i < 3 * height else 2 if i % 3 == 2 and i < 3 * width else 0 for i in range(pairs)]
        exponents = torch.arange(0, 2 * pairs, 2, dtype=torch.float32, device="cpu") / (2 * pairs)
        frequencies = (1.0 / self.config.rope_theta**exponents).to(position_ids.device)
        positions = position_ids.index_select(0, torch.tensor(axes, device=position_ids.device))  # [R/2, B, S]
        angles = (positions.permute(1, 2, 0).float() * frequencies).unsqueeze(2)
        return angles.cos().to(dtype), angles.sin().to(dtype)
