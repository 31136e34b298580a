"""Compiled bundles as systems: the data path of `Clef`, with a stopwatch between its stages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from ..answer import response, softmax
from ..batch import PassLimits, collate, pass_sizes, plan_passes, split_logits
from ..bundle import open_bundle
from ..choose import open_engine
from ..encode import Encoder
from ..engine import Engine, OnnxRuntimeEngine
from ..media import MediaReader
from ..request import parse_request
from ..vision import Vision
from .systems import Outcome, Stopwatch
from .workload import MAX_TOKENS, Call

PEAKS = {"onnxruntime": "onnxruntime", "onnxruntime-cuda": "torch-cuda", "tensorrt": "torch-cuda"}


class Ours:
    """A bundle on one of its engines. See systems.System."""

    def __init__(self, name: str, folder: Path, engine: str, threads: int) -> None:
        self.name = name
        self._folder, self._engine_name, self._threads = folder, engine, threads
        precision = name.rpartition("-")[2] if engine != "onnxruntime-cuda" else "fp32"
        self.arithmetic: str | None = f"{PEAKS[engine.removesuffix('_rtx')]}-{precision}"
        self._engine: Engine | None = None

    def open(self, profile: str | None = None) -> float:
        """See System.open; `profile`: prefix of a file for ONNX Runtime's profile of the text graph."""
        start = time.perf_counter()
        bundle = open_bundle(self._folder)
        self._model = bundle.manifest.model
        self._encoder = Encoder(bundle.path("tokenizer.json"), "text", self._model.control_tokens)
        self._reader = MediaReader(bundle.json("processor_config.json"))
        self._vision = Vision(
            self._reader, self._model, lambda: open_engine(self._engine_name, bundle, "vision", self._threads)
        )
        if profile is None:
            self._engine = open_engine(self._engine_name, bundle, "text", self._threads)
        else:
            cuda = self._engine_name == "onnxruntime-cuda"
            self._engine = OnnxRuntimeEngine(bundle, "text", self._threads, cuda=cuda, profile=profile)
        return time.perf_counter() - start

    def run(self, bodies: Call) -> Outcome:
        """See System.run; the answers are those of `Clef.decide_batch`, which a test compares."""
        assert self._engine is not None, "open comes before run"
        engine, model, watch = self._engine, self._model, Stopwatch()
        requests = [parse_request(body, self._reader) for body in bodies]
        encodings = [self._encoder.encode(request, MAX_TOKENS) for request in requests]
        watch.lap("encode")

        def fits(indices: list[int]) -> bool:
            return engine.fits(pass_sizes([encodings[i] for i in indices]))

        result: list[Any] = [None] * len(encodings)
        for indices in plan_passes([encoding.tokens for encoding in encodings], model, PassLimits(), fits):
            together = [encodings[i] for i in indices]
            watch.lap("batch")
            media = [self._vision.rows(item) for encoding in together for item in encoding.media]
            if media:
                watch.lap("vision")
            inputs = collate(together, media, model.sizes["hidden"])
            watch.lap("batch")
            logits = engine.run(inputs)["logits"]
            watch.lap("engine")
            for i, values in zip(indices, split_logits(logits, together), strict=True):
                result[i] = values
                response(requests[i], encodings[i], values, "max")
            watch.lap("answer")
        return Outcome([[np.array(softmax(values)) for values in record] for record in result], watch.seconds)

    def end_profiling(self) -> str:
        """The file of the profile; the system was opened with one."""
        assert isinstance(self._engine, OnnxRuntimeEngine), "only ONNX Runtime writes profiles"
        return self._engine.end_profiling()

    def info(self) -> dict[str, Any]:
        """See System.info."""
        return {} if self._engine is None else self._engine.info()

    def close(self) -> None:
        """See System.close."""
        if self._engine is not None:
            self._engine.close()
            self._vision.close()
