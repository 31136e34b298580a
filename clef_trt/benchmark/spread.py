"""Repeated measurements as figures: median and spread, and ratios with their interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 2000


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Median and spread of repeated runs, in seconds."""
    values = {
        "median_s": np.median(seconds),
        "p95_s": np.percentile(seconds, 95),
        "min_s": min(seconds),
        "max_s": max(seconds),
    }
    return {name: round(float(value), 6) for name, value in values.items()} | {"runs": len(seconds)}


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Median of the ratios turn by turn, with the 95 % interval of a bootstrap over turns (percentiles, seeded).

    Ratios within a turn, because both systems then met the same state of the machine.
    """
    ratios = np.divide(numerators, denominators)
    chosen = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[chosen], axis=1), (2.5, 97.5))
    figures = {"median": np.median(ratios), "low": low, "high": high}
    return {name: float(f"{value:.4g}") for name, value in figures.items()}
