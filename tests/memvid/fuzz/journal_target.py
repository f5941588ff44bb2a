"""The journal: its bytes alone against a second decoder, and in a store that opens with them.

Records are sealed again after most changes, so that what they say is tried, and not only their digests.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

from blake3 import blake3
from torpor.memvid.disk.paths import closing_fd
from torpor.memvid.errors import StoreError
from torpor.memvid.folder.store_file import load_store_uuid
from torpor.memvid.format.journal import HEADER_BYTES, JournalRecord, Key, scan
from torpor.memvid.format.manifest import UNREAD, tail_in
from torpor.memvid.limits import MAX_JOURNAL_RECORD_BYTES
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making
from torpor.tests.memvid.fuzz.mutation import change_bytes, change_document, change_int
from torpor.tests.memvid.fuzz.store_targets import InStore, all_rows, contents_of, write
from torpor.tests.memvid.fuzz.target import SOUND, Target, again, require
from torpor.tests.memvid.store_making import IDENTITY, token_ids

STORE_UUID: Final = "6b1f7f0e-9b4e-4e6e-8d3c-0123456789ab"
NONCE: Final = b"12345678"
NEW: Final = SessionUri("work", "new")
HEAD_BYTES: Final = 32
MARKS: Final = (b"TURN", b"VOID")


def digest(*parts: bytes) -> bytes:
    return blake3(b"".join(parts)).digest()[:16]


@dataclass(frozen=True)
class Line:
    """One record as it stands in a file, or bytes that hold none: then `mark` is empty."""

    mark: bytes
    length: int
    payload: bytes
    is_sealed: bool = True

    def bytes_at(self, place: int, store: bytes) -> bytes:
        if not self.mark:
            return self.payload
        seal = digest(store, NONCE, place.to_bytes(8, "little"), self.payload) if self.is_sealed else bytes(16)
        data = self.mark + (self.length % (1 << 32)).to_bytes(4, "little") + NONCE + seal + self.payload
        return data + bytes(-len(data) % 8)


def put_together(lines: Iterable[Line], uuid: str, free: int = 64) -> bytes:
    store = digest(uuid.encode())
    data = b"TORPJNL1" + store + NONCE
    data += digest(data)
    for line in lines:
        data += line.bytes_at(len(data), store)
    return data + bytes(free)


def line_at(data: bytes, place: int, uuid: str) -> Line | None:
    """The record at a place, by the page of the format alone."""
    head = data[place : place + HEAD_BYTES]
    length = int.from_bytes(head[4:8], "little")
    end = place + HEAD_BYTES + length
    if len(head) < HEAD_BYTES or length > MAX_JOURNAL_RECORD_BYTES or end + -end % 8 > len(data):
        return None
    payload = data[place + HEAD_BYTES : end]
    sealed = digest(digest(uuid.encode()), head[8:16], place.to_bytes(8, "little"), payload)
    return Line(head[:4], length, payload) if sealed == head[16:] else None


def take_apart(data: bytes, uuid: str) -> list[tuple[int, Line]]:
    """What the whole file holds: records, and what lies between them, each with its place."""
    lines, place, gap = list[tuple[int, Line]](), HEADER_BYTES, HEADER_BYTES
    nonce = data[24:32] if data[32:48] == digest(data[:32]) else None
    while place < len(data):
        line = line_at(data, place, uuid)
        is_ours = line is not None and nonce in (None, data[place + 8 : place + 16])
        if line is None or not is_ours or (gap < place and line.mark not in MARKS):
            place += 8
            continue
        if gap < place:
            lines.append((gap, Line(b"", 0, data[gap:place])))
        lines.append((place, line))
        nonce = data[place + 8 : place + 16]
        gap = place = place + HEAD_BYTES + line.length + -line.length % 8
    if any(data[gap:]):
        lines.append((gap, Line(b"", 0, data[gap:])))
    return lines


def change_journal(data: bytes, uuid: str, rng: Random) -> bytes:
    lines = [line for _, line in take_apart(data, uuid)]
    if not lines or rng.random() < 0.15:
        return change_bytes(data, rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        number = rng.randrange(len(lines))
        line = lines[number]
        choice = rng.randrange(9)
        if choice < 4:
            payload = change_document(line.payload, rng)
            lines[number] = replace(line, payload=payload, length=len(payload))
        elif choice == 4:
            lines[number] = replace(line, length=change_int(line.length, 32, rng))
        elif choice == 5:
            lines[number] = replace(line, mark=rng.choice((b"TURN", b"VOID", b"TURO", b"VOIX", rng.randbytes(4))))
        elif choice == 6:
            lines.insert(rng.randrange(len(lines) + 1), line)
        elif choice == 7 and len(lines) > 1:
            del lines[number]
        else:
            lines[number] = replace(line, is_sealed=False)
    changed = put_together(lines, uuid, free=rng.choice((0, 8, 64)))
    return change_bytes(changed, rng) if rng.random() < 0.15 else changed


class JournalTarget(Target):
    """The bytes of a journal alone."""

    name = "journal"

    def seeds(self) -> Iterable[bytes]:
        bundle = bytes(range(32)).hex()
        records = [
            JournalRecord(store_making.URI, {UNREAD: {"tokens": token_ids(258, 5)}}, (2, bundle), bundle, 258, None),
            JournalRecord(NEW, {"score": math.nan, UNREAD: {"tokens": token_ids(0, 3)}}, None, None, 0, IDENTITY),
            JournalRecord(NEW, {UNREAD: {"tokens": token_ids(0, 7)}}, (1, bundle), None, 0, IDENTITY),
        ]
        lines = [Line(b"TURN", len(record.encode()), record.encode()) for record in records]
        yield put_together([], STORE_UUID)
        yield put_together(lines, STORE_UUID)
        yield put_together([replace(lines[0], mark=b"VOID"), *lines[1:]], STORE_UUID)
        yield put_together([lines[0], replace(lines[1], is_sealed=False), lines[2]], STORE_UUID, free=0)

    def change(self, data: bytes, rng: Random) -> bytes:
        return change_journal(data, STORE_UUID, rng)

    def check(self, data: bytes) -> str:
        key = Key.read(data[:HEADER_BYTES], STORE_UUID)
        found = list(scan(lambda start, count: data[start : start + count], len(data), key))
        holes = [one for one in found if one.payload is None]
        lines = take_apart(data, STORE_UUID)
        require(
            [(one.place, one.payload) for one in found if one.payload is not None]
            == [(place, line.payload) for place, line in lines if line.mark],
            "other records are found",
        )
        places = {place for place, line in lines if not line.mark}
        is_cut = len(data) >= HEADER_BYTES and (lines[-1][0] + len(lines[-1][1].payload) if lines else 0) >= len(data)
        require(places <= {hole.place for hole in holes}, "bytes that hold no record are not told")
        require(len(holes) <= len(places) + 1, "a hole is told where none is")
        for one in found:
            if one.payload is None:
                continue
            mark = data[one.place : one.place + 4]
            require(one.is_spoilt or mark in MARKS, "a damaged mark is not told")
            require(mark not in MARKS or one.is_void == (mark == b"VOID"), "a mark means something else")
            with contextlib.suppress(StoreError):
                record = JournalRecord.decode(one.payload)
                decoded = again(partial(JournalRecord.decode, record.encode()))
                require(repr(decoded) == repr(record), "a record is encoded otherwise")  # NaN is unlike itself
        return "reported" if holes or is_cut or key.nonce is None else SOUND


_SESSIONS: Final = 3
"""How many have turns in the journals that we begin with."""


class ReplayTarget(InStore):
    """The journal of a store that is opened to write: what it says becomes versions, and no other version changes."""

    name = "replay"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with closing_fd(os.open(self._template.path, os.O_RDONLY)) as root_fd:
            self._uuid = load_store_uuid(root_fd, str(self._template.path))
        with Store.open(self._template.path, writable=False) as store:
            self._newest = {row.uri: row.version for row in store.iter_sessions()}
            agent = store.find_session(store_making.URI)
            session = {"model": "demo", UNREAD: {"tokens": token_ids(260, 5)}}
            records = [
                store_making.turn(store, 5),
                JournalRecord(store_making.URI, session, (1, agent.bundle_id), agent.bundle_id, 256, None),
                store_making.turn(store, 7, uri=SessionUri("work", "packed")),
                store_making.turn(store, 3, uri=NEW),
            ]
            lost = replace(records[0], base="00" * 32, newest=None)
        self._seeds = [records, records[1:], records[::-1], [lost, *records[2:]]]

    def seeds(self) -> Iterable[bytes]:
        """Sealed for no store: what is kept of an input must be good for another run."""
        for records in self._seeds:
            yield put_together((Line(b"TURN", len(one.encode()), one.encode()) for one in records), STORE_UUID)
        yield put_together((Line(b"VOID", len(one.encode()), one.encode()) for one in self._seeds[0]), STORE_UUID)

    def change(self, data: bytes, rng: Random) -> bytes:
        return change_journal(data, STORE_UUID, rng)

    def check(self, data: bytes) -> str:
        template = self._template
        template.restore(indexed=bool(blake3(data).digest()[0] & 1))
        sealed = put_together((line for _, line in take_apart(data, STORE_UUID)), self._uuid)
        write(template.path / "journal" / "turns.mvj", sealed)
        with Store.open(template.path, writable=True) as store:
            after = contents_of(store, template.truths, b"")
            is_sound = store.verify(deep=True).ok and store.opening.turns_replayed == _SESSIONS
            waiting = set(store.acknowledged())
            require(waiting == set(store._core.journal.waiting), "turns are neither versions nor told to wait")
            counting = counting_in(sealed, self._uuid)
            made = self._require_told(store, counting)
            for uri in counting.keys() - waiting - made:
                require(_is_covered(store, counting[uri][1]), "turns are neither versions nor in one")
        for truth in template.truths.values():
            require(after.get(truth.bundle_id) == truth.blocks, "a version of before is lost or another one")
        with Store.open(template.path, writable=True) as store:
            require(store.opening.turns_replayed == 0, "turns are made versions twice")
            require(set(store.acknowledged()) == waiting, "turns that wait are gone at the next opening")
        return SOUND if is_sound and not waiting else "reported"

    def _require_told(self, store: Store, counting: dict[SessionUri, tuple[bytes, JournalRecord]]) -> set[SessionUri]:
        """Each version that is new says what the last record of its session says. Gives their sessions."""
        made = set()
        for row in all_rows(store):
            if row.version <= self._newest.get(row.uri, 0):
                continue
            payload, record = counting[row.uri]
            with store.open_session(row.uri, row.version) as reader:
                manifest = reader.manifest
            require(manifest.session.get("covers") == digest(payload), "a version names another record")
            require(manifest.tail == tail_in(record.session), "a version has other turns")
            require(manifest.block_tokens == record.held, "a version has other blocks")
            made.add(row.uri)
        return made


def _is_covered(store: Store, record: JournalRecord) -> bool:
    """Whether the session was deleted, or a later version of it begins with what the record says."""
    if record.newest is not None and not store.versions(record.uri):
        return True
    ledger = tail_in(record.session)
    if record.base is not None:
        with store.open_bundle(record.base) as base:
            ledger = base.tokens()[: 4 * record.held] + ledger
    for row in store.versions(record.uri):
        with store.open_session(row.uri, row.version) as reader:
            is_later = record.newest is None or row.version > record.newest[0]
            if is_later and (reader.tokens() + reader.manifest.tail).startswith(ledger):
                return True
    return False


def counting_in(data: bytes, uuid: str) -> dict[SessionUri, tuple[bytes, JournalRecord]]:
    """The last record of each session that has not become void."""
    counting: dict[SessionUri, tuple[bytes, JournalRecord]] = {}
    for _, line in take_apart(data, uuid):
        with contextlib.suppress(StoreError):
            if line.mark:
                record = JournalRecord.decode(line.payload)
                counting.pop(record.uri, None)
                if bits_apart(line.mark, b"TURN") <= bits_apart(line.mark, b"VOID"):
                    counting[record.uri] = line.payload, record
    return counting


def bits_apart(one: bytes, other: bytes) -> int:
    return sum((here ^ there).bit_count() for here, there in zip(one, other, strict=True))


TARGETS: Final[tuple[type[Target], ...]] = (JournalTarget, ReplayTarget)
