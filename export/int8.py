"""Int8 for ONNX Runtime on the CPU: the large linears as products of 8-bit integers.

Weights take one scale per output; activations are quantised at run time, one scale per token, so that a record's
answer does not depend on its neighbours in a batch. Both are symmetric. Two exact changes of basis come first, so that
a few large channels do not spoil the precision of the others:

- The channels that a norm hands to its linears are scaled until the columns of those linears' weights are of one
  length: a channel then counts as much in the quantised activation as it does in the product. Folded into the norm.
- Where no norm lies before a linear, and its inputs are products of two activations with long tails, both operands are
  turned by a block-diagonal Hadamard matrix, which spreads a spike over its block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from clef_trt.errors import ExportError
from clef_trt.functions import DOMAIN

from .linears import Linear, constant, drop_weight
from .release import StoredTensor
from .weights import OwnTensor, read_tensor

CODES = 127  # the largest code; -128 is not used, so that both signs are alike
LARGEST_BLOCK = 128  # channels that one Hadamard matrix mixes


def hadamard(size: int) -> np.ndarray:
    """The orthogonal Hadamard matrix of a power of two (Sylvester's construction) [size, size] float32."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(np.float32(size))).astype(np.float32)


def hadamard_block(channels: int) -> int:
    """Channels per block: the largest power of two that divides `channels`, at most LARGEST_BLOCK."""
    return min(channels & -channels, LARGEST_BLOCK)


class Group:
    """The linears that read one activation, and the change of basis of that activation."""

    def __init__(self, linears: list[Linear]) -> None:
        self.linears = linears
        producer = linears[0].activation.producer()
        self.norm = producer if producer is not None and producer.op_type == "RMSNormalization" else None
        self.channel_scales: np.ndarray | None = None  # [in] float32, known once the first weight is asked for

    @property
    def activation(self) -> ir.Value:
        return self.linears[0].activation

    def scale_channels(self, root: Path, tensors: dict[str, StoredTensor]) -> None:
        """Lengths of the weights' columns, each output counting alike, their mean one; one where a column is zero."""
        squares = 0.0
        for linear in self.linears:
            weight = _weight(root, tensors, linear)
            squares = squares + np.square(
                weight / np.maximum(np.linalg.norm(weight, axis=1, keepdims=True), 1e-30)
            ).sum(0)
        lengths = np.sqrt(squares).astype(np.float32)
        if lengths.max() > 0:
            lengths /= lengths.mean()
        # A channel that next to nothing reads keeps some precision for the other readers of the norm.
        self.channel_scales = np.where(lengths > 1e-4, lengths, np.float32(1))

    def weight(self, root: Path, tensors: dict[str, StoredTensor], linear: Linear) -> np.ndarray:
        """The weight [out, in] in the basis of the activation."""
        weight = _weight(root, tensors, linear)
        if self.norm is not None:
            if self.channel_scales is None:
                self.scale_channels(root, tensors)
            return weight / self.channel_scales
        block = hadamard_block(weight.shape[1])
        return (weight.reshape(-1, block) @ hadamard(block)).reshape(weight.shape)


def _weight(root: Path, tensors: dict[str, StoredTensor], linear: Linear) -> np.ndarray:
    weight: np.ndarray = read_tensor(root, tensors[linear.weight]).float().numpy()
    if not np.isfinite(weight).all():
        raise ExportError(f"int8: the weight of {linear.name} is not finite")
    return weight


def groups(linears: list[Linear]) -> list[Group]:
    """Linears by the activation that they read, in the graph's order."""
    found: dict[int, list[Linear]] = {}
    for linear in linears:
        found.setdefault(id(linear.activation), []).append(linear)
    return [Group(readers) for readers in found.values()]


def int8_weights(root: Path, found: list[Group], tensors: dict[str, StoredTensor]) -> Iterator[OwnTensor]:
    """Per linear its codes [in, out] int8 and its scales [out] float32."""
    for group in found:
        for linear in group.linears:
            outputs, inputs = tensors[linear.weight].shape
            parts = _Parts(partial(group.weight, root, tensors, linear))
            yield OwnTensor(f"{linear.name}.weight_int8", "I8", (inputs, outputs), parts.codes)
            yield OwnTensor(f"{linear.name}.scales", "F32", (outputs,), parts.scales)


class _Parts:
    """Codes and scales of one weight, computed once and let go when both are written."""

    def __init__(self, weight: Callable[[], np.ndarray]) -> None:
        self._weight = weight
        self._scales: np.ndarray | None = None

    def codes(self) -> bytes:
        weight = self._weight()
        largest = np.abs(weight).max(1)
        self._scales = np.where(largest > 0, largest / np.float32(CODES), np.float32(1)).astype(np.float32)
        codes = np.rint(weight / self._scales[:, None]).astype(np.int8)
        return np.ascontiguousarray(codes.T).tobytes()

    def scales(self) -> bytes:
        assert self._scales is not None, "codes are written first"
        content, self._scales = self._scales.tobytes(), None
        return content


def quantise(model: ir.Model, found: list[Group], places: dict[str, StoredTensor]) -> None:
    """Rewrite the linears of a float32 text graph; `places` are what `int8_weights` yields, by name."""
    for group in found:
        first, name = group.linears[0], group.linears[0].name
        graph = first.matmul.graph
        assert isinstance(graph, ir.Graph), "a linear lies in the graph itself"
        activation = group.activation
        inputs = places[f"{name}.weight_int8"].shape[0]
        if group.norm is not None:
            _scale_norm(model, group, name)
            codes = ir.node("RowCodes", [activation], domain=DOMAIN, name=f"{name}/RowCodes", num_outputs=2)
        else:
            block = hadamard_block(inputs)
            matrix = _embedded(model, f"int8/hadamard_{block}", hadamard(block))
            codes = ir.node(
                "TurnedRowCodes", [activation, matrix], domain=DOMAIN, name=f"{name}/RowCodes", num_outputs=2
            )
        graph.insert_before(first.matmul, codes)
        quantised, row_scales = codes.outputs
        quantised.name, row_scales.name = f"{name}/codes", f"{name}/row_scales"
        quantised.shape, quantised.dtype = activation.shape, ir.DataType.UINT8
        assert activation.shape is not None, "the trace gives every activation a shape"
        row_scales.shape, row_scales.dtype = ir.Shape([*activation.shape[:-1], 1]), ir.DataType.FLOAT
        for linear in group.linears:
            operands = [
                quantised,
                row_scales,
                _external(model, f"{linear.name}.weight_int8", places, ir.DataType.INT8),
                _external(model, f"{linear.name}.scales", places, ir.DataType.FLOAT),
            ]
            node = ir.node("Int8Product", operands, domain=DOMAIN, name=f"{linear.name}/Int8Product")
            _replace(graph, linear, node)
            drop_weight(model, linear)


def _scale_norm(model: ir.Model, group: Group, name: str) -> None:
    """The scale of the norm before a group times its channel scales, and the weights of its other readers divided."""
    scales, norm = group.channel_scales, group.norm
    assert scales is not None, "weights are written first"
    assert norm is not None, "a group with a norm"
    graph = norm.graph
    assert isinstance(graph, ir.Graph), "a norm lies in the graph itself"
    scaled = ir.node("Mul", [norm.inputs[1], _embedded(model, f"{name}/channel_scales", scales)], name=f"{name}/Mul")
    scaled.outputs[0].name, scaled.outputs[0].dtype = f"{name}/norm_scale", ir.DataType.FLOAT
    scaled.outputs[0].shape = ir.Shape(scales.shape)
    graph.insert_before(norm, scaled)
    norm.replace_input_with(1, scaled.outputs[0])
    own = {id(linear.matmul) for linear in group.linears}
    others = [use for use in group.activation.uses() if id(use.node) not in own]
    for use in others:
        if use.node.op_type != "MatMul" or use.idx != 0:
            raise ExportError(f"int8: {use.node.name} reads what {norm.name} makes, and is no linear")
        weight = use.node.inputs[1]
        assert weight is not None, "a MatMul has two operands"
        inverse = _embedded(model, f"{name}/inverse_channel_scales", (1 / scales)[:, None])
        undone = ir.node("Mul", [weight, inverse], name=f"{use.node.name}/Mul")
        undone.outputs[0].name, undone.outputs[0].dtype = f"{use.node.name}/weight", ir.DataType.FLOAT
        undone.outputs[0].shape = weight.shape
        graph.insert_before(use.node, undone)
        use.node.replace_input_with(1, undone.outputs[0])


def _replace(graph: ir.Graph, linear: Linear, node: ir.Node) -> None:
    """Put `node` in the place of a linear's product."""
    old, new = linear.matmul.outputs[0], node.outputs[0]
    new.shape, new.type = old.shape, old.type
    graph.insert_before(linear.matmul, node)
    for use in list(old.uses()):
        use.node.replace_input_with(use.idx, new)
    graph.remove(linear.matmul, safe=True)
    new.name = old.name


def _embedded(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    """A small constant inside the graph, made once."""
    present = model.graph.initializers.get(name)
    return present if present is not None else constant(model, name, ir.Tensor(array.astype(np.float32), name=name))


def _external(model: ir.Model, name: str, places: dict[str, StoredTensor], dtype: ir.DataType) -> ir.Value:
    place = places[name]
    tensor = ir.ExternalTensor(
        location=place.file,
        offset=place.offset_bytes,
        length=place.length_bytes,
        dtype=dtype,
        shape=ir.Shape(place.shape),
        name=name,
    )
    return constant(model, name, tensor)
