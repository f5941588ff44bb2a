"""Which of several futures is the best."""

from __future__ import annotations

import pytest
from torpor.daemon.branches.ranking import measured, ranked
from torpor.daemon.engine.guiding import Guide


@pytest.mark.parametrize(
    ("by", "best_first"), [("mean_logprob", [3, 1, 4, 0, 2, 5]), ("perplexity", [1, 3, 4, 2, 0, 5])]
)
def test_whole_ones_come_before_those_that_were_cut_off_br29(by: str, best_first: list[int]) -> None:
    cut_off = [True, False, True, False, False, True]
    assert ranked(cut_off, by, [0.9, 0.1, 0.8, 0.2, None, None]) == best_first  # type: ignore[arg-type]


def test_equal_ones_keep_their_order() -> None:
    assert ranked([False] * 3, "mean_logprob", [-1.0, -1.0, -1.0]) == [0, 1, 2]


def test_a_measure_is_of_the_attempt_or_of_all_since_the_root() -> None:
    parent, attempt = Guide(measured=2, logprob_sum=-4.0), Guide(measured=4, logprob_sum=-6.0)
    assert measured("mean_logprob", parent, attempt) == -1.0
    assert measured("perplexity", parent, attempt) == pytest.approx(2.718281828**1.5)
    assert measured("client", parent, attempt) is None
    assert measured("mean_logprob", parent, parent) is None, "it has written nothing"
    assert measured("perplexity", Guide(), Guide()) is None
