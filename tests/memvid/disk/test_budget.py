"""Budgets: what would go past one is refused before it is written; nothing that frees space is asked about."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.memvid.disk.budget import UNLIMITED, Account, Budget, left_to_repacks, utc_day
from torpor.memvid.disk.clock import now_ns
from torpor.memvid.errors import BudgetExceeded, InvalidPolicy
from torpor.tests.memvid.store_making import of_sleeps, refusing

DAY_NS = 24 * 60 * 60 * 10**9
PLENTY = 1 << 50


TODAY = 20_000
nothing_is_asked = refusing(AssertionError("it was asked"))


def account(
    budget: Budget, *, store_bytes: int = 0, written: dict[int, int] | None = None, free: list[int] | None = None
) -> Account:
    """An account whose disk says the figures of `free` one after the other, the last one for ever."""
    left = list(free or [PLENTY])
    return Account(
        budget,
        held_bytes=lambda: store_bytes,
        written_on=lambda day: (written or {}).get(day, 0),
        free_bytes=lambda: left.pop(0) if len(left) > 1 else left[0],
    )


# --- what a budget is


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("max_store_bytes", "max_bytes_per_day", "min_free_bytes")
            for value in (-1, 1.0, True, "1", float("nan"), (1 << 60) + 1, 10**400)
        ),
        ("min_free_bytes", None),
    ],
)
def test_a_budget_that_is_no_number_of_bytes_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidPolicy) as refusal:
        Budget(**{name: value})
    assert refusal.value.field == name


# --- the decision


@pytest.mark.parametrize(
    ("which", "now", "used", "facts"),
    [
        (
            "max_store_bytes",
            {"store_bytes": 885},
            885,
            ["885 B", "15 B of it for repacks", "torpor prune", "--store-budget"],
        ),
        ("max_bytes_per_day", {"written": {TODAY: 900}}, 900, ["900 B", "UTC", "--daily-write-budget"]),
        ("min_free_bytes", {"free": [1100]}, 1100, ["1.07 KiB", "torpor rm", "--keep-free"]),
    ],
)
def test_each_budget_may_be_filled_but_for_what_repacks_need_and_no_further(
    which: str, now: dict[str, Any], used: int, facts: list[str]
) -> None:
    one = account(Budget(**{which: 1000}), **now).begin(TODAY)
    one.require(100)
    with pytest.raises(BudgetExceeded) as refusal:
        one.require(101)
    error = refusal.value
    assert (error.which, error.limit, error.used, error.needed) == (which, 1000, used, 101)
    assert error.code == "budget_exceeded"
    for fact in ("1000 B", "101 B", *facts):
        assert fact in error.message


def test_a_store_that_is_past_its_budget_already_takes_no_byte_more() -> None:
    for books in (
        account(Budget(max_store_bytes=10), store_bytes=11),
        account(Budget(max_bytes_per_day=10), written={TODAY: 11}),
        account(Budget(min_free_bytes=10), free=[9]),
    ):
        with pytest.raises(BudgetExceeded) as refusal:
            books.begin(TODAY).require(0)
        assert refusal.value.needed == 0
        assert "needs" not in refusal.value.message  # asked ahead: nobody knows yet how much it will be


def test_a_refusal_writes_sizes_as_people_read_them() -> None:
    with pytest.raises(BudgetExceeded) as refusal:
        account(Budget(max_store_bytes=30 << 20), store_bytes=59_767_154).begin(TODAY).require(1 << 20)
    assert refusal.value.message.startswith(
        "The store may hold 30.0 MiB, 480 KiB of it for repacks, and holds 57.0 MiB; "
    )


def test_a_repack_fits_beside_all_that_the_store_holds_unless_that_is_too_much_already() -> None:
    books = account(Budget(max_store_bytes=1000), store_bytes=900)
    one, two = (books.begin(TODAY, replacing=True) for _ in range(2))
    one(60)
    two(40)
    with pytest.raises(BudgetExceeded) as refusal:
        two(1)
    assert (refusal.value.used, refusal.value.limit) == (1000, 1000)
    account(Budget(max_store_bytes=899), store_bytes=900).begin(TODAY, replacing=True).require(1000)
    with pytest.raises(BudgetExceeded):
        account(Budget(max_bytes_per_day=999)).begin(TODAY, replacing=True).require(1000)


sizes = st.integers(0, 2000)


@given(st.none() | sizes, st.none() | sizes, sizes, sizes, sizes, sizes, sizes)
def test_a_write_is_allowed_exactly_when_no_budget_is_passed(
    most: int | None, daily: int | None, least: int, held: int, written: int, free: int, needed: int
) -> None:
    allowed = (
        (most is None or held + needed <= most - left_to_repacks(most))
        and (daily is None or written + needed <= daily)
        and (least == 0 or free - needed >= least)
    )
    books = account(Budget(most, daily, least), store_bytes=held, written={TODAY: written}, free=[free])
    try:
        books.begin(TODAY).require(needed)
    except BudgetExceeded:
        assert not allowed
    else:
        assert allowed


# --- the account


def test_a_meter_adds_up_what_is_written_and_not_what_was_refused() -> None:
    for budget in (Budget(max_store_bytes=of_sleeps(1000)), Budget(max_bytes_per_day=1000)):
        one = account(budget, store_bytes=700, written={TODAY: 700}).begin(TODAY)
        one(100)
        with pytest.raises(BudgetExceeded):
            one(201)
        one(200)
        with pytest.raises(BudgetExceeded) as refusal:
            one(1)
        assert refusal.value.used == 1000
        assert one.written_bytes == 300


def test_what_others_are_writing_counts_until_they_have_ended() -> None:
    for budget in (Budget(max_store_bytes=of_sleeps(100)), Budget(max_bytes_per_day=100)):
        books = account(budget)
        one, two = books.begin(TODAY), books.begin(TODAY)
        one(60)
        with pytest.raises(BudgetExceeded) as refusal:
            two(41)
        assert refusal.value.used == 60
        two(40)
        books.end(one, lambda *_: None)  # given up, and nothing of it kept
        two(60)


def test_what_was_published_counts_as_held_and_not_a_second_time() -> None:
    held = [0]
    books = Account(
        Budget(max_store_bytes=of_sleeps(100)),
        held_bytes=lambda: held[0],
        written_on=nothing_is_asked,
        free_bytes=nothing_is_asked,
    )
    one, two = books.begin(TODAY), books.begin(TODAY)
    one(60)
    held[0] = 60
    one.settle()
    two(40)
    with pytest.raises(BudgetExceeded):
        two(1)


def test_a_sleep_is_not_refused_for_what_a_repack_writes_and_a_repack_sees_what_sleeps_have_written() -> None:
    held = [90]
    books = Account(
        Budget(max_store_bytes=of_sleeps(1000)),
        held_bytes=lambda: held[0],
        written_on=nothing_is_asked,
        free_bytes=nothing_is_asked,
    )
    repack, sleep = books.begin(TODAY, replacing=True), books.begin(TODAY)
    repack(800)
    sleep(910)
    repack.require(0)
    held[0] = 1000
    with pytest.raises(BudgetExceeded):
        repack.require(0)


def test_a_repack_leaves_half_of_a_day_to_sleeps() -> None:
    books = account(Budget(max_bytes_per_day=1000), written={TODAY: 100})
    repack, sleep = books.begin(TODAY, replacing=True), books.begin(TODAY)
    repack(400)
    with pytest.raises(BudgetExceeded, match="repack may write until 500 B") as refusal:
        repack(1)
    assert (refusal.value.which, refusal.value.limit, refusal.value.used) == ("max_bytes_per_day", 500, 500)
    sleep(500)
    with pytest.raises(BudgetExceeded):
        sleep(1)


def test_work_beyond_the_budget_is_counted_and_refused_by_the_disk_alone_or_where_it_may_take_the_reserve_never() -> (
    None
):
    budget, kept = Budget(max_store_bytes=10, max_bytes_per_day=10, min_free_bytes=1000), list[tuple[int, int]]()
    books = account(budget, free=[2000, 1100, 1100])
    last = books.begin(TODAY, beyond="budgets")
    last(500)
    with pytest.raises(BudgetExceeded) as refusal:
        last(101)
    assert refusal.value.which == "min_free_bytes"
    books.end(last, lambda *told: kept.append(told))
    books = account(budget, free=[1001])
    ledger = books.begin(TODAY, beyond="reserve")
    ledger(500)
    books.end(ledger, lambda *told: kept.append(told))
    assert kept == [(TODAY, 500)] * 2


def test_what_is_written_goes_to_the_day_on_which_it_was_begun() -> None:
    books = account(Budget(max_bytes_per_day=100), written={TODAY: 0, TODAY + 1: 0})
    before, after = books.begin(TODAY), books.begin(TODAY + 1)
    before(100)
    after(100)
    for one in (before, after):
        with pytest.raises(BudgetExceeded):
            one(1)


def test_work_that_wrote_nothing_is_not_kept_and_one_whose_keeping_fails_is_over_all_the_same() -> None:
    books = account(Budget(max_store_bytes=of_sleeps(100)))
    books.end(books.begin(TODAY), nothing_is_asked)
    one = books.begin(TODAY)
    one(100)
    with pytest.raises(AssertionError):
        books.end(one, nothing_is_asked)
    books.begin(TODAY)(100)


def test_the_disk_is_asked_each_time_and_what_others_wrote_is_in_its_answer() -> None:
    books = account(Budget(min_free_bytes=1000), free=[1300, 1200, 1100, 1050])
    one, other = books.begin(TODAY), books.begin(TODAY)
    one(100)
    other(100)
    one(100)
    with pytest.raises(BudgetExceeded) as refusal:
        one(51)
    assert refusal.value.used == 1050


def test_without_a_budget_bytes_are_counted_and_nobody_is_asked() -> None:
    books = Account(UNLIMITED, held_bytes=nothing_is_asked, written_on=nothing_is_asked, free_bytes=nothing_is_asked)
    one = books.begin(TODAY)
    one(PLENTY)
    assert one.written_bytes == PLENTY


@given(sizes, st.lists(st.tuples(st.integers(0, 2), sizes), max_size=20))
def test_meters_never_let_their_sum_pass_the_budget(most: int, writes: list[tuple[int, int]]) -> None:
    books = account(Budget(max_bytes_per_day=most))
    meters, written = [books.begin(TODAY) for _ in range(3)], 0
    for number, size_bytes in writes:
        try:
            meters[number](size_bytes)
        except BudgetExceeded:
            assert written + size_bytes > most
        else:
            written += size_bytes
        assert sum(one.written_bytes for one in meters) == written <= most


# --- days and disks


def test_a_day_is_a_day_of_utc() -> None:
    assert utc_day(0) == utc_day(DAY_NS - 1) == 0
    assert utc_day(DAY_NS) == 1
    assert utc_day(1_735_689_600 * 10**9) == 20_089  # 2025-01-01T00:00:00Z
    assert utc_day(1_735_689_600 * 10**9 - 1) == 20_088


@pytest.mark.parametrize("shown", [-1, -(10**20)])
def test_threat_37_a_clock_before_1970_shows_the_first_day(monkeypatch: pytest.MonkeyPatch, shown: int) -> None:
    monkeypatch.setattr("time.time_ns", lambda: shown)
    assert utc_day(now_ns()) == 0


def may_write(written: dict[int, int], now_ns: int, size_bytes: int) -> bool:
    """Whether a budget of 100 bytes a day allows it, by what was written while the clock showed each day; and counts it
    as the store does."""
    books = account(Budget(max_bytes_per_day=100), written=written)
    one = books.begin(utc_day(now_ns))
    try:
        one(size_bytes)
    except BudgetExceeded:
        return False
    books.end(one, lambda day, total: written.update({day: written.get(day, 0) + total}))
    return True


def test_threat_37_a_clock_set_back_neither_lifts_a_days_budget_nor_locks_for_ever() -> None:
    written: dict[int, int] = {}
    for days, size_bytes, allowed in (
        (0, 100, True),
        (0, 1, False),
        (-1, 100, True),  # the clock is set back: that day's own budget, once
        (-1, 1, False),
        (0, 1, False),  # and put right: today's count is as it was
        (3653, 100, True),  # ten years ahead
        (0, 1, False),
        (1, 100, True),  # tomorrow comes all the same
    ):
        assert may_write(written, (TODAY + days) * DAY_NS, size_bytes) == allowed


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 150)), max_size=40))
def test_threat_37_however_the_clock_jumps_no_day_gets_more_than_its_budget(jumps: list[tuple[int, int]]) -> None:
    written: dict[int, int] = {}
    for days, size_bytes in jumps:
        may_write(written, (TODAY + days) * DAY_NS, size_bytes)
    assert all(size_bytes <= 100 for size_bytes in written.values())
    assert may_write(written, (TODAY + 4) * DAY_NS, 100)
