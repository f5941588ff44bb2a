"""What a machine remembers of a session that was removed, or that another machine has, counts no more."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.disk.remote import Remote
from torpor.memvid.errors import Diverged, LeaseHeld, RemoteUnreachable
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.machines import OpenMachine, S, freed, remote_of, unreachable
from torpor.tests.daemon.session_rig import tokens_of, until

OTHER = SessionUri("default", "other")


def _is_sent(*_: Any, **__: Any) -> Any:
    raise AssertionError("It is sent.")


async def test_who_was_told_that_another_machine_has_a_session_goes_on_with_it_without_no_answer(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began here while the remote was silent, and there: from the answer on this machine waits for the other."""
    async with machine("one") as one, machine("two") as two:
        with monkeypatch.context() as patch:
            patch.setattr(remote_of(one)._threads, "run_at_once", unreachable)
            await one.read("s", [1, 2, 3])
            await one.service.append("s", tokens=[4])
        await two.read("s", [7, 8, 9])
        with pytest.raises(LeaseHeld):
            await one.service.append("s", tokens=[5])
        monkeypatch.setattr(remote_of(one)._threads, "run_at_once", unreachable)
        with pytest.raises(RemoteUnreachable):
            await one.service.append("s", tokens=[5])


@pytest.mark.parametrize("asleep", [True, False])
async def test_no_session_begins_without_an_answer_under_a_name_that_was_seen_at_another_machine(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch, *, asleep: bool
) -> None:
    """Both would tell turns of it. Once it was seen to be removed there, one may begin."""
    async with machine("one") as one, machine("two") as two:
        await two.read("s", [7, 8, 9])
        ask = partial(one.service.append, "s", tokens=[5], create=True)
        if asleep:
            await two.sleep("s")
            await freed(two)
            await remote_of(one).head(S)
        else:
            with pytest.raises(LeaseHeld):
                await ask()
        with monkeypatch.context() as patch:
            patch.setattr(remote_of(one)._threads, "run_at_once", unreachable)
            with pytest.raises(RemoteUnreachable):
                await ask()
        await two.service.delete("s")
        await remote_of(one).head(S)
        monkeypatch.setattr(remote_of(one)._threads, "run_at_once", unreachable)
        assert (await ask()).token_count == 1


async def test_a_session_that_came_from_another_machine_is_not_the_one_that_began_here_alone(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one was removed: only while nobody else can have a session is it used without an answer."""
    async with machine("one") as one, machine("two") as two:
        with monkeypatch.context() as patch:
            patch.setattr(remote_of(one)._threads, "run_at_once", unreachable)
            await one.read("s", [1, 2, 3])
            await one.service.delete("s")
        await two.read("s", [7, 8, 9])
        await two.service.save("s", remote=True)
        await one.service.pull("s")
        monkeypatch.setattr(remote_of(one)._threads, "run_at_once", unreachable)
        with pytest.raises(RemoteUnreachable):
            await one.service.append("s", tokens=[5])


async def test_turns_of_a_session_that_was_removed_do_not_go_to_another_one_of_its_name(machine: OpenMachine) -> None:
    """They wait to be sent, and the new session has the name before that."""
    async with machine("one", remote_turns=0.5) as one:
        await one.read("s", tokens_of(1, 30))
        await one.service.delete("s")
        await one.service.create("s")
        await one.read("other", [1, 2, 3])
        await until(lambda: bool(remote_of(one).leases[OTHER].head.tail))
        assert not remote_of(one).leases[S].head.tail


async def test_a_removal_asks_the_remote_whatever_is_remembered(machine: OpenMachine) -> None:
    """`heads.json` may be lost, and remembers so many sessions at most."""
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        one.service._parts.store.disk._core.seen_heads._revisions.clear()
        assert not (await one.service.delete("s")).problems
        assert not (await two.service.remote()).sessions


async def test_a_version_that_the_remote_has_is_not_sent_again_and_again(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later one was removed here, and could not be removed there."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await one.wake("s")
        await one.service.append("s", tokens=[1, 2, 3])
        await one.service.save("s", remote=True)
        disk, uploading = one.service._parts.store.disk, one.service._parts.upkeep.uploading
        assert uploading is not None
        disk.delete_version(S, disk.require_session(S).bundle_id)
        with monkeypatch.context() as patch:
            patch.setattr(RemoteSessions, "push", _is_sent)
            await uploading.look_at(S)
        assert S not in uploading._noted


async def test_a_session_that_another_machine_goes_on_with_meanwhile_is_not_removed(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at what the remote has, and the taking."""
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        take = Remote._take

        async def late(remote: Remote, uri: SessionUri) -> Any:
            monkeypatch.setattr(Remote, "_take", take)
            await two.wake("s")
            await two.service.append("s", tokens=[9])
            await two.sleep("s")
            await freed(two)
            return await take(remote, uri)

        monkeypatch.setattr(Remote, "_take", late)
        (problem,) = (await one.service.delete("s")).problems
        assert problem.code == Diverged.code
        assert (await one.wake("s")).token_count == 301


async def test_a_removal_that_the_remote_refuses_keeps_the_session_from_nobody(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await one.wake("s")
        await one.service.append("s", tokens=[1, 2, 3])
        await one.sleep("s")
        await freed(one)

        def refused(*_: Any) -> Any:
            raise Diverged("It has gone on.")

        monkeypatch.setattr(RemoteSessions, "drop_version", refused)
        assert (await one.service.delete("s@1")).problems
        assert (await two.service.remote()).sessions[0].place == "asleep"


@pytest.mark.parametrize("what", ["packs", "tails"])
async def test_what_was_on_its_way_to_the_remote_while_its_session_was_removed_does_not_stay_there(
    what: str, machine: OpenMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version, with its text, and turns. No head names them, and a collection comes hours later."""
    async with machine("one", remote_turns=0.01) as one:
        sessions = remote_of(one).sessions
        coming, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

        def slow(ask: Any) -> Any:
            def asked(key: str, *rest: Any) -> Any:
                if key.startswith(what):
                    coming.set()
                    assert goes_on.wait(30)
                return ask(key, *rest)

            return asked

        def noted(ask: Any) -> Any:
            def asked(*given: Any, **options: Any) -> Any:
                try:
                    return ask(*given, **options)
                finally:
                    ended.set()

            return asked

        verb, sends = ("put", "push") if what == "packs" else ("create", "send_turns")
        await one.read("s", tokens_of(1, 30))
        monkeypatch.setattr(sessions._objects, verb, slow(getattr(sessions._objects, verb)))
        monkeypatch.setattr(RemoteSessions, sends, noted(getattr(RemoteSessions, sends)))
        if what == "packs":
            await one.service.save("s")
        else:
            await one.service.append("s", tokens=[1, 2, 3])
        await until(coming.is_set)
        await one.service.delete("s")
        goes_on.set()
        await until(ended.is_set)
        shared = tmp_path / "shared"
        # A turn of the reading may be on its way beside a pack: it is taken back once its own request has ended.
        await until(
            lambda: not [path for each in ("versions", "places", "tails") for path in (shared / each).rglob("*.*")]
        )
