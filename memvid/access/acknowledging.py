"""Turns that count as soon as the journal has them, before a version does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import BlockMissing, BundleMissing
from ..folder.marks import is_stripped
from ..uri import SessionUri
from .sessions import Sessions

if TYPE_CHECKING:
    from ..format.journal import JournalRecord


class Acknowledging(Sessions):
    """The journal of an open store."""

    def acknowledge(self, records: Sequence[JournalRecord]) -> None:
        """Make turns of sessions durable, all with one flush: when this returns, they survive any end of the process
        and of the power. The next version of a session takes the place of its record; so does its next record.

        Raises:
            NoSpace, StoreIoError, LimitExceeded, InvalidDraft, JournalWaits: none of them counts.
            BundleMissing, BlockMissing: the version behind which one of them stands is not listed any more, or is
                stripped (without marks: lacks keys and values); none of them counts.
            DurabilityLost, LockLost: not acknowledged, and this store writes no more until it is opened again.
            ReadOnlyStore, StoreClosed
        """
        self._core.require_writable()
        for base in {record.base for record in records if record.base is not None}:
            self._require_kept(base)
        with self._core.journaling():
            self._core.require_writable()  # the flush of another thread, for which this one waited, may have failed
            self._core.journal.append(records, partial(self._require_kept, again=False))

    def _require_kept(self, bundle_id: str, *, again: bool = True) -> None:
        """Turns stand behind a manifest that is there, and behind blocks that stay. A strip comes under the journal's
        lock. Without marks nothing is stripped, but what was before may have no keys and values.

        again: look for missing blocks once more, which is not for who holds the journal.
        """
        path = self._core.folder.manifest_path(bundle_id)
        if not self._core.folder.has_manifest(bundle_id):
            raise BundleMissing(
                f"The manifest {path} is not there any more, and turns stand behind it.",
                bundle_id=bundle_id,
                path=path,
            )
        stripped = is_stripped(self._core.folder, bundle_id)
        if stripped or (stripped is None and self._core.missing_of(self._core.needs.of(bundle_id), again=again)):
            raise BlockMissing(
                f"The version of {path} is stripped: its keys and values may go, and turns stand behind them.",
                bundle_id=bundle_id,
                path=path,
            )

    def make_room_to_acknowledge(self, uri: SessionUri, record_bytes: int, base: str | None = None) -> None:
        """Take the disk space of a session's next record now, so that a full disk refuses a turn before it begins. Of
        the budgets only the room to be kept free counts. base: the bundle behind which it is to stand.

        Raises:
            NoSpace, BudgetExceeded, StoreIoError, LimitExceeded, JournalWaits, BundleMissing, BlockMissing: nothing has
                changed.
            DurabilityLost, LockLost, ReadOnlyStore, StoreClosed
        """
        self._core.require_writable()
        if base is not None:
            self._require_kept(base)
        with self._core.metering(beyond="budgets") as room, self._core.journaling():
            self._core.require_writable()
            self._core.journal.reserve(uri, record_bytes, room.require)

    def give_back_room(self, uri: SessionUri) -> None:
        """What room was taken for a session's next record is for others again. Waits for no flush."""
        self._core.journal.room.pop(uri, None)

    def has_turns(self, uri: SessionUri) -> bool:
        """Whether the journal has turns of a session which no version has."""
        self._core.require_open()
        return self._core.journal.has(uri)

    def replay_turns(self, uri: SessionUri) -> None:
        """Make a version of what the journal has of a session, as an opening does: its state has left memory without a
        sleep, or there was no room for the version before.

        Raises:
            What `write_bundle` raises, and CorruptJournal; the journal keeps it.
        """
        from ..recovery.replaying import replay_session

        self._core.require_writable()
        with self._core.poisoning():
            replay_session(self._core, uri)

    def acknowledged_turns(self, uri: SessionUri) -> JournalRecord | None:
        """What the journal has of a session since its newest version; None for nothing. Raises CorruptJournal,
        StoreIoError."""
        self._core.require_open()
        return self._core.journal.find(uri)

    def acknowledged(self) -> list[SessionUri]:
        """The sessions that have turns in the journal which no version has."""
        self._core.require_open()
        return self._core.journal.uris()
