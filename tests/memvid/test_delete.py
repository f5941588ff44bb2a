"""Delete: gone from every list, bundles that others need stay, open readers finish (threats 51, 52)."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_making import OTHER_URI, URI, contents, expected, require_awake, sleep
from torpor.memvid import Store
from torpor.memvid.errors import BlockMissing, BundleMissing, SessionNotFound


def files(store: Store) -> list[str]:
    return sorted(file.suffix for file in Path(store.path).rglob("*.mv?"))


def test_a_deleted_session_is_gone_with_its_files(store: Store) -> None:
    first = sleep(store, 300)
    second = sleep(store, 600, before=first)
    sleep(store, 20, uri=OTHER_URI)
    report = store.delete_session(URI)
    assert (report.versions_deleted, report.bundles_deleted, report.bundles_kept) == (2, 2, 0)
    assert report.bytes_freed == first.bytes_written + second.bytes_written
    with pytest.raises(SessionNotFound):
        store.open_session(URI)
    assert files(store) == [".mvb"]
    require_awake(store, 20, uri=OTHER_URI)


def test_a_deleted_name_begins_again_at_version_1(store: Store) -> None:
    sleep(store, 300)
    sleep(store, 300)
    store.delete_session(URI)
    assert sleep(store, 20).version == 1
    require_awake(store, 20)


def test_bundles_that_a_fork_needs_stay_until_the_fork_goes(store: Store, store_path: Path) -> None:
    first = sleep(store, 600)
    sleep(store, 700, uri=OTHER_URI, before=first)
    report = store.delete_session(URI)
    assert (report.bundles_deleted, report.bundles_kept, report.bytes_freed) == (0, 1, 0)
    require_awake(store, 700, uri=OTHER_URI)
    assert store.verify(deep=True).ok
    store.close()
    for index in (True, False):
        if not index:
            (store_path / "index.sqlite").unlink()
        with Store.open(store_path, writable=True) as again:  # a new index must not bring it back
            assert again.find_session(URI) is None
            require_awake(again, 700, uri=OTHER_URI)
    with Store.open(store_path, writable=True) as again:
        again.delete_session(OTHER_URI)
    with Store.open(store_path, writable=True) as again:
        assert files(again) == []


def test_threats_51_52_an_open_reader_keeps_its_files_until_it_closes(store: Store) -> None:
    first = sleep(store, 600)
    sleep(store, 700, before=first)
    with store.open_session(URI) as reader:
        report = store.delete_session(URI)
        assert (report.bundles_deleted, report.bundles_kept) == (0, 2)
        assert contents(reader) == expected(700)
        assert files(store) == [".mvr", ".mvr"]
    assert files(store) == []


def test_leftovers_of_an_interrupted_delete_are_removed(store: Store, store_path: Path) -> None:
    sleep(store, 600)
    with store.open_session(URI):
        store.delete_session(URI)
        store.close()
    assert files(store) == [".mvr"]
    with Store.open(store_path, writable=False) as reader:
        assert list(reader.iter_sessions()) == []
        assert files(store) == [".mvr"]
    with Store.open(store_path, writable=True) as again:
        assert again.opening.leftovers_removed == 1
    assert files(store) == []


def test_nothing_retired_is_removed_while_a_bundle_cannot_be_read(store: Store, store_path: Path) -> None:
    """What an unreadable bundle refers to is unknown; once put back it must find its blocks."""
    first = sleep(store, 600)
    fork = sleep(store, 700, uri=OTHER_URI, before=first)
    store.delete_session(URI)
    name = fork.bundle_id.hex()
    file = store_path / "bundles" / name[:2] / f"{name}.mvb"
    data = file.read_bytes()
    store.close()
    file.write_bytes(data[:-1])
    (store_path / "index.sqlite").unlink()
    with Store.open(store_path, writable=True):
        assert files(store) == [".mvb", ".mvr"]
    file.write_bytes(data)
    (store_path / "index.sqlite").unlink()
    with Store.open(store_path, writable=True) as again:
        require_awake(again, 700, uri=OTHER_URI)


def test_blocks_of_a_deleted_session_cannot_be_reused(store: Store) -> None:
    first = sleep(store, 600)
    store.delete_session(URI)
    with pytest.raises((BundleMissing, BlockMissing)):
        sleep(store, 700, before=first)
    assert store.find_session(URI) is None


def test_a_version_whose_file_is_gone_does_not_stop_a_delete(store: Store, store_path: Path) -> None:
    sleep(store, 300)
    for file in store_path.rglob("*.mvb"):
        file.unlink()
    assert store.delete_session(URI).versions_deleted == 1
    assert store.find_session(URI) is None
