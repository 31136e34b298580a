"""Resizing of uint8 pictures as torchvision does it (antialiased bicubic), bit for bit and without torch.

Along an axis an output value is Σ w·x over a few neighbouring pixels with integer weights w = round(weight·2^p), then
(Σ + 2^(p−1)) >> p, cut to 0…255. The sums are matrix products, block by block because the weights are banded. Products
of floats are exact here, whatever the order of summing: every partial sum is an integer below 2^24 (float32) or 2^53
(float64), times one power of two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CHANNELS = 3
CUBIC_A = -0.5  # the free parameter of the kernel
MAX_SHIFT, WEIGHT_BITS = 22, 15  # p is the largest up to 22 that keeps every weight below 2^15
BLOCK = 16  # output pixels of one matrix product
ROWS = 64  # rows of the horizontal pass at a time: they stay in the cache


class Resampler:
    """Resizes pictures of one size to one other size: horizontally first, then vertically, each rounded to uint8."""

    def __init__(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        """`source` and `target` are (height, width) in pixels."""
        self._source = source
        self._vertical, self._horizontal = (
            None if inputs == outputs else _axis(inputs, outputs)
            for inputs, outputs in zip(source, target, strict=True)
        )

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """[height, width, 3] uint8 of the source size → the same of the target size."""
        assert pixels.shape == (*self._source, CHANNELS), f"{pixels.shape} came, expected {self._source}"
        if self._horizontal is not None:
            pixels = _along_rows(pixels, self._horizontal)
        if self._vertical is not None:
            pixels = _along_columns(pixels, self._vertical)
        return pixels


@dataclass(frozen=True, eq=False)
class _Axis:
    """The weights of one axis, for blocks of BLOCK outputs (the last may have fewer)."""

    outputs: int
    reads: list[slice]  # per block the inputs it reads, all of one width
    weights: np.ndarray  # [blocks, BLOCK, width of a read] float32 or float64, divided by 2^p

    @property
    def writes(self) -> list[slice]:
        """Per block the outputs it computes."""
        return [slice(start, min(start + BLOCK, self.outputs)) for start in range(0, self.outputs, BLOCK)]


def _along_rows(pixels: np.ndarray, axis: _Axis) -> np.ndarray:
    """[height, inputs, 3] → [height, outputs, 3]."""
    height, inputs, _ = pixels.shape
    blocks, _, width = axis.weights.shape
    # The three channels of a pixel lie side by side, so each weight stands three times on a diagonal.
    matrices = np.zeros((blocks, width, CHANNELS, BLOCK, CHANNELS), axis.weights.dtype)
    for channel in range(CHANNELS):
        matrices[:, :, channel, :, channel] = axis.weights.transpose(0, 2, 1)
    matrices = matrices.reshape(blocks, width * CHANNELS, BLOCK * CHANNELS)
    flat = pixels.reshape(height, inputs * CHANNELS)
    result = np.empty((height, axis.outputs * CHANNELS), np.uint8)
    buffer = np.empty((ROWS, inputs * CHANNELS), matrices.dtype)
    sums = np.empty((ROWS, axis.outputs * CHANNELS), matrices.dtype)
    for row in range(0, height, ROWS):
        rows = buffer[: min(ROWS, height - row)]
        rows[:] = flat[row : row + ROWS]
        for write, read, matrix in zip(axis.writes, axis.reads, matrices, strict=True):
            outputs = slice(write.start * CHANNELS, write.stop * CHANNELS)
            inputs_read = rows[:, read.start * CHANNELS : read.stop * CHANNELS]
            np.matmul(inputs_read, matrix[:, : outputs.stop - outputs.start], out=sums[: len(rows), outputs])
        _round(sums[: len(rows)], result[row : row + ROWS])
    return result.reshape(height, axis.outputs, CHANNELS)


def _along_columns(pixels: np.ndarray, axis: _Axis) -> np.ndarray:
    """[inputs, width, 3] → [outputs, width, 3]."""
    inputs, width, _ = pixels.shape
    flat = pixels.reshape(inputs, width * CHANNELS)
    result = np.empty((axis.outputs, width * CHANNELS), np.uint8)
    buffer = np.empty((axis.weights.shape[2], width * CHANNELS), axis.weights.dtype)
    sums = np.empty((BLOCK, width * CHANNELS), axis.weights.dtype)
    for write, read, matrix in zip(axis.writes, axis.reads, axis.weights, strict=True):
        outputs = write.stop - write.start
        buffer[:] = flat[read]
        np.matmul(matrix[:outputs], buffer, out=sums[:outputs])
        _round(sums[:outputs], result[write])
    return result.reshape(axis.outputs, width, CHANNELS)


def _round(sums: np.ndarray, result: np.ndarray) -> None:
    """Sums (altered) → the nearest integers, halves upwards, cut to 0…255."""
    sums += 0.5
    np.clip(sums, 0, 255, out=sums)
    np.copyto(result, sums, casting="unsafe")  # cuts off the fraction


def _axis(inputs: int, outputs: int) -> _Axis:
    """The weights that take `inputs` pixels to `outputs` pixels."""
    first, taps, shift = _taps(inputs, outputs)
    starts = np.arange(0, outputs, BLOCK)
    last = np.minimum(starts + BLOCK, outputs) - 1
    width = min(int((first[last] - first[starts]).max()) + taps.shape[1], inputs)
    reads = np.minimum(first[starts], inputs - width)
    output, tap = np.nonzero(taps)
    block = output // BLOCK
    exact_in_float32 = 255 * int(np.abs(taps).sum(1).max()) + 2**shift < 2**24
    weights = np.zeros((len(starts), BLOCK, width), np.float32 if exact_in_float32 else np.float64)
    weights[block, output % BLOCK, first[output] + tap - reads[block]] = taps[output, tap] * 2.0**-shift
    return _Axis(outputs, [slice(start, start + width) for start in reads.tolist()], weights)


def _taps(inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Per output its first input [outputs] and its integer weights [outputs, most taps]; and the shift p."""
    scale = inputs / outputs
    stretch = max(scale, 1.0)  # the kernel widens where the picture shrinks: that is the antialiasing
    centre = scale * (np.arange(outputs) + 0.5)
    first = np.maximum((centre - 2 * stretch + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + 2 * stretch + 0.5).astype(np.int64), inputs)
    taken = first[:, None] + np.arange(int((end - first).max()))
    weights = np.where(taken < end[:, None], _cubic((taken - centre[:, None] + 0.5) / stretch), 0.0)
    weights /= weights.cumsum(1)[:, -1:]  # summed from left to right
    largest = float(weights.max())
    shift = max(p for p in range(MAX_SHIFT + 1) if int(0.5 + largest * 2**p) < 2**WEIGHT_BITS)
    return first, np.trunc(weights * 2**shift + np.copysign(0.5, weights)).astype(np.int64), shift


def _cubic(x: np.ndarray) -> np.ndarray:
    """The cubic convolution kernel (Keys 1981), zero outside −2…2."""
    x, a = np.abs(x), CUBIC_A
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
