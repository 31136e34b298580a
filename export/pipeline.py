"""The export: release → trace → weights → functions → check → bundle, one step after the other."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from math import isqrt, prod
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
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
from clef_trt.contract import TEXT, VISION, Contract
from clef_trt.errors import BundleError, ExportError, ReleaseError
from clef_trt.functions import DOMAIN, QUERY_TILE, general_functions
from clef_trt.hashes import sha256_of_files
from clef_trt.processor import read_processors

from .config import ReleaseConfig, read_json
from .cpu import cpu_functions
from .precision import Precision, check_precision, quantise, quantised_linears
from .release import Release, open_release
from .tiles import loop_over_tiles
from .trace import checkpoint_name, model_sizes, trace_text, trace_vision, vision_checkpoint_name
from .weights import copied, fill_parameters, stored_as
from .write import file_records, new_bundle, write_manifest

MEDIA_TOKENS = {
    "<|image_pad|>": "image_token_id",
    "<|video_pad|>": "video_token_id",
    "<|vision_start|>": "vision_start_token_id",
    "<|vision_end|>": "vision_end_token_id",
}
COPIED_FILES = ("tokenizer.json", "processor_config.json")
WEIGHTS_FILE = "weights.safetensors"
TOOLS = ("clef-trt", "torch", "onnx", "onnxscript", "onnx-ir")
Progress = Callable[[str], None]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class GraphPlan:
    """How one graph of a bundle comes about."""

    contract: Contract
    trace: Callable[[ReleaseConfig, torch.dtype], ir.Model]
    checkpoint_name: Callable[[str], str]  # of a parameter


GRAPHS = (GraphPlan(TEXT, trace_text, checkpoint_name), GraphPlan(VISION, trace_vision, vision_checkpoint_name))


def export(
    source: str | Path,
    target: str | Path,
    *,
    precision: Precision = Precision("fp32"),
    copy_weights: bool = False,
    force: bool = False,
    progress: Progress = lambda _: None,
) -> Manifest:
    """Export a release (a folder or a hub name) into a bundle of one precision at `target`, and return its manifest.

    The graphs point into the release's own safetensors unless `copy_weights`; weights that are quantised are written.
    An int8 bundle holds all its weights, because ONNX Runtime reads them from one folder. Raises ReleaseError for a
    checkpoint that cannot be read, ExportError when `target` exists and `force` is not given, or when a step fails.
    """
    copy_weights = copy_weights or precision.name == "int8"
    with new_bundle(Path(target), force) as folder:
        progress(f"reading {source}")
        release = open_release(source)
        check_media(release)
        check_precision(precision, lambda: source_sha256(release, hash_weights(release, progress)))
        progress(f"tracing {len(release.config.text.layer_types)} layers and {release.config.vision.depth} of vision")
        models = {plan.contract.name: plan.trace(release.config, precision.dtype) for plan in GRAPHS}
        shapes = {plan.contract.name: _shapes(models[plan.contract.name], plan) for plan in GRAPHS}
        tensors = stored_as(release, {name: shape for part in shapes.values() for name, shape in part.items()})
        parameters = sum(prod(tensor.shape) for tensor in set(tensors.values()))
        text = models[TEXT.name]
        linears = quantised_linears(precision, text, release)
        if linears:
            progress(f"quantising {len(linears)} linears to {precision.name}")
            stored = {linear.weight: tensors.pop(checkpoint_name(linear.weight)) for linear in linears}
            quantise(precision, text, linears, release, stored, folder, progress)
        used = set(tensors.values())
        progress(f"hashing the weight files, {sum(t.length_bytes for t in used) / 1e6:,.0f} MB of them used")
        hashes = hash_weights(release, progress)
        own_weights = [] if precision.quantised_file is None else [precision.quantised_file]
        if copy_weights:
            progress("copying weights")
            tensors = copied(release, tensors, folder / WEIGHTS_FILE, progress)
            recorded_root, files = ".", file_records(folder, [WEIGHTS_FILE, *own_weights])
            own_weights.append(WEIGHTS_FILE)
        else:
            recorded_root = str(release.root)
            files = file_records(release.root, sorted({tensor.file for tensor in used}), hashes)
        progress("writing and checking the graphs")
        on_cpu = precision.name in ("fp32", "int8")
        bodies = cpu_functions(release.config.text) if on_cpu else general_functions()
        graphs = {}
        for plan in GRAPHS:
            name, model = plan.contract.name, models[plan.contract.name]
            names = [str(value.name) for value in _weights(model, plan)]
            fill_parameters(model, {parameter: tensors[plan.checkpoint_name(parameter)] for parameter in names})
            if on_cpu and plan.contract is TEXT:
                loop_over_tiles(model)
            graphs[name] = _write_graph(model, plan.contract, folder / f"{name}.onnx", shapes[name], bodies)
        for file in COPIED_FILES:
            shutil.copyfile(release.folder / file, folder / file)
        recorded = own_weights if copy_weights else []
        own = sorted(path.name for path in folder.iterdir() if path.name not in recorded)
        stored_bytes = sum(tensor.length_bytes for tensor in used)
        stored_bytes += sum((folder / name).stat().st_size for name in own_weights if name != WEIGHTS_FILE)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            precision=precision.name,
            source=SourceRecord(release.name, source_sha256(release, hashes)),
            weights=WeightsRecord(recorded_root, files, parameters, stored_bytes),
            model=_model_record(release),
            graphs=graphs,
            files=file_records(folder, own),
            tools={name: version(name) for name in TOOLS},
        )
        write_manifest(folder, manifest)
    return manifest


def _weights(model: ir.Model, plan: GraphPlan) -> list[ir.Value]:
    return list(model.graph.inputs)[len(plan.contract.inputs) :]


def _shapes(model: ir.Model, plan: GraphPlan) -> Shapes:
    """Shapes of a traced graph's weights, by their names in the checkpoint."""
    shapes = {}
    for value in _weights(model, plan):
        assert value.shape is not None, "the trace gives every parameter a shape"
        shapes[plan.checkpoint_name(str(value.name))] = tuple(value.shape.numpy())
    return shapes


def check_media(release: Release) -> None:
    """Raises ReleaseError where tokenizer, processor and configuration disagree about media."""
    config, vision = release.config, release.config.vision
    try:
        image, video = read_processors(read_json(release.folder / "processor_config.json"))
    except BundleError as fault:
        raise ReleaseError(str(fault)) from None
    for name in ("patch_size", "temporal_patch_size"):
        for processor in (image, video):
            if getattr(processor, name) != getattr(vision, name):
                raise ReleaseError(f"processor_config.json: {name} is not {getattr(vision, name)} as in config.json")
    if {image.merge_size, video.merge_size} != {vision.spatial_merge_size}:
        raise ReleaseError(f"processor_config.json: merge_size is not {vision.spatial_merge_size} as in config.json")
    if isqrt(vision.num_position_embeddings) ** 2 != vision.num_position_embeddings:
        raise ReleaseError(f"config.json: {vision.num_position_embeddings} position embeddings are no square table")
    added = {
        token["content"]: token["id"] for token in read_json(release.folder / "tokenizer.json").get("added_tokens", [])
    }
    for token, expected in MEDIA_TOKENS.items():
        if added.get(token) != getattr(config, expected):
            raise ReleaseError(
                f"tokenizer.json gives {token} the id {added.get(token)}; config.json has {expected} "
                f"{getattr(config, expected)}"
            )


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
        sizes=model_sizes(config),
        max_tokens=config.text.max_position_embeddings,
        attention_heads=config.text.num_attention_heads,
        head_attention_heads=config.head.heads,
        vision_attention_heads=config.vision.num_heads,
        vision_table_side=isqrt(config.vision.num_position_embeddings),
        query_tile=QUERY_TILE,
        control_tokens={
            "image": config.image_token_id,
            "video": config.video_token_id,
            "vision_start": config.vision_start_token_id,
            "vision_end": config.vision_end_token_id,
        },
    )


def _write_graph(
    model: ir.Model, contract: Contract, path: Path, shapes: Shapes, bodies: list[onnx.FunctionProto]
) -> GraphRecord:
    """Serialise with those of the bodies that it uses attached, and let ONNX check it."""
    proto = ir.to_proto(model)
    used = {node.op_type for node in model.graph.all_nodes() if node.domain == DOMAIN}
    proto.functions.extend(body for body in bodies if body.name in used)
    known = {opset.domain for opset in proto.opset_import}
    wanted = {(opset.domain, opset.version) for body in proto.functions for opset in body.opset_import}
    proto.opset_import.extend(helper.make_opsetid(*opset) for opset in sorted(wanted) if opset[0] not in known)
    check_graph(proto)
    path.write_bytes(proto.SerializeToString())
    return GraphRecord(
        file=path.name,
        parameters=sum(prod(shape) for shape in shapes.values()),
        opset=model.opset_imports[""],
        inputs=[TensorRecord(name, dtype, list(axes)) for name, (dtype, axes) in contract.inputs.items()],
        outputs=[TensorRecord(contract.output, "float32", list(contract.output_axes))],
    )


def check_graph(proto: onnx.ModelProto) -> None:
    """ONNX's checker and strict shape inference over the graph; raises ExportError with what they found.

    Weights are declared as inputs for the check: their bytes are checked already (`release.stored_tensors`), and the
    checker would look for them under the working directory and refuse files that have hard links.
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
