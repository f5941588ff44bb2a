"""Full blocks of awake sessions are written while these are used, and nobody waits for it or loses by it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.errors import SessionAwake
from torpor.daemon.upkeep import loop, writing_behind
from torpor.memvid.answers import VersionInfo
from torpor.memvid.errors import BudgetExceeded, NoSpace
from torpor.memvid.format.pack_writer import PackWriter
from torpor.memvid.writing.core import StoreCore
from torpor.tests.daemon.session_rig import SAMPLED, Gate, Rigged, as_killed, hold_calls, listening, tokens_of, until

KINDS = ("qwen3", "gemma3_text", "falcon_h1", "quantised")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing_behind, "BLOCKS_DUE", 1)


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing_behind, "BLOCKS_DUE", 1 << 20)


def rows(rig: Rigged, name: str) -> list[VersionInfo]:
    return list(rig.service._parts.store.disk.versions(rig.service._parts.sessions.resolve(name)))


async def written(rig: Rigged, name: str, blocks: int) -> VersionInfo:
    """The newest version of a session, once that has so many full blocks, and the session stands behind it."""
    live = rig.live(name)
    await until(lambda: live.durable is not None and live.durable.block_tokens >= 256 * blocks)
    return rows(rig, name)[-1]


def files(store: Path) -> set[str]:
    return {str(each.relative_to(store)) for each in store.rglob("*") if each.suffix in (".mvm", ".mvp", ".tmp")}


@pytest.fixture
def publishing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    yield (gate := hold_calls(monkeypatch, StoreCore, "publish_version"))
    gate.open()


@pytest.fixture
def flushing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    yield (gate := hold_calls(monkeypatch, PackWriter, "finish"))
    gate.open()


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("short_calls")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_kill_costs_less_than_a_block_and_what_was_said_since(open_kind: Any, store: Path, kind: str) -> None:
    """By a window or a recurrence, what is behind the last checkpoint: one in two blocks."""
    async with open_kind(kind) as rig:
        await rig.read("one", tokens_of(1, 45), sampling=SAMPLED)  # no call behind it ends where a block does
        await rig.service.append("one", tokens=tokens_of(3, 655))
        await rig.write("one", 7)
        row = await written(rig, "one", 2)
        assert row.block_tokens == (557 if kind in ("qwen3", "quantised") else 512)
        assert row.token_count in (700, 707), "as far as it was acknowledged when its blocks were on the disk"
        at_once, had = as_killed(store, "at once"), await rig.fingerprint("one")
        await rig.service.append("one", tokens=tokens_of(2, 20))
        later, went_on = as_killed(store, "later"), await rig.write("one", 9)
    async with open_kind(kind, store=at_once) as rig:
        woken = await rig.wake("one")
        assert woken.provenance.recomputed.same_logits
        assert woken.provenance.recomputed.tokens == 707 - row.block_tokens
        assert await rig.fingerprint("one") == had
    async with open_kind(kind, store=later) as rig:
        assert rig.service._parts.store.disk.opening.turns_replayed == 1
        again = (await rig.wake("one")).provenance.recomputed
        assert (again.same_logits, again.tokens) == (True, 727 - row.block_tokens)
        assert await rig.write("one", 9) == went_on, "the sampler goes on where it stood"


async def test_a_version_behind_always_ends_in_a_ledger_alone(rig: Rigged) -> None:
    """Else it would be taken for one that somebody has asked for, and stay."""
    await rig.read("one", tokens_of(1, 512))
    assert (await written(rig, "one", 1)).unread_tokens > 0


@pytest.mark.one_in(1)
@pytest.mark.parametrize("way", ["sleep", "stop"])
async def test_a_sleep_or_a_stop_writes_only_the_rest(open_rig: Any, store: Path, way: str) -> None:
    async with open_rig() as rig:
        await rig.read("one", tokens_of(1, 1200))
        row, had = await written(rig, "one", 4), await rig.fingerprint("one")
        block = row.bundle_bytes // 5  # four full ones, and what is behind them up to the end of a model call
        if way == "sleep":
            receipt = await rig.sleep("one")
            assert (receipt.blocks_reused, receipt.bytes_written < 2 * block) == (4, True)
            await until(lambda: len(rows(rig, "one")) == 1)
    async with open_rig(store=store) as rig:
        (kept,) = rows(rig, "one")[-1:]
        rest = kept.bundle_bytes - row.bundle_bytes  # what the version behind wrote is this one's now
        assert (kept.token_count, kept.unread_tokens, 0 < rest < 2 * block) == (1200, 0, True)
        assert (await rig.wake("one")).tokens_prefilled == 0
        assert await rig.fingerprint("one") == had


async def test_versions_behind_go_once_a_later_one_covers_them_unless_they_have_a_mark(open_rig: Any) -> None:
    async with open_rig() as rig, listening(rig) as heard:
        await rig.read("one", tokens_of(1, 300))
        await written(rig, "one", 1)
        for turn in range(2, 5):
            await rig.service.append("one", tokens=tokens_of(turn, 256))
            await written(rig, "one", turn)
        await until(lambda: [row.version for row in rows(rig, "one")] == [4])
        await rig.service.mark("one", tag="here")
        await rig.service.append("one", tokens=tokens_of(9, 256))
        await written(rig, "one", 5)
        assert [row.version for row in rows(rig, "one")] == [4, 5]
        assert (await rig.service.show("one")).info.dirty
        await until(lambda: len(heard.of("blocks_written")) == 5)
    told = heard.of("blocks_written", "one")
    assert [(each["version"], each["tokens"]) for each in told] == [(1, 300), (2, 556), (3, 812), (4, 1068), (5, 1324)]
    assert all(each["unread_tokens"] < 256 for each in told)
    assert not heard.of("sleep_began")


async def test_no_request_waits_while_blocks_are_written_and_the_version_has_the_last_turn(
    open_rig: Any, flushing: Gate, store: Path
) -> None:
    async with open_rig() as rig:
        await rig.read("one", tokens_of(1, 600))
        await flushing.reached()
        assert (await rig.service.append("one", tokens=[1, 2])).token_count == 602
        await rig.service.set("one", sampling=SAMPLED)
        at_once = as_killed(store)
        flushing.open()
        row = await written(rig, "one", 2)
        assert (row.version, row.token_count, rig.service._parts.store.disk.acknowledged()) == (1, 602, [])
        later, had = as_killed(store, "later"), await rig.fingerprint("one")
    for killed in (at_once, later):
        async with open_rig(store=killed) as rig:
            await rig.wake("one")
            assert (await rig.fingerprint("one"), rig.live("one").sampling) == (had, SAMPLED)


async def test_a_turn_that_ends_while_the_version_is_published_goes_on_behind_it(
    open_rig: Any, publishing: Gate, store: Path
) -> None:
    """It would be taken for covered: a version that begins with its tokens came later than its record."""
    async with open_rig() as rig:
        await rig.read("one", tokens_of(1, 600))
        await publishing.reached()
        asked = asyncio.ensure_future(rig.service.set("one", sampling=SAMPLED))
        await rig.read("two", tokens_of(2, 20))
        assert not asked.done()
        publishing.open()
        await asked
        assert rows(rig, "one")[0].token_count == 600
        killed, had = as_killed(store), await rig.fingerprint("one")
    async with open_rig(store=killed) as rig:
        woken = await rig.wake("one")
        assert (woken.provenance.recomputed.tokens < 256, rig.live("one").sampling) == (True, SAMPLED)
        assert await rig.fingerprint("one") == had


async def test_a_sleep_beside_it_makes_the_later_version(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the newest version would have tokens to compute again, and the session would stand behind another one."""
    saying = hold_calls(monkeypatch, writing_behind, "with_more_blocks")
    await rig.read("one", tokens_of(1, 600))
    await saying.reached()
    asked = asyncio.ensure_future(rig.sleep("one"))
    await rig.read("two", tokens_of(2, 20))
    await rig.sleep("two")
    assert not asked.done()
    saying.open()
    receipt = await asked
    newest = rows(rig, "one")[-1]
    assert (receipt.version, newest.version, newest.unread_tokens) == (2, 2, 0)


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("short_calls", "never")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["reading", "writing", "writing beside another"])
async def test_what_was_acknowledged_is_written_in_the_midst_of_the_next_turn(
    open_kind: Any, store: Path, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With half a turn in its caches, and with its state in a batch or a round."""
    async with open_kind(kind) as rig:
        await rig.read("one", tokens_of(1, 600), sampling=SAMPLED)
        await rig.read("two", tokens_of(2, 30))
        had = await rig.fingerprint("one")
        names = ("one", "two")[: 1 + (way == "writing beside another")]
        turns = (
            [rig.service.append("one", tokens=tokens_of(3, 1200))]
            if way == "reading"
            else [rig.service.generate(name, max_tokens=300) for name in names]
        )
        asked = [asyncio.ensure_future(turn) for turn in turns]
        await until(lambda: len(rig.network.calls) > 16)
        monkeypatch.setattr(writing_behind, "BLOCKS_DUE", 1)
        rig.service._parts.sessions.writing_behind.note(rig.live("one").uri)
        row = await written(rig, "one", 2)
        killed, in_its_midst = as_killed(store), not asked[0].done()
        await asyncio.gather(*asked)
        went_on = await rig.fingerprint("one")
    assert in_its_midst
    assert row.token_count == 600
    async with open_kind(kind, store=killed) as rig:
        assert rig.service._parts.store.disk.opening.turns_replayed == 1, (
            "that of the other session, which has no version"
        )
        assert (await rig.wake("one")).provenance.recomputed.tokens == 600 - row.block_tokens
        assert await rig.fingerprint("one") == had
    async with open_kind(kind, store=store) as rig:
        assert await rig.woken_fingerprint("one") == went_on


@pytest.mark.one_in(1)
@pytest.mark.usefixtures("short_calls")
async def test_an_agent_that_never_rests_has_less_than_two_blocks_and_its_last_turn_to_compute_again(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing_behind, "BLOCKS_DUE", 2)
    monkeypatch.setattr(loop, "REST", 0)
    turns, copies = (700, 200, 40, 500, 20, 260, 30, 30, 30), []
    async with open_rig() as rig:
        await rig.service.create("one")
        live = rig.live("one")
        for turn, count in enumerate(turns):
            await rig.service.append("one", tokens=tokens_of(turn, count))
            copies.append((as_killed(store, str(turn)), count, await rig.fingerprint("one")))
            # The machine may be slow: the next turn begins once what is due is written.
            await until(lambda: written_of(live) + 512 > len(live.state.tokens))
    for killed, count, had in copies:
        async with open_rig(store=killed) as rig:
            assert (await rig.wake("one")).provenance.recomputed.tokens < 512 + count
            assert await rig.fingerprint("one") == had


def written_of(live: Any) -> int:
    return live.durable.block_tokens if live.durable else 0


@pytest.mark.parametrize("way", ["rm", "forget"])
async def test_a_session_that_goes_meanwhile_leaves_nothing(
    rig: Rigged, flushing: Gate, store: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    await rig.read("one", tokens_of(1, 600))
    await flushing.reached()
    if way == "rm":
        await rig.service.delete("one")
        flushing.open()
    else:
        forget, there = rig.service._parts.upkeep.carry_out, []

        async def forgetting(order: Any) -> Any:
            there.append(files(store))
            return await forget(order)

        monkeypatch.setattr(rig.service._parts.upkeep, "carry_out", forgetting)
        asyncio.get_running_loop().call_later(0.1, flushing.open)
        await rig.service.maintain(operation="forget", session="one")
        assert there == [set()], "what was given up would have left bytes behind it"
    await rig.service._parts.sessions.writing_behind.settled()
    assert files(store) == set()
    assert (await rig.service.list_sessions()).sessions == ()


@pytest.mark.parametrize("refusal", [NoSpace("No room."), BudgetExceeded("Used up.")])
async def test_without_room_it_is_tried_again_later_and_nobody_is_refused(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: Exception
) -> None:
    put, tries = PackWriter.finish, 0

    def refuse(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise refusal
        return put(*args)

    monkeypatch.setattr(PackWriter, "finish", refuse)
    async with open_rig() as rig:
        await rig.read("one", tokens_of(1, 600))
        assert (await written(rig, "one", 2)).token_count == 600
    assert caplog.text.count("write behind of torpor://default/one failed") == 2


async def test_a_session_that_fails_keeps_no_other_from_being_written(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "AGAIN_S", 3600.0)
    put = writing_behind._copying

    def fail(engine: Any, writing: Any) -> Any:
        if writing.live.uri.name == "bad":
            raise ZeroDivisionError
        return put(engine, writing)

    monkeypatch.setattr(writing_behind, "_copying", fail)
    async with open_rig() as rig:
        await rig.read("bad", tokens_of(1, 600))
        await rig.read("good", tokens_of(2, 600))
        await written(rig, "good", 2)
        assert rows(rig, "bad") == []


async def test_only_sessions_whose_turns_are_durable_are_written(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await rig.read("scrap", tokens_of(1, 600), durability="none")
        await rig.read("kept", tokens_of(2, 600))
        await written(rig, "kept", 2)
        assert rows(rig, "scrap") == []
    async with open_rig(durability="sleep", store=store.parent / "other") as rig:
        await rig.read("one", tokens_of(1, 600))
        await asyncio.sleep(0.1)
        assert rows(rig, "one") == []


async def test_a_look_is_not_written_and_what_goes_on_from_it_is(rig: Rigged) -> None:
    await rig.asleep("one", tokens_of(1, 300))
    await rig.service.append("one", tokens=tokens_of(2, 400))
    await rig.sleep("one")
    newest = rows(rig, "one")[-1].version
    await rig.wake("one", at_token=290)
    await asyncio.sleep(0.1)
    assert rows(rig, "one")[-1].version == newest
    await rig.service.append("one", tokens=tokens_of(3, 300))
    await until(lambda: rows(rig, "one")[-1].version > newest)
    assert rows(rig, "one")[-1].token_count == 590
    assert newest in [row.version for row in rows(rig, "one")], "it went another way, so it stays"


async def test_it_rests_for_long_behind_each_write(open_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "REST", 1e6)
    async with open_rig() as rig, listening(rig) as heard:
        await rig.read_each(("one", "two"), tokens_of(1, 600))
        await until(lambda: bool(heard.of("blocks_written")))
        await asyncio.sleep(0.1)
        assert len(heard.of("blocks_written")) == 1


async def test_a_session_with_less_is_not_written(open_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing_behind, "BLOCKS_DUE", 2)
    async with open_rig() as rig:
        await rig.read("one", tokens_of(1, 512))
        await rig.read("two", tokens_of(2, 513))
        await written(rig, "two", 2)
        assert rows(rig, "one") == []


@pytest.mark.one_in(1)
@pytest.mark.usefixtures("short_calls")
@pytest.mark.parametrize("kind", ["qwen3", "quantised"])
async def test_a_new_session_takes_over_what_a_killed_one_has_in_blocks(open_kind: Any, store: Path, kind: str) -> None:
    """From the disk, and from memory once it is awake: a stand-in says how its tokens were read."""
    text = tokens_of(1, 1200)
    async with open_kind(kind) as rig:
        await rig.read("one", text)
        await written(rig, "one", 4)
        killed = as_killed(store)
    async with open_kind(kind, store=killed, prefix_reuse="exact") as rig:
        await rig.service._parts.sessions.reuse.learned()
        await rig.service.create("two")
        assert (await rig.service.append("two", tokens=[*text, 7])).cached_tokens >= 1024
        await rig.sleep("two")
        await rig.service.delete("two")
        await rig.wake("one")
        await rig.service.create("three")
        assert (await rig.service.append("three", tokens=[*text, 7])).cached_tokens >= 1024


@pytest.mark.usefixtures("short_calls")
async def test_a_long_session_is_written_part_by_part(open_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing_behind, "_MOST_BYTES", 1)
    async with open_rig() as rig, listening(rig) as heard:
        await rig.read("one", tokens_of(1, 1200))
        await written(rig, "one", 4)
        await until(lambda: len(heard.of("blocks_written")) == 4)
    assert [each["version"] for each in heard.of("blocks_written", "one")] == [1, 2, 3, 4]


@pytest.mark.usefixtures("never")
async def test_the_state_of_a_session_that_is_written_is_as_it_was(rig: Rigged) -> None:
    """Its memory is not copied by the next model call, and its least recent use is told as before."""
    await rig.read("one", tokens_of(1, 600))
    live, had = rig.live("one"), await rig.fingerprint("one")
    used = live.stay.last_used
    await rig.service._parts.sessions.writing_behind._write(live)
    assert rows(rig, "one")[-1].block_tokens >= 512
    assert (await rig.fingerprint("one"), live.stay.last_used, live.dirty) == (had, used, True)
    await rig.service._parts.sessions.writing_behind._write(live)
    assert len(rows(rig, "one")) == 1, "there is nothing more to write"


async def test_an_awake_session_is_written_behind_after_a_strip_that_is_refused(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig() as rig:
        with monkeypatch.context() as patch:
            patch.setattr(writing_behind, "BLOCKS_DUE", 1 << 20)
            await rig.read("s", tokens_of(1, 600))
            with pytest.raises(SessionAwake):
                await rig.service.maintain("strip", session="s")
        rig.service._parts.sessions.writing_behind.note(rig.live("s").uri)
        await written(rig, "s", 2)
