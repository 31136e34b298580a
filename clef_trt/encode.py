"""A request → token ids and spans, segment by segment as the reference does; the only user of the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .errors import BundleError, Fault, RequestError, SettingError, TooLongError
from .types import EncodedQuestion, Encoding, Question, Request

PREFIX = (
    "<|im_start|>system\nRead the complete state and schema. Decide every field jointly. Each answer must be exactly "
    "one of that field's allowed options.<|im_end|>\n<|im_start|>user\nSTATE:\n"
)
SUFFIX = "\n<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nJOINT SCHEMA DECISIONS:"
SCHEMA_OPENING, OPTIONS_OPENING, OPTION_END, FIELD_END = (
    "\n\nSCHEMA FIELDS:\n",
    "\nALLOWED OPTIONS:\n",
    "\n",
    "END FIELD\n",
)
CONTROL_TOKENS = ("text", "reference")
# Schemas repeat from request to request: the ids of their segments are kept, up to this many short ones.
KEPT_SEGMENTS, KEPT_SEGMENT_CHARACTERS = 8192, 1000

_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False).encode


def render(value: Any) -> str:
    """Text as it is, any other JSON value as compact JSON with sorted keys (code-point order)."""
    return value if isinstance(value, str) else _dump(value)


class Encoder:
    """Encodes requests with one tokenizer.json.

    Each segment is tokenised on its own. With control_tokens="text" no text of the caller can become an added token
    such as `<|im_end|>` or `<|image_pad|>`; with "reference" it is parsed for them, as the published code does.
    """

    def __init__(self, tokenizer_file: Path, control_tokens: str = "text") -> None:
        """Raises BundleError for a tokenizer.json that cannot be read, SettingError for an unknown control_tokens."""
        if control_tokens not in CONTROL_TOKENS:
            raise SettingError(f"control_tokens is {control_tokens!r}; expected one of {', '.join(CONTROL_TOKENS)}")
        try:
            text = tokenizer_file.read_text(encoding="utf-8")
            parsing = Tokenizer.from_str(text)
            plain = parsing if control_tokens == "reference" else _without_added_tokens(text)
        except BundleError:
            raise
        except Exception as fault:  # tokenizers raises Exception itself
            raise BundleError(f"{tokenizer_file} is no tokenizer.json that tokenizers reads: {fault}") from fault
        self._long_ids = _encode_with(plain)
        self._short_ids = lru_cache(KEPT_SEGMENTS)(self._long_ids)
        self._prefix = _encode_with(parsing)(PREFIX)
        self._suffix = _encode_with(parsing)(SUFFIX)

    def encode(
        self, request: Request, max_length: int, max_state_tokens: int | None = None, refuse_truncation: bool = False
    ) -> Encoding:
        """Token ids and spans of a request, its state cut from the end to fit `max_length` tokens.

        Raises TooLongError when everything but the state exceeds `max_length`, or when the state would be cut and
        `refuse_truncation` is set; RequestError for a value that is not JSON or text that is not Unicode.
        """
        schema, questions = self._schema(request.questions)
        state = self._ids(request.state, ("state",))
        fixed = len(self._prefix) + len(schema) + len(self._suffix)
        if fixed > max_length:
            raise TooLongError(
                f"the schema needs {fixed} tokens before any state; the limit is {max_length} tokens", fixed, max_length
            )
        room = max_length - fixed if max_state_tokens is None else min(max_length - fixed, max_state_tokens)
        cut = max(len(state) - room, 0)
        if cut and refuse_truncation:
            raise TooLongError(
                f"the state has {len(state)} tokens and room for {room}: the request needs "
                f"{fixed + len(state)} tokens, the limit is {fixed + room} tokens",
                fixed + len(state),
                fixed + room,
            )
        offset = len(self._prefix) + len(state) - cut
        ids = self._prefix + state[: len(state) - cut] + schema + self._suffix
        return Encoding(np.array(ids, np.int64), tuple(_shifted(q, offset) for q in questions), cut)

    def _schema(self, questions: tuple[Question, ...]) -> tuple[list[int], list[EncodedQuestion]]:
        """The ids of all fields, and their questions with spans counted from the first of those ids."""
        text, ids = self._text_ids, list(self._text_ids(SCHEMA_OPENING))
        encoded = []
        for number, question in enumerate(questions, 1):
            loc = ("questions", question.id)
            ids += text(f"\nFIELD {number}\nID: {question.id}\nTYPE: {question.type}\nINSTRUCTION: ", loc)
            start = len(ids)
            instructions = question.id if question.instructions in (None, "") else question.instructions
            ids += self._ids(instructions, (*loc, "instructions"))
            span = (start, len(ids))
            ids += text(OPTIONS_OPENING)
            option_spans = []
            for place, (option, description) in enumerate(question.options, 1):
                ids += text(f"OPTION {place}: ")
                start = len(ids)
                meaning = (
                    {"option_id": option} if description is None else {"option_id": option, "description": description}
                )
                ids += self._ids(meaning, (*loc, "criteria", option))
                option_spans.append((start, len(ids)))
                ids += text(OPTION_END)
            ids += text(FIELD_END)
            names = tuple(option for option, _ in question.options)
            encoded.append(EncodedQuestion(question.id, question.type, span, tuple(option_spans), names))
        return ids, encoded

    def _ids(self, value: Any, loc: tuple[str | int, ...]) -> list[int]:
        try:
            return self._text_ids(render(value), loc)
        except (TypeError, ValueError, RecursionError) as fault:
            reason = "nested too deeply" if isinstance(fault, RecursionError) else str(fault)
            raise RequestError([Fault(loc, f"is no JSON value: {reason}", "json")]) from None

    def _text_ids(self, text: str, loc: tuple[str | int, ...] = ()) -> list[int]:
        try:
            return self._short_ids(text) if len(text) <= KEPT_SEGMENT_CHARACTERS else self._long_ids(text)
        except UnicodeEncodeError as fault:
            raise RequestError(
                [Fault(loc, f"has an unpaired surrogate at character {fault.start}: it is no Unicode text", "unicode")]
            ) from None


def _encode_with(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    def ids(text: str) -> list[int]:
        text.encode()  # a surrogate raises UnicodeEncodeError here, with its place
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    return ids


def _without_added_tokens(text: str) -> Tokenizer:
    """The tokenizer in which added tokens are ordinary text."""
    parts = json.loads(text)
    added = {token["content"]: token["id"] for token in parts.get("added_tokens", [])}
    vocabulary = parts["model"].get("vocab", {})
    if isinstance(vocabulary, dict) and (shared := sorted(added.keys() & vocabulary.keys())):
        raise BundleError(
            f"tokenizer.json lists the added tokens {shared} in its model's vocabulary too, so text could become one: "
            'use control_tokens="reference" with callers you trust'
        )
    parts["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(parts))


def _shifted(question: EncodedQuestion, offset: int) -> EncodedQuestion:
    start, end = question.span
    spans = tuple((first + offset, last + offset) for first, last in question.option_spans)
    return EncodedQuestion(question.id, question.type, (start + offset, end + offset), spans, question.option_ids)
