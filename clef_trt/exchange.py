"""Arrays of any library → numpy views of the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import EngineError

CPU_DEVICES = (1, 3)  # DLPack's numbers of memory that the CPU addresses: its own, and page-locked by CUDA


def as_array(value: Any, name: str) -> np.ndarray:
    """`value` as a numpy array over the same memory; nothing is copied.

    Taken are numpy arrays, what has `__array_interface__` or the buffer protocol (array.array, memoryview, ctypes), and
    what exports DLPack from the CPU (tensors of torch, jax, …). The view keeps `value` alive. Raises EngineError for
    anything else, among it memory of a GPU, which `name` stands for in the message.
    """
    if isinstance(value, np.ndarray):
        return value
    try:
        if hasattr(value, "__array_interface__"):
            return np.asarray(value)
        if hasattr(value, "__dlpack__"):
            return _from_dlpack(value, name)
        if not isinstance(value, bytes | bytearray):
            return np.asarray(memoryview(value))
    except EngineError:
        raise
    except Exception as fault:  # libraries refuse in their own ways: TypeError, BufferError, RuntimeError, …
        raise EngineError(f"{name} cannot share its memory: {fault}") from fault
    raise EngineError(f"{name} is {type(value).__name__}, which has neither type nor shape; expected an array")


def _from_dlpack(value: Any, name: str) -> np.ndarray:
    device, number = value.__dlpack_device__()
    if device not in CPU_DEVICES:
        where = f"{name} lies on a device (DLPack {int(device)}:{number})"
        raise EngineError(f"{where}; copy it to the CPU: engines stage inputs themselves")
    array = np.from_dlpack(value)
    if not array.flags.writeable and hasattr(value, "__array__"):
        # An export without a version says nothing about writing, and numpy forbids it then; the library's view may not.
        own = np.asarray(value)
        if own.__array_interface__["data"][0] == array.__array_interface__["data"][0]:
            return own
    return array
