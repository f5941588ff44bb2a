"""`/openapi.json`: the routes, made from the records of their requests and answers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from ... import __version__
from ..wire.common_store import OF_ALL
from ..wire.schemas import Schemas, object_of
from . import chat_completions, completions, conversations, messages, responses, sessions
from .fields import Body

_JSON = "application/json"


@cache
def document() -> Mapping[str, Any]:
    """The description of all routes, for OpenAPI 3.1. Made once, in a second or less."""
    schemas = Schemas("components/schemas")
    paths: dict[str, dict[str, Any]] = {}
    for path, method, operation in [*_plain(), *_of_dialects(schemas), *_told(), *_of_sessions(schemas)]:
        paths.setdefault(path, {})[method.lower()] = operation
    for each in schemas.shared.values():
        if "required" in each:
            each["required"] = [name for name in each["required"] if name not in OF_ALL]
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
    }.items():
        yield path, "get", _operation(what, {"type": "string"} if path == "/metrics" else {"type": "object"}, [])
    yield "/v1/models/{model}", "get", _operation("One served model.", {"type": "object"}, _named_in("{model}"))


def _told() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """What a dialect has beside the routes with a body."""
    for route in [*responses.routes(), *conversations.routes()]:
        said = inspect.cleandoc(route.endpoint.__doc__ or "")
        for method in (route.methods or set()) & {"GET", "DELETE"}:
            yield route.path, method, _operation(said, {"type": "object"}, _named_in(route.path))


def _named_in(path: str) -> list[dict[str, Any]]:
    return [_parameter(name, "path", {"type": "string"}) for name in re.findall(r"{(\w+)}", path)]


def _of_dialects(schemas: Schemas) -> Iterator[tuple[str, str, dict[str, Any]]]:
    bodies: Mapping[str, type[Body]] = {
        chat_completions.PATH: chat_completions.ChatBody,
        completions.PATH: completions.CompletionBody,
        responses.PATH: responses.ResponsesBody,
        responses.COUNT_PATH: responses.ResponsesBody,
        conversations.PATH: conversations.ConversationBody,
        conversations.ONE_PATH: conversations.MetadataBody,
        conversations.ITEMS_PATH: conversations.ItemsBody,
        messages.PATH: messages.MessagesBody,
        messages.COUNT_PATH: messages.DialogueBody,
    }
    for path, body in bodies.items():
        operation = _operation(inspect.cleandoc(body.__doc__ or ""), {"type": "object"}, _named_in(path))
        schema = schemas.schema_of(body, "validation")
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
        yield path, "post", operation


def _of_sessions(schemas: Schemas) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for each in sessions.ROUTES:
        taken = schemas.fields_of(each.verb.request)
        named = [_parameter("session", "path", taken.pop("session")[0])] if each.names_session else []
        if each.method == "GET":
            named += [_parameter(name, "query", schema) for name, (schema, _) in taken.items()]
            taken = {}
        said = inspect.cleandoc(each.verb.request.__doc__ or "").split("\n\n")[0]
        operation = _operation(said, schemas.schema_of(each.verb.result, "serialization"), named)
        if each.method == "POST":
            body = object_of(taken)
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
