"""Whatever bit flips in the index file: the store lists what its bundles say (threat 2)."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from blake3 import blake3
from torpor.memvid import SessionUri, Store
from torpor.memvid.errors import StoreIoError
from torpor.memvid.index.index import Index
from torpor.memvid.index.index_image import WAL_FRAME, WAL_HEADER
from torpor.memvid.index.page_sums import PAGE_BYTES, SUMS_FILE, PageSums
from torpor.memvid.index.rows import SHADOWED, IndexedBundle
from torpor.memvid.index.schema import IndexUnusable
from torpor.memvid.limits import MAX_INDEX_BYTES
from torpor.tests.memvid.store_making import OTHER_URI, URI, bundle_path, reopened, sleep
from torpor.tests.shares import share

INDEX = "index.sqlite"
LOG = "index.sqlite-wal"
_SHARES = 24


@pytest.fixture
def filled(store: Store, store_path: Path, tmp_path: Path) -> Path:
    """A store with every kind of thing that an index tells of: versions, references, a rival, a file that cannot be
    read, a rewrite that was cut off, bytes written on a day."""
    first = sleep(store, 300)
    second = sleep(store, 600, before=first)
    sleep(store, 20, uri=OTHER_URI)
    store.close()
    with Store.open(_copy(store_path, tmp_path / "backup"), writable=True) as other:
        rival = bundle_path(other, sleep(other, 700, seed=3).bundle_id)
    with Store.open(store_path, writable=True) as again:
        sleep(again, 650, seed=4)
    name = rival.relative_to(tmp_path / "backup")
    (store_path / name).parent.mkdir(exist_ok=True)
    shutil.copy2(rival, store_path / name)
    with Store.open(store_path, writable=True) as again:
        lost = bundle_path(again, sleep(again, 640, seed=5).bundle_id)
    lost.write_bytes(lost.read_bytes()[:-1])
    (store_path / INDEX).unlink()
    with Store.open(store_path, writable=True) as again:
        assert len(again.index.with_status(SHADOWED)) == 1
        assert len(again.index.with_status("unreadable")) == 1
        again.index.add_written(20_000, 12_345)
        again.index.begin_rewrite(second.bundle_id, [])
    return store_path


def _copy(store_path: Path, to: Path) -> Path:
    shutil.copytree(store_path, to)
    return to


Said = tuple[Any, ...]


def said(index: Index) -> Said:
    """Everything that an index answers."""
    stored: list[IndexedBundle | None] = [index.stored(bundle_id) for bundle_id in sorted(index.bundle_ids())]
    bundles = [one for one in stored if one is not None]
    return (
        bundles,
        index.all_rows(),
        list(index.iter_latest()),
        index.uris(),
        index.totals(),
        index.unsettled(),
        [index.users_of(one.bundle_id) for one in bundles],
        [index.holders_of(block) for one in bundles for block in one.blocks],
        [index.rows_of([one.bundle_id]) for one in bundles],
        [index.versions(uri) for uri in index.uris()],
        [index.with_status(SHADOWED), index.with_status("unreadable")],
        index.written(),
    )


@contextlib.contextmanager
def opened(store_path: Path, store_uuid: str, *, writable: bool) -> Iterator[Index]:
    root_fd = os.open(store_path, os.O_RDONLY)
    opener = Index.open if writable else Index.copy_to_memory
    try:
        with contextlib.closing(opener(str(store_path), root_fd, store_uuid)) as index:
            yield index
    finally:
        os.close(root_fd)


def uuid_of(store_path: Path) -> str:
    with Store.open(store_path, writable=False) as store:
        return store.uuid


def require_refused_or_same(store_path: Path, store_uuid: str, expected: Said, *, writable: bool) -> bool:
    """Whether the index was refused; one that is believed says what it did."""
    try:
        with opened(store_path, store_uuid, writable=writable) as index:
            assert said(index) == expected
            if writable:
                index.add_written(20_000, 1)
    except IndexUnusable:
        return True
    return False


def flips(size: int, first: int, every: int, *, all_bits: bool) -> Iterator[tuple[int, int]]:
    for offset in range(first, size, every):
        for bit in range(8) if all_bits else (offset // every % 8,):
            yield offset, bit


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("writable", "first", "every"),
    [
        (True, 0, 211),
        (False, 1, 97),
        *(pytest.param(True, first, _SHARES, marks=pytest.mark.heavy) for first in range(0, _SHARES, 8)),
        *(pytest.param(False, first, _SHARES, marks=pytest.mark.heavy) for first in range(1, _SHARES, 8)),
    ],
)
def test_threat_2_a_flipped_bit_in_the_index_is_found_or_has_no_effect(
    filled: Path, writable: bool, first: int, every: int
) -> None:
    """The heavy shares flip one bit of every byte for a store that writes, and every bit for one that reads."""
    all_bits = every == _SHARES and not writable
    store_uuid = uuid_of(filled)
    sound, sums = (filled / INDEX).read_bytes(), (filled / SUMS_FILE).read_bytes()
    with opened(filled, store_uuid, writable=False) as index:
        expected = said(index)
    refused = 0
    for offset, bit in flips(len(sound), first, every, all_bits=all_bits):
        damaged = bytearray(sound)
        damaged[offset] ^= 1 << bit
        (filled / INDEX).write_bytes(damaged)
        (filled / SUMS_FILE).write_bytes(sums)
        refused += require_refused_or_same(filled, store_uuid, expected, writable=writable)
    assert refused > len(sound) / every / 100


@pytest.mark.parametrize("writable", [True, False])
def test_threat_2_a_flipped_bit_in_the_sums_costs_a_new_index_and_nothing_else(filled: Path, writable: bool) -> None:
    with Store.open(filled, writable=False) as store:
        expected = store.index.all_rows()
    sums = (filled / SUMS_FILE).read_bytes()
    for damaged in (b"", sums[:-1], sums + b"x", bytes([sums[0] ^ 1]) + sums[1:], bytes(len(sums))):
        (filled / SUMS_FILE).write_bytes(damaged)
        with Store.open(filled, writable=writable) as store:
            assert store.opening.index_rebuilt
            assert store.index.all_rows() == expected
    if writable:
        with Store.open(filled, writable=True) as store:
            assert store.opening.index_rebuilt is None


TAMPERING = [
    "UPDATE bundles SET status = 'shadowed' WHERE status = 'live' AND name = 'agent' AND version = 2",
    "DELETE FROM bundles",
    "DELETE FROM refs",
]


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("statement", TAMPERING)
def test_threat_2_a_sound_file_with_other_content_is_made_anew(
    filled: Path, tmp_path: Path, statement: str, writable: bool
) -> None:
    """As the index says it that is made from the bundles, and what is written next is the next version."""
    with contextlib.closing(sqlite3.connect(filled / INDEX)) as connection:
        changed = connection.execute(statement).rowcount
        connection.commit()
    assert changed
    reference = _copy(filled, tmp_path / "reference")
    (reference / INDEX).unlink()
    with Store.open(reference, writable=writable) as rebuilt, Store.open(filled, writable=writable) as store:
        assert store.opening.index_rebuilt
        assert said(store.index) == said(rebuilt.index)
        if writable:
            assert sleep(store, 720, seed=6).version == rebuilt.versions(URI)[-1].version + 2  # one cannot be read


@pytest.mark.parametrize("at", ["CREATE TABLE meta", "CREATE TABLE bundles", "live"])
@pytest.mark.parametrize("writable", [True, False])
def test_threat_26_text_that_is_no_utf_8_is_made_anew(filled: Path, at: str, writable: bool) -> None:
    data = bytearray((filled / INDEX).read_bytes())
    data[data.index(at.encode()) + len(at) - 1] |= 0x80
    (filled / INDEX).write_bytes(data)
    with Store.open(filled, writable=writable) as store:
        assert store.opening.index_rebuilt
        assert store.find_session(URI)


def test_an_index_that_was_closed_or_killed_between_checkpoints_is_believed(
    store: Store, store_path: Path, tmp_path: Path
) -> None:
    sleep(store, 300)
    killed = _copy(store_path, tmp_path / "killed")
    store.close()
    for path in (store_path, killed):
        for writable in (False, True):
            with Store.open(path, writable=writable) as again:
                assert again.opening.index_rebuilt is None
                assert len(again.versions(URI)) == 1


@pytest.mark.parametrize("writable", [True, False])
def test_an_index_that_was_killed_within_a_checkpoint_is_believed(
    store: Store, store_path: Path, tmp_path: Path, writable: bool
) -> None:
    """Any of the log's pages may be in the file, which may have its length already; they are read from the log."""
    for number in range(30):
        sleep(store, 20, uri=SessionUri("default", f"s{number}"), seed=number)
        if number == 20:
            store.index.drop([])  # which brings the log into the file
    cut_off, expected = _copy(store_path, tmp_path / "cut-off"), store.index.all_rows()
    old, log = (cut_off / INDEX).read_bytes(), (cut_off / LOG).read_bytes()
    store.close()
    new = (store_path / INDEX).read_bytes()
    assert len(new) > len(old)
    pages = range(0, max(len(old), len(new)), PAGE_BYTES)
    for every in (1, 2, 3):
        mixed = b"".join((new if at // PAGE_BYTES % every == 0 else old)[at : at + PAGE_BYTES] for at in pages)
        (cut_off / INDEX).write_bytes(mixed)
        (cut_off / LOG).write_bytes(log)
        with opened(cut_off, store.uuid, writable=writable) as index:
            assert index.all_rows() == expected
        (cut_off / SUMS_FILE).write_bytes(_sums(old))
    unlogged = next(at for at in pages if old[at : at + PAGE_BYTES] == new[at : at + PAGE_BYTES] != b"")
    (cut_off / INDEX).write_bytes(old[: unlogged + 7] + bytes([old[unlogged + 7] ^ 1]) + old[unlogged + 8 :])
    (cut_off / LOG).write_bytes(log)
    with pytest.raises(IndexUnusable), opened(cut_off, store.uuid, writable=writable):
        pass


def _sums(data: bytes) -> bytes:
    return b"".join(blake3(data[at : at + PAGE_BYTES]).digest(16) for at in range(0, len(data), PAGE_BYTES))


@pytest.mark.parametrize("writable", [True, False])
def test_an_index_of_the_schema_before_tells_what_it_alone_knows(
    store: Store, store_path: Path, writable: bool
) -> None:
    """Schema 8 had seals on its rows. What it says of a version that has vanished, and of bytes written, is kept, and
    what it does not know yet comes to it."""
    sleep(store, 300)
    lost = sleep(store, 20, uri=OTHER_URI)
    store.index.add_written(20_000, 12_345)
    written = store.index.written()
    store.close()
    before = _of_schema_8(store_path)
    with Store.open(store_path, writable=True) as again:
        sleep(again, 600)
    for name, data in before.items():
        (store_path / name).write_bytes(data)
    bundle_path(store, lost.bundle_id).unlink()
    for number in range(2):
        with Store.open(store_path, writable=writable) as again:
            assert [row.token_count for row in again.index.all_rows()] == [300, 600, 20]
            assert [finding.code for finding in again.opening.unreadable] == ["bundle_missing"]
            assert again.index.written() == written
            assert bool(again.opening.index_rebuilt) == (writable and not number)


def _of_schema_8(store_path: Path) -> dict[str, bytes]:
    """The index of a closed store as schema 8 had it."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    with contextlib.closing(connection):
        image = (store_path / INDEX).read_bytes()
        connection.deserialize(image[:18] + b"\1\1" + image[20:])  # a journal mode that memory has
        columns = "storage BLOB NOT NULL", "storage BLOB NOT NULL,\n    seal BLOB NOT NULL"
        connection.execute("PRAGMA writable_schema = RESET")
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = replace(sql, ?, ?) WHERE name = 'bundles'", columns)
        connection.execute("PRAGMA writable_schema = RESET")
        connection.execute("UPDATE bundles SET seal = zeroblob(16)")
        connection.execute("INSERT INTO meta VALUES ('seals', '3.0')")
        connection.execute("PRAGMA user_version = 8")
        image = connection.serialize()
    image = image[:18] + b"\2\2" + image[20:]
    return {INDEX: image, SUMS_FILE: _sums(image)}


def test_a_reader_that_comes_between_a_checkpoint_and_its_sums_looks_again(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(store, 300)
    old = (store_path / SUMS_FILE).read_bytes()
    store.index.drop([])
    new = (store_path / SUMS_FILE).read_bytes()
    (store_path / SUMS_FILE).write_bytes(old)
    real, looks = PageSums.of_data, []

    def looked(*of: Any) -> PageSums | None:
        looks.append(real(*of))
        (store_path / SUMS_FILE).write_bytes(new)
        return looks[-1]

    monkeypatch.setattr(PageSums, "of_data", looked)
    with opened(store_path, store.uuid, writable=False) as index:
        assert len(index.all_rows()) == 1
    assert looks[0] is None


@pytest.mark.parametrize(("code", "kept"), [(sqlite3.SQLITE_IOERR_READ, True), (sqlite3.SQLITE_CORRUPT, False)])
def test_only_damage_that_a_question_meets_has_the_index_made_anew(store: Store, code: int, kept: bool) -> None:
    sleep(store, 300)
    error = sqlite3.DatabaseError("it fails")
    error.sqlite_errorcode = code
    with mock.patch("torpor.memvid.index.session_queries.row_in", side_effect=error), pytest.raises(StoreIoError):
        store.index.all_rows()
    with reopened(store) as again:
        assert (again.opening.index_rebuilt is None) == kept
        assert len(again.versions(URI)) == 1


@pytest.fixture
def moments(store: Store, store_path: Path) -> list[dict[str, bytes]]:
    """The index's files at several moments of a store that lives, each with another log over another file."""
    found = []
    for number in range(60):
        sleep(store, 20, uri=SessionUri("default", f"s{number * 7 % 16}"), seed=number)
        if number % 7 == 6:
            found.append({name: (store_path / name).read_bytes() for name in (INDEX, SUMS_FILE, LOG)})
            assert found[-1][LOG]
            store.index.drop([])  # which brings the log into the file
    store.close()
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("writable", [True, False])
def test_threat_26_a_log_of_another_moment_than_the_index_file_hides_no_version(
    store_path: Path, moments: list[dict[str, bytes]], writable: bool
) -> None:
    """A live store copied file by file, or an index file put back from a backup: the sums are right for the file."""
    with Store.open(store_path, writable=False) as store:
        expected = store.index.all_rows()
    for earlier, later in [*itertools.permutations(moments, 2)][share() % 3 :: 3]:
        for name, data in (*earlier.items(), (LOG, later[LOG])):
            (store_path / name).write_bytes(data)
        with Store.open(store_path, writable=writable) as store:
            assert store.index.all_rows() == expected
            assert [store.find_session(row.uri, row.version) for row in expected] == expected
            assert not store.opening.unreadable
            assert not store.verify(deep=False).findings


def test_a_log_of_another_moment_is_not_brought_into_the_file_and_believed_then(
    store_path: Path, moments: list[dict[str, bytes]]
) -> None:
    store_uuid = uuid_of(store_path)
    for name, data in (*moments[0].items(), (LOG, moments[1][LOG])):
        (store_path / name).write_bytes(data)
    for writable in (True, False, True):
        with pytest.raises(IndexUnusable), opened(store_path, store_uuid, writable=writable):
            pass


def test_a_log_that_does_not_say_which_file_it_goes_with_is_not_believed(store: Store, store_path: Path) -> None:
    sleep(store, 300)
    store.index._connection.execute("DELETE FROM meta WHERE key = 'file'")
    with Store.open(store_path, writable=False) as reader:
        assert "another file" in str(reader.opening.index_rebuilt)
        assert len(reader.versions(URI)) == 1


def test_a_log_says_once_which_file_it_goes_with(store: Store) -> None:
    """It is asked at each opening and written with the first change after a checkpoint, also by the next process."""
    written: list[str] = []
    store.index._connection.set_trace_callback(lambda text: written.append(text) if "'file'" in text else None)
    sleep(store, 20)
    sleep(store, 20, seed=1)
    assert len(written) == 1
    store.index.drop([])
    sleep(store, 20, seed=2)
    assert len(written) == 2


def test_a_page_that_goes_bad_while_others_are_written_is_not_taken_for_good(store: Store, store_path: Path) -> None:
    """The sums are made of the pages that were written, not of the file as it is."""
    for number in range(40):
        sleep(store, 20, seed=number)
    with reopened(store) as again:
        found = again.index._connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'by_status'")
        (page,) = found.fetchone()
        with open(store_path / INDEX, "r+b") as file:
            file.seek(page * PAGE_BYTES - 1000)
            byte = file.read(1)
            file.seek(page * PAGE_BYTES - 1000)
            file.write(bytes([byte[0] ^ 1]))
        sleep(again, 20, seed=50)
    sums = (store_path / SUMS_FILE).read_bytes()
    now = blake3((store_path / INDEX).read_bytes()[(page - 1) * PAGE_BYTES : page * PAGE_BYTES]).digest(16)
    assert sums[(page - 1) * 16 : page * 16] != now


def test_a_damaged_page_number_in_the_log_is_taken_for_no_page(store: Store, store_path: Path, tmp_path: Path) -> None:
    """Sums up to the page that it says would take gigabytes."""
    for number in range(3):
        sleep(store, 20, seed=number)
    copy = _copy(store_path, tmp_path / "copy")
    log = (copy / LOG).read_bytes()
    frames = range(WAL_HEADER.size, len(log), WAL_FRAME.size + PAGE_BYTES)
    commits = [at for at in frames if WAL_FRAME.unpack_from(log, at)[1]]
    last_begins = commits[-2] + WAL_FRAME.size + PAGE_BYTES
    before = {WAL_FRAME.unpack_from(log, at)[0] for at in frames if at < last_begins}
    root_fd = os.open(copy, os.O_RDONLY)
    try:
        sums = PageSums.taken(root_fd, str(copy))
        for bit in range(32):
            damaged = bytearray(log)
            damaged[last_begins + bit // 8] ^= 1 << bit % 8
            (copy / LOG).write_bytes(damaged)
            sums._pending.clear()
            sums.expect_checkpoint()
            assert sums._pending == before
        (copy / LOG).write_bytes(log)
        sums.expect_checkpoint()
        assert sums._pending == {WAL_FRAME.unpack_from(log, at)[0] for at in frames}
        os.truncate(copy / LOG, MAX_INDEX_BYTES + 1)
        sums._pending.clear()
        sums.expect_checkpoint()
        assert sums._pending == set()
    finally:
        os.close(root_fd)


def test_a_checkpoint_is_made_when_the_log_is_long(store: Store, store_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("torpor.memvid.index.connection._CHECKPOINT_BYTES", 40 * PAGE_BYTES)
    log = store_path / f"{INDEX}-wal"
    sizes = []
    for number in range(12):
        sleep(store, 20, seed=number)
        sizes.append(log.stat().st_size)
    assert sizes != sorted(sizes)
    assert max(sizes) < 41 * (PAGE_BYTES + 24)
    killed = (store_path / INDEX).read_bytes(), (store_path / SUMS_FILE).read_bytes()
    assert len(killed[1]) == len(killed[0]) // PAGE_BYTES * 16


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("size_bytes", [1 << 40, 17, 0])  # ext4 has no file of 2**44 bytes, nor memory one of 2**40
def test_as_many_sums_as_no_index_of_that_size_has_are_not_read(
    store: Store, store_path: Path, size_bytes: int, writable: bool
) -> None:
    sleep(store, 300)
    store.close()
    os.truncate(store_path / SUMS_FILE, size_bytes)
    with (
        mock.patch.object(os, "pread", side_effect=os.pread) as asked,
        Store.open(store_path, writable=writable) as again,
    ):
        assert max((call.args[1] for call in asked.call_args_list), default=0) <= MAX_INDEX_BYTES
        assert again.opening.index_rebuilt
        assert len(again.versions(URI)) == 1


def test_sums_that_cannot_be_written_stop_nothing(store: Store, store_path: Path) -> None:
    (store_path / SUMS_FILE).unlink()
    (store_path / SUMS_FILE).mkdir()
    sleep(store, 300)
    with reopened(store) as again:
        assert again.opening.index_rebuilt
        assert len(again.versions(URI)) == 1


def test_threat_26_an_index_that_a_flipped_bit_makes_read_only_is_made_anew(filled: Path) -> None:
    """Every row is sound, and yet the next sleep would fail."""
    data = bytearray((filled / INDEX).read_bytes())
    data[18] ^= 4  # the version of the format that who writes must know
    (filled / INDEX).write_bytes(data)
    with Store.open(filled, writable=True) as store:
        assert store.opening.index_rebuilt
        sleep(store, 720, seed=6)
