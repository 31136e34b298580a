"""One picture of a request: its bytes or PIL image → its header, checked; later → its pixels in RGB.

Two kinds of picture come in, and their colours are read as the reference reads them:

- PNG, JPEG or WebP as base64 (a data URL or an object): turned upright by its EXIF orientation, transparency dropped.
- A `PIL.Image.Image`: taken as it stands, without EXIF, transparency laid onto white.

Where the reference has no sensible answer: 16-bit grey keeps its high byte (the reference turns all above 255 white),
premultiplied La and RGBa are laid onto white (it raises, or lays them onto black), 32-bit I and F have no agreed white
and are refused (it cuts them at 255). Orientation is read from EXIF only, not from XMP or text; of an animation the
first picture counts (for PNG the one that viewers without animation show). Damage that the decoder itself does not
notice, such as flipped bits within JPEG data, yields a picture.
"""

from __future__ import annotations

import base64
import io
import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from .errors import Fault, RequestError

Loc = tuple[str | int, ...]

EXPECTED = 'a data URL (data:image/png;base64,…), {"content_type": …, "base64": …} or a PIL image'
CONTENT_TYPES = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WebP"}
TYPES_EXPECTED = "image/png, image/jpeg or image/webp"
URL = re.compile(r"[a-z][a-z0-9+.-]{0,20}://|file:|//", re.IGNORECASE)
OTHER_FORMATS = {b"GIF8": "GIF", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"%PDF": "PDF"}
GREY_16_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", *GREY_16_BIT)
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
PNG_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
SCAN, MAX_SCANS = b"\xff\xda", 100  # of a JPEG; ten are usual, and a small file of thousands decodes for minutes
SIDEWAYS = (5, 6, 7, 8)  # orientations that exchange width and height
ORIENTATION_TAG, SHORT, LONG = 0x0112, 3, 4
WHITE = (255, 255, 255, 255)


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture whose header is read and whose pixels are not yet decoded."""

    loc: Loc  # its place in the request
    size: tuple[int, int]  # (height, width) upright, in pixels
    source: bytes | Image.Image
    format: str = "PIL"
    orientation: int = 1  # of EXIF, 1 to 8

    @property
    def encoded_bytes(self) -> int:
        """Size of the file that came as base64; 0 for a PIL image."""
        return len(self.source) if isinstance(self.source, bytes) else 0

    def pixels(self) -> np.ndarray:
        """The picture upright, [height, width, 3] uint8 RGB; raises RequestError where it cannot be decoded."""
        try:
            if isinstance(self.source, bytes):
                image: Image.Image = _header(self.source, self.format)[0]
                if self.orientation in UPRIGHT:
                    image = image.transpose(UPRIGHT[self.orientation])
                pixels = _without_alpha(image)
            else:
                pixels = _onto_white(self.source)
        except MemoryError:
            raise
        except Exception as fault:  # a decoder raises all kinds of errors for damaged files
            raise RequestError([self._damage("its pixels cannot be decoded: it is cut short or damaged")]) from fault
        if pixels.shape[:2] != self.size:
            raise RequestError([self._damage("its size changed after the request was read")])
        return pixels

    def _damage(self, what: str) -> Fault:
        height, width = self.size
        return Fault(self.loc, f"is a {self.format} picture of {width}×{height} pixels, but {what}", "corrupt")


def read_picture(value: Any, loc: Loc, max_bytes: int, max_pixels: int, faults: list[Fault]) -> Picture | None:
    """The picture that one entry of a request stands for, or None with what is wrong with it added to `faults`."""
    if isinstance(value, Image.Image):
        picture = _from_pil(value, loc, faults)
    else:
        picture = _from_file(value, loc, max_bytes, faults)
    if picture is None:
        return None
    height, width = picture.size
    if height * width > max_pixels:
        message = f"has {width}×{height} = {width * height} pixels; at most {max_pixels} are allowed"
        faults.append(Fault(loc, message, "too_large"))
        return None
    if not height * width:
        faults.append(Fault(loc, f"has {width}×{height} pixels; expected at least one", "size"))
        return None
    return picture


def named(value: Any) -> str:
    """What a value is, without anything of its content."""
    if isinstance(value, str):
        return f"text of {len(value)} characters"
    kinds = {type(None): "null", dict: "an object", list: "an array", tuple: "an array", bool: "a boolean"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")


def _from_pil(image: Image.Image, loc: Loc, faults: list[Fault]) -> Picture | None:
    if image.mode in MODES:
        return Picture(loc, (image.height, image.width), image)
    faults.append(Fault(loc, f"is a PIL image of mode {image.mode}; convert it to RGB or L first", "format"))
    return None


def _from_file(value: Any, loc: Loc, max_bytes: int, faults: list[Fault]) -> Picture | None:
    if isinstance(value, dict):
        encoded = _in_object(value, loc, faults)
    elif isinstance(value, str) and value[:5].lower() == "data:":
        encoded = _in_data_url(value, loc, faults)
    else:
        came = "a URL" if isinstance(value, str) and URL.match(value) else named(value)
        faults.append(Fault(loc, f"is {came}; expected {EXPECTED} (paths and URLs are never opened)", "type"))
        return None
    data = None if encoded is None else _decoded(*encoded, loc, max_bytes, faults)
    return None if encoded is None or data is None else _opened(data, encoded[0], loc, faults)


def _in_data_url(url: str, loc: Loc, faults: list[Fault]) -> tuple[str, str] | None:
    """The content type and base64 text of a data URL."""
    header, _, text = url.partition(",")
    match = re.fullmatch(r"data:([\w.+-]{1,30}/[\w.+-]{1,30});base64", header, re.IGNORECASE | re.ASCII)
    content_type = match[1].lower() if match else None
    if content_type in CONTENT_TYPES:
        return content_type, text
    came = f"of type {content_type}" if match else "without a content type and ;base64"
    faults.append(Fault(loc, f"is a data URL {came}; expected {TYPES_EXPECTED} as base64", "format"))
    return None


def _in_object(value: dict[Any, Any], loc: Loc, faults: list[Fault]) -> tuple[str, str] | None:
    """The content type and base64 text of an object, which has nothing else."""
    before = len(faults)
    if unknown := len(value.keys() - {"content_type", "base64"}):
        came = f"has {unknown} keys besides content_type and base64"
        faults.append(Fault(loc, f"{came}; expected no others", "unknown_key"))
    for key in ("content_type", "base64"):
        if key not in value:
            faults.append(Fault((*loc, key), "is missing", "missing"))
        elif not isinstance(value[key], str):
            faults.append(Fault((*loc, key), f"is {named(value[key])}; expected text", "type"))
    content_type = value.get("content_type")
    if isinstance(content_type, str) and content_type.lower() not in CONTENT_TYPES:
        shown = repr(content_type) if len(content_type) <= 40 else named(content_type)
        faults.append(Fault((*loc, "content_type"), f"is {shown}; expected {TYPES_EXPECTED}", "format"))
    return None if len(faults) > before else (str(content_type).lower(), str(value["base64"]))


def _decoded(content_type: str, text: str, loc: Loc, max_bytes: int, faults: list[Fault]) -> bytes | None:
    """The bytes of a base64 text of at most `max_bytes`, which is checked before they are decoded."""
    size = len(text) // 4 * 3 - text[-2:].count("=")
    if size > max_bytes:
        faults.append(Fault(loc, f"has {size} bytes of {content_type}; at most {max_bytes} are allowed", "too_large"))
        return None
    if not text:
        faults.append(Fault(loc, f"has no bytes; expected a file of {content_type}", "empty"))
        return None
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        expected = "A–Z a–z 0–9 + / padded with =, without spaces or line breaks"
        faults.append(Fault(loc, f"is not base64; expected {expected}", "base64"))
        return None


def _opened(data: bytes, content_type: str, loc: Loc, faults: list[Fault]) -> Picture | None:
    """The picture in the bytes of a file, which has to be of its content type."""
    found, expected = _format(data), CONTENT_TYPES[content_type]
    if found not in CONTENT_TYPES.values():
        faults.append(Fault(loc, f"has {found} bytes, not {content_type}; expected PNG, JPEG or WebP", "format"))
        return None
    if found != expected:
        faults.append(Fault(loc, f"is called {content_type}, but its bytes are {found}", "format"))
        return None
    if found == "JPEG" and (scans := data.count(SCAN)) > MAX_SCANS:
        faults.append(Fault(loc, f"is a JPEG of {scans} scans; at most {MAX_SCANS} are allowed", "too_large"))
        return None
    try:
        image, exif = _header(data, found)
        width, height = image.size
        orientation = _orientation(exif)
    except Image.DecompressionBombError:
        faults.append(Fault(loc, f"is a {found} picture of far more pixels than are allowed", "too_large"))
        return None
    except Exception:  # Pillow raises all kinds of errors for damaged files
        came = f"{len(data)} bytes of {found}"
        faults.append(Fault(loc, f"is {came} with an unreadable header: it is cut short or damaged", "corrupt"))
        return None
    size = (width, height) if orientation in SIDEWAYS else (height, width)
    return Picture(loc, size, data, found, orientation)


def _format(data: bytes) -> str:
    """The format by the first bytes of a file."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WebP"
    if b"<svg" in data[:1000].lower():
        return "SVG"
    return next((name for start, name in OTHER_FORMATS.items() if data.startswith(start)), "unrecognised")


class _Jpeg(JpegImageFile):
    """Leaves EXIF alone: Pillow looks there for the resolution, and warns where the EXIF is damaged."""

    def _read_dpi_from_exif(self) -> None:
        pass


def _header(data: bytes, format: str) -> tuple[Image.Image, bytes]:
    """An image with its header read and its pixels not, and its EXIF data.

    The reader of the format is called by itself: `Image.open` would warn about large pictures.
    """
    if format == "PNG":
        still, exif = _still_png(data)
        return PngImageFile(io.BytesIO(still)), exif
    image = {"JPEG": _Jpeg, "WebP": WebPImageFile}[format](io.BytesIO(data))
    return image, image.info.get("exif", b"")


def _still_png(data: bytes) -> tuple[bytes, bytes]:
    """The chunks of a PNG that its first picture consists of, and its EXIF data wherever that stands.

    The rest (animation, text, colour profiles) does not change the picture, and Pillow unpacks it or warns about it.
    """
    kept, exif, at = [data[:8]], b"", 8
    while at < len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        end = at + length + 12
        if name == b"eXIf":
            exif = data[at + 8 : end - 4]
        elif name in PNG_CHUNKS:
            kept.append(data[at:end])
        if name == b"IEND":
            break
        at = end
    return b"".join(kept), exif


def _orientation(exif: bytes) -> int:
    """The EXIF orientation, 1 to 8; 1 where there is none or the EXIF data is damaged."""
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, kind = struct.unpack_from(order + "HH", tiff, entry)
            if tag == ORIENTATION_TAG and kind in (SHORT, LONG):
                (value,) = struct.unpack_from(order + ("H" if kind == SHORT else "I"), tiff, entry + 8)
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def _without_alpha(image: Image.Image) -> np.ndarray:
    """[height, width, 3] uint8 RGB, the colours under transparency as they are stored."""
    image.load()
    image.info.pop("transparency", None)  # converting with it, Pillow warns
    return _high_bytes(image, None) if image.mode in (*GREY_16_BIT, "I") else _rgb(image)  # I: 16 bits of a PNG too


def _onto_white(image: Image.Image) -> np.ndarray:
    """[height, width, 3] uint8 RGB, transparency laid onto white."""
    transparency = image.info.get("transparency")
    if image.mode in GREY_16_BIT:
        return _high_bytes(image, transparency)
    if image.mode in ("La", "RGBa"):
        image = image.convert(image.mode.upper())
    if "A" in image.getbands() or transparency is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image)
    return _rgb(image)


def _rgb(image: Image.Image) -> np.ndarray:
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _high_bytes(image: Image.Image, transparent: int | None) -> np.ndarray:
    """16-bit grey → RGB, the transparent grey (if any) white."""
    values = np.asarray(image)
    grey = np.where(values == transparent, 255, values >> 8).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, 2)
