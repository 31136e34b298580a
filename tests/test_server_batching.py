"""Which requests share a pass, which goes first, and that nobody gets another's answer."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import BODY, NOUL, ROUTE, Held, fake_clef, running

from clef_trt import Clef, EngineError
from clef_trt.fake import FakeEngine
from clef_trt.server.batcher import Batcher, PassReport
from clef_trt.types import Encoding


def encoding(clef: Clef, words: int) -> Encoding:
    return clef.encode({"model": "m", "state": " word" * words, "questions": {"q": NOUL}})


def with_batcher(clef: Clef, work: Callable[[Batcher], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    async def run() -> Any:
        values = {"batch": 32, "padded_tokens": 16384, "window_s": 0.005, "patience_s": 60.0} | settings
        batcher = Batcher(clef, **values)
        task = asyncio.create_task(batcher.run())
        try:
            async with asyncio.timeout(30):
                return await work(batcher)
        finally:
            task.cancel()

    return asyncio.run(run())


async def queued_behind(batcher: Batcher, held: Held, first: Encoding, others: list[Encoding]) -> list[float]:
    """Run `first` alone, `others` having come meanwhile; when each of them was started, in their order."""
    tasks = [asyncio.create_task(batcher.logits(first))]
    while not held.begun.is_set():
        await asyncio.sleep(0.001)
    tasks += [asyncio.create_task(batcher.logits(one)) for one in others]
    await asyncio.sleep(0.01)
    assert len(batcher) == len(others)
    held.free.set()
    return [entry.started for entry in (await asyncio.gather(*tasks))[1:]]


def order(starts: list[float]) -> list[int]:
    """The number of each one's pass."""
    return [sorted(set(starts)).index(start) for start in starts]


def behind(others: list[int], **settings: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """Of requests of so many words that come during a pass: the number of each one's pass, and the passes."""
    held = Held()
    engine = FakeEngine(96, held)
    clef = fake_clef(engine)
    encodings = [encoding(clef, words) for words in others]
    starts = with_batcher(clef, lambda b: queued_behind(b, held, encoding(clef, 10), encodings), **settings)
    return order(starts), engine.passes[1:]


def test_what_waits_goes_together_in_one_pass_of_like_lengths() -> None:
    numbers, passes = behind([20] * 5 + [400] * 2)
    assert numbers == [0] * 5 + [1] * 2
    assert [batch for batch, _ in passes] == [5, 2]


def test_a_pass_has_its_largest_size() -> None:
    numbers, _ = behind([20] * 7, batch=3)
    assert numbers == [0, 0, 0, 1, 1, 1, 2]


def test_a_pass_has_at_most_so_many_padded_tokens() -> None:
    each = encoding(fake_clef(), 20).tokens
    numbers, _ = behind([20] * 5, padded_tokens=2 * each)
    assert numbers == [0, 0, 1, 1, 2]
    assert behind([20] * 3, padded_tokens=1)[0] == [0, 1, 2]  # one alone may be longer


def test_nobody_waits_for_more_than_a_pass_takes() -> None:
    held = Held()
    clef = fake_clef(FakeEngine(96, held, most={"batch": 2}))
    encodings = [encoding(clef, 20)] * 4
    begun = time.perf_counter()
    with_batcher(clef, lambda b: queued_behind(b, held, encodings[0], encodings), window_s=20.0)
    assert time.perf_counter() - begun < 10


def test_no_record_is_padded_to_more_than_twice_its_length() -> None:
    clef = fake_clef()
    words = [0, 100, 250, 400, 600, 900, 1500, 2500]
    lengths = [encoding(clef, count).tokens for count in words]
    numbers, _ = behind(words)
    for number in set(numbers):
        together = [length for length, its in zip(lengths, numbers, strict=True) if its == number]
        assert max(together) <= 2 * min(together)


def test_short_ones_go_before_long_ones() -> None:
    numbers, _ = behind([400, 1500, 20, 400, 20])
    assert numbers == [1, 2, 0, 1, 0]


def test_the_oldest_goes_once_shorter_ones_had_the_time_of_the_pass_before() -> None:
    clef = fake_clef(FakeEngine(96, lambda _: time.sleep(0.03)))
    first, long, short = (encoding(clef, words) for words in (10, 8000, 20))

    async def work(batcher: Batcher) -> list[float]:
        tasks = [asyncio.create_task(batcher.logits(first))]
        await asyncio.sleep(0.01)
        tasks += [asyncio.create_task(batcher.logits(one)) for one in (long, *[short] * 6)]
        return [entry.started for entry in (await asyncio.gather(*tasks))[1:]]

    numbers = order(with_batcher(clef, work, batch=1, patience_s=0.0))
    assert numbers[0] in (1, 2)  # the first pass was the oldest's: one or two short ones have its time
    assert sorted(numbers[1:]) == numbers[1:]


def test_a_long_one_does_not_starve_under_a_stream_of_short_ones() -> None:
    engine = FakeEngine(96, lambda _: time.sleep(0.005))
    clef = fake_clef(engine)
    short, long = encoding(clef, 10), encoding(clef, 3000)

    async def work(batcher: Batcher) -> float:
        stop = False

        async def stream() -> None:
            while not stop:
                await batcher.logits(short)

        streams = [asyncio.create_task(stream()) for _ in range(4)]
        await asyncio.sleep(0.02)
        begun = time.perf_counter()
        await batcher.logits(long)
        spent_s = time.perf_counter() - begun
        stop = True
        await asyncio.gather(*streams)
        return spent_s

    assert with_batcher(clef, work, patience_s=0.1, batch=1) < 1


def test_a_burst_of_long_ones_holds_a_short_one_up_by_one_pass() -> None:
    long_s, short_s = 0.06, 0.002
    engine = FakeEngine(96, lambda inputs: time.sleep(long_s if inputs["input_ids"].shape[1] > 4000 else short_s))
    clef = fake_clef(engine)
    short, long = encoding(clef, 10), encoding(clef, 9000)

    async def work(batcher: Batcher) -> list[float]:
        burst = [asyncio.create_task(batcher.logits(long)) for _ in range(12)]
        waits = []
        await asyncio.sleep(0.03)
        while not all(task.done() for task in burst):
            begun = time.perf_counter()
            await batcher.logits(short)
            waits.append(time.perf_counter() - begun)
            await asyncio.sleep(0.005)
        return waits

    waits = with_batcher(clef, work, batch=1, patience_s=0.05)
    assert len(waits) >= 6
    assert float(np.quantile(waits, 0.95)) < 2 * short_s + long_s + 0.05


def test_a_lone_request_does_not_wait_and_after_a_pass_of_several_the_window_is_used() -> None:
    reports: list[PassReport] = []
    clef = fake_clef()
    one = encoding(clef, 10)

    async def work(batcher: Batcher) -> tuple[float, float]:
        alone = (await batcher.logits(one)).started
        entry = await batcher.logits(one)
        alone = entry.started - entry.arrived
        await asyncio.gather(*(batcher.logits(one) for _ in range(4)))
        first = asyncio.create_task(batcher.logits(one))
        await asyncio.sleep(0.05)
        rest = [asyncio.create_task(batcher.logits(one)) for _ in range(3)]
        gathered = [await task for task in (first, *rest)]
        await asyncio.gather(*(batcher.logits(one) for _ in range(4)))
        late = await batcher.logits(one)
        return alone, {entry.records for entry in gathered}, late.started - late.arrived

    alone, gathered, late = with_batcher(clef, work, window_s=0.2, on_pass=reports.append)
    assert alone < 0.05
    assert gathered == {4}  # clients of the last pass came back one by one, within the window
    assert 0.1 < late < 0.5  # nobody came back: the one waits for the window, and no longer
    assert sum(report.records for report in reports) == 1 + 1 + 4 + 4 + 4 + 1


def test_a_pass_that_fails_runs_again_one_by_one() -> None:
    clef = fake_clef()
    bad = encoding(clef, 40)
    calls: list[int] = []

    def on_run(inputs: Any) -> Any:
        calls.append(len(inputs["sequence_lengths"]))
        if bad.tokens in inputs["sequence_lengths"]:
            raise RuntimeError("broken")

    held = Held()
    engine = FakeEngine(96, lambda inputs: held(inputs) or on_run(inputs))
    clef = fake_clef(engine)
    good = [encoding(clef, words) for words in (20, 30)]
    faults: list[BaseException] = []

    async def work(batcher: Batcher) -> list[Any]:
        tasks = [asyncio.create_task(batcher.logits(good[0]))]
        while not held.begun.is_set():
            await asyncio.sleep(0.001)
        tasks += [asyncio.create_task(batcher.logits(one)) for one in (good[0], bad, good[1])]
        await asyncio.sleep(0.01)
        held.free.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = with_batcher(clef, work, on_fault=faults.append)
    assert calls == [1, 3, 1, 1, 1]
    assert isinstance(results[2], RuntimeError)
    assert [type(fault) for fault in faults] == [RuntimeError]
    for result, one in ((results[1], good[0]), (results[3], good[1])):
        assert np.array_equal(result.logits.result()[0], clef.run_pass([one])[0][0])


def test_a_cancelled_request_leaves_the_queue() -> None:
    held = Held()
    engine = FakeEngine(96, held)
    clef = fake_clef(engine)
    one = encoding(clef, 10)

    async def work(batcher: Batcher) -> int:
        running_one = asyncio.create_task(batcher.logits(one))
        while not held.begun.is_set():
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(batcher.logits(one))
        await asyncio.sleep(0.01)
        for task in (waiting, running_one):
            task.cancel()
        await asyncio.sleep(0.01)
        left = len(batcher)
        held.free.set()
        assert (await batcher.logits(one)).records == 1
        return left

    assert with_batcher(clef, work) == 0


def test_an_engine_that_takes_few_records_gets_few() -> None:
    held = Held()
    engine = FakeEngine(96, held, most={"batch": 2})
    clef = fake_clef(engine)
    encodings = [encoding(clef, 20)] * 5
    with_batcher(clef, lambda b: queued_behind(b, held, encodings[0], encodings))
    assert max(batch for batch, _ in engine.passes) == 2


@pytest.mark.parametrize("kind", ["fake", "bundle"])
@pytest.mark.usefixtures("shared_passes")
def test_answers_are_those_of_decide_and_not_anothers(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "fake":
        clef, tolerance = fake_clef(FakeEngine(96, lambda _: time.sleep(0.002))), 0.0
    else:
        bundles: dict[str, Path] = request.getfixturevalue("bundles")
        clef, tolerance = Clef.load(bundles["odd"], max_length=2048), 2e-4  # padding changes the last digits
    rng = random.Random(0)
    bodies = []
    for number in range(60):
        questions = {
            f"nonce-{number}-{i}": NOUL | {"instructions": f"Is it {number}?"} for i in range(rng.randint(1, 4))
        }
        bodies.append(BODY | {"state": f"{number} " + "word " * rng.randint(1, 300), "questions": questions})
    expected = [clef.decide(body) for body in bodies]
    with running(clef, max_length=2048, warm_up_tokens=0) as server, ThreadPoolExecutor(16) as pool:
        found = [response.json() for response in pool.map(server.post, bodies)]
        assert server.metric('clef_batch_records_bucket{le="1.0"}') < 40  # most shared a pass
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["answers"].keys() == theirs["answers"].keys()
        assert ours["usage"] == theirs["usage"]
        for name, answer in ours["answers"].items():
            assert answer["noul"] == pytest.approx(theirs["answers"][name]["noul"], abs=tolerance)


def test_the_loop_is_free_while_a_large_body_is_encoded() -> None:
    with running(warm_up_tokens=0) as server:
        large = BODY | {"state": ["some words of a long state " * 20] * 1500}
        answered = threading.Thread(target=lambda: server.post(large, ROUTE))
        answered.start()
        waits = []
        while answered.is_alive():
            begun = time.perf_counter()
            server.http.get("/health")
            waits.append(time.perf_counter() - begun)
        answered.join()
    assert len(waits) > 3
    assert max(waits) < 1


def test_what_run_pass_raises_is_told() -> None:
    clef = fake_clef(FakeEngine(96, lambda inputs: {"logits": np.full(inputs["option_questions"].shape, np.inf)}))
    with pytest.raises(EngineError, match="not finite"):
        clef.run_pass([encoding(clef, 1)])
