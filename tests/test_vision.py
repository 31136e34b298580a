"""Media end to end: every stored media case alone and among text, positions, accounting, memory."""

from __future__ import annotations

import base64
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RELEASES, golden_cases
from pictures import drawing, with_pictures
from test_golden import assert_logits, assert_response

from clef_trt import Clef, RequestError, SettingError, TooLongError, samples
from clef_trt.grid import TokenGrid, position_ids, vision_inputs

CASES = [(release, case) for release in RELEASES for case in golden_cases(release, media=True)]
PICTURE = {"width": 300, "height": 200, "seed": 1}


@pytest.fixture(scope="module")
def clefs(bundles: dict[str, Path]) -> dict[str, Clef]:
    return {name: Clef.load(bundle) for name, bundle in bundles.items()}


def request(**media: Any) -> dict[str, Any]:
    questions = {"q": {"type": "choice", "instructions": "Which?", "criteria": {"a": None, "b": None}}}
    return {"model": "m", "state": "A form.", "questions": questions} | media


def test_there_are_as_many_cases_as_the_golden_files_promise() -> None:
    assert len(CASES) == 2 * 14


@pytest.mark.parametrize(("release", "case"), CASES, ids=[f"{release}-{case['name']}" for release, case in CASES])
def test_case(release: str, case: dict[str, Any], clefs: dict[str, Clef]) -> None:
    body = with_pictures(case["request"])
    encoding = clefs[release].encode(body)
    assert encoding.input_ids.tolist() == case["input_ids"]
    for question, stored in zip(encoding.questions, case["questions"], strict=True):
        assert list(question.span) == stored["span"]
        assert [list(span) for span in question.option_spans] == stored["option_spans"]
        assert list(question.option_ids) == stored["option_ids"]
    assert_logits(clefs[release].logits([body])[0], case)
    assert_response(clefs[release].decide(body), case["response"])


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.usefixtures("shared_passes")
def test_media_and_text_share_passes(release: str, clefs: dict[str, Clef]) -> None:
    """Pictures, videos and text of like length, interleaved, so that every pass mixes them."""
    media = golden_cases(release, media=True)
    texts = [case for case in golden_cases(release) if "error" not in case and 380 < len(case["input_ids"]) < 1300]
    texts = [case for case in texts if case["max_length"] == 16384 and not case["name"].startswith("control_tokens")]
    cases = [case for pair in zip(media, texts, strict=False) for case in pair]
    bodies = [with_pictures(case["request"]) for case in cases]
    passes: list[tuple[int, int]] = []
    run = clefs[release].engine.run

    def recorded(inputs: Any) -> Any:
        passes.append((len(inputs["input_ids"]), int((inputs["media_rows"] >= 0).any(1).sum())))
        return run(inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clefs[release].engine, "run", recorded)
        found = clefs[release].logits(bodies)
    assert any(0 < pictured < records for records, pictured in passes)
    for case, logits in zip(cases, found, strict=True):
        assert_logits(logits, case)


def test_verify_compares_pictures_too(bundles: dict[str, Path]) -> None:
    from clef_export.verify import verify_with_reference
    from conftest import GOLDEN

    bodies = [with_pictures(case["request"]) for case in golden_cases("odd", media=True)[-2:]]
    with Clef.load(bundles["odd"], control_tokens="reference") as clef:
        assert clef.patches(clef.encode(bodies[0]))[0].dtype == np.float32
        report = verify_with_reference(clef, GOLDEN / "odd", [*bodies, samples.requests()[-1]])
    assert report.total.same_top_option == 1.0
    assert report.total.max_logit_difference < 1e-5


def test_positions_by_hand() -> None:
    """Two tokens of text, a grid of 2 × 3, one of text, a grid of 1 × 1, two of text."""
    found = position_ids(12, [TokenGrid(2, 2, 3), TokenGrid(9, 1, 1)])
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert position_ids(3, []).tolist() == [[0, 1, 2]] * 3


def test_the_position_table_is_resampled_corner_to_corner() -> None:
    """The inputs of a 4 × 6 grid over a 3 × 3 table, against torch's bilinear resize with aligned corners."""
    import torch

    inputs = vision_inputs(np.zeros((1, 24, 5), np.float32), 4, 6, 2, 3)
    table = torch.arange(9.0).reshape(1, 1, 3, 3) ** 2
    expected = torch.nn.functional.interpolate(table, (4, 6), mode="bilinear", align_corners=True)[0, 0].numpy()
    resampled = (table.numpy().ravel()[inputs["position_rows"]] * inputs["position_weights"]).sum(1)
    row, column = inputs["positions"].T
    np.testing.assert_allclose(resampled, expected[row, column], rtol=0, atol=1e-5)
    assert inputs["positions"][:8].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]


@pytest.mark.parametrize("mode", ["text", "reference"])
def test_image_pad_in_a_callers_text(mode: str, bundles: dict[str, Path]) -> None:
    """With and without images it takes no picture's place. (Where it is parsed, the reference crashes with images.)"""
    clef = Clef.load(bundles["odd"], control_tokens=mode)
    pad = clef.manifest.model.control_tokens["image"]
    forged = request() | {"state": "<|image_pad|><|vision_start|>"}
    assert (pad in clef.encode(forged).input_ids) == (mode == "reference")
    clef.decide(forged)
    with_image = forged | {"images": [drawing.picture(PICTURE)]}
    encoding = clef.encode(with_image)
    (grid,) = encoding.grids
    inside = encoding.input_ids[grid.start : grid.end]
    assert (inside == pad).all()
    assert (encoding.input_ids == pad).sum() == len(inside) + (mode == "reference")
    assert clef.decide(with_image)["usage"]["input_tokens"] == encoding.tokens


def test_media_counts_before_anything_is_decoded(clefs: dict[str, Clef], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clef_trt.picture.Picture.pixels", lambda _: pytest.fail("a picture was decoded"))
    body = request(images=[drawing.data_url({"width": 4000, "height": 4000, "seed": 1, "mode": "L"})] * 2)
    with pytest.raises(TooLongError, match=r"schema and media \(of 31250 tokens\) need 3\d+ tokens.*limit is 16384"):
        clefs["odd"].decide(body)


def test_media_is_never_cut_and_the_state_is(bundles: dict[str, Path]) -> None:
    body = request(images=[drawing.picture(PICTURE)]) | {"state": "word " * 2000}
    whole = Clef.load(bundles["odd"], max_length=600)
    encoding = whole.encode(body)
    assert encoding.tokens == 600
    assert encoding.truncated_state_tokens > 0
    assert encoding.grids[0].end - encoding.grids[0].start == encoding.media[0].tokens


def test_max_image_tokens_shrinks(bundles: dict[str, Path]) -> None:
    body = request(images=[drawing.picture({"width": 800, "height": 600, "seed": 2})])
    full = Clef.load(bundles["odd"]).encode(body).media[0]
    small = Clef.load(bundles["odd"], max_image_tokens=100)
    assert full.tokens == 475
    assert small.encode(body).media[0].tokens <= 100
    small.decide(body)
    with pytest.raises(SettingError, match="max_image_tokens"):
        Clef.load(bundles["odd"], max_image_tokens=10)


def test_faults_of_pictures_come_with_all_others(clefs: dict[str, Clef]) -> None:
    with pytest.raises(RequestError) as error:
        clefs["odd"].decide({"model": "", "state": "", "questions": {}, "images": ["/etc/passwd"], "videos": [[]]})
    places = [fault.loc for fault in error.value.faults]
    assert places == [("model",), ("questions",), ("images", 0), ("videos", 0)]


def test_text_alone_never_opens_the_vision_graph(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    from clef_trt import clef as module

    real = module.open_engine
    monkeypatch.setattr(module, "open_engine", lambda *a: opened.append(a[2]) or real(*a))
    with Clef.load(bundles["odd"]) as clef:
        clef.decide(samples.ticket())
        assert opened == ["text"]
        clef.decide(request(images=[drawing.picture(PICTURE)]))
        clef.decide(request(images=[drawing.picture(PICTURE)]))
    assert opened == ["text", "vision"]


def test_damaged_pixels_in_a_batch_name_their_request(clefs: dict[str, Clef]) -> None:
    whole = drawing.png(PICTURE)
    cut = {"content_type": "image/png", "base64": base64.b64encode(whole[:-200]).decode()}
    with pytest.raises(RequestError) as error:
        clefs["odd"].decide_batch([samples.ticket(), request(images=[cut]), request()])
    assert [fault.loc for fault in error.value.faults] == [(1, "images", 0)]


def test_many_threads_share_one_clef(clefs: dict[str, Clef]) -> None:
    bodies = [*samples.requests(), request(images=[drawing.picture(PICTURE)])] * 3
    alone = [clefs["odd"].logits([body])[0] for body in bodies]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda body: clefs["odd"].logits([body])[0], bodies))
    for expected, found in zip(alone, together, strict=True):
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["path", "url"])
def test_no_file_and_no_socket_is_opened_for_a_picture(kind: str, clefs: dict[str, Clef], tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(drawing.png(PICTURE))
    place = str(file) if kind == "path" else "http://127.0.0.1:9/picture.png"
    touched: list[str] = []
    active = True

    def hook(event: str, arguments: Any) -> None:
        if active and (event.startswith("socket.") or (event == "open" and str(arguments[0]) == str(file))):
            touched.append(event)

    sys.addaudithook(hook)
    try:
        for value in (place, {"content_type": "image/png", "base64": place}, f"file://{place}", {"url": place}):
            with pytest.raises(RequestError):
                clefs["odd"].decide(request(images=[value]))
    finally:
        active = False
    assert touched == []


@pytest.mark.slow
def test_memory_grows_linearly_with_patches(bundles: dict[str, Path]) -> None:
    """One to four images of 4,096 tokens: a square of all patches would be 16 times as large for four, and one image's
    own (16,384 patches)² scores of four heads are 4.3 GB."""
    program = (
        "import sys\n"
        "from PIL import Image\n"
        "from clef_trt import Clef\n"
        "clef = Clef.load(sys.argv[1], max_length=40000)\n"
        "images = [Image.new('RGB', (2048, 2048), (40 * i, 90, 200)) for i in range(int(sys.argv[2]))]\n"
        "questions = {'q': {'type': 'noul', 'instructions': 'Red?'}}\n"
        "body = {'model': 'm', 'state': '', 'questions': questions, 'images': images}\n"
        "assert sum(item.tokens for item in clef.encode(body).media) == 4096 * len(images)\n"
        "clef.decide(body)\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    peaks = []
    for count in (1, 2, 4):
        command = [sys.executable, "-c", program, str(bundles["narrow"]), str(count)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(run.stdout) / 1e6)
    one, two, four = peaks
    assert one < 2.0, peaks
    assert four - two < 2.6 * max(two - one, 0.1), peaks
    assert four < 4.0, peaks
