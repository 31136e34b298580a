"""What the C++ host calls: JSON text and arrays in, JSON text and plain numbers out. See cpp/clef_host.hpp."""

from __future__ import annotations

import inspect
import json
from typing import Any

import numpy as np

from .answer import softmax
from .clef import Clef
from .contract import Tensors
from .errors import SettingError
from .strict_json import read_json
from .tensor_file import safetensors_bytes

# Of Clef.load; those that are objects of Python have no form in JSON.
SETTINGS = tuple(
    name for name in inspect.signature(Clef.load).parameters if name != "bundle" and not name.endswith("limits")
)
Question = tuple[str, str, tuple[str, ...], list[float]]  # id, type, option ids, their probabilities


class Embedded:
    """A bundle opened for a C++ program. Every method may be called from any thread."""

    def __init__(self, bundle: str, settings: bytes) -> None:
        """`settings`: a JSON object with any of SETTINGS. Raises what Clef.load does."""
        given = read_json(settings, "the settings")
        if not isinstance(given, dict) or (unknown := sorted(given.keys() - set(SETTINGS))):
            what = f"unknown settings {unknown}" if isinstance(given, dict) else "the settings are no JSON object"
            raise SettingError(f"{what}; there are {', '.join(SETTINGS)}")
        self._clef = Clef.load(bundle, **given)

    def decide(self, text: bytes) -> bytes:
        """The response body to a request body; an array of them to an array."""
        request = read_json(text)
        decided = self._clef.decide_batch(request) if isinstance(request, list) else self._clef.decide(request)
        return json.dumps(decided, ensure_ascii=False).encode()

    def probabilities(self, text: bytes) -> tuple[list[Question], int, int]:
        """Questions in request order with unrounded probabilities in encoded option order, tokens, tokens cut."""
        parsed = self._clef.parse(read_json(text))
        encoding = self._clef.encode_parsed(parsed)
        (logits,) = self._clef.run_pass([encoding])
        questions = [
            (question.id, question.type, question.option_ids, softmax(values))
            for question, values in zip(encoding.questions, logits, strict=True)
        ]
        return questions, encoding.tokens, encoding.truncated_state_tokens

    def encode(self, text: bytes) -> bytes:
        """The tensors of a request, as `clef-trt encode` writes them."""
        encodings = [self._clef.encode(read_json(text))]
        return safetensors_bytes(self._clef.collate(encodings), encodings)

    def run(self, inputs: Tensors, out: np.ndarray) -> None:
        """Logits of prepared tensors, into `out`."""
        self._clef.run_tensors(inputs, out)

    def info(self) -> bytes:
        """What is loaded and in effect, as JSON."""
        info: dict[str, Any] = self._clef.info()
        return json.dumps(info, ensure_ascii=False, default=str).encode()

    def close(self) -> None:
        """Release the engines."""
        self._clef.close()
