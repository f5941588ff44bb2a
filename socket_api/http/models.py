"""`/v1/models`: the served models with their context, as OpenAI's API lists them or as Anthropic's."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...daemon.api.process import ModelInfo, StatusResult
from ..errors import HttpRefused
from .errors import Dialect, dialect_of
from .metrics import status_of
from .requests import in_path
from .work import Desk, desk_of


def routes() -> list[Route]:
    """The list, and one model of it."""
    return [Route("/v1/models", _list), Route("/v1/models/{model:path}", _show)]


def _named(name: str, status: StatusResult) -> ModelInfo:
    """A model by its name, or by an alias. Raises HttpRefused: it is not served."""
    model = status.model_named(name)
    if model is None:
        served = ", ".join(each.name for each in status.models)
        raise HttpRefused(f"There is no model {name!r:.200}. Those that are served: {served}.", status=404)
    return model


async def _list(request: Request) -> Response:
    status, dialect, desk = await status_of(request), dialect_of(request), desk_of(request)
    models = [_told(each, status, dialect, desk) for each in status.models]
    if dialect == "anthropic":
        ids = [each["id"] for each in models] or [None]
        ends = {"first_id": ids[0], "last_id": ids[-1]}
        return JSONResponse({"data": models, "has_more": False, **ends})
    return JSONResponse({"object": "list", "data": models})


async def _show(request: Request) -> Response:
    status = await status_of(request)
    model = _named(in_path(request, "model"), status)
    return JSONResponse(_told(model, status, dialect_of(request), desk_of(request)))


def _told(model: ModelInfo, status: StatusResult, dialect: Dialect, desk: Desk) -> dict[str, Any]:
    """A model as an API tells it, with its aliases. Its context is None until it was loaded once."""
    aliases = [alias for alias, name in status.aliases if name == model.name]
    if dialect == "anthropic":
        return {
            "type": "model",
            "id": model.name,
            "display_name": model.name,
            "created_at": datetime.fromtimestamp(desk.started_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": model.context_tokens,
            "max_tokens": model.context_tokens,
            "aliases": aliases,
        }
    return {
        "id": model.name,
        "object": "model",
        "created": desk.started_s,
        "owned_by": "torpor",
        "context_length": model.context_tokens,
        "max_model_len": model.context_tokens,
        "aliases": aliases,
    }
