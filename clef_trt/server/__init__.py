"""`clef-trt serve`: decisions over HTTP. See the routes in `app`, the contract in the README.

settings   flags, variables, a file          serve     the process: load, warm_up, ready, drain
edge       ids, log lines, faults            app       the routes
gate       state, room, keys                 body      bytes read and decompressed within limits
multipart, assets   pictures of the official client
decide     a body → its answer               batcher   which requests share a pass, and which goes first
refusal    why not, as a status              metrics, logs   what is told of it all
openapi    the description of the routes     page      a page for people
"""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import MissingExtraError
from .settings import add_flags, read_settings

EXTRA = ("starlette", "uvicorn", "h11", "anyio", "python_multipart", "backports", "prometheus_client")


def add_command(commands: Any) -> None:
    """The parser of the command; what it needs is imported when it runs."""
    parser = commands.add_parser("serve", help="answer requests over HTTP (extra: serve)")
    add_flags(parser)
    parser.set_defaults(command=_serve)


def _serve(options: argparse.Namespace) -> None:
    settings = read_settings(vars(options))
    try:
        from .serve import serve
    except ImportError as fault:
        if (fault.name or "").split(".")[0] not in EXTRA:
            raise  # a fault of ours, not a missing package
        raise MissingExtraError("the server", "serve", fault) from None
    serve(settings)
