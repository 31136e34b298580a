"""The result as text: card, a table per workload, cold start, stages, profile, and what was not measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .systems import STAGES

Row = dict[str, Any]
UNKNOWN = "–"
SHOWN_OPERATORS = 15


def text(result: dict[str, Any]) -> str:
    """The whole of it."""
    parts = [card(result["card"])]
    for name in dict.fromkeys(row["workload"] for row in result["rows"]):
        mine = [row for row in result["rows"] if row["workload"] == name and row["median_ms"] is not None]
        parts += [title(result, name), aligned(*latency(mine)), aligned(*stages(mine))]
    parts += ["\nopening and cold start", aligned(*cold_start(result["systems"]))]
    if result["profile"] is not None:
        parts += profile_parts(result["profile"])
    parts += not_measured(result)
    return "\n".join(part for part in parts if part)


def card(value: dict[str, Any]) -> str:
    """One line per entry."""
    lines = (f"{name + ':':28}{told(entry)}" for name, entry in value.items())
    return "\n".join(lines) + "\n"


def told(entry: Any) -> str:
    """An entry of the card; unknown is null."""
    return entry if isinstance(entry, str) else json.dumps(entry, ensure_ascii=False)


def title(result: dict[str, Any], name: str) -> str:
    """What a workload holds, and what was asked for where that did not fit."""
    row = next(row for row in result["rows"] if row["workload"] == name)
    asked = row["asked"]
    if row["questions"] is None:
        low, high = asked["tokens"]
        return f"\n{name}: {asked['requests']} requests of {low} to {high} tokens, median {row['tokens']}"
    line = f"\n{name}: {row['tokens']} tokens, batch {row['batch']}, {row['questions']} × {row['options']} options"
    if (asked["questions"], asked["options"]) != (row["questions"], row["options"]):
        line += f" ({asked['questions']} × {asked['options']} do not fit)"
    if not row["exact"]:
        line += f" ({asked['tokens']} tokens asked for)"
    return line + (f", {row['pictures']} pictures" if row["pictures"] else "")


def latency(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Times of a call, rates, ratios with their 95 % interval, and agreement."""
    than = next((row["times_faster"]["than"] for row in rows), UNKNOWN)
    judge = next((row["agreement"]["with"] for row in rows), UNKNOWN)
    heads = ["system", "median ms", "p95", "min", "max", "tokens/s", f"faster than {than}", "× floor"]
    heads += [f"same top as {judge}", "max |Δp|", "peak MB"]
    return heads, [
        [
            row["system"],
            *(milliseconds(row[f"{name}_ms"]) for name in ("median", "p95", "min", "max")),
            f"{row['tokens_per_s']:,.0f}",
            "{median:.2f} [{low:.2f}, {high:.2f}]".format(**row["times_faster"]),
            figure(row["times_floor"], ".2f"),
            f"{row['agreement']['same_top_option']:.1%}",
            f"{row['agreement']['max_probability_difference']:.1e}",
            figure(row["peak_mb"], "d"),
        ]
        for row in rows
    ]


def stages(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Median milliseconds of each stage of a call."""
    shown = [name for name in STAGES if any(row["stages_ms"][name] is not None for row in rows)]
    heads = ["stages, ms", *shown] if shown else []
    return heads, [[row["system"], *(milliseconds(row["stages_ms"][name]) for name in shown)] for row in rows]


def cold_start(systems: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Seconds to export, to open, to a first decision; of processes of their own but for the first two."""
    heads = ["system", "export s", "open s", "own process: open s", "first decision s", "cold start s", "opened MB"]
    names = ("open_s", "first_decision_s", "cold_start_s")
    return heads, [
        [
            system["name"],
            figure(system["export_s"], ".1f"),
            figure(system["open_s"], ".2f"),
            *(figure(system["own_process"][name], ".2f") for name in names),
            figure(system["own_process"]["opened_mb"], "d"),
        ]
        for system in systems
        if system["reason"] is None
    ]


def profile_parts(entries: Sequence[Row]) -> list[str]:
    """A table per system and workload: where the time of a pass goes."""
    parts = []
    for why in dict.fromkeys(entry["reason"] for entry in entries if entry["reason"] is not None):
        named = ", ".join(entry["system"] for entry in entries if entry["reason"] == why)
        parts.append(f"\nno profile of {named}: {why}")
    for entry in entries:
        if entry["reason"] is not None:
            continue
        parts.append(f"\nprofile of {profiled(entry)}")
        parts.append(aligned(*operators(entry)))
    return parts


def profiled(entry: Row) -> str:
    """What a profile is of, and how a turn divides into backbone and head."""
    line = f"{entry['system']}, {entry['workload']}: {entry['turn_ms']:.2f} ms a turn"
    backbone_ms = entry["backbone_ms"]
    if backbone_ms is None:
        return line
    return f"{line}, {backbone_ms:.2f} of them the backbone and {entry['turn_ms'] - backbone_ms:.2f} the head"


def operators(entry: Row) -> tuple[list[str], list[list[str]]]:
    """Operator kinds, the most costly first, small ones together."""
    heads = ["operator", "nodes", "ms", "share", "× floor"]
    *kinds, between = entry["operators"]
    large, small = kinds[:SHOWN_OPERATORS], kinds[SHOWN_OPERATORS:]
    others = {"operator": f"{len(small)} other kinds", "times_floor": None}
    others |= {name: sum(row[name] for row in small) for name in ("nodes", "ms", "share")}
    return heads, [
        [
            row["operator"],
            str(row["nodes"]),
            f"{row['ms']:.3f}",
            f"{row['share']:.1%}",
            figure(row["times_floor"], ".2f"),
        ]
        for row in (*large, *([others] if small else []), between)
    ]


def not_measured(result: dict[str, Any]) -> list[str]:
    """Every system, or single workload of one, without figures, and the reason."""
    lines = [f"  {system['name']}: {system['reason']}" for system in result["systems"] if system["reason"] is not None]
    missing = {system["name"] for system in result["systems"] if system["reason"] is not None}
    lines += [
        f"  {row['system']}, {row['workload']}: {row['reason']}"
        for row in result["rows"]
        if row["reason"] is not None and row["system"] not in missing
    ]
    lines += [f"  peak of {name}: {peak['reason']}" for name, peak in result["peaks"].items() if peak["reason"]]
    lines += [
        f"  memory and cold start of {system['name']}: {system['own_process']['reason']}"
        for system in result["systems"]
        if system["reason"] is None and system["own_process"]["reason"] is not None
    ]
    return ["\nnot measured:", *lines] if lines else []


def aligned(heads: list[str], rows: list[list[str]]) -> str:
    """A table with its first column on the left, the others on the right; empty where there is nothing."""
    if not heads or not rows:
        return ""
    widths = [max(len(line[column]) for line in (heads, *rows)) for column in range(len(heads))]
    lines = []
    for first, *others in (heads, *rows):
        cells = (f"  {cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        lines.append(first.ljust(widths[0]) + "".join(cells))
    return "\n".join(lines)


def milliseconds(value: float | None) -> str:
    """Three significant digits at least; unknown is a dash."""
    return figure(value, ".3f" if value is not None and value < 10 else ".1f")


def figure(value: float | None, form: str) -> str:
    """A number in a format; unknown is a dash."""
    return UNKNOWN if value is None else format(value, form)
