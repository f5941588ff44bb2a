"""A session becomes durable, and leaves memory or stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.errors import EmptyContext
from torpor.memvid.errors import NoSpace, SessionNotFound
from torpor.tests.daemon.session_rig import Rigged, ignore, listening, tokens_of


async def save(rig: Rigged, name: str = "a") -> Any:
    return await rig.service.save(name)


async def test_a_save_is_the_version_of_a_sleep_and_the_session_stays_in_memory_as_it_was(open_rig: Any) -> None:
    async with open_rig() as rig, listening(rig) as heard:
        await rig.read("a", tokens_of(1, 600))
        was = await rig.fingerprint("a")
        saved = await save(rig)
        assert (saved.version, saved.token_count, saved.blocks_new, saved.already_asleep) == (1, 600, 4, False)
        assert rig.is_awake("a")
        assert await rig.fingerprint("a") == was
        (info,) = await rig.service.list_sessions()
        assert (info.state, info.version, info.dirty) == ("awake", 1, False)
        rig.service._parts.sessions.residency.awake.drop(rig.live("a").uri)
        assert (await rig.wake("a")).tokens_prefilled == 0
        assert await rig.fingerprint("a") == was
    assert [ended["cause"] for ended in heard.of("sleep_ended", "a")] == ["save"]


async def test_what_is_saved_is_written_once(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 600))
    first = await save(rig)
    again = await save(rig)
    assert (again.bundle_id, again.bytes_written, again.blocks_new) == (first.bundle_id, 0, 0)
    slept = await rig.sleep("a")
    assert (slept.bundle_id, slept.bytes_written, slept.already_asleep) == (first.bundle_id, 0, False)
    await rig.service.append("a", tokens=[1])
    second = await save(rig)
    assert (second.version, second.parent, second.blocks_reused) == (2, first.bundle_id, 2)


async def test_a_session_that_sleeps_stays_asleep_and_the_save_says_so(rig: Rigged) -> None:
    slept = await rig.asleep("a", tokens_of(1, 300))
    saved = await save(rig)
    assert (saved.bundle_id, saved.bytes_written, saved.already_asleep) == (slept.bundle_id, 0, True)
    assert not rig.is_awake("a")


async def test_a_save_waits_for_the_answer_that_is_being_written_and_has_all_of_it(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 20))
    gate = rig.network.hold_at(3)
    writing = asyncio.create_task(rig.write("a", 9))
    await gate.reached()
    saving = asyncio.create_task(save(rig))
    await asyncio.sleep(0)
    gate.open()
    await writing
    assert (await saving).token_count == 29


async def test_an_empty_or_unknown_session_is_refused(rig: Rigged) -> None:
    await rig.service.create("a")
    with pytest.raises(EmptyContext):
        await save(rig)
    with pytest.raises(SessionNotFound):
        await save(rig, "nobody")


async def test_a_save_that_finds_no_room_changes_nothing(rig: Rigged, full_disk: Any) -> None:
    await rig.read("a", tokens_of(1, 300))
    was = await rig.fingerprint("a")
    disk = full_disk()
    with pytest.raises(NoSpace):
        await save(rig)
    disk.free()
    assert await rig.fingerprint("a") == was
    assert rig.live("a").dirty
    assert (await save(rig)).version == 1


@pytest.mark.parametrize("verb", ["sleep", "save"])
async def test_turns_that_only_the_journal_has_are_in_the_receipt_of_a_session_out_of_memory(
    open_rig: Any, store: Path, verb: str
) -> None:
    async with open_rig(durability="turn") as rig:
        await rig.read("a", tokens_of(1, 40))
        rig.service._parts.sessions.residency.awake.drop(rig.live("a").uri)
        kept = await getattr(rig.service, verb)(session="a", on_event=ignore)
        assert (kept.token_count, kept.already_asleep) == (40, True)


async def test_a_save_takes_the_place_of_what_the_journal_has(open_rig: Any) -> None:
    async with open_rig(durability="turn") as rig:
        await rig.read("a", tokens_of(1, 40))
        assert rig.service._parts.store.disk.acknowledged() == [rig.live("a").uri]
        await save(rig)
        assert rig.service._parts.store.disk.acknowledged() == []
        await rig.write("a", 3)
        assert rig.service._parts.store.disk.acknowledged() == [rig.live("a").uri]
