"""Memory and cold start of one system in a process of its own: opening, a first decision, then every workload once.

The caches of the file system are as the run left them: warm, mostly.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .machine import resident_mb
from .models import Progress
from .systems import Sources, make_system, reason
from .workload import Call

FLAG = "--fresh"  # hidden option of the command: the file of what to do


def in_fresh_process(name: str, sources: Sources, calls: dict[str, list[Call]], tell: Progress) -> dict[str, Any]:
    """What `report` found, or nulls with the reason. `calls`: those of a turn of each workload, smallest first."""
    tell(f"{name} in a process of its own")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "task.json"
        # CLOCK_MONOTONIC, which perf_counter reads on Linux, is the same in both processes.
        task = {
            "system": name,
            "release": None if sources.release is None else str(sources.release),
            "bundles": {precision: str(path) for precision, path in sources.bundles.items()},
            "threads": sources.threads,
            "calls": calls,
            "started": time.perf_counter(),
        }
        file.write_text(json.dumps(task), encoding="utf-8")
        command = [sys.executable, "-m", "clef_trt.cli", "bench", FLAG, str(file)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (run.stderr.strip().splitlines() or ["nothing on standard error"])[-1]
        return empty(f"its process ended with status {run.returncode}: {last}")
    return found


def empty(why: str | None) -> dict[str, Any]:
    """What is known of a system that has no process of its own."""
    names = ("open_s", "first_decision_s", "cold_start_s", "opened_mb")
    return {**dict.fromkeys(names), "peak_mb": {}, "reason": why}


def report(file: Path) -> None:
    """In the process of its own: open the system, decide, and print the figures as one line of JSON.

    `cold_start_s` runs from starting the process to the first answer, all imports included (of those, `open_s` holds
    torch and transformers); `peak_mb` of a workload holds what the smaller ones before it left.
    """
    task = json.loads(file.read_text(encoding="utf-8"))
    release = None if task["release"] is None else Path(task["release"])
    bundles = {precision: Path(path) for precision, path in task["bundles"].items()}
    found = empty(None)
    try:
        system = make_system(task["system"], Sources(release, bundles, task["threads"]))
        found["open_s"] = round(system.open(), 4)
        found["opened_mb"] = resident_mb("VmRSS")
        for name, calls in task["calls"].items():
            for call in calls:
                start = time.perf_counter()
                system.run(call)
                if found["first_decision_s"] is None:
                    found["first_decision_s"] = round(time.perf_counter() - start, 4)
                    found["cold_start_s"] = round(time.perf_counter() - task["started"], 4)
            found["peak_mb"][name] = resident_mb()
    except Exception as fault:
        found["reason"] = reason(fault)
    print(json.dumps(found))
