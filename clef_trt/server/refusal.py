"""Refusals: why a request is not answered, as a status, headers and a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import Fault, RequestError, TooLongError, printable

SHOWN_FAULTS = 1000  # a hostile request may hold more
FAULT_TEXT = "Internal server error: a fault of the server, not of the request."


class Refusal(Exception):
    """A request that is not answered. `kind` is what logs and metrics call it; `detail` is what the client reads."""

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str | Sequence[Fault],
        headers: Mapping[str, str] | None = None,
        place: tuple[str | int, ...] = ("body",),
    ) -> None:
        super().__init__(kind)
        self.status, self.kind, self.headers = status, kind, dict(headers or {})
        self._detail, self._place = detail, place

    @property
    def detail(self) -> str | list[dict[str, Any]]:
        """The `detail` of the body: a sentence, or an entry per fault."""
        if isinstance(self._detail, str):
            return self._detail
        return [
            {"loc": [*self._place, *map(_part, fault.loc)], "msg": _clean(fault.message), "type": fault.kind}
            for fault in self._detail[:SHOWN_FAULTS]
        ]

    @property
    def messages(self) -> list[str]:
        """One line per fault, for envelopes that have no places."""
        if isinstance(self._detail, str):
            return [self._detail]
        return [_clean(str(fault)) for fault in self._detail[:SHOWN_FAULTS]]


def refused_json(error: RequestError) -> Refusal:
    """Of a body that is no strict JSON."""
    return Refusal(400, "not_json", error.faults)


def refused_request(error: RequestError, place: tuple[str | int, ...] = ("body",)) -> Refusal:
    """Of a request that is wrong or too long."""
    if isinstance(error, TooLongError):
        needs = f"needs {error.needed_tokens} tokens, limit {error.limit_tokens}"
        faults = [Fault(fault.loc, f"{needs}: {fault.message}", fault.kind) for fault in error.faults]
        return Refusal(413, "too_long", faults, place=place)
    return Refusal(422, "invalid", error.faults, place=place)


def fault_of_ours() -> Refusal:
    """Of an engine that fails, or any error that nothing here expects."""
    return Refusal(500, "fault", FAULT_TEXT)


def _part(part: str | int) -> str | int:
    return part if isinstance(part, int) else _clean(part, 200)


def _clean(text: str, most: int = 1000) -> str:
    return printable(text, most)
