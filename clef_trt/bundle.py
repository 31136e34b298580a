"""A bundle: one folder with graphs, tokenizer and manifest; the manifest is the contract between export and runtime."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .contract import CONTRACTS, SIZES
from .errors import BundleError
from .hashes import sha256_of_files

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
# Files up to this size are hashed in full at every opening; larger ones by `verify --files`.
HASHED_AT_OPENING_BYTES = 64 * 2**20
CONTROL_TOKENS = ("image", "video", "vision_start", "vision_end")
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


@dataclass(frozen=True)
class FileRecord:
    """One file as the export left it. `header_sha256` covers a safetensors header (its length included)."""

    size_bytes: int
    sha256: str
    header_sha256: str | None = None


@dataclass(frozen=True)
class TensorRecord:
    """One input or output of a graph; an axis is a name where it is dynamic, else its size."""

    name: str
    dtype: str
    axes: list[str | int]


@dataclass(frozen=True)
class GraphRecord:
    """One ONNX graph of the bundle."""

    file: str
    parameters: int  # numbers in its weights
    opset: int
    inputs: list[TensorRecord]
    outputs: list[TensorRecord]


@dataclass(frozen=True)
class WeightsRecord:
    """Where the weights lie: an absolute root outside the bundle, or `.` for the bundle itself."""

    root: str
    files: dict[str, FileRecord]  # paths relative to the root
    parameters: int  # numbers in all tensors the graphs use
    stored_bytes: int  # of those tensors


@dataclass(frozen=True)
class SourceRecord:
    """The checkpoint the bundle was made from. `sha256` covers the hashes of its weight files and configuration."""

    name: str
    sha256: str


@dataclass(frozen=True)
class ModelRecord:
    """The numbers of the model that the runtime plans with."""

    sizes: dict[str, int]  # the sizes of contract.SIZES
    max_tokens: int  # positions the model was made for
    vision_table_side: int  # the learned position table has this many positions along each side
    attention_heads: int  # of the backbone
    head_attention_heads: int  # of the joint schema head
    vision_attention_heads: int
    query_tile: int  # queries attended at once by the graph on ONNX Runtime
    control_tokens: dict[str, int]  # image, video, vision_start, vision_end


@dataclass(frozen=True)
class PlanRecord:
    """The plans of one recipe, one per graph. Their sizes and hashes are in the manifest's `files`."""

    recipe: str
    recipe_sha256: str
    target: str
    builder_version: str
    precision: str
    compute_capabilities: list[str]  # of the cards they run on, such as "8.9"
    runtime: dict[str, str]  # recipe.RuntimeSettings, of TensorRT for RTX; else nothing
    profiles: dict[str, dict[str, dict[str, list[int]]]]  # graph → name, in the plan's order → axis → min, opt, max
    files: dict[str, str]  # graph → file of the bundle


@dataclass(frozen=True)
class Manifest:
    """manifest.json."""

    format_version: int
    precision: str
    source: SourceRecord
    weights: WeightsRecord
    model: ModelRecord
    graphs: dict[str, GraphRecord]
    files: dict[str, FileRecord]  # every file of the bundle besides the manifest
    tools: dict[str, str]  # versions the bundle was made with
    plans: list[PlanRecord] = field(default_factory=list)

    def to_json(self) -> str:
        """The manifest as text."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: every file is there and of the recorded size, small ones and headers of the recorded hash."""

    folder: Path
    manifest: Manifest
    weights_root: Path

    def path(self, name: str) -> Path:
        """A file of the bundle."""
        return self.folder / name

    def json(self, name: str) -> Any:
        """The content of a JSON file of the bundle."""
        return json.loads(self.path(name).read_text(encoding="utf-8"))


def open_bundle(folder: str | Path, weights: str | Path | None = None) -> Bundle:
    """The bundle in `folder`; `weights` re-points a moved release (the folder the weight paths are relative to).

    Raises BundleError when the manifest is missing, broken or of another format version, or a file is missing,
    truncated or altered.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    root = Path(weights) if weights is not None else folder / manifest.weights.root  # an absolute root stays itself
    _check_files(folder, manifest.files, "the bundle is damaged: export it again")
    moved = (
        f"the weights are not (or no longer) the ones exported; they were in {manifest.weights.root}: if the release "
        "moved, name its new place (--weights DIR, or weights= in Python), else export again"
    )
    _check_files(root, manifest.weights.files, moved)
    return Bundle(folder, manifest, root)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle folder, its format checked but no other file looked at."""
    path = folder / MANIFEST_FILE
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        what = "is no bundle, or one whose export did not finish" if folder.is_dir() else "does not exist"
        raise BundleError(
            f"{folder} {what}: no {MANIFEST_FILE}; make one with: clef-trt export RELEASE BUNDLE"
        ) from None
    except (ValueError, OSError, RecursionError) as fault:
        raise BundleError(f"{path} cannot be read as JSON: {fault}") from None
    version = value.get("format_version") if isinstance(value, dict) else None
    if version != FORMAT_VERSION:
        raise BundleError(
            f"{path} has format version {version!r}; this clef_trt reads {FORMAT_VERSION}: "
            "install the version that wrote it, or export again"
        )
    manifest: Manifest = _read(Manifest, value, MANIFEST_FILE)
    for name in (*manifest.files, *manifest.weights.files):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise BundleError(f"{path} names {name!r}: only paths inside the bundle or its weights are allowed")
    _check_entries(manifest, path)
    return manifest


def _check_entries(manifest: Manifest, path: Path) -> None:
    """What the runtime looks up is there, and every file it opens is one whose hash is recorded."""
    expected: dict[str, tuple[Iterable[str], Iterable[str]]] = {
        "graphs": (manifest.graphs, CONTRACTS),
        "model.sizes": (manifest.model.sizes, SIZES),
        "model.control_tokens": (manifest.model.control_tokens, CONTROL_TOKENS),
    }
    for name, (found, wanted) in expected.items():
        if set(found) != set(wanted):
            raise BundleError(f"{path}: {name} has {sorted(found)}; expected {sorted(wanted)}")
    opened = {"tokenizer.json", "processor_config.json", *(graph.file for graph in manifest.graphs.values())}
    opened |= {file for plan in manifest.plans for file in plan.files.values()}
    if missing := sorted(opened - manifest.files.keys()):
        raise BundleError(f"{path}: {missing} are used, but not among its files")


def _read(kind: Any, value: Any, where: str) -> Any:
    """`value` as the dataclass or builtin type `kind`; an unknown, missing or mistyped entry is a BundleError."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise BundleError(f"{where} is {value!r}; expected an object")
        hints = typing.get_type_hints(kind)
        required = {
            f.name
            for f in dataclasses.fields(kind)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        }
        if wrong := (value.keys() - hints.keys()) | (required - value.keys()):
            raise BundleError(f"{where}: unknown or missing {sorted(wrong)}; it has {sorted(hints)}")
        return kind(**{name: _read(hints[name], value[name], f"{where}: {name}") for name in value})  # type: ignore[operator]
    if origin is dict:
        if not isinstance(value, dict):
            raise BundleError(f"{where} is {value!r}; expected an object")
        return {key: _read(arguments[1], item, f"{where}: {key}") for key, item in value.items()}
    if origin is list:
        if not isinstance(value, list):
            raise BundleError(f"{where} is {value!r}; expected an array")
        return [_read(arguments[0], item, where) for item in value]
    allowed = arguments if origin in (types.UnionType, typing.Union) else (kind,)
    if kind is not Any and (not isinstance(value, allowed) or isinstance(value, bool)):
        raise BundleError(f"{where} is {value!r}; expected {' or '.join(a.__name__ for a in allowed)}")
    return value


def _check_files(root: Path, files: dict[str, FileRecord], advice: str) -> None:
    hashed = {}
    for name, record in files.items():
        path = root / name
        if not path.is_file():
            raise BundleError(f"{path} is missing; {advice}")
        size = path.stat().st_size
        if size != record.size_bytes:
            raise BundleError(f"{path} has {size:,} bytes, the manifest says {record.size_bytes:,}; {advice}")
        if size < HASHED_AT_OPENING_BYTES:
            hashed[name] = path
        elif record.header_sha256 is not None and safetensors_header_sha256(path) != record.header_sha256:
            raise BundleError(f"{path} has another header than the manifest records; {advice}")
    for name, path in hashed.items():
        if hashlib.sha256(path.read_bytes()).hexdigest() != files[name].sha256:
            raise BundleError(f"{path} was altered: its SHA-256 is not the one in the manifest; {advice}")


def verify_files(bundle: Bundle, progress: typing.Callable[[str], None] = lambda _: None) -> None:
    """Hash every file of the bundle and its weights in full; raises BundleError naming all that differ."""
    expected = {bundle.folder / name: record.sha256 for name, record in bundle.manifest.files.items()}
    expected |= {bundle.weights_root / name: record.sha256 for name, record in bundle.manifest.weights.files.items()}
    found = sha256_of_files(list(expected), progress)
    if altered := [str(path) for path in expected if found[path] != expected[path]]:
        raise BundleError("altered since the export (SHA-256 differs): " + ", ".join(altered))


def read_safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data begins; raises BundleError when it has none."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length:,} bytes")
            text = file.read(length)
        if len(text) != length:
            raise ValueError(f"a header of {len(text):,} bytes where {length:,} are announced")
        header = json.loads(text)
        if not isinstance(header, dict):
            raise ValueError("a header that is no object")
    except (ValueError, struct.error) as fault:
        raise BundleError(f"{path} is no safetensors file, or truncated: {fault}") from None
    return header, 8 + length


def safetensors_header_sha256(path: Path) -> str:
    """SHA-256 of the header of a safetensors file, its eight length bytes included."""
    _, start = read_safetensors_header(path)
    with path.open("rb") as file:
        return hashlib.sha256(file.read(start)).hexdigest()
