"""The index is disposable: however it is lost or damaged, the bundles bring it back (promise 7; threats 24 to 26)."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from store_making import OTHER_URI, URI, bundle_path, require_awake, sleep
from torpor.memvid import SessionUri, Store
from torpor.memvid.errors import AmbiguousName, InvalidUri, NoSpace, SessionNotFound, StoreIoError, Truncated
from torpor.memvid.index import Index


def lose(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def scribble(path: Path) -> None:
    path.write_bytes(b"not a database" * 1000)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:9000])


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


def make_foreign(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE meta SET value = 'another'")
        connection.commit()


def age(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 0")


def break_row(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE bundles SET labels = 7, namespace = '../..'")
        connection.commit()


@pytest.mark.parametrize("damage", [lose, empty, scribble, cut, blot, blot_a_side_table, make_foreign, age, break_row])
@pytest.mark.parametrize("writable", [True, False])
def test_threat_26_a_lost_foreign_or_damaged_index_comes_back(
    store: Store, store_path: Path, damage: Callable[[Path], None], writable: bool
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
    old = (store_path / "index.sqlite").read_bytes()
    with Store.open(store_path, writable=True) as again:
        sleep(again, 600)
    (store_path / "index.sqlite").write_bytes(old)
    with Store.open(store_path, writable=True) as again:
        assert (again.opening.index_rebuilt, again.opening.rows_added) == (None, 1)
        require_awake(again, 600)


def test_a_damaged_bundle_keeps_its_row_while_the_index_lives(store: Store, store_path: Path) -> None:
    """Else a wake would quietly give the version before."""
    sleep(store, 300)
    file = bundle_path(store, sleep(store, 600).bundle_id)
    file.write_bytes(file.read_bytes()[:-1])
    store.close()
    with Store.open(store_path, writable=True) as again, pytest.raises(Truncated):
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

    def full(*_: object, **__: object) -> None:
        raise NoSpace("No room for the index.")

    with monkeypatch.context() as patch:
        patch.setattr(Index, "create", full)
        with Store.open(store_path, writable=True) as again:
            assert "kept in memory" in str(again.opening.index_rebuilt)
            require_awake(again, 300)
            assert again.delete_session(URI).bytes_freed > 0
    assert not list(store_path.rglob("*.mv?"))


def test_a_row_damaged_while_the_store_is_open_is_a_typed_error(store: Store, store_path: Path) -> None:
    sleep(store, 300)
    break_row(store_path / "index.sqlite")
    with pytest.raises(StoreIoError, match="made anew"):
        list(store.iter_sessions())


def test_a_session_is_found_by_what_a_person_types(store: Store) -> None:
    sleep(store, 10)
    sleep(store, 20)
    awake = SessionUri("work", "awake")
    for text in ("agent", "default/agent", "torpor://default/agent"):
        assert store.resolve(text) == URI
    for text in ("awake", "work/awake", "torpor://work/awake"):
        assert store.resolve(text, also=[awake]) == awake
    assert store.resolve("agent", also=[URI]) == URI
    with pytest.raises(AmbiguousName) as ambiguous:
        store.resolve("agent", also=iter([SessionUri("work", "agent")]))
    assert ambiguous.value.candidates == ["torpor://default/agent", "torpor://work/agent"]
    with pytest.raises(SessionNotFound) as missing:
        store.resolve("awakee", also=iter([awake]))
    assert missing.value.suggestions == ["torpor://work/awake"]
    with pytest.raises(SessionNotFound) as missing:
        store.resolve("work/agent")
    assert missing.value.suggestions == ["torpor://default/agent"]
    with pytest.raises(InvalidUri):
        store.resolve("../..")


def test_a_name_is_looked_up_without_listing_the_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep(store, 10)
    (plan,) = store.index._select(
        "EXPLAIN QUERY PLAN SELECT DISTINCT namespace FROM bundles WHERE name = ? AND status = ?", ("agent", "live")
    )[:1]
    assert "USING INDEX by_name" in plan[3]
    for listing in ("latest", "all_rows", "versions"):
        monkeypatch.setattr(store.index, listing, lambda *_: pytest.fail("the store was listed"))
    for text in ("agent", "default/agent", str(URI)):
        assert store.resolve(text) == URI
