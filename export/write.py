"""Bundles written whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from clef_trt.bundle import MANIFEST_FILE, FileRecord, Manifest, safetensors_header_sha256
from clef_trt.errors import ExportError
from clef_trt.hashes import sha256_of_files


@contextlib.contextmanager
def new_bundle(target: Path, force: bool = False) -> Iterator[Path]:
    """A temporary folder beside `target` that takes its name when the block ends well, and vanishes when it does not.

    Raises ExportError when `target` exists (with `force` it is replaced, after the new one is complete). What an
    earlier export left when it was killed is cleared away first.
    """
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_export(target):
            _clear_leftovers(target)
            _refuse_existing(target, force)
            folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
            try:
                yield folder
                if not (folder / MANIFEST_FILE).is_file():
                    raise ExportError("write: the bundle has no manifest")
                folder.chmod(0o755)
                _sync(folder)
                _refuse_existing(target, force)
                _replace(folder, target)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except OSError as fault:
        raise ExportError(f"write: {target} cannot be written: {fault}") from fault


@contextlib.contextmanager
def _only_export(target: Path) -> Iterator[None]:
    """Held from before anything is written until the bundle has its name; raises ExportError where another holds it.

    The lock lies outside the target's folder, by the path's hash, so that it can stay: removing one would race.
    """
    digest = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    with (Path(tempfile.gettempdir()) / f"clef_trt-{os.getuid()}-{digest}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExportError(f"another export to {target} is running") from None
        yield


def _refuse_existing(target: Path, force: bool) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if (target.exists() or target.is_symlink()) and not force:
        raise ExportError(f"{target} exists already; choose another name, or replace it with --force")
    if force and target.exists() and not (target / MANIFEST_FILE).is_file():
        raise ExportError(
            f"{target} is no bundle (no {MANIFEST_FILE}), so --force does not replace it; remove it yourself"
        )


def _replace(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; an existing bundle steps aside first and is deleted last."""
    aside = None
    if target.exists() and any(target.iterdir()):
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.replaced-", dir=target.parent))
        os.rename(target, aside)
    try:
        os.rename(folder, target)
    except OSError:
        if aside is not None:
            os.rename(aside, target)
        raise
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


def _clear_leftovers(target: Path) -> None:
    """What killed exports left: half-made folders go, a bundle that had stepped aside comes back."""
    for folder in target.parent.glob(f".{target.name}.partial-*"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in target.parent.glob(f".{target.name}.replaced-*"):
        if not target.exists() and (folder / MANIFEST_FILE).is_file():
            os.rename(folder, target)
        shutil.rmtree(folder, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def file_records(root: Path, names: list[str], hashes: dict[Path, str] | None = None) -> dict[str, FileRecord]:
    """The manifest's records of files under `root`, hashed now or as given."""
    hashes = hashes or sha256_of_files([root / name for name in names])
    return {
        name: FileRecord(
            size_bytes=(root / name).stat().st_size,
            sha256=hashes[root / name],
            header_sha256=safetensors_header_sha256(root / name) if _is_weights(root / name) else None,
        )
        for name in names
    }


def _is_weights(path: Path) -> bool:
    return path.suffix == ".safetensors" or path.parent.name == "blobs"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of a bundle: without it a folder is none."""
    (folder / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
