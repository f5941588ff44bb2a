"""The bytes of the journal: a header, then records. Pure: bytes in, values out.

    header    8 bytes TORPJNL1, 16 a mark of the store, 8 random, 16 digest of these
    record    4 bytes TURN or VOID, 4 length of the payload, 8 as in the header, 16 digest; payload; zeros up to 8 bytes

A record's digest covers the store, the random bytes, the place in the file and the payload. So a record of another
store, of an earlier journal or of another place in this one does not count. The digest leaves out the first four bytes:
they are overwritten when the record counts no more, which takes no room. Integers are little-endian; a payload is
canonical msgpack. Zeros follow the last record, END_BYTES at least: room on the disk that is taken before it is needed.
A file that was cut behind a record lacks them.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from blake3 import blake3

from ..errors import CorruptJournal, StoreError
from ..limits import (
    CHUNK_BYTES,
    MAX_ENVIRONMENT_ENTRIES,
    MAX_IDENTITY_PARTS,
    MAX_JOURNAL_BYTES,
    MAX_JOURNAL_RECORD_BYTES,
    MAX_TOKENS,
    MAX_VERSION,
)
from ..uri import SessionUri
from .blocks import ID_BYTES
from .identity import Identity
from .manifest import bytes_in, identity_in, integer_in, map_in, require_session_map
from .packing import pack, unpack

_MAGIC: Final = b"TORPJNL1"
_TURN: Final = b"TURN"
VOID: Final = b"VOID"
"""Stands in the place of `TURN` once a record counts no more. The session's earlier records do not count either."""
_HEADER: Final = struct.Struct("<8s16s8s16s")
_HEAD: Final = struct.Struct("<4sI8s16s")
_PLACE: Final = struct.Struct("<Q")
_NONCE_BYTES: Final = 8
_DIGEST_BYTES: Final = 16
_ALIGNED: Final = 8
_MOST_BYTES_IN_VAIN: Final = MAX_JOURNAL_BYTES
"""Of what looks like records behind damage and is none, before the rest of the file is given up. Damaged records never
take so much; only what somebody has put together for it does."""

COVERS: Final = "covers"
"""The entry of a version's session map that names the record in whose place it came, by `digest_of`."""

_MOST_VALUES_BESIDE: Final = 3 * MAX_IDENTITY_PARTS + 2 * MAX_ENVIRONMENT_ENTRIES + 32
"""What a manifest holds beside the session map, in values; more bytes than what it covers takes."""

HEADER_BYTES: Final = _HEADER.size
END_BYTES: Final = _ALIGNED


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """What was acknowledged of a session since its newest version; a later record of a session replaces an earlier one.

    newest: number and bundle id of its newest version at that time; None where it had none.
    base: the bundle whose first blocks hold the first `held` tokens; None where no block is kept, and `held` is 0.
    identity: of the model; None where the base says it.
    session: the session map, with the tokens behind `held` under `unread`.
    """

    uri: SessionUri
    session: Mapping[str, Any]
    newest: tuple[int, str] | None
    base: str | None
    held: int
    identity: Identity | None

    def encode(self) -> bytes:
        """Raises InvalidDraft, LimitExceeded: no version could have this session map."""
        require_session_map({**self.session, COVERS: [None] * _MOST_VALUES_BESIDE})
        return pack(
            {
                "uri": str(self.uri),
                "session": dict(self.session),
                "newest": None if self.newest is None else [self.newest[0], bytes.fromhex(self.newest[1])],
                "base": None if self.base is None else bytes.fromhex(self.base),
                "held": self.held,
                "identity": None if self.identity is None else [list(part) for part in self.identity.parts],
            },
            "a journal record",
        )

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Raises CorruptJournal: `encode` does not write this."""
        try:
            fields = map_in(unpack(payload, max_bytes=MAX_JOURNAL_RECORD_BYTES, what="a journal record"))
            record = cls(
                SessionUri.parse(fields["uri"]),
                map_in(fields["session"]),
                _newest_in(fields["newest"]),
                None if fields["base"] is None else bytes_in(fields["base"], ID_BYTES).hex(),
                integer_in(fields["held"], 0, MAX_TOKENS),
                None if fields["identity"] is None else identity_in(fields["identity"]),
            )
        except (KeyError, TypeError, ValueError, StoreError) as error:
            raise CorruptJournal(f"a record of the journal is not valid: {error}.") from error
        if (record.base is None) != (record.identity is not None) or (record.base is None and record.held):
            raise CorruptJournal("a record of the journal has tokens in blocks, and names no bundle of them.")
        return record


def _newest_in(value: object) -> tuple[int, str] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError("a version in it is no list")  # noqa: TRY004 - as for all that is malformed
    version, bundle_id = value
    return integer_in(version, 0, MAX_VERSION), bytes_in(bundle_id, ID_BYTES).hex()


# --- the file


@dataclass(frozen=True, slots=True)
class Key:
    """What makes a record one of this journal. nonce: as in the header; None where that is damaged, until a record
    tells it."""

    store: bytes
    nonce: bytes | None

    @classmethod
    def new(cls, store_uuid: str) -> Self:
        return cls(digest_of(store_uuid.encode()), os.urandom(_NONCE_BYTES))

    @classmethod
    def read(cls, header: bytes, store_uuid: str) -> Self:
        """The key of a journal that begins so.

        Raises:
            CorruptJournal: it is another store's, or of another version of Torpor.
        """
        ours = digest_of(store_uuid.encode())
        if len(header) < HEADER_BYTES or header[-_DIGEST_BYTES:] != digest_of(header[:-_DIGEST_BYTES]):
            return cls(ours, None)
        magic, store, nonce, _ = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise CorruptJournal("another version of Torpor wrote it.")
        if store != ours:
            raise CorruptJournal("it belongs to another store.")
        return cls(ours, nonce)

    def header(self) -> bytes:
        begun = _MAGIC + self.store + (self.nonce or b"")
        return begun + digest_of(begun)

    def record(self, payload: bytes, place: int) -> bytes:
        assert self.nonce is not None
        digest = digest_of(self.store, self.nonce, _PLACE.pack(place), payload)
        head = _HEAD.pack(_TURN, len(payload), self.nonce, digest)
        return (head + payload).ljust(size_of(len(payload)), b"\0")

    def heads(self) -> re.Pattern[bytes]:
        """Finds where records of this journal may begin: mark, a length below 16 MiB, nonce."""
        nonce = b"." * _NONCE_BYTES if self.nonce is None else re.escape(self.nonce)
        return re.compile(b"(?:TURN|VOID)(?=...\0" + nonce + b")", re.DOTALL)

    def payload_bytes_at(self, read: Read, place: int, size_bytes: int) -> int | None:
        """The length of what may be a record of this journal; None for bytes that cannot be one."""
        head = read(place, _HEAD.size)
        if len(head) < _HEAD.size:
            return None
        _, length, nonce, _ = _HEAD.unpack(head)
        if length > MAX_JOURNAL_RECORD_BYTES or self.nonce not in (None, nonce):
            return None
        return length if place + size_of(length) <= size_bytes else None

    def record_at(self, read: Read, place: int, size_bytes: int) -> Found | None:
        """The record at a place; None where none is."""
        length = self.payload_bytes_at(read, place, size_bytes)
        if length is None:
            return None
        whole = read(place, size_of(length))
        mark, _, nonce, digest = _HEAD.unpack_from(whole)
        payload, padding = whole[_HEAD.size : _HEAD.size + length], whole[_HEAD.size + length :]
        if digest != digest_of(self.store, nonce, _PLACE.pack(place), payload):
            return None
        is_void = _distance(mark, VOID) < _distance(mark, _TURN)
        is_spoilt = mark not in (_TURN, VOID) or any(padding)
        return Found(place, place + len(whole), payload, nonce, is_void, is_spoilt)


def _distance(one: bytes, other: bytes) -> int:
    """How many bits part two words of one length."""
    return (int.from_bytes(one) ^ int.from_bytes(other)).bit_count()


def digest_of(*parts: bytes) -> bytes:
    """16 bytes. By that of its payload a version tells the record in whose place it came."""
    return blake3(b"".join(parts)).digest(_DIGEST_BYTES)


def size_of(payload_bytes: int) -> int:
    return _HEAD.size + -(-payload_bytes // _ALIGNED) * _ALIGNED


@dataclass(frozen=True, slots=True)
class Found:
    """A record at its place in the file; without a payload, bytes that hold none, up to the next record or the end.
    is_spoilt: it is whole, but its mark or the zeros behind it are damaged."""

    place: int
    end: int
    payload: bytes | None = None
    nonce: bytes | None = None
    is_void: bool = False
    is_spoilt: bool = False


Read = Callable[[int, int], bytes]
"""Reads so many bytes from a place of the file, fewer at its end."""


def scan(read: Read, size_bytes: int, key: Key) -> Iterator[Found]:
    """All records of a file, and the bytes between them that hold none: 0 bytes at the end of a file that was cut
    there. Holds two records in memory, or CHUNK_BYTES. Reads and digests MAX_JOURNAL_BYTES at most beyond the records.
    """
    place, search, was_record = HEADER_BYTES, _Search(read, size_bytes), True
    while place < size_bytes:
        found = key.record_at(read, place, size_bytes)
        if found is None:
            found = Found(place, search.next_record(place + _ALIGNED, key))
            if found.end >= size_bytes and _is_zero(read, place, size_bytes):
                return
        elif key.nonce is None:
            key = Key(key.store, found.nonce)
        yield found
        place, was_record = found.end, found.payload is not None
    if was_record:
        yield Found(place, place)


class _Search:
    """Looks for records behind damaged ones, with a bound on its effort for the whole file."""

    def __init__(self, read: Read, size_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._bytes_in_vain = 0

    def next_record(self, start: int, key: Key) -> int:
        """Where the next record begins, from a place on; the end of the file if there is none, or none is found."""
        size, heads = self._size_bytes, key.heads()
        for begun in range(start, size, CHUNK_BYTES):
            for match in heads.finditer(self._read(begun, CHUNK_BYTES + _ALIGNED)):
                place = begun + match.start()
                if place % _ALIGNED:
                    continue
                if self._bytes_in_vain >= _MOST_BYTES_IN_VAIN:
                    return size
                if key.record_at(self._read, place, size) is not None:
                    return place
                self._bytes_in_vain += size_of(key.payload_bytes_at(self._read, place, size) or 0)
        return size


def _is_zero(read: Read, start: int, size_bytes: int) -> bool:
    return not any(any(read(place, CHUNK_BYTES)) for place in range(start, size_bytes, CHUNK_BYTES))
