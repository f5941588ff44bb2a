"""What operations share: opening with pins while files are rewritten, readers that follow, versions, commits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torpor.memvid import BlockDraft, Receipt, Store
from torpor.memvid.disk import durable
from torpor.memvid.errors import (
    BlockMissing,
    BundleMissing,
    Corruption,
    DurabilityLost,
    ReadOnlyStore,
    StoreClosed,
    StoreError,
)
from torpor.memvid.format.bundle import BundleFile
from torpor.memvid.writing.core import StoreCore
from torpor.memvid.writing.rewriting import Contents, prepared
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import OTHER_URI, URI, expected, move_all, require_awake, sleep


@pytest.fixture
def chain(store: Store) -> tuple[Receipt, Receipt]:
    first = sleep(store, 600)
    return first, sleep(store, 900, before=first)


# --- opening while files are rewritten


def test_a_file_that_is_rewritten_between_opening_and_pinning_is_opened_again(
    store: Store, chain: tuple[Receipt, Receipt], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = chain
    real, seen = StoreCore.open_bundle, []

    def open_bundle(core: StoreCore, bundle_id: bytes) -> BundleFile:
        file = real(core, bundle_id)
        seen.append(file.directory.holders)
        if len(seen) == 1:
            with monkeypatch.context() as inside:
                inside.setattr(StoreCore, "open_bundle", real)
                making.adopt(store, second)
        return file

    monkeypatch.setattr(StoreCore, "open_bundle", open_bundle)
    file, release = store._core.open_pinned(second.bundle_id)
    with contextlib.closing(file):
        assert seen == [(first.bundle_id,), ()]
        assert file.directory.holders == ()
        pins = store._core.pins
        assert (pins.count(second.bundle_id), pins.count(first.bundle_id)) == (1, 0)
        release()
        assert len(pins) == 0


def test_a_bundle_that_cannot_be_opened_pins_nothing(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    _, second = chain
    making.bundle_path(store, second.bundle_id).write_bytes(b"damaged")
    for bundle_id in (second.bundle_id, bytes(32)):
        with pytest.raises(Corruption):
            store._core.open_pinned(bundle_id)
    assert len(store._core.pins) == 0


def test_a_reader_pins_its_bundle_and_all_that_hold_its_blocks(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    first, second = chain
    with store.open_session(URI):
        assert {one for one in (first.bundle_id, second.bundle_id) if store._core.pins.count(one) == 1} == {
            first.bundle_id,
            second.bundle_id,
        }
    assert len(store._core.pins) == 0


# --- readers that follow a block that was moved


def test_a_reader_of_a_read_only_store_follows_a_block_that_another_process_moved(
    store: Store, chain: tuple[Receipt, Receipt]
) -> None:
    """Its pins are its own process's: the daemon beside it compacts as if nobody read."""
    first, second = chain
    with Store.open(store.path, writable=False) as beside, beside.open_session(URI) as reader:
        assert reader.entries[0].bundle_id == first.bundle_id
        move_all(store, first, second)
        assert making.contents(reader) == expected(900)
        assert reader.tokens() == making.token_ids(0, 900)


def test_a_reader_follows_when_the_file_that_held_its_blocks_is_gone(
    store: Store, chain: tuple[Receipt, Receipt]
) -> None:
    first, second = chain
    with Store.open(store.path, writable=False) as beside, beside.open_session(URI) as reader:
        half = [bytes(reader.read_slot(reader.entries[0], 0))]  # one holder is open already
        move_all(store, first, second)
        making.bundle_path(store, first.bundle_id).unlink()
        assert making.contents(reader) == expected(900)
        assert half[0] == expected(900)[0][0]


def test_readers_in_many_threads_follow_at_once(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    first, second = chain
    with Store.open(store.path, writable=False) as beside, beside.open_session(URI) as reader:
        move_all(store, first, second)
        with ThreadPoolExecutor(8) as pool:
            found = [pool.submit(making.contents, reader) for _ in range(16)]
            assert all(one.result(60) == expected(900) for one in found)


def test_a_reader_in_the_writer_s_own_process_keeps_what_it_reads(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    first, second = chain
    with store.open_session(URI) as reader:
        making.adopt(store, second)
        fewer = Contents([(entry.id, first.bundle_id) for entry in first.entries[2:]],
                         dict.fromkeys((entry.id for entry in first.entries[:2]), second.bundle_id))  # fmt: skip
        with prepared(store._core, first.bundle_id, fewer) as new:
            assert not new.commit(), "the reader looks there"
        assert making.contents(reader) == expected(900)
    with prepared(store._core, first.bundle_id, fewer) as new:
        assert new.commit()
    require_awake(store, 900)


def test_a_reader_looks_again_only_once_and_then_says_what_is_missing(
    store: Store, chain: tuple[Receipt, Receipt], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = chain
    opened: list[bytes] = []
    real = StoreCore.open_bundle
    with store.open_session(URI) as reader:
        making.bundle_path(store, first.bundle_id).unlink()

        def open_bundle(core: StoreCore, bundle_id: bytes) -> BundleFile:
            opened.append(bundle_id)
            return real(core, bundle_id)

        monkeypatch.setattr(StoreCore, "open_bundle", open_bundle)
        with pytest.raises(BundleMissing):
            reader.read_header(reader.entries[0])
        assert len(opened) == 1


def test_a_reader_does_not_take_a_file_without_the_block_for_a_moved_one(
    store: Store, chain: tuple[Receipt, Receipt]
) -> None:
    """The holder lost the block, and the bundle's own directory still says that it is there."""
    first, second = chain
    with Store.open(store.path, writable=False) as beside, beside.open_session(URI) as reader:
        path = making.bundle_path(store, second.bundle_id)
        before = path.read_bytes()
        move_all(store, first, second)
        path.write_bytes(before)
        with pytest.raises(BlockMissing):
            reader.read_header(reader.entries[0])


# --- versions and commits


def test_version_numbers_that_are_being_written_are_not_given_again(store: Store) -> None:
    core = store._core
    with core.next_version(URI) as one, core.next_version(URI) as two:
        assert (one, two) == (1, 2)
        with core.this_version(URI, 2, bytes(32)) as is_free:
            assert not is_free
        with core.this_version(URI, 7, bytes(32)) as is_free, core.next_version(URI) as eight:
            assert (is_free, eight) == (True, 8)
    with core.next_version(URI) as again:
        assert again == 1
    sleep(store, 300)
    with core.this_version(URI, 1, bytes(32)) as is_free:
        assert not is_free
    assert core._reserved == []


def test_a_failed_flush_is_remembered_and_every_later_write_refused(store: Store) -> None:
    core = store._core
    with pytest.raises(DurabilityLost), core.committing():
        raise DurabilityLost("the first", path="there")
    for what in (lambda: sleep(store, 10), lambda: store.delete_session(URI)):
        with pytest.raises(DurabilityLost, match="the first") as refusal:
            what()
        assert refusal.value.path == "there"
    assert not core.writable


def test_a_store_whose_flush_failed_changes_nothing_in_closing_but_the_index_file(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(store, 300)
    first = sleep(store, 600, uri=OTHER_URI, seed=1)
    failing = making.refusing(DurabilityLost("The flush failed."))
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_sync", failing)
        with pytest.raises(DurabilityLost):
            sleep(store, 700, uri=OTHER_URI, seed=1, before=first)

    def changed() -> dict[str, tuple[int, int]]:
        files = (file for file in Path(store.path).rglob("*") if file.is_file())
        return {str(file): (file.stat().st_ino, file.stat().st_mtime_ns) for file in files if "index" not in file.name}

    before = changed()
    for work in (store.gc, store.compact, store.repair, store.rebuild_index):
        with pytest.raises(DurabilityLost):
            work()
    store.verify(deep=True)
    store.close()
    assert changed() == before
    with Store.open(store.path, writable=True) as again:
        assert again.opening.index_rebuilt is None
        require_awake(again, 300)
        require_awake(again, 600, uri=OTHER_URI, seed=1)
        assert again.verify(deep=True).ok


@pytest.mark.parametrize("kind", ["read-only", "closed"])
def test_nothing_is_committed_where_nothing_may_be_written(store: Store, kind: str) -> None:
    with Store.open(store.path, writable=False) as other:
        if kind == "closed":
            other.close()
        error: type[StoreError] = StoreClosed if kind == "closed" else ReadOnlyStore
        with pytest.raises(error), other._core.committing():
            raise AssertionError("not reached")


def test_a_pin_that_is_let_go_removes_what_waited_for_it(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    first, second = chain
    paths = [making.bundle_path(store, one.bundle_id).with_suffix(".mvr") for one in (first, second)]
    with store._core.pinning() as pin:
        pin(first.bundle_id)
        store.delete_session(URI)
        assert [path.exists() for path in paths] == [True, False]
    assert not any(path.exists() for path in paths)


def test_letting_go_of_a_pin_never_waits_for_a_writer(store: Store, chain: tuple[Receipt, Receipt]) -> None:
    first, _ = chain

    def unpin() -> None:
        store._core.unpin([first.bundle_id])

    store._core.pins.add([first.bundle_id])
    store.delete_session(URI)
    with ThreadPoolExecutor(1) as pool:
        with store._core.committing():
            pool.submit(unpin).result(60)  # a deadlock would be an error here
        retired = making.bundle_path(store, first.bundle_id).with_suffix(".mvr")
        assert retired.exists(), "what is left goes with the next delete or gc"
    sleep(store, 10)
    store.delete_session(URI)
    assert not retired.exists()


def test_a_sleep_that_is_under_way_when_the_store_closes_is_not_acknowledged(store: Store) -> None:
    def blocks() -> Iterator[BlockDraft]:
        yield from making.drafts(300)
        store.close()

    with pytest.raises((StoreClosed, StoreError)):
        store.write_bundle(
            uri=URI, identity=making.IDENTITY, parent=None, reused=(), blocks=blocks(), session={}, token_count=300
        )
    with Store.open(store.path, writable=True) as again:
        assert again.find_session(URI) is None
        assert not list(Path(store.path).rglob("*.tmp"))
