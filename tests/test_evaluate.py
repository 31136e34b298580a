"""eval: labelled requests through a bundle, a stub and a server; interruption, faults, memory."""

from __future__ import annotations

import json
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN

from clef_trt import Clef, EngineError, MissingExtraError, RequestError, SettingError, samples
from clef_trt.bundle import CONTROL_TOKENS, FORMAT_VERSION, Manifest, ModelRecord, SourceRecord, WeightsRecord
from clef_trt.cli import main
from clef_trt.encode import Encoder
from clef_trt.evaluate import Target, evaluate, plot, table
from clef_trt.fake import FakeEngine
from clef_trt.labelled import MOST_QUESTIONS, Outcome, judge, read, survey
from clef_trt.remote import Remote

NOUL = {"type": "noul", "instructions": "Is it open?"}
CHOICE = {"type": "choice", "criteria": {"red": None, "green": None, "blue": None}}
SCORE = {"type": "score", "criteria": ["none", "some", "much"]}
QUESTIONS = {"open": NOUL, "colour": CHOICE, "amount": SCORE}
LABELS = {"open": True, "colour": "green", "amount": 2}


def line(labels: dict[str, Any] = LABELS, state: Any = 0, questions: dict[str, Any] = QUESTIONS) -> dict[str, Any]:
    return {"request": {"model": "m", "state": state, "questions": questions}, "answers": labels}


def write(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text("".join(text if isinstance(text, str) else json.dumps(text) + "\n" for text in lines))
    return path


def stub_answer(question: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    if question["type"] == "noul":
        return {"type": "noul", "noul": round(float(random.random()), 4)}
    names = (
        list(question["criteria"]) if question["type"] == "choice" else list("0123456789"[: len(question["criteria"])])
    )
    p = dict(zip(names, random.dirichlet(np.ones(len(names))).round(4).tolist(), strict=True))
    if question["type"] == "choice":
        return {"type": "choice", "choice": max(p, key=p.__getitem__), "confidence": 0, "probabilities": p}
    return {
        "type": "score",
        "score": sum(int(level) * q for level, q in p.items()),
        "confidence": 0,
        "probabilities": p,
    }


def stub_response(request: dict[str, Any]) -> dict[str, Any]:
    """Answers that depend on the state alone."""
    random = np.random.default_rng(request["state"])
    return {"answers": {name: stub_answer(question, random) for name, question in request["questions"].items()}}


class Stub:
    """A target; the batch of number `fail_at` raises."""

    def __init__(self, fail_at: int = -1) -> None:
        self.batches: list[list[int]] = []  # states
        self._fail_at = fail_at

    def target(self, sha256: str = "f" * 64) -> Target:
        return Target("stub", sha256, self.decide_batch)

    def decide_batch(self, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        if len(self.batches) == self._fail_at:
            raise KeyboardInterrupt
        self.batches.append([request["state"] for request in requests])
        return [stub_response(request) for request in requests]


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    lines: list[Any] = []
    for state in range(50):
        labels = {"open": bool(random.random() < 0.5), "colour": "red", "amount": int(random.integers(3))}
        lines.append(line(dict(list(labels.items())[: state % 4]), state))  # every fourth has none
    return write(tmp_path / "labelled.jsonl", [*lines[:20], "\n", *lines[20:]])


def test_what_an_answer_is_worth(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", [line()])
    answers = {
        "open": {"type": "noul", "noul": 0.4764},
        "colour": {"type": "choice", "choice": "green", "probabilities": {"red": 0.4, "green": 0.4, "blue": 0.2}},
        "amount": {"type": "score", "score": 0.8, "probabilities": {"0": 0.5, "1": 0.2, "2": 0.3}},
    }
    found = judge(next(read(path)), {"answers": answers})
    assert found == [
        Outcome("open", "noul", "true", "false", 0.5236, pytest.approx(2 * 0.5236**2), None),
        Outcome("colour", "choice", "green", "green", 0.4, pytest.approx(0.16 + 0.36 + 0.04), None),
        Outcome("amount", "score", "2", "0", 0.5, pytest.approx(0.25 + 0.04 + 0.49), pytest.approx(1.2)),
    ]


def test_golden_responses_are_judged(tmp_path: Path) -> None:
    cases = [case for case in json.loads((GOLDEN / "odd.json").read_text()) if "response" in case]
    lines = []
    for case in cases:
        right = {}
        for name, answer in case["response"]["answers"].items():
            levels = answer.get("probabilities", {})
            right[name] = {
                "noul": answer.get("noul", 0) >= 0.5,
                "choice": answer.get("choice"),
                "score": int(max(levels, key=levels.__getitem__)) if answer["type"] == "score" else 0,
            }[answer["type"]]
        lines.append({"request": case["request"], "answers": right})
    path = write(tmp_path / "l.jsonl", lines)
    outcomes = [o for one, case in zip(read(path), cases, strict=True) for o in judge(one, case["response"])]
    assert len(outcomes) > 50
    assert all(outcome.label == outcome.predicted for outcome in outcomes)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (None, "line 1, question 'open': the target's answer null is none to a noul"),
        ([], "answer null is none to a noul"),
        ({"open": {"type": "choice"}}, 'answer {"type": "choice"} is none to a noul'),
        ({"open": {"type": "noul", "noul": float("nan")}}, "has nan in noul; expected a number from 0 to 1"),
        ({"open": {"type": "noul", "noul": True}}, "has true in noul"),
        ({"open": {"type": "noul", "noul": 1.1}}, "has 1.1 in noul"),
    ],
)
def test_an_unusable_answer_is_an_error(answers: Any, said: str, tmp_path: Path) -> None:
    one = next(read(write(tmp_path / "l.jsonl", [line({"open": True})])))
    with pytest.raises(EngineError) as error:
        judge(one, {"answers": answers})
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"choice": "red", "probabilities": {"red": 1}}, "has no probability for each of red, green, blue, or others"),
        ({"choice": "pink", "probabilities": {"red": 1, "green": 0, "blue": 0}}, 'chooses "pink"; expected one of red'),
        ({"choice": [1], "probabilities": {"red": 1, "green": 0, "blue": 0}}, "chooses [1]"),
        ({"choice": "red", "probabilities": {"red": "1", "green": 0, "blue": 0}}, 'has "1" in probabilities'),
    ],
)
def test_an_unusable_choice_is_an_error(answer: Any, said: str, tmp_path: Path) -> None:
    one = next(read(write(tmp_path / "l.jsonl", [line({"colour": "red"})])))
    with pytest.raises(EngineError) as error:
        judge(one, {"answers": {"colour": {"type": "choice"} | answer}})
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{\n", "line 2: the line is not JSON in UTF-8"),
        ("[]\n", 'line 2: is []; expected {"request": …, "answers": …}'),
        ({"request": {}, "answer": {}}, "line 2: is an object with the keys request, answer; expected"),
        ({"request": {}, "answers": {}}, "line 2.request: is no request body"),
        (line([]), "line 2.answers: is []; expected an object"),
        (line({"shut": True}), "line 2.answers.shut: is no question of this request; its questions are open, colour"),
        (line({"open": 1}), "line 2.answers.open: is 1; expected true or false"),
        (line({"open": None}), "line 2.answers.open: is null; expected true or false"),
        (line({"colour": "pink"}), 'line 2.answers.colour: is "pink"; expected one of the options red, green, blue'),
        (line({"colour": 0}), "line 2.answers.colour: is 0; expected one of the options"),
        (line({"amount": 3}), "line 2.answers.amount: is 3; expected the number of a level, 0 to 2"),
        (line({"amount": True}), "line 2.answers.amount: is true; expected the number of a level"),
        (line({"amount": 1.0}), "line 2.answers.amount: is 1.0; expected the number of a level"),
        (line({"q": 0}, questions={"q": {"type": "rank"}}), "line 2.answers.q: is of a question with no type of noul"),
        (line({"q": 0}, questions={"q": 3}), "line 2.answers.q: is of a question with no type of noul"),
    ],
)
def test_wrong_lines_are_named_before_anything_runs(text: Any, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", [line(), text, line({"colour": "mauve"})])
    with pytest.raises(RequestError) as error:
        survey(path)
    assert said in str(error.value)
    assert "line 3.answers.colour" in str(error.value)


def test_a_file_without_labels_or_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="nothing to evaluate"):
        survey(write(tmp_path / "l.jsonl", [line({})]))
    with pytest.raises(RequestError, match=r"nothing\.jsonl cannot be read: No such file"):
        survey(tmp_path / "nothing.jsonl")


def test_a_report(labelled: Path) -> None:
    stub = Stub()
    found = evaluate(stub.target(), survey(labelled), batch=8, bootstrap=50)
    assert [len(batch) for batch in stub.batches] == [6, 6, 6, 6, 6, 6, 1]
    assert found["labelled"]["requests"] == 50
    assert found["labelled"]["requests_without_a_label"] == 13
    assert found["all"]["answers"] == 73
    assert {name: group["answers"] for name, group in found["types"].items()} == {"noul": 37, "choice": 24, "score": 12}
    assert list(found["questions"]) == ["open", "colour", "amount"]
    assert found["questions"]["open"] == found["types"]["noul"]  # the same answers under one name
    right = sum(
        outcome.label == outcome.predicted
        for one in read(labelled)
        for outcome in judge(one, stub_response(one.request))
    )
    assert found["all"]["accuracy"]["value"] == pytest.approx(right / 73)
    printed = table(found)
    assert "13 requests have no label" in printed
    assert f"{right / 73:.3f} (" in printed
    assert len({len(row) for row in printed.splitlines()[:1]}) == 1
    plain = evaluate(Stub().target(), survey(labelled), bootstrap=0)
    assert plain["all"]["accuracy"] == {"value": pytest.approx(right / 73), "interval": None}
    assert "(" not in table(plain).splitlines()[1]


@pytest.mark.parametrize("fail_at", [0, 1, 4])
@pytest.mark.parametrize("half_a_line", [b"", b'[[0,["op'])
def test_interrupted_and_gone_on_the_report_is_the_same(
    fail_at: int, half_a_line: bytes, labelled: Path, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole.json", tmp_path / "resumed.json"
    evaluate(Stub().target(), survey(labelled), whole, batch=8, bootstrap=20)
    interrupted = Stub(fail_at)
    with pytest.raises(KeyboardInterrupt):
        evaluate(interrupted.target(), survey(labelled), resumed, batch=8, bootstrap=20)
    assert not resumed.exists()
    partial = tmp_path / "resumed.json.partial"
    with partial.open("ab") as file:
        file.write(half_a_line)
    told: list[str] = []
    rest = Stub()
    evaluate(rest.target(), survey(labelled), resumed, batch=8, bootstrap=20, progress=told.append)
    assert len(interrupted.batches) + len(rest.batches) == 7
    assert whole.read_bytes() == resumed.read_bytes()
    assert (f"going on after {8 * fail_at} of 50 requests" in told) == (fail_at > 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labelled.jsonl", "resumed.json", "whole.json"]


def test_going_on_with_another_batch_size(labelled: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        evaluate(Stub(2).target(), survey(labelled), tmp_path / "r.json", batch=8, bootstrap=0)
    found = evaluate(Stub().target(), survey(labelled), tmp_path / "r.json", batch=5, bootstrap=0)
    assert found == evaluate(Stub().target(), survey(labelled), bootstrap=0)


def test_a_partial_file_of_something_else_is_refused_and_kept(labelled: Path, tmp_path: Path) -> None:
    report, partial = tmp_path / "r.json", tmp_path / "r.json.partial"
    with pytest.raises(KeyboardInterrupt):
        evaluate(Stub(2).target(), survey(labelled), report)
    content = partial.read_bytes()
    with pytest.raises(SettingError, match=r"r\.json\.partial was begun with another target.* f{64}, now it is 0{64}"):
        evaluate(Stub().target("0" * 64), survey(labelled), report)
    other = write(tmp_path / "other.jsonl", [line()])
    with pytest.raises(SettingError, match="was begun with other requests: its labelled_sha256"):
        evaluate(Stub().target(), survey(other), report)
    assert partial.read_bytes() == content
    for wrong, said in (
        (b"my diary", "is no partial report"),
        (b"[]\n", "is no partial report"),
        (content.replace(b'"format_version": 1', b'"format_version": 2'), "is no partial report of this version"),
        (content + b"[[0,[1]]]\n", "holds a line that is none of this run"),
        (content + content.splitlines(True)[1] * 9, "holds a line that is none of this run"),
        (content + b"[" + b"[0]," * 50 + b"[0]]\n", "holds 83 requests of 50"),
    ):
        partial.write_bytes(wrong)
        with pytest.raises(SettingError, match=said):
            evaluate(Stub().target(), survey(labelled), report)
        assert partial.read_bytes() == wrong


def test_half_a_first_line_begins_again(labelled: Path, tmp_path: Path) -> None:
    (tmp_path / "r.json.partial").write_bytes(b'{"format_version": 1, "targ')
    assert evaluate(Stub().target(), survey(labelled), tmp_path / "r.json", bootstrap=0)["all"]["answers"] == 73


def test_an_existing_report_is_kept(labelled: Path, tmp_path: Path) -> None:
    report = write(tmp_path / "r.json", ["mine"])
    for path in (report, tmp_path / "no" / "r.json"):
        with pytest.raises(SettingError, match="exists already, or its folder does not"):
            evaluate(Stub().target(), survey(labelled), path)
    assert report.read_text() == "mine"


def test_a_file_that_changes_is_noticed(labelled: Path) -> None:
    before = survey(labelled)
    with labelled.open("a") as file:
        file.write(json.dumps(line()) + "\n")
    with pytest.raises(RequestError, match="is not what it was"):
        evaluate(Stub().target(), before)
    write(labelled, [line()])
    with pytest.raises(RequestError, match="is not what it was"):
        evaluate(Stub().target(), before)


def test_generated_question_ids_do_not_swell_the_report(tmp_path: Path) -> None:
    often = [f"often {i}" for i in range(MOST_QUESTIONS)]
    lines = []
    for state in range(200):
        names = [f"once {state}", often[state % 100]]
        lines.append(line(dict.fromkeys(names, True), state, dict.fromkeys(names, NOUL)))
    found = evaluate(Stub().target(), survey(write(tmp_path / "l.jsonl", lines)), bootstrap=2)
    assert list(found["questions"]) == often  # each twice
    assert found["questions_left_out"] == 200
    assert found["all"]["answers"] == 400
    assert "200 other question ids are left out" in table(found)


def test_memory_stays_flat(tmp_path: Path) -> None:
    """20,000 requests of 1 kB, 40,000 answers: a few bytes each, and never many requests."""
    path = tmp_path / "l.jsonl"
    with path.open("w") as file:
        for _ in range(20_000):
            questions = {"open": NOUL, "colour": CHOICE}
            file.write(json.dumps(line({"open": True, "colour": "red"}, "x" * 1000, questions)) + "\n")
    response = {
        "answers": {
            "open": {"type": "noul", "noul": 0.75},
            "colour": {"type": "choice", "choice": "red", "probabilities": {"red": 0.5, "green": 0.25, "blue": 0.25}},
        }
    }
    target = Target("stub", "0" * 64, lambda requests: [response] * len(requests))
    tracemalloc.start()
    try:
        found = evaluate(target, survey(path), tmp_path / "r.json", bootstrap=3)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found["all"]["answers"] == 40_000
    assert path.stat().st_size > 20e6
    assert peak_bytes < 200 * 40_000 + 2**20


# A bundle


def fake_clef(engine: FakeEngine, **settings: Any) -> Clef:
    sizes = {"hidden": 96, "patch_values": 12}
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        precision="fp32",
        source=SourceRecord("fake", "0" * 64),
        weights=WeightsRecord(".", {}, 0, 0),
        model=ModelRecord(sizes, 262144, 4, 1, 1, 1, 256, dict.fromkeys(CONTROL_TOKENS, 0)),
        graphs={},
        files={},
        tools={},
    )
    return Clef(manifest, Encoder(GOLDEN / "odd" / "tokenizer.json"), engine, **settings)


def test_a_clef_is_decided_in_batches(labelled: Path) -> None:
    engine = FakeEngine(96)
    clef = fake_clef(engine)
    found = evaluate(Target("fake", "0" * 64, clef.decide_batch), survey(labelled), batch=10, bootstrap=0)
    assert found["all"]["answers"] == 73
    assert max(batch for batch, _ in engine.passes) > 1
    outcomes = [o for one in read(labelled) if one.labels for o in judge(one, clef.decide(one.request))]
    assert found["all"]["brier"]["value"] == pytest.approx(np.mean([outcome.brier for outcome in outcomes]))


def test_states_that_are_cut_are_counted_and_refusals_name_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", [line(), "\n", line(state="long " * 2000), line(state="long " * 3000)])
    cut = fake_clef(FakeEngine(96), max_length=2000)
    found = evaluate(Target("fake", "0" * 64, cut.decide_batch), survey(path), bootstrap=0)
    assert found["labelled"]["requests_cut_to_fit"] == 2
    assert "2 requests had a state that was cut to fit" in table(found)
    refuses = fake_clef(FakeEngine(96), max_length=2000, truncation="refuse")
    for batch in (1, 16):
        with pytest.raises(RequestError, match=r"^line 3") as error:
            evaluate(Target("fake", "0" * 64, refuses.decide_batch), survey(path), batch=batch)
        assert ("line 4" in str(error.value)) == (batch > 1)


def test_engine_faults_name_the_lines(labelled: Path) -> None:
    broken = fake_clef(FakeEngine(96, lambda inputs: {"logits": np.full(inputs["option_questions"].shape, np.nan)}))
    with pytest.raises(EngineError, match="lines 1 to 16: the engine returned logits that are not finite"):
        evaluate(Target("fake", "0" * 64, broken.decide_batch), survey(labelled))
    with pytest.raises(EngineError, match="lines 1 to 16: 0 responses to 12 requests"):
        evaluate(Target("none", "0" * 64, lambda requests: []), survey(labelled))


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main(["eval", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_on_a_bundle(bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "l.jsonl", [line(state=state) for state in range(4)])
    arguments = (bundles["odd"], path, "--bootstrap", 10, "--engine", "onnxruntime", "--report", tmp_path / "r.json")
    status, out, err = run(capsys, *arguments)
    assert status == 0, err
    assert "4 requests, 12 labelled answers" in err
    assert "4 of 4 requests" in err
    assert out.splitlines()[1].startswith("all")
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["target"]["engine"] == "onnxruntime"
    assert report["types"]["score"]["level_error"] in (0, 1, 2)
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert "exists already" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--batch", 0), "--batch is 0; expected at least 1"),
        (("--bootstrap", -1), "--bootstrap is -1"),
        (("--seed", -1), "--seed is -1"),
        (("--wanted-precision", 0), "--wanted-precision is 0.0"),
        (("--wanted-precision", "nan"), "--wanted-precision is nan"),
        (("--plot", "plot.gif"), "expected a name in .png or .svg"),
        (("--report", "no/such/folder.json"), "or its folder does not"),
        (("--api-key", "k"), "--api-key: of a server, but nothing is a bundle"),
        ((), "nothing does not exist"),
    ],
)
def test_wrong_options(
    arguments: tuple[Any, ...], said: str, labelled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "nothing", labelled, *arguments)
    assert status == 2
    assert said in err


def test_a_request_that_the_bundle_would_refuse_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = line()
    wrong["request"]["questions"] = QUESTIONS | {"more": {"type": "noul", "criteria": []}}
    status, _, err = run(capsys, "nothing", write(tmp_path / "l.jsonl", [line(), wrong]))
    assert status == 2
    assert "line 2.questions.more.criteria" in err


def test_options_of_a_bundle_are_refused_for_a_server(labelled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "http://127.0.0.1:1", labelled, "--engine", "auto", "--max-length", 5)
    assert status == 2
    assert "--engine, --max-length: of a bundle, but http://127.0.0.1:1 is a server" in err


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot(suffix: str, labelled: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="extra: bench")
    target = Target("$a_{target$", "0" * 64, Stub().decide_batch)
    plot(evaluate(target, survey(labelled), bootstrap=0), tmp_path / f"plot{suffix}")
    content = (tmp_path / f"plot{suffix}").read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")


def test_plot_without_matplotlib_says_what_to_install(
    labelled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    status, _, err = run(capsys, "nothing", labelled, "--plot", "plot.png")
    assert status == 2
    assert "pip install 'clef-trt[bench]'" in err
    with pytest.raises(MissingExtraError):
        plot({}, Path("plot.png"))


# A server

Reply = Callable[[int, dict[str, str], dict[str, Any]], tuple[int, dict[str, str], Any]]


class Server:
    """A SystemOne server of one function: (number of the request, its headers, its body) → status, headers, body."""

    def __init__(self) -> None:
        self.reply: Reply = lambda number, headers, body: (200, {}, stub_response(body))
        self.seen: list[tuple[str, dict[str, str]]] = []
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                headers = {name.lower(): value for name, value in self.headers.items()}
                with lock:
                    outer.seen.append((self.path, headers))
                    number = len(outer.seen)
                status, extra, answer = outer.reply(number, headers, body)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in extra.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                pass

        class Patient(ThreadingHTTPServer):
            request_queue_size = 64  # connections beyond it are tried again after a second

        self._server = Patient(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = Server()
    yield made
    made.close()


def remote(server: Server, **settings: Any) -> Remote:
    return Remote(server.url, sleep=lambda _: None, **settings)


def test_the_command_on_a_server(server: Server, labelled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = labelled.parent / "r.json"
    arguments = ("--bootstrap", 10, "--api-key", "secret", "--report", report)
    status, out, err = run(capsys, f"{server.url}/", labelled, *arguments)
    assert status == 0, err
    assert {path for path, _ in server.seen} == {"/v1/systemone"}
    assert {headers["authorization"] for _, headers in server.seen} == {"Bearer secret"}
    assert len(server.seen) == 37
    found, expected = json.loads(report.read_text()), evaluate(Stub().target(), survey(labelled), bootstrap=10)
    assert found["target"]["name"] == f"{server.url}/v1/systemone"
    assert {**found, "target": 0} == {**expected, "target": 0}
    assert "secret" not in report.read_text() + out + err


def test_a_full_server_is_asked_again_when_it_says(server: Server) -> None:
    waits: list[float] = []
    headers = {
        1: {"Retry-After": "7"},
        2: {},
        3: {"Retry-After": "1e9"},
        4: {"Retry-After": formatdate(0, usegmt=True)},
    }
    server.reply = lambda number, _, body: (
        (429 if number % 2 else 503, headers[number], "full") if number < 5 else (200, {}, stub_response(body))
    )
    request = line()["request"]
    assert Remote(server.url, sleep=waits.append).decide(request) == stub_response(request)
    assert waits == [7, 2, 60, 0]


@pytest.mark.parametrize(
    ("status", "headers", "body", "error", "said"),
    [
        (429, {}, b"full up", EngineError, "answered 429 Too Many Requests after 2 tries: full up"),
        (500, {}, b"", EngineError, "answered 500 Internal Server Error: (nothing more was said)"),
        (404, {}, {"detail": "no model m"}, EngineError, "answered 404 Not Found: no model m"),
        (401, {}, {"error": "who?"}, SettingError, "who?; the server wants another key (--api-key KEY)"),
        (302, {"Location": "https://elsewhere/x"}, b"", SettingError, "points to https://elsewhere/x; name that URL"),
        (413, {}, {"detail": [{"loc": [], "msg": "too long"}]}, RequestError, "answered 413"),
        (400, {}, b"", RequestError, "answered 400 Bad Request: (nothing more was said)"),
        (422, {}, b"\x1b[31m" + b"x" * 999, RequestError, "answered 422"),
        (200, {}, b"<html>", EngineError, "answered '<html>'; expected a JSON object with answers"),
        (200, {}, [1], EngineError, "answered '[1]'; expected a JSON object"),
    ],
)
def test_refusals(
    status: int, headers: dict[str, str], body: Any, error: type[Exception], said: str, server: Server
) -> None:
    server.reply = lambda *_: (status, headers, body)
    with pytest.raises(error) as found:
        remote(server, tries=2).decide(line()["request"])
    assert said in str(found.value)
    assert "\x1b" not in str(found.value)
    assert len(str(found.value)) < 500
    assert len(server.seen) == (2 if status == 429 else 1)


def test_a_refused_request_names_its_line(server: Server, tmp_path: Path) -> None:
    detail = [{"loc": ["body", "state"], "msg": "is too\nlong", "type": "t"}]
    server.reply = lambda number, _, body: (
        (422, {}, {"detail": detail}) if body["state"] in (1, 3) else (200, {}, stub_response(body))
    )
    path = write(tmp_path / "l.jsonl", [line(state=state) for state in range(5)])
    target = Target("server", "0" * 64, remote(server, in_flight=4).decide_batch)
    with pytest.raises(RequestError) as error:
        evaluate(target, survey(path))
    places = [line.split(": ")[0] for line in str(error.value).splitlines()]
    assert places == ["line 2.body.state", "line 4.body.state"]
    assert "answered 422" in str(error.value)
    assert "is too·long" in str(error.value)


def test_requests_are_in_flight_together_and_keep_their_order(server: Server) -> None:
    together = threading.Barrier(4, timeout=10)

    def reply(_: int, __: dict[str, str], body: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        together.wait()
        return 200, {}, stub_response(body)

    server.reply = reply
    requests = [line(state=state)["request"] for state in range(4)]
    client = remote(server, in_flight=4)
    assert client.decide_batch(requests) == [stub_response(request) for request in requests]
    client.close()


def test_closing_ends_the_wait_for_a_full_server(server: Server) -> None:
    server.reply = lambda *_: (503, {"Retry-After": "60"}, "loading")
    client = Remote(server.url)
    threading.Timer(0.2, client.close).start()
    with pytest.raises(EngineError, match="was closed before it was asked again"):
        client.decide(line()["request"])


def test_a_server_that_is_not_there(server: Server) -> None:
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:1/v1/systemone gave no answer: .*refused"):
        Remote("http://127.0.0.1:1").decide(line()["request"])


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://", "is no URL of a server; expected https://HOST"),
        ("https://user:word@host", "is no URL of a server"),
        ("https://host?key=1", "is no URL of a server"),
        ("http://host:many", "is no URL"),
        ("http://[::1", "is no URL"),
        ("http://host/a b", "characters that no URL may"),
    ],
)
def test_wrong_urls(url: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        Remote(url)


def test_urls_and_keys() -> None:
    for base in ("http://h:1/a", "http://h:1/a/", "http://h:1/a/v1/systemone"):
        assert Remote(base).url == "http://h:1/a/v1/systemone"
    for key in ("", "a\nb", "ä"):
        with pytest.raises(SettingError, match="no header can carry"):
            Remote("http://h", key)


def test_what_is_no_json_is_not_sent() -> None:
    with pytest.raises(RequestError, match="cannot be sent as JSON"):
        Remote("http://127.0.0.1:1").decide({"state": float("nan")})


def test_the_sample_requests_can_be_labelled(tmp_path: Path) -> None:
    request = samples.ticket()
    name = next(name for name, question in request["questions"].items() if question["type"] == "noul")
    assert survey(write(tmp_path / "l.jsonl", [{"request": request, "answers": {name: True}}])).answers == 1
