"""Recipes: those that come with the package, and that nothing unknown or impossible passes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from clef_trt.errors import SettingError
from clef_trt.recipe import COMPUTE_CAPABILITIES, STRATEGIES, builtin_recipes, read_recipe

NAMES = ["cpu-fp32", "cpu-int8", "h200-bf16", "h200-fp8", "rtx-bf16", "rtx-fp8"]


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """A built-in recipe with some of its text replaced, as a file."""

    def write(name: str, old: str, new: str) -> Path:
        text = builtin_recipes()[name].read_text(encoding="utf-8")
        assert text.count(old) >= 1, f"{old!r} is not in {name}"
        path = tmp_path / "changed.toml"
        path.write_text(text.replace(old, new, 1), encoding="utf-8")
        return path

    return write


def test_the_builtin_recipes() -> None:
    assert sorted(builtin_recipes()) == NAMES
    recipes = {name: read_recipe(name) for name in NAMES}
    assert {name: recipe.name for name, recipe in recipes.items()} == {name: name for name in NAMES}
    assert len({recipe.sha256 for recipe in recipes.values()}) == len(NAMES)
    targets = {"cpu": "onnxruntime", "h200": "tensorrt", "rtx": "tensorrt_rtx"}
    for name, recipe in recipes.items():
        place, precision = name.split("-")
        assert (recipe.target, recipe.precision) == (targets[place], precision)
        assert (recipe.build is None) == (place == "cpu")


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("cpu")])
def test_the_sequence_is_split_and_the_longest_part_optional(name: str) -> None:
    settings = read_recipe(name).build
    assert settings is not None
    lengths = {p.name: p.axes["sequence"][2] for p in settings.profiles["text"]}
    assert lengths == {str(length): length for length in (256, 1024, 4096, 16384, 65536)}
    by_default = settings.selected()
    assert [p.name for p in by_default["text"]] == ["256", "1024", "4096", "16384"]
    assert [p.axes["patches"][2] for p in by_default["vision"]] == [1024, 4096, 16384]


def test_a_path_gives_the_same_recipe() -> None:
    assert read_recipe(builtin_recipes()["rtx-fp8"]) == read_recipe("rtx-fp8")


def test_profiles_by_name() -> None:
    settings = read_recipe("rtx-bf16").build
    assert settings is not None
    asked = settings.selected(["65536", "256"])
    assert [p.name for p in asked["text"]] == ["256", "65536"]
    assert asked["vision"] == settings.selected()["vision"]
    with pytest.raises(SettingError, match=r"unknown profiles \['2048'\]; the recipe has .*'16384'.*patches-1024"):
        settings.selected(["256", "2048"])


def test_an_unknown_recipe_lists_those_there_are() -> None:
    with pytest.raises(SettingError, match=r"rtx-fp9.*cpu-fp32, cpu-int8, h200-bf16, h200-fp8, rtx-bf16, rtx-fp8"):
        read_recipe("rtx-fp9")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("rtx-bf16", "tf32 = false", "tf23 = false", "'tf23' is unknown, 'tf32' is missing; expected .*tf32"),
        ("rtx-bf16", "tf32 = false", "tf32 = 0", "tf32 is 0; expected true or false"),
        ("rtx-bf16", "tf32 = false", "tf32 = false\ntiming_cache = true", "'timing_cache' is unknown"),
        ("h200-fp8", "tf32 = false", 'tf32 = false\ncompute_capabilities = ["8.9"]', "'compute_capabilities' is unkn"),
        ("h200-fp8", '"tensorrt"', '"cuda"', "target is 'cuda'; expected one of tensorrt, tensorrt_rtx, onnxruntime"),
        ("h200-fp8", 'target = "tensorrt"', "", "target is missing"),
        ("h200-fp8", '"fp8"', '"fp32"', "precision of target tensorrt is 'fp32'; expected one of bf16, fp8"),
        ("cpu-fp32", '"fp32"', '"bf16"', "precision of target onnxruntime is 'bf16'; expected one of fp32, int8"),
        ("cpu-fp32", '"fp32"', '"fp32"\ntf32 = true', "'tf32' is unknown; expected exactly target, precision, drift"),
        ("h200-fp8", "optimization_level = 4", "optimization_level = 6", "optimization_level is 6; expected .* 0 to 5"),
        ("h200-fp8", "optimization_level = 4", "optimization_level = 4.0", "optimization_level is 4.0; expected an"),
        ("h200-fp8", "optimization_level = 4", "optimization_level = true", "optimization_level is True"),
        ("h200-fp8", "workspace_gib = 64", "workspace_gib = 0", "workspace_gib is 0; expected a number from 0.001"),
        ("h200-fp8", "workspace_gib = 64", "workspace_gib = nan", "workspace_gib is nan"),
        ("h200-fp8", "sequence = [1, 256, 256]", "sequence = [1, 257, 256]", "256.sequence is .*min <= opt <= max"),
        ("h200-fp8", "sequence = [1, 256, 256]", "sequence = [0, 256, 256]", "256.sequence is 0"),
        ("h200-fp8", "sequence = [1, 256, 256]", "sequence = [1, 256]", r"expected \[min, opt, max\]"),
        ("h200-fp8", "sequence = [1, 256, 256]", "length = [1, 256, 256]", "'length' is unknown, 'sequence' is missi"),
        ("h200-fp8", "patches = [4, 1024, 1024]", "patches = [2, 1024, 1024]", "expected multiples of 4"),
        ("h200-fp8", "optional = true", 'optional = "yes"', "65536.optional is 'yes'; expected true or false"),
        ("h200-fp8", "same_top_option = 0.995", "same_top_option = 99.5", "drift.same_top_option is 99.5"),
        ("h200-fp8", "same_top_option = 0.995", "", "drift: 'same_top_option' is missing"),
        ("rtx-fp8", '"8.9"', '"9.0"', "compute_capabilities is '9.0'; expected one of 7.5, "),
        ("rtx-fp8", '"8.9"', '"8.6"', r"compute_capabilities \['8.6'\] have no fp8; expected 8.9 or later"),
        ("rtx-bf16", '"8.9"', '"7.5"', r"\['7.5'\] have no bf16"),
        ("rtx-fp8", '"8.9"', '"12.0"', "names one twice"),
        ("rtx-fp8", '["8.9", "12.0"]', "[]", "compute_capabilities is "),
        ("rtx-fp8", '"EAGER"', '"eager"', "strategy is 'eager'; expected one of EAGER, LAZY, NONE"),
        ("rtx-fp8", '[runtime]\n', "[run]\n", "'run' is unknown, 'runtime' is missing"),
        ("rtx-fp8", "[runtime]", "[runtime", "is not TOML"),
    ],
)  # fmt: skip
def test_nothing_unknown_or_impossible(
    changed: Callable[..., Path], name: str, old: str, new: str, message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        read_recipe(changed(name, old, new))


def test_some_profile_is_built_by_default(changed: Callable[..., Path]) -> None:
    path = changed("rtx-bf16", "[text.profiles.256]", "[text.profiles.256]\noptional = true")
    assert read_recipe(path).build is not None
    text = path.read_text(encoding="utf-8")
    for name in ("1024", "4096", "16384"):
        text = text.replace(f"[text.profiles.{name}]", f"[text.profiles.{name}]\noptional = true")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingError, match="text: every profile is optional"):
        read_recipe(path)


def test_the_name_can_be_part_of_a_file_name(tmp_path: Path) -> None:
    path = tmp_path / "my recipe.toml"
    path.write_bytes(builtin_recipes()["rtx-bf16"].read_bytes())
    with pytest.raises(SettingError, match="letters, digits, - and _"):
        read_recipe(path)


def test_what_recipes_may_name_is_what_the_package_has() -> None:
    trt = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT for RTX is not installed")
    known = {name for name in dir(trt.ComputeCapability) if re.fullmatch(r"SM\d+", name)}
    assert known == {"SM" + card.replace(".", "") for card in COMPUTE_CAPABILITIES}
    graphs, kernels = STRATEGIES.values()
    assert set(graphs) == set(trt.CudaGraphStrategy.__members__)
    assert set(kernels) == set(trt.DynamicShapesKernelSpecializationStrategy.__members__)
