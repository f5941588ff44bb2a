"""The bytes of the journal: every flipped bit and every cut is told, and costs the record in which it lies (T5)."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from blake3 import blake3
from torpor.memvid.errors import CorruptJournal
from torpor.memvid.format import journal
from torpor.memvid.format.journal import HEADER_BYTES, VOID, Found, JournalRecord, Key, scan, size_of
from torpor.memvid.format.manifest import UNREAD
from torpor.memvid.format.packing import pack
from torpor.memvid.limits import CHUNK_BYTES, MAX_IDENTITY_PARTS, MAX_JOURNAL_RECORD_BYTES, MAX_TOKENS, MAX_VERSION
from torpor.tests.memvid.store_making import IDENTITY, OTHER_URI, URI, taking_at_most, token_ids

UUID = "6b1f7f0e-9b4e-4e6e-8d3c-0123456789ab"
OTHER_UUID = "0b1f7f0e-9b4e-4e6e-8d3c-0123456789ab"
BUNDLE = bytes(range(32)).hex()
FREE_BYTES = 64
FOUND = JournalRecord(URI, {UNREAD: {"tokens": token_ids(300, 5)}}, (1, BUNDLE), BUNDLE, 300, None)
NEW = JournalRecord(OTHER_URI, {UNREAD: {"tokens": token_ids(0, 4, 2)}}, None, None, 0, IDENTITY)
RECORDS = (
    FOUND,
    NEW,
    dataclasses.replace(FOUND, session={UNREAD: {"tokens": token_ids(300, 9)}}),
    dataclasses.replace(NEW, session={UNREAD: {"tokens": token_ids(0, 7, 2)}}),
)


def key_of(uuid: str = UUID, nonce: bytes = b"12345678") -> Key:
    return Key(Key.new(uuid).store, nonce)


def file_of(records: Iterable[JournalRecord], key: Key) -> tuple[bytes, list[int]]:
    """A journal with these records, and where they begin."""
    data, places = key.header(), []
    for record in records:
        places.append(len(data))
        data += key.record(record.encode(), len(data))
    return data + bytes(FREE_BYTES), places


FILE, PLACES = file_of(RECORDS, key_of())
END = len(FILE) - FREE_BYTES
PAYLOADS = [record.encode() for record in RECORDS]


def found_in(data: bytes, uuid: str = UUID) -> list[Found]:
    return list(scan(reading(data), len(data), Key.read(data[:HEADER_BYTES], uuid)))


def reading(data: bytes) -> Callable[[int, int], bytes]:
    return lambda start, count: data[start : start + count]


def payloads(found: Sequence[Found]) -> list[bytes | None]:
    return [one.payload for one in found]


def record_around(byte: int) -> int | None:
    """The number of the record in which a byte lies."""
    if not HEADER_BYTES <= byte < END:
        return None
    return max(number for number, place in enumerate(PLACES) if place <= byte)


# --- what was written


def test_a_journal_reads_back_as_it_was_written() -> None:
    found = found_in(FILE)
    assert payloads(found) == PAYLOADS
    assert [JournalRecord.decode(payload) for payload in PAYLOADS] == list(RECORDS)
    assert [one.place for one in found] == PLACES
    assert not any(one.is_void or one.is_spoilt for one in found)


def test_a_record_that_counts_no_more_says_so_in_four_bytes() -> None:
    data = bytearray(FILE)
    data[PLACES[1] : PLACES[1] + 4] = VOID
    assert [one.is_void for one in found_in(bytes(data))] == [False, True, False, False]
    assert not any(one.is_spoilt for one in found_in(bytes(data)))


# --- damage


def test_every_flipped_bit_is_told_and_costs_the_record_in_which_it_lies_at_most() -> None:
    for bit in range(8 * len(FILE)):
        data = bytearray(FILE)
        data[bit // 8] ^= 1 << bit % 8
        number, key = record_around(bit // 8), Key.read(bytes(data[:HEADER_BYTES]), UUID)
        found = found_in(bytes(data))
        holes = [one for one in found if one.payload is None]
        assert holes or key.nonce is None or any(one.is_spoilt for one in found), bit
        assert not any(one.is_void for one in found), bit
        read = [one.payload for one in found if one.payload is not None]
        assert read in (PAYLOADS, [one for at, one in enumerate(PAYLOADS) if at != number]), bit
        assert len(holes) <= 1, bit


def test_every_cut_is_told_and_costs_what_stood_behind_it() -> None:
    for size_bytes in range(END + 1):
        data = FILE[:size_bytes]
        found, whole = found_in(data), sum(end <= size_bytes for end in (*PLACES[1:], END))
        assert payloads(found)[:whole] == PAYLOADS[:whole]
        key = Key.read(data[:HEADER_BYTES], UUID)
        assert payloads(found)[whole:] == [None] or key.nonce is None, size_bytes
    for size_bytes in range(END + 1, len(FILE)):  # in the room behind the records nothing is lost
        assert payloads(found_in(FILE[:size_bytes])) == PAYLOADS


def test_a_cut_that_is_filled_with_zeros_is_told_unless_a_record_ends_there() -> None:
    for size_bytes in range(HEADER_BYTES, END):
        found = found_in(FILE[:size_bytes].ljust(len(FILE), b"\0"))
        whole = sum(end <= size_bytes for end in (*PLACES[1:], END))
        is_between = size_bytes in PLACES
        read = payloads(found)
        if read != [*PAYLOADS[:whole], *([] if is_between else [None])]:  # only zeros were cut off
            assert read == PAYLOADS[: whole + 1]
            assert not any(FILE[size_bytes : PLACES[whole + 1] if whole + 1 < len(PLACES) else END])


@pytest.mark.parametrize("mark", [VOID, b"TURN"])
def test_a_mark_with_some_flipped_bits_is_still_known(mark: bytes) -> None:
    for flips in ((0,), (1,), (31,), (0, 9), (5, 16, 30), (3, 12, 25, 26)):
        data, word = bytearray(FILE), int.from_bytes(mark)
        for bit in flips:
            word ^= 1 << bit
        data[PLACES[3] : PLACES[3] + 4] = word.to_bytes(4)
        last = found_in(bytes(data))[-1]
        assert last.payload == PAYLOADS[3]
        assert last.is_spoilt
        assert last.is_void == (mark == VOID)


# --- records that are not this journal's


def test_records_that_changed_places_do_not_count() -> None:
    first, third = FILE[PLACES[0] : PLACES[1]], FILE[PLACES[2] : PLACES[3]]
    moved = (
        FILE[: PLACES[0]] + third + FILE[PLACES[0] + len(third) : PLACES[2]] + first + FILE[PLACES[2] + len(first) :]
    )
    assert set(payloads(found_in(moved))) <= {None, PAYLOADS[1], PAYLOADS[3]}
    assert None in payloads(found_in(moved))


def test_a_record_that_is_played_again_does_not_count() -> None:
    again = FILE[:END] + FILE[PLACES[0] : PLACES[1]] + bytes(FREE_BYTES)
    assert payloads(found_in(again)) == [*PAYLOADS, None]


@pytest.mark.parametrize("other", [key_of(nonce=b"87654321"), key_of(OTHER_UUID), key_of(OTHER_UUID, b"87654321")])
def test_a_record_of_an_earlier_journal_or_of_another_store_does_not_count(other: Key) -> None:
    foreign = other.record(PAYLOADS[0], END)
    assert payloads(found_in(FILE[:END] + foreign + bytes(FREE_BYTES))) == [*PAYLOADS, None]


def test_a_torn_record_before_whole_ones_costs_them_nothing() -> None:
    torn = bytearray(FILE)
    torn[PLACES[1] + 8 : PLACES[2]] = bytes(PLACES[2] - PLACES[1] - 8)
    assert payloads(found_in(bytes(torn))) == [PAYLOADS[0], None, *PAYLOADS[2:]]


def test_behind_a_damaged_header_the_records_of_one_journal_count() -> None:
    mixed = b"\1" + FILE[1:END] + key_of(nonce=b"87654321").record(PAYLOADS[0], END) + bytes(FREE_BYTES)
    assert payloads(found_in(mixed)) == [*PAYLOADS, None]


@pytest.mark.parametrize(
    ("uuid", "magic", "says"),
    [(OTHER_UUID, b"TORPJNL1", "another store"), (UUID, b"TORPJNL2", "another version of Torpor")],
)
def test_a_whole_journal_of_another_store_or_version_is_not_read(uuid: str, magic: bytes, says: str) -> None:
    begun = magic + key_of(uuid).header()[len(magic) : -16]
    with pytest.raises(CorruptJournal, match=says):
        Key.read(begun + blake3(begun).digest(16), UUID)


# --- bounds


def decoys(count: int, payload_bytes: int = 8) -> bytes:
    """What looks like records and is none, of so many bytes each."""
    return (b"TURN" + struct.pack("<I", payload_bytes) + key_of().header()[24:32]).ljust(40, b"\0") * count


def test_bytes_that_look_like_records_are_given_up_after_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_MOST_BYTES_IN_VAIN", 3 * len(decoys(1)))
    last = key_of().record(PAYLOADS[0], HEADER_BYTES + len(decoys(3)))
    assert payloads(found_in(key_of().header() + decoys(3) + last + bytes(8))) == [None, PAYLOADS[0]]
    last = key_of().record(PAYLOADS[0], HEADER_BYTES + len(decoys(5)))
    found = found_in(key_of().header() + decoys(5) + last + bytes(8))
    assert payloads(found) == [None]  # told, to the end
    assert found[0].end == HEADER_BYTES + len(decoys(5)) + len(last) + 8


@pytest.mark.parametrize("is_header_damaged", [False, True])
def test_behind_thousands_of_damaged_records_and_marks_the_next_one_is_found(is_header_damaged: bool) -> None:
    for vain in (decoys(20_000), b"TURNVOID" * 30_000):
        header = bytes(HEADER_BYTES) if is_header_damaged else key_of().header()
        data = header + vain + key_of().record(PAYLOADS[0], HEADER_BYTES + len(vain)) + bytes(8)
        assert payloads(found_in(data)) == [None, PAYLOADS[0]]


def test_what_is_digested_in_vain_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    data, key, digested = decoys(100_000, 1 << 20), key_of(), list[int]()
    monkeypatch.setattr(journal, "_MOST_BYTES_IN_VAIN", 1 << 22)
    monkeypatch.setattr(journal, "digest_of", lambda *parts: digested.append(sum(map(len, parts))) or bytes(15))
    found = list(scan(reading(data), len(data), key))
    assert payloads(found) == [None]
    assert 1 << 22 <= sum(digested) < 10 << 20


def test_a_scan_of_a_large_file_takes_little_memory() -> None:
    sizes = 0, HEADER_BYTES + 40 * CHUNK_BYTES

    def noise(start: int, count: int) -> bytes:
        return bytes((start // 8 % 251 + 1,)) * max(0, min(count, sizes[1] - start))

    with taking_at_most(4 * CHUNK_BYTES):
        assert payloads(list(scan(noise, sizes[1], key_of()))) == [None]


def test_a_length_above_its_limit_is_no_record() -> None:
    head = b"TURN" + struct.pack("<I", MAX_JOURNAL_RECORD_BYTES + 1) + b"12345678" + bytes(16)
    most = HEADER_BYTES + size_of(MAX_JOURNAL_RECORD_BYTES) + 4096
    read: list[int] = []

    def reading_of(start: int, count: int) -> bytes:
        read.append(count)
        return head[: max(0, count)] if start == HEADER_BYTES else b""

    assert key_of().record_at(reading_of, HEADER_BYTES, most) is None
    assert max(read) <= len(head)


# --- what a record says

ID = bytes.fromhex(BUNDLE)
DOCUMENT: dict[str, Any] = {
    "uri": str(URI),
    "session": {},
    "newest": [1, ID],
    "base": ID,
    "held": 300,
    "identity": None,
}


@pytest.mark.parametrize(
    "change",
    [
        {"uri": "no uri"}, {"uri": 1}, {"session": []}, {"newest": [1]}, {"newest": [1, None]},
        {"newest": [-1, ID]}, {"newest": [True, ID]}, {"newest": [MAX_VERSION + 1, ID]},
        {"newest": [1, ID[1:]]}, {"newest": 1}, {"base": b""}, {"base": str(URI)}, {"base": None}, {"held": -1},
        {"held": MAX_TOKENS + 1}, {"held": 1.0}, {"identity": [["weights", "1"]]},
        {"base": None, "identity": [["weights", "1"]]}, {"base": None, "held": 0, "identity": [["weights", 1]]},
        {"base": None, "held": 0, "identity": [["weights"]]}, {"base": None, "held": 0, "identity": "weights"},
        {"base": None, "held": 0, "identity": [["weights", "1"]] * (MAX_IDENTITY_PARTS + 1)},
    ],
)  # fmt: skip
def test_a_record_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    assert JournalRecord.decode(pack(DOCUMENT, "a record")).held == 300
    with pytest.raises(CorruptJournal):
        JournalRecord.decode(pack(DOCUMENT | change, "a record"))


@pytest.mark.parametrize("payload", [b"", b"\x80", b"\xc1", b"\x90", pack({"uri": str(URI)}, "a record"), b"\xff" * 9])
def test_bytes_that_are_no_record_are_refused(payload: bytes) -> None:
    with pytest.raises(CorruptJournal):
        JournalRecord.decode(payload)
