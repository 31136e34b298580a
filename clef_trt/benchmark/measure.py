"""Systems take turns over the same requests; what they took and answered becomes the rows of the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .spread import ratio, summary
from .systems import STAGES, Outcome, System, reason
from .workload import Workload

# Between two systems, so that threads of the first that still wait for work in a loop do not meet the second.
SETTLE_S = 0.02
FIGURES = (
    *("median_ms", "p95_ms", "min_ms", "max_ms", "calls", "warm_up_ms"),
    *("tokens_per_s", "floor_ms", "times_floor"),
)


@dataclass
class Taken:
    """What one system took for one workload. `calls_s` and `stages_s` are of the measured turns, call by call."""

    turns_s: list[float] = field(default_factory=list)  # per measured turn, all its calls
    calls_s: list[float] = field(default_factory=list)
    stages_s: list[dict[str, float]] = field(default_factory=list)
    outcomes: list[list[Outcome]] = field(default_factory=list)  # per turn, the warm-up included
    warm_up_s: float | None = None
    reason: str | None = None  # why it could not go on


def take_turns(systems: Sequence[System], workload: Workload, tell: Callable[[str], None]) -> dict[str, Taken]:
    """All turns of a workload; the first warms up. The systems' order rotates, so that none always follows another.

    A system that fails is left out of the rest of this workload.
    """
    result = {system.name: Taken() for system in systems}
    for turn, calls in enumerate(workload.turns):
        first = turn % max(len(systems), 1)
        for system in (*systems[first:], *systems[:first]):
            taken = result[system.name]
            if taken.reason is not None:
                continue
            time.sleep(SETTLE_S)
            outcomes, seconds = [], []
            try:
                for call in calls:
                    start = time.perf_counter()
                    outcomes.append(system.run(call))
                    seconds.append(time.perf_counter() - start)
            except Exception as fault:
                taken.reason = reason(fault)
                tell(f"{workload.name}: {system.name} failed: {taken.reason}")
                continue
            taken.outcomes.append(outcomes)
            if turn == 0:
                taken.warm_up_s = sum(seconds)
                continue
            taken.turns_s.append(sum(seconds))
            taken.calls_s += seconds
            taken.stages_s += [outcome.stages_s for outcome in outcomes]
        tell(f"{workload.name}: turn {turn} of {len(workload.turns) - 1}" + (", warm-up" if turn == 0 else ""))
    return result


def rows(workload: Workload, taken: dict[str, Taken], floors_s: dict[str, float | None]) -> list[dict[str, Any]]:
    """One row per system. Ratios are against the first eager system that ran, else the first that ran.

    Agreement is with eager-fp32, else with that same first one. `floors_s`: of one turn, per system.
    """
    done = [name for name, own in taken.items() if own.reason is None]
    baseline = next((name for name in done if name.startswith("eager")), done[0] if done else None)
    judge = "eager-fp32" if "eager-fp32" in done else baseline
    return [
        {"workload": workload.name, **workload.facts, "system": name}
        | _figures(workload, own, floors_s.get(name), (baseline, taken[baseline]), (judge, taken[judge]))
        if own.reason is None and baseline is not None and judge is not None
        else missing_row(workload, name, own.reason)
        for name, own in taken.items()
    ]


def missing_row(workload: Workload, name: str, why: str | None) -> dict[str, Any]:
    """The row of a system that did not run: null figures, and the reason."""
    return {
        "workload": workload.name,
        **workload.facts,
        "system": name,
        **dict.fromkeys(FIGURES),
        "stages_ms": dict.fromkeys(STAGES),
        "times_faster": None,
        "agreement": None,
        "reason": why,
    }


def _figures(
    workload: Workload, own: Taken, floor_s: float | None, baseline: tuple[str, Taken], judge: tuple[str, Taken]
) -> dict[str, Any]:
    spread = summary(own.calls_s)
    turn_s = float(np.median(own.turns_s))
    assert own.warm_up_s is not None, "every workload has a turn to warm up"
    return {
        **{f"{name}_ms": round(spread[f"{name}_s"] * 1e3, 3) for name in ("median", "p95", "min", "max")},
        "calls": spread["runs"],
        "warm_up_ms": round(own.warm_up_s * 1e3, 3),
        "tokens_per_s": round(workload.tokens / turn_s, 1),
        "floor_ms": None if floor_s is None else round(floor_s * 1e3, 3),
        "times_floor": None if floor_s is None else float(f"{turn_s / floor_s:.3g}"),
        "stages_ms": {name: _median_ms([stages.get(name) for stages in own.stages_s]) for name in STAGES},
        "times_faster": {"than": baseline[0], **ratio(baseline[1].turns_s, own.turns_s)},
        "agreement": {"with": judge[0], **agreement(judge[1], own)},
        "reason": None,
    }


def agreement(expected: Taken, found: Taken) -> dict[str, Any]:
    """Share of questions with the same top option, and differences of probabilities, over all turns' requests."""
    pairs = [
        pair
        for turn in zip(expected.outcomes, found.outcomes, strict=True)
        for calls in zip(*turn, strict=True)
        for records in zip(calls[0].probabilities, calls[1].probabilities, strict=True)
        for pair in zip(*records, strict=True)
    ]
    differences = np.concatenate([np.abs(a - b) for a, b in pairs])
    return {
        "questions": len(pairs),
        "same_top_option": round(float(np.mean([a.argmax() == b.argmax() for a, b in pairs])), 4),
        "max_probability_difference": float(f"{differences.max():.3g}"),
        "mean_probability_difference": float(f"{differences.mean():.3g}"),
    }


def _median_ms(seconds: list[float | None]) -> float | None:
    known = [value for value in seconds if value is not None]
    return round(float(np.median(known)) * 1e3, 3) if known else None
