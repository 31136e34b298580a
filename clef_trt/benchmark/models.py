"""What is measured: releases of named shapes with random weights, or a real one, and the bundles made of it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..bundle import open_bundle
from ..encode import Encoder
from ..errors import SettingError
from ..make import export_module
from ..media import MediaReader

Progress = Callable[[str], None]
TINY = "tiny"


@dataclass
class Model:
    """A release, bundles of it by precision, and how long each of those took to make (None: it was there)."""

    name: str
    release: Path | None
    bundles: dict[str, Path] = field(default_factory=dict)
    export_s: dict[str, float | None] = field(default_factory=dict)


def shapes() -> dict[str, Path]:
    """The shapes that come with the package, besides `tiny`: name → file."""
    here = Path(__file__).parent
    # Installed, bench/shapes/ lies inside the package; in a checkout where the other benchmarks read it too.
    folder = next((f for f in (here / "shapes", here.parent.parent / "bench" / "shapes") if f.is_dir()), None)
    assert folder is not None, "the package is installed without its shapes"
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def read_shape(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and joint_head_config.json of a shape; raises SettingError for an unknown one."""
    if name == TINY:
        config, head = export_module("random_release").small_config()
        return config, head
    if name not in shapes():
        raise SettingError(f"{name!r} is no folder, and no shape: expected one of {', '.join((TINY, *shapes()))}")
    value = json.loads(shapes()[name].read_text(encoding="utf-8"))
    return value["config"], value["joint_head_config"]


def make_release(shape: str, folder: Path, seed: int | None) -> None:
    """A release of one shape: random weights, or without a seed sparse files with holes in their place."""
    from .vocabulary import trained_tokenizer

    random_release = export_module("random_release")
    config, head = read_shape(shape)
    tokenizer = trained_tokenizer(random_release.CONTROL_TOKENS, random_release.SPLIT)
    if config["text_config"]["vocab_size"] < tokenizer.get_vocab_size():
        config["text_config"]["vocab_size"] = tokenizer.get_vocab_size()
    for name in ("image", "video"):
        config[f"{name}_token_id"] = tokenizer.token_to_id(f"<|{name}_pad|>")
    for name in ("vision_start", "vision_end"):
        config[f"{name}_token_id"] = tokenizer.token_to_id(f"<|{name}|>")
    random_release.write_release(folder, config, head, tokenizer, seed)


def prepare_release(name: str, work: Path, progress: Progress) -> Path:
    """The release folder `name`, or one of that shape under `work`, made where it is not there yet."""
    if Path(name).is_dir():
        return Path(name)
    read_shape(name)
    folder = work / f"{name}.release"
    if not folder.exists():
        progress(f"making a release of shape {name} with random weights")
        unfinished = work / f"{name}.release.unfinished-{os.getpid()}"
        try:
            make_release(name, unfinished, seed=0)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def prepare_bundle(model: Model, precision: str, work: Path, progress: Progress) -> None:
    """Add the bundle of one precision to the model, exported under `work` where it is not there yet."""
    if precision in model.bundles or model.release is None:
        return
    # Two releases of one name share no bundle.
    place = "" if model.release.parent == work else f"-{hashlib.sha256(str(model.release).encode()).hexdigest()[:8]}"
    folder = work / f"{Path(model.name).name}{place}.{precision}.bundle"
    seconds = None
    if not folder.exists():
        progress(f"exporting {precision}")
        pipeline, chosen = export_module("pipeline"), export_module("precision").Precision(precision)
        start = time.perf_counter()
        pipeline.export(model.release, folder, precision=chosen)
        seconds = time.perf_counter() - start
    model.bundles[precision], model.export_s[precision] = folder, seconds


def add_bundles(model: Model, folders: list[Path]) -> None:
    """Bundles made elsewhere, for instance with plans. Raises SettingError for two of one precision."""
    for folder in folders:
        precision = open_bundle(folder).manifest.precision
        if precision in model.bundles:
            raise SettingError(f"{folder} and {model.bundles[precision]} are both {precision}: name one of them")
        model.bundles[precision], model.export_s[precision] = folder, None


def check_one_source(model: Model) -> None:
    """Raises SettingError unless all bundles come from one checkpoint."""
    sources = {str(path): open_bundle(path).manifest.source.sha256 for path in model.bundles.values()}
    if len(set(sources.values())) > 1:
        raise SettingError(f"these bundles are of different checkpoints: {', '.join(sources)}")


def text_tools(model: Model) -> tuple[Encoder, MediaReader]:
    """Encoder and media reader of the release, or of a bundle where there is no release."""
    if model.release is None:
        bundle = open_bundle(next(iter(model.bundles.values())))
        ids, folder = bundle.manifest.model.control_tokens, bundle.folder
    else:
        config, folder = json.loads((model.release / "config.json").read_text(encoding="utf-8")), model.release
        ids = {name: config[f"{name}_token_id"] for name in ("image", "video", "vision_start", "vision_end")}
    processor = json.loads((folder / "processor_config.json").read_text(encoding="utf-8"))
    return Encoder(folder / "tokenizer.json", "text", ids), MediaReader(processor)
