"""One body → its answer: read and encode off the event loop, wait for a pass, answer off the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from ..clef import Clef
from ..encode import render
from ..errors import Fault, RequestError, printable
from ..strict_json import read_json
from ..types import Encoding, Request
from .assets import in_assets, with_images
from .batcher import Batcher, Waiting
from .body import decoded
from .multipart import REQUEST_PART, read_parts
from .refusal import Refusal, fault_of_ours, refused_json, refused_request
from .settings import Settings

# Encoding a body of megabytes takes a second: large ones go through a thread of their own, and hold up no others.
LARGE_BYTES = 2**15
EXPECTED_COMPRESSION = 4
STAGES = ("queue", "encode", "run", "answer")


@dataclass(frozen=True)
class Sent:
    """A body as it came. `boundary`: of a multipart body, None of JSON."""

    content: bytes
    encoding: str | None
    boundary: bytes | None = None


@dataclass(frozen=True)
class Body:
    """A body as JSON, the parts of a multipart one besides it, and the bytes it was read from."""

    value: Any
    parts: dict[str, bytes] | None
    size: int


@dataclass
class Decision:
    """A response body, and what it took."""

    response: dict[str, Any]
    tokens: int
    truncated_tokens: int
    questions: int
    options: int
    media: int
    records: int  # of its pass
    stages_ms: dict[str, float] = field(default_factory=dict)


class Decider:
    """Decides for the routes. All its methods are called on the event loop."""

    def __init__(self, clef: Clef, settings: Settings, batcher: Batcher) -> None:
        self.clef, self.batcher = clef, batcher
        self._settings = settings
        self._pool = ThreadPoolExecutor(settings.encoders, thread_name_prefix="encode")
        self._large_pool = ThreadPoolExecutor(1, thread_name_prefix="encode large")
        self._names = (clef.manifest.source.name, *settings.models)

    def close(self) -> None:
        """Release the threads."""
        self._pool.shutdown(wait=False)
        self._large_pool.shutdown(wait=False)

    def knows(self, model: str) -> bool:
        """Whether requests may name this model."""
        return any(fnmatchcase(model.strip(), name) for name in self._names)

    async def body(self, sent: Sent) -> Body:
        """The body, read. Raises Refusal."""
        size = len(sent.content) * (1 if sent.encoding is None else EXPECTED_COMPRESSION)
        body: Body = await self._off_loop(lambda: self._read(sent), size)
        return body

    async def decide(
        self,
        body: Body,
        confidence: str | None = None,
        place: tuple[str | int, ...] = ("body",),
        begun: float | None = None,
    ) -> Decision:
        """The answers to a body. `begun`: when its reading began, for the time of the stage. Raises Refusal."""
        begun = time.perf_counter() if begun is None else begun
        request, encoding = await self._off_loop(lambda: self._encoded(body, place), body.size)
        try:
            entry = await self.batcher.logits(encoding)
        except RequestError as error:  # a picture whose pixels turn out to be damaged
            raise refused_request(error, place) from None
        except Exception as error:
            raise fault_of_ours() from error
        ended = time.perf_counter()
        logits = entry.logits.result()
        response = await self._off_loop(lambda: _for_clients(self.clef.answer(request, encoding, logits, confidence)))
        return _decision(response, encoding, entry, begun, ended)

    def _read(self, sent: Sent) -> Body:
        content = decoded(sent.content, sent.encoding, self._settings.decoded_bytes)
        size = len(content)
        parts = None
        if sent.boundary is not None:
            parts = read_parts(content, sent.boundary, self._settings.images + 1)
            if REQUEST_PART not in parts:
                raise Refusal(400, "not_multipart", f"the body has no part named {REQUEST_PART}")
            content = parts.pop(REQUEST_PART)
        try:
            return Body(read_json(content, "the body"), parts, size)
        except RequestError as error:
            raise refused_json(error) from None

    def _encoded(self, body: Body, place: tuple[str | int, ...]) -> tuple[Request, Encoding]:
        value = body.value
        places: list[tuple[str | int, ...]] = []
        try:
            value, places = with_images(value, body.parts)
            self._check_model(value)
            request = self.clef.parse(value)
            return request, self.clef.encode_parsed(request)
        except RequestError as error:
            images = len(value["images"]) if places else 0
            raise refused_request(in_assets(error, places, images), place) from None

    def _check_model(self, body: Any) -> None:
        model = body.get("model") if isinstance(body, dict) else None
        if isinstance(model, str) and model and not self.knows(model):
            raise unknown_model(model)

    async def _off_loop(self, work: Callable[[], Any], size: int = 0) -> Any:
        """The result of work on a body of so many bytes. Large ones have a thread of their own, and wait for it."""
        pool = self._pool if size <= LARGE_BYTES else self._large_pool
        return await asyncio.get_running_loop().run_in_executor(pool, work)


def with_model(body: Body, model: str) -> Body:
    """The body with the model of its route, where it names none itself."""
    return replace(body, value={"model": model, **body.value}) if isinstance(body.value, dict) else body


def unknown_model(model: str) -> Refusal:
    """Of a name that is none of this server's."""
    return Refusal(404, "model", f"the model {printable(model.strip(), 80)!r} is not known here; see /v1/models")


def check_batch(body: Body, most: int) -> list[Body]:
    """The requests of a batch's body. Raises Refusal 422."""
    items = body.value
    if not isinstance(items, list) or not 1 <= len(items) <= most:
        came = f"has {len(items)} requests" if isinstance(items, list) else "is no array"
        raise refused_request(RequestError([Fault((), f"{came}; expected an array of 1 to {most} requests", "type")]))
    return [Body(item, None, body.size // len(items)) for item in items]


def to_json(value: Any) -> bytes:
    """A body of ours."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _for_clients(response: dict[str, Any]) -> dict[str, Any]:
    """The response with legends as the official client takes them: text, objects and arrays, no null and no number."""
    for answer in response["answers"].values():
        for level, description in answer.get("legend", {}).items():
            if not isinstance(description, str | dict | list):
                answer["legend"][level] = level if description is None else render(description)
    return response


def _decision(response: dict[str, Any], encoding: Encoding, entry: Waiting, begun: float, ended: float) -> Decision:
    stages_s = (
        entry.started - entry.arrived,
        entry.arrived - begun,
        entry.finished - entry.started,
        time.perf_counter() - ended,
    )
    return Decision(
        response,
        encoding.tokens,
        encoding.truncated_state_tokens,
        len(encoding.questions),
        encoding.options,
        len(encoding.media),
        entry.records,
        {name: 1000 * spent for name, spent in zip(STAGES, stages_s, strict=True)},
    )
