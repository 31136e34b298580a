"""The page at /: plain files without a build step or outside resources, and the sample requests."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from ... import samples

CONTENT_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "form.js": "text/javascript; charset=utf-8",
    "answer.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
SECURITY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"Content-Security-Policy": SECURITY, "Cache-Control": "no-cache"}


def files_by_path() -> dict[str, tuple[bytes, str]]:
    """Path → content and its type."""
    folder = files(__package__)
    found = {f"/page/{name}": ((folder / name).read_bytes(), kind) for name, kind in CONTENT_TYPES.items()}
    examples = json.dumps(samples.requests(), ensure_ascii=False).encode()
    return found | {"/": found.pop("/page/index.html"), "/page/examples.json": (examples, "application/json")}


def handlers() -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """Path → what answers it."""
    return {path: _handler(content, kind) for path, (content, kind) in files_by_path().items()}


def _handler(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(_: Request) -> Response:
        return Response(content, headers={**HEADERS, "Content-Type": kind})

    return send
