"""Int8 for ONNX Runtime on the CPU: the large linears as MatMulNBits with eight bits, in blocks of 32 inputs.

Weights are symmetric, one float32 scale per output and block; activations are quantised at run time, each row block by
block too (accuracy level 4: int8 arithmetic). Blocks confine an outlier channel to its neighbours, where one scale for
a whole activation would round all others away.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir

from .linears import Linear, constant, drop_weight
from .release import StoredTensor
from .weights import OwnTensor, read_tensor

DOMAIN = "com.microsoft"
BLOCK, BITS, ZERO_POINT, ACCURACY_LEVEL = 32, 8, 128, 4


def int8_weights(root: Path, linears: list[Linear], tensors: dict[str, StoredTensor]) -> Iterator[OwnTensor]:
    """Per linear its codes [out, blocks, BLOCK] uint8 around ZERO_POINT and its scales [out, blocks] float32."""
    for linear in linears:
        stored = tensors[linear.weight]
        outputs, inputs = stored.shape
        blocks = -(-inputs // BLOCK)
        parts = _Parts(root, stored)
        yield OwnTensor(f"{linear.name}.weight_int8", "U8", (outputs, blocks, BLOCK), parts.codes)
        yield OwnTensor(f"{linear.name}.scales", "F32", (outputs, blocks), parts.scales)


class _Parts:
    """Codes and scales of one weight, computed once and let go when both are written."""

    def __init__(self, root: Path, stored: StoredTensor) -> None:
        self._root, self._stored = root, stored
        self._scales: np.ndarray | None = None

    def codes(self) -> bytes:
        weight = read_tensor(self._root, self._stored).float().numpy()
        padded = np.pad(weight, ((0, 0), (0, -weight.shape[1] % BLOCK))).reshape(len(weight), -1, BLOCK)
        largest = np.abs(padded).max(-1, keepdims=True)
        scales = np.where(largest > 0, largest / np.float32(ZERO_POINT - 1), np.float32(1)).astype(np.float32)
        self._scales = scales
        return (np.rint(padded / scales) + ZERO_POINT).astype(np.uint8).tobytes()

    def scales(self) -> bytes:
        assert self._scales is not None, "codes are written first"
        content, self._scales = self._scales.tobytes(), None
        return content


def quantise(
    model: ir.Model, linears: list[Linear], tensors: dict[str, StoredTensor], places: dict[str, StoredTensor]
) -> None:
    """Rewrite the linears of a float32 text graph; `places` are what `int8_weights` yields, by name."""
    model.opset_imports[DOMAIN] = 1
    for linear in linears:
        outputs, inputs = tensors[linear.weight].shape
        operands = [
            _external(model, f"{linear.name}.weight_int8", places, ir.DataType.UINT8),
            _external(model, f"{linear.name}.scales", places, ir.DataType.FLOAT),
        ]
        attributes = {"K": inputs, "N": outputs, "bits": BITS, "block_size": BLOCK, "accuracy_level": ACCURACY_LEVEL}
        node = ir.node(
            "MatMulNBits", [linear.activation, *operands], attributes, domain=DOMAIN, name=f"{linear.name}/MatMulNBits"
        )
        old = linear.matmul.outputs[0]
        new = node.outputs[0]
        new.shape, new.type = old.shape, old.type
        graph = linear.matmul.graph
        assert isinstance(graph, ir.Graph), "a linear lies in the graph itself"
        graph.insert_before(linear.matmul, node)
        for use in list(old.uses()):
            use.node.replace_input_with(use.idx, new)
        graph.remove(linear.matmul, safe=True)
        new.name = old.name
        drop_weight(model, linear)


def _external(model: ir.Model, name: str, places: dict[str, StoredTensor], dtype: ir.DataType) -> ir.Value:
    place = places[name]
    shape = place.shape if dtype == ir.DataType.UINT8 else (int(np.prod(place.shape)),)
    tensor = ir.ExternalTensor(
        location=place.file,
        offset=place.offset_bytes,
        length=place.length_bytes,
        dtype=dtype,
        shape=ir.Shape(shape),
        name=name,
    )
    return constant(model, name, tensor)
