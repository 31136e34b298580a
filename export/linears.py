"""The large linears of a traced text graph: what a quantised precision replaces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from clef_trt.errors import ExportError


@dataclass(frozen=True, eq=False)
class Linear:
    """One product of an activation [..., in] with a weight stored [out, in]."""

    name: str  # of the module, in TextModel
    matmul: ir.Node
    transpose: ir.Node  # of the weight; used by this product alone

    @property
    def activation(self) -> ir.Value:
        """The left operand."""
        value = self.matmul.inputs[0]
        assert value is not None, "a MatMul has two operands"
        return value

    @property
    def weight(self) -> str:
        """Name of the graph's parameter."""
        return f"{self.name}.weight"


def find_linears(model: ir.Model, names: Iterable[str]) -> list[Linear]:
    """The products of the named linears, in the graph's order; raises ExportError unless each is there once."""
    wanted = {f"{name}.weight": name for name in names}
    found = []
    for value in list(model.graph.inputs):
        if value.name not in wanted:
            continue
        uses = list(value.uses())
        if len(uses) != 1 or uses[0].node.op_type != "Transpose":
            raise ExportError(
                f"quantise: {value.name} is used by {[use.node.op_type for use in uses]}, not one Transpose"
            )
        transpose = uses[0].node
        products = list(transpose.outputs[0].uses())
        if len(products) != 1 or products[0].node.op_type != "MatMul" or products[0].idx != 1:
            raise ExportError(f"quantise: {value.name} is not the right operand of one MatMul")
        found.append(Linear(wanted.pop(value.name), products[0].node, transpose))
    if wanted:
        raise ExportError(f"quantise: the graph has no {sorted(wanted)}")
    return found


def drop_weight(model: ir.Model, linear: Linear) -> None:
    """Take the original weight of a linear, no longer used, out of the graph."""
    (parameter,) = [value for value in model.graph.inputs if value.name == linear.weight]
    model.graph.remove(linear.transpose, safe=True)
    model.graph.inputs.remove(parameter)


def constant(model: ir.Model, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """A tensor as an initializer of the graph."""
    value = ir.Value(
        name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
    )
    model.graph.initializers[name] = value
    return value
