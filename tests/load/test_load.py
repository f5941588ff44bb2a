"""Far more sessions than memory holds, many clients, and a daemon that is killed: every reply is that of the session
alone, no answered turn is lost or repeated, though no sleep was asked for, and no more memory is held than there may be
(QX1, QX10, QX16, MS9).

The heavy tests are the whole: 1,000 sessions in the memory of 40, 10,000 turns by 8 clients, a SIGKILL each minute; and
the same on two models that do not fit together. They take about an hour each on two cores.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from torpor.tests.load.harness import Plan, Report, run

BESIDE_BUDGET_BYTES = 256 * 2**20
"""What the process may take beside the budget and its start: what a model call works with and its buffers, which that
does not count, and what the allocator keeps. docs/reliability.md has 172 MiB for the whole load; half as much more."""
SHARE = Plan(sessions=14, tokens=300, turns=70, clients=4, held=4, kill_s=2.5)
TWO_MODELS = {"models": ("one", "other"), "both_fit": False}


def assert_held(plan: Plan, report: Report) -> None:
    assert report.wrong == []
    assert report.sleeps == 0
    assert report.turns == plan.turns
    assert report.compared_turns > 0
    assert report.slept_by_pressure > 0, "they did not all fit"
    assert 0 < report.most_held_bytes <= report.budget_bytes
    assert report.most_awake < plan.sessions
    if report.first_resident_bytes:  # the system tells
        grown = report.most_resident_bytes - report.first_resident_bytes
        assert grown <= report.budget_bytes + BESIDE_BUDGET_BYTES
    if plan.kill_s is not None:
        assert report.kills >= max(1, int((report.seconds - report.down_s) / plan.kill_s) - 1), "one each kill_s"


@pytest.mark.one_in(4)
def test_many_sessions_in_little_memory_say_what_each_says_alone_whenever_the_daemon_dies() -> None:
    assert_held(SHARE, run(SHARE))


@pytest.mark.one_in(4)
def test_sessions_of_two_models_that_do_not_fit_together_say_what_each_says_alone() -> None:
    plan = replace(SHARE, **TWO_MODELS, turns=40, kill_s=None)
    assert_held(plan, run(plan))


@pytest.mark.heavy
@pytest.mark.parametrize("models", [{}, TWO_MODELS], ids=["one-model", "two-models"])
def test_a_thousand_sessions_take_ten_thousand_turns_in_the_memory_of_forty(models: dict[str, object]) -> None:
    plan = replace(Plan(), **models)
    assert_held(plan, run(plan))
