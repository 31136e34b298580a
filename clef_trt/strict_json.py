"""JSON of a caller → values, or every fault in it with its place: nothing that two readers could read differently."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .errors import Fault, RequestError, printable

MAX_NESTING = 128
MAX_INTEGER_DIGITS = 4300  # Python's own bound: more take quadratic time to read and cannot be written again
SHOWN_FAULTS = 100  # a hostile body may hold millions

Loc = tuple[str | int, ...]


def read_json(content: bytes, where: str = "the request") -> Any:
    """The value of a JSON text in UTF-8.

    Raises RequestError, its faults of kind json, where it is none, and for duplicate keys, numbers that are not finite,
    integers of more than MAX_INTEGER_DIGITS digits, nesting deeper than MAX_NESTING and unpaired surrogates.
    """
    try:
        text = content.decode("utf-8")
        if text.startswith("\ufeff"):
            raise _not_json(f"{where} begins with a byte order mark (BOM); expected JSON in UTF-8 without one")
        value = _decode(text)
    except UnicodeDecodeError as fault:
        if _is_wide(content):
            raise _not_json(f"{where} is not JSON in UTF-8: it is UTF-16 or UTF-32") from None
        raise _not_json(f"{where} is not JSON in UTF-8: byte {fault.start} is no UTF-8 ({fault.reason})") from None
    except RecursionError:
        raise _not_json(f"{where} is nested too deeply; at most {MAX_NESTING} levels are allowed") from None
    except ValueError as fault:
        wide = "it is UTF-16 or UTF-32" if _is_wide(content) else str(fault)
        raise _not_json(f"{where} is not JSON in UTF-8: {wide}") from None
    if faults := list(_first(_faults(value, "\\u" in text))):
        raise RequestError(faults)
    return value


class _Refused:
    """Stands in a decoded value for a part that is refused, so that the walk over it can say where that is."""

    def __init__(self, message: str) -> None:
        self.message = message


def _integer(digits: str) -> int | _Refused:
    if len(digits) - digits.startswith("-") > MAX_INTEGER_DIGITS:
        return _Refused(f"is an integer of more than {MAX_INTEGER_DIGITS} digits")
    return int(digits)


def _number(text: str) -> float | _Refused:
    value = float(text)
    return value if abs(value) != float("inf") else _Refused("is a number beyond the range of a double")


def _constant(name: str) -> _Refused:
    return _Refused(f"is {name}, which is no JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Refused:
    value = dict(pairs)
    if len(value) == len(pairs):
        return value
    seen: set[str] = set()
    twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return _Refused(f"is an object in which the key {printable(twice)!r} is there twice")


_decode = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_constant
).decode


def _faults(value: Any, escapes: bool) -> Iterator[Fault]:
    """What is wrong within a decoded value. `escapes`: the text had some, so that strings may hold surrogates."""
    # Places are linked, newest part first, and only spelled out for a fault.
    stack: list[tuple[Any, int, Any]] = [(value, 0, None)]
    while stack:
        item, depth, place = stack.pop()
        kind = type(item)
        if kind is dict or kind is list:
            if depth == MAX_NESTING:
                yield _fault(place, f"is nested too deeply; at most {MAX_NESTING} levels are allowed")
                continue
            if kind is list:
                stack += [(entry, depth + 1, (index, place)) for index, entry in enumerate(item)]
                continue
            for key, entry in item.items():
                if escapes and _has_surrogate(key):
                    yield _fault(place, f"has the key {printable(key)!r} with an unpaired surrogate")
                stack.append((entry, depth + 1, (key, place)))
        elif kind is str:
            if escapes and _has_surrogate(item):
                yield _fault(place, "has an unpaired surrogate: it is no Unicode text")
        elif kind is _Refused:
            yield _fault(place, item.message)


def _first(faults: Iterator[Fault]) -> Iterator[Fault]:
    return (fault for _, fault in zip(range(SHOWN_FAULTS), faults, strict=False))


def _fault(place: Any, message: str) -> Fault:
    loc: list[str | int] = []
    while place is not None:
        part, place = place
        loc.append(printable(part, 80) if isinstance(part, str) else part)
    return Fault(tuple(reversed(loc)), message, "json")


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _is_wide(content: bytes) -> bool:
    """UTF-16 and UTF-32 of JSON begin with a byte order mark, or have a zero byte among their first two."""
    return content[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in content[:2]


def _not_json(message: str) -> RequestError:
    return RequestError([Fault((), message, "json")])
