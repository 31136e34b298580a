"""Encodings → padded passes: which records go together, and the tensors of one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .bundle import ModelRecord
from .contract import Tensors
from .grid import position_ids
from .types import QUESTION_TYPES, Encoding


@dataclass(frozen=True)
class PassLimits:
    """How large one pass may grow. A record that exceeds a bound alone is a pass of its own."""

    padded_tokens: int = 16384
    attention_bytes: int = 2**30


def attention_bytes(model: ModelRecord, batch: int, sequence: int) -> int:
    """Float32 scores held at once by the widest attention of a pass: a tile of queries against all keys."""
    heads = max(model.attention_heads, model.head_attention_heads)
    return 4 * batch * heads * min(model.query_tile, sequence) * sequence


def plan_passes(
    lengths: Sequence[int],
    model: ModelRecord,
    limits: PassLimits = PassLimits(),
    fits: Callable[[list[int]], bool] = lambda _: True,
) -> list[list[int]]:
    """Indices of records per pass, longest first; in a pass no record is padded to more than twice its length.

    `fits`: whether the engine takes these records as one pass; a record alone is not asked about.
    """
    passes: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        count = len(passes[-1]) + 1 if passes else 0
        if (
            not passes
            or 2 * lengths[index] < longest
            or count * longest > limits.padded_tokens
            or attention_bytes(model, count, longest) > limits.attention_bytes
            or not fits([*passes[-1], index])
        ):
            passes.append([])
            longest = lengths[index]
        passes[-1].append(index)
    return passes


def pass_sizes(encodings: Sequence[Encoding]) -> dict[str, int]:
    """The sizes of contract.TEXT's dynamic axes in a pass of these records."""
    return {
        "batch": len(encodings),
        "sequence": max(encoding.tokens for encoding in encodings),
        "questions": max(len(encoding.questions) for encoding in encodings),
        "options": max(encoding.options for encoding in encodings),
        "media": max(sum(grid.end - grid.start for encoding in encodings for grid in encoding.grids), 1),
    }


def collate(encodings: Sequence[Encoding], media: Sequence[np.ndarray], hidden_size: int) -> Tensors:
    """The tensors of contract.TEXT for one pass, padded to its longest record, most questions and most options.

    `media`: the rows [media tokens, hidden] float32 for all placeholders, in the order of the records and their items.
    """
    batch, sequence, questions, options, _ = pass_sizes(encodings).values()
    input_ids = np.zeros((batch, sequence), np.int64)
    positions = np.zeros((3, batch, sequence), np.int64)
    media_rows = np.full((batch, sequence), -1, np.int64)
    first_row = 0
    question_spans = np.zeros((batch, questions, 2), np.int64)
    question_types = np.zeros((batch, questions), np.int64)
    option_spans = np.zeros((batch, options, 2), np.int64)
    option_questions = np.full((batch, options), -1, np.int64)
    for row, encoding in enumerate(encodings):
        input_ids[row, : encoding.tokens] = encoding.input_ids
        positions[:, row, : encoding.tokens] = position_ids(encoding.tokens, encoding.grids)
        for grid in encoding.grids:
            media_rows[row, grid.start : grid.end] = np.arange(first_row, first_row + grid.end - grid.start)
            first_row += grid.end - grid.start
        asked = len(encoding.questions)
        question_spans[row, :asked] = [question.span for question in encoding.questions]
        question_types[row, :asked] = [QUESTION_TYPES.index(question.type) for question in encoding.questions]
        spans = [span for question in encoding.questions for span in question.option_spans]
        option_spans[row, : len(spans)] = spans
        counts = [len(question.option_ids) for question in encoding.questions]
        option_questions[row, : len(spans)] = np.repeat(np.arange(asked), counts)
    rows = np.concatenate([np.zeros((0, hidden_size), np.float32), *media])
    assert len(rows) == first_row, f"{len(rows)} rows of media for {first_row} placeholders"
    return {
        "input_ids": input_ids,
        "position_ids": positions,
        "sequence_lengths": np.array([encoding.tokens for encoding in encodings], np.int64),
        "media_embeddings": rows if len(rows) else np.zeros((1, hidden_size), np.float32),
        "media_rows": media_rows,
        "question_spans": question_spans,
        "question_types": question_types,
        "option_spans": option_spans,
        "option_questions": option_questions,
    }


def split_logits(logits: np.ndarray, encodings: Sequence[Encoding]) -> list[list[np.ndarray]]:
    """[batch, options] → per record, per question: float32 arrays in encoded option order."""
    return [
        np.split(row[: encoding.options], np.cumsum([len(q.option_ids) for q in encoding.questions])[:-1])
        for row, encoding in zip(logits, encodings, strict=True)
    ]
