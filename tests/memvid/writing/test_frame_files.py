"""Open packs: what is given out is the file that has the name now, and none that is gone stays open."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torpor.memvid import errors
from torpor.memvid.maintenance.repack_plan import RepackPolicy
from torpor.memvid.store import Store
from torpor.memvid.writing.frame_files import FrameFiles
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import OTHER_URI, URI, contents, expected, pack_of, require_awake, sleep


def open_without_a_name(store: Store) -> list[str]:
    """The files of the store that this process has open, and that no name means any more."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [each for each in found if each.startswith(f"{store.path}/packs") and each.endswith("(deleted)")]


def test_packs_are_opened_and_closed_as_they_are_needed(store: Store) -> None:
    making.sleep_each(store, *(256 * blocks for blocks in range(1, 8)), layers=1)
    files = FrameFiles(store._core.folder)
    packs = sorted(store.index.pack_sizes())
    with files, pytest.MonkeyPatch.context() as patch:
        patch.setattr("torpor.memvid.writing.frame_files.MAX_OPEN_ANCESTORS", 2)
        with files.holding(packs[0]) as first:
            for name in packs:
                with files.holding(name) as one:
                    assert files._files[name] is one
            assert first.read_head(next(iter(first.frames)))
            assert len(files._files) <= 3
            Path(store.path, packs[-1]).unlink()
            with pytest.raises(errors.BundleMissing), files.holding(packs[-1]):
                pass
            store._core.look_again()
            assert open_without_a_name(store) == []


@pytest.mark.parametrize(
    "remove",
    [
        lambda store: store.delete_session(URI),
        lambda store: store.forget(URI),
        lambda store: store.repack(policy=RepackPolicy(max_packs=1)),
        lambda store: store.strip(URI),
    ],
    ids=["delete", "forget", "repack", "strip"],
)
def test_a_pack_that_is_removed_is_open_nowhere(store: Store, remove: Callable[[Store], object]) -> None:
    """An open file keeps its room on a full disk, and what a forget has deleted can be read from it."""
    making.sleep_each(store, 300, 600, 900)
    assert store._core.files._files, "sleeps leave the packs of their parents open"
    remove(store)
    assert open_without_a_name(store) == []


def test_a_pack_that_is_removed_while_it_is_read_is_closed_behind_the_read(store: Store) -> None:
    receipt = sleep(store, 300)
    name = f"packs/{pack_of(store, receipt).name}"
    with store._core.files.holding(name) as file, store._core.files.holding(name):
        store.delete_session(URI)
        assert file.check_block(receipt.entries[0].id)
        with pytest.raises(errors.BundleMissing), store._core.files.holding(name):
            pass
        assert len(open_without_a_name(store)) == 1
    assert open_without_a_name(store) == []


@pytest.mark.parametrize("used", [False, True])
def test_a_pack_in_whose_place_another_file_came_proves_nothing(store: Store, used: bool) -> None:
    """used: somebody still reads the file that was there before."""
    first = sleep(store, 300)
    pack = pack_of(store, first)
    sleep(store, 300, uri=making.FORK_URI)  # which reads the blocks in the pack, and leaves it open
    with store._core.files.holding(f"packs/{pack.name}") if used else contextlib.nullcontext():
        making.swap_spoilt(store, pack, first.entries[0].id)
        assert sleep(store, 300, uri=OTHER_URI).blocks_new == 1
    require_awake(store, 300, uri=OTHER_URI)
    assert open_without_a_name(store) == []


def test_a_reader_reads_a_pack_that_was_put_back_and_goes_on_with_one_that_is_open(store: Store) -> None:
    receipt = sleep(store, 300)
    pack = pack_of(store, receipt)
    good = pack.read_bytes()
    making.spoil(store, receipt, 0)
    with store.open_session(URI) as reader:
        with pytest.raises(errors.CorruptBlock):
            contents(reader)
        making.swap(store, pack, good)
        assert contents(reader) == expected(300)
        making.swap_spoilt(store, pack, receipt.entries[0].id)
        assert contents(reader) == expected(300)
