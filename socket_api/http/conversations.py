"""`/v1/conversations`: a conversation is a session, whose name is its id.

Its items are told from the tokens. They can be added at its end, and not taken out: what the session has read behind
them would have to be read again. It is durable from its first item on: an empty one ends with the daemon. Its metadata
are labels of the session.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ...daemon.api.limits import MAX_LABEL_CHARS
from ...daemon.api.recalling import RecalledMessage
from ...daemon.api.verb import R, Verb
from ...daemon.api.verbs import VERBS
from ...errors import TorporError
from ..errors import HttpRefused
from .references import filled
from .requests import IGNORED_HEADER, Body, fault_at, ignored_of, in_path, read_fields
from .response_items import (
    Dialogue,
    Items,
    page_of,
    read_items,
    require_certain,
)
from .routing import Posted
from .turns import new_answer_id, taken_back, time_of
from .work import desk_of

PATH: Final = "/v1/conversations"
_FILL: Final = partial(filled, field="items")
ITEMS_PATH: Final = "/v1/conversations/{conversation_id}/items"
ONE_PATH: Final = "/v1/conversations/{conversation_id}"
LABEL: Final = "conversation"
_ID: Final = re.compile(r"conv_([0-9a-f]{32})")

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
"""As OpenAI bounds it."""


class ConversationBody(Body):
    """A new conversation, with its first items. model: whose session it is; the first if left out."""

    model: str | None = None
    items: Items | None = None
    metadata: Metadata | None = None


class MetadataBody(Body):
    """Other metadata of a conversation."""

    metadata: Metadata


class ItemsBody(Body):
    """Items that a conversation goes on with."""

    items: Items


def session_of(conversation_id: str) -> str:
    """The session of a conversation. Raises HttpRefused: we never make such an id."""
    if _ID.fullmatch(conversation_id) is None:
        raise no_conversation(conversation_id)
    return conversation_id


def no_conversation(conversation_id: str) -> HttpRefused:
    """The refusal of an id that no session has."""
    return HttpRefused(
        f"There is no conversation {conversation_id!r:.100}. It was never made, or was deleted, or had no messages when"
        " the daemon ended; make another one.",
        status=404,
    )


def routes() -> list[Route]:
    """All of them."""
    return [
        Posted(PATH, create, ConversationBody),
        Route(ONE_PATH, retrieve, methods=["GET"]),
        Posted(ONE_PATH, update, MetadataBody),
        Route(ONE_PATH, delete, methods=["DELETE"]),
        Route(ITEMS_PATH, list_items, methods=["GET"]),
        Posted(ITEMS_PATH, add_items, ItemsBody),
        Route(f"{ITEMS_PATH}/{{item_id}}", retrieve_item, methods=["GET"]),
        Route(f"{ITEMS_PATH}/{{item_id}}", delete_item, methods=["DELETE"]),
    ]


async def create(request: Request) -> Response:
    """Make a conversation. System texts that come first open it."""
    async with desk_of(request).bodies.read(request, _FILL) as raw:
        body = read_fields(ConversationBody, raw)
        dialogue = Dialogue(None, body.items or ())
        name, messages = f"conv_{new_answer_id()}", dialogue.messages
        system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else ""
        opening = {"system": system} if system else {}
        labels = (LABEL, *_labels_of(body.metadata or {}))
        params = {"session": name, "labels": labels, "model": body.model, "unnamed": True, **opening}
        async with taken_back(desk_of(request).backend, request.state.caller, name):
            session = await desk_of(request).ask(request, VERBS["create"], params)
            if messages:
                await _append(request, name, messages)
        return JSONResponse(_told(name, session.labels), headers=_ignored(body, dialogue))


async def retrieve(request: Request) -> Response:
    """A conversation."""
    name = _named(request)
    shown = await _ask(request, VERBS["show"], name)
    return JSONResponse(_told(name, shown.info.labels))


async def update(request: Request) -> Response:
    """Give a conversation other metadata."""
    async with desk_of(request).bodies.read(request) as raw:
        name, body = _named(request), read_fields(MetadataBody, raw)
        labels = (LABEL, *_labels_of(body.metadata))
        changed = await _ask(request, VERBS["set"], name, labels=labels)
        return JSONResponse(_told(name, changed.labels), headers=_ignored(body))


async def delete(request: Request) -> Response:
    """Delete a conversation with its session. Forks of it stay."""
    name = _named(request)
    await _ask(request, VERBS["delete"], name)
    return JSONResponse({"id": name, "object": "conversation.deleted", "deleted": True})


async def list_items(request: Request) -> Response:
    """The items of a conversation, told from its tokens."""
    return JSONResponse(page_of(await _items(request), request.query_params))


async def add_items(request: Request) -> Response:
    """Read items at the end of a conversation, and answer nothing."""
    async with desk_of(request).bodies.read(request, _FILL) as raw:
        name, body = _named(request), read_fields(ItemsBody, raw)
        dialogue = Dialogue(None, body.items)
        messages = dialogue.messages
        if not messages:
            raise fault_at("items", "there are none; give what the conversation goes on with")
        await _append(request, name, messages)
        history = (await _ask(request, VERBS["recall"], name)).messages
        new = history[-len(messages) :]
        require_certain(new)
        items, added = _items_of(name, history), sum(1 for _ in read_items(new, name))
        page = page_of(items[len(items) - added :], {"order": "asc", "limit": "100"})
        return JSONResponse(page, headers=_ignored(body, dialogue))


async def retrieve_item(request: Request) -> Response:
    """An item of a conversation."""
    item_id = in_path(request, "item_id")
    for item in await _items(request):
        if item["id"] == item_id:
            return JSONResponse(item)
    raise HttpRefused(f"The conversation has no item {item_id!r:.100}.", status=404)


async def delete_item(request: Request) -> Response:
    """Refused: what was read behind an item would have to be read again."""
    raise HttpRefused(
        "An item cannot be taken out of a conversation: what stands behind it was read with it. Delete the conversation"
        " and make another one, or go on from an earlier response, in a fork (previous_response_id).",
        status=400,
    )


def _named(request: Request) -> str:
    return session_of(in_path(request, "conversation_id"))


async def _ask(request: Request, verb: Verb[Any, R], name: str, **params: Any) -> R:
    """Ask about the session of a conversation. Raises HttpRefused: there is none; and as the service."""
    try:
        return await desk_of(request).ask(request, verb, {"session": name, **params})
    except TorporError as error:
        raise (no_conversation(name) if error.code == "session_not_found" else error) from error


async def _append(request: Request, name: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Read messages at the end of a conversation. Raises as `_ask`."""
    await _ask(request, VERBS["append"], name, messages=tuple(messages), durable=True, certain=True, unnamed=True)


async def _items(request: Request) -> list[dict[str, Any]]:
    name = _named(request)
    history = (await _ask(request, VERBS["recall"], name)).messages
    require_certain(history)
    return _items_of(name, history)


def _items_of(name: str, messages: Sequence[RecalledMessage]) -> list[dict[str, Any]]:
    return list(read_items(messages, name.removeprefix("conv_")))


def _ignored(body: Body, dialogue: Dialogue | None = None) -> dict[str, str]:
    """The header that names what has no effect; none for nothing."""
    items = dialogue.unknown if dialogue is not None else ()
    named = ignored_of(body, (f"items.{each}" for each in items))
    return {IGNORED_HEADER: named} if named else {}


def _labels_of(metadata: Mapping[str, str]) -> Iterator[str]:
    for key, value in metadata.items():
        if "=" in key or len(key) + len(value) >= MAX_LABEL_CHARS:
            raise fault_at(
                "metadata", f"a pair has at most {MAX_LABEL_CHARS - 1} characters, and its name no equals sign"
            )
        yield f"{key}={value}"


def _told(name: str, labels: Sequence[str]) -> dict[str, Any]:
    metadata = dict(label.split("=", 1) for label in labels if "=" in label)
    created = time_of(name.removeprefix("conv_"))
    return {"id": name, "object": "conversation", "created_at": created, "metadata": metadata}
