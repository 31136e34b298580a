"""The run: model, workloads, systems, processes of their own, turns, peaks, profile, result."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ClefError, SettingError
from ..make import progress
from . import fresh, plots, present
from .floor import linear_parameters, measure_peaks
from .machine import load_average, machine_card
from .measure import missing_row, rows, take_turns
from .models import TINY, Model, Progress, add_bundles, check_one_source, prepare_bundle, prepare_release, text_tools
from .profile import PRODUCTS, profile
from .systems import URL, Sources, System, check_names, default_names, make_system, needed_precision, reason
from .workload import Generator, Size, Workload, check_counts

T = TypeVar("T")
KIND = "clef-trt bench"  # of the JSON, by which bench/report.py knows it
PACKAGES = ("numpy", "onnxruntime", "tokenizers", "torch", "transformers", "tensorrt", "tensorrt-rtx-cu13-bindings")
ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES")
LEFT_OUT = (
    "waiting for other callers and for a batch to fill; servers excepted, HTTP and the JSON text of requests",
    "the schema's segments are tokenised once and then remembered by our encoder: every turn asks the same questions",
    "new requests in the mix: it is the same every turn, so that a server that remembers prompts gains from it",
    "downloading; reading weights from a cold disk",
    "answers of random weights mean nothing: agreement is that of the arithmetic",
)


def run(options: argparse.Namespace) -> None:
    """The command: prints card and tables, writes JSON and plots. Raises ClefError for what cannot be asked for."""
    if options.fresh is not None:
        fresh.report(options.fresh)
        return
    urls, keys = dict(options.url), dict(options.api_key)
    names = options.systems or [*default_names(), *(URL + name for name in urls)]
    _check(options, names, urls, keys)
    tell = progress()
    with _folder(options.work) as work:
        result = measured(options, names, urls, keys, work, tell)
    if options.plots is not None:
        drawn = plots.draw(result, options.plots)
        tell(f"drew {len(drawn)} pictures")
    print(present.text(result))
    if options.json is not None:
        options.json.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


@dataclass
class Run:
    """What a run knows of its systems, by name."""

    names: list[str]
    sources: Sources
    workloads: list[Workload]
    made: dict[str, System] = field(default_factory=dict)
    open_s: dict[str, float] = field(default_factory=dict)  # of those that opened
    reasons: dict[str, str | None] = field(default_factory=dict)  # of those that did not
    own_process: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def ready(self) -> list[System]:
        """The systems that opened."""
        return [system for name, system in self.made.items() if name in self.open_s]


def measured(
    options: argparse.Namespace,
    names: list[str],
    urls: dict[str, str],
    keys: dict[str, str],
    work: Path,
    tell: Progress,
) -> dict[str, Any]:
    """The result as one JSON object."""
    load_before = load_average()
    model = _model(options, work, tell)
    run = _prepared(options, model, names, urls, keys, work, tell)
    if not options.no_fresh:
        _in_fresh_processes(run, tell)
    for name, system in run.made.items():
        tell(f"opening {name}")
        seconds, run.reasons[name] = _attempt(system.open)
        if seconds is not None:
            run.open_s[name] = round(seconds, 4)
    if not run.ready:
        told = "\n".join(f"  {name}: {why}" for name, why in run.reasons.items())
        raise SettingError(f"none of these systems runs here:\n{told}")
    wanted = {system.arithmetic for system in run.ready if system.arithmetic is not None}
    if options.profile:
        wanted |= set(PRODUCTS.values())
    peaks = measure_peaks(wanted, run.sources.threads)
    linears = None if model.release is None else linear_parameters(model.release)
    rows = _rows(run, linears, peaks, tell)
    infos = {system.name: system.info() for system in run.ready}
    for system in run.ready:
        system.close()
    profiled = profile(list(run.open_s), run.sources, run.workloads, peaks, tell) if options.profile else None
    in_effect = {
        "threads": run.sources.threads,
        "affinity": sorted(os.sched_getaffinity(0)),
        **{name: os.environ.get(name) for name in ENVIRONMENT},
        "load_average_before": load_before,
        "load_average_after": load_average(),
    }
    card = machine_card("compiled bundles against the published code, in turns over the same requests", *PACKAGES)
    return {
        "kind": KIND,
        "card": card | {"asked": _asked(options, names), "in_effect": in_effect, "left_out": list(LEFT_OUT)},
        "model": {"name": Path(model.name).name, "linear_parameters": linears},
        "peaks": peaks,
        "systems": [_told(run, model, name, infos.get(name)) for name in names],
        "rows": rows,
        "profile": profiled,
    }


def _prepared(
    options: argparse.Namespace,
    model: Model,
    names: list[str],
    urls: dict[str, str],
    keys: dict[str, str],
    work: Path,
    tell: Progress,
) -> Run:
    """Requests, bundles and systems, so that nothing is made while something is measured."""
    workloads = _workloads(options, Generator(*text_tools(model)))
    in_flight = max(workload.facts["batch"] for workload in workloads)
    threads = options.threads or os.cpu_count() or 1
    run = Run(names, Sources(model.release, model.bundles, threads, urls, keys, in_flight), workloads)
    for name in names:
        precision = needed_precision(name)
        if precision is not None:
            _, run.reasons[name] = _attempt(partial(prepare_bundle, model, precision, work, tell))
    check_one_source(model)
    for name in names:
        if run.reasons.get(name) is None:
            system, run.reasons[name] = _attempt(partial(make_system, name, run.sources))
            if system is not None:
                run.made[name] = system
    run.own_process = {name: fresh.empty(None) for name in names}
    return run


def _in_fresh_processes(run: Run, tell: Progress) -> None:
    """Memory and cold start, while nothing is open here."""
    smallest_first = sorted(run.workloads, key=lambda workload: workload.tokens)
    calls = {workload.name: list(workload.turns[0]) for workload in smallest_first}
    for name in run.made:
        if name.startswith(URL):
            run.own_process[name] = fresh.empty("a server runs already")
        else:
            run.own_process[name] = fresh.in_fresh_process(name, run.sources, calls, tell)


def _rows(run: Run, linears: int | None, peaks: dict[str, Any], tell: Progress) -> list[dict[str, Any]]:
    """Every workload: the systems in turns, then rows with nulls for those that are not there."""
    found = []
    for workload in run.workloads:
        taken = take_turns(run.ready, workload, tell)
        done = rows(workload, taken, {s.name: _floor_s(s, linears, workload.tokens, peaks) for s in run.ready})
        by_name = {row["system"]: row for row in done}
        found += [by_name.get(name) or missing_row(workload, name, run.reasons[name]) for name in run.names]
    for row in found:
        row["peak_mb"] = run.own_process[row["system"]]["peak_mb"].get(row["workload"])
    return found


def _told(run: Run, model: Model, name: str, info: dict[str, Any] | None) -> dict[str, Any]:
    """What the result says of one system."""
    seconds = model.export_s.get(needed_precision(name) or "")
    return {
        "name": name,
        "reason": run.reasons[name],
        "arithmetic": run.made[name].arithmetic if name in run.made else None,
        "open_s": run.open_s.get(name),
        "export_s": None if seconds is None else round(seconds, 2),
        "info": info,
        "own_process": run.own_process[name],
    }


def _check(options: argparse.Namespace, names: list[str], urls: dict[str, str], keys: dict[str, str]) -> None:
    """Refuse before anything takes time."""
    check_names(names, urls)
    check_counts(options.questions, options.options, options.pictures)
    if unknown := sorted(keys.keys() - urls.keys()):
        raise SettingError(f"--api-key names {unknown}, which no --url does")
    for name in ("turns", "threads", "picture_side"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise SettingError(f"{name} is {value}; expected at least 1")
    if min(options.batch) < 1:
        raise SettingError(f"batch is {min(options.batch)}; expected at least 1")
    if options.json is not None and not options.json.parent.is_dir():
        raise SettingError(f"{options.json.parent} is no folder: the result could not be written")
    if options.plots is not None:
        plots.require()


def _model(options: argparse.Namespace, work: Path, tell: Progress) -> Model:
    """The release asked for, or none where bundles are named and no model is."""
    name = options.model or (options.bundle[0].name if options.bundle else TINY)
    named = options.model is not None or not options.bundle
    model = Model(name, prepare_release(name, work, tell) if named else None)
    add_bundles(model, options.bundle)
    return model


def _workloads(options: argparse.Namespace, generator: Generator) -> list[Workload]:
    """Sizes and batches asked for, each once, then the mix."""
    from . import DEFAULT_TOKENS

    turns = options.turns + 1
    asked = options.tokens or ([] if options.mix else DEFAULT_TOKENS)
    pairs = dict.fromkeys((n, one) for n, batch in asked for one in (options.batch if batch is None else [batch]))
    sizes = [
        Size(tokens, batch, options.questions, options.options, options.pictures, options.picture_side)
        for tokens, batch in pairs
    ]
    workloads = [generator.synthetic(size, turns, options.seed) for size in sizes]
    return workloads + [generator.mixed(batch, turns) for batch in options.batch if options.mix]


def _floor_s(system: System, linears: int | None, tokens: int, peaks: dict[str, dict[str, Any]]) -> float | None:
    gflops = peaks[system.arithmetic]["gflops"] if system.arithmetic is not None else None
    return None if gflops is None or linears is None else 2 * linears * tokens / (gflops * 1e9)


def _asked(options: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """The settings as they were given; folders by their names only, keys not at all."""
    shown = ("batch", "questions", "options", "pictures", "picture_side", "mix", "turns", "threads", "seed", "profile")
    return {
        "model": options.model and Path(options.model).name,
        "bundles": [folder.name for folder in options.bundle],
        "systems": names,
        "tokens": None if options.tokens is None else [f"{n}x{b}" if b else str(n) for n, b in options.tokens],
        **{name: getattr(options, name) for name in shown},
    }


def _attempt(step: Callable[[], T]) -> tuple[T | None, str | None]:
    """What a step returns, or the reason why it fails: a missing system is a row of the result, not its end."""
    try:
        return step(), None
    except (ClefError, ImportError, OSError, RuntimeError, MemoryError) as fault:
        return None, reason(fault)


@contextlib.contextmanager
def _folder(work: Path | None) -> Iterator[Path]:
    """The folder of releases and bundles: the caller's, or one that goes at the end."""
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
        yield work.resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
