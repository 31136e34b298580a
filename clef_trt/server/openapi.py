"""The description of the routes, with the limits that are in effect."""

from __future__ import annotations

from .. import __version__
from .schemas import Schema, ref, schemas
from .settings import Settings

VENDOR_PREFIX = "/client/v4/"
VENDOR_ROUTE = VENDOR_PREFIX + "accounts/{account}/ai/run/@cf/cloudflare/{model}"


def description(settings: Settings) -> Schema:
    """An OpenAPI 3.1 document."""
    # Of a batch any item is taken: of one that is no request the error stands in its place.
    each = {"anyOf": [ref("Request"), {}]}
    one, many = (
        ref("Request"),
        {"type": "array", "items": each, "minItems": 1, "maxItems": settings.batch_items},
    )
    response = ref("Response")
    item = {"oneOf": [response, ref("ItemError")]}
    vendor_request = ref("VendorRequest")
    multipart = {"schema": ref("MultipartRequest"), "encoding": {"request": {"contentType": "application/json"}}}
    paths = {
        "/v1/systemone": {
            "post": _deciding(
                "Decide one request", {"application/json": {"schema": one}, "multipart/form-data": multipart}, response
            )
        },
        "/v1/systemone/batch": {
            "post": _deciding(
                "Decide several; an error of one leaves the others their answers",
                {"application/json": {"schema": many}},
                {"type": "array", "items": item},
            )
        },
        VENDOR_ROUTE: {
            "post": _deciding(
                "Decide one request as Workers AI does, with its envelope",
                {"application/json": {"schema": vendor_request}},
                ref("Envelope"),
                vendor=True,
            )
        },
        "/v1/models": {"get": _asked("The models that requests may name", ref("Models"), keyed=True)},
        "/health": {"get": _asked("Whether the process lives", {"type": "object"}, waits=False)},
        "/ready": {"get": _asked("Whether requests are taken: after loading and warm-up", {"type": "object"})},
        "/metrics": {"get": _text("Numbers for Prometheus", "text/plain")},
        "/openapi.json": {"get": _asked("This document", {"type": "object"}, waits=False)},
    }
    if not settings.api_keys:
        security: list[Schema] = []
    else:
        security = [{"key": []}]
        for path, methods in paths.items():
            if path.startswith(("/v1/", VENDOR_PREFIX)):
                for method in methods.values():
                    method["security"] = security
    return {
        "openapi": "3.1.0",
        "info": {"title": "clef-trt", "version": __version__, "description": _told(settings)},
        "paths": paths,
        "components": {
            "schemas": schemas(settings),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _told(settings: Settings) -> str:
    return (
        f"Decisions of a Clef model. Records have at most {settings.max_length:,} tokens; of a longer state the end is "
        f"cut ({settings.truncation}). Bodies have at most {settings.body_bytes:,} bytes as sent and "
        f"{settings.decoded_bytes:,} decompressed; Content-Encoding may be zstd or gzip. Pictures have at most "
        f"{settings.picture_bytes:,} bytes and {settings.picture_pixels:,} pixels each, {settings.total_bytes:,} bytes "
        "in all, and come within the request: URLs are not opened. JSON is read strictly: no duplicate keys, at most "
        "128 levels, numbers of at most 4,300 digits."
    )


def _deciding(summary: str, content: Schema, answer: Schema, vendor: bool = False) -> Schema:
    refusal = ref("Envelope" if vendor else "Refusal")
    statuses = {
        "400": "not JSON, or not decodable",
        "401": "the key is missing or wrong",
        "404": "the model is not known",
        "408": "the body did not arrive in time",
        "413": "the body, or the record, is too large",
        "415": "the type or encoding is not taken",
        "422": "what is wrong in the request, all of it",
        "429": "the queue is full; see Retry-After",
        "503": "loading, or shutting down; see Retry-After",
    }
    responses: Schema = {code: _json(told, refusal) for code, told in statuses.items()}
    for code in ("429", "503"):
        responses[code]["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "required": True}}
    responses["500"] = _json("a fault of the server", refusal) if vendor else _plain("a fault of the server")
    responses["200"] = _json("answers", answer)
    result: Schema = {
        "summary": summary,
        "requestBody": {"required": True, "content": content},
        "responses": dict(sorted(responses.items())),
    }
    if vendor:
        result["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in ("account", "model")
        ]
    return result


def _asked(summary: str, answer: Schema, waits: bool = True, keyed: bool = False) -> Schema:
    responses: Schema = {"200": _json("ok", answer)}
    if keyed:
        responses["401"] = _json("the key is missing or wrong", ref("Refusal"))
    if waits:
        responses["503"] = _json("loading, or shutting down", ref("Refusal"))
    return {"summary": summary, "responses": responses}


def _text(summary: str, content_type: str) -> Schema:
    return {"summary": summary, "responses": {"200": _plain("ok", content_type)}}


def _plain(told: str, content_type: str = "text/plain") -> Schema:
    return {"description": told, "content": {content_type: {"schema": {"type": "string"}}}}


def _json(told: str, schema: Schema) -> Schema:
    return {"description": told, "content": {"application/json": {"schema": schema}}}
