"""Whose a session is, daemon beside daemon: leases that are renewed, asked for, lost and taken back."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.events import ProgressEvent, WorkEvent
from torpor.daemon.disk.remote import Remote
from torpor.daemon.disk.remote_threads import RemoteThreads
from torpor.daemon.errors import SessionAwake
from torpor.daemon.events.events import SleepBegan
from torpor.memvid.errors import CorruptHead, LeaseLost, RemoteRefused, RemoteUnreachable
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.machines import OpenMachine, S, dies, freed, remote_of, silent, unreachable
from torpor.tests.daemon.session_rig import listening, tokens_of, until


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
        assert report.remote_problem.message == f"{S} is awake on {remote_of(two).sessions.me.machine}."
        with pytest.raises(SessionAwake, match="torpor fork torpor://default/s no-wake"):
            await two.service.wake("s", fork="no-wake")
        assert report.provenance.forked_from is not None
        assert report.provenance.forked_from.session == str(S)
        head = await remote_of(two).head(S)
        assert head is not None
        assert (head.request, head.awake_at) == (None, remote_of(two).sessions.me)
        with monkeypatch.context() as patch:
            patch.setattr(RemoteThreads, "run_at_once", unreachable)
            report = await one.service.wake("s@1", fork="offline", at_token=200)
            assert report.token_count == 200
            assert report.remote_problem is not None
            assert report.remote_problem.code == "remote_unreachable"
            assert report.remote_problem.message == "No answer."
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
            patch.setattr(RemoteThreads, "run_at_once", unreachable)
            await until(lambda: not remote_of(one).has(S))
            with pytest.raises(RemoteUnreachable):
                await one.service.append("s", tokens=[1, 2, 3])
        await one.service.append("s", tokens=[1, 2, 3])
        assert len(one.live("s").state.tokens) == 303


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
        monkeypatch.setattr(lease, "renew", silent)
        monkeypatch.setattr(lease, "_renewed_s", float("-inf"))
        monkeypatch.setattr(Remote, "has", lambda self, uri: self is remote_of(one))
        with pytest.raises(LeaseLost):
            await one.service.append("s", tokens=[1, 2, 3])
        assert two is not one


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
