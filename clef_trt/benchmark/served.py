"""A running SystemOne server as a system: ours, or a peer's, over the same requests."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ..errors import EngineError
from ..remote import Remote
from .systems import Outcome
from .workload import MODEL, Body, Call, layout

SMALL: Body = {
    "model": MODEL,
    "state": "Good morning.",
    "questions": {"greeting": {"type": "noul", "instructions": "Is it a greeting?"}},
}


class Served:
    """A server by its URL. See systems.System.

    The requests of a call are sent at once, each over a connection of its own; what is measured is until the last
    answer is read. A server shows no stages. Its probabilities are rounded, by the protocol, to four decimals.
    """

    def __init__(self, name: str, url: str, key: str | None, in_flight: int) -> None:
        self.name = name
        self.arithmetic: str | None = None  # nobody knows what computes there
        # One try: an answer after a pause that the server asked for would be no latency.
        self._remote = Remote(url, key, in_flight=in_flight, tries=1)

    def open(self) -> float:
        """See System.open: one small decision tells whether the server answers."""
        start = time.perf_counter()
        self._remote.decide(SMALL)
        return time.perf_counter() - start

    def run(self, bodies: Call) -> Outcome:
        """See System.run."""
        responses = self._remote.decide_batch(bodies)
        return Outcome([_probabilities(*pair) for pair in zip(bodies, responses, strict=True)], {})

    def info(self) -> dict[str, Any]:
        """See System.info."""
        return {"engine": "server", "url": self._remote.url}

    def close(self) -> None:
        """See System.close."""
        self._remote.close()


def _probabilities(body: Body, response: dict[str, Any]) -> list[np.ndarray]:
    result = []
    for name, kind, options in layout(body):
        try:
            answer = response["answers"][name]
            if kind == "noul":
                result.append(np.array([answer["noul"], 1 - answer["noul"]]))
            else:
                result.append(np.array([answer["probabilities"][option] for option in options], float))
        except (KeyError, TypeError, ValueError):
            raise EngineError(f"the server's answer to question {name!r} has no probability for every option") from None
    return result
