"""New sessions that count together are all there or none, wherever the writing ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torpor.memvid.disk import durable
from torpor.memvid.errors import LimitExceeded, ReadOnlyStore, StoreIoError
from torpor.memvid.folder.group_file import MAX_GROUP
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.core import StoreCore
from torpor.tests.memvid.store_making import OTHER_URI, URI, bundle_path, refusing, reopened, sleep

GROUP = [SessionUri("default", name) for name in ("root", "root.1", "root.2")]


def there(store: Store) -> set[SessionUri]:
    """The sessions of the group that are listed."""
    return {uri for uri in GROUP if store.find_session(uri) is not None}


def asleep(store: Store, *uris: SessionUri) -> None:
    for uri in uris:
        sleep(store, 40, uri=uri)


broken = refusing(StoreIoError("a bad disk", path="/store"))


@pytest.mark.parametrize("written", range(4))
def test_all_of_a_group_are_there_after_a_crash_or_none_br26(store: Store, store_path: Path, written: int) -> None:
    sleep(store, 20, uri=URI)
    store.begin_group(GROUP)
    asleep(store, *GROUP[::-1][:written])
    store.close()  # without an end: as a crash leaves it
    with Store.open(store_path, writable=False) as reading:
        assert len(there(reading)) == written
    for _ in range(2):
        with Store.open(store_path, writable=True) as opened:
            assert there(opened) == (set(GROUP) if written == 3 else set())
            assert opened.find_session(URI) is not None
            assert opened.verify(deep=True).ok
    assert not (store_path / "group.json").exists()


def test_a_group_that_is_given_up_leaves_nothing_and_no_later_delete_goes_on_with_it(store: Store) -> None:
    store.begin_group(GROUP)
    sleep(store, 40, uri=GROUP[1])
    store.end_group()
    assert there(store) == set()
    store.begin_group(GROUP)
    asleep(store, *reversed(GROUP))
    store.end_group()
    store.delete_session(GROUP[0])
    store.begin_group(GROUP[:1])
    assert there(store) == set(GROUP[1:]), "the others are sessions of their own now"
    assert store.forget(GROUP[1]).problems == (), "the file is no stranger in the store"
    sleep(store, 20, uri=OTHER_URI)
    assert store.repair().problems == ()


def test_a_group_file_of_an_earlier_moment_removes_no_session_of_today(store: Store, store_path: Path) -> None:
    store.begin_group(GROUP)
    sleep(store, 40, uri=GROUP[1])
    earlier = (store_path / "group.json").read_bytes()
    store.end_group()
    assert there(store) == set()
    asleep(store, *GROUP[1:])
    store.close()
    (store_path / "group.json").write_bytes(earlier)
    with Store.open(store_path, writable=True) as opened:
        assert there(opened) == set(GROUP[1:])
    assert not (store_path / "group.json").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.delete_session(GROUP[0]),
        lambda store: store.forget(GROUP[0]),
        lambda store: sleep(store, 60, uri=GROUP[0]),
    ],
    ids=["delete", "forget", "sleep"],
)
def test_while_the_file_of_a_group_cannot_be_removed_it_counts_and_its_first_session_stays_as_it_is_br26(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Store], object]
) -> None:
    """Beside the file, the next opening would remove the others with it."""
    store.begin_group(GROUP)
    asleep(store, *reversed(GROUP))
    with monkeypatch.context() as patched:
        patched.setattr(durable, "remove", broken)
        store.end_group()
        with pytest.raises(StoreIoError):
            change(store)
        sleep(store, 60, uri=GROUP[1])
    assert (store_path / "group.json").exists()
    assert there(store) == set(GROUP)
    change(store)
    with reopened(store) as opened:
        assert there(opened) >= set(GROUP[1:])


def test_a_group_that_could_not_be_read_at_its_end_is_settled_before_its_first_session_changes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.begin_group(GROUP)
    asleep(store, *reversed(GROUP))
    with monkeypatch.context() as patched:
        patched.setattr(StoreCore, "open_reader", broken)
        with pytest.raises(StoreIoError):
            store.end_group()
    sleep(store, 60, uri=GROUP[0])
    with reopened(store) as opened:
        assert there(opened) == set(GROUP)


def test_a_later_version_of_the_first_session_lets_its_group_count(store: Store, store_path: Path) -> None:
    """As a replay of the journal makes one before the group is looked at."""
    store.begin_group(GROUP)
    asleep(store, *reversed(GROUP))
    file = (store_path / "group.json").read_bytes()
    store.end_group()
    sleep(store, 60, uri=GROUP[0])
    store.close()
    (store_path / "group.json").write_bytes(file)
    with Store.open(store_path, writable=True) as opened:
        assert there(opened) == set(GROUP)


def test_a_group_whose_first_version_cannot_be_read_counts(store: Store, store_path: Path) -> None:
    store.begin_group(GROUP)
    receipts = [sleep(store, 40, uri=uri, seed=at) for at, uri in enumerate(reversed(GROUP))]
    store.close()
    bundle_path(store, receipts[-1].bundle_id).write_bytes(b"")
    with Store.open(store_path, writable=True) as opened:
        assert there(opened) >= set(GROUP[1:])


def test_what_a_disk_does_not_read_today_is_removed_by_a_later_opening(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left for ever: as a version that is not of the group."""

    store.begin_group(GROUP)
    sleep(store, 40, uri=GROUP[1])
    store.close()
    with monkeypatch.context() as patched:
        patched.setattr(StoreCore, "open_reader", broken)
        with Store.open(store_path, writable=True) as opened:
            assert there(opened) == {GROUP[1]}
            with pytest.raises(StoreIoError):
                opened.begin_group(GROUP)
    with Store.open(store_path, writable=True) as opened:
        assert there(opened) == set()


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff" * 100, b"[" * 5000])
def test_a_damaged_file_removes_nothing(store: Store, store_path: Path, damage: bytes) -> None:
    store.begin_group(GROUP)
    sleep(store, 40, uri=GROUP[1])
    store.close()
    (store_path / "group.json").write_bytes(damage)
    with Store.open(store_path, writable=True) as opened:
        assert there(opened) == {GROUP[1]}


def test_a_group_that_is_too_large_or_in_a_store_for_reading_is_refused(store: Store, store_path: Path) -> None:
    with pytest.raises(LimitExceeded):
        store.begin_group([SessionUri("default", f"s{at}") for at in range(MAX_GROUP + 1)])
    store.close()
    with Store.open(store_path, writable=False) as reading, pytest.raises(ReadOnlyStore):
        reading.begin_group(GROUP)
