"""The engine contract: every backend passes the same tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clef_trt import Clef, EngineError, SettingError, samples
from clef_trt.batch import collate
from clef_trt.bundle import open_bundle, read_manifest
from clef_trt.choose import open_engine
from clef_trt.clef import Clef as ClefClass
from clef_trt.contract import CONTRACTS, Tensors
from clef_trt.encode import Encoder
from clef_trt.engine import SHARED_PASS, Engine, OnnxRuntimeEngine
from clef_trt.fake import FakeEngine
from clef_trt.request import parse_request

ENGINES = ("fake", "onnxruntime")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, bundles: dict[str, Path]) -> Any:
    bundle = open_bundle(bundles["odd"])
    hidden = bundle.manifest.model.sizes["hidden"]
    made: Engine = FakeEngine(hidden) if request.param == "fake" else open_engine("onnxruntime", bundle)
    yield made
    made.close()


@pytest.fixture
def inputs(bundles: dict[str, Path]) -> Tensors:
    encoder = Encoder(bundles["odd"] / "tokenizer.json")
    encodings = [encoder.encode(parse_request(request), 16384) for request in samples.requests()[:3]]
    return collate(encodings, [], read_manifest(bundles["odd"]).model.sizes["hidden"])


def test_logits_of_every_option(engine: Engine, inputs: Tensors) -> None:
    outputs = engine.run(inputs)
    assert outputs.keys() == {"logits"}
    assert outputs["logits"].dtype == np.float32
    assert outputs["logits"].shape == inputs["option_questions"].shape
    assert np.isfinite(outputs["logits"]).all()
    padding = inputs["option_questions"] < 0
    assert padding.any()
    assert (outputs["logits"][padding] == np.finfo(np.float32).min).all()


def test_a_record_alone_has_the_logits_it_has_in_a_batch(engine: Engine, inputs: Tensors) -> None:
    together = engine.run(inputs)["logits"]
    length, options = inputs["sequence_lengths"][1], int((inputs["option_questions"][1] >= 0).sum())
    alone = {
        name: array[:, 1:2, :length] if name == "position_ids" else array if name == "media_embeddings" else array[1:2]
        for name, array in inputs.items()
    }
    for name in ("input_ids", "media_rows"):
        alone[name] = alone[name][:, :length]
    for name in ("option_spans", "option_questions"):
        alone[name] = alone[name][:, :options]
    np.testing.assert_allclose(engine.run(alone)["logits"][0], together[1, :options], rtol=0, atol=1e-5)


def test_what_lies_in_the_padding_does_not_matter(engine: Engine, inputs: Tensors) -> None:
    dirty = {name: array.copy() for name, array in inputs.items()}
    for row, length in enumerate(inputs["sequence_lengths"]):
        dirty["input_ids"][row, length:] = 7
    found, expected = engine.run(dirty)["logits"], engine.run(inputs)["logits"]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_an_empty_record_is_finite_and_leaves_the_others_alone(engine: Engine, inputs: Tensors) -> None:
    """Engines with fixed batch sizes pad a batch with records of no tokens, questions or options."""
    expected = engine.run(inputs)["logits"]
    padded = {}
    for name, array in inputs.items():
        axis = 1 if name == "position_ids" else 0
        extra = np.zeros_like(array.take([0], axis))
        if name in ("media_rows", "option_questions"):
            extra[:] = -1
        padded[name] = array if name == "media_embeddings" else np.concatenate([array, extra], axis)
    found = engine.run(padded)["logits"]
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[:-1], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x.pop("media_rows"), r"missing inputs \['media_rows'\]"),
        (lambda x: x.update(extra=np.zeros(1)), r"missing inputs \['extra'\]"),
        (lambda x: x.update(input_ids=x["input_ids"].astype(np.int32)), "input_ids is int32"),
        (lambda x: x.update(sequence_lengths=x["sequence_lengths"][:-1]), "sequence_lengths"),
        (lambda x: x.update(question_types=x["question_types"][:, :-1]), "question_types"),
        (lambda x: x.update(media_embeddings=np.zeros((1, 5), np.float32)), "hidden = 96"),
        (lambda x: x.update({k: v[:0] for k, v in x.items() if k != "position_ids"}), "input_ids"),
    ],
)
def test_inputs_outside_the_contract_are_named(engine: Engine, inputs: Tensors, change: Any, said: str) -> None:
    change(inputs)
    with pytest.raises(EngineError, match=said):
        engine.run(inputs)


def test_info_says_what_runs(engine: Engine) -> None:
    assert {"engine", "version", "precision"} <= engine.info().keys()


def test_a_closed_engine_refuses(engine: Engine, inputs: Tensors) -> None:
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.run(inputs)


@pytest.mark.parametrize("graph", ["text", "vision"])
def test_the_contract_is_what_the_manifest_says(graph: str, bundles: dict[str, Path]) -> None:
    record, contract = read_manifest(bundles["odd"]).graphs[graph], CONTRACTS[graph]
    assert {t.name: (t.dtype, tuple(t.axes)) for t in record.inputs} == contract.inputs
    assert [(t.name, tuple(t.axes)) for t in record.outputs] == [(contract.output, contract.output_axes)]


def test_unknown_engines_and_settings_are_refused(bundles: dict[str, Path]) -> None:
    bundle = open_bundle(bundles["odd"])
    with pytest.raises(SettingError, match="expected one of auto, onnxruntime, onnxruntime-cuda"):
        open_engine("cuda", bundle)
    with pytest.raises(SettingError, match="threads is 0"):
        OnnxRuntimeEngine(bundle, threads=0)


def test_a_model_larger_than_memory_is_refused_before_loading(
    bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = open_bundle(bundles["odd"])
    monkeypatch.setattr("os.sysconf", lambda name: 1000)
    with pytest.raises(EngineError, match="needs about"):
        OnnxRuntimeEngine(bundle)


def fake_clef(bundles: dict[str, Path], engine: FakeEngine, **settings: Any) -> Clef:
    return ClefClass(read_manifest(bundles["odd"]), Encoder(bundles["odd"] / "tokenizer.json"), engine, **settings)


def test_logits_that_are_not_finite_are_an_error(bundles: dict[str, Path]) -> None:
    engine = FakeEngine(96, lambda inputs: {"logits": np.full(inputs["option_questions"].shape, np.nan, np.float32)})
    with pytest.raises(EngineError, match="not finite"):
        fake_clef(bundles, engine).decide(samples.ticket())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_length": 0}, "max_length is 0"),
        ({"max_length": 300_000}, "this model takes 1 to 262144"),
        ({"truncation": "silent"}, "expected one of report, refuse"),
        ({"confidence": "high"}, "expected one of max, jev, entropy"),
        ({"max_state_tokens": -1}, "max_state_tokens is -1"),
        ({"max_length": "5"}, "max_length is '5'"),
        ({"max_length": True}, "max_length is True"),
        ({"max_state_tokens": 1.5}, "max_state_tokens is 1.5"),
        ({"limits": 3}, r"expected Limits\("),
        ({"pass_limits": None}, r"expected PassLimits\("),
    ],
)
def test_impossible_settings_are_refused(bundles: dict[str, Path], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        fake_clef(bundles, FakeEngine(96), **settings)


def test_a_cpu_shares_a_pass_to_some_gain(bundles: dict[str, Path]) -> None:
    """Beyond some tokens tensors leave the caches: what is shared is bounded, one record alone is not."""
    engine = OnnxRuntimeEngine(open_bundle(bundles["odd"]), "text", 1)
    assert engine.fits({"batch": 8, "sequence": 128, "questions": 9, "options": 99})
    assert not engine.fits({"batch": 9, "sequence": 128, "questions": 1, "options": 2})
    vision = OnnxRuntimeEngine(open_bundle(bundles["odd"]), "vision", 1)
    assert (vision.fits({"groups": 4, "patches": 256}), vision.fits({"groups": 5, "patches": 256})) == (True, False)
    with Clef.load(bundles["odd"]) as clef:
        encodings = [clef.encode({"model": "m", "state": "x" * 200, "questions": {"q": {"type": "noul"}}})] * 8
        long = clef.encode({"model": "m", "state": "x" * 3000, "questions": {"q": {"type": "noul"}}})
        assert long.tokens > SHARED_PASS
        assert next(len(indices) for indices in clef.plan([*encodings, long])) == 1
        assert max(len(indices) for indices in clef.plan(encodings)) == SHARED_PASS // encodings[0].tokens
