"""Broken releases and bundles: each a clear error, nothing overwritten, nothing half there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clef_export.pipeline import export
from clef_export.random_release import byte_tokenizer, small_config, write_release
from conftest import GOLDEN

from clef_trt import BundleError, Clef, ExportError, ReleaseError, samples


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def cut(path: Path, lost_bytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - lost_bytes)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config, head = small_config()
    folder = tmp_path_factory.mktemp("sharded") / "release"
    write_release(folder, config, head, byte_tokenizer(), seed=1, shard_bytes=500_000)
    return folder


def text_config(**entries: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda c: c["text_config"].update(entries))


SHARD = "model-00002-of-00005.safetensors"
BROKEN_RELEASES = {
    "no config": (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
    "config is no json": (lambda f: (f / "config.json").write_text("{"), r"config\.json cannot be read as JSON"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), r"has no tokenizer\.json"),
    "no head": (lambda f: (f / "joint_head.safetensors").unlink(), r"has no joint_head\.safetensors"),
    "missing shard": (lambda f: (f / SHARD).unlink(), f"has no {SHARD}"),
    "truncated shard": (lambda f: cut(f / SHARD, 1), f"{SHARD} is truncated: .* download it again"),
    "header cut": (lambda f: os.truncate(f / SHARD, 20), f"{SHARD} is no safetensors file, or truncated"),
    "not safetensors": (
        lambda f: (f / SHARD).write_bytes(b"version 1 of a pointer"),
        "no safetensors file",
    ),
    "shard elsewhere": (
        lambda f: edit_json(f / "model.safetensors.index.json", lambda v: v["weight_map"].update(x="../x.safetensors")),
        "a shard lies beside its index",
    ),
    "another architecture": (
        lambda f: edit_json(f / "config.json", lambda c: c.update(architectures=["LlamaForCausalLM"])),
        "architectures is .*Llama.*this exporter knows",
    ),
    "another activation": (text_config(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "an unknown layer": (text_config(layer_types=["sliding_attention"] * 4), "expected a list of linear_attention"),
    "layers miscounted": (text_config(num_hidden_layers=3), "3 num_hidden_layers but 4 layer_types"),
    "a size that is none": (text_config(head_dim="64"), "head_dim is '64'; expected an integer"),
    "heads that do not divide": (text_config(num_key_value_heads=3), "no multiple of num_key_value_heads 3"),
    "tensors of another shape": (
        text_config(intermediate_size=250),
        r"mlp\.down_proj\.weight in .* is \[128, 256\]; the configuration asks for \[128, 250\]",
    ),
    "tensors missing": (
        text_config(layer_types=["linear_attention"] * 3 + ["full_attention"] * 2, num_hidden_layers=5),
        r"layers\.4\.input_layernorm\.weight is missing",
    ),
    "tensors left over": (
        text_config(layer_types=["linear_attention"] * 3, num_hidden_layers=3),
        r"layers\.3\.input_layernorm\.weight is not part of this architecture",
    ),
}


@pytest.mark.parametrize("name", BROKEN_RELEASES)
def test_a_broken_release_leaves_nothing(name: str, sharded: Path, tmp_path: Path) -> None:
    damage, said = BROKEN_RELEASES[name]
    release = tmp_path / "release"
    shutil.copytree(sharded, release)
    assert (release / "model-00005-of-00005.safetensors").exists()
    damage(release)
    with pytest.raises(ReleaseError, match=said):
        export(release, tmp_path / "out" / "bundle")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_bundle_that_had_stepped_aside_comes_back(bundle: Path) -> None:
    """SIGKILL between the two renames of a replacement."""
    aside = bundle.parent / f".{bundle.name}.replaced-x"
    bundle.rename(aside)
    with pytest.raises(ExportError, match="exists already"):
        export(GOLDEN / "odd", bundle)
    Clef.load(bundle).close()
    assert not aside.exists()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="cannot be written"):
        export(GOLDEN / "odd", tmp_path / "file" / "bundle")


def test_a_name_that_is_no_folder_and_no_hub_name(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="no folder, and no hub name"):
        export(tmp_path / "nothing", tmp_path / "bundle")


def test_a_hub_name_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ReleaseError, match="could not be had from the hub"):
        export("Cloudflare/no-such-release", tmp_path / "bundle")


@pytest.fixture
def bundle(bundles: dict[str, Path], tmp_path: Path) -> Path:
    """A bundle of its own whose release is its own too."""
    shutil.copytree(GOLDEN / "odd", tmp_path / "release")
    shutil.copytree(bundles["odd"], tmp_path / "bundle")

    def move(manifest: dict[str, Any]) -> None:
        manifest["weights"]["root"] = str(tmp_path / "release")

    edit_json(tmp_path / "bundle" / "manifest.json", move)
    return tmp_path / "bundle"


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def manifest(**entries: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "manifest.json", lambda m: m.update(entries))


BROKEN_BUNDLES = {
    "no manifest": (lambda b: (b / "manifest.json").unlink(), "is no bundle, or one whose export did not finish"),
    "manifest cut": (lambda b: cut(b / "manifest.json", 10), "cannot be read as JSON"),
    "from the future": (manifest(format_version=2), "format version 2; this clef_trt reads 1"),
    "an unknown entry": (manifest(vision="yes"), r"unknown or missing \['vision'\]"),
    "an entry of another type": (manifest(precision=32), "precision is 32; expected str"),
    "no text graph": (
        lambda b: edit_json(b / "manifest.json", lambda m: m["graphs"].pop("text")),
        r"graphs has \['vision'\]; expected",
    ),
    "a graph that is not recorded": (
        lambda b: edit_json(b / "manifest.json", lambda m: m["graphs"]["text"].update(file="/etc/passwd")),
        "used, but not among its files",
    ),
    "nested without end": (lambda b: (b / "manifest.json").write_text("[" * 200_000), "cannot be read as JSON"),
    "a file outside": (
        lambda b: edit_json(b / "manifest.json", lambda m: m["files"].update({"../x": m["files"]["text.onnx"]})),
        "only paths inside the bundle",
    ),
    "graph missing": (lambda b: (b / "text.onnx").unlink(), "text.onnx is missing; the bundle is damaged"),
    "graph cut": (lambda b: cut(b / "text.onnx", 1), "the manifest says"),
    "graph altered": (lambda b: flip_last_byte(b / "text.onnx"), "text.onnx was altered"),
    "tokenizer altered": (lambda b: flip_last_byte(b / "tokenizer.json"), "tokenizer.json was altered"),
    "weights altered": (
        lambda b: flip_last_byte(b.parent / "release" / "model.safetensors"),
        "model.safetensors was altered.*not .or no longer. the ones exported",
    ),
    "weights cut": (lambda b: cut(b.parent / "release" / "model.safetensors", 1), "model.safetensors has .* bytes"),
    "release moved": (lambda b: (b.parent / "release").rename(b.parent / "moved"), "missing.*--weights DIR"),
}


@pytest.mark.parametrize("name", BROKEN_BUNDLES)
def test_a_broken_bundle_does_not_open(name: str, bundle: Path) -> None:
    damage, said = BROKEN_BUNDLES[name]
    Clef.load(bundle).close()
    damage(bundle)
    with pytest.raises(BundleError, match=said):
        Clef.load(bundle)


def test_a_bundle_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="does not exist"):
        Clef.load(tmp_path / "nothing")


def test_a_moved_release_is_found_where_the_caller_says(bundle: Path) -> None:
    before = Clef.load(bundle).decide(samples.ticket())
    moved = bundle.parent / "moved"
    (bundle.parent / "release").rename(moved)
    assert Clef.load(bundle, weights=moved).decide(samples.ticket()) == before


def test_large_weights_are_checked_by_their_header(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the bound only sizes and headers are read at opening; `verify --files` reads everything."""
    from clef_trt.bundle import open_bundle, verify_files

    monkeypatch.setattr("clef_trt.bundle.HASHED_AT_OPENING_BYTES", 1000)
    weights = bundle.parent / "release" / "model.safetensors"
    flip_last_byte(weights)
    opened = open_bundle(bundle)
    with pytest.raises(BundleError, match=r"altered since the export.*model\.safetensors"):
        verify_files(opened)
    content = weights.read_bytes().replace(b"lm_head", b"lm_haed", 1)
    weights.write_bytes(content)
    with pytest.raises(BundleError, match="another header"):
        open_bundle(bundle)


def test_an_existing_bundle_is_not_overwritten(bundle: Path) -> None:
    before = sorted((path.name, path.stat().st_mtime_ns) for path in bundle.iterdir())
    with pytest.raises(ExportError, match=r"exists already; .* --force"):
        export(GOLDEN / "odd", bundle)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in bundle.iterdir()) == before
    with pytest.raises(ReleaseError):  # a replacement that fails leaves the old one
        export(bundle, bundle, force=True)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in bundle.iterdir()) == before
    export(GOLDEN / "odd", bundle, force=True)
    Clef.load(bundle).decide(samples.ticket())
    assert sorted(path.name for path in bundle.parent.iterdir()) == ["bundle", "release"]


def test_force_does_not_replace_what_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpeg").write_text("x")
    with pytest.raises(ExportError, match="is no bundle"):
        export(GOLDEN / "odd", tmp_path / "photos", force=True)
    assert (tmp_path / "photos" / "one.jpeg").exists()


def test_an_export_killed_half_way_is_no_bundle_and_the_next_one_clears_it_away(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from clef_export.write import new_bundle\n"
        "with new_bundle(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'text.onnx').write_bytes(b'half')\n"
        "    print(folder, flush=True)\n"
        "    time.sleep(600)\n"
    )
    target = tmp_path / "bundle"
    process = subprocess.Popen([sys.executable, "-c", program, str(target)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        partial = Path(process.stdout.readline().strip())
        assert partial.parent == tmp_path
        from clef_export.write import new_bundle

        with pytest.raises(ExportError, match=r"another export .* is running"), new_bundle(target):
            pass
        assert partial.exists()  # it is alive: another export leaves its folder alone
        process.send_signal(signal.SIGKILL)
    assert not target.exists()
    with pytest.raises(BundleError, match="whose export did not finish"):
        Clef.load(partial)
    time.sleep(0.1)
    export(GOLDEN / "odd", target)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
