"""A multipart body → the JSON of the request and the bytes of its parts, as the official client sends pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from .refusal import Refusal

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

REQUEST_PART = "request"
PIECE_BYTES = 2**16


def read_parts(content: bytes, boundary: bytes, most: int) -> dict[str, bytes]:
    """The parts by name, kept in memory: pictures of callers are never written to a disk.

    Raises Refusal 400 where the body is no multipart/form-data of at most `most` parts, each with a name of its own.
    """
    intake = _Intake(most)
    try:
        parser = MultipartParser(boundary, intake.callbacks())
        for start in range(0, len(content), PIECE_BYTES):
            parser.write(content[start : start + PIECE_BYTES])
        parser.finalize()
    except FormParserError:
        raise _damaged("the body is no multipart/form-data with that boundary, or is cut short") from None
    if not intake.complete:
        raise _damaged("the body is no multipart/form-data with that boundary, or is cut short")
    return {name: bytes(data) for name, data in intake.parts.items()}


class _Intake:
    """Gathers parts from the parser's callbacks."""

    def __init__(self, most: int) -> None:
        self.parts: dict[str, bytearray] = {}
        self.complete = False
        self._most = most
        self._field, self._value = bytearray(), bytearray()
        self._name: str | None = None

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._header,
            "on_headers_finished": self._named,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._name = None

    def _header(self) -> None:
        if self._field.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(self._value))
            self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._field.clear()
        self._value.clear()

    def _named(self) -> None:
        if not self._name:
            raise _damaged("a part of the body has no name")
        if self._name in self.parts:
            raise _damaged("two parts of the body have the same name")
        if len(self.parts) == self._most:
            raise _damaged(f"the body has more than {self._most} parts: the request, and one for each picture")
        self.parts[self._name] = bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        assert self._name is not None, "data before the headers' end"
        self.parts[self._name] += data[start:end]

    def _end(self) -> None:
        self.complete = True


def _damaged(told: str) -> Refusal:
    return Refusal(400, "not_multipart", told)
