"""The commands as a person types them."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from conftest import GOLDEN

from clef_trt import samples
from clef_trt.cli import main
from clef_trt.table import table


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_decide_from_a_file_and_from_standard_input(
    bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = json.loads((GOLDEN / "odd.json").read_text())[0]
    (tmp_path / "ticket.json").write_text(json.dumps(case["request"]))
    status, out, _ = run(capsys, "decide", bundles["odd"], tmp_path / "ticket.json")
    assert status == 0
    assert json.loads(out)["answers"]["team"]["choice"] == case["response"]["answers"]["team"]["choice"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(case["request"]).encode())))
    assert run(capsys, "decide", bundles["odd"], "-")[1] == out
    status, out, _ = run(capsys, "decide", bundles["odd"], tmp_path / "ticket.json", "--table", "--confidence", "jev")
    assert status == 0
    assert "team: " in out
    assert "→" in out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not JSON in UTF-8"),
        (b"[]", "expected an object"),
        (b'{"model": "m", "state": 1, "state": 2, "questions": {}}', "the key 'state' is there twice"),
        (b'{"model": "m", "state": 1, "questions": {"q": {"type": "rank"}}}', "questions.q.type: is 'rank'"),
    ],
)
def test_a_wrong_request_is_an_error_on_standard_error(
    content: bytes, said: str, bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.json").write_bytes(content)
    status, out, err = run(capsys, "decide", bundles["odd"], tmp_path / "r.json")
    assert (status, out) == (2, "")
    assert said in err


def test_missing_files_are_named(bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "decide", bundles["odd"], tmp_path / "nothing.json")
    assert status == 2
    assert "nothing.json cannot be read" in err
    status, _, err = run(capsys, "info", tmp_path / "nothing")
    assert status == 2
    assert "does not exist" in err


def test_info(bundles: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "info", bundles["narrow"])
    assert status == 0
    for part in ("narrow", "fp32", "3,779,956", "262,144 tokens", "onnxruntime"):
        assert part in out


def test_verify_passes_and_is_a_gate(
    bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "verify", bundles["odd"], "--reference", GOLDEN / "odd", "--files")
    assert status == 0
    assert "same top option 100.00%" in out
    assert "every file has its recorded SHA-256" in out
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps(samples.ticket()) + "\n\n")
    arguments = ("verify", bundles["odd"], "--requests", requests, "--reference")
    assert run(capsys, *arguments, GOLDEN / "odd")[0] == 0
    status, _, err = run(capsys, *arguments, GOLDEN / "odd", "--max-logit-difference", "1e-12")
    assert status == 1
    assert "allowed up to 1e-12" in err
    status, _, err = run(capsys, *arguments, GOLDEN / "narrow")
    assert status == 1
    assert "not the checkpoint" in err
    status, _, err = run(capsys, "verify", bundles["odd"])
    assert status == 2
    assert "nothing to verify" in err


def test_verify_notices_other_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A graph that reads another tensor in place of its own has the right files and the wrong logits."""
    shutil.copytree(GOLDEN / "odd", tmp_path / "release")
    assert run(capsys, "export", tmp_path / "release", tmp_path / "bundle")[0] == 0
    graph = (tmp_path / "bundle" / "text.onnx").read_bytes()
    import onnx
    from clef_export.write import file_records

    from clef_trt.bundle import read_manifest

    model = onnx.load_from_string(graph)
    norms = [t for t in model.graph.initializer if t.name.endswith("layernorm.weight")]
    norms[0].external_data[1].value, norms[3].external_data[1].value = (
        norms[3].external_data[1].value,
        norms[0].external_data[1].value,
    )
    (tmp_path / "bundle" / "text.onnx").write_bytes(model.SerializeToString())
    manifest = read_manifest(tmp_path / "bundle")
    manifest.files.update(file_records(tmp_path / "bundle", ["text.onnx"]))
    (tmp_path / "bundle" / "manifest.json").write_text(manifest.to_json())
    requests = tmp_path / "requests.jsonl"
    requests.write_text(json.dumps(samples.ticket()))
    arguments = ("verify", tmp_path / "bundle", "--requests", requests, "--reference", tmp_path / "release")
    status, _, err = run(capsys, *arguments)
    assert status == 1
    assert "verification failed" in err


def test_ranges_of_the_sample_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "ranges", GOLDEN / "odd", "-", tmp_path / "ranges.json")
    assert status == 0
    assert "16 activations over" in out
    assert (tmp_path / "ranges.json").exists()


def test_demo_prints_decisions_with_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "demo")
    assert status == 0
    for part in ("refund_asked: ", "team: ", "urgency: ", "4 decisions over", " ms (onnxruntime", "mean nothing"):
        assert part in out


def test_table_marks_the_decision_and_shows_no_control_characters() -> None:
    response = {
        "answers": {
            "pick": {
                "type": "choice",
                "choice": "a\x1b[31m",
                "confidence": 0.75,
                "probabilities": {"b" * 60: 0.25, "a\x1b[31m": 0.75},
            },
            "open": {"type": "noul", "noul": 0.2},
        }
    }
    lines = table(response).splitlines()
    assert lines[0] == "pick: a·[31m"
    assert lines[2].startswith("  → a·[31m ")
    assert "75.0%" in lines[2]
    assert len(lines[1]) < 80
    assert lines[3:] == ["open: no", "    yes   20.0%  █████", "  → no    80.0%  ███████████████████"]
