"""The export: release → trace → weights → functions → check → bundle, one step after the other."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from importlib.metadata import version
from math import prod
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import helper

from clef_trt.bundle import (
    FORMAT_VERSION,
    GraphRecord,
    Manifest,
    ModelRecord,
    SourceRecord,
    TensorRecord,
    WeightsRecord,
)
from clef_trt.engine import TEXT_INPUTS
from clef_trt.errors import ExportError
from clef_trt.hashes import sha256_of_files

from .functions import QUERY_TILE, fp32_functions
from .release import Release, open_release
from .trace import trace_text_model
from .weights import copied, fill_parameters, parameter_tensors
from .write import file_records, new_bundle, write_manifest

COPIED_FILES = ("tokenizer.json", "processor_config.json")
WEIGHTS_FILE, TEXT_GRAPH_FILE = "weights.safetensors", "text.onnx"
Progress = Callable[[str], None]


def export(
    source: str | Path,
    target: str | Path,
    *,
    copy_weights: bool = False,
    force: bool = False,
    progress: Progress = lambda _: None,
) -> Manifest:
    """Export a release (a folder or a hub name) into a float32 bundle at `target`, and return its manifest.

    The graph points into the release's own safetensors unless `copy_weights`. Raises ReleaseError for a checkpoint that
    cannot be read, ExportError when `target` exists and `force` is not given, or when a step fails.
    """
    with new_bundle(Path(target), force) as folder:
        progress(f"reading {source}")
        release = open_release(source)
        progress(f"tracing {len(release.config.text.layer_types)} layers")
        model = trace_text_model(release.config)
        tensors = parameter_tensors(release, _parameters(model))
        progress(f"hashing {sum(t.length_bytes for t in tensors.values()) / 1e6:,.0f} MB of weights")
        hashes = hash_weights(release, progress)
        source_record = SourceRecord(release.name, source_sha256(release, hashes))
        if copy_weights:
            progress("copying weights")
            tensors = copied(release, tensors, folder / WEIGHTS_FILE, progress)
            root, recorded_root = folder, "."
            files = file_records(folder, [WEIGHTS_FILE])
        else:
            root, recorded_root = release.root, str(release.root)
            files = file_records(root, sorted({t.file for t in tensors.values()}), hashes)
        fill_parameters(model, tensors)
        progress("writing and checking the graph")
        graph = _write_graph(model, folder / TEXT_GRAPH_FILE)
        for name in COPIED_FILES:
            if (release.folder / name).is_file():
                shutil.copyfile(release.folder / name, folder / name)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            precision="fp32",
            source=source_record,
            weights=WeightsRecord(
                root=recorded_root,
                files=files,
                parameters=sum(prod(t.shape) for t in tensors.values()),
                stored_bytes=sum(t.length_bytes for t in tensors.values()),
            ),
            model=_model_record(release),
            graphs={"text": graph},
            files=file_records(
                folder, sorted(p.name for p in folder.iterdir() if p.name not in (".lock", WEIGHTS_FILE))
            ),
            tools={name: version(name) for name in ("clef-trt", "torch", "onnx", "onnxscript", "onnx-ir")},
        )
        write_manifest(folder, manifest)
    return manifest


def _parameters(model: ir.Model) -> dict[str, tuple[int, ...]]:
    values = list(model.graph.inputs)[len(TEXT_INPUTS) :]
    return {str(value.name): tuple(value.shape.numpy()) if value.shape is not None else () for value in values}


def hash_weights(release: Release, progress: Progress = lambda _: None) -> dict[Path, str]:
    """The SHA-256 of every weight file."""
    return sha256_of_files([release.root / name for name in release.weight_files], progress)


def source_sha256(release: Release, hashes: dict[Path, str]) -> str:
    """SHA-256 over a release's configuration and the hashes of its weight files: the same in any layout on disk."""
    state = hashlib.sha256()
    for name in ("config.json", "joint_head_config.json"):
        state.update((release.folder / name).read_bytes())
    # In the order of the tensors' names: file names differ between layouts.
    for file in dict.fromkeys(tensor.file for _, tensor in sorted(release.tensors.items())):
        state.update(bytes.fromhex(hashes[release.root / file]))
    return state.hexdigest()


def _model_record(release: Release) -> ModelRecord:
    config = release.config
    return ModelRecord(
        hidden_size=config.text.hidden_size,
        max_tokens=config.text.max_position_embeddings,
        attention_heads=config.text.num_attention_heads,
        head_attention_heads=config.head.heads,
        query_tile=QUERY_TILE,
        control_tokens={
            "image": config.image_token_id,
            "video": config.video_token_id,
            "vision_start": config.vision_start_token_id,
            "vision_end": config.vision_end_token_id,
        },
    )


def _write_graph(model: ir.Model, path: Path) -> GraphRecord:
    """Serialise with the local functions attached, and let ONNX check it."""
    proto = ir.to_proto(model)
    proto.functions.extend(fp32_functions())
    check_graph(proto)
    path.write_bytes(proto.SerializeToString())
    inputs = [TensorRecord(name, dtype, list(axes)) for name, (dtype, axes) in TEXT_INPUTS.items()]
    outputs = [TensorRecord("logits", "float32", ["batch", "options"])]
    return GraphRecord(path.name, model.opset_imports[""], inputs, outputs)


def check_graph(proto: onnx.ModelProto) -> None:
    """ONNX's checker and strict shape inference over the graph; raises ExportError with what they found.

    Weights are declared as inputs for the check: their bytes are checked already (`stored_tensors`), and the checker
    would look for them under the working directory and refuse files that have hard links.
    """
    declared = onnx.ModelProto()
    declared.CopyFrom(proto)
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            declared.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    embedded = [t for t in proto.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
    del declared.graph.initializer[:]
    declared.graph.initializer.extend(embedded)
    try:
        onnx.checker.check_model(declared)
        onnx.shape_inference.infer_shapes(declared, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as fault:
        raise ExportError(f"check: ONNX refuses the graph: {fault}") from fault
