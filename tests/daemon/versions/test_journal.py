"""What was answered is there after any end of the process, though no sleep was asked for."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.sessions.transcripts import message_of
from torpor.daemon.tasks.cancellation import LeftMidway
from torpor.daemon.versions import journal
from torpor.memvid.errors import JournalWaits, NoSpace
from torpor.memvid.folder.journal import Journal
from torpor.memvid.store import Store
from torpor.tests.daemon.session_rig import (
    DEADLINE_S,
    SAMPLED,
    Rigged,
    as_killed,
    broken_at,
    given_up,
    hold_calls,
    lose_state,
    tokens_of,
)

KINDS = ("qwen3", "gemma3_text", "falcon_h1", "quantised")


def await_in_thread(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.001)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
async def test_each_answered_turn_is_there_bit_for_bit_after_a_kill(open_kind: Any, store: Path, kind: str) -> None:
    async with open_kind(kind) as rig:
        await rig.read("new", tokens_of(1, 530), sampling=SAMPLED)
        await rig.asleep("slept", tokens_of(2, 300), sampling=SAMPLED)
        await rig.service.append("slept", tokens=tokens_of(3, 90))
        for name in ("new", "slept"):
            await rig.write(name, 7)
        killed = as_killed(store)
        had = {name: await rig.fingerprint(name) for name in ("new", "slept")}
        went_on = {name: await rig.write(name, 9) for name in had}
    async with open_kind(kind, store=killed) as rig:
        assert rig.service._parts.store.disk.opening.turns_replayed == 2
        for name, was in had.items():
            woken = await rig.wake(name)
            assert woken.token_count == len(was.tokens)
            assert woken.provenance.recomputed is not None
            assert woken.provenance.recomputed.same_logits
            assert woken.look is None
            assert await rig.fingerprint(name) == was
            assert await rig.write(name, 9) == went_on[name], "the sampler goes on where it stood"


@pytest.mark.one_in(1)
@pytest.mark.parametrize("slept", [False, True])
async def test_each_token_of_an_answered_turn_can_be_had_after_a_kill(open_rig: Any, store: Path, slept: bool) -> None:
    """A fork or a wake at a token that only the journal has: the ledger is computed first."""
    async with open_rig() as rig:
        await rig.read("a", tokens_of(1, 300))
        if slept:
            await rig.sleep("a")
        await rig.service.append("a", tokens=tokens_of(2, 60))
        killed = as_killed(store)
        other = Path(shutil.copytree(killed, store.parent / "other"))
    begun = [*tokens_of(1, 300), *tokens_of(2, 60)][:330]
    async with open_rig(store=killed) as rig:
        await rig.service.fork("a", "b", at_token=330)
        await rig.wake("b")
        assert list(rig.live("b").state.tokens) == begun
        assert (await rig.wake("a")).token_count == 360
    async with open_rig(store=other) as rig:
        plan = await rig.service.plan_wake("a", at_token=330)
        restored = 300 if slept else 0
        assert (plan.token_count, plan.restored_tokens, plan.computed_tokens) == (330, restored, 360 - restored)
        assert (await rig.wake("a", at_token=330)).look.newest_tokens == 360
        assert list(rig.live("a").state.tokens) == begun


async def test_a_chat_goes_on_with_its_messages_and_sampling_after_a_kill(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await rig.service.create("talk", system="Be brief.", sampling=SAMPLED)
        await rig.service.chat("talk", message="Who are you?", max_tokens=6)
        await rig.service.set("talk", sampling=Sampling(temperature=0.3))
        killed = as_killed(store)
        before = rig.live("talk").chat
        went_on = await rig.service.chat("talk", message="And I?", max_tokens=6)
    async with open_rig(store=killed) as rig:
        await rig.wake("talk")
        after = rig.live("talk")
        assert (after.sampling.temperature, after.chat) == (0.3, before)
        assert (await rig.service.chat("talk", message="And I?", max_tokens=6)).tokens == went_on.tokens


async def test_without_the_journal_a_kill_costs_what_was_said_since_the_last_sleep(open_rig: Any, store: Path) -> None:
    async with open_rig(durability="sleep") as rig:
        await rig.asleep("one", tokens_of(1, 300))
        await rig.write("one", 5)
        killed = as_killed(store)
    async with open_rig(store=killed) as rig:
        assert (await rig.wake("one")).token_count == 300


async def test_a_session_to_throw_away_has_no_turn_in_the_journal_and_sleeps_when_asked_to(
    open_rig: Any, store: Path
) -> None:
    async with open_rig() as rig:
        await rig.read("scrap", tokens_of(1, 300), durability="none")
        await rig.write("scrap", 5)
        assert not (store / "journal").exists()
        assert (await rig.service.show("scrap")).info.durability == "none"
        assert (await rig.sleep("scrap")).token_count == 305
        await rig.service.fork("scrap", name="copy")
        for name in ("scrap", "copy"):
            await rig.write(name, 2)
            assert rig.live(name).durability == "none", "the sleep and the fork keep it"
        killed = as_killed(store)
    async with open_rig(store=killed) as rig:
        for name in ("scrap", "copy"):
            assert (await rig.wake(name)).token_count == 305


async def test_a_store_of_before_gets_a_journal_with_its_first_turn(open_rig: Any, store: Path) -> None:
    async with open_rig(durability="sleep") as rig:
        await rig.asleep("one", tokens_of(1, 300))
        assert not (store / "journal").exists()
    async with open_rig() as rig:
        await rig.write("one", 5)
        killed, had = as_killed(store), await rig.fingerprint("one")
    async with open_rig(store=killed) as rig:
        assert await rig.woken_fingerprint("one") == had


async def test_a_turn_that_is_cancelled_while_it_is_flushed_is_answered(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.read("one", tokens_of(1, 40))
    flushing = hold_calls(monkeypatch, Store, "acknowledge")
    asked = asyncio.ensure_future(rig.service.append("one", tokens=[1, 2]))
    await flushing.reached()
    asked.cancel()
    await asyncio.sleep(0)
    flushing.open()
    assert (await asked).token_count == 42


async def test_an_answer_waits_for_its_flush(
    open_rig: Any, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig() as rig:
        await rig.read("one", tokens_of(1, 40))
        flushing = hold_calls(monkeypatch, Store, "acknowledge")
        asked = asyncio.ensure_future(rig.service.append("one", tokens=[1, 2]))
        await flushing.reached()
        try:
            assert len(rig.live("one").state.tokens) == 42, "the turn is done"
            for _ in range(50):
                await asyncio.sleep(0)
            assert not asked.done()
            before = shutil.copytree(as_killed(store), tmp_path / "before")
        finally:
            flushing.open()
        await asked
        shutil.rmtree(store.parent / "killed")
        killed = as_killed(store)
    async with open_rig(store=before) as rig:
        assert (await rig.wake("one")).token_count == 40
    async with open_rig(store=killed) as rig:
        assert (await rig.wake("one")).token_count == 42


async def test_what_stays_of_a_cancelled_answer_is_there_after_a_kill(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await rig.read("one", tokens_of(1, 40))
        with pytest.raises(LeftMidway) as left:
            await given_up(rig, rig.write("one", 20), 4)
        killed, had = as_killed(store), await rig.fingerprint("one")
        assert len(had.tokens) == 40 + len(left.value.tokens) > 40
    async with open_rig(store=killed) as rig:
        assert await rig.woken_fingerprint("one") == had


async def test_a_full_disk_refuses_a_turn_before_it_changes_the_session(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.read("one", tokens_of(1, 40))
    before = await rig.fingerprint("one")

    def refuse(*_: Any) -> None:
        raise NoSpace("No room.")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "reserve", refuse)
        for asked in (rig.service.append("one", tokens=[1, 2]), rig.service.generate("one", max_tokens=3)):
            with pytest.raises(NoSpace):
                await asked
    assert await rig.fingerprint("one") == before
    await rig.write("one", 2)


@pytest.mark.one_in(1)
async def test_the_room_that_is_taken_for_a_turn_holds_its_record(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk refuses a turn and not its answer: what a session says of itself is counted before."""
    reserve, append, room = Journal.reserve, Journal.append, dict[Any, int]()

    def note(journal: Journal, uri: Any, count: int, ask: Any) -> None:
        room[uri] = count
        reserve(journal, uri, count, ask)

    def compare(journal: Journal, records: Any, *more: Any) -> None:
        for record in records:
            assert len(record.encode()) <= room.pop(record.uri), record.uri
        append(journal, records, *more)

    monkeypatch.setattr(Journal, "reserve", note)
    monkeypatch.setattr(Journal, "append", compare)
    monkeypatch.setattr(journal, "_BYTES_ELSE", 2048)  # what else there is would hide what is not counted
    async with open_rig() as rig:
        await rig.read("labelled", [1, 2], labels=["é" * 100 + str(number) for number in range(64)])
        said = [message_of("system", "Be brief. " * 100), *(message_of("user", str(number)) for number in range(30))]
        for _ in range(2):
            answer = await rig.service.converse("told", messages=said, max_tokens=4)
            said += [message_of("assistant", answer.text), message_of("user", "And now?")]
            await rig.sleep("told")
        await rig.asleep("back", tokens_of(1, 1900))
        await rig.wake("back", at_token=1)
        await rig.service.append("back", tokens=tokens_of(2, 1800))
        assert not room


async def test_a_session_that_found_no_room_at_the_start_is_told_and_comes_back(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a session that never slept, a start on a full disk has turns in the journal alone."""
    async with open_rig() as rig:
        await rig.read("new", tokens_of(1, 40))
        killed = as_killed(store)

    def refuse(*_: object) -> None:
        raise NoSpace("No room.")

    monkeypatch.setattr("torpor.memvid.recovery.replaying.write_version", refuse)
    async with open_rig(store=killed) as rig:
        with pytest.raises(JournalWaits, match="No room"):
            await rig.service.show("new")
        with pytest.raises(NoSpace):
            await rig.wake("new")
        monkeypatch.undo()
        await rig.wake("new")
        assert len(rig.live("new").state.tokens) == 40


async def test_room_that_a_failed_request_leaves_is_given_back(rig: Rigged, store: Path) -> None:
    await rig.read("one", tokens_of(1, 40))
    for number in range(3):
        await broken_at(rig, 1, rig.service.append(f"s{number}", tokens=[1, 2], create=True))
    await rig.service.delete("one")
    assert list((store / "journal").iterdir()) == [], "nothing in it counts, and nobody waits to write"


async def test_a_turn_behind_a_version_that_was_pruned_survives(open_rig: Any, store: Path) -> None:
    """The session was woken at an earlier version, and that one went while it was awake."""
    async with open_rig() as rig:
        await rig.asleep("one", tokens_of(1, 600))
        await rig.wake("one", at_token=100)
        await rig.write("one", 5)
        await rig.sleep("one")
        await rig.wake("one", version=1)
        pruned = await rig.service.maintain(operation="prune", session="one", keep_last=1)
        assert [action.version for action in pruned.actions if action.version] == [1]
        await rig.write("one", 7)
        killed, had = as_killed(store), await rig.fingerprint("one")
    async with open_rig(store=killed) as rig:
        woken = await rig.wake("one")
        assert woken.provenance.recomputed.same_logits
        assert await rig.fingerprint("one") == had


async def strip_and_wake(rig: Rigged) -> None:
    """A session is awake at a stripped version, whose blocks another one held until now."""
    await rig.read("one", tokens_of(1, 600), sampling=SAMPLED)
    await rig.sleep("one")
    await rig.service.fork("one", name="other")
    await rig.service.maintain("strip", session="one")
    assert (await rig.wake("one")).tokens_prefilled == 0
    await rig.service.delete("other")
    await rig.service.maintain("repack")


async def test_a_turn_behind_a_version_that_was_stripped_survives(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await strip_and_wake(rig)
        await rig.write("one", 7)
        killed, had = as_killed(store), await rig.fingerprint("one")
    async with open_rig(store=killed) as rig:
        assert rig.service._parts.store.disk.verify(deep=True).ok
        woken = await rig.wake("one")
        assert woken.provenance.recomputed.same_logits
        assert await rig.fingerprint("one") == had


async def test_room_for_a_turn_behind_a_stripped_version_is_for_the_whole_ledger(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, taken = Journal.reserve, list[int]()

    def note(journal: Journal, uri: Any, count: int, ask: Any) -> None:
        taken.append(count)
        reserve(journal, uri, count, ask)

    await strip_and_wake(rig)
    monkeypatch.setattr(Journal, "reserve", note)
    await rig.service.append("one", tokens=[1, 2])
    assert taken[0] > 602 * journal._BYTES_A_TOKEN + journal._BYTES_ELSE


@pytest.mark.one_in(1)
@pytest.mark.parametrize("kind", ["plain", "gemma3_text", "lfm2"])
async def test_a_turn_behind_keys_and_values_that_are_gone_is_there_bit_for_bit(
    open_kind: Any, store: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As an earlier version acknowledged one; or damage took them."""
    monkeypatch.setattr(Store, "_require_kept", lambda *_, **__: None)
    async with open_kind(kind) as rig:
        await strip_and_wake(rig)
        await rig.write("one", 7)
        killed, had = as_killed(store), await rig.fingerprint("one")
        went_on = await rig.write("one", 9)
    async with open_kind(kind, store=killed) as rig:
        assert rig.service._parts.store.disk.opening.turns_replayed == 1
        woken = await rig.wake("one")
        assert woken.provenance.recomputed.same_logits
        assert await rig.fingerprint("one") == had
        assert await rig.write("one", 9) == went_on


async def test_turns_that_wait_together_are_flushed_once(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    acknowledge = Store.acknowledge
    for number in range(8):
        await rig.read(f"s{number}", tokens_of(number, 40))

    def counted(store: Store, records: Any) -> None:
        batches.append(len(records))
        if len(batches) == 1:
            await_in_thread(lambda: len(rig.service._parts.store.journal._waiting) + batches[0] == 8)
        acknowledge(store, records)

    monkeypatch.setattr(Store, "acknowledge", counted)
    await asyncio.gather(*(rig.write(f"s{number}", 6) for number in range(8)))
    assert sum(batches) == 8
    assert len(batches) <= 2


async def write_together(rig: Any, monkeypatch: pytest.MonkeyPatch, counts: dict[str, int]) -> list[Any]:
    """Write in sessions so that one flush waits for the turns of all. Gives what each was told."""
    monkeypatch.setattr(journal, "_MANY", 1)
    monkeypatch.setattr(journal, "_WAIT_SHARE", 1e-9)
    monkeypatch.setattr(journal, "_MOST_WAIT_S", 3600.0)
    rig.network.reset()
    gate = rig.network.hold_at(1)
    asked = [asyncio.ensure_future(rig.write(name, count)) for name, count in counts.items()]
    await gate.reached()
    while len(rig.service._parts.store.journal._begun) < len(counts):
        await asyncio.sleep(0)
    gate.open()
    return await asyncio.gather(*asked, return_exceptions=True)


async def test_where_many_turns_are_under_way_a_flush_waits_for_the_others(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    acknowledge = Store.acknowledge

    def counted(store: Store, records: Any) -> None:
        batches.append(len(records))
        acknowledge(store, records)

    names = [f"s{number}" for number in range(6)]
    await rig.read_own(names, 40)
    monkeypatch.setattr(Store, "acknowledge", counted)
    await write_together(rig, monkeypatch, {name: 3 + number for number, name in enumerate(names)})
    assert batches == [6]


async def test_a_turn_that_cannot_be_written_refuses_no_other(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    acknowledge, batches = Store.acknowledge, list[list[str]]()

    def refuse_one(store: Store, records: Any) -> None:
        batches.append([record.uri.name for record in records])
        if "s1" in batches[-1]:
            raise NoSpace("No room.")
        acknowledge(store, records)

    for number in range(3):
        await rig.read(f"s{number}", tokens_of(number, 40))
    monkeypatch.setattr(Store, "acknowledge", refuse_one)
    told = await write_together(rig, monkeypatch, {"s1": 3, "s0": 4, "s2": 5})
    assert sorted(batches[0]) == ["s0", "s1", "s2"]
    assert [type(one) is NoSpace for one in told] == [True, False, False]
    monkeypatch.undo()
    assert len(rig.live("s1").state.tokens) == 43, "it is in memory, and the next answer makes it durable"
    await rig.write("s1", 1)


async def _fork(rig: Any) -> int:
    return int((await rig.service.fork("one", name="copy")).token_count)


async def _warm(rig: Any) -> int:
    (warmed,) = (await rig.service.warm(sessions=["one"])).sessions
    assert warmed.left is None
    return len(rig.live("one").state.tokens)


async def _append(rig: Any) -> int:
    return int((await rig.service.append("one", tokens=[5], create=True)).token_count) - 1


ASKED = {
    "fork": _fork,
    "warm": _warm,
    "append": _append,
    "sleep": lambda rig: _count(rig.sleep("one")),
    "wake": lambda rig: _count(rig.wake("one")),
    "show": lambda rig: _count_shown(rig),
}


async def _count(asked: Any) -> int:
    return int((await asked).token_count)


async def _count_shown(rig: Any) -> int:
    return int((await rig.service.show("one")).info.token_count)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("asked", ASKED)
async def test_a_session_that_lost_its_state_is_there_with_its_turns_whatever_is_asked(rig: Rigged, asked: str) -> None:
    await rig.read("one", tokens_of(1, 40))
    await lose_state(rig, "one")
    assert await ASKED[asked](rig) == 40


@pytest.mark.one_in(1)
@pytest.mark.parametrize("asked", [asked for asked in ASKED if asked != "show"])
async def test_turns_of_a_lost_state_that_became_no_version_at_once_become_one_at_the_next_use(
    rig: Rigged, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise NoSpace("No room.")

    await rig.asleep("one", tokens_of(1, 30))
    await rig.service.append("one", tokens=tokens_of(2, 10))
    with monkeypatch.context() as patch:
        patch.setattr(Store, "replay_turns", refuse)
        await lose_state(rig, "one")
    assert await ASKED[asked](rig) == 40


async def test_a_request_that_may_make_a_session_goes_on_with_the_turns_of_one_that_lost_its_state(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise NoSpace("No room.")

    await rig.read("one", tokens_of(1, 40))
    with monkeypatch.context() as patch:
        patch.setattr(Store, "replay_turns", refuse)
        await lose_state(rig, "one")
    assert await _append(rig) == 40


async def test_a_deleted_session_that_never_slept_stays_deleted(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await rig.read("one", tokens_of(1, 40))
        await rig.service.delete("one")
        killed = as_killed(store)
    async with open_rig(store=killed) as rig:
        assert list(await rig.service.list_sessions()) == []
