"""What the screen says of the disk of a store."""

from __future__ import annotations

from torpor.cli.view.disk import budgets_in


def test_the_budgets_of_a_store_are_told_by_name() -> None:
    disk = {"store_budget_bytes": 20 << 30, "daily_write_budget_bytes": None, "keep_free_bytes": 1 << 30}
    assert budgets_in(disk) == ["the store may hold 20.0 GiB", "of the disk stay free 1.00 GiB"]
    held = ["the store may hold 20.0 GiB", "its manifests and packs hold 3.00 GiB"]  # not its index, as `on disk` does
    assert budgets_in({**disk, "held_bytes": 3 << 30})[:2] == held
    assert budgets_in({**disk, "store_budget_bytes": None, "keep_free_bytes": 0}) == []
