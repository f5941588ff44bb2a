"""The index's questions: sessions by name, versions, packs of a block, listings, counts; when its file is written."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torpor.memvid.answers import VersionInfo
from torpor.memvid.disk import durable
from torpor.memvid.disk.budget import utc_day
from torpor.memvid.errors import DurabilityLost, IndexFailed, SessionNotFound
from torpor.memvid.index.index import INDEX_FILE, Index, PackRow
from torpor.memvid.index.queries import uris_with_earlier_ledgers
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import FORK_URI, OTHER_URI, URI, index_row, names, refusing, reopened, sleep


def row(uri: SessionUri, version: int, *, created_ns: int = 1, salt: int = 0) -> VersionInfo:
    bundle_id = f"{uri.namespace}/{uri.name} {version} {salt}".encode().ljust(32, b".").hex()
    return index_row(uri, version, bundle_id, created_ns=created_ns, labels=("a", "b"))


def block(number: int) -> bytes:
    return number.to_bytes(8, "big") + bytes(24)


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(str(tmp_path))


def test_a_session_is_found_by_what_a_person_types(store: Store) -> None:
    sleep(store, 10)
    sleep(store, 10, uri=SessionUri("work", "agent"), seed=1)
    for text, uri in (("agent", URI), ("default/agent", URI), ("torpor://work/agent", SessionUri("work", "agent"))):
        assert store.resolve(text) == uri
    with pytest.raises(SessionNotFound) as refusal:
        store.resolve("agnt")
    assert refusal.value.suggestions == ["torpor://default/agent"]


def test_rows_read_back_as_they_were_entered(index: Index) -> None:
    rows = [row(URI, 2), row(URI, 1), row(OTHER_URI, 7)]
    index.add_all(rows)
    assert index.versions(URI) == [rows[1], rows[0]]
    assert (index.find(URI), index.find(URI, 1), index.find(URI, 3)) == (rows[0], rows[1], None)
    for number in (0, -1, 1 << 53, 1 << 70):
        assert index.find(URI, number) is None
    assert (index.find(OTHER_URI), index.find(FORK_URI)) == (rows[2], None)
    assert index.rows_of([rows[2].bundle_id, "00" * 32]) == {rows[2].bundle_id: rows[2]}
    assert index.bundle_ids() == {each.bundle_id for each in rows}
    index.drop([rows[0].bundle_id, "00" * 32])
    assert index.find(URI) == rows[1]
    assert index.knows(rows[1].bundle_id)
    assert not index.knows(rows[0].bundle_id)


def test_of_two_versions_of_one_number_the_younger_is_the_newest(index: Index) -> None:
    old, young = row(URI, 1, created_ns=5), row(URI, 1, created_ns=9, salt=1)
    for order in ((old, young), (young, old)):
        index.drop([old.bundle_id, young.bundle_id])
        index.add_all(order)
        assert index.versions(URI) == [old, young]
        assert (index.find(URI), index.find(URI, 1)) == (young, young)


def test_a_block_is_found_in_the_packs_that_have_it_the_newest_first(index: Index) -> None:
    index.add_pack(PackRow("packs/a", 10, (block(1), block(2))))
    index.add_pack(PackRow("packs/b", 20, (block(2),), (block(1),)))
    index.add_pack(PackRow("packs/c", 30, (), (block(2), block(3))))
    assert index.packs_of(block(2)) == ["packs/b", "packs/a"]
    assert index.packs_of(block(2), stripped=True) == ["packs/b", "packs/a", "packs/c"]
    assert (index.packs_of(block(3)), index.packs_of(block(3), stripped=True)) == ([], ["packs/c"])
    found = {name: set(blocks) for name, blocks in index.packs_with([block(1), block(2), block(3)]).items()}
    assert found == {"packs/b": {block(2)}, "packs/a": {block(1), block(2)}}
    index.add_pack(PackRow("packs/b", 21, (block(3),)))
    assert (index.packs_of(block(2)), index.packs_of(block(3))) == (["packs/a"], ["packs/b"])
    assert index.pack_sizes() == {"packs/a": 10, "packs/b": 21, "packs/c": 30}
    index.drop_packs(["packs/a", "packs/none"])
    assert index.pack_sizes().keys() == {"packs/b", "packs/c"}
    left = [index.packs_of(block(number), stripped=True) for number in (1, 2, 3)]
    assert left == [[], ["packs/c"], ["packs/b", "packs/c"]]


def test_blocks_with_the_same_beginning_of_their_ids_are_both_found(index: Index) -> None:
    one, two = b"samesame" + b"1" * 24, b"samesame" + b"2" * 24
    index.add_pack(PackRow("packs/a", 10, (one, two)))
    assert set(index.packs_with([one, two])["packs/a"]) == {one, two}


def test_many_blocks_are_asked_for_at_once(index: Index) -> None:
    blocks = [block(number) for number in range(1300)]
    index.add_pack(PackRow("packs/a", 10, tuple(blocks)))
    assert sorted(index.packs_with(blocks)["packs/a"]) == blocks


@pytest.mark.parametrize("page", [1, 2, 100])
def test_a_listing_has_each_session_once_with_its_latest_version_and_all_its_bytes(index: Index, page: int) -> None:
    uris = [SessionUri(space, name) for space in ("a", "b") for name in ("x", "y", "z")]
    index.add_all(row(uri, version) for uri in reversed(uris) for version in (1, 3, 2))
    listed = [one for some in index.iter_listed(None, page) for one in some]
    assert listed == [(row(uri, 3), 300) for uri in uris]
    assert [one.uri for some in index.iter_listed("b", page) for one, _ in some] == uris[3:]
    assert [uri for some in index.iter_uris(page) for uri in some] == uris


def test_a_session_with_a_ledger_before_its_newest_version_is_found_in_one_question(index: Index) -> None:
    earlier, newest, same_number, exact = (SessionUri("a", name) for name in ("earlier", "newest", "same", "exact"))
    index.add_all([replace(row(earlier, 1), unread_tokens=2), row(earlier, 2), row(earlier, 3)])
    index.add_all([row(newest, 1), replace(row(newest, 2), unread_tokens=2)])
    index.add_all([replace(row(same_number, 1), unread_tokens=2), row(same_number, 1, created_ns=2, salt=1)])
    index.add_all([row(exact, 1), row(exact, 2)])
    assert uris_with_earlier_ledgers(index) == [earlier, same_number]


def test_a_session_that_goes_while_it_is_listed_hides_no_other(index: Index) -> None:
    index.add_all(row(SessionUri("a", f"{number:02}"), 1) for number in range(10))
    pages = index.iter_listed(None, 3)
    assert len(next(pages)) == 3
    index.drop([row(SessionUri("a", "02"), 1).bundle_id, row(SessionUri("a", "03"), 1).bundle_id])
    assert [one.uri.name for some in pages for one, _ in some] == [f"{number:02}" for number in range(4, 10)]


def test_names_near_another_are_few_and_of_its_namespace(index: Index) -> None:
    index.add_all(row(SessionUri("a", f"{number:04}"), 1) for number in range(1000))
    near = index.near(SessionUri("a", "0500"))
    assert len(near) <= 401
    assert {SessionUri("a", "0499"), SessionUri("a", "0500"), SessionUri("a", "0501")} <= set(near)
    assert index.near(SessionUri("b", "0500")) == []


def test_bytes_written_are_counted_by_day_and_kept(store: Store) -> None:
    day = utc_day(time.time_ns())
    total = 0
    for number in range(18):  # past a writing of the file
        total += sleep(store, 10, seed=number).bytes_written
    with reopened(store) as again:
        assert again.index.written().get(day, 0) == total
        again._core.count_written(day, 7)
    with Store.open(store.path, writable=True) as third:
        assert third.index.written().get(day, 0) == total + 7


def test_days_long_ago_are_forgotten(index: Index) -> None:
    index.add_written(100, 5)
    index.add_written(100, 5)
    index.add_written(499, 1)
    assert (index.written().get(100, 0), index.written().get(499, 0)) == (10, 1)
    index.add_written(501, 1)
    assert index.written().get(100, 0) == 0


def test_the_file_is_written_now_and_then_and_when_the_store_closes(store: Store, store_path: Path) -> None:
    for number in range(20):
        sleep(store, 10, seed=number, layers=1)
    assert (store_path / INDEX_FILE).exists()
    stamp = (store_path / INDEX_FILE).stat().st_ino
    sleep(store, 10, seed=99)
    assert (store_path / INDEX_FILE).stat().st_ino == stamp
    store.close()
    assert (store_path / INDEX_FILE).stat().st_ino != stamp
    stamp = (store_path / INDEX_FILE).stat().st_ino
    Store.open(store_path, writable=True).close()
    assert (store_path / INDEX_FILE).stat().st_ino == stamp, "nothing has changed"


def test_a_version_that_the_file_does_not_tell_of_costs_no_flush_when_it_goes(store: Store, store_path: Path) -> None:
    sleep(store, 300)
    store = reopened(store)
    second = sleep(store, 400, seed=1)
    with store:
        store.index.forget_in_file(store._core.folder, [second.bundle_id])
        assert (store_path / INDEX_FILE).exists()
        store.delete_version(URI, 2)
        assert (store_path / INDEX_FILE).exists()
        store.delete_version(URI, 1)
        assert not (store_path / INDEX_FILE).exists() or store.index._in_file == 0


def test_where_the_file_cannot_be_forgotten_nothing_is_deleted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep(store, 300)
    store = reopened(store)
    before = names(store.path)
    with store:
        with monkeypatch.context() as patch:
            patch.setattr(durable, "sync_folder", refusing(DurabilityLost("no flush")))
            with pytest.raises(DurabilityLost):
                store.delete_session(URI)
        assert names(store.path) == before
        making.require_awake(store, 300)


def test_an_index_that_fails_is_a_typed_error(store: Store) -> None:
    receipt = sleep(store, 300)
    store.index._connection.execute("UPDATE versions SET labels = '{'")
    with pytest.raises(IndexFailed, match=r"remove that file"):
        store.find_session(URI)
    store.index._connection.execute("DROP TABLE versions")
    with pytest.raises(IndexFailed):
        store.versions(URI)
    assert making.pack_of(store, receipt).exists()


def test_a_change_that_fails_halfway_changes_nothing(index: Index) -> None:
    index.add(row(URI, 1))
    with pytest.raises(ValueError, match="stop"):
        index.add_all(one for one in [row(URI, 2), None] if one or refusing(ValueError("stop"))())
    assert [one.version for one in index.versions(URI)] == [1]
    index.add(row(URI, 3))
    assert sqlite3.threadsafety >= 0


def test_no_question_of_a_wake_or_a_removal_reads_every_row(index: Index) -> None:
    index.add(row(URI, 1))
    index.add_pack(PackRow("packs/a", 10, (block(1),)))
    asked: list[str] = []
    index._connection.set_trace_callback(asked.append)
    index.find(URI)
    index.find(URI, 1)
    index.versions(URI)
    index.knows(row(URI, 1).bundle_id)
    index.rows_of([row(URI, 1).bundle_id])
    index.packs_of(block(1))
    index.packs_with([block(1)])
    list(index.iter_uris(10))
    index.drop([row(URI, 1).bundle_id])
    index.drop_packs(["packs/a"])
    index._connection.set_trace_callback(None)
    plans = [index._connection.execute(f"EXPLAIN QUERY PLAN {one}").fetchall() for one in asked]
    assert len([plan for plan in plans if plan]) >= 11
    assert "SCAN" not in repr(plans)
