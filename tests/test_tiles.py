"""The backbone as a loop over tiles of tokens computes what it computes in one piece."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from clef_export import pipeline
from clef_export.pipeline import export
from clef_export.release import open_release
from clef_export.tiles import FEWEST, ROWS, loop_over_tiles
from clef_export.trace import trace_text
from conftest import GOLDEN

from clef_trt.batch import collate
from clef_trt.bundle import open_bundle
from clef_trt.engine import OnnxRuntimeEngine
from clef_trt.errors import ExportError
from clef_trt.types import EncodedQuestion, Encoding


@pytest.fixture(scope="module")
def engines(bundles: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[OnnxRuntimeEngine]:
    """The golden release `narrow` with the loop, and without it: then with the general bodies of its operators."""
    flat = tmp_path_factory.mktemp("tiles") / "flat"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "loop_over_tiles", lambda model: None)
        export(GOLDEN / "narrow", flat)
    return [OnnxRuntimeEngine(open_bundle(bundle), "text", 1) for bundle in (bundles["narrow"], flat)]


def record(tokens: int, seed: int) -> Encoding:
    """Random tokens whose question and options lie at both ends."""
    ids = np.random.default_rng(seed).integers(0, 250, tokens)
    spans = ((0, 2), (2, 3), (tokens // 2, tokens // 2 + 1), (tokens - 3, tokens))
    return Encoding(ids, (EncodedQuestion("q", "choice", spans[0], spans[1:], ("a", "b", "c")),), 0)


@pytest.mark.parametrize(
    "lengths",
    [
        *([n] for n in (8, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS, 3 * ROWS + 7)),
        [ROWS // 2, ROWS // 2],
        [FEWEST + 1] * 5,
        [3, 200, 131],
    ],
    ids=str,
)
def test_a_loop_over_tiles_is_the_whole(engines: list[OnnxRuntimeEngine], lengths: list[int]) -> None:
    inputs = collate([record(tokens, seed) for seed, tokens in enumerate(lengths)], [], 128)
    loop, flat = (engine.run(inputs)["logits"] for engine in engines)
    np.testing.assert_allclose(loop, flat, rtol=0, atol=2e-5)


def test_a_backbone_that_needs_the_whole_record_is_refused() -> None:
    model = trace_text(open_release(GOLDEN / "odd").config, torch.float32)
    inner = next(node for node in model.graph if str(node.name).startswith("backbone.layers.0/Add"))
    reader = ir.node("Identity", [inner.outputs[0]], name="spy")
    model.graph.append(reader)
    with pytest.raises(ExportError, match=r"of backbone.layers.0/Add_\d+ is read outside the backbone"):
        loop_over_tiles(model)
    model.graph.remove(reader, safe=True)
    lengths = next(value for value in model.graph.inputs if value.name == "sequence_lengths")
    scale = ir.node("Cast", [lengths], {"to": ir.DataType.FLOAT}, name="scale")
    norm = next(node for node in model.graph if str(node.name).startswith("backbone.layers.0.input_layernorm/RMS"))
    model.graph.insert_before(norm, scale)
    norm.replace_input_with(1, scale.outputs[0])
    with pytest.raises(ExportError, match=r"RMSNormalization_\d+ takes .*, which depends on the whole record"):
        loop_over_tiles(model)
