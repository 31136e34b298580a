"""Where the time of ONNX Runtime's passes goes, by kind of operator, and how far its linears are from their floor.

Times are of the operators' own work: a loop's body counts under the operators in it. Profiling itself costs some
microseconds a node, so passes of small models look longer than they are.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any

from .ours import Ours
from .systems import OURS, Sources, make_system, reason
from .workload import Workload

# Products of an activation with a weight, and the peak that bounds each; the same kinds multiply activations too.
PRODUCTS = {
    **dict.fromkeys(("MatMul", "FusedMatMul", "Gemm"), "onnxruntime-fp32"),
    **dict.fromkeys(
        ("MatMulNBits", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul"),
        "onnxruntime-int8",
    ),
}
LOOP = "backbone/loop"  # the node, as the export names it
NEEDS_CARD = "a profile of TensorRT needs a card and its own profiler, which this command does not use yet"


def profile(
    names: list[str], sources: Sources, workloads: list[Workload], peaks: dict[str, Any], tell: Callable[[str], None]
) -> list[dict[str, Any]]:
    """An entry per system of ours among `names` and workload; nulls with the reason where there is none to be had."""
    entries = [_entry(name, None, NEEDS_CARD) for name in OURS if name.startswith("tensorrt")]
    for name in names:
        if not name.startswith("onnxruntime"):
            continue
        for workload in workloads:
            tell(f"{workload.name}: profiling {name}")
            try:
                system = make_system(name, sources)
                assert isinstance(system, Ours), "the systems on ONNX Runtime are ours"
                entries.append(_profiled(system, workload, peaks))
            except Exception as fault:
                entries.append(_entry(name, workload.name, reason(fault)))
                break
    return entries


def _profiled(system: Ours, workload: Workload, peaks: dict[str, Any]) -> dict[str, Any]:
    """The passes of all turns but the first, per turn."""
    with tempfile.TemporaryDirectory() as folder:
        system.open(profile=f"{folder}/profile")
        for calls in workload.turns[:3]:
            for call in calls:
                system.run(call)
        events = json.loads(Path(system.end_profiling()).read_text(encoding="utf-8"))
        system.close()
    turns = len(workload.turns[:3]) - 1
    passes = sorted((event for event in events if event["name"] == "model_run"), key=lambda event: event["ts"])
    passes = passes[len(passes) // (turns + 1) :]
    nodes = [
        event
        for event in events
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time") and event["ts"] >= passes[0]["ts"]
    ]
    turn_us = sum(event["dur"] for event in passes) / turns
    return _entry(system.name, workload.name, None) | {
        "turn_ms": round(turn_us / 1e3, 3),
        "backbone_ms": backbone_ms(nodes, passes, turns),
        "operators": operators(nodes, turns, turn_us, peaks),
    }


def backbone_ms(nodes: list[dict[str, Any]], passes: list[dict[str, Any]], turns: int) -> float | None:
    """Milliseconds a turn from the start of its passes to the last hidden states; what is left of a turn is the head.

    The backbone of a text graph ends with its loop over tiles; None for passes that hold none.
    """
    ends = sorted(event["ts"] + event["dur"] for event in nodes if event["name"].startswith(LOOP))
    if len(ends) != len(passes):
        return None
    spent_us = float(sum(end - event["ts"] for end, event in zip(ends, passes, strict=True)))
    return round(spent_us / turns / 1e3, 3)


def operators(nodes: list[dict[str, Any]], turns: int, turn_us: float, peaks: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows per kind of operator, the most costly first; a last one for the time outside all of them."""
    own_us: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    operations: dict[str, float] = defaultdict(float)
    for event, event_us in _self_times(nodes):
        kind = event["args"]["op_name"]
        weighed = _operations(event)
        kind = f"{kind} (linears)" if weighed else kind
        own_us[kind] += event_us / turns
        counts[kind] += 1
        operations[kind] += weighed / turns
    rows = []
    for kind, spent_us in sorted(own_us.items(), key=lambda item: -item[1]):
        gflops = peaks.get(PRODUCTS.get(kind.removesuffix(" (linears)"), ""), {}).get("gflops")
        floor_us = operations[kind] / (gflops * 1e3) if gflops and operations[kind] else None
        rows.append(_row(kind, counts[kind] // turns, spent_us, turn_us, floor_us))
    rows.append(_row("between operators", 0, turn_us - sum(own_us.values()), turn_us, None))
    return rows


def _row(kind: str, nodes: int, spent_us: float, turn_us: float, floor_us: float | None) -> dict[str, Any]:
    return {
        "operator": kind,
        "nodes": nodes,
        "ms": round(spent_us / 1e3, 4),
        "share": round(spent_us / turn_us, 4),
        "floor_ms": None if floor_us is None else round(floor_us / 1e3, 4),
        "times_floor": None if floor_us is None else float(f"{spent_us / floor_us:.3g}"),
    }


def _self_times(nodes: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Each event with its microseconds less those of the events within it."""
    result: list[list[Any]] = []
    open_events: list[list[Any]] = []  # those that hold the present one, outermost first
    for event in sorted(nodes, key=lambda event: (event["ts"], -event["dur"])):
        while open_events and event["ts"] >= open_events[-1][0]["ts"] + open_events[-1][0]["dur"]:
            open_events.pop()
        if open_events:
            open_events[-1][1] -= event["dur"]
        entry = [event, event["dur"]]
        result.append(entry)
        open_events.append(entry)
    return [(event, max(own, 0)) for event, own in result]


def _operations(event: dict[str, Any]) -> int:
    """Operations of a product with a weight; 0 for anything else.

    A weight shows as no input, because ONNX Runtime keeps a rearranged copy, or as a parameter. A product of two
    activations has two matrices and no parameter.
    """
    arguments = event["args"]
    if arguments["op_name"] not in PRODUCTS:
        return 0
    shapes = [shape for entry in arguments["input_type_shape"] for shape in entry.values()]
    matrices = [shape for shape in shapes if len(shape) >= 2]
    if not matrices or (len(matrices) > 1 and int(arguments["parameter_size"]) == 0):
        return 0
    output = next(iter(arguments["output_type_shape"][0].values()))
    return int(2 * prod(matrices[0]) * output[-1])


def _entry(name: str, workload: str | None, why: str | None) -> dict[str, Any]:
    return {
        "system": name,
        "workload": workload,
        "turn_ms": None,
        "backbone_ms": None,
        "operators": [],
        "reason": why,
    }
