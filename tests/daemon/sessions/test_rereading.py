"""What a sleep refers to is read again before it counts on it, a bounded share of what nobody has read for long."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.sessions import rereading
from torpor.daemon.sessions.rereading import REREAD_AFTER_S, LastRead
from torpor.memvid.folder.scrub_mark import ScrubMark, place_of
from torpor.memvid.format.blocks import BlockEntry
from torpor.memvid.format.frames import FrameReader
from torpor.memvid.format.pack import PackFile
from torpor.tests.daemon.session_rig import Rigged, flip, ignore, packs, tokens_of

LONG_AGO = time.time() - 2 * REREAD_AFTER_S


def block(number: int, size_bytes: int = 10) -> BlockEntry:
    return BlockEntry(bytes([number]) * 32, "span", 256 * number, 256, size_bytes)


BLOCKS = [block(number) for number in range(4)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that it is, to be changed."""
    now = [LONG_AGO]
    monkeypatch.setattr(rereading.time, "time", lambda: now[0])
    return now


def test_what_was_read_is_doubted_again_after_a_while_and_what_never_was_at_once(clock: list[float]) -> None:
    last = LastRead()
    last.note(BLOCKS[1:3])
    assert last.doubted(BLOCKS, 0) == (BLOCKS[0], BLOCKS[3])
    clock[0] += REREAD_AFTER_S
    assert set(last.doubted(BLOCKS, 0)) == set(BLOCKS)
    assert last.doubted(BLOCKS, clock[0] - 1) == ()


def test_what_was_read_in_what_is_the_future_now_is_doubted(clock: list[float]) -> None:
    last = LastRead()
    last.note(BLOCKS)
    clock[0] -= 10
    assert set(last.doubted(BLOCKS, 0)) == set(BLOCKS)


def test_no_more_is_read_than_the_budget_and_the_next_time_the_rest(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rereading, "REREAD_BYTES", 20)
    last, seen = LastRead(), []
    for _ in range(2):
        doubted = last.doubted(BLOCKS, 0)
        assert len(doubted) == 2
        last.keep(BLOCKS, {each.id for each in BLOCKS} - {each.id for each in doubted})
        seen += doubted
    assert seen == BLOCKS
    assert last.doubted(BLOCKS, 0) == ()


@pytest.fixture
def nothing_counts_as_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rereading, "REREAD_AFTER_S", 0.0)


def flip_a_bit(store: Path, block_id: bytes) -> None:
    """In the last byte of what a block's slots hold, in the one pack that has it."""
    for path in packs(store):
        with contextlib.closing(PackFile(os.open(path, os.O_RDONLY), str(path), None)) as file:
            if block_id not in file.frames:
                continue
            _, head = file.read_head(block_id)
            at = file.frames[block_id].offset + head.payload_offsets[-1] + head.stored[-1].stored_bytes - 1
        flip(path, at)
        return
    raise AssertionError("no pack has the block")


async def test_rot_in_a_block_that_a_sleep_would_refer_to_is_written_anew_from_memory(
    rig: Rigged, store: Path, nothing_counts_as_read: None
) -> None:
    await rig.read_each(("sleeper", "control"), tokens_of(1, 700))
    first = await rig.sleep("sleeper")
    await rig.write("sleeper", 3)
    flip_a_bit(store, rig.live("sleeper").durable.entries[1].id)
    second = await rig.sleep("sleeper")
    assert second.parent == first.bundle_id
    assert (second.blocks_reused, second.blocks_new) == (1, 3)
    await rig.wake("sleeper")
    await rig.write("control", 3)
    assert await rig.fingerprint("sleeper") == await rig.fingerprint("control")
    await rig.sleep("sleeper")
    assert (await rig.wake("sleeper", version=1)).token_count == 700, "it has the block again, too"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("after", ["a wake", "a sleep", "a sleep that doubted it", "a scrub"])
async def test_what_was_just_found_good_is_not_read_again(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """A second sleep costs what is new."""
    await rig.woken("a", tokens_of(1, 700))
    if after == "a scrub":
        rig.live("a").last_read = LastRead()
        place = place_of(rig.live("a").uri)
        rig.service._parts.store.disk.save_scrub_mark(ScrubMark(place[:1] + b"\xff", time.time_ns(), time.time_ns()))
    elif after != "a wake":  # whose state stays in memory
        if after == "a sleep that doubted it":
            rig.live("a").last_read = LastRead()
        await rig.service.append("a", tokens=tokens_of(2, 256))
        await rig.service._parts.sessions.residency.putting_away.keep(rig.live("a"), ignore, "client")
    await rig.service.append("a", tokens=[1, 2, 3])
    asked: list[Any] = []
    put = type(rig.service._parts.store.disk).write_bundle
    monkeypatch.setattr(
        type(rig.service._parts.store.disk),
        "write_bundle",
        lambda own, draft: asked.append(draft.doubted) or put(own, draft),
    )
    await rig.sleep("a")
    assert asked == [()]


async def test_a_session_whose_blocks_nobody_has_read_reads_them_at_its_sleep(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a branch that became a session."""
    await rig.woken("a", tokens_of(1, 700))
    rig.live("a").last_read = LastRead()
    await rig.write("a", 3)
    blocks = {entry.id for entry in rig.live("a").durable.entries[:2]}
    read: list[bytes] = []
    check = FrameReader.check_payloads
    monkeypatch.setattr(
        FrameReader, "check_payloads", lambda own, block, *a, **o: read.append(block) or check(own, block, *a, **o)
    )
    await rig.sleep("a")
    assert blocks <= set(read)
