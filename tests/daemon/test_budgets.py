"""A daemon with budgets: a sleep that would go past one is refused, and its session goes on as if nothing had been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from session_rig import tokens_of
from torpor.daemon.service import Service
from torpor.memvid.errors import BudgetExceeded, InvalidPolicy


@pytest.mark.parametrize(
    ("budget", "which"),
    [
        ({"store_budget": 60_000}, "max_store_bytes"),
        ({"daily_write_budget": 60_000}, "max_bytes_per_day"),
        ({"keep_free": 1 << 59}, "min_free_bytes"),
    ],
)
async def test_a_sleep_past_a_budget_leaves_the_session_awake_and_as_it_was(
    open_rig: Any, store: Path, budget: dict[str, int], which: str
) -> None:
    async with open_rig(close=False, **budget) as rig:
        for name in ("a", "control"):
            await rig.read(name, tokens_of(4, 300))
        before = await rig.fingerprint("a")
        with pytest.raises(BudgetExceeded) as refusal:
            await rig.sleep("a")
        assert refusal.value.details["which"] == which
        assert rig.is_awake("a")
        assert await rig.fingerprint("a") == before
        assert await rig.write("a", 20) == await rig.write("control", 20)
        assert [path for path in (store / "bundles").rglob("*") if path.is_file()] == []
        rig.service._store.close()
    async with open_rig() as rig:  # without the budget there is room
        await rig.read("a", tokens_of(4, 300))
        assert (await rig.sleep("a")).version == 1


async def test_a_budget_that_means_nothing_is_refused_before_anything_is_opened(store: Path) -> None:
    with pytest.raises(InvalidPolicy):
        await Service.open(store_path=store, keep_free=-1)
    assert not store.exists()
