"""The package as a stranger installs it."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import clef_trt
from clef_trt import samples

ROOT = Path(__file__).parent.parent


def test_public_names() -> None:
    assert sorted(clef_trt.__all__) == [
        "BundleError", "Clef", "ClefError", "Encoding", "EngineError", "ExportError", "Fault", "Limits", "MediaLimits",
        "MissingExtraError", "PassLimits", "ReleaseError", "RequestError", "SettingError", "TooLongError",
        "VerificationError",
    ]  # fmt: skip
    assert all(hasattr(clef_trt, name) for name in clef_trt.__all__)


def test_sample_requests_are_valid() -> None:
    from clef_trt.media import MediaReader
    from clef_trt.request import parse_request

    reader = MediaReader(json.loads((ROOT / "tests" / "golden" / "narrow" / "processor_config.json").read_text()))
    assert len(samples.requests()) == 10
    assert sum(bool(parse_request(request, reader).media) for request in samples.requests()) == 1


def test_the_runtime_does_not_import_torch() -> None:
    program = (
        "import sys, clef_trt, clef_trt.cli, clef_trt.fake; print({'torch', 'transformers', 'onnx'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


@pytest.mark.slow
def test_decide_with_only_the_runtime_dependencies(bundles: dict[str, Path], tmp_path: Path) -> None:
    """A wheel in an environment of its own: numpy, pillow, tokenizers, onnxruntime and what they need."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), str(ROOT)]
    subprocess.run(install, check=True, capture_output=True, cwd=tmp_path)
    listed = subprocess.run(
        [str(python), "-m", "pip", "list", "--format=freeze"], check=True, capture_output=True, text=True
    ).stdout.lower()
    assert "clef-trt==" in listed
    assert "torch" not in listed.replace("clef-trt", "")
    assert "transformers" not in listed
    subprocess.run([str(python), "-m", "pip", "check"], check=True, capture_output=True)

    ticket = ROOT / "clef_trt" / "sample_ticket.json"
    command = [str(tmp_path / "env" / "bin" / "clef-trt")]
    decided = subprocess.run(
        [*command, "decide", str(bundles["odd"]), str(ticket)], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert '"urgency"' in decided.stdout
    refused = subprocess.run(
        [*command, "export", str(bundles["odd"]), str(tmp_path / "b")], capture_output=True, text=True, cwd=tmp_path
    )
    assert refused.returncode == 2
    assert "pip install 'clef-trt[export]'" in refused.stderr


# device_*.py are the parts of device.py.
SCRIPTS = [path.name for path in sorted((ROOT / "bench").glob("*.py")) if not path.name.startswith("device_")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_bench_scripts_start(script: str) -> None:
    run = subprocess.run([sys.executable, str(ROOT / "bench" / script), "--help"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "--json" in run.stdout
