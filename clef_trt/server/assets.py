"""The `assets` of the official client → the `images` that Clef reads.

Other services put an asset where its placeholder stands in the text. Clef reads all images before the state, so a
placeholder becomes the name of its image: `[image 1]` for the first. The client's own placeholders are random, and
random text in a state would make its answers random too.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from ..errors import Fault, RequestError
from ..picture import named

FORMATS = {"png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "webp": "image/webp"}
SIGNATURES = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"RIFF", "image/webp"))
KEYS = ("type", "format", "data_base64", "part")
Loc = tuple[str | int, ...]


def with_images(body: Any, parts: Mapping[str, bytes] | None) -> tuple[Any, list[Loc]]:
    """The body with each asset as one more image, and the places of those assets in the order of their images.

    `parts`: of a multipart body, None of any other. Raises RequestError with every fault of the assets.
    """
    if not isinstance(body, dict) or ("assets" not in body and not parts):
        return body, []
    faults: list[Fault] = []
    assets = body.get("assets")
    if not isinstance(assets, dict) or not assets:
        raise RequestError([Fault(("assets",), f"is {named(assets)}; expected an object with an asset", "type")])
    unclaimed = dict(parts or {})
    images = [_image(name, asset, unclaimed, faults) for name, asset in assets.items()]
    for part in unclaimed:
        faults.append(Fault(("assets",), f"does not name the part {part!r} of the body", "unclaimed"))
    given = body.get("images")
    if not isinstance(given, list | None):
        faults.append(Fault(("images",), f"is {named(given)}; expected an array of images", "type"))
    if faults:
        raise RequestError(faults)
    first = len(given or []) + 1
    markers = {name: f"[image {number}]" for number, name in enumerate(assets, first)}
    result = {key: value for key, value in body.items() if key != "assets"} | {"images": [*(given or []), *images]}
    if "state" in result:
        result["state"] = _marked(result["state"], markers)
    if isinstance(result.get("questions"), dict):
        result["questions"] = {name: _marked_question(value, markers) for name, value in result["questions"].items()}
    return result, [("assets", name) for name in assets]


def in_assets(error: RequestError, places: list[Loc], images: int) -> RequestError:
    """A fault of an image that came as an asset, told where the caller put it. `images`: of the body with them."""
    first = images - len(places)

    def moved(fault: Fault) -> Fault:
        if fault.loc[:1] != ("images",) or len(fault.loc) < 2 or not isinstance(fault.loc[1], int):
            return fault
        index = fault.loc[1] - first
        return fault if index < 0 else Fault((*places[index], *fault.loc[2:]), fault.message, fault.kind)

    return RequestError([moved(fault) for fault in error.faults]) if type(error) is RequestError and places else error


def _image(name: str, asset: Any, unclaimed: dict[str, bytes], faults: list[Fault]) -> dict[str, str] | None:
    loc: Loc = ("assets", name)
    if not name.strip():
        faults.append(Fault(loc, "has no name: it would stand everywhere", "empty"))
    if not isinstance(asset, dict):
        faults.append(Fault(loc, f"is {named(asset)}; expected an object with {', '.join(KEYS)}", "type"))
        return None
    faults += [Fault((*loc, key), f"is not known here; expected {', '.join(KEYS)}", "unknown_key")
               for key in asset if key not in KEYS]  # fmt: skip
    if asset.get("type", "image") not in ("image", None):
        faults.append(Fault((*loc, "type"), "is no type of asset; expected image", "type"))
    part, text = asset.get("part"), asset.get("data_base64")
    if part is not None:
        data = unclaimed.pop(part, None) if isinstance(part, str) else None
        if data is None:
            faults.append(Fault((*loc, "part"), "names no part of the body that is still free", "missing"))
            return None
        return {"content_type": _content_type(data[:16], None), "base64": base64.b64encode(data).decode()}
    if not isinstance(text, str):
        faults.append(Fault((*loc, "data_base64"), f"is {named(text)}; expected text, or a part", "type"))
        return None
    kind = asset.get("format")
    if kind is not None and (not isinstance(kind, str) or kind not in FORMATS):
        faults.append(Fault((*loc, "format"), f"is no format; expected one of {', '.join(FORMATS)}", "format"))
        return None
    try:
        head = base64.b64decode(text[:16])
    except ValueError:
        head = b""  # told with the picture, as any text that is no base64
    return {"content_type": _content_type(head, kind), "base64": text}


def _content_type(head: bytes, kind: str | None) -> str:
    """By the first bytes, which the reader of pictures holds against it; the declared format where they say nothing."""
    found = next((name for signature, name in SIGNATURES if head.startswith(signature)), None)
    return found or FORMATS[kind or "png"]


def _marked_question(question: Any, markers: dict[str, str]) -> Any:
    if not isinstance(question, dict):
        return question
    return question | {key: _marked(question[key], markers) for key in ("instructions", "criteria") if key in question}


def _marked(value: Any, markers: dict[str, str]) -> Any:
    """The value with every placeholder in its texts (not in keys, which name things) replaced, longest first."""
    pattern = re.compile("|".join(re.escape(name) for name in sorted(markers, key=len, reverse=True)))

    def walk(item: Any) -> Any:
        if isinstance(item, str):
            return pattern.sub(lambda match: markers[match[0]], item)
        if isinstance(item, list):
            return [walk(entry) for entry in item]
        return {key: walk(entry) for key, entry in item.items()} if isinstance(item, dict) else item

    return walk(value)
