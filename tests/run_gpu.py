"""Every GPU test on a machine with a card, in one command.

Exports the golden release `narrow` in float32 and BF16, builds the BF16 recipe for the card, and runs `pytest -m gpu`.

    python tests/run_gpu.py [--recipe rtx-bf16 | h200-bf16]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from clef_trt.cli import main as clef_trt

HERE = Path(__file__).parent


def main() -> int:
    """The exit status of pytest, or of the first step that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="rtx-bf16", help="rtx-bf16 or h200-bf16 (default: %(default)s)")
    recipe = parser.parse_args().recipe
    with tempfile.TemporaryDirectory() as name:
        exact, plans = Path(name) / "fp32", Path(name) / "bf16"
        for step in (
            ["export", HERE / "golden" / "narrow", exact],
            ["export", HERE / "golden" / "narrow", plans, "--precision", "bf16"],
            ["build", plans, "--recipe", recipe, "--profile", "256", "--profile", "1024"],
        ):
            if status := clef_trt([str(word) for word in step]):
                return status
        environment = os.environ | {"CLEF_TRT_GPU_BUNDLE": str(plans), "CLEF_TRT_GPU_REFERENCE": str(exact)}
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-ra", str(HERE)]
        return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
