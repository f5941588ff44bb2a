"""What is removed and forgotten leaves the remote, too: at once what a session has alone, and its packs later."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.disk.remote_budget import RemoteBudget
from torpor.daemon.errors import NoRemote
from torpor.memvid.answers import DeleteReport, MaintenanceReport
from torpor.memvid.errors import RemoteUnreachable, SessionNotFound, StoreIoError
from torpor.memvid.maintenance.forgetting import NOT_FORGOTTEN
from torpor.memvid.remote import collecting
from torpor.memvid.remote.folder_objects import FolderObjects
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.machines import OpenMachine, S, dies, freed, remote_of
from torpor.tests.daemon.session_rig import Rigged, tokens_of, until

NOTEBOOK = SessionUri("default", "notebook")


@pytest.fixture
def hours_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture: what waits an hour need not wait."""
    monkeypatch.setattr(collecting, "_GRACE_NS", 0)


def there(tmp_path: Path, *folders: str) -> list[str]:
    """The objects of the remote."""
    return sorted(
        str(path.relative_to(tmp_path / "shared"))
        for each in folders
        for path in (tmp_path / "shared" / each).rglob("*")
        if path.is_file()
    )


def told_of_remote(rig: Rigged, report: MaintenanceReport) -> set[tuple[str, str]]:
    """What was done with what is in which folder of it."""
    url = remote_of(rig).url
    return {
        (each.kind, each.path[len(url) + 1 :].split("/")[0]) for each in report.actions if each.path.startswith(url)
    }


async def repacked(rig: Rigged) -> list[tuple[str, str | None]]:
    report = await rig.service.maintain("repack", remote=True)
    assert not report.problems
    return [(each.kind, each.session) for each in report.actions]


async def test_a_forget_names_the_sessions_that_keep_its_blocks_in_the_remote(machine: OpenMachine) -> None:
    """A fork of its beginning needs a pack that has the rest of it, too."""
    async with machine("one") as one:
        await one.asleep("notebook", tokens_of(1, 600))
        await freed(one, NOTEBOOK)
        await one.service.fork("notebook", "beginning", at_token=300)
        await one.asleep("other", tokens_of(2, 300))
        for name in ("beginning", "other"):
            await one.service.push(name)
        report = await one.service.maintain("forget", session="notebook")
        (problem,) = report.problems
        assert problem.code == NOT_FORGOTTEN
        assert "torpor://default/beginning" in problem.message
        assert "torpor://default/other" not in problem.message
        report = await one.service.maintain("forget", session="beginning")
        assert not report.problems


@pytest.mark.usefixtures("hours_pass")
async def test_a_forget_reaches_the_remote_and_says_what_is_left(machine: OpenMachine, tmp_path: Path) -> None:
    """Manifests, places and turns go at once, packs once a collection may remove them; a fork stays whole."""
    async with machine("one") as one, machine("two") as two:
        await one.asleep("notebook", tokens_of(1, 600))
        await freed(one, NOTEBOOK)
        await one.service.fork("notebook", "kept")
        await one.wake("kept")
        await one.write("kept", 4)
        await one.sleep("kept")
        await freed(one, SessionUri("default", "kept"))
        report = await one.service.maintain("forget", session="notebook")
        assert not report.problems
        head = await remote_of(one).head(SessionUri("default", "kept"))
        assert head is not None
        assert len(there(tmp_path, "versions", "places")) == 2 * len(head.versions)
        told = told_of_remote(one, report)
        assert ("keep", "heads") in told
        assert {("remove", "versions"), ("remove", "places")} <= told
        assert not one.service._parts.store.disk._core.seen_heads.knows(NOTEBOOK)
        packs = there(tmp_path, "packs")
        assert await repacked(one) == [("remove", None)] * (len(packs) - len(there(tmp_path, "packs")))
        assert (await two.wake("kept")).tokens_prefilled == 0
        again = await one.service.maintain("forget", session="notebook")
        assert told_of_remote(one, again) == {("keep", "heads")}
        with pytest.raises(SessionNotFound):
            await one.service.maintain("forget", session="never")
        with pytest.raises(SessionNotFound):
            await two.wake("notebook")


async def test_a_delete_that_is_cut_off_leaves_the_session_here_and_nowhere_else(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It does not come back from the remote, and the daemon that comes back does not send it again."""

    def cut(store: Store, uri: Any) -> Any:
        raise StoreIoError("The disk is gone.")

    async with machine("one", close=False) as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        with monkeypatch.context() as patch:
            patch.setattr(Store, "delete_session", cut)
            with pytest.raises(StoreIoError):
                await one.service.delete("s")
        assert not there(tmp_path, "versions", "places", "tails")
        await dies(one)
    async with machine("one") as one, machine("two") as two:
        await until(lambda: one.service._parts.upkeep.uploading._pages is None)  # type: ignore[union-attr]
        assert not there(tmp_path, "versions")
        with pytest.raises(SessionNotFound):
            await two.wake("s")
        report = await one.service.delete("s")
        assert (report.versions_deleted, report.problems) == (1, ())


async def test_a_forget_names_what_a_bucket_keeps(machine: OpenMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old versions, which nothing of ours reaches; and packs that stay for an hour, with how they go."""
    monkeypatch.setattr(FolderObjects, "keeps_old", True)
    async with machine("one") as one:
        await one.asleep("notebook", tokens_of(1, 300))
        await freed(one, NOTEBOOK)
        report = await one.service.maintain("forget", session="notebook")
        assert [each.code for each in report.problems] == ["not_forgotten"]
        assert "lifecycle" in report.problems[0].message
        (leaving,) = [each for each in report.actions if each.kind == "leave"]
        assert "an hour from now" in leaving.reason
        assert (leaving.session, leaving.size_bytes > 0) == (str(NOTEBOOK), True)


async def test_the_plan_of_a_forget_tells_what_the_remote_has_and_changes_nothing(
    machine: OpenMachine, tmp_path: Path
) -> None:
    """Also of a session that is in the remote alone. What is done is what was told."""
    async with machine("one") as one, machine("two") as two:
        await one.asleep("notebook", tokens_of(1, 300))
        await freed(one, NOTEBOOK)
        before = there(tmp_path, "heads", "versions", "places", "packs", "tails", "leaving")
        plan = await one.service.maintain("forget", session="notebook", dry_run=True)
        told = {("remove", "places"), ("remove", "versions"), ("leave", "packs"), ("keep", "heads")}
        assert told_of_remote(one, plan) == told
        foreign = await two.service.maintain("forget", session="notebook", dry_run=True)
        assert [each.code for each in foreign.problems] == ["session_not_found"], "it is to come here first"
        assert told_of_remote(two, foreign) == {("leave", "packs")}
        assert there(tmp_path, "heads", "versions", "places", "packs", "tails", "leaving") == before
        done = await one.service.maintain("forget", session="notebook")
        assert told_of_remote(one, done) == told
        url = remote_of(one).url
        paths = [{each.path for each in report.actions if each.path.startswith(url)} for report in (plan, done)]
        assert paths[0] == paths[1]


@pytest.mark.usefixtures("hours_pass")
async def test_what_no_head_names_is_removed_unless_its_session_is_in_use(
    machine: OpenMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill between the drop and the removals leaves it."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        with monkeypatch.context() as patch:
            patch.setattr(FolderObjects, "remove", _away)
            report = await one.service.delete("s")
        assert [each.code for each in report.problems] == ["remote_unreachable"]
        assert len(there(tmp_path, "versions", "places")) == 2
        await one.read("s", tokens_of(2, 300))
        assert await repacked(one) == [("leave", None)]
        assert len(there(tmp_path, "versions", "places")) == 2
        await one.sleep("s")
        await freed(one)
        assert ("remove", str(S)) in await repacked(one)
        assert len(there(tmp_path, "versions", "places")) == 2
        assert (await one.wake("s")).token_count == 300


async def test_a_collection_comes_by_itself_behind_a_delete(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a minute has passed, and an hour later; else once a day. The budget of the day holds it back."""
    async with machine("one") as one:
        job = one.service._parts.upkeep.collecting
        assert job is not None
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        ((_, later),) = job.due()
        await one.service.delete("s")
        ((_, soon),) = job.due()
        assert later - soon > 3000
        await job.piece(None)
        ((_, behind),) = job.due()
        assert behind - soon > 3000
        with monkeypatch.context() as patch:
            patch.setattr(RemoteBudget, "is_used_up", True)
            job._next = 0
            ((_, put_off),) = job.due()
            assert put_off > 0


async def test_who_has_no_remote_is_told(machine: OpenMachine) -> None:
    async with machine("one", remote=None) as one:
        with pytest.raises(NoRemote):
            await one.service.maintain("repack", remote=True)


def _away(*_: Any, **__: Any) -> Any:
    raise RemoteUnreachable("No answer.")


@pytest.mark.one_in(1)
@pytest.mark.parametrize("starts_anew", [False, True])
@pytest.mark.parametrize("how", ["delete", "forget"])
async def test_a_removal_that_the_remote_was_silent_to_goes_on_when_it_is_asked_for_again(
    machine: OpenMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, *, starts_anew: bool
) -> None:
    """The session is not here any more, and the remote is seen to have nothing of it."""

    async def remove(rig: Rigged) -> Any:
        if how == "forget":
            return await rig.service.maintain("forget", session="notebook")
        return await rig.service.delete("notebook")

    async with machine("one") as one:
        await one.asleep("notebook", tokens_of(1, 300))
        await freed(one, NOTEBOOK)
        with monkeypatch.context() as patch:
            patch.setattr(FolderObjects, "replace", _away)
            for _ in range(2):
                assert "remote_unreachable" in {each.code for each in (await remove(one)).problems}
        assert len(there(tmp_path, "versions", "places")) == 2
        if not starts_anew:
            await _removed_now(one, remove, tmp_path)
    if starts_anew:
        async with machine("one") as one:
            await _removed_now(one, remove, tmp_path)


async def _removed_now(rig: Rigged, remove: Callable[[Rigged], Awaitable[Any]], tmp_path: Path) -> None:
    report = await remove(rig)
    assert not report.problems
    assert not there(tmp_path, "versions", "places", "tails")
    if isinstance(report, DeleteReport):
        assert (report.versions_deleted, report.remote_objects) == (0, 2)
        with pytest.raises(SessionNotFound):
            await rig.service.delete("notebook")


async def test_a_plan_tells_what_leaves_already_and_from_when_on_it_is_removed(machine: OpenMachine) -> None:
    async with machine("one") as one:
        await one.asleep("notebook", tokens_of(1, 300))
        await freed(one, NOTEBOOK)
        await one.service.maintain("forget", session="notebook")
        plan = await one.service.maintain("repack", remote=True, dry_run=True)
        (action,) = plan.actions
        assert action.kind == "leave"
        assert action.size_bytes > 1000
        assert re.search(r"removes it from \d\d:\d\d UTC on", action.reason)


async def test_what_another_machine_has_gone_on_with_meanwhile_is_not_removed(
    machine: OpenMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often it is asked for: nothing of it was ever seen here."""
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        with monkeypatch.context() as patch:
            patch.setattr(FolderObjects, "replace", _away)
            await one.service.delete("s")
        await two.wake("s")
        for _ in range(2):
            with pytest.raises(SessionNotFound, match="It is not here"):
                await one.service.delete("s")
        await two.service.append("s", tokens=[1, 2, 3])
        await two.sleep("s")
        await freed(two)
        for _ in range(2):
            with pytest.raises(SessionNotFound, match="It is not here"):
                await one.service.delete("s")
        with monkeypatch.context() as patch:
            patch.setattr(RemoteSessions, "pull", _away)
            with pytest.raises(RemoteUnreachable):
                await one.wake("s")
        with pytest.raises(SessionNotFound, match="It is not here"):
            await one.service.delete("s")
        assert (await two.wake("s")).token_count == 303


@pytest.mark.one_in(1)
async def test_a_forget_reaches_what_is_on_its_way_there(
    machine: OpenMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack that no head tells of, and that is young: it leaves with the session."""
    async with machine("one") as one:
        remote, coming, goes_on = remote_of(one), threading.Event(), threading.Event()
        objects, collect, under_way = remote.sessions._objects, remote.collect, list[SessionUri | None]()
        put = objects.put

        async def collected(*asked: Any, **options: Any) -> Any:
            under_way.append(remote._sending)
            goes_on.set()
            return await collect(*asked, **options)

        def slow(*asked: Any) -> None:
            coming.set()
            assert goes_on.wait(30)
            put(*asked)

        await one.read("notebook", tokens_of(1, 300))
        with monkeypatch.context() as patch:
            patch.setattr(objects, "put", slow)
            await one.service.save("notebook")
            await until(coming.is_set)
            patch.setattr(objects, "put", put)
            patch.setattr(remote, "collect", collected)
            forgetting = asyncio.create_task(one.service.maintain("forget", session="notebook"))
            await until(lambda: bool(under_way or remote._moving._waiters))
            goes_on.set()
            report = await forgetting
        assert under_way == [None]
        assert not report.problems
        assert ("leave", "packs") in told_of_remote(one, report)
        monkeypatch.setattr(collecting, "_GRACE_NS", 0)
        assert await repacked(one) == [("remove", None)]
        assert not there(tmp_path, "packs", "versions", "places", "tails")
