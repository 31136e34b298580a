"""The schemas of requests and answers, with the limits that are in effect."""

from __future__ import annotations

from typing import Any

from ..picture import CONTENT_TYPES
from .assets import FORMATS
from .settings import Settings

Schema = dict[str, Any]

TEXT_OR_JSON: Schema = {"type": ["string", "object", "array", "null"]}
PROBABILITY: Schema = {"type": "number", "minimum": 0, "maximum": 1}


def schemas(settings: Settings) -> Schema:
    """The components of the description, by name."""
    question = {"instructions": TEXT_OR_JSON}
    request: Schema = {
        "model": {
            "type": "string",
            "minLength": 1,
            "examples": ["clef-flash"],
            "description": "404 where it is unknown",
        },
        "state": {"description": "what is decided about: any JSON"},
        "questions": {
            "type": "object",
            "minProperties": 1,
            "maxProperties": settings.questions,
            "additionalProperties": ref("Question"),
            "description": "an id without characters needs instructions",
        },
        "images": {"type": ["array", "null"], "maxItems": settings.images, "items": ref("Image")},
        "videos": {
            "type": ["array", "null"],
            "maxItems": settings.videos,
            "items": {"type": "array", "minItems": 1, "maxItems": settings.frames, "items": ref("Image")},
        },
        "assets": {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": ref("Asset"),
            "description": "images by the placeholder that names them in texts",
        },
        "stream": {"const": False},
        "temperature": {"description": "ignored"},
        "id": {"description": "ignored"},
    }
    vendor = {key: value for key, value in request.items() if key != "assets"}
    return {
        "Request": _object(request, ["model", "state", "questions"]),
        "VendorRequest": _object(vendor, ["state", "questions"]),
        "MultipartRequest": {
            "type": "object",
            "required": ["request"],
            "properties": {"request": ref("Request")},
            "additionalProperties": {"type": "string", "format": "binary"},
        },
        "Question": {"oneOf": [ref("Noul"), ref("Choice"), ref("Score")]},
        "Noul": _object(
            {
                "type": {"const": "noul"},
                **question,
                "criteria": {
                    "type": ["object", "null"],
                    "properties": {"true": {}, "false": {}},
                    "additionalProperties": False,
                },
            },
            ["type"],
        ),
        "Choice": _object(
            {
                "type": {"const": "choice"},
                **question,
                "criteria": {
                    "type": "object",
                    "minProperties": 1,
                    "maxProperties": settings.options,
                    "additionalProperties": True,
                },
            },
            ["type", "criteria"],
        ),
        "Score": _object(
            {
                "type": {"const": "score"},
                **question,
                "criteria": {"type": "array", "minItems": 1, "maxItems": settings.levels, "items": {}},
            },
            ["type", "criteria"],
        ),
        "Image": {
            "oneOf": [
                {
                    "type": "string",
                    "pattern": r"^[Dd][Aa][Tt][Aa]:image/(png|jpeg|webp);base64,",
                    "description": "a data URL",
                },
                _object(
                    {"content_type": {"enum": list(CONTENT_TYPES)}, "base64": {"type": "string", "minLength": 1}},
                    ["content_type", "base64"],
                ),
            ]
        },
        "Asset": _object(
            {
                "type": {"enum": ["image", None]},
                "format": {"enum": [*FORMATS, None]},
                "data_base64": {"type": ["string", "null"]},
                "part": {"type": ["string", "null"]},
            },
            [],
        ),
        "Response": _object(
            {
                "model": {"type": "string"},
                "answers": {"type": "object", "additionalProperties": ref("Answer")},
                "usage": _object(
                    {
                        name: {"type": "integer", "minimum": 0}
                        for name in ("input_tokens", "output_tokens", "truncated_state_tokens")
                    },
                    ["input_tokens", "output_tokens", "truncated_state_tokens"],
                ),
            },
            ["model", "answers", "usage"],
        ),
        "Answer": {
            "oneOf": [
                _object({"type": {"const": "noul"}, "noul": PROBABILITY}, ["type", "noul"]),
                _object(
                    {"type": {"const": "choice"}, "choice": {"type": "string"}, **_sure()},
                    ["type", "choice", "confidence", "probabilities"],
                ),
                _object(
                    {
                        "type": {"const": "score"},
                        "score": {"type": "number", "minimum": 0, "maximum": settings.levels - 1},
                        "legend": {"type": "object", "additionalProperties": {"type": ["string", "object", "array"]}},
                        **_sure(),
                    },
                    ["type", "score", "confidence", "legend", "probabilities"],
                ),
            ]
        },
        "ItemError": _object(
            {"error": _object({"status": {"type": "integer"}, "detail": _detail()}, ["status", "detail"])}, ["error"]
        ),
        "Refusal": _object({"detail": _detail()}, ["detail"]),
        "Envelope": _object(
            {
                "result": {"oneOf": [ref("Response"), {"type": "null"}]},
                "success": {"type": "boolean"},
                "errors": {
                    "type": "array",
                    "items": _object({"code": {"type": "integer"}, "message": {"type": "string"}}, ["code", "message"]),
                },
                "messages": {"type": "array"},
            },
            ["result", "success", "errors", "messages"],
        ),
        "Models": _object(
            {
                "models": {
                    "type": "array",
                    "items": _object(
                        {name: {"type": "string"} for name in ("name", "description", "release_date")},
                        ["name", "description", "release_date"],
                    ),
                }
            },
            ["models"],
        ),
    }


def _object(properties: Schema, required: list[str]) -> Schema:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _sure() -> Schema:
    return {"confidence": PROBABILITY, "probabilities": {"type": "object", "additionalProperties": PROBABILITY}}


def _detail() -> Schema:
    fault = _object(
        {
            "loc": {"type": "array", "items": {"type": ["string", "integer"]}},
            "msg": {"type": "string"},
            "type": {"type": "string"},
        },
        ["loc", "msg", "type"],
    )
    return {"oneOf": [{"type": "string"}, {"type": "array", "items": fault}]}


def ref(name: str) -> Schema:
    """A component."""
    return {"$ref": f"#/components/schemas/{name}"}
