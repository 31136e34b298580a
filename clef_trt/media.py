"""Images and videos of a request → items with their grid of patches, from headers alone; later → the patches.

Every number comes from the release's processor_config.json. Sizes, sampling of frames and normalising follow the
reference (transformers 5.24 with torchvision); see `picture` for colours and `resample` for resizing. Where the
reference raises: a video of one frame shows that frame for a whole temporal patch, grey and transparent frames are
converted as images are, and a video whose frames differ in size is refused. Only the frames that are sampled are ever
decoded; of the others the headers are checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import Fault, RequestError, SettingError
from .picture import Loc, Picture, named, read_picture
from .processor import Processor, Size, read_processors
from .resample import CHANNELS, Resampler

MAX_ASPECT_RATIO = 200  # of the reference
CHUNK = 256  # patches normalised at a time: they stay in the cache


@dataclass(frozen=True)
class MediaLimits:
    """What media a request may hold; one more is refused. Bytes are those of files, decoded from base64."""

    images: int = 4
    videos: int = 2
    frames: int = 64  # of a video
    picture_bytes: int = 4 * 2**20  # of an image or a frame
    picture_pixels: int = 16_000_000  # of an image or a frame
    total_bytes: int = 8 * 2**20  # of all images and frames


@dataclass(frozen=True, eq=False)
class MediaItem:
    """An image or video whose headers are read and whose pixels are not yet decoded."""

    kind: str  # "image" or "video"
    loc: Loc  # its place in the request
    grid: tuple[int, int, int]  # temporal patches, rows and columns of patches
    timestamps: tuple[float, ...]  # seconds, one per temporal patch of a video; none of an image
    merge_size: int  # patches along each side of a token
    frames: tuple[Picture, ...]  # what to decode; the last one also fills the rest of the last temporal patch

    @property
    def tokens(self) -> int:
        """Placeholders of the item's merged patches, without vision_start, vision_end and timestamps."""
        return math.prod(self.grid) // self.merge_size**2


class MediaReader:
    """Reads the media of requests for one release."""

    def __init__(
        self,
        processor_config: dict[str, Any],
        limits: MediaLimits = MediaLimits(),
        max_image_tokens: int | None = None,
    ) -> None:
        """`processor_config` is the content of processor_config.json.

        `max_image_tokens` shrinks each image, as a whole, to at most that many tokens; it does not touch videos. It
        stands for a lower `size.longest_edge` of the image processor, and holds even for narrow images, whose tokens
        that bound alone can exceed. Raises BundleError for a configuration that asks for what is not implemented,
        SettingError for a `max_image_tokens` under the least tokens of an image.
        """
        self._image_processor, self._video_processor = read_processors(processor_config)
        self._limits, self._max_image_tokens = limits, max_image_tokens
        least = self._image_processor.least_tokens
        if max_image_tokens is not None and (type(max_image_tokens) is not int or max_image_tokens < least):
            expected = f"a whole number of at least {least}, the fewest tokens of an image"
            raise SettingError(f"max_image_tokens is {max_image_tokens!r}; expected {expected}")

    def open(self, images: Any, videos: Any) -> list[MediaItem]:
        """The items of a request in the model's order, images before videos; only headers are read.

        An image is a data URL, `{"content_type", "base64"}` or a PIL image, and a video a list of such frames; None
        stands for no images or videos. Raises RequestError with every fault found, of these kinds: type, missing,
        unknown_key, empty, too_many, too_large (bytes or pixels), base64, format, corrupt, size (sides).
        """
        intake, items = _Intake(self._limits), []
        for loc, value in intake.entries(images, ("images",), self._limits.images, "images"):
            items.append(self._image(value, loc, intake))
        for loc, value in intake.entries(videos, ("videos",), self._limits.videos, "videos"):
            items.append(self._video(value, loc, intake))
        intake.finish()
        return [item for item in items if item is not None]

    def patches(self, item: MediaItem) -> np.ndarray:
        """[t·h·w, 3·temporal·patch·patch] float32: the item's normalised patches in the order of its merged patches.

        Rows run over (t, h/merge, w/merge, merge, merge), columns over (channel, temporal, patch, patch). Raises
        RequestError, of kind corrupt, where a file turns out to be damaged.
        """
        processor = self._image_processor if item.kind == "image" else self._video_processor
        side, depth = processor.patch_size, processor.temporal_patch_size
        times, rows, columns = item.grid
        result = np.empty((times, rows * columns, CHANNELS, depth, side**2), np.float32)
        resample = Resampler(item.frames[0].size, (rows * side, columns * side))
        for index, frame in enumerate(item.frames):
            time, first = divmod(index, depth)
            end = first + 1 if index + 1 < len(item.frames) else depth
            _write_patches(resample(frame.pixels()), processor, result[time, :, :, first:end])
        return result.reshape(times * rows * columns, CHANNELS * depth * side**2)

    def _image(self, value: Any, loc: Loc, intake: _Intake) -> MediaItem | None:
        picture, processor = intake.picture(value, loc), self._image_processor
        if picture is None or intake.is_too_narrow(picture.size, loc):
            return None
        grid = processor.grid(processor.image_size(picture.size, self._max_image_tokens))
        return MediaItem("image", loc, (1, *grid), (), processor.merge_size, (picture,))

    def _video(self, value: Any, loc: Loc, intake: _Intake) -> MediaItem | None:
        frames = [intake.picture(entry, place) for place, entry in intake.frames(value, loc)]
        pictures = [frame for frame in frames if frame is not None]
        if not pictures:
            return None
        size, processor = pictures[0].size, self._video_processor
        for picture in pictures:
            if picture.size != size:
                came, expected = (f"{width}×{height}" for height, width in (picture.size, size))
                intake.add(picture.loc, f"has {came} pixels; expected {expected} like the other frames", "size")
        size = processor.whole_tokens(size)
        if intake.is_too_narrow(size, loc) or len(pictures) < len(frames):
            return None
        indices = processor.sampled_frames(len(pictures))
        times = processor.timestamps(indices)
        grid = (len(times), *processor.grid(processor.video_size(size, len(indices))))
        return MediaItem("video", loc, grid, times, processor.merge_size, tuple(pictures[index] for index in indices))


def _write_patches(pixels: np.ndarray, processor: Processor, result: np.ndarray) -> None:
    """Normalises [height, width, 3] uint8 into `result` [patches, 3, frames, patch·patch], the same for each frame.

    Patches come merge block by merge block, each value as (level − mean) / std in float32.
    """
    side, merge = processor.patch_size, processor.merge_size
    height, width, _ = pixels.shape
    planes = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    # A run of `side` pixels stays together: moved as one value, it moves fast.
    runs = planes.view(f"V{side}").reshape(
        CHANNELS, height // side // merge, merge, side, width // side // merge, merge
    )
    levels = np.ascontiguousarray(runs.transpose(1, 4, 2, 5, 0, 3)).view(np.uint8).reshape(-1, CHANNELS, side**2)
    mean, std = processor.mean[:, None], processor.std[:, None]
    buffer = np.empty((CHUNK, CHANNELS, side**2), np.float32)
    for start in range(0, len(levels), CHUNK):
        chunk = levels[start : start + CHUNK]
        values = buffer[: len(chunk)]
        values[:] = chunk
        values -= mean
        values /= std
        result[start : start + CHUNK] = values[:, :, None]


class _Intake:
    """Reads the pictures of one request, gathering what is wrong and counting bytes."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._faults: list[Fault] = []
        self._bytes = 0

    def add(self, loc: Loc, message: str, kind: str) -> None:
        self._faults.append(Fault(loc, message, kind))

    def entries(self, value: Any, loc: Loc, limit: int, what: str) -> list[tuple[Loc, Any]]:
        """The entries of a list with their places; none where it is missing, no list or too long."""
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            self.add(loc, f"is {named(value)}; expected an array of {what}", "type")
            return []
        if len(value) > limit:
            self.add(loc, f"has {len(value)} {what}; at most {limit} are allowed", "too_many")
            return []
        return [((*loc, index), entry) for index, entry in enumerate(value)]

    def frames(self, value: Any, loc: Loc) -> list[tuple[Loc, Any]]:
        """The frames of one video with their places."""
        if value is None or (isinstance(value, list | tuple) and not value):
            self.add(loc, f"is {'null' if value is None else 'an empty array'}; expected at least one frame", "empty")
            return []
        return self.entries(value, loc, self._limits.frames, "frames")

    def picture(self, value: Any, loc: Loc) -> Picture | None:
        """One image or frame; None where it is faulty, or past the limit of bytes, so that no more of them are kept."""
        picture = read_picture(value, loc, self._limits.picture_bytes, self._limits.picture_pixels, self._faults)
        self._bytes += picture.encoded_bytes if picture else 0
        return picture if self._bytes <= self._limits.total_bytes else None

    def is_too_narrow(self, size: Size, loc: Loc) -> bool:
        height, width = size
        if max(size) <= MAX_ASPECT_RATIO * min(size):
            return False
        expected = f"a long side of at most {MAX_ASPECT_RATIO} times the short one"
        self.add(loc, f"has {width}×{height} pixels; expected {expected}", "size")
        return True

    def finish(self) -> None:
        """Raises RequestError if anything was wrong."""
        limit = self._limits.total_bytes
        if self._bytes > limit:
            self.add((), f"images and videos have {self._bytes} bytes; at most {limit} are allowed in all", "too_large")
        if self._faults:
            raise RequestError(self._faults)
