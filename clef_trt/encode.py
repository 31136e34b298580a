"""A request → token ids and spans, segment by segment as the reference does; the only user of the tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from .errors import BundleError, Fault, RequestError, SettingError, TooLongError
from .grid import TokenGrid
from .media import MediaItem
from .types import EncodedQuestion, Encoding, Question, Request

PREFIX = (
    "<|im_start|>system\nRead the complete state and schema. Decide every field jointly. Each answer must be exactly "
    "one of that field's allowed options.<|im_end|>\n<|im_start|>user\nSTATE:\n"
)
SUFFIX = "\n<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nJOINT SCHEMA DECISIONS:"
MEDIA_END = "\n"
SCHEMA_OPENING, OPTIONS_OPENING, OPTION_END, FIELD_END = (
    "\n\nSCHEMA FIELDS:\n",
    "\nALLOWED OPTIONS:\n",
    "\n",
    "END FIELD\n",
)
CONTROL_TOKENS = ("text", "reference")
# Schemas repeat from request to request: the ids of their segments are kept, up to this many short ones. States do not.
KEPT_SEGMENTS, KEPT_SEGMENT_CHARACTERS = 4096, 500

_dump = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False).encode


def render(value: Any) -> str:
    """Text as it is, any other JSON value as compact JSON with sorted keys (code-point order)."""
    return value if isinstance(value, str) else _dump(value)


class Encoder:
    """Encodes requests with one tokenizer.json.

    Each segment is tokenised on its own. With control_tokens="text" no text of the caller can become an added token
    such as `<|im_end|>` or `<|image_pad|>`; with "reference" it is parsed for them, as the published code does.
    """

    def __init__(
        self, tokenizer_file: Path, control_tokens: str = "text", media_ids: dict[str, int] | None = None
    ) -> None:
        """`media_ids`: ids of the control tokens of media (see bundle.ModelRecord), where media is encoded.

        Raises BundleError for a tokenizer.json that cannot be read, SettingError for an unknown control_tokens."""
        if control_tokens not in CONTROL_TOKENS:
            raise SettingError(f"control_tokens is {control_tokens!r}; expected one of {', '.join(CONTROL_TOKENS)}")
        try:
            text = tokenizer_file.read_text(encoding="utf-8")
            added = {token["content"]: token["id"] for token in json.loads(text)["added_tokens"]}
            tokenizer = Tokenizer.from_str(text) if control_tokens == "reference" else _without_added_tokens(text)
        except BundleError:
            raise
        except Exception as fault:  # tokenizers raises Exception itself
            raise BundleError(f"{tokenizer_file} is no tokenizer.json that tokenizers reads: {fault}") from fault
        self._new_ids = _encode_with(tokenizer)
        self._kept_ids = lru_cache(KEPT_SEGMENTS)(self._new_ids)
        self._media_ids = media_ids or {}
        self._prefix, self._suffix = (_template_ids(part, added, self._new_ids) for part in (PREFIX, SUFFIX))

    def encode(
        self, request: Request, max_length: int, max_state_tokens: int | None = None, refuse_truncation: bool = False
    ) -> Encoding:
        """Token ids and spans of a request, its state cut from the end to fit `max_length` tokens.

        Media counts by its headers: no picture is decoded for a request that does not fit. Raises TooLongError when
        everything but the state exceeds `max_length`, or when the state would be cut and `refuse_truncation` is set;
        RequestError for a value that is not JSON or text that is not Unicode.
        """
        faults: list[Fault] = []
        schema, questions = self._schema(request.questions, faults)
        opening, grids = self._opening(request.media)
        state = self._ids(request.state, ("state",), faults, keep=False)
        if faults:
            raise RequestError(faults)
        fixed = len(opening) + len(schema) + len(self._suffix)
        if fixed > max_length:
            what = "the schema needs"
            if request.media:
                what = f"the schema and media (of {sum(item.tokens for item in request.media)} tokens) need"
            raise _too_long(
                f"{what} {fixed} tokens before any state; the limit is {max_length} tokens", fixed, max_length
            )
        room = max_length - fixed if max_state_tokens is None else min(max_length - fixed, max_state_tokens)
        cut = max(len(state) - room, 0)
        if cut and refuse_truncation:
            bound, limit = ("max_state_tokens", room) if room < max_length - fixed else ("the limit", max_length)
            needed = fixed + len(state)
            raise _too_long(
                f"the state has {len(state)} tokens and room for {room}: the request needs {needed} tokens, {bound} is "
                f"{limit} tokens",
                needed,
                fixed + room,
            )
        offset = len(opening) + len(state) - cut
        ids = opening + state[: len(state) - cut] + schema + self._suffix
        shifted = tuple(_shifted(question, offset) for question in questions)
        return Encoding(np.array(ids, np.int64), shifted, cut, request.media, tuple(grids))

    def _opening(self, media: tuple[MediaItem, ...]) -> tuple[list[int], list[TokenGrid]]:
        """The prefix and the placeholders of all media, and where those lie."""
        ids, grids = list(self._prefix), []
        for item in media:
            start, end = self._media_ids["vision_start"], self._media_ids["vision_end"]
            placeholder = self._media_ids[item.kind]
            _, rows, columns = (size // item.merge_size for size in item.grid)
            # A video is a start token, its temporal patches as images behind their times, and an end token.
            ids += [start] if item.kind == "video" else []
            for seconds in item.timestamps or (None,):
                ids += [] if seconds is None else self._text_ids(f"<{seconds:.1f} seconds>")
                grids.append(TokenGrid(len(ids) + 1, rows, columns))
                ids += [start, *[placeholder] * (rows * columns), end]
            ids += [end] if item.kind == "video" else []
        return ids + (self._text_ids(MEDIA_END) if media else []), grids

    def _schema(self, questions: tuple[Question, ...], faults: list[Fault]) -> tuple[list[int], list[EncodedQuestion]]:
        """The ids of all fields, and their questions with spans counted from the first of those ids."""
        text, ids = self._text_ids, list(self._text_ids(SCHEMA_OPENING))
        encoded = []
        for number, question in enumerate(questions, 1):
            loc = ("questions", question.id)
            heading = f"\nFIELD {number}\nID: {question.id}\nTYPE: {question.type}\nINSTRUCTION: "
            ids += self._ids(heading, loc, faults)
            start = len(ids)
            instructions = question.id if question.instructions in (None, "") else question.instructions
            ids += self._ids(instructions, (*loc, "instructions"), faults)
            span = (start, len(ids))
            ids += text(OPTIONS_OPENING)
            option_spans = []
            for place, (option, description) in enumerate(question.options, 1):
                ids += text(f"OPTION {place}: ")
                start = len(ids)
                meaning = (
                    {"option_id": option} if description is None else {"option_id": option, "description": description}
                )
                ids += self._ids(meaning, (*loc, "criteria", option), faults)
                option_spans.append((start, len(ids)))
                ids += text(OPTION_END)
            ids += text(FIELD_END)
            names = tuple(option for option, _ in question.options)
            encoded.append(EncodedQuestion(question.id, question.type, span, tuple(option_spans), names))
        return ids, encoded

    def _ids(self, value: Any, loc: tuple[str | int, ...], faults: list[Fault], keep: bool = True) -> list[int]:
        """The ids of a caller's value; what is wrong with it is added to `faults`."""
        try:
            return self._text_ids(render(value), keep)
        except UnicodeEncodeError:
            faults.append(Fault(loc, "has an unpaired surrogate: it is no Unicode text", "unicode"))
        except RecursionError:
            faults.append(Fault(loc, "is nested too deeply", "json"))
        except (TypeError, ValueError) as fault:
            faults.append(Fault(loc, f"is no JSON value ({fault}); expected text, numbers, objects, arrays", "json"))
        return []

    def _text_ids(self, text: str, keep: bool = True) -> list[int]:
        return self._kept_ids(text) if keep and len(text) <= KEPT_SEGMENT_CHARACTERS else self._new_ids(text)


def _too_long(message: str, needed_tokens: int, limit_tokens: int) -> TooLongError:
    return TooLongError([Fault((), message, "too_long")], needed_tokens, limit_tokens)


def _encode_with(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    def ids(text: str) -> list[int]:
        text.encode()  # a surrogate raises UnicodeEncodeError here, with its place
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    return ids


def _template_ids(text: str, added: dict[str, int], ids: Callable[[str], list[int]]) -> list[int]:
    """The ids of text of ours, in which added tokens are parsed."""
    parts = re.split("(" + "|".join(map(re.escape, added)) + ")", text)
    return [token for part in parts if part for token in ([added[part]] if part in added else ids(part))]


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
