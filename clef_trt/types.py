"""One frozen type per stage of the data path: Request → Encoding → (batch tensors) → logits → answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .grid import TokenGrid
from .media import MediaItem

QUESTION_TYPES = ("noul", "choice", "score")  # the index is the type id the head embeds


@dataclass(frozen=True)
class Limits:
    """What a request may hold; one more is refused."""

    questions: int = 64
    options: int = 255  # of a choice
    levels: int = 10  # of a score


@dataclass(frozen=True)
class Question:
    """One validated question."""

    id: str
    type: str  # one of QUESTION_TYPES
    instructions: Any  # text or JSON; None or "" stands for the id
    options: tuple[tuple[str, Any], ...]  # (option id, description or None) in the order the model reads them
    criteria: Any  # as the caller gave them: their order is the order of the answer


@dataclass(frozen=True)
class Request:
    """One validated request."""

    model: str
    state: Any
    questions: tuple[Question, ...]
    media: tuple[MediaItem, ...] = ()  # images, then videos; headers read, pixels not yet


@dataclass(frozen=True)
class EncodedQuestion:
    """Where one question and its options lie in `Encoding.input_ids`; a span is (start, end), end exclusive."""

    id: str
    type: str
    span: tuple[int, int]
    option_spans: tuple[tuple[int, int], ...]
    option_ids: tuple[str, ...]  # in encoded order, which is the order of the logits


@dataclass(frozen=True, eq=False)
class Encoding:
    """One record as the model reads it."""

    input_ids: np.ndarray  # [tokens] int64
    questions: tuple[EncodedQuestion, ...]
    truncated_state_tokens: int  # tokens of the state that did not fit and were cut from its end
    media: tuple[MediaItem, ...] = ()  # what to tile; their tokens fill `grids` in order
    grids: tuple[TokenGrid, ...] = ()  # where they lie: one per image, one per temporal patch of a video

    @property
    def tokens(self) -> int:
        """Length of the record."""
        return len(self.input_ids)

    @property
    def options(self) -> int:
        """Options of all questions."""
        return sum(len(question.option_ids) for question in self.questions)
