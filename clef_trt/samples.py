"""The sample requests that ship with the package."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any


def ticket() -> dict[str, Any]:
    """A support ticket with four questions: the request of the demonstration."""
    request: dict[str, Any] = json.loads(_text("sample_ticket.json"))
    return request


def requests() -> list[dict[str, Any]]:
    """A handful of different requests: what `verify` compares when it is given none."""
    texts = [json.loads(line) for line in _text("sample_requests.jsonl").splitlines()]
    return [ticket(), *texts, json.loads(_text("sample_picture.json"))]


def path() -> Path:
    """The file of the sample requests about text without the ticket, one JSON object a line, as `ranges` takes them."""
    return Path(str(files(__package__) / "sample_requests.jsonl"))


def _text(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
