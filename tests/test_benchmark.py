"""`clef-trt bench`: its requests, its arithmetic, and a whole run on the tiny shape."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN

from clef_trt import Clef, samples
from clef_trt.answer import softmax
from clef_trt.benchmark import present
from clef_trt.benchmark.eager import Eager
from clef_trt.benchmark.floor import linear_parameters
from clef_trt.benchmark.measure import rows, take_turns
from clef_trt.benchmark.models import Model, make_release, read_shape, shapes, text_tools
from clef_trt.benchmark.ours import Ours
from clef_trt.benchmark.profile import operators
from clef_trt.benchmark.spread import ratio, summary
from clef_trt.benchmark.systems import EAGER, OURS, STAGES, Outcome, default_names
from clef_trt.benchmark.workload import Generator, Size, Workload, layout, mix
from clef_trt.cli import main
from clef_trt.errors import SettingError
from clef_trt.request import parse_request

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny release with the tokenizer that is trained for the benchmark."""
    folder = tmp_path_factory.mktemp("tiny") / "release"
    make_release("tiny", folder, seed=0)
    return folder


@pytest.fixture(scope="module", params=["trained", "bytes"])
def generator(request: pytest.FixtureRequest, release: Path) -> Generator:
    """Over the trained vocabulary, and over one of bytes."""
    return Generator(*text_tools(Model("m", release if request.param == "trained" else GOLDEN / "narrow")))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A SystemOne server whose first option is always a little more probable."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answers = {}
            for name, kind, options in layout(body):
                p = {option: round(1 / (len(options) + 1), 4) for option in options}
                p[options[0]] += round(1 / (len(options) + 1), 4)
                noul = {"type": "noul", "noul": 0.6}
                answers[name] = noul if kind == "noul" else {"type": kind, "probabilities": p}
            content = json.dumps({"model": body["model"], "answers": answers, "usage": {}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "size",
    [Size(600), Size(601, batch=3), Size(4096, questions=7, options=9), Size(900, pictures=1, picture_side=256)],
    ids=str,
)
def test_requests_have_exactly_the_tokens_asked_for(size: Size, generator: Generator) -> None:
    workload = generator.synthetic(size, turns=2)
    assert [len(call) for calls in workload.turns for call in calls] == [size.batch] * 2
    bodies = [body for calls in workload.turns for call in calls for body in call]
    assert {generator.tokens(body) for body in bodies} == {size.tokens}
    assert workload.facts["exact"] is True
    assert workload.tokens == size.tokens * size.batch
    assert len({json.dumps(body) for body in bodies}) == len(bodies)  # no turn repeats a request
    for body in bodies:
        assert len(body["questions"]) == workload.facts["questions"]
        assert all(len(question["criteria"]) == workload.facts["options"] for question in body["questions"].values())


def test_requests_are_seeded(generator: Generator) -> None:
    first, again, other = (generator.synthetic(Size(600), turns=2, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.turns != other.turns


def test_many_questions_and_options(release: Path) -> None:
    generator = Generator(*text_tools(Model("m", release)))
    for size in (Size(16384, questions=64, options=4), Size(16384, questions=4, options=255)):
        facts = generator.synthetic(size, turns=1).facts
        assert (facts["questions"], facts["options"], facts["exact"]) == (size.questions, size.options, True)


def test_what_does_not_fit_is_less_and_said(release: Path) -> None:
    generator = Generator(*text_tools(Model("m", release)))
    facts = generator.synthetic(Size(128, questions=64, options=4), turns=1).facts
    assert facts["tokens"] == 128
    assert 1 <= facts["questions"] < 64
    assert facts["asked"] == {"tokens": 128, "questions": 64, "options": 4}
    with pytest.raises(SettingError, match=r"no request of 20 tokens here: the smallest one needs \d+"):
        generator.synthetic(Size(20), turns=1)


def test_the_default_requests_fit_into_128_tokens(release: Path) -> None:
    """With four options, in the trained vocabulary as in the published one."""
    facts = Generator(*text_tools(Model("m", release))).synthetic(Size(128), turns=1).facts
    assert (facts["tokens"], facts["options"]) == (128, 4)


def test_the_mix(generator: Generator) -> None:
    bodies = mix()
    assert len(bodies) == 21
    assert max(len(options) for body in bodies for _, _, options in layout(body)) == 60
    assert {kind for body in bodies for _, kind, _ in layout(body)} == {"noul", "choice", "score"}
    workload = generator.mixed(batch=4, turns=2)
    assert [len(call) for call in workload.turns[0]] == [4, 4, 4, 4, 4, 1]
    assert workload.tokens == sum(generator.tokens(body) for body in bodies)


def test_the_trained_tokenizer_is_the_same_every_time(release: Path, tmp_path: Path) -> None:
    make_release("tiny", tmp_path / "again", seed=0)
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (release / name).read_bytes()


def test_the_linears_of_the_9b_shape_are_those_of_the_published_arithmetic(tmp_path: Path) -> None:
    config, head = read_shape("9b")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "joint_head_config.json").write_text(json.dumps(head))
    assert 2 * linear_parameters(tmp_path) == pytest.approx(13.84e9, rel=1e-3)  # 13.84 GFLOP a token
    assert linear_parameters(tmp_path) < 6_919_565_824  # layers and final norm, as published


def test_the_shapes_are_there() -> None:
    assert sorted(shapes()) == ["0.8b", "27b", "9b"]
    with pytest.raises(SettingError, match=r"expected one of tiny, 0\.8b, 27b, 9b"):
        read_shape("8b")


def test_ratios_turn_by_turn() -> None:
    found = ratio([2.0, 4.0, 40.0], [1.0, 2.0, 10.0])
    assert found["median"] == 2.0
    assert found["low"] == 2.0
    assert found["high"] == 4.0
    assert summary([1.0, 3.0, 2.0]) == {"median_s": 2.0, "p95_s": 2.9, "min_s": 1.0, "max_s": 3.0, "runs": 3}


def test_our_stages_give_the_answers_of_clef(bundles: dict[str, Path]) -> None:
    requests = samples.requests()
    system = Ours("onnxruntime-fp32", bundles["narrow"], "onnxruntime", 1)
    system.open()
    outcome = system.run(requests)
    with Clef.load(bundles["narrow"], threads=1) as clef:
        logits = clef.logits(requests)
        answers = [response["answers"] for response in clef.decide_batch(requests)]
    system.close()
    for body, record, expected, answered in zip(requests, outcome.probabilities, logits, answers, strict=True):
        assert [question.tolist() for question in record] == [softmax(question) for question in expected]
        for (name, kind, options), values in zip(layout(body), record, strict=True):
            told = answered[name]
            p = {"true": told["noul"]} if kind == "noul" else told["probabilities"]
            mine = dict(zip(options, values.tolist(), strict=True))
            assert p == {option: pytest.approx(mine[option], abs=1e-4) for option in p}
    assert set(outcome.stages_s) == {"encode", "vision", "batch", "engine", "answer"}


@pytest.mark.slow
def test_eager_and_ours_agree_on_a_picture(bundles: dict[str, Path]) -> None:
    requests = [samples.ticket(), samples.requests()[-1]]
    assert "images" in requests[1]
    eager = Eager("eager-fp32", GOLDEN / "narrow", "float32", "cpu", 1)
    ours = Ours("onnxruntime-fp32", bundles["narrow"], "onnxruntime", 1)
    found = []
    for system in (eager, ours):
        assert system.open() > 0
        found.append(system.run(requests).probabilities)
        assert system.info()["threads"] == 1
        system.close()
    for one, other in zip(*found, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)


class Fake:
    """A system that takes no time, and fails where it is told to."""

    arithmetic = None

    def __init__(self, name: str, p: float, fails_at: int | None = None) -> None:
        self.name, self._p, self._fails_at, self.calls = name, p, fails_at, 0

    def open(self) -> float:
        return 0.0

    def run(self, bodies: list[dict[str, Any]]) -> Outcome:
        self.calls += 1
        if self.calls == self._fails_at:
            raise MemoryError
        return Outcome([[np.array([self._p, 1 - self._p])] for _ in bodies], {"engine": 0.001})

    def info(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def test_turns_and_rows() -> None:
    facts = {"tokens": 8, "batch": 1, "questions": 1, "options": 2, "pictures": 0, "exact": True, "asked": {}}
    workload = Workload("8", (([{}],), ([{}],), ([{}],)), 8, facts)
    systems = [Fake("url:a", 0.6), Fake("eager-bf16", 0.7), Fake("b", 0.4), Fake("c", 0.5, fails_at=2)]
    taken = take_turns(systems, workload, lambda _: None)
    assert [system.calls for system in systems] == [3, 3, 3, 2]
    a, eager, b, c = rows(workload, taken, {"b": 1e-6})
    assert eager["times_faster"] == {"than": "eager-bf16", "median": 1.0, "low": 1.0, "high": 1.0}
    assert a["times_faster"]["than"] == "eager-bf16"
    assert a["agreement"]["with"] == "eager-bf16"
    assert (a["agreement"]["same_top_option"], a["agreement"]["questions"]) == (1.0, 3)
    assert a["agreement"]["max_probability_difference"] == 0.1
    assert b["agreement"]["same_top_option"] == 0.0
    assert (a["floor_ms"], a["times_floor"]) == (None, None)
    assert b["times_floor"] > 1
    assert b["calls"] == 2
    assert b["stages_ms"] == {name: 1.0 if name == "engine" else None for name in STAGES}
    assert (c["median_ms"], c["reason"]) == (None, "MemoryError")


def test_operators_are_told_apart_by_their_weights_and_loops_by_their_bodies() -> None:
    def event(kind: str, ts: int, dur: int, shapes: list[list[int]], parameters: int = 0) -> dict[str, Any]:
        inputs, output = [{"float": shape} for shape in shapes], [{"float": [4, 16]}]
        arguments = {"op_name": kind, "input_type_shape": inputs, "output_type_shape": output}
        return {"ts": ts, "dur": dur, "args": {**arguments, "parameter_size": str(parameters)}}

    nodes = [
        event("MatMul", 0, 10, [[4, 8]]),  # its weight is packed
        event("MatMul", 10, 30, [[4, 8], [8, 16]]),  # two activations
        event("Scan", 40, 50, [[4, 8]]),
        event("MatMul", 45, 20, [[4, 8], [8, 16]], parameters=512),
    ]
    found = operators(nodes, 1, 100.0, {"onnxruntime-fp32": {"gflops": 0.1024}})
    assert [(row["operator"], row["nodes"], row["ms"]) for row in found] == [
        ("MatMul (linears)", 2, 0.03),
        ("MatMul", 1, 0.03),
        ("Scan", 1, 0.03),
        ("between operators", 0, 0.01),
    ]
    # Two products of 1,024 operations at 0.1024 GFLOP/s are 20 µs.
    assert [row["times_floor"] for row in found] == [1.5, None, None, None]
    assert sum(row["share"] for row in found) == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--systems", "eager-fp16"], "unknown systems ['eager-fp16']; there are eager-fp32"),
        (["--model", "8b"], "expected one of tiny, 0.8b"),
        (["--questions", "65"], "questions is 65; expected 1 to 64"),
        (["--turns", "0"], "turns is 0; expected at least 1"),
        (["--batch", "0"], "batch is 0"),
        (["--api-key", "a=secret"], "--api-key names ['a'], which no --url does"),
        (["--json", "nowhere/at/all.json"], "nowhere/at is no folder"),
    ],
)
def test_what_cannot_be_asked_for(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_key_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--api-key", "secret"])
    assert "secret" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def result(release: Path, server: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A whole run; and the folder it wrote into."""
    folder = tmp_path_factory.mktemp("bench")
    sizes = ["--tokens", "128", "256", "128x2", "--turns", "2", "--threads", "1"]
    outputs = ["--json", str(folder / "run.json"), "--plots", str(folder / "run"), "--work", str(folder / "work")]
    servers = ["--url", f"peer={server}", "--url", "gone=http://127.0.0.1:9"]
    assert main(["bench", "--model", str(release), *sizes, "--mix", "--profile", *servers, *outputs]) == 0
    return json.loads((folder / "run.json").read_text()), folder


@pytest.mark.slow
def test_every_system_has_figures_or_a_reason(result: tuple[dict[str, Any], Path]) -> None:
    found, _ = result
    systems = {system["name"]: system for system in found["systems"]}
    assert list(systems) == [*default_names(), "url:peer", "url:gone"]
    ran = {"eager-fp32", "eager-bf16", "onnxruntime-fp32", "onnxruntime-int8", "url:peer"}
    assert {name for name, system in systems.items() if system["reason"] is None} == ran
    assert "CUDA" in systems["onnxruntime-cuda"]["reason"]
    assert "no bf16 bundle with a plan of tensorrt" in systems["tensorrt-bf16"]["reason"]
    assert "gave no answer" in systems["url:gone"]["reason"]
    assert {row["workload"] for row in found["rows"]} == {"128", "256", "128 × 2", "mix"}
    assert len(found["rows"]) == 4 * len(systems)
    for row in found["rows"]:
        figures = [row[name] for name in ("median_ms", "p95_ms", "tokens_per_s", "times_faster", "agreement")]
        if row["system"] in ran:
            assert row["reason"] is None
            assert None not in figures
            assert row["min_ms"] <= row["median_ms"] <= row["p95_ms"] <= row["max_ms"]
            assert row["times_faster"]["low"] <= row["times_faster"]["median"] <= row["times_faster"]["high"]
        else:
            assert figures == [None] * 5
            assert row["reason"]


@pytest.mark.slow
def test_figures_of_a_run(result: tuple[dict[str, Any], Path]) -> None:
    found, _ = result
    assert found["card"]["asked"]["tokens"] == ["128", "256", "128x2"]
    assert found["card"]["in_effect"]["threads"] == 1
    assert {system["info"]["threads"] for system in found["systems"] if "threads" in (system["info"] or {})} == {1}
    rows = {(row["workload"], row["system"]): row for row in found["rows"]}
    ours = rows["128", "onnxruntime-fp32"]
    assert ours["agreement"]["with"] == "eager-fp32"
    assert ours["agreement"]["same_top_option"] == 1.0
    assert ours["agreement"]["max_probability_difference"] < 1e-4
    assert ours["times_floor"] > 1
    assert ours["peak_mb"] > 20
    assert set(ours["stages_ms"]) == set(STAGES)
    assert ours["stages_ms"]["engine"] <= ours["max_ms"]
    assert ours["stages_ms"]["copy_in"] is None
    assert rows["128", "eager-bf16"]["agreement"]["max_probability_difference"] > 0
    assert rows["128", "url:peer"]["stages_ms"] == dict.fromkeys(STAGES)
    assert (rows["mix", "onnxruntime-int8"]["calls"], rows["128 × 2", "url:peer"]["batch"]) == (42, 2)
    for system in found["systems"]:
        if system["name"].startswith(("eager", "onnxruntime")) and system["reason"] is None:
            own = system["own_process"]
            assert own["reason"] is None
            assert 0 < own["first_decision_s"] < own["cold_start_s"]
            assert 0 < own["opened_mb"] <= own["peak_mb"]["128"] <= own["peak_mb"]["256"]
    assert all(peak["gflops"] > 0 for peak in found["peaks"].values())
    profiled = {entry["system"]: entry for entry in found["profile"] if entry["workload"] in ("128", None)}
    assert "needs a card" in profiled["tensorrt-bf16"]["reason"]
    kinds = {row["operator"]: row for row in profiled["onnxruntime-fp32"]["operators"]}
    assert kinds["MatMul (linears)"]["times_floor"] > 1
    assert sum(row["share"] for row in kinds.values()) == pytest.approx(1, abs=0.01)
    for precision in ("fp32", "int8"):
        entry = profiled[f"onnxruntime-{precision}"]
        assert 0.5 * entry["turn_ms"] < entry["backbone_ms"] < entry["turn_ms"]


@pytest.mark.slow
def test_pictures_text_and_page(result: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    found, folder = result
    drawn = {"latency.png", "latency.svg", "throughput.png", "throughput.svg", "stages.png", "stages.svg"}
    assert {path.name for path in (folder / "run").iterdir()} == drawn
    told = present.text(found)
    for name in (*default_names(), "url:peer", "same top as eager-fp32", "faster than eager-fp32", "not measured:"):
        assert name in told
    assert str(folder) not in json.dumps(found)

    other = tmp_path / "other.json"
    other.write_text(json.dumps({"card": {"what": "something else"}, "rows": []}))
    script = [sys.executable, str(ROOT / "bench" / "report.py"), "--page", str(tmp_path / "page.md")]
    subprocess.run([*script, "--json", str(folder / "run.json"), str(other)], check=True)
    page = (tmp_path / "page.md").read_text()
    assert "(run/latency.svg)" in page
    assert "- [other.json](other.json): something else" in page
    assert "| onnxruntime-int8 |" in page
    assert "tensorrt-bf16: there is no bf16 bundle" in page


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="eager needs torch")
def test_a_bundle_alone_with_pictures(bundles: dict[str, Path], tmp_path: Path) -> None:
    """Without a release there is no eager code and no floor; and the ratio is against the first system."""
    outputs = ["--json", str(tmp_path / "run.json"), "--no-fresh"]
    sizes = ["--tokens", "800", "--pictures", "1", "--picture-side", "256", "--turns", "1", "--threads", "1"]
    systems = ["--systems", "eager-fp32", "onnxruntime-fp32"]
    assert main(["bench", "--bundle", str(bundles["narrow"]), *sizes, *systems, *outputs]) == 0
    eager, ours = json.loads((tmp_path / "run.json").read_text())["rows"]
    assert "no release" in eager["reason"]
    assert ours["times_faster"] == {"than": "onnxruntime-fp32", "median": 1.0, "low": 1.0, "high": 1.0}
    assert (ours["times_floor"], ours["peak_mb"]) == (None, None)
    assert ours["stages_ms"]["vision"] > 0


def test_names() -> None:
    assert len({*EAGER, *OURS}) == len(EAGER) + len(OURS)
    assert parse_request(mix()[0]).model == "clef-flash"
