"""Whether a request may come in: the state of the server, the bound of its queue, and the keys of its clients."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import math
from collections.abc import Callable, Iterator, Sequence

from .refusal import Refusal

LOADING, READY, DRAINING = "loading", "ready", "draining"
RETRY_LOADING_S, RETRY_DRAINING_S = 5, 2
LONGEST_RETRY_S = 60


class Gate:
    """Counts the requests that are inside. Used on the event loop only."""

    def __init__(self, most: int, wait_s: Callable[[int], float] = lambda _: 1.0) -> None:
        """`wait_s`: about how long until so many requests are answered."""
        self.state = LOADING
        self.wait_s = wait_s
        self.inside = 0
        self._most = most
        self._empty = asyncio.Event()
        self._empty.set()

    def check_ready(self) -> None:
        """Raises Refusal 503 unless the server takes requests."""
        if self.state == LOADING:
            raise Refusal(503, LOADING, "the model is loading", {"Retry-After": str(RETRY_LOADING_S)})
        if self.state == DRAINING:
            # A kept connection would only meet the same server again.
            headers = {"Retry-After": str(RETRY_DRAINING_S), "Connection": "close"}
            raise Refusal(503, DRAINING, "the server is shutting down", headers)

    @contextlib.contextmanager
    def admitted(self, requests: int = 1) -> Iterator[None]:
        """Room for so many requests. Raises Refusal 429 where there is none."""
        if self.inside + requests > self._most:
            after_s = min(max(math.ceil(self.wait_s(self.inside)), 1), LONGEST_RETRY_S)
            told = f"the queue is full: {self.inside} of {self._most} requests are inside"
            raise Refusal(429, "queue_full", told, {"Retry-After": str(after_s)})
        self.inside += requests
        self._empty.clear()
        try:
            yield
        finally:
            self.inside -= requests
            if not self.inside:
                self._empty.set()

    async def empty(self) -> None:
        """Wait until nobody is inside."""
        await self._empty.wait()


class Keys:
    """The keys that open the server; without any, everybody may ask."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def check(self, authorization: str | None) -> None:
        """Raises Refusal 401. Takes as long for a wrong key as for a right one, whichever it is."""
        if not self._digests:
            return
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            told = "the API key is missing or wrong; expected Authorization: Bearer KEY"
            raise Refusal(401, "key", told, {"WWW-Authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
