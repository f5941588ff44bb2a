"""`/openapi.json`: the routes, made from the records of their requests and answers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from starlette.routing import Route

from ... import __version__
from ..wire.common_store import LEFT_OUT
from ..wire.schemas import Schemas, object_of
from . import sessions
from .routing import Posted

_JSON = "application/json"


def document(dialects: Sequence[Route]) -> Mapping[str, Any]:
    """The description of all routes, for OpenAPI 3.1, in a second or less. dialects: those of the APIs of others."""
    schemas = Schemas("components/schemas")
    paths: dict[str, dict[str, Any]] = {}
    for path, method, operation in [*_plain(), *_of_dialects(schemas, dialects), *_of_sessions(schemas)]:
        paths.setdefault(path, {})[method.lower()] = operation
    for each in schemas.shared.values():
        if "required" in each:
            each["required"] = [name for name in each["required"] if name not in LEFT_OUT]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Torpor", "version": __version__, "description": "A memory for local agents that survives."},
        "security": [{"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": schemas.shared,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _plain() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, what in {
        "/healthz": "Whether the daemon serves.",
        "/metrics": "Figures of all namespaces for Prometheus, for the daemon's owner.",
        "/v1/models": "The served models.",
        "/v1/events": "What happens in the daemon, as server-sent events. It goes on behind the Last-Event-ID.",
    }.items():
        yield path, "get", _operation(what, {"type": "string"} if path == "/metrics" else {"type": "object"}, [])
    yield "/v1/models/{model}", "get", _operation("One served model.", {"type": "object"}, _named_in("{model}"))


def _named_in(path: str) -> list[dict[str, Any]]:
    return [_parameter(name, "path", {"type": "string"}) for name in re.findall(r"{(\w+)}", path)]


def _of_dialects(schemas: Schemas, dialects: Sequence[Route]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for route in dialects:
        body = route.body if isinstance(route, Posted) else None
        summary = inspect.cleandoc((body or route.endpoint).__doc__ or "")
        for method in (route.methods or set()) - {"HEAD"}:
            operation = _operation(summary, {"type": "object"}, _named_in(route.path))
            if body is not None:
                schema = schemas.schema_of(body, "validation")
                operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
            yield route.path, method, operation


def _of_sessions(schemas: Schemas) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for each in sessions.ROUTES:
        fields = schemas.fields_of(each.verb.request)
        parameters = [_parameter("session", "path", fields.pop("session")[0])] if each.names_session else []
        if each.method == "GET":
            parameters += [_parameter(name, "query", schema) for name, (schema, _) in fields.items()]
            fields = {}
        summary = inspect.cleandoc(each.verb.request.__doc__ or "").split("\n\n")[0]
        operation = _operation(summary, schemas.schema_of(each.verb.result, "serialization"), parameters)
        if each.method == "POST":
            body = object_of(fields)
            operation["requestBody"] = {"required": bool(body["required"]), "content": {_JSON: {"schema": body}}}
        yield each.path, each.method, operation


def _parameter(name: str, place: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _operation(what: str, answer: dict[str, Any], parameters: list[dict[str, Any]]) -> dict[str, Any]:
    failure = {"description": "A refusal, or a failure.", "content": {_JSON: {"schema": {"type": "object"}}}}
    return {
        "summary": what,
        "parameters": parameters,
        "responses": {"200": {"description": "Done.", "content": {_JSON: {"schema": answer}}}, "default": failure},
    }
