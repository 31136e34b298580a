"""The command line. Here are decide and info; `evaluate`, `make`, `benchmark`, `server`, `tensor_file` have others."""

from __future__ import annotations

import argparse
import base64
import io
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__, benchmark, evaluate, make, server, tensor_file
from .answer import CONFIDENCES
from .bundle import open_bundle
from .clef import TRUNCATIONS
from .encode import CONTROL_TOKENS
from .errors import ClefError, Fault, RequestError, VerificationError
from .strict_json import read_json
from .table import table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 where verification fails, 2 for any other error."""
    options = parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bars and names, whatever the terminal's encoding
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        options.command(options)
    except VerificationError as error:
        print(f"verification failed: {error}", file=sys.stderr)
        return 1
    except ClefError as error:
        print(f"clef-trt: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    result = argparse.ArgumentParser(prog="clef-trt", description="Compiled Clef decisions.")
    result.add_argument("--version", action="version", version=f"clef-trt {__version__}")
    commands = result.add_subparsers(required=True, metavar="COMMAND")

    make.add_commands(commands)
    evaluate.add_command(commands)
    benchmark.add_command(commands)
    server.add_command(commands)
    tensor_file.add_command(commands)

    decide = commands.add_parser("decide", help="answer one request")
    make.add_bundle(decide)
    decide.add_argument("request", metavar="REQUEST.json", help="a request body, or - for standard input")
    decide.add_argument(
        "--image", metavar="FILE", type=Path, action="append", default=[], help="a picture to decide about (repeatable)"
    )
    decide.add_argument("--max-image-tokens", type=int, help="shrink larger pictures to this many tokens")
    decide.add_argument("--table", action="store_true", help="a table for people instead of JSON")
    decide.add_argument("--max-length", type=int, default=16384, help="tokens of a record (default: %(default)s)")
    decide.add_argument("--truncation", choices=TRUNCATIONS, default="report", help="of a state that does not fit")
    decide.add_argument("--confidence", choices=CONFIDENCES, default="max")
    decide.add_argument("--control-tokens", choices=CONTROL_TOKENS, default="text")
    decide.set_defaults(command=_decide)

    info = commands.add_parser("info", help="what a bundle holds and what would run it")
    make.add_bundle(info)
    info.set_defaults(command=_info)
    return result


def _decide(options: argparse.Namespace) -> None:
    content = sys.stdin.buffer.read() if options.request == "-" else make.read_bytes(Path(options.request))
    request = read_json(content)
    names = ("max_length", "max_image_tokens", "truncation", "confidence", "control_tokens")
    settings = {name: getattr(options, name) for name in names}
    if options.image and isinstance(request, dict):
        given = request.get("images")
        if not isinstance(given, list | None):
            raise RequestError([Fault(("images",), "is no array, so --image cannot add to it", "type")])
        request["images"] = [*(given or []), *map(_picture, options.image)]
    with make.load(options, **settings) as clef:
        response = clef.decide(request)
    print(table(response) if options.table else json.dumps(response, ensure_ascii=False, indent=1))


def _info(options: argparse.Namespace) -> None:
    manifest = open_bundle(options.bundle, options.weights).manifest
    rows = {
        "source": manifest.source.name,
        "source sha256": manifest.source.sha256,
        "precision": manifest.precision,
        "parameters": f"{manifest.weights.parameters:,} ({manifest.weights.stored_bytes / 1e9:.2f} GB stored)",
        "weights": "in the bundle" if manifest.weights.root == "." else manifest.weights.root,
        "longest record": f"{manifest.model.max_tokens:,} tokens",
        "graphs": ", ".join(f"{name} (opset {graph.opset})" for name, graph in manifest.graphs.items()),
        "plans": ", ".join(f"{p.recipe} ({', '.join(p.compute_capabilities)})" for p in manifest.plans) or "none",
        "made with": ", ".join(f"{name} {version}" for name, version in manifest.tools.items()),
    }
    try:
        with make.load(options) as clef:
            engine = clef.engine.info()
        rows["engine"] = ", ".join(f"{name} {value}" for name, value in engine.items())
    except ClefError as error:
        rows["engine"] = f"none: {error}"
    for name, value in rows.items():
        print(f"{name + ':':16}{value}")


def _picture(path: Path) -> dict[str, str]:
    content_type = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
    if path.suffix.lower() not in content_type:
        raise RequestError([Fault((), f"{path} is not named as one of {', '.join(content_type)}", "format")])
    encoded = base64.b64encode(make.read_bytes(path)).decode()
    return {"content_type": content_type[path.suffix.lower()], "base64": encoded}


if __name__ == "__main__":
    sys.exit(main())
