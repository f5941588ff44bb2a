"""What is healed, what is put off, and what a repair may take: nothing that could be computed again another time."""

from __future__ import annotations

import asyncio
import errno
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.errors import RepairPutOff, ServiceClosed, UnknownModel
from torpor.daemon.upkeep import healing
from torpor.daemon.upkeep.healing import _MAX_TOLD, _put_off
from torpor.daemon.upkeep.scrubbing import ScrubPolicy
from torpor.memvid import Store
from torpor.memvid.errors import CorruptBlock, StoreIoError
from torpor.memvid.folder.scrub_mark import place_of
from torpor.memvid.format.bundle import FrameFile
from torpor.memvid.uri import SessionUri
from torpor.snapshot.errors import IdentityMismatch
from torpor.tests.daemon.damage_rig import TEXT, damage, mend, told
from torpor.tests.daemon.session_rig import MODEL, Gate, Rigged, as_killed, crowded, listening, tokens_of, until

A = SessionUri("default", "a")


def newest(rig: Any, name: str = "a") -> tuple[int, int]:
    row = rig.service.store.find_session(SessionUri("default", name))
    return row.version, row.token_count


def counts(store: Path) -> dict[str, int]:
    with Store.open(store, writable=False) as opened:
        return {row.uri.name: row.token_count for row in opened.iter_sessions()}


@asynccontextmanager
async def _no_memory(rig: Any, _full_disk: Any) -> Any:
    """The budget is cut down to the model and a few tokens."""
    info = rig.service.residency.memory.info()
    await rig.service.residency.resize(info.weights_bytes + 100_000)
    yield
    await rig.service.residency.resize(info.budget_bytes)


@asynccontextmanager
async def _no_space(_rig: Any, full_disk: Any) -> Any:
    disk = full_disk()
    yield
    disk.free()


@asynccontextmanager
async def _changed(rig: Any, _full_disk: Any) -> Any:
    rig.service.shelf.places[MODEL].changed = ("weights",)
    yield
    rig.service.shelf.places[MODEL].changed = ()


# --- a repair that somebody asks for


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("hindrance", "why"),
    [(_no_memory, "memory_budget_exceeded"), (_no_space, "no_space"), (_changed, "model_changed")],
)
async def test_an_asked_repair_cuts_nothing_that_can_be_healed_another_time(
    rig: Rigged, store: Path, full_disk: Any, hindrance: Any, why: str
) -> None:
    await rig.asleep("a", TEXT)
    await asyncio.to_thread(damage, store, "a", span=1)
    async with hindrance(rig, full_disk):
        with pytest.raises(RepairPutOff) as refused:
            await rig.service.maintain(operation="repair")
        assert list(refused.value.sessions) == [str(A)]
        assert refused.value.sessions[str(A)].startswith(why)
        assert str(A) in refused.value.message
        assert newest(rig) == (1, 1300)
    result = await rig.service.maintain(operation="repair")
    assert not [action for action in result.actions if action.kind == "salvage"]
    assert newest(rig) == (2, 1300)


async def test_an_awake_session_that_cannot_be_kept_puts_an_asked_repair_off(
    rig: Rigged, store: Path, full_disk: Any
) -> None:
    await rig.asleep("a", TEXT)
    await rig.wake("a")
    await asyncio.to_thread(damage, store, "a", span=1)
    async with _no_space(rig, full_disk):
        with pytest.raises(RepairPutOff):
            await rig.service.maintain(operation="repair")
    assert newest(rig) == (1, 1300)


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
        with pytest.raises(RepairPutOff) as refused:
            await asked
        assert {f"torpor://default/{name}" for name in "bc"} <= refused.value.sessions.keys()
        await stopping
        await rig.service.close()
    assert counts(store) == {"a": 1300, "b": 1300, "c": 1300}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [UnknownModel, IdentityMismatch])
async def test_a_session_of_a_model_that_is_not_served_is_repaired_when_that_is_asked_for_and_only_then(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    async with open_rig() as rig, listening(rig) as heard:
        await rig.asleep("a", TEXT)
        await asyncio.to_thread(damage, store, "a", span=1)

        def unknown(*_args: Any, **_options: Any) -> Any:
            raise kind("it is another model's")

        monkeypatch.setattr(rig.service.residency, "room_to_wake", unknown)
        await mend(rig)
        assert newest(rig) == (1, 1300)
        result = await rig.service.maintain(operation="repair")
        assert [action.kind for action in result.actions if action.kind == "salvage"] == ["salvage"]
        assert newest(rig) == (2, 256)
    assert len(heard.of("heal_failed")) == 2


def test_a_refusal_names_a_few_and_counts_the_rest() -> None:
    refused = _put_off({SessionUri("default", f"s{at}"): "no_space: it is full." for at in range(_MAX_TOLD + 3)})
    assert "torpor://default/s0 (no_space: it is full); torpor://default/s1" in refused.message
    assert "and 3 others" in refused.message
    assert f"s{_MAX_TOLD} " not in refused.message
    assert len(refused.sessions) == _MAX_TOLD + 3


@pytest.mark.one_in(2)
@pytest.mark.parametrize("awake", [False, True])
async def test_what_could_not_be_read_just_now_is_not_taken_for_damaged(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch, awake: bool
) -> None:
    async with open_rig() as rig, listening(rig) as heard:
        await rig.asleep("a", TEXT)
        if awake:
            await rig.wake("a")
        refuse_reads(monkeypatch, 1)
        await mend(rig)
        assert newest(rig) == (1, 1300), "nothing was computed or written"
        refuse_reads(monkeypatch, 2)  # the first only makes it suspect
        with pytest.raises(RepairPutOff) as refused:
            await rig.service.maintain(operation="repair")
        assert refused.value.sessions[str(A)].startswith("store_io")
        assert (await rig.service.maintain(operation="repair")).actions == ()
        assert newest(rig) == (1, 1300)
    assert [each["code"] for each in heard.of("heal_failed")] == ["store_io", "store_io"]
    assert len(heard.of("store_repaired")) == 0


def refuse_reads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The system refuses the next reads of a block's payloads."""
    check, refused = FrameFile.check_payloads, []

    def checked(file: FrameFile, *args: Any, **options: Any) -> Any:
        if len(refused) < count:
            refused.append(1)
            raise StoreIoError("Cannot read.", path=file.path, action="read", errno=errno.EIO)
        return check(file, *args, **options)

    monkeypatch.setattr(FrameFile, "check_payloads", checked)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("crash", ["behind the heal", "in it"])
async def test_turns_of_a_session_that_went_back_before_its_healed_version_survive_a_kill(
    open_rig: Any, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str
) -> None:
    killed = tmp_path / "killed"

    def kill() -> None:
        as_killed(store)

    write = Store.write_bundle

    def write_and_kill(store: Store, **options: Any) -> Any:
        receipt = write(store, **options)
        kill()
        return receipt

    async with open_rig() as rig:
        await rig.asleep("a", TEXT)
        await rig.wake("a", at_token=100)
        await rig.service.append("a", tokens=tokens_of(3, 10))
        damage(store, "a")
        with monkeypatch.context() as patch:
            if crash == "in it":
                patch.setattr(Store, "write_bundle", write_and_kill)
            await mend(rig)
        assert [count for _, count in await versions_of(rig)] == [1300, 1300]
        if crash == "behind the heal":
            kill()
    async with open_rig(store=killed) as rig:
        assert (await rig.wake("a")).token_count == 110


# --- earlier versions


async def versions_of(rig: Any) -> list[tuple[int, int]]:
    return [(each.version, each.token_count) for each in (await rig.service.show("a")).versions]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tagged", [False, True])
async def test_a_damaged_earlier_version_with_tokens_of_its_own_is_given_up_by_none_but_who_asks(
    open_rig: Any, store: Path, tagged: bool
) -> None:
    async with open_rig() as rig, listening(rig) as heard:
        await rig.asleep("a", TEXT)
        if tagged:
            await rig.service.mark("a@1", tag="before")
        await rig.wake("a", at_token=100)
        await rig.service.append("a", tokens=tokens_of(3, 10))
        await rig.sleep("a")
        await asyncio.to_thread(damage, store, "a", version=1, span=4)
        await mend(rig)
        assert await versions_of(rig) == [(1, 1300), (2, 110)]
        await rig.service.maintain(operation="repair")
        assert await versions_of(rig) == [(2, 110)]
    assert [each["code"] for each in heard.of("heal_failed")] == ["repair_put_off"]
    assert heard.of("store_repaired") == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("tagged", [False, True])
async def test_a_damaged_earlier_version_whose_tokens_a_sound_one_has_is_only_kept_for_its_mark(
    open_rig: Any, store: Path, tagged: bool
) -> None:
    async with open_rig() as rig, listening(rig) as heard:
        await rig.asleep("a", TEXT[:300])
        if tagged:
            await rig.service.mark("a@1", tag="before")
        await rig.service.append("a", tokens=TEXT[300:])
        await rig.sleep("a")
        await asyncio.to_thread(damage, store, "a", version=1, span=1)
        await mend(rig)
        assert await versions_of(rig) == ([(1, 300)] if tagged else []) + [(2, 1300)]
    assert len(heard.of("store_repaired")) == (not tagged)


async def test_an_earlier_version_that_shares_the_damage_of_the_newest_is_not_given_up_unasked(
    rig: Rigged, store: Path
) -> None:
    await rig.read("a", tokens_of(1, 40))
    await rig.service.append("a", tokens=tokens_of(2, 560))
    await rig.sleep("a")
    await rig.service.mark("a@1", tag="before")
    await rig.wake("a", at_token=270)
    await rig.service.append("a", tokens=tokens_of(3, 10))
    await rig.sleep("a")
    await asyncio.to_thread(damage, store, "a", span=0)
    await mend(rig)
    assert (1, 600) in await versions_of(rig)
    assert (await rig.wake("a")).token_count == 280


async def test_an_earlier_version_that_nobody_can_compute_holds_no_repair_up(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig, listening(rig) as heard:
        await rig.asleep("a", TEXT)
        await rig.wake("a", at_token=100)
        await rig.service.append("a", tokens=tokens_of(3, 10))
        await rig.sleep("a")
        await asyncio.to_thread(damage, store, "a", version=1, span=-1, kind="state")
        await mend(rig)
        assert await versions_of(rig) == [(2, 110)]
    assert len(heard.of("store_repaired")) == 1


# --- a stop


RARE = ScrubPolicy(1 << 40, idle_s=0.05, round_s=3600.0, look_s=0.01)


async def close_in_the_midst(rig: Any, gate: Gate) -> None:
    """Tell the daemon to stop, and only then let go on what the gate holds up."""
    await gate.reached()
    closing = asyncio.create_task(rig.service.close())
    await until(lambda: rig.service.hibernation.stopping is not None)
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
        assert [(row.version, row.token_count) for row in opened.versions(SessionUri("default", first))] == [(1, 1300)]
    async with open_rig(scrub=RARE) as rig, listening(rig) as heard:
        await told(heard, "store_repaired")
        await rig.wake(first)
        assert await rig.fingerprint(first) == before


@pytest.mark.one_in(2)
async def test_a_stop_waits_for_one_block_of_what_a_heal_reads_of_the_store(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig() as rig:
        for seed, name in enumerate("abcd"):
            await rig.asleep(name, tokens_of(seed, 1300))
    damage(store, "a", span=0)
    gate, sound, seen = Gate(), healing._is_sound, []

    def watched(*args: Any) -> bool:
        seen.append(1)
        if len(seen) == 2:
            gate.pass_through()
        return sound(*args)

    monkeypatch.setattr(healing, "_is_sound", watched)
    async with open_rig(close=False) as rig:
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
            await rig.service.maintain(operation="quantise", session="a", bits=bits)
        await rig.wake("a")
        await rig.service.append("a", tokens=tokens_of(9, 40))
        had = list(rig.live("a").state.tokens)
        assert list((await rig.service.close()).ledgers)
    return had


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["plain", "gemma3_text", "lfm2"])
async def test_a_repair_without_a_daemon_keeps_a_ledger_before_which_only_the_record_is_lost(
    open_kind: Any, store: Path, kind: str
) -> None:
    had = await leave_a_ledger(open_kind(kind, stop_within=0), 600)
    damage(store, "a", kind="state")
    with Store.open(store, writable=True) as opened:
        report = opened.repair()
        lost = [finding.message for finding in opened.verify(deep=True).findings]
    (salvage,) = [action for action in report.actions if action.kind == "salvage"]
    assert salvage.reason == "The first 640 of its 640 tokens are sound and become a new version."
    assert [", 0 are gone until" in message for message in lost] == [True, True]
    async with open_kind(kind) as rig:
        (info,) = await rig.service.list_sessions()
        assert (info.token_count, info.unread_tokens) == (640, 40)
        woken = await rig.wake("a")
        assert woken.token_count == 640
        assert list(rig.live("a").state.tokens) == had


async def test_a_repair_without_a_daemon_cuts_a_ledger_before_which_tokens_are_lost(open_rig: Any, store: Path) -> None:
    await leave_a_ledger(open_rig(stop_within=0), 600)
    damage(store, "a", span=1)
    with Store.open(store, writable=True) as opened:
        (salvage,) = [action for action in opened.repair().actions if action.kind == "salvage"]
        row = opened.find_session(A)
    assert salvage.reason.startswith("The first 256 of its 640 tokens")
    assert (row.token_count, row.unread_tokens, row.salvaged.of) == (256, 0, 640)


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
        assert (info.token_count, info.unread_tokens, info.salvaged) == (1340, 316, None)
        woken = await rig.wake("a")
        assert woken.token_count == 1340
        assert list(rig.live("a").state.tokens) == had
        assert (rig.live("a").loss.bits, rig.live("a").loss.tokens) == (8, 1024)


# --- a repair that is only planned


@pytest.mark.one_in(2)
async def test_a_planned_repair_tells_of_the_healing_and_of_no_loss_that_it_spares(rig: Rigged, store: Path) -> None:
    await rig.asleep("a", TEXT)
    await asyncio.to_thread(damage, store, "a", span=1)
    plan = await rig.service.maintain(operation="repair", dry_run=True)
    first = plan.actions[0]
    assert (first.kind, first.session, first.version) == ("heal", str(A), 1)
    assert "1,044 tokens or more" in first.reason
    assert "Only if that fails: " in first.reason
    assert "salvage" in first.reason
    assert plan.problems == ()
    assert not [each for each in plan.actions if each.kind in ("salvage", "quarantine")]
    assert newest(rig) == (1, 1300), "nothing was done"
    done = await rig.service.maintain(operation="repair")
    assert (newest(rig), done.problems) == ((2, 1300), ())


async def test_a_planned_repair_tells_of_the_loss_where_this_daemon_heals_nothing(rig: Rigged, store: Path) -> None:
    await rig.asleep("a", TEXT)
    await asyncio.to_thread(damage, store, "a", span=1)
    rig.service.shelf.places[MODEL].leaving = True
    plan = await rig.service.maintain(operation="repair", dry_run=True)
    assert {"salvage", "quarantine"} <= {each.kind for each in plan.actions}
    assert "heal" not in {each.kind for each in plan.actions}
    assert len(plan.problems) == 1
    rig.service.shelf.places[MODEL].leaving = False


@pytest.mark.one_in(2)
async def test_a_planned_repair_tells_of_a_session_that_too_many_wait_for_and_of_the_others(
    rig: Rigged, store: Path
) -> None:
    for name in "ab":
        await rig.asleep(name, TEXT)
        await asyncio.to_thread(damage, store, name, span=1)
    async with crowded(rig, "a"):
        plan = await rig.service.maintain(operation="repair", dry_run=True)
    reasons = {each.session: each.reason for each in plan.actions if each.kind == "heal"}
    assert reasons[str(A)].startswith("session_busy")
    assert "are computed again" in reasons["torpor://default/b"]


async def test_a_planned_repair_says_of_earlier_versions_that_they_may_come_back(rig: Rigged, store: Path) -> None:
    await rig.asleep("a", TEXT)
    await rig.service.append("a", tokens=tokens_of(3, 300))
    await rig.sleep("a")
    await asyncio.to_thread(damage, store, "a", span=1)
    plan = await rig.service.maintain(operation="repair", dry_run=True)
    assert [(each.kind, each.version) for each in plan.actions if each.kind == "heal"] == [("heal", 2)]
    earlier = [each for each in plan.actions if each.version == 1]
    assert all(each.reason.startswith("unless what is computed again brings") for each in earlier)
    assert [each.message.startswith("unless what is computed again brings") for each in plan.problems] == [True]
