"""Passes: bounds, order, and that a batch is the sum of its records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clef_trt import Clef, RequestError, TooLongError, samples
from clef_trt.batch import PassLimits, attention_bytes, plan_passes
from clef_trt.bundle import ModelRecord, read_manifest
from clef_trt.encode import Encoder
from clef_trt.fake import FakeEngine

TEXTS = [request for request in samples.requests() if "images" not in request]
MODEL = ModelRecord({"hidden": 96}, 262144, 12, 16, 16, 4, 256, {})


@settings(derandomize=True, max_examples=300)
@given(
    st.lists(st.integers(1, 20_000), max_size=40),
    st.integers(1, 40_000),
    st.integers(1, 2**31),
)
def test_passes_keep_their_bounds_and_lose_nothing(lengths: list[int], tokens: int, size: int) -> None:
    passes = plan_passes(lengths, MODEL, PassLimits(tokens, size))
    assert sorted(i for indices in passes for i in indices) == list(range(len(lengths)))
    for indices in passes:
        longest = max(lengths[i] for i in indices)
        assert all(2 * lengths[i] >= longest for i in indices)
        if len(indices) > 1:
            assert len(indices) * longest <= tokens
            assert attention_bytes(MODEL, len(indices), longest) <= size


def test_attention_memory_grows_linearly_beyond_a_tile() -> None:
    assert attention_bytes(MODEL, 1, 100) == 4 * 16 * 100 * 100
    assert attention_bytes(MODEL, 2, 10_000) == 4 * 2 * 16 * 256 * 10_000


def clef(bundles: dict[str, Path], engine: FakeEngine, pass_limits: PassLimits) -> Clef:
    encoder = Encoder(bundles["odd"] / "tokenizer.json")
    return Clef(read_manifest(bundles["odd"]), encoder, engine, pass_limits=pass_limits)


def test_order_is_kept_and_passes_stay_under_the_token_bound(bundles: dict[str, Path]) -> None:
    engine = FakeEngine(96)
    batched = clef(bundles, engine, PassLimits(padded_tokens=3000))
    requests = TEXTS * 3
    answers = batched.decide_batch(requests)
    assert len(engine.passes) > 1
    assert all(batch == 1 or batch * sequence <= 3000 for batch, sequence in engine.passes)
    for request, answer in zip(requests, answers, strict=True):
        assert answer == batched.decide(request)


def test_what_is_too_long_stays_so_in_a_batch(bundles: dict[str, Path]) -> None:
    encoder = Encoder(bundles["odd"] / "tokenizer.json")
    short = Clef(read_manifest(bundles["odd"]), encoder, FakeEngine(96), max_length=1000, truncation="refuse")
    with pytest.raises(TooLongError) as error:
        short.decide_batch([TEXTS[-1], TEXTS[0]])
    assert error.value.limit_tokens == 1000 < error.value.needed_tokens
    assert [fault.loc for fault in error.value.faults] == [(1,)]


@pytest.mark.parametrize("requests", [None, {}, TEXTS[0], "text", iter(TEXTS)])
def test_a_batch_is_a_list(requests: Any, bundles: dict[str, Path]) -> None:
    with pytest.raises(RequestError, match="expected a list of requests"):
        clef(bundles, FakeEngine(96), PassLimits()).decide_batch(requests)


def test_passes_are_such_as_the_engine_takes(bundles: dict[str, Path]) -> None:
    """A plan's profiles bound the batch: more short records than that are several passes, not an error."""
    engine = FakeEngine(96, most={"batch": 2, "questions": 4})
    answers = clef(bundles, engine, PassLimits()).decide_batch(TEXTS)
    assert max(batch for batch, _ in engine.passes) == 2
    assert answers == clef(bundles, FakeEngine(96), PassLimits()).decide_batch(TEXTS)


def test_an_empty_batch_is_empty(bundles: dict[str, Path]) -> None:
    assert clef(bundles, FakeEngine(96), PassLimits()).decide_batch([]) == []


def test_faults_of_a_batch_name_the_request_and_nothing_is_run(bundles: dict[str, Path]) -> None:
    engine = FakeEngine(96)
    good, bad = samples.ticket(), samples.ticket() | {"model": 3}
    with pytest.raises(RequestError) as error:
        clef(bundles, engine, PassLimits()).decide_batch([good, bad, {"state": 1}])
    places = [fault.loc for fault in error.value.faults]
    assert places == [(1, "model"), (2, "model"), (2, "questions")]
    assert engine.passes == []


def test_logits_come_per_request_and_question(bundles: dict[str, Path]) -> None:
    found = clef(bundles, FakeEngine(96), PassLimits()).logits(TEXTS)
    for request, logits in zip(TEXTS, found, strict=True):
        sizes = [len(q.get("criteria", {})) if q["type"] != "noul" else 2 for q in request["questions"].values()]
        assert [len(values) for values in logits] == sizes
        assert all(values.dtype == np.float32 for values in logits)
