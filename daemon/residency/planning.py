"""Plans a wake without doing it, and checks whether an awake session agrees with an order to wake it.

Reads manifest and block headers, and no state. Nothing is loaded, woken, put to sleep, reserved or told to subscribers.
"""

from __future__ import annotations

from dataclasses import replace

from ...memvid.answers import VersionInfo
from ...memvid.units import format_plural
from ...memvid.uri import SessionUri
from ...memvid.writing.reader import BundleReader
from ...snapshot.identity import require_nothing_differs
from ...snapshot.restore import no_such_position
from ..api.waking import WakePlanResult
from ..engine.generation import PREFILL_CHUNK_TOKENS
from ..errors import ModelNotLoaded, SessionAwake
from ..memory.loading import has_changed
from ..memory.model_registry import Shelf
from ..models.models import LoadedModel
from ..sessions.sessions import Session
from ..sessions.unprocessed_tail import unread_in
from ..versions.orders import WakeOrder
from ..versions.waking import Prospect
from ..versions.writing import Versions
from .residency import Residency


class Planning:
    """Plans wakes. Belongs to the event loop."""

    def __init__(self, versions: Versions, residency: Residency, shelf: Shelf) -> None:
        self._versions = versions
        self._residency = residency
        self._shelf = shelf

    async def plan(self, uri: SessionUri, order: WakeOrder) -> WakePlanResult:
        """The plan of `Residency.bring_back`. The caller holds the session's turn.

        Raises:
            As the wake before it reads a block. ModelNotLoaded: the model's caches are not known yet.
        """
        live = self._residency.awake.get(uri)
        if live is not None:
            require_as_ordered(live, order, self._residency.standing.find_row(uri, order.version))
            return self._of_awake(live)
        if self._residency.standing.is_in_ledger_alone(uri, order.version, order.at_token):
            # Before the look at that token, all of it is computed and put to sleep.
            return replace(await self.plan(uri, WakeOrder(strict=order.strict)), token_count=order.at_token or 0)
        row = self._residency.standing.row_of(uri, order.version)
        place = self._shelf.place(row.model)
        if place.changed:
            raise has_changed(place)
        model = self._shelf.facts(row.model)
        if model is None:
            raise ModelNotLoaded(
                f"Model {row.model!r} has not been loaded since the daemon began, so a wake on it cannot be planned. "
                f"Load it: torpor models load {row.model}",
                model=row.model,
            )
        reader, prospect = await self._versions.waking.look(uri, order, model)
        with reader:
            unread = unread_in(reader.manifest.session, uri) if order.at_token is None else None
            count, is_loaded = len(unread.tokens) if unread else 0, place.model is not None
            told = self._told(reader, prospect, model, count, is_loaded=is_loaded)
        if not self._residency.is_fetched_back(row):
            return told
        if order.at_token is None:
            told = replace(told, restored_tokens=told.token_count - count, computed_tokens=count)
        return replace(told, is_fetched=True)

    def _told(
        self, reader: BundleReader, prospect: Prospect | None, model: LoadedModel, unread: int, *, is_loaded: bool
    ) -> WakePlanResult:
        """unread: tokens behind all blocks; the wake computes them in any case."""
        manifest = reader.manifest
        target = manifest.block_tokens if prospect is None else prospect.plan.target_tokens
        at_token = None if target == manifest.block_tokens else target
        needed = model.layout.tokens_to_wake(manifest.block_tokens + unread, at_token)
        told = WakePlanResult(
            session=str(manifest.uri),
            version=manifest.version,
            bundle_id=reader.bundle_id,
            token_count=target + unread,
            already_awake=False,
            model=model.name,
            model_loaded=is_loaded,
            computed_tokens=unread,
            memory_bytes=model.layout.most_bytes(needed, PREFILL_CHUNK_TOKENS),
        )
        if prospect is None:
            return told
        plan = prospect.plan
        return replace(
            told,
            bytes_to_read=plan.read_bytes,
            blocks=len(plan.spans) + (plan.state is not None),
            restored_tokens=plan.resumed_tokens,
            computed_tokens=plan.replayed_tokens + unread,
            differs=prospect.differs,
        )

    def _of_awake(self, live: Session) -> WakePlanResult:
        return WakePlanResult(
            session=str(live.uri),
            version=live.durable.version if live.durable else None,
            bundle_id=live.durable.bundle_id if live.durable else None,
            token_count=len(live.state.tokens),
            already_awake=True,
            model=live.model.name,
            model_loaded=live.model.is_loaded,
            differs=live.provenance.differs,
        )


def require_as_ordered(live: Session, order: WakeOrder, stored: VersionInfo | None) -> None:
    """Refuse an order for another version or position than that of the awake session, for a position that it does not
    have, and, if strict, for a session that something else computed.

    stored: the version of the order, by default the newest; None if the index has none.

    Raises:
        SessionAwake, NoSuchPosition, IdentityMismatch
    """
    version, held = live.durable.version if live.durable else None, len(live.state.tokens)
    what, slept = f"{live.uri}, which is awake,", held
    if stored is not None and (order.version is not None or not live.dirty):
        what, slept = f"Version {stored.version} of {live.uri}", stored.token_count
    if order.at_token is not None and order.at_token > slept:
        raise no_such_position(what, slept, order.at_token, is_awake=True)
    changed = live.dirty or (live.is_cut_short and order.at_token is None)
    other_version = order.version is not None and (order.version != version or changed)
    if other_version or order.at_token not in (None, held):
        raise _awake_otherwise(live, order)
    if order.strict:
        require_nothing_differs(live.provenance.differs, model=live.model.name)


def _awake_otherwise(live: Session, order: WakeOrder) -> SessionAwake:
    version, held = live.durable.version if live.durable else None, len(live.state.tokens)
    wanted = [
        f"token {order.at_token}" if order.at_token is not None else "",
        f"version {order.version}" if order.version is not None else "",
    ]
    return SessionAwake(
        f"{live.uri} is awake{' and has changed' if live.dirty else f' at version {version}'}, with "
        f"{format_plural(held, 'token')}; put it to sleep before waking {' of '.join(filter(None, wanted))}.",
        session=str(live.uri),
        version=order.version,
        at_token=order.at_token,
    )
