"""BF16 and FP8 graphs on a CPU: the same graph in float32, every result rounded where the graph itself rounds.

ONNX Runtime's CPU provider has no BF16 products. Here each operator computes in float32 and its result is rounded to
BF16 where the graph says BF16; the E4M3 quantisation of an FP8 graph is run as it is. Sums inside one operator are then
those of float32, as a GPU accumulates them. For judging drift, not for use: it is slower than float32.
"""

from __future__ import annotations

import onnx_ir as ir

from clef_trt.bundle import Bundle
from clef_trt.engine import OnnxRuntimeEngine
from clef_trt.errors import EngineError

BF16, FLOAT = ir.DataType.BFLOAT16, ir.DataType.FLOAT
# These move values and cannot leave the grid of BF16.
MOVES = frozenset(
    [
        "Concat",
        "Expand",
        "Gather",
        "GatherElements",
        "Identity",
        "Pad",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Transpose",
        "Unsqueeze",
        "Where",
    ]
)


def emulated_engine(bundle: Bundle, graph: str = "text", threads: int | None = None) -> OnnxRuntimeEngine:
    """An engine over a BF16 or FP8 graph; raises EngineError where ONNX Runtime cannot reach the weights."""
    if bundle.manifest.precision not in ("bf16", "fp8"):
        raise EngineError(f"{bundle.folder} is {bundle.manifest.precision}: only bf16 and fp8 are emulated")
    if bundle.manifest.precision == "fp8" and bundle.manifest.weights.root != ".":
        raise EngineError(
            f"{bundle.folder} has weights in two folders; export it with --copy-weights to emulate it here"
        )
    model = ir.load(bundle.path(bundle.manifest.graphs[graph].file))
    in_float32(model)
    return OnnxRuntimeEngine(bundle, graph, threads, model=ir.to_proto(model).SerializeToString())


def in_float32(model: ir.Model) -> None:
    """Rewrite every BF16 value of a graph into a float32 value that is rounded to BF16."""
    graph = model.graph
    for value in list(graph.initializers.values()):
        if value.dtype == BF16:
            _replace_uses(value, _cast_after(graph, value, FLOAT, f"{value.name}/float32"))
    for node in list(graph):
        if "to" in node.attributes and node.attributes["to"].as_int() == BF16:
            node.attributes["to"] = ir.AttrInt64("to", FLOAT)
        if "output_dtype" in node.attributes and node.attributes["output_dtype"].as_int() == BF16:
            node.attributes["output_dtype"] = ir.AttrInt64("output_dtype", FLOAT)
        for output in node.outputs:
            if output.dtype == BF16:
                _emulate(graph, node, output)


def _emulate(graph: ir.Graph, node: ir.Node, output: ir.Value) -> None:
    if node.op_type == "Constant":
        _replace_uses(output, _cast_after(graph, output, FLOAT, f"{output.name}/float32"))
        return
    output.dtype = FLOAT
    if node.op_type not in MOVES:
        rounded = _cast_after(graph, output, BF16, f"{output.name}/bfloat16")
        rounded_float = _cast_after(graph, rounded, FLOAT, f"{output.name}/rounded")
        _replace_uses(output, rounded_float, but=rounded)


def _cast_after(graph: ir.Graph, value: ir.Value, dtype: ir.DataType, name: str) -> ir.Value:
    cast = ir.node("Cast", [value], {"to": dtype}, name=name)
    cast.outputs[0].name, cast.outputs[0].dtype, cast.outputs[0].shape = name, dtype, value.shape
    producer = value.producer()
    if producer is None:
        graph.insert_before(graph[0], cast)
    else:
        graph.insert_after(producer, cast)
    return cast.outputs[0]


def _replace_uses(value: ir.Value, new: ir.Value, but: ir.Value | None = None) -> None:
    kept = {id(new.producer()), id(but.producer()) if but is not None else None}
    for use in list(value.uses()):
        if id(use.node) not in kept:
            use.node.replace_input_with(use.idx, new)
