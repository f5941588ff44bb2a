"""One memory budget: what fits is awake, the rest sleeps and comes back by itself, and nobody can tell which."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.session import Look
from torpor.daemon.engine import generation
from torpor.daemon.engine.buffers import CACHED_SHARE
from torpor.daemon.engine.generation import PREFILL_CHUNK_TOKENS
from torpor.daemon.errors import MemoryBudgetExceeded, MemoryBusy, ServiceClosed, SessionExists
from torpor.daemon.memory.memory import DEFAULT_SHARE, default_budget
from torpor.daemon.verbs import forking as forking_verbs
from torpor.memvid.errors import SessionNotFound, StoreIoError
from torpor.memvid.index.index import INDEX_FILE
from torpor.memvid.store import Store
from torpor.snapshot import memory as system_memory
from torpor.snapshot.errors import NotEnoughMemory
from torpor.snapshot.memory import available_bytes
from torpor.tests.daemon.session_rig import (
    HELD,
    LOGITS,
    ROW,
    SAMPLED,
    STEP,
    Rigged,
    broken_at,
    cancelled,
    flip,
    held_at,
    held_up,
    manifest_of,
    manifests,
    most,
    packs,
    tokens_of,
    until,
)

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS


def resident_bytes(rig: Rigged) -> int:
    """What models and sessions take, looked at anew."""
    sessions = tuple(rig.service._parts.sessions.residency.awake.values())
    return rig.model.weights_bytes + sum(session.resident_bytes for session in sessions)


async def info(rig: Rigged) -> Any:
    return (await rig.service.status()).memory


async def all_is_free(rig: Rigged) -> None:
    """Nothing is reserved any more, nobody waits and holds a turn, and what is counted is what is there."""
    await until(lambda: not rig.service._parts.sessions.residency.turns.in_use())
    told = await info(rig)
    assert (told.reserved_bytes, told.waiting) == (0, 0)
    assert told.weights_bytes + told.sessions_bytes == resident_bytes(rig)


# --- accounting


async def test_status_tells_what_the_memory_is_used_for(open_rig: Any, weights: int) -> None:
    async with open_rig(memory_budget=weights + 10 * HELD) as rig:
        told = await info(rig)
        assert (told.budget_bytes, told.weights_bytes, told.sessions_bytes) == (weights + 10 * HELD, weights, 0)
        await rig.read("a", tokens_of(1, 100))
        assert (await info(rig)).sessions_bytes == HELD
        await rig.sleep("a")
        assert (await info(rig)).sessions_bytes == 0
        assert (await info(rig)).slept_by_pressure == 0, "it was told to"


async def test_without_a_word_the_budget_is_a_share_of_what_is_available_and_the_models_come_on_top() -> None:
    before = available_bytes()
    assert default_budget(10**9) - 10**9 == pytest.approx(DEFAULT_SHARE * before, rel=0.1)


async def test_models_that_are_larger_than_the_budget_end_the_start(open_rig: Any, weights: int, store: Path) -> None:
    with pytest.raises(MemoryBudgetExceeded) as refusal:
        async with open_rig(memory_budget=weights - 1):
            pass
    assert (refusal.value.wanted_bytes, refusal.value.budget_bytes) == (weights, weights - 1)
    Store.open(store, writable=True).close()  # the store has been let go


@pytest.mark.parametrize("at_once", [64, 2048], ids=["as on a CPU", "as on a GPU"])
@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "mamba2", "lfm2", "qwen3_next", "quantised"])
async def test_what_is_reserved_for_a_request_is_never_less_than_what_it_takes(
    open_kind: Any, kind: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "PREFILL_CHUNK_TOKENS", at_once)
    async with open_kind(kind) as rig:
        await rig.service.create("a")
        for count in (1, 255, 1, 700, 3):
            live = rig.live("a")
            growth = live.growth_of(at_once)(len(live.state.tokens) + count)
            before = live.resident_bytes
            await rig.service.append("a", tokens=tokens_of(count, count))
            assert live.resident_bytes - before <= growth
        layout, tokens = rig.live("a").model.layout, len(rig.live("a").state.tokens)
        await rig.sleep_and_wake("a")
        assert rig.live("a").resident_bytes <= layout.most_bytes(tokens, at_once)


async def test_a_request_that_fits_into_what_its_session_has_reserves_nothing(open_rig: Any, weights: int) -> None:
    async with open_rig(memory_budget=weights + most(100)) as rig:
        await rig.read("a", tokens_of(1, 100))
        assert rig.live("a").growth_of(PREFILL_CHUNK_TOKENS)(STEP) == 0
        await rig.write("a", STEP - 100)
        with pytest.raises(MemoryBudgetExceeded):
            await rig.write("a", 1)


# --- eviction


async def test_the_least_recently_used_sleeps_and_comes_back_when_it_is_asked_for(open_rig: Any, weights: int) -> None:
    async with open_rig(memory_budget=weights + 2 * HELD + most(50)) as rig:
        await rig.read_own("abc", 50)
        await rig.service.append("a", tokens=[1])
        await rig.read("d", tokens_of(4, 50))
        assert [rig.is_awake(name) for name in "abcd"] == [True, False, True, True]
        assert (await info(rig)).slept_by_pressure == 1
        report = await rig.service.append("b", tokens=[1])
        assert (report.token_count, report.woken.tokens_prefilled) == (51, 0)
        assert not rig.is_awake("c")
        await all_is_free(rig)


async def test_a_session_that_has_not_changed_is_dropped_and_nothing_is_written(
    open_rig: Any, weights: int, store: Path
) -> None:
    async with open_rig(memory_budget=weights + most(50) + HELD) as rig:
        await rig.woken("a", tokens_of(1, 50))
        files = [*manifests(store), *packs(store)]
        await rig.read("b", tokens_of(2, 50))
        await rig.read("c", tokens_of(3, 50))
        assert not rig.is_awake("a")
        assert [*manifests(store), *packs(store)] == files


@pytest.mark.one_in(2)
async def test_a_session_in_use_is_not_evicted_and_what_wants_its_memory_waits(open_rig: Any, weights: int) -> None:
    async with open_rig(memory_budget=weights + most(50) + STEP * ROW) as rig:
        await rig.read("a", tokens_of(1, 50))
        await rig.asleep("b", tokens_of(2, 50))
        await rig.wake("a")
        writing, gate = await held_at(rig, 1, rig.write("a", STEP))
        waking = asyncio.ensure_future(rig.wake("b"))
        await waits(rig, 1)
        assert rig.is_awake("a")
        assert rig.service._parts.models.memory._evicting is None, "nobody waits for the turn of a session in use"
        gate.open()
        await writing
        await waking
        assert rig.is_awake("b")
        assert not rig.is_awake("a"), "it was idle by then, and in the way"
        await all_is_free(rig)


async def test_an_eviction_whose_sleep_fails_leaves_the_session_awake_and_the_next_one_is_tried(
    open_rig: Any, weights: int, full_disk: Any
) -> None:
    async with open_rig(memory_budget=weights + most(50) + HELD) as rig:
        await rig.read("a", tokens_of(1, 50))
        await rig.read("b", tokens_of(2, 50))
        before = await rig.fingerprint("a")
        full_disk("a")
        await rig.read("c", tokens_of(3, 50))
        assert [rig.is_awake(name) for name in "abc"] == [True, False, True]
        assert await rig.fingerprint("a") == before
        await rig.service.append("a", tokens=[1])


async def test_a_refusal_says_why_nothing_could_make_room(open_rig: Any, weights: int, full_disk: Any) -> None:
    async with open_rig(memory_budget=weights + most(50) + HELD) as rig:
        await rig.read("a", tokens_of(1, 50))
        await rig.read("b", tokens_of(2, 50))
        disk = full_disk()
        await rig.service.create("c")
        with pytest.raises(MemoryBudgetExceeded) as refusal:
            await rig.service.append("c", tokens=tokens_of(3, 50))
        assert sorted(refusal.value.unslept) == ["torpor://default/a", "torpor://default/b"]
        assert "no_space: The disk is full." in refusal.value.message
        assert (refusal.value.wanted_bytes, refusal.value.held_bytes) == (most(50), weights + 2 * HELD)
        await rig.service.create("other/c")
        with pytest.raises(MemoryBudgetExceeded) as refusal:
            await rig.service.append("other/c", tokens=tokens_of(3, 50))
        assert "default/" not in refusal.value.message, "its client may know of no other namespace"
        disk.free()
        await rig.service.append("c", tokens=tokens_of(3, 50))
        await all_is_free(rig)


async def test_what_can_never_fit_is_refused_at_once_and_nothing_has_changed_qx18(
    open_rig: Any, weights: int, store: Path
) -> None:
    async with open_rig(memory_budget=weights + 3 * HELD) as rig:
        await rig.read("a", tokens_of(1, 50), sampling=SAMPLED)
        await rig.read("b", tokens_of(2, 50))
        before = await rig.fingerprint("a")
        for request in (
            rig.service.append("a", tokens=tokens_of(3, 1000)),
            rig.service.generate("a", text="x" * 1000, sampling=Sampling(seed=3)),
            rig.service.chat("a", message="x" * 1000, max_tokens=9),
        ):
            with pytest.raises(MemoryBudgetExceeded):
                await request
        assert await rig.fingerprint("a") == before
        assert rig.live("a").sampling == SAMPLED
        assert rig.is_awake("b")
        assert [*manifests(store), *packs(store)] == []
        await all_is_free(rig)


async def test_who_wants_memory_beside_a_look_that_somebody_goes_on_from_waits_for_that(
    open_rig: Any, weights: int
) -> None:
    async with open_rig(memory_budget=weights + most(450) + HELD // 2) as rig:
        await rig.asleep("a", tokens_of(1, 50))
        await rig.wake("a", at_token=20)
        await rig.service.create("b")
        going_on, gate = await held_at(rig, 1, rig.service.append("a", tokens=tokens_of(2, 9)))
        other = asyncio.ensure_future(rig.service.append("b", tokens=tokens_of(3, 449)))
        await until(lambda: rig.service._parts.models.memory.info().waiting == 1 or other.done())
        gate.open()
        assert (await going_on).token_count == 29
        assert (await other).token_count == 449
        assert not rig.is_awake("a")


@pytest.mark.one_in(2)
async def test_the_buffers_that_mlx_keeps_are_given_back(open_rig: Any, weights: int) -> None:
    limit = mx.set_cache_limit(1 << 30)
    try:
        async with open_rig(memory_budget=weights + most(1000)) as rig:
            for at in range(4):
                await rig.read(f"s{at}", tokens_of(at, 900))
                assert mx.get_cache_memory() <= most(1000) // CACHED_SHARE
            assert (await info(rig)).slept_by_pressure == 3
        assert mx.set_cache_limit(limit) == 1 << 30, "after the service it is as it was"
    finally:
        mx.set_cache_limit(limit)


# --- waiting


async def waits(rig: Rigged, count: int) -> None:
    await until(lambda: rig.service._parts.models.memory.info().waiting == count)


@pytest.mark.one_in(2)
async def test_a_waiter_that_is_given_up_gives_its_place_and_its_turn_back(open_rig: Any, weights: int) -> None:
    async with open_rig(memory_budget=weights + most(50) + STEP * ROW) as rig:
        await rig.read_own("abc", 50)
        await rig.sleep("b")
        await rig.sleep("c")
        await rig.wake("a")
        async with held_up(rig, "a"):
            first = asyncio.ensure_future(rig.wake("b"))
            await waits(rig, 1)
            second = asyncio.ensure_future(rig.wake("c"))
            await waits(rig, 2)
            first.cancel()
            await cancelled(first)
            await waits(rig, 1)
            assert not rig.is_awake("b")
        await second
        assert rig.is_awake("c")
        await all_is_free(rig)


@pytest.mark.one_in(2)
async def test_those_that_wait_are_served_in_the_order_of_their_coming(open_rig: Any, weights: int) -> None:
    async with open_rig(memory_budget=weights + most(50) + STEP * ROW) as rig:
        for at, name in enumerate("abcde"):
            await rig.asleep(name, tokens_of(at, 50))
        await rig.wake("a")
        ended: list[str] = []

        async def wake(name: str) -> None:
            await rig.wake(name)
            ended.append(name)

        waiters = []
        async with held_up(rig, "a"):
            for at, name in enumerate("bdce", start=1):
                waiters.append(asyncio.ensure_future(wake(name)))
                await waits(rig, at)
        await asyncio.gather(*waiters)
        assert ended == list("bdce")


@pytest.mark.one_in(2)
async def test_one_too_many_is_told_so_and_nothing_happens_qx18(
    open_rig: Any, weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torpor.daemon.memory.memory.MAX_WAITING_FOR_MEMORY", 1)
    async with open_rig(memory_budget=weights + most(50) + STEP * ROW) as rig:
        for at, name in enumerate("abc"):
            await rig.asleep(name, tokens_of(at, 50))
        await rig.wake("a")
        async with held_up(rig, "a"):
            waiting = asyncio.ensure_future(rig.wake("b"))
            await waits(rig, 1)
            with pytest.raises(MemoryBusy):
                await rig.wake("c")
            assert not rig.is_awake("c")
        await waiting
        await all_is_free(rig)


@pytest.mark.one_in(2)
async def test_a_stop_tells_those_that_wait_and_keeps_what_is_awake(open_rig: Any, weights: int) -> None:
    async with open_rig(memory_budget=weights + most(50) + STEP * ROW) as rig:
        for at, name in enumerate("ab"):
            await rig.asleep(name, tokens_of(at, 50))
        await rig.wake("a")
        async with held_up(rig, "a"):
            waiting = asyncio.ensure_future(rig.wake("b"))
            await waits(rig, 1)
            stopping = asyncio.ensure_future(rig.service.prepare_close())
            with pytest.raises(ServiceClosed):
                await waiting
        assert (await stopping).slept == ("torpor://default/a",)


@pytest.mark.one_in(5)
async def test_two_that_hold_memory_and_want_more_do_not_wait_for_each_other(open_rig: Any, weights: int) -> None:
    """Each is awake, in its turn, and wants to grow by more than is left: the later gives way, both are served."""
    alone: dict[str, Any] = {}
    texts = {name: tokens_of(at, 300) for at, name in enumerate("ab")}
    async with open_rig() as rig:
        for name in "ab":
            await rig.read(name, texts[name], sampling=SAMPLED)
            alone[name] = await rig.write(name, 300)
            await rig.service.delete(name)
    # Both hold 512 rows; each wants 343 more, and there are 300.
    async with open_rig(memory_budget=weights + (2 * 512 + 300) * ROW + 2 * LOGITS) as rig:
        for name in "ab":
            await rig.read(name, texts[name], sampling=SAMPLED)
        encode = asyncio.Event()
        plain = rig.service._parts.sessions.residency.room_for

        async def together(*arguments: Any) -> Any:
            await encode.wait()
            return await plain(*arguments)

        rig.service._parts.sessions.residency.room_for = together  # type: ignore[method-assign]
        caches, bring_back = (
            [weakref.ref(rig.live(name).state.caches[0]) for name in "ab"],
            rig.service._parts.sessions.residency.bring_back,
        )

        async def looking(*arguments: Any) -> Any:
            assert None in [cache() for cache in caches], "the one that waits has nothing of what it gave up"
            return await bring_back(*arguments)

        rig.service._parts.sessions.residency.bring_back = looking  # type: ignore[method-assign]
        writing = {name: asyncio.ensure_future(rig.write(name, 300)) for name in "ab"}
        await until(lambda: len(rig.service._parts.sessions.residency.turns.in_use()) == 2)
        encode.set()
        assert {name: await task for name, task in writing.items()} == alone
        await all_is_free(rig)


async def test_a_fork_that_waits_for_a_turn_whose_holder_waits_for_memory_is_no_circle(
    open_rig: Any, weights: int, full_disk: Any
) -> None:
    """The fork has the name `c` and waits for the turn of `a`, which waits for memory that `b` cannot give back."""
    async with open_rig(memory_budget=weights + most(100) + HELD) as rig:
        await rig.read_own("ab", 50)
        growing, plain, disk = asyncio.Event(), rig.service._parts.sessions.residency.room_for, full_disk("b")

        async def held(*arguments: Any) -> Any:
            await growing.wait()
            return await plain(*arguments)

        rig.service._parts.sessions.residency.room_for = held  # type: ignore[method-assign]
        writing = asyncio.ensure_future(rig.write("a", 300))
        await until(lambda: len(rig.service._parts.sessions.residency.turns.in_use()) == 1)
        forking = asyncio.ensure_future(rig.service.fork("a", name="c"))
        await until(lambda: len(rig.service._parts.sessions.residency.turns.in_use()) == 2)
        growing.set()
        assert len((await writing)[0]) == STEP - 50, "the answer ends where there is no more memory"
        assert (await forking).token_count == STEP
        disk.free()
        await all_is_free(rig)


@pytest.mark.one_in(2)
async def test_a_fork_that_waits_has_nobody_refused_who_waits_for_the_memory_of_its_source(
    open_rig: Any, weights: int
) -> None:
    async with open_rig(memory_budget=weights + most(100) + HELD) as rig:
        await rig.read_own("ab", 50)
        async with held_up(rig, "a"):
            growing = asyncio.ensure_future(rig.service.append("b", tokens=tokens_of(2, 300)))
            await waits(rig, 1)
            forking = asyncio.ensure_future(rig.service.fork("a", name="c"))
            await until(lambda: len(rig.service._parts.sessions.residency.turns.in_use()) == 3)
        assert (await growing).token_count == 350
        assert (await forking).token_count == 50 + STEP
        await all_is_free(rig)


@pytest.mark.one_in(2)
async def test_a_fork_to_a_name_that_is_taken_is_refused_while_others_use_both(rig: Rigged) -> None:
    await rig.read_own("ab", 50)
    async with held_up(rig, "a"):
        with pytest.raises(SessionExists):
            await rig.service.fork("a", name="b")
        with pytest.raises(SessionExists):
            await rig.service.fork("b", name="a")


async def test_forks_that_wait_while_their_sources_are_deleted_are_no_circle(rig: Rigged) -> None:
    """Each waits for a session of the name that the other one holds: neither is there any more when it has its own."""
    for at, name in enumerate("ab"):
        await rig.asleep(name, tokens_of(at, 50))
    service = rig.service
    turns, uris = service._parts.sessions.residency.turns, [service._parts.sessions.resolve(name) for name in "ab"]
    async with turns.take(uris[0]), turns.take(uris[1]):
        forks = []
        for source, name in ("ab", "ba"):
            asking = service._parts.sessions.residency.turn_with_name(
                service._parts.sessions.resolve(source), service._parts.sessions.resolve(name)
            )
            service._parts.sessions.residency.standing.require_new = lambda _: None  # type: ignore[method-assign]
            forks.append(asyncio.ensure_future(asking.__aenter__()))
        await until(lambda: all(turns.users(uri) == 2 for uri in uris))
        del service._parts.sessions.residency.standing.require_new  # type: ignore[method-assign]
        for uri in uris:
            service._parts.store.disk.delete_session(uri)
    answers = await asyncio.wait_for(asyncio.gather(*forks, return_exceptions=True), 10)
    assert [type(answer) for answer in answers] == [SessionNotFound, SessionNotFound]


async def test_a_fork_at_an_earlier_token_takes_its_memory_from_the_budget(open_rig: Any, weights: int) -> None:
    async with open_rig(memory_budget=weights + most(300)) as rig:
        await rig.read("a", tokens_of(1, 300))
        await rig.read("b", tokens_of(2, 20))
        await rig.service.fork("a", name="c", at_token=20)
        assert not rig.is_awake("b"), "it made room"
        assert (await rig.wake("c")).token_count == 20
        await all_is_free(rig)


async def test_a_fork_at_an_earlier_token_has_its_source_make_room_if_nothing_else_can(
    open_rig: Any, weights: int
) -> None:
    async with open_rig(memory_budget=weights + most(300)) as rig:
        await rig.read("a", tokens_of(1, 300))
        assert (await rig.service.fork("a", name="c", at_token=20)).token_count == 20
        assert not rig.is_awake("a")
        await all_is_free(rig)


async def test_a_fork_whose_source_cannot_sleep_to_make_room_is_refused_with_the_reason(
    open_rig: Any, weights: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source is the only one that could make room; it is asked once, and not for ever."""
    async with open_rig(memory_budget=weights + most(600) + HELD) as rig:
        await rig.woken("a", tokens_of(1, 500))
        tried, order_of_fork = [], forking_verbs._order_of_fork

        async def unreadable(live: Any) -> bool:
            tried.append(live.uri.name)
            raise StoreIoError("The disk is gone.", path="x")

        async def then_the_disk_goes(*args: Any) -> Any:
            order = await order_of_fork(*args)
            monkeypatch.setattr(rig.service._parts.store.versions, "is_kept", unreadable)
            return order

        with monkeypatch.context() as patch:
            patch.setattr(forking_verbs, "_order_of_fork", then_the_disk_goes)
            forking = asyncio.ensure_future(rig.service.fork("a", name="c", at_token=400))
            await until(lambda: forking.done() or len(tried) > 1)
        monkeypatch.undo()
        with pytest.raises(MemoryBudgetExceeded) as refusal:
            await forking
        assert (tried, list(refusal.value.unslept)) == (["a"], ["torpor://default/a"])
        assert "The disk is gone." in refusal.value.message
        assert (await rig.service.fork("a", name="c", at_token=400)).token_count == 400
        await all_is_free(rig)


# --- many sessions, one budget

Turn = Callable[[], Awaitable[Any]]
VERBS = ("read", "write", "show", "sleep", "look")


def script(seed: int, sessions: int, turns: int) -> list[list[tuple[str, int, list[int]]]]:
    """For each session its turns, in order: to write some tokens, to read some, or to look at an earlier one."""
    draw = random.Random(seed)
    return [
        [(draw.choice(VERBS), draw.randint(1, 12), tokens_of(draw.randrange(1000), 5)) for _ in range(turns)]
        for _ in range(sessions)
    ]


def looked(look: Look | None) -> tuple[int, int] | None:
    """What is looked at, without the numbers of versions: one that had to make room has more of them."""
    return None if look is None else (look.token_count, look.newest_tokens)


async def play(rig: Rigged, name: str, turn: tuple[str, int, list[int]]) -> Any:
    verb, count, tokens = turn
    if verb == "write":
        return await rig.write(name, count)
    if verb == "read":
        read = await rig.service.append(name, tokens=tokens)
        return read.token_count, looked(read.branched)
    if verb == "sleep":
        slept = await rig.sleep(name)
        return slept.token_count, slept.looked_at
    if verb == "look":
        await rig.sleep(name)
        look = looked((await rig.wake(name, at_token=40 + count)).look)
        await rig.sleep(name)  # it ends when it leaves memory, and others may need that
        return look
    return (await rig.service.show(name)).info.token_count


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fitting", [1, 4])
@pytest.mark.timeout(60)
async def test_more_sessions_than_fit_answer_as_each_would_alone_qx1_qx10(
    open_rig: Any, weights: int, fitting: int, tmp_path: Path
) -> None:
    """Eight clients play the turns of twelve sessions in any order: every reply is that of the session alone, and never
    is more memory taken than the budget, but for what one model call works with."""
    sessions, turns = 12, 6
    plays = script(fitting, sessions, turns)
    expected: list[list[Any]] = []
    async with open_rig(store=tmp_path / "alone") as rig:
        for at in range(sessions):
            await rig.read(f"s{at}", tokens_of(at, 60 + 7 * at), sampling=SAMPLED)
            expected.append([await play(rig, f"s{at}", turn) for turn in plays[at]])
    budget = weights + (fitting - 1) * HELD + most(400)
    async with open_rig(memory_budget=budget) as rig:
        peaks: list[int] = []
        for at in range(sessions):
            await rig.read(f"s{at}", tokens_of(at, 60 + 7 * at), sampling=SAMPLED)
        got: list[list[Any]] = [[] for _ in range(sessions)]
        queue = [at for at in range(sessions) for _ in range(turns)]
        random.Random(fitting).shuffle(queue)
        busy: set[int] = set()

        async def client() -> None:
            while queue:
                at = next((each for each in queue if each not in busy), None)
                if at is None:
                    return
                queue.remove(at)
                busy.add(at)
                got[at].append(await play(rig, f"s{at}", plays[at][len(got[at])]))
                peaks.append(resident_bytes(rig))
                busy.discard(at)

        done = asyncio.Event()

        async def watch() -> None:
            while not done.is_set():
                peaks.append(resident_bytes(rig))
                told = rig.service._parts.models.memory.info()
                peaks.append(told.weights_bytes + told.sessions_bytes + told.reserved_bytes)
                await asyncio.sleep(0.002)

        watching = asyncio.ensure_future(watch())
        try:
            while queue:
                await asyncio.gather(*(client() for _ in range(8)))
        finally:
            done.set()
            await watching
        assert got == expected
        assert max(peaks) <= budget
        told = await info(rig)
        assert told.slept_by_pressure > sessions
        await all_is_free(rig)


@pytest.mark.one_in(2)
@pytest.mark.timeout(60)
async def test_eight_clients_are_served_by_a_budget_for_one_session_ms9(open_rig: Any, weights: int) -> None:
    async with open_rig(memory_budget=weights + most(90)) as rig:
        for at in range(8):
            await rig.read(f"s{at}", tokens_of(at, 50))
        results = await asyncio.gather(*(rig.write(f"s{at}", 5) for at in range(8) for _ in range(3)))
        assert len(results) == 24
        infos = await rig.service.list_sessions()
        assert [each.token_count for each in infos] == [65] * 8
        assert sum(each.state == "awake" for each in infos) <= 1
        await all_is_free(rig)


async def test_a_request_that_fails_gives_its_reservation_back(open_rig: Any, weights: int) -> None:
    async with open_rig(memory_budget=weights + most(300)) as rig:
        await rig.service.create("a")
        await broken_at(rig, 1, rig.service.append("a", tokens=tokens_of(1, 300)))
        rig.network.reset()
        await all_is_free(rig)
        await rig.service.append("a", tokens=tokens_of(1, 300))


async def test_a_quantisation_takes_its_memory_from_the_budget_too(open_rig: Any, quantisable_model: Path) -> None:
    open_rig = partial(open_rig, quantisable_model)
    async with open_rig() as rig:
        await rig.asleep("a", tokens_of(1, 300))
        needed = rig.model.weights_bytes + 2 * rig.model.layout.most_bytes(300, PREFILL_CHUNK_TOKENS)
    async with open_rig(memory_budget=needed - 1) as rig:
        with pytest.raises(MemoryBudgetExceeded):
            await rig.service.maintain(operation="quantize", session="a", bits=8)
    async with open_rig(memory_budget=needed) as rig:
        await rig.read("b", tokens_of(1, 50))
        report = await rig.service.maintain(operation="quantize", session="a", bits=8)
        assert (report.problems, rig.is_awake("b")) == ((), False)
        await all_is_free(rig)


# --- idling


async def test_a_session_that_nobody_uses_goes_to_sleep_and_comes_back(open_rig: Any) -> None:
    async with open_rig(idle_sleep=0.05) as rig:
        await rig.read("a", tokens_of(1, 50), sampling=SAMPLED)
        before = await rig.fingerprint("a")
        await until(lambda: not rig.is_awake("a"))
        await until(lambda: rig.service._parts.models.memory.slept_by_idling == 1)
        assert (await rig.wake("a")).tokens_prefilled == 0
        assert await rig.fingerprint("a") == before


async def test_a_session_in_use_is_not_idle(open_rig: Any) -> None:
    async with open_rig(idle_sleep=0.02) as rig:
        await rig.read("b", tokens_of(2, 5))
        await rig.read("a", tokens_of(1, 5))
        await rig.wake("a")
        async with rig.service._parts.sessions.residency.turn(rig.live("a").uri):
            await until(lambda: not rig.is_awake("b"))
            assert rig.is_awake("a")
        await until(lambda: not rig.is_awake("a"))


async def test_an_idle_session_that_cannot_sleep_stays_and_sleeps_when_it_can(open_rig: Any, full_disk: Any) -> None:
    async with open_rig(idle_sleep=0.02) as rig:
        disk = full_disk()
        await rig.read("a", tokens_of(1, 5))
        await until(lambda: disk.refused >= 2)
        assert rig.is_awake("a")
        disk.free()
        await until(lambda: not rig.is_awake("a"))


async def test_without_an_idle_time_nothing_sleeps_by_itself(rig: Rigged) -> None:
    (state,) = (each for each in rig.service._parts.upkeep.loop.states() if each.name == "idle sleep")
    assert (state.running, state.last, state.next) == (None, None, None)


async def test_what_the_budget_has_and_the_system_has_not_is_refused_before_it_is_taken(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX does not survive an allocation that fails."""
    await rig.read("a", tokens_of(1, 50))
    before = await rig.fingerprint("a")
    with monkeypatch.context() as short:
        short.setattr(system_memory, "_available", lambda: 10_000)
        short.setattr(mx, "get_cache_memory", lambda: 0)
        with pytest.raises(NotEnoughMemory) as refusal:
            await rig.service.append("a", tokens=tokens_of(2, 600))
    assert refusal.value.details["available_bytes"] == 10_000
    assert await rig.fingerprint("a") == before
    assert (await rig.service.status()).memory.reserved_bytes == 0
    await rig.service.append("a", tokens=tokens_of(2, 600))


async def test_a_wake_tells_of_a_manifest_that_may_be_a_newer_version(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await rig.woken("a", tokens_of(1, 8))
        await rig.service.append("a", tokens=tokens_of(2, 8))
        newest = manifest_of(store, (await rig.sleep("a")).bundle_id)
    flip(newest, 200)
    (store / INDEX_FILE).unlink()
    async with open_rig() as rig:
        planned = await rig.service.plan_wake("a")
        woken = await rig.wake("a")
        assert (woken.version, [each.path for each in woken.unreadable]) == (1, [str(newest)])
        assert planned.unreadable == woken.unreadable
        again = await rig.wake("a")
        assert (again.already_awake, again.unreadable) == (True, woken.unreadable)
        assert (await rig.service.status()).unreadable == woken.unreadable
        flip(newest, 200)
        await rig.sleep("a")
        assert (await rig.wake("a")).unreadable == ()
