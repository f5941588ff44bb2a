"""The index is disposable: however it is lost or damaged, the bundles bring it back (promise 7; threats 24 to 26)."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import os
import random
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid import SessionUri, Store
from torpor.memvid.checking import scanning
from torpor.memvid.errors import (
    BundleMissing,
    DurabilityLost,
    InvalidUri,
    LimitExceeded,
    NoSpace,
    SessionNotFound,
    StoreError,
    StoreIoError,
    Truncated,
)
from torpor.memvid.format.bundle import BundleFile
from torpor.memvid.format.records import IndexRow
from torpor.memvid.index import index as index_module
from torpor.memvid.index import index_image
from torpor.memvid.index.index import Index
from torpor.memvid.index.page_sums import PAGE_BYTES, SUMS_FILE
from torpor.memvid.index.rows import LIVE, SHADOWED, IndexedBundle
from torpor.memvid.limits import MAX_VERSION
from torpor.memvid.recovery import reindexing
from torpor.memvid.writing import rewriting
from torpor.tests.memvid.store_making import OTHER_URI, URI, bundle_path, refusing, reopened, require_awake, sleep

BREAK_ROWS = "UPDATE bundles SET labels = 7, namespace = '../..'"


def by_sql(statement: str) -> Callable[[Path], None]:
    """Damage by a hand that knows SQLite."""

    def damage(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(statement)
            connection.commit()

    return damage


def blot(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:4096] + bytes(len(data) - 4096))


def blot_a_side_table(path: Path) -> None:
    """Damage where listing the rows does not look."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'referrers'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    data = bytearray(path.read_bytes())
    data[(page - 1) * size : page * size] = bytes(size)
    path.write_bytes(data)


def kept_index(store_path: Path) -> dict[str, bytes]:
    """The index of a closed store, for `put_back`."""
    return {name: (store_path / name).read_bytes() for name in ("index.sqlite", SUMS_FILE)}


def put_back(store_path: Path, files: dict[str, bytes]) -> None:
    """As from a backup."""
    for name, data in files.items():
        (store_path / name).write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "lost": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "no database": lambda path: path.write_bytes(b"not a database" * 1000),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:9000]),
    "zeros behind its first page": blot,
    "zeros in a side table": blot_a_side_table,
    "another store's": by_sql("UPDATE meta SET value = 'another'"),
    "an older version's": by_sql("PRAGMA user_version = 0"),
    "broken rows": by_sql(BREAK_ROWS),
    # bytes(a large number) would take that much memory
    "an id that is a number": by_sql("INSERT INTO refs VALUES (1, 1000000000000)"),
    "an unknown status": by_sql("UPDATE bundles SET status = 'other'"),
    "a count of rewrites below 0": by_sql("UPDATE meta SET value = '-1' WHERE key = 'rewrites'"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("writable", [True, False])
def test_threat_26_a_lost_foreign_or_damaged_index_comes_back(
    store: Store, store_path: Path, damage: Callable[[Path], object], writable: bool
) -> None:
    first = sleep(store, 300)
    sleep(store, 600, before=first)
    sleep(store, 20, uri=OTHER_URI)
    rows, versions = list(store.iter_sessions()), store.versions(URI)
    store.close()
    damage(store_path / "index.sqlite")
    with Store.open(store_path, writable=writable) as again:
        assert again.opening.index_rebuilt
        assert list(again.iter_sessions()) == rows
        assert again.versions(URI) == versions
        require_awake(again, 600)
        if writable:
            assert sleep(again, 700).version == 3
    if writable:
        with Store.open(store_path, writable=True) as again:
            assert again.opening.index_rebuilt is None


def test_threat_24_a_bundle_that_the_index_does_not_know_is_added(store: Store, store_path: Path) -> None:
    sleep(store, 300)
    store.close()
    old = kept_index(store_path)
    with Store.open(store_path, writable=True) as again:
        sleep(again, 600)
    put_back(store_path, old)
    with Store.open(store_path, writable=True) as again:
        assert (again.opening.index_rebuilt, again.opening.rows_added) == (None, 1)
        require_awake(again, 600)


def test_a_damaged_bundle_keeps_its_row_while_the_index_lives(store: Store) -> None:
    """Else a wake would quietly give the version before."""
    sleep(store, 300)
    file = bundle_path(store, sleep(store, 600).bundle_id)
    file.write_bytes(file.read_bytes()[:-1])
    with reopened(store) as again, pytest.raises(Truncated):
        again.open_session(URI)


def test_a_damaged_bundle_does_not_stop_the_others_and_is_reported(store: Store, store_path: Path) -> None:
    sleep(store, 20, uri=OTHER_URI)
    file = bundle_path(store, sleep(store, 600).bundle_id)
    file.write_bytes(file.read_bytes()[:-1])
    store.close()
    (store_path / "index.sqlite").unlink()
    for _ in range(2):
        with Store.open(store_path, writable=True) as again:
            require_awake(again, 20, uri=OTHER_URI)
            with pytest.raises(SessionNotFound):
                again.open_session(URI)
            assert [finding.code for finding in again.verify(deep=False).findings] == ["truncated"]
            assert file.exists()


def test_two_bundles_that_claim_one_version_leave_the_younger_one(
    store: Store, store_path: Path, tmp_path: Path
) -> None:
    """As when a backup is put back over a store that went on."""
    sleep(store, 300)
    store.close()
    shutil.copytree(store_path, tmp_path / "backup")
    with Store.open(store_path, writable=True) as again:
        sleep(again, 500, seed=1)
    with Store.open(tmp_path / "backup", writable=True) as again:
        younger = sleep(again, 600, seed=2)
        file = bundle_path(again, younger.bundle_id)
    target = store_path / "bundles" / file.parent.name
    target.mkdir(0o700, exist_ok=True)
    shutil.copy(file, target / file.name)
    with Store.open(store_path, writable=True) as again:
        assert (again.opening.index_rebuilt, again.opening.rows_added) == (None, 1)
        require_awake(again, 600, seed=2)
        assert [finding.code for finding in again.verify(deep=True).findings] == ["rival_version"]
    with Store.open(store_path, writable=True) as again:
        assert again.opening.index_rebuilt is None
        require_awake(again, 600, seed=2)


def test_a_store_opens_on_a_full_disk_and_can_delete(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(store, 300)
    store.close()
    (store_path / "index.sqlite").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(Index, "return_to_file", refusing(NoSpace("No room for the index.")))
        with Store.open(store_path, writable=True) as again:
            assert "kept in memory" in str(again.opening.index_rebuilt)
            require_awake(again, 300)
            assert again.delete_session(URI).bytes_freed > 0
    assert not list(store_path.rglob("*.mv?"))


def test_a_row_damaged_while_the_store_is_open_is_a_typed_error(store: Store) -> None:
    sleep(store, 300)
    store.index._connection.execute(BREAK_ROWS)
    with pytest.raises(StoreIoError, match="makes it anew"):
        list(store.iter_sessions())


@pytest.mark.parametrize("version", [-(2**63) - 1, -1, 0, 2, MAX_VERSION + 1, 2**63, 2**70])
def test_a_version_that_cannot_be_is_not_there_and_leaves_the_index_believed(
    store: Store, store_path: Path, version: int
) -> None:
    sleep(store, 300)
    assert store.find_session(URI, version) is None
    with pytest.raises(SessionNotFound, match=f"no version {version}"):
        store.open_session(URI, version)
    assert (store_path / SUMS_FILE).exists()


def test_a_session_is_found_by_what_a_person_types(store: Store) -> None:
    sleep(store, 10)
    sleep(store, 20)
    awake = SessionUri("work", "awake")
    for text, also, found in (
        *((text, [], URI) for text in ("agent", "default/agent", "torpor://default/agent")),
        *((text, [awake], awake) for text in ("work/awake", "torpor://work/awake")),
        ("agent", [URI], URI),
        ("agent", [SessionUri("work", "agent")], URI),
    ):
        assert store.resolve(text, also=also) == found
    for text, suggested in (("work/awakee", [str(awake)]), ("agents", [str(URI)]), ("awake", []), ("work/agent", [])):
        with pytest.raises(SessionNotFound) as missing:
            store.resolve(text, also=[awake])
        assert missing.value.suggestions == suggested
    with pytest.raises(InvalidUri):
        store.resolve("../..")


def test_a_name_is_looked_up_without_listing_the_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep(store, 10)
    (plan,) = store.index._select(
        "EXPLAIN QUERY PLAN SELECT DISTINCT namespace FROM bundles WHERE name = ? AND status = ?", ("agent", "live")
    )[:1]
    assert "USING INDEX by_name" in plan[3]
    for listing in ("iter_latest", "all_rows", "versions"):
        monkeypatch.setattr(store.index, listing, lambda *_: pytest.fail("the store was listed"))
    for text in ("agent", "default/agent", str(URI)):
        assert store.resolve(text) == URI


# --- who holds which block


def test_a_block_is_found_in_the_live_bundles_that_hold_it(store: Store) -> None:
    first = sleep(store, 600)
    fork = sleep(store, 700, uri=OTHER_URI, before=first)
    shared, own = first.entries[0].id, fork.entries[-1].id
    assert store.index.holders_of(shared) == [first.bundle_id]
    assert store.index.holders_of(own) == [fork.bundle_id]
    assert store.index.holders_of(bytes(32)) == []
    assert store.index.users_of(first.bundle_id) == [fork.bundle_id]
    with store.open_session(URI):
        store.delete_session(URI)
        assert store.index.holders_of(shared) == []  # its file is there, but it is no version any more
        assert store.index.users_of(first.bundle_id) == [fork.bundle_id]


def test_a_bundle_that_lost_its_version_to_a_rival_is_no_holder(store: Store) -> None:
    present = store.index.stored(sleep(store, 300).bundle_id)
    rival = dataclasses.replace(present, bundle_id=NEEDED, status=SHADOWED, refs=(bytes(32),))
    store.index.add(rival)
    assert store.index.holders_of(present.blocks[0]) == [present.bundle_id]
    assert store.index.users_of(bytes(32)) == [NEEDED]  # but what it needs stays


# --- rewrites: the references cover what a file needs, before, during and after

NEEDED = bytes(range(32))


def rewritten(monkeypatch: pytest.MonkeyPatch, bundle_id: bytes, refs: tuple[bytes, ...]) -> None:
    """From now on a bundle's file needs these bundles, as after the rename of a rewrite."""

    def indexed(file: BundleFile) -> IndexedBundle:
        found = real(file)
        if found.bundle_id != bundle_id or found.row is None:
            return found
        row = dataclasses.replace(found.row, bundle_bytes=4321)
        return IndexedBundle(bundle_id, LIVE, row, refs, (b"8 bytes of a block id, and more.",))

    real = scanning.indexed
    monkeypatch.setattr(scanning, "indexed", indexed)


def a_fork(store: Store) -> tuple[bytes, bytes]:
    """A bundle that needs another: (its id, the other's)."""
    first = sleep(store, 600)
    return sleep(store, 700, uri=OTHER_URI, before=first).bundle_id, first.bundle_id


def the_file(store_path: Path, bundle_id: bytes) -> Path:
    return store_path / "bundles" / bundle_id.hex()[:2] / f"{bundle_id.hex()}.mvb"


def test_a_rewrite_that_begins_is_in_the_index_file_when_it_is_told(store: Store, store_path: Path) -> None:
    """A power cut keeps nothing else: neither the -wal nor what was not flushed."""
    store.index.begin_rewrite(NEEDED, [])  # a retired file, which has no row to mark
    assert store.index.unsettled() == set()
    fork, first = a_fork(store)
    store.index.begin_rewrite(fork, [NEEDED])
    shutil.copy(store_path / "index.sqlite", store_path / "copy")
    with contextlib.closing(sqlite3.connect(store_path / "copy")) as copy:
        refs = copy.execute("SELECT refers_to FROM refs ORDER BY refers_to").fetchall()
        assert copy.execute("SELECT bundle_id FROM bundles WHERE unsettled").fetchall() == [(fork,)]
    assert refs == sorted([(first,), (NEEDED,)])
    assert [found.name for found in store_path.glob("rewrites.*")] == ["rewrites.2"]
    (store_path / f"rewrites.{10**15}").touch(mode=0o600)  # more digits than a count has: it is none
    with reopened(store) as again:
        assert again.opening.index_rebuilt is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to tell which folder is flushed")
def test_the_count_of_rewrites_is_flushed_before_a_file_is_replaced(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork, _ = a_fork(store)
    flushed: list[tuple[str, list[str]]] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        names = [found.name for found in store_path.glob("rewrites.*")]
        flushed.append((os.path.realpath(f"/proc/self/fd/{fd}"), names))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    for count in ("rewrites.1", "rewrites.2"):
        store.index.begin_rewrite(fork, [NEEDED])
        assert flushed[-1] == (str(store_path), [count])


def test_a_rewrite_that_ends_replaces_what_the_file_holds(store: Store) -> None:
    fork, _ = a_fork(store)
    present = store.index.stored(fork)
    assert present.row is not None
    store.index.begin_rewrite(fork, [NEEDED])
    row = dataclasses.replace(present.row, bundle_bytes=4321)
    block = b"8 bytes of a block id, and more."
    store.index.finish_rewrite(IndexedBundle(fork, LIVE, row, (NEEDED,), (block,)))
    assert store.index.stored(fork) == IndexedBundle(fork, LIVE, row, (NEEDED,), (block[:8],))
    assert store.index.holders_of(block) == [fork]
    assert store.index.unsettled() == set()


def test_a_rewrite_does_not_begin_while_the_index_cannot_be_brought_up_to_date(store: Store, store_path: Path) -> None:
    fork, _ = a_fork(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.index, "_checkpoint", lambda: False)
        with pytest.raises(StoreIoError, match="another program"):
            store.index.begin_rewrite(fork, [NEEDED])
    assert not list(store_path.glob("rewrites.*"))
    store.index.begin_rewrite(fork, [NEEDED])


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("renamed", [False, True])
def test_threat_28_a_rewrite_that_was_cut_off_is_read_again(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool, renamed: bool
) -> None:
    """Before the rename, or after it: what the file holds then counts."""
    fork, first = a_fork(store)
    before = store.index.stored(fork)
    store.index.begin_rewrite(fork, [NEEDED])
    assert set(store.index.refs_of(fork)) == {first, NEEDED}
    store.close()
    if renamed:
        rewritten(monkeypatch, fork, (NEEDED,))
    with Store.open(store_path, writable=writable) as again:
        assert again.opening.index_rebuilt is None
        assert again.index.unsettled() == set()
        found = again.index.stored(fork)
        assert (found.refs == (NEEDED,) and found.row.bundle_bytes == 4321) if renamed else found == before


@pytest.mark.parametrize("renamed", [False, True])
def test_threats_28_51_what_a_cut_off_rewrite_may_need_is_not_removed(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: bool
) -> None:
    target = sleep(store, 300).bundle_id
    user = sleep(store, 20, uri=OTHER_URI).bundle_id
    store.index.begin_rewrite(user, [target])
    store.delete_session(URI)
    retired = the_file(store_path, target).with_suffix(".mvr")
    assert retired.exists()
    store.close()
    if renamed:
        rewritten(monkeypatch, user, (target,))
    Store.open(store_path, writable=True).close()
    assert retired.exists() == renamed


@pytest.mark.parametrize("writable", [True, False])
def test_threat_28_a_bundle_retired_in_a_rewrite_is_gone_with_its_mark(
    store: Store, store_path: Path, writable: bool
) -> None:
    fork, first = a_fork(store)
    store.index.begin_rewrite(fork, [NEEDED])
    store.close()
    file = the_file(store_path, fork)
    file.rename(file.with_suffix(".mvr"))
    with Store.open(store_path, writable=writable) as again:
        assert again.find_session(OTHER_URI) is None
        assert (again.index.unsettled(), again.index.users_of(first), again.index.users_of(NEEDED)) == (set(), [], [])


@pytest.mark.parametrize("begun", [False, True])
def test_threats_25_28_a_file_put_back_is_read_again_for_it_may_be_an_older_rewrite_and_keeps_its_mark_until_then(
    store: Store, store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    fork, first = a_fork(store)
    if begun:
        store.index.begin_rewrite(fork, [NEEDED])
    store.close()
    the_file(store_path, fork).rename(tmp_path / "moved")
    for _ in range(2):
        with Store.open(store_path, writable=True) as again:
            assert [found.code for found in again.opening.unreadable] == [BundleMissing.code]
            assert again.index.unsettled() == {fork}
            assert set(again.index.refs_of(fork)) == ({first, NEEDED} if begun else {first})
    (tmp_path / "moved").rename(the_file(store_path, fork))
    rewritten(monkeypatch, fork, (NEEDED,))
    with Store.open(store_path, writable=True) as again:
        assert (again.index.unsettled(), again.index.refs_of(fork)) == (set(), (NEEDED,))


@pytest.mark.parametrize("writable", [True, False])
def test_threat_28_a_bundle_damaged_in_a_rewrite_keeps_its_row_and_its_mark(
    store: Store, store_path: Path, writable: bool
) -> None:
    fork, first = a_fork(store)
    store.index.begin_rewrite(fork, [NEEDED])
    store.close()
    file = the_file(store_path, fork)
    good = file.read_bytes()
    file.write_bytes(good[:-1])
    for _ in range(2):
        with Store.open(store_path, writable=writable) as again:
            assert [(found.code, found.path) for found in again.opening.unreadable] == [("truncated", str(file))]
            assert again.index.unsettled() == {fork}
            assert set(again.index.refs_of(fork)) == {first, NEEDED}
            with pytest.raises(Truncated):
                again.open_session(OTHER_URI)
    file.write_bytes(good)
    with Store.open(store_path, writable=True) as again:
        assert (again.index.unsettled(), again.index.refs_of(fork)) == (set(), (first,))
        require_awake(again, 700, uri=OTHER_URI)


def test_threat_24_an_index_older_than_the_last_rewrite_is_made_anew(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a removal would believe references of a file that is no more."""
    fork, _ = a_fork(store)
    store.close()
    old = kept_index(store_path)
    rewritten(monkeypatch, fork, (NEEDED,))
    with Store.open(store_path, writable=True) as again:
        again.index.begin_rewrite(fork, [NEEDED])
    for _ in range(2):
        put_back(store_path, old)
        with Store.open(store_path, writable=False) as reader:
            assert reader.opening.index_rebuilt is None  # removes nothing, so it may believe it
        with Store.open(store_path, writable=True) as again:
            assert "older than the last rewrite" in str(again.opening.index_rebuilt)
            assert again.index.refs_of(fork) == (NEEDED,)
        with Store.open(store_path, writable=True) as again:
            assert again.opening.index_rebuilt is None


def test_a_reader_beside_a_daemon_reads_what_it_rewrote(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's last rows are only in its -wal: the reader sees the mark, and looks at the file."""
    fork, _ = a_fork(store)
    present = store.index.stored(fork)
    assert present is not None
    store.index.begin_rewrite(fork, [NEEDED])
    rewritten(monkeypatch, fork, (NEEDED,))
    store.index.finish_rewrite(dataclasses.replace(present, refs=(NEEDED,)))
    later = sleep(store, 20)
    with Store.open(store_path, writable=False) as reader:
        assert reader.opening.index_rebuilt is None
        assert (reader.index.unsettled(), reader.index.refs_of(fork)) == (set(), (NEEDED,))
        assert reader.versions(URI)[-1].bundle_id == later.bundle_id


@pytest.mark.parametrize("writes", [1, 10])
def test_an_index_that_changes_while_it_is_copied_is_copied_again(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """Half of it would be old and half new; a daemon that never rests leaves the bundles to read."""
    rows = [sleep(store, 300)]
    real, left = index_image._read_log, writes

    def before_the_file_is_read(*args: Any) -> bytes:
        nonlocal left
        log = real(*args)
        if left:
            left -= 1
            rows.append(sleep(store, 300))
            store.index._settle()
        return log

    monkeypatch.setattr(index_image, "_read_log", before_the_file_is_read)
    with Store.open(store_path, writable=False) as reader:
        assert reader.opening.index_rebuilt == (None if writes == 1 else "it changes faster than it can be copied")
        assert reader.opening.unreadable == ()
        assert len(rows) == 1 + writes
        assert {row.version for row in reader.versions(URI)} >= ({1, 2} if writes == 1 else {1})
        require_awake(reader, 300)


@pytest.mark.parametrize("writable", [True, False])
def test_a_session_whose_file_was_written_anew_wakes_with_the_rows_of_before(
    store: Store, store_path: Path, writable: bool
) -> None:
    """Where its blocks lie is not what the session is: a store opened before the rewrite, or an index that was not
    told of its end, refuses nothing."""
    fork, first = a_fork(store)
    with contextlib.ExitStack() as stack:
        if not writable:
            before = stack.enter_context(Store.open(store_path, writable=False))
        core = store._core
        with contextlib.closing(core.open_bundle(fork)) as file:
            entries = [(entry.id, fork if entry.bundle_id is None else entry.bundle_id) for entry in file.entries]
        with rewriting.prepared(core, fork, rewriting.Contents(entries, {})) as prepared:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(Index, "finish_rewrite", lambda *_: None)
            assert prepared.commit()
        assert store.index.refs_of(fork) == (first,)
        if writable:
            store.delete_session(URI)
            before = store
        require_awake(before, 700, uri=OTHER_URI)
    store.close()
    for way in (writable, True):
        with Store.open(store_path, writable=way) as again:
            assert (again.index.unsettled(), again.index.refs_of(fork)) == (set(), ())
            assert len(set(again.index.holders_of(entries[0][0])) & {fork, first}) == (1 if writable else 2)
            require_awake(again, 700, uri=OTHER_URI)
            assert again.verify(deep=True).ok


# --- bytes written, for budgets


def test_bytes_written_are_counted_by_day_and_kept(store: Store) -> None:
    for day, size in ((20_000, 5), (20_000, 7), (20_001, 1)):
        store.index.add_written(day, size)
    with reopened(store) as again:
        reindexing.rebuild(again._core.folder, again.index)
        assert [again.index.written_on(day) for day in (19_999, 20_000, 20_001)] == [0, 12, 1]
        again.index.add_written(20_500, 1)
        assert again.index.written() == {20_500: 1}


# --- making the index anew on request


def test_a_rebuild_of_an_open_store_leaves_what_the_bundles_say(store: Store, store_path: Path) -> None:
    fork, first = a_fork(store)
    rows = list(store.iter_sessions())
    store.index._connection.execute(BREAK_ROWS)
    actions, problems = reindexing.plan_rebuild(store._core.folder, store.index)
    assert [(action.kind, action.path) for action in actions] == [
        ("index", str(the_file(store_path, one))) for one in sorted([fork, first])
    ]
    assert problems == []
    with pytest.raises(StoreIoError):
        list(store.iter_sessions())
    report = reindexing.rebuild(store._core.folder, store.index)
    assert report.index_rebuilt == "it was asked for"
    assert list(store.iter_sessions()) == rows
    assert store.index.refs_of(fork) == (first,)
    assert reindexing.plan_rebuild(store._core.folder, store.index) == ([], [])
    sleep(store, 20)
    with reopened(store) as again:
        assert (again.opening.index_rebuilt, again.opening.rows_added) == (None, 0)
        require_awake(again, 20)


@pytest.mark.parametrize("damage", ["lost", "empty", "no database"])
def test_threat_26_an_index_lost_while_the_store_is_open_is_made_anew_on_request(
    store: Store, store_path: Path, damage: str
) -> None:
    sleep(store, 300)
    (store_path / "index.sqlite-wal").unlink()
    DAMAGES[damage](store_path / "index.sqlite")
    reindexing.rebuild(store._core.folder, store.index)
    require_awake(store, 300)
    assert sleep(store, 600).version == 2
    with reopened(store) as again:
        assert again.opening.index_rebuilt is None
        require_awake(again, 600)


def test_what_a_rebuild_would_change_is_told_and_nothing_changes(store: Store, store_path: Path) -> None:
    fork, first = a_fork(store)
    spare = sleep(store, 20, uri=SessionUri("default", "spare")).bundle_id
    assert reindexing.plan_rebuild(store._core.folder, store.index) == ([], [])
    index = store.index
    index.drop([first])
    index.begin_rewrite(fork, [NEEDED])
    file = the_file(store_path, spare)
    file.rename(file.with_suffix(".mvr"))
    before = (index.bundle_ids(), index.refs_of(fork))
    actions, _ = reindexing.plan_rebuild(store._core.folder, index)
    told = {Path(action.path).stem: (action.session, action.version, action.reason) for action in actions}
    assert told == {
        first.hex(): (URI, 1, "the index lacks it"),
        fork.hex(): (OTHER_URI, 1, "the index has another references for it"),
        spare.hex(): (
            SessionUri("default", "spare"), 1, "the index has a row for it, and no version has such a file"
        ),
    }  # fmt: skip
    assert (index.bundle_ids(), index.refs_of(fork)) == before


def test_a_rebuild_keeps_the_versions_that_only_the_old_rows_tell_of(
    store: Store, store_path: Path, tmp_path: Path
) -> None:
    """Else a wake would quietly give the version before, and its number would be given again."""
    first = sleep(store, 300)
    missing = sleep(store, 600, before=first)
    damaged = sleep(store, 20, uri=OTHER_URI)
    the_file(store_path, missing.bundle_id).rename(tmp_path / "moved")
    broken = the_file(store_path, damaged.bundle_id)
    good = broken.read_bytes()
    broken.write_bytes(good[:-1])
    actions, problems = reindexing.plan_rebuild(store._core.folder, store.index)
    assert (actions, sorted(found.code for found in problems)) == ([], ["bundle_missing", "truncated"])
    report = reindexing.rebuild(store._core.folder, store.index)
    assert sorted(found.code for found in report.unreadable) == ["bundle_missing", "truncated"]
    assert [row.version for row in store.versions(URI)] == [1, 2]
    with pytest.raises(BundleMissing):
        store.open_session(URI)
    with pytest.raises(Truncated):
        store.open_session(OTHER_URI)
    assert store.index.unsettled() == {missing.bundle_id, damaged.bundle_id}
    (tmp_path / "moved").rename(the_file(store_path, missing.bundle_id))
    broken.write_bytes(good)
    with reopened(store) as again:
        assert (again.opening.unreadable, again.index.unsettled()) == ((), set())
        require_awake(again, 600)
        require_awake(again, 20, uri=OTHER_URI)


def test_a_rebuild_does_not_bring_back_what_a_cut_off_delete_left(store: Store, store_path: Path) -> None:
    first = sleep(store, 300)
    second = sleep(store, 600, before=first)
    the_file(store_path, first.bundle_id).unlink()
    file = the_file(store_path, second.bundle_id)
    file.rename(file.with_suffix(".mvr"))
    reindexing.rebuild(store._core.folder, store.index)
    assert store.find_session(URI) is None


def test_threat_28_a_rebuild_that_fails_leaves_a_store_that_opens(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(store, 300)
    real = Index._insert

    def failing(self: Index, bundle: IndexedBundle) -> None:
        real(self, bundle)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Index, "_insert", failing)
        with pytest.raises(KeyboardInterrupt):
            reindexing.rebuild(store._core.folder, store.index)
    with pytest.raises(StoreIoError):
        store.find_session(URI)
    with reopened(store) as again:
        assert again.opening.index_rebuilt is None, "the old one stays until there is a new one"
        require_awake(again, 300)


def test_a_rebuild_whose_file_cannot_be_flushed_writes_nothing_more_and_reads_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(store, 600, before=sleep(store, 300))
    failing = refusing(DurabilityLost("The flush failed."))
    with monkeypatch.context() as patch:
        patch.setattr("torpor.memvid.disk.durable.sync_folder", failing)
        with pytest.raises(DurabilityLost):
            store.rebuild_index()
    assert [row.version for row in store.versions(URI)] == [1, 2]
    require_awake(store, 600)
    assert store.verify(deep=True).ok
    with pytest.raises(DurabilityLost, match="writes no more"):
        sleep(store, 20, uri=OTHER_URI)
    with reopened(store) as again:
        assert again.opening.unreadable == ()
        require_awake(again, 600)


@pytest.mark.parametrize("half_made", [False, True])
def test_a_file_that_a_rebuild_could_not_replace_is_behind_and_what_is_deleted_then_is_no_loss(
    store: Store, monkeypatch: pytest.MonkeyPatch, half_made: bool
) -> None:
    sleep(store, 300)
    sleep(store, 20, uri=OTHER_URI)
    failing = refusing(NoSpace("No room for the index."))
    with monkeypatch.context() as patch:
        patch.setattr(index_module, "configure" if half_made else "put_in_place", failing)
        store.rebuild_index()
    store.delete_session(URI)
    with reopened(store) as again:
        assert again.opening.unreadable == ()
        assert [row.uri for row in again.iter_sessions()] == [OTHER_URI]


@pytest.mark.parametrize("step", ["create", "flush", "place", "open"])
def test_an_index_that_cannot_return_to_its_file_goes_on_in_memory(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    sleep(store, 300)
    sleep(store, 20, uri=OTHER_URI)
    store.index.go_on_in_memory()
    (store_path / "index.sqlite").unlink()
    store.index.file_is_behind = False  # as after an opening that could make none
    failing = refusing(DurabilityLost("The flush failed.") if step == "flush" else NoSpace("No room."))
    here, durable = "torpor.memvid.index.index.", "torpor.memvid.disk.durable."
    places = {"create": here + "new_file", "flush": durable + "sync_folder", "place": here + "put_in_place"}
    with monkeypatch.context() as patch:
        patch.setattr(places.get(step, here + "configure"), failing)
        with pytest.raises(StoreError):
            store.index.return_to_file()
    assert store.index.file_is_behind == (step != "create")
    require_awake(store, 300)
    store.delete_session(URI)
    with reopened(store) as again:
        assert again.opening.unreadable == ()
        assert [row.uri for row in again.iter_sessions()] == [OTHER_URI]


def test_an_index_whose_last_change_has_no_end_is_not_copied_and_nobody_waits_for_it_for_ever(store: Store) -> None:
    sleep(store, 300)
    store.index._connection.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreIoError, match="did not come to an end"):
        store.index.go_on_in_memory()
    store.index._connection.execute("ROLLBACK")
    require_awake(store, 300)
    sleep(store, 20, uri=OTHER_URI)


def test_an_index_that_returned_to_its_file_has_nothing_in_it_of_what_was_dropped(
    store: Store, store_path: Path
) -> None:
    sleep(store, 300, uri=SessionUri("default", "secretname"))
    sleep(store, 300)
    store.index.go_on_in_memory()
    store.delete_session(SessionUri("default", "secretname"))
    assert b"secretname" in (store_path / "index.sqlite").read_bytes()
    store.index.return_to_file()
    assert [file.name for file in store_path.glob("index*") if b"secretname" in file.read_bytes()] == []
    assert (store_path / "index.sqlite").stat().st_mode & 0o777 == 0o600
    sleep(store, 600)
    with reopened(store) as again:
        assert again.opening.index_rebuilt is None
        assert [row.version for row in again.versions(URI)] == [1, 2]


def test_a_stranger_that_counts_more_rewrites_than_there_can_be_is_named_and_nothing_is_written_anew(
    store: Store, store_path: Path
) -> None:
    fork, _ = a_fork(store)
    store.close()
    stranger = store_path / f"rewrites.{10**15 - 1}"
    stranger.touch(mode=0o600)
    with Store.open(store_path, writable=True) as again:
        assert "older than the last rewrite" in str(again.opening.index_rebuilt)
        with pytest.raises(LimitExceeded, match="remove that file") as refusal:
            again.index.begin_rewrite(fork, [NEEDED])
        assert refusal.value.details["path"] == str(stranger)
        assert again.index.unsettled() == set()
        require_awake(again, 700, uri=OTHER_URI)
        sleep(again, 20, uri=SessionUri("default", "more"))
    stranger.unlink()
    (store_path / "index.sqlite").unlink()
    with Store.open(store_path, writable=True) as again:  # as the message says
        again.index.begin_rewrite(fork, [NEEDED])
        assert [found.name for found in store_path.glob("rewrites.*")] == ["rewrites.1"]


def test_an_index_that_has_lost_its_count_is_a_typed_error(store: Store) -> None:
    fork, _ = a_fork(store)
    store.index._connection.execute("UPDATE meta SET value = 'many' WHERE key = 'rewrites'")
    with pytest.raises(StoreIoError, match="makes it anew"):
        store.index.begin_rewrite(fork, [NEEDED])


def test_a_rebuild_on_a_full_disk_goes_on_in_memory_and_says_that_the_index_has_no_file(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(store, 300)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "return_to_file", refusing(NoSpace("No room for the index.")))
        assert "kept in memory" in str(reindexing.rebuild(store._core.folder, store.index).index_rebuilt)
        (problem,) = store.rebuild_index().problems
    assert (problem.code, problem.path) == ("index_failed", store.index.path)
    assert "No room for the index." in problem.message
    require_awake(store, 300)
    assert store.rebuild_index().problems == ()
    require_awake(store, 300)


def test_a_store_whose_new_index_cannot_be_read_back_goes_on_with_one_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.pread

    def failing(fd: int, count: int, offset: int) -> bytes:
        if (count, offset) == (PAGE_BYTES, 0):
            raise OSError(errno.EIO, "Input/output error")
        return read(fd, count, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", failing)
        with Store.open(tmp_path / "new", writable=True) as store:
            sleep(store, 300)
    with Store.open(tmp_path / "new", writable=True) as store:
        require_awake(store, 300)


# --- many sessions


def many(count: int, versions: int = 1) -> Iterator[IndexedBundle]:
    """Rows as bundles would give them, without the bundles."""
    for number in range(count):
        session, version = divmod(number, versions)
        row = IndexRow(
            SessionUri("default", f"agent-{session:06}"), version + 1, digest(number),
            digest(number - 1) if version else None, digest(-1), 10, 2000, 1000, number, "demo", ("test",),
        )  # fmt: skip
        refs = (digest(number - 1),) if version else ()
        yield IndexedBundle(row.bundle_id, LIVE, row, refs, tuple(digest((number, block)) for block in range(3)))


def digest(value: object) -> bytes:
    return hashlib.blake2b(repr(value).encode(), digest_size=32).digest()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("count", "versions"),
    [(5_000, 1), (2_000, 2), (1_999, 2), (0, 1), pytest.param(100_000, 4, marks=pytest.mark.heavy)],
)
def test_a_large_index_answers_as_a_small_one(store: Store, count: int, versions: int) -> None:
    """Also where a page of a listing ends exactly at its last session."""
    folder = store._core.folder
    store.index.close()
    store.index = Index.create_in_memory(store.path, store.uuid, many(count, versions), root_fd=folder.root_fd)
    store.index.return_to_file()
    rows = [bundle.row for bundle in many(count, versions)]
    latest = [row for at, row in enumerate(rows) if row and (row.version == versions or at == count - 1)]
    assert list(store.index.iter_latest()) == latest
    assert store.index.all_rows() == rows
    assert store.index.uris() == [row.uri for row in latest]
    assert store.index.totals() == (len(latest), count, 2000 * count)
    for number in range(0, count, max(1, count // 7)):
        row = rows[number]
        assert store.index.find(row.uri, row.version) == row
        assert store.index.holders_of(digest((number, 2))) == [row.bundle_id]
        assert store.index.rows_of([row.bundle_id, bytes(32)]) == {row.bundle_id: row}
    store.index.close()
    with contextlib.closing(Index.open(store.path, folder.root_fd, store.uuid)) as again:
        assert again.bundle_ids() == {row.bundle_id for row in rows if row}
    with contextlib.closing(Index.copy_to_memory(store.path, folder.root_fd, store.uuid)) as copy:
        assert copy.all_rows() == rows


def test_no_question_of_a_wake_or_a_removal_reads_every_row(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is answered by an index; a scan would grow with the store."""
    asked, real, index = list[str](), store.index._select, store.index
    monkeypatch.setattr(index, "_select", lambda statement, values: asked.append(statement) or real(statement, values))
    for question in (index.find, index.versions, index.bundles_of):
        question(URI)
    index.find(URI, 1)
    for question in (index.knows, index.refs_of, index.users_of, index.holders_of):
        question(NEEDED)
    index.unsettled()
    index.with_status("unreadable")
    index.rows_of([NEEDED])
    assert len(asked) == 11
    for statement in asked:
        plan = real(f"EXPLAIN QUERY PLAN {statement}", ("",) * statement.count("?"))
        scans = [step[3] for step in plan if step[3].startswith("SCAN") and "by_unsettled" not in step[3]]
        assert scans == [], statement


@pytest.mark.parametrize("seed", [10, 13, 31, 41])
def test_what_sqlite_moved_about_before_a_drop_is_erased_too(store_path: Path, seed: int) -> None:
    """`secure_delete` overwrites the place of a dropped row, not those where it stood earlier. With these histories
    SQLite 3.40 leaves the dropped names behind where the file is not written anew."""
    chosen = random.Random(seed)
    secret, label = SessionUri("private", "zyx-secret-session"), "hush-label"

    def entered(uri: SessionUri, version: int, labels: tuple[str, ...]) -> bytes:
        bundle_id = chosen.randbytes(32)
        row = IndexRow(uri, version, bundle_id, None, b"i" * 32, 1, 1, 1, 1, "m", labels)
        store.index.add(IndexedBundle(bundle_id, LIVE, row, (), ()))
        return bundle_id

    others: list[bytes] = []
    secrets: list[bytes] = []
    with Store.open(store_path, writable=True) as store:
        for number in range(chosen.choice([40, 80, 150])):
            if chosen.random() < 0.25:
                secrets.append(entered(secret, len(secrets) + 1, (label,) * chosen.choice([1, 5, 30])))
            else:
                other = SessionUri("default", f"{chosen.randrange(10**6)}-{number}")
                others.append(entered(other, 1, ("x" * chosen.choice([1, 60, 400, 900]),)))
            if others and chosen.random() < 0.3:
                store.index.drop([others.pop(chosen.randrange(len(others)))])
        store.index.drop(secrets)
        store.index.erase_dropped()
    held = b"".join(file.read_bytes() for file in store_path.glob("index.sqlite*"))
    assert [word for word in (secret.namespace, secret.name, label) if word.encode() in held] == []
