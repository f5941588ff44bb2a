"""Handler for blocks."""

from __future__ import annotations

from dataclasses import replace

from ...memvid.errors import SessionNotFound
from ..api.blocks import BlocksResult
from ..api.store import BlocksRequest
from ..parts.parts import Parts
from ..sessions.sessions import Session
from ..views.blocks import blocks_of
from .answering import answers
from .contents import spans_apart


@answers(BlocksRequest, told=False)
async def blocks(parts: Parts, request: BlocksRequest) -> BlocksResult:
    """Raises SessionNotFound: also if the session is awake and has never slept. AmbiguousVersion, and the errors of a
    damaged manifest."""
    parts.door.require_open()
    named = (await parts.sessions.named(request.session, look=True)).require_whole()
    uri = named.uri
    if uri in parts.sessions.awake and parts.store.disk.find_session(uri) is None:
        raise SessionNotFound(
            f"{uri} is awake and has never slept, and only stored versions have blocks; `torpor save {uri}` makes one.",
            session=str(uri),
        )
    row = named.row or parts.store.standing.require_row(uri)
    models = (model for model in parts.models.shelf.loaded() if model.identity.digest.hex() == row.identity)
    model = next(models, None)
    thinking = None if model is None else model.marks.reasoning_ids
    spans = () if model is None else await spans_apart(parts, row, model)
    live = parts.sessions.awake.get(row.uri)
    held, tokens = _held_of(live), None if live is None else len(live.state.tokens)

    def look() -> BlocksResult:  # all of it off the loop: there may be thousands
        # A stop waits for what is read, so long reads end with it.
        go_on = parts.door.require_working if request.deep else parts.door.require_open
        deep, disk = request.deep, parts.store.disk
        found = blocks_of(disk, row, deep=deep, thinking=thinking, spans=spans, at_each_block=go_on)
        told = tuple(replace(each, resident=each.block_id in held) for each in found.blocks)
        return replace(found, blocks=told, memory_tokens=tokens)

    return await parts.store.on_look(look)


def _held_of(live: Session | None) -> set[str]:
    """The blocks that a session has in memory as its last version has them, by their ids in hex."""
    if live is None or live.durable is None:
        return set()
    unchanged = live.unchanged_tokens if live.dirty else live.durable.block_tokens
    end = min(unchanged, len(live.state.tokens))
    there = (each for each in live.durable.entries if each.end <= end)
    return {each.id.hex() for each in there if each.kind == "span" or not live.dirty}
