"""The joint schema head as matrices: all options of a record lie on one axis, so there is no loop over questions.

Parameters carry the names of joint_head.safetensors. Shapes: B records, S tokens, Q questions, N options, H hidden,
W width. Padding: an empty span for questions and options, question -1 for options.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from clef_trt.functions import MASKED

from .config import HeadConfig
from .operators import masked_attention


class MultiheadAttention(nn.Module):
    """`nn.MultiheadAttention` by its parameters (in_proj_weight [3W, W]), over keys that a bias masks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, query: Tensor, memory: Tensor, key_bias: Tensor) -> Tensor:
        """query [B, N, W], memory [B, S, W], key_bias [B, S] -> [B, N, W]."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k, v = (
            functional.linear(x, weight, bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x, weight, bias in zip((query, memory, memory), weights, biases, strict=True)
        )
        return self.out_proj(masked_attention(q, k, v, key_bias).transpose(1, 2).flatten(2))


class FloatLinear(nn.Linear):
    """A linear that computes in float32, whatever the dtype of its input and parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.float(), self.weight.float(), self.bias.float())


class FloatLayerNorm(nn.LayerNorm):
    """A norm that computes in float32, whatever the dtype of its input and parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class EvidenceLayer(nn.Module):
    """Options read the memory; they never see each other."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.query_norm = nn.LayerNorm(config.width)
        self.memory_norm = nn.LayerNorm(config.width)
        self.attention = MultiheadAttention(config.width, config.heads)
        self.feedforward_norm = nn.LayerNorm(config.width)
        # Index 3 is the second Linear in the checkpoint: 2 was a dropout.
        self.feedforward = nn.ModuleDict(
            {"0": nn.Linear(config.width, config.feedforward), "3": nn.Linear(config.feedforward, config.width)}
        )

    def forward(self, options: Tensor, memory: Tensor, memory_bias: Tensor) -> Tensor:
        options = options + self.attention(self.query_norm(options), self.memory_norm(memory), memory_bias)
        inner = functional.gelu(self.feedforward["0"](self.feedforward_norm(options)))
        return options + self.feedforward["3"](inner)


class DecoderLayer(nn.Module):
    """`nn.TransformerDecoderLayer` with norm_first and GELU: fields see each other, then the memory."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = MultiheadAttention(config.width, config.heads)
        self.multihead_attn = MultiheadAttention(config.width, config.heads)
        self.linear1 = nn.Linear(config.width, config.feedforward)
        self.linear2 = nn.Linear(config.feedforward, config.width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(config.width) for _ in range(3))

    def forward(self, fields: Tensor, field_bias: Tensor, memory: Tensor, memory_bias: Tensor) -> Tensor:
        normed = self.norm1(fields)
        fields = fields + self.self_attn(normed, normed, field_bias)
        fields = fields + self.multihead_attn(self.norm2(fields), memory, memory_bias)
        return fields + self.linear2(functional.gelu(self.linear1(self.norm3(fields))))


class JointSchemaHead(nn.Module):
    """Final hidden states to one logit per option."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.width
        self.hidden_norm = nn.LayerNorm(hidden)
        self.memory_projection = nn.Linear(hidden, width, bias=False)
        self.question_projection = nn.Linear(hidden, width, bias=False)
        self.option_question_projection = nn.Linear(hidden, width, bias=False)
        self.global_projection = nn.Linear(hidden, width, bias=False)
        self.option_context_projection = nn.Linear(hidden, width, bias=False)
        self.option_lexical_projection = nn.Linear(hidden, width, bias=False)
        self.type_embedding = nn.Embedding(3, width)
        self.evidence_layers = nn.ModuleList(EvidenceLayer(config) for _ in range(config.routing_layers))
        self.option_summary_norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        # Scores in float32 in every precision: a step of BF16 at a logit of 4 would be 0.03, the margin of a decision.
        self.field_norm = FloatLayerNorm(width)
        self.option_norm = FloatLayerNorm(width)
        self.residual_scorer = nn.ModuleDict({"0": FloatLinear(4 * width, width), "3": FloatLinear(width, 1)})
        self.prior_logit_scale = nn.Parameter(torch.empty(()))
        self.joint_logit_scale = nn.Parameter(torch.empty(()))
        self.residual_gate = nn.Parameter(torch.empty(()))

    def forward(
        self,
        hidden: Tensor,  # [B, S, H]
        lexical_rows: Tensor,  # [B, S, H] output embedding of each token
        sequence_lengths: Tensor,  # [B]
        question_spans: Tensor,  # [B, Q, 2]
        question_types: Tensor,  # [B, Q]
        option_spans: Tensor,  # [B, N, 2]
        option_questions: Tensor,  # [B, N]
    ) -> Tensor:  # [B, N] float32
        normed = self.hidden_norm(hidden)
        memory = self.memory_projection(normed)
        token = torch.arange(hidden.shape[1], device=hidden.device)
        memory_bias = key_bias(token < sequence_lengths.unsqueeze(-1), memory.dtype)
        field_bias = key_bias(question_spans[..., 1] > question_spans[..., 0], memory.dtype)
        last = (sequence_lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, normed.shape[-1])
        summary = normed.gather(1, last)  # [B, 1, H] the global vector: the last real token

        question = span_means(question_spans, token, normed)  # [B, Q, H]
        context_means = span_means(option_spans, token, normed)  # [B, N, H]
        lexical = span_means(option_spans, token, lexical_rows)  # [B, N, H]
        owner = Owner(option_questions, question.shape[1])

        options = (
            self.option_context_projection(context_means)
            + self.option_lexical_projection(lexical)
            + owner.of(self.option_question_projection(question))
        )
        for layer in self.evidence_layers:
            options = layer(options, memory, memory_bias)

        base = self.question_projection(question)
        scores = (base @ options.transpose(1, 2)).float() / math.sqrt(base.shape[-1])  # [B, Q, N]
        weights = scores.masked_fill(~owner.mask, MASKED).softmax(-1).to(options.dtype)
        fields = (
            base
            + self.option_summary_norm(weights @ options)
            + self.global_projection(summary)
            + self.type_embedding(question_types)
        )
        for layer in self.layers:
            fields = layer(fields, field_bias, memory, memory_bias)

        prior = cosine(lexical, owner.of(question + summary), eps=1e-12)
        field, option = owner.of(self.field_norm(fields)), self.option_norm(options)
        features = torch.cat((field, option, field * option, (field - option).abs()), -1)
        residual = self.residual_scorer["3"](functional.gelu(self.residual_scorer["0"](features))).squeeze(-1)
        joint = logit_scale(self.joint_logit_scale) * cosine(field, option, eps=1e-8) + residual
        logits = logit_scale(self.prior_logit_scale) * prior + torch.sigmoid(self.residual_gate.float()) * joint
        # Padding takes the lowest finite value: it has no part in a softmax over the whole axis.
        return logits.masked_fill(option_questions < 0, torch.finfo(torch.float32).min)


class Owner:
    """Which question each option belongs to: option_questions [B, N], -1 for padding."""

    def __init__(self, option_questions: Tensor, questions: int) -> None:
        self.index = option_questions.clamp(min=0).unsqueeze(-1)
        index = torch.arange(questions, device=option_questions.device)
        self.mask = index[:, None] == option_questions.unsqueeze(1)  # [B, Q, N]

    def of(self, per_question: Tensor) -> Tensor:
        """[B, Q, D] -> [B, N, D], each option's question's row (a gather: exact in every precision)."""
        return per_question.gather(1, self.index.expand(-1, -1, per_question.shape[-1]))


def key_bias(real: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is real, MASKED where it is padding."""
    return torch.where(real, 0.0, MASKED).to(dtype)


def span_means(spans: Tensor, token: Tensor, rows: Tensor) -> Tensor:
    """Means of rows [B, S, H] over spans [B, K, 2], as one matrix product -> [B, K, H]; zero for an empty span."""
    start, end = spans[..., :1], spans[..., 1:]
    inside = (token >= start) & (token < end)
    sums = inside.to(rows.dtype) @ rows  # of zeros and ones: exact weights in every precision
    return (sums.float() / (end - start).clamp(min=1)).to(rows.dtype)


def cosine(left: Tensor, right: Tensor, eps: float) -> Tensor:
    """Cosine over the last axis in float32, each norm at least eps."""
    left, right = left.float(), right.float()
    norms = (x.square().sum(-1).sqrt().clamp(min=eps) for x in (left, right))
    return (left * right).sum(-1) / math.prod(norms)


def logit_scale(parameter: Tensor) -> Tensor:
    """e^min(parameter, ln 100)."""
    return parameter.float().clamp(max=math.log(100.0)).exp()
