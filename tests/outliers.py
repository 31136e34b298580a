"""A random release with planted outlier channels, as trained checkpoints have and random ones do not."""

from __future__ import annotations

from pathlib import Path

import torch
from clef_export.random_release import byte_tokenizer, small_config, write_release
from safetensors.torch import load_file, save_file

CHANNELS = (5, 40, 77)
RESIDUAL, NORMED = 300.0, 30.0  # times the other channels, in the residual stream and behind its norms
READ_NORMED = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")


def write_outlier_release(folder: Path, seed: int) -> None:
    """Three channels of the residual stream hundreds of times the others, tens of times behind the norms.

    The norms bring the other channels back to one, and the linears that read them take the outliers with small
    weights, so that the outliers cost precision without drowning the rest.
    """
    config, head = small_config()
    write_release(folder, config, head, byte_tokenizer(), seed)
    weights = load_file(folder / "model.safetensors")
    channels = torch.tensor(CHANNELS)
    level = RESIDUAL * (len(CHANNELS) / config["text_config"]["hidden_size"]) ** 0.5  # the rms that the outliers make
    for name, weight in weights.items():
        if name.endswith("embed_tokens.weight"):
            weight[:, channels] *= RESIDUAL
        elif name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight", "language_model.norm.weight")):
            scale = (1 + weight.float()) * level  # the norm multiplies with 1 + weight
            scale[channels] *= (1 if name.endswith("language_model.norm.weight") else NORMED) / RESIDUAL
            weight.copy_(scale - 1)
        elif (
            name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight"))
            or ".in_proj_" in name
        ):
            weight[:, channels] /= NORMED
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
