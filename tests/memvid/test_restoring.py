"""A store without its store.json: who is recognised as one, and that nothing is lost by making it again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from store_making import URI, sleep
from torpor.memvid import Store
from torpor.memvid.errors import MarksLost, NoStore, NotAStore, StoreLocked
from torpor.memvid.folder import open_existing_root
from torpor.memvid.lock import StoreLock
from torpor.memvid.restoring import lacks_store_file, restore_store_file


@pytest.fixture
def bare(store_path: Path) -> tuple[Path, str]:
    """The folder of a closed store with two versions and a pin, whose store.json is gone; and its uuid."""
    with Store.open(store_path, writable=True) as store:
        first = sleep(store, 300)
        sleep(store, 600, before=first)
        store.pin(URI, 1)
    uuid = store.uuid
    (store_path / "store.json").unlink()
    return store_path, uuid


@pytest.mark.parametrize("writable", [True, False])
def test_a_store_without_its_file_says_what_makes_it_again(bare: tuple[Path, str], writable: bool) -> None:
    with pytest.raises(NotAStore, match=f"torpor repair --store {bare[0]}"):
        Store.open(bare[0], writable=writable)


@pytest.mark.parametrize("gone", [(), ("marks.json",), ("index.sqlite",)])
def test_it_comes_back_with_its_uuid_versions_and_marks(bare: tuple[Path, str], gone: tuple[str, ...]) -> None:
    path, uuid = bare
    for name in gone:
        (path / name).unlink()
    assert lacks_store_file(path)
    restore_store_file(path)
    assert not lacks_store_file(path)
    with Store.open(path, writable=True) as store:
        assert store.uuid == uuid
        assert [row.version for row in store.versions(URI)] == [1, 2]
        assert len(store.marks(URI).pins) == (0 if "marks.json" in gone else 1)
        assert store.verify(deep=True).findings == ()


def test_with_neither_marks_nor_index_it_gets_a_new_uuid_and_keeps_its_versions(bare: tuple[Path, str]) -> None:
    path, uuid = bare
    (path / "marks.json").unlink()
    (path / "index.sqlite").write_bytes(b"not an index" * 999)
    restore_store_file(path)
    with Store.open(path, writable=True) as store:
        assert store.uuid != uuid
        assert [row.version for row in store.versions(URI)] == [1, 2]


def test_it_goes_on_saying_that_there_are_marks(bare: tuple[Path, str]) -> None:
    restore_store_file(bare[0])
    (bare[0] / "marks.json").unlink()
    with Store.open(bare[0], writable=False) as store, pytest.raises(MarksLost):
        store.marks(URI)


def test_a_plan_makes_nothing(bare: tuple[Path, str]) -> None:
    before = {path: path.read_bytes() for path in bare[0].rglob("*") if path.is_file()}
    assert restore_store_file(bare[0], dry_run=True).path == str(bare[0] / "store.json")
    assert {path: path.read_bytes() for path in bare[0].rglob("*") if path.is_file()} == before


def test_nothing_is_made_while_somebody_has_the_lock(bare: tuple[Path, str]) -> None:
    root_fd = open_existing_root(str(bare[0]))
    lock = StoreLock(root_fd, str(bare[0]))
    try:
        with pytest.raises(StoreLocked):
            restore_store_file(bare[0])
    finally:
        lock.close()
        os.close(root_fd)
    assert lacks_store_file(bare[0])


@pytest.mark.parametrize("content", [None, b"", b"a film, not a bundle"])
def test_a_folder_that_only_resembles_a_store_is_left_as_it_is(tmp_path: Path, content: bytes | None) -> None:
    mine = tmp_path / "mine"
    folder = mine / "bundles" / "ab"
    folder.mkdir(parents=True, mode=0o700)
    mine.chmod(0o700)
    if content is not None:
        (folder / f"ab{'0' * 62}.mvb").write_bytes(content)
    before = sorted(mine.rglob("*"))
    assert not lacks_store_file(mine)
    with pytest.raises(NoStore):
        restore_store_file(mine)
    assert sorted(mine.rglob("*")) == before
