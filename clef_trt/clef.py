"""Clef: the data path, request → encode → batch → run → answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .answer import CONFIDENCES, response
from .batch import PassLimits, collate, pass_sizes, plan_passes, split_logits
from .bundle import Manifest, open_bundle
from .choose import open_engine
from .contract import Tensors
from .encode import Encoder
from .engine import Engine
from .errors import EngineError, Fault, RequestError, SettingError, TooLongError
from .exchange import as_array
from .media import MediaLimits, MediaReader
from .request import parse_request
from .types import Encoding, Limits, Request
from .vision import Vision

TRUNCATIONS = ("report", "refuse")


class Clef:
    """Decides requests with a compiled bundle. Safe to use from several threads.

    Made by `Clef.load`, or from parts (any Engine, for instance the fake one) by the constructor.
    """

    def __init__(
        self,
        manifest: Manifest,
        encoder: Encoder,
        engine: Engine,
        vision: Vision | None = None,
        *,
        max_length: int = 16384,
        max_state_tokens: int | None = None,
        truncation: str = "report",
        confidence: str = "max",
        limits: Limits = Limits(),
        pass_limits: PassLimits = PassLimits(),
    ) -> None:
        """Without `vision` requests with pictures are refused. Raises SettingError; settings are those of `load`."""
        _check_settings(
            manifest.model.max_tokens, max_length, max_state_tokens, truncation, confidence, limits, pass_limits
        )
        self.manifest = manifest
        self.engine = engine
        self._encoder, self._vision = encoder, vision
        self.max_length, self._max_state_tokens = max_length, max_state_tokens
        self._refuse_truncation = truncation == "refuse"
        self._confidence = confidence
        self._limits, self._pass_limits = limits, pass_limits

    @classmethod
    def load(
        cls,
        bundle: str | Path,
        *,
        engine: str = "auto",
        weights: str | Path | None = None,
        threads: int | None = None,
        control_tokens: str = "text",
        max_length: int = 16384,
        max_state_tokens: int | None = None,
        truncation: str = "report",
        confidence: str = "max",
        max_image_tokens: int | None = None,
        limits: Limits = Limits(),
        media_limits: MediaLimits = MediaLimits(),
        pass_limits: PassLimits = PassLimits(),
    ) -> Clef:
        """Open a bundle.

        engine: "auto", "onnxruntime", "onnxruntime-cuda", "tensorrt" or "tensorrt_rtx". weights: the new place of a
        release that moved since its export. threads: of ONNX Runtime, None for one per core. control_tokens: "text"
        keeps `<|im_end|>` and its like in a caller's text as plain text, "reference" parses them as the published code
        does. max_length: tokens of a record, the state is cut to fit. truncation: "report" in the response's usage, or
        "refuse". confidence: "max", "jev" or "entropy". max_image_tokens: larger images are shrunk to it. The vision
        graph is opened at the first picture.

        Raises BundleError, EngineError, MissingExtraError or SettingError.
        """
        opened = open_bundle(bundle, weights)
        model = opened.manifest.model
        _check_settings(model.max_tokens, max_length, max_state_tokens, truncation, confidence, limits, pass_limits)
        if not isinstance(media_limits, MediaLimits):
            raise SettingError(f"media_limits is {media_limits!r}; expected MediaLimits(…)")
        encoder = Encoder(opened.path("tokenizer.json"), control_tokens, model.control_tokens)
        reader = MediaReader(opened.json("processor_config.json"), media_limits, max_image_tokens)
        vision = Vision(reader, model, lambda: open_engine(engine, opened, "vision", threads))
        return cls(
            opened.manifest,
            encoder,
            open_engine(engine, opened, "text", threads),
            vision,
            max_length=max_length,
            max_state_tokens=max_state_tokens,
            truncation=truncation,
            confidence=confidence,
            limits=limits,
            pass_limits=pass_limits,
        )

    def decide(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answers to one request body, as a response body {"model", "answers", "usage"}.

        Raises RequestError (every fault with its place), TooLongError, EngineError.
        """
        return self.decide_batch([request])[0]

    def decide_batch(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers to several requests, in their order.

        Raises before anything is run if one of them is wrong; only pixels are decoded later, when their pass comes.
        """
        parsed = _each(requests, self.parse)
        encodings = _each(parsed, self.encode_parsed)
        return [
            self.answer(request, encoding, values)
            for request, encoding, values in zip(parsed, encodings, self._run(encodings), strict=True)
        ]

    def encode(self, request: dict[str, Any]) -> Encoding:
        """Token ids and spans of one request, as the model reads it."""
        return self.encode_parsed(self.parse(request))

    def logits(self, requests: Sequence[dict[str, Any]]) -> list[list[np.ndarray]]:
        """Per request, per question: float32 logits in encoded option order (see `encode`)."""
        return self._run(_each(_each(requests, self.parse), self.encode_parsed))

    def tensors(self, requests: Sequence[dict[str, Any]]) -> Tensors:
        """What `run_tensors` takes: `contract.TEXT` for these requests as one padded pass, however large."""
        return self.collate(_each(_each(requests, self.parse), self.encode_parsed))

    def run_tensors(self, inputs: Mapping[str, Any], out: Any = None) -> np.ndarray:
        """The logits [batch, options] float32 of one pass over prepared tensors; of padding the lowest finite value.

        Arrays of any library that shares memory of the CPU will do (see `exchange.as_array`). Contiguous ones are read
        in place, and only during the call. `out`: memory of the caller that is written in place and returned, as a view
        where it is no numpy array; without it the result is an array of its own, which others can share.

        Raises EngineError for tensors outside the contract, and where an answer is not finite.
        """
        arrays = {name: as_array(value, name) for name, value in inputs.items()}
        logits = self.engine.run(arrays, None if out is None else as_array(out, "out"))["logits"]
        if not np.isfinite(logits).all():
            raise EngineError("the engine returned logits that are not finite")
        return logits

    # The stages of `decide_batch`, for who runs them apart, as the server does: each may be called from any thread.

    def parse(self, request: Any) -> Request:
        """A request body, validated; of pictures only the headers are read. Raises RequestError."""
        return parse_request(request, None if self._vision is None else self._vision.reader, self._limits)

    def encode_parsed(self, request: Request) -> Encoding:
        """Token ids and spans of a validated request. Raises RequestError, TooLongError."""
        return self._encoder.encode(request, self.max_length, self._max_state_tokens, self._refuse_truncation)

    def plan(self, encodings: Sequence[Encoding]) -> list[list[int]]:
        """Indices of the encodings per pass: what the engine takes together."""

        def fits(indices: list[int]) -> bool:
            return self.engine.fits(pass_sizes([encodings[i] for i in indices]))

        lengths = [encoding.tokens for encoding in encodings]
        return plan_passes(lengths, self.manifest.model, self._pass_limits, fits)

    def collate(self, encodings: Sequence[Encoding], indices: Sequence[int] | None = None) -> Tensors:
        """`contract.TEXT` for one pass over encodings, their pictures read and run. `indices`: as of `run_pass`."""
        media = _each(encodings, self._media_rows, indices)
        return collate(encodings, [rows for record in media for rows in record], self.manifest.model.sizes["hidden"])

    def run_pass(self, encodings: Sequence[Encoding], indices: Sequence[int] | None = None) -> list[list[np.ndarray]]:
        """Logits of one pass, as `logits`. `indices`: of the encodings, for errors; None where there is only one.

        Raises RequestError where a picture cannot be decoded, EngineError where the engine fails or an answer is not
        finite.
        """
        logits = split_logits(self.engine.run(self.collate(encodings, indices))["logits"], encodings)
        if not all(np.isfinite(question).all() for record in logits for question in record):
            raise EngineError("the engine returned logits that are not finite")
        return logits

    def answer(
        self, request: Request, encoding: Encoding, logits: Sequence[np.ndarray], confidence: str | None = None
    ) -> dict[str, Any]:
        """The response body. `confidence`: in place of the one that was set."""
        return response(request, encoding, logits, confidence or self._confidence)

    def patches(self, encoding: Encoding) -> list[np.ndarray]:
        """Per item of `encoding.media`: its patches [t·h·w, values] float32, as the vision graph takes them."""
        return [self._vision.reader.patches(item) for item in encoding.media] if self._vision is not None else []

    def info(self) -> dict[str, Any]:
        """What is loaded and in effect."""
        return {
            "source": self.manifest.source.name,
            "precision": self.manifest.precision,
            "parameters": self.manifest.weights.parameters,
            "max_length": self.max_length,
            **self.engine.info(),
        }

    def close(self) -> None:
        """Release the engines."""
        self.engine.close()
        if self._vision is not None:
            self._vision.close()

    def __enter__(self) -> Clef:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, encodings: Sequence[Encoding]) -> list[list[np.ndarray]]:
        result: list[list[np.ndarray]] = [[]] * len(encodings)
        for indices in self.plan(encodings):
            for i, values in zip(indices, self.run_pass([encodings[i] for i in indices], indices), strict=True):
                result[i] = values
        return result

    def _media_rows(self, encoding: Encoding) -> list[np.ndarray]:
        return [] if self._vision is None else [self._vision.rows(item) for item in encoding.media]


def _each(items: Sequence[Any], step: Callable[[Any], Any], indices: Sequence[int] | None = None) -> list[Any]:
    """`step` of every item; the faults of all are raised together, with the item's index where there are several.

    Where every fault is that of a request too long, so is what is raised, with the numbers of the longest.
    """
    if not isinstance(items, list | tuple):
        raise RequestError([Fault((), f"is a {type(items).__name__}; expected a list of requests", "type")])
    results, errors, faults = [], [], []
    for index, item in zip(indices or range(len(items)), items, strict=True):
        try:
            results.append(step(item))
        except RequestError as error:
            if len(items) == 1 and indices is None:
                raise
            errors.append(error)
            faults += [Fault((index, *fault.loc), fault.message, fault.kind) for fault in error.faults]
    too_long = [error for error in errors if isinstance(error, TooLongError)]
    if errors and len(too_long) == len(errors):
        longest = max(too_long, key=lambda error: error.needed_tokens)
        raise TooLongError(faults, longest.needed_tokens, longest.limit_tokens)
    if faults:
        raise RequestError(faults)
    return results


def _check_settings(
    max_tokens: int,
    max_length: Any,
    max_state_tokens: Any,
    truncation: Any,
    confidence: Any,
    limits: Any,
    pass_limits: Any,
) -> None:
    if type(max_length) is not int or not 1 <= max_length <= max_tokens:
        raise SettingError(f"max_length is {max_length!r}; this model takes 1 to {max_tokens} tokens")
    if max_state_tokens is not None and (type(max_state_tokens) is not int or max_state_tokens < 0):
        raise SettingError(f"max_state_tokens is {max_state_tokens!r}; expected at least 0, or None for no bound")
    if truncation not in TRUNCATIONS:
        raise SettingError(f"truncation is {truncation!r}; expected one of {', '.join(TRUNCATIONS)}")
    if confidence not in CONFIDENCES:
        raise SettingError(f"confidence is {confidence!r}; expected one of {', '.join(CONFIDENCES)}")
    for name, value, kind in (("limits", limits, Limits), ("pass_limits", pass_limits, PassLimits)):
        if not isinstance(value, kind):
            raise SettingError(f"{name} is {value!r}; expected {kind.__name__}(…)")
