"""Passes at the shape, of bench/device.py: transformers' backbone and the project's own modules over the same weights.

`transformers` is its Qwen3.5 text model with sdpa attention (its own fused kernels where their packages import, else
its torch code); `ours` is export/backbone.py, what is exported. Both feed export/head.py. Systems take turns.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from device_parts import Clock, Task, Told, figures, reason, tell
from torch import Tensor, nn
from torch.nn import functional

QUESTIONS, OPTIONS, SPAN = 4, 4, 3  # of a record; tokens of each question and option
TURNS, LEAST_TURNS = 9, 3
CASE_S = 6.0  # of the turns of one case: long passes are repeated less often
MARGIN = 1.3  # of a longer pass over what its tokens make expected
PIECE_S = 0.25
PIECES = ("delta rule of transformers", "delta rule of ours", "attention", "MLP", "all linears")
System = Callable[[dict[str, Tensor]], Tensor]  # the contract's inputs → logits


@dataclass
class Model:
    """Both backbones over one set of weights, and the head they feed."""

    theirs: nn.Module
    ours: Any
    head: nn.Module
    lm_head: Tensor
    device: str
    last: dict[str, tuple[int, float]] = field(default_factory=dict)  # system → tokens and seconds of a pass

    def transformers(self, backbone: nn.Module) -> System:
        """A pass over transformers' text model, or a compiled one."""

        def run(x: dict[str, Tensor]) -> Tensor:
            hidden = backbone(input_ids=x["input_ids"], position_ids=x["position_ids"], use_cache=False)[0]
            return self.logits(hidden, x)

        return run

    def own(self, backbone: nn.Module) -> System:
        """A pass over the project's backbone, or a compiled one."""

        def run(x: dict[str, Tensor]) -> Tensor:
            hidden = backbone(x["input_ids"], x["position_ids"], x["media_embeddings"], x["media_rows"])
            return self.logits(hidden, x)

        return run

    def logits(self, hidden: Tensor, x: dict[str, Tensor]) -> Tensor:
        """The head over final hidden states."""
        rows = functional.embedding(x["input_ids"], self.lm_head)
        names = ("sequence_lengths", "question_spans", "question_types", "option_spans", "option_questions")
        return self.head(hidden, rows, *(x[name] for name in names))


def build(shape: str, device: str) -> Model:
    """Random BF16 weights, made on the device; transformers' and the project's backbone hold the same tensors."""
    import transformers
    from clef_export.backbone import Backbone
    from clef_export.config import parse_config
    from clef_export.head import JointSchemaHead

    from clef_trt.benchmark.models import read_shape

    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    config, head_config = read_shape(shape)
    release = parse_config(config, head_config)
    text = dict(config["text_config"])
    asked = transformers.AutoConfig.for_model(text.pop("model_type"), **text)
    with torch.device(device):
        theirs = transformers.AutoModel.from_config(asked, dtype=torch.bfloat16, attn_implementation="sdpa")
        head = JointSchemaHead(release.head)
        lm_head = torch.randn(release.text.vocab_size, release.text.hidden_size, dtype=torch.bfloat16)
    with torch.device("meta"):
        ours = Backbone(release.text)
    theirs.to(device).eval()  # wherever transformers put what it made itself
    ours.load_state_dict(theirs.state_dict(), assign=True)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.endswith("in_proj_weight"):
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif name.endswith("in_proj_bias") or parameter.dim() == 0:  # the others are initialised by torch
                parameter.zero_()
    return Model(theirs, ours.eval(), head.to(torch.bfloat16).eval(), lm_head, device)


def inputs(model: Model, tokens: int, batch: int) -> dict[str, Tensor]:
    """Records of random ids on the device, questions and options at their end."""
    from clef_trt.batch import collate
    from clef_trt.types import EncodedQuestion, Encoding

    source, records = np.random.default_rng(0), []
    for _ in range(batch):
        start, asked = tokens - SPAN * QUESTIONS * (OPTIONS + 1), []
        assert start >= 0, "the questions do not fit"
        for number in range(QUESTIONS):
            first = start + SPAN * number * (OPTIONS + 1)
            spans = tuple((first + SPAN * i, first + SPAN * (i + 1)) for i in range(OPTIONS + 1))
            names = tuple(str(option) for option in range(OPTIONS))
            asked.append(EncodedQuestion(f"q{number}", "choice", spans[0], spans[1:], names))
        records.append(Encoding(source.integers(0, model.lm_head.shape[0], tokens), tuple(asked), 0))
    arrays = collate(records, [], model.lm_head.shape[1])
    return {name: torch.from_numpy(array).to(model.device) for name, array in arrays.items()}


def eager(task: Task, told: Told) -> None:
    """Eager passes of both backbones, and the time of their pieces alone."""
    names = ("transformers", "ours")
    plan(told, task.cases, names)
    for name, (tokens, batch) in itertools.product(PIECES, task.cases):
        told.plan("pieces", key(name, tokens, batch), piece=name, tokens=tokens, batch=batch)
    model = prepared(task, told)
    systems = {"transformers": model.transformers(model.theirs), "ours": model.own(model.ours)}
    for tokens, batch in task.cases:
        medians = take_turns(model, systems, tokens, batch, told)
        if told.left_s() > 2:
            pieces(model, tokens, batch, medians, told)


def prepared(task: Task, told: Told) -> Model:
    """The model, after telling what it is."""
    start = time.perf_counter()
    model = build(task.shape, task.device)
    linears = [m for m in model.ours.modules() if isinstance(m, nn.Linear)]
    parameters = sum(p.numel() for p in (*model.ours.parameters(), *model.head.parameters())) + model.lm_head.numel()
    told.write(
        "shape",
        {"name": task.shape, "parameters": parameters, "layers": len(model.ours.layers)}
        | {"linear_parameters": sum(m.in_features * m.out_features for m in linears), "dtype": "bfloat16"},
    )
    import transformers

    told.write(
        "in_effect",
        {"transformers": transformers.__version__, "attention": model.theirs.config._attn_implementation}
        | {"fused packages": {name: importlib.util.find_spec(name) is not None for name in ("fla", "causal_conv1d")}}
        | {"questions × options of a record": f"{QUESTIONS} × {OPTIONS}"},
    )
    tell(f"{task.part}: {parameters:,} parameters after {time.perf_counter() - start:.1f} s")
    return model


def plan(told: Told, cases: list[tuple[int, int]], names: tuple[str, ...]) -> None:
    """Tell the passes that will come."""
    for tokens, batch in cases:
        for name in names:
            told.plan("rows", key(name, tokens, batch), system=name, tokens=tokens, batch=batch)


def key(name: str, tokens: int, batch: int) -> str:
    """What a row is called where it has no figures."""
    return f"{name}, {batch} × {tokens} tokens"


def take_turns(
    model: Model, systems: dict[str, System], tokens: int, batch: int, told: Told, known: str = "transformers"
) -> dict[str, float]:
    """Rows of one case, its systems interleaved; returns median seconds. Ratios and agreement are with `known`."""
    from clef_trt.benchmark.spread import ratio

    clock, firsts, memory, logits = Clock(model.device), {}, {}, {}
    expected = sum(s * MARGIN * tokens * batch / n for name, (n, s) in model.last.items() if name in systems)
    if told.left_s() < (1 + LEAST_TURNS) * expected:
        why = f"not begun: a turn would take about {expected:.1f} s, and {told.left_s():.0f} s were left"
        why = why if told.left_s() > 0 else "not begun: its time was over"
        for name in systems:
            told.row("rows", key(name, tokens, batch), None, why, system=name, tokens=tokens, batch=batch)
        return {}
    x, taken = inputs(model, tokens, batch), {name: [] for name in systems}
    with torch.inference_mode():
        for name, run in systems.items():
            try:
                if model.device == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                logits[name] = run(x).float().cpu().numpy()
                firsts[name] = time.perf_counter() - start
                run(x)
                memory[name] = torch.cuda.max_memory_allocated() // 10**6 if model.device == "cuda" else None
            except Exception as fault:
                del taken[name]
                told.row("rows", key(name, tokens, batch), None, reason(fault), system=name, tokens=tokens, batch=batch)
        begun = time.monotonic()
        for turn in range(TURNS):
            if turn >= LEAST_TURNS and (time.monotonic() - begun > CASE_S or told.left_s() < 0):
                break
            for name in taken:
                taken[name].append(clock.seconds(lambda run=systems[name]: run(x)))
    for name, seconds in taken.items():
        found = figures(seconds)
        model.last[name] = (tokens * batch, found["median_ms"] / 1e3)
        compared = known in taken and name != known
        told.row(
            "rows", key(name, tokens, batch), found, system=name, tokens=tokens, batch=batch,
            tokens_per_s=round(1e3 * tokens * batch / found["median_ms"]), first_s=round(firsts[name], 3),
            times_faster=ratio(taken[known], seconds) if compared else None, memory_mb=memory[name],
            same_top_option=same_top(logits[known], logits[name]) if compared else None,
            max_logit_difference=difference(logits[known], logits[name]) if compared else None,
        )  # fmt: skip
        tell(f"{key(name, tokens, batch)}: {found['median_ms']:.2f} ms")
    return {name: float(np.median(seconds)) for name, seconds in taken.items()}


def same_top(known: np.ndarray, other: np.ndarray) -> float:
    """Share of questions with the same most probable option; NaN never is."""
    tops = [np.where(np.isnan(x).any(), -i, x.reshape(-1, OPTIONS).argmax(-1)) for i, x in ((1, known), (2, other))]
    return float((tops[0] == tops[1]).mean())


def difference(known: np.ndarray, other: np.ndarray) -> float | None:
    """The largest difference of a logit; None where one is not a number."""
    value = float(np.abs(known - other).max())
    return value if math.isfinite(value) else None


def pieces(model: Model, tokens: int, batch: int, medians: dict[str, float], told: Told) -> None:
    """The delta rule of each backbone, attention and all linears alone, and their share of the passes just measured."""
    from clef_export.operators import causal_attention, gated_delta_rule
    from transformers.models.qwen3_5 import modeling_qwen3_5

    text, device = model.ours.config, model.device
    kinds = [layer.kind for layer in model.ours.layers]
    delta, full = kinds.count("linear_attention"), kinds.count("full_attention")
    like = {"device": device, "dtype": torch.bfloat16}
    q, k = (torch.randn(batch, tokens, text.linear_num_key_heads, text.linear_key_head_dim, **like) for _ in range(2))
    v = torch.randn(batch, tokens, text.linear_num_value_heads, text.linear_value_head_dim, **like)
    decay = -torch.rand(batch, tokens, text.linear_num_value_heads, device=device)
    beta = torch.rand(batch, tokens, text.linear_num_value_heads, **like)
    group = text.linear_num_value_heads // text.linear_num_key_heads
    wide = [x.repeat_interleave(group, dim=2) for x in (q, k)]  # what every version of transformers takes
    rows = torch.randn(batch, tokens, text.hidden_size, **like)
    query = torch.randn(batch, text.num_attention_heads, tokens, text.head_dim, **like)
    key_, value = (torch.randn(batch, text.num_key_value_heads, tokens, text.head_dim, **like) for _ in range(2))
    linears = [m for m in model.ours.layers.modules() if isinstance(m, nn.Linear)]
    narrow = {m.in_features: torch.randn(batch, tokens, m.in_features, **like) for m in linears}
    rule = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def all_linears() -> None:
        for module in linears:  # no output is kept: together they would be as large as the weights
            module(narrow[module.in_features])

    both, only = ("transformers", "ours"), {PIECES[0]: ("transformers",), PIECES[1]: ("ours",)}
    calls: tuple[tuple[int, Callable[[], Any]], ...] = (
        (delta, lambda: rule(*wide, v, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)),
        (delta, lambda: gated_delta_rule(q, k, v, decay, beta.float())),
        (full, lambda: causal_attention(query, key_, value)),
        (delta + full, lambda: model.ours.layers[0].mlp(rows)),
        (1, all_linears),
    )
    for name, (layers, run) in zip(PIECES, calls, strict=True):
        what = {"piece": name, "tokens": tokens, "batch": batch, "layers": layers}
        try:
            with torch.inference_mode():
                found = figures(Clock(device).repeated(run, PIECE_S, least=3, most=50))
        except Exception as fault:
            told.row("pieces", key(name, tokens, batch), None, reason(fault), **what)
            continue
        total = found["median_ms"] * layers
        shares = {
            system: round(total / 1e3 / medians[system], 4) for system in only.get(name, both) if system in medians
        }
        told.row("pieces", key(name, tokens, batch), found, total_ms=float(f"{total:.5g}"), shares=shares, **what)
