"""The command eval: a bundle or a server over labelled requests → how often it is right, and whether it knows."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from . import make
from .choose import ENGINES
from .clef import Clef
from .errors import EngineError, Fault, MissingExtraError, RequestError, SettingError, printable
from .labelled import Labelled, Survey, judge, read, survey
from .metrics import METRICS
from .outcomes import Outcomes, append, check_free, open_partial, partial_path, resume, summed_up, write_report
from .request import parse_request

TOLD_EVERY_S = 10.0
PLOTS = (".png", ".svg")
BUNDLE_OPTIONS = ("engine", "weights", "threads", "max_length", "max_image_tokens")
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """What is evaluated. `sha256` covers all that decides its answers, as far as that is known."""

    name: str
    sha256: str
    decide_batch: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]]
    info: dict[str, Any] = field(default_factory=dict)


def add_command(commands: Any) -> None:
    """The parser of eval."""
    parser = commands.add_parser("eval", help="measure a bundle or a server on labelled requests")
    parser.add_argument("target", metavar="BUNDLE_OR_URL", help="a bundle, or the http(s) URL of a SystemOne server")
    parser.add_argument(
        "labelled", metavar="LABELLED.jsonl", type=Path, help='one {"request": …, "answers": {id: right answer}} a line'
    )
    parser.add_argument("--report", metavar="REPORT.json", type=Path, help="written whole; makes the run resumable")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="reliability as .png or .svg (extra: bench)")
    parser.add_argument("--wanted-precision", metavar="P", type=float, default=0.95, help="of answers decided alone")
    parser.add_argument("--batch", metavar="N", type=int, default=16, help="requests at once (default: %(default)s)")
    parser.add_argument("--bootstrap", metavar="N", type=int, default=1000, help="resamples; 0 for no intervals")
    parser.add_argument("--seed", type=int, default=0, help="of the resamples (default: %(default)s)")
    parser.add_argument("--api-key", metavar="KEY", help="of a server that wants one")
    parser.add_argument("--engine", choices=ENGINES, help="of a bundle (default: auto)")
    parser.add_argument("--weights", metavar="DIR", type=Path, help="where a release lies that moved since its export")
    parser.add_argument("--threads", type=int, help="worker threads of a bundle (default: one per core)")
    parser.add_argument("--max-length", type=int, help="tokens of a bundle's record (default: 16384)")
    parser.add_argument("--max-image-tokens", type=int, help="of a bundle: shrink larger pictures to this many tokens")
    parser.set_defaults(command=_eval)


def evaluate(
    target: Target,
    labelled: Survey,
    report: Path | None = None,
    *,
    wanted_precision: float = 0.95,
    batch: int = 16,
    bootstrap: int = 1000,
    seed: int = 0,
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Decide every labelled request and sum up: the content of REPORT.json, which is written where `report` is named.

    Outcomes are appended to `report` + ".partial", a batch at a time; called again with the same target and requests,
    it goes on from there to the same report. Memory: about 60 bytes per labelled answer and one batch of requests, some
    300 bytes per answer while it sums up.
    Raises RequestError and EngineError with the line, SettingError for a report that exists or a partial file of
    something else.
    """
    outcomes = Outcomes(labelled)
    with contextlib.ExitStack() as stack:
        partial, done = None, 0
        if report is not None:
            check_free(report)
            partial = stack.enter_context(open_partial(partial_path(report)))
            done = resume(partial, partial_path(report), target.sha256, labelled, outcomes)
            if done:
                progress(f"going on after {done:,} of {labelled.requests:,} requests")
        resumed, begun, told = done, time.monotonic(), time.monotonic()
        requests = read(labelled.path, done)
        while together := list(islice(requests, batch)):
            rows = _decided(target, together)
            if outcomes.count + sum(len(outcomes) for _, *outcomes in rows) > labelled.answers:
                break
            outcomes.add(rows)
            done += len(rows)
            if partial is not None:
                append(partial, rows)
            now = time.monotonic()
            if now > told + TOLD_EVERY_S or done == labelled.requests:
                speed, told = (done - resumed) / max(now - begun, 1e-9), now
                progress(f"{done:,} of {labelled.requests:,} requests, {speed:.1f}/s, {outcomes.right:.1%} right")
        if (done, outcomes.count) != (labelled.requests, labelled.answers):
            raise RequestError([Fault((), f"{labelled.path} is not what it was when it was first read", "file")])
        result = summed_up(
            outcomes,
            labelled,
            {"name": target.name, "sha256": target.sha256, **target.info},
            wanted_precision=wanted_precision,
            bootstrap=bootstrap,
            seed=seed,
            progress=progress,
        )
        if report is not None:
            write_report(report, result)
            partial_path(report).unlink()
    return result


def _decided(target: Target, together: Sequence[Labelled]) -> list[list[Any]]:
    """Per request the tokens its state was cut by, then its outcomes. Requests without a label are not run."""
    asked = [labelled for labelled in together if labelled.labels]
    lines = f"lines {together[0].line} to {together[-1].line}"
    try:
        responses = target.decide_batch([labelled.request for labelled in asked]) if asked else []
    except RequestError as error:
        raise RequestError([_at_line(fault, asked) for fault in error.faults]) from error
    except EngineError as error:
        raise EngineError(f"{lines}: {error}") from error
    if len(responses) != len(asked):
        raise EngineError(f"{lines}: {len(responses)} responses to {len(asked)} requests")
    found = {labelled.line: response for labelled, response in zip(asked, responses, strict=True)}
    return [
        [_cut_tokens(found[labelled.line]), *judge(labelled, found[labelled.line])] if labelled.labels else [0]
        for labelled in together
    ]


def _at_line(fault: Fault, asked: Sequence[Labelled]) -> Fault:
    """Of several requests the first part of a place is the request's index; of one alone it may be left out."""
    index, loc = (fault.loc[0], fault.loc[1:]) if fault.loc and isinstance(fault.loc[0], int) else (0, fault.loc)
    return Fault((f"line {asked[index].line}", *loc), fault.message, fault.kind)


def _cut_tokens(response: Any) -> int:
    usage = response.get("usage") if isinstance(response, dict) else None
    cut = usage.get("truncated_state_tokens") if isinstance(usage, dict) else None
    return cut if type(cut) is int else 0


def _eval(options: argparse.Namespace) -> None:
    _check_settings(options)
    say = make.progress()
    say(f"reading {options.labelled}")
    # A server may take what this package does not, so of its requests only the labels are checked.
    labelled = survey(options.labelled, (lambda _: None) if _is_url(options.target) else _check_request)
    say(f"{labelled.requests:,} requests, {labelled.answers:,} labelled answers")
    with _open_server(options) if _is_url(options.target) else _open_bundle(options) as target:
        result = evaluate(
            target,
            labelled,
            options.report,
            wanted_precision=options.wanted_precision,
            batch=options.batch,
            bootstrap=options.bootstrap,
            seed=options.seed,
            progress=say,
        )
    print(table(result))
    if options.plot is not None:
        plot(result, options.plot)


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _check_settings(options: argparse.Namespace) -> None:
    """Whatever can be wrong without running anything; hours later would be too late."""
    for name, least in (("batch", 1), ("bootstrap", 0), ("seed", 0)):
        if getattr(options, name) < least:
            raise SettingError(f"--{name} is {getattr(options, name)}; expected at least {least}")
    if not 0 < options.wanted_precision <= 1:
        raise SettingError(f"--wanted-precision is {options.wanted_precision}; expected more than 0, at most 1")
    given = [f"--{name.replace('_', '-')}" for name in BUNDLE_OPTIONS if getattr(options, name) is not None]
    if _is_url(options.target) and given:
        raise SettingError(f"{', '.join(given)}: of a bundle, but {options.target} is a server")
    if not _is_url(options.target) and options.api_key is not None:
        raise SettingError(f"--api-key: of a server, but {options.target} is a bundle; expected http:// or https://")
    if options.report is not None:
        check_free(options.report)
    if options.plot is not None:
        if options.plot.suffix.lower() not in PLOTS or not options.plot.parent.is_dir():
            raise SettingError(
                f"--plot is {options.plot}; expected a name in {' or '.join(PLOTS)} in a folder there is"
            )
        _figure()


def _check_request(body: dict[str, Any]) -> None:
    """All but pictures, which are read when their batch comes."""
    parse_request({key: value for key, value in body.items() if key not in ("images", "videos")})


@contextlib.contextmanager
def _open_bundle(options: argparse.Namespace) -> Iterator[Target]:
    settings = {name: value for name in BUNDLE_OPTIONS if (value := getattr(options, name)) is not None}
    with Clef.load(options.target, **settings) as clef:
        info = clef.info()
        decides = [clef.manifest.to_json(), info["engine"], info["precision"], info["max_length"]]
        identity = json.dumps([*decides, options.max_image_tokens])
        yield Target(options.target, hashlib.sha256(identity.encode()).hexdigest(), clef.decide_batch, info)


@contextlib.contextmanager
def _open_server(options: argparse.Namespace) -> Iterator[Target]:
    from .remote import Remote  # here: a client of HTTP is slow to import, and every command would pay for it

    with contextlib.closing(Remote(options.target, options.api_key, in_flight=options.batch)) as remote:
        yield Target(remote.url, hashlib.sha256(remote.url.encode()).hexdigest(), remote.decide_batch)


def table(report: dict[str, Any]) -> str:
    """A report for people: a row per group, then the reliability of all answers."""
    wanted = report["settings"]["wanted_precision"]
    head = ["", "answers", "accuracy", "macro-F1", "Brier", "ECE", "levels off", f"alone at {wanted:.4g}"]
    groups = {"all": report["all"], **report["types"]}
    groups |= {f"  {printable(name)}": summary for name, summary in report["questions"].items()}
    lines = _aligned([head, *([name, *_cells(summary)] for name, summary in groups.items())])
    labelled = report["labelled"]
    for count, said in (
        (report["questions_left_out"], "other question ids are left out: those above are the most frequent"),
        (labelled["requests_without_a_label"], "requests have no label and were not run"),
        (labelled["requests_cut_to_fit"], "requests had a state that was cut to fit"),
    ):
        lines += [f"{count:,} {said}"] if count else []
    rows = [
        [
            f"{row['from']:.3f}–{row['to']:.3f}",
            f"{row['answers']:,}",
            f"{row['confidence']:.3f}",
            f"{row['accuracy']:.3f}",
        ]
        for row in report["all"]["reliability"]
    ]
    return "\n".join([*lines, "", *_aligned([["probability", "answers", "mean", "accuracy"], *rows])])


def _cells(summary: dict[str, Any]) -> list[str]:
    cells = [f"{summary['answers']:,}"]
    for name in METRICS:
        value, interval = summary[name]["value"], summary[name]["interval"]
        known = interval is not None and None not in interval
        cells.append(f"{value:.3f} ({interval[0]:.3f}–{interval[1]:.3f})" if known else f"{value:.3f}")
    cells.append(f"{summary['score_error']:.2f}" if "score_error" in summary else "")
    alone = summary["decided_alone"]
    return [*cells, f"{alone['share']:.1%} from {alone['from_probability']:.4f}" if alone["share"] else "none"]


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def plot(report: dict[str, Any], path: Path) -> None:
    """Reliability of all answers and of each type, and how many answers lie in each bin, as a PNG or SVG file."""
    figure = _figure()(figsize=(5, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    upper.plot((0, 1), (0, 1), color="0.7", linestyle="--", label="honest")
    groups = report["types"] if len(report["types"]) == 1 else {"all": report["all"], **report["types"]}
    for name, summary in groups.items():
        bins = summary["reliability"]
        label = f"{name} (ECE {summary['ece']['value']:.3f})"
        upper.plot([row["confidence"] for row in bins], [row["accuracy"] for row in bins], marker="o", label=label)
    upper.set(ylabel="accuracy", ylim=(0, 1.02))
    upper.set_title(printable(report["target"]["name"], 60), parse_math=False)
    upper.legend()
    bins = report["all"]["reliability"]
    edges, width = [row["from"] for row in bins], 1 / report["settings"]["bins"]
    lower.bar(edges, [row["answers"] for row in bins], width, align="edge", edgecolor="white")
    lower.set(xlabel="probability of the answer", ylabel="answers", xlim=(0, 1))
    figure.savefig(path, dpi=150)


def _figure() -> Any:
    """matplotlib's Figure: without pyplot there is no window and no state to clean up."""
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError as fault:
        raise MissingExtraError("--plot", "bench", fault) from None
