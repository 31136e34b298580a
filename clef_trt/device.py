"""The few CUDA calls the runtime makes, as an interface: one implementation over cuda-bindings, tests bring another."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from .errors import EngineError, MissingExtraError

logger = logging.getLogger("clef_trt")


class Device(Protocol):
    """One GPU. Streams, addresses, graphs and executables are handles as integers; every method raises EngineError.

    A handle that is destroyed must not be used again, also when destroying it raised.
    """

    def activate(self) -> None:
        """Make this GPU the calling thread's current one; due before other calls of a thread."""

    def create_stream(self) -> int:
        """A stream that does not wait for the default stream."""

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream."""

    def synchronise(self, stream: int) -> None:
        """Wait until everything submitted to the stream is done."""

    def allocate(self, size_bytes: int) -> int:
        """Address of device memory, aligned to at least 256 bytes."""

    def free(self, address: int) -> None:
        """Free device memory."""

    def allocate_pinned(self, size_bytes: int) -> np.ndarray:
        """Page-locked host memory as uint8 [size_bytes]."""

    def free_pinned(self, block: np.ndarray) -> None:
        """Free page-locked memory, given the array `allocate_pinned` returned; views of it become invalid."""

    def copy_to_device(self, address: int, source: np.ndarray, stream: int) -> None:
        """Submit a copy of contiguous page-locked memory to the device."""

    def copy_to_host(self, target: np.ndarray, address: int, stream: int) -> None:
        """Submit a copy from the device into contiguous page-locked memory."""

    def begin_capture(self, stream: int) -> None:
        """Record what this thread submits to the stream, instead of running it."""

    def end_capture(self, stream: int) -> int:
        """The recorded graph; also ends a capture that went wrong, and raises."""

    def destroy_graph(self, graph: int) -> None:
        """Destroy a recorded graph; its executables stay usable."""

    def instantiate(self, graph: int) -> int:
        """An executable of a graph."""

    def launch(self, executable: int, stream: int) -> None:
        """Submit a graph's executable."""

    def destroy_executable(self, executable: int) -> None:
        """Destroy an executable."""

    def memory(self) -> tuple[int, int]:
        """(free, total) device memory in bytes."""

    def name(self) -> str:
        """The card's name."""

    def compute_capability(self) -> tuple[int, int]:
        """(major, minor)."""


def record(device: Device, stream: int, submit: Callable[[], None]) -> int:
    """The executable of what `submit` submits to the stream; nothing of it runs. Raises what went wrong first."""
    device.begin_capture(stream)
    try:
        submit()
    except BaseException:
        # The stream stays unusable until its capture is ended, which a broken one answers with an error.
        with contextlib.suppress(EngineError):
            device.destroy_graph(device.end_capture(stream))
        raise
    graph = device.end_capture(stream)
    try:
        return device.instantiate(graph)
    finally:
        attempt(device.destroy_graph, graph)


def attempt(release: Callable[[Any], None], handle: Any) -> None:
    """Release one thing; a failure is logged, so that the others are released too and an earlier error stays visible.

    CUDA reports failures of earlier work at any call: the handle counts as released then, and is never tried again.
    """
    try:
        release(handle)
    except EngineError as fault:
        logger.warning("while releasing: %s", fault)


class CudaDevice:
    """A Device over `cuda.bindings.runtime`."""

    def __init__(self, index: int = 0) -> None:
        """Raises MissingExtraError without cuda-bindings, EngineError without a usable GPU `index`."""
        try:
            self._cuda: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError as fault:
            raise MissingExtraError("CUDA", "tensorrt", fault) from None
        self._index = index
        (count,) = self._call("cudaGetDeviceCount")
        if not 0 <= index < count:
            raise EngineError(f"GPU {index} does not exist; this machine has {count}")
        self.activate()

    def activate(self) -> None:
        """See Device.activate."""
        self._call("cudaSetDevice", self._index)

    def create_stream(self) -> int:
        """See Device.create_stream."""
        (stream,) = self._call("cudaStreamCreateWithFlags", self._cuda.cudaStreamNonBlocking)
        return int(stream)

    def destroy_stream(self, stream: int) -> None:
        """See Device.destroy_stream."""
        self._call("cudaStreamDestroy", stream)

    def synchronise(self, stream: int) -> None:
        """See Device.synchronise."""
        self._call("cudaStreamSynchronize", stream)

    def allocate(self, size_bytes: int) -> int:
        """See Device.allocate."""
        (address,) = self._call("cudaMalloc", size_bytes)
        return int(address)

    def free(self, address: int) -> None:
        """See Device.free."""
        self._call("cudaFree", address)

    def allocate_pinned(self, size_bytes: int) -> np.ndarray:
        """See Device.allocate_pinned."""
        (address,) = self._call("cudaHostAlloc", size_bytes, self._cuda.cudaHostAllocDefault)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(int(address)))

    def free_pinned(self, block: np.ndarray) -> None:
        """See Device.free_pinned."""
        self._call("cudaFreeHost", block.ctypes.data)

    def copy_to_device(self, address: int, source: np.ndarray, stream: int) -> None:
        """See Device.copy_to_device."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", address, source.ctypes.data, source.nbytes, kind, stream)

    def copy_to_host(self, target: np.ndarray, address: int, stream: int) -> None:
        """See Device.copy_to_host."""
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", target.ctypes.data, address, target.nbytes, kind, stream)

    def begin_capture(self, stream: int) -> None:
        """See Device.begin_capture."""
        # Thread-local: what other threads do meanwhile (another engine allocating) does not break this capture.
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        """See Device.end_capture."""
        (graph,) = self._call("cudaStreamEndCapture", stream)
        return int(graph)

    def destroy_graph(self, graph: int) -> None:
        """See Device.destroy_graph."""
        self._call("cudaGraphDestroy", graph)

    def instantiate(self, graph: int) -> int:
        """See Device.instantiate."""
        (executable,) = self._call("cudaGraphInstantiate", graph, 0)
        return int(executable)

    def launch(self, executable: int, stream: int) -> None:
        """See Device.launch."""
        self._call("cudaGraphLaunch", executable, stream)

    def destroy_executable(self, executable: int) -> None:
        """See Device.destroy_executable."""
        self._call("cudaGraphExecDestroy", executable)

    def memory(self) -> tuple[int, int]:
        """See Device.memory."""
        free, total = self._call("cudaMemGetInfo")
        return int(free), int(total)

    def name(self) -> str:
        """See Device.name."""
        (properties,) = self._call("cudaGetDeviceProperties", self._index)
        name = properties.name
        return name.split(b"\0")[0].decode(errors="replace") if isinstance(name, bytes) else str(name)

    def compute_capability(self) -> tuple[int, int]:
        """See Device.compute_capability."""
        attributes = self._cuda.cudaDeviceAttr
        (major,) = self._call("cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMajor, self._index)
        (minor,) = self._call("cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMinor, self._index)
        return int(major), int(minor)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """The results of a CUDA call behind its error code."""
        try:
            error, *results = getattr(self._cuda, name)(*arguments)
        except RuntimeError as fault:  # a driver library that cannot be loaded
            raise EngineError(f"{name} failed: {fault}") from fault
        if error != self._cuda.cudaError_t.cudaSuccess:
            # CUDA keeps the last error until it is asked for, and TensorRT would take it for one of its own.
            self._cuda.cudaGetLastError()
            _, text = self._cuda.cudaGetErrorString(error)
            raise EngineError(f"{name} failed: {text.decode()} ({error.name})")
        return tuple(results)
