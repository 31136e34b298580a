"""FP8: the large linears of a BF16 text graph as products of E4M3 operands with static per-tensor scales.

What TensorRT fuses into an FP8 product: on the left QuantizeLinear and DequantizeLinear, one pair per activation and
shared by all linears that read it; on the right nothing but a DequantizeLinear between the stored weight, already
transposed, and the MatMul.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from clef_trt.errors import ExportError

from .linears import Linear, constant, drop_weight
from .ranges import E4M3_MAX, Ranges, activation_of
from .release import StoredTensor
from .weights import OwnTensor, read_tensor


def fp8_weights(
    root: Path, linears: list[Linear], tensors: dict[str, StoredTensor], scales: dict[str, float]
) -> Iterator[OwnTensor]:
    """Each linear's weight [in, out] in E4M3, one after the other; `scales` is filled with {linear: its scale}."""
    for linear in linears:
        stored = tensors[linear.weight]
        yield OwnTensor(
            f"{linear.name}.weight_fp8", "F8_E4M3", stored.shape[::-1], _quantised(root, stored, linear.name, scales)
        )


def _quantised(root: Path, stored: StoredTensor, name: str, scales: dict[str, float]) -> Callable[[], bytes]:
    def content() -> bytes:
        weight = read_tensor(root, stored).float()
        amax = float(weight.abs().max())
        if not np.isfinite(amax):
            raise ExportError(f"fp8: the weight of {name} is not finite")
        scales[name] = amax / E4M3_MAX if amax else 1.0
        scaled = (weight / scales[name]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return scaled.T.contiguous().view(torch.uint8).numpy().tobytes()

    return content


def quantise(
    model: ir.Model,
    linears: list[Linear],
    ranges: Ranges,
    choice: str,
    weight_scales: dict[str, float],
    places: dict[str, StoredTensor],
) -> None:
    """Rewrite the linears of a BF16 text graph; `places` are the E4M3 weights by `NAME.weight_fp8`."""
    # Its type is what makes the codes E4M3.
    zero = constant(model, "fp8/zero_point", ir.Tensor(np.zeros((), ml_dtypes.float8_e4m3fn), name="fp8/zero_point"))
    dequantised: dict[str, tuple[ir.Value, ir.Value]] = {}
    for linear in linears:
        name = activation_of(linear.name)
        if name not in dequantised:
            scale = _scale(model, f"{name}/scale", ranges.scale(name, choice))
            dequantised[name] = linear.activation, _quantised_activation(linear, name, scale, zero)
        source, activation = dequantised[name]
        if source is not linear.activation:
            raise ExportError(f"fp8: {linear.name} does not read the activation {name} that its neighbours read")
        weight_name = f"{linear.name}.weight_fp8"
        weight = _external(model, weight_name, places[weight_name])
        weight_scale = _scale(model, f"{weight_name}/scale", weight_scales[linear.name])
        node = _dequantise(weight, weight_scale, zero, weight_name)
        _graph(linear.matmul).insert_before(linear.matmul, node)
        linear.matmul.replace_input_with(0, activation)
        linear.matmul.replace_input_with(1, node.outputs[0])
        drop_weight(model, linear)


def _quantised_activation(linear: Linear, name: str, scale: ir.Value, zero: ir.Value) -> ir.Value:
    value = linear.activation
    quantise = ir.node("QuantizeLinear", [value, scale, zero], name=f"{name}/Q")
    quantise.outputs[0].name, quantise.outputs[0].dtype = f"{name}/fp8", ir.DataType.FLOAT8E4M3FN
    quantise.outputs[0].shape = value.shape
    dequantise = _dequantise(quantise.outputs[0], scale, zero, name)
    _graph(linear.matmul).insert_before(linear.matmul, [quantise, dequantise])
    return dequantise.outputs[0]


def _dequantise(value: ir.Value, scale: ir.Value, zero: ir.Value, name: str) -> ir.Node:
    node = ir.node("DequantizeLinear", [value, scale, zero], {"output_dtype": ir.DataType.BFLOAT16}, name=f"{name}/DQ")
    output = node.outputs[0]
    output.name, output.dtype, output.shape = f"{name}/bfloat16", ir.DataType.BFLOAT16, value.shape
    return node


def _graph(node: ir.Node) -> ir.Graph:
    assert isinstance(node.graph, ir.Graph), "a linear lies in the graph itself"
    return node.graph


def _scale(model: ir.Model, name: str, value: float) -> ir.Value:
    return constant(model, name, ir.tensor(np.float32(value), name=name))


def _external(model: ir.Model, name: str, place: StoredTensor) -> ir.Value:
    tensor = ir.ExternalTensor(
        location=place.file,
        offset=place.offset_bytes,
        length=place.length_bytes,
        dtype=ir.DataType.FLOAT8E4M3FN,
        shape=ir.Shape(place.shape),
        name=name,
    )
    return constant(model, name, tensor)
