"""The handler of histories."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from ...memvid.uri import SessionUri
from ..api.creating import HistoryRequest
from ..api.history import HistoryResult, InMemory
from ..api.limits import MAX_HISTORY
from ..api.session import Origin
from ..branches.trees import Branch
from ..parts.parts import Parts
from ..residency.listing import look_of
from ..sessions.sessions import Session
from ..tasks.pieces import SESSIONS_AT_ONCE, Pieces, in_pieces
from ..views.history import history_of
from .answering import answers


@answers(HistoryRequest, told=False)
async def history(parts: Parts, request: HistoryRequest) -> HistoryResult:
    """Raises SessionNotFound, AmbiguousVersion, InvalidUri."""
    parts.door.require_open()
    named = [await parts.sessions.named(each, look=True) for each in request.sessions]
    made = await parts.store.on_look(
        partial(
            history_of,
            parts.store.disk,
            named,
            namespace=request.namespace,
            since_ns=request.since_ns,
            limit=request.limit,
        )
    )
    only = {*(str(each.uri) for each in named), *(each.session for each in made.entries)} if named else None
    found = await in_pieces(_in_memory(parts, request.namespace, only))
    return replace(made, in_memory=tuple(found[:MAX_HISTORY]))


def _in_memory(parts: Parts, namespace: str | None, only: Collection[str] | None) -> Pieces[list[InMemory]]:
    """What is in memory of some sessions, or of all: those that are awake, and behind them the branches of trees, each
    before the one above it. Of a session that was kept of a branch and has no version yet, its origin counts, too."""

    def is_meant(live: Session) -> bool:
        origin = _unwritten_origin(live)
        named = {str(live.uri), *([origin.session] if origin else [])}
        return namespace in (None, live.uri.namespace) and (only is None or not named.isdisjoint(only))

    found = []
    for looked_at, live in enumerate(list(parts.sessions.awake.values()), 1):
        if is_meant(live):
            newest = parts.store.disk.find_session(live.uri)
            found.append(_state_of(live, look=look_of(live, newest) is not None))
        if not looked_at % SESSIONS_AT_ONCE:
            yield
    for tree in parts.sessions.forest.all_trees():
        if is_meant(tree.root.live):
            found += map(_branch_of, tree.root.subtree())
            yield
    return found


def _unwritten_origin(live: Session) -> Origin | None:
    """The origin of a session that has no version yet; None if it is of another namespace."""
    origin = live.provenance.forked_from
    if origin is None or live.durable is not None:
        return None
    return origin if SessionUri.parse(origin.session).namespace == live.uri.namespace else None


def _state_of(live: Session, *, look: bool = False) -> InMemory:
    tokens, before = len(live.state.tokens), _unwritten_origin(live)
    bundle_id, taken = (None, 0) if before is None else (before.bundle_id, before.tokens)
    if live.durable is not None:
        bundle_id, taken = live.durable.bundle_id, live.durable.token_count
    return InMemory(str(live.uri), bundle_id, tokens, tokens - taken, look)


def _branch_of(branch: Branch) -> InMemory:
    above = branch.parent
    state = _state_of(branch.live)
    grown = state.added_tokens if above is None else branch.position - branch.fork_head
    return replace(state, added_tokens=grown, branch=branch.number, parent=None if above is None else above.number)
