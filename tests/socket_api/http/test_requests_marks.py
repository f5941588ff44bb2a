"""How many marks for a cache are taken, and for how long; `exchanges/` has them in each API."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.daemon.api.limits import MAX_CHECKPOINTS, MAX_KEEP_AWAKE_S
from torpor.socket_api.http.requests import Marks


def test_only_the_newest_marks_and_times_of_a_day_at_most_are_taken() -> None:
    marks = Marks()
    for count in range(9):
        marks.add({"ttl": f"{count}d"}, count)
    assert marks.checkpoints == tuple(range(9 - MAX_CHECKPOINTS, 9))
    assert marks.keep_awake_s == MAX_KEEP_AWAKE_S


@pytest.mark.parametrize("ttl", ["", "soon", "1e9s", "-1m", 5, None, "9999999d"])
def test_a_time_that_is_none_is_no_time_and_refuses_nothing(ttl: Any) -> None:
    marks = Marks()
    marks.add({"ttl": ttl}, 1)
    assert (marks.checkpoints, marks.keep_awake_s) == ((1,), None)
