"""Releases without training: random weights for demonstrations and tests, or sparse files for full-size exports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch._subclasses.fake_tensor import FakeTensorMode

from clef_trt.errors import ReleaseError

from .config import ReleaseConfig, parse_config
from .release import HEAD_FILE, INDEX_FILE, SINGLE_FILE, safetensors_header
from .trace import TextModel, checkpoint_name, vision_checkpoint_name
from .vision import VisionTower

CONTROL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>", "<think>", "</think>",
)  # fmt: skip
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Shapes = dict[str, tuple[int, ...]]


def small_config() -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and joint_head_config.json of a small release for `byte_tokenizer`."""
    vocabulary = 256
    ids = {token: vocabulary + i for i, token in enumerate(CONTROL_TOKENS)}
    text = {
        "hidden_act": "silu", "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "vocab_size": 320,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "attention_bias": False, "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "model_type": "qwen3_5_text",
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "in_channels": 3, "patch_size": 16,
        "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 576, "out_hidden_size": 128,
        "hidden_act": "gelu_pytorch_tanh", "model_type": "qwen3_5_vision",
    }  # fmt: skip
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "dtype": "bfloat16",
        "tie_word_embeddings": False, "text_config": text, "vision_config": vision,
        "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"], "vision_end_token_id": ids["<|vision_end|>"],
    }  # fmt: skip
    head = {"hidden_size": 128, "width": 64, "routing_layers": 2, "layers": 2, "heads": 4, "feedforward": 128}
    return config, head


def byte_tokenizer() -> Tokenizer:
    """Qwen3.5's tokenizer with bytes for a vocabulary: NFC, its split, and the control tokens from id 256 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(token, special=token.startswith("<|"), normalized=False) for token in CONTROL_TOKENS]
    )
    return tokenizer


def write_release(
    folder: Path,
    config: dict[str, Any],
    head: dict[str, Any],
    tokenizer: Tokenizer,
    seed: int | None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """A release of random BF16 weights in the published layout; with seed None the weights are holes in sparse files.

    Raises ReleaseError when `folder` exists and is not empty, or the configuration is one the export refuses.
    """
    backbone, joint_head = _shapes(parse_config(config, head))
    _write_small_files(folder, config, head, tokenizer)
    shards = list(_shards(backbone, shard_bytes))
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    else:
        weight_map = {tensor: file for file, shapes in zip(names, shards, strict=True) for tensor in shapes}
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for file, shapes in zip([*names, HEAD_FILE], [*shards, joint_head], strict=True):
        header, data_bytes = safetensors_header({name: ("BF16", shape) for name, shape in shapes.items()})
        with (folder / file).open("wb") as out:
            out.write(header)
            if generator is None:
                out.truncate(len(header) + data_bytes)
                continue
            for name, shape in shapes.items():
                values = _random(name, shape, generator).to(torch.bfloat16)
                out.write(values.contiguous().view(torch.int16).numpy().tobytes())


def _write_small_files(folder: Path, config: dict[str, Any], head: dict[str, Any], tokenizer: Tokenizer) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ReleaseError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "joint_head_config.json").write_text(json.dumps(head))
    (folder / "processor_config.json").write_text(json.dumps(processor_config(config["vision_config"]), indent=1))
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>", "tokenizer_class": "TokenizersBackend"}
    media = {
        "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(special | media))


def processor_config(vision: dict[str, Any]) -> dict[str, Any]:
    """processor_config.json with the published numbers for a tower of these patches."""
    shared = {
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "resample": 3,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255,
        "merge_size": vision["spatial_merge_size"], "patch_size": vision["patch_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
    }  # fmt: skip
    image = {
        "image_processor_type": "Qwen2VLImageProcessorPil",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    }
    video = {
        "video_processor_type": "Qwen3VLVideoProcessor", "do_sample_frames": True, "fps": 2, "max_frames": 768,
        "min_frames": 4, "size": {"shortest_edge": 4096, "longest_edge": 25165824},
    }  # fmt: skip
    return {"processor_class": "Qwen3VLProcessor", "image_processor": shared | image, "video_processor": shared | video}


def _shapes(config: ReleaseConfig) -> tuple[Shapes, Shapes]:
    """Names and shapes of the backbone file (with the vision tower) and of the head file."""
    with FakeTensorMode():
        text = {checkpoint_name(name): tuple(p.shape) for name, p in TextModel(config).named_parameters()}
        vision = {
            vision_checkpoint_name(name): tuple(p.shape) for name, p in VisionTower(config.vision).named_parameters()
        }
    if config.text.tie_word_embeddings:
        del text["lm_head.weight"]
    head = {name.removeprefix("head."): shape for name, shape in text.items() if name.startswith("head.")}
    return {name: shape for name, shape in text.items() if not name.startswith("head.")} | vision, head


def _shards(shapes: Shapes, shard_bytes: int) -> Iterator[Shapes]:
    shard: Shapes = {}
    size = 0
    for name, shape in shapes.items():
        tensor_bytes = 2 * int(torch.Size(shape).numel())
        if shard and size + tensor_bytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = shape
        size += tensor_bytes
    yield shard


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Values in the range a trained model has, by the role that the name tells: norms near one, decays apart."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("A_log"):
        return torch.empty(shape).uniform_(0.01, 16, generator=generator).log()
    if name.endswith("dt_bias"):
        return 1 + 0.1 * noise
    zero_centred = (
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "q_norm.weight",
        "k_norm.weight",
        "language_model.norm.weight",
    )
    if "norm" in name and name.endswith("weight"):
        return 0.1 * noise if name.endswith(zero_centred) else 1 + 0.1 * noise
    if len(shape) < 2:
        return 0.1 * noise
    fan_in = int(torch.Size(shape[1:]).numel())
    return noise if "embed" in name or name == "lm_head.weight" else noise * fan_in**-0.5
