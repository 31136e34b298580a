"""Validation: what is accepted, and that every fault is named with its place."""

from __future__ import annotations

from typing import Any

import pytest

from clef_trt import Limits, RequestError
from clef_trt.request import parse_request

NOUL = {"type": "noul", "instructions": "Open?"}


def body(**questions: Any) -> dict[str, Any]:
    return {"model": "clef-flash", "state": "x", "questions": questions or {"q": NOUL}}


def faults(request: Any) -> dict[str, str]:
    with pytest.raises(RequestError) as error:
        parse_request(request)
    return {".".join(map(str, fault.loc)): fault.message for fault in error.value.faults}


def test_options_come_in_the_order_the_model_reads_them() -> None:
    questions = {
        "n": {"type": "noul", "criteria": {"false": "shut", "true": None}},
        "c": {
            "type": "choice",
            "criteria": {"zeta": None, "Alpha": "", "10": None, "9": None, "\uffee": None, "😀": None},
        },
        "s": {"type": "score", "criteria": ["low", {"a": 1}, None]},
    }
    parsed = parse_request(body(**questions)).questions
    assert parsed[0].options == (("true", None), ("false", "shut"))
    assert [key for key, _ in parsed[1].options] == ["10", "9", "Alpha", "zeta", "\uffee", "😀"]
    assert parsed[2].options == (("0", "low"), ("1", {"a": 1}), ("2", None))


def test_ignored_keys_change_nothing() -> None:
    assert parse_request(body() | {"temperature": 0.3, "stream": False, "id": "r-1"}) == parse_request(body())
    assert parse_request(body() | {"images": [], "videos": None}) == parse_request(body())


def test_every_fault_is_reported_at_once() -> None:
    found = faults(
        {
            "model": "",
            "questions": {
                "a": {"type": "rank"},
                "b": {"type": "choice", "criteria": {}},
                "c": {"type": "score", "criteria": "high"},
                "d": {"type": "noul", "criteria": ["yes", "no"], "instructions": 3},
                "e": {"type": "noul", "criteria": {"maybe": "?"}, "weight": 2},
                "f": "open?",
                "": {"type": "noul", "instructions": None},
            },
            "stream": True,
            "media_kwargs": {"do_resize": False},
        }
    )
    assert found.keys() == {
        "model", "state", "stream", "media_kwargs", "questions.a.type", "questions.b.criteria", "questions.c.criteria",
        "questions.d.criteria", "questions.d.instructions", "questions.e.criteria.maybe", "questions.e.weight",
        "questions.f", "questions.",
    }  # fmt: skip
    assert found["questions.a.type"] == "is 'rank'; expected one of noul, choice, score"
    assert found["questions.c.criteria"].startswith("is 'high'; expected an array")
    assert found["media_kwargs"] == "is not known here; expected model, state, questions, images, videos"


@pytest.mark.parametrize("value", [None, [], "text", 3, {}])
def test_questions_must_be_an_object_with_something_in_it(value: Any) -> None:
    assert "questions" in faults({"model": "m", "state": "", "questions": value})


@pytest.mark.parametrize("value", [None, "text", 4, [body()]])
def test_a_request_must_be_an_object(value: Any) -> None:
    with pytest.raises(RequestError, match="expected an object with model, state and questions"):
        parse_request(value)


@pytest.mark.parametrize("model", [None, "", 5, ["clef"]])
def test_model_must_be_a_name(model: Any) -> None:
    assert "model" in faults(body() | {"model": model})


def test_counts_up_to_the_limits_and_no_further() -> None:
    choice = {"type": "choice", "criteria": {str(i): None for i in range(255)}}
    score = {"type": "score", "criteria": ["x"] * 10}
    many = {f"q{i}": NOUL for i in range(64)}
    assert len(parse_request(body(**many)).questions) == 64
    parse_request(body(c=choice, s=score))
    found = faults(body(c={"type": "choice", "criteria": {str(i): None for i in range(256)}}))
    assert found == {"questions.c.criteria": "has 256 options; at most 255 are allowed"}
    assert "questions.s.criteria" in faults(body(s={"type": "score", "criteria": ["x"] * 11}))
    assert faults(body(**many, one_more=NOUL)) == {"questions": "has 65 questions; at most 64 are allowed"}
    with pytest.raises(RequestError, match="at most 1 are allowed"):
        parse_request(body(a=NOUL, b=NOUL), limits=Limits(questions=1))


def test_keys_that_are_no_strings_are_refused() -> None:
    assert faults({"model": "m", "state": "", "questions": {1: NOUL}}) == {
        "questions": "is a number; expected strings as the questions' ids"
    }
    assert "questions.c.criteria" in faults(body(c={"type": "choice", "criteria": {1: None, "1": None}}))
    assert "a number" in faults(body() | {10**5000: 1})


def test_values_of_other_kinds_are_refused() -> None:
    import numpy as np

    assert "questions.q.type" in faults(body(q={"type": np.array(["noul", "x"])}))
    assert "model" in faults(body() | {"model": "\ud800"})


def test_very_many_faults_are_all_kept_and_not_all_shown() -> None:
    with pytest.raises(RequestError) as error:
        parse_request(body() | {f"key {i}": 1 for i in range(20_000)})
    assert len(error.value.faults) == 20_000
    assert str(error.value).endswith("… and 19980 more")


def test_pictures_are_refused_without_a_reader() -> None:
    assert "images" in faults(body() | {"images": ["data:image/png;base64,AAAA"]})


def test_error_texts_hold_no_control_characters_and_nothing_long() -> None:
    nasty = "\x1b[31m\x00" + "a" * 5000
    with pytest.raises(RequestError) as error:
        parse_request(body(q={"type": nasty}) | {"stream": nasty, nasty: 1})
    text = str(error.value)
    assert "\x1b" not in text
    assert "\x00" not in text
    assert len(text) < 1000
