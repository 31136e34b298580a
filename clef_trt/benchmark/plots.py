"""The result as pictures: latency against tokens with its floor, throughput against batch, the split into stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import MissingExtraError
from .systems import STAGES

Row = dict[str, Any]
FORMATS = ("png", "svg")


def require() -> None:
    """Raises MissingExtraError where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as fault:
        raise MissingExtraError("drawing", "bench", fault) from None


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write every picture that the result has figures for into `folder`, as PNG and SVG; returns the files."""
    require()
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "clef-trt bench"  # the same result gives the same file
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for row in result["rows"] if row["median_ms"] is not None]
    figures = {
        "latency": _latency([row for row in rows if row["questions"] is not None]),
        "throughput": _throughput([row for row in rows if row["questions"] is not None]),
        "stages": _stages(rows),
    }
    written = []
    for name, figure in figures.items():
        if figure is None:
            continue
        for form in FORMATS:
            written.append(folder / f"{name}.{form}")
            figure.savefig(written[-1], dpi=120, metadata={"Date": None} if form == "svg" else None)
        _pyplot().close(figure)
    return written


def _pyplot() -> Any:
    from matplotlib import pyplot

    return pyplot


def _latency(rows: list[Row]) -> Any:
    """Median against tokens at the smallest batch, from fastest to slowest call as bars; floors dashed."""
    if not rows:
        return None
    batch = min(row["batch"] for row in rows)
    rows = sorted((row for row in rows if row["batch"] == batch), key=lambda row: row["tokens"])
    figure, axes = _pyplot().subplots(figsize=(8, 4.5), layout="constrained")
    for colour, (name, own) in zip(_colours(), _by_system(rows).items(), strict=False):
        tokens, medians = [row["tokens"] for row in own], [row["median_ms"] for row in own]
        spread = [
            [row["median_ms"] - row["min_ms"] for row in own],
            [row["max_ms"] - row["median_ms"] for row in own],
        ]
        axes.errorbar(tokens, medians, spread, fmt="-o", markersize=4, capsize=3, color=colour, label=name)
        floors = [row["floor_ms"] for row in own]
        if None not in floors:
            axes.plot(tokens, floors, "--", linewidth=1, color=colour)
    every = sorted({row["tokens"] for row in rows})
    axes.set(xscale="log", yscale="log", xlabel="tokens of a request", ylabel="ms")
    axes.set_xticks(every, [str(tokens) for tokens in every])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title(f"Latency, batch {batch}: median, fastest and slowest; its floor dashed")
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _throughput(rows: list[Row]) -> Any:
    """Tokens per second against batch, for the requests that were measured at most batches."""
    batches: dict[int, set[int]] = {}
    for row in rows:
        batches.setdefault(row["tokens"], set()).add(row["batch"])
    tokens = max(batches, key=lambda n: (len(batches[n]), -n), default=0)
    if len(batches.get(tokens, ())) < 2:
        return None
    rows = sorted((row for row in rows if row["tokens"] == tokens), key=lambda row: row["batch"])
    figure, axes = _pyplot().subplots(figsize=(8, 4.5), layout="constrained")
    for colour, (name, own) in zip(_colours(), _by_system(rows).items(), strict=False):
        rates = [row["tokens_per_s"] for row in own]
        axes.plot([row["batch"] for row in own], rates, "-o", markersize=4, color=colour, label=name)
    every = sorted(batches[tokens])
    axes.set(xscale="log", xlabel="requests decided together", ylabel="tokens per second", ylim=(0, None))
    axes.set_xticks(every, [str(batch) for batch in every])
    axes.minorticks_off()
    axes.set_title(f"Throughput, requests of {tokens} tokens")
    figure.legend(loc="outside right upper", fontsize="small")
    return figure


def _stages(rows: list[Row]) -> Any:
    """Bars of the stages' medians, a panel per workload; of a server, which shows none, the whole call."""
    names = list(dict.fromkeys(row["workload"] for row in rows))
    if not names:
        return None
    heights = [max(sum(row["workload"] == name for row in rows), 1) for name in names]
    figure, panels = _pyplot().subplots(
        len(names),
        1,
        squeeze=False,
        figsize=(8, 0.8 + 0.8 * len(names) + 0.3 * sum(heights)),
        height_ratios=heights,
        layout="constrained",
    )
    colours = dict(zip((*STAGES, "whole call"), _colours(), strict=False))
    shown = {}
    for name, axes in zip(names, panels[:, 0], strict=True):
        own = [row for row in rows if row["workload"] == name][::-1]
        for place, row in enumerate(own):
            parts = {stage: value for stage, value in row["stages_ms"].items() if value is not None}
            left = 0.0
            for stage, value in (parts or {"whole call": row["median_ms"]}).items():
                shown[stage] = axes.barh(place, value, left=left, color=colours[stage])
                left += value
        axes.set_yticks(range(len(own)), [row["system"] for row in own])
        axes.set_title(f"tokens × batch: {name}" if own[0]["questions"] is not None else name, fontsize="medium")
    panels[-1, 0].set_xlabel("ms, medians")
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", fontsize="small", ncols=len(shown))
    return figure


def _by_system(rows: list[Row]) -> dict[str, list[Row]]:
    result: dict[str, list[Row]] = {}
    for row in rows:
        result.setdefault(row["system"], []).append(row)
    return result


def _colours() -> list[str]:
    return [f"C{number}" for number in range(20)]
