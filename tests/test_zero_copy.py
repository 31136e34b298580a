"""Prepared tensors in and logits out without a copy, in memory of any library; and one Clef under many threads."""

from __future__ import annotations

import array
import ctypes
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from random_requests import random_requests

from clef_trt import Clef, EngineError, samples
from clef_trt.cli import main
from clef_trt.contract import TEXT
from clef_trt.exchange import as_array
from clef_trt.fake import FakeEngine


@pytest.fixture(scope="module")
def clef(bundles: dict[str, Path]) -> Any:
    with Clef.load(bundles["odd"], threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def tensors(clef: Clef) -> Any:
    return clef.tensors(random_requests(3, seed=11))


class Seen:
    """An engine that keeps where its inputs and its output lie."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.places: dict[str, int] = {}

    def run(self, inputs: Any, out: Any = None) -> Any:
        arrays = inputs if out is None else inputs | {"out": out}
        self.places = {name: place(value) for name, value in arrays.items()}
        return self.engine.run(inputs, out)


def place(value: np.ndarray) -> int:
    return int(value.__array_interface__["data"][0])


def test_prepared_tensors_give_the_logits_of_their_requests(clef: Clef, tensors: Any) -> None:
    logits = clef.run_tensors(tensors)
    assert logits.dtype == np.float32
    assert logits.shape == tensors["option_questions"].shape
    assert (logits[tensors["option_questions"] < 0] == np.finfo(np.float32).min).all()
    for row, questions in zip(logits, clef.logits(random_requests(3, seed=11)), strict=True):
        values = np.concatenate(questions)
        np.testing.assert_allclose(row[: len(values)], values, rtol=0, atol=1e-5)


def test_tensors_of_torch_are_read_and_written_where_they_are(clef: Clef, tensors: Any) -> None:
    expected = clef.run_tensors(tensors)
    given = {name: torch.from_numpy(value.copy()) for name, value in tensors.items()}
    out = torch.full(expected.shape, -7.0)
    seen = Seen(clef.engine)
    returned = Clef(clef.manifest, clef._encoder, seen).run_tensors(given, out)  # type: ignore[arg-type]
    assert seen.places == {name: value.data_ptr() for name, value in given.items()} | {"out": out.data_ptr()}
    assert place(returned) == out.data_ptr()
    assert np.array_equal(out.numpy(), expected)


def test_out_is_written_by_the_engine_itself(clef: Clef, tensors: Any) -> None:
    expected = clef.run_tensors(tensors)
    ring = np.full((4, *expected.shape), np.nan, np.float32)  # a caller's buffer that holds several results
    result = clef.run_tensors(tensors, ring[2])
    assert result.base is ring
    assert np.array_equal(ring[2], expected)
    assert np.isnan(ring[[0, 1, 3]]).all()
    for engine in (clef.engine, FakeEngine(clef.manifest.model.sizes["hidden"])):
        out = np.empty_like(expected)
        assert engine.run(tensors, out)["logits"] is out
        assert np.array_equal(out, engine.run(tensors)["logits"])


def test_logits_are_shared_with_other_libraries(clef: Clef, tensors: Any) -> None:
    logits = clef.run_tensors(tensors)
    before = logits.copy()
    shared = torch.from_dlpack(logits)
    assert shared.data_ptr() == place(logits)
    assert memoryview(logits).c_contiguous
    clef.run_tensors(clef.tensors([samples.ticket()]))  # a later pass leaves an earlier result alone
    del logits
    assert np.array_equal(shared.numpy(), before)


def test_inputs_may_change_between_passes(clef: Clef, tensors: Any) -> None:
    """Nothing of an earlier pass is kept: the same arrays, filled anew, give the new answer."""
    reused = {name: value.copy() for name, value in tensors.items()}
    out = np.empty(tensors["option_questions"].shape, np.float32)
    clef.run_tensors(reused, out)
    first = out.copy()
    reused["input_ids"][:] = np.roll(reused["input_ids"], 1, axis=1)
    clef.run_tensors(reused, out)
    assert not np.array_equal(out, first)
    assert np.array_equal(out, clef.run_tensors({name: value.copy() for name, value in reused.items()}))
    reused["input_ids"][:] = tensors["input_ids"]
    assert np.array_equal(clef.run_tensors(reused, out), first)


def test_what_is_not_contiguous_or_not_writable_still_goes_in(clef: Clef, tensors: Any) -> None:
    expected = clef.run_tensors(tensors)
    strided = {name: np.repeat(value, 2, axis=0)[::2] for name, value in tensors.items()}
    assert not strided["input_ids"].flags.c_contiguous
    frozen = {name: value.copy() for name, value in tensors.items()}
    for value in frozen.values():
        value.flags.writeable = False
    for given in (strided, frozen):
        assert np.array_equal(clef.run_tensors(given), expected)
        assert np.array_equal(clef.run_tensors(given, np.empty_like(expected)), expected)


class Interface:
    """Anything with numpy's array interface."""

    def __init__(self, value: np.ndarray) -> None:
        self.__array_interface__ = value.__array_interface__
        self._kept = value


class OnDevice:
    """What a tensor of a GPU looks like from outside."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 1)

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("nothing may be copied from a device unasked")


def test_as_array_shares_memory() -> None:
    numbers = np.arange(6, dtype=np.int64).reshape(2, 3)
    assert as_array(numbers, "x") is numbers
    for value in (Interface(numbers), memoryview(numbers), torch.from_numpy(numbers)):
        shared = as_array(value, "x")
        assert place(shared) == place(numbers)
        assert shared.shape == (2, 3)
        assert shared.flags.writeable
    row = as_array(array.array("q", [1, 2, 3]), "x")
    assert row.dtype == np.int64
    block = (ctypes.c_float * 3 * 2)()
    as_array(block, "x")[1, 2] = 5
    assert block[1][2] == 5
    held = as_array(torch.arange(4.0), "x")  # the tensor has no other owner than the view
    assert held.tolist() == [0, 1, 2, 3]


def test_as_array_refuses_what_it_cannot_share() -> None:
    with pytest.raises(EngineError, match=r"input_ids lies on a device \(DLPack 2:1\); copy it to the CPU"):
        as_array(OnDevice(), "input_ids")
    for value in (
        [[1, 2]],
        None,
        "text",
        b"bytes",
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, requires_grad=True),
    ):
        with pytest.raises(EngineError, match="x "):
            as_array(value, "x")


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (lambda shape: np.empty(shape, np.float64), "out is float64"),
        (lambda shape: np.empty((shape[0], shape[1] + 1), np.float32), "expected float32"),
        (lambda shape: np.empty(shape[1], np.float32), "expected float32"),
        (lambda shape: np.empty((shape[0], 2 * shape[1]), np.float32)[:, ::2], "not contiguous"),
        (lambda shape: np.broadcast_to(np.float32(0), shape).copy().view(Locked), "read-only"),
        (lambda shape: memoryview(bytes(4 * shape[0] * shape[1])).cast("f", shape), "read-only"),
    ],
)
def test_out_that_does_not_fit_is_refused(clef: Clef, tensors: Any, out: Any, said: str) -> None:
    shape = tensors["option_questions"].shape
    for engine in (clef.engine, FakeEngine(clef.manifest.model.sizes["hidden"])):
        with pytest.raises(EngineError, match=said):
            Clef(clef.manifest, clef._encoder, engine).run_tensors(tensors, out(shape))


class Locked(np.ndarray):
    """An array that may not be written."""

    def __array_finalize__(self, _: Any) -> None:
        self.flags.writeable = False


def test_tensors_outside_the_contract_are_refused(clef: Clef, tensors: Any) -> None:
    with pytest.raises(EngineError, match="unknown or missing inputs"):
        clef.run_tensors({name: value for name, value in tensors.items() if name != "media_rows"})
    with pytest.raises(EngineError, match="input_ids is int32"):
        clef.run_tensors(tensors | {"input_ids": tensors["input_ids"].astype(np.int32)})


def test_encode_writes_what_tensors_holds(
    clef: Clef, bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "request.json").write_text(json.dumps(samples.ticket()))
    expected, encoding = clef.tensors([samples.ticket()]), clef.encode(samples.ticket())
    for suffix in ("safetensors", "npz"):
        target = tmp_path / f"request.{suffix}"
        assert main(["encode", str(bundles["odd"]), str(tmp_path / "request.json"), "--tensors", str(target)]) == 0
        assert f"{encoding.tokens} tokens, {encoding.options} options" in capsys.readouterr().out
        loaded = safetensors.numpy.load_file(target) if suffix == "safetensors" else dict(np.load(target))
        assert loaded.keys() == expected.keys() == TEXT.inputs.keys()
        assert all(np.array_equal(loaded[name], value) for name, value in expected.items())
        assert all(loaded[name].dtype == value.dtype for name, value in expected.items())
    with safetensors.safe_open(tmp_path / "request.safetensors", "numpy") as file:
        (questions,) = json.loads(file.metadata()["questions"])
    assert [question["id"] for question in questions] == [question.id for question in encoding.questions]
    assert questions[2]["options"] == list(encoding.questions[2].option_ids)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["request.json", "request.npz", "request.safetensors"]


def test_encode_opens_no_text_engine(bundles: dict[str, Path], tmp_path: Path) -> None:
    """Tensors for another machine's TensorRT are written where nothing runs the bundle."""
    bundle = tmp_path / "bundle"
    shutil.copytree(bundles["odd"], bundle)
    manifest = json.loads((bundle / "manifest.json").read_text()) | {"precision": "bf16"}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "request.json").write_text(json.dumps(samples.ticket()))
    target = tmp_path / "request.npz"
    with pytest.raises(EngineError, match="is bf16"):
        Clef.load(bundle)
    assert main(["encode", str(bundle), str(tmp_path / "request.json"), "--tensors", str(target)]) == 0
    assert target.exists()


def test_encode_runs_the_vision_graph(bundles: dict[str, Path], tmp_path: Path) -> None:
    request = samples.requests()[-1]
    (tmp_path / "request.json").write_text(json.dumps(request))
    target = tmp_path / "request.npz"
    assert main(["encode", str(bundles["narrow"]), str(tmp_path / "request.json"), "--tensors", str(target)]) == 0
    with Clef.load(bundles["narrow"]) as clef:
        expected = clef.tensors([request])
    assert all(np.array_equal(np.load(target)[name], value) for name, value in expected.items())
    assert expected["media_embeddings"].any()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tensors", "x.bin"], "neither of .safetensors, .npz"),
        (["--tensors", "no/x.npz"], "cannot be written"),
        (["--tensors", "x.npz", "--max-length", "0"], "--max-length is 0"),
        (["--tensors", "x.npz", "--max-length", "9"], "9"),
    ],
)
def test_encode_refuses(
    bundles: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("request.json").write_text(json.dumps(samples.ticket()))
    assert main(["encode", str(bundles["odd"]), "request.json", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["request.json"]


def test_many_threads_on_one_clef(clef: Clef) -> None:
    requests = random_requests(12, seed=5)
    alone = [clef.decide(request) for request in requests]
    prepared = [clef.tensors([request]) for request in requests]
    logits = [clef.run_tensors(tensors) for tensors in prepared]

    def one(i: int) -> bool:
        own = np.empty_like(logits[i % 12])
        clef.run_tensors(prepared[i % 12], own)  # inputs are shared by all threads, outputs are each one's own
        return clef.decide(requests[i % 12]) == alone[i % 12] and np.array_equal(own, logits[i % 12])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(96)))


def test_one_clef_per_thread(bundles: dict[str, Path]) -> None:
    requests = random_requests(6, seed=6)

    def one(name: str) -> Any:
        with Clef.load(bundles[name], threads=1) as own:
            return name, [own.decide(request) for request in requests]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(one, ["odd", "narrow", "odd", "narrow"]))
    assert answers[0] == answers[2]
    assert answers[1] == answers[3]
    assert answers[0][1] != answers[1][1]


@pytest.mark.slow
def test_python_goes_on_while_a_pass_is_inside_the_engine(clef: Clef) -> None:
    """Were the interpreter's lock held, the counter would stand still for the whole pass."""
    long = clef.tensors([{"model": "m", "state": "word " * 4000, "questions": {"q": {"type": "noul"}}}])
    out = np.empty(long["option_questions"].shape, np.float32)
    for how in (None, out):
        clef.run_tensors(long, how)
        gaps, done = [0.0], threading.Event()

        def count(gaps: list[float] = gaps, done: threading.Event = done) -> None:
            last = time.perf_counter()
            while not done.is_set():
                now = time.perf_counter()
                gaps[0], last = max(gaps[0], now - last), now

        counter = threading.Thread(target=count)
        counter.start()
        start = time.perf_counter()
        clef.run_tensors(long, how)
        spent = time.perf_counter() - start
        done.set()
        counter.join()
        assert gaps[0] < spent / 2
