"""What is healed, what cannot be healed now, and that a repair gives nothing up."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.errors import ServiceClosed, UnknownModel
from torpor.daemon.upkeep.scrubbing import ScrubPolicy
from torpor.memvid.errors import CorruptBlock
from torpor.memvid.folder.scrub_mark import place_of
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.snapshot.errors import IdentityMismatch
from torpor.tests.daemon.damage_rig import TEXT, damage, mend, told
from torpor.tests.daemon.session_rig import (
    MODEL,
    Gate,
    Rigged,
    as_killed,
    crowded,
    listening,
    make_unreadable,
    packs,
    tokens_of,
    until,
)

A = SessionUri("default", "a")


def newest(rig: Any, name: str = "a") -> tuple[int, int]:
    row = rig.service._parts.store.disk.find_session(SessionUri("default", name))
    return row.version, row.block_tokens


def counts(store: Path) -> dict[str, int]:
    with Store.open(store, writable=False) as opened:
        return {row.uri.name: row.block_tokens for row in opened.iter_sessions()}


@asynccontextmanager
async def _no_memory(rig: Any, _full_disk: Any) -> Any:
    """The budget is cut down to the model and a few tokens."""
    info = rig.service._parts.models.memory.info()
    await rig.service._parts.models.memory.resize(info.weights_bytes + 100_000)
    yield
    await rig.service._parts.models.memory.resize(info.budget_bytes)


@asynccontextmanager
async def _no_space(_rig: Any, full_disk: Any) -> Any:
    disk = full_disk()
    yield
    disk.free()


@asynccontextmanager
async def _changed(rig: Any, _full_disk: Any) -> Any:
    rig.service._parts.models.shelf.places[MODEL].changed = ("weights",)
    yield
    rig.service._parts.models.shelf.places[MODEL].changed = ()


def _refused(kind: type[Exception]) -> Any:
    @asynccontextmanager
    async def refused(rig: Any, _full_disk: Any) -> Any:
        def refuse(*_args: Any, **_options: Any) -> Any:
            raise kind("it is another model's")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rig.service._parts.sessions.residency, "room_to_wake", refuse)
            yield

    return refused


# --- a repair that somebody asks for


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("hindrance", "why"),
    [
        (_no_memory, "memory_budget_exceeded"),
        (_no_space, "no_space"),
        (_changed, "model_changed"),
        (_refused(UnknownModel), "unknown_model"),
        (_refused(IdentityMismatch), "identity_mismatch"),
    ],
)
async def test_what_cannot_be_healed_now_is_healed_another_time(
    open_rig: Any, store: Path, full_disk: Any, hindrance: Any, why: str
) -> None:
    async with open_rig() as rig, listening(rig) as heard:
        await rig.asleep("a", TEXT)
        await asyncio.to_thread(damage, store, "a", span=1)
        async with hindrance(rig, full_disk):
            result = await rig.service.maintain(operation="repair")
            assert [(each.code, "whole up to token 256" in each.message) for each in result.problems] == [
                ("block_missing", True)
            ]
            assert newest(rig) == (1, 1300)
        assert [each["code"] for each in await told(heard, "heal_failed")] == [why]
        result = await rig.service.maintain(operation="repair")
        assert result.problems == ()
        assert newest(rig) == (2, 1300)


async def test_a_repair_that_heals_still_tells_that_marks_were_lost(rig: Rigged, store: Path) -> None:
    await rig.asleep("a", TEXT)
    await asyncio.to_thread(damage, store, "a", span=1)
    (store / "marks.json").unlink()
    result = await rig.service.maintain(operation="repair")
    assert [each.code for each in result.problems] == ["marks_lost"]
    assert newest(rig) == (2, 1300)


async def test_an_awake_session_without_room_on_the_disk_is_kept_by_a_later_repair(
    rig: Rigged, store: Path, full_disk: Any
) -> None:
    await rig.woken("a", TEXT)
    await asyncio.to_thread(damage, store, "a", span=1)
    async with _no_space(rig, full_disk):
        assert (await rig.service.maintain(operation="repair")).problems
    assert newest(rig) == (1, 1300)
    assert (await rig.service.maintain(operation="repair")).problems == ()
    assert newest(rig) == (2, 1300)


async def test_a_daemon_that_prepares_to_stop_repairs_nothing(rig: Rigged, store: Path) -> None:
    await rig.asleep("a", TEXT)
    await asyncio.to_thread(damage, store, "a", span=1)
    await rig.service.prepare_close()
    with pytest.raises(ServiceClosed):
        await rig.service.maintain(operation="repair")
    assert newest(rig) == (1, 1300)


@pytest.mark.one_in(2)
async def test_a_stop_that_comes_while_a_repair_heals_cuts_nothing(open_rig: Any, store: Path) -> None:
    async with open_rig(close=False) as rig:
        for seed, name in enumerate("abc"):
            await rig.asleep(name, tokens_of(seed, 1300))
            await asyncio.to_thread(damage, store, name, span=1)
        gate = rig.network.hold_at(1)
        asked = asyncio.create_task(rig.service.maintain(operation="repair"))
        await gate.reached()
        stopping = asyncio.create_task(rig.service.prepare_close())
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(ServiceClosed):
            await asked
        await stopping
        await rig.service.close()
    assert counts(store) == {"a": 1300, "b": 1300, "c": 1300}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("awake", [False, True])
async def test_what_could_not_be_read_just_now_is_not_taken_for_damaged(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch, awake: bool
) -> None:
    async with open_rig() as rig, listening(rig) as heard:
        await rig.asleep("a", TEXT)
        if awake:
            await rig.wake("a")
        readable = make_unreadable(packs(store)[0], "hard link", monkeypatch)
        await mend(rig)
        assert newest(rig) == (1, 1300), "nothing was computed or written"
        result = await rig.service.maintain(operation="repair")
        assert {"unsafe_path", "block_missing"} <= {each.code for each in result.problems}
        readable()
        assert (await rig.service.maintain(operation="repair")).actions == ()
        assert newest(rig) == (1, 1300)
        assert [each["code"] for each in await told(heard, "heal_failed", 2)] == ["unsafe_path", "unsafe_path"]
        assert [each["moved"] for each in heard.of("store_repaired")] == [0]


@pytest.mark.one_in(1)
@pytest.mark.parametrize("crash", ["behind the heal", "in it"])
@pytest.mark.parametrize("healed", ["blocks", "a ledger"])
async def test_turns_of_a_session_that_went_back_before_its_healed_version_survive_a_kill(
    open_rig: Any, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str, healed: str
) -> None:
    killed = tmp_path / "killed"

    def kill() -> None:
        as_killed(store)

    write = Store.write_bundle

    def write_and_kill(store: Store, draft: Any) -> Any:
        receipt = write(store, draft)
        kill()
        return receipt

    if healed == "a ledger":
        await leave_a_ledger(open_rig(stop_within=0), 600)
    async with open_rig() as rig:
        if healed == "blocks":
            await rig.asleep("a", TEXT)
        await rig.wake("a", at_token=100)
        await rig.service.append("a", tokens=tokens_of(3, 10))
        damage(store, "a", **({} if healed == "blocks" else {"kind": "state"}))
        with monkeypatch.context() as patch:
            if crash == "in it":
                patch.setattr(Store, "write_bundle", write_and_kill)
            await mend(rig)
        assert (await versions_of(rig))[-1][1] == (1300 if healed == "blocks" else 640)
        if crash == "behind the heal":
            kill()
    async with open_rig(store=killed) as rig:
        assert (await rig.wake("a")).token_count == 110


# --- earlier versions


async def versions_of(rig: Any) -> list[tuple[int, int]]:
    return [(each.version, each.token_count) for each in (await rig.service.show("a")).versions]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("span", [0, 4])
async def test_a_damaged_earlier_version_is_neither_healed_nor_given_up(open_rig: Any, store: Path, span: int) -> None:
    async with open_rig() as rig, listening(rig) as heard:
        await rig.asleep("a", TEXT)
        await rig.wake("a", at_token=100)
        await rig.service.append("a", tokens=tokens_of(3, 10))
        await rig.sleep("a")
        await asyncio.to_thread(damage, store, "a", version=1, span=span)
        await mend(rig)
        await rig.service.maintain(operation="repair")
        assert await versions_of(rig) == [(1, 1300), (2, 110)]
        assert (await rig.wake("a")).token_count == 110
    assert heard.of("heal_failed") == heard.of("session_healed") == []
    assert len(heard.of("store_repaired")) == 1


async def test_an_earlier_version_is_whole_again_with_the_newest_whose_damage_it_shares(
    rig: Rigged, store: Path
) -> None:
    await rig.read("a", tokens_of(1, 40))
    await rig.service.append("a", tokens=tokens_of(2, 560))
    await rig.sleep("a")
    await rig.wake("a", at_token=270)
    await rig.service.append("a", tokens=tokens_of(3, 10))
    await rig.sleep("a")
    await asyncio.to_thread(damage, store, "a", span=0)
    await mend(rig)
    assert (await rig.wake("a")).token_count == 280
    await rig.sleep("a")
    assert (await rig.wake("a", 1)).token_count == 600


async def test_a_stripped_version_is_not_healed(rig: Rigged, store: Path) -> None:
    await rig.asleep("a", TEXT)
    await rig.service.maintain(operation="strip", session="a")
    assert rig.service._parts.store.disk.verify(A, deep=True).ok
    await asyncio.to_thread(damage, store, "a", kind="state")
    await mend(rig)
    assert (rig.service._parts.upkeep.healing.healed, rig.service._parts.upkeep.healing.failed) == (0, 0)


async def test_a_stripped_version_is_not_computed_for_an_earlier_one_that_is_damaged(rig: Rigged, store: Path) -> None:
    await rig.asleep("a", TEXT)
    await rig.service.append("a", tokens=tokens_of(3, 10))
    await rig.sleep("a")
    await rig.service.maintain(operation="strip", session="a@2")
    await asyncio.to_thread(damage, store, "a", version=1, span=1)
    await mend(rig)
    assert (rig.service._parts.upkeep.healing.healed, rig.service._parts.upkeep.healing.failed) == (0, 0)
    assert await versions_of(rig) == [(1, 1300), (2, 1310)]


# --- a stop


RARE = ScrubPolicy(1 << 40, idle_s=0.05, round_s=3600.0)


async def close_in_the_midst(rig: Any, gate: Gate) -> None:
    """Tell the daemon to stop, and only then let go on what the gate holds up."""
    await gate.reached()
    closing = asyncio.create_task(rig.service.close())
    await until(lambda: rig.service._parts.door.stopping is not None)
    gate.open()
    await closing


@pytest.mark.one_in(2)
@pytest.mark.parametrize("found_by", ["round", "wake"])
async def test_a_stop_waits_for_one_call_of_a_heal_and_the_next_daemon_heals(
    open_rig: Any, store: Path, found_by: str
) -> None:
    names = sorted("abcd", key=lambda name: place_of(SessionUri("default", name)))
    first = names[0]
    async with open_rig() as rig:
        for name in names:
            await rig.read(name, TEXT if name == first else tokens_of(5, 300))
        before = await rig.fingerprint(first)
        for name in names:
            await rig.sleep(name)
    if found_by == "wake":  # a round has gone by
        async with open_rig(scrub=RARE) as rig, listening(rig) as heard:
            await told(heard, "session_scrubbed", len(names))
    damage(store, first, span=0)
    async with open_rig(scrub=RARE, close=False) as rig:
        rig.network.reset()
        gate = rig.network.hold_at(1)
        if found_by == "wake":
            with pytest.raises(CorruptBlock):
                await rig.wake(first)
        await close_in_the_midst(rig, gate)
        assert len(rig.network.calls) == 1
    with Store.open(store, writable=False) as opened:
        assert [(row.version, row.block_tokens) for row in opened.versions(SessionUri("default", first))] == [(1, 1300)]
    async with open_rig(scrub=RARE) as rig, listening(rig) as heard:
        await told(heard, "store_repaired")
        assert await rig.woken_fingerprint(first) == before


@pytest.mark.one_in(2)
async def test_the_scrub_reads_on_beside_a_heal_and_after_a_kill_amid_it_the_next_daemon_heals(
    open_rig: Any, store: Path
) -> None:
    names = sorted("abcd", key=lambda name: place_of(SessionUri("default", name)))
    async with open_rig() as rig:
        for name in names:
            await rig.asleep(name, TEXT if name == names[0] else tokens_of(5, 300))
    damage(store, names[0], span=0)
    async with open_rig(scrub=RARE) as rig, listening(rig) as heard:
        scrub, disk = rig.service._parts.store.scrub, rig.service._parts.store.disk
        rig.network.reset()
        gate = rig.network.hold_at(1)
        await gate.reached()
        await told(heard, "session_scrubbed", len(names))
        await until(lambda: scrub.due()[0][0] is None)
        killed = as_killed(store)
        gate.open()
        await told(heard, "session_healed")
        await until(lambda: disk.load_scrub_mark().begun_ns == scrub._mark.begun_ns)
    async with open_rig(store=killed, scrub=RARE) as rig, listening(rig) as heard:
        await told(heard, "session_healed")


@pytest.mark.one_in(2)
async def test_a_stop_waits_for_one_block_of_what_a_heal_reads_of_the_store(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig() as rig:
        for seed, name in enumerate("abcd"):
            await rig.asleep(name, tokens_of(seed, 1300))
    damage(store, "a", span=0)
    async with open_rig(close=False) as rig:
        gate, going_on, seen = Gate(), rig.service._parts.upkeep.healing._require_going_on, []

        def watched(*args: Any) -> None:
            seen.append(1)
            if len(seen) == 2:
                gate.pass_through()
            going_on(*args)

        monkeypatch.setattr(rig.service._parts.upkeep.healing, "_require_going_on", watched)
        asked = asyncio.create_task(rig.service.maintain(operation="repair"))
        await close_in_the_midst(rig, gate)
        with pytest.raises(ServiceClosed):
            await asked
        assert len(seen) == 2
    assert counts(store) == dict.fromkeys("abcd", 1300)


# --- ledgers


async def leave_a_ledger(opened: Any, tokens: int, *, bits: int | None = None) -> list[int]:
    """A session `a` whose newest version ends in a ledger of 40 tokens."""
    async with opened as rig:
        await rig.asleep("a", tokens_of(1, tokens))
        if bits is not None:
            await rig.service.maintain(operation="quantize", session="a", bits=bits)
        await rig.wake("a")
        await rig.service.append("a", tokens=tokens_of(9, 40))
        had = list(rig.live("a").state.tokens)
        assert list((await rig.service.close()).ledgers)
    return had


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["plain", "gemma3_text", "lfm2"])
async def test_where_only_the_record_before_a_ledger_is_lost_no_token_is(
    open_kind: Any, store: Path, kind: str
) -> None:
    had = await leave_a_ledger(open_kind(kind, stop_within=0), 600)
    damage(store, "a", kind="state")
    async with open_kind(kind) as rig:
        await mend(rig)
        woken = await rig.wake("a")
        assert woken.token_count == 640
        assert list(rig.live("a").state.tokens) == had


@pytest.mark.one_in(2)
async def test_what_is_damaged_of_a_lossy_session_becomes_part_of_its_ledger(
    open_rig: Any, quantisable_model: Path, store: Path
) -> None:
    had = await leave_a_ledger(open_rig(quantisable_model, stop_within=0), 1300, bits=8)
    damage(store, "a", span=4)
    async with open_rig(quantisable_model) as rig, listening(rig) as heard:
        await mend(rig)
        assert heard.of("heal_failed") == []
        (info,) = await rig.service.list_sessions()
        assert (info.token_count, info.unread_tokens) == (1340, 316)
        woken = await rig.wake("a")
        assert woken.token_count == 1340
        assert list(rig.live("a").state.tokens) == had
        assert (rig.live("a").loss.bits, rig.live("a").loss.tokens) == (8, 1024)


# --- a repair that is only planned


@pytest.mark.one_in(2)
async def test_a_planned_repair_tells_of_the_healing(rig: Rigged, store: Path) -> None:
    await rig.asleep("a", TEXT)
    await asyncio.to_thread(damage, store, "a", span=1)
    plan = await rig.service.maintain(operation="repair", dry_run=True)
    assert [each.kind for each in plan.actions] == ["copy", "move", "heal"]
    last = plan.actions[-1]
    assert (last.session, last.version) == (str(A), 1)
    assert last.reason.startswith("1,044 tokens or more")
    assert plan.problems == ()
    assert newest(rig) == (1, 1300), "nothing was done"
    done = await rig.service.maintain(operation="repair")
    assert (newest(rig), done.problems) == ((2, 1300), ())
    (healed,) = [each for each in done.actions if each.kind == "heal"]
    assert (healed.session, healed.version) == (str(A), 2)
    assert healed.reason.endswith("are computed again.")


@pytest.mark.one_in(1)
async def test_a_planned_repair_tells_of_what_the_healing_leaves(rig: Rigged, store: Path) -> None:
    for seed, name in enumerate("ab"):
        await rig.woken(name, tokens_of(seed, 1300))
        await rig.service.append(name, tokens=tokens_of(2, 300))
        await rig.sleep(name)
    await asyncio.to_thread(damage, store, "a", span=1)  # of both versions
    await asyncio.to_thread(damage, store, "b", version=1)  # the newest has another last span
    plan = await rig.service.maintain(operation="repair", dry_run=True)
    assert [(each.session, each.version) for each in plan.actions if each.kind == "heal"] == [(str(A), 2)]
    assert [each.message.partition(" is ")[0] for each in plan.problems] == ["Version 1 of torpor://default/b"]
    done = await rig.service.maintain(operation="repair")
    assert [each.message for each in done.problems] == [each.message for each in plan.problems]


async def test_a_planned_repair_says_where_this_daemon_heals_nothing(rig: Rigged, store: Path) -> None:
    await rig.asleep("a", TEXT)
    await asyncio.to_thread(damage, store, "a", span=1)
    rig.service._parts.models.shelf.places[MODEL].leaving = True
    plan = await rig.service.maintain(operation="repair", dry_run=True)
    assert plan.actions[-1].reason.startswith("It is not computed again: ")
    assert [each.kind for each in plan.actions if each.session == str(A)] == ["keep"]
    assert len(plan.problems) == 1
    rig.service._parts.models.shelf.places[MODEL].leaving = False


@pytest.mark.one_in(2)
async def test_a_planned_repair_tells_of_a_session_that_too_many_wait_for_and_of_the_others(
    rig: Rigged, store: Path
) -> None:
    for seed, name in enumerate("ab"):
        await rig.asleep(name, tokens_of(seed, 1300))
        await asyncio.to_thread(damage, store, name, span=1)
    async with crowded(rig, "a"):
        plan = await rig.service.maintain(operation="repair", dry_run=True)
    reasons = {(each.session, each.kind): each.reason for each in plan.actions}
    assert reasons[str(A), "keep"].startswith("It is not computed again: session_busy")
    assert "are computed again" in reasons["torpor://default/b", "heal"]
