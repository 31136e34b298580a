"""Encodings of many clients → passes of the engine, one at a time: which go next, and which go together."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from ..clef import Clef
from ..errors import RequestError
from ..types import Encoding

Logits = list[np.ndarray]


@dataclass(eq=False)
class Waiting:
    """An encoding in the queue; times are of time.perf_counter."""

    encoding: Encoding
    arrived: float
    logits: asyncio.Future[Logits]
    started: float = 0.0
    finished: float = 0.0
    records: int = 0  # of the pass it was in

    @property
    def tokens(self) -> int:
        return self.encoding.tokens


@dataclass
class PassReport:
    """What one pass was, for metrics."""

    records: int
    tokens: int
    padded_tokens: int
    spent_s: float
    failed: bool


@dataclass
class Batcher:
    """Runs passes on one thread of its own; everything else happens on the event loop, so nothing needs a lock.

    Which goes next: a record of the shortest length class (a power of two), the oldest of them; so a short request
    waits for the pass that runs and for no longer one behind it. Once the oldest request of all has waited for
    `patience_s`, or for as much less as it is shorter than the longest record, it goes before them; then the shorter
    ones have as much time as its pass took, so that neither starves. Others join it, oldest first, whose lengths differ
    from its own and each other's by no more than a factor of two, up to `batch` and `padded_tokens`.

    When: at once, unless more are likely to come: within `window_s` of a pass of several, its clients are about to ask
    again. Then it waits until as many are there, or that time is over. Alone, nobody waits.
    """

    clef: Clef
    batch: int
    padded_tokens: int
    window_s: float
    patience_s: float
    on_pass: Callable[[PassReport], None] = lambda _: None
    on_fault: Callable[[BaseException], None] = lambda _: None
    clock: Callable[[], float] = time.perf_counter
    _waiting: list[Waiting] = field(default_factory=list)
    _arrival: asyncio.Event = field(default_factory=asyncio.Event)
    _expected: int = 1  # requests that a pass would hold if the clients of the last one came back
    _idle_since: float = 0.0
    _oldest_leads: bool = False  # the pass that runs
    _owed_s: float = 0.0  # to those shorter than the oldest, for the last pass that it led
    _spent_s: deque[float] = field(default_factory=lambda: deque(maxlen=64))  # per record, of the last passes

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    def __len__(self) -> int:
        return len(self._waiting)

    async def logits(self, encoding: Encoding) -> Waiting:
        """The encoding with its logits and times, once its pass has run.

        Raises what the pass raised for this encoding alone. Cancelled, it leaves the queue.
        """
        entry = Waiting(encoding, self.clock(), asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._arrival.set()
        try:
            await entry.logits
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
        return entry

    def wait_s(self, requests: int) -> float:
        """About how long until so many requests are answered."""
        return requests * sum(self._spent_s) / len(self._spent_s) if self._spent_s else 1.0

    async def run(self) -> None:
        """Serve the queue until cancelled."""
        try:
            while True:
                await self._gathered()
                if chosen := self._chosen():
                    await self._pass(chosen)
        finally:
            self._thread.shutdown(wait=False)

    async def _gathered(self) -> None:
        """Wait until there is something to run and no reason to wait for more."""
        while not self._waiting:
            self._arrival.clear()
            await self._arrival.wait()
        arrived = self._waiting[0].arrived
        if arrived > self._idle_since + self.window_s:
            self._expected = 1
        until = max(arrived, self._idle_since) + self.window_s
        room = self._room(self._waiting[0].encoding)
        while len(self._waiting) < min(self._expected, room) and (left_s := until - self.clock()) > 0:
            self._arrival.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._arrival.wait()
            except TimeoutError:
                break
            if not self._waiting:  # its client has gone
                break

    def _room(self, encoding: Encoding) -> int:
        """How many records like this one a pass takes: nobody waits for more."""
        most = max(min(self.batch, self.padded_tokens // encoding.tokens), 1)
        try:
            return max(len(indices) for indices in self.clef.plan([encoding] * most))
        except Exception:  # an engine that cannot say what fits; `_chosen` tells of it
            return 1

    def _chosen(self) -> list[Waiting]:
        """The entries of the next pass; they leave the queue."""
        if not self._waiting:
            return []
        oldest = self._waiting[0]
        leader = min(self._waiting, key=lambda entry: (entry.tokens.bit_length(), entry.arrived))
        patience_s = self.patience_s * min(oldest.tokens / self.clef.max_length, 1)
        waited_s = self.clock() - oldest.arrived
        if waited_s >= patience_s and self._owed_s <= 0:
            leader = oldest
        self._oldest_leads = leader is oldest
        together = [leader]
        shortest = longest = leader.tokens
        for entry in self._waiting:
            low, high = min(shortest, entry.tokens), max(longest, entry.tokens)
            if len(together) == self.batch:
                break
            if entry is not leader and high <= 2 * low and high * (len(together) + 1) <= self.padded_tokens:
                together.append(entry)
                shortest, longest = low, high
        try:
            plan = self.clef.plan([entry.encoding for entry in together])
            chosen = [together[i] for i in next(indices for indices in plan if 0 in indices)]
        except Exception as fault:  # an engine that cannot say what fits may still run one record
            self.on_fault(fault)
            chosen = [leader]
        self._waiting = [entry for entry in self._waiting if entry not in chosen]
        return chosen

    async def _pass(self, entries: Sequence[Waiting]) -> None:
        """Run one pass and hand out its logits; of a pass that fails the records run again, each alone."""
        loop = asyncio.get_running_loop()
        started = self.clock()
        encodings = [entry.encoding for entry in entries]
        try:
            logits = await loop.run_in_executor(self._thread, self.clef.run_pass, encodings)
            fault: Exception | None = None
        except Exception as error:  # whatever an engine raises, the next request is served
            logits, fault = [], error
        finished = self.clock()
        self._owed_s = finished - started if self._oldest_leads else max(self._owed_s - (finished - started), 0)
        tokens = sum(entry.tokens for entry in entries)
        padded = len(entries) * max(entry.tokens for entry in entries)
        self.on_pass(PassReport(len(entries), tokens, padded, finished - started, fault is not None))
        for entry in entries:
            self._spent_s.append((finished - started) / len(entries))
            entry.started = entry.started or started
            entry.finished, entry.records = finished, len(entries)
        if fault is not None and len(entries) > 1:
            for entry in entries:
                if not entry.logits.done():  # its client is still there
                    await self._pass([entry])
        elif fault is not None:
            if not isinstance(fault, RequestError):
                self.on_fault(fault)
            _finish(entries[0], fault)
        else:
            for entry, values in zip(entries, logits, strict=True):
                _finish(entry, values)
        self._expected, self._idle_since = len(entries) + len(self._waiting), self.clock()


def _finish(entry: Waiting, result: Logits | Exception) -> None:
    if entry.logits.done():  # its client has gone
        return
    if isinstance(result, Exception):
        entry.logits.set_exception(result)
    else:
        entry.logits.set_result(result)
