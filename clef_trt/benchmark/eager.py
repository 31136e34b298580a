"""The published code in eager torch as a system: its own encoding, model and answers, on transformers' own paths."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ..answer import softmax
from ..errors import EngineError
from ..make import export_module
from ..media import MediaReader
from ..request import parse_request
from .models import Model, text_tools
from .systems import Outcome, Stopwatch
from .workload import MAX_TOKENS, Body, Call


class Eager:
    """The reference over a release. See systems.System.

    Pictures are tiled by our reader, because the reference's own processor needs torchvision; the `encode` stage of
    requests with pictures is therefore ours. The vision tower is part of its `engine` stage.
    """

    def __init__(
        self, name: str, release: Path, dtype: str, device: str, threads: int, *, compiled: bool = False
    ) -> None:
        self.name = name
        self._release, self._dtype, self._device, self._threads = release, dtype, device, threads
        self._compiled = compiled
        short = {"float32": "fp32", "bfloat16": "bf16"}[dtype]
        self.arithmetic: str | None = f"torch-{short}" if device == "cpu" else f"torch-cuda-{short}"

    def open(self) -> float:
        """See System.open."""
        start = time.perf_counter()
        module = export_module("reference")
        import torch
        import transformers

        if self._device == "cuda" and not torch.cuda.is_available():
            raise EngineError("torch has no CUDA here, or there is no card")
        torch.set_num_threads(self._threads)  # of the process: the same for every eager system
        logging: Any = transformers.logging
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._reference = module.Reference(self._release, getattr(torch, self._dtype))
        self._reference.model.to(self._device)
        if self._compiled:
            # The text backbone; the head is loops over questions. The first pass of a length compiles for up to half a
            # minute, as the delta rule's loop over chunks is unrolled; beyond torch's limit of lengths it runs eagerly.
            self._reference.model.language_model.model.language_model.compile()
        self._torch = torch
        self._encoder, self._reader = text_tools(Model(self.name, self._release))
        return time.perf_counter() - start

    def run(self, bodies: Call) -> Outcome:
        """See System.run: encode_record, collate_records, the model, systemone_answer, as the published `systemone`."""
        module, watch = self._reference.module, Stopwatch()
        records = [self._record(body) for body in bodies]
        watch.lap("encode")
        with self._torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pad = self._reference.tokenizer.pad_token_id
            batch = module.collate_records(records, pad, self._torch.device(self._device))
            watch.lap("batch")
            answered = self._reference.model(batch)
            logits = [[question.float().cpu().numpy() for question in record] for record in answered]
            watch.lap("engine")
        result = []
        for body, record, values in zip(bodies, records, logits, strict=True):
            probabilities = [np.array(softmax(question)) for question in values]
            for question, own in zip(record.questions, probabilities, strict=True):
                by_option = dict(zip(question.option_ids, own.tolist(), strict=True))
                module.systemone_answer(body["questions"][question.question_id], by_option)
            result.append(probabilities)
        watch.lap("answer")
        return Outcome(result, watch.seconds)

    def info(self) -> dict[str, Any]:
        """See System.info."""
        return {
            "engine": "torch.compile" if self._compiled else "torch",
            "version": self._torch.__version__,
            "transformers": export_module("reference").sys.modules["transformers"].__version__,
            "precision": self._dtype,
            "device": self._device,
            "threads": self._torch.get_num_threads(),
            "attention": self._reference.model.language_model.config._attn_implementation,
        }

    def close(self) -> None:
        """See System.close."""
        del self._reference

    def _record(self, body: Body) -> Any:
        if "images" not in body and "videos" not in body:
            return self._reference.encode(body, MAX_TOKENS)
        encoding = self._encoder.encode(parse_request(body, self._reader), MAX_TOKENS)
        return self._reference.with_media(encoding, [self._patches(item) for item in encoding.media])

    def _patches(self, item: Any) -> np.ndarray:
        reader: MediaReader = self._reader
        return reader.patches(item)
