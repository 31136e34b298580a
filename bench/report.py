"""The results in bench/results/ as one page, bench/results/README.md: dated runs with cards, tables and plots.

Every result stays on the page, those that lose too. Results of other scripts are listed with what they measured.

    python bench/report.py [--json FILE …] [--page FILE]

Plots lie in a folder of the result's name beside it, as `clef-trt bench --plots` draws them; where there are none yet
they are drawn, if matplotlib is there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import device

from clef_trt.benchmark import plots, present
from clef_trt.benchmark.command import KIND
from clef_trt.errors import MissingExtraError

RESULTS = Path(__file__).parent / "results"
PLOTS = ("latency", "throughput", "stages")
INTRODUCTION = """# Measured

Made by `python bench/report.py` from the JSON files in this folder: do not edit. Times are medians of a call; a ratio
is the median over turns with its 95 % interval; `× floor` is the time over that of the linears' arithmetic alone at the
rate of one large product, measured in the same run (see `clef_trt/benchmark/floor.py`); agreement is with the named
system over the same requests.
"""


def page(files: list[Path]) -> str:
    """The page in Markdown: runs of the command, newest first, then the other results."""
    runs, others = [], []
    for file in files:
        result = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(result, dict) and result.get("kind") in (KIND, device.KIND):
            runs.append((file, result))
        else:
            others.append((file, result))
    runs.sort(key=lambda run: run[1]["card"]["date"], reverse=True)
    sections = {KIND: section, device.KIND: device_section}
    parts = [INTRODUCTION, *(sections[result["kind"]](file, result) for file, result in runs)]
    if others:
        lines = [f"- [{file.name}]({file.name}): {what(file, result)}" for file, result in others]
        parts.append("\n".join(["## Other measurements\n", *lines]) + "\n")
    return "\n".join(parts)


def section(file: Path, result: dict[str, Any]) -> str:
    """One run: what it ran on, a table per workload, plots, cold start, profile, and what was not measured."""
    card = result["card"]
    changed = ", changed since" if card["changed_since_commit"] else ""
    gpus = ", ".join(" ".join(gpu.values()) for gpu in card["gpus"]) or "no GPU"
    parts = [
        f"## {card['date'][:10]}: {result['model']['name']} on {card['cpu']}, {card['cores']} cores\n",
        f"[{file.name}]({file.name}); commit {card['commit']}{changed}; {gpus}; {card['memory_gb']} GB of memory; "
        f"{card['in_effect']['threads']} threads; {card['asked']['turns']} turns.\n",
    ]
    folder = file.with_suffix("")
    for name in PLOTS:
        if (folder / f"{name}.svg").is_file():
            parts.append(f"[![{name}]({folder.name}/{name}.png)]({folder.name}/{name}.svg)\n")
    for name in dict.fromkeys(row["workload"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["workload"] == name and row["median_ms"] is not None]
        parts += [f"**{present.title(result, name).strip()}**\n", table(*present.latency(rows))]
        parts.append(table(*present.stages(rows)))
    parts += ["**Opening and cold start**\n", table(*present.cold_start(result["systems"]))]
    for entry in result["profile"] or ():
        if entry["reason"] is None:
            parts += [f"**Where the time goes: {present.profiled(entry)}**\n", table(*present.operators(entry))]
    parts.append("\n".join(f"- {line.strip()}" for line in present.not_measured(result)[1:]))
    parts.append(folded_card(card))
    return "\n".join(part for part in parts if part)


def device_section(file: Path, result: dict[str, Any]) -> str:
    """One run of bench/device.py: what it ran on, its tables, and what was not measured."""
    card, name = result["card"], (result["shape"] or {}).get("name", result["card"]["asked"]["shape"])
    on = card.get("in_effect", {}).get("device") or "a machine that could not be told"
    on = card["cpu"] if on == "cpu" else on
    peaks = ", ".join(f"{name} {rate}" for name, rate in result["peaks_tflops"].items() if rate)
    parts = [
        f"## {card['date'][:10]}: ceilings and eager passes, {name}, on {on}\n",
        f"[{file.name}]({file.name}); commit {card['commit']}{', changed since' * bool(card['changed_since_commit'])}; "
        f"TFLOP/s of the floors: {peaks or present.UNKNOWN}.\n",
    ]
    for title, heads, rows in device.tables(result):
        if rows:
            parts += [f"**{title}**\n", table(heads, rows)]
    parts.append("\n".join(f"- {line.strip()}" for line in device.missing(result)[1:]))
    parts.append("Left out: " + "; ".join(result["left_out"]) + ".\n")
    parts.append(folded_card(card))
    return "\n".join(part for part in parts if part)


def folded_card(card: dict[str, Any]) -> str:
    """The card, shown where it is opened."""
    shown = [f"- {name}: {present.told(value)}" for name, value in card.items() if name not in ("what", "date")]
    return "\n".join(["<details><summary>Card</summary>\n", *shown, "\n</details>\n"])


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown; nothing where it has no rows."""
    if not heads or not rows:
        return ""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join("| " + " | ".join(line) + " |" for line in escaped) + "\n"


def what(file: Path, result: Any) -> str:
    """What another script says it measured, else the name of the file without its date."""
    values = result if isinstance(result, dict) else {}
    named = values.get("card", {}).get("what") or values.get("benchmark")
    return str(named or re.sub(r"-\d{4}-\d\d-\d\d$", "", file.stem))


def draw_missing(files: list[Path]) -> None:
    """Plots of results that have none."""
    for file in files:
        result = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(result, dict) and result.get("kind") == KIND and not file.with_suffix("").is_dir():
            try:
                plots.draw(result, file.with_suffix(""))
            except MissingExtraError as fault:
                print(f"{file.name} gets no plots: {fault}", file=sys.stderr)


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", nargs="+", type=Path, metavar="FILE", help="these results (default: all there are)")
    parser.add_argument("--page", type=Path, default=RESULTS / "README.md", help="default: bench/results/README.md")
    options = parser.parse_args()
    files = sorted(options.json or RESULTS.glob("*.json"))
    draw_missing(files)
    options.page.write_text(page(files), encoding="utf-8")


if __name__ == "__main__":
    main()
