"""Golden releases through TensorRT for RTX: what types the parsed networks compute in, and that they build."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN, RELEASES
from handmade import recipe

from clef_trt.build import build
from clef_trt.bundle import open_bundle, verify_files
from clef_trt.errors import EngineError, SettingError
from clef_trt.network import network_types, parse_graph

trt = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT for RTX is not installed (extra: rtx)")
pytestmark = pytest.mark.slow

PRECISIONS = ("bf16", "fp8")
LARGE = re.compile(
    r"backbone\.layers\.\d+\."
    r"(mlp\.(gate|up|down)_proj|self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))/MatMul"
)
LARGE_LINEARS = {"narrow": 50, "odd": 26}
# The delta rule between its casts: names in `chunked_delta_rule` and `parallel_delta_rule`, inlined with a suffix.
STATE_PATH = re.compile(
    r"GatedDeltaRule/(kk|ax\d|xax\d|u|w|qk|kw|b0|b_carried\d|m\d|ws|out_state|out_chunk|total)(__\d+(_\d+)?)?$"
)
MAX_TOKENS = 256


@pytest.fixture(scope="session")
def precise(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """A bundle per golden release and precision."""
    from clef_export.pipeline import export
    from clef_export.precision import Precision
    from clef_export.ranges import synthetic_ranges
    from clef_export.release import open_release

    result = {}
    for release in RELEASES:
        ranges = synthetic_ranges(open_release(GOLDEN / release).config)
        for precision in PRECISIONS:
            result[release, precision] = tmp_path_factory.mktemp("precise") / f"{release}-{precision}"
            export(
                GOLDEN / release,
                result[release, precision],
                precision=Precision(precision, ranges if precision == "fp8" else None),
            )
    return result


def producers(network: Any) -> dict[str, Any]:
    """The layer that makes each tensor, by the tensor's name."""
    layers = map(network.get_layer, range(network.num_layers))
    return {layer.get_output(i).name: layer for layer in layers for i in range(layer.num_outputs)}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("release", RELEASES)
def test_types_of_the_text_network(precise: dict[tuple[str, str], Path], release: str, precision: str) -> None:
    parsed = parse_graph(open_bundle(precise[release, precision]), "text", trt, MAX_TOKENS)
    layers = network_types(parsed.network)
    attention = [layer for layer in layers if layer.type == "ATTENTION_INPUT"]
    assert attention
    assert all(layer.inputs[:3] == ("BF16",) * 3 for layer in attention)

    products = [layer for layer in layers if layer.type == "MATRIX_MULTIPLY"]
    large = [layer for layer in products if LARGE.match(layer.name)]
    assert len(large) == LARGE_LINEARS[release]
    assert all(layer.inputs == ("BF16", "BF16") for layer in large)

    state_path = [layer for layer in layers if STATE_PATH.match(layer.name)]
    assert len(state_path) > 20
    assert {kind for layer in state_path for kind in (layer.inputs[0], *layer.outputs)} == {"FLOAT"}
    scorer = [layer for layer in products if layer.name.startswith("head.residual_scorer.")]
    assert [layer.inputs for layer in scorer] == [("FLOAT", "FLOAT")] * 2
    # No product is left in float32 but those of the delta rule and of the head's scorer.
    islands = {layer.name for layer in (*state_path, *scorer)}
    assert {layer.name for layer in products if "FLOAT" in layer.inputs} <= islands
    # Statistics of norms, L2 norms and whatever else is summed or averaged.
    reduced = [layer for layer in layers if layer.type in ("REDUCE", "CUMULATIVE", "SOFTMAX")]
    assert {layer.inputs[0] for layer in reduced} == {"FLOAT"}
    assert parsed.network.get_output(0).dtype == trt.float32


@pytest.mark.parametrize("release", RELEASES)
def test_fp8_reaches_both_operands_of_every_large_linear(precise: dict[tuple[str, str], Path], release: str) -> None:
    parsed = parse_graph(open_bundle(precise[release, "fp8"]), "text", trt, MAX_TOKENS)
    made_by = producers(parsed.network)

    def source(tensor: Any) -> Any:
        """The layer behind a tensor; changes of shape in between move no values."""
        layer = made_by[tensor.name]
        while layer.type == trt.LayerType.SHUFFLE:
            layer = made_by[layer.get_input(0).name]
        return layer

    layers = map(parsed.network.get_layer, range(parsed.network.num_layers))
    products = [layer for layer in layers if layer.type == trt.LayerType.MATRIX_MULTIPLY]
    quantised, shared = 0, set()
    for layer in products:
        operands = [source(layer.get_input(i)) for i in range(2)]
        if not LARGE.match(layer.name):
            assert all(operand.type != trt.LayerType.DEQUANTIZE for operand in operands), layer.name
            continue
        assert all(operand.type == trt.LayerType.DEQUANTIZE for operand in operands), layer.name
        assert all(operand.get_input(0).dtype == trt.fp8 for operand in operands), layer.name
        activation, weight = (made_by[operand.get_input(0).name] for operand in operands)
        assert (activation.type, weight.type) == (trt.LayerType.QUANTIZE, trt.LayerType.CONSTANT), layer.name
        quantised += 1
        shared.add(activation.name)
    assert quantised == LARGE_LINEARS[release]
    assert len(shared) < quantised, "one quantisation serves all consumers of an activation"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("release", RELEASES)
def test_types_of_the_vision_network(precise: dict[tuple[str, str], Path], release: str, precision: str) -> None:
    """Vision stays BF16 in FP8 bundles."""
    parsed = parse_graph(open_bundle(precise[release, precision]), "vision", trt, MAX_TOKENS)
    layers = network_types(parsed.network)
    attention = [layer for layer in layers if layer.type == "ATTENTION_INPUT"]
    assert attention
    assert all(layer.inputs[:3] == ("BF16",) * 3 for layer in attention)
    kinds = {layer.inputs for layer in layers if layer.type in ("MATRIX_MULTIPLY", "CONVOLUTION")}
    assert ("BF16", "BF16") in kinds
    assert "FP8" not in {kind for layer in layers for kind in (*layer.inputs, *layer.outputs)}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("release", RELEASES)
def test_plans_for_both_cards(precise: dict[tuple[str, str], Path], release: str, precision: str) -> None:
    folder = precise[release, precision]
    manifest = build(open_bundle(folder), recipe(precision=precision))
    (plan,) = manifest.plans
    assert plan.compute_capabilities == ["8.9", "12.0"]
    for file in plan.files.values():
        assert manifest.files[file].size_bytes == (folder / file).stat().st_size > 100_000
    reopened = open_bundle(folder)
    assert reopened.manifest == manifest
    verify_files(reopened)


def test_too_small_a_workspace_says_what_to_do(precise: dict[tuple[str, str], Path]) -> None:
    settings = recipe().build
    assert settings is not None
    small = dataclasses.replace(recipe("small"), build=dataclasses.replace(settings, workspace_gib=0.002))
    folder = precise["odd", "bf16"]
    before = sorted(folder.iterdir())
    with pytest.raises(EngineError, match=r"(?s)cannot build the graph.*raise the recipe's workspace_gib"):
        build(open_bundle(folder), small)
    assert sorted(folder.iterdir()) == before


def test_float32_has_no_plan(bundles: dict[str, Path]) -> None:
    with pytest.raises(SettingError, match=r"recipe test builds bf16, .*odd is fp32: choose another recipe, or export"):
        build(open_bundle(bundles["odd"]), recipe())
