"""Media items → rows of the backbone: tiling, the vision graph, group by group."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from .bundle import ModelRecord
from .engine import Engine
from .errors import EngineError
from .grid import vision_inputs
from .media import MediaItem, MediaReader

# Patches of one pass; a larger image is a pass of its own, the temporal patches of a video share passes.
MAX_PATCHES = 16384


class Vision:
    """Runs the vision graph over media items. Its engine is opened at the first one, and once."""

    def __init__(self, reader: MediaReader, model: ModelRecord, open_engine: Callable[[], Engine]) -> None:
        self.reader = reader
        self._model = model
        self._open_engine = open_engine
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        self._closed = False

    def rows(self, item: MediaItem) -> np.ndarray:
        """[tokens of the item, hidden] float32, in the order of its placeholders.

        Raises RequestError where its pixels cannot be decoded, EngineError where the graph returns what is not finite.
        """
        engine = self._opened()
        times, rows, columns = item.grid
        patches = self.reader.patches(item).reshape(times, rows * columns, -1)
        groups = min(max(MAX_PATCHES // (rows * columns), 1), times)
        while groups > 1 and not engine.fits({"groups": groups, "patches": rows * columns}):
            groups //= 2
        parts = []
        for start in range(0, times, groups):
            inputs = vision_inputs(
                patches[start : start + groups], rows, columns, item.merge_size, self._model.vision_table_side
            )
            parts.append(engine.run(inputs)["embeddings"].reshape(-1, self._model.sizes["hidden"]))
        result = np.concatenate(parts)
        if not np.isfinite(result).all():
            raise EngineError("the vision engine returned rows that are not finite")
        return result

    def close(self) -> None:
        """Release the engine, if it was opened."""
        with self._lock:
            self._closed = True
            if self._engine is not None:
                self._engine.close()

    def _opened(self) -> Engine:
        with self._lock:
            if self._engine is None:
                if self._closed:
                    raise EngineError("the engine is closed")
                self._engine = self._open_engine()
            return self._engine
