"""The coins of the store are counted where somebody asks for them, and as `torpor du` counts them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torpor.daemon.api.process import StoreCoins
from torpor.daemon.upkeep import measuring
from torpor.memvid.store import Store
from torpor.tests.daemon.session_rig import Rigged, tokens_of, until


async def coins(rig: Rigged) -> StoreCoins | None:
    disk = (await rig.service.status()).disk
    return None if disk is None else disk.coins


async def counted(rig: Rigged) -> StoreCoins:
    """The count that a question has made."""
    job = rig.service._parts.upkeep.measuring
    await coins(rig)
    await until(lambda: not list(job.due()))
    found = await coins(rig)
    assert found is not None
    return found


async def test_the_coins_are_those_of_the_usage_and_counted_for_who_asks(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "WAIT_S", 0.0)
    job = rig.service._parts.upkeep.measuring
    await rig.asleep("agent", tokens_of(1, 300))
    await rig.service.fork("agent", "twin")
    assert list(job.due()) == [], "nobody has asked"
    assert await coins(rig) is None
    found, usage = await counted(rig), rig.service._parts.store.disk.usage()
    assert (found.logical_bytes, found.stored_bytes, found.shared_bytes, found.alone_bytes) == (
        *(usage.logical_bytes, usage.stored_bytes, usage.shared_bytes, usage.alone_bytes),
    )
    assert found.shared_bytes > 0 < found.rest_bytes
    ((_, due_at),) = job.due()
    assert due_at > time.monotonic() + measuring.EVERY_S - 60, "a question soon after has the last count"
    assert await coins(rig) == found


async def test_a_count_gives_way_to_what_somebody_waits_for_and_goes_on_where_it_was(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "WAIT_S", 0.0)
    for name in ("agent", "other", "third"):
        await rig.asleep(name, tokens_of(1, 300))
    gave_way = [0]

    def always() -> bool:
        gave_way[0] += 1
        return True

    monkeypatch.setattr(rig.service._parts.upkeep.loop.thread, "must_stop", always)
    found, usage = await counted(rig), rig.service._parts.store.disk.usage()
    assert (found.alone_bytes, found.rest_bytes) == (usage.alone_bytes, usage.rest_bytes)
    assert gave_way[0] == 4, "three manifests, and the pack that they share"


async def test_a_count_that_fails_is_tried_later_and_the_last_one_is_told(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "WAIT_S", 0.0)
    await rig.asleep("agent", tokens_of(1, 300))
    found = await counted(rig)
    monkeypatch.setattr(measuring, "EVERY_S", 0.0)
    tried: list[Any] = []

    def fail(*_: Any, **__: Any) -> None:
        tried.append(1)
        raise OSError("no")

    monkeypatch.setattr(Store, "usage_in_steps", fail)
    rig.service._parts.upkeep.measuring._due_at = 0.0
    rig.service._parts.upkeep.measuring.look_again()
    await until(lambda: bool(tried))
    assert await coins(rig) == found
