"""STORE/journal: turns that were acknowledged and that no version covers yet.

    journal/turns.mvj     one file, to which records are appended; `format/journal.py` has its bytes
    journal/turns.mvj.N   one that was put back while another one was open; an opening takes it up behind that one

Owns the file: its room on the disk, its flushes, and which record of it counts. `recovery/replaying.py` makes versions
of what it finds there when a store is opened.

Rules:
- A record says all that is not in the session's newest version, so the last one of a session counts alone. The next
  version takes its place: it is void then, in memory and in the file, and so are the session's earlier ones. Where the
  file takes no change, the next flush tries again, and an opening finds that the version names the record.
- Records that wait together are written together and flushed once. They count as acknowledged when `append` returns.
- The file ends in zeros. Room for a turn is taken before the turn begins, so that a full disk refuses it in time; what
  was taken for one session is not used up by others.
- When most of the file is void, the rest of it is written into a new file, which takes its place by one rename. So is
  it before the next record, if some of the file is damaged, or if it is no longer in its place. A record that was
  damaged meanwhile is copied as it is, behind the session's newest sound one: the next one takes the place of both, or
  the next opening tells of the damage and uses the sound one.
- A journal that was missing may be put back while another one is open. Where it has turns that the open one never had,
  it gets another name before a new file takes this one. A session that is deleted goes from all journals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ..answers import Finding
from ..disk import durable
from ..disk.paths import (
    Closing,
    is_named,
    list_names,
    open_file,
    open_folder,
    opened_folder,
    read_at,
    stat_open,
    undoing,
)
from ..errors import CorruptJournal, DurabilityLost, JournalWaits, LimitExceeded, StoreError, StoreIoError
from ..format.journal import (
    END_BYTES,
    HEADER_BYTES,
    VOID,
    JournalRecord,
    Key,
    digest_of,
    scan,
    size_of,
)
from ..limits import KIB, MAX_JOURNAL_BYTES, MAX_JOURNAL_RECORD_BYTES, MIB
from ..uri import SessionUri
from .damaged import free_name, move_aside
from .folder import StoreFolder
from .journal_findings import UNREADABLE, describe_hole
from .store_file import JOURNAL

TURNS_FILE: Final = "turns.mvj"

_NAME: Final = re.compile(r"turns\.mvj(\.[0-9]+)?", re.ASCII)
"""The names that `free_name` gives."""

_STEP_BYTES: Final = 64 * KIB
_STEP_SHARE: Final = 4
"""Room is taken in steps of this size, or of a part of a longer file, so that most records lengthen none."""

_MOST_STEP_BYTES: Final = 1 * MIB

_SMALL_BYTES: Final = 1 * MIB
"""A smaller file is not written anew, however little of it counts."""

_VOID_SHARE: Final = 4
"""A file is written anew when it is so many times as long as what counts in it."""

_MOST_FINDINGS: Final = 100
"""What is told of one damaged file, before the rest is only counted."""


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where the record of a session that counts stands in the file. older: the session's record before it, which would
    count if this one were damaged."""

    start: int
    payload_bytes: int
    digest: bytes
    base: str | None
    older: _Place | None = None

    def starts(self) -> Iterator[int]:
        """Where this record and the older ones begin."""
        place: _Place | None = self
        while place is not None:
            yield place.start
            place = place.older


class Journal(Closing):
    """The journal of one open store. Safe from several threads. Its file is made at the first record.

    findings: what of it cannot be read. waiting: the sessions whose turns could not be made versions, and why. room:
    the bytes of each session's next record, for which room on the disk is taken; any thread may take one out, and waits
    for no flush. lock: while it is held, no record comes.
    """

    def __init__(self, folder: StoreFolder, name: str = TURNS_FILE) -> None:
        self.folder_path = f"{folder.path}/{JOURNAL}"
        self.path = f"{self.folder_path}/{name}"
        self._name = name
        self.findings: list[Finding] = []
        self.waiting: dict[SessionUri, str] = {}
        self._folder = folder
        self.lock = threading.RLock()
        self._fd = self._folder_fd = -1
        self._key = Key.new(folder.uuid)
        self._end = self._size = 0
        self._live: dict[SessionUri, _Place] = {}
        self._void: list[_Place] = []
        self._is_spoilt = False
        self.room: dict[SessionUri, int] = {}

    # --- opening and closing

    @classmethod
    def load(cls, folder: StoreFolder, *, writable: bool, name: str = TURNS_FILE) -> Journal:
        """What there is of a journal. Damage is told in `findings`, and costs nothing but what it lies in. A file that
        cannot be this store's journal is moved to `damaged`.

        Raises:
            UnsafePath; StoreIoError: it cannot be read, and a writer would sleep over what is in it. A reader is told.
            NoSpace, DurabilityLost: it could not be moved.
        """
        journal = cls(folder, name)
        with undoing(journal.close), contextlib.suppress(FileNotFoundError):
            journal._folder_fd = open_folder(folder.root_fd, JOURNAL, journal.folder_path)
            try:
                flags = os.O_RDWR if writable else os.O_RDONLY
                journal._fd = open_file(journal._folder_fd, name, flags, journal.path)
                journal._scan()
            except (CorruptJournal, LimitExceeded) as error:
                journal._find(f"{journal.path} is not read: {error.message}")
                if writable:
                    move_aside(folder.root_fd, folder.path, journal._folder_fd, name, journal.folder_path)
                    os.close(journal._fd)
                    journal._fd, journal._end, journal._size = -1, 0, 0
            except StoreIoError as error:
                message = f"{error.message} Turns in it may not be in any version yet. {UNREADABLE}"
                if writable:
                    raise StoreIoError(message, **error.details) from error
                journal.findings.append(Finding(journal.path, StoreIoError.code, message))
        return journal

    def close(self, *, tidying: bool = False) -> None:
        """Close the file. tidying: write what it was not told yet, or remove one that says nothing any more.
        Idempotent."""
        with self.lock:
            self.room.clear()
            if tidying:
                with contextlib.suppress(StoreError):
                    self.settle()
            for fd in (self._fd, self._folder_fd):
                if fd >= 0:
                    os.close(fd)
            self._fd = self._folder_fd = -1

    def _scan(self) -> None:
        self._size = stat_open(self._fd, self.path).st_size
        _require_short(self.path, self._size)
        header = self._read(0, HEADER_BYTES)
        self._key, self._end = Key.read(header, self._folder.uuid), HEADER_BYTES
        if self._key.nonce is None:
            self._find(f"{self.path}: its header is damaged. What stands behind it is used.")
        for found in scan(self._read, self._size, self._key):
            if found.payload is None:
                self._find(f"{self.path}: {describe_hole(found)}")
                continue
            self._end, self._key = found.end, Key(self._key.store, found.nonce)
            try:
                record = JournalRecord.decode(found.payload)
            except CorruptJournal as error:
                self._find(f"{self.path}: at byte {found.place} {error.message}")
                continue
            if found.is_spoilt:
                self._find(f"{self.path}: bytes around the record at byte {found.place} are damaged. It is used.")
            older = self._live.pop(record.uri, None)
            if not found.is_void:
                self._live[record.uri] = _Place(
                    found.place, len(found.payload), digest_of(found.payload), record.base, older
                )
            elif older is not None:
                self._void.append(older)

    def _find(self, message: str) -> None:
        self._is_spoilt = True
        if len(self.findings) == _MOST_FINDINGS:
            message = f"{self.path}: there is more damage than is told here."
        if len(self.findings) <= _MOST_FINDINGS:
            self.findings.append(Finding(self.path, CorruptJournal.code, message))

    def _read(self, start: int, count: int) -> bytes:
        return read_at(self._fd, start, count, self.path)

    # --- what it holds

    def uris(self) -> list[SessionUri]:
        with self.lock:
            return list(self._live)

    def has(self, uri: SessionUri) -> bool:
        """Waits for no flush."""
        return uri in self._live

    def bases(self) -> dict[SessionUri, str]:
        with self.lock:
            return {uri: place.base for uri, place in self._live.items() if place.base is not None}

    def find(self, uri: SessionUri) -> JournalRecord | None:
        """The record of a session that counts. Raises CorruptJournal, StoreIoError."""
        with self.lock:
            place = self._live.get(uri)
            return None if place is None else JournalRecord.decode(self._payload(place))

    def digest_of(self, uri: SessionUri) -> bytes | None:
        """By which the next version of a session names the record in whose place it comes; None if it takes the place
        of none."""
        place = self._live.get(uri)
        return None if place is None or uri in self.waiting else place.digest

    def _payload(self, place: _Place) -> bytes:
        record = self._key.record_at(self._read, place.start, self._size)
        if record is None or record.payload is None:
            raise CorruptJournal(f"{self.path}: the record at byte {place.start} is not what was written there.")
        return record.payload

    def require_settled(self, uri: SessionUri) -> None:
        """Raises JournalWaits: what was acknowledged of a session could not be made a version."""
        if (reason := self.waiting.get(uri)) is not None:
            raise JournalWaits(
                f"The journal has acknowledged turns of {uri} that could not be made a version: {reason} Put that "
                "right: the next start of the daemon tries again, and so does the next request that uses the session. "
                f"To go on without them, fork an earlier version (`torpor fork {uri.name}@VERSION NAME`), or delete "
                "the session.",
                session=str(uri),
                reason=reason,
            )

    # --- writing

    def reserve(self, uri: SessionUri, payload_bytes: int, ask: Callable[[int], None]) -> None:
        """Take room on the disk for the next record of a session, so that its `append` needs none. ask: raises if no
        more than so many bytes of the disk may be taken.

        Raises:
            What `ask` raises.
            NoSpace, StoreIoError, DurabilityLost; LimitExceeded: no record may be so large.
            JournalWaits: turns of the session that were acknowledged earlier are not in a version yet.
        """
        _require_small(uri, payload_bytes)
        with self.lock:
            self.require_settled(uri)
            self._have_room(size_of(payload_bytes), [uri], ask)
            self.room[uri] = payload_bytes

    def append(self, records: Sequence[JournalRecord], require_base: Callable[[str], object] = lambda _: None) -> None:
        """Write records and flush them: when this returns, they survive. require_base: raises if turns cannot stand
        behind this bundle.

        Raises:
            What `require_base` raises.
            NoSpace, StoreIoError, LimitExceeded, JournalWaits, InvalidDraft: none of them counts.
            DurabilityLost: whether they survive is unknown.
        """
        payloads = [record.encode() for record in records]
        for record, payload in zip(records, payloads, strict=True):
            _require_small(record.uri, len(payload))
        with self.lock:
            for record in records:
                self.require_settled(record.uri)
                if record.base is not None:
                    require_base(record.base)
            self._have_room(sum(map(size_of, map(len, payloads))), [record.uri for record in records])
            places, parts, end = dict[SessionUri, _Place](), [], self._end
            for record, payload in zip(records, payloads, strict=True):
                older = places.get(record.uri) or self._live.get(record.uri)
                places[record.uri] = _Place(end, len(payload), digest_of(payload), record.base, older)
                parts.append(self._key.record(payload, end))
                end += len(parts[-1])
            self._write(b"".join(parts))
            self._end = end
            self._live.update(places)
            for uri in places:
                self.room.pop(uri, None)

    def cover(self, uri: SessionUri) -> None:
        """A version takes the place of what was acknowledged of a session: its record counts no more. What the file
        does not take now it takes with the next flush. Turns that wait stay: no version but their own has them. Raises
        DurabilityLost."""
        with self.lock:
            if uri not in self.waiting and self._let_go(uri) is not None:
                try:
                    self.settle(removing=False)
                except DurabilityLost:
                    raise
                except StoreError:
                    pass

    def drop(self, uri: SessionUri) -> None:
        """The session is deleted: its record counts no more, durably. Needs no room on the disk.

        Raises:
            StoreIoError: the record still counts.
            DurabilityLost
        """
        with self.lock:
            for other in self.beside():
                if other._let_go(uri) is not None:
                    other.settle()
            reserved, reason = self.room.pop(uri, None), self.waiting.get(uri)
            place = self._let_go(uri)
            try:
                self.settle()
            except BaseException:
                if place is not None:
                    with contextlib.suppress(ValueError):  # it is void in a file that has left its place
                        self._void.remove(place)
                    self._live[uri] = place
                if reserved is not None:
                    self.room[uri] = reserved
                if reason is not None:
                    self.waiting[uri] = reason
                raise

    def _let_go(self, uri: SessionUri) -> _Place | None:
        """In memory: its record counts no more."""
        self.waiting.pop(uri, None)
        if (place := self._live.pop(uri, None)) is not None:
            self._void.append(place)
        return place

    def settle(self, *, removing: bool = True) -> None:
        """Make durable that records count no more, and those that do if the file has left its place. removing: a file
        in which none counts goes. Raises UnsafePath, StoreIoError, NoSpace, DurabilityLost."""
        with self.lock:
            if removing and self._fd >= 0 and not self._live and not self.room:
                self._remove()
            elif self._fd >= 0:
                is_in_place = self._is_in_place()
                if self._void:  # also where it was moved to: it may be put back
                    self._write(b"")
                if not is_in_place:
                    self._write_anew(_bytes_but(self.room, []))

    def erase(self, uri: SessionUri) -> None:
        """Leave no byte of a session in the file, of records that count no more either.

        Raises:
            NoSpace, StoreIoError, LimitExceeded, DurabilityLost
        """
        with self.lock:
            for journal in itertools.chain(self.beside(), [self]):
                journal.room.pop(uri, None)
                journal._let_go(uri)
                if journal._fd >= 0:
                    if journal._live or journal.room:
                        journal._write_anew(_bytes_but(journal.room, []))
                    else:
                        journal._remove()

    def _have_room(
        self, needed: int, uris: Collection[SessionUri], ask: Callable[[int], None] = lambda _: None
    ) -> None:
        """Room for so many bytes of these sessions behind the last record, and for what is reserved; if it has to be
        taken, in a new file where most of the old one is void."""
        needed += _bytes_but(self.room, uris)
        is_sound = self._fd >= 0 and not self._is_spoilt and self._is_in_place()
        if is_sound and self._end + needed + END_BYTES <= self._size:
            return
        counting = sum(size_of(place.payload_bytes) for place in self._live.values())
        anew_bytes, longer_bytes = _in_steps(HEADER_BYTES + counting + needed), _in_steps(self._end + needed)
        _require_short(self.path, anew_bytes)
        most_bytes = min(MAX_JOURNAL_BYTES, max(_SMALL_BYTES, _VOID_SHARE * anew_bytes))
        if not is_sound or longer_bytes > most_bytes:
            ask(anew_bytes)
            self._write_anew(needed)
        else:
            step_bytes = min(_MOST_STEP_BYTES, self._size // _STEP_SHARE)
            longer_bytes = max(longer_bytes, min(most_bytes, _in_steps(self._size + step_bytes)))
            ask(longer_bytes - self._size)
            self._lengthen(longer_bytes)

    def _is_in_place(self) -> bool:
        """Whether the open file still has its name in the store: what is written into another one is lost."""
        return is_named(self._folder_fd, self._name, self._fd, self.path) and is_named(
            self._folder.root_fd, JOURNAL, self._folder_fd, self.folder_path
        )

    # --- other files

    def strange(self) -> list[str]:
        """The names of journals in the store's folder that are not the open file. Raises UnsafePath, StoreIoError."""
        with (
            self.lock,  # a new file has its name some time before it is the open one
            contextlib.suppress(FileNotFoundError),
            opened_folder(self._folder.root_fd, JOURNAL, self.folder_path) as fd,
        ):
            names = filter(_NAME.fullmatch, list_names(fd, self.folder_path))
            others = [each for each in names if self._fd < 0 or not is_named(fd, each, self._fd, self.path)]
            return sorted(others, key=lambda name: (len(name), name))
        return []

    def beside(self, *, writable: bool = True) -> Iterator[Journal]:
        """The journals in the store's folder that are not this one. Under `lock`. Raises as `load`."""
        for name in self.strange():
            with Journal.load(self._folder, writable=writable, name=name) as other:
                yield other

    def take_up(self) -> bool:
        """At an opening, once the file is gone, for nothing in it counts: give its name to one that was kept beside it.
        Whether there is one. Raises UnsafePath, NoSpace, StoreIoError, DurabilityLost."""
        names = self.strange()
        if self._fd >= 0 or not names:
            return False
        self._open_folder()
        durable.move(self._folder_fd, names[0], self.folder_path, self._folder_fd, TURNS_FILE, self.folder_path)
        return True

    def _make_way(self) -> None:
        """Another file has the name of this one: it gets another name, if turns count in it that never were in this
        one. What was in this one, and counts no more, is void in it then."""
        if self._name not in self.strange():
            return
        with Journal.load(self._folder, writable=True, name=self._name) as other:
            is_new = False
            for uri, place in list(other._live.items()):
                own = self._live.get(uri)
                if own is not None and own.digest == place.digest:
                    continue
                record = self._key.record_at(self._read, place.start, self._size) if self._fd >= 0 else None
                if record is not None and record.payload is not None and digest_of(record.payload) == place.digest:
                    other._let_go(uri)
                else:
                    is_new = True
            if is_new:
                other.settle(removing=False)
                new = free_name(self._name, list_names(self._folder_fd, self.folder_path))
                durable.move(self._folder_fd, self._name, self.folder_path, self._folder_fd, new, self.folder_path)

    # --- writing the file

    def _lengthen(self, size_bytes: int) -> None:
        try:
            durable.write_at(self._fd, self._size, bytes(size_bytes - self._size), self.path)
        except StoreError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        durable.sync_file(self._fd, self.path)
        self._size = size_bytes

    def _write(self, data: bytes) -> None:
        """Write behind the last record, where there is room, and make void what counts no more; flush both."""
        try:
            durable.write_at(self._fd, self._end, data, self.path)
            for start in itertools.chain.from_iterable(place.starts() for place in self._void):
                durable.write_at(self._fd, start, VOID, self.path)
        except StoreError as error:
            self._take_back(len(data), error)
            raise
        durable.sync_file(self._fd, self.path)
        self._void.clear()

    def _take_back(self, written: int, failure: StoreError) -> None:
        """Zeros again where a write failed: a turn that is refused must not be found by the next opening. Records are
        written in order, so if the first one is not whole, none is."""
        is_whole = True
        try:
            is_whole = self._key.record_at(self._read, self._end, self._end + written) is not None
            durable.write_at(self._fd, self._end, bytes(written), self.path)
            if is_whole:
                durable.sync_file(self._fd, self.path)
        except StoreError as error:
            if is_whole and written:
                raise DurabilityLost(
                    f"Writing {self.path} failed ({failure.message}), and what was written of it could not be taken "
                    f"back ({error.message}). Nothing more is written until the store is opened again.",
                    path=self.path,
                ) from error
            self._is_spoilt = True

    def _write_anew(self, needed: int) -> None:
        """Put a new file in the place of the old one, with the records that count and room for so many bytes more."""
        self._open_folder()
        key, end, places = Key.new(self._folder.uuid), HEADER_BYTES, dict[SessionUri, _Place]()
        with durable.TempFile(self._folder_fd, self.folder_path) as temp:
            temp.append([key.header()])
            for uri, newest in self._live.items():
                for old, payload in _to_copy(newest, self._payload):
                    if payload is not None:
                        record = key.record(payload, end)
                    else:  # with a mark, for zeros would be no damage
                        damaged = VOID + self._read(old.start, size_of(old.payload_bytes))[len(VOID) :]
                        record = damaged.ljust(size_of(old.payload_bytes), b"\0")
                    temp.append([record])
                    places[uri] = dataclasses.replace(old, start=end, older=places.get(uri))
                    end += len(record)
            size = _in_steps(end + needed)
            _require_short(self.path, size)
            temp.append([bytes(size - end)])
            temp.sync()
            fd = temp.duplicate()  # before: once it has its name, what is written into the old one would be lost
            with undoing(partial(os.close, fd)):
                self._make_way()
                temp.publish(self._name, replacing=self._fd >= 0)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._key, self._live = fd, key, places
        self._end, self._size = end, size
        self._void.clear()
        self._is_spoilt = False

    def _open_folder(self) -> None:
        """Open the folder that the store has now; make it if it has none."""
        root_fd, moved = self._folder.root_fd, self._folder_fd
        if moved >= 0 and is_named(root_fd, JOURNAL, moved, self.folder_path):
            return
        durable.make_folder(root_fd, JOURNAL, self._folder.path)
        self._folder_fd = open_folder(root_fd, JOURNAL, self.folder_path)
        if moved >= 0:
            os.close(moved)

    def _remove(self) -> None:
        if self._is_in_place():
            durable.remove(self._folder_fd, self._name, self.folder_path)
            durable.sync_folder(self._folder_fd, self.folder_path)
        elif self._void:  # where it was moved to: it may be put back
            self._write(b"")
        os.close(self._fd)
        self._fd, self._end, self._size = -1, 0, 0
        self._void.clear()
        self._is_spoilt = False


def _bytes_but(room: dict[SessionUri, int], uris: Collection[SessionUri]) -> int:
    """The bytes in the file that are taken for other sessions than these."""
    return sum(size_of(count) for uri, count in list(room.items()) if uri not in uris)


def _to_copy(newest: _Place, payload_of: Callable[[_Place], bytes]) -> list[tuple[_Place, bytes | None]]:
    """The record of a session that counts; if it is damaged, without a payload, behind the newest sound one."""
    place: _Place | None = newest
    damaged: list[tuple[_Place, bytes | None]] = []
    while place is not None:
        with contextlib.suppress(CorruptJournal):
            return [(place, payload_of(place)), *damaged]
        place, damaged = place.older, [(newest, None)]
    return damaged


def _in_steps(size_bytes: int) -> int:
    """The length of a file with so many bytes in it, and zeros behind them."""
    return -(-(size_bytes + END_BYTES) // _STEP_BYTES) * _STEP_BYTES


def _require_small(uri: SessionUri, payload_bytes: int) -> None:
    if payload_bytes > MAX_JOURNAL_RECORD_BYTES:
        raise LimitExceeded(
            f"What {uri} has beyond its newest version takes {payload_bytes} bytes in the journal; the limit is "
            f"{MAX_JOURNAL_RECORD_BYTES}. Put it to sleep.",
            session=str(uri),
            size_bytes=payload_bytes,
            limit=MAX_JOURNAL_RECORD_BYTES,
        )


def _require_short(path: str, size_bytes: int) -> None:
    if size_bytes > MAX_JOURNAL_BYTES:
        raise LimitExceeded(
            f"{path} would have {size_bytes} bytes; the limit is {MAX_JOURNAL_BYTES}. Put sessions to sleep.",
            path=path,
            size_bytes=size_bytes,
            limit=MAX_JOURNAL_BYTES,
        )
