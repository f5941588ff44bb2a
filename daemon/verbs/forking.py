"""Handlers for forks and folds."""

from __future__ import annotations

import time

from ...memvid.access.sessions import Named
from ...memvid.uri import parse_reference
from ..api.forking import FoldRequest, FoldResult, ForkRequest, ForkResult
from ..events.accounts import note_recomputed, recomputed_tokens
from ..events.events import SessionForked
from ..memory.line import Use
from ..parts.parts import Parts
from ..tasks.cancellation import to_the_end
from ..versions.forking import ForkOrder
from .answering import answers


@answers(ForkRequest, queued=True)
async def fork(parts: Parts, request: ForkRequest) -> ForkResult:
    """Raises:
    SessionExists: there is a session of that name.
    SessionNotFound, AmbiguousVersion, EmptyContext, NoSuchPosition, the errors of a sleep and, at an earlier token,
        of a wake; then there is no fork, and the other session is as it was.
    """
    started = time.monotonic()
    parts.door.require_open()
    wanted = parse_reference(request.name)
    source = parts.store.disk.session_of(request.session, parts.sessions.awake)
    # The name's turn is taken before anything is awaited, so no two requests take a name that is free.
    async with parts.sessions.residency.turn_with_name(source, wanted) as use:
        named = await parts.sessions.named_by_number(request.session, look=True)
        order = await to_the_end(_order_of_fork(parts, use, named, request))
        await parts.sessions.residency.fetch_back(order.row)
        is_whole = await parts.store.on_io(lambda: parts.store.forking.is_whole(order))
        if order.at_token not in (None, order.row.block_tokens) or not is_whole:
            async with parts.sessions.residency.room_to_wake(use, order.row, order.at_token) as model:
                forked = await to_the_end(parts.store.forking.cut_off(order, model, request.emit))
        else:
            forked = await to_the_end(parts.store.forking.refer_to_all(order))
        await parts.sessions.learn_words(wanted)
    seconds = time.monotonic() - started
    note_recomputed(forked.computed_tokens)
    computed = recomputed_tokens()
    result = ForkResult.of(forked.receipt, seconds=seconds, forked_from=order.origin, tokens_prefilled=computed)
    parts.bus.publish(
        SessionForked(
            wanted,
            source=order.row.uri,
            tokens=result.token_count,
            tokens_prefilled=result.tokens_prefilled,
            bytes_written=result.bytes_written,
            blocks_reused=result.blocks_reused,
            seconds=result.seconds,
        )
    )
    return result


@answers(FoldRequest, queued=True)
async def fold(parts: Parts, request: FoldRequest) -> FoldResult:
    """Raises InvalidFold, SessionExists, SessionNotFound, EmptyContext, TemplateUnusable, ContextOverflow,
    GenerationFailed, and the errors of a sleep or a wake. Then there is no new session, and the other one has lost
    nothing."""
    wanted = parse_reference(request.name)
    folded = await parts.sessions.folds.make(parts.sessions.resolve(request.session), wanted, request, request.emit)
    await parts.sessions.learn_words(wanted)
    return folded


async def _order_of_fork(parts: Parts, use: Use, named: Named, request: ForkRequest) -> ForkOrder:
    """The version to fork; a changed awake session is saved as one first."""
    source, row, at_token = named.uri, named.row, named.place(request.at_token)
    labels = None if request.labels is None else tuple(request.labels)
    if row is None:
        live = parts.sessions.awake.get(source)
        if live is None:
            await parts.store.journal.replay(source)
            await parts.sessions.residency.write_ledger(use, None, at_token, request.emit)
            row, held = parts.store.standing.require_row(source), None
        else:
            row = await parts.store.putting_away.keep_changed(live, request.emit, "fork")
            held = len(live.state.tokens) if live.is_cut_short else None
        at_token = held if at_token is None else at_token
    return ForkOrder(row, parse_reference(request.name), at_token, labels, request.unnamed)
