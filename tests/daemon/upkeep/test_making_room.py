"""A daemon whose store reaches its budget: what was used longest ago is stripped, as planned, and goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.upkeep import writing_behind
from torpor.memvid.answers import MaintenanceReport
from torpor.memvid.disk.clock import now_ns
from torpor.memvid.errors import BudgetExceeded
from torpor.memvid.exchange.incoming import hand_over
from torpor.memvid.maintenance import strip_plan
from torpor.memvid.store import Store
from torpor.memvid.writing import sleeping
from torpor.tests.daemon.session_rig import Rigged, listening, tokens_of, until, wait_for

ROOM_OF_THREE = 812_000
"""For three sessions of 300 tokens, and not for four."""
DAY_NS = 24 * 3600 * 10**9


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No session is too young to be stripped."""
    monkeypatch.setattr(strip_plan, "RECENT_NS", 0)


async def sleep(rig: Rigged, *names: str, unnamed: bool = True) -> None:
    for name in names:
        await rig.read(name, tokens_of(sum(map(ord, name)), 300))
        rig.live(name).unnamed = unnamed
        await rig.sleep(name)


def disk_of(rig: Rigged) -> Store:
    return rig.service._parts.store.disk


def stripped(rig: Rigged) -> list[str]:
    disk = disk_of(rig)
    return [uri.name for page in disk.index.iter_uris(99) for uri in page if disk.marks(uri).stripped]


async def planned(rig: Rigged) -> list[str]:
    plan = await rig.service.maintain(operation="strip", dry_run=True)
    return [str(action.session).rpartition("/")[2] for action in plan.actions]


async def test_a_sleep_without_room_has_what_was_used_longest_ago_stripped_as_planned_and_the_budget_holds(
    open_rig: Any,
) -> None:
    async with open_rig(store_budget=ROOM_OF_THREE, prefix_reuse="off") as rig, listening(rig) as heard:
        await sleep(rig, "named", unnamed=False)
        for number in range(6):
            plan, before = await planned(rig), stripped(rig)
            await sleep(rig, f"s{number}")
            went = [name for name in stripped(rig) if name not in before]
            assert went == plan[: len(went)]
            assert disk_of(rig).held_bytes <= ROOM_OF_THREE
        await until(lambda: not rig.service._parts.store.room.is_short)
        went = stripped(rig)
        assert went == [f"s{number}" for number in range(len(went))]
        assert 3 <= len(went) <= 5, "the newest is whole, and the named one"
        assert await planned(rig) == [f"s{number}" for number in range(len(went), 6)]
    assert heard.of("sleep_failed") == []
    assert [len(heard.of("versions_stripped", name)) for name in (*went, "named")] == [1] * len(went) + [0]


async def test_a_stripped_session_goes_on_as_one_that_was_kept_and_the_answer_says_what_it_cost(open_rig: Any) -> None:
    async with open_rig(store_budget=ROOM_OF_THREE, prefix_reuse="off") as rig:
        await rig.read("control", tokens_of(sum(map(ord, "s0")), 300))
        await sleep(rig, "s0", "s1", "s2", "s3")
        assert "s0" in stripped(rig)
        result = await rig.service.generate("s0", max_tokens=5, prove=True, on_event=lambda _: None)
        control = await rig.service.generate("control", max_tokens=5, prove=True, on_event=lambda _: None)
        assert (result.recomputed_tokens, result.woken.recomputed_because) == (300, "stripped")
        (told,) = (await rig.service.why("s0")).requests[-1:]
        assert (told.cost.recomputed_tokens, told.cost.recomputed_because, told.cost.cause) == (
            300,
            "stripped",
            "stripped",
        )
        assert (result.tokens, result.final_logits_blake3) == (control.tokens, control.final_logits_blake3)
        assert await rig.fingerprint("s0") == await rig.fingerprint("control")


async def test_a_sleep_is_refused_where_nothing_may_go(open_rig: Any) -> None:
    async with open_rig(store_budget=ROOM_OF_THREE, prefix_reuse="off", close=False) as rig:
        await sleep(rig, "a", "b", "c", unnamed=False)
        with pytest.raises(BudgetExceeded):
            await sleep(rig, "d")
        assert (stripped(rig), rig.is_awake("d")) == ([], True)
        rig.service._parts.store.room._options.now = replace(rig.service._parts.options, strip_named=True)
        await rig.sleep("d")
        assert stripped(rig) == ["a"]
        assert disk_of(rig).held_bytes <= ROOM_OF_THREE
        disk_of(rig).close()


async def test_a_strip_that_stops_for_a_sleep_without_room_on_the_disk_goes_on_after_it(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, told, real = threading.Event(), list[bool](), Store.make_room

    def make_room(store: Store, *what: Any, should_stop: Callable[[], bool], **how: Any) -> MaintenanceReport:
        begun.set()
        if not told:
            wait_for(should_stop)
        told.append(should_stop())
        return real(store, *what, should_stop=should_stop, **how)

    async with open_rig(store_budget=ROOM_OF_THREE, prefix_reuse="off") as rig:
        await sleep(rig, "s0", "s1")
        monkeypatch.setattr(Store, "make_room", make_room)
        making = asyncio.ensure_future(rig.service._parts.store.room.make(ROOM_OF_THREE // 2))
        await until(begun.is_set)
        thread = rig.service._parts.upkeep.loop.thread
        with thread.claims:
            await thread.wait_for_room(0)
        assert await making
        assert (told, stripped(rig)) == ([True, False], ["s0"])


async def test_a_session_that_a_request_has_is_not_stripped_though_it_is_not_awake_yet(open_rig: Any) -> None:
    async with open_rig(store_budget=ROOM_OF_THREE, prefix_reuse="off") as rig:
        await sleep(rig, "s0", "s1")
        async with rig.service._parts.sessions.residency.turn(disk_of(rig).resolve("s0")):
            assert await planned(rig) == ["s1"]
            assert await rig.service._parts.store.room.make(ROOM_OF_THREE // 2)
        assert stripped(rig) == ["s1"]


async def test_nothing_is_stripped_for_a_session_that_could_never_fit(open_rig: Any) -> None:
    async with open_rig(store_budget=ROOM_OF_THREE, prefix_reuse="off", close=False) as rig:
        await sleep(rig, "s0", "s1")
        await rig.read("large", tokens_of(1, 1300))
        with pytest.raises(BudgetExceeded):
            await rig.sleep("large")
        assert stripped(rig) == []
        disk_of(rig).close()


async def test_blocks_written_behind_and_an_import_find_room(
    open_rig: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing_behind, "BLOCKS_DUE", 2)
    async with open_rig(store_budget=ROOM_OF_THREE, prefix_reuse="off") as rig:
        await sleep(rig, "s0", "s1", "s2")
        disk_of(rig).export_session(rig.service._parts.sessions.resolve("s2"), None, tmp_path / "s2.mvb")
        await rig.read("behind", tokens_of(1, 700))  # it is due at once
        await until(lambda: disk_of(rig).find_session(rig.live("behind").uri) is not None)
        await rig.service.delete("s2")
        await sleep(rig, "s3")
        handed = hand_over(disk_of(rig).path, str(tmp_path / "s2.mvb"))
        await rig.service.import_bundle(handed)
        assert disk_of(rig).held_bytes <= ROOM_OF_THREE
        assert {"s0", "s1"} <= set(stripped(rig))


async def test_a_look_that_makes_no_version_is_a_use(open_rig: Any) -> None:
    async with open_rig(prefix_reuse="off") as rig:
        await sleep(rig, "s0", "s1")
        assert await planned(rig) == ["s0", "s1"]
        await rig.wake("s0")
        assert await planned(rig) == ["s1"], "it is in use"
        await rig.sleep("s0")
        assert await planned(rig) == ["s1", "s0"]
    async with open_rig() as rig:
        assert await planned(rig) == ["s1", "s0"]


async def test_sessions_that_nobody_named_and_nobody_used_for_long_are_deleted(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left(rig: Rigged) -> list[str]:
        return [uri.name for page in disk_of(rig).index.iter_uris(99) for uri in page]

    with monkeypatch.context() as patched:
        patched.setattr(sleeping, "now_ns", lambda: now_ns() - 40 * DAY_NS)
        async with open_rig(prefix_reuse="off") as rig:
            await sleep(rig, "old", "tagged", "used")
            await sleep(rig, "named", unnamed=False)
            await rig.service.mark("tagged", tag="kept")
    for days, names in (("none", ["named", "old", "tagged", "used"]), ("30", ["named", "tagged", "used"])):
        async with open_rig(keep_unnamed=0.0 if days == "none" else float(days)) as rig:
            await rig.wake("used")
            await rig.sleep("used")
            for ago in range(31):
                disk_of(rig).index.add_written(now_ns() // DAY_NS - ago, 1)
            job = rig.service._parts.upkeep.deleting_unused
            job._next = 0.0
            job.look_again()
            await until(lambda job=job: all(at > 0 for _, at in job.due()))
            await until(lambda rig=rig, names=names: left(rig) == names)


async def test_a_use_saves_a_session_that_was_to_be_deleted(rig: Rigged) -> None:
    await sleep(rig, "s0")
    uri, job = rig.service._parts.sessions.resolve("s0"), rig.service._parts.upkeep.deleting_unused
    job.note(uri)  # as by a look of before that use
    await until(lambda: not job._noted)
    async with rig.service._parts.sessions.residency.turn(uri):
        assert disk_of(rig).find_session(uri) is not None


@pytest.mark.one_in(1)
@pytest.mark.parametrize("strip_named", [False, True])
async def test_where_a_full_store_lets_nothing_go_a_session_that_others_need_the_memory_of_is_kept_as_its_ledger(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch, strip_named: bool
) -> None:
    """One that somebody has named stays in memory, unless the setting says that its keys and values may go."""
    monkeypatch.setattr(strip_plan, "RECENT_NS", 3600 * 10**9)  # all of them are too young
    options = {"store_budget": ROOM_OF_THREE, "prefix_reuse": "off", "strip_named": strip_named}
    async with open_rig(**options, close=False) as rig, listening(rig) as heard:
        await sleep(rig, "a", "b", "c")
        for name, unnamed in (("named", False), ("unnamed", True)):
            await rig.read(name, tokens_of(sum(map(ord, name)), 300))
            rig.live(name).unnamed = unnamed
        before = await rig.fingerprint("unnamed")
        for name in ("named", "unnamed"):
            await rig.service._parts.models.memory._let_leave(rig.service._parts.sessions.resolve(name))
        assert [rig.is_awake(name) for name in ("named", "unnamed")] == [not strip_named, False]
        assert stripped(rig) == []
        result = await rig.service.wake("unnamed")
        assert (result.tokens_prefilled, result.recomputed_because) == (300, "ledger")
        assert await rig.fingerprint("unnamed") == before
        disk_of(rig).close()
    why = ["budget_exceeded"]
    assert [each["code"] for each in heard.of("ledger_kept", "unnamed")] == why
    assert [each["code"] for each in heard.of("ledger_kept", "named")] == (why if strip_named else [])
    assert [each["code"] for each in heard.of("eviction_refused")] == ([] if strip_named else why)
