"""What an export writes: the graph, its weights by reference, its parts against eager torch."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from clef_export import operators
from clef_export.cpu import linear_attention
from clef_export.pipeline import export
from clef_export.random_release import byte_tokenizer, small_config, write_release
from clef_export.release import open_release
from conftest import GOLDEN, RELEASES
from onnx import TensorProto, helper

from clef_trt import Clef, samples
from clef_trt.bundle import read_manifest
from clef_trt.functions import MASKED, general_functions
from clef_trt.tensorrt_functions import parallel_delta_rule


def graph_of(bundle: Path, name: str = "text") -> onnx.ModelProto:
    return onnx.load(bundle / f"{name}.onnx", load_external_data=False)


@pytest.mark.parametrize("graph", ["text", "vision"])
@pytest.mark.parametrize("release", RELEASES)
def test_onnx_accepts_the_graph_with_its_weights(
    release: str, graph: str, bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(GOLDEN / release)  # external data is looked for under the working directory
    onnx.checker.check_model(graph_of(bundles[release], graph), full_check=True)


def test_axes_are_dynamic_and_named(bundles: dict[str, Path]) -> None:
    model = graph_of(bundles["odd"])
    axes = {i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    assert axes["input_ids"] == ["batch", "sequence"]
    assert axes["position_ids"] == [3, "batch", "sequence"]
    assert axes["media_embeddings"] == ["media", 96]
    assert axes["question_spans"] == ["batch", "questions", 2]
    assert axes["option_questions"] == ["batch", "options"]
    (logits,) = model.graph.output
    assert [d.dim_param for d in logits.type.tensor_type.shape.dim] == ["batch", "options"]
    model = graph_of(bundles["odd"], "vision")
    axes = {i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    assert axes["pixel_values"] == ["groups", "patches", 1536]
    (rows,) = model.graph.output
    assert [d.dim_param or d.dim_value for d in rows.type.tensor_type.shape.dim] == ["groups", "tokens", 96]


def test_operators_stay_whole(bundles: dict[str, Path]) -> None:
    model = graph_of(bundles["narrow"])
    (loop,) = [node for node in model.graph.node if node.op_type == "Loop"]
    (body,) = [attribute.g for attribute in loop.attribute]
    kinds = [node.op_type for node in [*model.graph.node, *body.node] if node.domain == "clef"]
    assert kinds.count("ContinuedDeltaRule") == 6
    assert kinds.count("ContinuedAttention") == 2
    assert kinds.count("MaskedAttention") == 2 + 2 * 4
    assert {function.name for function in model.functions} == set(kinds)
    vision = graph_of(bundles["narrow"], "vision")
    assert [node.op_type for node in vision.graph.node if node.domain == "clef"] == ["FullAttention"] * 3
    assert sum(node.op_type == "RMSNormalization" for node in body.node) == 2 * 8 + 2 * 2 + 6 + 1


@pytest.mark.parametrize("graph", ["text", "vision"])
def test_no_weight_is_in_the_graph_and_no_path_of_this_machine(graph: str, bundles: dict[str, Path]) -> None:
    model = graph_of(bundles["narrow"], graph)
    weights = [t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    assert sum(np.prod(t.dims, dtype=int) for t in weights) == read_manifest(bundles["narrow"]).graphs[graph].parameters
    assert {t.data_type for t in weights} == {TensorProto.BFLOAT16}
    assert sum(len(t.raw_data) for t in model.graph.initializer) < 10_000
    text = (bundles["narrow"] / f"{graph}.onnx").read_bytes()
    for path in (os.getcwd(), os.path.dirname(torch.__file__), str(bundles["narrow"])):
        assert path.encode() not in text


def test_embedding_tables_are_never_expanded(bundles: dict[str, Path]) -> None:
    model = graph_of(bundles["narrow"])
    for table in ("backbone.embed_tokens.weight", "lm_head.weight"):
        users = [node for node in model.graph.node if table in node.input]
        assert [node.op_type for node in users] == ["Gather"]


def test_copied_weights_make_a_bundle_that_can_be_moved(bundles: dict[str, Path], tmp_path: Path) -> None:
    release = tmp_path / "release"
    shutil.copytree(GOLDEN / "odd", release)
    manifest = export(release, tmp_path / "bundle", copy_weights=True)
    shutil.rmtree(release)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "bundle").rename(tmp_path / "elsewhere" / "b")
    moved = tmp_path / "elsewhere" / "b"
    assert manifest.weights.root == "."
    assert not any(str(tmp_path) in path.read_text(errors="ignore") for path in moved.glob("*.json"))
    with Clef.load(moved) as clef, Clef.load(bundles["odd"]) as other:
        assert clef.decide(samples.ticket()) == other.decide(samples.ticket())


def test_a_hub_cache_of_symlinks(tmp_path: Path, bundles: dict[str, Path]) -> None:
    """The layout a download leaves: snapshots/<revision>/ of relative links into blobs/."""
    cache = tmp_path / "models--example--odd"
    snapshot = cache / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for number, path in enumerate(sorted((GOLDEN / "odd").iterdir())):
        shutil.copy(path, cache / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    manifest = export(snapshot, tmp_path / "bundle")
    assert manifest.source.name == "example/odd"
    assert manifest.source.sha256 == read_manifest(bundles["odd"]).source.sha256
    assert manifest.weights.root == str(cache / "blobs")
    with Clef.load(tmp_path / "bundle") as clef, Clef.load(bundles["odd"]) as other:
        assert clef.decide(samples.ticket()) == other.decide(samples.ticket())


def test_a_release_of_hard_links(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    for path in (GOLDEN / "odd").iterdir():
        copy = tmp_path / path.name
        shutil.copy(path, copy)
        os.link(copy, tmp_path / "release" / path.name)
    export(tmp_path / "release", tmp_path / "bundle")
    Clef.load(tmp_path / "bundle").decide(samples.ticket())


def test_one_seed_makes_one_release(tmp_path: Path) -> None:
    config, head = small_config()
    for name in ("a", "b"):
        write_release(tmp_path / name, config, head, byte_tokenizer(), seed=5)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def run_function(
    name: str, inputs: list[torch.Tensor], functions: list[onnx.FunctionProto] | None = None, outputs: int = 1
) -> np.ndarray:
    """The first output of one `clef` operator alone in a graph, on ONNX Runtime."""
    functions = functions or general_functions()
    names = [f"x{i}" for i in range(len(inputs))]
    values = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, [None] * x.ndim) for n, x in zip(names, inputs, strict=True)
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * 4)
    results = ["y", *(f"y{i}" for i in range(1, outputs))]
    graph = helper.make_graph([helper.make_node(name, names, results, domain="clef")], "g", values, [output])
    opsets = [helper.make_opsetid(*opset) for opset in (("", 23), ("clef", 1), ("com.microsoft", 1))]
    model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(["y"], {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
    return np.asarray(result)


def step_by_step(q: Any, k: Any, v: Any, g: Any, b: Any) -> np.ndarray:
    """The delta rule's definition, token by token in float64."""
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, v.shape[2] // x.shape[2], 2) for x in (q / np.sqrt(q.shape[-1]), k))
    batch, length, heads, key_dim = k.shape
    state, out = np.zeros((batch, heads, key_dim, v.shape[-1])), np.zeros_like(v)
    for t in range(length):
        state = state * np.exp(g[:, t])[..., None, None]
        read = np.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], b[:, t][..., None] * (v[:, t] - read))
        out[:, t] = np.einsum("bhkv,bhk->bhv", state, q[:, t])
    return out


@pytest.mark.parametrize("correlated", [False, True], ids=["random", "correlated"])
@pytest.mark.parametrize(
    ("batch", "length", "key_heads", "value_heads", "key_dim", "value_dim"),
    [(1, 1, 1, 1, 8, 8), (2, 64, 2, 4, 16, 16), (1, 65, 1, 3, 32, 48), (1, 200, 2, 2, 128, 64)],
)
def test_the_delta_rule_is_its_definition(
    batch: int, length: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, correlated: bool
) -> None:
    """Correlated keys with little decay and beta near one are where other forms of the inverse break down."""
    torch.manual_seed(length)
    q, k = torch.randn(2, batch, length, key_heads, key_dim)
    v = torch.randn(batch, length, value_heads, value_dim)
    g = -torch.rand(batch, length, value_heads) * (0.001 if correlated else 2)
    b = torch.rand(batch, length, value_heads)
    if correlated:
        k, b = 0.02 * k + torch.randn(1, 1, key_heads, key_dim), 0.99 + 0.01 * b
    expected = step_by_step(*(x.double().numpy() for x in (q, k, v, g, b)))
    tolerance = 2e-6 * max(1.0, np.abs(expected).max())
    inputs = [q, k, v, g, b]
    shape = dataclasses.replace(
        open_release(GOLDEN / "odd").config.text,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
    )
    for found in (
        operators.gated_delta_rule(*inputs).numpy(),
        run_function("GatedDeltaRule", inputs),
        run_function("GatedDeltaRule", inputs, [parallel_delta_rule(max_tokens=length)]),
        run_function("GatedDeltaRule", inputs, [parallel_delta_rule(max_tokens=4096)]),
        run_function(
            "ContinuedDeltaRule",
            [*inputs, torch.zeros(batch, value_heads, key_dim, value_dim)],
            [linear_attention(shape)],
            outputs=2,
        ),
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("length", [1, 7, 256, 257, 700])
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (3, 1), (2, 2)])
def test_tiled_attention_is_attention(length: int, heads: int, key_heads: int) -> None:
    torch.manual_seed(length)
    q, k, v = torch.randn(2, heads, length, 16), *torch.randn(2, 2, key_heads, length, 16)
    np.testing.assert_allclose(
        run_function("CausalAttention", [q, k, v]), operators.causal_attention(q, k, v), rtol=0, atol=2e-6
    )
    k, v = torch.randn(2, 2, heads, 90, 16)
    np.testing.assert_allclose(
        run_function("FullAttention", [q, k, v]), operators.full_attention(q, k, v), rtol=0, atol=2e-6
    )
    bias = torch.where(torch.rand(2, 90) < 0.5, 0.0, MASKED)
    bias[1] = MASKED  # a row masked whole stays finite
    np.testing.assert_allclose(
        run_function("MaskedAttention", [q, k, v, bias]), operators.masked_attention(q, k, v, bias), rtol=0, atol=2e-6
    )
