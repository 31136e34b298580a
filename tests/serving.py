"""Servers for tests: in this process over any engine, or as `clef-trt serve` in one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import numpy as np
from conftest import GOLDEN

from clef_trt import Clef
from clef_trt.bundle import CONTROL_TOKENS, FORMAT_VERSION, Manifest, ModelRecord, SourceRecord, WeightsRecord
from clef_trt.encode import Encoder
from clef_trt.fake import FakeEngine
from clef_trt.media import MediaReader
from clef_trt.server.logs import line_handler
from clef_trt.server.serve import Process
from clef_trt.server.settings import Settings
from clef_trt.vision import Vision

NOUL = {"type": "noul", "instructions": "Is it open?"}
CHOICE = {"type": "choice", "criteria": {"red": None, "green": "the colour of grass", "blue": None}}
SCORE = {"type": "score", "criteria": ["none", "some", "much"]}
BODY: dict[str, Any] = {
    "model": "clef-flash",
    "state": "The door is open and green.",
    "questions": {"open": NOUL, "colour": CHOICE, "amount": SCORE},
}
ROUTE = "/v1/systemone"
VENDOR = "/client/v4/accounts/abc/ai/run/@cf/cloudflare/clef-flash"


def fake_clef(engine: FakeEngine | None = None, **settings: Any) -> Clef:
    """A Clef over an engine without a model."""
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        precision="fp32",
        source=SourceRecord("fake", "0" * 64),
        weights=WeightsRecord(".", {}, 0, 0),
        model=ModelRecord(
            {"hidden": 96, "patch_values": 12}, 262144, 4, 1, 1, 1, 256, dict.fromkeys(CONTROL_TOKENS, 0)
        ),
        graphs={},
        files={},
        tools={},
    )
    return Clef(manifest, Encoder(GOLDEN / "odd" / "tokenizer.json"), engine or FakeEngine(96), **settings)


class _Rows:
    """A vision engine without a model."""

    def run(self, inputs: Any) -> Any:
        groups, patches = inputs["pixel_values"].shape[:2]
        return {"embeddings": np.ones((groups, patches // 4, 96), np.float32)}

    def fits(self, sizes: Any) -> bool:
        return True

    def close(self) -> None:
        pass


def seeing_clef() -> Clef:
    """A Clef over engines without a model that takes pictures."""
    config = json.loads((GOLDEN / "odd" / "processor_config.json").read_text())
    tokens = json.loads((GOLDEN / "odd" / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"].strip("<|>").replace("_pad", ""): token["id"] for token in tokens}
    clef = fake_clef()
    clef._encoder._media_ids = ids
    record = ModelRecord({"hidden": 96, "patch_values": 12}, 262144, 4, 1, 1, 1, 256, ids)
    clef._vision = Vision(MediaReader(config), record, _Rows)
    return clef


class Running:
    """A server in a thread of this process. `logs` are its lines so far."""

    def __init__(self, load: Callable[[Settings], Clef], settings: Settings) -> None:
        self._stream = io.StringIO()
        logger = logging.Logger("test", settings.log_level.upper())
        logger.addHandler(line_handler(self._stream))
        started = threading.Event()

        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            self.process = Process(settings, logger, load)
            started.set()
            await self.process.run()

        self.fault: BaseException | None = None

        def target() -> None:
            try:
                asyncio.run(run())
            except BaseException as fault:
                self.fault = fault
                started.set()

        self._thread = threading.Thread(target=target)
        self._thread.start()
        started.wait(10)
        wait_until(lambda: self.process.port or self.fault is not None)
        self.url = f"http://127.0.0.1:{self.process.port}"
        self.http = httpx2.Client(base_url=self.url, timeout=30, trust_env=False)

    @property
    def logs(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    @property
    def text(self) -> str:
        time.sleep(0.02)  # a request is logged and counted after its answer has gone
        return self._stream.getvalue()

    def ready(self) -> Running:
        wait_until(lambda: self.http.get("/ready").status_code == 200 or self.fault is not None)
        if self.fault is not None:
            raise self.fault
        return self

    def post(self, body: Any, route: str = ROUTE, **more: Any) -> httpx2.Response:
        return self.http.post(route, json=body, **more)

    def send(self, content: bytes, route: str = ROUTE, **headers: str) -> httpx2.Response:
        named = {"content-type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        return self.http.post(route, content=content, headers=named)

    def metric(self, line: str) -> float:
        """The value of a metric, by its name and labels."""
        time.sleep(0.02)
        match = re.search(rf"^{re.escape(line)} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        return float(match[1]) if match else 0.0

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self.process.stop)

    def close(self) -> None:
        self.http.close()
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):
                self.stop()
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server does not end"


@contextlib.contextmanager
def running(clef: Clef | Callable[[Settings], Clef] | None = None, **settings: Any) -> Iterator[Running]:
    """A server of this process that is ready."""
    made = clef or fake_clef()
    server = Running(made if not isinstance(made, Clef) else lambda _: made, Settings(**{"port": 0} | settings))
    try:
        yield server.ready()
    finally:
        server.close()


class Spawned:
    """`clef-trt serve` in a process of its own."""

    def __init__(self, *arguments: object, environment: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "clef_trt.cli", "serve", *map(str, arguments)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("CLEF_TRT_")}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env | (environment or {}))
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append(line)

    @property
    def logs(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in list(self.lines) if line.startswith("{")]

    def ready(self, timeout_s: float = 60) -> Spawned:
        wait_until(
            lambda: any(line["event"] == "ready" for line in self.logs) or self.process.poll() is not None, timeout_s
        )
        assert self.process.poll() is None, "".join(self.lines)
        return self

    @property
    def url(self) -> str:
        port = next(line["port"] for line in self.logs if line["event"] == "listening")
        return f"http://127.0.0.1:{port}"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60) -> int:
        status = self.process.wait(timeout_s)
        self._reader.join(10)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait()


@contextlib.contextmanager
def spawned(*arguments: object, environment: dict[str, str] | None = None) -> Iterator[Spawned]:
    """`clef-trt serve` with these arguments."""
    server = Spawned(*arguments, environment=environment)
    try:
        yield server
    finally:
        server.close()


def wait_until(happens: Callable[[], Any], timeout_s: float = 30) -> None:
    until = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.005)


class Held:
    """For FakeEngine: passes wait until they are let go."""

    def __init__(self) -> None:
        self.begun, self.free = threading.Event(), threading.Event()

    def __call__(self, _: Any) -> None:
        self.begun.set()
        self.free.wait(20)


def slow(seconds: float) -> Callable[[Any], None]:
    """For FakeEngine: every pass takes so long."""
    return lambda _: time.sleep(seconds)
