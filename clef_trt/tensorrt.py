"""A plan of TensorRT as an engine: padded buckets, persistent buffers, one CUDA graph per bucket."""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .buffers import Buffers, allocate
from .contract import Contract, Tensors, into
from .device import Device, attempt, record
from .errors import EngineError, SettingError
from .execution import Bucket, Execution, Layout
from .profiles import choose, read_profiles, sizes_of
from .tensorrt_package import Plan, RtxSettings, import_tensorrt

Key = tuple[int, Bucket]  # profile and bucket


class TensorRTEngine:
    """One graph of a bundle on TensorRT. See engine.Engine.

    A captured graph holds its execution context's state, and setting another shape changes that: so every graph has a
    context of its own. All contexts share one block of activation memory; passes run one after the other.
    """

    def __init__(
        self,
        trt: Any,
        plan: bytes | mmap.mmap,
        contract: Contract,
        sizes: Mapping[str, int],
        profiles: Mapping[str, Mapping[str, Sequence[int]]],
        device: Device,
        *,
        graphs: int = 16,
        precision: str | None = None,
        rtx: RtxSettings | None = None,
    ) -> None:
        """Open a serialised plan; a mapped file spares the host a copy of the weights, and may be closed afterwards.

        trt: "tensorrt", "tensorrt_rtx_bindings", or the module itself. sizes: the model's own sizes (contract.SIZES).
        profiles: {name: {axis: (min, opt, max)}} over the contract's dynamic axes, in the plan's order.
        graphs: CUDA graphs kept, the least recently used is dropped; 0 enqueues every pass.

        Raises MissingExtraError, SettingError, and EngineError when the plan does not open or is not of this contract.
        """
        if graphs < 0:
            raise SettingError(f"graphs is {graphs}; expected at least 0 (every pass enqueued)")
        self._contract, self._sizes, self._device = contract, dict(sizes), device
        self._profiles = read_profiles(contract, profiles)
        # TensorRT's own graphs take the place of ours: it would capture inside a capture.
        own = rtx is None or rtx.cuda_graph_strategy == "DISABLED"
        self._graphs = graphs if own else 0
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        self._stream = 0  # 0: none, as the default stream is never used
        self._workspace = 0  # address of the activation memory, 0: none
        self._captured: OrderedDict[Key, Execution] = OrderedDict()  # least recently used first
        self._plain: dict[int, Execution] = {}  # per profile, for what is not captured
        self._uncapturable: dict[Key, str] = {}  # with the reason
        self._counts = {"passes": 0, "captures": 0, "replays": 0}
        self._cache_is_behind = False
        module = import_tensorrt(trt) if isinstance(trt, str) else trt
        self._buffers: list[Buffers] = []
        try:
            device.activate()
            free, total = device.memory()
            if len(plan) > free:
                raise EngineError(
                    f"the plan needs at least {len(plan) / 1e9:.1f} GB on the GPU; {device.name()} has "
                    f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
                )
            self._plan = Plan(module, plan, rtx)
            self._layout = Layout(contract, self._sizes, self._plan.storage(contract))
            self._plan.check_profiles(contract, self._profiles, self._sizes)
            self._workspace_bytes = int(self._plan.engine.device_memory_size_v2)
            if self._workspace_bytes:
                self._workspace = allocate(device, self._workspace_bytes, "activation memory of the plan")
            self._stream = device.create_stream()
            for profile in self._profiles:
                most = {
                    name: self._layout.size_bytes(name, profile.shapes(axes, self._sizes)[2])
                    for name, (_, axes) in contract.inputs.items()
                }
                self._buffers.append(Buffers(device, most))
            major, minor = device.compute_capability()
            self._fixed_info = {
                "engine": module.__name__,
                "version": module.__version__,
                "device": device.name(),
                "compute_capability": f"{major}.{minor}",
                "precision": precision,
                "profiles": {profile.name: dict(profile.axes) for profile in self._profiles},
                "activation_bytes": self._workspace_bytes,
                "cuda_graphs": "own" if self._graphs else "none" if own else "tensorrt",
                "graph_limit": self._graphs,
                "runtime_cache": self._plan.cache_state,
            }
        except BaseException:
            self._release()
            raise

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """See Engine.fits: whether any profile takes them."""
        return any(profile.misfit(sizes) is None for profile in self._profiles)

    def run(self, inputs: Tensors, out: np.ndarray | None = None) -> Tensors:
        """See Engine.run; the output is float32, cut back to the sizes of the inputs, and copied to `out`."""
        with self._lock:
            plan = self._plan
            if plan is None:
                raise EngineError("the engine is closed")
            self._contract.check(inputs, self._sizes)
            if out is not None:
                self._contract.check_output(out, inputs)
            sizes = sizes_of(self._contract, inputs)
            profile = choose(self._profiles, sizes)
            key = profile, tuple(self._profiles[profile].bucket(sizes).items())
            self._device.activate()
            try:
                output = self._pass(plan, key, inputs, sizes)
            except BaseException as fault:
                # Whatever state its context is in now, no later pass meets it.
                self._drop(key)
                if isinstance(fault, EngineError) or not isinstance(fault, Exception):
                    raise
                raise plan.error(f"TensorRT failed: {fault}") from fault
            self._counts["passes"] += 1
            return {self._contract.output: into(out, output)}

    def info(self) -> dict[str, Any]:
        """See Engine.info. `fallbacks`: buckets whose capture failed, `fallback_reasons` why: they are enqueued."""
        with self._lock:
            return {
                **self._fixed_info,
                **self._counts,
                "graphs": len(self._captured),
                "fallbacks": len(self._uncapturable),
                "fallback_reasons": sorted(set(self._uncapturable.values())),
                "buffer_bytes": sum(buffers.size_bytes for buffers in self._buffers),
            }

    def close(self) -> None:
        """See Engine.close; may be called again."""
        with self._lock:
            if self._plan is not None:
                attempt(lambda device: device.activate(), self._device)
                self._release()

    def _pass(self, plan: Plan, key: Key, inputs: Tensors, sizes: Mapping[str, int]) -> np.ndarray:
        """One pass, waited for; the first of a bucket is enqueued and then captured, later ones replay the graph."""
        execution = self._execution(plan, key)
        self._prepare(execution, key[1])
        execution.write(inputs)
        if execution.executable is not None:
            self._device.launch(execution.executable, self._stream)
            self._counts["replays"] += 1
        else:
            execution.submit()
        self._device.synchronise(self._stream)
        output = execution.read(sizes)
        if key in self._captured and execution.executable is None:
            self._capture(key, execution)
        if not self._counts["passes"]:
            # The kernels of the first pass are kept at once, those of later shapes when the engine is closed.
            plan.save_cache()
            self._cache_is_behind = False
        return output

    def _execution(self, plan: Plan, key: Key) -> Execution:
        """The context to run a bucket with: its own one, or its profile's where it is not captured."""
        profile = key[0]
        if not self._graphs or key in self._uncapturable:
            if profile not in self._plain:
                self._plain[profile] = self._new_execution(plan, profile)
            return self._plain[profile]
        if key in self._captured:
            self._captured.move_to_end(key)
            return self._captured[key]
        execution = None
        if len(self._captured) >= self._graphs:
            _, oldest = self._captured.popitem(last=False)
            self._destroy_graph(oldest)
            # Creating a context costs more than giving one other shapes, now that no graph holds its state.
            execution = oldest if oldest.profile == profile else None
        execution = execution or self._new_execution(plan, profile)
        self._captured[key] = execution
        return execution

    def _new_execution(self, plan: Plan, profile: int) -> Execution:
        execution = Execution(plan, self._layout, profile, self._device, self._stream)
        if self._workspace:
            execution.use_workspace(self._workspace, self._workspace_bytes)
        return execution

    def _prepare(self, execution: Execution, bucket: Bucket) -> None:
        """Shapes, room in the buffers, and their addresses: each only where it changed."""
        buffers = self._buffers[execution.profile]
        if execution.is_ready(bucket, buffers):
            return
        self._cache_is_behind = True
        needed = execution.reshape(bucket)
        if not buffers.fit(needed):
            # Buffers are about to move: no graph that holds their addresses may stay.
            for key, other in list(self._captured.items()):
                if other.profile == execution.profile and other is not execution:
                    del self._captured[key]
                    self._destroy_graph(other)
            buffers.grow(needed)
        execution.bind(buffers)

    def _capture(self, key: Key, execution: Execution) -> None:
        """Capture the pass; where that fails, its bucket is enqueued from now on."""
        try:
            if not execution.capturable():
                raise EngineError("TensorRT says that the pass cannot be captured")
            execution.executable = record(self._device, self._stream, execution.submit)
            self._counts["captures"] += 1
        except Exception as fault:  # the bindings raise RuntimeError beside returning False
            self._uncapturable[key] = str(fault)
            del self._captured[key]
            self._plain.setdefault(key[0], execution)

    def _destroy_graph(self, execution: Execution) -> None:
        if execution.executable is not None:
            executable, execution.executable = execution.executable, None
            attempt(self._device.destroy_executable, executable)

    def _drop(self, key: Key) -> None:
        """Give up the context of a failed pass, once nothing of the pass runs any more."""
        attempt(self._device.synchronise, self._stream)
        execution = self._captured.pop(key, None) or self._plain.pop(key[0], None)
        if execution is not None:
            self._destroy_graph(execution)

    def _release(self) -> None:
        """Give everything back, each thing once, in the order of who uses whom."""
        if self._stream:
            attempt(self._device.synchronise, self._stream)
        for execution in self._captured.values():
            self._destroy_graph(execution)
        self._captured.clear()
        self._plain.clear()
        plan, self._plan = self._plan, None
        if plan is not None:
            if self._cache_is_behind:
                plan.save_cache()
            plan.close()
        for buffers in self._buffers:
            buffers.release()
        self._buffers.clear()
        if self._workspace:
            attempt(self._device.free, self._workspace)
            self._workspace = 0
        if self._stream:
            attempt(self._device.destroy_stream, self._stream)
            self._stream = 0
