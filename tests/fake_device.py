"""A GPU and a TensorRT made of numpy, which hold callers to the protocol of the real ones.

Work is asynchronous: what is submitted to a stream runs at `synchronise`. Breaches are raised and also kept in
`FakeDevice.breaches`, since a caller may take a raised one for a failed capture.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from clef_trt.contract import Contract, Tensors
from clef_trt.errors import EngineError
from clef_trt.profiles import Profile, float32_of_bfloat16, read_profiles

PLAN = b"a plan"


class Breach(Exception):
    """The protocol was broken."""


class FakeDevice:
    """See clef_trt.device.Device. `fail_at`: the number of the call that fails, counting those to TensorRT too."""

    def __init__(self, *, fail_at: int | None = None, refuse_capture: bool = False, free_bytes: int = 2**34) -> None:
        self.fail_at, self.refuse_capture, self.free_bytes = fail_at, refuse_capture, free_bytes
        self.calls = 0
        self.counts: Counter[str] = Counter()
        self.breaches: list[str] = []
        self.live: dict[str, dict[int, Any]] = {
            kind: {} for kind in ("memory", "pinned", "stream", "graph", "executable")
        }
        self.capturing: dict[int, tuple[int, list[Operation]]] = {}  # stream → (thread, what was recorded)
        self.invalidated: set[int] = set()
        self._handles = itertools.count(2**32, 2**32)  # far apart, as addresses
        self._active = threading.local()

    def breach(self, what: str) -> Breach:
        self.breaches.append(what)
        return Breach(what)

    def fails(self, name: str) -> bool:
        """Count a call; whether it is the one that has to fail."""
        self.calls += 1
        self.counts[name] += 1
        return self.calls == self.fail_at

    def held(self) -> dict[str, int]:
        return {kind: len(things) for kind, things in self.live.items() if things}

    def covering(self, address: int, size: int) -> np.ndarray:
        """The `size` live bytes at an address."""
        for start, block in self.live["memory"].items():
            if start <= address and address + size <= start + block.nbytes:
                return np.asarray(block[address - start : address - start + size])
        raise self.breach(f"{size} bytes at {address:#x} lie in no live allocation")

    def submit(self, stream: int, operation: Operation) -> None:
        if stream in self.capturing:
            self.capturing[stream][1].append(operation)
        else:
            self._thing("stream", stream).append(operation)

    def activate(self) -> None:
        self._fail("activate")
        self._active.yes = True

    def create_stream(self) -> int:
        return self._create("create_stream", "stream", [])

    def destroy_stream(self, stream: int) -> None:
        self._destroy("destroy_stream", "stream", stream)

    def synchronise(self, stream: int) -> None:
        self._call("synchronise", waits=True)
        work = self._thing("stream", stream)
        while work:
            work.pop(0).run()

    def allocate(self, size_bytes: int) -> int:
        if size_bytes > self.free_bytes:
            raise EngineError("out of memory")
        return self._create("allocate", "memory", np.full(size_bytes, 0xA5, np.uint8), waits=True)

    def free(self, address: int) -> None:
        self._idle("free")
        self._destroy("free", "memory", address, waits=True)

    def allocate_pinned(self, size_bytes: int) -> np.ndarray:
        block = np.full(size_bytes, 0xA5, np.uint8)
        self._call("allocate_pinned", waits=True)
        self.live["pinned"][block.ctypes.data] = block
        return block

    def free_pinned(self, block: np.ndarray) -> None:
        self._idle("free_pinned")
        block.fill(0xEE)  # a later read of it shows
        self._destroy("free_pinned", "pinned", block.ctypes.data, waits=True)

    def copy_to_device(self, address: int, source: np.ndarray, stream: int) -> None:
        self._copy("copy_to_device", source, address, stream, to_device=True)

    def copy_to_host(self, target: np.ndarray, address: int, stream: int) -> None:
        self._copy("copy_to_host", target, address, stream, to_device=False)

    def begin_capture(self, stream: int) -> None:
        self._call("begin_capture")
        if self._thing("stream", stream) or stream in self.capturing:
            raise self.breach("a capture begins on a stream that is busy")
        self.capturing[stream] = (threading.get_ident(), [])

    def end_capture(self, stream: int) -> int:
        if stream not in self.capturing:
            raise self.breach("a capture ends that did not begin")
        _, recorded = self.capturing.pop(stream)
        broken = stream in self.invalidated
        self.invalidated.discard(stream)
        if broken:
            self._fail("end_capture")
            raise EngineError("capture invalidated")
        return self._create("end_capture", "graph", recorded)

    def destroy_graph(self, graph: int) -> None:
        self._destroy("destroy_graph", "graph", graph)

    def instantiate(self, graph: int) -> int:
        return self._create("instantiate", "executable", list(self._thing("graph", graph)))

    def launch(self, executable: int, stream: int) -> None:
        self._call("launch")
        for operation in self._thing("executable", executable):
            if operation.stale():
                raise self.breach("a graph is launched whose context changed since its capture")
            self.submit(stream, operation)

    def destroy_executable(self, executable: int) -> None:
        self._idle("destroy_executable")
        self._destroy("destroy_executable", "executable", executable)

    def memory(self) -> tuple[int, int]:
        self._call("memory")
        return self.free_bytes, 2**35

    def name(self) -> str:
        self._call("name")
        return "Fake GPU"

    def compute_capability(self) -> tuple[int, int]:
        self._call("compute_capability")
        return 9, 0

    def _fail(self, name: str) -> None:
        if self.fails(name):
            raise EngineError(f"{name} failed: injected")

    def _call(self, name: str, waits: bool = False) -> None:
        if not getattr(self._active, "yes", False):
            raise self.breach(f"{name} from a thread that did not activate the device")
        for stream, (thread, _) in self.capturing.items():
            if waits and thread == threading.get_ident():
                self.invalidated.add(stream)
                raise self.breach(f"{name} during a capture")
        self._fail(name)

    def _create(self, name: str, kind: str, thing: Any, waits: bool = False) -> int:
        self._call(name, waits)
        handle = next(self._handles)
        self.live[kind][handle] = thing
        return handle

    def _destroy(self, name: str, kind: str, handle: int, waits: bool = False) -> None:
        self._thing(kind, handle)
        del self.live[kind][handle]  # gone even where the call then reports an error
        self._call(name, waits)

    def _thing(self, kind: str, handle: int) -> Any:
        if handle not in self.live[kind]:
            raise self.breach(f"{kind} {handle:#x} is not there, or no longer")
        return self.live[kind][handle]

    def _idle(self, name: str) -> None:
        if any(self.live["stream"].values()):
            raise self.breach(f"{name} while work that may need it is not done")

    def _copy(self, name: str, host: np.ndarray, address: int, stream: int, to_device: bool) -> None:
        self._call(name)
        start = host.ctypes.data
        if not host.flags.c_contiguous or not any(
            base <= start and start + host.nbytes <= base + block.nbytes for base, block in self.live["pinned"].items()
        ):
            raise self.breach(f"{name}: the host memory is not page-locked")
        bytes_ = host.reshape(-1).view(np.uint8)

        def copy() -> None:
            there = self.covering(address, host.nbytes)
            if not any(base <= start < base + block.nbytes for base, block in self.live["pinned"].items()):
                raise self.breach(f"{name}: the page-locked memory was freed")
            if to_device:
                there[:] = bytes_
            else:
                bytes_[:] = there

        self.submit(stream, Operation(copy))


class Operation:
    """Work on a stream; `stale` once the context it was captured of is in another state, or gone."""

    def __init__(self, run: Callable[[], None], context: FakeContext | None = None) -> None:
        self.run = run
        self._context = None if context is None else weakref.ref(context)
        self._state = context.state if context is not None else 0

    def stale(self) -> bool:
        if self._context is None:
            return False
        context = self._context()
        return context is None or context.state != self._state


class Members:
    """An enumeration: members compare by identity."""

    def __init__(self, name: str, *members: str) -> None:
        self.__name__ = name
        for member in members:
            setattr(self, member, f"{name}.{member}")


class FakeTrt:
    """The module: one plan of one contract, whose pass is `compute`."""

    __version__ = "0.fake"

    def __init__(
        self,
        device: FakeDevice,
        contract: Contract,
        sizes: Mapping[str, int],
        profiles: Mapping[str, Mapping[str, Sequence[int]]],
        compute: Callable[[Tensors], Tensors],
        output_shape: Callable[[Mapping[str, tuple[int, ...]]], tuple[int, ...]],
        *,
        dtypes: Mapping[str, str] | None = None,
        rtx: bool = False,
    ) -> None:
        self.__name__ = "fake_rtx" if rtx else "fake_tensorrt"
        self.device, self.contract, self.sizes, self.compute = device, contract, sizes, compute
        self.profiles: list[Profile] = read_profiles(contract, profiles)
        self.output_shape = output_shape
        self.names = [*contract.inputs, contract.output]
        self.dtypes = {name: self._type(contract.inputs.get(name, ("float32", ()))[0]) for name in self.names}
        self.dtypes |= {name: f"DataType.{dtype}" for name, dtype in (dtypes or {}).items()}
        self.shape_inputs: set[str] = set()
        self.workspace_bytes = 4096
        self.stream_capturable = True
        self.contexts: weakref.WeakSet[FakeContext] = weakref.WeakSet()
        self.contexts_made = 0
        self.passes: list[dict[str, tuple[int, ...]]] = []
        self.caches: list[FakeCache] = []
        self.TensorIOMode = Members("TensorIOMode", "INPUT", "OUTPUT")
        self.TensorLocation = Members("TensorLocation", "DEVICE", "HOST")
        self.DataType = Members("DataType", "FLOAT", "BF16", "INT64", "HALF", "INT32")
        self.ExecutionContextAllocationStrategy = Members("Strategy", "STATIC", "USER_MANAGED")
        self.ILogger = FakeLogger
        if rtx:
            self.IRuntimeCache = FakeCache
            self.CudaGraphStrategy = Members("CudaGraphStrategy", "DISABLED", "WHOLE_GRAPH_CAPTURE")
            self.DynamicShapesKernelSpecializationStrategy = Members("Specialization", "EAGER", "LAZY", "NONE")

    def Runtime(self, log: FakeLogger) -> FakeRuntime:
        return FakeRuntime(self, log)

    def _type(self, dtype: str) -> str:
        return {"float32": "DataType.FLOAT", "int64": "DataType.INT64"}[dtype]


class FakeLogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO = "internal", "error", "warning", "info"

    def __init__(self) -> None: ...

    def log(self, severity: str, text: str) -> None: ...


class FakeRuntime:
    def __init__(self, trt: FakeTrt, log: FakeLogger) -> None:
        self._trt, self._log = trt, log

    def deserialize_cuda_engine(self, plan: bytes) -> FakeCudaEngine | None:
        self._log.log(FakeLogger.INFO, "not an error")
        if self._trt.device.fails("deserialize") or plan != PLAN:
            self._log.log(FakeLogger.ERROR, "wrong magic tag")
            return None
        return FakeCudaEngine(self._trt)


class FakeCudaEngine:
    def __init__(self, trt: FakeTrt) -> None:
        self._trt = trt
        self.num_io_tensors = len(trt.names)
        self.num_optimization_profiles = len(trt.profiles)
        self.device_memory_size_v2 = trt.workspace_bytes

    def get_tensor_name(self, index: int) -> str:
        return self._trt.names[index]

    def get_tensor_mode(self, name: str) -> str:
        return "TensorIOMode.OUTPUT" if name == self._trt.contract.output else "TensorIOMode.INPUT"

    def get_tensor_dtype(self, name: str) -> str:
        return self._trt.dtypes[name]

    def get_tensor_location(self, name: str) -> str:
        return "TensorLocation.DEVICE"

    def is_shape_inference_io(self, name: str) -> bool:
        return name in self._trt.shape_inputs

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        return self._trt.profiles[index].shapes(self._trt.contract.inputs[name][1], self._trt.sizes)

    def create_runtime_config(self) -> FakeConfig:
        return FakeConfig(self._trt)

    def create_execution_context(self, how: Any) -> FakeContext | None:
        strategy = how.strategy if isinstance(how, FakeConfig) else how
        if strategy != "Strategy.USER_MANAGED":
            raise self._trt.device.breach(f"contexts with activation memory of their own: {how}")
        if self._trt.device.fails("create_execution_context"):
            return None
        return FakeContext(self._trt)


class FakeConfig:
    """IRuntimeConfig."""

    def __init__(self, trt: FakeTrt) -> None:
        self._trt = trt
        self.strategy = "Strategy.STATIC"
        self.cuda_graph_strategy = self.dynamic_shapes_kernel_specialization_strategy = ""

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> FakeCache:
        self._trt.caches.append(FakeCache())
        return self._trt.caches[-1]

    def set_runtime_cache(self, cache: FakeCache) -> bool:
        return True


class FakeCache:
    """IRuntimeCache."""

    content, broken = b"kernels", False

    def serialize(self) -> bytes | None:
        return None if self.broken else self.content

    def deserialize(self, content: bytes) -> bool:
        return content == self.content


class FakeContext:
    """IExecutionContext."""

    def __init__(self, trt: FakeTrt) -> None:
        self._trt, self._device = trt, trt.device
        self.state = 0  # counts what would invalidate a captured graph
        self._profile: Profile | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._workspace = (0, 0)
        self._settled = False  # ran since the last change
        trt.contexts.add(self)
        trt.contexts_made += 1

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self._change()
        self._profile, self._shapes = self._trt.profiles[index], {}
        return not self._device.fails("set_optimization_profile_async")

    def set_device_memory(self, address: int, size: int) -> None:
        self._change()
        if size < self._trt.workspace_bytes or address % 256:
            raise self._device.breach("too little or misaligned activation memory")
        self._workspace = address, size

    def set_input_shape(self, name: str, dims: tuple[int, ...]) -> bool:
        self._change()
        if self._profile is None:
            raise self._device.breach("shapes before a profile")
        least, _, most = self._profile.shapes(self._trt.contract.inputs[name][1], self._trt.sizes)
        if not all(low <= size <= high for low, size, high in zip(least, dims, most, strict=True)):
            raise self._device.breach(f"{name} of shape {dims} is outside profile {self._profile.name}")
        self._shapes[name] = dims
        return not self._device.fails("set_input_shape")

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if self._shapes.keys() != self._trt.contract.inputs.keys():
            raise self._device.breach("a shape is asked for before all inputs have theirs")
        return self._trt.output_shape(self._shapes)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._change()
        self._addresses[name] = address
        return not self._device.fails("set_tensor_address")

    def is_stream_capturable(self, stream: int) -> bool:
        return self._trt.stream_capturable

    def execute_async_v3(self, stream: int) -> bool:
        device, trt = self._device, self._trt
        capturing = stream in device.capturing
        if self._shapes.keys() != trt.contract.inputs.keys() or self._addresses.keys() != set(trt.names):
            raise device.breach("a pass before all shapes and addresses are set")
        if capturing and not self._settled:
            raise device.breach("a capture right after a change: a plain pass comes first")
        if device.fails("execute_async_v3"):
            if capturing:
                device.invalidated.add(stream)
            return False
        if capturing and device.refuse_capture:
            device.invalidated.add(stream)
            return False
        self._settled = True
        shapes = {**self._shapes, trt.contract.output: trt.output_shape(self._shapes)}
        addresses, workspace = dict(self._addresses), self._workspace

        def run() -> None:
            if trt.workspace_bytes:
                device.covering(*workspace)[:] = 0x5A
            trt.passes.append(shapes)
            outputs = trt.compute({name: self._read(name, addresses[name], shapes[name]) for name in self._shapes})
            self._write(trt.contract.output, addresses, outputs)

        for name, dims in shapes.items():  # room is asked for here already, as the real one may start at once
            device.covering(addresses[name], self._size(name, dims))
        device.submit(stream, Operation(run, self))
        return True

    def _change(self) -> None:
        self.state += 1
        self._settled = False
        if self._device.capturing:
            raise self._device.breach("a context is changed during a capture")

    def _stored(self, name: str) -> np.dtype[Any]:
        return np.dtype(
            {"DataType.FLOAT": "float32", "DataType.BF16": "uint16", "DataType.INT64": "int64"}[self._trt.dtypes[name]]
        )

    def _size(self, name: str, dims: tuple[int, ...]) -> int:
        return int(np.prod(dims)) * self._stored(name).itemsize

    def _read(self, name: str, address: int, dims: tuple[int, ...]) -> np.ndarray:
        dtype = self._stored(name)
        array = self._device.covering(address, self._size(name, dims)).view(dtype).reshape(dims)
        return float32_of_bfloat16(array) if dtype == np.uint16 else array.copy()

    def _write(self, name: str, addresses: dict[str, int], outputs: Tensors) -> None:
        array = outputs[name]
        if self._stored(name) == np.uint16:
            array = (np.ascontiguousarray(array).view(np.uint32) >> 16).astype(np.uint16)
        bytes_ = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._device.covering(addresses[name], bytes_.nbytes)[:] = bytes_
