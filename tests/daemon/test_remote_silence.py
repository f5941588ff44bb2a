"""A remote that does not answer: what goes on without it, what waits for it, and what is said of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.disk.remote_threads import RemoteThreads
from torpor.memvid.errors import RemoteUnreachable
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.machines import OpenMachine, S, freed, remote_of, silent, unreachable
from torpor.tests.daemon.session_rig import tokens_of, until


async def test_what_goes_on_without_the_remote_waits_for_a_silent_one_once(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new session, and a removal; what needs an answer asks, and then it is silent no more."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        loop = one.service._parts.upkeep.loop  # which has the answer a moment later than others see what it asked for
        await until(lambda: not any(each.running for each in loop.states()))
        monkeypatch.setattr("torpor.daemon.disk.remote_threads._SLOW_S", 0.0)
        asked = list[SessionUri]()

        def asked_in_vain(uri: SessionUri, *_: Any) -> Any:
            asked.append(uri)
            raise RemoteUnreachable("No answer.")

        with monkeypatch.context() as patch:
            patch.setattr(remote_of(one).sessions._objects, "get", silent)
            patch.setattr(remote_of(one).sessions, "take", asked_in_vain)
            patch.setattr(remote_of(one).sessions, "require_droppable", asked_in_vain)
            await one.read("new", [1, 2, 3])
            await one.read("newer", [1, 2, 3])
            (problem,) = (await one.service.delete("s")).problems
            assert problem.code == "remote_unreachable"
            assert asked == [SessionUri("default", "new")]
        await remote_of(one).head(S)
        await one.read("newest", [1, 2, 3])
        assert remote_of(one).has(SessionUri("default", "newest"))


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
        report = await one.service.close()
        assert len(asked) == 1
        assert sorted(report.unsent) == [f"torpor://default/s{number}" for number in range(3)]


async def test_a_stop_tells_nothing_of_what_the_remote_has(machine: OpenMachine) -> None:
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        await one.read("t", [1, 2, 3])
        assert (await one.service.close()).unsent == ()


async def test_a_session_begins_without_an_answer_and_goes_there_later(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local work goes on; what another machine may have does not."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        with monkeypatch.context() as patch:
            patch.setattr(RemoteThreads, "run_at_once", unreachable)
            await one.read("new", tokens_of(2, 300))
            with pytest.raises(RemoteUnreachable, match=r"may have \S+/s by now.* --fork NAME` goes on here"):
                await one.wake("s")
            with pytest.raises(RemoteUnreachable, match="new has begun here while"):
                await one.service.push("new")
            receipt = await one.service.sleep("new", remote=True)
            assert (receipt.remote, receipt.remote_problem.code) == (None, "remote_unreachable")
    async with machine("two") as two:
        assert (await two.wake("new")).token_count == 300


async def test_a_session_of_the_remote_is_never_used_without_its_answer_whatever_is_remembered(
    machine: OpenMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a store remembers of heads may go: then nothing tells whether another machine has the session."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
    (tmp_path / "one" / "heads.json").unlink()
    async with machine("one") as one:
        monkeypatch.setattr(RemoteThreads, "run_at_once", unreachable)
        with pytest.raises(RemoteUnreachable):
            await one.wake("s")
        await one.read("new", [1, 2, 3])
        await one.service.append("new", tokens=[4])


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


async def test_a_daemon_without_a_remote_warns_of_a_store_that_has_had_one(machine: OpenMachine) -> None:
    async with machine("one", remote=None) as one:
        await one.asleep("s", tokens_of(1, 40))
        assert one.service.warnings == ()
    async with machine("one") as one:
        await one.wake("s")
        await one.sleep("s")
        await freed(one)
        assert one.service.warnings == ()
    async with machine("one", remote=None) as one:
        (warning,) = one.service.warnings
        assert "has had a remote, and the daemon has none" in warning
        heads = Path(one.service._parts.store.disk.path) / "heads.json"
        assert str(heads) in warning
    heads.unlink()
    async with machine("one", remote=None) as one:
        assert one.service.warnings == ()


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


@pytest.mark.one_in(1)
async def test_a_shared_folder_that_is_gone_does_not_answer_and_is_used_again_once_it_is_back(
    machine: OpenMachine, tmp_path: Path
) -> None:
    """Moved away or removed, and an empty one in its place: it is no empty remote, and is not used through what was
    open."""
    shared, away = tmp_path / "shared", tmp_path / "away"
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 40))
        await freed(one)
        await one.read("t", tokens_of(2, 40))
        shared.rename(away)
        for is_there in (False, True):
            if is_there:
                shared.mkdir()
            for asks in (one.service.remote(), one.wake("s"), one.service.push("s")):
                with pytest.raises(RemoteUnreachable, match="is another folder" if is_there else "open: No such file"):
                    await asks
        await one.sleep("t")
        with pytest.raises(RemoteUnreachable):
            await one.service.push("t")
        assert not list(shared.iterdir())
        shared.rmdir()
        shutil.copytree(away, shared)
        await one.service.push("t")
        assert (await one.wake("s")).token_count == 40
        assert {each.session for each in (await one.service.remote()).sessions} == {
            "torpor://default/s",
            "torpor://default/t",
        }


async def test_a_daemon_begins_while_its_shared_folder_is_not_there(machine: OpenMachine, tmp_path: Path) -> None:
    """As with an object store that does not answer; the folder is used once it is there."""
    shared = tmp_path / "shared"
    shared.rmdir()
    async with machine("one") as one:
        (warning,) = one.service.warnings
        assert "could not open: No such file" in warning
        await one.asleep("s", tokens_of(1, 40))
        shared.mkdir()
        await freed(one)
