"""Wheel and source archive: what is in them, and that they install on every Python this project supports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import clef_trt

ROOT = Path(__file__).parent.parent
VERSIONS = ("3.11", "3.12", "3.13")
BUILD = "from setuptools import build_meta; build_meta.build_wheel('{0}'); build_meta.build_sdist('{0}')"
IMPORT = "import time; start = time.perf_counter(); import clef_trt; print(time.perf_counter() - start)"
SMOKE = """
import json, sys, sysconfig
import clef_trt, clef_trt.cli, clef_trt.cpp
from clef_trt import samples
assert clef_trt.__file__.startswith(sysconfig.get_path("purelib")), clef_trt.__file__
assert (clef_trt.cpp.include_folder() / "clef_host.hpp").is_file()
with clef_trt.Clef.load(sys.argv[1], threads=1) as clef:
    print(json.dumps(clef.decide(samples.ticket())))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, made of a copy of the sources: setuptools leaves its traces where it builds."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("clef_trt", "engines", "export", "bench"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run = subprocess.run([sys.executable, "-c", BUILD.format(target)], cwd=source, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return target


def interpreter(version: str) -> str | None:
    """A Python of that version: this one, one on the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    candidates = [sys.executable, shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python")]
    for candidate in filter(None, candidates):
        asked = [str(candidate), "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        try:
            run = subprocess.run(asked, capture_output=True, text=True)
        except OSError:
            continue
        if run.stdout.strip() == version:
            return str(candidate)
    return None


def test_the_wheel_holds_two_packages_and_nothing_beside_them(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"clef_trt-{clef_trt.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "clef_trt",
        "clef_export",
        f"clef_trt-{clef_trt.__version__}.dist-info",
    }
    for name in ("py.typed", "cpp/clef_host.hpp", "cpp/examples/CMakeLists.txt", "server/page/index.html"):
        assert f"clef_trt/{name}" in names
    for folder in ("clef_trt", "engines"):
        files = {path.name for path in (ROOT / folder).iterdir() if path.suffix in (".py", ".toml", ".json", ".jsonl")}
        inside = "clef_trt/" if folder == "clef_trt" else "clef_trt/engines/"
        assert not files - {name.removeprefix(inside) for name in names}


def test_the_source_archive_holds_what_the_wheel_is_made_of(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    assert archive.name == f"clef_trt-{clef_trt.__version__}.tar.gz"
    with tarfile.open(archive) as opened:
        names = {name.split("/", 1)[-1] for name in opened.getnames()}
    for name in ("pyproject.toml", "LICENSE", "clef_trt/cpp/clef_tensors.hpp", "engines/h200-bf16.toml"):
        assert name in names
    for name in ("export/pipeline.py", "bench/shapes/0.8b.json", "clef_trt/cpp/examples/host_example.cpp"):
        assert name in names


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_works_in_a_fresh_environment(
    version: str, built: Path, bundles: dict[str, Path], tmp_path: Path
) -> None:
    base = interpreter(version)
    if base is None:
        pytest.skip(f"no Python {version} here")
    subprocess.run([base, "-m", "venv", str(tmp_path / "env")], check=True, capture_output=True)
    python = str(tmp_path / "env" / "bin" / "python")
    (wheel,) = built.glob("*.whl")
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    installed = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", *constraints, str(wheel)], capture_output=True, text=True
    )
    assert installed.returncode == 0, installed.stderr
    subprocess.run([python, "-m", "pip", "check"], check=True, capture_output=True)

    def run(program: str, *arguments: str) -> str:
        command = [python, "-W", "error", "-c", program, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout

    assert '"urgency"' in run(SMOKE, str(bundles["odd"]))
    # The best of some: the first has bytecode and libraries to read, and other tests may be at work.
    assert min(float(run(IMPORT)) for _ in range(5)) < 0.5
