"""A machine that was away comes back with turns that another one has taken over: nothing told is lost, and no session
is refused for it."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.daemon.disk import remote_threads
from torpor.daemon.disk.remote import Remote
from torpor.memvid.errors import LeaseLost, LimitExceeded, RemoteUnreachable
from torpor.memvid.remote.folder_objects import FolderObjects
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.machines import OpenMachine, S, dies, freed, remote_of, silent
from torpor.tests.daemon.session_rig import tokens_of, until

OTHER = SessionUri("default", "other")
FAST = {"remote_lease": 1.0, "remote_turns": 0.0}
BEGUN, MORE, YET_MORE, LAST = tokens_of(1, 300), tokens_of(2, 30), tokens_of(3, 15), tokens_of(4, 10)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("pushes", [True, False], ids=["slept-there", "died-there"])
@pytest.mark.parametrize("slept", [True, False], ids=["slept-here", "never-slept"])
async def test_a_machine_that_died_takes_what_another_went_on_with(
    machine: OpenMachine, *, slept: bool, pushes: bool
) -> None:
    """Its own turns are a beginning of that."""
    async with machine("one", close=False, **FAST) as one:
        if slept:
            await one.asleep("s", BEGUN)
            await freed(one)
        else:
            await one.read("s", BEGUN)
        await one.service.append("s", tokens=MORE)
        await dies(one)
    async with machine("two", close=False, **FAST) as two:
        await two.wake("s")
        await two.service.append("s", tokens=YET_MORE)
        if pushes:
            await two.sleep("s")
            await freed(two)
        await dies(two)
    async with machine("one", **FAST) as one:
        assert [each.here for each in (await one.service.remote()).sessions] == ["behind"]
        await one.wake("s")
        assert list(one.live("s").state.tokens) == [*BEGUN, *MORE, *YET_MORE]
        await one.service.append("s", tokens=LAST)
    async with machine("two", **FAST) as two:
        await two.wake("s")
        assert list(two.live("s").state.tokens) == [*BEGUN, *MORE, *YET_MORE, *LAST]


@pytest.mark.one_in(1)
async def test_a_machine_that_was_cut_off_goes_on_with_what_another_has_added(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the session in its memory, and its turns in its journal."""
    async with machine("one", **FAST) as one, machine("two", **FAST) as two:
        await one.asleep("s", BEGUN)
        await freed(one)
        await one.service.append("s", tokens=MORE)
        lease = remote_of(one).leases[S]
        monkeypatch.setattr(lease, "renew", lambda: None)
        await until(lambda: not remote_of(one).has(S))
        await two.wake("s")
        await two.service.append("s", tokens=YET_MORE)
        await two.sleep("s")
        await freed(two)
        await one.service.append("s", tokens=LAST)
        assert list(one.live("s").state.tokens) == [*BEGUN, *MORE, *YET_MORE, *LAST]


@pytest.mark.one_in(1)
async def test_a_turn_that_was_not_sent_is_not_kept_beside_what_others_add(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not told. Were it in the journal, the session could not go on here."""
    async with machine("one", close=False, **FAST) as one:
        await one.asleep("s", BEGUN)
        await freed(one)
        await one.wake("s")
        with monkeypatch.context() as patch:
            patch.setattr(Remote, "send_turns", _fails)
            with pytest.raises(RemoteUnreachable):
                await one.service.append("s", tokens=MORE)
        await dies(one)
    async with machine("two", **FAST) as two:
        await two.wake("s")
        await two.service.append("s", tokens=YET_MORE)
    async with machine("one", **FAST) as one:
        await one.wake("s")
        assert list(one.live("s").state.tokens) == [*BEGUN, *YET_MORE]


async def test_a_turn_that_was_refused_leaves_memory_with_its_answer(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last sleep of a stop would make a version of it, beside what another machine has added. What was told is
    there, and a client that asks again finds the turn once."""
    async with machine("one", **FAST) as one, machine("two", **FAST) as two:
        await one.asleep("s", BEGUN)
        await freed(one)
        await one.service.append("s", tokens=MORE)
        with monkeypatch.context() as patch:
            patch.setattr(Remote, "send_turns", _fails)
            with pytest.raises(RemoteUnreachable):
                await one.service.append("s", tokens=LAST)
        await one.service.append("s", tokens=LAST)
        assert list(one.live("s").state.tokens) == [*BEGUN, *MORE, *LAST]
        with monkeypatch.context() as patch:
            patch.setattr(Remote, "send_turns", _fails)
            with pytest.raises(RemoteUnreachable):
                await one.service.append("s", tokens=LAST)
        remote_of(one).leases[S].release(asleep=True)  # as if it had run out
        await two.wake("s")
        await two.service.append("s", tokens=YET_MORE)
        await one.service.close()
    async with machine("one", **FAST) as one:
        await one.wake("s")
        assert list(one.live("s").state.tokens) == [*BEGUN, *MORE, *LAST, *YET_MORE]


async def _fails(*_: Any) -> bool:
    raise RemoteUnreachable("No answer.")


@pytest.mark.one_in(1)
async def test_a_turn_that_is_too_long_for_a_record_is_sent_as_a_version(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with machine("one", close=False, **FAST) as one:
        await one.read("s", BEGUN)
        monkeypatch.setattr(RemoteSessions, "send_turns", _too_long)
        await one.service.append("s", tokens=MORE)
        await dies(one)
    async with machine("two", **FAST) as two:
        await two.wake("s")
        assert list(two.live("s").state.tokens) == [*BEGUN, *MORE]


@pytest.mark.parametrize("told", ["nothing", "turns", "a version", "turns behind a version"])
async def test_a_turn_that_is_too_long_to_be_sent_and_was_refused_is_not_kept_as_a_version(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    """It is made one before it can go there. All that was told is here still, and in a process that comes later."""
    async with machine("one", close=False, **FAST) as one:
        if told != "nothing":
            await one.read("s", BEGUN)
        if "version" in told:
            await one.sleep("s")
            await freed(one)
        if told == "turns behind a version":
            await one.service.append("s", tokens=MORE)
        with monkeypatch.context() as patch:
            patch.setattr(RemoteSessions, "send_turns", _too_long)
            patch.setattr(RemoteSessions, "push", silent)
            with pytest.raises(RemoteUnreachable):
                await one.service.append("s", tokens=LAST, create=True)
        before = {"nothing": [], "turns behind a version": [*BEGUN, *MORE]}.get(told, BEGUN)
        if told == "nothing":
            assert not await one.service.list_sessions()
        else:
            await one.wake("s")
            assert list(one.live("s").state.tokens) == before
        await dies(one)
    async with machine("one", **FAST) as one:
        await one.service.append("s", tokens=YET_MORE, create=True)
        assert list(one.live("s").state.tokens) == [*before, *YET_MORE]


def _too_long(*_: Any) -> bool:
    raise LimitExceeded("It is too long.", limit=0)


@pytest.mark.parametrize("case", ["lease-ran-out", "no-answer-at-first"])
async def test_who_makes_a_session_if_there_is_none_is_not_refused_for_one_that_comes_meanwhile(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Whether there is one is asked once. Nothing is told for certain then, and who asks again goes on with it."""
    async with machine("one", **FAST) as one, machine("two", **FAST) as two:
        remote = remote_of(one)
        hold, run_at_once = remote.hold, remote._threads.run_at_once

        async def first_hold(*asked: Any, **options: Any) -> Any:
            monkeypatch.setattr(remote, "hold", hold)
            if case == "no-answer-at-first":
                monkeypatch.setattr(remote._threads, "run_at_once", first_request)
            taken = await hold(*asked, **options)
            if case == "lease-ran-out":
                remote.leases[S].release(asleep=False)
            await two.asleep("s", BEGUN)
            await freed(two)
            return taken

        async def first_request(*_: Any) -> Any:
            monkeypatch.setattr(remote._threads, "run_at_once", run_at_once)
            raise RemoteUnreachable("No answer.")

        monkeypatch.setattr(remote, "hold", first_hold)
        with pytest.raises(LeaseLost if case == "lease-ran-out" else RemoteUnreachable):
            await one.service.append("s", tokens=MORE, create=True)
        await one.service.append("s", tokens=LAST, create=True)
        assert list(one.live("s").state.tokens) == [*BEGUN, *LAST]


@pytest.mark.parametrize("outage_s", [0.0, 3600.0], ids=["outage", "one-request"])
async def test_what_was_put_off_in_an_outage_goes_to_the_remote_with_its_next_answer(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch, outage_s: float
) -> None:
    """Versions and turns. Where others were answered meanwhile it waits: else a slow line would be full of retries."""
    monkeypatch.setattr("torpor.daemon.upkeep.loop.AGAIN_S", 3600.0)
    monkeypatch.setattr("torpor.daemon.upkeep.loop._MOST_AGAIN_S", 3600.0)
    monkeypatch.setattr(remote_threads, "_OUTAGE_S", outage_s)
    async with machine("one", remote_turns=0.01) as one:
        remote, loop = remote_of(one), one.service._parts.upkeep.loop

        def failures(of: str) -> int:
            return next(each.failures for each in loop.states() if each.name == of)

        await one.read("s", BEGUN)
        await one.read("other", BEGUN)
        with monkeypatch.context() as patch:
            for method in ("get", "size", "create", "replace", "put"):
                patch.setattr(FolderObjects, method, _away)
            await one.sleep("s")
            await one.service.append("other", tokens=MORE)
            await until(lambda: failures("remote") == failures("remote turns") == 1)
        before = remote.leases[OTHER].head.tail
        await remote.head(SessionUri("default", "any"))
        if outage_s:
            assert failures("remote") == failures("remote turns") == 1
            return
        await freed(one)
        await until(lambda: remote.leases[OTHER].head.tail != before)


def _away(*_: Any) -> Any:
    raise RemoteUnreachable("No answer.")
