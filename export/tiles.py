"""Graphs for the CPU: the backbone as a loop over tiles of tokens, so that no layer's tensors outgrow the caches.

Every layer is causal: a tile needs of the tokens before it only the keys and values of attention, the state of the
delta rule and the last inputs of its convolution. Those are carried from tile to tile, and the time per token outside
attention no longer depends on how many tokens there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from clef_trt.errors import ExportError
from clef_trt.functions import DOMAIN, function

from .linears import constant

ROWS = 256  # tokens of a tile, over all records of a pass
FEWEST = 64  # tokens of a tile, of each record
SEQUENCE, TILE = "sequence", "tile"


def tile_functions() -> list[onnx.FunctionProto]:
    """The bodies of the operators around the loop. Tensors x are [B, S, …]."""
    tiles = f"""
            rows = Constant <value_ints = [{ROWS}]> ()
            fewest = Constant <value_ints = [{FEWEST}]> ()
            zero = Constant <value_ints = [0]> ()
            one = Constant <value_ints = [1]> ()
            batch = Shape <start = 0, end = 1> (x)
            length = Shape <start = 1, end = 2> (x)
            share = Div(rows, batch)
            most = Max(share, fewest)
            most_less_one = Sub(most, one)
            rounded = Add(length, most_less_one)
            count = Div(rounded, most)
            spread = Add(length, count)
            spread_less_one = Sub(spread, one)
            tile = Div(spread_less_one, count)
            tiled = Mul(count, tile)
            missing = Sub(tiled, length)
            pads = Concat <axis = 0> (zero, missing)
            tiles = Squeeze(count)"""
    padded = """
            axis = Constant <value_ints = [1]> ()
            output = Pad(x, pads, , axis)"""
    one_tile = """
            axis = Constant <value_ints = [1]> ()
            start = Mul(number, tile)
            end = Add(start, tile)
            output = Slice(padded, start, end, axis)"""
    joined = """
            axis = Constant <value_ints = [1]> ()
            zero = Constant <value_ints = [0]> ()
            rest = Constant <value_ints = [-1]> ()
            batch = Shape <start = 0, end = 1> (x)
            length = Shape <start = 1, end = 2> (x)
            channels = Shape <start = 2, end = 3> (x)
            by_record = Transpose <perm = [1, 0, 2, 3]> (tiles)
            shape = Concat <axis = 0> (batch, rest, channels)
            padded = Reshape(by_record, shape)
            output = Slice(padded, zero, length, axis)"""
    initial = """
            batch = Shape <start = 0, end = 1> (x)
            shape = Concat <axis = 0> (batch, sizes)
            output = ConstantOfShape <value = float[1] {0.0}> (shape)"""
    return [
        function("TokenTiles", "x", tiles, outputs="tiles, tile, pads"),
        function("PaddedToTiles", "x, pads", padded),
        function("TokenTile", "padded, number, tile", one_tile),
        function("JoinedTiles", "tiles, x", joined),
        function("InitialState", "x, sizes", initial),
    ]


@dataclass(frozen=True)
class State:
    """What a node carries from tile to tile: float32 [B, *sizes], zeros at first, or a sequence that starts empty."""

    name: str
    sizes: tuple[int, ...] | None = None  # None: a sequence of tensors

    def describe(self, value: ir.Value) -> None:
        """Give a value its type and, where it has one, its shape."""
        if self.sizes is None:
            value.type = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
        else:
            value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["batch", *self.sizes])


def loop_over_tiles(model: ir.Model) -> None:
    """Rewrite the text graph in place: its backbone, from the embedded tokens to the last norm, becomes a Loop.

    Nodes that only prepare weights stay outside of it. Raises ExportError where a node of the backbone would have to
    know more of a record than its tile and what is carried.
    """
    graph = model.graph
    embedded, entries, hidden = _boundaries(graph)
    nodes = _between(graph, entries, hidden)
    _reshape_tiles(model, nodes, entries)
    place = next(use.node for use in hidden.uses())

    def add(
        op: str,
        name: str,
        inputs: Sequence[ir.Value],
        outputs: Sequence[str] = ("output",),
        domain: str = DOMAIN,
    ) -> list[ir.Value]:
        node = _node(op, f"backbone/{name}", inputs, outputs, domain=domain)
        graph.insert_before(place, node)
        return list(node.outputs)

    count, tile, pads = add("TokenTiles", "tiles", [embedded], ["count", "tile", "pads"])
    number = _value("backbone/tile_number", ir.DataType.INT64, [])
    going = _value("backbone/going", ir.DataType.BOOL, [])
    inside = [_node("Identity", "backbone/go_on", [going])]
    for entry in entries:
        (padded,) = add("PaddedToTiles", f"padded_{entry.name}", [entry, pads])
        piece = _node("TokenTile", f"backbone/tile_of_{entry.name}", [padded, number, tile], domain=DOMAIN)
        piece.outputs[0].type, piece.outputs[0].shape = entry.type, entry.shape
        inside.append(piece)
        for node in nodes:
            for index, value in enumerate(node.inputs):
                if value is entry:
                    node.replace_input_with(index, piece.outputs[0])
    graph.remove(nodes)
    zeros: dict[tuple[int, ...] | None, ir.Value] = {}
    initial: list[ir.Value] = []
    starts: list[ir.Value] = []
    ends: list[ir.Value] = []
    for node in nodes:
        states = _states(node)
        given = [ir.Value(name=f"{node.name}/{state.name}") for state in states]
        for state, value in zip(states, given, strict=True):
            state.describe(value)
            if state.sizes not in zeros:
                if state.sizes is None:
                    (zeros[None],) = add("SequenceEmpty", "initial_sequence", [], domain="")
                else:
                    label = "_".join(map(str, state.sizes))
                    sizes = constant(model, f"tiles/sizes_{label}", ir.tensor(np.array(state.sizes, np.int64)))
                    (zeros[state.sizes],) = add("InitialState", f"initial_{label}", [embedded, sizes])
            initial.append(zeros[state.sizes])
        replacement, next_states = _continued(model, node, given) if given else ([node], [])
        for state, value in zip(states, next_states, strict=True):
            state.describe(value)
        inside += replacement
        starts += given
        ends += next_states
    for node in inside:
        for output in node.outputs:
            output.shape = _of_tile(output.shape)
    body = ir.Graph(
        [number, going, *starts], [inside[0].outputs[0], *ends, hidden], nodes=inside, name="backbone_over_one_tile"
    )
    loop = _node("Loop", "backbone/loop", [count, None, *initial], [*(v.name or "" for v in starts), "tiles"])
    loop.attributes.add(ir.AttrGraph("body", body))
    graph.insert_before(place, loop)
    outside = [use for use in hidden.uses() if use.node.graph is graph]
    (joined,) = add("JoinedTiles", "hidden", [loop.outputs[-1], embedded])
    joined.type, joined.shape = embedded.type, embedded.shape
    for use in outside:
        use.node.replace_input_with(use.idx, joined)


def _boundaries(graph: ir.Graph) -> tuple[ir.Value, list[ir.Value], ir.Value]:
    """The embedded tokens; they and the rotary tables, all [B, S, …]; the final hidden states."""
    by_name = {(node.name or "").rpartition("_")[0]: node for node in graph}
    first, last = (by_name[f"backbone.{name}/RMSNormalization"] for name in ("layers.0.input_layernorm", "norm"))
    embedded = first.inputs[0]
    assert embedded is not None, "a norm has an input"
    tables = [by_name[name].outputs[0] for name in ("backbone/Cos", "backbone/Sin") if name in by_name]
    return embedded, [embedded, *tables], last.outputs[0]


def _between(graph: ir.Graph, entries: list[ir.Value], hidden: ir.Value) -> list[ir.Node]:
    """The nodes that compute `hidden` from `entries`, in their order."""
    reached = {id(value) for value in entries}
    nodes = []
    for node in graph:
        if any(id(value) in reached for value in node.inputs if value is not None):
            nodes.append(node)
            reached.update(id(output) for output in node.outputs)
        if node is hidden.producer():
            break
    inner = {id(node) for node in nodes}
    for node in nodes:
        for output in node.outputs:
            if output is not hidden and any(id(use.node) not in inner for use in output.uses()):
                raise ExportError(f"tiles: {output.name} of {node.name} is read outside the backbone")
    return nodes


def _reshape_tiles(model: ir.Model, nodes: list[ir.Node], entries: list[ir.Value]) -> None:
    """Reshapes to [B, S, …] keep the first two axes as they come, whatever their sizes."""
    known_inside = {id(value) for value in entries} | {id(output) for node in nodes for output in node.outputs}
    for node in nodes:
        for index, value in enumerate(node.inputs):
            if value is None or id(value) in known_inside or not _of_record(value):
                continue
            shape = node.outputs[0].shape
            known = [] if shape is None else [size for size in shape if isinstance(size, int)]
            if node.op_type != "Reshape" or index != 1 or shape is None or len(known) != len(shape) - 2:
                raise ExportError(f"tiles: {node.name} takes {value.name}, which depends on the whole record")
            name = "tiles/shape_" + "_".join(map(str, known))
            kept = model.graph.initializers.get(name)
            if kept is None:
                kept = constant(model, name, ir.tensor(np.array([0, 0, *known], np.int64)))
            node.replace_input_with(1, kept)
            node.attributes.pop("allowzero", None)


def _of_record(value: ir.Value | None) -> bool:
    """Whether a value depends on an input of the graph."""
    if value is None:
        return False
    producer = value.producer()
    return value.is_graph_input() if producer is None else any(_of_record(given) for given in producer.inputs)


def _states(node: ir.Node) -> list[State]:
    """What a node of the backbone carries."""
    if node.op_type == "Conv":
        weight = _shape(node, 1)
        return [State("last_inputs", (weight[0], weight[2] - 1))]
    if node.op_type == "GatedDeltaRule":
        (key_dim,), (value_heads, value_dim) = _shape(node, 1)[3:], _shape(node, 2)[2:]
        return [State("state", (value_heads, key_dim, value_dim))]
    if node.op_type == "CausalAttention":
        return [State("keys"), State("values")]
    return []


def _continued(model: ir.Model, node: ir.Node, given: list[ir.Value]) -> tuple[list[ir.Node], list[ir.Value]]:
    """A node in the form that goes on from the states `given`, and the states after it."""
    name, output = node.name, node.outputs[0]
    if node.op_type == "Conv":
        (last_inputs,), x = given, node.inputs[0]
        joined = _node("Concat", f"{name}/joined", [last_inputs, x], axis=2)
        node.replace_input_with(0, joined.outputs[0])
        kernel = _shape(node, 1)[2]
        node.attributes.add(ir.AttrInt64s("pads", [0, 0]))
        bounds = [
            constant(model, f"tiles/{label}", ir.tensor(np.array([number], np.int64)))
            for label, number in ((f"last_{kernel - 1}", 1 - kernel), ("end", np.iinfo(np.int64).max), ("axis_2", 2))
        ]
        kept = _node("Slice", f"{name}/kept", [joined.outputs[0], *bounds])
        return [joined, node, kept], list(kept.outputs)
    op = {"GatedDeltaRule": "ContinuedDeltaRule", "CausalAttention": "ContinuedAttention"}[node.op_type]
    ends = [f"next_{value.name}" for value in given]
    new = _node(op, name or op, [*node.inputs, *given], ["output", *ends], domain=DOMAIN)
    new.outputs[0].type, new.outputs[0].shape = output.type, output.shape
    for use in list(output.uses()):
        use.node.replace_input_with(use.idx, new.outputs[0])
    return [new], list(new.outputs[1:])


def _node(
    op: str,
    name: str,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[str] = ("output",),
    domain: str = "",
    **attributes: int,
) -> ir.Node:
    node = ir.node(op, inputs, attributes, domain=domain, name=name, num_outputs=len(outputs))
    for value, label in zip(node.outputs, outputs, strict=True):
        value.name = f"{name}/{label}"
    return node


def _value(name: str, dtype: ir.DataType, shape: list[int | str | None]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _shape(node: ir.Node, index: int) -> list[int]:
    """The shape of an input; named axes are 0."""
    value = node.inputs[index]
    assert value is not None, "the trace gives every operator its inputs"
    assert value.shape is not None, "the trace gives every value a shape"
    return [size if isinstance(size, int) else 0 for size in value.shape]


def _of_tile(shape: ir.Shape | None) -> ir.Shape | None:
    """The axis of tokens named as that of a tile."""
    if shape is None:
        return None
    return ir.Shape([d if isinstance(d, int) else TILE if d.value == SEQUENCE else d.value for d in shape])
