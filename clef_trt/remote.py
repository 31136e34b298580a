"""A small client of a SystemOne server: requests in, responses out, over the standard library."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import math
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .errors import EngineError, Fault, RequestError, SettingError, printable

ROUTE = "/v1/systemone"
RETRIED = (429, 503)  # the server is full, or loading: it says when to come back
LONGEST_WAIT_S = 60.0
SHOWN_LETTERS = 300  # of a body that says what went wrong


class Remote:
    """Decides requests at `{base}/v1/systemone`. Safe to use from several threads."""

    def __init__(
        self,
        base: str,
        api_key: str | None = None,
        *,
        in_flight: int = 1,
        timeout_s: float = 300.0,
        tries: int = 6,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        """in_flight: requests sent at once by `decide_batch`. tries: for a server that answers 429 or 503. sleep: takes
        the seconds to wait in between; None waits, but no longer than until `close`.

        Raises SettingError for an impossible URL or key.
        """
        self.url = _route(base)
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key is not None:
            if not api_key or not api_key.isascii() or not api_key.isprintable():
                raise SettingError("the API key is empty or holds characters that no header can carry")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._closed = threading.Event()
        self._timeout_s, self._tries, self._sleep = timeout_s, tries, sleep or self._closed.wait
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._pool = ThreadPoolExecutor(in_flight)

    def decide(self, request: dict[str, Any]) -> dict[str, Any]:
        """The response body to one request body.

        Raises RequestError where the server refuses the request (400, 413, 422), SettingError for the key, EngineError
        for anything else, each with the URL and what it answered.
        """
        try:
            body = json.dumps(request, allow_nan=False).encode()
        except ValueError as fault:
            raise RequestError([Fault((), f"cannot be sent as JSON: {fault}", "json")]) from None
        for attempt in range(1, self._tries + 1):
            try:
                message = urllib.request.Request(self.url, body, self._headers)
                with self._opener.open(message, timeout=self._timeout_s) as answer:
                    return self._parsed(answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    if error.code not in RETRIED or attempt == self._tries:
                        raise self._refused(error, attempt) from None
                    wait_s = _wait_s(error.headers.get("Retry-After"), 2.0 ** (attempt - 1))
            except (OSError, http.client.HTTPException) as fault:
                reason = getattr(fault, "reason", None) or fault
                raise EngineError(f"{self.url} gave no answer: {reason or type(fault).__name__}") from fault
            self._sleep(wait_s)
            if self._closed.is_set():
                raise EngineError(f"{self.url} was closed before it was asked again")
        raise AssertionError("the last try returns or raises")

    def decide_batch(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The responses to several requests, in their order; `in_flight` are sent at once.

        Raises as `decide`; the places of a RequestError begin with the request's index.
        """
        futures = [self._pool.submit(self.decide, request) for request in requests]
        responses, faults = [], []
        try:
            for index, future in enumerate(futures):
                try:
                    responses.append(future.result())
                except RequestError as error:
                    faults += [Fault((index, *fault.loc), fault.message, fault.kind) for fault in error.faults]
        finally:
            for future in futures:
                future.cancel()
        if faults:
            raise RequestError(faults)
        return responses

    def close(self) -> None:
        """Send nothing more; waits for answers to what was sent."""
        self._closed.set()
        self._pool.shutdown(cancel_futures=True)

    def _parsed(self, content: bytes) -> dict[str, Any]:
        try:
            response = json.loads(content)
        except (ValueError, RecursionError):
            response = None
        if not isinstance(response, dict):
            shown = printable(content.decode(errors="replace"), SHOWN_LETTERS)
            raise EngineError(f"{self.url} answered {shown!r}; expected a JSON object with answers")
        return response

    def _refused(self, error: urllib.error.HTTPError, attempt: int) -> Exception:
        content = b""
        with contextlib.suppress(OSError, http.client.HTTPException):  # the status alone must do
            content = error.read(2**20)
        status = f"{self.url} answered {error.code} {printable(str(error.reason))}".rstrip()
        faults = _faults(content)
        told = "; ".join(str(fault) if fault.loc else fault.message for fault in faults) or "(nothing more was said)"
        if error.code in (400, 413, 422):
            faults = faults or [Fault((), told, "refused")]
            return RequestError([Fault(fault.loc, f"{status}: {fault.message}", fault.kind) for fault in faults])
        if error.code in (401, 403):
            return SettingError(f"{status}: {told}; the server wants another key (--api-key KEY)")
        if 300 <= error.code < 400:
            place = printable(error.headers.get("Location") or "another place", SHOWN_LETTERS)
            return SettingError(f"{status} and points to {place}; name that URL instead: a key is not sent elsewhere")
        tries = f" after {attempt} tries" if error.code in RETRIED else ""
        return EngineError(f"{status}{tries}: {told}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib would follow with a GET, and carry the key to whatever host it is sent to."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _route(base: str) -> str:
    try:
        parts = urllib.parse.urlsplit(base)
        host = parts.hostname
        _ = parts.port  # raises where it is no number
    except ValueError as fault:
        raise SettingError(f"{printable(base, 200)!r} is no URL: {fault}") from None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or "@" in parts.netloc:
        raise SettingError(f"{printable(base, 200)!r} is no URL of a server; expected https://HOST[:PORT][/PATH]")
    if not base.isascii() or not base.isprintable() or " " in base:
        raise SettingError(f"{printable(base, 200)!r} holds characters that no URL may; encode them with %")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path.removesuffix(ROUTE)}{ROUTE}"


def _wait_s(retry_after: str | None, otherwise: float) -> float:
    """Seconds of a Retry-After header, a number or a date; at most LONGEST_WAIT_S."""
    wait_s = otherwise
    if retry_after is not None:
        try:
            wait_s = float(retry_after)
        except ValueError:
            with contextlib.suppress(ValueError, OverflowError):
                wait_s = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
    return min(max(wait_s, 0.0), LONGEST_WAIT_S) if not math.isnan(wait_s) else otherwise


def _faults(content: bytes) -> list[Fault]:
    """What the body of a refusal says: the entries of a `detail` list with their places, else its text."""
    text = content.decode(errors="replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    detail = value.get("detail", value.get("error", value)) if isinstance(value, dict) else value
    if isinstance(detail, list) and detail and all(isinstance(entry, dict) and "msg" in entry for entry in detail):
        return [_fault(entry) for entry in detail]
    shown = detail if isinstance(detail, str) else text
    return [Fault((), printable(shown.strip(), SHOWN_LETTERS), "refused")] if shown.strip() else []


def _fault(entry: dict[str, Any]) -> Fault:
    loc = entry.get("loc")
    place = tuple(str(part) for part in loc) if isinstance(loc, list) else ()
    return Fault(place, printable(str(entry["msg"]), SHOWN_LETTERS), "refused")
