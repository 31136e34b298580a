"""The server's contract: every status, header and edge case, over an engine without a model."""

from __future__ import annotations

import base64
import gzip
import http.client
import io
import json
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from serving import BODY, CHOICE, NOUL, ROUTE, SCORE, VENDOR, Held, Running, fake_clef, running, seeing_clef, wait_until

from clef_trt.cli import main
from clef_trt.fake import FakeEngine
from clef_trt.server.body import decoded
from clef_trt.server.refusal import Refusal
from clef_trt.strict_json import read_json

zstd = pytest.importorskip("backports.zstd")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(fake_clef(max_length=2000), max_length=2000) as made:
        yield made


def body(**more: Any) -> dict[str, Any]:
    return BODY | more


# Answers


def test_an_answer_is_that_of_decide(server: Running) -> None:
    response = server.post(BODY)
    assert response.status_code == 200
    assert response.json() == fake_clef().decide(BODY)
    assert response.headers["content-type"] == "application/json"
    stages = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert list(stages) == ["queue", "encode", "run", "answer"]
    assert all(float(spent) >= 0 for spent in stages.values())


def test_what_other_services_take_is_ignored_and_echoed(server: Running) -> None:
    for name in ("clef", "clef-flash", " clef-flash ", "jev-latest", "jev", "fake"):
        response = server.post(body(model=name, temperature=0.7, id="x", stream=False, images=[]))
        assert response.json()["model"] == name


def test_order_of_a_choice_is_the_requests(server: Running) -> None:
    criteria = {"z": None, "a": None, "é": None, "e\u0301": None}
    answer = server.post(body(questions={"q": {"type": "choice", "criteria": criteria}})).json()["answers"]["q"]
    assert list(answer["probabilities"]) == list(criteria)


def test_255_options_sum_to_one_and_scores_are_in_range(server: Running) -> None:
    with running() as wide:
        questions = {"q": {"type": "choice", "criteria": dict.fromkeys(map(str, range(255)))}, "s": SCORE}
        answers = wide.post(body(questions=questions)).json()["answers"]
    assert sum(answers["q"]["probabilities"].values()) == pytest.approx(1, abs=0.0128)
    assert 0 <= answers["s"]["score"] <= 2


def test_the_vendors_route_has_its_envelope_and_confidence(server: Running) -> None:
    response = server.post({key: value for key, value in BODY.items() if key != "model"}, VENDOR)
    assert response.status_code == 200
    envelope = response.json()
    assert envelope.keys() == {"result", "success", "errors", "messages"}
    assert (envelope["success"], envelope["errors"], envelope["messages"]) == (True, [], [])
    assert envelope["result"] == fake_clef(confidence="entropy").decide(BODY)


@pytest.mark.parametrize(
    ("route", "content", "status", "said"),
    [
        (VENDOR, b'{"state": 1}', 422, "questions: is missing"),
        (VENDOR, b"{", 400, "is not JSON"),
        (VENDOR.replace("clef-flash", "llama"), b"{}", 404, "'llama' is not known"),
        ("/client/v4/accounts/a/ai/run/@cf/other/m", b"{}", 404, "no such route"),
    ],
)
def test_the_vendors_envelope_of_errors(route: str, content: bytes, status: int, said: str, server: Running) -> None:
    response = server.send(content, route)
    assert response.status_code == status
    envelope = response.json()
    assert (envelope["result"], envelope["success"], envelope["messages"]) == (None, False, [])
    assert envelope["errors"][0]["code"] == status
    assert said in envelope["errors"][0]["message"]


def test_a_batch_answers_each_item(server: Running) -> None:
    items = [BODY, {"model": "clef"}, body(model="gpt"), body(state="b"), 7]
    results = server.post(items, f"{ROUTE}/batch").json()
    assert results[0] == server.post(BODY).json()
    assert results[3] == server.post(body(state="b")).json()
    statuses = [result.get("error", {}).get("status") for result in results]
    assert statuses == [None, 422, 404, None, 422]
    assert [fault["loc"] for fault in results[1]["error"]["detail"]] == [["body", 1, "state"], ["body", 1, "questions"]]
    for wrong in ([], {}, [BODY] * 65):
        assert server.post(wrong, f"{ROUTE}/batch").status_code == 422


def test_models_health_and_metrics(server: Running) -> None:
    models = server.http.get("/v1/models").json()["models"]
    assert [model["name"] for model in models] == ["fake", "clef", "clef-flash", "jev-latest"]
    assert all(model.keys() == {"name", "description", "release_date"} for model in models)
    assert server.http.get("/health").json()["status"] == "live"
    assert server.http.get("/ready").json() == {"status": "ready"}
    answered, refused = (f'clef_requests_total{{route="{ROUTE}",status="{status}"}}' for status in (200, 422))
    before = [server.metric(name) for name in (answered, refused, 'clef_refusals_total{kind="invalid"}')]
    server.post(BODY)
    server.post({})
    after = [server.metric(name) for name in (answered, refused, 'clef_refusals_total{kind="invalid"}')]
    assert [late - early for early, late in zip(before, after, strict=True)] == [1, 1, 1]
    text = server.http.get("/metrics").text
    for name in ("clef_ready 1.0", "clef_requests_inside 0.0", "clef_queue_requests 0.0", "clef_batch_records_bucket",
                 'clef_stage_seconds_count{stage="queue"}', 'clef_pass_tokens_total{kind="padding"}',
                 "clef_request_tokens_sum", "process_resident_memory_bytes"):  # fmt: skip
        assert name in text


# Refusals


def refused(response: Any, status: int) -> str:
    """The text of a refusal, which is as every refusal has to be."""
    assert response.status_code == status, response.text
    assert response.headers["x-typesafe-request-id"] == response.headers["x-request-id"]
    assert all(letter.isprintable() for letter in response.text)
    detail = response.json()["detail"]
    if isinstance(detail, str):
        return detail
    assert all(fault.keys() == {"loc", "msg", "type"} and fault["loc"][0] == "body" for fault in detail)
    return "; ".join(".".join(map(str, fault["loc"][1:])) + ": " + fault["msg"] for fault in detail)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "line 1 column 1"),
        (b"{", "Expecting property name enclosed in double quotes: line 1 column 2"),
        (b'{"model": "m"} x', "Extra data: line 1 column 16"),
        (b'{"a": [{"b": {"k": 1, "k": 2}}]}', "a.0.b: is an object in which the key 'k' is there twice"),
        (json.dumps(BODY).encode("utf-16"), "UTF-16"),
        (json.dumps(BODY).encode("utf-16-le"), "UTF-16"),
        (json.dumps(BODY).encode("utf-32"), "UTF-16 or UTF-32"),
        (b'{"state": "\xff"}', "byte 11 is no UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "BOM"),
        (b'{"state": [1, NaN]}', "state.1: is NaN"),
        (b'{"state": -Infinity}', "state: is -Infinity"),
        (b'{"state": 1e999}', "state: is a number beyond the range of a double"),
        (b'{"state": ' + b"1" * 4301 + b"}", "state: is an integer of more than 4300 digits"),
        (b'{"state": -' + b"1" * 4301 + b"}", "4300 digits"),
        (b'{"state": ' + b"[" * 128 + b"]" * 128 + b"}", "nested too deeply; at most 128"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"state": {"a": "x\\ud800y"}}', "state.a: has an unpaired surrogate"),
        (b'{"state": {"a\\udc00\\u0007": 1}}', "unpaired surrogate"),
        (b'{"state": "\x00"}', "Invalid control character"),
    ],
)
def test_400_is_no_strict_json(content: bytes, said: str, server: Running) -> None:
    assert said in refused(server.send(content), 400)


def test_the_bounds_of_strict_json_are_allowed() -> None:
    assert read_json(b"1" * 4300) == int("1" * 4300)
    assert read_json(b"-" + b"1" * 4300) == -int("1" * 4300)
    read_json(b"[" * 128 + b"]" * 128)
    assert read_json(b'["\\ud83d\\ude00", -0.0, 1e22]') == ["😀", -0.0, 1e22]
    assert str(read_json(b"-0.0")) == "-0.0"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": ""}, "model: "),
        ({"model": 5}, "model: "),
        ({"questions": {}}, "questions: "),
        ({"questions": {str(i): NOUL for i in range(65)}}, "has 65 questions; at most 64"),
        ({"questions": {"q": {"type": "choice", "criteria": {}}}}, "questions.q.criteria: "),
        ({"questions": {"q": {"type": "choice", "criteria": dict.fromkeys(map(str, range(256)))}}}, "256 options"),
        ({"questions": {"q": {"type": "score", "criteria": []}}}, "questions.q.criteria: "),
        ({"questions": {"q": {"type": "score", "criteria": ["x"] * 11}}}, "11 levels"),
        ({"questions": {"": {"type": "noul"}}}, "neither an id nor instructions"),
        ({"questions": {"q": NOUL | {"criteria": [["true", 1]]}}}, "questions.q.criteria: "),
        ({"questions": {"q": NOUL | {"criteria": 3}}}, "questions.q.criteria: "),
        ({"questions": {"q": NOUL | {"criteria": {"maybe": 1}}}}, "questions.q.criteria.maybe: "),
        ({"questions": {"q": NOUL | {"instructions": 5}}}, "questions.q.instructions: "),
        ({"questions": {"q": {"type": "box"}}}, "questions.q.type: is 'box'; expected one of noul, choice, score"),
        ({"media_kwargs": {}}, "media_kwargs: is not known here"),
        ({"stream": True}, "stream: "),
        ({"a\u0007\u001bb": 1}, "a··b: is not known here"),
        ({"images": ["http://example.com/x.png"]}, "images: is not possible here"),
    ],
)
def test_422_names_the_place(change: dict[str, Any], said: str, server: Running) -> None:
    assert said in refused(server.post(body(**change)), 422)


def test_422_lists_all_faults_at_once(server: Running) -> None:
    wrong = {
        "model": 1,
        "questions": {"a": {"type": "x"}, "b": {"type": "score"}, "c": NOUL | {"k": 1}},
        "stream": True,
    }
    response = server.post(wrong)
    assert response.status_code == 422
    assert [fault["loc"] for fault in response.json()["detail"]] == [
        ["body", "stream"], ["body", "state"], ["body", "model"], ["body", "questions", "a", "type"],
        ["body", "questions", "b", "criteria"], ["body", "questions", "c", "k"],
    ]  # fmt: skip
    for no_object in (b"[]", b"null", b"7", b'"text"'):
        assert server.send(no_object).status_code == 422


def test_404_and_405(server: Running) -> None:
    assert "'gpt' is not known" in refused(server.post(body(model="gpt")), 404)
    assert "\\" not in refused(server.post(body(model="a\u001b[31m\nb")), 404)
    for path in ("/v1", "/v1/systemone/", "/nothing", "/v1/models/clef"):
        assert refused(server.http.get(path), 404)
    for method, path, allowed in (
        ("GET", ROUTE, "POST"),
        ("HEAD", ROUTE, "POST"),
        ("PUT", ROUTE, "POST"),
        ("DELETE", f"{ROUTE}/batch", "POST"),
        ("OPTIONS", VENDOR, "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
        ("PATCH", "/openapi.json", "GET, HEAD"),
    ):
        response = server.http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, allowed), path
    head = server.http.head("/health")
    assert (head.status_code, head.content) == (200, b"")


def test_413_of_bodies_before_they_are_read(server: Running) -> None:
    limit = 13 * 2**20
    with socket.create_connection(("127.0.0.1", server.process.port), timeout=10) as raw:
        head = (
            f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {limit + 1}\r\n\r\n"
        )
        raw.sendall(head.encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 413 ")

    def pieces() -> Iterator[bytes]:
        for _ in range(14):
            yield b" " * 2**20

    response = server.http.post(ROUTE, content=pieces(), headers={"content-type": "application/json"})
    assert "more than 13631488 bytes" in refused(response, 413)
    assert refused(server.send(b" " * limit), 400)
    assert server.post(BODY).status_code == 200


@pytest.mark.parametrize("encoding", ["zstd", "gzip"])
def test_compressed_bodies(encoding: str, server: Running) -> None:
    pack = {"zstd": zstd.compress, "gzip": gzip.compress}[encoding]
    content = json.dumps(BODY).encode()
    packed = pack(content)
    assert server.send(packed, content_encoding=encoding).json() == server.post(BODY).json()
    assert server.send(pack(content[:50]) + pack(content[50:]), content_encoding=encoding).status_code == 200
    bomb = pack(b" " * (13 * 2**20 + 1))
    assert len(bomb) < 20_000
    assert "once decompressed" in refused(server.send(bomb, content_encoding=encoding), 413)
    for damaged in (packed[:-5], packed[:5], b"", b"no " + packed, packed + b"more", content):
        assert encoding in refused(server.send(damaged, content_encoding=encoding), 400)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = zstd.compress(bytes(2**30), level=19)
    import tracemalloc

    tracemalloc.start()
    try:
        with pytest.raises(Refusal):
            decoded(bomb, "zstd", 10_000_000)
        assert tracemalloc.get_traced_memory()[1] < 15_000_000
    finally:
        tracemalloc.stop()


def test_415(server: Running) -> None:
    response = server.send(b"{}", content_encoding="br")
    assert refused(response, 415)
    assert response.headers["accept-encoding"] == "zstd, gzip"
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", "x"):
        assert refused(server.send(b"{}", content_type=kind), 415)
    assert refused(server.send(b"[]", f"{ROUTE}/batch", content_type="multipart/form-data; boundary=b"), 415)
    content = json.dumps(BODY).encode()
    for kind in ("application/json; charset=UTF-8", "Application/JSON"):
        assert server.send(content, content_type=kind, content_encoding="identity").status_code == 200
    assert server.http.post(ROUTE, content=content).status_code == 200  # no type at all


@pytest.mark.parametrize("route", [ROUTE, VENDOR])
def test_413_of_records(route: str, server: Running) -> None:
    long = body(questions={str(i): {"type": "noul", "instructions": "why " * 100} for i in range(20)})
    response = server.post(long, route)
    assert response.status_code == 413
    text = response.text
    assert "needs " in text
    assert "tokens, limit 2000" in text
    cut = server.post(body(state="long " * 5000)).json()
    assert cut["usage"]["truncated_state_tokens"] > 0
    assert cut["usage"]["input_tokens"] == 2000


def test_413_where_truncation_is_refused() -> None:
    with running(fake_clef(max_length=2000, truncation="refuse")) as server:
        response = server.post(body(state="long " * 5000))
        assert "limit 2000" in refused(response, 413)


def test_401() -> None:
    with running(api_keys=("secret-one", "secret-two")) as server:
        for headers in (
            {},
            {"authorization": "Bearer no"},
            {"authorization": "Basic secret-one"},
            {"authorization": "x"},
        ):
            response = server.http.post(ROUTE, json=BODY, headers=headers)
            assert refused(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
            assert server.http.get("/v1/models", headers=headers).status_code == 401
        for key in ("secret-one", "secret-two"):
            assert server.http.post(ROUTE, json=BODY, headers={"authorization": f"Bearer {key}"}).status_code == 200
        for path in ("/health", "/ready", "/metrics", "/openapi.json", "/"):
            assert server.http.get(path).status_code == 200
        assert "secret" not in server.text


def test_429_when_the_queue_is_full() -> None:
    held = Held()
    with running(fake_clef(FakeEngine(96, held)), queue=3, batch_items=3, warm_up_tokens=0) as server:
        results: list[int] = []
        threads = [threading.Thread(target=lambda: results.append(server.post(BODY).status_code)) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until(lambda: server.metric("clef_requests_inside") == 3)
        for content, route in ((BODY, ROUTE), ([BODY], f"{ROUTE}/batch"), (BODY, VENDOR)):
            response = server.post(content, route)
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
        assert server.http.get("/health").status_code == 200
        held.free.set()
        for thread in threads:
            thread.join(20)
        assert results == [200] * 3
        assert server.post([BODY] * 3, f"{ROUTE}/batch").status_code == 200


def test_503_while_loading_and_a_bundle_that_cannot_be_loaded() -> None:
    gate = threading.Event()

    def load(_: Any) -> Any:
        gate.wait(20)
        return fake_clef()

    from serving import Running as Server

    from clef_trt.server.settings import Settings

    server = Server(load, Settings(port=0))
    try:
        for path in ("/ready", "/v1/models"):
            response = server.http.get(path)
            assert refused(response, 503)
            assert int(response.headers["retry-after"]) >= 1
        assert server.post(BODY).status_code == 503
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/openapi.json").status_code == 200
        gate.set()
        assert server.ready().post(BODY).status_code == 200
    finally:
        gate.set()
        server.close()


def test_a_slow_body_ends(server: Running) -> None:
    with running(body_timeout_s=0.05) as impatient:
        connection = http.client.HTTPConnection("127.0.0.1", impatient.process.port, timeout=10)
        connection.putrequest("POST", ROUTE)
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        response = connection.getresponse()
        assert response.status == 408
        response.read()
        connection.close()


def test_a_client_that_goes_leaves_its_place() -> None:
    held = Held()
    engine = FakeEngine(96, held)
    with running(fake_clef(engine), warm_up_tokens=0) as server:
        content = json.dumps(BODY).encode()
        sockets = [socket.create_connection(("127.0.0.1", server.process.port)) for _ in range(3)]
        for one in sockets:
            head = f"POST {ROUTE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            one.sendall(head.encode() + content)
            assert held.begun.wait(10)
        wait_until(lambda: server.metric("clef_queue_requests") == 2)
        for one in sockets:
            one.close()
        wait_until(lambda: server.metric("clef_requests_inside") == 0)
        held.free.set()
        assert server.post(BODY).status_code == 200
        assert len(engine.passes) == 2
        assert server.metric('clef_refusals_total{kind="gone"}') == 3


# Ids, logs, faults


def test_every_response_has_an_id(server: Running) -> None:
    ids = {server.http.get(path).headers["x-typesafe-request-id"] for path in ("/health", "/", "/nope", "/health")}
    assert len(ids) == 4
    own = {"x-request-id": "my.id-1"}
    assert server.http.get("/health", headers=own).headers["x-typesafe-request-id"] == "my.id-1"
    for odd in ("", "a b", "é" * 5, "x" * 129, "<script>"):
        headers = [(b"x-request-id", odd.encode())]
        assert server.http.get("/health", headers=headers).headers["x-request-id"] != odd
    with socket.create_connection(("127.0.0.1", server.process.port), timeout=10) as raw:
        raw.sendall(b"no http at all\r\n\r\n")
        assert b"x-typesafe-request-id: " in raw.recv(1000)


def test_logs_hold_numbers_and_no_content(server: Running) -> None:
    secrets = ("gold-fish", "tell-me", "option-x", "described", "odd-key", "strange-path", "who-am-i")
    questions = {"tell-me": {"type": "choice", "criteria": {"option-x": "described", "b": None}}}
    server.post(body(state="gold-fish", questions=questions))
    server.post(body(state="gold-fish", questions=questions | {"odd-key": {"type": "tell-me"}}, **{"odd-key": 1}))
    server.post([body(model="who-am-i")], f"{ROUTE}/batch")
    server.http.post("/strange-path?who-am-i", content=b"gold-fish")
    server.send(b'{"tell-me": gold-fish')
    text = server.text
    assert not [secret for secret in secrets if secret in text]
    lines = [line for line in server.logs if line["event"] == "request"]
    answered = next(line for line in lines if line["status"] == 200 and line["route"] == ROUTE)
    assert {
        "id",
        "method",
        "ms",
        "tokens",
        "questions",
        "options",
        "records",
        "queue_ms",
        "bytes_in",
    } <= answered.keys()
    assert {"invalid", "not_json", "route"} <= {line.get("kind") for line in lines}


def fails_on(words: dict[int, Exception | float]) -> FakeEngine:
    """An engine that raises, or answers with a number, where a record's length is one of these."""

    def on_run(inputs: Any) -> Any:
        for length, what in words.items():
            if length in inputs["sequence_lengths"]:
                if isinstance(what, Exception):
                    raise what
                return {"logits": np.full(inputs["option_questions"].shape, what, np.float32)}
        return None

    return FakeEngine(96, on_run)


def test_500_is_of_the_request_alone_and_tells_nothing() -> None:
    raises, nan = body(state="a"), body(state="a b c d")
    lengths = [fake_clef().encode(request).tokens for request in (raises, nan)]
    engine = fails_on({lengths[0]: RuntimeError("gold-fish"), lengths[1]: float("nan")})
    with running(fake_clef(engine), warm_up_tokens=0) as server:
        for request in (raises, nan, raises):
            response = server.post(request)
            assert response.status_code == 500
            assert response.headers["content-type"].startswith("text/plain")
            assert response.text == "Internal server error: a fault of the server, not of the request."
            assert server.post(BODY).status_code == 200
        results = server.post([BODY, raises, nan, body(state="The door is open and red.")], f"{ROUTE}/batch").json()
        assert [result.get("error", {}).get("status") for result in results] == [None, 500, 500, None]
        assert results[0] == server.post(BODY).json()
        envelope = server.post(nan, VENDOR)
        assert (envelope.status_code, envelope.json()["success"]) == (500, False)
        assert "gold-fish" not in server.text
        assert "Traceback" not in server.text
        faults = [line for line in server.logs if line["event"] == "engine fault"]
        assert {line["fault"][0] for line in faults} == {"RuntimeError", "EngineError"}
        assert server.metric('clef_refusals_total{kind="fault"}') == 6


def test_a_fault_of_the_server_itself_is_a_500(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("gold-fish")

    monkeypatch.setattr(server.process.service.decider.clef, "answer", fail)
    for route in (ROUTE, VENDOR):
        response = server.post(BODY, route)
        assert response.status_code == 500
        assert "gold-fish" not in response.text + server.text
    assert '"KeyError"' in server.text


# Pictures


def png(colour: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (64, 64), colour).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture(scope="module")
def seeing() -> Iterator[Running]:
    with running(seeing_clef()) as made:
        yield made


def multipart(request: bytes, *parts: tuple[str, bytes]) -> tuple[bytes, str]:
    pieces = [("request", request), *parts]
    content = b"".join(
        b'--b\r\nContent-Disposition: form-data; name="' + name.encode() + b'"\r\n\r\n' + data + b"\r\n"
        for name, data in pieces
    )
    return content + b"--b--\r\n", "multipart/form-data; boundary=b"


def test_assets_are_images_in_their_order(seeing: Running) -> None:
    encoded = base64.b64encode(png()).decode()
    image = {"content_type": "image/png", "base64": encoded}
    asked = {"q": NOUL | {"instructions": "Is [image 1] red?"}}
    expected = seeing.post(body(state="see [image 1] and [image 2]", questions=asked, images=[image, image]))
    assert expected.status_code == 200, expected.text
    assets = {"one": {"type": "image", "part": "asset-0"}, "two": {"data_base64": encoded, "format": "png"}}
    request = body(state="see one and two", questions={"q": NOUL | {"instructions": "Is one red?"}}, assets=assets)
    content, kind = multipart(json.dumps(request).encode(), ("asset-0", png()))
    response = seeing.send(content, content_type=kind)
    assert response.status_code == 200, response.text
    assert response.json() == expected.json()
    packed = seeing.send(zstd.compress(content), content_type=kind, content_encoding="zstd")
    assert packed.json() == expected.json()


@pytest.mark.parametrize(
    ("assets", "parts", "said"),
    [
        ({}, [], "assets: is"),
        ({"a": 5}, [], "assets.a: is a number"),
        ({" ": {"data_base64": "x"}}, [], "has no name"),
        ({"a": {"part": "asset-9"}}, [], "assets.a.part: names no part"),
        ({"a": {"part": "p"}, "b": {"part": "p"}}, [("p", png())], "assets.b.part: names no part"),
        ({"a": {"part": "p"}}, [("p", png()), ("q", png())], "does not name the part 'q'"),
        ({"a": {"part": "p"}}, [("p", b"no picture")], "assets.a: has unrecognised bytes"),
        ({"a": {"part": "p"}}, [("p", b"")], "assets.a: has no bytes"),
        ({"a": {"data_base64": "%%%", "format": "png"}}, [], "assets.a: is not base64"),
        ({"a": {"data_base64": "", "format": "gif"}}, [], "assets.a.format: is no format"),
        ({"a": {"url": "http://x"}}, [], "assets.a.url: is not known here"),
        ({str(i): {"part": str(i)} for i in range(5)}, [], "assets.0.part"),
    ],
)
def test_faults_of_assets_are_told_at_their_place(
    assets: Any, parts: list[tuple[str, bytes]], said: str, seeing: Running
) -> None:
    content, kind = multipart(json.dumps(body(assets=assets)).encode(), *parts)
    assert said in refused(seeing.send(content, content_type=kind), 422)


def test_400_of_multipart(seeing: Running) -> None:
    content, kind = multipart(json.dumps(BODY).encode())
    assert seeing.send(content, content_type=kind).status_code == 200
    wrong = [
        (content[:-6], kind),
        (content.replace(b"request", b"reqwest"), kind),
        (content, "multipart/form-data"),
        (content, "multipart/form-data; boundary=other"),
        (multipart(b"{")[0], kind),
        (multipart(b"{}", *[(str(i), b"x") for i in range(9)])[0], kind),
        (multipart(b"{}", ("request", b"{}"))[0], kind),
        (b"", kind),
        (b"junk", kind),
    ]
    for sent, named in wrong:
        assert refused(seeing.send(sent, content_type=named), 400)


def test_a_picture_that_turns_out_damaged_is_the_clients_fault(seeing: Running) -> None:
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(stream, "PNG")
    image = {"content_type": "image/png", "base64": base64.b64encode(stream.getvalue()[:6000]).decode()}
    assert "images.0: is a PNG picture of 64×64 pixels, but" in refused(seeing.post(body(images=[image])), 422)
    url = body(images=["https://example.com/x.png"])
    assert "paths and URLs are never opened" in refused(seeing.post(url), 422)
    for path in ("/etc/passwd", "file:///etc/passwd", "data:text/html;base64,PGI+"):
        assert refused(seeing.post(body(images=[path])), 422)


# The command


def test_without_its_packages_the_command_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(("clef_trt.server.", "starlette", "uvicorn"))]:
        if name != "clef_trt.server.settings":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    assert main(["serve", "bundle"]) == 2
    assert "pip install 'clef-trt[serve]'" in capsys.readouterr().err


def test_options_of_a_choice_with_everything_at_its_limit() -> None:
    with running() as server:
        questions: dict[str, Any] = {f"q{i}": CHOICE for i in range(64)}
        assert len(server.post(body(questions=questions)).json()["answers"]) == 64
