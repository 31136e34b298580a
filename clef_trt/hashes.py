"""SHA-256 of large files: several at once, and once per content."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK_BYTES = 8 * 2**20
# Smaller files are hashed faster than the cache is read.
CACHED_FROM_BYTES = 64 * 2**20


def cache_file() -> Path:
    """Where hashes are remembered: $XDG_CACHE_HOME (else ~/.cache)/clef_trt/sha256.json."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clef_trt" / "sha256.json"


def sha256_of_files(paths: Iterable[Path], progress: Callable[[str], None] = lambda _: None) -> dict[Path, str]:
    """The SHA-256 of each file, hashed in parallel.

    A large file's hash is remembered by its real path, size, modification time and inode, so that 19 GB are read once.
    """
    paths = list(paths)
    cache = _read_cache()
    keys = {path: _key(path) for path in paths}
    result = {path: cache[key] for path, key in keys.items() if key in cache}
    missing = [path for path in paths if path not in result]
    total, done, lock = sum(path.stat().st_size for path in missing), 0, threading.Lock()

    def digest(path: Path) -> str:
        nonlocal done
        state = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                state.update(block)
                with lock:
                    before, done = done, done + len(block)
                    if done // 2**31 > before // 2**31:
                        progress(f"hashed {done / 1e9:.1f} of {total / 1e9:.1f} GB")
        return state.hexdigest()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        result |= dict(zip(missing, pool.map(digest, missing), strict=True))
    fresh = {keys[path]: result[path] for path in missing if path.stat().st_size >= CACHED_FROM_BYTES}
    if fresh:
        _write_cache(_read_cache() | fresh)
    return result


def _key(path: Path) -> str:
    state = path.stat()
    return f"{os.path.realpath(path)}:{state.st_size}:{state.st_mtime_ns}:{state.st_ino}"


def _read_cache() -> dict[str, str]:
    try:
        value = json.loads(cache_file().read_text(encoding="utf-8"))
        return value if isinstance(value, dict) else {}
    except (OSError, ValueError):
        return {}


def _write_cache(cache: dict[str, str]) -> None:
    """Best effort: a read-only home costs a second hashing, not an error."""
    try:
        cache_file().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache_file().parent, delete=False, encoding="utf-8") as file:
            json.dump(cache, file)
        os.replace(file.name, cache_file())
    except OSError:
        pass
