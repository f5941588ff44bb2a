"""A day's budget of a remote: how it is written, when it is used up, and what list prices say."""

from __future__ import annotations

import pytest
from torpor.memvid.disk.daily_budget import DailyBudget, Used


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("20GB", DailyBudget(bytes_sent=20 * 10**9)),
        (" 1.5 GiB ", DailyBudget(bytes_sent=3 << 29)),
        ("10000 requests", DailyBudget(requests=10_000)),
        ("1 request", DailyBudget(requests=1)),
        ("$2", DailyBudget(dollars=2.0)),
        ("$0.25, 7requests,500", DailyBudget(500, 7, 0.25)),
    ],
)
def test_it_is_read_as_a_person_writes_it_and_written_as_it_is_read(text: str, budget: DailyBudget) -> None:
    assert DailyBudget.parse(text) == budget
    assert DailyBudget.parse(budget.told(exactly=True)) == budget


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "is no part of a day's budget") for text in ("", "much", "20 GB a day", "-3 requests", "2$", "$1e3")),
        *((text, "would let nothing be sent") for text in ("0", "0 requests", "$0", "$0.00")),
        *((text, "says twice") for text in ("1GB, 2GB", "$1, $2")),
        ("1GB, ", "is no part"),
    ],
)
def test_what_is_none_is_refused_with_the_form_to_use(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        DailyBudget.parse(text)


def test_it_is_used_up_once_one_of_its_bounds_is_reached() -> None:
    budget = DailyBudget.parse("100B, 10 requests, $0.00005")
    assert not budget.is_used_up(Used(99, writes=9))
    assert budget.is_used_up(Used(100))
    assert budget.is_used_up(Used(writes=3, reads=4, removals=3))
    assert budget.is_used_up(Used(writes=10))
    assert not DailyBudget().is_used_up(Used(10**15, 10**9))


def test_money_is_requests_and_a_month_of_storage() -> None:
    assert Used(writes=10**6).dollars == pytest.approx(5.00)
    assert Used(reads=10**6).dollars == pytest.approx(0.40)
    assert Used(bytes_sent=10**9).dollars == pytest.approx(0.023)
    assert Used(removals=10**6).dollars == 0
