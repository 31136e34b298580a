"""Commands that make and judge bundles: export, ranges, build, verify, demo. All but build need torch."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import samples
from .bundle import open_bundle, verify_files
from .clef import Clef
from .encode import Encoder
from .errors import Fault, MissingExtraError, RequestError, SettingError
from .media import MediaReader
from .recipe import builtin_recipes, read_recipe
from .strict_json import read_json
from .table import table
from .vision import Vision

Options = argparse.Namespace


def add_commands(commands: Any) -> None:
    """The parsers of these commands."""
    export = commands.add_parser("export", help="make a bundle of a release (extra: export)")
    export.add_argument("release", metavar="RELEASE", help="a folder, or a hub name such as Cloudflare/clef-flash")
    export.add_argument("bundle", metavar="BUNDLE", type=Path, help="the folder to make")
    export.add_argument("--precision", choices=("fp32", "bf16", "fp8", "int8"), default="fp32")
    export.add_argument("--ranges", metavar="FILE", type=Path, help="of activations, for fp8 (see: clef-trt ranges)")
    export.add_argument("--range", default="max", help="max, or a percentile of the file such as 99.9 (default: max)")
    export.add_argument("--copy-weights", action="store_true", help="make a bundle that holds its own weights")
    export.add_argument("--force", action="store_true", help="replace an existing bundle once the new one is complete")
    export.set_defaults(command=_export)

    ranges = commands.add_parser("ranges", help="measure the activations of a release for fp8 (extra: export)")
    ranges.add_argument("release", metavar="RELEASE")
    ranges.add_argument("requests", metavar="REQUESTS.jsonl", type=Path, help="one request a line; - for the samples")
    ranges.add_argument("target", metavar="RANGES.json", type=Path, help="continued where an earlier run stopped")
    ranges.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    ranges.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    ranges.set_defaults(command=_ranges)

    builder = commands.add_parser("build", help="build TensorRT plans of a bundle (extra: tensorrt or rtx)")
    add_bundle(builder)
    names = ", ".join(builtin_recipes())
    builder.add_argument("--recipe", required=True, metavar="RECIPE", help=f"a TOML file, or one of {names}")
    builder.add_argument("--profile", action="append", metavar="NAME", help="only these profiles (repeatable)")
    builder.add_argument("--force", action="store_true", help="replace the plan of the same recipe")
    builder.set_defaults(command=_build)

    verify = commands.add_parser("verify", help="compare a bundle with a reference, or its files with their hashes")
    add_bundle(verify)
    verify.add_argument("--reference", metavar="RELEASE", help="the release it was exported from (extra: export)")
    verify.add_argument("--against", metavar="BUNDLE", type=Path, help="another bundle of that release, as reference")
    verify.add_argument("--emulate", action="store_true", help="run a bf16 or fp8 bundle on the CPU, rounded alike")
    verify.add_argument("--requests", metavar="FILE", type=Path, help="requests to compare, one JSON object a line")
    verify.add_argument("--files", action="store_true", help="hash every file of the bundle and its weights")
    verify.add_argument("--recipe", help="take the limits of drift from this recipe (else those of float32)")
    verify.add_argument("--max-logit-difference", metavar="X", type=float, help="largest |Δlogit| (float32: 1e-4)")
    verify.set_defaults(command=_verify)

    demo = commands.add_parser("demo", help="export a small random release and decide a support ticket (extra: export)")
    demo.set_defaults(command=_demo)


def add_bundle(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command that opens a bundle."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path)
    parser.add_argument("--weights", metavar="DIR", type=Path, help="where a release lies that moved since its export")
    parser.add_argument("--threads", type=int, help="worker threads (default: one per core)")


def load(options: Options, **settings: Any) -> Clef:
    """The bundle of the options."""
    return Clef.load(options.bundle, weights=options.weights, threads=options.threads, **settings)


def _export(options: Options) -> None:
    pipeline, precision, ranges = (export_module(name) for name in ("pipeline", "precision", "ranges"))
    measured = None if options.ranges is None else ranges.read_ranges(options.ranges)
    manifest = pipeline.export(
        options.release,
        options.bundle,
        precision=precision.Precision(options.precision, measured, options.range),
        copy_weights=options.copy_weights,
        force=options.force,
        progress=progress(),
    )
    print(f"{options.bundle}: {manifest.source.name}, {manifest.precision}, {manifest.weights.parameters:,} parameters")


def _ranges(options: Options) -> None:
    requests = samples.path() if str(options.requests) == "-" else options.requests
    module = export_module("collect")
    found = module.run_ranges(options.release, requests, options.target, options.device, progress(), options.dtype)
    print(f"{options.target}: {len(found.activations)} activations over {found.tokens:,} tokens")


def _build(options: Options) -> None:
    try:
        from .build import build
    except ImportError as fault:
        raise MissingExtraError("building plans", "rtx", fault) from None
    bundle, recipe = open_bundle(options.bundle, options.weights), read_recipe(options.recipe)
    build(bundle, recipe, profiles=options.profile, progress=progress(), force=options.force)
    print(f"{options.bundle}: built {recipe.name}")


def _verify(options: Options) -> None:
    if options.reference is None and options.against is None and not options.files:
        raise SettingError("nothing to verify: name --reference RELEASE, --against BUNDLE, --files, or several")
    if options.files:
        verify_files(open_bundle(options.bundle, options.weights), progress())
        print("every file has its recorded SHA-256")
    if options.reference is None and options.against is None:
        return
    module = export_module("verify")
    limits = _limits(module, options)
    requests = samples.requests() if options.requests is None else _json_lines(options.requests)
    with _judged(options) as clef:
        if options.reference is not None:
            print(module.verify_with_reference(clef, options.reference, requests, limits, progress()))
        if options.against is not None:
            with Clef.load(options.against, threads=options.threads, control_tokens="reference") as other:
                print(module.verify_pair(other, clef, requests, limits))


def _judged(options: Options) -> Clef:
    """The bundle to verify, its control tokens read as the reference reads them."""
    if not options.emulate:
        return load(options, control_tokens="reference")
    emulated_engine = export_module("emulate").emulated_engine
    bundle = open_bundle(options.bundle, options.weights)
    model = bundle.manifest.model
    encoder = Encoder(bundle.path("tokenizer.json"), "reference", model.control_tokens)
    reader = MediaReader(bundle.json("processor_config.json"))
    vision = Vision(reader, model, lambda: emulated_engine(bundle, "vision", options.threads))
    return Clef(bundle.manifest, encoder, emulated_engine(bundle, "text", options.threads), vision)


def _limits(module: Any, options: Options) -> Any:
    drift = None if options.recipe is None else read_recipe(options.recipe).drift
    if drift is None:
        return module.DriftLimits(1e-4 if options.max_logit_difference is None else options.max_logit_difference)
    return module.DriftLimits(
        options.max_logit_difference,
        drift.same_top_option,
        drift.max_probability_difference,
        drift.mean_probability_difference,
    )


def _demo(_: Options) -> None:
    random_release = export_module("random_release")
    run_export = export_module("pipeline").export
    with tempfile.TemporaryDirectory() as folder:
        release, bundle = Path(folder) / "release", Path(folder) / "bundle"
        config, head = random_release.small_config()
        random_release.write_release(release, config, head, random_release.byte_tokenizer(), seed=0)
        run_export(release, bundle, progress=progress())
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


def export_module(name: str) -> Any:
    """A module of the export package, which needs torch."""
    try:
        return importlib.import_module(f"clef_export.{name}")
    except ImportError as fault:
        if (fault.name or "").startswith(("clef_trt", "clef_export")):
            raise  # a fault of ours, not a missing package
        raise MissingExtraError("this command", "export", fault) from None


def progress() -> Callable[[str], None]:
    """Lines on standard error, each with the seconds since the start."""
    start = time.perf_counter()
    return lambda text: print(f"[{time.perf_counter() - start:6.1f} s] {text}", file=sys.stderr, flush=True)


def read_bytes(path: Path) -> bytes:
    """A file named by the caller; raises RequestError where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as fault:
        raise RequestError([Fault((), f"{path} cannot be read: {fault.strerror}", "file")]) from None


def _json_lines(path: Path) -> list[Any]:
    lines = read_bytes(path).splitlines()
    return [read_json(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
