"""`clef-trt serve` as a process: start, signals, restart, what is imported."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from serving import BODY, ROUTE, Held, Running, fake_clef, running, spawned, wait_until

from clef_trt import Clef, SettingError, samples
from clef_trt.fake import FakeEngine
from clef_trt.server.settings import Settings
from clef_trt.server.warm_up import length_classes, warm_up

QUICK = ("--port", 0, "--max-length", 2048, "--no-warm-up-picture")


def test_neither_the_package_nor_the_command_line_imports_the_server_stack() -> None:
    program = (
        "import sys, clef_trt.cli; clef_trt.cli.parser(); print({'starlette', 'uvicorn', 'h11'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


# Draining, in this process


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def server(held: Held) -> Iterator[Running]:
    with running(fake_clef(FakeEngine(96, held)), warm_up_tokens=0) as made:
        yield made
        held.free.set()


def test_draining_answers_what_is_inside_and_refuses_the_rest(server: Running, held: Held) -> None:
    with ThreadPoolExecutor(5) as pool:
        inside = [pool.submit(server.post, BODY) for _ in range(5)]
        wait_until(lambda: server.metric("clef_requests_inside") == 5)
        kept = http.client.HTTPConnection("127.0.0.1", server.process.port, timeout=10)
        kept.request("GET", "/health")
        kept.getresponse().read()
        server.stop()
        wait_until(lambda: any(line["event"] == "draining" for line in server.logs))
        kept.request("POST", ROUTE, json.dumps(BODY), {"Content-Type": "application/json"})
        refused = kept.getresponse()
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["connection"] == "close"
        assert b"shutting down" in refused.read()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.process.port), timeout=5)
        held.free.set()
        assert [future.result().status_code for future in inside] == [200] * 5
    server.close()
    assert server.fault is None
    assert server.logs[-1]["event"] == "stopped"


def test_stopping_while_loading_does_not_wait_for_the_model() -> None:
    gate = threading.Event()

    def load(_: Settings) -> Clef:
        gate.wait(20)
        return fake_clef()

    server = Running(load, Settings(port=0))
    begun = time.perf_counter()
    server.close()
    assert time.perf_counter() - begun < 5
    assert server.fault is None
    gate.set()


def test_an_address_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = Running(lambda _: fake_clef(), Settings(port=taken.getsockname()[1]))
        server.close()
        assert isinstance(server.fault, SettingError)
        assert "cannot listen on 127.0.0.1" in str(server.fault)


def test_every_length_class_is_warmed_up() -> None:
    assert length_classes(16384) == [256, 512, 1024, 2048, 4096, 8192, 16384]
    assert length_classes(3000) == [256, 512, 1024, 2048, 3000]
    assert (length_classes(100), length_classes(0)) == ([100], [])
    engine = FakeEngine(96)
    warm_up(fake_clef(engine, max_length=4096), 4096, 8, picture=True)
    assert max(batch for batch, _ in engine.passes) == 8
    for low, high in ((2048, 4096), (1024, 2048)):
        assert any(low < sequence <= high for _, sequence in engine.passes)


# The command, over a bundle


@pytest.mark.slow
def test_the_command_answers_as_decide_does_and_ends_on_sigterm(bundles: dict[str, Path]) -> None:
    picture = next(request for request in samples.requests() if request.get("images"))
    with Clef.load(bundles["odd"], max_length=2048, threads=1) as clef:
        expected = [clef.decide(request) for request in (BODY, picture)]
    with spawned(bundles["odd"], "--port", 0, "--max-length", 2048, "--threads", 1) as server:
        with httpx2.Client(base_url=server.ready().url, trust_env=False) as client:
            assert [client.post(ROUTE, json=request).json() for request in (BODY, picture)] == expected
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        assert [line["event"] for line in server.logs if line["event"] != "request"] == [
            "listening", "loaded", "ready", "draining", "stopped",
        ]  # fmt: skip


@pytest.mark.slow
def test_sigterm_under_load_answers_all_that_was_accepted_and_sigkill_leaves_nothing_behind(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in bundles["odd"].rglob("*")}
    answered: list[int] = []
    stop = threading.Event()

    def ask(url: str) -> None:
        """On connections of its own: a closed port ends it, an answer cut off or lost is a fault."""
        while not stop.is_set():
            try:
                connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
                connection.connect()
            except OSError:
                return
            try:
                while not stop.is_set():
                    connection.request("POST", ROUTE, json.dumps(BODY), {"Content-Type": "application/json"})
                    response = connection.getresponse()
                    content = response.read()
                    answered.append(response.status)
                    assert response.status == 503 or json.loads(content)["answers"]
                    if response.headers["connection"] == "close":
                        break
            except (ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected):
                answered.append(-1)  # a kept connection may end between two requests
                return
            finally:
                connection.close()

    with spawned(bundles["odd"], *QUICK) as server:
        url = server.ready().url
        threads = [threading.Thread(target=ask, args=(url,)) for _ in range(12)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
        for thread in threads:
            thread.join(30)
        logged = [line for line in server.logs if line["event"] == "request" and line.get("route") == ROUTE]
        assert answered.count(200) == sum(line["status"] == 200 for line in logged) > 20
        assert set(answered) <= {200, 503, -1}
    stop.set()
    with spawned(bundles["odd"], *QUICK) as server:
        url = server.ready().url
        server.signal(signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
    port = url.rsplit(":", 1)[1]
    with spawned(bundles["odd"], *QUICK[2:], "--port", port) as server:
        assert httpx2.post(server.ready().url + ROUTE, json=BODY, trust_env=False).status_code == 200
    assert {path: path.stat().st_mtime_ns for path in bundles["odd"].rglob("*")} == before


def test_a_bundle_that_cannot_be_loaded_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with spawned(tmp_path / "empty", "--port", 0) as server:
        assert server.wait() == 2
        assert "clef-trt: " in "".join(server.lines)
        assert "Traceback" not in "".join(server.lines)


def test_variables_and_a_file_reach_the_process(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text("port = 0\nmax_length = 0\n")
    with spawned(environment={"CLEF_TRT_CONFIG": str(tmp_path / "serve.toml"), "CLEF_TRT_BUNDLE": "b"}) as server:
        assert server.wait() == 2
        assert "serve.toml: max_length is 0; expected a whole number of at least 1" in "".join(server.lines)
