"""Decisions before the first request, one of every length class: no caller waits for memory or a choice of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import samples
from ..clef import Clef

SHORTEST_TOKENS = 256
WORD = " word"
QUESTIONS: dict[str, Any] = {
    "yes": {"type": "noul", "instructions": "Is it?"},
    "one": {"type": "choice", "criteria": {"a": None, "b": None}},
    "level": {"type": "score", "criteria": ["low", "high"]},
}


def length_classes(longest_tokens: int) -> list[int]:
    """Powers of two up to the longest record, and that itself."""
    if longest_tokens == 0:
        return []
    classes, length = [], SHORTEST_TOKENS
    while length < longest_tokens:
        classes.append(length)
        length *= 2
    return [*classes, longest_tokens]


def warm_up(
    clef: Clef, longest_tokens: int, batch: int, picture: bool, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Run a pass of every length class, a full one of the shortest, and one with a picture where the bundle takes them.

    Raises EngineError where one of them fails: a server that cannot decide must not become ready.
    """
    for length in length_classes(longest_tokens):
        request = _request(clef, length)
        clef.decide(request)
        if length <= SHORTEST_TOKENS:
            clef.decide_batch([request] * batch)
        progress(length)
    if picture and longest_tokens and "vision" in clef.manifest.graphs:
        asked = next(request for request in samples.requests() if request.get("images"))
        if clef.encode({**asked, "images": []}).tokens < longest_tokens:
            clef.decide(asked)


def _request(clef: Clef, tokens: int) -> dict[str, Any]:
    """A request of about so many tokens, and no more; of a limit that holds no question only the questions."""

    def asked(words: int) -> dict[str, Any]:
        return {"model": "clef", "state": WORD * words, "questions": QUESTIONS}

    fixed, hundred = clef.encode(asked(0)).tokens, clef.encode(asked(100)).tokens
    per_word = max((hundred - fixed) / 100, 0.01)
    return asked(max(int((tokens - fixed) / per_word), 0))
