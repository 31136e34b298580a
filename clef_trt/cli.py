"""The command line: clef-trt export | verify | decide | info | demo."""

from __future__ import annotations

import argparse
import base64
import json
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import __version__, samples
from .answer import CONFIDENCES
from .bundle import open_bundle, verify_files
from .clef import TRUNCATIONS, Clef
from .encode import CONTROL_TOKENS
from .errors import ClefError, Fault, MissingExtraError, RequestError, VerificationError
from .table import table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 where verification fails, 2 for any other error."""
    options = parser().parse_args(arguments)
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

    export = commands.add_parser("export", help="make a bundle of a release (needs the extra: export)")
    export.add_argument("release", metavar="RELEASE", help="a folder, or a hub name such as Cloudflare/clef-flash")
    export.add_argument("bundle", metavar="BUNDLE", type=Path, help="the folder to make")
    export.add_argument("--copy-weights", action="store_true", help="make a bundle that holds its own weights")
    export.add_argument("--force", action="store_true", help="replace an existing bundle once the new one is complete")
    export.set_defaults(command=_export)

    verify = commands.add_parser("verify", help="compare a bundle with the reference, or its files with their hashes")
    _add_bundle(verify)
    verify.add_argument("--reference", metavar="RELEASE", help="the release it was exported from (extra: export)")
    verify.add_argument("--requests", metavar="FILE", type=Path, help="requests to compare, one JSON object a line")
    verify.add_argument("--files", action="store_true", help="hash every file of the bundle and its weights")
    verify.add_argument(
        "--max-logit-difference", metavar="X", type=float, default=1e-4, help="largest |Δlogit| (default: %(default)s)"
    )
    verify.set_defaults(command=_verify)

    decide = commands.add_parser("decide", help="answer one request")
    _add_bundle(decide)
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
    _add_bundle(info)
    info.set_defaults(command=_info)

    demo = commands.add_parser("demo", help="export a small random release and decide a support ticket (extra: export)")
    demo.set_defaults(command=_demo)
    return result


def _add_bundle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path)
    parser.add_argument("--weights", metavar="DIR", type=Path, help="where a release lies that moved since its export")
    parser.add_argument("--threads", type=int, help="worker threads (default: one per core)")


def _export(options: argparse.Namespace) -> None:
    run_export = _export_module("export").export
    manifest = run_export(
        options.release, options.bundle, copy_weights=options.copy_weights, force=options.force, progress=_progress()
    )
    print(f"{options.bundle}: {manifest.source.name}, {manifest.precision}, {manifest.weights.parameters:,} parameters")


def _verify(options: argparse.Namespace) -> None:
    if options.reference is None and not options.files:
        raise VerificationError("nothing to verify: name --reference RELEASE, or --files, or both")
    if options.files:
        verify_files(open_bundle(options.bundle, options.weights), _progress())
        print("every file has its recorded SHA-256")
    if options.reference is not None:
        run_verify = _export_module("verify").verify
        requests = samples.requests() if options.requests is None else _json_lines(options.requests)
        with _load(options, control_tokens="reference") as clef:
            report = run_verify(
                clef,
                options.reference,
                requests,
                max_logit_difference=options.max_logit_difference,
                progress=_progress(),
            )
        print(report)


def _decide(options: argparse.Namespace) -> None:
    request = _json(sys.stdin.buffer.read() if options.request == "-" else _bytes(Path(options.request)))
    names = ("max_length", "max_image_tokens", "truncation", "confidence", "control_tokens")
    settings = {name: getattr(options, name) for name in names}
    if options.image and isinstance(request, dict):
        request["images"] = [*(request.get("images") or []), *map(_picture, options.image)]
    with _load(options, **settings) as clef:
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
        "plans": ", ".join(str(plan) for plan in manifest.plans) or "none",
        "made with": ", ".join(f"{name} {version}" for name, version in manifest.tools.items()),
    }
    try:
        with _load(options) as clef:
            engine = clef.engine.info()
        rows["engine"] = ", ".join(f"{name} {value}" for name, value in engine.items())
    except ClefError as error:
        rows["engine"] = f"none: {error}"
    for name, value in rows.items():
        print(f"{name + ':':16}{value}")


def _demo(_: argparse.Namespace) -> None:
    random_release = _export_module("random_release")
    run_export = _export_module("export").export
    with tempfile.TemporaryDirectory() as folder:
        release, bundle = Path(folder) / "release", Path(folder) / "bundle"
        config, head = random_release.small_config()
        random_release.write_release(release, config, head, random_release.byte_tokenizer(), seed=0)
        run_export(release, bundle, progress=_progress())
        request = samples.ticket()
        with Clef.load(bundle) as clef:
            clef.decide(request)  # the first decision also allocates
            start = time.perf_counter()
            response = clef.decide(request)
            spent_ms = 1000 * (time.perf_counter() - start)
            engine = clef.engine.info()
    print(f"\n{request['state']['subject']!r}\n")
    print(table(response))
    print(
        f"\n{len(response['answers'])} decisions over {response['usage']['input_tokens']} tokens in {spent_ms:.1f} ms "
        f"({engine['engine']} {engine['version']}, {engine['precision']}, {engine['threads']} threads)"
    )
    print("This model is small and has random weights: its answers mean nothing. With the real release:")
    print("  clef-trt export Cloudflare/clef-flash clef-flash.bundle")


def _load(options: argparse.Namespace, **settings: Any) -> Clef:
    return Clef.load(options.bundle, weights=options.weights, threads=options.threads, **settings)


def _export_module(name: str) -> Any:
    """A module of the export package, which needs torch."""
    try:
        if name == "export":
            import clef_export.pipeline as module
        elif name == "verify":
            import clef_export.verify as module
        else:
            import clef_export.random_release as module
    except ImportError as fault:
        raise MissingExtraError(f"clef-trt {name}", "export", fault) from None
    return module


def _progress() -> Any:
    start = time.perf_counter()
    return lambda text: print(f"[{time.perf_counter() - start:6.1f} s] {text}", file=sys.stderr, flush=True)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as fault:
        raise RequestError([Fault((), f"{path} cannot be read: {fault.strerror}", "file")]) from None


def _picture(path: Path) -> dict[str, str]:
    content_type = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
    if path.suffix.lower() not in content_type:
        raise RequestError([Fault((), f"{path} is not named as one of {', '.join(content_type)}", "format")])
    encoded = base64.b64encode(_bytes(path)).decode()
    return {"content_type": content_type[path.suffix.lower()], "base64": encoded}


def _json(content: bytes, where: str = "the request") -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as fault:
        raise RequestError([Fault((), f"{where} is not JSON in UTF-8: {fault}", "json")]) from None


def _json_lines(path: Path) -> list[Any]:
    lines = _bytes(path).splitlines()
    return [_json(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


if __name__ == "__main__":
    sys.exit(main())
