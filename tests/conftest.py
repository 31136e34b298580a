"""Shared fixtures: golden cases, bundles exported once, the reference loaded once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"
RELEASES = ("narrow", "odd")

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def golden_cases(release: str, media: bool = False) -> list[dict[str, Any]]:
    """The stored cases of one release, those with pictures or without."""
    cases = json.loads((GOLDEN / f"{release}.json").read_text(encoding="utf-8"))
    return [case for case in cases if bool({"images", "videos"} & case["request"].keys()) == media]


def control_tokens(case: dict[str, Any]) -> str:
    """The stored ids of two cases are what the reference makes of control tokens in user text: it parses them."""
    return "reference" if case["name"].startswith("control_tokens") else "text"


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Hashes are not remembered in the user's home."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bundle per golden release."""
    from clef_export.pipeline import export

    folder = tmp_path_factory.mktemp("bundles")
    for name in RELEASES:
        export(GOLDEN / name, folder / name)
    return {name: folder / name for name in RELEASES}


@pytest.fixture(scope="session")
def references() -> dict[str, Any]:
    """The published reference over each golden release."""
    from clef_export.reference import Reference

    return {name: Reference(GOLDEN / name) for name in RELEASES}


@pytest.fixture
def shared_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU records of the byte tokenizer would seldom share a pass, for their length: here they do."""
    from clef_trt import engine

    monkeypatch.setattr(engine, "SHARED_PASS", 16384)
