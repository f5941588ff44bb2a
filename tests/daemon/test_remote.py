"""Sessions that move between machines by a remote: daemons, each with a store of its own, and one folder for all."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.events import ProgressEvent, WorkEvent
from torpor.daemon.disk.remote import Remote
from torpor.daemon.disk.remote_threads import RemoteThreads
from torpor.daemon.errors import SessionExists, StopDeadline
from torpor.daemon.events.events import SleepBegan
from torpor.daemon.tasks.door import Phase
from torpor.memvid.errors import (
    BundleMissing,
    CorruptHead,
    Diverged,
    LeaseHeld,
    LeaseLost,
    NoSpace,
    OwnerMismatch,
    RemoteRefused,
    RemoteUnreachable,
    SessionNotFound,
)
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.remote.tails import put_record
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.machines import OpenMachine, S, dies, freed, remote_of
from torpor.tests.daemon.session_rig import Rigged, listening, tokens_of, until


async def test_a_session_goes_on_at_another_machine_at_the_next_token(machine: OpenMachine) -> None:
    """To the bit, as at the machine where it slept; and back, with what was added."""
    async with machine("one") as one, machine("two") as two:
        await one.read("s", tokens_of(1, 600))
        await one.sleep("s")
        await freed(one)
        report = await two.wake("s")
        assert (report.token_count, report.tokens_prefilled, report.version) == (600, 0, 1)
        state = await two.fingerprint("s")
        wrote = await two.write("s", 40)
        await two.sleep("s")
        await freed(two)
        report = await one.wake("s")
        assert (report.token_count, report.version) == (640, 2)
        grown = await one.fingerprint("s")
        await one.sleep("s")
        await freed(one)
        assert await one.woken_fingerprint("s", 1) == state
        await one.sleep("s")
        await one.service.fork("s@1", "control")
        await one.wake("control")
        assert await one.write("control", 40) == wrote
        assert await one.fingerprint("control") == grown


async def test_two_machines_never_have_one_session(machine: OpenMachine) -> None:
    """Who has it answers; the other one is told who that is, and makes no session of that name."""
    async with machine("one") as one, machine("two") as two:
        await one.read("s", tokens_of(1, 300))
        with pytest.raises(SessionNotFound):
            await two.wake("other")
        for asked in (two.service.create("s"), two.service.append("s", tokens=[1], create=True)):
            with pytest.raises(LeaseHeld) as refused:
                await asked
        assert refused.value.details["store"] == remote_of(one).sessions.me.store
        await one.sleep("s")
        await freed(one)
        await two.wake("s")
        with pytest.raises(LeaseHeld):
            await one.service.append("s", tokens=[5])
        with pytest.raises(SessionExists):
            await two.service.create("s")


async def test_who_makes_no_new_session_goes_on_with_that_of_the_remote(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As commands do at first: they say that a session is new only once the daemon knows none."""
    async with machine("one") as one, machine("two") as two:
        await one.read("s", tokens_of(1, 300))
        assert [each.place for each in (await two.service.remote()).sessions] == ["held"]
        with pytest.raises(LeaseHeld):
            await two.service.append("s", tokens=[5])
        await one.sleep("s")
        await freed(one)
        with monkeypatch.context() as patch:
            patch.setattr(Remote, "run", _unreachable)
            with pytest.raises(SessionNotFound):
                await two.service.append("s", tokens=[5])
        assert (await two.service.append("s", tokens=[5])).token_count == 301


async def test_no_new_session_has_a_name_that_another_machine_has(machine: OpenMachine) -> None:
    """Whatever makes it: each would be there twice."""
    async with machine("one") as one, machine("two") as two:
        await one.read("s", tokens_of(1, 30))
        await two.asleep("other", tokens_of(2, 300))
        root = (await two.service.tree("other")).branch
        for asked in (
            two.service.keep(root, "s"),
            two.service.keep(root, "s", subtree=True),
            two.service.fold("other", name="s", summary="So far."),
            two.service.fork("other", name="s"),
            two.service.import_bundle(bundle_id="ab" * 32, session="s"),
        ):
            with pytest.raises(LeaseHeld):
                await asked
        assert (await two.service.keep(root, "kept")).state == "awake"
        assert remote_of(two).has(SessionUri("default", "kept"))


async def test_many_leases_are_renewed_together(machine: OpenMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an answer takes long, one after the other would not come round in time; a fault of one is no other's."""
    async with machine("one", remote_lease=60.0) as one:
        for number in range(5):
            await one.read(f"s{number}", [1, 2, 3])
        all_at_it, at_it, renewed = threading.Event(), set[str](), set[str]()
        for uri, lease in remote_of(one).leases.items():

            def renew(uri: SessionUri = uri) -> None:
                if uri.name == "s0":
                    raise CorruptHead("It is damaged.", path="", reason="")
                at_it.add(uri.name)
                if len(at_it) == 4:
                    all_at_it.set()
                if all_at_it.wait(30):
                    renewed.add(uri.name)

            monkeypatch.setattr(lease, "renew", renew)
            monkeypatch.setattr(lease, "_renewed_s", lease._renewed_s - 30)
            monkeypatch.setattr(lease, "_tried_s", lease._renewed_s - 30)
        one.service._parts.upkeep.renewing.look_again()
        await until(lambda: renewed == {"s1", "s2", "s3", "s4"})


async def test_what_goes_on_without_the_remote_waits_for_a_silent_one_once(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new session, and a removal; what needs an answer asks, and then it is silent no more."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        monkeypatch.setattr("torpor.daemon.disk.remote_threads._SLOW_S", 0.0)
        asked = list[SessionUri]()

        def silent(uri: SessionUri, *_: Any) -> Any:
            asked.append(uri)
            raise RemoteUnreachable("No answer.")

        with monkeypatch.context() as patch:
            patch.setattr(remote_of(one).sessions._objects, "get", lambda *_: _raise(RemoteUnreachable("No answer.")))
            patch.setattr(remote_of(one).sessions, "take", silent)
            patch.setattr(remote_of(one).sessions, "require_droppable", silent)
            await one.read("new", [1, 2, 3])
            await one.read("newer", [1, 2, 3])
            (problem,) = (await one.service.delete("s")).problems
            assert problem.code == "remote_unreachable"
            assert asked == [SessionUri("default", "new")]
        await remote_of(one).head(S)
        await one.read("newest", [1, 2, 3])
        assert remote_of(one).has(SessionUri("default", "newest"))


async def test_a_stop_whose_time_is_over_leaves_an_upload(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At the next block: the daemon leaves within its time, and the next one sends the rest."""
    async with machine("one") as one:
        await one.read("s", tokens_of(1, 600))
        remote, sending, goes_on = remote_of(one), threading.Event(), threading.Event()
        put_pack = remote.sessions._versions.put_pack

        def slow(stream: Any) -> Any:
            sending.set()
            assert goes_on.wait(60)
            return put_pack(stream)

        monkeypatch.setattr(remote.sessions._versions, "put_pack", slow)
        await one.sleep("s")
        await until(sending.is_set)
        one.service._parts.door.begin_to_stop(Phase.STOPPING, 0.0)
        goes_on.set()
        await one.service.close()
    assert not list((tmp_path / "shared").glob("versions/*.mvm"))
    async with machine("one") as one:
        await freed(one)


async def test_a_stop_whose_time_is_over_leaves_a_version_that_comes(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 600))
        await freed(one)
        objects, coming, goes_on = remote_of(two).sessions._versions.objects, threading.Event(), threading.Event()
        get_ranges = objects.get_ranges

        def slow(*asked: Any) -> Any:
            coming.set()
            assert goes_on.wait(60)
            return get_ranges(*asked)

        monkeypatch.setattr(objects, "get_ranges", slow)
        waking = asyncio.create_task(two.wake("s"))
        await until(coming.is_set)
        two.service._parts.door.begin_to_stop(Phase.STOPPING, 0.0)
        goes_on.set()
        with pytest.raises(StopDeadline):
            await waking
        await two.service.close()
        assert (await one.wake("s")).token_count == 600


async def test_a_stop_asks_a_remote_that_does_not_answer_once(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for each session: an answer may take ten seconds not to come."""
    async with machine("one") as one:
        for number in range(3):
            await one.read(f"s{number}", [1, 2, 3])
        asked = list[object]()

        def silent(*_: Any, **__: Any) -> Any:
            asked.append(_)
            raise RemoteUnreachable("No answer.")

        await one.service._parts.upkeep.loop.close()
        monkeypatch.setattr(remote_of(one).sessions, "push", silent)
        await one.service.close()
        assert len(asked) == 1


async def test_a_session_is_shown_at_the_machine_that_has_it(machine: OpenMachine) -> None:
    """As far as is known here without a question: from the start on, and from each refusal; until it is back."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
    async with machine("two") as two:
        await two.wake("s")
        there = remote_of(two).sessions.me.machine
        async with machine("one") as one:
            await until(lambda: remote_of(one).machine_of(S) is not None)
            (info,) = await one.service.list_sessions()
            shown, logged = await one.service.show("s"), await one.service.history(["s"])
            assert (info.machine, shown.info.machine, logged.machines) == (there, there, {str(S): there})
            (info,) = await two.service.list_sessions()
            assert info.machine is None
            await two.sleep("s")
            await freed(two)
            await one.wake("s")
            (info,) = await one.service.list_sessions()
            assert info.machine is None
            with pytest.raises(LeaseHeld):
                await two.service.append("s", tokens=[1])
            (info,) = await two.service.list_sessions()
            assert info.machine == there


async def test_what_another_machine_has_removed_is_at_none_once_the_remote_was_listed(machine: OpenMachine) -> None:
    """And nothing here counts on its versions there."""
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        await two.wake("s")
        assert [each.machine for each in (await one.service.remote()).sessions] == [remote_of(two).sessions.me.machine]
        assert remote_of(one).machine_of(S) is not None
        await two.service.delete("s")
        assert not (await one.service.remote()).sessions
        (info,) = await one.service.list_sessions()
        assert info.machine is None
        assert S not in remote_of(one).sessions.versions_seen


async def test_who_names_what_is_not_here_is_told_where_the_remote_is_listed(machine: OpenMachine) -> None:
    """It may be spelled otherwise there. Of a session that is here, a version that it lacks is no such case."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        for asked in (one.wake("t"), one.service.append("t", tokens=[1]), one.service.show("t")):
            with pytest.raises(SessionNotFound, match="`torpor ls --remote`"):
                await asked
        with pytest.raises(SessionNotFound) as refused:
            await one.wake("s@7")
        assert "--remote" not in refused.value.message


async def test_a_daemon_takes_its_own_sessions_back(machine: OpenMachine, tmp_path: Path) -> None:
    """T1: it was killed: the next one of its store has them at once, and sends what was not sent."""
    async with machine("one", close=False) as one:
        await one.read("s", tokens_of(1, 300))
        await one.service.save("s")
    await dies(one)
    async with machine("one") as one:
        report = await one.wake("s")
        assert (report.token_count, report.tokens_prefilled) == (300, 0)
    async with machine("two") as two:
        assert (await two.wake("s")).token_count == 300


async def test_a_stop_sends_what_sleeps_then(machine: OpenMachine) -> None:
    """The next machine has it, without waiting for a lease."""
    async with machine("one") as one:
        await one.read("s", tokens_of(1, 300))
        await one.service.generate("s", max_tokens=5)
    async with machine("two") as two:
        assert (await two.wake("s")).token_count == 305


async def test_who_asks_for_a_session_gets_it_once_nobody_uses_it(machine: OpenMachine) -> None:
    async with machine("one", remote_lease=1.0) as one, machine("two", remote_lease=1.0) as two:
        await one.read("s", tokens_of(1, 300))
        told = list[WorkEvent]()
        async with listening(one, names=["sleep_began"]) as heard:
            report = await two.service.wake("s", on_event=told.append)
        assert [each.event.cause for each in heard if isinstance(each.event, SleepBegan)] == ["handover"]
        assert not one.is_awake("s")
        machine_name = remote_of(one).sessions.me.machine
        asking = [each for each in told if isinstance(each, ProgressEvent) and each.stage == "handover"]
        assert {each.machine for each in asking} == {report.came_from} == {machine_name}
        assert 0.2 < report.waited_seconds < report.seconds
        assert (await two.wake("s")).came_from is None


async def test_what_sleeps_for_its_disuse_is_free_for_others_at_once(machine: OpenMachine) -> None:
    """And not at its next renewal: it is sent while its sleep still has its turn."""
    async with machine("one", remote_lease=3600.0, idle_sleep=0.1) as one, machine("two") as two:
        for number in range(4):
            await one.read(f"s{number}", tokens_of(number, 300))
        for number in range(4):
            await asyncio.wait_for(freed(one, SessionUri("default", f"s{number}")), 25)
            assert (await two.wake(f"s{number}")).token_count == 300


@pytest.mark.parametrize("sent", ["version", "turn"])
async def test_who_asks_is_seen_by_whatever_is_sent_and_waits_for_no_renewal(machine: OpenMachine, sent: str) -> None:
    """That renews the lease, too: while turns were sent, a request waited for the first renewal behind them."""
    async with machine("one", remote_lease=3600.0, remote_turns=0.0) as one, machine("two") as two:
        await one.read("s", tokens_of(1, 300))
        told = list[WorkEvent]()
        waking = asyncio.create_task(two.service.wake("s", on_event=told.append))
        await until(lambda: bool(told))
        await (one.service.save("s") if sent == "version" else one.service.append("s", tokens=[1, 2]))
        assert (await asyncio.wait_for(waking, 25)).token_count == (300 if sent == "version" else 302)


async def test_a_wake_that_may_fork_goes_on_with_what_can_be_had_and_asks_nobody(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another machine has the session, or nothing tells whether one has. What is free is woken itself."""
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        report = await two.service.wake("s", fork="not-needed")
        assert (report.session, report.remote_problem) == (str(S), None)
        await two.service.append("s", tokens=[1, 2, 3])
        await two.service.push("s")
        await two.service.append("s", tokens=[4])
        report = await one.service.wake("s", fork="here")
        assert (report.session, report.token_count) == ("torpor://default/here", 303)
        assert report.remote_problem is not None
        assert report.remote_problem.code == "lease_held"
        assert report.provenance.forked_from is not None
        assert report.provenance.forked_from.session == str(S)
        head = await remote_of(two).head(S)
        assert head is not None
        assert (head.request, head.awake_at) == (None, remote_of(two).sessions.me)
        with monkeypatch.context() as patch:
            patch.setattr(RemoteThreads, "run_at_once", _unreachable)
            report = await one.service.wake("s@1", fork="offline", at_token=200)
            assert report.token_count == 200
            assert report.remote_problem is not None
            assert report.remote_problem.code == "remote_unreachable"
            with pytest.raises(RemoteUnreachable):
                await one.service.wake("unknown", fork="another")


async def test_who_asks_no_more_leaves_the_session_where_it_is(machine: OpenMachine) -> None:
    """The request is taken back: else the session would be put to sleep for nobody."""
    async with machine("one") as one, machine("two") as two:
        await one.read("s", tokens_of(1, 300))
        told = list[WorkEvent]()
        asked = asyncio.create_task(two.service.wake("s", on_event=told.append))
        await until(lambda: bool(told))
        head = await remote_of(two).head(S)
        assert head is not None
        assert head.request == remote_of(two).sessions.me
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        head = await remote_of(two).head(S)
        assert head is not None
        assert head.request is None


async def test_who_is_gone_before_the_session_was_taken_keeps_it_from_nobody(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would renew its lease, nor give it back."""
    async with machine("one") as one:
        remote, asked, goes_on = remote_of(one), threading.Event(), threading.Event()
        take = remote.sessions.take

        def held(*arguments: Any) -> Any:
            asked.set()
            assert goes_on.wait(60)
            return take(*arguments)

        monkeypatch.setattr(remote.sessions, "take", held)
        creating = asyncio.create_task(one.service.create("s"))
        await until(asked.is_set)
        creating.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await creating
        head = await remote.head(S)
        assert head is not None
        assert head.awake_at is None


@pytest.mark.one_in(1)
async def test_a_machine_whose_lease_ran_out_tells_nothing(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is begun then; once the remote answers again, and nobody has taken the session, it goes on."""
    async with machine("one", remote_lease=1.0) as one:
        await one.read("s", tokens_of(1, 300))
        with monkeypatch.context() as patch:
            patch.setattr(RemoteThreads, "run_at_once", _unreachable)
            await until(lambda: not remote_of(one).has(S))
            with pytest.raises(RemoteUnreachable):
                await one.service.append("s", tokens=[1, 2, 3])
        await one.service.append("s", tokens=[1, 2, 3])
        assert len(one.live("s").state.tokens) == 303


async def _unreachable(*_: Any, **__: Any) -> None:
    await asyncio.sleep(0)
    raise RemoteUnreachable("No answer.")


@pytest.mark.one_in(1)
async def test_a_renewal_that_failed_is_tried_again_before_the_lease_runs_out(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is not put off, as other upkeep is that fails."""
    async with machine("one", remote_lease=1.0) as one:
        await one.read("s", tokens_of(1, 300))
        await one.service.save("s")
        await until(lambda: remote_of(one).leases[S].head.newest is not None)
        lease, tries = remote_of(one).leases[S], list[int]()
        renew = lease.renew

        def fails_at_first() -> None:
            tries.append(1)
            if len(tries) < 3:
                raise RemoteUnreachable("It is away.")
            renew()

        monkeypatch.setattr("torpor.daemon.upkeep.loop.AGAIN_S", 3600.0)
        monkeypatch.setattr(lease, "renew", fails_at_first)
        await until(lambda: len(tries) > 3)


async def test_a_lease_is_renewed_while_its_version_comes(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: else another machine could take the session meanwhile."""
    async with machine("one") as one, machine("two", remote_lease=1.0) as two:
        await one.read("s", tokens_of(1, 300))
        await one.sleep("s")
        await freed(one)
        remote, moving, goes_on = remote_of(two), threading.Event(), threading.Event()
        pull = remote.sessions.pull

        def slow(head: Any, **options: Any) -> Any:
            moving.set()
            assert goes_on.wait(60)
            return pull(head, **options)

        monkeypatch.setattr(remote.sessions, "pull", slow)
        waking = asyncio.create_task(two.wake("s"))
        try:
            await until(moving.is_set)
            taken = await remote.head(S)
            async with asyncio.timeout(30):
                while (renewed := await remote.head(S)) == taken:
                    await asyncio.sleep(0.01)
        finally:
            goes_on.set()
            await waking
        assert taken is not None
        assert renewed is not None
        assert renewed.epoch == taken.epoch == remote.leases[S].epoch


async def test_versions_that_move_leave_threads_to_renewals(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were each to wait on a thread for the one before, no renewal would get one."""
    async with machine("one") as one:
        remote, moving, goes_on = remote_of(one), threading.Event(), threading.Event()

        def slow(head: Any, **_: Any) -> None:
            moving.set()
            assert goes_on.wait(60)

        monkeypatch.setattr(remote.sessions, "pull", slow)
        pulls = [asyncio.create_task(remote.pull(None)) for _ in range(8)]  # type: ignore[arg-type]
        await until(moving.is_set)
        renewed = asyncio.create_task(remote.run(lambda: None))
        try:
            await until(renewed.done)
        finally:
            goes_on.set()
            await asyncio.gather(*pulls, renewed)


async def test_a_lease_that_runs_out_in_a_turn_keeps_its_answer_from_being_told(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T2: whoever asked is told that it is not his; both machines never answer."""
    async with machine("one", remote_lease=1.0) as one, machine("two", remote_lease=1.0) as two:
        await one.read("s", tokens_of(1, 300))
        await one.service.save("s")
        await until(lambda: remote_of(one).leases[S].head.newest is not None)
        lease = remote_of(one).leases[S]
        gate = one.held("acknowledge") if hasattr(one, "held") else None
        assert gate is None
        monkeypatch.setattr(lease, "renew", lambda: _raise(RemoteUnreachable("No answer.")))
        monkeypatch.setattr(lease, "_renewed_s", float("-inf"))
        monkeypatch.setattr(Remote, "has", lambda self, uri: self is remote_of(one))
        with pytest.raises(LeaseLost):
            await one.service.append("s", tokens=[1, 2, 3])
        assert two is not one


def _raise(error: Exception) -> None:
    raise error


async def test_what_has_gone_on_at_two_places_stays_at_both(machine: OpenMachine, tmp_path: Path) -> None:
    """A machine that was away too long has turns of its own: nothing of either is lost, and the way out is told."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
    async with machine("one", remote=None) as one:
        await one.service.append("s", tokens=tokens_of(2, 50))
        await one.sleep("s")
    async with machine("two") as two:
        await two.wake("s")
        await two.service.append("s", tokens=tokens_of(3, 20))
    async with machine("one") as one:
        with pytest.raises(Diverged, match="torpor fork"):
            await one.wake("s")
        await one.service.fork("s", "mine")
        assert (await one.wake("mine")).token_count == 350
        await one.service.delete("s")
        assert (await one.wake("s")).token_count == 320


async def test_a_session_begins_without_an_answer_and_goes_there_later(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local work goes on; what another machine may have does not."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        with monkeypatch.context() as patch:
            patch.setattr(RemoteThreads, "run_at_once", _unreachable)
            await one.read("new", tokens_of(2, 300))
            with pytest.raises(RemoteUnreachable, match=r"may have \S+/s by now.* --fork NAME` goes on here"):
                await one.wake("s")
            with pytest.raises(RemoteUnreachable, match="new has begun here while"):
                await one.service.push("new")
            receipt = await one.service.sleep("new", remote=True)
            assert (receipt.remote, receipt.remote_problem.code) == (None, "remote_unreachable")
    async with machine("two") as two:
        assert (await two.wake("new")).token_count == 300


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("turns", "survive"), [(0.0, 345), (0.2, 345), (None, 300)])
async def test_what_was_answered_survives_the_loss_of_the_machine(
    machine: OpenMachine, turns: float | None, survive: int
) -> None:
    """Its store is gone for good. Each turn, or those of some time before; or what slept."""
    async with machine("one", close=False, remote_lease=1.0, remote_turns=turns) as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        for more in (tokens_of(2, 30), tokens_of(3, 15)):
            await one.service.append("s", tokens=more)
        if turns:
            while not ((head := await remote_of(one).head(S)) and head.tail and len(one.live("s").state.tokens) == 345):
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.3)
        await dies(one)
    async with machine("two", remote_lease=1.0) as two:
        report = await two.wake("s")
        assert report.token_count == survive
        assert list(two.live("s").state.tokens) == [*tokens_of(1, 300), *tokens_of(2, 30), *tokens_of(3, 15)][:survive]
        await two.service.append("s", tokens=[7])
        await two.sleep("s")
        await freed(two)
        head = await remote_of(two).head(S)
        assert head is not None
        assert not head.tail


@pytest.mark.one_in(1)
async def test_a_session_that_never_slept_survives_too(machine: OpenMachine) -> None:
    async with machine("one", close=False, remote_lease=1.0, remote_turns=0.0) as one:
        await one.read("s", tokens_of(1, 300))
        await one.service.append("s", tokens=[1, 2, 3])
        await dies(one)
    async with machine("two", remote_lease=1.0) as two:
        assert (await two.wake("s")).token_count == 303


@pytest.mark.one_in(1)
async def test_a_dialogue_goes_on_in_the_session_that_came_from_another_machine(machine: OpenMachine) -> None:
    """Found by what was said, which only the other machine has heard."""
    said = [{"role": "user", "content": "hello"}]
    async with machine("one") as one:
        first = await one.service.converse("s", said, max_tokens=4)
    said += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and?"}]
    async with machine("two") as two:
        await two.wake("s")
        then = await two.service.converse("s", said, max_tokens=4)
    assert then.session == first.session
    assert then.prefilled_tokens == then.token_count - len(then.tokens) - first.token_count


async def test_what_is_removed_does_not_come_back(machine: OpenMachine) -> None:
    """Not from the remote, nor by a machine that slept over it; and a new session of the name is another one."""
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        await two.wake("s")
        await two.sleep("s")
        await freed(two)
        report = await one.service.delete("s")
        assert not report.problems
        with pytest.raises(SessionNotFound):
            await one.wake("s")
        head = await remote_of(one).head(S)
        assert head is not None
        assert not head.versions
        assert not await remote_of(two).is_behind(S)
    async with machine("two"):
        pass
    async with machine("one") as one:
        with pytest.raises(SessionNotFound):
            await one.wake("s")
        await one.asleep("s", tokens_of(2, 40))
        await freed(one)
    async with machine("two") as two:
        with pytest.raises(Diverged):
            await two.wake("s")


async def test_what_another_machine_has_gone_on_with_is_not_removed_with_a_copy(machine: OpenMachine) -> None:
    """What goes is what is here, and it is said what stays; who is offline is told so, too."""
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        await two.wake("s")
        await two.service.append("s", tokens=[1, 2, 3])
        await two.sleep("s")
        await freed(two)
        (problem,) = (await one.service.delete("s")).problems
        assert problem.code == "diverged"
        assert (await one.wake("s")).token_count == 303


async def _goes_on_elsewhere(one: Rigged, two: Rigged) -> None:
    """A session that is awake at `two`, and unchanged, is taken from it by `one`, which reads 50 tokens and sleeps."""
    await one.asleep("s", tokens_of(1, 300))
    await freed(one)
    await two.wake("s")
    remote_of(two).leases[S].release(asleep=True)  # as if it had run out
    await one.wake("s")
    await one.service.append("s", tokens=tokens_of(2, 50))
    await one.sleep("s")
    await freed(one)
    assert two.is_awake("s")


async def test_a_pull_leaves_no_older_state_in_memory(machine: OpenMachine) -> None:
    """The next turn goes on from what was pulled beneath the session."""
    async with machine("one") as one, machine("two") as two:
        await _goes_on_elsewhere(one, two)
        await two.service.pull("s")
        await two.service.append("s", tokens=[7])
        assert list(two.live("s").state.tokens) == [*tokens_of(1, 300), *tokens_of(2, 50), 7]


async def test_a_request_that_was_given_up_leaves_no_older_state_in_memory(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the newer version came for it."""
    async with machine("one") as one, machine("two") as two:
        await _goes_on_elsewhere(one, two)
        sessions, came, goes_on = remote_of(two).sessions, threading.Event(), threading.Event()
        pull = sessions.pull

        def held(head: Any, **options: Any) -> Any:
            pulled = pull(head, **options)
            came.set()
            assert goes_on.wait(60)
            return pulled

        monkeypatch.setattr(sessions, "pull", held)
        asked = asyncio.create_task(two.service.append("s", tokens=[9]))
        await until(came.is_set)
        asked.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await two.service.append("s", tokens=[7])
        assert list(two.live("s").state.tokens) == [*tokens_of(1, 300), *tokens_of(2, 50), 7]


async def test_a_pull_of_a_session_that_is_awake_elsewhere_keeps_it_from_nothing(machine: OpenMachine) -> None:
    """Turns behind the newest version become one where the session is: a version of another machine would diverge."""
    async with machine("one", remote_turns=0.0) as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        await one.service.append("s", tokens=tokens_of(2, 50))
        assert (await two.service.pull("s")).version == 1
        await one.service.append("s", tokens=tokens_of(3, 50))
        await one.sleep("s")
        await freed(one)
        assert (await two.wake("s")).token_count == 400


async def test_a_turn_that_comes_while_a_version_is_sent_stays_in_the_remote(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands behind that version, and was told."""
    async with machine("one", remote_turns=0.0) as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        await one.service.append("s", tokens=[1])
        remote, sent, goes_on, pushing = remote_of(one), threading.Event(), threading.Event(), list[str]()
        lease = remote.leases[S]
        push, change = remote.sessions.push, lease.change

        def noted(of: Any, goes_on: Any, **named: Any) -> Any:
            pushing.append(threading.current_thread().name)
            return push(of, goes_on, **named)

        def held(edit: Any) -> Any:
            if pushing == [threading.current_thread().name]:
                sent.set()
                assert goes_on.wait(60)
            return change(edit)

        monkeypatch.setattr(remote.sessions, "push", noted)
        monkeypatch.setattr(lease, "change", held)
        await one.service.save("s")
        await until(sent.is_set)
        pushing.append("another thread may have its name from now on")
        await one.service.append("s", tokens=[2, 3])
        told = await remote.head(S)
        goes_on.set()
        assert told is not None
        while (head := await remote.head(S)) is None or head.newest == told.newest:
            await asyncio.sleep(0.01)
        assert head.tail == told.tail != ()


async def test_a_session_whose_turns_are_no_version_yet_is_kept(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who took it then would go on without them."""
    async with machine("one", remote_turns=None) as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        await one.service.append("s", tokens=[1, 2, 3])
        disk, tries = one.service._parts.store.disk, list[int]()

        def full(_: SessionUri) -> None:
            tries.append(1)
            raise NoSpace("It is full.", path="")

        with monkeypatch.context() as patch:
            patch.setattr(disk, "replay_turns", full)
            one.service._parts.sessions.awake.drop(S)
            await until(lambda: bool(tries))
            head = await remote_of(one).head(S)
        assert head is not None
        assert head.awake_at == remote_of(one).sessions.me
        assert (await one.wake("s")).token_count == 303


async def test_a_head_that_changes_while_it_is_read_is_no_replayed_one(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was seen meanwhile is newer than what was asked for."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        objects, asked, goes_on = remote_of(one).sessions._objects, threading.Event(), threading.Event()
        get, reading = objects.get, list[str]()

        def held(key: str, most_bytes: int) -> Any:
            found = get(key, most_bytes)
            if reading == [threading.current_thread().name]:
                asked.set()
                assert goes_on.wait(60)
            return found

        def read() -> Any:
            reading.append(threading.current_thread().name)
            return remote_of(one).sessions.heads.read(S)

        monkeypatch.setattr(objects, "get", held)
        head = asyncio.create_task(asyncio.to_thread(read))
        await until(asked.is_set)
        await one.service.append("s", tokens=[1])  # takes the session: its head is a newer one
        goes_on.set()
        assert (await head).head.newest is not None


@pytest.mark.parametrize("error", [RemoteRefused("Not now."), LeaseLost("It is another machine's.")], ids=str)
async def test_a_renewal_that_was_refused_puts_off_no_other(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """An object store refuses for a moment while credentials are made anew; a session that was lost is taken again."""
    async with machine("one", remote_lease=1.0) as one:
        await one.read("s", tokens_of(1, 300))
        lease, tries = remote_of(one).leases[S], list[int]()
        renew = lease.renew

        def refused_at_first() -> None:
            tries.append(1)
            if len(tries) == 1:
                raise error
            renew()

        monkeypatch.setattr("torpor.daemon.upkeep.loop.AGAIN_S", 3600.0)
        monkeypatch.setattr(lease, "renew", refused_at_first)
        await until(lambda: len(tries) > 1)


async def test_who_asks_for_a_session_does_not_wait_for_what_failed_before(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload that failed is put off, and longer each time; a hand-over is not."""
    monkeypatch.setattr("torpor.daemon.upkeep.loop.AGAIN_S", 3600.0)
    async with machine("one", remote_lease=1.0) as one, machine("two", remote_lease=1.0) as two:
        await one.read("s", tokens_of(1, 300))
        tries = list[int]()

        async def fails(*_: Any, **__: Any) -> None:
            await asyncio.sleep(0)
            tries.append(1)
            raise RemoteUnreachable("No answer.")

        with monkeypatch.context() as patch:
            patch.setattr(remote_of(one), "push", fails)
            await one.service.save("s")
            await until(lambda: bool(tries))
        assert (await asyncio.wait_for(two.wake("s"), 60)).token_count == 300


async def test_turns_stand_behind_no_version_of_another_session(machine: OpenMachine) -> None:
    """Who may write in the remote may name one: its tokens would be this session's, and it would be here, too."""
    async with machine("one", remote_turns=0.0) as one, machine("two") as two:
        for name in ("s", "other"):
            await one.asleep(name, tokens_of(1, 300))
            await freed(one, SessionUri("default", name))
        await one.service.append("s", tokens=[5])
        disk, remote = one.service._parts.store.disk, remote_of(one)
        turns, other = disk.acknowledged_turns(S), disk.require_session(SessionUri("default", "other"))
        assert turns is not None
        key = put_record(
            remote.sessions._versions, dataclasses.replace(turns, base=other.bundle_id), remote.sessions.me.store
        )
        remote.leases[S].change(lambda head: dataclasses.replace(head, tail=(key,)))
        remote.leases[S].release(asleep=True)
        with pytest.raises(OwnerMismatch):
            await two.wake("s")
        assert two.service._parts.store.disk.find_session(other.uri) is None


async def test_a_forget_leaves_no_mark_of_the_head_that_it_changed(machine: OpenMachine) -> None:
    """The drop from the remote writes the head once more."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        await one.service.maintain("forget", session="s")
        assert not remote_of(one).sessions.is_known(S)


async def test_a_session_of_the_remote_is_never_used_without_its_answer_whatever_is_remembered(
    machine: OpenMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a store remembers of heads may go: then nothing tells whether another machine has the session."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
    (tmp_path / "one" / "heads.json").unlink()
    async with machine("one") as one:
        monkeypatch.setattr(RemoteThreads, "run_at_once", _unreachable)
        with pytest.raises(RemoteUnreachable):
            await one.wake("s")
        await one.read("new", [1, 2, 3])
        await one.service.append("new", tokens=[4])


async def test_one_bad_head_leaves_the_others_in_the_listing(machine: OpenMachine, tmp_path: Path) -> None:
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 30))
        await freed(one)
        (tmp_path / "shared" / "heads" / "default" / "bad").write_bytes(b"x")
        listed = await one.service.remote()
        assert [each.session for each in listed.sessions] == [str(S)]
        assert [each.code for each in listed.problems] == ["corrupt_head"]


@pytest.mark.one_in(1)
async def test_what_no_journal_keeps_is_not_dropped_for_what_another_machine_has(machine: OpenMachine) -> None:
    """A turn that was told stays a version here, and the session is said to have gone on in both places."""
    async with machine("one", durability="sleep", remote_lease=1.0) as one, machine("two", remote_lease=1.0) as two:
        await one.read("s", tokens_of(1, 300))
        await one.service.save("s")
        await until(lambda: remote_of(one).leases[S].head.newest is not None)
        await one.service.append("s", tokens=[1, 2, 3])
        await one.service._parts.upkeep.loop.close()  # no renewal any more, as in a suspend
        await two.wake("s")
        await two.service.append("s", tokens=[9])
        await two.sleep("s")
        await freed(two)
        with pytest.raises(Diverged):
            await one.service.append("s", tokens=[4])
        assert one.service._parts.store.disk.require_session(S).token_count == 303


async def test_a_version_that_is_removed_does_not_come_back(machine: OpenMachine) -> None:
    """The newest one: the session is as the one before it, on each machine."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await one.wake("s")
        await one.service.append("s", tokens=[1, 2, 3])
        await one.sleep("s")
        await freed(one)
        await one.service.delete("s@2")
        assert (await one.wake("s")).token_count == 300
    async with machine("two") as two:
        assert (await two.wake("s")).token_count == 300


@pytest.mark.one_in(1)
def test_a_daemon_without_a_remote_imports_nothing_of_one(tmp_path: Path) -> None:
    """But the records and the handlers of its verbs."""
    program = f"""
import asyncio, sys
from pathlib import Path
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service

async def serve():
    service = await Service.open(ServeOptions(store=Path({str(tmp_path)!r}) / "store"))
    await service.close()

asyncio.run(serve())
print(*[name for name in sys.modules if any(part in name for part in ("remote", "obstore", "cryptography"))])
"""
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | home, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert set(told.split()) == {"torpor.daemon.api.remote", "torpor.daemon.verbs.remote"}


async def test_a_second_receipt_says_that_the_remote_has_it(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the remote the first one stands, and the next try gives the second."""
    async with machine("one") as one:
        await one.read("s", tokens_of(1, 300))
        saved = await one.service.save("s", remote=True)
        head = await remote_of(one).head(S)
        assert head is not None
        assert saved.remote is not None
        assert head.newest == saved.remote.bundle_id == saved.bundle_id
        assert one.is_awake("s")
        await one.service.append("s", tokens=[1, 2, 3])
        with monkeypatch.context() as patch:
            patch.setattr(Remote, "push", _unreachable)
            slept = await one.service.sleep("s", remote=True)
        assert (slept.token_count, slept.remote) == (303, None)
        assert slept.remote_problem is not None
        assert slept.remote_problem.code == "remote_unreachable"
        assert "torpor push" in slept.remote_problem.message
        assert not one.is_awake("s")
        again = await one.service.sleep("s", remote=True)
        assert (again.already_asleep, again.remote_problem) == (True, None)
        assert again.remote is not None
        assert (again.remote.version, again.remote.bundle_id) == (slept.version, slept.bundle_id)
        head = await remote_of(one).head(S)
        assert head is not None
        assert (head.newest, head.awake_at) == (slept.bundle_id, None)


async def test_a_daemon_begins_while_the_remote_does_not_answer(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new session goes there once it does."""

    def away(_: RemoteSessions) -> None:
        raise RemoteUnreachable("No answer.")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteSessions, "require_proven", away)
        begun = machine("one")
        one = await begun.__aenter__()
        assert one.service.warnings == ("No answer. What the remote has is not used here before it answers.",)
        await one.read("s", tokens_of(1, 40))
    await one.sleep("s")
    await freed(one)
    await begun.__aexit__(None, None, None)


async def test_a_push_sends_again_what_is_missing_or_damaged(machine: OpenMachine, tmp_path: Path) -> None:
    """Of a version that the remote has, as far as is remembered here: that is what refusals advise."""
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        for what, damage in (("packs", None), ("versions", None), ("places", b"x")):
            for path in (tmp_path / "shared" / what).iterdir():
                path.unlink()
                if damage is not None:
                    path.write_bytes(damage)
        with pytest.raises(BundleMissing):
            await two.wake("s")
        assert (await one.service.push("s")).blocks_sent > 0
        assert (await two.wake("s")).token_count == 300


async def test_who_waits_to_send_what_another_request_has_sent_loses_nothing(machine: OpenMachine) -> None:
    """A sleep that waits for the remote has let the session go by then: that is no lost lease."""
    async with machine("one") as one:
        await one.read("s", tokens_of(1, 300))
        remote = remote_of(one)
        async with remote._moving:
            waiting = asyncio.create_task(remote.push(S))
            await asyncio.sleep(0)
            await remote.release(S)
        assert await waiting is None


async def test_the_status_tells_that_the_remote_does_not_answer_until_it_does(machine: OpenMachine) -> None:
    def silent() -> None:
        raise RemoteUnreachable("It does not answer.", url="file:///there")

    async with machine("one") as one:
        with pytest.raises(RemoteUnreachable):
            await remote_of(one).run(silent)
        told = (await one.service.status()).remote
        assert told is not None
        assert told.problem == "It does not answer."
        await remote_of(one).head(S)
        told = (await one.service.status()).remote
        assert told is not None
        assert told.problem is None
