"""Seeded requests of invented words, for tests that need many."""

from __future__ import annotations

import random
from typing import Any


def random_requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Requests of one to four questions of all types, over states of 5 to 60 words."""
    source = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(source.choices(letters, k=source.randint(2, 9))) for _ in range(400)]

    def text(length: int) -> str:
        return " ".join(source.choices(words, k=length))

    def question() -> dict[str, Any]:
        kind = source.choice(["noul", "choice", "score"])
        asked: dict[str, Any] = {"type": kind, "instructions": text(6)}
        if kind == "choice":
            asked["criteria"] = {f"{text(1)}{i}": text(3) for i in range(source.randint(2, 8))}
        elif kind == "score":
            asked["criteria"] = [text(3) for _ in range(source.randint(2, 5))]
        return asked

    return [
        {
            "model": "clef-flash",
            "state": text(source.randint(5, 60)),
            "questions": {f"q{i}": question() for i in range(source.randint(1, 4))},
        }
        for _ in range(count)
    ]
