"""The diary is written some seconds behind the requests, and what hinders that hinders no request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.upkeep import loop, writing_diary
from torpor.daemon.views import causes as views
from torpor.memvid.disk import durable
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.session_rig import tokens_of, until

URI = SessionUri("default", "a")


async def test_it_is_written_behind_the_requests_and_never_flushed(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing_diary, "BEHIND_S", 0.01)
    async with open_rig() as rig:
        flushed: list[str] = []
        sync = durable._sync

        def noted(fd: int, path: str) -> None:
            flushed.append(path)
            sync(fd, path)

        monkeypatch.setattr(durable, "_sync", noted)
        await rig.read("a", tokens_of(1, 20))
        await until(lambda: (store / "diary.mvd").exists())
        assert not [path for path in flushed if "diary" in path]
        with Store.open(store, writable=False) as opened:
            assert [each.outcome for each in views.why(opened, URI).requests] == ["none"]


async def test_a_file_that_cannot_be_written_costs_its_entries_alone(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing_diary, "BEHIND_S", 0.01)
    async with open_rig() as rig:
        (store / "diary.mvd").mkdir()
        await rig.read("a", tokens_of(1, 20))
        disk = rig.service._parts.store.disk
        await until(lambda: disk.diary.problem is not None)
        await rig.service.append("a", tokens=tokens_of(2, 20))
        assert len((await rig.service.why("a")).requests) == 2, "the daemon remembers them"
        told = await rig.service.causes()
        assert str(store / "diary.mvd") in (told.problem or "")
        (store / "diary.mvd").rmdir()
        await rig.service.append("a", tokens=tokens_of(3, 20))
    with Store.open(store, writable=False) as opened:
        assert len(views.why(opened, URI).requests) >= 1, "the close writes what waits"


@pytest.mark.parametrize("named", ["a", "a@1"])
async def test_a_delete_is_written_behind_too_and_again_where_that_fails(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setattr(writing_diary, "BEHIND_S", 0.01)
    monkeypatch.setattr(loop, "AGAIN_S", 0.01)
    async with open_rig() as rig:
        await rig.read("a", tokens_of(1, 20))
        await rig.service.sleep("a")
        disk = rig.service._parts.store.disk
        await until(lambda: (store / "diary.mvd").exists() and not disk.diary.has_unwritten)
        (store / "diary.mvd").rename(store / "aside")
        (store / "diary.mvd").mkdir()
        await rig.service.delete(named)
        await until(lambda: disk.diary.problem is not None)
        (store / "diary.mvd").rmdir()
        (store / "aside").rename(store / "diary.mvd")
        await until(lambda: not disk.diary.has_unwritten)
        with Store.open(store, writable=False) as opened:
            assert views.why(opened, URI).requests == ()
