"""Every stored text case of the published reference, one by one and in mixed batches."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RELEASES, control_tokens, golden_cases

from clef_trt import Clef, TooLongError

TOLERANCE = 1e-4
GIANTS = ("questions_64", "options_255")
CASES = [(release, case) for release in RELEASES for case in golden_cases(release)]
IDS = [f"{release}-{case['name']}" for release, case in CASES]


@pytest.fixture(scope="module")
def load(bundles: dict[str, Path]) -> Any:
    """Clef over a golden bundle with a case's settings, opened once per setting."""
    opened: dict[Any, Clef] = {}

    def get(release: str, max_length: int = 16384, tokens: str = "text") -> Clef:
        key = (release, max_length, tokens)
        if key not in opened:
            opened[key] = Clef.load(bundles[release], max_length=max_length, control_tokens=tokens)
        return opened[key]

    return get


def test_there_are_as_many_cases_as_the_golden_files_promise() -> None:
    assert len(CASES) == 2 * 43


@pytest.mark.parametrize(("release", "case"), CASES, ids=IDS)
def test_case(release: str, case: dict[str, Any], load: Any) -> None:
    clef = load(release, case["max_length"], control_tokens(case))
    if "error" in case:
        with pytest.raises(TooLongError) as error:
            clef.decide(case["request"])
        assert (error.value.needed_tokens, error.value.limit_tokens) == (411, 100)
        assert "411" in case["error"]
        assert "411" in str(error.value)
        assert "100" in str(error.value)
        return
    encoding = clef.encode(case["request"])
    assert encoding.input_ids.tolist() == case["input_ids"]
    for question, stored in zip(encoding.questions, case["questions"], strict=True):
        assert question.id == stored["id"]
        assert ("noul", "choice", "score").index(question.type) == stored["type"]
        assert list(question.span) == stored["span"]
        assert [list(span) for span in question.option_spans] == stored["option_spans"]
        assert list(question.option_ids) == stored["option_ids"]
    assert_logits(clef.logits([case["request"]])[0], case)
    assert_response(clef.decide(case["request"]), case["response"])


def assert_logits(found: list[np.ndarray], case: dict[str, Any]) -> None:
    for logits, stored in zip(found, case["logits"], strict=True):
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, stored, rtol=0, atol=TOLERANCE, err_msg=case["name"])


def assert_response(found: dict[str, Any], stored: dict[str, Any]) -> None:
    found["usage"].pop("truncated_state_tokens")
    assert list(found) == list(stored)
    assert found["model"] == stored["model"]
    assert found["usage"] == stored["usage"]
    assert list(found["answers"]) == list(stored["answers"])
    for name, expected in stored["answers"].items():
        answer = found["answers"][name]
        assert list(answer) == list(expected)
        for key, value in expected.items():
            if isinstance(value, float):
                assert abs(answer[key] - value) <= 1.5e-4, (name, key)
            elif key == "probabilities":
                assert list(answer[key]) == list(value)
                assert all(abs(answer[key][option] - value[option]) <= 1.5e-4 for option in value)
            else:
                assert answer[key] == value, (name, key)


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.usefixtures("shared_passes")
def test_mixed_batches_in_any_order_give_the_same_logits(release: str, size: int, load: Any) -> None:
    cases = [c for c in golden_cases(release) if "error" not in c and c["max_length"] == 16384]
    cases = [c for c in cases if c["name"] not in GIANTS and control_tokens(c) == "text"]
    random.Random(size).shuffle(cases)
    clef = load(release)
    for start in range(0, len(cases), size):
        batch = cases[start : start + size]
        for case, logits in zip(batch, clef.logits([case["request"] for case in batch]), strict=True):
            assert_logits(logits, case)
        for case, response in zip(batch, clef.decide_batch([case["request"] for case in batch]), strict=True):
            assert_response(response, case["response"])


@pytest.mark.slow
def test_peak_memory_over_all_cases_is_under_8_gb(bundles: dict[str, Path]) -> None:
    """In a process of its own. (Its ru_maxrss would start at this process's, from which it is forked.)"""
    program = (
        "import json, sys\n"
        "from clef_trt import Clef\n"
        "cases = [c for c in json.load(open(sys.argv[2])) if not {'images', 'videos'} & c['request'].keys()]\n"
        "clef = Clef.load(sys.argv[1])\n"
        "requests = [c['request'] for c in cases]\n"
        "longest = max(clef.encode(request).tokens for request in requests)\n"
        "clef.decide_batch(requests)\n"
        "print(longest, next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    for release in RELEASES:
        golden = Path(__file__).parent / "golden" / f"{release}.json"
        run = subprocess.run(
            [sys.executable, "-c", program, str(bundles[release]), str(golden)],
            capture_output=True,
            text=True,
            check=True,
        )
        longest, kilobytes = map(int, run.stdout.split())
        assert longest == 15807
        assert kilobytes < 8e6
