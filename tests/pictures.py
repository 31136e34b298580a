"""The golden requests' pictures, drawn by golden/pictures.py, as callers hand them over."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_spec = importlib.util.spec_from_file_location("golden_pictures", Path(__file__).parent / "golden" / "pictures.py")
assert _spec is not None
assert _spec.loader is not None
drawing: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(drawing)


def with_pictures(request: dict[str, Any]) -> dict[str, Any]:
    """A golden request with its pictures drawn: PIL images, or data URLs where it says so."""
    drawn = dict(request)
    if "images" in request:
        drawn["images"] = [
            drawing.data_url(spec) if spec.get("as") == "data_url" else drawing.picture(spec)
            for spec in request["images"]
        ]
    if "videos" in request:
        drawn["videos"] = [drawing.frames(spec) for spec in request["videos"]]
    return drawn
