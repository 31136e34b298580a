"""FP8 ranges: which linears, what they read, how large it gets; interrupted, resumed and refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clef_export import collect as collect_module
from clef_export import ranges as ranges_module
from clef_export.collect import BINS, collect_ranges, histogram, load_text_model, percentile, run_ranges
from clef_export.config import parse_config, read_config
from clef_export.random_release import byte_tokenizer, small_config, write_release
from clef_export.ranges import Ranges, activation_of, large_linears, read_ranges, synthetic_ranges, write_ranges
from clef_export.release import Release, open_release
from clef_export.trace import TextModel
from conftest import GOLDEN, golden_cases
from torch import Tensor, nn

from clef_trt import samples
from clef_trt.batch import collate, split_logits
from clef_trt.encode import Encoder
from clef_trt.errors import ExportError, ReleaseError, RequestError, SettingError
from clef_trt.request import parse_request
from clef_trt.types import Encoding

REQUESTS = [request for request in samples.requests() if "images" not in request]
BIN = 1 + 1 / 32  # the largest ratio of a bin's edges
SHAPE_9B = Path(__file__).parents[1] / "bench" / "shapes" / "9b.json"


@pytest.fixture(scope="module")
def release() -> Release:
    return open_release(GOLDEN / "odd")


@pytest.fixture(scope="module")
def model(release: Release) -> TextModel:
    return load_text_model(release, "cpu", torch.float32)


@pytest.fixture(scope="module")
def collected(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ranges of all sample requests, collected without an interrupt."""
    path = tmp_path_factory.mktemp("ranges") / "ranges.json"
    collect_ranges(release, REQUESTS, path)
    return path


@pytest.fixture(autouse=True, scope="module")
def _two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def encode(release: Release, request: dict[str, Any]) -> Encoding:
    return Encoder(release.folder / "tokenizer.json").encode(parse_request(request), 16384)


def tensors(release: Release, encoding: Encoding) -> dict[str, Tensor]:
    inputs = collate([encoding], [], release.config.text.hidden_size)
    return {name: torch.from_numpy(array) for name, array in inputs.items()}


def inputs_of(model: TextModel, linears: list[str], release: Release, request: dict[str, Any]) -> dict[str, Tensor]:
    """What each linear reads in one request, by hooks of its own."""
    seen: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, x, name=name: seen.__setitem__(name, x[0]))
        for name in linears
    ]
    with torch.no_grad():
        model(**tensors(release, encode(release, request)))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(("name", "count"), [("narrow", 50), ("odd", 26)])
def test_large_linears_of_a_release_are_linears_of_the_model(name: str, count: int) -> None:
    config = read_config(GOLDEN / name)
    linears = large_linears(config)
    assert len(linears) == len(set(linears)) == count
    with torch.device("meta"):
        model = TextModel(config)
    small = ("in_proj_a", "in_proj_b")
    backbone = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and "backbone" in name]
    assert sorted(linears) == sorted(name for name in backbone if not name.endswith(small))


def test_large_linears_of_9b() -> None:
    value = json.loads(SHAPE_9B.read_text())
    linears = large_linears(parse_config(value["config"], value["joint_head_config"]))
    assert len(linears) == 200
    assert len({activation_of(linear) for linear in linears}) == 32 * 2 + 24 * 2 + 8 * 2


def test_names_of_activations() -> None:
    layer = "backbone.layers.3"
    names = {linear: activation_of(f"{layer}.{linear}").removeprefix(f"{layer}.") for linear in SHARING}
    assert names == SHARING
    for other in ("in_proj_a", "lm_head", ""):
        with pytest.raises(ExportError, match="gate_proj"):
            activation_of(other)


SHARING = {
    "mlp.gate_proj": "mlp.input",
    "mlp.up_proj": "mlp.input",
    "mlp.down_proj": "mlp.down_proj.input",
    "self_attn.q_proj": "self_attn.input",
    "self_attn.k_proj": "self_attn.input",
    "self_attn.v_proj": "self_attn.input",
    "self_attn.o_proj": "self_attn.o_proj.input",
    "linear_attn.in_proj_qkv": "linear_attn.input",
    "linear_attn.in_proj_z": "linear_attn.input",
    "linear_attn.out_proj": "linear_attn.out_proj.input",
}


def test_linears_of_one_activation_read_the_same_tensor_and_others_do_not(release: Release, model: TextModel) -> None:
    linears = large_linears(release.config)
    seen = inputs_of(model, linears, release, REQUESTS[0])
    by_activation: dict[str, set[int]] = {}
    for linear in linears:
        by_activation.setdefault(activation_of(linear), set()).add(id(seen[linear]))
    assert all(len(same) == 1 for same in by_activation.values())
    assert len(set.union(*by_activation.values())) == len(by_activation) == 16


@pytest.mark.parametrize("name", ["odd", "narrow"])
def test_the_loaded_model_gives_the_golden_logits(name: str) -> None:
    release, case = open_release(GOLDEN / name), golden_cases(name)[0]
    assert case["name"] == "ticket"
    model, encoding = load_text_model(release, "cpu", torch.float32), encode(release, case["request"])
    with torch.no_grad():
        (logits,) = split_logits(model(**tensors(release, encoding)).numpy(), [encoding])
    for found, expected in zip(logits, case["logits"], strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    config, head = small_config()
    write_release(tmp_path / "tied", {**config, "tie_word_embeddings": True}, head, byte_tokenizer(), seed=1)
    tied = open_release(tmp_path / "tied")
    model = load_text_model(tied, "cpu", torch.bfloat16)
    assert model.lm_head.weight.data_ptr() == model.backbone.embed_tokens.weight.data_ptr()
    result = collect_ranges(tied, REQUESTS[:1], tmp_path / "ranges.json", dtype=torch.bfloat16)
    assert all(0 < activation.max < math.inf for activation in result.activations.values())


def test_weights_that_do_not_fit_are_refused(release: Release) -> None:
    missing = dict(release.tensors)
    del missing["lm_head.weight"]
    with pytest.raises(ReleaseError, match=r"lm_head.weight is missing"):
        load_text_model(Release(release.folder, release.root, "", release.config, missing), "cpu", torch.float32)


def test_ranges_equal_a_direct_computation(release: Release, model: TextModel, collected: Path) -> None:
    ranges = read_ranges(collected)
    encodings = [encode(release, request) for request in REQUESTS]
    assert not ranges.synthetic
    assert (ranges.requests, ranges.tokens) == (len(REQUESTS), sum(encoding.tokens for encoding in encodings))
    linears = [
        f"backbone.layers.1.{n}" for n in ("self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    ]
    linears += [f"backbone.layers.2.linear_attn.{n}" for n in ("in_proj_qkv", "in_proj_z", "out_proj")]
    runs = [inputs_of(model, linears, release, request) for request in REQUESTS]
    for linear in linears:
        values = np.sort(np.concatenate([run[linear].abs().flatten().numpy() for run in runs]))
        found = ranges.activations[activation_of(linear)]
        assert found.max == values[-1]
        assert found.values == len(values)
        for name, upper in found.percentiles.items():
            exact = values[math.ceil(len(values) * float(name) / 100) - 1]
            assert exact <= upper <= exact * BIN
        assert ranges.scale(activation_of(linear)) == float(values[-1]) / 448
        assert ranges.scale(activation_of(linear), "99.9") == found.percentiles["99.9"] / 448
        assert ranges.weight_scale(linear) == float(model.get_parameter(f"{linear}.weight").abs().max()) / 448
    assert list(ranges.weights) == large_linears(release.config)
    assert set(ranges.activations) == {activation_of(linear) for linear in ranges.weights}


def test_the_percentile_of_a_known_distribution_is_within_one_bin() -> None:
    values = torch.rand(200_000, generator=torch.Generator().manual_seed(0)).mul(-50).exp()  # 2^-72 … 1
    counts = histogram(values).tolist()
    assert sum(counts) == 200_000
    ordered = values.sort().values
    for percent in (50, 90, 99.9, 99.99):
        exact = float(ordered[math.ceil(2000 * percent) - 1])
        assert exact <= percentile(counts, 1.0, percent) <= exact * BIN
    parts = sum(histogram(part) for part in values.to(torch.float32).split(777))
    assert parts.tolist() == counts  # type: ignore[union-attr]


def test_the_ends_of_the_histogram() -> None:
    counts = histogram(torch.tensor([0.0, -0.0, 2.0**-41, 1e-38, 2.0**39.99, 2.0**50, -1.0]))
    assert counts[0] == 4
    assert counts[BINS - 1] == 2
    assert percentile(counts.tolist(), 2.0**50, 50) == 0.0
    assert percentile(histogram(torch.ones(3)).tolist(), 1.0, 99) == 1.0  # never above the maximum


def test_a_zero_tensor_takes_scale_one() -> None:
    config = read_config(GOLDEN / "odd")
    base = synthetic_ranges(config)
    name, linear = "backbone.layers.0.mlp.input", "backbone.layers.0.mlp.up_proj"
    zero = ranges_module.ActivationRange(0.0, {"99.9": 0.0}, 5)
    ranges = Ranges("0" * 64, 1, 1, "0" * 64, {name: zero}, {linear: ranges_module.WeightRange(0.0)})
    assert (ranges.scale(name), ranges.scale(name, "99.9"), ranges.weight_scale(linear)) == (1.0, 1.0, 1.0)
    assert (base.scale(name), base.weight_scale(linear)) == (8 / 448, 0.5 / 448)
    with pytest.raises(ExportError, match=r"'99\.5' is no choice of range.*max, 99\.9"):
        base.scale(name, "99.5")
    with pytest.raises(ExportError, match="is no activation"):
        base.scale(linear)
    with pytest.raises(ExportError, match="is no linear"):
        base.weight_scale(name)


class Interrupted:
    """`observe`, interrupted at one of its calls."""

    def __init__(self, at: int, error: BaseException | None = None) -> None:
        self.calls, self.at, self.error, self.observe = 0, at, error or KeyboardInterrupt(), collect_module.observe

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise self.error
        return self.observe(*arguments)


@pytest.mark.parametrize(("at", "every"), [(4, 20), (4, 2), (len(REQUESTS), 3)])
def test_a_resumed_run_writes_the_file_of_an_uninterrupted_one(
    at: int, every: int, release: Release, collected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, told = tmp_path / "ranges.json", []
    with monkeypatch.context() as patch:
        patch.setattr(collect_module, "observe", Interrupted(at))
        with pytest.raises(KeyboardInterrupt):
            collect_ranges(release, REQUESTS, target, every=every)
    assert [path.name for path in tmp_path.iterdir()] == ["ranges.json.partial"]
    rest = Interrupted(at=-1)
    monkeypatch.setattr(collect_module, "observe", rest)
    collect_ranges(release, REQUESTS, target, every=every, progress=told.append)
    assert rest.calls == len(REQUESTS) - (at - 1)
    assert f"going on after {at - 1} of {len(REQUESTS)} requests" in told
    assert target.read_bytes() == collected.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["ranges.json"]


def test_a_run_that_was_killed_goes_on_from_its_last_save(
    release: Release, collected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves no chance to save: what lies there is the state of the last `every`."""
    target, kept = tmp_path / "ranges.json", []
    state_file = tmp_path / "ranges.json.partial"
    monkeypatch.setattr(collect_module, "observe", Interrupted(5))
    with pytest.raises(KeyboardInterrupt):
        collect_ranges(release, REQUESTS, target, every=3, progress=lambda text: _keep(text, state_file, kept))
    monkeypatch.undo()
    state_file.write_bytes(kept[-1])
    assert json.loads(kept[-1])["requests"] == 3
    collect_ranges(release, REQUESTS, target)
    assert target.read_bytes() == collected.read_bytes()


def test_a_result_that_cannot_be_written_is_not_lost(
    release: Release, collected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(collect_module, "write_ranges", full)
        with pytest.raises(OSError, match="no space"):
            collect_ranges(release, REQUESTS, tmp_path / "ranges.json")
    monkeypatch.setattr(collect_module, "observe", Interrupted(at=1))  # there is nothing left to run
    collect_ranges(release, REQUESTS, tmp_path / "ranges.json")
    assert (tmp_path / "ranges.json").read_bytes() == collected.read_bytes()


def _keep(text: str, path: Path, kept: list[bytes]) -> None:
    if text.endswith(f"of {len(REQUESTS)} requests"):
        kept.append(path.read_bytes())


@pytest.fixture
def begun(release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The target of a run that was interrupted after two requests."""
    with monkeypatch.context() as patch:
        patch.setattr(collect_module, "observe", Interrupted(3))
        with pytest.raises(KeyboardInterrupt):
            collect_ranges(release, REQUESTS, tmp_path / "ranges.json")
    return tmp_path / "ranges.json"


def test_other_inputs_are_refused(release: Release, begun: Path) -> None:
    before = begun.with_name("ranges.json.partial").read_bytes()
    for requests in (REQUESTS[::-1], REQUESTS[:-1], [*REQUESTS, REQUESTS[0]]):
        with pytest.raises(ExportError, match="begun with another requests_sha256"):
            collect_ranges(release, requests, begun)
    with pytest.raises(ExportError, match="another dtype: float32, now it is bfloat16"):
        collect_ranges(release, REQUESTS, begun, dtype=torch.bfloat16)
    with pytest.raises(ExportError, match="begun with another source_sha256"):
        collect_ranges(open_release(GOLDEN / "narrow"), REQUESTS, begun)
    assert begun.with_name("ranges.json.partial").read_bytes() == before


def test_a_broken_state_is_refused(release: Release, begun: Path) -> None:
    state_file = begun.with_name("ranges.json.partial")
    whole = json.loads(state_file.read_text())
    name = next(iter(whole["counts"]))
    for change in (
        {"requests": 99},
        {"requests": -1},
        {"counts": whole["counts"] | {name: [0]}},
        {"counts": whole["counts"] | {name: [0.5] * BINS}},
        {"maxima": {}},
        {"maxima": whole["maxima"] | {name: "3"}},
        {"format_version": 2},
        {"extra": 1},
    ):
        state_file.write_text(json.dumps(whole | change))
        with pytest.raises(ExportError, match=r"ranges\.json\.partial"):
            collect_ranges(release, REQUESTS, begun)
    state_file.write_text(json.dumps(whole)[:-9])
    with pytest.raises(ExportError, match="cannot be read as JSON"):
        collect_ranges(release, REQUESTS, begun)


def test_requests_that_are_wrong_or_hold_media_are_refused_before_anything_runs(
    release: Release, tmp_path: Path
) -> None:
    (picture,) = (request for request in samples.requests() if "images" in request)
    with pytest.raises(RequestError, match="text only") as error:
        collect_ranges(release, [REQUESTS[0], picture, {"model": "m"}], tmp_path / "ranges.json")
    assert [fault.loc for fault in error.value.faults] == [(1, "images"), (2, "state"), (2, "questions")]
    with pytest.raises(RequestError, match="no requests"):
        collect_ranges(release, [], tmp_path / "ranges.json")
    assert not list(tmp_path.iterdir())


def test_impossible_settings_are_refused(release: Release, tmp_path: Path) -> None:
    for settings in ({"every": 0}, {"percentiles": ()}, {"percentiles": (100,)}, {"device": "cuda:99"}):
        with pytest.raises(SettingError):
            collect_ranges(release, REQUESTS[:1], tmp_path / "ranges.json", **settings)  # type: ignore[arg-type]
    (tmp_path / "ranges.json").write_text("mine")
    for target in (tmp_path / "ranges.json", tmp_path / "nowhere" / "ranges.json"):
        with pytest.raises(ExportError, match="choose another name"):
            collect_ranges(release, REQUESTS[:1], target)
    assert (tmp_path / "ranges.json").read_text() == "mine"


def test_values_that_are_not_finite_are_an_error_with_their_place(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for parameter, value, place in (
        ("backbone.layers.2.input_layernorm.weight", math.inf, "backbone.layers.2.linear_attn.input .* request 0"),
        ("backbone.layers.1.post_attention_layernorm.weight", math.nan, "backbone.layers.1.mlp.input .* request 0"),
        ("backbone.layers.1.self_attn.q_proj.weight", math.nan, "backbone.layers.1.self_attn.q_proj.weight"),
    ):
        broken = load_text_model(release, "cpu", torch.float32)
        broken.get_parameter(parameter).view(-1)[3] = value
        monkeypatch.setattr(collect_module, "load_text_model", lambda *_, broken=broken: broken)
        with pytest.raises(ExportError, match=place):
            collect_ranges(release, REQUESTS[:2], tmp_path / "ranges.json")
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = synthetic_ranges(read_config(GOLDEN / "odd"))
    write_ranges(ranges, tmp_path / "ranges.json")
    before = (tmp_path / "ranges.json").read_bytes()

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_ranges(synthetic_ranges(read_config(GOLDEN / "narrow")), tmp_path / "ranges.json")
    assert [path.name for path in tmp_path.iterdir()] == ["ranges.json"]
    assert (tmp_path / "ranges.json").read_bytes() == before


def test_synthetic_ranges_of_9b_are_read_back(tmp_path: Path) -> None:
    value = json.loads(SHAPE_9B.read_text())
    ranges = synthetic_ranges(parse_config(value["config"], value["joint_head_config"]))
    write_ranges(ranges, tmp_path / "ranges.json")
    assert read_ranges(tmp_path / "ranges.json") == ranges
    assert ranges.synthetic
    assert {ranges.scale(name, "99.99") for name in ranges.activations} == {8 / 448}


NAME = "backbone.layers.0.mlp.input"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("extra",), 1, r"unknown keys \['extra'\]"),
        (("tokens",), None, r"missing keys \['tokens'\]"),
        (("format_version",), 2, "format version 2"),
        (("format_version",), None, "format version None"),
        (("source_sha256",), "abc", "SHA-256"),
        (("source_sha256",), "0" * 64, "of release 000"),
        (("requests",), 0, "of 0 requests"),
        (("requests",), -1, "at least 0"),
        (("requests",), True, "at least 0"),
        (("requests",), 1.5, "finite int"),
        (("activations",), {}, "no activations"),
        (("activations",), [], "expected dict"),
        (("activations", NAME), None, f"missing, of {NAME}"),
        (("activations", NAME), 3, "expected ActivationRange|expected dict"),
        (("activations", NAME, "max"), math.nan, "finite float"),
        (("activations", NAME, "max"), math.inf, "finite float"),
        (("activations", NAME, "max"), 10**400, "finite float"),
        (("activations", NAME, "max"), "8", "finite float"),
        (("activations", NAME, "max"), 1.0, "with a max of 1.0"),
        (("activations", NAME, "values"), None, r"missing keys \['values'\]"),
        (("activations", NAME, "percentiles", "99.9"), None, "not all of the same percentiles"),
        (("activations", NAME, "percentiles", "max"), 1.0, "percentile 'max'"),
        (("activations", "backbone.layers.9.mlp.input"), {"max": 1, "percentiles": {}, "values": 1}, "percentiles"),
        (("weights", "backbone.layers.0.mlp.gate_proj", "min"), 0.0, r"unknown keys \['min'\]"),
        (("weights", "lm_head"), {"max": 1.0}, "no large linear"),
        (("weights", "backbone.layers.0.mlp.down_proj"), None, r"missing, of backbone.layers.0.mlp.down_proj.input"),
    ],
)
def test_a_file_that_is_not_exactly_one_is_refused(
    place: tuple[str, ...], value: Any, message: str, collected: Path, tmp_path: Path
) -> None:
    whole = json.loads(collected.read_text())
    inner = whole
    for key in place[:-1]:
        inner = inner[key]
    if value is None:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    path = tmp_path / "ranges.json"
    path.write_text(json.dumps(whole))
    with pytest.raises(ExportError, match=message):
        read_ranges(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"null", b"[" * 100_000])
def test_a_file_that_is_no_object_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ranges.json"
    path.write_bytes(content)
    with pytest.raises(ExportError, match=r"ranges\.json"):
        read_ranges(path)
    with pytest.raises(ExportError, match=r"nothing\.json"):
        read_ranges(tmp_path / "nothing.json")


def test_run_ranges_reads_lines_of_requests(tmp_path: Path, collected: Path) -> None:
    lines, target = tmp_path / "requests.jsonl", tmp_path / "ranges.json"
    lines.write_text("\n\n".join(json.dumps(request) for request in REQUESTS) + "\n")
    assert run_ranges(GOLDEN / "odd", lines, target) == read_ranges(target)
    assert target.read_bytes() == collected.read_bytes()
    lines.write_text('{"model": "m"}\n{\n')
    with pytest.raises(RequestError, match="line 2"):
        run_ranges(GOLDEN / "odd", lines, tmp_path / "other.json")
    with pytest.raises(RequestError, match="cannot be read"):
        run_ranges(GOLDEN / "odd", tmp_path / "none.jsonl", tmp_path / "other.json")
    with pytest.raises(SettingError, match="float32, bfloat16"):
        run_ranges(GOLDEN / "odd", lines, tmp_path / "other.json", dtype="float8")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_gives_the_same_ranges(release: Release, collected: Path, tmp_path: Path) -> None:
    found = collect_ranges(release, REQUESTS, tmp_path / "ranges.json", device="cuda")
    expected = read_ranges(collected)
    assert (found.weights, found.tokens) == (expected.weights, expected.tokens)
    for name, activation in expected.activations.items():
        assert found.activations[name].values == activation.values
        assert found.activations[name].max == pytest.approx(activation.max, rel=1e-2)
