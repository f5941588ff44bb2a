"""A stop that has no time, or no room, for a session keeps all that was read and said in it, and nothing half."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.errors import MemoryBudgetExceeded, StopDeadline
from torpor.daemon.sessions.sessions import Session
from torpor.daemon.sessions.transcripts import TextMap, Turn, message_of
from torpor.daemon.sessions.unprocessed_tail import Unread
from torpor.daemon.tasks.door import LastSleep
from torpor.memvid.errors import NoSpace
from torpor.memvid.exchange.incoming import hand_over
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.snapshot.errors import MalformedSnapshot, NoSuchPosition
from torpor.snapshot.passes import Passes
from torpor.snapshot.state import token_array
from torpor.tests.daemon.damage_rig import damage, mend
from torpor.tests.daemon.session_rig import (
    SAMPLED,
    UNREADABLE,
    Gate,
    Rigged,
    Writing,
    broken_at,
    cancelled,
    given_up,
    listening,
    make_unreadable,
    manifests,
    packs,
    tokens_of,
    until,
)

KINDS = ("qwen3", "gemma3_text", "falcon_h1")


def uri(name: str) -> str:
    return f"torpor://default/{name}"


async def three(rig: Rigged) -> None:
    """`new` has never slept; `more` has gone on since its sleep; `same` has not."""
    await rig.read("new", tokens_of(1, 530), sampling=SAMPLED)
    await rig.read("more", tokens_of(2, 300), sampling=SAMPLED)
    await rig.read("same", tokens_of(3, 40))
    for name in ("more", "same"):
        await rig.sleep_and_wake(name)
    await rig.service.append("more", tokens=tokens_of(4, 290))
    await rig.write("more", 7)
    await rig.write("new", 5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_stop_has_no_time_for_goes_on_bit_for_bit_from_its_ledger(open_kind: Any, kind: str) -> None:
    async with open_kind(kind, stop_within=0) as rig:
        await three(rig)
        had = {name: await rig.fingerprint(name) for name in ("new", "more")}
        report = await rig.service.close()
        assert (report.slept, report.failed, report.empty) == ((), {}, ())
        assert sorted(report.ledgers) == [uri("more"), uri("new")]
        assert all(why.startswith("stop_deadline: ") for why in report.ledgers.values())
    async with open_kind(kind) as rig:
        listed = {info.session: info for info in await rig.service.list_sessions()}
        counts = {name: len(was.tokens) for name, was in had.items()} | {"same": 40}
        assert {name: listed[uri(name)].token_count for name in counts} == counts
        stored = {name: info.token_count - info.unread_tokens for name, info in listed.items()}
        assert stored == {uri("new"): 0, uri("more"): 300, uri("same"): 40}
        for name, was in had.items():
            woken = await rig.wake(name)
            assert (woken.token_count, woken.tokens_prefilled) == (len(was.tokens), len(was.tokens) - stored[uri(name)])
            again = woken.provenance.recomputed
            assert again is not None
            assert (again.start, again.same_logits) == (stored[uri(name)], True)
            assert not again.damaged, "nobody is told of damage where there was none"
            assert await rig.fingerprint(name) == was
            was_written = await rig.write(name, 12)
            assert len(was_written[0]) == 12
            slept = await rig.sleep(name)
            assert slept.token_count == len(was.tokens) + 12
    async with open_kind(kind) as rig:
        for name in had:
            assert (await rig.wake(name)).tokens_prefilled == 0, "it is whole again"


async def test_the_deepest_are_written_first_then_the_newest(open_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_rig(stop_within=3600) as rig:
        await rig.read("deep", tokens_of(1, 600))
        await rig.read("old", tokens_of(2, 100))
        await rig.read("new", tokens_of(3, 100))
        await rig.woken("kept", tokens_of(4, 900))
        await rig.service.append("kept", tokens=tokens_of(5, 50))
        writing = Writing(monkeypatch, "nobody")
        report = await rig.service.close()
        assert writing.begun == ["deep", "new", "old", "kept"]
        assert report.slept == tuple(map(uri, writing.begun))


@pytest.mark.one_in(2)
async def test_a_sleep_that_takes_too_long_is_broken_off_and_leaves_nothing_half_written(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def look(_order: LastSleep) -> None:
        nonlocal looks
        looks += 1
        if looks > 2:
            raise StopDeadline("no more time")

    async with open_rig() as rig:
        await rig.read("deep", tokens_of(1, 1000))
        await rig.read("next", tokens_of(2, 300))
        monkeypatch.setattr(LastSleep, "require_time", look)
        async with listening(rig) as heard:
            preparing = await rig.service.prepare_close()
        assert sorted(preparing.ledgers) == [uri("deep"), uri("next")]
        told = heard.of("ledger_kept", "deep")
        assert told == [
            {
                "version": 1,
                "tokens": 1000,
                "unread_tokens": 1000,
                "bytes_written": told[0]["bytes_written"],
                "code": "stop_deadline",
            }
        ]
        assert told[0]["bytes_written"] < 10_000
        assert heard.of("sleep_failed", "deep")[0]["code"] == "stop_deadline"
        report = await rig.service.close()
        assert report.ledgers == preparing.ledgers
    assert not [path.name for path in store.rglob("*") if path.suffix in (".tmp", ".part")]
    async with open_rig() as rig:
        assert {each.version for each in await rig.service.list_sessions()} == {1}, "no ledger was kept twice"
        await rig.wake("deep")
        assert len(rig.live("deep").state.tokens) == 1000


def refuse_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on there is room for small files only."""
    put = Store.write_bundle

    def write(store: Store, draft: Any) -> Any:
        if list(draft.blocks):
            raise NoSpace("the disk is full")
        return put(store, dataclasses.replace(draft, blocks=()))

    monkeypatch.setattr(Store, "write_bundle", write)


async def test_a_stop_that_is_asked_for_is_refused_before_it_gives_keys_and_values_up(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig() as rig:
        await rig.read("a", tokens_of(1, 300))
        refuse_blocks(monkeypatch)
        report = await rig.service.prepare_close()
        assert (list(report.failed), report.ledgers) == ([uri("a")], {})
        await rig.write("a", 3)
        report = await rig.service.close()
        assert (report.failed, list(report.ledgers)) == ({}, [uri("a")])
        assert report.ledgers[uri("a")].startswith("no_space: ")
    monkeypatch.undo()
    async with open_rig() as rig:
        await rig.wake("a")
        assert len(rig.live("a").state.tokens) == 303


async def test_where_not_even_a_ledger_can_be_kept_it_is_told_and_the_same_reason_once(
    rig: Rigged, full_disk: Any
) -> None:
    await rig.read("a", tokens_of(1, 300))
    full_disk()
    report = await rig.service.close()
    assert report.ledgers == {}
    assert report.failed[uri("a")].count("The disk is full") == 1
    assert report.failed[uri("a")].endswith("Not even its ledger could be kept, for the same reason.")


async def test_a_ledger_relies_on_no_block_that_is_damaged(open_rig: Any, store: Path) -> None:
    async with open_rig(stop_within=0) as rig:
        await rig.woken("a", tokens_of(1, 300))
        await rig.write("a", 4)
        had = await rig.fingerprint("a")
        (pack,) = packs(store)
        pack.write_bytes(pack.read_bytes()[:64])
        assert list((await rig.service.close()).ledgers) == [uri("a")]
    async with open_rig() as rig:
        assert (await rig.wake("a")).tokens_prefilled == 304
        assert await rig.fingerprint("a") == had


@pytest.mark.one_in(2)
@pytest.mark.parametrize("gone", ["pruned", "manifest", "pack"])
async def test_a_ledger_is_kept_whatever_became_of_the_version_that_it_would_rest_on(
    open_rig: Any, store: Path, gone: str
) -> None:
    async with open_rig(stop_within=0) as rig:
        await rig.woken("a", tokens_of(1, 300))
        if gone == "pruned":
            await rig.write("a", 4)
            await rig.sleep("a")
            await rig.wake("a", 1)
        await rig.write("a", 9)
        had = ledger(rig, "a")
        if gone == "pruned":
            await rig.service.maintain(operation="prune", session="a", keep_last=1)
        else:
            (manifests(store) if gone == "manifest" else packs(store))[0].unlink()
        report = await rig.service.close()
        assert (list(report.ledgers), report.failed) == ([uri("a")], {})
    async with open_rig() as rig:
        await rig.wake("a")
        assert ledger(rig, "a") == had


@pytest.mark.one_in(5)
@pytest.mark.parametrize("within", [math.inf, 0.0])
@pytest.mark.parametrize("how", UNREADABLE)
async def test_a_stop_needs_no_old_version_to_keep_what_is_in_memory(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch, how: str, within: float
) -> None:
    async with open_rig(stop_within=within) as rig:
        await rig.woken("a", tokens_of(1, 300))
        await rig.write("a", 40)
        had = await rig.fingerprint("a")
        readable = make_unreadable(packs(store)[0], how, monkeypatch)
        report = await rig.service.close()
        assert (report.failed, list(report.ledgers)) == ({}, [] if within else [uri("a")])
    readable()
    async with open_rig() as rig:
        assert await rig.woken_fingerprint("a") == had


async def test_a_sleep_that_had_begun_before_the_stop_has_no_longer_either(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, put = Gate(), Store.write_bundle

    def held_up(store: Store, draft: Any) -> Any:
        def waiting() -> Any:
            for block in draft.blocks:
                gate.pass_through()
                yield block

        return put(store, dataclasses.replace(draft, blocks=waiting()))

    async with open_rig(stop_within=0) as rig:
        await rig.read("a", tokens_of(1, 600))
        monkeypatch.setattr(Store, "write_bundle", held_up)
        sleeping = asyncio.ensure_future(rig.sleep("a"))
        await gate.reached()
        closing = asyncio.ensure_future(rig.service.close())
        await until(lambda: rig.service._parts.door.stopping is not None)
        gate.open()
        assert list((await closing).ledgers) == [uri("a")]
        with pytest.raises(StopDeadline):
            await sleeping


async def test_a_daemon_that_goes_on_after_a_refused_stop_has_time_for_its_sleeps(
    open_rig: Any, full_disk: Any
) -> None:
    async with open_rig(stop_within=0) as rig:
        await rig.read("a", tokens_of(1, 40))
        disk = full_disk()
        assert list((await rig.service.prepare_close()).failed) == [uri("a")]
        disk.free()
        assert (await rig.sleep("a")).token_count == 40


@pytest.mark.one_in(2)
@pytest.mark.parametrize("slept", [False, True])
async def test_stops_that_are_refused_again_and_again_write_each_ledger_once_until_something_happens(
    open_rig: Any, full_disk: Any, slept: bool
) -> None:
    async with open_rig(stop_within=0) as rig, listening(rig) as heard:
        await rig.read("a", tokens_of(1, 300), sampling=SAMPLED)
        if slept:
            await rig.sleep_and_wake("a")
            await rig.write("a", 3)
        await rig.read("full", tokens_of(2, 40))
        full_disk("full")
        for _ in range(3):
            report = await rig.service.prepare_close()
            assert (list(report.ledgers), list(report.failed)) == ([uri("a")], [uri("full")])
        assert len(heard.of("ledger_kept", "a")) == 1
        await rig.write("a", 1)
        for _ in range(2):
            assert list((await rig.service.prepare_close()).ledgers) == [uri("a")]
        assert len(heard.of("ledger_kept", "a")) == 2
        had = await rig.fingerprint("a")
        await rig.service.close()
        assert len(heard.of("ledger_kept", "a")) == 2
    async with open_rig() as rig:
        assert await rig.woken_fingerprint("a") == had


async def test_a_session_that_went_back_is_not_taken_for_what_a_new_one_would_read(open_rig: Any) -> None:
    """Its first tokens were read in other calls, and its ledger alone does not say in which: other bits are no hit."""
    first = tokens_of(1, 600)
    async with open_rig(stop_within=0, prefix_reuse="exact") as rig:
        await rig.read("a", first[:40])
        await rig.service.append("a", tokens=first[40:])
        await rig.sleep("a")
        await rig.wake("a", at_token=300)
        await rig.service.append("a", tokens=tokens_of(2, 40))
        assert list((await rig.service.close()).ledgers) == [uri("a")]
    async with open_rig(prefix_reuse="exact") as rig:
        await rig.service._parts.sessions.reuse.learned()
        assert await cached(rig, "asleep", first[:290]) == 0
        await rig.wake("a")
        assert await cached(rig, "awake", first[:290]) == 0
        await rig.sleep("a")
        assert await cached(rig, "whole-again", first[:290]) == 0


async def cached(rig: Rigged, name: str, tokens: list[int]) -> int:
    """How much a new session takes over of what others have read."""
    await rig.service.create(name)
    appended = await rig.service.append(name, tokens=tokens)
    await rig.service.delete(name)
    return int(appended.cached_tokens)


async def test_a_session_that_goes_back_behind_its_sleep_keeps_the_ledger_that_it_has(open_rig: Any) -> None:
    async with open_rig(stop_within=0) as rig:
        await rig.asleep("a", tokens_of(1, 600))
        await rig.wake("a", at_token=300)
        await rig.service.append("a", tokens=tokens_of(2, 40))
        had = list(rig.live("a").state.tokens)
        await rig.service.close()
    async with open_rig() as rig:
        assert [(info.token_count, info.unread_tokens) for info in await rig.service.list_sessions()] == [(340, 84)]
        await rig.wake("a")
        assert list(rig.live("a").state.tokens) == had
        await rig.service.fork("a@1", name="before")
        assert (await rig.wake("before")).token_count == 600, "the version that it went back from is as it was"


async def test_a_ledger_is_read_before_whatever_is_asked_of_its_session(open_rig: Any) -> None:
    async with open_rig(stop_within=0, endless=False) as rig:
        await rig.read("a", tokens_of(1, 400))
        had = list(rig.live("a").state.tokens)
        await rig.service.close()
    async with open_rig(endless=False) as rig:
        added = await rig.service.append("a", tokens=[7])
        assert (added.token_count, added.prefilled_tokens) == (401, 1)
        assert added.woken is not None
        assert (added.woken.tokens_prefilled, added.woken.token_count) == (400, 400)
        assert list(rig.live("a").state.tokens) == [*had, 7]


async def test_a_reading_that_fails_or_is_given_up_leaves_the_ledger_asleep(open_rig: Any) -> None:
    async with open_rig(stop_within=0) as rig:
        await rig.read("a", tokens_of(1, 400))
        await rig.service.close()
    async with open_rig() as rig:
        await broken_at(rig, 1, rig.wake("a"))
        assert not rig.is_awake("a")
        rig.network.reset()
        with pytest.raises(asyncio.CancelledError):
            await given_up(rig, rig.wake("a"))
        assert not rig.is_awake("a")
        rig.network.reset()
        assert (await rig.wake("a")).token_count == 400


@pytest.mark.one_in(2)
@pytest.mark.parametrize("verb", ["wake", "append"])
async def test_a_session_whose_wake_is_given_up_before_its_ledger_is_read_does_not_go_on_without_it(
    open_rig: Any, verb: str
) -> None:
    tokens = await a_ledger(open_rig)
    async with open_rig() as rig:
        asked = rig.wake("a") if verb == "wake" else rig.service.append("a", tokens=[5])
        task = asyncio.ensure_future(asked)
        await asyncio.sleep(0)  # what is in the snapshot comes back first, and that is not stopped
        task.cancel()
        await cancelled(task)
        assert not rig.is_awake("a")
        assert (await rig.wake("a")).token_count == len(tokens)


async def a_ledger(open_rig: Any, held: int = 600, more: int = 40) -> list[int]:
    """The session `a`, of which so many tokens sleep with their state, and so many more as a ledger; all of them."""
    async with open_rig(stop_within=0) as rig:
        if held:
            await rig.woken("a", tokens_of(1, held))
            await rig.service.append("a", tokens=tokens_of(2, more))
        else:
            await rig.read("a", tokens_of(2, more))
        tokens = list(rig.live("a").state.tokens)
        assert list((await rig.service.close()).ledgers) == [uri("a")]
    return tokens


def ledger(rig: Rigged, name: str) -> list[int]:
    return list(rig.live(name).state.tokens)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("held", [600, 0])
async def test_a_fork_of_a_ledger_has_all_of_it_too(open_rig: Any, held: int) -> None:
    had = await a_ledger(open_rig, held)
    async with open_rig() as rig:
        made = await rig.service.fork("a", name="b")
        assert (made.token_count, made.forked_from.tokens) == (len(had), len(had))
        await rig.service.delete("a")
        assert (await rig.wake("b")).token_count == len(had)
        assert ledger(rig, "b") == had


@pytest.mark.one_in(2)
@pytest.mark.parametrize("awake", [False, True])
async def test_a_fork_at_the_end_of_the_state_has_nothing_of_the_ledger_behind_it(open_rig: Any, awake: bool) -> None:
    had = await a_ledger(open_rig)
    async with open_rig() as rig:
        if awake:
            await rig.wake("a", at_token=600)
        made = await rig.service.fork("a", name="b", at_token=None if awake else 600)
        assert (made.token_count, made.forked_from.tokens) == (600, 600)
        await rig.wake("b")
        assert ledger(rig, "b") == had[:600]
        for at in (0, 641):
            with pytest.raises(NoSuchPosition, match=f"no position {at} in it; give one from 1 to 600"):
                await rig.service.fork("a", name="c", at_token=at)
        if awake:  # at a look no version is computed
            with pytest.raises(NoSuchPosition, match="ledger alone"):
                await rig.service.fork("a", name="c", at_token=601)


async def test_a_session_that_is_asked_for_at_the_end_of_its_state_stays_there(open_rig: Any) -> None:
    await a_ledger(open_rig)
    async with open_rig() as rig:
        assert (await rig.wake("a", at_token=600)).token_count == 600
        assert rig.live("a").is_mere_look, "no version holds just that"
        slept = await rig.sleep("a")
        assert (slept.token_count, slept.looked_at) == (640, 600), "what the next wake gives"
        assert (await rig.wake("a")).token_count == 640
        await rig.sleep("a")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("at", [None, 300])
async def test_a_system_text_that_was_said_in_a_ledger_is_said_again_only_where_that_is_cut_off(
    open_rig: Any, at: int | None
) -> None:
    async with open_rig(stop_within=0) as rig:
        await rig.service.create("s", system="Be brief.")
        await rig.service.append("s", tokens=tokens_of(1, 300))
        await rig.sleep("s")
        await rig.service.chat("s", message="hello", max_tokens=3)
        await rig.service.close()
    async with open_rig() as rig:
        await rig.wake("s", at_token=at)
        await rig.service.chat("s", message="other", max_tokens=3)
        behind = rig.model.decode(rig.live("s").state.tokens[300:])
        assert (behind.count("Be brief."), "hello" in behind) == (1, at is None)


async def test_what_waits_for_memory_puts_nothing_between_a_state_and_its_ledger(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    had = await a_ledger(open_rig)
    async with open_rig() as rig:
        await rig.wake("a", at_token=600)
        memory = rig.service._parts.models.memory
        reserve, calls = memory.reserve, []

        async def once(claim: Any, wanted: int, **options: Any) -> bool:
            calls.append(wanted)
            return len(calls) > 1 and await reserve(claim, wanted, **options)

        monkeypatch.setattr(memory, "reserve", once)
        await rig.service.append("a", tokens=[7, 8])
        assert len(calls) > 1
        assert ledger(rig, "a") == [*had[:600], 7, 8]
        await rig.service.append("a", tokens=[9])
        assert ledger(rig, "a") == [*had[:600], 7, 8, 9]


@pytest.mark.one_in(2)
async def test_what_damage_took_before_a_ledger_is_told_as_damaged(open_rig: Any, store: Path) -> None:
    async with open_rig(stop_within=0) as rig:
        await rig.asleep("a", tokens_of(1, 1300))
        await rig.wake("a", at_token=600)
        await rig.service.append("a", tokens=tokens_of(9, 40))
    async with open_rig() as rig:
        assert (await rig.wake("a")).provenance.recomputed.damaged is False, "a stop had no time for it"
        rig.service._parts.sessions.residency.awake.drop(SessionUri("default", "a"))
        await asyncio.to_thread(damage, store, "a", span=1)
        await mend(rig)
        told = (await rig.wake("a")).provenance.recomputed
        assert (told.start, told.tokens, told.damaged) == (256, 384, True)


async def test_a_key_that_was_drawn_anew_behind_the_last_token_is_kept(open_rig: Any) -> None:
    async with open_rig(stop_within=0) as rig:
        await rig.woken("a", tokens_of(1, 300), sampling=SAMPLED)
        live = rig.live("a")
        await rig.service._parts.sessions.exchanges.change_sampling(live, Sampling(seed=77))
        had = await rig.fingerprint("a")
        assert list((await rig.service.close()).ledgers) == [uri("a")]
    async with open_rig() as rig:
        woken = await rig.wake("a")
        assert (woken.tokens_prefilled, woken.provenance.recomputed) == (0, None)
        assert await rig.fingerprint("a") == had
        assert rig.live("a").sampling.seed == 77


async def test_a_wake_that_is_refused_memory_leaves_the_ledger_asleep(open_rig: Any) -> None:
    await a_ledger(open_rig, 0, 900)
    async with open_rig() as rig:
        budget = rig.service._parts.models.memory.info()
        await rig.service._parts.models.memory.resize(budget.weights_bytes + 50_000)
        with pytest.raises(MemoryBudgetExceeded):
            await rig.wake("a")
        assert not rig.is_awake("a")
        assert (await rig.service.prepare_close()).failed == {}


async def test_what_was_read_again_to_the_bit_is_told_once(open_rig: Any) -> None:
    await a_ledger(open_rig)
    async with open_rig() as rig:
        assert (await rig.wake("a")).provenance.recomputed is not None
        await rig.sleep("a")
        assert (await rig.wake("a")).provenance.recomputed is None


async def test_a_session_that_is_warmed_is_whole(open_rig: Any) -> None:
    had = await a_ledger(open_rig)
    async with open_rig() as rig:
        await rig.service.warm(sessions=["a"])
        assert ledger(rig, "a") == had


def an_unread(**changes: Any) -> dict[str, Any]:
    passes = Passes()
    passes.add(3)
    whole = Unread(10, token_array(b"\1\0\0\0" * 3), passes, b"12345678", "a" * 64, TextMap(), turn_open=True)
    return {**whole.to_map(), **changes}


def test_the_end_of_a_ledger_comes_back_as_it_was_kept() -> None:
    read = Unread.from_map(an_unread())
    assert read is not None
    assert read.to_map() == an_unread()
    assert Unread.from_map(None) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": b""}, {"tokens": b"123"}, {"tokens": [1]}, {"start": -1}, {"start": 2**40}, {"passes": b"\1"},
        {"passes": b"\4\0\0\0\1\0\0\0"}, {"random_key": b""}, {"random_key": b"123"}, {"logits_digest": "a"},
        {"turn_open": 1}, {"more": 1}, {"text_map": {}},
        {"text_map": TextMap((Turn.of(message_of("user", "x"), 14),)).to_map()},
    ],
)  # fmt: skip
def test_what_is_no_end_of_a_ledger_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((ValueError, KeyError)):
        Unread.from_map(an_unread(**changes))


async def test_a_ledger_with_tokens_that_the_model_does_not_know_is_malformed(open_rig: Any) -> None:
    async with open_rig(stop_within=0) as rig:
        await rig.read("a", tokens_of(1, 30))
        await rig.service.close()
    async with open_rig() as rig:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Session, "woken", _with_strange_token(Session.woken))
            with pytest.raises(MalformedSnapshot, match="vocabulary"):
                await rig.wake("a")
        assert not rig.is_awake("a")
        await rig.wake("a")


def _with_strange_token(woken: Any) -> Any:
    def make(*args: Any) -> Session:
        session: Session = woken(*args)
        assert session.unread is not None
        strange = session.unread.tokens[:]
        strange[3] = 2**31
        session.unread = replace(session.unread, tokens=strange)
        return session

    return make


@pytest.mark.one_in(2)
@pytest.mark.parametrize("held", [600, 0])
async def test_an_export_and_its_import_tell_all_of_a_ledger(
    open_rig: Any, store: Path, tmp_path: Path, held: int
) -> None:
    had = await a_ledger(open_rig, held=held)
    file = tmp_path / "a.mvb"
    with Store.open(store, writable=False) as opened:
        assert opened.export_session(SessionUri("default", "a"), None, file).token_count == len(had)
    async with open_rig(store=tmp_path / "other") as rig:
        bundle_id = hand_over(str(tmp_path / "other"), str(file))
        imported = await rig.service.import_bundle(bundle_id=bundle_id)
        assert imported.token_count == len(had)
        again = hand_over(str(tmp_path / "other"), str(file))
        assert (await rig.service.import_bundle(bundle_id=again)).token_count == len(had)
        await rig.wake("a")
        assert ledger(rig, "a") == had
