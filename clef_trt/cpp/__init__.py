"""C++ headers to embed clef_trt, or to run a bundle's text graph without Python; see `python -m clef_trt.cpp`."""

from __future__ import annotations

from pathlib import Path


def include_folder() -> Path:
    """The folder of the headers; examples/ in it holds programs that use them."""
    return Path(__file__).parent
