"""The command encode: a request → the tensors of the text graph in a file, for hosts that run it without Python."""

from __future__ import annotations

import argparse
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import make
from .batch import collate
from .bundle import open_bundle
from .choose import open_engine
from .contract import Tensors
from .encode import CONTROL_TOKENS, Encoder
from .errors import SettingError
from .media import MediaReader
from .request import parse_request
from .strict_json import read_json
from .types import Encoding
from .vision import Vision

FORMATS = (".safetensors", ".npz")
SAFETENSORS_TYPES = {"int64": "I64", "float32": "F32"}


def add_command(commands: Any) -> None:
    """The parser of encode."""
    parser = commands.add_parser("encode", help="write the tensors of one request, for hosts without Python")
    make.add_bundle(parser)
    parser.add_argument("request", metavar="REQUEST.json", type=Path, help="a request body")
    parser.add_argument("--tensors", metavar="FILE", type=Path, required=True, help="a .safetensors or .npz to write")
    parser.add_argument("--max-image-tokens", type=int, help="shrink larger pictures to this many tokens")
    parser.add_argument("--max-length", type=int, default=16384, help="tokens of a record (default: %(default)s)")
    parser.add_argument("--control-tokens", choices=CONTROL_TOKENS, default="text")
    parser.set_defaults(command=_encode)


def write_tensors(path: Path, tensors: Tensors, encodings: Sequence[Encoding]) -> None:
    """Write `tensors` to a .safetensors file with the questions in its metadata, or to an .npz; whole or not at all.

    Raises SettingError for another suffix or a file that cannot be written.
    """
    if path.suffix not in FORMATS:
        raise SettingError(f"{path} is named as neither of {', '.join(FORMATS)}")
    partial = path.with_name(f".{path.name}.{os.getpid()}{path.suffix}")
    try:
        if path.suffix == ".npz":
            np.savez(partial, **tensors)  # type: ignore[arg-type]
        else:
            partial.write_bytes(safetensors_bytes(tensors, encodings))
        partial.replace(path)
    except OSError as fault:
        partial.unlink(missing_ok=True)
        raise SettingError(f"{path} cannot be written: {fault.strerror}") from None


def safetensors_bytes(tensors: Tensors, encodings: Sequence[Encoding]) -> bytes:
    """A safetensors file; its metadata `questions` is, per record, [{"id", "type", "options": ids in logits order}]."""
    questions = [
        [{"id": q.id, "type": q.type, "options": list(q.option_ids)} for q in encoding.questions]
        for encoding in encodings
    ]
    header: dict[str, Any] = {"__metadata__": {"questions": json.dumps(questions)}}
    # The wider type first, behind a header of whole words: then every tensor is aligned for who maps the file.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    end = 0
    for name, array in ordered:
        start, end = end, end + array.nbytes
        dtype = SAFETENSORS_TYPES[str(array.dtype)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(array.tobytes() for _, array in ordered)])


def _encode(options: argparse.Namespace) -> None:
    """Opens no text engine: whoever encodes for another machine may have no engine for the bundle."""
    opened = open_bundle(options.bundle, options.weights)
    model = opened.manifest.model
    if not 1 <= options.max_length <= model.max_tokens:
        raise SettingError(f"--max-length is {options.max_length}; this model takes 1 to {model.max_tokens} tokens")
    reader = MediaReader(opened.json("processor_config.json"), max_image_tokens=options.max_image_tokens)
    encoder = Encoder(opened.path("tokenizer.json"), options.control_tokens, model.control_tokens)
    request = parse_request(read_json(make.read_bytes(options.request), str(options.request)), reader)
    encoding = encoder.encode(request, options.max_length)
    vision = Vision(reader, model, lambda: open_engine("auto", opened, "vision", options.threads))
    rows = [vision.rows(item) for item in encoding.media]
    vision.close()
    write_tensors(options.tensors, collate([encoding], rows, model.sizes["hidden"]), [encoding])
    cut = f", {encoding.truncated_state_tokens} cut from the state" if encoding.truncated_state_tokens else ""
    print(f"{options.tensors}: {encoding.tokens} tokens{cut}, {encoding.options} options")
