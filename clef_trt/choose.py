"""Which engine runs a bundle: by name, or the best one this machine has."""

from __future__ import annotations

import mmap
from collections.abc import Callable

from .bundle import Bundle, PlanRecord
from .contract import CONTRACTS
from .device import CudaDevice, Device
from .engine import PARAMETER_BYTES, Engine, OnnxRuntimeEngine
from .errors import ClefError, EngineError, SettingError
from .hashes import cache_file
from .tensorrt import TensorRTEngine
from .tensorrt_package import MODULES, RtxSettings

ENGINES = ("auto", "onnxruntime", "onnxruntime-cuda", "tensorrt", "tensorrt_rtx")


def open_engine(
    name: str,
    bundle: Bundle,
    graph: str = "text",
    threads: int | None = None,
    open_device: Callable[[], Device] = CudaDevice,
) -> Engine:
    """The engine `name` over a bundle's graph.

    `auto` takes a plan whose card is present, else ONNX Runtime on the CPU where it runs the precision. Raises
    SettingError for an unknown name, EngineError that says what would work, MissingExtraError.
    """
    if name not in ENGINES:
        raise SettingError(f"engine is {name!r}; expected one of {', '.join(ENGINES)}")
    if name in MODULES:
        plans = [plan for plan in bundle.manifest.plans if plan.target == name]
        if not plans:
            raise EngineError(f"{bundle.folder} has no plan for {name}: make one with clef-trt build; {_built(bundle)}")
        device = open_device()
        return _over_plan(bundle, _fitting(plans, device), graph, device)
    if name == "auto" and bundle.manifest.plans:
        try:
            device = open_device()
            return _over_plan(bundle, _fitting(bundle.manifest.plans, device), graph, device)
        except ClefError as fault:
            if bundle.manifest.precision not in PARAMETER_BYTES:
                raise EngineError(f"no plan of {bundle.folder} runs here: {fault}") from fault
    if bundle.manifest.precision not in PARAMETER_BYTES:
        raise EngineError(
            f"{bundle.folder} is {bundle.manifest.precision}; ONNX Runtime runs {', '.join(PARAMETER_BYTES)}: build a "
            f"TensorRT plan of it, or export the release again in one of those; {_built(bundle)}"
        )
    return OnnxRuntimeEngine(bundle, graph, threads, cuda=name == "onnxruntime-cuda")


def _built(bundle: Bundle) -> str:
    plans = [f"{plan.recipe} ({', '.join(plan.compute_capabilities)})" for plan in bundle.manifest.plans]
    return f"built are {', '.join(plans)}" if plans else "nothing is built yet"


def _fitting(plans: list[PlanRecord], device: Device) -> PlanRecord:
    """The first plan for the card."""
    major, minor = device.compute_capability()
    for plan in plans:
        if f"{major}.{minor}" in plan.compute_capabilities:
            return plan
    built = sorted({card for plan in plans for card in plan.compute_capabilities})
    raise EngineError(f"{device.name()} has compute capability {major}.{minor}; the plans are for {', '.join(built)}")


def _over_plan(bundle: Bundle, plan: PlanRecord, graph: str, device: Device) -> Engine:
    rtx = None
    if plan.runtime:
        cache = cache_file().parent / f"{plan.recipe_sha256[:16]}.{graph}.rtx-cache"
        rtx = RtxSettings(runtime_cache=cache, **plan.runtime)
    with bundle.path(plan.files[graph]).open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return TensorRTEngine(
        MODULES[plan.target],
        content,
        CONTRACTS[graph],
        bundle.manifest.model.sizes,
        plan.profiles[graph],
        device,
        precision=plan.precision,
        rtx=rtx,
    )
