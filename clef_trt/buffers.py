"""Device memory and page-locked staging of one profile's tensors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .device import Device, attempt
from .errors import EngineError

SMALL_BYTES = 2**20  # a tensor whose maximum is at most this is allocated at its maximum at once
FIRST_BYTES = 2**16


class Buffers:
    """Per tensor a block on the device and one of the same size in page-locked memory, growing with the passes.

    Growing moves tensors: `generation` counts that, and whatever holds addresses of an older one must be rebuilt.
    """

    def __init__(self, device: Device, most_bytes: Mapping[str, int]) -> None:
        """`most_bytes`: what a tensor needs at the profile's maximum, where it is known."""
        self._device, self._most = device, most_bytes
        self.generation = 0
        self.addresses: dict[str, int] = {}
        self.staging: dict[str, np.ndarray] = {}

    @property
    def size_bytes(self) -> int:
        """Device memory held."""
        return sum(block.nbytes for block in self.staging.values())

    def fit(self, needed_bytes: Mapping[str, int]) -> bool:
        """Whether every tensor has room for its `needed_bytes`."""
        return all(name in self.staging and self.staging[name].nbytes >= size for name, size in needed_bytes.items())

    def grow(self, needed_bytes: Mapping[str, int]) -> None:
        """Make room; at least doubles what is too small. Raises EngineError, then every tensor keeps what it had."""
        self.generation += 1
        for name, needed in needed_bytes.items():
            present = self.staging[name].nbytes if name in self.staging else 0
            if present >= needed:
                continue
            most = self._most.get(name)
            size = max(needed, 2 * present, FIRST_BYTES)
            if most is not None:
                size = most if most <= SMALL_BYTES else min(size, most)
            address = allocate(self._device, max(size, needed), name)
            try:
                block = self._device.allocate_pinned(max(size, needed))
            except BaseException:
                attempt(self._device.free, address)
                raise
            self._free(name)
            self.addresses[name], self.staging[name] = address, block

    def release(self) -> None:
        """Free everything, whatever happens meanwhile; see `attempt`."""
        for name in list(self.staging):
            self._free(name)

    def _free(self, name: str) -> None:
        if name in self.staging:
            attempt(self._device.free, self.addresses.pop(name))
            attempt(self._device.free_pinned, self.staging.pop(name))


def allocate(device: Device, size_bytes: int, what: str) -> int:
    """Device memory; where there is too little, the error says how much is needed and free."""
    try:
        return device.allocate(size_bytes)
    except EngineError as fault:
        try:
            free, total = device.memory()
        except EngineError:
            raise fault from None
        raise EngineError(
            f"{fault}: {what} needs {size_bytes / 1e6:,.0f} MB, the GPU has {free / 1e6:,.0f} of {total / 1e6:,.0f} MB "
            "free"
        ) from fault
