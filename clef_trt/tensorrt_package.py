"""The two packages of TensorRT behind one door: loading, what differs between them, and the checks of a plan.

`tensorrt` is the enterprise package, `tensorrt_rtx_bindings` TensorRT for RTX; nearly all of their API is the same.
"""

from __future__ import annotations

import functools
import importlib
import logging
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .contract import Contract
from .errors import EngineError, MissingExtraError, SettingError
from .profiles import Profile

logger = logging.getLogger("clef_trt")

EXTRAS = {"tensorrt": "tensorrt", "tensorrt_rtx_bindings": "rtx"}  # module → extra that installs it
# Everything the runtime uses of either package, and of the RTX package besides; a test looks for it there.
USED = (
    *("__version__", "ILogger.INTERNAL_ERROR", "ILogger.ERROR", "ILogger.WARNING", "ILogger.log"),
    *("Runtime.deserialize_cuda_engine", "TensorIOMode.INPUT", "TensorIOMode.OUTPUT", "TensorLocation.DEVICE"),
    *("DataType.FLOAT", "DataType.BF16", "DataType.INT64", "ExecutionContextAllocationStrategy.USER_MANAGED"),
    *("ICudaEngine.num_io_tensors", "ICudaEngine.get_tensor_name", "ICudaEngine.get_tensor_mode"),
    *("ICudaEngine.get_tensor_dtype", "ICudaEngine.get_tensor_location", "ICudaEngine.is_shape_inference_io"),
    *("ICudaEngine.num_optimization_profiles", "ICudaEngine.get_tensor_profile_shape"),
    *("ICudaEngine.device_memory_size_v2", "ICudaEngine.create_execution_context"),
    *("IExecutionContext.set_optimization_profile_async", "IExecutionContext.set_device_memory"),
    *("IExecutionContext.set_input_shape", "IExecutionContext.set_tensor_address"),
    *("IExecutionContext.get_tensor_shape", "IExecutionContext.execute_async_v3"),
)
USED_OF_RTX = (
    *("ICudaEngine.create_runtime_config", "IRuntimeConfig.set_execution_context_allocation_strategy"),
    *("IRuntimeConfig.cuda_graph_strategy", "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy"),
    *("IRuntimeConfig.create_runtime_cache", "IRuntimeConfig.set_runtime_cache", "IRuntimeCache.serialize"),
    *("IRuntimeCache.deserialize", "CudaGraphStrategy.DISABLED", "CudaGraphStrategy.WHOLE_GRAPH_CAPTURE"),
    *("DynamicShapesKernelSpecializationStrategy.EAGER", "DynamicShapesKernelSpecializationStrategy.LAZY"),
    *("DynamicShapesKernelSpecializationStrategy.NONE", "IExecutionContext.is_stream_capturable"),
)

MODULES = {"tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt_rtx_bindings"}  # target → what is imported


@dataclass(frozen=True)
class RtxSettings:
    """What only TensorRT for RTX has.

    runtime_cache: file of compiled kernels, read if it is there and written after first use; None for no cache.
    cuda_graph_strategy: DISABLED, or WHOLE_GRAPH_CAPTURE for graphs kept by TensorRT in place of this package's.
    dynamic_shapes_kernel_specialization_strategy: EAGER, LAZY or NONE. A captured graph keeps the kernels it was
    captured with, so LAZY ones that are compiled later would not be used.
    """

    runtime_cache: Path | None = None
    cuda_graph_strategy: str = "DISABLED"
    dynamic_shapes_kernel_specialization_strategy: str = "EAGER"


def import_tensorrt(name: str) -> Any:
    """The module `tensorrt` or `tensorrt_rtx_bindings`; raises MissingExtraError naming the extra that installs it."""
    if name not in EXTRAS:
        raise SettingError(f"TensorRT package is {name!r}; expected one of {', '.join(EXTRAS)}")
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as fault:  # OSError: the package is there, one of its libraries is not
        raise MissingExtraError(f"a plan of {name}", EXTRAS[name], fault) from None


class Plan:
    """A deserialised plan and the settings its execution contexts share."""

    def __init__(self, trt: Any, plan: bytes | mmap.mmap, rtx: RtxSettings | None) -> None:
        """Raises EngineError with TensorRT's own words when the plan does not fit this TensorRT or this GPU."""
        self._trt = trt
        self._errors, log = _logger(trt)
        self._rtx = rtx if rtx is not None else RtxSettings()
        self.is_rtx = hasattr(trt, "IRuntimeCache")
        if rtx is not None and not self.is_rtx:
            raise SettingError(f"{trt.__name__} takes no settings of TensorRT for RTX: {rtx}")
        self._config: Any = None
        self._cache: Any = None
        self.cache_state = "none"  # none, new, loaded or rejected
        self._errors.clear()
        try:
            self._runtime = trt.Runtime(log)
        except (TypeError, RuntimeError) as fault:  # the bindings' word for a library that returned nothing
            raise self.error(f"{trt.__name__} {trt.__version__} cannot make a runtime: {fault}") from fault
        self.engine = self._runtime.deserialize_cuda_engine(plan)
        if self.engine is None:
            raise self.error(f"{trt.__name__} {trt.__version__} cannot open the plan")
        if self.is_rtx:
            self._configure_rtx()

    def error(self, what: str) -> EngineError:
        """An EngineError with what TensorRT logged last."""
        said = "; ".join(self._errors)
        self._errors.clear()
        return EngineError(f"{what}: {said}" if said else what)

    def new_context(self) -> Any:
        """An execution context that is given its activation memory, so that several can share one block."""
        if self._config is not None:
            context = self.engine.create_execution_context(self._config)
        else:
            strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
            context = self.engine.create_execution_context(strategy)
        if context is None:
            raise self.error("TensorRT cannot create an execution context")
        return context

    def capturable(self, context: Any, stream: int) -> bool:
        """False where TensorRT knows beforehand that a capture would fail; only the RTX package can say."""
        return bool(context.is_stream_capturable(stream)) if self.is_rtx else True

    def storage(self, contract: Contract) -> dict[str, np.dtype[Any]]:
        """How each tensor lies in memory; bfloat16 as uint16. Raises EngineError unless the plan is the contract's."""
        modes: dict[str, Any] = {}
        for index in range(self.engine.num_io_tensors):
            name = self.engine.get_tensor_name(index)
            modes[name] = self.engine.get_tensor_mode(name)
        found = {name for name, mode in modes.items() if mode == self._trt.TensorIOMode.INPUT}
        outputs = {name for name, mode in modes.items() if mode == self._trt.TensorIOMode.OUTPUT}
        if found != contract.inputs.keys() or outputs != {contract.output}:
            raise EngineError(
                f"the plan takes {sorted(found)} and returns {sorted(outputs)}; the {contract.name} graph takes "
                f"{sorted(contract.inputs)} and returns {[contract.output]}: build the plan from this bundle"
            )
        types = self._trt.DataType
        known = {
            "float32": ((types.FLOAT, "float32"), (types.BF16, "uint16")),
            "int64": ((types.INT64, "int64"),),
        }
        result = {}
        for name in modes:
            expected, _ = contract.inputs.get(name, ("float32", ()))
            dtype = self.engine.get_tensor_dtype(name)
            stored = [numpy_name for trt_type, numpy_name in known[expected] if trt_type == dtype]
            if not stored:
                allowed = " or ".join(str(trt_type) for trt_type, _ in known[expected])
                raise EngineError(f"{name} of the plan is {dtype}; expected {allowed}")
            # Values that decide shapes live on the host: such a plan cannot be replayed as a graph.
            on_host = self.engine.get_tensor_location(name) != self._trt.TensorLocation.DEVICE
            if on_host or self.engine.is_shape_inference_io(name):
                raise EngineError(f"the plan computes shapes from the values of {name}; expected only from its shape")
            result[name] = np.dtype(stored[0])
        return result

    def check_profiles(self, contract: Contract, profiles: Sequence[Profile], sizes: dict[str, int]) -> None:
        """Raises EngineError unless the plan was built with exactly these profiles, in this order."""
        built = self.engine.num_optimization_profiles
        if built != len(profiles):
            raise EngineError(f"the plan has {built} profiles; expected {[profile.name for profile in profiles]}")
        for index, profile in enumerate(profiles):
            for name, (_, axes) in contract.inputs.items():
                found = [tuple(dims) for dims in self.engine.get_tensor_profile_shape(name, index)]
                expected = profile.shapes(axes, sizes)
                if found != expected:
                    raise EngineError(
                        f"profile {profile.name!r} of the plan has {name} from {found[0]} over {found[1]} to "
                        f"{found[2]}; expected {expected[0]}, {expected[1]}, {expected[2]}"
                    )

    def save_cache(self) -> None:
        """Write the runtime cache, whole or not at all; a failure is logged, since only the next start is slower."""
        path = self._rtx.runtime_cache
        if self._cache is None or path is None:
            return
        temporary = None
        try:
            content = self._cache.serialize()
            if content is None:
                raise self.error("TensorRT cannot serialise its runtime cache")
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
                temporary = file.name
                file.write(content)
            os.replace(temporary, path)
        except Exception as fault:  # the bindings raise RuntimeError
            logger.warning("the runtime cache %s was not written: %s", path, fault)
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the plan; its contexts must be gone."""
        self._config = self._cache = self.engine = self._runtime = None

    def _configure_rtx(self) -> None:
        """All that differs in TensorRT for RTX: one runtime configuration with strategies and the kernel cache."""
        trt, settings = self._trt, self._rtx
        config = self.engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        config.cuda_graph_strategy = _member(
            trt.CudaGraphStrategy, settings.cuda_graph_strategy, ("DISABLED", "WHOLE_GRAPH_CAPTURE")
        )
        config.dynamic_shapes_kernel_specialization_strategy = _member(
            trt.DynamicShapesKernelSpecializationStrategy,
            settings.dynamic_shapes_kernel_specialization_strategy,
            ("EAGER", "LAZY", "NONE"),
        )
        if settings.runtime_cache is not None:
            self._cache, self.cache_state = config.create_runtime_cache(), "new"
            if settings.runtime_cache.is_file():
                # A cache of another card, driver or TensorRT is no error: it is replaced after first use.
                accepted = self._cache.deserialize(settings.runtime_cache.read_bytes())
                self.cache_state = "loaded" if accepted else "rejected"
            if not config.set_runtime_cache(self._cache):
                raise self.error("TensorRT refuses its runtime cache")
        self._config = config


def _member(enum: Any, name: str, known: tuple[str, ...]) -> Any:
    if name not in known:
        raise SettingError(f"{enum.__name__} is {name!r}; expected one of {', '.join(known)}")
    return getattr(enum, name)


@functools.cache
def _logger(trt: Any) -> tuple[deque[str], Any]:
    """The last errors TensorRT logged, and its logger.

    One per package and for good: TensorRT keeps the first logger it is given and goes on using it for later engines.
    """
    errors: deque[str] = deque(maxlen=4)

    def initialise(self: Any) -> None:
        trt.ILogger.__init__(self)

    def log(_: Any, severity: Any, text: str) -> None:
        if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
            errors.append(text)
        logger.log(logging.WARNING if severity == trt.ILogger.WARNING else logging.DEBUG, "TensorRT: %s", text)

    return errors, type("Log", (trt.ILogger,), {"__init__": initialise, "log": log})()
