"""The tensors of the two graphs: what an engine takes and returns, whatever runs it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import EngineError

Tensors = dict[str, np.ndarray]
Axes = tuple[str | int, ...]  # an axis is dynamic where it is a name, of the model's own size where it is a SIZE
SIZES = ("hidden", "patch_values")


@dataclass(frozen=True)
class Contract:
    """Inputs and the one output of a graph: name → (dtype, axes)."""

    name: str
    inputs: dict[str, tuple[str, Axes]]
    output: str
    output_axes: Axes

    def check(self, inputs: Tensors, sizes: dict[str, int]) -> None:
        """Raises EngineError for unknown or missing names, other dtypes, and axes that disagree or are empty.

        `sizes`: the model's own sizes, at least those of its inputs among SIZES.
        """
        if inputs.keys() != self.inputs.keys():
            wrong = sorted(inputs.keys() ^ self.inputs.keys())
            raise EngineError(f"unknown or missing inputs {wrong}; the {self.name} graph takes {sorted(self.inputs)}")
        known: dict[str, int] = dict(sizes)
        for name, (dtype, axes) in self.inputs.items():
            array = inputs[name]
            if array.dtype != dtype or array.ndim != len(axes):
                raise EngineError(f"{name} is {array.dtype} {list(array.shape)}; expected {dtype} {list(axes)}")
            for axis, size in zip(axes, array.shape, strict=True):
                expected = axis if isinstance(axis, int) else known.setdefault(axis, size)
                if size != expected or size < 1:
                    raise EngineError(f"{name} is {list(array.shape)}; expected {list(axes)} with {axis} = {expected}")

    def check_output(self, out: np.ndarray, inputs: Tensors) -> None:
        """Raises EngineError where `out` cannot hold the output of these checked inputs in place."""
        sizes = {
            axis: size
            for name, (_, axes) in self.inputs.items()
            for axis, size in zip(axes, inputs[name].shape, strict=True)
        }
        expected = [sizes.get(axis, axis) for axis in self.output_axes]
        fits = len(expected) == out.ndim and all(
            isinstance(axis, str) or axis == size for axis, size in zip(expected, out.shape, strict=True)
        )
        if out.dtype != np.float32 or not fits:
            raise EngineError(f"out is {out.dtype} {list(out.shape)}; expected float32 {expected}")
        if not out.flags.c_contiguous or not out.flags.writeable:
            state = "read-only" if out.flags.c_contiguous else "not contiguous"
            raise EngineError(f"out is {state}; expected a contiguous array that may be written")


# Padding: input_ids hold anything behind a record's length, questions and options an empty span, options question -1.
TEXT = Contract(
    "text",
    {
        "input_ids": ("int64", ("batch", "sequence")),
        "position_ids": ("int64", (3, "batch", "sequence")),  # time, height, width
        "sequence_lengths": ("int64", ("batch",)),
        "media_embeddings": ("float32", ("media", "hidden")),  # one zero row where there is no media
        "media_rows": ("int64", ("batch", "sequence")),  # row of media_embeddings per token, -1 for text
        "question_spans": ("int64", ("batch", "questions", 2)),
        "question_types": ("int64", ("batch", "questions")),  # index into types.QUESTION_TYPES
        "option_spans": ("int64", ("batch", "options", 2)),
        "option_questions": ("int64", ("batch", "options")),
    },
    "logits",  # float32; of padding the lowest finite value
    ("batch", "options"),
)

# One image, or temporal patches of one video: groups of equal size, attention stays inside each. Patches in merge-block
# order; see `grid.vision_inputs`.
VISION = Contract(
    "vision",
    {
        "pixel_values": ("float32", ("groups", "patches", "patch_values")),
        "position_rows": ("int64", ("patches", 4)),  # rows of the learned position table
        "position_weights": ("float32", ("patches", 4)),  # their bilinear weights
        "positions": ("int64", ("patches", 2)),  # row and column of the patch
    },
    "embeddings",  # float32
    ("groups", "tokens", "hidden"),
)
CONTRACTS = {contract.name: contract for contract in (TEXT, VISION)}


def into(out: np.ndarray | None, result: np.ndarray) -> np.ndarray:
    """`result`, or `out` with its numbers where that is given."""
    if out is None:
        return result
    np.copyto(out, result)
    return out
