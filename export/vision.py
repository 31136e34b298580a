"""The vision tower as torch modules made for tracing; parameters carry the checkpoint's names.

One pass takes groups of equal size: an image is one group, a video one group per temporal patch. Attention stays in a
group because the group is the batch axis: there is no mask. Shapes: G groups, P patches of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .backbone import rotated
from .config import VisionConfig
from .operators import full_attention


class PatchEmbedding(nn.Module):
    """The checkpoint's 3-D convolution whose stride is its kernel: one product per flattened patch."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = nn.ParameterDict(
            {"weight": torch.empty(config.hidden_size, *patch), "bias": torch.empty(config.hidden_size)}
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        return functional.linear(pixel_values, self.proj["weight"].flatten(1), self.proj["bias"])


class VisionAttention(nn.Module):
    """Attention of all patches of a group, with rotate-half over the whole head."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).chunk(3, -1))
        query, key = (rotated(part.float(), cos, sin).to(x.dtype) for part in (query, key))
        attended = full_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return self.proj(attended.transpose(1, 2).flatten(2))


class VisionBlock(nn.Module):
    """Attention and tanh-GELU MLP, each behind a LayerNorm and a residual."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.attn = VisionAttention(config)
        self.mlp = nn.ModuleDict(
            {
                "linear_fc1": nn.Linear(config.hidden_size, config.intermediate_size),
                "linear_fc2": nn.Linear(config.intermediate_size, config.hidden_size),
            }
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        inner = functional.gelu(self.mlp["linear_fc1"](self.norm2(x)), approximate="tanh")
        return x + self.mlp["linear_fc2"](inner)


class PatchMerger(nn.Module):
    """LayerNorm per patch, merge_size² consecutive rows joined, a two-layer MLP into the backbone's width."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.joined = config.hidden_size * config.spatial_merge_size**2
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.linear_fc1 = nn.Linear(self.joined, self.joined)
        self.linear_fc2 = nn.Linear(self.joined, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        joined = self.norm(x).reshape(x.shape[0], -1, self.joined)
        return self.linear_fc2(functional.gelu(self.linear_fc1(joined)))


class VisionTower(nn.Module):
    """Patches to rows of the backbone: [G, P, patch values] → [G, P / merge², out_hidden_size].

    Patches lie in merge-block order. `position_rows` and `position_weights` [P, 4] resample the learned table to the
    grid (four rows of the table and their bilinear weights per patch); `positions` [P, 2] are the patch's row and
    column, which turn the heads.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = PatchMerger(config)

    def forward(
        self, pixel_values: Tensor, position_rows: Tensor, position_weights: Tensor, positions: Tensor
    ) -> Tensor:
        x = self.patch_embed(pixel_values.to(self.pos_embed.weight.dtype))
        x = x + (self.pos_embed(position_rows) * position_weights.unsqueeze(-1)).sum(1).to(x.dtype)
        cos, sin = self.rotary_tables(positions)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.merger(x).float()

    def rotary_tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [1, P, 1, D/2], D the head's size: half the angles turn with the row, half with the column."""
        quarter = self.config.hidden_size // self.config.num_heads // 4
        exponents = torch.arange(0, quarter, dtype=torch.float32, device="cpu") / quarter
        frequencies = (1.0 / self.config.rope_theta**exponents).to(positions.device)
        angles = (positions.float().unsqueeze(-1) * frequencies).flatten(1)[None, :, None]
        return angles.cos(), angles.sin()
