"""The bytes of a body: read within a limit and a time, and decompressed within a limit."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request

from .refusal import Refusal
from .settings import Settings

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ENCODINGS = ("zstd", "gzip")
# A frame may ask for a window of gigabytes; RFC 9659 allows 8 MiB in HTTP.
WINDOW_LOG = 23
PIECE_BYTES = 2**16


async def read_body(request: Request, settings: Settings) -> bytes:
    """The body as it was sent. Raises Refusal 413 at the first byte too many, and 408 when it takes too long."""
    limit = settings.body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(f"the body has {int(declared)} bytes; at most {limit} are allowed")
    parts, size = [], 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise _too_large(f"the body has more than {limit} bytes, which is the limit")
                parts.append(part)
    except TimeoutError:
        late = f"the body did not arrive within {settings.body_timeout_s:g} s"
        raise Refusal(408, "slow_body", late, {"Connection": "close"}) from None
    except ClientDisconnect:
        raise Refusal(499, "gone", "the client closed the connection") from None
    return b"".join(parts)


def check_encoding(name: str) -> str | None:
    """The encoding of a Content-Encoding header; None where there is none. Raises Refusal 415."""
    encoding = name.strip().lower().removeprefix("x-")
    if encoding in ("", "identity"):
        return None
    if encoding not in ENCODINGS:
        told = f"Content-Encoding is none of {', '.join(ENCODINGS)} and identity"
        raise Refusal(415, "encoding", told, {"Accept-Encoding": ", ".join(ENCODINGS)})
    return encoding


def decoded(content: bytes, encoding: str | None, limit: int) -> bytes:
    """The body decompressed. Raises Refusal: 413 past `limit` bytes, before more are made; 400 where it is damaged."""
    if encoding is None:
        if len(content) > limit:
            raise _too_large(f"the body has {len(content)} bytes; at most {limit} are allowed")
        return content
    read = {"zstd": _zstd, "gzip": _gzip}[encoding]
    parts: list[bytes] = []
    size = 0

    def take(part: bytes) -> None:
        nonlocal size
        size += len(part)
        if size > limit:
            raise _too_large(f"the body has more than {limit} bytes once decompressed, which is the limit")
        parts.append(part)

    try:
        complete = read(content, take)
    except (zstd.ZstdError, zlib.error, EOFError):
        complete = False
    if not complete:
        raise Refusal(400, "not_decodable", f"the body is not {encoding}, is damaged or is cut short")
    return b"".join(parts)


def _zstd(content: bytes, take: Callable[[bytes], None]) -> bool:
    """Every frame of the content, piece by piece; whether the last one is complete."""
    while True:
        decompressor = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG})
        take(decompressor.decompress(content, PIECE_BYTES))
        while not decompressor.eof:
            if decompressor.needs_input:
                return False
            take(decompressor.decompress(b"", PIECE_BYTES))
        content = decompressor.unused_data
        if not content:
            return True


def _gzip(content: bytes, take: Callable[[bytes], None]) -> bool:
    """Every member of the content, piece by piece; whether the last one is complete."""
    while True:
        decompressor = zlib.decompressobj(16 + zlib.MAX_WBITS)
        while not decompressor.eof:
            part = decompressor.decompress(content, PIECE_BYTES)
            content = decompressor.unconsumed_tail
            if not part and not content and not decompressor.eof:
                return False
            take(part)
        content = decompressor.unused_data
        if not content:
            return True


def _too_large(told: str) -> Refusal:
    return Refusal(413, "too_large", told)
