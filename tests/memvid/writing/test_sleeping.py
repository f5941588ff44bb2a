"""Sleeps: which blocks are written and which are referred to, and several at once (threats 49, 51)."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid import BlockDraft, BlockEntry, Identity, Receipt, SessionUri, SlotDraft, Store
from torpor.memvid.errors import BlockMissing, InvalidDraft, StoreIoError
from torpor.memvid.folder.pins import Pins
from torpor.memvid.format.ledger_tail import UNREAD
from torpor.memvid.writing import sleeping
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import (
    IDENTITY,
    OTHER_URI,
    URI,
    bundle_path,
    drafts,
    expected,
    move_all,
    require_awake,
    sleep,
)

WAIT = 30
"""Seconds after which something that must happen has not."""


def write(store: Store, uri: SessionUri, blocks: Iterable[BlockDraft], tokens: int, **more: object) -> Receipt:
    request: dict[str, object] = {"identity": IDENTITY, "parent": None, "reused": (), "session": {}} | more
    return store.write_bundle(uri=uri, blocks=blocks, token_count=tokens, **request)  # type: ignore[arg-type]


# --- what is referred to


def test_a_new_block_that_is_there_already_is_referred_to_where_it_lies_now(store: Store) -> None:
    first = sleep(store, 600)
    second = sleep(store, 900, before=first)
    move_all(store, first, second)
    fork = write(store, OTHER_URI, drafts(900), 900)
    assert (fork.blocks_new, fork.blocks_reused) == (0, 5)
    assert {entry.bundle_id for entry in fork.entries} == {second.bundle_id}
    require_awake(store, 900, uri=OTHER_URI)


def test_blocks_reused_by_a_receipt_of_before_a_compaction_are_found_where_they_went(store: Store) -> None:
    first = sleep(store, 600)
    second = sleep(store, 900, before=first)
    move_all(store, first, second)
    fork = sleep(store, 1200, uri=OTHER_URI, before=first)
    assert {entry.bundle_id for entry in fork.entries[:2]} == {second.bundle_id}
    assert first.bundle_id not in store.index.refs_of(fork.bundle_id)
    require_awake(store, 1200, uri=OTHER_URI)


def test_the_same_tokens_with_other_bytes_or_under_another_identity_are_another_block(store: Store) -> None:
    sleep(store, 300, seed=1)
    altered = drafts(300, seed=1)
    altered[0] = dataclasses.replace(altered[0], slots=drafts(300, seed=2)[0].slots)
    for blocks, identity in ((altered, IDENTITY), (drafts(300, seed=1), Identity((("weights", "other"),)))):
        receipt = write(store, OTHER_URI, blocks, 300, identity=identity)
        assert (receipt.blocks_new, receipt.blocks_reused) == (3, 0), "each names the one before it as its parent"


def test_a_retired_file_is_nothing_that_a_new_version_leans_on(store: Store) -> None:
    first = sleep(store, 600)
    sleep(store, 900, uri=OTHER_URI, before=first)
    store.delete_session(URI)
    receipt = sleep(store, 600)
    assert first.bundle_id not in {entry.bundle_id for entry in receipt.entries}
    require_awake(store, 600)


def test_a_block_that_nobody_holds_any_more_cannot_be_reused(store: Store) -> None:
    first = sleep(store, 600)
    second = sleep(store, 900, before=first)
    bundle_path(store, first.bundle_id).unlink()
    with pytest.raises(BlockMissing):
        sleep(store, 1200, before=second)
    assert not list(Path(store.path).rglob("*.tmp"))


def test_blocks_of_a_bundle_that_the_system_refuses_to_open_cannot_be_reused_which_is_told_apart_from_its_writing(
    store: Store, tmp_path: Path
) -> None:
    first = sleep(store, 600)
    os.link(making.bundle_path(store, first.bundle_id), tmp_path / "backup.mvb")
    with pytest.raises(BlockMissing) as refused:
        sleep(store, 900, before=first)
    assert refused.value.details["reason"] == "unsafe_path"
    write(store, URI, drafts(900), 900, parent=first.bundle_id)
    require_awake(store, 900)


def test_what_becomes_unreadable_while_a_version_is_written_is_written_too(store: Store, tmp_path: Path) -> None:
    """It was found in the store, and is in memory as well."""
    first = sleep(store, 600)

    def blocks() -> Iterator[BlockDraft]:
        yield from drafts(900)
        os.link(making.bundle_path(store, first.bundle_id), tmp_path / "backup.mvb")

    receipt = write(store, OTHER_URI, blocks(), 900)
    assert (receipt.blocks_new, receipt.blocks_reused) == (5, 0)
    require_awake(store, 900, uri=OTHER_URI)


def test_state_records_may_be_left_out_of_what_is_reused_and_nothing_else(store: Store) -> None:
    """A session keeps the records of fewer positions as it grows."""
    first = write(store, URI, [making.span(0, 256), making.state(256), making.span(256, 256), making.state(512)], 512)
    one, between, two, _ = first.entries
    new = [making.state(512, seed=1)]
    for wrong in ((one, between, between), (between, one, two), (two,), (between, two)):
        with pytest.raises(InvalidDraft):
            write(store, URI, new, 512, parent=first.bundle_id, reused=wrong)
    second = write(store, URI, new, 512, parent=first.bundle_id, reused=(one, two))
    assert [entry.kind for entry in second.entries] == ["span", "span", "state"]
    assert second.entries[:2] == (one, two)
    assert store.verify(deep=True).ok


@pytest.mark.parametrize(
    "choose",
    [
        lambda entries: entries[1:],
        lambda entries: (entries[1], entries[0]),
        lambda entries: (entries[0], dataclasses.replace(entries[1], raw_bytes=1)),
        lambda entries: (dataclasses.replace(entries[0], id=bytes(32)),),
    ],
    ids=["not the first", "another order", "another size", "another block"],
)
def test_what_is_not_the_beginning_of_the_parent_s_chain_is_not_reused(store: Store, choose: object) -> None:
    first = sleep(store, 600)
    reused: tuple[BlockEntry, ...] = choose(first.entries)  # type: ignore[operator]
    with pytest.raises(InvalidDraft):
        write(store, URI, drafts(900, first=512), 900, parent=first.bundle_id, reused=reused)
    assert len(store.versions(URI)) == 1


# --- several at once


class Slow:
    """Blocks that come only when they are let: a model that is still computing them."""

    def __init__(self, blocks: list[BlockDraft]) -> None:
        self._blocks = blocks
        self.begun, self.let = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[BlockDraft]:
        yield self._blocks[0]
        self.begun.set()
        assert self.let.wait(WAIT)
        yield from self._blocks[1:]


@contextlib.contextmanager
def slowly(
    store: Store, uri: SessionUri, blocks: list[BlockDraft], tokens: int, **more: object
) -> Iterator[list[Receipt]]:
    """Meanwhile another thread sleeps, and waits for its blocks; its receipt is there afterwards."""
    slow, done = Slow(blocks), list[Receipt]()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(write, store, uri, slow, tokens, **more)
        try:
            assert slow.begun.wait(WAIT)
            yield done
        finally:
            slow.let.set()
        done.append(waiting.result(WAIT))


def test_threat_49_a_slow_sleep_holds_up_no_other_and_no_delete(store: Store) -> None:
    sleep(store, 300, uri=OTHER_URI, seed=5)
    with slowly(store, URI, drafts(600), 600) as done:
        assert sleep(store, 300, uri=SessionUri("default", "third"), seed=6).version == 1
        assert store.delete_session(OTHER_URI).bundles_deleted == 1
        meanwhile = sleep(store, 300, seed=7)
    assert (done[0].version, meanwhile.version) == (1, 2), "each has the number that it began with"
    with store.open_session(URI, version=1) as reader:
        assert making.contents(reader) == expected(600)
    assert store.verify(deep=True).ok


def test_threat_49_sleeps_of_many_sessions_at_once_are_each_whole(store: Store) -> None:
    uris = [SessionUri("many", str(number)) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for round_ in range(3):
            tokens = 300 * (round_ + 1)
            done = [pool.submit(sleep, store, tokens, uri=uri, seed=seed) for seed, uri in enumerate(uris)]
            assert [one.result(WAIT).version for one in done] == [round_ + 1] * 8
    for seed, uri in enumerate(uris):
        require_awake(store, 900, uri=uri, seed=seed)
    assert store.verify(deep=True).ok


def test_threat_49_sleeps_of_one_session_at_once_get_a_version_each(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(sleep, store, 300, seed=seed) for seed in range(16)]
        versions = {one.result(WAIT).version: seed for seed, one in enumerate(done)}
    assert sorted(versions) == list(range(1, 17))
    for version, seed in versions.items():
        with store.open_session(URI, version=version) as reader:
            assert making.contents(reader) == expected(300, seed=seed)


def test_a_number_that_was_given_to_a_sleep_that_failed_is_a_gap_and_is_not_given_while_it_runs(store: Store) -> None:
    class Cut(Exception):
        pass

    numbers = []

    def blocks() -> Iterator[BlockDraft]:
        numbers.append(sleep(store, 300, seed=2).version)
        raise Cut
        yield

    with pytest.raises(Cut):
        write(store, URI, blocks(), 300)
    assert numbers == [2]
    assert sleep(store, 300, seed=3).version == 3
    assert not list(Path(store.path).rglob("*.tmp"))


@pytest.mark.parametrize("by_id", [False, True])
def test_threat_51_what_an_unfinished_sleep_refers_to_survives_a_delete(store: Store, by_id: bool) -> None:
    """by_id: nobody but the sleep itself knows that it refers to the other session's block."""
    first = sleep(store, 600)
    more = {} if by_id else {"parent": first.bundle_id, "reused": first.entries[:2]}
    with slowly(store, OTHER_URI, drafts(900, first=0 if by_id else 512), 900, **more) as done:
        assert store.delete_session(URI).bundles_kept == 1
    assert done[0].entries[0].bundle_id == first.bundle_id
    require_awake(store, 900, uri=OTHER_URI)
    assert store.verify(deep=True).ok


def test_threat_51_what_a_failed_sleep_referred_to_goes_with_it(store: Store) -> None:
    first = sleep(store, 600)

    def blocks() -> Iterator[BlockDraft]:
        assert store.delete_session(URI).bundles_kept == 1
        yield from ()

    with pytest.raises(InvalidDraft):
        write(store, OTHER_URI, blocks(), 900, parent=first.bundle_id, reused=first.entries[:2])
    assert store.statistics().bundle_files == 0


def unpinned_delete(store: Store, monkeypatch: pytest.MonkeyPatch, uri: SessionUri) -> None:
    """A delete that has looked at the pins already when a sleep takes its own."""
    with monkeypatch.context() as patch:
        patch.setattr(Pins, "wait_or_free", lambda self, bundle_ids: sorted(bundle_ids))
        store.delete_session(uri)


def losing_its_blocks(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockDraft]:
    """The blocks of a session that sleeps already, which is deleted before the last one comes."""
    *most, last = drafts(600)
    yield from most
    unpinned_delete(store, monkeypatch, URI)
    yield last


def test_a_block_that_is_deleted_after_it_was_found_is_written_after_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = sleep(store, 600)
    receipt = write(store, OTHER_URI, losing_its_blocks(store, monkeypatch), 600)
    assert (receipt.blocks_new, receipt.blocks_reused) == (4, 0)
    assert not bundle_path(store, base.bundle_id).with_suffix(".mvr").exists()
    require_awake(store, 600, uri=OTHER_URI)
    assert store.verify(deep=True).ok


def test_where_no_file_can_be_opened_any_more_a_sleep_that_is_led_elsewhere_fails_by_name(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep(store, 600)
    real, opened = os.dup, []

    def no_more(fd: int) -> int:
        if opened:
            raise OSError(errno.EMFILE, "too many open files")
        opened.append(real(fd))  # to read the first file back
        return opened[0]

    with monkeypatch.context() as patch:
        patch.setattr(os, "dup", no_more)
        with pytest.raises(StoreIoError) as refusal:
            write(store, OTHER_URI, losing_its_blocks(store, monkeypatch), 600)
    assert refusal.value.errno == errno.EMFILE
    assert not list(Path(store.path).rglob("*.tmp"))
    assert store.find_session(OTHER_URI) is None
    sleep(store, 600, uri=OTHER_URI)
    require_awake(store, 600, uri=OTHER_URI)


def test_a_holder_that_is_deleted_while_it_is_looked_at_stays_until_the_sleep_has_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is pinned first and looked at then: what was seen there is there when the new version refers to it."""
    first = sleep(store, 600)
    second = sleep(store, 900, before=first)  # whose first two blocks lie in the file of `first`
    read = sleeping.Holdings._read

    def delete_after_the_look(self: sleeping.Holdings, holder: bytes) -> frozenset[bytes]:
        found = read(self, holder)
        if holder == first.bundle_id and store.find_session(URI) is not None:
            store.delete_session(URI)
        return found

    monkeypatch.setattr(sleeping.Holdings, "_read", delete_after_the_look)
    fork = sleep(store, 1100, uri=OTHER_URI, before=second)
    assert store.find_session(URI) is None
    assert fork.entries[0].bundle_id == first.bundle_id
    require_awake(store, 1100, uri=OTHER_URI)
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("how", ["sleep", "import"])
def test_a_version_of_the_same_state_at_the_same_time_takes_nothing_from_a_deleted_one(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    """A clock before 1970 counts as 1970, always."""
    monkeypatch.setattr("time.time_ns", lambda: -1)
    if how == "import":
        with Store.open(tmp_path / "elsewhere", writable=True) as elsewhere:
            sleep(elsewhere, 600, uri=OTHER_URI)
            elsewhere.export_session(OTHER_URI, None, tmp_path / "file")

    def made() -> Receipt:
        return sleep(store, 600) if how == "sleep" else store.import_file(tmp_path / "file", as_uri=URI)

    first = made()
    fork = sleep(store, 900, uri=OTHER_URI, before=first)
    store.delete_session(URI)
    again = made()
    assert (again.version, again.bundle_id != first.bundle_id) == (1, True)
    with store.open_session(URI) as reader:
        assert reader.manifest.created_ns == 1
    require_awake(store, 900, uri=OTHER_URI)
    require_awake(store, 600)
    assert {entry.bundle_id for entry in fork.entries} == {first.bundle_id, fork.bundle_id}
    assert store.verify(deep=True).ok


@pytest.mark.one_in(3)
def test_a_sleep_that_finds_all_its_blocks_does_not_keep_them_in_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few are kept, to be written should they go after all; the rest of a large session must not be held twice."""
    sleep(store, 256 * 20)
    monkeypatch.setattr(sleeping, "_SPARE_BYTES", 2 * drafts(256)[0].slots[0].spec.size_bytes * 4)
    buffers: list[weakref.ref[Buffer]] = []
    alive: list[int] = []

    def blocks() -> Iterator[BlockDraft]:
        for number in range(20):
            yield copied(drafts(256 * 20)[number], buffers)
            gc.collect()
            alive.append(sum(buffer() is not None for buffer in buffers))
        yield drafts(256 * 20)[-1]

    receipt = write(store, OTHER_URI, blocks(), 256 * 20)
    assert receipt.blocks_new == 0
    assert max(alive) <= 4 * 4, "the slots of the two spares, of the last draft, and of one more at most"
    require_awake(store, 256 * 20, uri=OTHER_URI)


def test_nothing_that_its_caller_has_is_kept_by_a_sleep_until_a_garbage_collection(store: Store) -> None:
    """What was slept is gigabytes. An error that holds itself, as one raised from itself does, keeps the frames of all
    who called, and what they have."""

    def call() -> weakref.ref[Buffer]:
        held = Buffer()
        write(store, URI, drafts(600), 600)
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


class Buffer(bytearray):
    """Bytes that can be seen to go."""


def copied(draft: BlockDraft, buffers: list[weakref.ref[Buffer]]) -> BlockDraft:
    """The same block in memory of its own."""
    slots = []
    for slot in draft.slots:
        data = Buffer(b"".join(slot.buffers))
        buffers.append(weakref.ref(data))
        slots.append(SlotDraft(slot.spec, [memoryview(data)]))
    return dataclasses.replace(draft, slots=slots)


@pytest.mark.parametrize("how", ["found, and not in memory any more", "reused"])
def test_a_block_that_is_deleted_under_a_sleep_which_has_it_nowhere_else_fails_that_sleep_and_no_other(
    store: Store, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    base = sleep(store, 600)
    monkeypatch.setattr(sleeping, "_SPARE_BYTES", 0)
    more = {"parent": base.bundle_id, "reused": base.entries[:2]} if how == "reused" else {}

    def blocks() -> Iterator[BlockDraft]:
        yield from drafts(600, first=512 if more else 0)
        unpinned_delete(store, monkeypatch, URI)

    with pytest.raises(BlockMissing):
        write(store, OTHER_URI, blocks(), 600, **more)
    assert store.find_session(OTHER_URI) is None
    assert not list(Path(store.path).rglob("*.tmp"))
    sleep(store, 600, uri=OTHER_URI)
    require_awake(store, 600, uri=OTHER_URI)


def test_a_version_is_given_up_until_it_is_published_and_leaves_nothing(store: Store) -> None:
    class GivenUpError(Exception):
        pass

    first = sleep(store, 300)
    before = sorted(Path(store.path).rglob("*.*vb"))
    with pytest.raises(GivenUpError):
        write(store, URI, drafts(900), 900, before_publishing=making.refusing(GivenUpError))
    assert sorted(Path(store.path).rglob("*.*vb")) == before
    assert not list(Path(store.path).rglob("*.tmp"))
    assert [row.version for row in store.versions(URI)] == [first.version]
    assert write(store, URI, drafts(900), 900, before_publishing=lambda: None).version == first.version + 1


def test_a_version_says_what_is_acknowledged_once_its_blocks_are_flushed_and_leaves_the_room_for_the_next_turn(
    store: Store,
) -> None:
    """A turn may end while the blocks are written, and the next one may have begun, with its room on the disk."""
    first = sleep(store, 300)
    store.acknowledge([making.turn(store, 600)])

    def said() -> dict[str, Any]:
        assert list(Path(store.path).rglob("*.tmp")), "the blocks are there"
        store.acknowledge([making.turn(store, 610)])
        store.make_room_to_acknowledge(URI, 5_000)
        return {UNREAD: {"tokens": making.token_ids(812, 98)}}

    receipt = write(store, URI, drafts(812), 812, parent=first.bundle_id, session=said)
    assert (receipt.ledger_tokens, store.acknowledged()) == (910, [])
    assert store._core.journal.room == {URI: 5_000}
    store.close()
    with Store.open(store.path, writable=True) as again:
        assert (again.opening.turns_replayed, again.find_session(URI).ledger_tokens) == (0, 910)
