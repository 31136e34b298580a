"""What every system is given: seeded requests of an exact number of input tokens, or the realistic mix.

No turn repeats a request of another (the mix excepted), so that a server that remembers prompts gains nothing.
"""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from string import ascii_lowercase
from typing import Any

import numpy as np
from PIL import Image

from ..encode import Encoder
from ..errors import SettingError
from ..media import MediaReader
from ..request import parse_request
from ..types import QUESTION_TYPES

Body = dict[str, Any]
Call = list[Body]  # requests that are decided together

# Tried in this order to lengthen a text that lacks a few tokens: in any vocabulary one of them adds exactly one.
FILLERS = (" a", " the", ".", "a", "!", "\n")
MODEL = "clef-flash"  # the name in the requests, which servers may ask for
MAX_TOKENS = 2**20  # of the encoder here: requests are of their size by construction, not cut to it


@dataclass(frozen=True)
class Size:
    """One synthetic workload. `questions` and `options` are as asked for; see `Generator.schema`."""

    tokens: int  # of each request
    batch: int = 1
    questions: int = 4
    options: int = 4
    pictures: int = 0
    picture_side: int = 448  # pixels


@dataclass(frozen=True)
class Workload:
    """Requests for some turns: turns → calls → requests. `facts` go into the rows of the result."""

    name: str
    turns: tuple[tuple[Call, ...], ...]
    tokens: int  # of all requests of one turn
    facts: dict[str, Any]


class Generator:
    """Makes requests for one vocabulary."""

    def __init__(self, encoder: Encoder, reader: MediaReader) -> None:
        self._encoder, self._reader = encoder, reader

    def synthetic(self, size: Size, turns: int, seed: int = 0) -> Workload:
        """A call of `size.batch` different requests per turn, each of `size.tokens` tokens."""
        questions, options = self.schema(size)
        sources = np.random.SeedSequence([seed, size.tokens, size.batch]).spawn(turns * size.batch)
        bodies = [self._request(size, questions, options, source) for source in sources]
        calls = [bodies[start : start + size.batch] for start in range(0, len(bodies), size.batch)]
        counts = [self.tokens(body) for body in bodies]
        facts = {
            "tokens": max(counts),
            "exact": set(counts) == {size.tokens},
            "batch": size.batch,
            "questions": questions,
            "options": options,
            "pictures": size.pictures,
            "asked": {"tokens": size.tokens, "questions": size.questions, "options": size.options},
        }
        name = f"{size.tokens} × {size.batch}" if size.batch > 1 else str(size.tokens)
        return Workload(name, tuple((call,) for call in calls), sum(counts) // turns, facts)

    def mixed(self, batch: int, turns: int) -> Workload:
        """The mix, in the same calls of `batch` requests every turn."""
        bodies = mix()
        calls = tuple(bodies[start : start + batch] for start in range(0, len(bodies), batch))
        counts = [self.tokens(body) for body in bodies]
        facts = {
            "tokens": round(float(np.median(counts))),
            "exact": True,
            "batch": batch,
            "questions": None,
            "options": None,
            "pictures": 0,
            "asked": {"requests": len(bodies), "tokens": [min(counts), max(counts)]},
        }
        return Workload("mix" if batch == 1 else f"mix × {batch}", (calls,) * turns, sum(counts), facts)

    def tokens(self, body: Body) -> int:
        """Input tokens of a request, its pictures included."""
        return self._encoder.encode(parse_request(body, self._reader), MAX_TOKENS).tokens

    def schema(self, size: Size) -> tuple[int, int]:
        """The most questions, then options, up to those asked for, that leave room for a state of one token.

        Raises SettingError where not even one question of two options fits.
        """
        pictures = [_picture(size.picture_side, np.random.SeedSequence(0))] * size.pictures
        smaller = [(questions, size.options) for questions in range(size.questions, 0, -1)]
        smaller += [(1, options) for options in range(size.options - 1, 1, -1)]
        needed = 0
        for questions, options in smaller:
            needed = self.tokens(_body("", questions, options, pictures)) + 1
            if needed <= size.tokens:
                return questions, options
        raise SettingError(f"no request of {size.tokens} tokens here: the smallest one needs {needed}")

    def _request(self, size: Size, questions: int, options: int, source: np.random.SeedSequence) -> Body:
        """A request whose state is grown, and cut, until its encoding has the wanted number of tokens."""
        pictures = [_picture(size.picture_side, part) for part in source.spawn(size.pictures)]
        drawn = np.random.default_rng(source).choice(words(), size.tokens).tolist()

        def tokens(state: str) -> int:
            return self.tokens(_body(state, questions, options, pictures))

        fixed = tokens("")
        count, state = size.tokens - fixed, ""
        while count:
            state = " ".join(drawn[:count])
            found = tokens(state)
            if found <= size.tokens:
                break
            # As many words as hold the excess, at their present tokens per word; in the end one by one.
            count -= max((found - size.tokens) * count // (found - fixed), 1)
            state = ""
        while (found := tokens(state)) < size.tokens:
            longer = (state + filler for filler in FILLERS)
            state_or_none = next((text for text in longer if found < tokens(text) <= size.tokens), None)
            if state_or_none is None:
                break  # the row will say that it is not exact
            state = state_or_none
        return _body(state, questions, options, pictures)


def mix() -> list[Body]:
    """The requests of the mix: support triage, routing over 60 intents, moderation, invoices, traces of agents."""
    text = (files(__package__) / "mix.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@cache
def words() -> tuple[str, ...]:
    """Common words, those of the mix, of which synthetic states are made."""
    return tuple(sorted(set(re.findall(r"\b[a-z]{2,8}\b", json.dumps(mix())))))


def layout(body: Body) -> list[tuple[str, str, tuple[str, ...]]]:
    """Per question: its id, its type, and its option ids in the order the model reads them."""
    text_only = {key: value for key, value in body.items() if key not in ("images", "videos")}
    questions = parse_request(text_only).questions
    return [(question.id, question.type, tuple(option for option, _ in question.options)) for question in questions]


def _body(state: str, questions: int, options: int, pictures: list[dict[str, str]]) -> Body:
    """A request of short questions: choices without descriptions, told apart by letters."""
    criteria = {_letters(number): None for number in range(options)}
    asked = {f"q{number}": {"type": QUESTION_TYPES[1], "criteria": criteria} for number in range(1, questions + 1)}
    return {"model": MODEL, "state": state, "questions": asked} | ({"images": pictures} if pictures else {})


def _letters(number: int) -> str:
    """a, b, … z, aa, ab, …"""
    first, last = divmod(number, 26)
    return (ascii_lowercase[first - 1] if first else "") + ascii_lowercase[last]


def _picture(side: int, source: np.random.SeedSequence) -> dict[str, str]:
    """A JPEG of smooth random colours, as a request carries it."""
    colours = np.random.default_rng(source).integers(0, 256, (8, 8, 3), np.uint8)
    image = Image.fromarray(colours).resize((side, side), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, "jpeg", quality=90)
    return {"content_type": "image/jpeg", "base64": base64.b64encode(buffer.getvalue()).decode()}


def check_counts(questions: int, options: int, pictures: int) -> None:
    """Raises SettingError for counts that no request may have."""
    for name, value, least, most in (
        ("questions", questions, 1, 64),
        ("options", options, 2, 255),
        ("pictures", pictures, 0, 4),
    ):
        if not least <= value <= most:
            raise SettingError(f"{name} is {value}; expected {least} to {most}")
