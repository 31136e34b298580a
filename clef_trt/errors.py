"""The errors callers meet.

ClefError
├── RequestError        the request is wrong; `.faults` lists every fault with its place
│   └── TooLongError    the request needs more tokens than the limit; `.needed_tokens`, `.limit_tokens`
├── BundleError         a bundle is missing, incomplete, altered or of another version
├── EngineError         an engine cannot be opened or its answer is unusable
├── SettingError        an unknown or impossible setting
├── MissingExtraError   an optional dependency is not installed
├── ReleaseError        a checkpoint cannot be read (export)
├── ExportError         a step of the export broke its promise
└── VerificationError   an engine does not agree with its reference (the gate of `verify`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


def printable(text: str, most: int = 40) -> str:
    """Text of a caller as it may be shown: one line, no control characters, at most `most` characters."""
    shown = "".join(letter if letter.isprintable() else "·" for letter in text[:most])
    return shown if len(text) <= most else shown[:-1] + "…"


class ClefError(Exception):
    """Base of every error this package raises on purpose."""


SHOWN_FAULTS = 20  # in the text of a RequestError; `faults` holds all


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a request: where, what kind, and what came against what was expected."""

    loc: tuple[str | int, ...]
    message: str
    kind: str

    def __str__(self) -> str:
        place = ".".join(printable(str(part)) for part in self.loc)
        return f"{place or 'request'}: {self.message}"


class RequestError(ClefError):
    """The request is wrong. `faults` holds all of them, not only the first."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        lines = [str(fault) for fault in self.faults[:SHOWN_FAULTS]]
        if len(self.faults) > SHOWN_FAULTS:
            lines.append(f"… and {len(self.faults) - SHOWN_FAULTS} more")
        super().__init__("\n".join(lines))


class TooLongError(RequestError):
    """Schema and media alone exceed the token limit, or the state would be cut where that is refused."""

    def __init__(self, faults: Sequence[Fault], needed_tokens: int, limit_tokens: int) -> None:
        self.needed_tokens, self.limit_tokens = needed_tokens, limit_tokens
        super().__init__(faults)


class BundleError(ClefError):
    """A bundle is missing, incomplete, altered, moved or of another format version."""


class EngineError(ClefError):
    """An engine cannot be opened, refuses its inputs, or returned something unusable."""


class SettingError(ClefError):
    """A setting is unknown or its value impossible."""


class ReleaseError(ClefError):
    """A checkpoint cannot be read or does not fit its configuration."""


class ExportError(ClefError):
    """A step of the export did not do what it promises."""


class VerificationError(ClefError):
    """An engine does not agree with its reference."""


class MissingExtraError(ClefError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str, cause: Any = None) -> None:
        detail = f" ({cause})" if cause else ""
        super().__init__(f"{what} needs packages that are not installed{detail}: pip install 'clef-trt[{extra}]'")
