"""References to items, in a dialogue of `/v1/responses` or a conversation: the named items stand in their place.

A reference stands for its item alone, as it does for OpenAI. So what stands before and behind it counts, and the daemon
compares the dialogue as it does any other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from starlette.requests import Request

from ...daemon.api.recalling import RecalledMessage, RecallResult
from ...daemon.api.verbs import VERBS
from ...errors import TorporError
from ..errors import HttpRefused
from .requests import memory_of
from .response_items import is_read, not_found, read_items, require_certain
from .turns import answer_in, is_stored
from .work import desk_of

_FIELDS: Final = {"type", "id"}

_Said = tuple[Sequence[RecalledMessage], Mapping[str, dict[str, Any]]]
"""Messages, and their items by their ids."""


async def filled(request: Request, raw: dict[str, Any], room_bytes: int, *, field: str) -> tuple[dict[str, Any], int]:
    """A body with items in place of references, and the bytes that they take. field: the name of its items. room_bytes:
    how many they may take.

    Raises:
        PreviousResponseNotFound: no session has an item.
        HttpRefused: they take more, or the words of one cannot be told.
    """
    value = raw.get(field)
    items = list(value) if isinstance(value, list) else []
    references = {at: item.get("id") for at, item in enumerate(items) if _is_reference(item)}
    taken_bytes = 0
    recalls: dict[str, _Said] = {}
    for at, named in references.items():
        place = f"{field}.{at}.id"
        answer_id = answer_in(named) if isinstance(named, str) else None
        if answer_id is None:
            raise not_found(str(named or ""), place)
        if answer_id not in recalls:
            recalls[answer_id] = await _said_at(request, answer_id, named, place)
        messages, items_by_id = recalls[answer_id]
        if (item := items_by_id.get(named)) is None:
            raise not_found(named, place)
        require_certain(messages if is_read(named) else messages[-1:])  # else the last one is the answer
        taken_bytes += memory_of(item)
        if taken_bytes > room_bytes:
            raise HttpRefused("The items that the body names and its own are too long. Name fewer.", status=413)
        items[at] = item
    return ({**raw, field: items} if references else raw), taken_bytes


def _is_reference(item: object) -> bool:
    """Whether it names an item; the type may be left out, for nothing else has only an id."""
    if not isinstance(item, Mapping):
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "id" in item and item.keys() <= _FIELDS)


async def _said_at(request: Request, answer_id: str, named: str, place: str) -> _Said:
    """What was said up to an answer, behind the stored response before it; or in a conversation, whose own items are
    named after it."""
    recall = await _found(said_behind_stored(request, answer_id))
    if recall is None and is_read(named):
        recall = await _found(_recalled(request, {"session": f"conv_{answer_id}"}))
    if recall is None:
        raise not_found(named, place)
    return recall.messages, {item["id"]: item for item in read_items(recall.messages, answer_id)}


async def said_behind_stored(request: Request, answer_id: str) -> RecallResult:
    """What was said up to an answer, behind the stored response before it. Raises as `recall`."""
    recall = await _recalled(request, {"answer_id": answer_id})
    while recall.after is not None and not is_stored(recall.after):
        earlier = await _recalled(request, {"answer_id": recall.after})
        if earlier.messages[-1].number >= recall.messages[0].number:  # no daemon has written this
            return replace(recall, after=None)
        recall = replace(recall, messages=(*earlier.messages, *recall.messages), after=earlier.after)
    return recall


async def _recalled(request: Request, params: Mapping[str, str]) -> RecallResult:
    recall: RecallResult = await desk_of(request).ask(request, VERBS["recall"], params)
    return recall


async def _found(recall: Awaitable[RecallResult]) -> RecallResult | None:
    """What was said; None if there is no such place."""
    try:
        return await recall
    except TorporError as error:
        if error.code in ("answer_not_found", "session_not_found"):
            return None
        raise
