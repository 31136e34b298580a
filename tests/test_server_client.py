"""The official client, unchanged, against a real server; its errors for every status."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image as Pictures
from serving import BODY, ROUTE, Held, Running, fake_clef, running, seeing_clef

from clef_trt.fake import FakeEngine
from clef_trt.remote import Remote

sdk = pytest.importorskip("typesafe_sdk")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(seeing_clef(), api_keys=("key",), warm_up_tokens=0) as made:
        yield made


def client(server: Running, **more: Any) -> Any:
    return sdk.TypeSafeClient(base_url=server.url, **{"api_key": "key", "retry": sdk.RetryPolicy(max_retries=0)} | more)


QUESTIONS = {
    "open": sdk.Noul(instructions="Is it open?", criteria={"true": "stands open", "false": None}),
    "tone": sdk.Choice(instructions="The tone?", criteria={"calm": None, "angry": "An upset message"}),
    "much": sdk.Score(instructions="How much?", criteria=["none", {"some": 1}, ["much"]]),
}


def test_choice_noul_and_score(server: Running) -> None:
    with client(server) as one:
        result = one.system_one(state={"message": "The door stands open."}, questions=QUESTIONS)
    assert result.model == "jev-latest"
    assert 0 <= result.nouls["open"].noul <= 1
    assert result.choices["tone"].choice in {"calm", "angry"}
    assert sum(result.choices["tone"].probabilities.values()) == pytest.approx(1, abs=1e-3)
    assert result.scores["much"].legend == {0: "none", 1: {"some": 1}, 2: ["much"]}
    assert result.usage.input_tokens > 0
    assert result.usage.output_tokens == 0


def test_a_level_without_text_has_one_in_the_legend(server: Running) -> None:
    with client(server) as one:
        questions = {"s": {"type": "score", "criteria": [None, 3, "x"]}}
        result = one.system_one(state="s", questions=questions)
    assert set(result.scores["s"].legend) == {0, 1, 2}


def test_models(server: Running) -> None:
    with client(server) as one:
        models = one.models.list().models
    assert {"clef", "clef-flash", "jev-latest"} <= {model.name for model in models}


def test_large_bodies_come_as_zstd(server: Running) -> None:
    with client(server) as one, client(server, compression=False) as plain:
        state = "A long message. " * 200
        first, second = (c.system_one(state=state, questions=QUESTIONS) for c in (one, plain))
    assert first.answers == second.answers
    sizes = [line["bytes_in"] for line in server.logs if line.get("bytes_in")][-2:]
    assert sizes[0] < 1000 < 3000 < sizes[1]


def test_the_client_without_threads(server: Running) -> None:
    async def ask() -> Any:
        async with sdk.AsyncTypeSafeClient(base_url=server.url, api_key="key") as one:
            return await asyncio.gather(*(one.system_one(state=f"{i}", questions=QUESTIONS) for i in range(8)))

    assert len(asyncio.run(ask())) == 8


def test_images_as_assets(server: Running) -> None:
    stream = io.BytesIO()
    Pictures.new("RGB", (64, 48), (200, 20, 20)).save(stream, "PNG")
    picture = sdk.Image(stream.getvalue())
    jpeg = sdk.Image.from_pil(Pictures.new("RGB", (64, 48)))
    asked = {"red": sdk.Noul(instructions="Is it red?")}
    with client(server) as one:
        placed = one.system_one(state={"photo": picture}, questions=asked)
        again = one.system_one(state={"photo": picture}, questions=asked)
        named = one.system_one(state={"photo": "front"}, questions=asked, assets={"front": picture})
        both = one.system_one(state=[picture, jpeg, "text"], questions=asked)
        with one.attach_assets(picture):
            inside = one.system_one(state=f"The photo: {picture}", questions=asked)
        without = one.system_one(state={"photo": "front"}, questions=asked)
    assert placed.answers == again.answers == named.answers
    assert both.usage.input_tokens > placed.usage.input_tokens > without.usage.input_tokens
    assert inside.usage.input_tokens > without.usage.input_tokens


@pytest.mark.parametrize(
    ("error", "status", "change", "said"),
    [
        ("TypeSafeUnprocessableEntityError", 422, {"questions": {"q": {"type": "rank"}}}, "questions.q.type"),
        ("TypeSafeNotFoundError", 404, {"model": "gpt"}, "'gpt' is not known"),
        ("TypeSafeBadRequestError", 400, {"state": "\x7f", "extra_body": {"state": "x" * 14}}, None),
        ("TypeSafeAPIError", 413, {"state": "x" * 14_000_000}, "at most 13631488"),
    ],
)
def test_its_errors(error: str, status: int, change: dict[str, Any], said: str | None, server: Running) -> None:
    asked = {"state": "s", "questions": QUESTIONS} | change
    if said is None:  # it sends no body that is not JSON, so a wrong encoding is claimed
        asked = {"state": "s", "questions": QUESTIONS, "extra_headers": {"Content-Encoding": "gzip"}}
    with client(server, compression=False) as one, pytest.raises(getattr(sdk, error)) as found:
        one.system_one(**asked)
    assert found.value.status == status
    assert type(found.value).__name__ == error
    assert found.value.request_id
    assert said is None or said in str(found.value)


def test_a_wrong_key(server: Running) -> None:
    with client(server, api_key="other") as one, pytest.raises(sdk.TypeSafeAuthenticationError):
        one.system_one(state="s", questions=QUESTIONS)
    assert Remote(server.url, "key").decide(BODY)["answers"]


def test_a_fault_and_a_server_that_is_not_there() -> None:
    def fail(_: Any) -> None:
        raise RuntimeError

    with running(fake_clef(FakeEngine(96, fail)), warm_up_tokens=0) as server, client(server) as one:
        with pytest.raises(sdk.TypeSafeInternalServerError) as found:
            one.system_one(state="s", questions=QUESTIONS)
        assert found.value.status == 500
    with client(server) as one, pytest.raises(sdk.TypeSafeAPIConnectionError):
        one.system_one(state="s", questions=QUESTIONS)


def test_it_comes_again_when_a_full_server_says(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()
    with running(fake_clef(FakeEngine(96, held)), queue=1, batch_items=1, warm_up_tokens=0) as server:
        inside = threading.Thread(target=lambda: server.post(BODY, ROUTE))
        inside.start()
        assert held.begun.wait(10)
        with client(server) as one, pytest.raises(sdk.TypeSafeRateLimitError) as found:
            one.system_one(state="s", questions=QUESTIONS)
        assert found.value.retry_after_ms == 1000
        threading.Timer(0.3, held.free.set).start()
        with client(server, retry=sdk.RetryPolicy(max_retries=1)) as one:
            assert one.system_one(state="s", questions=QUESTIONS).answers
        inside.join()
        statuses = [line["status"] for line in server.logs if line.get("route") == ROUTE]
        assert statuses == [429, 429, 200, 200]
