"""A release's numbers: config.json and joint_head_config.json as checked, frozen values."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from clef_trt.errors import ReleaseError

ARCHITECTURE = "Qwen3_5ForConditionalGeneration"
LAYER_KINDS = ("linear_attention", "full_attention")
TEXT_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class TextConfig:
    """The Qwen3.5 text backbone, in the names of its config.json."""

    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    attention_bias: bool
    tie_word_embeddings: bool
    rope_theta: float
    rotary_dim: int
    mrope_section: tuple[int, int, int]


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower, in the names of its config.json."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int
    out_hidden_size: int
    rope_theta: float


@dataclass(frozen=True)
class HeadConfig:
    """The joint schema head, in the names of its joint_head_config.json."""

    hidden_size: int
    width: int
    routing_layers: int
    layers: int
    heads: int
    feedforward: int


@dataclass(frozen=True)
class ReleaseConfig:
    """Everything the export reads from a release's configuration files."""

    text: TextConfig
    vision: VisionConfig
    head: HeadConfig
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int


def read_config(folder: Path) -> ReleaseConfig:
    """The configuration of a release folder.

    Raises ReleaseError when a file is missing or is not JSON, the architecture is another one, a number is missing or
    of the wrong type, or the numbers contradict each other.
    """
    config = read_json(folder / "config.json")
    head = read_json(folder / "joint_head_config.json")
    return parse_config(config, head)


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a file of the release."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReleaseError(f"the release has no {path.name} (looked in {path.parent})") from None
    except (ValueError, OSError) as fault:
        raise ReleaseError(f"{path} cannot be read as JSON: {fault}") from None
    if not isinstance(value, dict):
        raise ReleaseError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def parse_config(config: dict[str, Any], head: dict[str, Any]) -> ReleaseConfig:
    """The two configuration objects as one checked value; raises ReleaseError as `read_config` does."""
    architectures = config.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise ReleaseError(f"config.json: architectures is {architectures!r}; this exporter knows [{ARCHITECTURE!r}]")
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ReleaseError("config.json: text_config is missing or not an object")
    result = ReleaseConfig(
        text=_text_config(text, bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))),
        vision=_vision_config(config.get("vision_config")),
        head=HeadConfig(
            **{field.name: _number(head, field.name, "joint_head_config.json") for field in fields(HeadConfig)}
        ),
        **{
            name: _number(config, name, "config.json", minimum=0)
            for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        },
    )
    _check(result)
    return result


def _text_config(text: dict[str, Any], tied: bool) -> TextConfig:
    where = "config.json: text_config"
    if text.get("hidden_act") != "silu":
        raise ReleaseError(f"{where}.hidden_act is {text.get('hidden_act')!r}; this exporter knows 'silu'")
    layer_types = text.get("layer_types")
    if not isinstance(layer_types, list) or not layer_types or any(kind not in LAYER_KINDS for kind in layer_types):
        raise ReleaseError(f"{where}.layer_types is {layer_types!r}; expected a list of {' and '.join(LAYER_KINDS)}")
    if text.get("num_hidden_layers", len(layer_types)) != len(layer_types):
        raise ReleaseError(f"{where}: {text['num_hidden_layers']} num_hidden_layers but {len(layer_types)} layer_types")
    rope = text.get("rope_parameters")
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise ReleaseError(f"{where}.rope_parameters is {rope!r}; this exporter knows rope_type 'default'")
    if not rope.get("mrope_interleaved", True):
        raise ReleaseError(
            f"{where}.rope_parameters.mrope_interleaved is false; this exporter knows interleaved M-RoPE"
        )
    sizes = {name: _number(text, name, where) for name in TEXT_SIZES}
    section = rope.get("mrope_section", [11, 11, 10])
    if not isinstance(section, list) or len(section) != 3 or not all(isinstance(n, int) and n >= 0 for n in section):
        raise ReleaseError(f"{where}.rope_parameters.mrope_section is {section!r}; expected three integers")
    return TextConfig(
        **sizes,
        layer_types=tuple(layer_types),
        rms_norm_eps=_real(text, "rms_norm_eps", where),
        attention_bias=bool(text.get("attention_bias", False)),
        tie_word_embeddings=tied,
        rope_theta=_real(rope, "rope_theta", f"{where}.rope_parameters"),
        rotary_dim=int(sizes["head_dim"] * _real(rope, "partial_rotary_factor", f"{where}.rope_parameters")),
        mrope_section=(section[0], section[1], section[2]),
    )


def _vision_config(vision: Any) -> VisionConfig:
    where = "config.json: vision_config"
    if not isinstance(vision, dict):
        raise ReleaseError(f"{where} is {vision!r}; expected an object")
    if vision.get("hidden_act") != "gelu_pytorch_tanh":
        raise ReleaseError(
            f"{where}.hidden_act is {vision.get('hidden_act')!r}; this exporter knows 'gelu_pytorch_tanh'"
        )
    rope = vision.get("rope_parameters") or {"rope_theta": 10000.0}
    sizes = {
        field.name: _number(vision, field.name, where) for field in fields(VisionConfig) if field.name != "rope_theta"
    }
    return VisionConfig(**sizes, rope_theta=_real(rope, "rope_theta", f"{where}.rope_parameters"))


def _check(config: ReleaseConfig) -> None:
    text, head, vision = config.text, config.head, config.vision
    for larger, smaller in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        if getattr(text, larger) % getattr(text, smaller):
            raise ReleaseError(
                f"config.json: {larger} {getattr(text, larger)} is no multiple of {smaller} {getattr(text, smaller)}"
            )
    if text.rotary_dim % 2 or not 0 < text.rotary_dim <= text.head_dim:
        raise ReleaseError(f"config.json: {text.rotary_dim} rotary dimensions in heads of {text.head_dim}")
    if sum(text.mrope_section) != text.rotary_dim // 2:
        raise ReleaseError(
            f"config.json: mrope_section {list(text.mrope_section)} does not add up to "
            f"{text.rotary_dim // 2}, half the rotary dimensions"
        )
    if head.hidden_size != text.hidden_size:
        raise ReleaseError(
            f"joint_head_config.json: hidden_size {head.hidden_size}, but the backbone's is {text.hidden_size}"
        )
    if vision.out_hidden_size != text.hidden_size:
        raise ReleaseError(
            f"config.json: vision_config.out_hidden_size {vision.out_hidden_size}, "
            f"but the backbone's hidden_size is {text.hidden_size}"
        )
    if vision.hidden_size % (4 * vision.num_heads):
        raise ReleaseError(
            f"config.json: vision_config.hidden_size {vision.hidden_size} "
            f"is no multiple of 4 in each of {vision.num_heads} heads"
        )
    if head.width % head.heads:
        raise ReleaseError(f"joint_head_config.json: width {head.width} is no multiple of heads {head.heads}")


def _number(values: dict[str, Any], name: str, where: str, minimum: int = 1) -> int:
    value = values.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ReleaseError(f"{where}: {name} is {value!r}; expected an integer of at least {minimum}")
    return value


def _real(values: dict[str, Any], name: str, where: str) -> float:
    value = values.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ReleaseError(f"{where}: {name} is {value!r}; expected a positive number")
    return float(value)
