"""Backbone and head, traced into one ONNX graph without weights."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings

import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from clef_trt.engine import TEXT_INPUTS
from clef_trt.errors import ExportError

from .backbone import Backbone
from .config import ReleaseConfig
from .functions import DOMAIN, DOMAIN_VERSION, OPSET
from .head import JointSchemaHead

# Sizes to trace with: unequal and above one, so that no axis is taken for another or for a constant.
SAMPLE_SIZES = {"batch": 2, "sequence": 80, "questions": 3, "options": 7, "media": 5}


class TextModel(nn.Module):
    """Token ids, spans and media rows to one logit per option: the text graph, in the order of TEXT_INPUTS."""

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


def trace_text_model(config: ReleaseConfig) -> ir.Model:
    """The text graph of a release's configuration, float32, its parameters declared as inputs without bytes.

    Traced on fake tensors: no memory is taken for weights. Promises that inputs, their axes and the output are those
    of TEXT_INPUTS, and that every parameter kept its name.
    """
    with FakeTensorMode(), torch.device("cpu"):
        model = TextModel(config).eval()
        samples = tuple(
            torch.zeros(_sizes(axes, config), dtype=torch.float32 if dtype == "float32" else torch.int64)
            for dtype, axes in TEXT_INPUTS.values()
        )
    dims = {name: torch.export.Dim(name, min=1) for name in SAMPLE_SIZES}
    dynamic = tuple({i: dims[a] for i, a in enumerate(axes) if a in dims} for _, axes in TEXT_INPUTS.values())
    with _quiet():
        program = torch.export.export(model, samples, dynamic_shapes=dynamic, strict=False)
        onnx_program = torch.onnx.export(program, (), opset_version=OPSET, optimize=False, verbose=False)
    assert onnx_program is not None
    graph_model: ir.Model = onnx_program.model
    parameters = dict(model.named_parameters())
    _weights_become_inputs(graph_model, set(parameters))
    with _quiet():
        onnxscript.optimizer.optimize_ir(graph_model)
    _name_axes(graph_model)
    _tidy(graph_model)
    _check(graph_model, set(parameters))
    return graph_model


def _sizes(axes: tuple[str | int, ...], config: ReleaseConfig) -> list[int]:
    sizes = SAMPLE_SIZES | {"hidden": config.text.hidden_size}
    return [axis if isinstance(axis, int) else sizes[axis] for axis in axes]


@contextlib.contextmanager
def _quiet():  # type: ignore[no-untyped-def]
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


def _name_axes(model: ir.Model) -> None:
    """Axes get the names of TEXT_INPUTS instead of the tracer's symbols."""
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        axes = TEXT_INPUTS.get(value.name or "", (None, ()))[1]
        for dim, axis in zip(value.shape or (), axes, strict=False):
            if isinstance(dim, ir.SymbolicDim) and isinstance(axis, str):
                names[str(dim.value)] = axis
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, names)) + r")\b")

    def renamed(dim: int | ir.SymbolicDim) -> int | str | None:
        if isinstance(dim, int):
            return dim
        return None if dim.value is None else pattern.sub(lambda match: names[match.group()], dim.value)

    values = [*model.graph.inputs, *(output for node in model.graph for output in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([renamed(dim) for dim in value.shape])
    model.graph.outputs[0].name = "logits"


def _tidy(model: ir.Model) -> None:
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
    model.graph.name = "text"
    model.producer_name, model.producer_version = "clef_trt", None
    model.opset_imports[DOMAIN] = DOMAIN_VERSION


def _check(model: ir.Model, parameters: set[str]) -> None:
    names = [value.name for value in model.graph.inputs]
    if names[: len(TEXT_INPUTS)] != list(TEXT_INPUTS):
        raise ExportError(f"trace: inputs are {names[: len(TEXT_INPUTS)]}, expected {list(TEXT_INPUTS)}")
    if set(names[len(TEXT_INPUTS) :]) != parameters:
        lost = sorted(map(str, parameters.symmetric_difference(names[len(TEXT_INPUTS) :])))
        raise ExportError(f"trace: parameters and graph disagree on {lost}")
    for value, (_, axes) in zip(model.graph.inputs, TEXT_INPUTS.values(), strict=False):
        found = [dim if isinstance(dim, int) else dim.value for dim in value.shape or ()]
        expected = [found[i] if axis == "hidden" else axis for i, axis in enumerate(axes)]
        if found != expected:
            raise ExportError(f"trace: {value.name} has axes {found}, expected {list(axes)}")
