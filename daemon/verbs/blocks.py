"""Handler for blocks."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ...memvid.errors import Corruption
from ..api.blocks import BlockInfo, BlocksResult
from ..api.store import BlocksRequest
from ..parts.parts import Parts
from ..sessions.sessions import Session
from ..views.blocks import blocks_of, blocks_unread
from ..views.ledgers import Present, present_awake, present_in_files
from .answering import answers
from .contents import spans_apart


class _LeftAlone(Exception):
    """Nobody waits for the look any more."""


@answers(BlocksRequest, told=False)
async def blocks(parts: Parts, request: BlocksRequest) -> BlocksResult:
    """Raises SessionNotFound: also if the session is awake and has never slept; AmbiguousVersion."""
    try:
        return await _blocks(parts, request)
    except Corruption as error:  # of its manifest
        return blocks_unread(await parts.sessions.stored(request.session), error)


async def _blocks(parts: Parts, request: BlocksRequest) -> BlocksResult:
    present = await _present_of(parts, request.session)
    row = present.row
    model = parts.models.shelf.loaded_of(row)
    thinking = None if model is None else model.marks.reasoning_ids
    spans = () if model is None else await spans_apart(parts, row, model)
    held = _held_of(parts.sessions.awake.get(row.uri))

    left = threading.Event()

    def go_on() -> None:
        if left.is_set():
            raise _LeftAlone
        # A stop waits for what is read, so long reads end with it.
        (parts.door.require_working if request.deep else parts.door.require_open)()

    def look() -> BlocksResult:  # all of it off the loop: there may be thousands
        go_on()
        deep, disk = request.deep, parts.store.disk
        found = blocks_of(disk, present, deep=deep, thinking=thinking, spans=spans, at_each_block=go_on)
        return replace(found, blocks=tuple(replace(each, resident=_is_in(held, each, found)) for each in found.blocks))

    try:
        return await parts.store.on_look(look)
    finally:
        left.set()


async def _present_of(parts: Parts, session: str) -> Present:
    """What a session holds, awake or asleep; what a version holds, if one is named."""
    named, newest = await parts.sessions.named(session, look=True), await parts.sessions.stored(session)
    if named.row is not None:
        return Present.of_version(newest)
    live, disk = parts.sessions.awake.get(named.uri), parts.store.disk
    if live is None:
        return await parts.store.on_look(partial(present_in_files, disk, named.uri))
    base = None if live.durable is None else live.durable.bundle_id
    return await parts.store.on_look(partial(present_awake, disk, newest, base, live.ledger()))


def _held_of(live: Session | None) -> dict[str, int]:
    """The blocks that a session has in memory as its last version has them, by their ids in hex, and up to which token:
    after it went back, up to the midst of one."""
    if live is None or live.durable is None:
        return {}
    unchanged = live.unchanged_tokens if live.dirty else live.durable.block_tokens
    end = min(unchanged, len(live.state.tokens))
    there = (each for each in live.durable.entries if each.kind == "span" or not live.dirty)
    return {each.id.hex(): min(each.end, end) for each in there}


def _is_in(held: Mapping[str, int], block: BlockInfo, found: BlocksResult) -> bool:
    """Whether all of a block that counts is in memory."""
    return min(block.start + block.tokens, found.common_tokens) <= held.get(block.block_id, -1)
