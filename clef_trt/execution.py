"""One execution context of a plan: shapes, addresses, staging and submission of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .buffers import Buffers
from .contract import Axes, Contract, Tensors
from .device import Device
from .profiles import PADDING, float32_of_bfloat16, shape, write_padded
from .tensorrt_package import Plan

Bucket = tuple[tuple[str, int], ...]  # (axis, size) of every dynamic axis


@dataclass(frozen=True)
class Layout:
    """The tensors of a plan: the contract, the model's own sizes, and how each tensor lies in memory."""

    contract: Contract
    sizes: Mapping[str, int]
    storage: Mapping[str, np.dtype[Any]]

    def shape(self, axes: Axes, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of a tensor at `sizes` of its dynamic axes."""
        return shape(axes, sizes, self.sizes)

    def size_bytes(self, name: str, dims: tuple[int, ...]) -> int:
        """What a tensor of this shape takes."""
        return int(np.prod(dims, dtype=np.int64)) * self.storage[name].itemsize


class Execution:
    """A context on one profile, and the graph captured of it, if any (`executable`).

    Where TensorRT refuses what a method asks, it raises EngineError, and the execution must not be used again.
    """

    def __init__(self, plan: Plan, layout: Layout, profile: int, device: Device, stream: int) -> None:
        self.profile = profile
        self.executable: int | None = None
        self._plan, self._layout, self._device, self._stream = plan, layout, device, stream
        self._context = plan.new_context()
        self._bucket: Bucket | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._buffers: Buffers | None = None
        self._generation = 0  # of the buffers whose addresses the context holds
        self._views: dict[str, np.ndarray] = {}  # staging memory in the shapes of the bucket
        if not self._context.set_optimization_profile_async(profile, stream):
            raise plan.error(f"TensorRT refuses profile {profile}")

    def use_workspace(self, address: int, size_bytes: int) -> None:
        """Give the context its activation memory."""
        self._context.set_device_memory(address, size_bytes)

    def is_ready(self, bucket: Bucket, buffers: Buffers) -> bool:
        """Whether nothing changed since `reshape` and `bind`."""
        return self._bucket == bucket and self._generation == buffers.generation

    def reshape(self, bucket: Bucket) -> dict[str, int]:
        """Set the shapes; returns how many bytes each tensor needs."""
        contract, sizes = self._layout.contract, dict(bucket)
        self._shapes = {name: self._layout.shape(axes, sizes) for name, (_, axes) in contract.inputs.items()}
        for name, dims in self._shapes.items():
            if not self._context.set_input_shape(name, dims):
                raise self._plan.error(f"TensorRT refuses {name} of shape {list(dims)}")
        output = tuple(self._context.get_tensor_shape(contract.output))
        if len(output) != len(contract.output_axes) or min(output) < 1:
            raise self._plan.error(f"TensorRT derives {list(output)} as shape of {contract.output} for {sizes}")
        self._shapes[contract.output] = output
        self._bucket = bucket
        return {name: self._layout.size_bytes(name, dims) for name, dims in self._shapes.items()}

    def bind(self, buffers: Buffers) -> None:
        """Take the addresses of `buffers`, which must fit what `reshape` returned."""
        if self._generation != buffers.generation:
            for name in self._shapes:
                if not self._context.set_tensor_address(name, buffers.addresses[name]):
                    raise self._plan.error(f"TensorRT refuses the address of {name}")
            self._buffers, self._generation = buffers, buffers.generation
        self._views = {
            name: buffers.staging[name][: self._layout.size_bytes(name, dims)]
            .view(self._layout.storage[name])
            .reshape(dims)
            for name, dims in self._shapes.items()
        }

    def write(self, inputs: Tensors) -> None:
        """Stage the inputs, padded to the bucket."""
        for name, array in inputs.items():
            write_padded(self._views[name], array, PADDING.get(name, 0))

    def submit(self) -> None:
        """Copies in, the pass, the copy out: all asynchronous."""
        assert self._buffers is not None, "bind comes before submit"
        addresses, output = self._buffers.addresses, self._layout.contract.output
        for name in self._layout.contract.inputs:
            self._device.copy_to_device(addresses[name], self._views[name], self._stream)
        if not self._context.execute_async_v3(self._stream):
            raise self._plan.error("TensorRT cannot enqueue the pass")
        self._device.copy_to_host(self._views[output], addresses[output], self._stream)

    def read(self, sizes: Mapping[str, int]) -> np.ndarray:
        """The output as a float32 array of its own, cut to `sizes`; the pass must be done."""
        contract = self._layout.contract
        ends = [sizes.get(axis) if isinstance(axis, str) else axis for axis in contract.output_axes]
        cut = self._views[contract.output][tuple(map(slice, ends))]
        return float32_of_bfloat16(cut) if cut.dtype == np.uint16 else cut.copy()

    def capturable(self) -> bool:
        """False where TensorRT knows beforehand that a capture would fail."""
        return self._plan.capturable(self._context, self._stream)
