"""A store whose store.json is missing or damaged: who is recognised as one, and that nothing is lost by making it
again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from torpor.memvid import Store, errors
from torpor.memvid.disk.lock import StoreLock
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.retention import Retention
from torpor.memvid.folder.store_file import _FORMAT, StoreFile, open_existing_root
from torpor.memvid.recovery.restoring import lacks_store_file, restore_store_file
from torpor.tests.memvid.store_making import URI, flip, sleep
from torpor.tests.shares import share


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
    with pytest.raises(errors.NotAStore, match=f"torpor repair --store {bare[0]}"):
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
    with Store.open(bare[0], writable=False) as store, pytest.raises(errors.MarksLost):
        store.marks(URI)


def test_a_plan_makes_nothing(bare: tuple[Path, str]) -> None:
    before = {path: path.read_bytes() for path in bare[0].rglob("*") if path.is_file()}
    (action,) = restore_store_file(bare[0], dry_run=True)
    assert (action.kind, action.path) == ("rewrite", str(bare[0] / "store.json"))
    assert {path: path.read_bytes() for path in bare[0].rglob("*") if path.is_file()} == before


def test_marks_in_quarantine_are_not_forgotten(bare: tuple[Path, str]) -> None:
    path, _ = bare
    restore_store_file(path)
    flip((path / "marks.json"), 30)
    with Store.open(path, writable=True) as store:
        store.repair()
    (path / "store.json").unlink()
    restore_store_file(path)
    with Store.open(path, writable=True) as store:
        assert [problem.code for problem in store.repair().problems] == ["marks_lost"]
        with pytest.raises(errors.MarksLost):
            store.prune(Retention(keep_last=1))
        assert [row.version for row in store.versions(URI)] == [1, 2]


def test_a_store_whose_versions_are_all_gone_is_recognised_by_its_index(store_path: Path) -> None:
    with Store.open(store_path, writable=True) as store:
        uuid = store.uuid
    (store_path / "store.json").unlink()
    assert lacks_store_file(store_path)
    restore_store_file(store_path)
    with Store.open(store_path, writable=True) as store:
        assert (store.uuid, store.opening.index_rebuilt) == (uuid, None)


# --- a damaged one


@pytest.fixture
def sound(store_path: Path) -> Path:
    """The folder of a closed store with three versions, the first of them pinned."""
    with Store.open(store_path, writable=True) as store:
        first = sleep(store, 20)
        sleep(store, 30, before=first)
        sleep(store, 40)
        store.pin(URI, 1)
    return store_path


def flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def require_told_and_mended(sound: Path, bits: Iterable[int]) -> None:
    file = sound / "store.json"
    good = file.read_bytes()
    for bit in bits:
        flip(file, bit // 8, 1 << bit % 8)
        rest = {path: path.read_bytes() for path in sound.rglob("*") if path.is_file()}
        for writable in (False, True):
            with pytest.raises(errors.CorruptStoreFile, match=f"{file} is damaged: .*torpor repair --store {sound}"):
                Store.open(sound, writable=writable)
        assert lacks_store_file(sound)
        assert {path: path.read_bytes() for path in rest} == rest
        assert [action.kind for action in restore_store_file(sound)] == ["quarantine", "rewrite"]
        assert file.read_bytes() == good, bit
        (aside,) = (sound / "quarantine").iterdir()
        assert (aside.name, aside.read_bytes()) == ("store.json.1", rest[file])
        with Store.open(sound, writable=True) as store:
            assert store.opening.index_rebuilt is None
            assert len(store.marks(URI).pins) == 1
            assert store.verify(deep=True).ok
            assert (store.repair().actions, store.repair().problems) == ((), ())
        aside.unlink()


@pytest.mark.one_in(1)
def test_a_flipped_bit_is_told_and_mended_and_nothing_is_lost(sound: Path) -> None:
    require_told_and_mended(sound, range(share() % 61, (sound / "store.json").stat().st_size * 8, 61))


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_every_flipped_bit_is_told_and_mended_and_nothing_is_lost(sound: Path) -> None:
    require_told_and_mended(sound, range((sound / "store.json").stat().st_size * 8))


def test_an_open_store_finds_and_mends_every_kind_of_wrong_store_file(store: Store, store_path: Path) -> None:
    sleep(store, 20)
    store.pin(URI, 1)
    file = store_path / "store.json"
    good = file.read_bytes()
    for wrong, kinds in (
        (None, ["rewrite"]),
        (flipped(good, 100), ["quarantine", "rewrite"]),
        (StoreFile("1b671a64-40d5-491e-99b0-da01ff1f3341", marked=False).encode(), ["quarantine", "rewrite"]),
    ):
        file.unlink()
        if wrong is not None:
            file.touch(0o600)
            file.write_bytes(wrong)
        assert [(one.code, one.path) for one in store.verify(deep=False).findings] == [
            ("corrupt_store_file", str(file))
        ]
        plan = store.repair(dry_run=True)
        assert ([action.kind for action in plan.actions], plan.problems) == (kinds, ())
        assert (file.read_bytes() if file.exists() else None) == wrong
        report = store.repair()
        assert (report.actions, report.problems) == (plan.actions, ())
        assert file.read_bytes() == good
        assert store.verify(deep=True).ok


def test_a_lost_file_of_marks_is_not_forgotten_with_a_damaged_store_file(sound: Path) -> None:
    (sound / "marks.json").unlink()
    data = (sound / "store.json").read_bytes()
    (sound / "store.json").write_bytes(flipped(data, data.index(b"uuid") * 8))
    restore_store_file(sound)
    with Store.open(sound, writable=False) as store, pytest.raises(errors.MarksLost):
        store.marks(URI)


def test_where_marks_and_index_are_of_two_stores_the_damaged_file_decides(sound: Path, tmp_path: Path) -> None:
    with Store.open(tmp_path / "other", writable=True) as other:
        sleep(other, 20)
        other.pin(URI, 1)
    shutil.copy(tmp_path / "other" / "marks.json", sound / "marks.json")
    good = (sound / "store.json").read_bytes()
    (sound / "store.json").write_bytes(flipped(good, 8 * good.index(b"format")))
    restore_store_file(sound)
    assert (sound / "store.json").read_bytes() == good


def test_a_later_version_is_not_taken_for_damage(sound: Path) -> None:
    later = replace(_FORMAT, version=2).encode({"rooms": 3})
    (sound / "store.json").write_bytes(later)
    with pytest.raises(errors.UnsupportedFormat, match=r"store\.json has version 2"):
        lacks_store_file(sound)
    with pytest.raises(errors.UnsupportedFormat):
        restore_store_file(sound)
    assert (sound / "store.json").read_bytes() == later


@pytest.mark.parametrize("name", ["store.json", "marks.json", "index.sqlite"])
def test_a_repair_that_is_cut_off_after_setting_it_aside_is_finished_by_the_next(
    sound: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also where one more file is lost in between."""
    good = (sound / "store.json").read_bytes()
    (sound / "store.json").write_bytes(flipped(good, 8 * good.index(b"digest")))
    with monkeypatch.context() as patch:
        patch.setattr(StoreFolder, "write_store_file", no_space)
        with pytest.raises(errors.NoSpace):
            restore_store_file(sound)
    assert not (sound / "store.json").exists()
    (sound / name).unlink(missing_ok=True)
    assert lacks_store_file(sound)
    assert [action.kind for action in restore_store_file(sound)] == ["rewrite"]
    assert (sound / "store.json").read_bytes() == good


def no_space(*_: object, **__: object) -> None:
    raise errors.NoSpace("the disk is full")


def test_nothing_is_made_while_somebody_has_the_lock(bare: tuple[Path, str]) -> None:
    root_fd = open_existing_root(str(bare[0]))
    lock = StoreLock(root_fd, str(bare[0]))
    try:
        with pytest.raises(errors.StoreLocked):
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
    with pytest.raises(errors.NoStore):
        restore_store_file(mine)
    assert sorted(mine.rglob("*")) == before
