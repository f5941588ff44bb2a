"""Sessions move between machines that are killed, stand still and are cut off for longer than their leases, and whose
clocks are set: each turn that was told is there once, in order, at every machine, and the state computes what it
computes alone.

The heavy test is the whole: 50 sessions, 2,000 turns.
"""

from __future__ import annotations

import pytest
from torpor.tests.load.history import Told, Turns
from torpor.tests.load.moving import Plan, Report, run

SHARE = Plan(sessions=3, turns=24, clients=3, fault_s=2.0)


def assert_moved(plan: Plan, report: Report) -> None:
    assert report.wrong == []
    assert report.told > plan.turns // 3, report.refused
    assert report.moves > 0
    assert report.kills + report.stops + report.cuts > 0
    assert report.compared > 0


def told(*turns: tuple[int, int]) -> list[Told]:
    """Turns and the tokens that they were told with, one after the other."""
    return [Told(turn, tokens, 2.0 * at, 2.0 * at + 1, machine=at) for at, (turn, tokens) in enumerate(turns)]


@pytest.mark.parametrize(
    ("turns", "answers", "wrong"),
    [
        ([1, 2, 3], [(1, 10), (2, 20), (3, 30)], ""),
        ([1, 9, 3], [(1, 10), (3, 30)], ""),  # one that was not told may be there
        ([1, 3], [(1, 10), (2, 20), (3, 20)], "lost"),
        ([1, 2, 2], [(1, 10), (2, 20)], "twice"),
        ([2, 1], [(1, 20), (2, 10)], "before turn 1"),
        ([1, 2], [(1, 10), (2, 10)], "ends elsewhere"),
        ([1, 2], [(1, 10), (2, 30)], "ends elsewhere"),
    ],
)
def test_a_history_that_breaks_a_promise_is_found(turns: list[int], answers: list[tuple[int, int]], wrong: str) -> None:
    found = Turns(10).judge("s", [turns], told(*answers))
    assert any(wrong in sentence for sentence in found) if wrong else not found


def test_where_a_session_went_on_at_two_places_each_told_turn_is_at_one_of_them() -> None:
    turns = Turns(10)
    assert not turns.judge("s", [[1, 2, 4], [1, 3]], told((1, 10), (2, 20), (3, 20), (4, 30)))
    assert "lost" in turns.judge("s", [[1, 2], [1, 3]], told((1, 10), (4, 20)))[0]
    assert "elsewhere" in turns.judge("s", [[1, 2, 3], [1, 2]], told((1, 10), (3, 20)))[0]


def test_tokens_tell_their_turns() -> None:
    turns = Turns()
    tokens = [token for turn in (5, 2001, 7) for token in turns.tokens(turn)]
    assert turns.turns_in(tokens) == [5, 2001, 7]
    assert turns.turns_in(tokens[:-1]) is None
    assert turns.turns_in([*tokens[:50], 1, *tokens[51:]]) is None


@pytest.mark.one_in(4)
def test_what_was_told_is_there_wherever_a_session_goes_on_whatever_machine_dies() -> None:
    assert_moved(SHARE, run(SHARE))


@pytest.mark.heavy
@pytest.mark.parametrize("machines", [2, 3])
def test_fifty_sessions_take_two_thousand_turns_while_machines_die_and_stand_still(machines: int) -> None:
    plan = Plan(machines=machines)
    assert_moved(plan, run(plan))


@pytest.mark.heavy
@pytest.mark.parametrize("remote_turns", ["5", "off"])
def test_turns_that_were_not_sent_yet_are_kept_where_they_were_told(remote_turns: str) -> None:
    plan = Plan(sessions=20, turns=400, remote_turns=remote_turns)
    assert_moved(plan, run(plan))
