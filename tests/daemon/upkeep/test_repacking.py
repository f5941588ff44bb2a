"""The packs of a session that sleeps often are joined in the background, and nobody waits for it or fails by it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.upkeep.repacking import Repacking
from torpor.memvid.errors import NoSpace
from torpor.memvid.maintenance.repack_plan import RepackPolicy
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.session_rig import Gate, Rigged, packs, tokens_of, until

FEW = RepackPolicy(max_packs=2)
URI = SessionUri("default", "a")


def repack_early(rig: Rigged) -> Repacking:
    """Let this service repack a session whose blocks lie in more than two packs."""
    repacking: Repacking = rig.service._parts.store.repacking
    repacking._policy = FEW
    return repacking


def packs_of(store: Store) -> int:
    with store.open_session(URI) as reader:
        return store.count_packs(reader.entries)


async def sleep_often(rig: Rigged, count: int) -> None:
    for number in range(count):
        await rig.service.append("a", tokens=tokens_of(number, 300))
        await rig.sleep("a")


def gated(monkeypatch: pytest.MonkeyPatch) -> tuple[Gate, list[str]]:
    """Repacks wait at the gate; the names of the threads that they run on."""
    gate, threads, repack = Gate(), list[str](), Store.repack

    def waiting(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name.rstrip("_0123456789"))
        gate.pass_through()
        return repack(*args, **options)

    monkeypatch.setattr(Store, "repack", waiting)
    return gate, threads


@pytest.mark.one_in(2)
async def test_a_session_that_sleeps_often_is_woken_from_few_packs_with_the_same_state(open_rig: Any) -> None:
    async with open_rig() as rig:
        repack_early(rig)
        await rig.service.create("a")
        await sleep_often(rig, 5)
        await rig.service.append("a", tokens=tokens_of(5, 300))
        fingerprint = await rig.fingerprint("a")
        await rig.sleep("a")
        await until(lambda: packs_of(rig.service._parts.store.disk) <= FEW.max_packs)
        assert await rig.woken_fingerprint("a") == fingerprint
        for version in range(1, 7):
            await rig.sleep("a")
            assert (await rig.wake("a", version)).token_count == 300 * version
    with Store.open(rig.service._parts.store.disk.path, writable=False) as store:
        assert store.verify(deep=True).ok


async def test_a_session_of_few_packs_is_left_alone(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    _, threads = gated(monkeypatch)
    repack_early(rig)
    await rig.service.create("a")
    await sleep_often(rig, 2)
    assert rig.service._parts.store.repacking._noted == {}
    assert threads == []


@pytest.mark.one_in(2)
async def test_sleeps_and_wakes_go_on_while_it_runs_on_a_thread_of_its_own(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    repack_early(rig)
    await rig.service.create("a")
    gate, threads = gated(monkeypatch)
    await sleep_often(rig, 3)
    await gate.reached()
    await rig.wake("a")
    await sleep_often(rig, 2)
    await rig.asleep("b", tokens_of(1, 300))
    gate.open()
    await until(lambda: packs_of(rig.service._parts.store.disk) <= FEW.max_packs)
    assert set(threads) == {"torpor-upkeep"}


async def test_a_session_that_is_awake_sleeps_again_after_its_blocks_have_moved(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    repack_early(rig)
    await rig.service.create("a")
    gate, _ = gated(monkeypatch)
    await sleep_often(rig, 3)
    await gate.reached()
    await rig.service.append("a", tokens=tokens_of(9, 300))
    before = packs(store)
    gate.open()
    await until(lambda: not set(packs(store)) & set(before))
    fingerprint = await rig.fingerprint("a")
    receipt = await rig.sleep("a")
    assert receipt.blocks_reused == 900 // 256
    assert await rig.woken_fingerprint("a") == fingerprint


@pytest.mark.one_in(2)
@pytest.mark.parametrize("failure", [NoSpace("full"), RuntimeError("a bug")])
async def test_what_fails_in_it_fails_no_sleep(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception
) -> None:
    def fail(*_args: Any, **_options: Any) -> Any:
        raise failure

    repack_early(rig)
    await rig.service.create("a")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "repack", fail)
        await sleep_often(rig, 5)
        await until(lambda: "repack of torpor://default/a failed" in caplog.text)
    await sleep_often(rig, 1)
    await until(lambda: packs_of(rig.service._parts.store.disk) <= FEW.max_packs)


async def test_it_gives_way_to_a_sleep_and_goes_on_after_it(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    repacking = repack_early(rig)
    await rig.service.create("a")
    gate, threads = gated(monkeypatch)
    await sleep_often(rig, 3)
    await gate.reached()
    with repacking._thread.sleeps:
        gate.open()
        await until(lambda: repacking._thread.repacks_ended == 1)
        assert packs_of(rig.service._parts.store.disk) == 3, "it stopped before its first step"
    await until(lambda: packs_of(rig.service._parts.store.disk) <= FEW.max_packs)
    assert len(threads) == 2


async def test_a_daemon_that_ends_waits_for_no_more_than_the_step_that_has_begun(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    async with open_rig(close=False) as rig:
        repack_early(rig)
        await rig.service.create("a")
        gate, _ = gated(monkeypatch)
        await sleep_often(rig, 3)
        await gate.reached()
        closing = asyncio.ensure_future(rig.service.close())
        await until(rig.service._parts.upkeep.loop.thread.must_stop)
        gate.open()
        await closing
    with Store.open(store, writable=True) as opened:
        assert opened.verify(deep=True).ok
        assert packs_of(opened) == 3
