"""The TensorRT engine on a GPU made of numpy; what needs a card is at the end."""

from __future__ import annotations

import ast
import gc
import importlib
import json
import mmap
import os
import threading
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_device import PLAN, FakeDevice, FakeTrt

from clef_trt import EngineError, MissingExtraError, SettingError, tensorrt_package
from clef_trt.bundle import open_bundle, read_manifest
from clef_trt.choose import open_engine
from clef_trt.contract import TEXT, VISION, Tensors
from clef_trt.device import CudaDevice, record
from clef_trt.fake import FakeEngine
from clef_trt.profiles import PADDING, bfloat16_bits, choose, float32_of_bfloat16, read_profiles
from clef_trt.tensorrt import TensorRTEngine
from clef_trt.tensorrt_package import RtxSettings, import_tensorrt

HIDDEN = 96
SMALL = {"batch": (1, 1, 4), "sequence": (1, 128, 256), "questions": (1, 4, 8), "options": (1, 8, 32)}
PROFILES = {
    "long": {**SMALL, "sequence": (257, 1024, 4096), "media": (1, 1, 8192)},
    "short": {**SMALL, "media": (1, 1, 64)},
    "wide": {**SMALL, "batch": (1, 8, 16), "media": (1, 1, 64)},
}
VISION_PROFILES = {
    "small": {"groups": (1, 1, 40), "patches": (4, 64, 64)},
    "large": {"groups": (1, 1, 2), "patches": (65, 256, 4096)},
}
VISION_SIZES = {"hidden": HIDDEN, "patch_values": 24}


def text_logits(inputs: Tensors) -> Tensors:
    """FakeEngine's, shifted where there is media by the rows each record reads, so that those count too."""
    logits = FakeEngine(HIDDEN).run(inputs)["logits"]
    for record_, rows in enumerate(inputs["media_rows"]):
        logits[record_, inputs["option_questions"][record_] >= 0] += inputs["media_embeddings"][rows[rows >= 0]].sum()
    return {"logits": logits}


def embeddings(inputs: Tensors) -> Tensors:
    pixels = inputs["pixel_values"]
    means = (pixels.mean(-1) + inputs["position_weights"].sum(-1)).reshape(pixels.shape[0], -1, 4).mean(-1)
    return {"embeddings": np.repeat(means[..., None], HIDDEN, -1).astype(np.float32)}


def make_trt(device: FakeDevice, profiles: Any = None, **settings: Any) -> FakeTrt:
    return FakeTrt(
        device,
        TEXT,
        {"hidden": HIDDEN},
        profiles or PROFILES,
        text_logits,
        lambda shapes: shapes["option_questions"],
        **settings,
    )


def make_engine(trt: FakeTrt, plan: bytes = PLAN, profiles: Any = None, **settings: Any) -> TensorRTEngine:
    return TensorRTEngine(trt, plan, TEXT, {"hidden": HIDDEN}, profiles or PROFILES, trt.device, **settings)


def make_inputs(batch: int = 1, sequence: int = 40, questions: int = 2, options: int = 5, media: int = 1) -> Tensors:
    random = np.random.default_rng([batch, sequence, questions, options, media])
    longer = np.array([0, 1])  # no span is empty
    spans = np.sort(random.integers(0, sequence - 1, (batch, options, 2)), -1) + longer
    asked = np.sort(random.integers(0, sequence - 1, (batch, questions, 2)), -1) + longer
    rows = np.full((batch, sequence), -1, np.int64)
    if media > 1:
        rows[0, : min(media, sequence)] = np.arange(min(media, sequence))
    return {
        "input_ids": random.integers(1, 1000, (batch, sequence)),
        "position_ids": np.broadcast_to(np.arange(sequence), (3, batch, sequence)).copy(),
        "sequence_lengths": np.full(batch, sequence),
        "media_embeddings": random.standard_normal((media, HIDDEN), np.float32) * np.float32(media > 1),
        "media_rows": rows,
        "question_spans": asked,
        "question_types": random.integers(0, 3, (batch, questions)),
        "option_spans": spans,
        "option_questions": np.where(np.arange(options) < options - 1, random.integers(0, questions, options), -1)
        * np.ones((batch, 1), np.int64),
    }


def make_vision_inputs(groups: int, patches: int) -> Tensors:
    random = np.random.default_rng([groups, patches])
    return {
        "pixel_values": random.standard_normal((groups, patches, VISION_SIZES["patch_values"]), np.float32),
        "position_rows": random.integers(0, 100, (patches, 4)),
        "position_weights": random.random((patches, 4), np.float32),
        "positions": random.integers(0, 64, (patches, 2)),
    }


@pytest.fixture
def device() -> Any:
    made = FakeDevice()
    yield made
    assert made.breaches == []


@pytest.fixture
def trt(device: FakeDevice) -> FakeTrt:
    return make_trt(device)


@pytest.fixture
def engine(trt: FakeTrt) -> Any:
    made = make_engine(trt, precision="bf16")
    yield made
    made.close()
    assert trt.device.held() == {}


def check(engine: TensorRTEngine, inputs: Tensors) -> None:
    found = engine.run(inputs)
    assert found.keys() == {"logits"}
    assert found["logits"].dtype == np.float32
    np.testing.assert_array_equal(found["logits"], text_logits(inputs)["logits"])


# Behaviour


def test_logits_through_padding_capture_and_replay(engine: TensorRTEngine, trt: FakeTrt) -> None:
    for batch, sequence, questions, options in [(1, 40, 2, 5), (3, 200, 5, 17), (1, 300, 1, 1), (2, 41, 3, 6)] * 3:
        check(engine, make_inputs(batch, sequence, questions, options))
    assert engine.info() | {"passes": 12, "captures": 4, "replays": 8, "graphs": 4, "fallbacks": 0} == engine.info()
    assert trt.passes[0]["input_ids"] == (1, 64)
    assert trt.passes[1]["option_spans"] == (4, 32, 2)


def test_passes_of_one_bucket_share_a_graph(engine: TensorRTEngine, trt: FakeTrt) -> None:
    for sequence in (65, 100, 128):
        check(engine, make_inputs(3, sequence, 3, 9))
    assert trt.device.counts["begin_capture"] == 1
    assert trt.device.counts["launch"] == 2
    assert {shapes["position_ids"] for shapes in trt.passes} == {(3, 4, 128)}


def test_what_tensors_are_padded_with(device: FakeDevice) -> None:
    seen: list[Tensors] = []
    trt = make_trt(device)
    trt.compute = lambda inputs: seen.append(inputs) or text_logits(inputs)  # type: ignore[func-returns-value]
    engine = make_engine(trt)
    # A wider pass of the same bucket first: nothing of it may stay behind.
    for inputs in (make_inputs(4, 60, 4, 8, 8), make_inputs(3, 40, 3, 5, 5)):
        check(engine, inputs)
    for name, array in seen[-1].items():
        corner = tuple(map(slice, inputs[name].shape))
        np.testing.assert_array_equal(array[corner], inputs[name])
        array[corner] = PADDING.get(name, 0)
        assert (array == PADDING.get(name, 0)).all(), name
    engine.close()


def test_a_record_alone_has_the_logits_it_has_in_a_batch(engine: TensorRTEngine) -> None:
    inputs = make_inputs(3, 100)
    together = engine.run(inputs)["logits"]
    alone = {
        name: array[:, 1:2] if name == "position_ids" else array if name == "media_embeddings" else array[1:2]
        for name, array in inputs.items()
    }
    np.testing.assert_array_equal(engine.run(alone)["logits"][0], together[1])


def test_outputs_are_the_callers_own(engine: TensorRTEngine) -> None:
    first = engine.run(make_inputs(1, 40))["logits"]
    before = first.copy()
    engine.run(make_inputs(1, 41))
    np.testing.assert_array_equal(first, before)


def test_vision_pads_groups_and_never_patches(device: FakeDevice) -> None:
    trt = FakeTrt(
        device,
        VISION,
        VISION_SIZES,
        VISION_PROFILES,
        embeddings,
        lambda shapes: (shapes["pixel_values"][0], shapes["pixel_values"][1] // 4, HIDDEN),
    )
    engine = TensorRTEngine(trt, PLAN, VISION, VISION_SIZES, VISION_PROFILES, device)
    for groups, patches in [(1, 16), (17, 36), (2, 1024), (17, 36)]:
        inputs = make_vision_inputs(groups, patches)
        found = engine.run(inputs)["embeddings"]
        assert found.shape == (groups, patches // 4, HIDDEN)
        np.testing.assert_array_equal(found, embeddings(inputs)["embeddings"])
    assert [shapes["pixel_values"][:2] for shapes in trt.passes] == [(1, 16), (18, 36), (2, 1024), (18, 36)]
    with pytest.raises(EngineError, match=r"groups 3, patches 100: small takes patches 4 to 64; large takes groups 1"):
        engine.run(make_vision_inputs(3, 100))
    with pytest.raises(EngineError, match="small takes patches 4 to 64; large takes patches 65 to 4096"):
        engine.run(make_vision_inputs(1, 2))
    engine.close()
    assert device.held() == {}


def test_bfloat16_inputs_and_outputs(device: FakeDevice) -> None:
    trt = make_trt(device, dtypes={"media_embeddings": "BF16", "logits": "BF16"})
    engine = make_engine(trt)
    inputs = make_inputs(2, 40, media=7)
    found = engine.run(inputs)["logits"]
    assert found.dtype == np.float32
    real = inputs["option_questions"] >= 0
    np.testing.assert_allclose(found[real], text_logits(inputs)["logits"][real], rtol=2**-7, atol=0.5)
    engine.close()


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="the values to compare with are ml_dtypes's")
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    bits[:4] = [0x3F808000, 0x3F818000, 0x7F800000, 0xFF7FFFFF]  # ties, infinity, the lowest finite value
    values = bits.view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(float32_of_bfloat16(bfloat16_bits(values)), expected)


# Profiles and errors


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 256, 1, 1, 1), "short"),
        ((5, 256, 1, 1, 1), "wide"),
        ((1, 257, 1, 1, 1), "long"),
        ((1, 20, 1, 1, 65), "long"),
        ((4, 4096, 8, 32, 8192), "long"),
    ],
)
def test_the_tightest_profile_is_chosen(sizes: tuple[int, ...], expected: str) -> None:
    profiles = read_profiles(TEXT, PROFILES)
    named = dict(zip(("batch", "sequence", "questions", "options", "media"), sizes, strict=True))
    assert profiles[choose(profiles, named)].name == expected


def test_buckets_hold_the_sizes_and_stay_inside_the_profile() -> None:
    (profile,) = read_profiles(TEXT, {"only": {**SMALL, "sequence": (100, 1000, 20_000), "media": (1, 1, 5000)}})
    buckets = set()
    for sequence in range(1, 20_001):
        bucket = profile.bucket({"batch": 3, "sequence": sequence, "questions": 5, "options": 31, "media": 4097})
        assert (bucket["batch"], bucket["questions"], bucket["options"], bucket["media"]) == (4, 8, 32, 5000)
        assert max(sequence, 100) <= bucket["sequence"] <= 20_000
        assert bucket["sequence"] - sequence < max(64, sequence / 8) or sequence < 100
        buckets.add(bucket["sequence"])
    assert len(buckets) < 60


def test_sizes_no_profile_takes_are_refused_naming_the_ranges(engine: TensorRTEngine) -> None:
    with pytest.raises(EngineError) as caught:
        engine.run(make_inputs(5, 300))
    assert "batch 5, sequence 300" in str(caught.value)
    assert "long takes batch 1 to 4; short takes batch 1 to 4; wide takes sequence 1 to 256" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x.pop("media_rows"), r"missing inputs \['media_rows'\]"),
        (lambda x: x.update(input_ids=x["input_ids"].astype(np.int32)), "input_ids is int32"),
        (lambda x: x.update(media_embeddings=np.zeros((1, 5), np.float32)), "hidden = 96"),
    ],
)
def test_inputs_outside_the_contract_are_named(engine: TensorRTEngine, change: Any, said: str) -> None:
    inputs = make_inputs()
    change(inputs)
    with pytest.raises(EngineError, match=said):
        engine.run(inputs)


@pytest.mark.parametrize(
    ("profiles", "said"),
    [
        ({}, "has no profiles"),
        ({"a": SMALL}, r"profile 'a' has the axes .*; the text graph has .*'media'"),
        ({"a": {**SMALL, "media": (2, 1, 3)}}, r"media is \[2, 1, 3\]"),
        ({"a": {**SMALL, "media": (1, 1, 64)}}, r"the plan has 3 profiles; expected \['a'\]"),
        ({**PROFILES, "wide": {**PROFILES["wide"], "options": (1, 8, 64)}}, "profile 'wide' of the plan has option"),
    ],
)
def test_profiles_that_are_not_the_plans_are_refused(trt: FakeTrt, profiles: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        TensorRTEngine(trt, PLAN, TEXT, {"hidden": HIDDEN}, profiles, trt.device)
    assert trt.device.held() == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.names.remove("media_rows"), r"takes \['input_ids', 'media_embeddings', 'option.*'media_rows'"),
        (lambda t: t.dtypes.update(media_embeddings="DataType.HALF"), "media_embeddings of the plan is DataType.HALF"),
        (lambda t: t.dtypes.update(input_ids="DataType.INT32"), "expected DataType.INT64"),
        (lambda t: t.shape_inputs.add("sequence_lengths"), "from the values of sequence_lengths"),
        (lambda t: setattr(t, "sizes", {"hidden": 64}), "media_embeddings from"),
    ],
)
def test_plans_of_another_contract_are_refused(trt: FakeTrt, change: Any, said: str) -> None:
    change(trt)
    with pytest.raises(EngineError, match=said):
        make_engine(trt)
    assert trt.device.held() == {}


def test_plans_that_do_not_open_say_why(trt: FakeTrt) -> None:
    with pytest.raises(EngineError, match=r"fake_tensorrt 0.fake cannot open the plan: wrong magic tag$"):
        make_engine(trt, b"something else")
    trt.device.free_bytes = 3
    with pytest.raises(EngineError, match=r"Fake GPU has 0.0 of 34.4 GB free"):
        make_engine(trt)
    trt.device.free_bytes = 4000
    with pytest.raises(EngineError, match="activation memory of the plan needs 0 MB"):
        make_engine(trt)
    assert trt.device.held() == {}


def test_impossible_settings_and_missing_packages(trt: FakeTrt, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="graphs is -1"):
        make_engine(trt, graphs=-1)
    with pytest.raises(SettingError, match="takes no settings of TensorRT for RTX"):
        make_engine(trt, rtx=RtxSettings())
    with pytest.raises(SettingError, match="expected one of tensorrt, tensorrt_rtx_bindings"):
        import_tensorrt("torch")

    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    for name, extra in (("tensorrt", "tensorrt"), ("tensorrt_rtx_bindings", "rtx")):
        with pytest.raises(MissingExtraError, match=rf"clef-trt\[{extra}\]"):
            import_tensorrt(name)
    with pytest.raises(MissingExtraError, match=r"CUDA needs .*clef-trt\[tensorrt\]"):
        CudaDevice()


# Graphs


def test_graphs_are_bounded_and_the_least_recent_goes(trt: FakeTrt) -> None:
    engine = make_engine(trt, graphs=2)
    for sequence in (40, 100, 40, 150, 40):  # 150 displaces 100
        check(engine, make_inputs(1, sequence))
    assert engine.info()["graphs"] == 2
    assert len(trt.device.live["executable"]) == 2
    assert trt.device.counts["launch"] == 2
    # A displaced graph's context serves the next bucket of its profile.
    assert trt.contexts_made == 2
    check(engine, make_inputs(1, 300))
    assert trt.contexts_made == 3
    assert len(trt.device.live["executable"]) == 2
    engine.close()
    assert trt.device.held() == {}


def test_without_graphs_every_pass_is_enqueued_on_one_context(trt: FakeTrt) -> None:
    engine = make_engine(trt, graphs=0)
    for sequence in (40, 100, 40, 300):
        check(engine, make_inputs(1, sequence))
    assert trt.contexts_made == 2
    assert trt.device.counts["begin_capture"] == 0
    assert engine.info()["cuda_graphs"] == "none"
    engine.close()
    assert trt.device.held() == {}


def test_a_failed_capture_is_enqueued_for_ever_and_seen_in_info(engine: TensorRTEngine, trt: FakeTrt) -> None:
    trt.device.refuse_capture = True
    for sequence in (40, 40, 100, 40):
        check(engine, make_inputs(1, sequence))
    assert trt.device.counts["begin_capture"] == 2
    assert trt.contexts_made == 2
    trt.device.refuse_capture = False
    check(engine, make_inputs(1, 40))
    check(engine, make_inputs(1, 150))
    info = engine.info()
    assert (info["fallbacks"], info["graphs"]) == (2, 1)
    assert info["fallback_reasons"] == ["TensorRT cannot enqueue the pass"]


def test_buffers_that_grow_take_the_graphs_of_their_profile_along(engine: TensorRTEngine, trt: FakeTrt) -> None:
    for media, sequence in [(1, 300), (1, 400), (1, 40), (300, 400), (1, 300), (8000, 400), (1, 300), (1, 40)]:
        check(engine, make_inputs(1, sequence, media=media))
    assert trt.device.counts["destroy_executable"] == 4
    assert trt.device.counts["launch"] == 1  # of the short profile, whose buffers stayed
    assert engine.info()["graphs"] == 3


def test_buffers_too_large_for_the_gpu_leave_a_usable_engine(engine: TensorRTEngine, trt: FakeTrt) -> None:
    check(engine, make_inputs(1, 300))
    trt.device.free_bytes = 10**6
    with pytest.raises(EngineError, match="media_embeddings needs 3 MB, the GPU has 1 of"):
        engine.run(make_inputs(1, 300, media=8000))
    check(engine, make_inputs(1, 300))


def test_several_threads(engine: TensorRTEngine) -> None:
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(12):
                check(engine, make_inputs(1 + (seed + step) % 4, 30 + 40 * ((seed * step) % 9)))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert engine.info()["passes"] == 72


# Release


def test_closing_gives_everything_back_once(trt: FakeTrt) -> None:
    engine = make_engine(trt)
    for sequence in (40, 300, 40):
        check(engine, make_inputs(1, sequence))
    engine.close()
    engine.close()
    assert trt.device.held() == {}
    gc.collect()
    assert not trt.contexts
    with pytest.raises(EngineError, match="closed"):
        engine.run(make_inputs())
    assert engine.info()["graphs"] == 0


def a_life(device: FakeDevice) -> tuple[int, int]:
    """An engine opened, run and closed, whatever fails; returns passes that came out and those that failed."""
    good = failed = 0
    engine = make_engine(make_trt(device), graphs=2)
    for media, sequence in [(1, 300), (1, 400), (300, 400), (1, 40), (1, 40), (1, 500), (1, 300)]:
        try:
            check(engine, make_inputs(1, sequence, media=media))
            good += 1
        except EngineError:
            failed += 1
    engine.close()
    return good, failed


def test_a_failure_at_any_call_leaks_nothing_and_spoils_one_pass_at_most(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR")
    clean = FakeDevice()
    assert a_life(clean) == (7, 0)
    outcomes = set()
    for call in range(1, clean.calls + 1):
        device = FakeDevice(fail_at=call)
        try:
            good, failed = a_life(device)
            outcomes.add(failed)
            assert failed <= 1 and good + failed == 7, call  # noqa: PT018
        except EngineError:
            outcomes.add(-1)  # not opened
        assert device.breaches == [], call
        assert device.held() == {}, call
    assert outcomes == {-1, 0, 1}


def test_a_capture_that_breaks_is_ended(device: FakeDevice) -> None:
    device.activate()
    stream = device.create_stream()

    def submit() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(device, stream, submit)
    assert device.capturing == {}
    device.destroy_stream(stream)
    assert device.held() == {}


# TensorRT for RTX


def test_the_runtime_cache_is_written_after_first_use_and_read_again(device: FakeDevice, tmp_path: Path) -> None:
    path = tmp_path / "plan.cache"
    settings = RtxSettings(path)
    for state in ("new", "loaded"):
        engine = make_engine(make_trt(device, rtx=True), rtx=settings)
        assert engine.info()["runtime_cache"] == state
        check(engine, make_inputs())
        assert path.read_bytes() == b"kernels"
        engine.close()
    path.write_bytes(b"of another card")
    engine = make_engine(make_trt(device, rtx=True), rtx=settings)
    assert engine.info()["runtime_cache"] == "rejected"
    check(engine, make_inputs())
    engine.close()
    assert path.read_bytes() == b"kernels"
    assert list(tmp_path.iterdir()) == [path]


def test_a_cache_that_cannot_be_written_is_no_failure(
    device: FakeDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path, broken in ((tmp_path / "missing" / "cache", False), (tmp_path / "cache", True)):
        trt = make_trt(device, rtx=True)
        engine = make_engine(trt, rtx=RtxSettings(path))
        trt.caches[0].broken = broken
        check(engine, make_inputs())
        engine.close()
    assert caplog.text.count("was not written") == 2
    assert list(tmp_path.iterdir()) == []


def test_strategies_of_the_rtx_package(device: FakeDevice) -> None:
    trt = make_trt(device, rtx=True)
    engine = make_engine(trt, rtx=RtxSettings(cuda_graph_strategy="WHOLE_GRAPH_CAPTURE"))
    check(engine, make_inputs())
    assert engine.info()["cuda_graphs"] == "tensorrt"
    assert device.counts["begin_capture"] == 0
    engine.close()
    trt.stream_capturable = False
    engine = make_engine(trt)
    check(engine, make_inputs())
    assert engine.info()["fallback_reasons"] == ["TensorRT says that the pass cannot be captured"]
    engine.close()
    with pytest.raises(SettingError, match="CudaGraphStrategy is 'ALL'; expected one of DISABLED, WHOLE_GRAPH_CAPTURE"):
        make_engine(trt, rtx=RtxSettings(cuda_graph_strategy="ALL"))
    with pytest.raises(SettingError, match="expected one of EAGER, LAZY, NONE"):
        make_engine(trt, rtx=RtxSettings(dynamic_shapes_kernel_specialization_strategy="SOON"))
    assert device.held() == {}


def test_the_real_package_has_all_that_is_used() -> None:
    rtx = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT for RTX is not installed")
    for name in (*tensorrt_package.USED, *tensorrt_package.USED_OF_RTX):
        reduce(getattr, name.split("."), rtx)
    assert hasattr(rtx, "IRuntimeCache"), "this is how the package is told from the enterprise one"


def test_everything_used_is_in_the_list() -> None:
    """Attributes of the package and methods of its objects in the source, against tensorrt_package.USED."""
    listed = {part for name in (*tensorrt_package.USED, *tensorrt_package.USED_OF_RTX) for part in name.split(".")}
    objects = {"trt", "_trt", "engine", "_context", "context", "config", "_cache", "_runtime", "enum", "types"}
    for file in ("tensorrt_package.py", "execution.py", "tensorrt.py"):
        tree = ast.parse((Path(tensorrt_package.__file__).parent / file).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = (
                    owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
                )
                if name in objects and node.attr not in ("__name__", "__init__"):
                    assert node.attr in listed, f"{name}.{node.attr} in {file}"


def test_the_real_package_says_why_a_plan_does_not_open() -> None:
    rtx = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT for RTX is not installed")
    with pytest.raises(EngineError, match=r"tensorrt_rtx_bindings .* cannot open the plan: .*eserializ"):
        tensorrt_package.Plan(rtx, b"no plan" * 100, None)
    with mmap.mmap(-1, 4096) as mapped, pytest.raises(EngineError, match=r"cannot open the plan: .*eserializ"):
        tensorrt_package.Plan(rtx, mapped, None)


def test_cuda_bindings_take_these_calls() -> None:
    """Without a driver every call answers with an error code, so that its arguments were at least accepted."""
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-bindings is not installed")
    if gpu_count():
        pytest.skip("there is a GPU: made-up handles would reach it")
    with pytest.raises(EngineError, match=r"cudaGetDeviceCount failed: .*cudaError"):
        CudaDevice()
    device = CudaDevice.__new__(CudaDevice)
    device._cuda, device._index = runtime, 0
    block = np.zeros(8, np.uint8)
    calls: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("activate", "create_stream", "memory", "name", "compute_capability"), ()),
        **dict.fromkeys(("destroy_stream", "synchronise", "begin_capture", "end_capture", "destroy_graph"), (1,)),
        **dict.fromkeys(("allocate", "free", "allocate_pinned", "instantiate", "destroy_executable"), (256,)),
        "free_pinned": (block,),
        "copy_to_device": (256, block, 1),
        "copy_to_host": (block, 256, 1),
        "launch": (1, 1),
    }
    assert calls.keys() == {name for name in vars(CudaDevice) if not name.startswith("_")}
    for name, arguments in calls.items():
        with pytest.raises(EngineError, match=r"cuda\w+ failed: .* \(cudaError"):
            getattr(device, name)(*arguments)


# On a card: CLEF_TRT_GPU_BUNDLE names a bundle with a plan of its text graph; CLEF_TRT_GPU_REFERENCE one of the same
# release in fp32, for ONNX Runtime.


def gpu_count() -> int:
    try:
        runtime = importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return 0
    error, count = runtime.cudaGetDeviceCount()
    return int(count) if error == runtime.cudaError_t.cudaSuccess else 0


def gpu_engine(**settings: Any) -> TensorRTEngine:
    folder = os.environ.get("CLEF_TRT_GPU_BUNDLE")
    if folder is None or not gpu_count():
        pytest.skip("needs a GPU with cuda-bindings, and CLEF_TRT_GPU_BUNDLE naming a bundle with a plan")
    bundle = open_bundle(folder)
    if not bundle.manifest.plans:
        pytest.skip(f"{folder} has no plans")
    plan = bundle.manifest.plans[0]
    return TensorRTEngine(
        tensorrt_package.MODULES[plan.target],
        bundle.path(plan.files["text"]).read_bytes(),
        TEXT,
        bundle.manifest.model.sizes,
        plan.profiles["text"],
        CudaDevice(),
        rtx=RtxSettings(**plan.runtime) if plan.runtime else None,
        **settings,
    )


def gpu_inputs(engine: TensorRTEngine, batch: int, sequence: int) -> Tensors:
    """Random tokens and spans for the model of the bundle, inside its profiles."""
    sizes = read_manifest(Path(os.environ["CLEF_TRT_GPU_BUNDLE"])).model.sizes
    profiles = engine.info()["profiles"].values()
    most = {axis: max(profile[axis][2] for profile in profiles) for axis in ("batch", "sequence")}
    inputs = make_inputs(min(batch, most["batch"]), min(sequence, most["sequence"]))
    return {**inputs, "media_embeddings": np.zeros((1, sizes["hidden"]), np.float32)}


@pytest.mark.gpu
def test_gpu_agrees_with_onnx_runtime() -> None:
    engine = gpu_engine()
    reference_folder = os.environ.get("CLEF_TRT_GPU_REFERENCE")
    if reference_folder is None:
        engine.close()
        pytest.skip("needs CLEF_TRT_GPU_REFERENCE naming the same release exported in fp32")
    reference = open_engine("onnxruntime", open_bundle(reference_folder))
    for batch, sequence in [(1, 40), (1, 200), (2, 130)]:
        inputs = gpu_inputs(engine, batch, sequence)
        real = inputs["option_questions"] >= 0
        for _ in range(2):  # enqueued, then replayed
            found, expected = engine.run(inputs)["logits"], reference.run(inputs)["logits"]
            assert np.abs(found - expected)[real].max() < 0.05 * max(1.0, np.abs(expected[real]).max())
    assert engine.info()["replays"] == 3
    engine.close()


@pytest.mark.gpu
def test_gpu_memory_stays_flat_over_thousands_of_shapes() -> None:
    engine, card = gpu_engine(graphs=4), CudaDevice()
    random = np.random.default_rng(0)
    longest = min(max(profile["sequence"][2] for profile in engine.info()["profiles"].values()), 512)
    used = []
    for step in range(10_000):
        engine.run(gpu_inputs(engine, 1 + step % 2, int(random.integers(8, longest + 1))))
        if step % 1000 == 999:
            used.append(card.memory()[0])
    print(json.dumps({"free_bytes": used, **engine.info()}, default=str))
    assert used[1] - used[-1] < 64 * 2**20  # the first 2,000 meet every bucket
    engine.close()


@pytest.mark.gpu
def test_gpu_graphs_replay_what_is_enqueued() -> None:
    """Buckets in turn, so that a graph that held another bucket's state would show."""
    graphs, plain = gpu_engine(), gpu_engine(graphs=0)
    for _ in range(3):
        for batch, sequence in [(1, 40), (1, 200), (2, 130), (1, 64)]:
            inputs = gpu_inputs(graphs, batch, sequence)
            np.testing.assert_array_equal(graphs.run(inputs)["logits"], plain.run(inputs)["logits"])
    assert graphs.info()["fallbacks"] == 0, graphs.info()
    graphs.close()
    plain.close()
