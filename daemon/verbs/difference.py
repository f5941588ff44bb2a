"""Handler for difference."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from ...memvid.access.sessions import Named
from ..api.difference import Difference
from ..api.store import DifferenceRequest
from ..parts.parts import Parts
from ..sessions.sessions import Session
from ..views.difference import Side, difference_of, side_of
from ..views.stored import BACKEND
from ..views.words import words_for
from .answering import answers


@answers(DifferenceRequest, told=False)
async def difference(parts: Parts, request: DifferenceRequest) -> Difference:
    """Raises SessionNotFound, AmbiguousVersion, and the errors of a damaged manifest."""
    named = [await parts.sessions.named(text, look=True) for text in (request.session, request.other)]
    live = [_live_side(parts, each) for each in named]
    folders = [model.folder for model in parts.models.shelf.loaded()]

    def compare() -> Difference:
        with ExitStack() as stack:
            one, other = (side or _stored_side(parts, stack, each) for side, each in zip(live, named, strict=True))
            return difference_of(one, other, partial(words_for, folders=folders), by_token=request.tokens)

    return await parts.store.on_look(compare)


def _stored_side(parts: Parts, stack: ExitStack, named: Named) -> Side:
    disk = parts.store.disk
    row = named.row or parts.store.standing.require_row(named.uri)
    return side_of(stack.enter_context(disk.open_session(row.uri, row.bundle_id)), row, named.place_in(row.token_count))


def _live_side(parts: Parts, named: Named) -> Side | None:
    """The session as it is in memory; None where a version is named, or it sleeps."""
    live = parts.sessions.awake.get(named.uri)
    return (
        None if live is None or named.row is not None else _side_of_live(live, named.place_in(len(live.state.tokens)))
    )


def _side_of_live(live: Session, token: int | None) -> Side:
    durable, ledger = live.durable, live.ledger()
    return Side(
        name=str(live.uri),
        version=None if durable is None else durable.version,
        bundle_id=None if durable is None else durable.bundle_id,
        model=live.model.name,
        labels=live.labels,
        changed=live.dirty,
        count=min(ledger.count, token or ledger.count),
        identity=dict(live.model.identity.parts),
        session={**live.to_map(), BACKEND: dict(live.model.backend)},
        entries=ledger.entries,
        read=ledger.read,
    )
