"""Logs as lines of JSON: numbers, routes and kinds of faults; never a state, a question, an image or a key."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import Any, TextIO

LOGGER = "clef_trt.server"


class _Lines(logging.Formatter):
    """A record as one line. Of an exception only its type and places: its text may hold what a caller sent."""

    def format(self, record: logging.LogRecord) -> str:
        seconds, ms = divmod(int(record.created * 1000), 1000)
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{ms:03}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            line |= fault_fields(record.exc_info[1])
        return json.dumps(line, ensure_ascii=True, separators=(",", ":"), default=str)


def set_up(level: str, stream: TextIO | None = None) -> logging.Logger:
    """The logger of the server, and those of what it runs on, as lines on standard error."""
    handler = line_handler(stream or sys.stderr)
    for name, least in ((LOGGER, logging.DEBUG), ("uvicorn", logging.WARNING), ("clef_trt", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(max(getattr(logging, level.upper()), least))
    return logging.getLogger(LOGGER)


def line_handler(stream: TextIO) -> logging.Handler:
    """Writes records as lines."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Lines())
    return handler


def fault_fields(fault: BaseException | None) -> dict[str, Any]:
    """What may be told of an exception: types and places, of its causes too."""
    types: list[str] = []
    places: list[str] = []
    while fault is not None and len(types) < 5:
        types.append(type(fault).__name__)
        places += [
            f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(fault.__traceback__)
        ]
        fault = fault.__cause__
    return {"fault": types, "places": places[-20:]}
