"""Images and videos: pixel values against the golden cases and transformers, every refusal by name."""

from __future__ import annotations

import base64
import binascii
import copy
import dataclasses
import hashlib
import importlib
import importlib.util
import io
import json
import math
import re
import struct
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from clef_trt.errors import BundleError, Fault, RequestError, SettingError
from clef_trt.media import MediaLimits, MediaReader
from clef_trt.resample import Resampler

GOLDEN = Path(__file__).parent / "golden"
CONFIG: dict[str, Any] = json.loads((GOLDEN / "narrow" / "processor_config.json").read_text())
CASES = [
    case
    for case in json.loads((GOLDEN / "narrow.json").read_text())
    if case["request"].get("images") or case["request"].get("videos")
]
TOKENS = {
    kind: json.loads((GOLDEN / "narrow" / "config.json").read_text())[f"{kind}_token_id"] for kind in ("image", "video")
}
RNG = np.random.default_rng(7)


def load_pictures() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", GOLDEN / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pictures = load_pictures()
SMALL = pictures.picture({"width": 320, "height": 256, "seed": 3})


@pytest.fixture(scope="module")
def reader() -> MediaReader:
    return MediaReader(CONFIG)


@pytest.fixture(scope="module")
def reference() -> types.SimpleNamespace:
    """What of transformers runs without torchvision."""
    torch = pytest.importorskip("torch")
    image = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    video = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
    processor = importlib.import_module("transformers.models.qwen3_vl.processing_qwen3_vl").Qwen3VLProcessor
    metadata = importlib.import_module("transformers.video_utils").VideoMetadata
    to_rgb = importlib.import_module("transformers.image_transforms").convert_to_rgb

    def sample(total: int) -> list[int]:
        settings = types.SimpleNamespace(**CONFIG["video_processor"])
        frames = metadata(total_num_frames=total, fps=24)
        return [int(index) for index in video.Qwen3VLVideoProcessor.sample_frames(settings, frames)]

    def resize(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        channels_first = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
        resized = torch.nn.functional.interpolate(channels_first, size, mode="bicubic", antialias=True)
        return np.asarray(resized[0].permute(1, 2, 0))

    def normalise(pixels: np.ndarray, mean: list[float], std: list[float]) -> np.ndarray:
        factor = 1.0 / CONFIG["image_processor"]["rescale_factor"]
        levels = torch.from_numpy(pixels.copy()).to(torch.float32)
        return np.asarray(levels.sub_(torch.tensor(mean) * factor).div_(torch.tensor(std) * factor))

    def video_patches(frames: np.ndarray) -> np.ndarray:
        """[frames, height, width, 3] normalised → patches."""
        stacked = torch.from_numpy(frames).permute(0, 3, 1, 2)[None].contiguous()
        return np.asarray(video.Qwen3VLVideoProcessor.patchify(None, stacked, 16, 2, 2)[0][0])

    return types.SimpleNamespace(
        image_size=image.smart_resize,
        image_processor=image.Qwen2VLImageProcessorPil,
        video_size=video.smart_resize,
        sample=sample,
        timestamps=lambda indices: processor._calculate_timestamps(None, list(indices), 24, 2),
        to_rgb=lambda picture: to_rgb(picture, return_numpy=True),
        resize=resize,
        normalise=normalise,
        video_patches=video_patches,
    )


# Helpers: files, and patches back to pixels.


def file(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def entry(data: bytes, content_type: str = "image/png") -> dict[str, str]:
    return {"content_type": content_type, "base64": base64.b64encode(data).decode()}


def data_url(data: bytes, content_type: str = "image/png") -> str:
    return f"data:{content_type};base64,{base64.b64encode(data).decode()}"


def configured(part: str, **changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    config[part] |= changes
    return config


def levels(reader: MediaReader, value: Any, kind: str = "image") -> np.ndarray:
    """[frames, height, width, 3]: the levels 0…255 that an item's patches hold (mean and std are 127.5)."""
    (item,) = reader.open([value], None) if kind == "image" else reader.open(None, [value])
    t, h, w = item.grid
    patches = reader.patches(item).reshape(t, h // 2, w // 2, 2, 2, 3, 2, 16, 16)
    frames = patches.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(2 * t, h * 16, w * 16, 3)
    return np.rint(frames * 127.5 + 127.5).astype(np.uint8)


def faults(reader: MediaReader, images: Any = None, videos: Any = None) -> tuple[Fault, ...]:
    with pytest.raises(RequestError) as caught:
        reader.open(images, videos)
    return caught.value.faults


def fault(reader: MediaReader, image: Any) -> Fault:
    """The only fault of a request with one image."""
    (only,) = faults(reader, [image])
    assert only.loc[:2] == ("images", 0)
    return only


# Values.


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_pixel_values_and_token_counts(case: dict[str, Any], reader: MediaReader) -> None:
    images = [
        pictures.data_url(spec) if spec.get("as") == "data_url" else pictures.picture(spec)
        for spec in case["request"].get("images", [])
    ]
    items = reader.open(images, [pictures.frames(spec) for spec in case["request"].get("videos", [])])
    for kind, token in TOKENS.items():
        assert sum(item.tokens for item in items if item.kind == kind) == case["input_ids"].count(token)
    kept = GOLDEN / "media" / f"{case['name']}.npz"
    if kept.exists():
        expected = np.load(kept)
        patches = np.concatenate([reader.patches(item) for item in items])
        assert [list(item.grid) for item in items] == expected["image_grid_thw"].tolist()
        assert patches.dtype == np.float32
        np.testing.assert_array_equal(patches, expected["pixel_values"])


def test_every_golden_resize_bit_for_bit() -> None:
    for spec in json.loads((GOLDEN / "resize.json").read_text()):
        pixels = np.asarray(pictures.picture(spec).convert("RGB"))
        resized = Resampler((spec["height"], spec["width"]), (spec["out_height"], spec["out_width"]))(pixels)
        assert hashlib.sha256(resized.tobytes()).hexdigest() == spec["sha256"], spec


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((1, 1), (32, 32)),
        ((7, 200), (32, 320)),
        ((1000, 900), (32, 64)),  # shrinks so far that float32 would not be exact
        ((300, 31), (150, 31)),
        ((31, 300), (31, 290)),
        ((65, 66), (64, 64)),
        ((50, 50), (50, 50)),
    ],
)
def test_resize_equals_torch(source: tuple[int, int], target: tuple[int, int], reference: Any) -> None:
    noise = RNG.integers(0, 256, (*source, 3), dtype=np.uint8)
    edges = RNG.integers(0, 2, (*source, 3), dtype=np.uint8) * 255  # overshoots on both sides
    for pixels in (noise, edges, np.full((*source, 3), 255, np.uint8)):
        np.testing.assert_array_equal(Resampler(source, target)(pixels), reference.resize(pixels, target))


def test_normalising_equals_torch_for_any_mean_and_std(reference: Any) -> None:
    mean, std = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
    reader = MediaReader(configured("image_processor", image_mean=mean, image_std=std))
    pixels = RNG.integers(0, 256, (256, 256, 3), dtype=np.uint8)
    (item,) = reader.open([Image.fromarray(pixels)], None)
    frame = reference.normalise(pixels, mean, std)
    np.testing.assert_array_equal(reader.patches(item), reference.video_patches(np.stack([frame, frame])))


def test_images_equal_transformers_where_nothing_is_resized(reader: MediaReader, reference: Any) -> None:
    settings = {key: value for key, value in CONFIG["image_processor"].items() if key != "image_processor_type"}
    processor = reference.image_processor(**settings)
    for image in (SMALL, data_url(file(SMALL, "JPEG", quality=80), "image/jpeg")):
        expected = processor(images=[image], return_tensors="np")
        (item,) = reader.open([image], None)
        assert item.grid == tuple(expected["image_grid_thw"][0])
        np.testing.assert_allclose(reader.patches(item), expected["pixel_values"], atol=3e-7, rtol=0)


def test_image_sizes_equal_transformers(reader: MediaReader, reference: Any) -> None:
    for _ in range(300):
        height, width = (int(side) for side in np.exp(RNG.uniform(0, 8.5, 2)))
        if max(height, width) > 200 * min(height, width) or height * width > 16_000_000:
            continue
        (item,) = reader.open([Image.new("L", (width, height))], None)
        expected = reference.image_size(height, width, 32, 65536, 16777216)
        assert (item.grid[1] * 16, item.grid[2] * 16) == expected, (height, width)


# Videos.


@pytest.mark.parametrize("total", [1, 2, 3, 4, 5, 6, 7, 23, 47, 48, 59, 60, 63, 64, 71, 72, 100, 500])
def test_frames_and_timestamps_equal_transformers(total: int, reference: Any) -> None:
    reader = MediaReader(CONFIG, MediaLimits(frames=500))
    frames = [Image.new("RGB", (64, 64), (index // 2, 0, 0)) for index in range(total)]
    (item,) = reader.open(None, [frames])
    indices = reference.sample(total)
    assert [frame.loc[2] for frame in item.frames] == indices
    assert item.timestamps == tuple(reference.timestamps(indices))
    assert item.grid[0] == len(item.timestamps) == math.ceil(len(indices) / 2)


def test_video_sizes_equal_transformers(reference: Any) -> None:
    small = MediaReader(configured("video_processor", size={"shortest_edge": 4096, "longest_edge": 200_000}))
    large = MediaReader(configured("video_processor", size={"shortest_edge": 400_000, "longest_edge": 25165824}))
    for reader, least, most in (
        (small, 4096, 200_000),
        (large, 400_000, 25165824),
        (MediaReader(CONFIG), 4096, 25165824),
    ):
        for total in (2, 3, 4, 5, 60):
            for _ in range(40):
                height, width = (int(side) for side in np.exp(RNG.uniform(0.5, 7, 2)))
                frames = [Image.new("L", (width, height))] * total
                count = len(reference.sample(total))
                try:
                    expected = reference.video_size(count, height, width, 2, 32, least, most)
                except ValueError:  # an aspect ratio over 200
                    assert [fault.kind for fault in faults(reader, None, [frames])] == ["size"]
                    continue
                (item,) = reader.open(None, [frames])
                assert (item.grid[1] * 16, item.grid[2] * 16) == expected, (total, height, width)


def test_video_sizes_by_hand(reader: MediaReader) -> None:
    def side_pixels(frames: int, width: int, height: int) -> tuple[int, int]:
        (item,) = reader.open(None, [[Image.new("L", (width, height))] * frames])
        return item.grid[2] * 16, item.grid[1] * 16

    assert side_pixels(4, 160, 128) == (160, 128)
    assert side_pixels(4, 40, 20) == (64, 32)  # 20 < 32: first 64×32, which is a whole number of tokens
    assert side_pixels(4, 10, 1999) == (32, 6400)  # first 32×6396, then rounded
    assert side_pixels(1, 33, 33) == (64, 64)  # two frames of 32×32 are under 4096: 33·√(4096/(2·33²)) = 45.3 → 64


def test_video_patches_equal_torch(reader: MediaReader, reference: Any) -> None:
    frames = [Image.fromarray(RNG.integers(0, 256, (70, 101, 3), dtype=np.uint8)) for _ in range(60)]
    (item,) = reader.open(None, [frames])
    size = (item.grid[1] * 16, item.grid[2] * 16)
    indices = reference.sample(60)
    assert len(indices) == 5
    resized = np.stack([reference.resize(np.asarray(frames[index]), size) for index in indices])
    expected = reference.video_patches(reference.normalise(resized, [0.5] * 3, [0.5] * 3))
    np.testing.assert_array_equal(reader.patches(item), expected)


def test_a_video_of_one_frame_repeats_it(reader: MediaReader) -> None:
    frames = levels(reader, [SMALL], "video")
    assert len(frames) == 2
    np.testing.assert_array_equal(frames[0], np.asarray(SMALL))
    np.testing.assert_array_equal(frames[1], np.asarray(SMALL))
    (item,) = reader.open(None, [[SMALL]])
    assert (item.grid, item.timestamps) == ((1, 16, 20), (0.0,))


def test_grey_transparent_and_encoded_frames_are_read_like_images(reader: MediaReader) -> None:
    transparent = pictures.picture({"width": 320, "height": 256, "seed": 3, "alpha": True})
    frames = [SMALL.convert("L"), transparent, data_url(file(transparent)), entry(file(SMALL))]
    for got, frame in zip(levels(reader, frames, "video"), frames, strict=True):
        np.testing.assert_array_equal(got, levels(reader, frame)[0])


def test_frames_of_unequal_size_are_refused_one_by_one(reader: MediaReader) -> None:
    frames = [SMALL, SMALL.resize((64, 48)), SMALL, SMALL.resize((256, 320))]
    found = faults(reader, None, [frames])
    assert [(fault.loc, fault.kind) for fault in found] == [(("videos", 0, 1), "size"), (("videos", 0, 3), "size")]
    assert found[0].message == "has 64×48 pixels; expected 320×256 like the other frames"


def test_images_come_before_videos_and_both_are_lazy(reader: MediaReader) -> None:
    damaged = file(SMALL)[:2000]  # the header is whole
    items = reader.open([SMALL, entry(damaged)], [[SMALL] * 4])
    assert [item.kind for item in items] == ["image", "image", "video"]
    assert [item.tokens for item in items] == [80, 80, 160]
    assert [item.timestamps for item in items] == [(), (), ((0 + 1 / 24) / 2, (2 / 24 + 3 / 24) / 2)]
    assert reader.open(None, None) == reader.open([], []) == []


# Colour.


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB"])
def test_pil_modes_equal_transformers(mode: str, reader: MediaReader, reference: Any) -> None:
    base = pictures.picture({"width": 320, "height": 256, "seed": 5, "alpha": True})
    if mode == "PA":
        image = base.convert("P").convert("PA")
    else:
        image = (base if mode in ("LA", "RGBA") else base.convert("RGB")).convert(mode)
    np.testing.assert_array_equal(levels(reader, image)[0], reference.to_rgb(image))


@pytest.mark.parametrize("transparency", [bytes(range(256)), SMALL.convert("P").getpixel((9, 9))])
def test_pil_palette_transparency_goes_onto_white(
    transparency: bytes | int, reader: MediaReader, reference: Any
) -> None:
    image = SMALL.convert("P")
    image.info["transparency"] = transparency
    got = levels(reader, image)[0]
    np.testing.assert_array_equal(got, reference.to_rgb(image))
    assert not np.array_equal(got, np.asarray(SMALL.convert("P").convert("RGB")))


def test_a_transparent_colour_goes_onto_white_for_pil_and_is_kept_in_files(reader: MediaReader) -> None:
    for image, colour, stored in ((SMALL.copy(), (10, 20, 30), (10, 20, 30)), (SMALL.convert("L"), 77, (77, 77, 77))):
        ImageDraw.Draw(image).rectangle((0, 0, 9, 9), colour)
        data = file(image, transparency=colour)
        assert levels(reader, Image.open(io.BytesIO(data)))[0, 5, 5].tolist() == [255, 255, 255]
        assert levels(reader, entry(data))[0, 5, 5].tolist() == list(stored)


def test_premultiplied_modes_go_onto_white(reader: MediaReader) -> None:
    for mode, colour, expected in (("RGBA", (200, 100, 0, 128), (227, 177, 127)), ("LA", (200, 128), (227,) * 3)):
        image = Image.new(mode, (256, 256), colour)
        got = levels(reader, image.convert({"RGBA": "RGBa", "LA": "La"}[mode]))[0, 0, 0].astype(int)
        assert np.abs(got - expected).max() <= 1  # premultiplying rounds


def test_16_bit_grey_keeps_its_high_byte(reader: MediaReader) -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = np.repeat((values >> 8).astype(np.uint8)[:, :, None], 3, 2)
    image = Image.fromarray(values)
    assert image.mode == "I;16"
    np.testing.assert_array_equal(levels(reader, image)[0], expected)
    np.testing.assert_array_equal(levels(reader, Image.fromarray(values.astype(">u2")))[0], expected)
    np.testing.assert_array_equal(levels(reader, entry(file(image)))[0], expected)
    image.info["transparency"] = 5
    assert levels(reader, image)[0, 0, 4:7].tolist() == [[0] * 3, [255] * 3, [0] * 3]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_modes_without_an_agreed_white_are_refused(mode: str, reader: MediaReader) -> None:
    assert fault(reader, Image.new(mode, (256, 256))) == Fault(
        ("images", 0), f"is a PIL image of mode {mode}; convert it to RGB or L first", "format"
    )


@pytest.mark.parametrize(
    ("mode", "format"),
    [
        *((mode, "PNG") for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
        *((mode, "JPEG") for mode in ("L", "RGB", "CMYK")),
        *((mode, "WEBP") for mode in ("RGB", "RGBA")),
    ],
)
def test_files_are_read_in_rgb_without_alpha(mode: str, format: str, reader: MediaReader) -> None:
    image = pictures.picture({"width": 320, "height": 256, "seed": 5, "alpha": True}).convert(mode)
    data = file(image, format, **({"lossless": True} if format == "WEBP" else {}))
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA").convert("RGB"))
    np.testing.assert_array_equal(levels(reader, entry(data, f"image/{format.lower()}"))[0], expected)
    np.testing.assert_array_equal(levels(reader, data_url(data, f"image/{format.lower()}"))[0], expected)


def test_palette_transparency_in_a_png_is_dropped_without_a_warning(reader: MediaReader) -> None:
    image = SMALL.convert("P")
    data = file(image, transparency=bytes(range(0, 256, 2)))
    np.testing.assert_array_equal(levels(reader, entry(data))[0], np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_files_upright_and_swaps_the_grid(orientation: int, format: str, reader: MediaReader) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file(SMALL, format, exif=exif)
    stored = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    upright = {
        1: stored,
        2: stored[:, ::-1],
        3: stored[::-1, ::-1],
        4: stored[::-1],
        5: stored.transpose(1, 0, 2),
        6: stored[::-1].transpose(1, 0, 2),
        7: stored[::-1, ::-1].transpose(1, 0, 2),
        8: stored[:, ::-1].transpose(1, 0, 2),
    }[orientation]
    (item,) = reader.open([entry(data, f"image/{format.lower()}")], None)
    assert item.grid == ((1, 20, 16) if orientation > 4 else (1, 16, 20))
    np.testing.assert_array_equal(levels(reader, entry(data, f"image/{format.lower()}"))[0], upright)
    np.testing.assert_array_equal(levels(reader, Image.open(io.BytesIO(data)))[0], stored)  # a PIL image stays


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", binascii.crc32(name + data))


def tiff(order: str, kind: int, orientation: int) -> bytes:
    value = struct.pack(order + ("H2x" if kind == 3 else "I"), orientation)
    head = struct.pack(order + "2sHI", b"II" if order == "<" else b"MM", 42, 8)
    return head + struct.pack(order + "HHHI", 1, 0x0112, kind, 1) + value + bytes(4)


def with_chunks(png: bytes, *chunks: bytes, after_header: bool = False) -> bytes:
    at = 33 if after_header else len(png) - 12
    return png[:at] + b"".join(chunks) + png[at:]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", [3, 4])
def test_exif_after_the_pixels_of_a_png_counts(order: str, kind: int, reader: MediaReader) -> None:
    data = with_chunks(file(SMALL), chunk(b"eXIf", tiff(order, kind, 6)))
    assert reader.open([entry(data)], None)[0].grid == (1, 20, 16)


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"II*\0",
        b"II*\0\xff\xff\xff\x7f",
        b"XX",
        tiff("<", 3, 9),
        tiff(">", 3, 0),
        tiff("<", 2, 6),
        tiff("<", 3, 6)[:18],
    ],
)
def test_damaged_exif_turns_nothing_and_warns_of_nothing(exif: bytes, reader: MediaReader) -> None:
    files = {
        "image/png": with_chunks(file(SMALL), chunk(b"eXIf", exif), after_header=True),
        "image/jpeg": file(SMALL, "JPEG", exif=b"Exif\0\0" + exif),
        "image/webp": file(SMALL, "WEBP", exif=b"Exif\0\0" + exif),
    }
    for content_type, data in files.items():
        stored = np.asarray(Image.open(io.BytesIO(file(SMALL, content_type[6:]))).convert("RGB"))
        np.testing.assert_array_equal(levels(reader, entry(data, content_type))[0], stored)


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_the_first_frame_of_an_animation_counts(format: str, reader: MediaReader) -> None:
    others = [Image.new("RGB", SMALL.size, colour) for colour in ("red", "blue")]
    data = file(SMALL, format, save_all=True, append_images=others, lossless=True)
    np.testing.assert_array_equal(levels(reader, entry(data, f"image/{format.lower()}"))[0], np.asarray(SMALL))


def test_an_animation_chunk_pillow_warns_about_is_nothing_to_us(reader: MediaReader) -> None:
    animation = chunk(b"acTL", bytes(8))
    for after_header in (True, False):
        data = with_chunks(file(SMALL), animation, animation, after_header=after_header)
        np.testing.assert_array_equal(levels(reader, entry(data))[0], np.asarray(SMALL))


# The cap on an image's tokens.


@pytest.mark.parametrize("cap", [64, 65, 70, 100, 256, 1000, 20_000])
def test_max_image_tokens_is_never_exceeded_and_equals_a_lower_longest_edge(cap: int, reference: Any) -> None:
    reader = MediaReader(CONFIG, max_image_tokens=cap)
    for _ in range(200):
        height, width = (int(side) for side in np.exp(RNG.uniform(0, 8, 2)))
        if max(height, width) > 200 * min(height, width):
            continue
        (item,) = reader.open([Image.new("L", (width, height))], None)
        assert 64 <= item.tokens <= cap, (height, width)
        expected = reference.image_size(height, width, 32, 65536, min(16777216, cap * 1024))
        if 64 <= expected[0] * expected[1] // 1024 <= cap:
            assert (item.grid[1] * 16, item.grid[2] * 16) == expected, (height, width)


def test_max_image_tokens_shrinks_the_whole_picture() -> None:
    image = Image.new("RGB", (1600, 800), "red")
    ImageDraw.Draw(image).rectangle((800, 0, 1599, 799), "blue")
    (frame, _) = levels(MediaReader(CONFIG, max_image_tokens=130), image)
    assert frame.shape == (256, 512, 3)  # 8 × 16 tokens
    assert frame[100, [10, -10]].tolist() == [[255, 0, 0], [0, 0, 255]]
    narrow = Image.new("L", (6400, 32))
    assert MediaReader(CONFIG, max_image_tokens=64).open([narrow], None)[0].grid == (1, 2, 128)
    assert MediaReader(CONFIG).open([narrow], None)[0].tokens == 200


def test_max_image_tokens_below_the_least_is_refused() -> None:
    for value in (63, 0, 64.5, True):
        with pytest.raises(SettingError, match=rf"max_image_tokens is {value}; expected a whole number of at least 64"):
            MediaReader(CONFIG, max_image_tokens=value)  # type: ignore[arg-type]


# Refusals.


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("http://example.com/a.png", "type", "is a URL; expected a data URL"),
        ("https://example.com/a.png", "type", "is a URL; expected a data URL"),
        ("file:///etc/passwd", "type", "is a URL; expected a data URL"),
        ("file:/etc/passwd", "type", "is a URL; expected a data URL"),
        ("//example.com/a.png", "type", "is a URL; expected a data URL"),
        ("/etc/passwd", "type", "is text of 11 characters; expected a data URL"),
        ("tests/golden/README.md", "type", "is text of 22 characters; expected a data URL"),
        (base64.b64encode(file(SMALL)).decode(), "type", "characters; expected a data URL"),
        ("", "type", "is text of 0 characters; expected a data URL"),
        (None, "type", "is null; expected a data URL"),
        (True, "type", "is a boolean; expected a data URL"),
        (7, "type", "is a number; expected a data URL"),
        ([SMALL], "type", "is an array; expected a data URL"),
        (b"abc", "type", "is a bytes; expected a data URL"),
        (np.zeros((4, 4, 3)), "type", "is a ndarray; expected a data URL"),
        ("data:image/gif;base64,R0lGODlh", "format", "is a data URL of type image/gif; expected image/png, "),
        ("data:image/svg+xml;base64,PHN2Zz4=", "format", "is a data URL of type image/svg+xml; expected image/png, "),
        ("data:image/png,abc", "format", "is a data URL without a content type and ;base64; expected image/png, "),
        ("data:", "format", "is a data URL without a content type and ;base64; expected image/png, "),
        ("data:image/png;base64,", "empty", "has no bytes; expected a file of image/png"),
        ("data:image/png;base64", "empty", "has no bytes; expected a file of image/png"),
        ("data:image/png;base64,AAA", "base64", "is not base64; expected A–Z a–z 0–9 + /"),
        ("data:image/png;base64,AA=A", "base64", "is not base64; expected"),
        ("data:image/png;base64,AAAA\nAAAA", "base64", "is not base64; expected"),
        ("data:image/png;base64,AAA_", "base64", "is not base64; expected"),
        ("data:image/png;base64,AAAé", "base64", "is not base64; expected"),
        ("data:image/png;base64,AAAA", "format", "has unrecognised bytes, not image/png; expected PNG, JPEG or WebP"),
        (entry(b"<?xml version='1.0'?><SVG/>"), "format", "has SVG bytes, not image/png; expected PNG, JPEG or WebP"),
        (entry(file(SMALL, "GIF")), "format", "has GIF bytes, not image/png; expected PNG, JPEG or WebP"),
        (entry(file(SMALL, "BMP")), "format", "has BMP bytes, not image/png; expected PNG, JPEG or WebP"),
        (entry(file(SMALL, "TIFF")), "format", "has TIFF bytes, not image/png; expected PNG, JPEG or WebP"),
        (entry(file(SMALL), "image/jpeg"), "format", "is called image/jpeg, but its bytes are PNG"),
        (entry(file(SMALL, "JPEG"), "image/webp"), "format", "is called image/webp, but its bytes are JPEG"),
        (data_url(file(SMALL, "WEBP")), "format", "is called image/png, but its bytes are WebP"),
        ({"content_type": "image/png", "base64": ""}, "empty", "has no bytes; expected a file of image/png"),
        (entry(file(SMALL)) | {"path": "/etc/passwd"}, "unknown_key", "has 1 keys besides content_type and base64"),
        (Image.new("RGB", (0, 5)), "size", "has 0×5 pixels; expected at least one"),
        (Image.new("RGB", (201, 1)), "size", "has 201×1 pixels; expected a long side of at most 200 times the short"),
        (entry(file(Image.new("L", (3, 601)))), "size", "has 3×601 pixels; expected a long side of at most 200 times"),
    ],
)
def test_refusals_of_one_image(value: Any, kind: str, message: str, reader: MediaReader) -> None:
    found = fault(reader, value)
    assert found.loc == ("images", 0)
    assert (found.kind, message in found.message) == (kind, True), found


def test_objects_name_every_fault(reader: MediaReader) -> None:
    found = faults(reader, [{}, {"content_type": 5, "base64": None}, {"content_type": "image/gif", "base64": "AAAA"}])
    assert [(*fault.loc, fault.message) for fault in found] == [
        ("images", 0, "content_type", "is missing"),
        ("images", 0, "base64", "is missing"),
        ("images", 1, "content_type", "is a number; expected text"),
        ("images", 1, "base64", "is null; expected text"),
        ("images", 2, "content_type", "is 'image/gif'; expected image/png, image/jpeg or image/webp"),
    ]


def test_every_fault_of_a_request_is_listed(reader: MediaReader) -> None:
    found = faults(reader, [SMALL, "x"], [[SMALL, 3, SMALL, None], "y", []][:2])
    assert [fault.loc for fault in found] == [("images", 1), ("videos", 0, 1), ("videos", 0, 3), ("videos", 1)]
    assert found[3].message == "is text of 1 characters; expected an array of frames"
    assert [(fault.loc, fault.kind) for fault in faults(reader, "x", {"a": 1})] == [
        (("images",), "type"),
        (("videos",), "type"),
    ]
    assert [(fault.loc, fault.message) for fault in faults(reader, None, [[], None])] == [
        (("videos", 0), "is an empty array; expected at least one frame"),
        (("videos", 1), "is null; expected at least one frame"),
    ]


def test_too_many(reader: MediaReader) -> None:
    found = faults(reader, [SMALL] * 5, [[SMALL]] * 3)
    assert [(fault.loc, fault.message, fault.kind) for fault in found] == [
        (("images",), "has 5 images; at most 4 are allowed", "too_many"),
        (("videos",), "has 3 videos; at most 2 are allowed", "too_many"),
    ]
    (found_frames,) = faults(reader, None, [[SMALL] * 64, [SMALL] * 65])
    assert (found_frames.loc, found_frames.message) == (("videos", 1), "has 65 frames; at most 64 are allowed")
    assert len(reader.open([SMALL] * 4, [[SMALL] * 64] * 2)) == 6


def test_bytes_and_pixels_are_limited() -> None:
    data = file(Image.fromarray(RNG.integers(0, 256, (256, 256, 3), dtype=np.uint8)))
    exact = MediaLimits(picture_bytes=len(data), total_bytes=3 * len(data), picture_pixels=65536)
    assert len(MediaReader(CONFIG, exact).open([entry(data)], [[entry(data), data_url(data)]])) == 2
    one_byte = MediaReader(CONFIG, dataclasses.replace(exact, picture_bytes=len(data) - 1))
    assert fault(one_byte, entry(data)) == Fault(
        ("images", 0),
        f"has {len(data)} bytes of image/png; at most {len(data) - 1} are allowed",
        "too_large",
    )
    (total,) = faults(MediaReader(CONFIG, exact), [entry(data)] * 2, [[entry(data)] * 2])
    assert (total.loc, total.kind) == ((), "too_large")
    assert total.message == f"images and videos have {4 * len(data)} bytes; at most {3 * len(data)} are allowed in all"
    one_pixel = MediaReader(CONFIG, dataclasses.replace(exact, picture_pixels=65535))
    for value in (entry(data), Image.new("L", (256, 256))):
        found = fault(one_pixel, value)
        assert (found.message, found.kind) == ("has 256×256 = 65536 pixels; at most 65535 are allowed", "too_large")
    assert MediaLimits() == MediaLimits(4, 2, 64, 4 * 2**20, 16_000_000, 8 * 2**20)


def test_decompression_bombs_are_refused_by_their_header(reader: MediaReader) -> None:
    png = file(Image.new("1", (1, 1)))
    header = struct.pack(">IIBBBBB", 60_000, 50_000, 1, 0, 0, 0, 0)
    bomb = png[:8] + chunk(b"IHDR", header) + png[33:]
    assert fault(reader, entry(bomb)).message == "has 60000×50000 = 3000000000 pixels; at most 16000000 are allowed"
    jpeg = bytearray(file(Image.new("L", (8, 8)), "JPEG"))
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = struct.pack(">HH", 65_000, 65_000)
    found = fault(reader, entry(bytes(jpeg), "image/jpeg"))
    assert found.message == "has 65000×65000 = 4225000000 pixels; at most 16000000 are allowed"
    webp = bytearray(file(Image.new("RGB", (8, 8)), "WEBP"))
    at = webp.index(b"\x9d\x01\x2a")
    for side in (5000, 16_000):  # Pillow itself refuses the second
        webp[at + 3 : at + 7] = struct.pack("<HH", side, side)
        assert fault(reader, entry(bytes(webp), "image/webp")).kind == "too_large"


def test_a_jpeg_of_thousands_of_scans_is_refused(reader: MediaReader) -> None:
    jpeg = file(SMALL, "JPEG", progressive=True)
    scan = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    assert reader.open([entry(jpeg[:-2] + scan * 50 + b"\xff\xd9", "image/jpeg")], None)
    found = fault(reader, entry(jpeg[:-2] + scan * 1000 + b"\xff\xd9", "image/jpeg"))
    assert (found.message, found.kind) == ("is a JPEG of 1010 scans; at most 100 are allowed", "too_large")


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_files_cut_short_are_refused_with_their_place(format: str, reader: MediaReader) -> None:
    data, content_type = file(SMALL, format), f"image/{format.lower()}"
    for kept in (13, 30, len(data) // 10, len(data) // 2, len(data) - 100):
        with pytest.raises(RequestError) as caught:
            reader.patches(reader.open(None, [[entry(data[:kept], content_type)]])[0])
        (found,) = caught.value.faults
        assert (found.loc, found.kind) == (("videos", 0, 0), "corrupt")
        assert "it is cut short or damaged" in found.message


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_flipped_bits_raise_no_other_error(format: str, reader: MediaReader) -> None:
    data, kinds = file(SMALL.resize((64, 64)), format), set()
    for _ in range(150):
        damaged = bytearray(data)
        for at in RNG.integers(12, len(data), RNG.integers(1, 6)):
            damaged[at] ^= 1 << RNG.integers(8)
        try:
            (item,) = reader.open([entry(bytes(damaged), f"image/{format.lower()}")], None)
            reader.patches(item)
        except RequestError as error:
            kinds |= {fault.kind for fault in error.faults}
    assert "corrupt" in kinds
    assert kinds <= {"corrupt", "format", "size", "too_large"}


def test_a_pil_image_that_cannot_be_decoded_or_has_changed_is_refused(reader: MediaReader) -> None:
    cut = Image.open(io.BytesIO(file(SMALL, "JPEG")[:-500]))
    changed = SMALL.copy()
    items = reader.open([cut, changed], None)
    changed.thumbnail((100, 100))
    for item, message in zip(items, ("its pixels cannot be decoded", "its size changed"), strict=True):
        with pytest.raises(RequestError, match=rf"{item.loc[1]}: is a PIL picture of 320×256 pixels, but {message}"):
            reader.patches(item)


def test_errors_echo_neither_control_characters_nor_long_content(reader: MediaReader) -> None:
    nasty = "\x1b[31m\u202e\0\n" * 2000
    values = [nasty, f"data:{nasty}", f"data:image/png;base64,{nasty}", {"content_type": nasty, "base64": nasty}]
    values += [{"content_type": "\x1b\n", "base64": "", nasty: 1}, {nasty: nasty}, f"http://{nasty}"]
    reader = MediaReader(CONFIG, MediaLimits(images=10))
    for found in faults(reader, values, {nasty: 1}):
        assert str(found).isprintable()
        assert len(str(found)) < 250


# processor_config.json.


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("image_processor", {"resample": 2}, r"image_processor\.resample is 2; this version implements 3"),
        ("image_processor", {"do_resize": False}, r"image_processor\.do_resize is False; this version implements True"),
        ("image_processor", {"do_normalize": False}, r"do_normalize is False; this version implements True"),
        ("image_processor", {"do_rescale": None}, r"do_rescale is None; this version implements True"),
        ("image_processor", {"do_convert_rgb": False}, r"do_convert_rgb is False"),
        ("image_processor", {"image_processor_type": "CLIPImageProcessor"}, r"image_processor_type is 'CLIPImage"),
        ("image_processor", {"do_center_crop": True}, r"do_center_crop is True; this version implements None or False"),
        (
            "image_processor",
            {"crop_size": {"height": 4}},
            r"image_processor\.crop_size is not known here; expected do_",
        ),
        ("image_processor", {"size": {"height": 4, "width": 4}}, r"image_processor\.size has no shortest_edge"),
        (
            "image_processor",
            {"size": {"shortest_edge": 4, "longest_edge": 9, "max_height": 1}},
            r"image_processor\.size has max_height; expected two edges",
        ),
        (
            "image_processor",
            {"patch_size": 0},
            r"image_processor\.patch_size is 0; expected a whole number of at least",
        ),
        ("image_processor", {"patch_size": "16"}, r"patch_size is '16'; expected a whole number"),
        ("image_processor", {"image_mean": [0.5]}, r"image_mean is \[0\.5\]; expected three numbers"),
        ("image_processor", {"image_std": [0.5, 0, 0.5]}, r"image_std is .*; expected numbers other than 0"),
        ("image_processor", {"rescale_factor": 0}, r"rescale_factor is 0; expected a number above 0"),
        ("video_processor", {"do_sample_frames": False}, r"video_processor\.do_sample_frames is False"),
        ("video_processor", {"cap_pixels_per_frame": True}, r"video_processor\.cap_pixels_per_frame is True"),
        ("video_processor", {"num_frames": 8}, r"video_processor\.num_frames is not known here"),
        ("video_processor", {"fps": None}, r"video_processor\.fps is None; expected a number above 0"),
    ],
)
def test_configurations_that_ask_for_something_else_are_refused(
    part: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BundleError, match=message):
        MediaReader(configured(part, **changes))


def test_missing_parts_of_the_configuration_are_named() -> None:
    for part in ("image_processor", "video_processor"):
        with pytest.raises(BundleError, match=rf"processor_config\.json has no object {part}"):
            MediaReader({key: value for key, value in CONFIG.items() if key != part})
        for key in ("patch_size", "merge_size", "temporal_patch_size", "size", "image_mean", "rescale_factor"):
            config = copy.deepcopy(CONFIG)
            del config[part][key]
            with pytest.raises(BundleError, match=rf"{part} has no {key}"):
                MediaReader(config)
    config = copy.deepcopy(CONFIG)
    del config["video_processor"]["fps"]
    with pytest.raises(BundleError, match=r"video_processor has no fps"):
        MediaReader(config)
    with pytest.raises(BundleError, match=r"processor_class is 'Other'"):
        MediaReader(CONFIG | {"processor_class": "Other"})


def test_harmless_keys_of_the_configuration_are_accepted() -> None:
    config = configured("video_processor", crop_size=None, data_format="channels_first", default_to_square=True)
    config["image_processor"]["image_processor_type"] = "Qwen2VLImageProcessorFast"
    del config["image_processor"]["do_resize"]
    assert MediaReader(config).open([SMALL], None)[0].grid == (1, 16, 20)


def test_every_number_comes_from_the_configuration(reference: Any) -> None:
    config = configured("image_processor", patch_size=14, merge_size=3, temporal_patch_size=3)
    config["image_processor"]["size"] = {"shortest_edge": 1764, "longest_edge": 90_000}
    reader = MediaReader(config)
    pixels = RNG.integers(0, 256, (500, 300, 3), dtype=np.uint8)
    (item,) = reader.open([Image.fromarray(pixels)], None)
    height, width = reference.image_size(500, 300, 42, 1764, 90_000)
    assert item.grid == (1, height // 14, width // 14)
    assert item.tokens == height * width // 42**2
    patches = reader.patches(item).reshape(height // 42, width // 42, 3, 3, 3, 3, 14, 14)
    frames = patches.transpose(5, 0, 2, 6, 1, 3, 7, 4).reshape(3, height, width, 3)
    expected = reference.normalise(reference.resize(pixels, (height, width)), [0.5] * 3, [0.5] * 3)
    for frame in frames:
        np.testing.assert_array_equal(frame, expected)


def test_the_runtime_imports_no_torch() -> None:
    for name in ("media", "picture", "processor", "resample"):
        source = (Path(__file__).parent.parent / "clef_trt" / f"{name}.py").read_text()
        imported = set(re.findall(r"^(?:from|import) (\w+|\.\w+)", source, re.MULTILINE))
        assert imported <= {
            *("__future__", "base64", "dataclasses", "io", "math", "re", "struct", "typing", "numpy", "PIL"),
            *(".errors", ".media", ".picture", ".processor", ".resample"),
        }
