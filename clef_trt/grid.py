"""Places on a grid of patches: positions of media tokens in the backbone, and of patches in the vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .contract import Tensors


@dataclass(frozen=True)
class TokenGrid:
    """The placeholders of one image or one temporal patch of a video in a record."""

    start: int  # index of its first token
    rows: int  # tokens
    columns: int

    @property
    def end(self) -> int:
        """Index behind its last token."""
        return self.start + self.rows * self.columns


def position_ids(length: int, grids: Sequence[TokenGrid]) -> np.ndarray:
    """M-RoPE positions [3, length] int64: time, height, width of every token.

    Text counts up, alike on all three. A grid takes the position p that is due: token (r, c) is at (p, p + r, p + c),
    and what follows the grid is at p + max(rows, columns).
    """
    positions = np.empty((3, length), np.int64)
    due, start = 0, 0
    for grid in grids:
        positions[:, start : grid.start] = np.arange(due, due + grid.start - start)
        due += grid.start - start
        rows, columns = np.divmod(np.arange(grid.rows * grid.columns), grid.columns)
        positions[0, grid.start : grid.end] = due
        positions[1, grid.start : grid.end] = due + rows
        positions[2, grid.start : grid.end] = due + columns
        due += max(grid.rows, grid.columns)
        start = grid.end
    positions[:, start:] = np.arange(due, due + length - start)
    return positions


def vision_inputs(pixel_values: np.ndarray, rows: int, columns: int, merge_size: int, table_side: int) -> Tensors:
    """The tensors of contract.VISION for groups of one grid.

    pixel_values [groups, rows * columns, values], patches in merge-block order; rows, columns: patches of a group;
    table_side: the learned position table is table_side² positions, resampled bilinearly with its corners on the
    grid's corners.
    """
    row, column = _merge_block_order(rows, columns, merge_size)
    row_low, row_high, row_weight = _between(row, rows, table_side)
    column_low, column_high, column_weight = _between(column, columns, table_side)
    return {
        "pixel_values": pixel_values,
        "position_rows": np.stack(
            [
                row_low * table_side + column_low,
                row_low * table_side + column_high,
                row_high * table_side + column_low,
                row_high * table_side + column_high,
            ],
            -1,
        ),
        "position_weights": np.stack(
            [
                (1 - row_weight) * (1 - column_weight),
                (1 - row_weight) * column_weight,
                row_weight * (1 - column_weight),
                row_weight * column_weight,
            ],
            -1,
        ),
        "positions": np.stack([row, column], -1),
    }


def _merge_block_order(rows: int, columns: int, merge_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each patch, the merge_size² patches of a token next to each other."""
    blocks = np.arange(rows * columns).reshape(rows // merge_size, merge_size, columns // merge_size, merge_size)
    return np.divmod(blocks.transpose(0, 2, 1, 3).ravel(), columns)


def _between(index: np.ndarray, count: int, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The two table places around each index of a grid of `count`, and the weight of the upper one."""
    place = index.astype(np.float32) * np.float32((side - 1) / max(count - 1, 1))
    low = np.minimum(place.astype(np.int64), side - 1)
    return low, np.minimum(low + 1, side - 1), place - low.astype(np.float32)
