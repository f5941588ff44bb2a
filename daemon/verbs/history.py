"""The handler of histories."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

from ...memvid.answers import VersionInfo
from ...memvid.errors import StoreError
from ...memvid.store import Store
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
from ..views.ledgers import PlainLedger, Present
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
    told = await parts.store.on_look(lambda: tuple(each.told(parts.store.disk) for each in found[:MAX_HISTORY]))
    uris = map(SessionUri.parse, {each.session for each in made.entries})
    machines = {str(uri): machine for uri in uris if (machine := parts.sessions.roll.machine_of(uri)) is not None}
    return replace(made, in_memory=told, machines=machines)


@dataclass(frozen=True, slots=True)
class _Awake:
    """state: as memory tells it. newest: the bundle id of its newest version. ledger: to compare with the version that
    it went on from; None where the lengths tell what they have in common."""

    state: InMemory
    newest: str | None
    ledger: PlainLedger | None

    def told(self, store: Store) -> InMemory:
        """With what the files tell; reads the disk."""
        state, bundle_id = self.state, self.state.bundle_id or ""
        row = store.index.rows_of([bundle_id]).get(bundle_id)
        if row is None or state.version is None or state.parent is not None:
            return state
        common = min(state.token_count, row.token_count)
        if self.ledger is not None:
            with contextlib.suppress(StoreError):  # a damaged version is told of elsewhere
                common = Present.of_ledger(store, row, self.ledger, 0).common
        goes_on = common == row.token_count and self.newest in (None, bundle_id)
        return replace(state, back_at=None if goes_on else common, added_tokens=state.token_count - common)


def _in_memory(parts: Parts, namespace: str | None, only: Collection[str] | None) -> Pieces[list[_Awake]]:
    """What is in memory of some sessions, or of all: those that are awake, and behind them the branches of trees, each
    before the one above it. Of a session that was kept of a branch and has no version yet, its origin counts, too."""

    def is_meant(live: Session) -> bool:
        origin = _unwritten_origin(live)
        named = {str(live.uri), *([origin.session] if origin else [])}
        return namespace in (None, live.uri.namespace) and (only is None or not named.isdisjoint(only))

    def newest_of(live: Session) -> VersionInfo | None:
        return parts.store.disk.find_session(live.uri)

    found = []
    for looked_at, live in enumerate(list(parts.sessions.awake.values()), 1):
        if is_meant(live):
            newest = newest_of(live)
            found.append(_state_of(live, newest, look=look_of(live, newest) is not None))
        if not looked_at % SESSIONS_AT_ONCE:
            yield
    for tree in parts.sessions.forest.all_trees():
        if is_meant(tree.root.live):
            newest = newest_of(tree.root.live)
            found += [_branch_of(each, newest) for each in tree.root.subtree()]
            yield
    return found


def _unwritten_origin(live: Session) -> Origin | None:
    """The origin of a session that has no version yet; None if it is of another namespace."""
    origin = live.provenance.forked_from
    if origin is None or live.durable is not None:
        return None
    return origin if SessionUri.parse(origin.session).namespace == live.uri.namespace else None


def _state_of(live: Session, newest: VersionInfo | None, *, look: bool = False) -> _Awake:
    tokens, before, durable = len(live.state.tokens), _unwritten_origin(live), live.durable
    newest_id = None if newest is None else newest.bundle_id
    if durable is None:
        bundle_id, taken = (None, 0) if before is None else (before.bundle_id, before.tokens)
        return _Awake(InMemory(str(live.uri), bundle_id, None, tokens, tokens - taken, look=look), newest_id, None)
    has_all = not live.dirty or live.unchanged_tokens >= durable.token_count
    state = InMemory(str(live.uri), durable.bundle_id, durable.version, tokens, tokens - durable.token_count, look=look)
    return _Awake(state, newest_id, None if has_all else live.ledger())


def _branch_of(branch: Branch, newest: VersionInfo | None) -> _Awake:
    above = branch.parent
    found = _state_of(branch.live, newest)
    grown = found.state.added_tokens if above is None else branch.position - branch.fork_head
    state = replace(
        found.state, added_tokens=grown, branch=branch.number, parent=None if above is None else above.number
    )
    return replace(found, state=state)
