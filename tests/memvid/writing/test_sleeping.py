"""Sleeps: which blocks are written and which are referred to, the order and number of flushes, several at once (threats
49, 51)."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torpor.memvid import errors
from torpor.memvid.disk import durable
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.format import manifest
from torpor.memvid.format.blocks import BlockDraft, BlockEntry
from torpor.memvid.format.identity import Identity
from torpor.memvid.format.manifest import UNREAD
from torpor.memvid.format.records import Receipt
from torpor.memvid.index.index import Index
from torpor.memvid.limits import MAX_TOKENS
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing import sleeping
from torpor.memvid.writing.core import StoreCore
from torpor.memvid.writing.needs import Pins
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import OTHER_URI, URI, drafts, names, pack_of, reopened, require_awake, sleep

WAIT = 30
"""Seconds after which something that must happen has not."""


def write(store: Store, uri: SessionUri, blocks: Iterable[BlockDraft], tokens: int, **more: Any) -> Receipt:
    return making.write(store, blocks, tokens, uri=uri, **more)


# --- flushes


def test_a_fork_and_a_version_of_a_ledger_cost_two_flushes(store: Store) -> None:
    first = sleep(store, 512)
    for work in (
        lambda: write(store, making.FORK_URI, [], 512, parent=first.bundle_id, reused=first.entries),
        lambda: write(store, OTHER_URI, drafts(512), 512),  # all of it is in the store
        lambda: write(store, SessionUri("x", "ledger"), [], 0, session={UNREAD: {"tokens": making.token_ids(0, 40)}}),
    ):
        before = names(store.path)
        with making.flushes() as told:
            receipt = work()
        assert [Path(path).parent.name for path in told] == ["versions", "store"], told
        assert receipt.bytes_written == making.manifest_path(store, receipt.bundle_id).stat().st_size < 2000
        assert len(names(store.path) - before) == 1


# --- what is referred to


def test_the_same_tokens_with_other_bytes_or_under_another_identity_are_another_block(store: Store) -> None:
    sleep(store, 300, seed=1)
    altered = drafts(300, seed=1)
    altered[0] = dataclasses.replace(altered[0], slots=drafts(300, seed=2)[0].slots)
    for blocks, identity in ((altered, making.IDENTITY), (drafts(300, seed=1), Identity((("weights", "other"),)))):
        receipt = write(store, OTHER_URI, blocks, 300, identity=identity)
        assert (receipt.blocks_new, receipt.blocks_reused) == (3, 0), "each names the one before it as its parent"


def test_a_block_that_is_in_no_pack_any_more_cannot_be_reused(store: Store) -> None:
    first = sleep(store, 600)
    second = sleep(store, 900, before=first)
    pack_of(store, first).unlink()
    before = names(store.path)
    with pytest.raises(errors.BlockMissing):
        sleep(store, 1200, before=second)
    assert names(store.path) == before
    sleep(store, 1200)
    require_awake(store, 1200)


def test_a_pack_that_is_put_back_is_reused_at_once(store: Store, tmp_path: Path) -> None:
    """Also where another pack was believed to have the block, and is gone."""
    first = sleep(store, 600)
    pack = pack_of(store, first)
    copy = pack.rename(tmp_path / "away")
    sleep(store, 600, uri=OTHER_URI)  # all anew, in a pack of the same name
    pack.unlink()
    with pytest.raises(errors.BlockMissing):
        sleep(store, 900, before=first)
    copy.rename(pack)
    assert sleep(store, 900, before=first).blocks_reused == 2
    require_awake(store, 900)


def test_blocks_that_went_to_a_pack_which_this_object_does_not_know_are_found(store: Store, tmp_path: Path) -> None:
    """The pack of the index is gone, and another one was put in by hand."""
    with Store.open(tmp_path / "elsewhere", writable=True) as elsewhere:
        other_pack = pack_of(elsewhere, sleep(elsewhere, 700))
    first = sleep(store, 600)
    pack_of(store, first).unlink()
    other_pack.rename(Path(store.path, "packs", other_pack.name))
    assert sleep(store, 900, before=first).blocks_reused == 2
    with store.open_session(URI) as reader:
        making.contents(reader)


def test_a_version_whose_manifest_is_missing_is_no_parent(store: Store, tmp_path: Path) -> None:
    first = sleep(store, 600)
    away = making.manifest_path(store, first.bundle_id).rename(tmp_path / "away")
    with pytest.raises(errors.BundleMissing):
        sleep(store, 900, before=first)
    away.rename(making.manifest_path(store, first.bundle_id))
    assert sleep(store, 900, before=first).version == 2


@pytest.mark.parametrize("what", ["manifest", "pack"])
def test_what_the_system_refuses_to_open_cannot_be_reused_and_the_state_can_still_sleep(
    store: Store, tmp_path: Path, what: str
) -> None:
    first = sleep(store, 600)
    os.link(
        making.manifest_path(store, first.bundle_id) if what == "manifest" else pack_of(store, first),
        tmp_path / "second",
    )
    store._core.files.close()
    with pytest.raises(errors.BlockMissing) as refused:
        sleep(store, 900, before=first)
    assert refused.value.details.get("reason") == ("unsafe_path" if what == "manifest" else None)
    write(store, URI, drafts(900), 900, parent=first.bundle_id)
    require_awake(store, 900)


def test_what_becomes_unreadable_while_a_version_is_written_is_written_too(store: Store) -> None:
    """It was found in the store, and is in memory as well."""
    first = sleep(store, 600)

    def blocks() -> Iterator[BlockDraft]:
        yield from drafts(900)
        pack_of(store, first).unlink()

    receipt = write(store, OTHER_URI, blocks(), 900)
    assert (receipt.blocks_new, receipt.blocks_reused) == (5, 0)
    require_awake(store, 900, uri=OTHER_URI)
    with store.open_session(URI) as reader, pytest.raises(errors.BlockMissing) as refused:
        making.contents(reader)
    assert refused.value.details["whole_up_to"] == 512


def test_state_records_may_be_left_out_of_what_is_reused_and_nothing_else(store: Store) -> None:
    """A session keeps the records of fewer positions as it grows."""
    first = write(store, URI, [making.span(0, 256), making.state(256), making.span(256, 256), making.state(512)], 512)
    one, between, two, _ = first.entries
    new = [making.state(512, seed=1)]
    for wrong in ((one, between, between), (between, one, two), (two,), (between, two)):
        with pytest.raises(errors.InvalidDraft):
            write(store, URI, new, 512, parent=first.bundle_id, reused=wrong)
    second = write(store, URI, new, 512, parent=first.bundle_id, reused=(one, two))
    assert [entry.kind for entry in second.entries] == ["span", "span", "state"]
    assert second.entries[:2] == (one, two)


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
def test_what_is_not_the_beginning_of_the_parent_s_chain_is_not_reused(store: Store, choose: Any) -> None:
    first = sleep(store, 600)
    reused: tuple[BlockEntry, ...] = choose(first.entries)
    with pytest.raises(errors.InvalidDraft):
        write(store, URI, drafts(900, first=512), 900, parent=first.bundle_id, reused=reused)
    assert len(store.versions(URI)) == 1


@pytest.mark.parametrize("cut", [False, True])
def test_a_doubted_block_is_read_before_a_version_refers_to_it(store: Store, cut: bool) -> None:
    first = sleep(store, 600)
    if cut:
        pack_of(store, first).write_bytes(pack_of(store, first).read_bytes()[:-1])
        store._core.files.close()
    else:
        making.spoil(store, first, 1)
    more = {"parent": first.bundle_id, "reused": first.entries[:2]}
    before = names(store.path)
    for doubted in (first.entries[1:2], first.entries[:2]):
        with pytest.raises(errors.Corruption):
            write(store, URI, drafts(900, first=512), 900, doubted=doubted, **more)
    assert names(store.path) == before
    if not cut:
        write(store, OTHER_URI, drafts(900, first=512), 900, doubted=first.entries[:1], **more)
    write(store, URI, drafts(900), 900, parent=first.bundle_id)
    require_awake(store, 900)


# --- failures: nothing is left behind


class GivenUpError(Exception):
    pass


def failing_at(call: str, at: int, error: Exception) -> contextlib.AbstractContextManager[None]:
    """Let the so-many-th of these system calls fail."""
    return making.meanwhile(os, call, making.refusing(error), at=at)


FULL = OSError(errno.ENOSPC, "No space left on device")
BROKEN = OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("step", ["add_pack", "add"])
def test_a_version_that_cannot_be_entered_is_taken_back(store: Store, step: str) -> None:
    first = sleep(store, 600)
    before = names(store.path)
    with (
        mock.patch.object(Index, step, making.refusing(errors.IndexFailed("no memory"))),
        pytest.raises(errors.IndexFailed),
    ):
        sleep(store, 900, before=first)
    assert names(store.path) == before
    with reopened(store) as again:
        assert [row.version for row in again.versions(URI)] == [1]
        sleep(again, 900, before=first)
        require_awake(again, 900)


def test_an_interrupt_after_the_row_was_written_takes_it_back(store: Store) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        making.meanwhile(Index, "add", making.refusing(KeyboardInterrupt), after=True),
    ):
        sleep(store, 300)
    assert (names(store.path), store.find_session(URI)) == (set(), None)


def test_a_version_that_can_neither_be_entered_nor_taken_back_ends_writing(store: Store) -> None:
    with (
        mock.patch.object(Index, "add", making.refusing(errors.IndexFailed("no memory"))),
        mock.patch.object(durable, "remove", making.refusing(errors.StoreIoError("no right"))),
        pytest.raises(errors.DurabilityLost, match="could not be taken back"),
    ):
        sleep(store, 300)
    with pytest.raises(errors.DurabilityLost):
        sleep(store, 300)
    assert len(names(store.path)) == 2
    with reopened(store) as again:  # the version is whole, and was not acknowledged: it is there
        require_awake(again, 300)


def test_while_a_manifest_that_failed_may_come_back_its_pack_stays(store: Store) -> None:
    """The flush of its name failed, and so does that of its removal: a power cut may bring the name back."""
    with (
        failing_at("fsync", 4, BROKEN),
        mock.patch.object(StoreFolder, "flush", making.refusing(errors.DurabilityLost("x"))),
        pytest.raises(errors.DurabilityLost),
    ):
        sleep(store, 300)
    assert [name[:6] for name in names(store.path)] == ["packs/"]


def test_a_flush_that_fails_does_not_cost_another_session_the_same_pack(store: Store) -> None:
    """Two sessions with the same blocks sleep at once, and each writes them: the packs have one name."""
    with slowly(store, OTHER_URI, drafts(600), 600, failing=errors.DurabilityLost) as done:
        done.append(sleep(store, 600))
        flush = failing_at("fsync", 3, BROKEN)  # of the folder of packs, after the pack and the manifest
        flush.__enter__()
    flush.__exit__(None, None, None)
    require_awake(store, 600)
    with reopened(store) as again:
        assert again.find_session(OTHER_URI) is None
        require_awake(again, 600)


def test_a_sleep_of_more_than_the_limits_is_refused(store: Store) -> None:
    with pytest.raises(errors.LimitExceeded):
        write(store, URI, [], MAX_TOKENS + 1)
    with mock.patch.object(sleeping, "MAX_BLOCKS", 3), pytest.raises(errors.LimitExceeded):
        write(store, URI, drafts(900), 900)
    with mock.patch("torpor.memvid.format.pack_writer.MAX_FRAMES", 2), pytest.raises(errors.LimitExceeded):
        write(store, URI, drafts(900), 900)
    with mock.patch("torpor.memvid.format.pack_writer.MAX_BUNDLE_BYTES", 5000), pytest.raises(errors.LimitExceeded):
        write(store, URI, drafts(900), 900)
    assert names(store.path) == set()


def test_a_version_is_given_up_until_it_is_published_and_leaves_nothing(store: Store) -> None:
    first = sleep(store, 300)
    before = names(store.path)
    with pytest.raises(GivenUpError):
        write(store, URI, drafts(900), 900, before_publishing=making.refusing(GivenUpError))
    assert names(store.path) == before
    assert [row.version for row in store.versions(URI)] == [first.version]
    assert write(store, URI, drafts(900), 900, before_publishing=lambda: None).version == first.version + 1


# --- several at once


class Slow:
    """Blocks that come only when they are let: a model that is still computing them."""

    def __init__(self, blocks: list[BlockDraft]) -> None:
        self._blocks = blocks
        self.begun, self.let = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[BlockDraft]:
        yield from self._blocks
        self.begun.set()
        assert self.let.wait(WAIT)


@contextlib.contextmanager
def slowly(
    store: Store,
    uri: SessionUri,
    blocks: list[BlockDraft],
    tokens: int,
    failing: type[Exception] | None = None,
    **more: Any,
) -> Iterator[list[Receipt]]:
    """Meanwhile another thread sleeps, and waits behind its blocks; its receipt is there afterwards, unless it raises
    what is `failing`."""
    slow, done = Slow(blocks), list[Receipt]()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(write, store, uri, slow, tokens, **more)
        try:
            assert slow.begun.wait(WAIT)
            yield done
        finally:
            slow.let.set()
        if failing is not None:
            with pytest.raises(failing):
                waiting.result(WAIT)
        else:
            done.append(waiting.result(WAIT))


def test_threat_49_a_slow_sleep_holds_up_no_other_and_no_delete(store: Store) -> None:
    sleep(store, 300, uri=OTHER_URI, seed=5)
    with slowly(store, URI, drafts(600), 600) as done:
        assert sleep(store, 300, uri=SessionUri("default", "third"), seed=6).version == 1
        assert store.delete_session(OTHER_URI).versions_deleted == 1
        beside = sleep(store, 300, seed=7)
    assert (done[0].version, beside.version) == (1, 2), "each has the number that it began with"
    require_awake(store, 600, version=1)


def test_threat_49_sleeps_of_many_sessions_at_once_are_each_whole(store: Store) -> None:
    uris = [SessionUri("many", str(number)) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for round_ in range(3):
            tokens = 300 * (round_ + 1)
            done = [pool.submit(sleep, store, tokens, uri=uri, seed=seed) for seed, uri in enumerate(uris)]
            assert [one.result(WAIT).version for one in done] == [round_ + 1] * 8
    for seed, uri in enumerate(uris):
        require_awake(store, 900, uri=uri, seed=seed)


def test_threat_49_sleeps_of_the_same_blocks_at_once_are_each_whole(store: Store) -> None:
    uris = [SessionUri("many", str(number)) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(sleep, store, 600, uri=uri) for uri in uris]
        assert [one.result(WAIT).version for one in done] == [1] * 8
    for uri in uris[1:]:
        require_awake(store, 600, uri=uri)
        store.delete_session(uri)
    require_awake(store, 600, uri=uris[0])
    store.delete_session(uris[0])
    assert names(store.path) == set()


def test_threat_49_sleeps_of_one_session_at_once_get_a_version_each(store: Store) -> None:
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(sleep, store, 300, seed=seed) for seed in range(16)]
        versions = {one.result(WAIT).version: seed for seed, one in enumerate(done)}
    assert sorted(versions) == list(range(1, 17))
    for version, seed in versions.items():
        with store.open_session(URI, version=version) as reader:
            assert making.contents(reader) == making.expected(300, seed=seed)


def test_a_number_that_was_given_to_a_sleep_that_failed_is_a_gap_and_is_not_given_while_it_runs(store: Store) -> None:
    numbers = []

    def blocks() -> Iterator[BlockDraft]:
        numbers.append(sleep(store, 300, seed=2).version)
        raise GivenUpError
        yield

    with pytest.raises(GivenUpError):
        write(store, URI, blocks(), 300)
    assert numbers == [2]
    assert sleep(store, 300, seed=3).version == 3


def test_the_number_of_a_version_whose_manifest_is_missing_is_not_given_again(store: Store, tmp_path: Path) -> None:
    sleep(store, 300)
    second = sleep(store, 400)
    file = making.manifest_path(store, second.bundle_id)
    away = file.rename(tmp_path / "away")
    with reopened(store) as again:
        assert [finding.path for finding in again.opening.unreadable] == [str(file)]
        assert sleep(again, 500).version == 3
        away.rename(file)
        require_awake(again, 400, version=2)
        require_awake(again, 500)


@pytest.mark.parametrize("by_id", [False, True])
def test_threat_51_what_an_unfinished_sleep_refers_to_survives_a_delete(store: Store, by_id: bool) -> None:
    """by_id: nobody but the sleep itself knows that it refers to the other session's block."""
    first = sleep(store, 600)
    pack = pack_of(store, first)
    more = {} if by_id else {"parent": first.bundle_id, "reused": first.entries[:2]}
    with slowly(store, OTHER_URI, drafts(900, first=0 if by_id else 512), 900, **more) as done:
        store.delete_session(URI)
        assert pack.exists()
    assert done[0].blocks_reused == 2
    require_awake(store, 900, uri=OTHER_URI)


def test_threat_51_what_a_failed_sleep_referred_to_goes_with_the_next_delete(store: Store) -> None:
    first = sleep(store, 600)

    def blocks() -> Iterator[BlockDraft]:
        store.delete_session(URI)
        assert pack_of(store, first).exists()
        yield from ()

    with pytest.raises(errors.InvalidDraft):
        write(store, OTHER_URI, blocks(), 900, parent=first.bundle_id, reused=first.entries[:2])
    assert not store._core.pins.blocks()
    sleep(store, 600)
    store.delete_session(URI)
    assert names(store.path) == set()


def unpinned_delete(store: Store, uri: SessionUri) -> None:
    """A delete that has looked at the pins already when a sleep takes its own."""
    with mock.patch.object(Pins, "blocks", return_value=frozenset()):
        store.delete_session(uri)


def losing_its_blocks(store: Store, first: int = 0) -> Iterator[BlockDraft]:
    """The blocks of a session that sleeps already, which is deleted before the last one comes."""
    *most, last = drafts(600, first=first)
    yield from most
    unpinned_delete(store, URI)
    yield last


def test_a_block_that_is_deleted_after_it_was_found_is_written_after_all(store: Store) -> None:
    sleep(store, 600)
    receipt = write(store, OTHER_URI, losing_its_blocks(store), 600)
    assert (receipt.blocks_new, receipt.blocks_reused) == (4, 0)
    require_awake(store, 600, uri=OTHER_URI)
    with reopened(store, anew=True) as again:
        require_awake(again, 600, uri=OTHER_URI)


@pytest.mark.parametrize("held", [False, True])
def test_blocks_that_leave_at_the_last_moment_are_written_after_all(store: Store, held: bool) -> None:
    """Between the flush of the manifest and its commit. held: the removed pack is still open for another thread."""
    first = sleep(store, 600)
    name = store.index.packs_of(first.entries[0].id)[0]
    with (
        store._core.files.holding(name) if held else contextlib.nullcontext(),
        making.meanwhile(StoreCore, "missing_of", lambda: unpinned_delete(store, URI)),
    ):
        receipt = write(store, OTHER_URI, drafts(600), 600)
    assert (receipt.blocks_new, receipt.blocks_reused) == (4, 0)
    require_awake(store, 600, uri=OTHER_URI)


def test_blocks_that_leave_again_and_again_end_the_sleep(store: Store) -> None:
    sleep(store, 600)
    with (
        mock.patch.object(StoreCore, "missing_of", lambda core, blocks, **_: set(list(blocks)[:1])),
        mock.patch.object(sleeping, "_TRIES", 3),
        pytest.raises(errors.BlockMissing),
    ):
        write(store, OTHER_URI, drafts(600), 600)
    assert not list(Path(store.path).rglob("*.tmp"))


@pytest.mark.parametrize("how", ["reused", "too large to keep"])
def test_a_block_that_is_deleted_and_not_in_memory_fails_the_sleep_by_name(
    store: Store, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = sleep(store, 600)
    if how == "too large to keep":
        monkeypatch.setattr(sleeping, "_SPARE_BYTES", 100)
    more = {"parent": base.bundle_id, "reused": base.entries[:2]} if how == "reused" else {}

    with pytest.raises(errors.BlockMissing):
        write(store, OTHER_URI, losing_its_blocks(store, 512 if more else 0), 600, **more)
    assert store.find_session(OTHER_URI) is None
    assert names(store.path) == set()
    sleep(store, 600, uri=OTHER_URI)
    require_awake(store, 600, uri=OTHER_URI)


def test_where_no_file_can_be_opened_any_more_a_sleep_that_is_led_elsewhere_fails_by_name(store: Store) -> None:
    sleep(store, 600)
    no_descriptor = making.refusing(OSError(errno.EMFILE, "too many open files"))
    with mock.patch.object(os, "dup", no_descriptor), pytest.raises(errors.StoreIoError) as refusal:
        write(store, OTHER_URI, losing_its_blocks(store), 600)
    assert refusal.value.errno == errno.EMFILE
    assert names(store.path) == set()


def test_a_compressed_sleep_refers_to_what_lies_there_raw_and_the_other_way_round(store: Store) -> None:
    flat = {"period": 16}
    raw = sleep(store, 600, **flat)
    assert sleep(store, 600, uri=OTHER_URI, compressed=True, **flat).blocks_new == 0
    small = sleep(store, 600, uri=making.FORK_URI, seed=1, compressed=True, **flat)
    assert small.bytes_written < raw.bytes_written
    assert sleep(store, 600, uri=SessionUri("x", "y"), seed=1, **flat).blocks_new == 0
    for uri, seed in ((URI, 0), (OTHER_URI, 0), (making.FORK_URI, 1), (SessionUri("x", "y"), 1)):
        require_awake(store, 600, uri=uri, seed=seed, **flat)


# --- the journal


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
    assert (receipt.token_count, store.acknowledged()) == (910, [])
    assert store._core.journal.room == {URI: 5_000}
    with reopened(store) as again:
        row = again.require_session(URI)
        assert (again.opening.turns_replayed, row.token_count) == (0, 910)


@pytest.mark.parametrize("covers", [True, False])
def test_a_version_covers_the_turns_of_its_session_or_leaves_them(store: Store, covers: bool) -> None:
    sleep(store, 300)
    store.acknowledge([making.turn(store, 5)])
    write(store, URI, drafts(40, seed=2), 40, covers=covers)
    assert store.has_turns(URI) is not covers
    with reopened(store) as again:
        assert making.ledger(again) == (making.token_ids(0, 40, 2) if covers else making.token_ids(0, 305))


def test_a_sleep_that_fails_leaves_the_turns(store: Store) -> None:
    sleep(store, 300)
    store.acknowledge([making.turn(store, 5)])
    with failing_at("rename", 2, FULL), pytest.raises(errors.NoSpace):
        sleep(store, 310)
    assert store.has_turns(URI)
    with reopened(store) as again:
        assert making.ledger(again) == making.token_ids(0, 305)


def test_a_manifest_above_its_limit_is_refused(store: Store) -> None:
    with mock.patch.object(manifest, "MAX_MANIFEST_BYTES", 200), pytest.raises(errors.StoreError):
        sleep(store, 300)
    assert names(store.path) == set()
    receipt = sleep(store, 300)
    with mock.patch.object(manifest, "MAX_MANIFEST_BYTES", 100), pytest.raises(errors.LimitExceeded):
        store.open_bundle(receipt.bundle_id)
