"""Full blocks of awake sessions are written while nothing uses them, and nobody waits for it or loses by it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.upkeep import writing_behind
from torpor.memvid.errors import BudgetExceeded, NoSpace
from torpor.memvid.format.records import IndexRow
from torpor.memvid.format.writer import BundleWriter
from torpor.memvid.writing import sleeping
from torpor.tests.daemon.session_rig import SAMPLED, Gate, Rigged, as_killed, hold_calls, listening, tokens_of, until

KINDS = ("qwen3", "gemma3_text", "falcon_h1", "quantised")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing_behind, "QUIET_S", 0.02)
    monkeypatch.setattr(writing_behind, "_AGAIN_S", 0.05)
    monkeypatch.setattr(writing_behind, "_REST_BESIDE_REQUESTS", 9)


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing_behind, "QUIET_S", 3600.0)


def rows(rig: Rigged, name: str) -> list[IndexRow]:
    return list(rig.service.store.versions(rig.service.resolve(name)))


async def written(rig: Rigged, name: str, blocks: int) -> IndexRow:
    """The newest version of a session, once that has so many full blocks, and the session stands behind it."""
    live = rig.live(name)
    await until(lambda: live.durable is not None and live.durable.token_count >= 256 * blocks)
    return rows(rig, name)[-1]


def files(store: Path) -> set[str]:
    return {str(each.relative_to(store)) for each in store.rglob("*") if each.suffix in (".mvb", ".mvr", ".tmp")}


@pytest.fixture
def publishing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    yield (gate := hold_calls(monkeypatch, sleeping, "publish"))
    gate.open()


@pytest.fixture
def flushing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    yield (gate := hold_calls(monkeypatch, BundleWriter, "finish"))
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
        assert (row.token_count, row.ledger_tokens) == (557 if kind in ("qwen3", "quantised") else 512, 707)
        at_once, had = as_killed(store, "at once"), await rig.fingerprint("one")
        await rig.service.append("one", tokens=tokens_of(2, 20))
        later, went_on = as_killed(store, "later"), await rig.write("one", 9)
    async with open_kind(kind, store=at_once) as rig:
        woken = await rig.wake("one")
        assert woken.recomputed.same_logits
        assert woken.recomputed.tokens == 707 - row.token_count
        assert await rig.fingerprint("one") == had
    async with open_kind(kind, store=later) as rig:
        assert rig.service.store.opening.turns_replayed == 1
        woken = await rig.wake("one")
        assert (woken.recomputed.same_logits, woken.recomputed.tokens) == (True, 727 - row.token_count)
        assert await rig.write("one", 9) == went_on, "the sampler goes on where it stood"


async def test_a_version_behind_always_ends_in_a_ledger_alone(rig: Rigged) -> None:
    """Else it would be taken for one that somebody has asked for, and stay."""
    await rig.read("one", tokens_of(1, 512))
    assert (await written(rig, "one", 1)).unread_tokens > 0


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
        assert (kept.token_count, kept.unread_tokens, kept.bundle_bytes < 2 * block) == (1200, 0, True)
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


async def test_a_request_waits_for_no_disk_and_what_is_given_up_is_never_published(
    open_rig: Any, flushing: Gate, store: Path
) -> None:
    async with open_rig() as rig:
        await rig.read("one", tokens_of(1, 600))
        await flushing.reached()
        assert (await rig.service.append("one", tokens=[1, 2])).token_count == 602
        killed = as_killed(store)
        await rig.read("two", tokens_of(2, 600))
        await asyncio.sleep(0.1)  # it is due, and would have to wait for what was given up
        assert (await rig.service.append("two", tokens=[1])).token_count == 601
        assert rows(rig, "one") == []
        flushing.open()
        row = await written(rig, "one", 2)
        assert (row.version, row.ledger_tokens) == (1, 602)
        had = await rig.fingerprint("one")
    async with open_rig(store=killed) as rig:
        await rig.wake("one")
        assert await rig.fingerprint("one") == had


async def test_a_request_that_comes_while_the_version_is_published_goes_on_behind_it(
    open_rig: Any, publishing: Gate, store: Path
) -> None:
    async with open_rig() as rig:
        await rig.read("one", tokens_of(1, 600))
        await publishing.reached()
        asked = asyncio.ensure_future(rig.service.append("one", tokens=[1, 2]))
        await asyncio.sleep(0.01)
        assert not asked.done()
        publishing.open()
        assert (await asked).token_count == 602
        assert rows(rig, "one")[0].ledger_tokens == 600
        killed, had = as_killed(store), await rig.fingerprint("one")
    async with open_rig(store=killed) as rig:
        assert (await rig.wake("one")).token_count == 602
        assert await rig.fingerprint("one") == had


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
        forget, there = rig.service.maintenance.carry_out, []

        async def forgetting(order: Any) -> Any:
            there.append(files(store))
            return await forget(order)

        monkeypatch.setattr(rig.service.maintenance, "carry_out", forgetting)
        asyncio.get_running_loop().call_later(0.1, flushing.open)
        await rig.service.maintain(operation="forget", session="one")
        assert there == [set()], "what was given up would have left bytes behind it"
    await rig.service.writing_behind.settled()
    assert files(store) == set()
    assert (await rig.service.list_sessions()).sessions == ()


@pytest.mark.parametrize("refusal", [NoSpace("No room."), BudgetExceeded("Used up.")])
async def test_without_room_it_is_tried_again_later_and_nobody_is_refused(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: Exception
) -> None:
    put, tries = BundleWriter.finish, 0

    def refuse(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise refusal
        return put(*args)

    monkeypatch.setattr(BundleWriter, "finish", refuse)
    async with open_rig() as rig:
        await rig.read("one", tokens_of(1, 600))
        assert (await written(rig, "one", 2)).ledger_tokens == 600
    assert caplog.text.count("were not written behind") == 2


async def test_a_session_that_fails_keeps_no_other_from_being_written(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing_behind, "_AGAIN_S", 3600.0)
    put = writing_behind._copied

    def fail(live: Any, *args: Any) -> Any:
        if live.uri.name == "bad":
            raise writing_behind.TorporError("It holds NaN.")
        return put(live, *args)

    monkeypatch.setattr(writing_behind, "_copied", fail)
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
    assert rows(rig, "one")[-1].ledger_tokens == 590
    assert newest in [row.version for row in rows(rig, "one")], "it went another way, so it stays"


async def test_beside_requests_it_rests_for_long_behind_each_write(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing_behind, "_REST", 0)
    monkeypatch.setattr(writing_behind, "_REST_BESIDE_REQUESTS", 1e6)
    async with open_rig() as rig, listening(rig) as heard:
        with rig.service.bus.request("another", lambda: None):
            for name in ("one", "two"):
                await rig.read(name, tokens_of(1, 600))
            await until(lambda: bool(heard.of("blocks_written")))
            await asyncio.sleep(0.1)
        assert len(heard.of("blocks_written")) == 1


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
    used = live.last_used
    await rig.service.writing_behind._look_at(live.uri)
    assert rows(rig, "one")[-1].token_count >= 512
    assert (await rig.fingerprint("one"), live.last_used, live.dirty) == (had, used, True)
    await rig.service.writing_behind._look_at(live.uri)
    assert len(rows(rig, "one")) == 1, "there is nothing more to write"
