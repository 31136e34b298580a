"""Which engine opens: by name, by the card that is present, and what the error says when none can."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from clef_trt import EngineError, MissingExtraError, SettingError, choose
from clef_trt.bundle import Bundle, PlanRecord, open_bundle
from clef_trt.choose import open_engine

PLAN = PlanRecord("rtx-bf16", "0" * 64, "tensorrt_rtx", "1.7", "bf16", ["8.9", "12.0"], {}, {"text": {}}, {"text": "p"})


class Card:
    """A device of some compute capability; nothing else is asked of it here."""

    def __init__(self, major: int, minor: int) -> None:
        self._capability = (major, minor)

    def compute_capability(self) -> tuple[int, int]:
        return self._capability

    def name(self) -> str:
        return "Card"


def no_card() -> Any:
    raise EngineError("no GPU")


@pytest.fixture
def bundle(bundles: dict[str, Path]) -> Bundle:
    return open_bundle(bundles["odd"])


def with_plans(bundle: Bundle, precision: str, *plans: PlanRecord) -> Bundle:
    manifest = dataclasses.replace(bundle.manifest, precision=precision, plans=list(plans))
    return dataclasses.replace(bundle, manifest=manifest)


def test_auto_takes_a_plan_whose_card_is_present(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(choose, "_over_plan", lambda *arguments: opened.append(arguments[1]))
    old = dataclasses.replace(PLAN, recipe="older", compute_capabilities=["8.6"])
    open_engine("auto", with_plans(bundle, "bf16", old, PLAN), open_device=lambda: Card(12, 0))
    open_engine("tensorrt_rtx", with_plans(bundle, "bf16", old, PLAN), open_device=lambda: Card(8, 6))
    assert opened == [PLAN, old]


def test_auto_falls_back_to_the_cpu_where_it_runs_the_precision(bundle: Bundle) -> None:
    for device in (no_card, lambda: Card(9, 0)):
        engine = open_engine("auto", with_plans(bundle, "fp32", PLAN), open_device=device)
        assert engine.info()["engine"] == "onnxruntime"


def test_errors_say_what_would_work(bundle: Bundle) -> None:
    planned = with_plans(bundle, "bf16", PLAN)
    with pytest.raises(EngineError, match=r"Card has compute capability 9\.0; the plans are for 12\.0, 8\.9"):
        open_engine("auto", planned, open_device=lambda: Card(9, 0))
    with pytest.raises(EngineError, match=r"no plan of .* runs here: no GPU"):
        open_engine("auto", planned, open_device=no_card)
    with pytest.raises(EngineError, match=r"no plan for tensorrt: .*built are rtx-bf16 \(8\.9, 12\.0\)"):
        open_engine("tensorrt", planned, open_device=no_card)
    with pytest.raises(EngineError, match="is bf16; ONNX Runtime runs fp32, int8: build a TensorRT plan"):
        open_engine("auto", with_plans(bundle, "bf16"), open_device=no_card)
    with pytest.raises(SettingError, match="expected one of auto, onnxruntime, onnxruntime-cuda, tensorrt"):
        open_engine("cuda", bundle)


def test_onnxruntime_without_cuda_names_its_extra(bundle: Bundle) -> None:
    with pytest.raises(MissingExtraError, match=r"clef-trt\[cuda\]"):
        open_engine("onnxruntime-cuda", bundle)


def test_both_onnxruntimes_installed_is_told(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clef_trt.engine._is_installed", lambda name: True)
    assert "both installed" in open_engine("onnxruntime", bundle).info()["warning"]
