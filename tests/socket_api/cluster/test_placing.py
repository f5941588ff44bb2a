"""The order of replicas, and the seconds behind it."""

from __future__ import annotations

import pytest
from torpor.socket_api.cluster.placing import Rates, Standing, Wanted, ranked

S = "torpor://default/s"
RATES = Rates(disk_bytes_per_s=100.0, remote_bytes_per_s=10.0, text_bytes_per_s=10.0, handover_s=5.0, answer_s=3.0)
HAS_ROOM = 10**6


def order(standings: dict[str, Standing], wanted: Wanted, **queued: int) -> list[str]:
    return [each.replica for each in ranked(standings, queued, wanted, RATES)]


def waits(standings: dict[str, Standing], wanted: Wanted, **queued: int) -> dict[str, str]:
    return {each.replica: str(each) for each in ranked(standings, queued, wanted, RATES)}


def test_it_goes_where_the_session_is_awake_however_busy_that_is() -> None:
    standings = {"a": Standing(free_bytes=HAS_ROOM), "b": Standing({S: 1000}, free_bytes=HAS_ROOM)}
    assert order(standings, Wanted(S), b=100) == ["b", "a"]


def test_who_answered_last_is_believed_before_what_it_told() -> None:
    standings = {"a": Standing(), "b": Standing({S: 1000})}
    assert order(standings, Wanted(S, was_at="a")) == ["a", "b"]


def test_a_replica_that_is_gone_is_not_waited_for() -> None:
    standings = {"a": Standing(), "b": Standing({S: 1000})}
    assert order(standings, Wanted(S, was_at="gone")) == ["b", "a"]


@pytest.mark.parametrize(
    ("standing", "wanted", "told"),
    [
        (Standing(free_bytes=HAS_ROOM), Wanted(), "0 s"),
        (Standing(asleep={S: 1000}, free_bytes=HAS_ROOM), Wanted(S), "10 s (waking 10)"),
        (Standing(asleep={S: 1000}, free_bytes=600), Wanted(S), "14 s (waking 10, room 4)"),
        (Standing(free_bytes=HAS_ROOM), Wanted(head_bytes=20), "2 s (reading 2)"),
        (Standing(free_bytes=HAS_ROOM), Wanted(head_bytes=20, read_at=frozenset("a")), "0 s"),
        (Standing({S: 1000}), Wanted(S), "awake here, 0 s"),
    ],
)
def test_the_wait_of_a_replica_alone(standing: Standing, wanted: Wanted, told: str) -> None:
    assert waits({"a": standing}, wanted) == {"a": told}


def test_elsewhere_there_is_a_hand_over_and_a_way_here() -> None:
    standings = {"a": Standing({S: 1000}), "b": Standing(free_bytes=HAS_ROOM)}
    assert waits(standings, Wanted(S), b=2) == {
        "a": "awake here, 0 s",
        "b": "121 s (waiting 6, handover 5, fetching 100, waking 10)",
    }


def test_a_queue_is_left_for_one_that_would_be_ready_sooner() -> None:
    standings = {"a": Standing(asleep={S: 100}, free_bytes=HAS_ROOM), "b": Standing(free_bytes=HAS_ROOM)}
    assert order(standings, Wanted(S), a=3) == ["a", "b"]
    assert order(standings, Wanted(S), a=4) == ["b", "a"]


def test_of_equals_the_one_with_more_room_is_asked() -> None:
    standings = {"a": Standing(free_bytes=1), "b": Standing(free_bytes=2)}
    assert order(standings, Wanted()) == ["b", "a"]


def test_what_has_told_nothing_yet_has_nothing() -> None:
    assert Standing.told({}) == Standing()
