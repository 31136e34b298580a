"""`bench/device.py` as far as it runs without a card: its parts on the tiny shape, its time, and what it tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "bench"))

import device  # noqa: E402
import device_ceilings  # noqa: E402
import device_passes  # noqa: E402
from device_parts import Task, Told, figures, run  # noqa: E402

from clef_trt.benchmark import models  # noqa: E402
from clef_trt.benchmark.floor import linear_parameters  # noqa: E402


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Few repeats; the settings of torch that a part changes are put back."""
    monkeypatch.setattr(device_ceilings, "LEAST_S", {"cpu": 0.0})
    monkeypatch.setattr(device_passes, "PIECE_S", 0.0)
    monkeypatch.setattr(device_passes, "TURNS", 3)
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.set_num_threads(before[1])
    torch.compiler.reset()


def lines_of(task: Task, seconds: float = 100.0) -> list[tuple[str, dict[str, Any]]]:
    """What a part tells, in this process; as it would be read from its file."""
    lines: list[tuple[str, dict[str, Any]]] = []
    run(task, Told(lambda section, row: lines.append((section, json.loads(json.dumps(row)))), seconds))
    return lines


def result_of(*parts: str, cases: tuple[tuple[int, int], ...] = ((96, 1),), seconds: float = 100.0) -> dict[str, Any]:
    """The result of parts run in this process."""
    result: dict[str, Any] = {"card": {}, "parts": []} | {name: [] for name in device.SECTIONS}
    for part in parts:
        lines = lines_of(Task(part, "tiny", "cpu", list(cases), seconds, "eager"), seconds)
        result["parts"].append({"name": part, "reason": dict(lines)["end"]["reason"]})
        device.collect(result, [line for line in lines if line[0] != "end"])
    device.add_floors(result)
    return result


def test_ceilings_and_eager_passes() -> None:
    """Every row is there, with figures or a reason; shares and floors follow from them."""
    result = result_of("ceilings", "eager", cases=((96, 1), (80, 2)))
    assert [part["reason"] for part in result["parts"]] == [None, None]
    ceilings = {row["name"]: row for row in result["ceilings"]}
    assert ceilings["bf16 square"]["tflops"] > 0
    assert ceilings["device to device"]["gb_per_s"] > 0
    assert "CUDA" in ceilings["tf32 square"]["reason"]
    rows = result["rows"]
    cases = [(name, *case) for case in ((96, 1), (80, 2)) for name in ("transformers", "ours")]
    assert [(row["system"], row["tokens"], row["batch"]) for row in rows] == cases
    for row in rows:
        assert row["reason"] is None
        assert 0 < row["min_ms"] <= row["median_ms"] <= row["p95_ms"] <= row["max_ms"]
        floor_ms = 2 * result["shape"]["linear_parameters"] * row["tokens"] * row["batch"] / 1e9
        assert row["floor_ms"] == pytest.approx(floor_ms / result["peaks_tflops"]["bf16"], rel=1e-3)
        assert row["times_floor"] == pytest.approx(row["median_ms"] / row["floor_ms"], rel=1e-3)
    ours = [row for row in rows if row["system"] == "ours"]
    # The same weights in BF16: close, though a near tie may fall on the other side.
    assert min(row["same_top_option"] for row in ours) >= 0.75
    assert max(row["max_logit_difference"] for row in ours) < 0.1
    assert {row["piece"] for row in result["pieces"]} == set(device_passes.PIECES)
    rule = next(row for row in result["pieces"] if row["piece"] == "delta rule of ours")
    assert rule["layers"] == 3
    assert rule["shares"]["ours"] == pytest.approx(rule["total_ms"] / ours[0]["median_ms"], rel=0.01)
    assert device.text(result).count("delta rule of ours") == 2


def test_compiled_passes_agree_with_eager_ones() -> None:
    """Both ways to compile run, and answer as eager transformers does."""
    result = result_of("compile")
    assert [row["reason"] for row in result["rows"]] == [None] * 5
    around = [row for row in result["rows"] if row["system"].endswith("around the rule")]
    assert [row["max_logit_difference"] < 0.1 for row in around] == [True, True]


def test_a_part_that_raises_leaves_nulls_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was planned is null; the other parts are not concerned."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("no memory\nleft")

    monkeypatch.setattr(device_passes, "build", broken)
    monkeypatch.setattr(device_ceilings, "copying", broken)
    result = result_of("eager", "ceilings")
    assert [part["reason"] for part in result["parts"]] == ["RuntimeError: no memory left", None]
    assert [row["median_ms"] for row in result["rows"]] == [None, None]
    assert {row["reason"] for row in result["rows"] + result["pieces"]} == {"RuntimeError: no memory left"}
    assert next(row for row in result["ceilings"] if row["name"] == "device to device")["reason"] is not None
    told = device.text(result)
    assert "part eager: RuntimeError: no memory left" in told
    assert "transformers, 1 × 96 tokens; ours, 1 × 96 tokens and 5 more: RuntimeError: no memory left" in told
    assert result["rows"][0]["times_floor"] is None
    monkeypatch.setattr(models, "prepare_release", broken)
    assert {row["reason"] for row in result_of("engines")["engines"]} == {"RuntimeError: no memory left"}


def test_what_no_time_was_left_for_is_null() -> None:
    """A part whose time is over begins nothing more."""
    result = result_of("eager", "ceilings", "compile", seconds=0.0)
    assert {row["median_ms"] for name in device.SECTIONS for row in result[name]} == {None}
    assert all("time was over" in row["reason"] for row in result["pieces"] + result["ceilings"])
    assert len(result["rows"]) == 7


def test_a_system_that_fails_leaves_the_others_their_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One null row, with its reason."""

    def broken(self: Any, _: Any) -> Any:
        return lambda x: self.nothing

    monkeypatch.setattr(device_passes.Model, "own", broken)
    result = result_of("eager")
    assert [row["system"] for row in result["rows"] if row["median_ms"] is None] == ["ours"]
    assert "nothing" in result["rows"][0]["reason"]


def test_an_overrunning_part_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its lines stay, its processes do not."""
    script = tmp_path / "device_parts.py"
    script.write_text(
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "with open(sys.argv[2], 'w') as out:\n"
        "    out.write(json.dumps(['in_effect', {'child': child.pid}]) + '\\n[\"cut')\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(device, "__file__", str(tmp_path / "device.py"))
    monkeypatch.setattr(device, "GRACE_S", 1.0)
    start = time.monotonic()
    lines, why = device.run_part(Task("eager", "tiny", "cpu", [(96, 1)], 1.0, "eager"))
    assert time.monotonic() - start < 10
    assert why == "killed after its 1 s"
    assert [section for section, _ in lines] == ["in_effect"]
    status = Path(f"/proc/{lines[0][1]['child']}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"


def test_linears_counted_from_the_modules_are_those_of_the_configuration(tmp_path: Path) -> None:
    """Both count the parameters of the floor."""
    for shape in ("tiny", "9b"):
        config, head = models.read_shape(shape)
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "joint_head_config.json").write_text(json.dumps(head))
        assert sum(k * n for k, n in device_ceilings.linear_shapes(shape)) == linear_parameters(tmp_path)


def test_figures() -> None:
    """Milliseconds of seconds."""
    assert figures([0.001, 0.003, 0.002]) == {
        "median_ms": 2.0, "p95_ms": 2.9, "min_ms": 1.0, "max_ms": 3.0, "runs": 3
    }  # fmt: skip


def test_the_command_and_its_page(tmp_path: Path) -> None:
    """The script prints card and tables and writes JSON, which the page of results shows."""
    file = tmp_path / "device-2026-11-30.json"
    command = [str(ROOT / "bench" / "device.sh"), "--shape", "tiny", "--device", "cpu", "--parts", "ceilings"]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(
        [*command, "--json", str(file)], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert "bf16 square" in done.stdout
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["kind"] == device.KIND
    assert result["card"]["in_effect"]["device"] == "cpu"
    page = tmp_path / "page.md"
    script = [sys.executable, str(ROOT / "bench" / "report.py"), "--page", str(page), "--json", str(file)]
    subprocess.run(script, check=True, timeout=60)
    assert "**Ceilings**" in page.read_text(encoding="utf-8")


def test_a_checkout_that_is_not_installed_is_enough() -> None:
    """Both packages come from the checkout; without `site` no installed one is seen."""
    places = [path for path in sys.path if path.endswith("site-packages")] + [str(ROOT / "bench")]
    code = (
        f"import sys; sys.path += {places!r}; import device_parts; device_parts.use_checkout(); "
        "import clef_trt, clef_export.config as c; print(clef_trt.__file__, c.__file__)"
    )
    told = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert told.stdout.split() == [str(ROOT / "clef_trt" / "__init__.py"), str(ROOT / "export" / "config.py")]
