"""`/openapi.json`: the routes, made from the records of their requests and answers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, get_type_hints

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from ... import __version__
from ...daemon.api.events import NEVER_SENT
from ...daemon.api.records import Record
from . import chat_completions, completions, messages, responses, sessions
from .fields import Body

_REF = "#/components/schemas/{model}"
_JSON = "application/json"


class _Schemas(GenerateJsonSchema):
    # The defaults of a sampling are numbers of classes of their own, and are left out of its schema.
    ignored_warning_kinds = {"non-serializable-default"}  # noqa: RUF012 - as pydantic declares it


@cache
def document() -> Mapping[str, Any]:
    """The description of all routes, for OpenAPI 3.1. Made once, in a second or less."""
    schemas: dict[str, Any] = {}
    paths: dict[str, dict[str, Any]] = {}
    for path, method, operation in [*_plain(), *_of_dialects(schemas), *_of_sessions(schemas)]:
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Torpor", "version": __version__, "description": "A memory for local agents that survives."},
        "security": [{"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _plain() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, what in {
        "/healthz": "Whether the daemon serves.",
        "/metrics": "Figures for Prometheus.",
        "/v1/models": "The served models.",
    }.items():
        yield path, "get", _operation(what, {"type": "string"} if path == "/metrics" else {"type": "object"}, [])
    named = [_parameter("model", "path", {"type": "string"})]
    yield "/v1/models/{model}", "get", _operation("One served model.", {"type": "object"}, named)


def _of_dialects(schemas: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    bodies: Mapping[str, type[Body]] = {
        chat_completions.PATH: chat_completions.ChatBody,
        completions.PATH: completions.CompletionBody,
        responses.PATH: responses.ResponsesBody,
        messages.PATH: messages.MessagesBody,
        messages.COUNT_PATH: messages.DialogueBody,
    }
    for path, body in bodies.items():
        operation = _operation(inspect.cleandoc(body.__doc__ or ""), {"type": "object"}, [])
        schema = _schema_of(body, "validation", schemas)
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
        yield path, "post", operation


def _of_sessions(schemas: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for each in sessions.ROUTES:
        taken = _fields_of(each.verb.request, schemas)
        named = [_parameter("session", "path", taken.pop("session")[0])] if each.names_session else []
        if each.method == "GET":
            named += [_parameter(name, "query", schema) for name, (schema, _) in taken.items()]
            taken = {}
        said = inspect.cleandoc(each.verb.request.__doc__ or "").split("\n\n")[0]
        operation = _operation(said, _schema_of(each.verb.result, "serialization", schemas), named)
        if each.method == "POST":
            body = {
                "type": "object",
                "properties": {name: schema for name, (schema, _) in taken.items()},
                "required": [name for name, (_, needed) in taken.items() if needed],
                "additionalProperties": False,
            }
            operation["requestBody"] = {"required": bool(body["required"]), "content": {_JSON: {"schema": body}}}
        yield each.path, each.method, operation


def _fields_of(record: type[Record], schemas: dict[str, Any]) -> dict[str, tuple[dict[str, Any], bool]]:
    """The schema of each field of a request that crosses the wire, and whether it must be given."""
    hints = get_type_hints(record, include_extras=True)
    return {
        each.name: (_schema_of(hints[each.name], "validation", schemas), each.default is MISSING)
        for each in fields(record)
        if each.name not in NEVER_SENT
    }


def _schema_of(declared: Any, mode: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    schema = TypeAdapter(declared).json_schema(ref_template=_REF, mode=mode, schema_generator=_Schemas)
    schemas.update(schema.pop("$defs", {}))
    return schema


def _parameter(name: str, place: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _operation(what: str, answer: dict[str, Any], parameters: list[dict[str, Any]]) -> dict[str, Any]:
    failure = {"description": "A refusal, or a failure.", "content": {_JSON: {"schema": {"type": "object"}}}}
    return {
        "summary": what,
        "parameters": parameters,
        "responses": {"200": {"description": "Done.", "content": {_JSON: {"schema": answer}}}, "default": failure},
    }
