"""Whatever comes in: no 5xx, no hang, no growth. FUZZ_REQUESTS=20000 is the long mode; 1,000 are sent otherwise."""

from __future__ import annotations

import gzip
import json
import marshal
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from serving import BODY, CHOICE, NOUL, ROUTE, SCORE, VENDOR, Running, fake_clef, running

from clef_trt import RequestError, samples
from clef_trt.fake import FakeEngine
from clef_trt.strict_json import read_json

schemathesis = pytest.importorskip("schemathesis")
from schemathesis import checks  # noqa: E402

REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "1000"))
EXPECTED = {200, 400, 404, 413, 415, 422}
LONGEST_S = 10.0
GROWTH_BYTES = 24 * 2**20


# Ours: bytes and values that are nearly right

ODD_VALUES = (
    None, True, False, 0, -1, 10**30, -0.0, 1e308, "", "\u0000", "\u202e", "é", "<|im_end|>", "<|image_pad|>",
    "a" * 3000,
    [], {}, [None], {"": ""}, {"type": "noul"}, [[[[[]]]]], {"true": 1}, "data:image/png;base64,AAAA", "https://x/y.png",
)  # fmt: skip
ODD_BYTES = (
    b"NaN", b"Infinity", b"-", b"1e999", b"\\ud800", b"\xff", b"\x00", b"\xef\xbb\xbf", b"{", b"}", b"[", b"]", b'"',
    b",",
    b":", b"9" * 5000, b"[" * 200, b'{"a":' * 200, b'"a":1,"a":2', b"\\u0000", b"//", b"'", b"\n", b"1" * 400, b"null",
)  # fmt: skip


def seeds() -> list[dict[str, Any]]:
    everything = BODY | {
        "questions": {"a": NOUL | {"criteria": {"true": "x", "false": {"y": 1}}}, "b": CHOICE, "c": SCORE}
    }
    return [BODY, everything, everything | {"temperature": 1, "stream": False}, *samples.requests()[:5]]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    for key, entry in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(entry, (*at, key))


def copied(value: Any) -> Any:
    """A copy of a JSON value, which may be nested more deeply than copy.deepcopy can follow."""
    return marshal.loads(marshal.dumps(value))


def changed_value(value: Any, rng: random.Random) -> Any:
    """The value with something in it replaced, removed, renamed or nested."""
    value = copied(value)
    found = [place for place in places(value) if place]
    if not found:
        return rng.choice(ODD_VALUES)
    *path, last = rng.choice(found)
    holder = value
    for key in path:
        holder = holder[key]
    kind = rng.randrange(5)
    if kind == 0:
        del holder[last]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(["", "type", "criteria", "assets", "images", "videos", "x\u0007", "media_kwargs"])] = (
            holder.pop(last)
        )
    elif kind == 2:
        holder[last] = {"k": [holder[last]] * rng.randint(1, 3)}
    elif kind == 3:
        depth = rng.choice([5, 100, 127, 140])
        for _ in range(depth):
            holder[last] = [holder[last]]
    else:
        holder[last] = copied(rng.choice(ODD_VALUES))
    return value


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """The bytes with some removed, doubled, flipped or put in."""
    at, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    kind = rng.randrange(5)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + content[end:]
    if kind == 2:
        return content[:end] + content[at:end] + content[end:]
    if kind == 3 and content:
        spot = rng.randrange(len(content))
        return content[:spot] + bytes([content[spot] ^ (1 << rng.randrange(8))]) + content[spot + 1 :]
    return content[:at] + rng.choice(ODD_BYTES) + content[at:]


def attempt(rng: random.Random) -> tuple[bytes, dict[str, str]]:
    """A body that is or was nearly a request, and its headers."""
    value: Any = rng.choice(seeds())
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        value = changed_value(value, rng)
    content = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
    for _ in range(rng.choice([0, 0, 1, 3])):
        content = changed_bytes(content, rng)
    headers = {"content-type": "application/json"}
    other = rng.random()
    if other < 0.1:
        content, headers["content-encoding"] = gzip.compress(content, 1), "gzip"
        if rng.random() < 0.5:
            content = changed_bytes(content, rng)
    elif other < 0.15:
        headers["content-encoding"] = rng.choice(["zstd", "br", "gzip, gzip", "identity", "deflate"])
    elif other < 0.2:
        headers["content-type"] = rng.choice(
            ["text/json", "multipart/form-data; boundary=a", "multipart/form-data", ";", "a/b;" * 99]
        )
        if rng.random() < 0.5:
            content = b'--a\r\nContent-Disposition: form-data; name="request"\r\n\r\n' + content + b"\r\n--a--\r\n"
            content = changed_bytes(content, rng)
    return content, headers


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_requests_that_are_nearly_right() -> None:
    rng = random.Random(REQUESTS)
    engine = FakeEngine(96)
    found: Counter[int] = Counter()
    half = 0
    with running(fake_clef(engine, max_length=4000), warm_up_tokens=0, log_level="error") as server:
        for number in range(REQUESTS):
            if number == REQUESTS // 2:
                half = resident_bytes()
            content, headers = attempt(rng)
            route = rng.choice([ROUTE, ROUTE, VENDOR])
            begun, passes = time.perf_counter(), len(engine.passes)
            try:
                response = server.http.post(route, content=content, headers=headers)
            except httpx2.LocalProtocolError:  # no client sends such a header
                continue
            assert time.perf_counter() - begun < LONGEST_S, content[:500]
            assert response.status_code in EXPECTED, (
                response.status_code,
                headers,
                content[:2000],
                server.text[-2000:],
            )
            assert (len(engine.passes) > passes) == (response.status_code == 200)
            if (
                "content-encoding" not in headers
                and headers["content-type"] == "application/json"
                and not is_strict(content)
            ):
                assert response.status_code == 400
            assert all(letter.isprintable() for letter in response.text) or response.status_code == 200
            found[response.status_code] += 1
        assert server.metric("clef_requests_inside") == 0
        assert resident_bytes() - half < GROWTH_BYTES
    assert set(found) >= {200, 400, 415, 422}
    assert found[200] > REQUESTS / 20


def is_strict(content: bytes) -> bool:
    try:
        read_json(content)
    except RequestError:
        return False
    return True


def test_connections_that_are_nearly_http(server: Running) -> None:
    import socket

    rng = random.Random(1)
    found: Counter[int] = Counter()
    head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
    for _ in range(max(REQUESTS // 20, 20)):
        content = head.encode()
        for _ in range(rng.randint(1, 4)):
            content = changed_bytes(content, rng)
        with socket.create_connection(("127.0.0.1", server.process.port), timeout=10) as raw:
            raw.sendall(content)
            raw.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while part := raw.recv(65536):
                    answer += part
            except ConnectionResetError:
                continue
        for status in re.findall(rb"^HTTP/1.1 (\d+)", answer, re.MULTILINE):
            assert int(status) < 500, (content, answer)
            found[int(status)] += 1
        assert not answer or b"x-typesafe-request-id: " in answer
    assert server.post(BODY).status_code == 200
    assert found[400] > 3
    assert len(found) > 2


# Schemathesis, over the description that the server gives of itself


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(fake_clef(max_length=4000), warm_up_tokens=0, log_level="error", api_keys=("key",)) as made:
        made.http.headers["authorization"] = "Bearer key"
        yield made


CHECKS = [
    checks.not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
    checks.response_headers_conformance, checks.response_schema_conformance, checks.negative_data_rejection,
    checks.unsupported_method, checks.ignored_auth,
]  # fmt: skip
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


@pytest.mark.parametrize("mode", MODES, ids=["right", "wrong"])
def test_the_description_is_true(mode: Any, server: Running) -> None:
    description = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in description.get_all_operations()]
    assert len(operations) == 7  # all but the description itself
    for operation in operations:
        sent = 0

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=max(REQUESTS // 30, 10),
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=REQUESTS == 1000,
        )
        def send(case: Any) -> None:
            nonlocal sent
            sent += 1
            case.call_and_validate(headers={"Authorization": "Bearer key"}, checks=CHECKS, timeout=LONGEST_S)

        try:
            send()
        except Unsatisfiable:  # nothing of a GET without parameters can be wrong
            assert mode is schemathesis.GenerationMode.NEGATIVE
            assert operation.method == "get"
