"""Builds with TensorRT for RTX, which needs no GPU for them, of hand-made graphs."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from handmade import PROFILES, SHORT, TEXT_BODY, recipe, write_bundle

from clef_trt import build as build_module
from clef_trt.build import build
from clef_trt.bundle import Bundle, open_bundle, verify_files
from clef_trt.contract import CONTRACTS
from clef_trt.errors import EngineError, MissingExtraError, SettingError
from clef_trt.profiles import read_profiles
from clef_trt.recipe import Drift, Recipe

trt = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT for RTX is not installed (extra: rtx)")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_bundle(tmp_path / "bundle")


def state(bundle: Bundle) -> dict[str, bytes]:
    """All a bundle's folder holds."""
    return {path.name: path.read_bytes() for path in bundle.folder.iterdir()}


def test_a_build_adds_plans_and_their_record(bundle: Bundle) -> None:
    told: list[str] = []
    manifest = build(bundle, recipe(), progress=told.append)
    reopened = open_bundle(bundle.folder)
    assert reopened.manifest == manifest
    verify_files(reopened)
    assert set(manifest.files) - set(bundle.manifest.files) == {"test.text.plan", "test.vision.plan"}
    assert set(state(bundle)) == {*manifest.files, "manifest.json"}
    (plan,) = manifest.plans
    assert dataclasses.asdict(plan) == {
        "recipe": "test",
        "recipe_sha256": recipe().sha256,
        "target": "tensorrt_rtx",
        "builder_version": trt.__version__,
        "precision": "bf16",
        "compute_capabilities": ["8.9", "12.0"],
        "runtime": {"cuda_graph_strategy": "DISABLED", "dynamic_shapes_kernel_specialization_strategy": "EAGER"},
        "profiles": {
            "text": {"short": {axis: list(range_) for axis, range_ in SHORT.items()}},
            "vision": {"small": {"groups": [1, 1, 2], "patches": [4, 16, 64]}},
        },
        "files": {"text": "test.text.plan", "vision": "test.vision.plan"},
    }
    for graph, profiles in plan.profiles.items():  # the runtime reads them
        assert [p.axes for p in read_profiles(CONTRACTS[graph], profiles)] == [p.axes for p in PROFILES[graph][:1]]
    for graph in ("text", "vision"):
        assert any(re.match(rf"{graph}: Building engine", line) for line in told)


def test_profiles_asked_for_by_name(bundle: Bundle) -> None:
    (plan,) = build(bundle, recipe(), profiles=["short", "long"]).plans
    assert {graph: list(profiles) for graph, profiles in plan.profiles.items()} == {
        "text": ["short", "long"],
        "vision": ["small"],
    }
    with pytest.raises(SettingError, match=r"unknown profiles \['longest'\]"):
        build(bundle, recipe("other"), profiles=["longest"])


def test_an_existing_plan_is_replaced_only_by_force(bundle: Bundle) -> None:
    first = build(bundle, recipe())
    before = state(bundle)
    with pytest.raises(SettingError, match=r"plan of recipe test already, of this version .*--force"):
        build(bundle, recipe())
    with pytest.raises(SettingError, match=r"an earlier version of the recipe"):
        build(bundle, dataclasses.replace(recipe(), sha256="1" * 64))
    assert state(bundle) == before
    both = build(bundle, recipe("other"))
    assert [plan.recipe for plan in both.plans] == ["test", "other"]
    assert first.plans[0] == both.plans[0]
    again = build(bundle, dataclasses.replace(recipe(cards=("8.9",)), sha256="1" * 64), force=True)
    cards = {plan.recipe: plan.compute_capabilities for plan in again.plans}
    assert cards == {"other": ["8.9", "12.0"], "test": ["8.9"]}
    assert open_bundle(bundle.folder).manifest == again


def test_weights_in_two_folders(tmp_path: Path) -> None:
    """As of FP8: the release's untouched ones, and the bundle's own. The parser reads from one folder only."""
    bundle = write_bundle(tmp_path / "two", own_vision_weights=True)
    assert "vision.bin" in bundle.manifest.files
    assert list(build(bundle, recipe()).plans[0].files) == ["text", "vision"]


def test_weights_the_manifest_does_not_record(bundle: Bundle) -> None:
    record = dataclasses.replace(bundle.manifest.weights, files={})
    other = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, weights=record))
    with pytest.raises(EngineError, match=r"points into \['text.bin'\], which the manifest does not record"):
        build(other, recipe())


def test_another_precision_is_refused(bundle: Bundle) -> None:
    with pytest.raises(SettingError, match=r"recipe test builds fp8, .*bundle is bf16"):
        build(bundle, recipe(precision="fp8"))
    int8 = dataclasses.replace(bundle, manifest=dataclasses.replace(bundle.manifest, precision="int8"))
    with pytest.raises(SettingError, match="onnxruntime, which runs the graphs themselves"):
        build(int8, Recipe("cpu", "0" * 64, "onnxruntime", "int8", Drift(0.99, 0.1, 0.01)))


def test_a_missing_package_names_its_extra(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'clef-trt\[tensorrt\]'"):
        build(bundle, dataclasses.replace(recipe(), target="tensorrt"))
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'clef-trt\[rtx\]'"):
        build(bundle, recipe())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("first = Unheard(input_ids)\nother = Unseen(input_ids)\n" + TEXT_BODY, r"(?s)text graph:.*Unheard.*Unseen"),
        (TEXT_BODY.replace("(ends, last)", "(ends, input_ids)"), r"ReduceSum .*\.cpp:\d+"),
        (TEXT_BODY.replace("Mul(sums", "Mul(ends"), r"logits of the text graph is .*; the contract says \[-1, -1\]"),
        ("other = clef.Other(input_ids)\n" + TEXT_BODY, r"clef operators \['Other'\]; .*'GatedDeltaRule'"),
        # Attention has no kernel in float32: parsed, but not built.
        (
            """
    first = Cast <to = 1> (input_ids)
    axes = Constant <value_ints = [1, 3]> ()
    one = Unsqueeze(first, axes)
    wide_shape = Constant <value_ints = [1, 1, 1, 16]> ()
    wide = Expand(one, wide_shape)
    key = Add(wide, wide)
    value = Mul(wide, wide)
    attended = Attention(wide, key, value)
    all = Constant <value_ints = [1, 2, 3]> ()
    pooled = ReduceSum <keepdims = 0> (attended, all)
    last = Constant <value_ints = [-1]> ()
    column = Unsqueeze(pooled, last)
    ends = Cast <to = 1> (option_spans)
    sums = ReduceSum <keepdims = 0> (ends, last)
    logits = Add(sums, column)""",
            r"cannot build the graph:\n  .*Attention",
        ),
    ],
    ids=["unknown operators", "broken node", "another rank", "unknown clef operator", "no kernel"],
)
def test_a_graph_that_cannot_be_built(tmp_path: Path, body: str, message: str) -> None:
    bundle = write_bundle(tmp_path / "broken", body)
    before = state(bundle)
    with pytest.raises(EngineError, match=message):
        build(bundle, recipe())
    assert state(bundle) == before


@pytest.mark.parametrize("graph", ["text", "vision"])
def test_an_interrupt_leaves_nothing(bundle: Bundle, graph: str) -> None:
    before = state(bundle)

    def interrupt(text: str) -> None:
        if text.startswith(f"{graph}: Building engine"):  # told from inside TensorRT
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(bundle, recipe(), progress=interrupt)
    assert state(bundle) == before


def test_ctrl_c_reaches_a_running_build(bundle: Bundle) -> None:
    before = state(bundle)

    def press(text: str) -> None:
        if text.startswith("text: Building engine"):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)  # so that the main thread has seen it when this, the builder's thread, goes on

    # Started in the background, as CI may be, a process ignores SIGINT, and Python then sets no handler for it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            build(bundle, recipe(), progress=press)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert state(bundle) == before


def test_a_failure_while_publishing_leaves_nothing(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state(bundle)

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(build_module, "_write_manifest", fail)
    with pytest.raises(OSError, match="disk full"):
        build(bundle, recipe())
    assert state(bundle) == before


def test_one_build_at_a_time_and_leftovers_are_cleared(bundle: Bundle) -> None:
    (bundle.folder / ".build-killed").mkdir()
    with (
        build_module._only_build(bundle.folder),
        pytest.raises(EngineError, match="another build is running"),
    ):
        build(bundle, recipe())
    assert not (bundle.folder / ".build-killed").exists()
    build(bundle, recipe())


class FakeConfig:
    """The timing cache of `tensorrt`, whose caches belong to the card "here"."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def create_timing_cache(self, stored: bytes) -> Any:
        self.asked.append(stored)
        return type("Cache", (), {"content": stored, "serialize": lambda self: b"here"})()

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        return cache.content in (b"", b"here")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An H200 in words; returns where caches go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("clef_trt.device.CudaDevice.__init__", lambda self: None)
    monkeypatch.setattr("clef_trt.device.CudaDevice.compute_capability", lambda self: (9, 0))
    return tmp_path / "clef_trt"


def test_the_timing_cache_is_kept_between_builds(card: Path) -> None:
    settings = dataclasses.replace(recipe().build, timing_cache=True)
    module = type("tensorrt", (), {"__version__": "11.4"})
    (path,) = (card / "tensorrt-11.4-sm90.timing",)
    config = FakeConfig()
    with build_module._tensorrt(module, config, settings) as cards:
        assert cards == ["9.0"]
    assert path.read_bytes() == b"here"
    with build_module._tensorrt(module, config, settings):
        pass
    assert config.asked == [b"", b"here"]
    path.write_bytes(b"another card")
    with build_module._tensorrt(module, config, settings):
        pass
    assert config.asked[2:] == [b"another card", b""]
    assert path.read_bytes() == b"here"
    with build_module._tensorrt(module, config, dataclasses.replace(settings, timing_cache=False)):
        pass
    assert len(config.asked) == 4
