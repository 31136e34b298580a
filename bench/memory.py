"""Peak resident memory of one decision by what it holds: tokens of text, or images of 4,096 tokens each.

A small random model (its own weights are 4 MB), so that what is measured is activations. Each row is a process of its
own.

    python bench/memory.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

DECIDE = """
import json, sys, time
from PIL import Image
from clef_trt import Clef
bundle, tokens, images = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
clef = Clef.load(bundle, max_length=tokens + 1000 + 4200 * images)
request = {
    "model": "m",
    "state": "x" * tokens,
    "questions": {"q": {"type": "noul", "instructions": "Is it?"}},
    "images": [Image.new("RGB", (2048, 2048), (40 * i, 90, 200)) for i in range(images)],
}
start = time.perf_counter()
usage = clef.decide(request)["usage"]
seconds = time.perf_counter() - start
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"input_tokens": usage["input_tokens"], "peak_mb": round(peak / 1000), "seconds": round(seconds, 2)}))
"""


def rows(bundle: Path) -> list[dict[str, Any]]:
    """One measured decision per row."""
    result = []
    for tokens, images in [(0, 0), (4000, 0), (15500, 0), (0, 1), (0, 2), (0, 4)]:
        command = [sys.executable, "-c", DECIDE, str(bundle), str(tokens), str(images)]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        result.append({"state_tokens": tokens, "images": images} | json.loads(run.stdout))
    return result


def main() -> None:
    """Print a card, a table and, where asked, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from clef_export.pipeline import export
    from clef_export.random_release import byte_tokenizer, small_config, write_release

    config, head = small_config()
    card = {
        "what": "peak resident memory of one decision, float32, ONNX Runtime on the CPU",
        "model": {"text": config["text_config"], "vision": config["vision_config"], "head": head},
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("clef-trt", "onnxruntime", "numpy")},
    }
    with tempfile.TemporaryDirectory() as folder:
        write_release(Path(folder) / "release", config, head, byte_tokenizer(), seed=0)
        export(Path(folder) / "release", Path(folder) / "bundle")
        table = rows(Path(folder) / "bundle")
    print(f"{'state tokens':>14}{'images':>8}{'input tokens':>14}{'peak MB':>9}{'seconds':>9}")
    for row in table:
        print(
            f"{row['state_tokens']:14}{row['images']:8}{row['input_tokens']:14}{row['peak_mb']:9}{row['seconds']:9.2f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"card": card, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
