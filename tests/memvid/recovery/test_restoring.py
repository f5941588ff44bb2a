"""A store whose store.json is missing or damaged gets it again, with its own uuid."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.memvid import errors
from torpor.memvid.recovery.restoring import restore_store_file
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import flip, require_awake, sleep, turn


@pytest.fixture
def closed(store: Store) -> Path:
    """A store with a version, closed."""
    sleep(store)
    store.close()
    return Path(store.path)


def lose(path: Path, how: str) -> bytes:
    file = path / "store.json"
    good = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        flip(file, 20)
    return good


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_it_is_made_again_with_the_uuid_that_the_marks_tell(closed: Path, how: str) -> None:
    good = lose(closed, how)
    with pytest.raises((errors.NotAStore, errors.CorruptStoreFile)):
        Store.open(closed, writable=True)
    plan = restore_store_file(closed, dry_run=True)
    assert (closed / "store.json").exists() == (how == "damaged"), "a plan changes nothing"
    assert restore_store_file(closed) == plan
    assert [action.kind for action in plan] == ["rewrite"]
    assert ("moves to damaged/" in plan[0].reason) == (how == "damaged")
    assert (closed / "store.json").read_bytes() == good
    assert (closed / "damaged" / "store.json").exists() == (how == "damaged")
    with Store.open(closed, writable=True) as store:
        require_awake(store, 300)
    assert restore_store_file(closed) == ()


def test_a_sound_store_is_left_as_it_is(closed: Path) -> None:
    assert restore_store_file(closed) == ()


def test_without_marks_it_gets_a_new_uuid_and_says_so(closed: Path) -> None:
    good = lose(closed, "missing")
    (closed / "marks.json").unlink()
    assert "new uuid" in restore_store_file(closed)[0].reason
    assert (closed / "store.json").read_bytes() != good
    with Store.open(closed, writable=True) as store:
        require_awake(store, 300)
        store.repair()
    with Store.open(closed, writable=True) as store:
        assert store.verify(deep=True).ok


def test_without_marks_it_is_refused_while_the_journal_has_turns(store: Store) -> None:
    sleep(store)
    store.acknowledge([turn(store, 5)])
    path = Path(store.path)
    store._core.journal.close()
    store._core._lock.close()  # type: ignore[union-attr]
    lose(path, "missing")
    marks = path / "marks.json"
    good = marks.read_bytes()
    marks.unlink()
    with pytest.raises(errors.CorruptStoreFile, match="turns"):
        restore_store_file(path)
    assert not (path / "store.json").exists()
    marks.write_bytes(good)
    restore_store_file(path)
    with Store.open(path, writable=True) as again:
        assert again.opening.turns_replayed == 1


def test_a_folder_of_other_things_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert restore_store_file(tmp_path) == ()
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_an_empty_store_is_told_by_its_marks(store: Store) -> None:
    store.close()
    lose(Path(store.path), "missing")
    assert restore_store_file(store.path)
    Store.open(store.path, writable=True).close()


def test_it_waits_for_nobody_who_has_the_store(store: Store) -> None:
    sleep(store)
    lose(Path(store.path), "missing")
    with pytest.raises(errors.StoreLocked):
        restore_store_file(store.path)
