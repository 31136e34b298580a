"""A bundle of small hand-made graphs that builds in a tenth of a second, and a recipe for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import parser

from clef_trt.bundle import (
    CONTROL_TOKENS,
    FORMAT_VERSION,
    Bundle,
    FileRecord,
    GraphRecord,
    Manifest,
    ModelRecord,
    SourceRecord,
    WeightsRecord,
    open_bundle,
)
from clef_trt.contract import CONTRACTS
from clef_trt.hashes import sha256_of_files
from clef_trt.recipe import BuildSettings, Drift, Recipe, RecipeProfile, RuntimeSettings

HIDDEN, PATCH_VALUES = 8, 12
SHORT = {
    "batch": (1, 1, 2),
    "sequence": (1, 64, 128),
    "questions": (1, 2, 4),
    "options": (1, 4, 16),
    "media": (1, 1, 64),
}
PROFILES = {
    "text": (RecipeProfile("short", SHORT), RecipeProfile("long", SHORT | {"sequence": (1, 128, 256)}, optional=True)),
    "vision": (RecipeProfile("small", {"groups": (1, 1, 2), "patches": (4, 16, 64)}),),
}
TEXT_BODY = """
    last = Constant <value_ints = [-1]> ()
    ends = Cast <to = 1> (option_spans)
    sums = ReduceSum <keepdims = 0> (ends, last)
    row = Constant <value_int = 0> ()
    factor = Gather (weight, row)
    factor_float = Cast <to = 1> (factor)
    logits = Mul(sums, factor_float)"""
VISION_BODY = """
    values = Cast <to = 16> (pixel_values)
    rows = MatMul(values, weight)
    split = Constant <value_ints = [0, -1, 4, 8]> ()
    blocks = Reshape(rows, split)
    block_axis = Constant <value_ints = [2]> ()
    means = ReduceMean <keepdims = 0> (blocks, block_axis)
    embeddings = Cast <to = 1> (means)"""


def recipe(name: str = "test", precision: str = "bf16", cards: tuple[str, ...] = ("8.9", "12.0")) -> Recipe:
    settings = BuildSettings(
        workspace_gib=0.25,
        optimization_level=0,
        tf32=False,
        profiles=PROFILES,
        compute_capabilities=cards,
        runtime=RuntimeSettings("DISABLED", "EAGER"),
    )
    return Recipe(name, "0" * 64, "tensorrt_rtx", precision, Drift(0.99, 0.1, 0.01), settings)


def write_bundle(folder: Path, text: str = TEXT_BODY, own_vision_weights: bool = False) -> Bundle:
    """A bundle of two hand-made graphs in BF16; one weight per graph, beside the bundle as a release's are.

    `own_vision_weights`: the bundle holds those of the vision graph itself.
    """
    release = folder.parent / f"{folder.name}-release"
    for place in (folder, release):
        place.mkdir()
    bodies = {"text": (text, (4,)), "vision": (VISION_BODY, (PATCH_VALUES, HIDDEN))}
    places = {"text": release, "vision": folder if own_vision_weights else release}
    elements = {"float32": "float", "int64": "int64"}
    sizes = {"hidden": HIDDEN, "patch_values": PATCH_VALUES}
    graphs = {}
    for name, (body, shape) in bodies.items():
        contract = CONTRACTS[name]
        inputs = ", ".join(
            f"{elements[dtype]}[{', '.join(str(sizes.get(str(axis), axis)) for axis in axes)}] {tensor}"
            for tensor, (dtype, axes) in contract.inputs.items()
        )
        output = (
            f"float[{', '.join(str(sizes.get(str(axis), axis)) for axis in contract.output_axes)}] {contract.output}"
        )
        model = parser.parse_model(
            f'<ir_version: 10, opset_import: ["" : 23, "clef" : 1]>\n{name} ({inputs}) => ({output}) {{{body}\n}}'
        )
        weight = onnx.TensorProto(name="weight", data_type=onnx.TensorProto.BFLOAT16, dims=shape)
        # 1.0 in bfloat16 throughout
        (places[name] / f"{name}.bin").write_bytes(np.full(shape, 0x3F80, np.uint16).tobytes())
        weight.data_location = onnx.TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=f"{name}.bin")
        model.graph.initializer.append(weight)
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
        graphs[name] = GraphRecord(f"{name}.onnx", int(np.prod(shape)), 23, [], [])
    for name in ("tokenizer.json", "processor_config.json"):  # of no matter to a build
        (folder / name).write_text("{}")
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        precision="bf16",
        source=SourceRecord("hand-made", "0" * 64),
        weights=WeightsRecord(str(release), _records(release), 0, 0),
        model=ModelRecord(sizes, 512, 4, 1, 1, 1, 256, dict.fromkeys(CONTROL_TOKENS, 0)),
        graphs=graphs,
        files=_records(folder),
        tools={},
    )
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    return open_bundle(folder)


def _records(folder: Path) -> dict[str, FileRecord]:
    return {p.name: FileRecord(p.stat().st_size, d) for p, d in sha256_of_files(sorted(folder.iterdir())).items()}
