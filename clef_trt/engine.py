"""The engine contract, and the engine that runs anywhere: ONNX Runtime on the CPU.

An engine takes the named tensors of TEXT_INPUTS and returns {"logits": [batch, options] float32}.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Protocol

import numpy as np
import onnxruntime

from .bundle import Bundle
from .errors import EngineError, SettingError

logger = logging.getLogger("clef_trt")

Tensors = dict[str, np.ndarray]

# name: (dtype, axes); an axis is dynamic where it is a name (hidden is the model's). Padding: tokens and media rows by
# -1 or anything (they are never seen), questions and options by an empty span, options also by question -1.
TEXT_INPUTS: dict[str, tuple[str, tuple[str | int, ...]]] = {
    "input_ids": ("int64", ("batch", "sequence")),
    "position_ids": ("int64", (3, "batch", "sequence")),  # time, height, width
    "sequence_lengths": ("int64", ("batch",)),
    "media_embeddings": ("float32", ("media", "hidden")),  # one zero row where there is no media
    "media_rows": ("int64", ("batch", "sequence")),  # row of media_embeddings per token, -1 for text
    "question_spans": ("int64", ("batch", "questions", 2)),
    "question_types": ("int64", ("batch", "questions")),  # index into types.QUESTION_TYPES
    "option_spans": ("int64", ("batch", "options", 2)),
    "option_questions": ("int64", ("batch", "options")),
}


class Engine(Protocol):
    """What every backend does. `run` may be called from several threads."""

    def run(self, inputs: Tensors) -> Tensors:
        """TEXT_INPUTS -> {"logits": float32 [batch, options]}; raises EngineError for inputs outside the contract."""

    def info(self) -> dict[str, Any]:
        """What is in effect: backend, versions, settings."""

    def close(self) -> None:
        """Release memory; the engine must not be run afterwards."""


def check_inputs(inputs: Tensors, hidden_size: int) -> None:
    """Raises EngineError where `inputs` are not TEXT_INPUTS: unknown or missing names, dtypes, axes that disagree."""
    if inputs.keys() != TEXT_INPUTS.keys():
        wrong = sorted(inputs.keys() ^ TEXT_INPUTS.keys())
        raise EngineError(f"unknown or missing inputs {wrong}; the engine takes {sorted(TEXT_INPUTS)}")
    sizes: dict[str | int, int] = {"hidden": hidden_size}
    for name, (dtype, axes) in TEXT_INPUTS.items():
        array = inputs[name]
        if array.dtype != dtype or array.ndim != len(axes):
            raise EngineError(f"{name} is {array.dtype} {list(array.shape)}; expected {dtype} {list(axes)}")
        for axis, size in zip(axes, array.shape, strict=True):
            expected = axis if isinstance(axis, int) else sizes.setdefault(axis, size)
            if size != expected or size < 1:
                raise EngineError(f"{name} is {list(array.shape)}; expected {list(axes)} with {axis} = {expected}")


class OnnxRuntimeEngine:
    """A bundle's text graph on ONNX Runtime's CPU provider."""

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        """`threads`: worker threads of one pass; None leaves the choice (one per core) to ONNX Runtime."""
        if threads is not None and threads < 1:
            raise SettingError(f"threads is {threads}; expected at least 1, or None for one per core")
        graph = bundle.manifest.graphs["text"]
        self._hidden_size = bundle.manifest.model.hidden_size
        _require_memory(bundle)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        # Shapes change from pass to pass: remembering each one's memory plan only costs memory.
        options.enable_mem_pattern = False
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", os.path.realpath(bundle.weights_root)
        )
        try:
            self._session: onnxruntime.InferenceSession | None = onnxruntime.InferenceSession(
                bundle.path(graph.file).read_bytes(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as fault:  # ONNX Runtime raises a class per status, all directly under Exception
            raise EngineError(f"ONNX Runtime cannot open {bundle.path(graph.file)}: {fault}") from fault
        self._info = {
            "engine": "onnxruntime",
            "version": onnxruntime.__version__,
            "provider": "CPUExecutionProvider",
            "precision": bundle.manifest.precision,
            "threads": threads or os.cpu_count(),
        }

    def run(self, inputs: Tensors) -> Tensors:
        """See Engine.run."""
        if self._session is None:
            raise EngineError("the engine is closed")
        check_inputs(inputs, self._hidden_size)
        try:
            (logits,) = self._session.run(["logits"], inputs)
        except Exception as fault:
            raise EngineError(f"ONNX Runtime failed: {fault}") from fault
        return {"logits": np.asarray(logits)}

    def info(self) -> dict[str, Any]:
        """See Engine.info."""
        return dict(self._info)

    def close(self) -> None:
        """See Engine.close."""
        self._session = None


def _require_memory(bundle: Bundle) -> None:
    """Say what float32 weights need before they are loaded, and refuse what this machine cannot hold."""
    needed = 4 * bundle.manifest.weights.parameters
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        raise EngineError(
            f"{bundle.manifest.source.name} in fp32 needs about {needed / 1e9:.0f} GB for its weights; this machine "
            f"has {present / 1e9:.0f} GB. Use a machine with more memory, or another precision"
        )
    if needed > 4e9:
        logger.warning("loading about %.0f GB of float32 weights", needed / 1e9)


def open_engine(name: str, bundle: Bundle, threads: int | None = None) -> Engine:
    """The engine `name` over a bundle: `onnxruntime`, or `auto` for the best one this machine can run."""
    known = ("auto", "onnxruntime")
    if name not in known:
        raise SettingError(f"engine is {name!r}; expected one of {', '.join(known)}")
    if bundle.manifest.precision != "fp32":
        raise EngineError(
            f"{bundle.folder} is {bundle.manifest.precision}, and ONNX Runtime on the CPU runs fp32: "
            "export the release again with that precision"
        )
    return OnnxRuntimeEngine(bundle, threads)
