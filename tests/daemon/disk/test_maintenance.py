"""The store is looked after while sessions are served: who waits for whom, and what stays of a session in memory."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.disk import maintenance
from torpor.daemon.disk.upkeep_thread import UpkeepThread
from torpor.daemon.errors import ServiceClosed, SessionExists
from torpor.daemon.upkeep.retaining import Retaining
from torpor.memvid.answers import Action, Finding, MaintenanceReport
from torpor.memvid.errors import BundleMissing, NameTaken, SessionNotFound, StoreIoError
from torpor.memvid.exchange.incoming import hand_over
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.session_rig import (
    DEADLINE_S,
    Gate,
    Rigged,
    cancelled,
    manifests,
    packs,
    tokens_of,
    until,
    wait_for,
)

NOTHING = MaintenanceReport("repack", False)


@dataclasses.dataclass
class Held:
    """gate: holds the operations; threads: those they run on; done: what has come to its end."""

    gate: Gate = dataclasses.field(default_factory=Gate)
    threads: list[str] = dataclasses.field(default_factory=list)
    done: list[str] = dataclasses.field(default_factory=list)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """Prunes that stop, on their thread, until the gate is opened."""
    holding = Held()

    def prune(_store: Store, *_: Any, **__: Any) -> MaintenanceReport:
        holding.threads.append(threading.current_thread().name)
        holding.gate.pass_through()
        holding.done.append("operation ended")
        return NOTHING

    monkeypatch.setattr(Store, "prune", prune)
    return holding


def pruning(rig: Any) -> asyncio.Future[Any]:
    """A prune that is asked for."""
    return asyncio.ensure_future(rig.service.maintain(operation="prune", keep_last=1))


async def test_sessions_sleep_and_wake_while_an_operation_runs(rig: Rigged, held: Held) -> None:
    await rig.read("a", tokens_of(1, 300))
    running = pruning(rig)
    await held.gate.reached()
    async with asyncio.timeout(DEADLINE_S):
        assert (await rig.sleep("a")).version == 1
        assert (await rig.service.mark("a", tag="x")).version == 1
        assert (await rig.wake("a")).tokens_prefilled == 0
    assert held.done == []
    held.gate.open()
    await running


async def test_operations_run_one_after_the_other_on_one_thread(rig: Rigged, held: Held) -> None:
    running = [pruning(rig)]
    await held.gate.reached()
    running.append(pruning(rig))
    await rig.service.status()
    held.gate.open()
    await asyncio.gather(*running)
    # a second thread would have been made while the first was held
    assert held.threads == ["torpor-upkeep_0"] * 2


async def test_an_operation_whose_client_leaves_runs_to_its_end_threat_46(rig: Rigged, held: Held) -> None:
    asking = pruning(rig)
    await held.gate.reached()
    asking.cancel()
    await asyncio.sleep(0)
    assert not asking.done()
    held.gate.open()
    await cancelled(asking)
    assert held.done == ["operation ended"]


async def test_a_stop_cuts_a_repack_short(open_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def repack(_store: Store, *_: Any, should_stop: Callable[[], bool], **__: Any) -> MaintenanceReport:
        begun.set()
        wait_for(should_stop)
        return NOTHING

    monkeypatch.setattr(Store, "repack", repack)
    async with open_rig() as rig:
        running = asyncio.ensure_future(rig.service.maintain(operation="repack"))
        await until(begun.is_set)
        await rig.service.begin_close()
        await running  # before the second half of the stop


async def test_a_repack_stops_for_a_sleep_without_room_goes_on_after_it_and_reports_once(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Finding("/p", "corrupt_block", "m.")
    told: list[bool] = []
    begun = threading.Event()

    def repack(_store: Store, *_: Any, should_stop: Callable[[], bool], **__: Any) -> MaintenanceReport:
        number = len(told)
        begun.set()
        if not number:
            wait_for(should_stop)
        told.append(should_stop())
        action = Action("rewrite", f"/{number}", "torpor://default/a", 1, 5, "why")
        return MaintenanceReport("repack", False, (action,), 0, 7, 8, (found,))

    monkeypatch.setattr(Store, "repack", repack)
    async with open_rig() as rig:
        running = asyncio.ensure_future(rig.service.maintain(operation="repack"))
        await until(begun.is_set)
        thread = rig.service._parts.upkeep.loop.thread
        with thread.sleeps:
            before = thread.repacks_ended
            with thread.claims:
                assert await thread.wait_for_room(before)
                assert told == [True], "it does not begin again while the sleep has its room"
            result = await running
        assert told == [True, False]
        assert [action.path for action in result.actions] == ["/0", "/1"]
        assert (result.bytes_freed, result.bytes_written, len(result.problems)) == (14, 16, 1)


async def test_a_stop_lets_the_operation_that_runs_end_before_it_closes_the_store(
    open_rig: Any, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    close_thread, close_store = UpkeepThread.close, Store.close

    async def opening(self: UpkeepThread) -> None:
        held.gate.open()
        await close_thread(self)

    def noting(self: Store) -> None:
        held.done.append("store closed")
        close_store(self)

    monkeypatch.setattr(UpkeepThread, "close", opening)
    monkeypatch.setattr(Store, "close", noting)
    monkeypatch.setattr(Retaining, "note", lambda *_: None)  # it would wait behind the held operation
    async with open_rig() as rig:
        await rig.read("a", tokens_of(1, 20))
        running = pruning(rig)
        await held.gate.reached()
        assert (await rig.service.close()).slept == ("torpor://default/a",)
        held.gate.open()  # else a stop that does not wait leaves this test's thread behind
        await running
    assert held.done[:2] == ["operation ended", "store closed"]


async def test_an_operation_that_a_stop_finds_waiting_is_not_begun(rig: Rigged, held: Held) -> None:
    running = [pruning(rig), pruning(rig)]
    await held.gate.reached()
    await rig.service.begin_close()
    held.gate.open()
    await running[0]
    with pytest.raises(ServiceClosed):
        await running[1]
    assert held.done == ["operation ended"]


async def test_the_store_is_left_alone_once_the_daemon_stops(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 20))
    await rig.service.close()
    for late in (
        rig.service.maintain(operation="repack"),
        rig.service.maintain(operation="forget", session="a"),
        rig.service.mark("a", pinned=True),
        rig.service.import_bundle(bundle_id="ab" * 32),
    ):
        with pytest.raises(ServiceClosed):
            await late


async def test_a_report_is_plain_data_and_its_lists_are_bounded() -> None:
    action = Action("remove", "/p", "torpor://default/a", 1, 5, "why")
    finding = Finding("/p", "corrupt_block", "m.")
    report = MaintenanceReport("repack", False, (action,) * 10_005, 0, 7, 8, (finding,) * 1_002)
    result = maintenance.bounded(report)
    assert (len(result.actions), result.actions_left_out) == (10_000, 5)
    assert (len(result.problems), result.problems_left_out) == (1_000, 2)
    assert (result.bytes_freed, result.bytes_written) == (7, 8)
    json.dumps(dataclasses.asdict(result), allow_nan=False)
    assert maintenance.bounded(NOTHING).actions_left_out == 0


# --- forget


async def test_forgetting_a_session_that_never_slept_drops_it_from_memory_and_journal(rig: Rigged, store: Path) -> None:
    await rig.read("a", [1, 2])
    plan = await rig.service.maintain(operation="forget", session="a", dry_run=True)
    assert rig.is_awake("a")
    done = await rig.service.maintain(operation="forget", session="a")
    assert (plan.dry_run, done.dry_run) == (True, False)
    assert plan.actions == done.actions
    told = [(one.kind, one.path, one.session, one.reason) for one in done.actions]
    journal, gone = store / "journal" / "turns.mvj", "torpor://default/a"
    assert told == [
        ("remove", "", gone, "the awake session, 2 tokens, leaves memory"),
        ("remove", str(journal), gone, "Its turns in the journal go."),
    ]
    assert not journal.exists()
    with pytest.raises(SessionNotFound):
        await rig.sleep("a")


def removed(rig: Rigged, how: str) -> Any:
    """The removal of a session, when it is awaited."""
    return rig.service.delete("a") if how == "delete" else rig.service.maintain(operation="forget", session="a")


@pytest.mark.parametrize("awake", [True, False])
@pytest.mark.parametrize("how", ["delete", "forget"])
async def test_a_removed_session_is_gone_from_memory_and_disk(
    open_rig: Any, store: Path, how: str, awake: bool
) -> None:
    async with open_rig() as rig:
        await rig.asleep("a", tokens_of(1, 300))
        await rig.write("a", 2)
        await rig.sleep("a")
        if awake:
            await rig.wake("a")
        plan = await rig.service.maintain(operation="forget", session="a", dry_run=True)
        assert [not action.path for action in plan.actions].count(True) == awake
        assert len((await rig.service.show("a")).versions) == 2
        result = await removed(rig, how)
        assert (result.problems, result.bytes_freed > 0) == ((), True)
        assert [*await rig.service.list_sessions(), *packs(store), *manifests(store)] == []
        with pytest.raises(SessionNotFound):
            await rig.wake("a")
    async with open_rig() as rig:
        assert not await rig.service.list_sessions()


async def test_a_forget_of_a_session_that_is_gone_is_passed_on_for_what_it_has_left(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SessionUri] = []

    def note(_store: Store, uri: SessionUri, *, dry_run: bool) -> MaintenanceReport:
        asked.append(uri)
        return NOTHING

    with pytest.raises(SessionNotFound):
        await rig.service.maintain(operation="forget", session="a")
    monkeypatch.setattr(Store, "forget", note)
    for name in ("a", "work/b"):
        await rig.service.maintain(operation="forget", session=name)
    assert asked == [SessionUri("default", "a"), SessionUri("work", "b")]


@pytest.mark.parametrize("how", ["delete", "forget"])
async def test_a_removal_that_fails_leaves_the_session_in_memory(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    await rig.asleep("a", tokens_of(1, 300))
    await rig.write("a", 5)
    before = await rig.fingerprint("a")

    def fail(*_: object, **__: object) -> None:
        raise StoreIoError("the disk is gone")

    for name in ("forget", "delete_session"):
        monkeypatch.setattr(Store, name, fail)
    with pytest.raises(StoreIoError):
        await removed(rig, how)
    monkeypatch.undo()
    assert await rig.fingerprint("a") == before
    assert (await rig.sleep("a")).token_count == 305


async def test_a_forget_waits_for_the_sessions_turn(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    turn_held: list[bool] = []
    await rig.asleep("a", [1, 2])
    uri = rig.service._parts.sessions.resolve("a")

    def note(*_: Any, **__: Any) -> MaintenanceReport:
        turn_held.append(uri in rig.service._parts.sessions.residency.turns.in_use())
        return NOTHING

    monkeypatch.setattr(Store, "forget", note)
    async with rig.service._parts.sessions.residency.turns.take(uri):
        asking = asyncio.ensure_future(rig.service.maintain(operation="forget", session="a"))
        await asyncio.sleep(0)
        assert turn_held == []
    await asking
    assert turn_held == [True]


# --- versions


async def test_a_session_that_went_on_from_a_version_that_is_pruned_loses_nothing(rig: Rigged) -> None:
    await rig.asleep("a", tokens_of(1, 300))
    await rig.write("a", 2)
    await rig.sleep("a")
    await rig.wake("a", 1)
    await rig.write("a", 1)
    before = await rig.fingerprint("a")
    await rig.service.maintain(operation="prune", keep_last=1)
    assert (await rig.sleep("a")).version == 3
    assert await rig.woken_fingerprint("a") == before


async def test_operations_on_one_session_need_it_to_be_in_the_store(rig: Rigged) -> None:
    await rig.read("a", [1, 2])
    for operation in ("repack", "prune"):
        with pytest.raises(SessionNotFound):
            await rig.service.maintain(operation=operation, session="a", keep_last=1)


async def test_a_sleeping_session_survives_every_operation_bit_for_bit(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 600))
    before = await rig.fingerprint("a")
    await rig.sleep("a")
    await rig.asleep("b", tokens_of(2, 600))
    await rig.service.maintain(operation="forget", session="b")
    for operation in ("repack", "repair"):
        result = await rig.service.maintain(operation=operation)
        assert (result.operation, result.problems) == (operation, ())
    await rig.service.maintain(operation="repack", cold_after_days=0.0)
    assert await rig.woken_fingerprint("a") == before


# --- import


async def handed_over(rig: Rigged, tmp_path: Path, name: str = "a") -> str:
    """The id of the exported session, put where a client of the daemon puts one."""
    store, file = rig.service._parts.store.disk, tmp_path / f"{len(list(tmp_path.iterdir()))}.mvb"
    await asyncio.to_thread(store.export_session, SessionUri("default", name), None, file)
    return hand_over(store.path, str(file))


async def test_an_imported_session_wakes_bit_for_bit_under_another_name_or_its_own(
    rig: Rigged, store: Path, tmp_path: Path
) -> None:
    await rig.read("a", tokens_of(1, 300))
    before = await rig.fingerprint("a")
    slept = await rig.sleep("a")
    receipt = await rig.service.import_bundle(bundle_id=await handed_over(rig, tmp_path), session="b")
    assert (receipt.session, receipt.version, receipt.token_count) == ("torpor://default/b", 1, 300)
    bundle_id = await handed_over(rig, tmp_path)
    await rig.service.delete("a")
    assert (await rig.service.import_bundle(bundle_id=bundle_id)).bundle_id == slept.bundle_id
    for name in "ab":
        assert await rig.woken_fingerprint(name) == before
    assert list((store / "incoming").iterdir()) == []


async def test_nothing_is_imported_over_another_session_or_one_that_is_awake(rig: Rigged, tmp_path: Path) -> None:
    await rig.asleep("a", tokens_of(1, 300))
    bundle_id = await handed_over(rig, tmp_path)
    other = await rig.asleep("other", tokens_of(2, 300))
    with pytest.raises(NameTaken, match="torpor rm torpor://default/other"):
        await rig.service.import_bundle(bundle_id=bundle_id, session="other")
    await rig.wake("a")
    await rig.read("b", [1, 2])
    for session in (None, "a", "b"):
        with pytest.raises(SessionExists):
            await rig.service.import_bundle(bundle_id=bundle_id, session=session)
    assert len((await rig.service.show("a")).versions) == 1
    assert (await rig.service.show("other")).info.bundle_id == other.bundle_id


async def test_an_id_that_nobody_handed_over_is_missing(rig: Rigged) -> None:
    for session in (None, "b"):
        with pytest.raises(BundleMissing):
            await rig.service.import_bundle(bundle_id="ab" * 32, session=session)
