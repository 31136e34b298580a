"""`clef-trt bench`: compiled bundles against the published code and running servers, on this machine.

machine   the card of a run              systems   names of what is measured; ours, eager, served: each kind
workload  the requests                   measure   turns, and rows of what they took
models    releases and bundles           fresh     memory and cold start, in processes of their own
floor     the arithmetic of a pass       profile   where the time of a pass goes
command   the run, step by step          present, plots   tables and pictures of its result
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

DEFAULT_TOKENS = [(128, None), (512, None), (2048, None)]


def add_command(commands: Any) -> None:
    """The parser of the command; what it needs is imported when it runs."""
    bench = commands.add_parser("bench", help="measure bundles against the published code and servers (extra: export)")
    bench.add_argument("--model", help="tiny, 0.8b, 9b or 27b with random weights, or a release folder (default: tiny)")
    bench.add_argument(
        "--bundle", action="append", type=Path, default=[], metavar="DIR", help="measure this bundle too (repeatable)"
    )
    bench.add_argument("--systems", nargs="+", metavar="NAME", help="only these (default: all that run here)")
    bench.add_argument(
        "--tokens", nargs="+", type=_size, metavar="N[xB]", help="tokens a request, and batch (default: 128 512 2048)"
    )
    bench.add_argument("--batch", nargs="+", type=int, default=[1], metavar="N", help="requests decided together")
    bench.add_argument("--questions", type=int, default=4, help="of each request, as far as they fit (default: 4)")
    bench.add_argument("--options", type=int, default=4, help="of each question (default: 4)")
    bench.add_argument("--pictures", type=int, default=0, help="of each request (default: none)")
    bench.add_argument("--picture-side", type=int, default=448, metavar="PIXELS", help="default: 448")
    bench.add_argument("--mix", action="store_true", help="the realistic mix, alone unless --tokens is given")
    bench.add_argument("--turns", type=int, default=5, help="measured turns of every system (default: 5)")
    bench.add_argument("--threads", type=int, help="of every system (default: one per core)")
    bench.add_argument("--seed", type=int, default=0, help="of the requests (default: 0)")
    bench.add_argument("--work", type=Path, metavar="DIR", help="keep releases and bundles here for another run")
    bench.add_argument(
        "--url", action="append", type=_pair, default=[], metavar="NAME=URL", help="a running server (repeatable)"
    )
    bench.add_argument("--api-key", action="append", type=_pair, default=[], metavar="NAME=KEY", help="of that server")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the result as one JSON object")
    bench.add_argument("--plots", type=Path, metavar="DIR", help="draw it, as PNG and SVG (extra: bench)")
    bench.add_argument("--profile", action="store_true", help="where the time of ONNX Runtime's passes goes")
    bench.add_argument("--no-fresh", action="store_true", help="leave out memory and cold start")
    bench.add_argument("--fresh", type=Path, help=argparse.SUPPRESS)
    bench.set_defaults(command=_bench)


def _bench(options: argparse.Namespace) -> None:
    from . import command

    command.run(options)


def _size(text: str) -> tuple[int, int | None]:
    """512 or 128x8: tokens of a request, and how many of them are decided together."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if match is None or not int(match[1]) or match[2] == "0":
        raise argparse.ArgumentTypeError(f"{text!r} is no size; expected TOKENS or TOKENSxBATCH such as 512 or 128x8")
    return int(match[1]), int(match[2]) if match[2] else None


def _pair(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not (name and found and value):
        raise argparse.ArgumentTypeError("expected NAME=VALUE")  # without the text: it may hold a key
    return name, value
