"""The README is true: its Python runs, its commands exist, its files are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from clef_trt.cli import parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_python_runs(
    bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (480, 360), (150, 110, 60)).save("photo.jpg")
    programs = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(programs) == 2
    exec("".join(programs).replace("clef-flash.bundle", str(bundles["narrow"])), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.split(" ", 1)[1].startswith("{'billing': 0.")
    assert re.fullmatch(r"\{'type': 'noul', 'noul': 0\.\d+\} \d+", second)


def test_its_commands_parse() -> None:
    commands = re.findall(r"^    clef-trt (.*?)(?:\s+#.*)?$", README, re.MULTILINE)
    told = {command.split()[0] for command in commands}
    assert told == {"export", "verify", "decide", "ranges", "build", "eval", "bench", "serve", "encode"}
    for command in commands:
        parser().parse_args(shlex.split(command))


def test_its_make_targets_and_files_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake (\w+)", README):
        assert f"\n{target}:" in makefile
    for name in re.findall(r"`((?:\w+/)?\w+\.py)`", README):
        assert (ROOT / name).exists() or (ROOT / "clef_trt" / name).exists(), name
    for name in re.findall(r"^(\w+)/ ", README, re.MULTILINE):
        assert (ROOT / name).is_dir()
    tree = README.split("## Files")[1].split("```")[1]
    for folder in ("clef_trt", "export"):
        for path in (ROOT / folder).glob("[!_]*.py"):
            assert re.search(rf"\b{path.stem}\b", tree) or path.stem in ("errors", "types", "samples", "table"), path


def test_every_recipe_is_told() -> None:
    for path in (ROOT / "engines").glob("*.toml"):
        assert f"`{path.stem}`" in README


def test_settings_are_those_of_load() -> None:
    import inspect

    from clef_trt import Clef

    known = {**inspect.signature(Clef.load).parameters, **inspect.signature(Clef.__init__).parameters}
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", README, re.MULTILINE)
    assert len(rows) > 5
    for name in re.findall(r"\w+", " ".join(rows)):
        assert name in known
