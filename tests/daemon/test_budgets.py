"""A daemon with budgets: a sleep that would go past one is refused, and its session goes on as if nothing had been."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
from torpor.memvid.errors import BudgetExceeded, InvalidPolicy, NoSpace, StoreError
from torpor.memvid.maintenance.repack_plan import RepackPolicy
from torpor.memvid.store import Store
from torpor.tests.daemon.session_rig import Gate, Rigged, tokens_of, until


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("budget", "which"),
    [
        ({"store_budget": 60_000}, "max_store_bytes"),
        ({"daily_write_budget": 60_000}, "max_bytes_per_day"),
        ({"keep_free": 1 << 59, "durability": "sleep"}, "min_free_bytes"),  # it refuses turns, too
    ],
)
async def test_a_sleep_past_a_budget_leaves_the_session_awake_and_as_it_was(
    open_rig: Any, store: Path, budget: dict[str, int], which: str
) -> None:
    async with open_rig(close=False, **budget) as rig:
        await rig.read_each(("a", "control"), tokens_of(4, 300))
        before = await rig.fingerprint("a")
        with pytest.raises(BudgetExceeded) as refusal:
            await rig.sleep("a")
        assert refusal.value.details["which"] == which
        assert rig.is_awake("a")
        assert await rig.fingerprint("a") == before
        assert await rig.write("a", 20) == await rig.write("control", 20)
        assert [path for folder in ("versions", "packs") for path in (store / folder).iterdir()] == []
        before = await rig.fingerprint("a")
        rig.service._parts.store.disk.close()
    async with open_rig() as rig:  # without the budget there is room
        if "keep_free" in budget:
            await rig.read("a", tokens_of(4, 320))
        else:
            assert await rig.woken_fingerprint("a") == before, "its turns came out of the journal"
        assert (await rig.sleep("a")).token_count == 320


@pytest.mark.one_in(2)
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    ("budget", "option"),
    [({"store_budget": 60_000}, "--store-budget"), ({"daily_write_budget": 60_000}, "--daily-write-budget")],
)
async def test_a_stop_keeps_the_ledger_of_a_session_that_a_budget_refuses_and_stays_within_it(
    open_rig: Any, store: Path, budget: dict[str, int], option: str, prepared: bool
) -> None:
    """The budget holds at each moment, and nothing that was said is lost."""
    async with open_rig(close=False, **budget) as rig:
        await rig.read("a", tokens_of(4, 300))
        before = await rig.fingerprint("a")
        with pytest.raises(BudgetExceeded):
            await rig.sleep("a")
        if prepared:
            assert (await rig.service.prepare_close()).failed == {}
        report = await rig.service.close()
        assert (report.slept, report.failed) == ((), {})
        assert option in report.ledgers["torpor://default/a"]
    assert sum(file.stat().st_size for file in store.rglob("*") if file.is_file()) < 60_000
    async with open_rig(**budget) as rig:
        (info,) = await rig.service.list_sessions()
        assert (info.token_count, info.unread_tokens) == (300, 300)
        assert await rig.woken_fingerprint("a") == before


async def test_a_stop_keeps_the_room_that_the_disk_must_have_but_for_ledgers(open_rig: Any) -> None:
    """A state waits to be computed again; what was said is a few kilobytes, and is never lost for the room."""
    async with open_rig(close=False, keep_free=1 << 59, durability="sleep") as rig:
        await rig.read("a", tokens_of(4, 300))
        said = await rig.fingerprint("a")
        report = await rig.service.close()
        assert (report.slept, report.failed) == ((), {})
        assert report.ledgers["torpor://default/a"].startswith("budget_exceeded: ")
        assert "--keep-free" in report.ledgers["torpor://default/a"]
    async with open_rig() as rig:
        (info,) = await rig.service.list_sessions()
        assert (info.token_count, info.unread_tokens) == (300, 300)
        assert await rig.woken_fingerprint("a") == said


class Crowded:
    """A disk with too little room for a sleep as long as a repack is writing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refusal: StoreError) -> None:
        self.gate = Gate()
        self.repacking = False
        self.asked = 0
        repack, write = Store.repack, Store.write_bundle

        def repack_at_the_gate(*arguments: Any, **options: Any) -> Any:
            self.repacking = True
            try:
                self.gate.pass_through()
                return repack(*arguments, **options)
            finally:
                self.repacking = False

        def write_if_there_is_room(*arguments: Any, **options: Any) -> Any:
            self.asked += 1
            if self.repacking:
                raise refusal
            return write(*arguments, **options)

        monkeypatch.setattr(Store, "repack", repack_at_the_gate)
        monkeypatch.setattr(Store, "write_bundle", write_if_there_is_room)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("refusal", "claims"),
    [
        (NoSpace("No room."), True),
        (BudgetExceeded("No room.", which="min_free_bytes"), True),
        (BudgetExceeded("No room.", which="max_store_bytes", used=2, needed=1), False),
    ],
)
async def test_a_sleep_without_room_waits_for_the_repack_that_takes_it_and_is_tried_again(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch, refusal: StoreError, claims: bool
) -> None:
    """Where the store's budget refuses it, room is made behind the repack."""
    rig.service._parts.store.repacking._policy = RepackPolicy(max_packs=2)
    disk = Crowded(monkeypatch, refusal)
    await rig.service.create("a")
    for number in range(3):
        await rig.service.append("a", tokens=tokens_of(number, 300))
        await rig.sleep("a")
    await disk.gate.reached()
    await rig.read("b", tokens_of(1, 300))
    disk.asked = 0
    sleeping = asyncio.ensure_future(rig.sleep("b"))
    await until(lambda: disk.asked == 1)
    if claims:
        thread = rig.service._parts.upkeep.loop.thread
        await until(lambda: sleeping.done() or bool(thread.claims))
    assert (disk.asked, sleeping.done()) == (1, False)
    disk.gate.open()
    assert (await sleeping).version == 1
    assert disk.asked == 2


async def test_a_sleep_without_room_waits_for_a_repack_that_a_user_ordered_too(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.service.create("a")
    for number in range(3):
        await rig.service.append("a", tokens=tokens_of(number, 300))
        await rig.sleep("a")
    disk = Crowded(monkeypatch, NoSpace("No room."))
    ordered = asyncio.ensure_future(rig.service.maintain(operation="repack"))
    await disk.gate.reached()
    await rig.read("b", tokens_of(1, 300))
    sleeping = asyncio.ensure_future(rig.sleep("b"))
    claims = rig.service._parts.upkeep.loop.thread.claims
    await until(lambda: sleeping.done() or bool(claims))
    assert (disk.asked, sleeping.done()) == (1, False)
    disk.gate.open()
    assert (await sleeping).version == 1
    assert (await ordered).problems == ()


async def test_a_sleep_without_room_is_refused_at_once_where_nothing_is_repacked(rig: Rigged, full_disk: Any) -> None:
    disk = full_disk()
    await rig.read("a", tokens_of(1, 300))
    with pytest.raises(NoSpace):
        await rig.sleep("a")
    assert disk.refused == 1
    disk.free()


async def test_a_budget_that_means_nothing_is_refused_before_anything_is_opened(store: Path) -> None:
    with pytest.raises(InvalidPolicy):
        await Service.open(ServeOptions(store=store, keep_free=-1))
    assert not store.exists()
