"""Build recipes: what a plan is built for, from TOML, checked down to the last key."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contract import CONTRACTS
from .errors import SettingError
from .profiles import Profile, dynamic_axes

# What each target can run. TensorRT has no kernel for attention in float32.
PRECISIONS = {"tensorrt": ("bf16", "fp8"), "tensorrt_rtx": ("bf16", "fp8"), "onnxruntime": ("fp32", "int8")}
COMPUTE_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")  # TensorRT for RTX 1.7 builds for these
FIRST_BF16, FIRST_FP8 = "8.0", "8.9"  # the first ones with tensor cores for it
STRATEGIES = {  # what IRuntimeConfig of TensorRT for RTX knows
    "cuda_graph_strategy": ("DISABLED", "WHOLE_GRAPH_CAPTURE"),
    "dynamic_shapes_kernel_specialization_strategy": ("EAGER", "LAZY", "NONE"),
}
COMMON_KEYS = ("target", "precision", "drift")
BUILD_KEYS = ("workspace_gib", "optimization_level", "tf32", *CONTRACTS)
KEYS = {
    "tensorrt": (*COMMON_KEYS, *BUILD_KEYS, "timing_cache"),
    "tensorrt_rtx": (*COMMON_KEYS, *BUILD_KEYS, "compute_capabilities", "runtime"),
    "onnxruntime": COMMON_KEYS,
}
PATCHES_PER_TOKEN = 4  # the vision graph merges blocks of 2 × 2


@dataclass(frozen=True)
class RecipeProfile(Profile):
    """A named profile of one graph; an optional one is built only where it is asked for by name."""

    optional: bool = False


@dataclass(frozen=True)
class Drift:
    """What `verify` allows between a plan and the reference. Differences are of probabilities, 0 to 1."""

    same_top_option: float  # least share of questions whose most probable option is the same
    max_probability_difference: float
    mean_probability_difference: float


@dataclass(frozen=True)
class RuntimeSettings:
    """How TensorRT for RTX runs a plan; see its IRuntimeConfig."""

    cuda_graph_strategy: str
    dynamic_shapes_kernel_specialization_strategy: str


@dataclass(frozen=True)
class BuildSettings:
    """What both builders are told."""

    workspace_gib: float  # the most that activations and scratch memory of a pass may take
    optimization_level: int  # 0 to 5: how long the builder searches
    tf32: bool  # whether float32 products may round their factors to 10 bits
    profiles: dict[str, tuple[RecipeProfile, ...]]  # by graph
    timing_cache: bool = False  # of `tensorrt`: remember measured kernels between builds
    compute_capabilities: tuple[str, ...] = ()  # of `tensorrt_rtx`: the cards a plan is built for
    runtime: RuntimeSettings | None = None  # of `tensorrt_rtx`

    def selected(self, names: Iterable[str] | None = None) -> dict[str, tuple[RecipeProfile, ...]]:
        """The profiles to build, by graph: those named, or where a graph has none of the names, all but the optional.

        Raises SettingError for a name that no graph has.
        """
        asked = set(names or ())
        known = {profile.name for profiles in self.profiles.values() for profile in profiles}
        if unknown := sorted(asked - known):
            raise SettingError(f"unknown profiles {unknown}; the recipe has {sorted(known)}")
        return {
            graph: tuple(p for p in profiles if p.name in asked) or tuple(p for p in profiles if not p.optional)
            for graph, profiles in self.profiles.items()
        }


@dataclass(frozen=True)
class Recipe:
    """One recipe. `build` is None for ONNX Runtime, which needs no plan."""

    name: str
    sha256: str  # of the file
    target: str
    precision: str
    drift: Drift
    build: BuildSettings | None = None


def builtin_recipes() -> dict[str, Path]:
    """The recipes that come with the package: name → file."""
    here = Path(__file__).parent
    # Installed, engines/ lies inside the package; in a checkout beside it.
    folder = next((f for f in (here / "engines", here.parent / "engines") if f.is_dir()), None)
    assert folder is not None, "the package is installed without its recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_recipe(name_or_path: str | Path) -> Recipe:
    """The built-in recipe of that name, else the TOML file at that path.

    Raises SettingError when there is neither, and for unknown, missing or impossible entries.
    """
    builtin = builtin_recipes()
    path = builtin.get(str(name_or_path)) or Path(name_or_path)
    try:
        content = path.read_bytes()
        value = tomllib.loads(content.decode("utf-8"))
    except OSError as fault:
        raise SettingError(
            f"recipe {str(name_or_path)!r} cannot be read ({fault.strerror}); it is neither a file nor one of "
            f"{', '.join(builtin)}"
        ) from None
    except ValueError as fault:  # TOMLDecodeError and UnicodeDecodeError
        raise SettingError(f"{path} is not TOML: {fault}") from None
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", path.stem):
        raise SettingError(f"{path}: a recipe is named with letters, digits, - and _, because its plans bear the name")
    return _recipe(value, path.stem, hashlib.sha256(content).hexdigest())


def _recipe(value: dict[str, Any], name: str, sha256: str) -> Recipe:
    if "target" not in value:
        raise SettingError(f"{name}: target is missing; expected one of {', '.join(KEYS)}")
    target = _one_of(value["target"], tuple(KEYS), f"{name}: target")
    _same_keys(value, KEYS[target], name)
    precision = _one_of(value["precision"], PRECISIONS[target], f"{name}: precision of target {target}")
    drift = _table(value["drift"], tuple(Drift.__dataclass_fields__), f"{name}: drift")
    limits = Drift(**{key: float(_number(item, 0, 1, f"{name}: drift.{key}")) for key, item in drift.items()})
    build = None if target == "onnxruntime" else _build(value, name)
    if build is not None and target == "tensorrt_rtx":
        least = FIRST_FP8 if precision == "fp8" else FIRST_BF16
        if old := [c for c in build.compute_capabilities if float(c) < float(least)]:
            raise SettingError(f"{name}: compute_capabilities {old} have no {precision}; expected {least} or later")
    return Recipe(name, sha256, target, precision, limits, build)


def _build(value: dict[str, Any], name: str) -> BuildSettings:
    settings: dict[str, Any] = {
        "workspace_gib": float(_number(value["workspace_gib"], 0.001, 1024, f"{name}: workspace_gib")),
        "optimization_level": _integer(value["optimization_level"], 0, 5, f"{name}: optimization_level"),
        "profiles": {graph: _profiles(value[graph], graph, f"{name}: {graph}") for graph in CONTRACTS},
    }
    settings |= {key: _boolean(value[key], f"{name}: {key}") for key in ("tf32", "timing_cache") if key in value}
    if "runtime" in value:
        runtime = _table(value["runtime"], tuple(STRATEGIES), f"{name}: runtime")
        settings["runtime"] = RuntimeSettings(
            **{key: _one_of(item, STRATEGIES[key], f"{name}: runtime.{key}") for key, item in runtime.items()}
        )
    if "compute_capabilities" in value:
        cards = value["compute_capabilities"]
        if not isinstance(cards, list) or not cards:
            raise SettingError(f"{name}: compute_capabilities is {cards!r}; expected a list such as ['8.9', '12.0']")
        for card in cards:
            _one_of(card, COMPUTE_CAPABILITIES, f"{name}: compute_capabilities")
        if len(set(cards)) != len(cards):
            raise SettingError(f"{name}: compute_capabilities {cards} names one twice")
        settings["compute_capabilities"] = tuple(cards)
    return BuildSettings(**settings)


def _profiles(value: Any, graph: str, where: str) -> tuple[RecipeProfile, ...]:
    named = _table(value, ("profiles",), where)["profiles"]
    if not isinstance(named, dict) or not named:
        raise SettingError(f"{where}.profiles is {named!r}; expected tables {where}.profiles.NAME")
    axes = tuple(dynamic_axes(CONTRACTS[graph]))
    result = []
    for name, table in named.items():
        place = f"{where}.profiles.{name}"
        if not isinstance(table, dict):
            raise SettingError(f"{place} is {table!r}; expected a table")
        optional = _boolean(table.get("optional", False), f"{place}.optional")
        ranges = _table({key: item for key, item in table.items() if key != "optional"}, axes, place)
        result.append(RecipeProfile(name, {a: _range(ranges[a], a, f"{place}.{a}") for a in axes}, optional))
    if all(profile.optional for profile in result):
        raise SettingError(f"{where}: every profile is optional, so that nothing would be built by default")
    return tuple(result)


def _range(value: Any, axis: str, where: str) -> tuple[int, int, int]:
    if not isinstance(value, list) or len(value) != 3:
        raise SettingError(f"{where} is {value!r}; expected [min, opt, max]")
    least, best, most = (_integer(item, 1, 2**31 - 1, where) for item in value)
    if not least <= best <= most:
        raise SettingError(f"{where} is {value}; expected min <= opt <= max")
    if axis == "patches" and any(item % PATCHES_PER_TOKEN for item in value):
        raise SettingError(f"{where} is {value}; expected multiples of {PATCHES_PER_TOKEN}, the patches of a token")
    return least, best, most


def _table(value: Any, keys: tuple[str, ...], where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SettingError(f"{where} is {value!r}; expected a table with {', '.join(keys)}")
    _same_keys(value, keys, where)
    return {key: value[key] for key in keys}


def _same_keys(value: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    if wrong := sorted(value.keys() ^ set(keys)):
        kinds = ", ".join(f"{key!r} is {'unknown' if key in value else 'missing'}" for key in wrong)
        raise SettingError(f"{where}: {kinds}; expected exactly {', '.join(keys)}")


def _one_of(value: Any, known: tuple[str, ...], where: str) -> str:
    if not isinstance(value, str) or value not in known:
        raise SettingError(f"{where} is {value!r}; expected one of {', '.join(known)}")
    return value


def _boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise SettingError(f"{where} is {value!r}; expected true or false")
    return value


def _integer(value: Any, least: int, most: int, where: str) -> int:
    if not isinstance(value, int):
        raise SettingError(f"{where} is {value!r}; expected an integer")
    return int(_number(value, least, most, where))


def _number(value: Any, least: float, most: float, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise SettingError(f"{where} is {value!r}; expected a number from {least} to {most}")
    return value
