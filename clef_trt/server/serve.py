"""The process: listen at once, load, warm up, be ready; on SIGTERM answer what is inside, and leave with status 0."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .. import __version__
from ..clef import Clef
from ..errors import SettingError
from .app import Service
from .batcher import Batcher
from .decide import Decider
from .edge import ID_HEADERS, new_id
from .gate import DRAINING, READY
from .logs import fault_fields, set_up
from .settings import Settings
from .warm_up import warm_up

BACKLOG = 2048
LONGEST_HEAD_BYTES = 64 * 2**10


def serve(settings: Settings, load: Callable[[Settings], Clef] | None = None) -> None:
    """Run until a signal. Raises ClefError where the bundle cannot be loaded or the address not be listened on."""
    if settings.bundle is None:
        raise SettingError("no bundle is named: clef-trt serve BUNDLE, or the setting bundle")
    logger = set_up(settings.log_level)
    asyncio.run(Process(settings, logger, load or open_clef).run())


def open_clef(settings: Settings) -> Clef:
    """The bundle of the settings."""
    assert settings.bundle is not None, "checked by serve"
    return Clef.load(
        settings.bundle,
        engine=settings.engine,
        weights=settings.weights,
        threads=settings.threads,
        control_tokens=settings.control_tokens,
        max_length=settings.max_length,
        max_state_tokens=settings.max_state_tokens,
        truncation=settings.truncation,
        confidence=settings.confidence,
        max_image_tokens=settings.max_image_tokens,
        limits=settings.limits(),
        media_limits=settings.media_limits(),
        pass_limits=settings.pass_limits(),
    )


class Process:
    """One server from its start to its end. `port` is known once `listening` is set."""

    def __init__(self, settings: Settings, logger: logging.Logger, load: Callable[[Settings], Clef]) -> None:
        self.settings, self.logger = settings, logger
        self.service = Service(settings, logger)
        self.port = 0
        self._load = load
        self._stop = asyncio.Event()
        self._clef: Clef | None = None

    async def run(self) -> None:
        """Serve until `stop` or a signal; see `serve`."""
        server = _Server(
            uvicorn.Config(
                self.service.app(),
                host=self.settings.host,
                port=self.settings.port,
                http=_Protocol,
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=max(round(self.settings.keep_alive_s), 1),
                h11_max_incomplete_event_size=LONGEST_HEAD_BYTES,
            )
        )
        loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # off the main thread, by `stop` alone
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.stop)
        serving = asyncio.create_task(server.serve())
        others = [asyncio.create_task(step) for step in (self._serve_model(server), self._drain(server))]
        try:
            # The server ends after the drain; the model's task only by a fault.
            done, _ = await asyncio.wait({serving, others[0]}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            server.should_exit = server.force_exit = True
            for task in others:
                task.cancel()
            await asyncio.gather(serving, *others, return_exceptions=True)
            if self.service.decider is not None:
                self.service.decider.close()
            if self._clef is not None:
                self._clef.close()
        self._log("stopped")

    def stop(self) -> None:
        """What a signal does: take nothing new, answer what is inside, end `run`."""
        self._stop.set()

    async def _serve_model(self, server: _Server) -> None:
        """Load, warm up, run passes."""
        await server.listening()
        self.port = server.port
        self._log("listening", host=self.settings.host, port=self.port, version=__version__)
        begun = time.perf_counter()
        service, settings = self.service, self.settings
        clef = self._clef = await _in_thread(lambda: self._load(settings))
        self._log("loaded", seconds=round(time.perf_counter() - begun, 3), **clef.info())
        longest = clef.max_length if settings.warm_up_tokens is None else min(settings.warm_up_tokens, clef.max_length)
        await _in_thread(lambda: warm_up(clef, longest, settings.batch, settings.warm_up_picture))
        batcher = Batcher(
            clef,
            settings.batch,
            settings.padded_tokens,
            settings.window_ms / 1000,
            settings.patience_ms / 1000,
            service.metrics.passed,
            lambda fault: self._log("engine fault", logging.ERROR, **fault_fields(fault)),
        )
        service.open(Decider(clef, settings, batcher), _models(clef, settings))
        if not self._stop.is_set():
            service.gate.state = READY
            self._log("ready", seconds=round(time.perf_counter() - begun, 3))
        await batcher.run()

    async def _drain(self, server: _Server) -> None:
        """After `stop`: no new connection, no new request, every one inside answered; then the end."""
        await self._stop.wait()
        gate = self.service.gate
        gate.state = DRAINING
        self._log("draining", inside=gate.inside)
        server.stop_listening()
        await gate.empty()
        server.should_exit = True

    def _log(self, event: str, level: int = logging.INFO, **fields: Any) -> None:
        self.logger.log(level, event, extra={"fields": fields})


class _Server(uvicorn.Server):
    """uvicorn, with its signals left to us: it would close idle connections before what is inside is answered."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: Any = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # which it raises for an address in use, its reason logged
            raise SettingError(f"cannot listen on {self.config.host}, port {self.config.port}") from None

    async def listening(self) -> None:
        """Wait for the socket."""
        while not self.started:
            await asyncio.sleep(0.005)

    @property
    def port(self) -> int:
        return int(self.servers[0].sockets[0].getsockname()[1])

    def stop_listening(self) -> None:
        """Take no new connection."""
        for server in getattr(self, "servers", []):
            server.close()


class _Protocol(H11Protocol):
    """HTTP/1.1 of uvicorn, whose answer to what is no HTTP has an id too."""

    def send_400_response(self, msg: str) -> None:
        request_id = new_id()
        ids = "".join(f"{name}: {request_id}\r\n" for name in ID_HEADERS)
        body = msg.encode()
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\n{ids}"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


async def _in_thread(work: Callable[[], Any]) -> Any:
    """The result of work in a thread that does not keep the process: loading may take minutes, and be stopped."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def tell(set_to: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            set_to(value)

    def run() -> None:
        try:
            told = (result.set_result, work())
        except Exception as fault:
            told = (result.set_exception, fault)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, *told)

    threading.Thread(target=run, daemon=True, name="load").start()
    return await result


def _models(clef: Clef, settings: Settings) -> list[dict[str, str]]:
    """What /v1/models tells. Of a prefix such as jev* the latest is named, as clients do that know only this one."""
    names = [clef.manifest.source.name, *(name.replace("*", "-latest") for name in settings.models)]
    info = clef.info()
    told = (
        f"{info['source']}, compiled: {info['engine']}, {info['precision']}, records of up to {clef.max_length} tokens"
    )
    manifest = Path(settings.bundle or "") / "manifest.json"
    made_s = manifest.stat().st_mtime if manifest.is_file() else time.time()
    date = settings.release_date or time.strftime("%Y-%m-%d", time.gmtime(made_s))
    return [{"name": name, "description": told, "release_date": date} for name in dict.fromkeys(names)]
