"""The page in headless Chromium: a person decides something, at a desk and on a phone."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from serving import BODY, ROUTE, Running, running, seeing_clef

from clef_trt import samples

CHROMIUM = shutil.which("chromium")
PICTURES = os.environ.get("PAGE_PICTURES")  # a folder: pictures of the page are kept there, to be looked at
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium (apt-get install chromium)")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(seeing_clef(), warm_up_tokens=0) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_playwright = pytest.importorskip("playwright.sync_api").sync_playwright
    with sync_playwright() as play:
        # A container has no user namespaces for Chromium's own sandbox.
        made = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(params=[(1280, 900), (390, 844)], ids=["desk", "phone"])
def page(request: pytest.FixtureRequest, browser: Any, server: Running) -> Iterator[Any]:
    context = browser.new_context(viewport=dict(zip(("width", "height"), request.param, strict=True)))
    context.set_default_timeout(10_000)
    made = context.new_page()
    complaints: list[str] = []
    made.on("pageerror", lambda error: complaints.append(str(error)))
    made.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    made.on(
        "request", lambda sent: complaints.append(sent.url) if not sent.url.startswith((server.url, "blob:")) else None
    )
    made.goto(server.url)
    made.wait_for_selector(".question")
    yield made
    if PICTURES:
        made.screenshot(path=Path(PICTURES) / f"{request.node.name}.png")
    assert [text for text in complaints if "status of 4" not in text] == []
    context.close()


def bars(page: Any) -> dict[str, list[float]]:
    """Question → its probabilities as they are shown; the bars are as wide as they say."""
    page.wait_for_selector(".times")
    page.wait_for_timeout(450)  # the bars grow
    found = {}
    for part in page.query_selector_all(".answer"):
        values = []
        for bar in part.query_selector_all(".bars li"):
            value = float(bar.query_selector(".value").inner_text().removesuffix(" %")) / 100
            width = bar.query_selector(".fill").bounding_box()["width"] / bar.bounding_box()["width"]
            assert width == pytest.approx(value, abs=0.01)
            values.append(value)
        found[part.query_selector(".asked").inner_text()] = values
    return found


def fits(page: Any) -> None:
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@in_a_browser
def test_an_example_is_decided_and_shown(page: Any, server: Running) -> None:
    page.click("#decide")
    found = bars(page)
    asked = samples.ticket()
    answers = server.post(asked | {"model": "clef"}).json()["answers"]
    assert list(found) == [question["instructions"] for question in asked["questions"].values()]
    assert list(found.values())[2] == pytest.approx(list(answers["team"]["probabilities"].values()), abs=0.001)
    assert page.inner_text(".answer:nth-of-type(3) .said") == answers["team"]["choice"]
    times = page.inner_text(".times")
    assert all(stage in times for stage in ("waiting", "encoding", "model", "answer", "tokens"))
    fits(page)


@in_a_browser
def test_a_question_is_written_and_one_removed(page: Any, server: Running) -> None:
    for _ in range(3):
        page.click(".question:last-child .remove")
    page.fill("#state", "It rains.")
    page.click("#add-question")
    last = ".question:last-child"
    page.fill(f"{last} .id", "weather")
    page.select_option(f"{last} .type", "choice")
    for number, name in ((1, "dry"), (2, "wet")):
        page.fill(f"{last} .option:nth-child({number}) .name", name)
    page.click(f"{last} .add-option")
    page.keyboard.type("snow")
    page.keyboard.press("Control+Enter")
    found = bars(page)
    assert len(found) == 2
    assert len(found["weather"]) == 3
    fits(page)


@in_a_browser
def test_a_picture_is_dropped(page: Any, server: Running) -> None:
    stream = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 20, 20)).save(stream, "PNG")
    content = base64.b64encode(stream.getvalue()).decode()
    drop = f"""() => {{
        const data = new DataTransfer();
        const bytes = Uint8Array.from(atob("{content}"), (c) => c.charCodeAt(0));
        data.items.add(new File([bytes], "red.png", {{ type: "image/png" }}));
        const dropped = new DragEvent("drop", {{ dataTransfer: data, bubbles: true }});
        document.getElementById("pictures").dispatchEvent(dropped);
    }}"""
    page.evaluate(drop)
    page.wait_for_selector("#thumbnails img")
    page.set_input_files("#picture", {"name": "b.png", "mimeType": "image/png", "buffer": stream.getvalue()})
    page.wait_for_selector("#thumbnails button:nth-child(2)")
    page.click("#thumbnails button:nth-child(2)")
    before = server.metric("clef_media_total")
    page.click("#decide")
    bars(page)
    assert server.metric("clef_media_total") == before + 1
    fits(page)


@in_a_browser
def test_json_and_what_is_wrong_with_it(page: Any, server: Running) -> None:
    page.click("#as-json")
    request = json.loads(page.input_value("#json"))
    assert request["questions"] == samples.ticket()["questions"]
    assert request["state"] == samples.ticket()["state"]
    page.fill("#json", json.dumps(BODY))
    page.click("#decide")
    assert len(bars(page)) == 3
    page.fill("#json", json.dumps(BODY | {"questions": {"<b>q</b>": {"type": "rank"}}}))
    page.click("#decide")
    page.wait_for_selector(".refused")
    assert "questions.<b>q</b>.type: is 'rank'; expected one of noul, choice, score" in page.inner_text(".refused")
    page.fill("#json", "{")
    page.click("#decide")
    page.wait_for_selector(".refused >> text=not JSON")
    fits(page)


def test_nothing_of_it_comes_from_elsewhere(server: Running) -> None:
    response = server.http.get("/")
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    for path in ("/page/page.js", "/page/form.js", "/page/answer.js", "/page/page.css", "/page/icon.svg"):
        found = server.http.get(path)
        assert found.status_code == 200
        assert "http" not in found.text.replace("http://www.w3.org/2000/svg", "")
    assert "http" not in response.text
    assert "style=" not in response.text
    assert len(server.http.get("/page/examples.json").json()) == 10
    with running(page=False) as without:
        assert without.http.get("/").status_code == 404
        assert without.post(BODY, ROUTE).status_code == 200
