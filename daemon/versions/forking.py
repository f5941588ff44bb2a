"""Forks: a fork begins with the state of another session at some token, and has its own history from there.

A fork has its own version from the start, durable before any request sees it. Its chain refers to the blocks of the
other session. No block is copied, and blocks never change, so neither session can change the other. At an earlier
token, the tokens behind the last full block are computed and written anew, as by a wake at that token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...memvid.answers import VersionInfo
from ...memvid.disk.clock import now_ns
from ...memvid.format.manifest import UNNAMED
from ...memvid.store import Receipt, Store, VersionDraft
from ...memvid.uri import SessionUri
from ..api.events import OnEvent
from ..api.session import Origin
from ..disk.making_room import Room
from ..models.models import LoadedModel
from ..sessions.unprocessed_tail import without_answers, without_unread
from ..views.stored import FORKED_FROM, origin_of
from .orders import WakeOrder
from .version import copy_of
from .waking import disowned_of
from .writing import Terms, Versions


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """The order of a fork. at_token: None for all of the version's tokens. labels: None for those of the version.
    unnamed: as of `fork`."""

    row: VersionInfo
    uri: SessionUri
    at_token: int | None = None
    labels: tuple[str, ...] | None = None
    unnamed: bool = False

    @property
    def tokens(self) -> int:
        """The number of tokens of the fork."""
        return self.row.token_count if self.at_token is None else self.at_token

    @property
    def origin(self) -> Origin:
        """The origin in the fork's session map."""
        return origin_of(self.row, self.tokens)


@dataclass(frozen=True, slots=True)
class Forked:
    """A fork's first version, and how many tokens the model computed for it."""

    receipt: Receipt
    computed_tokens: int


class Forking:
    """Makes forks; in the store alone, if possible."""

    def __init__(self, store: Store, versions: Versions, room: Room) -> None:
        self._store = store
        self._versions = versions
        self._room = room

    def is_whole(self, order: ForkOrder) -> bool:
        """Whether all blocks of the other's version are there, so that a fork can refer to them. Raises StoreError."""
        with self._store.open_session(order.row.uri, order.row.version) as reader:
            return reader.is_whole()

    async def refer_to_all(self, order: ForkOrder) -> Forked:
        """Write the first version of a new session, with all of the other's tokens. The caller holds both turns. Raises
        StoreError: the other version is damaged or gone, or there is no room for the fork."""
        draft = await self._versions.threads.on_io(lambda: self._refer_to_all(order))
        return Forked(await self._room.after(lambda: self._versions.write(draft)), 0)

    async def cut_off(self, order: ForkOrder, model: LoadedModel, emit: OnEvent) -> Forked:
        """Write the first version of a new session, at an earlier token. The caller holds both turns, and memory for
        the other's state.

        Raises:
            StoreError: the other version is damaged or gone, or there is no room for the fork.
            NoSuchPosition: the version has fewer tokens. And the errors of a wake.
        """
        wake = WakeOrder(order.row.version, order.at_token, cause="fork")
        woken = await self._versions.waking.wake(order.row.uri, wake, model, emit)
        session = woken.session
        session.uri, session.created_ns = order.uri, now_ns()
        session.labels = session.labels if order.labels is None else order.labels
        session.unnamed = order.unnamed
        session.provenance = replace(session.provenance, forked_from=order.origin)
        computed = session.state.computed_tokens
        receipt = await self._versions.sleep(session, emit, cause="fork", terms=Terms(may_wait=True))
        return Forked(receipt, computed)

    def _refer_to_all(self, order: ForkOrder) -> VersionDraft:
        """A version with the other's chain; no block is read or written."""
        gone = disowned_of(self._store, order.row.uri)
        with self._store.open_session(order.row.uri, order.row.version) as reader:
            kept = without_answers(reader.manifest.session, order.row.uri, gone)
            return copy_of(reader, order.uri, _map_of_fork(kept, order))


def _map_of_fork(kept: Mapping[str, Any], order: ForkOrder) -> dict[str, Any]:
    if order.at_token is not None:
        kept = without_unread(kept)
    labels = kept.get("labels") if order.labels is None else list(order.labels)
    own = {"labels": labels, UNNAMED: order.unnamed, "created_ns": now_ns(), FORKED_FROM: asdict(order.origin)}
    return {**kept, **own}
