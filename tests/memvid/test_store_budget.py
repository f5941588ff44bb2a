"""Budgets in a store: a sleep that would go past one is refused whole; what frees space never is."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torpor.memvid.disk import durable
from torpor.memvid.disk.budget import Budget, utc_day
from torpor.memvid.errors import BudgetExceeded, CorruptStoreFile, NoSpace
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.retention import Retention
from torpor.memvid.folder.store_file import STORE_FILE, encode_store_file
from torpor.memvid.format.blocks import BlockDraft
from torpor.memvid.format.pack_writer import PackWriter
from torpor.memvid.index.index import Index
from torpor.memvid.limits import GIB
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import (
    OTHER_URI,
    URI,
    drafts,
    names,
    of_sleeps,
    refusing,
    require_awake,
    sleep,
    span,
    state,
    write,
)


def bundle_bytes(path: Path) -> int:
    return sum((path / name).stat().st_size for name in names(path))


def require_untouched(store: Store, path: Path, tokens: int, files: int) -> None:
    require_awake(store, tokens)
    assert not list(path.rglob("*.tmp"))
    assert len(names(path)) == 2 * files


def test_a_store_is_never_larger_than_its_budget(store_path: Path) -> None:
    with Store.open(store_path, writable=True) as store:
        first = sleep(store, 300)
    limit = of_sleeps(2 * first.bytes_written + 10)
    with Store.open(store_path, writable=True, budget=Budget(max_store_bytes=limit)) as store:
        second = sleep(store, 300, uri=OTHER_URI, seed=1)
        with pytest.raises(BudgetExceeded) as refusal:
            sleep(store, 600, before=first)
        assert (refusal.value.details["which"], refusal.value.details["limit"]) == ("max_store_bytes", limit)
        require_untouched(store, store_path, 300, 2)
        assert bundle_bytes(store_path) == first.bytes_written + second.bytes_written <= limit
        store.delete_session(OTHER_URI)  # and what it frees can be used at once
        assert sleep(store, 300, uri=OTHER_URI, seed=1).version == 1


@pytest.mark.parametrize("bound", ["max_store_bytes", "max_bytes_per_day"])
def test_a_sleep_that_cannot_fit_is_refused_with_its_size_before_any_of_it_is_written(
    store_path: Path, bound: str
) -> None:
    """So one that is tried again and again does not use up what others may write in a day."""
    raw = sum(slot.spec.size_bytes for draft in drafts(600) for slot in draft.slots)
    with Store.open(store_path.with_name("measured"), writable=True) as measured:
        whole = sleep(measured, 600).bytes_written
    with Store.open(store_path, writable=True, budget=Budget(**{bound: raw - 1})) as store:
        with mock.patch.object(StoreFolder, "new_temp", side_effect=AssertionError("it wrote")):
            for _ in range(3):
                with pytest.raises(BudgetExceeded) as refusal:
                    sleep(store, 600)
        assert raw < refusal.value.details["needed"] < whole
        assert store.index.written().get(utc_day(time.time_ns()), 0) == 0
        sleep(store, 300)


def test_what_the_store_has_already_is_not_asked_for_twice(store_path: Path) -> None:
    """More is handed in than there is room for, but none of it is new."""
    with Store.open(store_path, writable=True) as store:
        first = sleep(store, 600)
    limit = first.bytes_written + 8 * 1024
    with Store.open(store_path, writable=True, budget=Budget(max_store_bytes=limit)) as store:
        receipt = sleep(store, 600, uri=OTHER_URI)
        assert (receipt.blocks_new, receipt.blocks_reused) == (0, first.blocks_new)
        with pytest.raises(BudgetExceeded) as refusal:
            sleep(store, 900, uri=OTHER_URI, seed=3)
        assert refusal.value.details["needed"] > 600


def test_what_the_store_holds_is_kept_up_with_through_everything_that_changes_it(store_path: Path) -> None:
    with Store.open(store_path, writable=True, budget=Budget(max_store_bytes=1 << 40)) as store:
        receipt = sleep(store, 300)
        for change in (
            lambda: sleep(store, 700, uri=OTHER_URI, before=sleep(store, 600, before=receipt)),
            lambda: store.prune(Retention(keep_last=1)),
            lambda: store.delete_session(URI),
            lambda: store.delete_session(OTHER_URI),
        ):
            assert store._core.folder.held_bytes() == bundle_bytes(store_path)
            change()
        assert store._core.folder.held_bytes() == bundle_bytes(store_path) == 0


def test_a_day_s_writes_are_counted_across_openings_and_with_the_day_they_begin_anew(store_path: Path) -> None:
    with Store.open(store_path, writable=True) as store:
        first = sleep(store, 300)
        assert store.index.written().get(utc_day(time.time_ns()), 0) == first.bytes_written
    budget = Budget(max_bytes_per_day=first.bytes_written + 100)
    with Store.open(store_path, writable=True, budget=budget) as store:
        store.delete_session(URI)  # what was written is written
        with pytest.raises(BudgetExceeded) as refusal:
            sleep(store, 300)
        assert refusal.value.details["which"] == "max_bytes_per_day"
        tomorrow = time.time_ns() + 86_400 * 10**9
        with mock.patch.object(time, "time_ns", return_value=tomorrow):
            sleep(store, 300)
            with pytest.raises(BudgetExceeded):
                sleep(store, 300, uri=OTHER_URI)


def test_what_a_refused_sleep_wrote_counts_for_the_day(store_path: Path) -> None:
    with Store.open(store_path, writable=True, budget=Budget(max_bytes_per_day=40_000)) as store:
        with pytest.raises(BudgetExceeded):
            sleep(store, 2000, compressed=True)  # of what is compressed nobody knows ahead how long it is
        written = store.index.written().get(utc_day(time.time_ns()), 0)
        assert 16_000 < written <= 40_000
        assert store.find_session(URI) is None
        assert (names(store_path), list(store_path.rglob("*.tmp"))) == (set(), [])


def test_the_disk_keeps_free_what_it_should(store_path: Path) -> None:
    with Store.open(store_path, writable=True, budget=Budget(min_free_bytes=1_000_000)) as store:
        sleep(store, 300)

        class Full:
            f_bavail, f_blocks, f_frsize = 1_000_100, 2_000_000, 1

        with mock.patch.object(os, "statvfs", return_value=Full), mock.patch.object(os, "fstatvfs", return_value=Full):
            with pytest.raises(BudgetExceeded) as refusal:
                sleep(store, 300, uri=OTHER_URI)
            assert refusal.value.details["which"] == "min_free_bytes"
            store.prune(Retention(keep_last=1))
        require_untouched(store, store_path, 300, 1)


def test_a_sleep_that_begins_during_another_finds_what_that_one_has_written(store_path: Path) -> None:
    with Store.open(store_path, writable=True) as store:
        one = sleep(store, 300).bytes_written
        store.delete_session(URI)
    with Store.open(store_path, writable=True, budget=Budget(max_store_bytes=one + one // 2)) as store:

        def blocks() -> Iterator[BlockDraft]:
            yield span(0, 256)
            with pytest.raises(BudgetExceeded):
                sleep(store, 300, uri=OTHER_URI, seed=1)
            yield from (span(256, 44), state(300))

        write(
            store,
            blocks(),
            300,
            compressed=True,  # else all blocks are looked at before the first is written
        )
        require_untouched(store, store_path, 300, 1)


def test_a_sleep_that_fits_is_not_refused_for_what_a_repack_writes_beside_it(store_path: Path) -> None:
    """A repack takes the place of what is there; its temporary file is not what the store holds."""
    with Store.open(store_path, writable=True) as store:
        second = sleep(store, 300)
        one = sleep(store, 300, uri=OTHER_URI, seed=1).bytes_written
        store.delete_session(OTHER_URI)
        held = bundle_bytes(store_path)
    with Store.open(store_path, writable=True, budget=Budget(max_store_bytes=of_sleeps(held + one))) as store:
        core = store._core
        with core.metering(replacing=True) as room, core.folder.new_temp() as temp:
            writer = PackWriter(temp, room)
            for entry in second.entries:
                with core.files.holding(core.index.packs_of(entry.id)[0]) as file:
                    writer.add_copy(file, entry.id)
            write(store, drafts(300, seed=1), 300, uri=OTHER_URI)
            with pytest.raises(BudgetExceeded):
                sleep(store, 1, uri=OTHER_URI, seed=2)
        require_awake(store, 300, uri=OTHER_URI, seed=1)
        assert held < core.folder.held_bytes() == bundle_bytes(store_path) <= held + one


def test_what_a_sleep_wrote_that_failed_beside_another_is_given_back(store_path: Path) -> None:
    with Store.open(store_path, writable=True) as store:
        one = sleep(store, 300).bytes_written
        store.delete_session(URI)
    with Store.open(store_path, writable=True, budget=Budget(max_store_bytes=of_sleeps(one))) as store:

        def failing() -> Iterator[BlockDraft]:
            yield span(0, 256, seed=1)
            raise KeyError("the state is gone")

        def blocks() -> Iterator[BlockDraft]:
            with pytest.raises(KeyError):
                write(store, failing(), 9, uri=OTHER_URI)
            yield from (span(0, 256), span(256, 44), state(300))

        write(store, blocks(), 300)
        require_untouched(store, store_path, 300, 1)


def test_a_count_that_cannot_be_kept_does_not_fail_the_sleep(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Index, "add_written", mock.Mock(side_effect=NoSpace("No room for the index.")))
    sleep(store, 300)
    require_awake(store, 300)


@pytest.mark.parametrize(
    ("free_gib", "held_gib", "expected"),
    [(3, 0, 3 * GIB // 5), (2048, 0, 100 * GIB), (50, 40, 50 * GIB), (0, 0, 1)],
)
def test_a_store_for_which_nobody_gave_a_budget_gets_one_by_its_free_space_that_does_not_move(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: int, held_gib: int, expected: int
) -> None:
    monkeypatch.setattr(StoreFolder, "held_bytes", lambda _: held_gib * GIB)
    for gib, say in ((free_gib, expected), (2 * free_gib + 7, expected)):
        monkeypatch.setattr(os, "statvfs", lambda _, gib=gib: mock.Mock(f_bavail=gib, f_frsize=GIB, f_blocks=gib))
        with Store.open(store_path, writable=True, budget=Budget(max_bytes_per_day=7)) as store:
            store.hold_to_budget(None)
            assert store.budget == Budget(max_store_bytes=say, max_bytes_per_day=7)


def test_a_disk_without_room_for_the_figure_of_the_budget_stops_no_start(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(store_path, writable=True) as store:
        before = (store_path / STORE_FILE).read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(durable, "write_file", refusing(NoSpace("full")))
            store.hold_to_budget(None)
        assert store.budget.max_store_bytes
        assert (store_path / STORE_FILE).read_bytes() == before


@pytest.mark.parametrize("budget", [0, -1, 1.5, "5", True, 1 << 70])
def test_a_budget_in_store_json_that_none_wrote_keeps_the_store_shut(store_path: Path, budget: Any) -> None:
    with Store.open(store_path, writable=True) as store:
        sleep(store, 300)
        uuid = store.uuid
    (store_path / STORE_FILE).write_bytes(encode_store_file(uuid, budget))
    with pytest.raises(CorruptStoreFile, match="its budget is no number of bytes"):
        Store.open(store_path, writable=True)
