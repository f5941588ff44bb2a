"""Openings: the index comes in line with the folder, whatever became of it, and what is missing or damaged is told."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from blake3 import blake3
from torpor.memvid.disk import durable
from torpor.memvid.errors import BundleMissing, NoSpace, NotAStore, StoreIoError
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.format.records import Receipt
from torpor.memvid.index import index as module
from torpor.memvid.index.index import INDEX_FILE, Index
from torpor.memvid.recovery import opening
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.cut_off import copies_at_each_step
from torpor.tests.memvid.store_making import FORK_URI, OTHER_URI, URI, put, remove_index, reopened, require_awake, sleep


@pytest.fixture
def made(store: Store) -> Store:
    """Three versions of a session, a fork, and another session; the index has a file."""
    first = sleep(store, 300)
    second = sleep(store, 600, before=first)
    sleep(store, 900, before=second)
    sleep(store, 700, uri=FORK_URI, before=second)
    sleep(store, 300, uri=OTHER_URI, seed=1)
    return reopened(store)


def require_all(store: Store) -> None:
    assert [(row.uri, row.version) for row in store.index.all_rows()] == [
        (URI, 1),
        (URI, 2),
        (URI, 3),
        (FORK_URI, 1),
        (OTHER_URI, 1),
    ]
    for version, tokens in ((1, 300), (2, 600), (3, 900)):
        require_awake(store, tokens, version=version)
    require_awake(store, 700, uri=FORK_URI)
    require_awake(store, 300, uri=OTHER_URI, seed=1)


def resealed(body: bytes, uuid: str) -> bytes:
    return body + module._TAIL_MAGIC + blake3(body).update(f"{uuid} 0".encode()).digest()


def changed(data: bytes, *statements: str) -> bytes:
    """The body of an index file after these statements."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.deserialize(data[: -module._TAIL_BYTES])
        for statement in statements:
            connection.execute(statement)
        return connection.serialize()


def unlike_its_schema(data: bytes, change: str) -> bytes:
    """The body of an index file whose versions have other types than the schema in it says."""
    loose = changed(
        data,
        "PRAGMA writable_schema = 1",
        "UPDATE sqlite_master SET sql = replace(sql, ' STRICT', '') WHERE name = 'versions'",
    )
    return changed(
        loose + bytes(module._TAIL_BYTES),
        f"UPDATE versions SET {change} WHERE number = 1",
        "PRAGMA writable_schema = 1",
        "UPDATE sqlite_master SET sql = sql || ' STRICT' WHERE name = 'versions'",
    )


HARMLESS: dict[str, Callable[[bytes, str], bytes]] = {
    "empty": lambda data, uuid: b"",
    "cut": lambda data, uuid: data[:-1],
    "longer": lambda data, uuid: data + b"x",
    "zeros": lambda data, uuid: bytes(len(data)),
    "a flipped bit": lambda data, uuid: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "nothing but a tail": lambda data, uuid: resealed(b"", uuid),
    "no database": lambda data, uuid: resealed(b"SQLite format 4\0" * 300, uuid),
    "of another store": lambda data, uuid: resealed(data[: -module._TAIL_BYTES], "another"),
    "another schema": lambda data, uuid: resealed(changed(data, "CREATE TABLE more (x)"), uuid),
    "a trigger": lambda data, uuid: resealed(
        changed(data, "CREATE TRIGGER t AFTER INSERT ON versions BEGIN DELETE FROM versions; END"), uuid
    ),
    "no packs": lambda data, uuid: resealed(changed(data, "DELETE FROM blocks", "DELETE FROM packs"), uuid),
    "no versions": lambda data, uuid: resealed(changed(data, "DELETE FROM versions"), uuid),
    "numbers for ids": lambda data, uuid: resealed(unlike_its_schema(data, "bundle_id = 1000000000"), uuid),
    "words for numbers": lambda data, uuid: resealed(unlike_its_schema(data, "version = 'seven'"), uuid),
    "a log's header": lambda data, uuid: resealed(data[:18] + b"\2\2" + data[20 : -module._TAIL_BYTES], uuid),
}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_threat_26_a_damaged_foreign_or_older_index_costs_nothing(
    made: Store, store_path: Path, change: Callable[[bytes, str], bytes], writable: bool
) -> None:
    made.close()
    file = store_path / INDEX_FILE
    put(file, change(file.read_bytes(), made.uuid))
    with Store.open(store_path, writable=writable) as again:
        assert again.opening.unreadable == ()
        require_all(again)
        if writable:  # nothing that came with the file acts
            sleep(again, 20, uri=OTHER_URI, seed=3)
            assert len(again.index.all_rows()) == 6


@pytest.mark.parametrize("writable", [True, False])
def test_threat_26_an_index_that_is_gone_comes_back(made: Store, store_path: Path, writable: bool) -> None:
    made.close()
    remove_index(store_path)
    with Store.open(store_path, writable=writable) as again:
        assert (again.opening.index_rebuilt, again.opening.rows_added) == ("it is missing", 5)
        require_all(again)
    assert (store_path / INDEX_FILE).exists() is writable
    if writable:
        with Store.open(store_path, writable=True) as third:
            assert (third.opening.index_rebuilt, third.opening.rows_added) == (None, 0)


def test_an_index_that_goes_while_the_store_is_open_is_written_anew(made: Store, store_path: Path) -> None:
    remove_index(store_path)
    require_all(made)
    made.delete_session(OTHER_URI)
    sleep(made, 300, uri=OTHER_URI, seed=1)
    made.close()
    with Store.open(store_path, writable=True) as again:
        assert again.opening.index_rebuilt is None
        require_all(again)


@pytest.mark.parametrize("writable", [True, False])
def test_threat_24_an_index_of_any_earlier_moment_costs_nothing_where_nothing_was_deleted(
    store: Store, store_path: Path, tmp_path: Path, writable: bool
) -> None:
    moments = []
    receipt = None
    for count in range(1, 5):
        receipt = sleep(store, 256 * count + 10, before=receipt)
        store = reopened(store)
        moments.append((store_path / INDEX_FILE).read_bytes())
    store.close()
    for data in moments:
        put(store_path / INDEX_FILE, data)
        with Store.open(store_path, writable=writable) as again:
            assert again.opening.unreadable == ()
            assert [row.version for row in again.versions(URI)] == [1, 2, 3, 4]
            for version in range(1, 5):
                require_awake(again, 256 * version + 10, version=version)


@pytest.mark.parametrize("writable", [True, False])
def test_an_index_of_a_moment_before_a_delete_is_not_believed(store: Store, store_path: Path, writable: bool) -> None:
    """As one put back from a backup: what was deleted is not taken for missing."""
    moments = []
    sleep(store, 300)
    for number in range(3):
        sleep(store, 300, uri=OTHER_URI, seed=1)
        store = reopened(store)
        moments.append((store_path / INDEX_FILE).read_bytes())
        store.delete_session(OTHER_URI)
        store = reopened(store)
        assert [each.name for each in store_path.glob("deletes.*")] == [f"deletes.{number + 1}"]
    store.close()
    for earlier in moments:
        put(store_path / INDEX_FILE, earlier)
        with Store.open(store_path, writable=writable) as again:
            assert again.opening.unreadable == ()
            assert again.opening.index_rebuilt is not None
            assert [row.uri for row in again.iter_sessions()] == [URI]
            require_awake(again, 300)


def test_a_row_that_lies_is_refused_and_not_believed(made: Store, store_path: Path) -> None:
    made.close()
    file = store_path / INDEX_FILE
    data = changed(file.read_bytes(), "UPDATE versions SET token_count = 1 WHERE name = 'agent' AND version = 3")
    put(file, resealed(data, made.uuid))
    with Store.open(store_path, writable=True) as again:
        with pytest.raises(Exception, match="token_count differs") as refused:
            again.open_session(URI)
        assert refused.value.code == "index_mismatch"  # type: ignore[attr-defined]
        require_awake(again, 600, version=2)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE versions SET labels = '{' WHERE version = 3",
        "UPDATE versions SET namespace = '../x' WHERE version = 3",
        "UPDATE versions SET bundle_id = x'00' WHERE version = 3",
        "UPDATE blocks SET pack = 999",
        "UPDATE packs SET name = '../../etc/passwd' WHERE number = 1",
        "UPDATE packs SET name = 'packs/' || number",
    ],
)
def test_threat_26_a_crafted_index_is_a_typed_error_or_costs_nothing_and_removes_nothing(
    made: Store, store_path: Path, statement: str
) -> None:
    made.close()
    file, before = store_path / INDEX_FILE, making.names(store_path)
    put(file, resealed(changed(file.read_bytes(), statement), made.uuid))
    for writable in (False, True):
        with contextlib.suppress(StoreIoError), Store.open(store_path, writable=writable) as again:
            for row in [*again.versions(URI)]:
                with contextlib.suppress(StoreIoError):
                    again.open_session(URI, row.version).close()
    assert making.names(store_path) == before
    remove_index(store_path)
    with Store.open(store_path, writable=True) as again:
        require_all(again)


def test_an_index_file_longer_than_any_of_ours_is_not_read_whole(made: Store, store_path: Path) -> None:
    made.close()
    os.truncate(store_path / INDEX_FILE, 1 << 40)
    with (
        mock.patch.object(module, "MAX_INDEX_BYTES", 1 << 20),
        making.taking_at_most(40 << 20),
        Store.open(store_path, writable=False) as again,
    ):
        assert again.opening.index_rebuilt is not None
        require_all(again)


class _Small:
    """A connection for whose image there is no memory."""

    def __init__(self, real: sqlite3.Connection) -> None:
        self._real = real

    def __getattr__(self, name: str) -> object:
        return making.refusing(MemoryError) if name == "serialize" else getattr(self._real, name)


UNWRITTEN: dict[str, Callable[[Store], contextlib.AbstractContextManager[object]]] = {
    "above its limit": lambda _: mock.patch.object(module, "MAX_INDEX_BYTES", 1000),
    "a full disk": lambda _: mock.patch.object(durable, "write_unflushed", making.refusing(NoSpace("No room"))),
    "no memory": lambda store: mock.patch.object(store.index, "_connection", _Small(store.index._connection)),
}


@pytest.mark.parametrize("why", UNWRITTEN)
def test_an_index_that_cannot_be_written_fails_nothing(made: Store, store_path: Path, why: str) -> None:
    remove_index(store_path)
    with UNWRITTEN[why](made):
        for number in range(20):
            sleep(made, 10, uri=OTHER_URI, seed=number)
        made.delete_session(FORK_URI)
        made.close()
    assert not (store_path / INDEX_FILE).exists()
    with Store.open(store_path, writable=True) as again:
        assert len(again.versions(OTHER_URI)) == 21
        assert again.find_session(FORK_URI) is None


# --- files that are missing, damaged, put back


@pytest.fixture
def files(made: Store) -> list[Path]:
    """A manifest and a pack of the session, those of its second version."""
    row = made.versions(URI)[1]
    with made.open_session(URI, 2) as reader:
        (name,) = made.index.packs_of(reader.entries[1].id)
    return [making.manifest_path(made, row.bundle_id), Path(made.path, name)]


BETWEEN = ("nothing", "delete", "sleep", "delete the others", "delete newer")
PUT_BACK = [
    (what, between, anew)
    for what, between, anew in itertools.product(((0,), (1,), (0, 1)), BETWEEN, (True, False))
    if not (anew and 0 in what and between.startswith("delete"))
]
"""Without the manifest and the index nothing tells of the version, and a delete may take its packs."""


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("what", "between", "anew"), PUT_BACK)
@pytest.mark.parametrize("opened", [True, False])
def test_what_was_missing_and_is_put_back_is_whole_without_a_command(
    made: Store, store_path: Path, files: list[Path], tmp_path: Path, what: tuple[int, ...], between: str, anew: bool,
    opened: bool,
) -> None:  # fmt: skip
    """opened: put back while the store is open, else between two openings."""
    made.close()
    if anew:
        remove_index(store_path)
    away = [files[number].rename(tmp_path / str(number)) for number in what]
    store = Store.open(store_path, writable=True)
    {
        "nothing": lambda: None,
        "delete": lambda: store.delete_session(FORK_URI),
        "sleep": lambda: sleep(store, 40, seed=5),
        "delete the others": lambda: (store.delete_session(FORK_URI), store.delete_session(OTHER_URI)),
        "delete newer": lambda: store.delete_version(URI, 3),
    }[between]()
    if not opened:
        store.close()
    for number, file in zip(what, away, strict=True):
        file.rename(files[number])
    if not opened:
        store = Store.open(store_path, writable=True)
    elif anew:
        store._core.look_again()
    with store:
        require_awake(store, 600, version=2)
        require_awake(store, 300, version=1)
        if between != "delete newer":
            require_awake(store, 900, version=3)
    with Store.open(store_path, writable=True) as again:
        assert again.opening.unreadable == ()
        require_awake(again, 600, version=2)


def test_threat_25_a_missing_version_is_told_at_each_opening_with_what_helps(
    made: Store, store_path: Path, files: list[Path]
) -> None:
    made.close()
    files[0].unlink()
    for writable in (True, True, False):
        with Store.open(store_path, writable=writable) as again:
            (finding,) = again.opening.unreadable
            assert (finding.path, finding.code) == (str(files[0]), "bundle_missing")
            assert f"version 2 of {URI}" in finding.message
            assert [row.version for row in again.versions(URI)] == [1, 2, 3]
            with pytest.raises(BundleMissing, match="version 2"):
                again.open_session(URI, 2)
            require_awake(again, 900)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "huge", "link", "fifo", "foreign mode", "hard link"])
def test_a_damaged_or_hostile_file_is_told_and_stops_nothing_else(
    made: Store, store_path: Path, files: list[Path], tmp_path: Path, number: int, damage: str
) -> None:
    made.close()
    remove_index(store_path)
    file = files[number]
    file.chmod(0o000) if damage == "foreign mode" else making.HARMS[damage](file, tmp_path / "aside")
    for writable in (True, False):
        with making.taking_at_most(64 << 20), Store.open(store_path, writable=writable) as again:
            told = {finding.path for finding in again.opening.unreadable}
            assert told == ({str(file)} if damage != "foreign mode" or os.geteuid() else set())
            require_awake(again, 300, version=1)
            require_awake(again, 300, uri=OTHER_URI, seed=1)


def test_names_that_are_none_of_ours_are_left_alone(made: Store, store_path: Path, tmp_path: Path) -> None:
    made.close()
    mine = [
        store_path / "packs" / name
        for name in ("notes.txt", "x.tmp", f"{'A' * 64}.mvp", f"{'a' * 63}.mvp", f"{'a' * 64}.mvm", "ab.tmp.d")
    ]
    for file in mine:
        file.write_text("mine")
    (store_path / "versions" / f"{'b' * 64}.mvp").write_text("mine")
    (store_path / "packs" / "0123456789abcdef.tmp").mkdir()
    (store_path / "damaged").symlink_to(tmp_path)
    (tmp_path / "0123456789abcdef.tmp").write_text("mine")
    mine.append(tmp_path / "0123456789abcdef.tmp")
    with Store.open(store_path, writable=True) as again:
        assert (again.opening.unreadable, again.opening.leftovers_removed) == ((), 0)
        require_all(again)
    assert all(file.read_text() == "mine" for file in mine)


@pytest.mark.parametrize("folder", ["", "packs", "versions", "journal", "damaged"])
def test_threat_28_leftovers_of_unfinished_writes_go_at_the_next_opening_to_write(
    made: Store, store_path: Path, folder: str
) -> None:
    made.close()
    left = store_path / folder / "0123456789abcdef.tmp"
    left.parent.mkdir(mode=0o700, exist_ok=True)
    left.write_bytes(b"half")
    with Store.open(store_path, writable=False) as reader:
        assert reader.opening.leftovers_removed == 0
    assert left.exists()
    with Store.open(store_path, writable=True) as again:
        assert again.opening.leftovers_removed == 1
        require_all(again)
    assert not left.exists()


def test_a_pack_without_a_version_stays_and_is_found_by_a_sleep(store: Store, store_path: Path) -> None:
    """As a crash between the two names of a sleep leaves it."""
    receipt = sleep(store, 300)
    making.manifest_path(store, receipt.bundle_id).unlink()
    with reopened(store, anew=True) as again:
        assert again.opening.unreadable == ()
        assert again.find_session(URI) is None
        assert sleep(again, 300).blocks_new == 0


def test_two_versions_of_one_number_are_the_same_with_any_index(store: Store, store_path: Path, tmp_path: Path) -> None:
    """As a manifest that was missing with the index, and is put back, makes them: the younger is the newest."""
    first = sleep(store, 300)
    away = making.manifest_path(store, first.bundle_id).rename(tmp_path / "away")
    with reopened(store, anew=True) as again:
        second = sleep(again, 400)
        assert second.version == 1
        away.rename(making.manifest_path(again, first.bundle_id))
        again._core.look_again()
        told = [[row.bundle_id for row in again.versions(URI)]]
        require_awake(again, 400)
    for anew, writable in itertools.product((False, True), (True, False)):
        if anew:
            remove_index(store_path)
        with Store.open(store_path, writable=writable) as again:
            told.append([row.bundle_id for row in again.versions(URI)])
            require_awake(again, 400)
            require_awake(again, 400, version=1)
    assert all(one == [first.bundle_id, second.bundle_id] for one in told)


def test_a_folder_that_cannot_be_listed_is_a_typed_error_and_leaves_no_lock(made: Store, store_path: Path) -> None:
    made.close()
    with mock.patch("torpor.memvid.folder.folder.list_names", making.refusing(StoreIoError("EIO"))):
        for writable in (True, False):
            with pytest.raises(StoreIoError):
                Store.open(store_path, writable=writable)
    with Store.open(store_path, writable=True) as again:
        require_all(again)


def test_a_reader_that_meets_a_delete_looks_again_and_not_for_ever(
    made: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.manifest_path(made, made.versions(URI)[0].bundle_id).unlink()
    made.close()
    stamps = itertools.count()
    monkeypatch.setattr(opening, "_stamp_of_file", lambda folder: (next(stamps),))
    with (
        mock.patch.object(Index, "load", side_effect=Index.load) as loads,
        Store.open(store_path, writable=False) as again,
    ):
        assert len(again.opening.unreadable) == 1
    assert loads.call_count == opening._TRIES + 2, "twice more when a version is missing"


@pytest.mark.one_in(1)
@pytest.mark.parametrize("has_index", [False, True])
def test_what_a_daemon_removes_while_a_reader_opens_the_store_is_no_finding(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, has_index: bool
) -> None:
    """Before each look of the reader at the folder."""
    for at in itertools.count():
        path, looks = store_path / str(at), itertools.count()
        with Store.open(path, writable=True) as daemon, monkeypatch.context() as patch:
            sleep(daemon, 10, uri=OTHER_URI)
            sleep(daemon, 300)
            making.copy_pack(daemon, making.pack_of(daemon, sleep(daemon, 300, uri=FORK_URI, seed=2)))
            if has_index:
                daemon._core.index.save(daemon._core.folder, always=True)

            def remove(daemon: Store = daemon) -> None:
                daemon.delete_session(URI)
                daemon.repack()

            def noting(name: str, looks: itertools.count[int] = looks, at: int = at, remove: Any = remove) -> Any:
                real = getattr(StoreFolder, name)

                def call(*args: Any, **kwargs: Any) -> Any:
                    if next(looks) == at:
                        remove()
                    return real(*args, **kwargs)

                return call

            for name in ("open_name", "list_versions", "list_packs", "has_manifest", "status_of"):
                patch.setattr(StoreFolder, name, noting(name))
            with Store.open(path, writable=False) as reader:
                assert reader.opening.unreadable == ()
                assert reader.repack(dry_run=True).problems == ()
                assert reader.verify(deep=False).findings == ()
        if next(looks) <= at:
            assert at > 20
            return


def test_threat_28_a_store_whose_making_was_cut_off_is_made(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    copies = copies_at_each_step(disk, tmp_path / "cut", lambda: Store.open(disk / "store", writable=True).close())
    assert len(copies) > 6
    for copy in copies:
        with Store.open(copy / "store", writable=True) as again:
            sleep(again, 10)
            assert not again.marks(URI)
        assert {path.name for path in (copy / "store").iterdir()} >= {"store.json", "marks.json", "versions", "packs"}


def test_files_copied_in_any_order_while_the_store_is_used_are_a_store(store: Store, tmp_path: Path) -> None:
    """Versions first, packs after: a consistent copy, with whatever index."""
    first = sleep(store, 300)
    copy = tmp_path / "copy"
    copy.mkdir(mode=0o700)
    shutil.copytree(Path(store.path, "versions"), copy / "versions")
    second = sleep(store, 600, before=first)
    for name in ("store.json", "marks.json"):
        shutil.copy2(Path(store.path, name), copy)
    shutil.copytree(Path(store.path, "packs"), copy / "packs")
    store = reopened(store)
    shutil.copy2(Path(store.path, INDEX_FILE), copy)
    store.close()
    with Store.open(copy, writable=True) as again:
        require_awake(again, 300, version=1)
        assert [finding.path for finding in again.opening.unreadable] == [
            str(making.manifest_path(again, second.bundle_id))
        ]
    shutil.rmtree(copy / "packs")
    with pytest.raises(NotAStore):
        Store.open(copy, writable=True)


def test_the_rows_are_those_that_a_new_index_has(made: Store) -> None:
    rows, packs = made.index.all_rows(), made.index.pack_sizes()
    with reopened(made, anew=True) as again:
        assert (again.index.all_rows(), again.index.pack_sizes()) == (rows, packs)
        receipt: Receipt = sleep(again, 20, seed=9)
        assert len(making.packs_of(again, receipt)) == 1
        assert making.pack_of(again, receipt).exists()


@pytest.mark.parametrize("when", ["at an opening", "while open"])
def test_an_index_of_another_moment_hides_no_version_whose_number_it_gives_to_another(
    tmp_path: Path, when: str
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    with Store.open(ours, writable=True) as store:
        sleep(store, 20)
    shutil.copytree(ours, theirs)
    for path, tokens in ((ours, 30), (theirs, 40)):  # the younger one is the other store's
        with Store.open(path, writable=True) as store:
            receipt = sleep(store, tokens, seed=tokens)
        if path == ours:
            mine = making.manifest_path(store, receipt.bundle_id)
    own = mine.read_bytes()
    shutil.copy2(theirs / INDEX_FILE, ours / INDEX_FILE)
    if when == "while open":
        mine.unlink()
    with Store.open(ours, writable=True) as store:
        if when == "while open":
            put(mine, own)
            store._core.look_again()
        assert store.verify(deep=True).findings == ()
        require_awake(store, 30, seed=30)
        assert [row.version for row in store.versions(URI)] == [1, 2]
    with Store.open(ours, writable=True) as store:
        assert store.opening.unreadable == ()
