"""Int8 on ONNX Runtime: the decisions of float32, where a few channels are large too, whatever else is in the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from clef_export.cpu import int8_product
from clef_export.int8 import hadamard, hadamard_block
from clef_export.pipeline import export
from clef_export.precision import Precision
from clef_export.random_release import byte_tokenizer, small_config, write_release
from onnx import helper, numpy_helper
from outliers import write_outlier_release
from random_requests import random_requests
from safetensors.torch import load_file, save_file

from clef_trt import Clef, ExportError
from clef_trt.answer import softmax
from clef_trt.engine import products_saturate

REQUESTS = 500


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles of the release with planted outlier channels, by precision."""
    folder = tmp_path_factory.mktemp("int8")
    write_outlier_release(folder / "release", seed=7)
    for precision in ("fp32", "int8"):
        export(folder / "release", folder / precision, precision=Precision(precision))
    return {precision: folder / precision for precision in ("fp32", "int8")}


@pytest.mark.slow
def test_decisions_stay_on_a_release_with_outlier_channels(outliers: dict[str, Path]) -> None:
    """A changed top option counts unless float32's own margin is under 0.01."""
    requests = random_requests(REQUESTS, seed=0)
    exact, found = (Clef.load(outliers[precision]).logits(requests) for precision in ("fp32", "int8"))
    kept, largest = [], 0.0
    for a, b in (
        (a, b) for record, other in zip(exact, found, strict=True) for a, b in zip(record, other, strict=True)
    ):
        p, q = np.array(softmax(a)), np.array(softmax(b))
        second, first = np.sort(p)[-2:]
        kept.append(p.argmax() == q.argmax() or first - second < 0.01)
        largest = max(largest, float(np.abs(p - q).max()))
    assert len(kept) > 2 * REQUESTS
    assert np.mean(kept) >= 0.99
    assert 1e-4 < largest <= 0.03


@pytest.mark.slow
@pytest.mark.usefixtures("shared_passes")
def test_a_record_is_answered_alike_alone_and_among_others(outliers: dict[str, Path]) -> None:
    """Scales are per token: what a neighbour or padding holds does not change the codes of a record."""
    requests = random_requests(12, seed=3)
    clef = Clef.load(outliers["int8"])
    alone = [clef.logits([request])[0] for request in requests]
    for a, b in zip(alone, clef.logits(requests), strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-4)


def test_one_norm_is_scaled_once_and_its_other_readers_undo_it(outliers: dict[str, Path]) -> None:
    model = onnx.load(outliers["int8"] / "text.onnx", load_external_data=False)
    scales = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer if t.name.endswith("channel_scales")}
    assert len(scales) == 4 * 2 + 3  # two norms a layer, and in_proj_a and in_proj_b of the three delta layers together
    for name, value in scales.items():
        if not name.endswith("/inverse_channel_scales"):
            assert value.mean() == pytest.approx(1, abs=1e-5)
            assert value[[5, 40, 77]].max() < 0.1  # the planted channels, whose weights are small
    undone = [node for node in model.graph.node if any(name.endswith("/inverse_channel_scales") for name in node.input)]
    assert len(undone) == 3 * 2


@pytest.mark.parametrize(("channels", "block"), [(3584, 128), (160, 32), (96, 32), (64, 64), (7, 1)])
def test_hadamard_blocks_are_orthogonal_and_divide(channels: int, block: int) -> None:
    assert hadamard_block(channels) == block
    np.testing.assert_allclose(hadamard(block) @ hadamard(block).T, np.eye(block), atol=1e-6)


@pytest.fixture(scope="module")
def zeroed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release in which a channel that no linear reads, a whole weight and an output are zero."""
    folder = tmp_path_factory.mktemp("zeroed") / "release"
    write_release(folder, *small_config(), byte_tokenizer(), seed=1)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name in ("gate_proj", "up_proj"):
        weights[f"model.language_model.layers.0.mlp.{name}.weight"][:, 3] = 0
    weights["model.language_model.layers.1.mlp.down_proj.weight"].zero_()
    weights["model.language_model.layers.2.linear_attn.in_proj_qkv.weight"][4] = 0
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_zeros_in_the_weights_are_no_division_by_zero(zeroed: Path, tmp_path: Path) -> None:
    for precision in ("fp32", "int8"):
        export(zeroed, tmp_path / precision, precision=Precision(precision))
    request = random_requests(1, seed=1)
    exact, found = (Clef.load(tmp_path / precision).logits(request) for precision in ("fp32", "int8"))
    for a, b in zip(exact[0], found[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=0.5)


@pytest.mark.slow
def test_a_weight_that_is_not_finite_is_refused(zeroed: Path, tmp_path: Path) -> None:
    weights = load_file(zeroed / "model.safetensors")
    weights["model.language_model.layers.1.mlp.up_proj.weight"][0, 0] = float("inf")
    for path in zeroed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match=r"layers.1.mlp.up_proj is not finite"):
        export(tmp_path, tmp_path / "bundle", precision=Precision("int8"))


@pytest.mark.parametrize("exact", ["0", "1"])
def test_products_of_codes_at_their_extremes_are_exact(exact: str) -> None:
    """Processors without VNNI saturate at 255 * 127 + 255 * 127, unless they are asked for exact products."""
    if exact == "0" and products_saturate():
        pytest.skip("this CPU has no VNNI: the engine asks for exact products")
    names = ["codes", "row_scales", "weight", "weight_scales"]
    codes, weight = np.full((1, 64, 512), 255, np.uint8), np.full((512, 64), 127, np.int8)
    values = [codes, np.ones((1, 64, 1), np.float32), weight, np.ones(64, np.float32)]
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in zip(names, values, strict=True)
    ]
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 64, 64])
    constant = numpy_helper.from_array(weight, "weight")
    node = helper.make_node("Int8Product", names, ["y"], domain="clef")
    graph = helper.make_graph([node], "g", [i for i in inputs if i.name != "weight"], [output], [constant])
    opsets = [helper.make_opsetid(*opset) for opset in (("", 23), ("clef", 1), ("com.microsoft", 1))]
    model = helper.make_model(graph, opset_imports=opsets, functions=[int8_product()], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.x64quantprecision", exact)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {n: v for n, v in zip(names, values, strict=True) if n != "weight"})
    assert (found == 512 * 127 * 127).all()


@pytest.mark.parametrize(
    ("flags", "saturate"),
    [("avx2 fma", True), ("avx512f avx512bw", True), ("avx2 avx_vnni", False), ("avx512_vnni", False)],
)
def test_exact_products_are_asked_for_where_others_saturate(
    flags: str, saturate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: sse2 {flags}\n")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert products_saturate(tmp_path / "cpuinfo") == saturate
    assert products_saturate(tmp_path / "missing")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not products_saturate(tmp_path / "cpuinfo")


@pytest.mark.slow
def test_exact_products_are_said_and_change_no_answer(
    outliers: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = random_requests(1, seed=4)[0]
    fast = Clef.load(outliers["int8"])
    monkeypatch.setattr("clef_trt.engine.products_saturate", lambda: True)
    exact = Clef.load(outliers["int8"])
    assert "VNNI" in exact.engine.info()["int8"]
    for a, b in zip(fast.logits([request])[0], exact.logits([request])[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
