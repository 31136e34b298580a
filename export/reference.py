"""The published reference, for comparison: its own code over a release, on the CPU."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from clef_trt.errors import MissingExtraError, ReleaseError
from clef_trt.types import QUESTION_TYPES, Encoding

from .config import read_json

FILE = "joint_schema_model.py"
# The file is run only if it is the published one, wherever it lies.
SHA256 = "0e304cf7c6500e8bb59bef7e2afd2c6373f82596dfb3b57d1aa93c175e2dc3a3"


class Reference:
    """The published model and encoder over one release."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """Loads all weights, in float32 four bytes a parameter. Raises ReleaseError when the code cannot be had."""
        try:
            from safetensors.torch import load_file
            from transformers import AutoTokenizer, Qwen3_5ForConditionalGeneration
        except ImportError as fault:
            raise MissingExtraError("the reference", "export", fault) from None
        self.module = reference_module(folder)
        backbone = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        backbone.config.use_cache = False
        config = read_json(folder / "joint_head_config.json")
        head = self.module.JointSchemaHead(**config)
        head.load_state_dict(load_file(folder / "joint_head.safetensors"))
        self.model = self.module.ClefModel(backbone, head.to(dtype)).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(self, request: dict[str, Any], max_length: int = 16384) -> Any:
        """The reference's EncodedRecord of text; raises its ValueError where the schema is too long."""
        return self.module.encode_record(self.tokenizer, request, max_length=max_length)

    def with_media(self, encoding: Encoding, patches: Sequence[np.ndarray]) -> Any:
        """An EncodedRecord of our encoding and our patches of its media.

        The reference's own processor needs torchvision; so its model is compared here, and its tiling by stored values.
        """
        questions = [
            self.module.EncodedQuestion(
                question.id,
                QUESTION_TYPES.index(question.type),
                question.span,
                question.option_spans,
                question.option_ids,
            )
            for question in encoding.questions
        ]
        kinds = [item.kind for item in encoding.media for _ in range(item.grid[0])]
        token_types = np.zeros(encoding.tokens, np.int64)
        for kind, grid in zip(kinds, encoding.grids, strict=True):
            token_types[grid.start : grid.end] = {"image": 1, "video": 2}[kind]
        media: dict[str, Any] = {"mm_token_type_ids": token_types.tolist(), "token_offset": 0}
        for kind, suffix in (("image", ""), ("video", "_videos")):
            chosen = [i for i, item in enumerate(encoding.media) if item.kind == kind]
            if chosen:
                media[f"pixel_values{suffix}"] = torch.from_numpy(np.concatenate([patches[i] for i in chosen]))
                media[f"{kind}_grid_thw"] = torch.tensor([encoding.media[i].grid for i in chosen])
        return self.module.EncodedRecord(tuple(encoding.input_ids.tolist()), tuple(questions), "unknown", media)

    def logits(self, records: Sequence[Any]) -> list[list[np.ndarray]]:
        """Per record, per question float32 logits in the order of its encoded options; one padded batch."""
        with torch.inference_mode():
            batch = self.module.collate_records(records, self.tokenizer.pad_token_id, torch.device("cpu"))
            return [[question.float().numpy() for question in record] for record in self.model(batch)]


def reference_module(folder: Path) -> ModuleType:
    """The published joint_schema_model: the copy in clef-finetune, else the release's own, if it is the published one.

    Neither is trusted by its name: what is run has the known hash.
    """
    candidates = [folder / FILE]
    package = importlib.util.find_spec("clef_finetune")
    if package is not None and package.submodule_search_locations:
        candidates.insert(0, Path(package.submodule_search_locations[0]) / "_vendor" / FILE)
    for path in candidates:
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == SHA256:
            return _load(path)
    raise ReleaseError(
        f"the published {FILE} is needed to compare with (SHA-256 {SHA256[:8]}…): neither clef-finetune 0.1.0 is "
        f"installed (pip install --no-deps clef-finetune==0.1.0) nor does {folder} hold that very file"
    )


def _load(path: Path) -> ModuleType:
    name = "clef_reference_joint_schema_model"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module
