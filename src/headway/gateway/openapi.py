"""The gateway's own paths as an OpenAPI 3.1 document, served at ``/openapi.json``.

The document is what tests and clients hold the paths to, so it says no more than they keep. The routed endpoints are
OpenAI's and described there. It tells nothing of a pool: whoever reads it learns no model's name.
"""

from __future__ import annotations

from typing import Final

import msgspec

import headway
from headway.gateway.feedback import Feedback

Json = dict[str, object]

_ERROR: Final[Json] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MODEL: Final[Json] = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
    },
}
_DECISION: Final[Json] = {
    "type": "object",
    "required": ["id", "request_id", "policy", "candidates", "chosen", "reason", "slo", "outcome"],
    "properties": {
        "id": {"type": "string"},
        "request_id": {"type": "string"},
        "policy": {"type": "string"},
        "chosen": {"type": ["string", "null"]},
        "reason": {"type": "string"},
        "slo": {"enum": ["met-expected", "infeasible", "none"]},
        "candidates": {
            "type": "array",
            "items": {"type": "object", "required": ["instance_id", "model", "verdict"]},
        },
        "outcome": {"type": ["object", "null"]},
    },
}
_MESSAGE: Final[Json] = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "user", "assistant"]},
        "content": {"type": "string"},
    },
}
_ROUTE_BODY: Final[Json] = {
    "type": "object",
    "required": ["model", "messages"],
    "properties": {
        "model": {"type": "string", "minLength": 1},
        "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
        "max_tokens": {"type": "integer", "minimum": 1},
        "priority": {"type": "integer", "minimum": -(2**31) + 1, "maximum": 2**31 - 1},
        "slo": {
            "type": "object",
            "properties": {
                "ttft_ms": {"type": "number", "exclusiveMinimum": 0},
                "tpot_ms": {"type": "number", "exclusiveMinimum": 0},
                "quality_min": {"type": "number", "minimum": 0, "maximum": 1},
                "max_cost_usd": {"type": "number", "minimum": 0},
            },
        },
    },
}
_DRAIN_BODY: Final[Json] = {
    "type": "object",
    "properties": {"draining": {"type": "boolean"}},
    "additionalProperties": False,
}


def document() -> Json:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headway",
            "version": headway.__version__,
            "description": "The gateway's own paths. /v1/chat/completions, /v1/completions, /v1/embeddings and "
            "/v1/responses are routed to the pool and are as OpenAI describes them.",
        },
        "paths": {
            "/v1/models": {"get": _read("What clients may send as model", _listing(_MODEL, "data"))},
            "/v1/models/{name}": {"get": _read("One of them", _MODEL, "name")},
            "/v1/route": {"post": _write("Decide and send nothing", _DECISION, _ROUTE_BODY, 404)},
            "/v1/feedback": {"post": _write("What a user says of an answer", _stored(), _feedback_body(), 404, 409)},
            "/decisions/{id}": {"get": _read("A recent decision, or a request that still waits", _DECISION, "id")},
            "/queue": {"get": _read("Who waits in the central queue, and why", {"type": "object"})},
            "/instances": {"get": _read("Every instance as it stands", _listing({"type": "object"}, "instances"))},
            "/instances/{id}/drain": {
                "post": _write("Give an instance nothing new", {"type": "object"}, _DRAIN_BODY, 404, named="id")
            },
            "/metrics": {"get": _read("Metrics in Prometheus text format", None)},
            "/health": {"get": _read("The process lives", {"type": "object"})},
            "/livez": {"get": _read("The process lives", {"type": "object"})},
            "/readyz": {"get": _readyz()},
            "/version": {"get": _read("What runs here", {"type": "object"})},
            "/openapi.json": {"get": _read("This document", {"type": "object"})},
        },
    }


def _answers(schema: Json | None, *refusals: int) -> Json:
    """The 200 of a path, text where ``schema`` is None, and its refusals in OpenAI's shape."""
    if schema is None:
        content: Json = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": schema}}
    found: Json = {"200": {"description": "done", "content": content}}
    for status in (401, 403, *refusals):
        found[str(status)] = {"description": "refused", "content": {"application/json": {"schema": _ERROR}}}
    return found


def _read(summary: str, schema: Json | None, named: str | None = None) -> Json:
    operation: Json = {"summary": summary, "responses": _answers(schema, *((404,) if named else ()))}
    return operation if named is None else {**operation, "parameters": [_path_parameter(named)]}


def _write(summary: str, schema: Json, body: Json, *refusals: int, named: str | None = None) -> Json:
    operation: Json = {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": _answers(schema, 400, 413, *refusals),
    }
    return operation if named is None else {**operation, "parameters": [_path_parameter(named)]}


def _readyz() -> Json:
    operation = _read("Whether to send traffic here", {"type": "object"})
    body: Json = {"application/json": {"schema": {"type": "object", "required": ["ready", "reason"]}}}
    operation["responses"] = {
        "200": {"description": "ready", "content": body},
        "503": {"description": "not ready, or draining", "content": body},
    }
    return operation


def _listing(item: Json, field: str) -> Json:
    return {"type": "object", "required": [field], "properties": {field: {"type": "array", "items": item}}}


def _stored() -> Json:
    names = ("stored", "request_id", "decision_id")
    return {"type": "object", "required": list(names)}


def _feedback_body() -> Json:
    """Of the struct that is decoded; that one id and one verdict are needed is said beside it."""
    (_, schemas) = msgspec.json.schema_components([Feedback])
    schema = dict(schemas["Feedback"])
    one_id = {"oneOf": [_not_null(name) for name in ("id", "request_id", "decision_id")]}
    one_verdict = {"oneOf": [_not_null(name) for name in ("quality", "thumbs")]}
    return {**schema, "allOf": [one_id, one_verdict]}


def _not_null(field: str) -> Json:
    return {"required": [field], "properties": {field: {"not": {"type": "null"}}}}


def _path_parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
