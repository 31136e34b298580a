"""The published reference beside ours, on requests that are not stored anywhere."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clef_export.pipeline import export
from clef_export.random_release import byte_tokenizer, small_config, write_release
from clef_export.reference import Reference
from conftest import RELEASES

from clef_trt import Clef

WORDS = ["refund", "später", "退款", "the", "not", "é😀", "2026", "{json}", "\n", "\t", "مرحبا", "naïve", "OPTION 1:"]


def random_request(rng: random.Random) -> dict[str, Any]:
    """A request of any state and one to six questions of any type."""

    def text(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    def value(depth: int = 0) -> Any:
        if depth < 2 and rng.random() < 0.5:
            inner = [value(depth + 1) for _ in range(rng.randint(0, 4))]
            return inner if rng.random() < 0.5 else {f"{text(2)} {i}": item for i, item in enumerate(inner)}
        return rng.choice([text(60), rng.randint(-9, 10**6), rng.random(), None, True, ""])

    questions: dict[str, Any] = {}
    for number in range(rng.randint(1, 6)):
        question: dict[str, Any] = {"type": rng.choice(["noul", "choice", "score"])}
        if rng.random() < 0.8:
            question["instructions"] = rng.choice([text(12), {"ask": text(4)}, [text(2)], None])
        if question["type"] == "choice":
            question["criteria"] = {f"{text(2)} {i}": rng.choice([None, text(6)]) for i in range(rng.randint(1, 20))}
        elif question["type"] == "score":
            question["criteria"] = [text(5) for _ in range(rng.randint(1, 10))]
        elif rng.random() < 0.5:
            question["criteria"] = {"true": text(4), "false": rng.choice([None, text(4)])}
        questions[f"q{number} {text(1)}"] = question
    return {"model": "clef-flash", "state": value(), "questions": questions}


def assert_agreement(clef: Clef, reference: Reference, seed: int, count: int = 20) -> None:
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(count)]
    found = clef.logits(requests)
    for request, logits in zip(requests, found, strict=True):
        assert clef.encode(request).input_ids.tolist() == list(reference.encode(request).input_ids)
        (expected,) = reference.logits([reference.encode(request)])
        for ours, theirs in zip(logits, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.usefixtures("shared_passes")
def test_twenty_random_requests(release: str, bundles: dict[str, Path], references: dict[str, Any]) -> None:
    with Clef.load(bundles[release]) as clef:
        assert_agreement(clef, references[release], seed=RELEASES.index(release))


@pytest.mark.usefixtures("shared_passes")
def test_a_release_of_a_third_shape(tmp_path: Path) -> None:
    """Sharded, tied embeddings, biased projections, another kernel, other sections, the last layer a delta layer."""
    config, head = copy.deepcopy(small_config())
    config["tie_word_embeddings"] = True
    config["text_config"] |= {
        "attention_bias": True, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3, "hidden_size": 80,
        "intermediate_size": 112, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32,
        "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 24, "linear_value_head_dim": 40,
        "num_hidden_layers": 3, "layer_types": ["full_attention", "full_attention", "linear_attention"],
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    config["text_config"]["rope_parameters"] |= {"mrope_section": [4, 3, 1], "partial_rotary_factor": 0.5}
    config["vision_config"]["out_hidden_size"] = head["hidden_size"] = 80
    head |= {"width": 40, "heads": 5, "routing_layers": 3, "layers": 1}
    write_release(tmp_path / "release", config, head, byte_tokenizer(), seed=3, shard_bytes=100_000)
    assert len(list((tmp_path / "release").glob("model-*.safetensors"))) > 2
    export(tmp_path / "release", tmp_path / "bundle")
    with Clef.load(tmp_path / "bundle") as clef:
        assert_agreement(clef, Reference(tmp_path / "release"), seed=9)
