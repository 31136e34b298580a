"""Modules traced into ONNX graphs without weights: backbone and head in one, the vision tower in another."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Callable, Iterator

import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from clef_trt.contract import TEXT, VISION, Contract
from clef_trt.errors import ExportError
from clef_trt.functions import DOMAIN, DOMAIN_VERSION, OPSET

from .backbone import Backbone
from .config import ReleaseConfig
from .head import JointSchemaHead
from .vision import VisionTower

# Sizes to trace with: unequal and above one, so that no axis is taken for another or for a constant.
SAMPLE_SIZES = {"batch": 2, "sequence": 80, "questions": 3, "options": 7, "media": 5, "groups": 3, "tokens": 6}


class TextModel(nn.Module):
    """Token ids, spans and media rows to one logit per option: the text graph, in the order of contract.TEXT."""

    def __init__(self, config: ReleaseConfig) -> None:
        super().__init__()
        self.backbone = Backbone(config.text)
        self.head = JointSchemaHead(config.head)
        self.lm_head = nn.Linear(config.text.hidden_size, config.text.vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        sequence_lengths: Tensor,
        media_embeddings: Tensor,
        media_rows: Tensor,
        question_spans: Tensor,
        question_types: Tensor,
        option_spans: Tensor,
        option_questions: Tensor,
    ) -> Tensor:
        hidden = self.backbone(input_ids, position_ids, media_embeddings, media_rows)
        lexical_rows = functional.embedding(input_ids, self.lm_head.weight)
        return self.head(
            hidden, lexical_rows, sequence_lengths, question_spans, question_types, option_spans, option_questions
        )


def checkpoint_name(parameter: str) -> str:
    """The tensor of the release (see `Release.tensors`) that a parameter of TextModel is filled from."""
    if parameter.startswith("backbone."):
        return "model.language_model." + parameter.removeprefix("backbone.")
    return parameter


def vision_checkpoint_name(parameter: str) -> str:
    """The tensor of the release that a parameter of VisionTower is filled from."""
    return "model.visual." + parameter


def trace_text(config: ReleaseConfig, dtype: torch.dtype = torch.float32) -> ir.Model:
    """The text graph of a release's configuration; see `trace`."""
    return trace(lambda: TextModel(config), TEXT, config, dtype)


def trace_vision(config: ReleaseConfig, dtype: torch.dtype = torch.float32) -> ir.Model:
    """The vision graph of a release's configuration; see `trace`."""
    return trace(lambda: VisionTower(config.vision), VISION, config, dtype)


def trace(build: Callable[[], nn.Module], contract: Contract, config: ReleaseConfig, dtype: torch.dtype) -> ir.Model:
    """A module as a graph in `dtype`, its parameters declared as inputs without bytes.

    BF16 is traced rather than made of the float32 graph: where float32 is needed is then written once, in the modules.
    Traced on fake tensors: no memory is taken for weights. Promises that inputs, their axes and the output are those
    of the contract, and that every parameter kept its name.
    """
    merge = config.vision.spatial_merge_size**2
    fixed = model_sizes(config)
    sample = SAMPLE_SIZES | {"patches": SAMPLE_SIZES["tokens"] * merge} | fixed
    dims = {name: torch.export.Dim(name, min=1) for name in SAMPLE_SIZES}
    dims["patches"] = merge * dims["tokens"]
    with FakeTensorMode(), torch.device("cpu"):
        model = _in_dtype(build, dtype).eval()
        samples = tuple(
            torch.zeros([a if isinstance(a, int) else sample[a] for a in axes], dtype=getattr(torch, kind))
            for kind, axes in contract.inputs.values()
        )
    dynamic = tuple({i: dims[a] for i, a in enumerate(axes) if a in dims} for _, axes in contract.inputs.values())
    with _quiet():
        program = torch.export.export(model, samples, dynamic_shapes=dynamic, strict=False)
        onnx_program = torch.onnx.export(program, (), opset_version=OPSET, optimize=False, verbose=False)
    assert onnx_program is not None
    graph_model: ir.Model = onnx_program.model
    parameters = set(dict(model.named_parameters()))
    _weights_become_inputs(graph_model, parameters)
    with _quiet():
        onnxscript.optimizer.optimize_ir(graph_model)
    _name_axes(graph_model, contract)
    _tidy(graph_model, contract)
    _check(graph_model, contract, parameters, fixed)
    return graph_model


def _in_dtype(build: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """The module with parameters in `dtype`; fake parameters cannot be converted afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return build()
    finally:
        torch.set_default_dtype(before)


def model_sizes(config: ReleaseConfig) -> dict[str, int]:
    """The sizes of contract.SIZES."""
    vision = config.vision
    patch_values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {"hidden": config.text.hidden_size, "patch_values": patch_values}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs and warns about its own internals (torchvision is absent, pytree renames)."""
    level = logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger("torch.onnx").setLevel(level)


def _weights_become_inputs(model: ir.Model, parameters: set[str]) -> None:
    """Weights as graph inputs, so that simplifying the graph cannot fold them into copies."""
    for name in list(model.graph.initializers):
        if name in parameters:
            value = model.graph.initializers.pop(name)
            value.const_value = None
            model.graph.inputs.append(value)


def _name_axes(model: ir.Model, contract: Contract) -> None:
    """Axes get the names of the contract instead of the tracer's symbols."""
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        axes = contract.inputs.get(value.name or "", (None, ()))[1]
        for dim, axis in zip(value.shape or (), axes, strict=False):
            if isinstance(dim, ir.SymbolicDim) and isinstance(axis, str):
                names[str(dim.value)] = axis
    pattern = re.compile("|".join(rf"(?<!\w){re.escape(symbol)}(?!\w)" for symbol in names))

    def renamed(dim: int | ir.SymbolicDim) -> int | str | None:
        if isinstance(dim, int):
            return dim
        return None if dim.value is None else pattern.sub(lambda match: names[match.group()], dim.value)

    values = [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([renamed(dim) for dim in value.shape])
    (output,) = model.graph.outputs
    output.name = contract.output
    assert output.shape is not None, "the trace gives the output a shape"
    output.shape = ir.Shape(
        [size if isinstance(size, int) else axis for axis, size in zip(contract.output_axes, output.shape, strict=True)]
    )


def _tidy(model: ir.Model, contract: Contract) -> None:
    """Nodes named by their module; the tracer's notes (stack traces, paths of the machine) dropped."""
    for i, node in enumerate(model.graph):
        scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
        module = re.findall(r"'([^']*)'", scopes)
        node.name = f"{module[-2] if len(module) > 1 else 'model'}/{node.op_type}_{i}"
        node.metadata_props.clear()
        for output in node.outputs:
            output.metadata_props.clear()
    for value in model.graph.inputs:
        value.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.graph.name = contract.name
    model.producer_name, model.producer_version = "clef_trt", None
    model.opset_imports[DOMAIN] = DOMAIN_VERSION


def _check(model: ir.Model, contract: Contract, parameters: set[str], sizes: dict[str, int]) -> None:
    names = [value.name for value in model.graph.inputs]
    count = len(contract.inputs)
    if names[:count] != list(contract.inputs):
        raise ExportError(f"trace: inputs are {names[:count]}, expected {list(contract.inputs)}")
    if set(names[count:]) != parameters:
        raise ExportError(f"trace: parameters and graph disagree on {set(names[count:]) ^ parameters}")
    for value, (_, axes) in zip(model.graph.inputs, contract.inputs.values(), strict=False):
        found = [dim if isinstance(dim, int) else dim.value for dim in value.shape or ()]
        expected = [axis if isinstance(axis, int) else sizes.get(axis, axis) for axis in axes]
        if found != expected:
            raise ExportError(f"trace: {value.name} has axes {found}, expected {expected}")
