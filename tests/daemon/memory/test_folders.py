"""A change in a folder ends a wait for it; so does its time, and the end of whoever waits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import watchfiles
from torpor.daemon.memory import watching
from torpor.daemon.memory.watching import change_in


async def test_a_change_ends_the_wait_long_before_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "CHECK_EVERY_S", 3600.0)
    waiting = asyncio.ensure_future(change_in((tmp_path,), asyncio.Event()))
    number = 0
    async with asyncio.timeout(60):
        while not waiting.done():  # the watch begins at some moment
            number += 1
            (tmp_path / f"{number}").write_text("new")
            await asyncio.wait({waiting}, timeout=0.05)


@pytest.mark.parametrize("watched", ["a folder", "none", "one that is not there", "none is to be had"])
async def test_its_time_ends_a_wait_in_which_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: str
) -> None:
    def refuse(*_args: Any, **_options: Any) -> Any:
        raise OSError("no more watches")

    monkeypatch.setattr(watching, "CHECK_EVERY_S", 0.05)
    if watched == "none is to be had":
        monkeypatch.setattr(watchfiles, "awatch", refuse)
    given = {"none": (), "one that is not there": (tmp_path / "gone",)}.get(watched, (tmp_path,))
    async with asyncio.timeout(60):
        await change_in(given, asyncio.Event())


@pytest.mark.parametrize("watched", ["a folder", "none"])
async def test_a_wait_ends_when_whoever_waits_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: str
) -> None:
    monkeypatch.setattr(watching, "CHECK_EVERY_S", 3600.0)
    closing = asyncio.Event()
    waiting = asyncio.ensure_future(change_in((tmp_path,) if watched == "a folder" else (), closing))
    await asyncio.sleep(0)
    closing.set()
    async with asyncio.timeout(60):
        await waiting
