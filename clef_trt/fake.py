"""An engine without a model, for tests of code that uses `Clef`: same contract, same checks, answers by arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .contract import TEXT, Tensors, into
from .errors import EngineError


class FakeEngine:
    """Logits from the token ids of each option's and its question's span, so that they do not depend on the batch.

    `on_run`, if given, is called with the inputs of every pass and may return other outputs or raise. `most`: the
    largest sizes of a pass by axis, such as {"batch": 4}; where an axis is not named there is no bound.
    """

    def __init__(
        self,
        hidden_size: int,
        on_run: Callable[[Tensors], Tensors | None] | None = None,
        most: Mapping[str, int] | None = None,
    ) -> None:
        self.passes: list[tuple[int, int]] = []  # (batch, sequence) of every pass so far
        self._hidden_size = hidden_size
        self._on_run = on_run
        self._most = dict(most or {})
        self._closed = False

    def run(self, inputs: Tensors, out: np.ndarray | None = None) -> Tensors:
        """See engine.Engine.run."""
        if self._closed:
            raise EngineError("the engine is closed")
        TEXT.check(inputs, {"hidden": self._hidden_size})
        if out is not None:
            TEXT.check_output(out, inputs)
        self.passes.append((inputs["input_ids"].shape[0], inputs["input_ids"].shape[1]))
        if self._on_run is not None and (outputs := self._on_run(inputs)) is not None:
            return outputs
        logits = np.full(inputs["option_questions"].shape, np.finfo(np.float32).min, np.float32)
        for record, row in enumerate(inputs["option_questions"]):
            ids = inputs["input_ids"][record]
            for option in np.flatnonzero(row >= 0):
                question = _mean(ids, inputs["question_spans"][record, row[option]])
                logits[record, option] = np.sin(_mean(ids, inputs["option_spans"][record, option]) + question)
        return {"logits": into(out, logits)}

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """See engine.Engine.fits."""
        return all(sizes[axis] <= most for axis, most in self._most.items())

    def info(self) -> dict[str, Any]:
        """See engine.Engine.info."""
        return {"engine": "fake", "version": "1", "precision": "fp32"}

    def close(self) -> None:
        """See engine.Engine.close."""
        self._closed = True


def _mean(ids: np.ndarray, span: np.ndarray) -> float:
    return float(ids[span[0] : span[1]].mean())
