"""Handler for blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...memvid.errors import SessionNotFound
from ..api.blocks import BlocksResult
from ..api.store import BlocksRequest
from ..parts.parts import Parts
from ..sessions.sessions import Session
from ..views.blocks import blocks_of
from .answering import answers


@answers(BlocksRequest, told=False)
async def blocks(parts: Parts, request: BlocksRequest) -> BlocksResult:
    """Raises SessionNotFound: also if the session is awake and has never slept. AmbiguousVersion, and the errors of a
    damaged manifest."""
    parts.door.require_open()
    named = (await parts.sessions.named(request.session)).require_whole()
    uri = named.uri
    if uri in parts.sessions.awake and parts.store.disk.find_session(uri) is None:
        raise SessionNotFound(
            f"{uri} is awake and has never slept, and only stored versions have blocks; `torpor save {uri}` makes one.",
            session=str(uri),
        )
    row = named.row or parts.store.standing.require_row(uri)
    marks = (model.marks for model in parts.models.shelf.loaded() if model.identity.digest.hex() == row.identity)
    thinking = next((each.reasoning_ids for each in marks), None)
    found = await parts.store.on_io(partial(blocks_of, parts.store.disk, row, deep=request.deep, thinking=thinking))
    return _with_memory(found, parts.sessions.awake.get(uri))


def _with_memory(found: BlocksResult, live: Session | None) -> BlocksResult:
    """The same with what of it the awake session has in memory."""
    held: set[str] = set()
    if live is not None and live.durable is not None:
        unchanged = live.unchanged_tokens if live.dirty else live.durable.block_tokens
        end = min(unchanged, len(live.state.tokens))
        held = {
            each.id.hex() for each in live.durable.entries if each.end <= end and (each.token_count or not live.dirty)
        }
    told = tuple(replace(each, resident=each.block_id in held) for each in found.blocks)
    return replace(found, blocks=told, memory_tokens=None if live is None else len(live.state.tokens))
