"""The engine contract, and the engine that runs anywhere: ONNX Runtime on the CPU.

An engine runs one graph of a bundle: it takes the named tensors of the graph's contract and returns its output by name.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime

from .bundle import Bundle
from .contract import CONTRACTS, Tensors, into
from .errors import EngineError, MissingExtraError, SettingError

# What ONNX Runtime on the CPU runs, and the memory of a weight there (int8: embeddings and small weights are wider).
PARAMETER_BYTES = {"fp32": 4.0, "int8": 2.0}

# Tokens of a text pass and patches of a vision pass that records or frames may share on a CPU. Two cores are busy with
# far less; beyond it tensors leave the caches: 32 records of 128 tokens cost 20 % more each than 8 (bench/growth.py).
SHARED_PASS = 1024
SHARED_AXES = {"text": ("batch", "sequence"), "vision": ("groups", "patches")}

logger = logging.getLogger("clef_trt")


class Engine(Protocol):
    """What every backend does. `run` may be called from several threads."""

    def run(self, inputs: Tensors, out: np.ndarray | None = None) -> Tensors:
        """The contract's inputs → {its output: float32}; raises EngineError for inputs outside the contract.

        `out`: contiguous memory of the output's shape, which is written and returned as the output.
        """

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """Whether one pass may have these sizes of the contract's dynamic axes."""

    def info(self) -> dict[str, Any]:
        """What is in effect: backend, versions, settings."""

    def close(self) -> None:
        """Release memory; the engine must not be run afterwards."""


class OnnxRuntimeEngine:
    """One graph of a bundle on ONNX Runtime: its CPU provider, or CUDA."""

    def __init__(
        self,
        bundle: Bundle,
        graph: str = "text",
        threads: int | None = None,
        model: bytes | None = None,
        cuda: bool = False,
        profile: str | None = None,
    ) -> None:
        """`threads`: worker threads of one pass; None leaves the choice (one per core) to ONNX Runtime.

        `model`: an ONNX model to run in place of the bundle's own, over the same weights. `cuda`: needs
        onnxruntime-gpu in the place of onnxruntime; inputs and the output are then bound to the device once per pass.
        `profile`: prefix of a file for ONNX Runtime's profile, which `end_profiling` completes.
        """
        if threads is not None and (type(threads) is not int or threads < 1):
            raise SettingError(f"threads is {threads!r}; expected at least 1, or None for one per core")
        provider = "CUDAExecutionProvider" if cuda else "CPUExecutionProvider"
        if provider not in onnxruntime.get_available_providers():
            raise MissingExtraError("engine onnxruntime-cuda", "cuda", "this onnxruntime has no CUDA provider")
        self._contract = CONTRACTS[graph]
        self._sizes = bundle.manifest.model.sizes
        self._cuda = cuda
        if not cuda:
            _require_memory(bundle, graph)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        # Shapes change from pass to pass: remembering each one's memory plan only costs memory. Reuse ties tensors of
        # one shape to one buffer that is kept until the last of them is done: every layer's buffers at once.
        options.enable_mem_pattern = options.enable_mem_reuse = False
        exact = bundle.manifest.precision == "int8" and products_saturate()
        if exact:
            options.add_session_config_entry("session.x64quantprecision", "1")
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", os.path.realpath(bundle.weights_root)
        )
        if profile is not None:
            options.enable_profiling, options.profile_file_prefix = True, profile
        path = bundle.path(bundle.manifest.graphs[graph].file)
        try:
            self._session: onnxruntime.InferenceSession | None = onnxruntime.InferenceSession(
                model or path.read_bytes(), options, providers=[provider]
            )
        except Exception as fault:  # ONNX Runtime raises a class per status, all directly under Exception
            raise EngineError(f"ONNX Runtime cannot open {path}: {fault}") from fault
        if provider not in self._session.get_providers():
            raise EngineError(f"ONNX Runtime fell back to {self._session.get_providers()}: CUDA or a GPU is missing")
        self._info = {
            "engine": "onnxruntime-cuda" if cuda else "onnxruntime",
            "version": onnxruntime.__version__,
            "provider": provider,
            "precision": bundle.manifest.precision,
            "threads": threads or os.cpu_count(),
        }
        if exact:
            self._info["int8"] = "slower, exact products: this CPU's 8-bit products saturate (it has no VNNI)"
        if double := _installed_twice():
            self._info["warning"] = double

    def run(self, inputs: Tensors, out: np.ndarray | None = None) -> Tensors:
        """See Engine.run; on the CPU contiguous inputs are read in place, and `out` is written without a copy."""
        session = self._session
        if session is None:
            raise EngineError("the engine is closed")
        self._contract.check(inputs, self._sizes)
        if out is not None:
            self._contract.check_output(out, inputs)
        output = self._contract.output
        try:
            if self._cuda:
                result = self._bound(session, inputs)
            elif out is not None:
                self._run_into(session, inputs, out)
                return {output: out}
            else:
                (result,) = session.run([output], inputs)
        except Exception as fault:
            raise EngineError(f"ONNX Runtime failed: {fault}") from fault
        return {output: into(out, np.asarray(result))}

    def _run_into(self, session: onnxruntime.InferenceSession, inputs: Tensors, out: np.ndarray) -> None:
        """One pass whose output is written where `out` lies."""
        binding = session.io_binding()
        # A binding holds addresses only, so `arrays` keeps copies of what is not contiguous alive.
        arrays = {name: np.ascontiguousarray(array) for name, array in inputs.items()}
        for name, array in arrays.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output(self._contract.output, "cpu", 0, np.float32, list(out.shape), out.ctypes.data)
        session.run_with_iobinding(binding)

    def _bound(self, session: onnxruntime.InferenceSession, inputs: Tensors) -> np.ndarray:
        """One pass with its tensors on the device; copied there and back once."""
        binding = session.io_binding()
        for name, array in inputs.items():
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
        binding.bind_output(self._contract.output, "cuda")
        session.run_with_iobinding(binding)
        return np.asarray(binding.copy_outputs_to_cpu()[0])

    def end_profiling(self) -> str:
        """The file with the time of every node, in Chrome's trace format; the engine was opened with `profile`."""
        if self._session is None:
            raise EngineError("the engine is closed")
        return str(self._session.end_profiling())

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """See Engine.fits: on the CPU, what shares a pass to some gain; records and images alone may be of any size."""
        return self._cuda or prod(sizes[axis] for axis in SHARED_AXES[self._contract.name]) <= SHARED_PASS

    def info(self) -> dict[str, Any]:
        """See Engine.info."""
        return dict(self._info)

    def close(self) -> None:
        """See Engine.close."""
        self._session = None


def products_saturate(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether ONNX Runtime's products of uint8 and int8 overflow 16 bits: on x86 without VNNI instructions.

    Asked for exact products, it took slower ones on a CPU with VNNI too, so it is asked only where they are needed.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")).split()
    except (OSError, StopIteration):
        return True
    return not {"avx512_vnni", "avx_vnni"} & set(flags)


def _installed_twice() -> str | None:
    """onnxruntime and onnxruntime-gpu share their import folder: with both, what is imported is a mixture."""
    names = {name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)}
    if len(names) < 2:
        return None
    return "onnxruntime and onnxruntime-gpu are both installed; uninstall both, then install one of them"


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _require_memory(bundle: Bundle, graph: str) -> None:
    """Say what the weights need before they are loaded, and refuse what this machine cannot hold."""
    needed = PARAMETER_BYTES.get(bundle.manifest.precision, 4.0) * bundle.manifest.graphs[graph].parameters
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        raise EngineError(
            f"the {graph} graph of {bundle.manifest.source.name} needs about {needed / 1e9:.0f} GB for its weights in "
            f"{bundle.manifest.precision}; this machine has {present / 1e9:.0f} GB. Use a machine with more memory, or "
            "another precision"
        )
    if needed > 4e9:
        logger.warning("loading about %.0f GB of weights", needed / 1e9)
