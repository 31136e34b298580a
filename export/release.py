"""A published checkpoint: where it lies, what tensors it holds, and the bytes each occupies."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

from clef_trt.bundle import read_safetensors_header
from clef_trt.errors import BundleError, MissingExtraError, ReleaseError

from .config import ReleaseConfig, read_config, read_json

DTYPE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1}
HEAD_FILE, INDEX_FILE, SINGLE_FILE = "joint_head.safetensors", "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """The bytes of one tensor: a file relative to the release's root, and a region of it."""

    file: str
    dtype: str  # as safetensors spells it: BF16, F16, F32, …
    shape: tuple[int, ...]
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True)
class Release:
    """A checked release. Tensors carry the checkpoint's names; those of the head are prefixed with `head.`."""

    folder: Path  # as the caller named it: configuration, tokenizer and processor files lie here
    root: Path  # the real folder under which every weight file lies (a hub cache keeps them in blobs/)
    name: str
    config: ReleaseConfig
    tensors: dict[str, StoredTensor]

    @property
    def weight_files(self) -> list[str]:
        """The weight files, relative to the root."""
        return sorted({tensor.file for tensor in self.tensors.values()})


def open_release(source: str | Path) -> Release:
    """The release in a folder, or of a hub name such as `Cloudflare/clef-flash`.

    Raises ReleaseError when the folder, a file, a shard or a tensor's bytes are missing, or a header is no safetensors.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = _from_hub(str(source))
    config = read_config(folder)
    paths = [*_shards(folder), folder / HEAD_FILE]
    for path in paths:
        if not path.is_file():
            raise ReleaseError(f"the release has no {path.name} (looked in {folder})")
    if not (folder / "tokenizer.json").is_file():
        raise ReleaseError(f"the release has no tokenizer.json (looked in {folder})")
    real = [Path(os.path.realpath(path)) for path in paths]
    root = Path(os.path.commonpath([path.parent for path in real]))
    tensors: dict[str, StoredTensor] = {}
    for path, target in zip(paths, real, strict=True):
        prefix = "head." if path.name == HEAD_FILE else ""
        for name, tensor in stored_tensors(target, target.relative_to(root).as_posix()).items():
            if prefix + name in tensors:
                raise ReleaseError(f"tensor {name} is in {path.name} and in {tensors[prefix + name].file}")
            tensors[prefix + name] = tensor
    return Release(folder, root, _name(folder), config, tensors)


def _from_hub(name: str) -> Path:
    """The local snapshot of a hub repository, downloaded where it is not in the cache."""
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise ReleaseError(f"{name!r} is no folder, and no hub name of the form owner/name")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as fault:
        raise MissingExtraError(f"downloading {name}", "export", fault) from None
    try:
        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pt", "*.gguf"]))
    except Exception as fault:
        raise ReleaseError(f"{name!r} is no folder here and could not be had from the hub: {fault}") from fault


def _name(folder: Path) -> str:
    """The release's own name; a hub cache's folder `models--owner--name/snapshots/<hash>` gives `owner/name`."""
    parts = folder.resolve().parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/")
    return folder.resolve().name


def _shards(folder: Path) -> list[Path]:
    if not (folder / INDEX_FILE).exists():
        if not (folder / SINGLE_FILE).exists():
            raise ReleaseError(f"the release has neither {SINGLE_FILE} nor {INDEX_FILE} (looked in {folder})")
        return [folder / SINGLE_FILE]
    weight_map = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ReleaseError(f"{folder / INDEX_FILE} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ReleaseError(f"{folder / INDEX_FILE} names {name!r}; a shard lies beside its index")
    return [folder / name for name in names]


def stored_tensors(path: Path, relative: str) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; raises ReleaseError when its header is broken or its bytes are missing."""
    try:
        header, start = read_safetensors_header(path)
    except BundleError as fault:
        raise ReleaseError(str(fault)) from None
    size = path.stat().st_size
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise ReleaseError(f"{path}: the entry of {name} is {entry!r}, no safetensors entry") from None
        if start + end > size:
            raise ReleaseError(
                f"{path} is truncated: {name} ends at byte {start + end:,}, the file has {size:,}; download it again"
            )
        if dtype in DTYPE_BYTES and end - begin != prod(shape) * DTYPE_BYTES[dtype]:
            raise ReleaseError(f"{path}: {name} {dtype} {list(shape)} cannot lie in {end - begin:,} bytes")
        tensors[name] = StoredTensor(relative, dtype, shape, start + begin, end - begin)
    return tensors


def safetensors_header(shapes: dict[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, int]:
    """The header of a safetensors file of tensors in this order {name: (dtype, shape)}, and its data's bytes."""
    entries, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + prod(shape) * DTYPE_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, end
