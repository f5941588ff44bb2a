"""Far more conversations over HTTP than the store may hold, and a daemon that is killed: the budget holds at each
moment, no answer is wrong, and what is stripped goes as the plan says and is read again.

The heavy test is the whole: 500 conversations of 2,000 tokens in the room of 40, in three namespaces.
"""

from __future__ import annotations

import pytest
from torpor.tests.load.within_budget import Plan, Report, run

SHARE = Plan(conversations=10, tokens=400, turns=22, held=4, awake=3, clients=3, kill_s=6.0)


def assert_within(plan: Plan, report: Report) -> None:
    assert report.wrong == []
    assert report.turns == report.compared == plan.turns
    assert 0 < report.most_held_bytes <= report.budget_bytes
    assert len(set(report.stripped)) >= plan.conversations - plan.held, "they did not all fit"
    assert report.read_again > 0
    assert report.tokens_read_again >= report.read_again * plan.tokens


@pytest.mark.one_in(4)
def test_conversations_go_on_in_a_store_that_holds_a_third_of_them_whenever_the_daemon_dies() -> None:
    assert_within(SHARE, run(SHARE))


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_five_hundred_conversations_go_on_in_the_room_of_forty_whenever_the_daemon_dies() -> None:
    plan = Plan()
    assert_within(plan, run(plan))
