"""The C++ hosts: compiled by g++, their answers against Python's, their errors, and what they do to memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import RELEASES, control_tokens, golden_cases
from random_requests import random_requests

from clef_trt import Clef, TooLongError, samples
from clef_trt.answer import softmax
from clef_trt.cpp import include_folder
from clef_trt.tensor_file import write_tensors

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

HERE = Path(__file__).parent
EXAMPLES = include_folder() / "examples"
CASES = [(release, case) for release in RELEASES for case in golden_cases(release)]
# With them set, the compiler's own warnings are errors as Python's are.
FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
# Leaks of the interpreter and of libraries that keep what they have to the end; ours would be in the program itself.
SUPPRESSIONS = "".join(f"leak:{name}\n" for name in ("libpython", "/site-packages/", "/lib-dynload/", "libstdc++"))


def told(option: str) -> str:
    run = subprocess.run([sys.executable, "-m", "clef_trt.cpp", option], check=True, capture_output=True, text=True)
    return run.stdout.strip()


def compiled(source: Path, target: Path, *flags: str) -> Path:
    run = subprocess.run(["g++", *FLAGS, str(source), "-o", str(target), *flags], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return target


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs; those that embed Python are built side by side."""
    folder = tmp_path_factory.mktemp("programs")
    embedding = told("--embed").split()
    compiled(EXAMPLES / "tensors_example.cpp", folder / "tensors_example", told("--includes"), "-ldl")
    for source in (EXAMPLES / "host_example.cpp", EXAMPLES / "host_load.cpp", HERE / "host_cases.cpp"):
        compiled(source, folder / source.stem, *embedding)
    return folder


def settings(case: dict[str, Any]) -> dict[str, Any]:
    return {"max_length": case["max_length"], "control_tokens": control_tokens(case)}


def run_cases(program: Path, lines: list[tuple[Path, dict[str, Any], Any]], **more: str) -> list[list[str]]:
    """Per (bundle, settings, request) what host_cases answered, its fields apart."""
    text = "".join(
        f"{bundle}\t{json.dumps(given)}\t{request if isinstance(request, str) else json.dumps(request)}\n"
        for bundle, given, request in lines
    )
    run = subprocess.run(
        [str(program), sys.executable], input=text, capture_output=True, text=True, env={**os.environ, **more}
    )
    assert run.returncode == 0, run.stderr
    answers = [line.split("\t") for line in run.stdout.split("\n")[:-1]]  # splitlines would split at U+2028
    assert len(answers) == len(lines)
    return answers


@pytest.fixture(scope="module")
def load(bundles: dict[str, Path]) -> Any:
    """Clef with the settings of a case, opened once."""
    opened: dict[str, Clef] = {}

    def get(release: str, case: dict[str, Any]) -> Clef:
        key = release + json.dumps(settings(case))
        if key not in opened:
            opened[key] = Clef.load(bundles[release], **settings(case))
        return opened[key]

    return get


def test_all_golden_text_cases_embedded_are_pythons_to_the_last_digit(
    programs: Path, bundles: dict[str, Path], load: Any
) -> None:
    # By settings, so that a host serves many cases; several hosts follow each other in the process even so.
    cases = sorted(CASES, key=lambda item: (item[0], json.dumps(settings(item[1]))))
    answers = run_cases(programs / "host_cases", [(bundles[r], settings(c), c["request"]) for r, c in cases])
    for (release, case), answer in zip(cases, answers, strict=True):
        clef = load(release, case)
        if "error" in case:
            with pytest.raises(TooLongError) as error:
                clef.decide(case["request"])
            assert answer == ["!", "too_long", str(error.value), "411 100"]
            continue
        assert answer[0] == "=", answer
        assert answer[1] == json.dumps(clef.decide(case["request"]), ensure_ascii=False)
        (logits,) = clef.logits([case["request"]])
        assert np.array_equal(np.float32(json.loads(answer[2])), np.concatenate(logits))
        assert json.loads(answer[3]) == [value for question in logits for value in softmax(question)]


def test_all_golden_text_cases_without_python_are_within_1e_5(
    programs: Path, bundles: dict[str, Path], load: Any, tmp_path: Path
) -> None:
    for release in RELEASES:
        files, expected = [], []
        for case in golden_cases(release):
            if "error" in case:
                continue
            clef = load(release, case)
            tensors = clef.tensors([case["request"]])
            files.append(tmp_path / f"{release}-{len(files)}.safetensors")
            write_tensors(files[-1], tensors, [clef.encode(case["request"])])
            expected.append(clef.run_tensors(tensors))
        command = [str(programs / "tensors_example"), str(bundles[release]), told("--onnxruntime"), *map(str, files)]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        found = [json.loads(line) for line in run.stdout.splitlines()]
        assert len(found) == len(expected) == 42
        for logits, values in zip(found, expected, strict=True):
            np.testing.assert_allclose(logits, values, rtol=0, atol=1e-5)


def test_a_mixed_batch_without_python(programs: Path, bundles: dict[str, Path], tmp_path: Path) -> None:
    requests = random_requests(5, seed=3)
    with Clef.load(bundles["odd"], threads=1) as clef:
        tensors = clef.tensors(requests)
        write_tensors(tmp_path / "five.safetensors", tensors, [clef.encode(request) for request in requests])
        expected = clef.run_tensors(tensors)
    command = [programs / "tensors_example", bundles["odd"], told("--onnxruntime"), tmp_path / "five.safetensors"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)  # padding is the lowest number there is


def test_examples(programs: Path, bundles: dict[str, Path]) -> None:
    ticket = Path(samples.__file__).parent / "sample_ticket.json"
    command = [programs / "host_example", sys.executable, bundles["odd"], ticket]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    with Clef.load(bundles["odd"]) as clef:
        assert json.loads(run.stdout) == clef.decide(json.loads(ticket.read_text()))
    assert "refund_asked  true  0." in run.stderr
    command[2] = "/nowhere"
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.startswith("bundle: /nowhere does not exist")


def test_the_readmes_program(bundles: dict[str, Path], tmp_path: Path) -> None:
    (program,) = re.findall(r"```cpp\n(.*?)```", (HERE.parent / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "host.cpp").write_text(program.replace("clef-flash.bundle", str(bundles["odd"])))
    host = compiled(tmp_path / "host.cpp", tmp_path / "host", *told("--embed").split())
    run = subprocess.run([host, sys.executable], check=True, capture_output=True, text=True)
    assert 0 < json.loads(run.stdout)["answers"]["refund"]["noul"] < 1


def test_exceptions_arrive_with_kind_message_and_places(programs: Path, bundles: dict[str, Path]) -> None:
    bundle, given = bundles["odd"], {"threads": 1}
    wrong = {"model": "m", "state": 1, "questions": {"a": {"type": "nul"}, "b": {"type": "score", "criteria": []}}}
    answers = run_cases(
        programs / "host_cases",
        [(bundle, given, "{"), (bundle, given, wrong), (bundle, {"max_length": 8}, samples.ticket()),
         (bundle / "no", given, "{}"), (bundle, {"engine": "tensorrt"}, "{}"), (bundle, {"truncation": "no"}, "{}")],
    )  # fmt: skip
    assert [answer[:2] for answer in answers] == [
        ["!", kind] for kind in ("request", "request", "too_long", "bundle", "engine", "setting")
    ]
    assert "not JSON" in answers[0][2]
    assert "questions.a.type" in answers[1][3]
    assert "questions.b.criteria" in answers[1][3]
    needed, limit = map(int, answers[2][3].split())
    assert needed > limit == 8
    assert "no manifest.json" in answers[3][2] or "does not exist" in answers[3][2]
    assert "no plan for tensorrt" in answers[4][2]
    assert "report, refuse" in answers[5][2]


def test_what_a_host_refuses_and_survives(programs: Path, bundles: dict[str, Path]) -> None:
    command = [programs / "host_cases", sys.executable, bundles["odd"]]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    lines = dict(line.split("\t", 1) for line in run.stdout.splitlines() if "\t" in line)
    assert {what: line.split("\t")[0] for what, line in lines.items()} == {
        "no such python": "host",
        "another python": "host",
        "no such bundle": "bundle",
        "an unknown setting": "setting",
        "settings that are no JSON": "request",
        "a fault of another library": "python",
        "no tensors": "engine",
        "end_python with hosts": "host",
        "an empty batch": "[]",
        "end_python": "nothing",
        "a host after end_python": "host",
        "end_python twice": "nothing",
    }
    assert "TypeError" in lines["a fault of another library"]
    assert "threads" in lines["an unknown setting"]


def test_the_tensor_host_refuses_what_it_cannot_read(programs: Path, bundles: dict[str, Path], tmp_path: Path) -> None:
    program, library = programs / "tensors_example", told("--onnxruntime")
    good = tmp_path / "good.safetensors"
    with Clef.load(bundles["odd"], threads=1) as clef:
        request = samples.ticket()
        tensors, encoding = clef.tensors([request]), clef.encode(request)
        write_tensors(good, tensors, [encoding])
        content = good.read_bytes()
        (tmp_path / "cut.safetensors").write_bytes(content[:-9])
        (tmp_path / "head.safetensors").write_bytes(content[:40])
        (tmp_path / "wide.safetensors").write_bytes(content.replace(b'"I64"', b'"U64"', 1))
        lacking = {name: array for name, array in tensors.items() if name != "media_rows"}
        write_tensors(tmp_path / "lacking.safetensors", lacking, [encoding])
        uneven = tensors | {"sequence_lengths": np.array([1, 1], np.int64)}
        write_tensors(tmp_path / "uneven.safetensors", uneven, [encoding])
    altered = tmp_path / "altered"
    shutil.copytree(bundles["odd"], altered)
    (altered / "tokenizer.json").write_bytes(b"{}")

    def message(bundle: Path, library: str, file: str) -> str:
        command = [program, bundle, library, tmp_path / file]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 1
        return run.stderr

    odd = bundles["odd"]
    assert "bundle: " in message(tmp_path / "none", library, good.name)
    assert "the manifest says" in message(altered, library, good.name)
    assert "engine: ONNX Runtime cannot be opened" in message(odd, "/nowhere/libonnxruntime.so", good.name)
    assert "is not ONNX Runtime" in message(odd, "libm.so.6", good.name)
    assert "cannot be read" in message(odd, library, "none.safetensors")
    assert "does not fit" in message(odd, library, "cut.safetensors")
    assert "truncated" in message(odd, library, "head.safetensors")
    assert "U64" in message(odd, library, "wide.safetensors")
    assert "8 inputs; expected 9" in message(odd, library, "lacking.safetensors")
    assert "axis 0 of sequence_lengths is 2; expected 1 batch" in message(odd, library, "uneven.safetensors")


@pytest.fixture(scope="module")
def short_requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("requests") / "requests.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in random_requests(16, seed=7)))
    return path


@pytest.mark.slow
def test_many_threads_get_the_answers_of_one_in_flat_memory(
    programs: Path, bundles: dict[str, Path], short_requests: Path
) -> None:
    count = os.environ.get("CLEF_SOAK_REQUESTS", "1000")  # 10,000 is the figure promised; see bench/embed.py
    command = [programs / "host_load", sys.executable, bundles["odd"], short_requests, "8", count, '{"threads": 1}']
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout)
    assert seen["wrong"] == 0
    assert seen["megabytes"][-1] < 1.03 * seen["megabytes"][0] + 4, seen


@pytest.mark.slow
def test_address_sanitizer_finds_nothing(bundles: dict[str, Path], short_requests: Path, tmp_path: Path) -> None:
    # The sanitizer makes the compiler see uninitialised use where there is none, in pybind11.
    flags = ["-fsanitize=address", "-fno-omit-frame-pointer", "-g", "-Wno-maybe-uninitialized"]
    embedding = told("--embed").split()
    (tmp_path / "suppressions").write_text(SUPPRESSIONS)
    environment = {
        "ASAN_OPTIONS": "detect_leaks=1:halt_on_error=1:detect_stack_use_after_return=1",
        "LSAN_OPTIONS": f"suppressions={tmp_path / 'suppressions'}:print_suppressions=0",
        "PYTHONMALLOC": "malloc",  # one allocation each, so that the sanitizer sees them
    }
    cases = compiled(HERE / "host_cases.cpp", tmp_path / "host_cases", *flags, *embedding)
    given = {"threads": 1}
    lines: list[tuple[Path, dict[str, Any], Any]] = [
        (bundles[release], given, request)
        for release in ("odd", "narrow", "odd")
        for request in [*short_requests.read_text().splitlines()[:4], "{", "{}", samples.ticket()]
    ]
    answers = run_cases(cases, lines, **environment)
    assert [answer[0] for answer in answers] == 3 * ["=", "=", "=", "=", "!", "!", "="]
    misused = subprocess.run(
        [cases, sys.executable, bundles["odd"]], capture_output=True, text=True, env=os.environ | environment
    )
    assert misused.returncode == 0, misused.stderr
    load = compiled(EXAMPLES / "host_load.cpp", tmp_path / "host_load", *flags, *embedding)
    run = subprocess.run(
        [load, sys.executable, bundles["odd"], short_requests, "8", "200", '{"threads": 1}'],
        capture_output=True, text=True, env=os.environ | environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    tensors = compiled(EXAMPLES / "tensors_example.cpp", tmp_path / "tensors", *flags, told("--includes"), "-ldl")
    with Clef.load(bundles["odd"], threads=1) as clef:
        write_tensors(tmp_path / "t.safetensors", clef.tensors([samples.ticket()]), [clef.encode(samples.ticket())])
    run = subprocess.run(
        [tensors, bundles["odd"], told("--onnxruntime"), tmp_path / "t.safetensors"],
        capture_output=True, text=True, env=os.environ | environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_cmake_builds_the_examples(tmp_path: Path) -> None:
    for command in (
        ["cmake", "-S", str(EXAMPLES), "-B", str(tmp_path), f"-DPython_EXECUTABLE={sys.executable}"],
        ["cmake", "--build", str(tmp_path)],
    ):
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / "host_example").exists()
    assert (tmp_path / "tensors_example").exists()
