"""The server under load, every answer checked: what comes back is right, nothing is lost, and what serving costs.

Servers run as processes of their own (`clef-trt serve`); clients are threads of this one, so both share the machine.
Without --bundle a small random release is exported first, as `clef-trt demo` does.

overhead    one client against Clef.decide in this process, in turns: the p50 of each, and their difference
checked     --clients for --seconds; each request carries a nonce in its question ids, each answer is compared with that
            of Clef.decide to the same request alone (probabilities within --tolerance: padding changes last digits)
throughput  16 clients against one, requests a second
overflow    a queue of 8 and 32 clients: some are refused with 429 and Retry-After, all others are answered right
long        short requests of 4 clients alone, then during a burst of inputs of --long-tokens: p95, and one long pass

    python bench/serve_load.py [--bundle DIR] [--seconds 60] [--clients 64] [--only checked …] [--json FILE]

Ends with status 1 where an answer is lost, mixed up or wrong, or a bound below is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from clef_trt import Clef
from clef_trt.benchmark.machine import load_average, machine_card
from clef_trt.make import export_module

PARTS = ("overhead", "checked", "throughput", "overflow", "long")
ROUTE = "/v1/systemone"
OVERHEAD_BOUND_MS, THROUGHPUT_BOUND = 1.5, 2.0
BLOCK, PAUSE_S = 10, 0.05
MAX_LENGTH = 16384
WORDS = ("invoice", "refund", "login", "blue", "slow", "parcel", "please", "twice", "report", "seat", "today", "error")


def request_of(nonce: str, words: int, rng: random.Random) -> dict[str, Any]:
    """A request of its own: the nonce in the ids of its questions, and in no other request."""
    state = {"nonce": nonce, "text": " ".join(rng.choice(WORDS) for _ in range(words))}
    questions = {
        f"{nonce}-asked": {"type": "noul", "instructions": "Is money asked back?"},
        f"{nonce}-team": {"type": "choice", "criteria": {"billing": None, "access": "logins", "other": None}},
    }
    return {"model": "clef", "state": state, "questions": questions}


class Server:
    """`clef-trt serve` on a free port."""

    def __init__(self, bundle: Path, *arguments: object) -> None:
        command = [
            sys.executable,
            "-m",
            "clef_trt.cli",
            "serve",
            bundle,
            "--port",
            0,
            "--log-level",
            "info",
            *arguments,
        ]
        command += ["--max-length", MAX_LENGTH, "--no-warm-up-picture"]
        self.process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.port = 0
        for line in self.process.stderr:
            said = json.loads(line) if line.startswith("{") else {}
            self.port = said.get("port", self.port)
            if said.get("event") == "ready":
                break
        else:
            raise RuntimeError(f"the server ended with status {self.process.wait()}")
        stream = self.process.stderr
        threading.Thread(target=lambda: [None for _ in stream], daemon=True).start()  # so that it never waits

    def close(self) -> None:
        """It answers what is inside, and ends with status 0."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(120)
        assert status == 0, f"the server ended with status {status}"


@contextlib.contextmanager
def server(bundle: Path, *arguments: object) -> Iterator[Server]:
    made = Server(bundle, *arguments)
    try:
        yield made
    finally:
        made.close()


class Client:
    """One kept connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)

    def ask(self, content: bytes) -> tuple[int, dict[str, str], bytes]:
        self._connection.request("POST", ROUTE, content, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()

    def close(self) -> None:
        self._connection.close()


class Pool:
    """Requests with their right answers."""

    def __init__(self, clef: Clef, count: int, words: tuple[int, int], tolerance: float, seed: int) -> None:
        rng = random.Random(seed)
        self.requests = [request_of(f"n{seed}x{i}", rng.randint(*words), rng) for i in range(count)]
        self.bodies = [json.dumps(request).encode() for request in self.requests]
        self.answers = [clef.decide(request) for request in self.requests]
        self._tolerance = tolerance

    def wrong(self, index: int, content: bytes) -> str | None:
        """What is wrong with the answer to one request."""
        found, expected = json.loads(content), self.answers[index]
        if found["answers"].keys() != expected["answers"].keys():
            return "mixed"
        if found["usage"] != expected["usage"]:
            return "usage"
        for name, answer in expected["answers"].items():
            ours = found["answers"][name]
            pairs = [(ours["noul"], answer["noul"])] if "noul" in answer else [
                (ours["probabilities"][option], value) for option, value in answer["probabilities"].items()
            ]  # fmt: skip
            if any(abs(a - b) > self._tolerance for a, b in pairs):
                return "value"
        return None


def load(port: int, pool: Pool, clients: int, seconds: float, seed: int = 0) -> dict[str, Any]:
    """So many clients, each with one request at a time, for so long."""
    statuses: Counter[int] = Counter()
    wrong: Counter[str] = Counter()
    latencies: list[float] = []
    lock, until = threading.Lock(), time.perf_counter() + seconds

    def run(number: int) -> None:
        rng, client = random.Random(f"{seed}-{number}"), Client(port)
        own: list[float] = []
        while time.perf_counter() < until:
            index = rng.randrange(len(pool.bodies))
            begun = time.perf_counter()
            try:
                status, headers, content = client.ask(pool.bodies[index])
            except (OSError, http.client.HTTPException):
                status, headers, content = -1, {}, b""
            own.append(time.perf_counter() - begun)
            fault = pool.wrong(index, content) if status == 200 else None
            if status == 429 and not int(headers.get("retry-after", 0)) >= 1:
                fault = "no Retry-After"
            with lock:
                statuses[status] += 1
                if fault:
                    wrong[fault] += 1
            if status == 429:
                time.sleep(0.02)  # sooner than it says, to keep the queue full
        client.close()
        with lock:
            latencies.extend(own)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - begun
    return {
        "clients": clients,
        "seconds": round(spent, 2),
        "statuses": dict(statuses),
        "wrong": dict(wrong),
        "lost": statuses[-1],
        "requests_per_s": round(statuses[200] / spent, 1),
        **{f"p{q}_ms": round(1000 * float(np.percentile(latencies, q)), 2) for q in (50, 95, 99)},
    }


def overhead(port: int, clef: Clef, pool: Pool, turns: int) -> dict[str, Any]:
    """p50 of the server at one client, of Clef.decide, and the difference; block by block, so that drift cancels.

    The threads of an engine spin for a while after a pass: a pause lets them end before the other's turn. Outside
    stages: HTTP, the queue and the changes of threads alone, by the times that the server tells; on a machine that
    others use, it says more than the difference of two decisions.
    """
    client = Client(port)
    served, direct, outside = [], [], []
    for turn in range(turns // BLOCK + 1):
        indices = [(turn * BLOCK + i) % len(pool.bodies) for i in range(BLOCK)]
        times: list[list[float]] = [[], []]
        for index in indices:
            begun = time.perf_counter()
            status, headers, content = client.ask(pool.bodies[index])
            times[0].append(1000 * (time.perf_counter() - begun))
            stages = (part.split(";dur=") for part in headers["server-timing"].split(", "))
            outside.append(times[0][-1] - sum(float(spent) for name, spent in stages if name != "queue"))
            assert status == 200, f"the server answered {status}"
            assert pool.wrong(index, content) is None, "the server answered wrongly"
        time.sleep(PAUSE_S)
        for index in indices:
            begun = time.perf_counter()
            clef.decide(json.loads(pool.bodies[index]))
            times[1].append(1000 * (time.perf_counter() - begun))
        time.sleep(PAUSE_S)
        if turn:  # the first block is the warm-up
            served += times[0]
            direct += times[1]
    client.close()
    medians = statistics.median(served), statistics.median(direct)
    return {
        "server_p50_ms": round(medians[0], 3),
        "decide_p50_ms": round(medians[1], 3),
        "overhead_p50_ms": round(medians[0] - medians[1], 3),
        "outside_stages_p50_ms": round(statistics.median(outside), 3),
        "bound_ms": OVERHEAD_BOUND_MS,
        "runs": turns,
    }


def long_inputs(port: int, pool: Pool, tokens: int, burst: int, seconds: float) -> dict[str, Any]:
    """p95 of short requests alone and while long ones wait, against twice the one plus one long pass."""
    rng = random.Random(5)
    body = json.dumps(request_of("long", tokens // 2, rng)).encode()
    client = Client(port)
    begun = time.perf_counter()
    status, _, content = client.ask(body)
    one_ms = 1000 * (time.perf_counter() - begun)
    assert status == 200, f"the long request was answered with {status}"
    alone = load(port, pool, 4, seconds, seed=1)
    done: list[int] = []

    def ask() -> None:
        one = Client(port)
        done.append(one.ask(body)[0])
        one.close()

    threads = [threading.Thread(target=ask) for _ in range(burst)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    during = load(port, pool, 4, max(one_ms / 1000 * burst, seconds), seed=2)
    for thread in threads:
        thread.join()
    bound = 2 * alone["p95_ms"] + one_ms
    return {
        "long_tokens": json.loads(content)["usage"]["input_tokens"],
        "long_alone_ms": round(one_ms, 1),
        "burst": burst,
        "burst_s": round(time.perf_counter() - begun, 2),
        "burst_answered": done.count(200),
        "short_alone": alone,
        "short_during": during,
        "bound_p95_ms": round(bound, 1),
        "within": during["p95_ms"] <= bound and done.count(200) == burst,
    }


def run(options: argparse.Namespace, bundle: Path, told: Callable[[str], None]) -> tuple[dict[str, Any], list[str]]:
    """The parts that were asked for, and what is wrong in them."""
    result: dict[str, Any] = {"load_average_before": load_average()}
    bad: list[str] = []
    threads = [] if options.threads is None else ["--threads", options.threads]
    with Clef.load(bundle, max_length=MAX_LENGTH, threads=options.threads) as clef:
        pool = Pool(clef, options.requests, (5, 60), options.tolerance, seed=1)
        tokens = [answer["usage"]["input_tokens"] for answer in pool.answers]
        result["tokens"] = [min(tokens), max(tokens)]
        with server(bundle, *threads) as one:
            if "overhead" in options.only:
                result["overhead"] = overhead(one.port, clef, pool, options.turns)
                told(f"overhead: {result['overhead']}")
                if result["overhead"]["overhead_p50_ms"] > OVERHEAD_BOUND_MS:
                    bad.append("overhead")
            if "checked" in options.only:
                result["checked"] = load(one.port, pool, options.clients, options.seconds)
                told(f"checked: {result['checked']}")
                if result["checked"]["wrong"] or set(result["checked"]["statuses"]) != {200}:
                    bad.append("checked")
            if "throughput" in options.only:
                rows = [load(one.port, pool, clients, options.seconds / 6, seed=clients) for clients in (1, 16, 1, 16)]
                alone, together = (max(row["requests_per_s"] for row in rows[start::2]) for start in (0, 1))
                result["throughput"] = {"rows": rows, "gain": round(together / alone, 2), "aim": THROUGHPUT_BOUND}
                result["throughput"]["engine"] = engine_gain(clef, pool)
                told(f"throughput: {result['throughput']}")
            if "long" in options.only:
                result["long"] = long_inputs(one.port, pool, options.long_tokens, options.burst, options.seconds / 6)
                told(f"long: {result['long']}")
                if not result["long"]["within"]:
                    bad.append("long")
        if "overflow" in options.only:
            with server(bundle, *threads, "--queue", 8, "--batch-items", 8) as small:
                result["overflow"] = load(small.port, pool, 32, options.seconds / 6)
            told(f"overflow: {result['overflow']}")
            if result["overflow"]["wrong"] or set(result["overflow"]["statuses"]) != {200, 429}:
                bad.append("overflow")
    result["load_average_after"] = load_average()
    return result, bad


def engine_gain(clef: Clef, pool: Pool) -> dict[str, float]:
    """Requests a second of Clef.decide_batch by batch size: what the engine itself gains, without a server."""
    rates = {}
    for batch in (1, 4, 16):
        spent = []
        for turn in range(9):
            requests = [pool.requests[(turn * batch + i) % len(pool.requests)] for i in range(batch)]
            begun = time.perf_counter()
            clef.decide_batch(requests)
            spent.append(time.perf_counter() - begun)
        rates[f"batch_{batch}_requests_per_s"] = round(batch / statistics.median(spent[1:]), 1)
    return rates


def small_bundle(folder: Path) -> Path:
    """A random release, exported."""
    module = export_module("random_release")
    config, head = module.small_config()
    module.write_release(folder / "release", config, head, module.byte_tokenizer(), seed=0)
    export_module("pipeline").export(folder / "release", folder / "bundle")
    return folder / "bundle"


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, metavar="DIR")
    parser.add_argument("--seconds", type=float, default=60.0, help="of `checked`; other parts take a sixth per row")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256, help="different ones, each with its right answer")
    parser.add_argument("--turns", type=int, default=500, help="of `overhead`")
    parser.add_argument("--tolerance", type=float, default=2e-4, help="of probabilities, which have four decimals")
    parser.add_argument("--long-tokens", type=int, default=16000)
    parser.add_argument("--burst", type=int, default=8, help="long inputs at once")
    parser.add_argument("--threads", type=int, help="of every engine (default: one per core)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as one JSON object")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = options.bundle or small_bundle(Path(folder))
        result, bad = run(options, bundle, lambda text: print(text, file=sys.stderr, flush=True))
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    result = {
        "card": machine_card("server under load", "starlette", "uvicorn", "onnxruntime"),
        "settings": settings,
    } | result
    text = json.dumps(result, indent=1)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    if bad:
        print(f"missed: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
