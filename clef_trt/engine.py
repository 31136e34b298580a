"""The engine contract, and the engine that runs anywhere: ONNX Runtime on the CPU.

An engine runs one graph of a bundle: it takes the named tensors of the graph's contract and returns its output by name.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Protocol

import numpy as np
import onnxruntime

from .bundle import Bundle
from .contract import CONTRACTS, Tensors
from .errors import EngineError, SettingError

# What ONNX Runtime on the CPU runs, and the memory of a weight there (int8: embeddings and small weights are wider).
PARAMETER_BYTES = {"fp32": 4.0, "int8": 2.0}

logger = logging.getLogger("clef_trt")


class Engine(Protocol):
    """What every backend does. `run` may be called from several threads."""

    def run(self, inputs: Tensors) -> Tensors:
        """The contract's inputs → {its output: float32}; raises EngineError for inputs outside the contract."""

    def info(self) -> dict[str, Any]:
        """What is in effect: backend, versions, settings."""

    def close(self) -> None:
        """Release memory; the engine must not be run afterwards."""


class OnnxRuntimeEngine:
    """One graph of a bundle on ONNX Runtime's CPU provider."""

    def __init__(
        self, bundle: Bundle, graph: str = "text", threads: int | None = None, model: bytes | None = None
    ) -> None:
        """`threads`: worker threads of one pass; None leaves the choice (one per core) to ONNX Runtime.

        `model`: an ONNX model to run in place of the bundle's own, over the same weights.
        """
        if threads is not None and threads < 1:
            raise SettingError(f"threads is {threads}; expected at least 1, or None for one per core")
        self._contract = CONTRACTS[graph]
        self._sizes = bundle.manifest.model.sizes
        _require_memory(bundle, graph)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        # Shapes change from pass to pass: remembering each one's memory plan only costs memory.
        options.enable_mem_pattern = False
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", os.path.realpath(bundle.weights_root)
        )
        path = bundle.path(bundle.manifest.graphs[graph].file)
        try:
            self._session: onnxruntime.InferenceSession | None = onnxruntime.InferenceSession(
                model or path.read_bytes(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as fault:  # ONNX Runtime raises a class per status, all directly under Exception
            raise EngineError(f"ONNX Runtime cannot open {path}: {fault}") from fault
        self._info = {
            "engine": "onnxruntime",
            "version": onnxruntime.__version__,
            "provider": "CPUExecutionProvider",
            "precision": bundle.manifest.precision,
            "threads": threads or os.cpu_count(),
        }

    def run(self, inputs: Tensors) -> Tensors:
        """See Engine.run."""
        session = self._session
        if session is None:
            raise EngineError("the engine is closed")
        self._contract.check(inputs, self._sizes)
        try:
            (output,) = session.run([self._contract.output], inputs)
        except Exception as fault:
            raise EngineError(f"ONNX Runtime failed: {fault}") from fault
        return {self._contract.output: np.asarray(output)}

    def info(self) -> dict[str, Any]:
        """See Engine.info."""
        return dict(self._info)

    def close(self) -> None:
        """See Engine.close."""
        self._session = None


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


def open_engine(name: str, bundle: Bundle, graph: str = "text", threads: int | None = None) -> Engine:
    """The engine `name` over a bundle's graph: `onnxruntime`, or `auto` for the best one this machine can run."""
    known = ("auto", "onnxruntime")
    if name not in known:
        raise SettingError(f"engine is {name!r}; expected one of {', '.join(known)}")
    if bundle.manifest.precision not in PARAMETER_BYTES:
        raise EngineError(
            f"{bundle.folder} is {bundle.manifest.precision}; ONNX Runtime on the CPU runs "
            f"{', '.join(PARAMETER_BYTES)}: build a TensorRT plan of it, or export the release again in one of those"
        )
    return OnnxRuntimeEngine(bundle, graph, threads)
