"""The settings of the server, and where they come from: flags over environment over a file over defaults."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..answer import CONFIDENCES
from ..batch import PassLimits
from ..choose import ENGINES
from ..clef import TRUNCATIONS
from ..encode import CONTROL_TOKENS
from ..errors import SettingError, printable
from ..media import MediaLimits
from ..types import Limits

PREFIX = "CLEF_TRT_"
OF_TESTS = "CLEF_TRT_GPU_"  # variables of the project's own tests, of no meaning here
MIB = 2**20


def _of(group: str, default: Any, told: str, **bounds: Any) -> Any:
    """A field: `kind` when it is not the default's, `least`, `most` or `choices` as bounds."""
    if isinstance(default, tuple):
        return field(default=default, metadata={"group": group, "told": told, "kind": "list", **bounds})
    kind = "text" if default is None else type(default).__name__
    return field(default=default, metadata={"group": group, "told": told, "kind": kind, **bounds})


LISTEN, MODEL, QUEUE, BODY, REQUEST = "listening", "model", "queue and batches", "bodies", "what a request may hold"
_limits, _media, _passes = Limits(), MediaLimits(), PassLimits()


@dataclass(frozen=True)
class Settings:
    """Everything that can be set. The names are those of the keys in a file; flags and variables follow from them."""

    bundle: str | None = _of(MODEL, None, "the folder of the bundle")
    host: str = _of(LISTEN, "127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = _of(LISTEN, 8000, "0 for a free one, which the first log line names", least=0, most=65535)
    api_keys: tuple[str, ...] = _of(LISTEN, (), "keys of clients (Authorization: Bearer KEY); without any, all may ask")
    page: bool = _of(LISTEN, True, "a page for people at /")
    keep_alive_s: float = _of(LISTEN, 30.0, "an idle connection is kept this long", least=0)
    log_level: str = _of(LISTEN, "info", "info has a line a request", choices=("debug", "info", "warning", "error"))

    engine: str = _of(MODEL, "auto", "what runs the bundle", choices=ENGINES)
    weights: str | None = _of(MODEL, None, "where a release lies that moved since its export")
    threads: int | None = _of(MODEL, None, "worker threads of a pass; one per core if not set", kind="int", least=1)
    max_length: int = _of(MODEL, 16384, "tokens of a record; the state is cut to fit", least=1)
    max_state_tokens: int | None = _of(MODEL, None, "tokens of a state; no bound if not set", kind="int", least=0)
    truncation: str = _of(MODEL, "report", "of a state that does not fit", choices=TRUNCATIONS)
    confidence: str = _of(MODEL, "max", "formula of /v1/systemone", choices=CONFIDENCES)
    vendor_confidence: str = _of(MODEL, "entropy", "formula of the vendor's route", choices=CONFIDENCES)
    control_tokens: str = _of(MODEL, "text", "of control tokens in a caller's text", choices=CONTROL_TOKENS)
    max_image_tokens: int | None = _of(MODEL, None, "larger pictures are shrunk to it", kind="int", least=1)
    models: tuple[str, ...] = _of(
        MODEL, ("clef", "clef-flash", "jev*"), "names that requests may use besides the bundle's own; * ends a prefix"
    )
    release_date: str | None = _of(MODEL, None, "of the model, for /v1/models; if not set, when the bundle was made")
    warm_up_tokens: int | None = _of(
        MODEL, None, "longest record of the warm-up; max_length if not set, 0 for no warm-up", kind="int", least=0
    )
    warm_up_picture: bool = _of(MODEL, True, "open the graph for pictures before being ready")

    queue: int = _of(QUEUE, 256, "requests at once, from their first byte to their answer; more get 429", least=1)
    batch: int = _of(QUEUE, 32, "most requests of one pass", least=1)
    window_ms: float = _of(QUEUE, 5.0, "longest wait for others to share a pass with; none while alone", least=0)
    patience_ms: float = _of(
        QUEUE,
        1000.0,
        "wait of the longest record until it goes before shorter ones, in turns",
        least=0,
    )
    padded_tokens: int = _of(
        QUEUE, _passes.padded_tokens, "most tokens of a shared pass, padding included; a CPU shares fewer", least=1
    )
    attention_bytes: int = _of(QUEUE, _passes.attention_bytes, "most memory of a pass's attention scores", least=1)
    encoders: int = _of(QUEUE, 2, "threads that read, encode and answer", least=1)

    body_bytes: int = _of(BODY, 13 * MIB, "of a body as it is sent", least=1)
    decoded_bytes: int = _of(BODY, 13 * MIB, "of a body once decompressed", least=1)
    body_timeout_s: float = _of(BODY, 30.0, "for a body to arrive", least=0.001)
    batch_items: int = _of(BODY, 64, "requests of one /v1/systemone/batch", least=1)

    questions: int = _of(REQUEST, _limits.questions, "questions", least=1)
    options: int = _of(REQUEST, _limits.options, "options of a choice", least=1)
    levels: int = _of(REQUEST, _limits.levels, "levels of a score", least=1)
    images: int = _of(REQUEST, _media.images, "images", least=0)
    videos: int = _of(REQUEST, _media.videos, "videos", least=0)
    frames: int = _of(REQUEST, _media.frames, "frames of a video", least=1)
    picture_bytes: int = _of(REQUEST, _media.picture_bytes, "bytes of an image or a frame", least=1)
    picture_pixels: int = _of(REQUEST, _media.picture_pixels, "pixels of an image or a frame", least=1)
    total_bytes: int = _of(REQUEST, _media.total_bytes, "bytes of all images and frames", least=1)

    def __post_init__(self) -> None:
        if self.batch_items > self.queue:
            raise SettingError(f"batch_items is {self.batch_items}; expected at most queue, which is {self.queue}")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise SettingError("api_keys holds one that is empty or that no header can carry")

    def limits(self) -> Limits:
        """Of questions."""
        return Limits(self.questions, self.options, self.levels)

    def media_limits(self) -> MediaLimits:
        """Of pictures."""
        return MediaLimits(
            self.images, self.videos, self.frames, self.picture_bytes, self.picture_pixels, self.total_bytes
        )

    def pass_limits(self) -> PassLimits:
        """Of one pass."""
        return PassLimits(self.padded_tokens, self.attention_bytes)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every setting; those not given stay out of the parsed options, so that others can decide them."""
    parser.add_argument("--config", metavar="FILE.toml", default=None, help=f"settings by key (or {PREFIX}CONFIG)")
    groups: dict[str, Any] = {}
    for one in fields(Settings):
        told = one.metadata["told"]
        group = groups.setdefault(one.metadata["group"], None) or parser.add_argument_group(one.metadata["group"])
        groups[one.metadata["group"]] = group
        if one.name == "bundle":
            group.add_argument("bundle", metavar="BUNDLE", nargs="?", default=argparse.SUPPRESS, help=told)
            continue
        flag = "--" + one.name.replace("_", "-")
        shown = f"{told} (default: {_shown_default(one)})".replace("%", "%%")
        if one.metadata["kind"] == "bool":
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=shown)
            continue
        repeated = one.metadata["kind"] == "list"
        group.add_argument(
            "--api-key" if one.name == "api_keys" else "--model" if one.name == "models" else flag,
            dest=one.name,
            metavar="{" + ",".join(one.metadata["choices"]) + "}" if "choices" in one.metadata else _metavar(one),
            action="append" if repeated else "store",
            default=argparse.SUPPRESS,
            help=shown + (" (repeatable)" if repeated else ""),
        )
    parser.epilog = (
        f"Every setting is a flag, a variable ({PREFIX}MAX_LENGTH for --max-length; several names or keys with commas) "
        "and a key of the file (max_length = 4096). A flag wins over a variable, that over the file. "
        "Keys are better not given as flags, which other users of the machine can see."
    )


def read_settings(flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings in effect.

    `flags`: those given, by setting, and `config`. Raises SettingError for an unknown key or an impossible value, with
    the place it came from.
    """
    known = {one.name: one for one in fields(Settings)}
    variables = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX) and not name.startswith(OF_TESTS)
    }
    config = flags.get("config") or variables.get("config")
    variables.pop("config", None)
    placed = [
        *(
            (f"{config}: {printable(name)}", name, value)
            for name, value in ({} if config is None else _file(config)).items()
        ),
        *((PREFIX + printable(name).upper(), name, value) for name, value in variables.items()),
        *(("--" + name.replace("_", "-"), name, value) for name, value in flags.items() if name in known),
    ]
    values: dict[str, Any] = {}
    for place, name, value in placed:
        if name not in known:
            raise SettingError(f"{place} is no setting; there are {', '.join(known)}")
        values[name] = _checked(known[name], value, place)
    return Settings(**values)


def _file(name: str) -> dict[str, Any]:
    path = Path(name)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise SettingError(f"{path} cannot be read: {fault.strerror}") from None
    except ValueError as fault:
        raise SettingError(f"{path} is no TOML: {fault}") from None


def _checked(one: Field[Any], value: Any, place: str) -> Any:
    """A value as its setting takes it; text of flags and variables is read as the setting's kind."""
    kind = one.metadata["kind"]
    read = {"int": _int, "float": _float, "bool": _bool, "list": _list}.get(kind, _text)
    result = read(value)
    least, most = one.metadata.get("least"), one.metadata.get("most")
    fits = result is not None and result in one.metadata.get("choices", (result,))
    if not fits or (least is not None and result < least) or (most is not None and result > most):
        shown = "a value" if one.name == "api_keys" else printable(repr(value))
        raise SettingError(f"{place} is {shown}; expected {_expected(one)}")
    return result


def _int(value: Any) -> int | None:
    try:
        return int(value) if isinstance(value, str) else value if type(value) is int else None
    except ValueError:
        return None


def _float(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
    except ValueError:
        return None
    return number if number is not None and abs(number) < float("inf") else None


def _bool(value: Any) -> bool | None:
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    return value if isinstance(value, bool) else words.get(value.lower()) if isinstance(value, str) else None


def _list(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",")) if value else ()
    return tuple(value) if isinstance(value, list) and all(isinstance(part, str) for part in value) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _expected(one: Field[Any]) -> str:
    if "choices" in one.metadata:
        return f"one of {', '.join(one.metadata['choices'])}"
    names = {"int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list of texts"}
    bounds = [
        f"{word} {one.metadata[key]}"
        for key, word in (("least", "at least"), ("most", "at most"))
        if key in one.metadata
    ]
    return " ".join([names.get(one.metadata["kind"], "text"), *([f"of {' and '.join(bounds)}"] if bounds else [])])


def _shown_default(one: Field[Any]) -> str:
    assert one.default is not MISSING, f"{one.name} has no default"
    if isinstance(one.default, tuple):
        return ", ".join(one.default) or "none"
    return (
        "not set"
        if one.default is None
        else str(one.default).lower()
        if isinstance(one.default, bool)
        else str(one.default)
    )


def _metavar(one: Field[Any]) -> str:
    return {"int": "N", "float": "X"}.get(one.metadata["kind"], "TEXT")
