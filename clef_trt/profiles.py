"""Optimization profiles: which one takes a pass, and the padded sizes (bucket) it runs at.

Sizes are {axis: size} over a contract's dynamic axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .contract import SIZES, Axes, Contract, Tensors
from .errors import EngineError

# What tensors are padded with, 0 where nothing is said; see contract.TEXT.
PADDING = {"media_rows": -1, "option_questions": -1}
# An image's patches are never padded: attention would see the padding, since the vision graph has no lengths.
FIXED_AXES = ("patches",)
# Axes along which a pass costs in proportion: padded by an eighth at most (sequence in whole chunks of 64 tokens).
FINEST_STEPS = {"sequence": 64, "groups": 1}


@dataclass(frozen=True)
class Profile:
    """One profile of a plan: the (min, opt, max) of every dynamic axis of its inputs."""

    name: str
    axes: dict[str, tuple[int, int, int]]

    def misfit(self, sizes: Mapping[str, int]) -> str | None:
        """The first axis this profile cannot take, in words; smaller sizes fit where they may be padded."""
        for axis, (least, _, most) in self.axes.items():
            if sizes[axis] > most or (axis in FIXED_AXES and sizes[axis] < least):
                return f"{axis} {least} to {most}"
        return None

    def bucket(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """`sizes` rounded up, so that few shapes cover all passes, and inside the profile."""
        return {axis: min(max(_rounded(axis, sizes[axis]), low), high) for axis, (low, _, high) in self.axes.items()}

    def shapes(self, axes: Axes, model_sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
        """The min, opt and max shape of a tensor."""
        return [
            shape(axes, {axis: range_[which] for axis, range_ in self.axes.items()}, model_sizes) for which in range(3)
        ]


def read_profiles(contract: Contract, profiles: Mapping[str, Mapping[str, Sequence[int]]]) -> list[Profile]:
    """Profiles as a manifest holds them, in the plan's order: {name: {axis: (min, opt, max)}}.

    Raises EngineError for none, unknown or missing axes, and ranges that are not ascending from at least 1.
    """
    known = dynamic_axes(contract)
    result = []
    for name, axes in profiles.items():
        if axes.keys() != set(known):
            raise EngineError(f"profile {name!r} has the axes {sorted(axes)}; the {contract.name} graph has {known}")
        for axis, range_ in axes.items():
            if len(range_) != 3 or not 1 <= range_[0] <= range_[1] <= range_[2]:
                raise EngineError(f"profile {name!r}: {axis} is {list(range_)}; expected min, opt, max, ascending")
        result.append(Profile(name, {axis: (axes[axis][0], axes[axis][1], axes[axis][2]) for axis in known}))
    if not result:
        raise EngineError(f"the plan of the {contract.name} graph has no profiles")
    return result


def choose(profiles: Sequence[Profile], sizes: Mapping[str, int]) -> int:
    """The index of the tightest profile that takes `sizes`: least maximum sequence or patches, then least volume.

    Raises EngineError naming the sizes and, per profile, the axis that does not fit and its range.
    """
    misfits = [profile.misfit(sizes) for profile in profiles]
    fitting = [index for index, misfit in enumerate(misfits) if misfit is None]
    if not fitting:
        came = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        ranges = "; ".join(f"{profile.name} takes {misfit}" for profile, misfit in zip(profiles, misfits, strict=True))
        raise EngineError(f"no profile of the plan takes {came}: {ranges}")

    def extent(index: int) -> tuple[int, int]:
        maxima = {axis: range_[2] for axis, range_ in profiles[index].axes.items()}
        return maxima.get("sequence", maxima.get("patches", 0)), math.prod(maxima.values())

    return min(fitting, key=extent)


def dynamic_axes(contract: Contract) -> list[str]:
    """The names of the axes of a contract's inputs that vary from pass to pass."""
    axes = [axis for _, axes in contract.inputs.values() for axis in axes if isinstance(axis, str)]
    return [axis for axis in dict.fromkeys(axes) if axis not in SIZES]


def sizes_of(contract: Contract, inputs: Tensors) -> dict[str, int]:
    """The sizes of a pass whose inputs were checked against the contract."""
    known = dynamic_axes(contract)
    pairs = ((a, s) for n, (_, axes) in contract.inputs.items() for a, s in zip(axes, inputs[n].shape, strict=True))
    return {axis: size for axis, size in pairs if axis in known and isinstance(axis, str)}


def shape(axes: Axes, sizes: Mapping[str, int], model_sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a tensor at the given sizes."""
    return tuple(axis if isinstance(axis, int) else sizes.get(axis) or model_sizes[axis] for axis in axes)


def write_padded(target: np.ndarray, array: np.ndarray, fill: int) -> None:
    """Write `array` into the leading corner of `target` and `fill` into the rest.

    A target of uint16 holds bfloat16, which numpy does not know: float32 rounded to nearest even.
    """
    if target.shape != array.shape:
        assert fill == 0 or target.dtype != np.uint16, f"{fill} is not written as bfloat16"
        target.fill(fill)
    target[tuple(map(slice, array.shape))] = bfloat16_bits(array) if target.dtype == np.uint16 else array


def bfloat16_bits(array: np.ndarray) -> np.ndarray:
    """float32 → the bits of the nearest bfloat16 as uint16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)


def float32_of_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The bits of bfloat16 as uint16 → float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded(axis: str, size: int) -> int:
    if axis in FIXED_AXES:
        return size
    above = (size - 1).bit_length()  # 2^above is the next power of two
    step = max(FINEST_STEPS[axis], 1 << max(above - 4, 0)) if axis in FINEST_STEPS else 1 << above
    return -(-size // step) * step
