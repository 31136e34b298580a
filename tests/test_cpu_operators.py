"""bench/cpu_operators.py compares forms of one operator: they compute the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from clef_export.config import parse_config

from clef_trt.benchmark.models import read_shape

BENCH = Path(__file__).parent.parent / "bench"


def test_forms_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import cpu_operators

    for name, value in (("TURNS", 1), ("RUNS", 1), ("SETTLE_S", 0)):
        monkeypatch.setattr(cpu_operators, name, value)
    config = parse_config(*read_shape("0.8b")).text
    rows = cpu_operators.delta_rule(70, config)
    assert len(rows) == 3
    assert max(row["relative_error"] for row in rows) < 1e-4
    rows = cpu_operators.linears(5, 256, 32)
    assert "Hadamard" in rows[-1]["form"]
    assert max(row["relative_error"] for row in rows) < 0.3
    del sys.modules["cpu_operators"], sys.modules["cpu"]
