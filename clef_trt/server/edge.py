"""The outermost layer: an id and safe headers on every response, one log line and one count, and no fault gets past."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .logs import fault_fields
from .metrics import Metrics
from .refusal import FAULT_TEXT

ID_HEADERS = ("x-typesafe-request-id", "x-request-id")
ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
HEADERS = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]


class Edge:
    """Wraps the application. `scope["record"]` is a dictionary in which handlers leave what the log line shall hold."""

    def __init__(self, app: ASGIApp, metrics: Metrics, logger: logging.Logger) -> None:
        self._app, self._metrics, self._logger = app, metrics, logger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        request_id = _request_id(scope)
        record: dict[str, Any] = {"route": "other"}
        scope["record"] = record
        status, sent_bytes = 0, 0

        async def tagged(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                names = {name for name, _ in message["headers"]}
                ids = [(name.encode(), request_id.encode()) for name in ID_HEADERS]
                more = [] if b"cache-control" in names else [(b"cache-control", b"no-store")]
                message["headers"] = [*message["headers"], *ids, *more, *HEADERS]
            sent_bytes += len(message.get("body", b""))
            await send(message)

        fields: dict[str, Any] = {}
        try:
            await self._app(scope, receive, tagged)
        except Exception as fault:  # nothing of it may reach the client, nor its text the log
            record["kind"], fields = "fault", fault_fields(fault)
            if not status:
                await _send_fault(tagged)
        spent_s = time.perf_counter() - begun
        kind = record.get("kind")
        self._metrics.responded(record["route"], status, kind, spent_s)
        level = logging.ERROR if status >= 500 and status != 503 else logging.INFO
        if self._logger.isEnabledFor(level):
            method = scope["method"] if scope["method"] in ("GET", "HEAD", "POST") else "other"
            told = {"id": request_id, "method": method, "status": status, **record, "bytes_out": sent_bytes}
            self._logger.log(level, "request", extra={"fields": told | {"ms": round(1000 * spent_s, 3)} | fields})


def _request_id(scope: Scope) -> str:
    """The client's own, where it is plain; else a new one."""
    headers = dict(scope["headers"])
    for name in ID_HEADERS:
        given = headers.get(name.encode(), b"").decode("latin-1")
        if ID.fullmatch(given):
            return str(given)
    return new_id()


def new_id() -> str:
    """An id that no other request has."""
    return uuid.uuid4().hex


async def _send_fault(send: Send) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(FAULT_TEXT)).encode())]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": FAULT_TEXT.encode()})
