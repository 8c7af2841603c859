"""The description of the interface, OpenAPI 3.1: requests from their structs, answers from their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tonnage.ui.examples import EXAMPLES
from tonnage.ui.messages import ERROR_SCHEMA, HTML, JSON
from tonnage.ui.routes import API, Answered
from tonnage.version import __version__

_REF = "#/components/schemas/{name}"
_ERROR = "Refusal"
_REFUSED = {
    400: "The body is no strict JSON, or does not name one checkpoint.",
    403: "The host is not this server, or the request comes from a page of another site.",
    404: "The checkpoint is not among those that are served.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    422: "The question cannot be answered; every problem is named by its field or option.",
    500: "A bug; the server says more where it runs.",
    503: "Too many wait, or what worked on it was killed; try again after Retry-After seconds.",
    504: "No answer in time; it was cut off.",
}
_OF_POSTS = (400, 404, 408, 413, 415, 422)
_NULLABLE_TEXT = {"type": ["string", "null"]}
_REFUSAL = {
    "type": "object",
    "required": ["schema", "problems", "more"],
    "properties": {
        "schema": {"const": ERROR_SCHEMA},
        "problems": {
            "type": "array",
            "maxItems": 40,
            "items": {
                "type": "object",
                "required": ["where", "what", "tensor", "expected", "found"],
                "properties": {
                    "where": {"type": "string", "description": "The option, field or file it is in."},
                    "what": {"type": "string", "description": "What is wrong."},
                    "tensor": _NULLABLE_TEXT,
                    "expected": _NULLABLE_TEXT,
                    "found": _NULLABLE_TEXT,
                },
            },
        },
        "more": {"type": "integer", "minimum": 0, "description": "Problems that are not listed."},
    },
}
DOCUMENTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "plan": (
        "tonnage.plan/1",
        (
            "checkpoint", "engine", "estimator", "topology", "profile", "supply_bytes", "supply", "ranks",
            "binding_rank", "fits", "reasons", "suggestions", "pessimism", "notes", "remarks", "cache", "numerics",
        ),
    ),
    "fit": ("tonnage.fit/1", ("checkpoint", "engine", "supply_bytes", "ways", "best")),
    "regions": (
        "tonnage.regions/1",
        (
            "checkpoint", "engine", "topology", "supply_bytes", "room_bytes", "contexts", "concurrencies", "cells",
        ),
    ),
    "flags": ("tonnage.flags/1", ("engine", "words", "shell", "files", "notes")),
    "observe": ("tonnage.observe/1", ("log", "starts", "figures", "ranks", "plan", "comparisons", "exceeds", "notes")),
    "checkpoints": ("tonnage.checkpoints/1", ("directories", "hub", "checkpoints", "complete")),
    "gpus": ("tonnage.gpus/1", ("gpus",)),
    "models": ("tonnage.models/1", ("families",)),
}  # fmt: skip
"""The schema of every document, and the keys that are always in it."""


def openapi_document() -> dict[str, Any]:
    """Return the description."""
    bodies = [route.body for route in API if route.body is not None]
    _, components = msgspec.json.schema_components(bodies, ref_template=_REF)
    components = {name: _without_attributes(schema) for name, schema in components.items()}
    components["Address"]["oneOf"] = [{"required": [name]} for name in ("path", "hub", "config")]
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tonnage",
            "version": __version__,
            "summary": "To the byte, what every GPU will hold of a language model.",
            "description": "Answers are the documents that the command line prints with --json; bytes are integers.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": {route.path: {route.method.lower(): _operation(route)} for route in API},
        "components": {"schemas": {**components, _ERROR: _REFUSAL}},
    }


def _operation(route: Answered) -> dict[str, Any]:
    refused = (403, *(_OF_POSTS if route.method == "POST" else ()), 500, 503, 504)
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.title,
        "responses": {"200": _answered(route), **{str(status): _refused(status) for status in sorted(refused)}},
    }
    if route.body is not None:
        example = EXAMPLES[route.name]
        media = {"schema": {"$ref": _REF.format(name=route.body.__name__)}, "examples": {"small": {"value": example}}}
        operation["requestBody"] = {"required": True, "content": {JSON: media}}
    return operation


def _answered(route: Answered) -> dict[str, Any]:
    if route.name not in DOCUMENTS:
        return {"description": "One file, to be saved.", "content": {HTML.partition(";")[0]: {}}}
    name, keys = DOCUMENTS[route.name]
    properties = {"schema": {"const": name}, **{key: {} for key in keys}}
    schema = {"type": "object", "required": ["schema", *keys], "properties": properties}
    return {"description": f"A document {name}.", "content": {JSON: {"schema": schema}}}


def _refused(status: int) -> dict[str, Any]:
    refusal: dict[str, Any] = {
        "description": _REFUSED[status],
        "content": {JSON: {"schema": {"$ref": _REF.format(name=_ERROR)}}},
    }
    if status == 503:
        refusal["headers"] = {"Retry-After": {"schema": {"type": "integer"}}}
    return refusal


def _without_attributes(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose description is that of its struct, its attributes as those of its properties."""
    text, _, attributes = schema.get("description", "").partition("\n\nAttributes:\n")
    described = dict(schema, description=" ".join(text.split()))
    for line in attributes.splitlines():
        name, _, says = line.strip().partition(": ")
        if name in described["properties"]:
            described["properties"][name] = {"description": says, **described["properties"][name]}
    return described
