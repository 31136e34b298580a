"""processor_config.json → its numbers, and the reference's rules of picture size and frame sampling that use them.

The rules are those of transformers 5.24: `smart_resize` of Qwen2-VL's images and of Qwen3-VL's videos,
`Qwen3VLVideoProcessor.sample_frames` and `Qwen3VLProcessor._calculate_timestamps`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import BundleError

FILE = "processor_config.json"
ASSUMED_FPS = 24  # of a list of frames, which says nothing about time

# What the file may ask for besides the numbers; the first value is also what an absent key means to the reference.
IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (True,),
    "do_convert_rgb": (True,),
    "do_sample_frames": (True,),
    "do_center_crop": (None, False),
    "do_pad": (None, False),
    "cap_pixels_per_frame": (None, False),
    "resample": (3,),  # bicubic
    "data_format": ("channels_first",),
    "default_to_square": (True, False),  # of no effect: the size is a range of areas
    "return_metadata": (False, True),  # of no effect on pixels
    "image_processor_type": ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"),
    "video_processor_type": ("Qwen3VLVideoProcessor",),
    "processor_class": ("Qwen3VLProcessor",),
}
NUMBERS = ("patch_size", "merge_size", "temporal_patch_size", "rescale_factor", "image_mean", "image_std", "size")
VIDEO_NUMBERS = (*NUMBERS, "fps", "min_frames", "max_frames")

Size = tuple[int, int]  # (height, width) in pixels


@dataclass(frozen=True, eq=False)
class Processor:
    """What the file says of images, or of videos; the last three numbers are of videos only."""

    patch_size: int  # pixels
    merge_size: int  # patches along each side of a token
    temporal_patch_size: int  # frames
    min_area: int  # pixels of an image, or of all frames of a video
    max_area: int
    mean: np.ndarray  # [3] float32, in levels of 0 to 255, as `std`
    std: np.ndarray
    fps: float = 0.0  # frames wanted per second
    min_frames: int = 0
    max_frames: int = 0

    @property
    def token_side(self) -> int:
        """Pixels along each side of a token."""
        return self.patch_size * self.merge_size

    @property
    def least_tokens(self) -> int:
        """The fewest tokens of an image."""
        return max(math.ceil(self.min_area / self.token_side**2), 1)

    def image_size(self, size: Size, max_tokens: int | None = None) -> Size:
        """The size an image is resized to.

        `max_tokens`, at least `least_tokens`, lowers the largest area. Where the reference's rule would still exceed
        it, or fall below the smallest area, the sides are the nearest ones in tokens that do neither.
        """
        if max_tokens is None:
            return self._fitted(size, 1, 1, self.max_area)
        height, width = self._fitted(size, 1, 1, min(self.max_area, max_tokens * self.token_side**2))
        if self.least_tokens <= height * width // self.token_side**2 <= max_tokens:
            return height, width
        rows, columns = _nearest_sides(size, self.least_tokens, max_tokens)
        return rows * self.token_side, columns * self.token_side

    def video_size(self, size: Size, frames: int) -> Size:
        """The size that each of `frames` sampled frames of `size` (after `whole_tokens`) is resized to."""
        depth = self.temporal_patch_size
        frames = max(frames, depth)  # fewer make the reference raise; they fill one temporal patch
        return self._fitted(size, frames, round(frames / depth) * depth, self.max_area)

    def whole_tokens(self, size: Size) -> Size:
        """The size of a video's frame, enlarged until each side has at least a token's pixels."""
        scale = max(self.token_side / side for side in size)
        return (int(size[0] * scale), int(size[1] * scale)) if min(size) < self.token_side else size

    def grid(self, size: Size) -> tuple[int, int]:
        """Rows and columns of patches in a picture of a resized size."""
        return size[0] // self.patch_size, size[1] // self.patch_size

    def sampled_frames(self, total: int) -> list[int]:
        """The indices of the frames that the model sees of `total` frames."""
        wanted = int(total / ASSUMED_FPS * self.fps)
        count = min(max(wanted, self.min_frames), self.max_frames, total)
        return [int(index) for index in np.linspace(0, total - 1, count).round()]

    def timestamps(self, indices: list[int]) -> tuple[float, ...]:
        """Seconds of each temporal patch, midway between its first and its last frame."""
        depth = self.temporal_patch_size
        seconds = [index / ASSUMED_FPS for index in indices]
        seconds += seconds[-1:] * (-len(seconds) % depth)  # the last frame fills the last patch
        return tuple(
            (first + last) / 2 for first, last in zip(seconds[::depth], seconds[depth - 1 :: depth], strict=True)
        )

    def _fitted(self, size: Size, frames: int, rounded_frames: int, max_area: int) -> Size:
        """The nearest sides of whole tokens, shrunk or enlarged alike where the area of all frames is out of bounds."""
        side, volume = self.token_side, frames * size[0] * size[1]
        height, width = (round(pixels / side) * side for pixels in size)
        if rounded_frames * height * width > max_area:
            shrink = math.sqrt(volume / max_area)
            height, width = (max(side, math.floor(pixels / shrink / side) * side) for pixels in size)
        elif rounded_frames * height * width < self.min_area:
            enlarge = math.sqrt(self.min_area / volume)
            height, width = (math.ceil(pixels * enlarge / side) * side for pixels in size)
        return height, width


def _nearest_sides(size: Size, least: int, most: int) -> tuple[int, int]:
    """Sides in tokens with a product from `least` to `most`, nearest (by ratio) to the picture's at `most` tokens."""
    ideal_rows = math.sqrt(most * size[0] / size[1])
    ideal_columns = most / ideal_rows

    def columns_of(rows: int) -> int:
        return min(max(round(ideal_columns), math.ceil(least / rows)), most // rows)

    def distance(rows: int) -> float:
        return abs(math.log(rows / ideal_rows)) + abs(math.log(columns_of(rows) / ideal_columns))

    rows = min((rows for rows in range(1, most + 1) if math.ceil(least / rows) <= most // rows), key=distance)
    return rows, columns_of(rows)


def read_processors(config: dict[str, Any]) -> tuple[Processor, Processor]:
    """The processors of images and of videos in the content of processor_config.json.

    Raises BundleError for a missing or impossible number, and for anything that asks for what is not implemented.
    """
    image, video = _Part(config, "image_processor"), _Part(config, "video_processor")
    processors = (
        Processor(**image.common()),
        Processor(
            **video.common(),
            fps=video.positive("fps"),
            min_frames=video.count("min_frames"),
            max_frames=video.count("max_frames"),
        ),
    )
    _check_implemented({key: config[key] for key in config.keys() - {image.name, video.name}}, "")
    for part in (image, video):
        _check_implemented(part.unread, f"{part.name}.")
    return processors


class _Part:
    """One object of the file, from which each number is taken once."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        if not isinstance(config.get(name), dict):
            raise BundleError(f"{FILE} has no object {name}")
        self.name, self.unread = name, dict(config[name])

    def common(self) -> dict[str, Any]:
        """The numbers that images and videos share."""
        scale = np.float32(1 / self.positive("rescale_factor"))
        mean, std = self.channels("image_mean") * scale, self.channels("image_std") * scale
        if not std.all():
            raise self._wrong("image_std", std.tolist(), "numbers other than 0")
        areas = _Part({"size": self._take("size")}, "size")
        areas.name = f"{self.name}.size"
        numbers = {
            "min_area": areas.count("shortest_edge"),
            "max_area": areas.count("longest_edge"),
            "mean": mean,
            "std": std,
        }
        if areas.unread:
            raise BundleError(f"{FILE}: {areas.name} has {', '.join(areas.unread)}; expected two edges, as areas")
        return numbers | {key: self.count(key) for key in ("patch_size", "merge_size", "temporal_patch_size")}

    def count(self, key: str) -> int:
        value = self._take(key)
        if type(value) is not int or value < 1:
            raise self._wrong(key, value, "a whole number of at least 1")
        return value

    def positive(self, key: str) -> float:
        value = self._take(key)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._wrong(key, value, "a number above 0")
        return float(value)

    def channels(self, key: str) -> np.ndarray:
        value = self._take(key)
        if not isinstance(value, list) or [type(number) in (int, float) for number in value] != [True] * 3:
            raise self._wrong(key, value, "three numbers: red, green and blue")
        return np.array(value, np.float32)

    def _take(self, key: str) -> Any:
        if key not in self.unread:
            raise BundleError(f"{FILE}: {self.name} has no {key}")
        return self.unread.pop(key)

    def _wrong(self, key: str, value: Any, expected: str) -> BundleError:
        return BundleError(f"{FILE}: {self.name}.{key} is {value!r}; expected {expected}")


def _check_implemented(settings: dict[str, Any], prefix: str) -> None:
    for key, value in sorted(settings.items()):
        if key not in IMPLEMENTED:
            if value is not None:
                raise BundleError(f"{FILE}: {prefix}{key} is not known here; expected {', '.join(IMPLEMENTED)}")
        elif value not in IMPLEMENTED[key]:
            expected = " or ".join(map(repr, IMPLEMENTED[key]))
            raise BundleError(f"{FILE}: {prefix}{key} is {value!r}; this version implements {expected}")
