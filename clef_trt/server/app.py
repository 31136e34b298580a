"""The routes, and how a request goes through them: key, state of the server, room, body, decision, answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from python_multipart.multipart import parse_options_header
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from .. import __version__
from . import metrics, page
from .body import check_encoding, read_body
from .decide import Body, Decider, Decision, Sent, check_batch, to_json, unknown_model, with_model
from .edge import Edge
from .gate import READY, Gate, Keys
from .logs import fault_fields
from .metrics import Metrics
from .openapi import VENDOR_PREFIX, VENDOR_ROUTE, description
from .refusal import Refusal, fault_of_ours
from .settings import Settings

JSON = "application/json"
Handler = Callable[[Request], Awaitable[Response]]


class Service:
    """What the routes share. `decider` is set once the model is loaded, and `models` with it."""

    def __init__(self, settings: Settings, logger: logging.Logger) -> None:
        self.settings, self.logger = settings, logger
        self.gate = Gate(settings.queue)
        self.keys = Keys(settings.api_keys)
        self.metrics = Metrics()
        self.decider: Decider | None = None
        self.models: list[dict[str, str]] = []

    def open(self, decider: Decider, models: list[dict[str, str]]) -> None:
        """The model is loaded."""
        self.decider, self.models = decider, models
        self.gate.wait_s = decider.batcher.wait_s

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes: list[BaseRoute] = [
            _route("/v1/systemone", self._systemone, "POST"),
            _route("/v1/systemone/batch", self._batch, "POST"),
            _route("/v1/models", self._models, "GET"),
            _route(VENDOR_ROUTE, self._vendor, "POST"),
            _route("/health", self._health, "GET"),
            _route("/ready", self._ready, "GET"),
            _route("/metrics", self._metrics, "GET"),
            _route("/openapi.json", self._openapi, "GET"),
        ]
        if self.settings.page:
            routes += [_route(path, file, "GET") for path, file in page.handlers().items()]
        handlers = {HTTPException: _from_starlette, Refusal: _refused, Exception: _unexpected}
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return Edge(app, self.metrics, self.logger)

    async def _systemone(self, request: Request) -> Response:
        async def work(decider: Decider, sent: Sent, begun: float) -> Response:
            body = await decider.body(sent)
            decision = await decider.decide(body, begun=begun)
            return self._decided(request, decision, decision.response)

        return await self._inside(request, work, multipart=True)

    async def _vendor(self, request: Request) -> Response:
        model = request.path_params["model"]

        async def work(decider: Decider, sent: Sent, begun: float) -> Response:
            if not decider.knows(model):
                raise unknown_model(model)
            body = await decider.body(sent)
            decision = await decider.decide(with_model(body, model), self.settings.vendor_confidence, begun=begun)
            return self._decided(request, decision, enveloped(decision.response))

        return await self._inside(request, work)

    async def _batch(self, request: Request) -> Response:
        async def work(decider: Decider, sent: Sent, begun: float) -> Response:
            items = check_batch(await decider.body(sent), self.settings.batch_items)
            with self.gate.admitted(len(items) - 1):  # the first has its room already
                results = await asyncio.gather(*(self._item(decider, item, i) for i, item in enumerate(items)))
            refused = sum("error" in result for result in results)
            request.scope["record"] |= {"items": len(items), "refused": refused}
            return Response(to_json(results), media_type=JSON)

        return await self._inside(request, work)

    async def _item(self, decider: Decider, item: Body, index: int) -> dict[str, Any]:
        try:
            decision = await decider.decide(item, place=("body", index))
        except Refusal as refusal:
            self.metrics.refused(refusal.kind)
            return {"error": {"status": refusal.status, "detail": refusal.detail}}
        self.metrics.decided(decision)
        return decision.response

    async def _inside(
        self, request: Request, work: Callable[[Decider, Sent, float], Awaitable[Response]], multipart: bool = False
    ) -> Response:
        """What every deciding route does around its own work."""
        begun = time.perf_counter()
        self.keys.check(request.headers.get("authorization"))
        self.gate.check_ready()
        assert self.decider is not None, "ready without a model"
        with self.gate.admitted():
            boundary = _boundary(request.headers.get("content-type"), multipart)
            encoding = check_encoding(request.headers.get("content-encoding", ""))
            content = await read_body(request, self.settings)
            request.scope["record"]["bytes_in"] = len(content)
            return await _unless_gone(request, work(self.decider, Sent(content, encoding, boundary), begun))

    def _decided(self, request: Request, decision: Decision, body: Any) -> Response:
        self.metrics.decided(decision)
        stages = {name: round(spent, 3) for name, spent in decision.stages_ms.items()}
        request.scope["record"] |= {
            "tokens": decision.tokens,
            "truncated_tokens": decision.truncated_tokens,
            "questions": decision.questions,
            "options": decision.options,
            "media": decision.media,
            "records": decision.records,
            **{f"{name}_ms": spent for name, spent in stages.items()},
        }
        timing = ", ".join(f"{name};dur={spent}" for name, spent in stages.items())
        return Response(to_json(body), media_type=JSON, headers={"Server-Timing": timing})

    async def _models(self, request: Request) -> Response:
        self.keys.check(request.headers.get("authorization"))
        self.gate.check_ready()
        return Response(to_json({"models": self.models}), media_type=JSON)

    async def _health(self, _: Request) -> Response:
        return Response(to_json({"status": "live", "version": __version__}), media_type=JSON)

    async def _ready(self, _: Request) -> Response:
        self.gate.check_ready()
        return Response(to_json({"status": READY}), media_type=JSON)

    async def _metrics(self, _: Request) -> Response:
        self.metrics.inside.set(self.gate.inside)
        self.metrics.ready.set(self.gate.state == READY)
        self.metrics.waiting.set(len(self.decider.batcher) if self.decider else 0)
        return Response(self.metrics.text(), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _openapi(self, _: Request) -> Response:
        return Response(to_json(description(self.settings)), media_type=JSON)


def enveloped(result: Any) -> dict[str, Any]:
    """The vendor's envelope of an answer."""
    return {"result": result, "success": True, "errors": [], "messages": []}


def _route(path: str, handler: Handler, method: str) -> Route:
    """The handler, with the route named for the log whatever becomes of the request."""

    async def endpoint(request: Request) -> Response:
        request.scope["record"]["route"] = path
        return await handler(request)

    return Route(path, endpoint, methods=[method], name=path)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal), f"a {type(error).__name__} where a Refusal was expected"
    record = request.scope["record"]
    record["kind"] = error.kind
    if error.__cause__ is not None:  # of the engine: its place, without its text
        record |= fault_fields(error.__cause__)
    if request.url.path.startswith(VENDOR_PREFIX):
        errors = [{"code": error.status, "message": message} for message in error.messages]
        body = {"result": None, "success": False, "errors": errors, "messages": []}
        return Response(to_json(body), error.status, error.headers, JSON)
    if error.status == 500:
        return PlainTextResponse(error.messages[0], 500)
    return Response(to_json({"detail": error.detail}), error.status, error.headers, JSON)


async def _unexpected(request: Request, _: Exception) -> Response:
    """Any other exception; the edge logs it."""
    return await _refused(request, fault_of_ours())


async def _from_starlette(request: Request, error: Exception) -> Response:
    """Its own refusals: no such route, no such method."""
    assert isinstance(error, HTTPException), f"a {type(error).__name__} where an HTTPException was expected"
    told = {404: "there is no such route; see /openapi.json", 405: "the route does not take this method"}
    kind = {404: "route", 405: "method"}.get(error.status_code, "http")
    headers = dict(error.headers or {})
    if "Allow" in headers:
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
    return await _refused(request, Refusal(error.status_code, kind, told.get(error.status_code, error.detail), headers))


def _boundary(content_type: str | None, multipart: bool) -> bytes | None:
    """The boundary of a multipart body, None for JSON. Raises Refusal 415 for any other type, 400 without boundary."""
    kind, options = parse_options_header(content_type or JSON)
    charset = options.get(b"charset", b"utf-8").lower()
    if kind == b"application/json" and charset in (b"utf-8", b"utf8"):
        return None
    if multipart and kind == b"multipart/form-data":
        if not options.get(b"boundary") or len(options[b"boundary"]) > 256:
            raise Refusal(400, "not_multipart", "Content-Type names no boundary that parts may have")
        return options[b"boundary"]
    expected = "application/json in UTF-8" + (" or multipart/form-data" if multipart else "")
    raise Refusal(415, "type", f"the body's Content-Type is not taken here; expected {expected}", {"Accept": JSON})


async def _end(request: Request) -> None:
    """Wait until the client closes the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _unless_gone(request: Request, work: Awaitable[Response]) -> Response:
    """The response, unless the client closes the connection first: then the work is dropped, and its place is free."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_end(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Refusal(499, "gone", "the client closed the connection")
    finally:
        for one in (task, watch):
            one.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch
