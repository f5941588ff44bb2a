"""Sleeps and repacks know of each other: who waits, and who has had room given back."""

from __future__ import annotations

import threading
import time

import pytest
from torpor.daemon.sleep.disk_space import Stop, Way

DEADLINE_S = 30.0


@pytest.fixture
def way() -> Way:
    return Way()


def wait_until_waiting(way: Way, count: int = 1) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while len(way._changed._waiters) < count:  # type: ignore[attr-defined]
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_there_is_no_more_room_where_no_repack_was_under_way(way: Way) -> None:
    before = way.ended()
    with way.claimed():
        assert not way.wait_for_room(before)


def test_one_that_ended_during_the_first_try_has_given_room_back(way: Way) -> None:
    before = way.ended()
    with way.repacking():
        pass
    with way.claimed():
        assert way.wait_for_room(before)
    with way.claimed():
        assert not way.wait_for_room(way.ended())


def test_a_claim_waits_for_every_repack_that_is_under_way(way: Way) -> None:
    before, answers = way.ended(), list[bool]()

    def claim() -> None:
        with way.claimed():
            answers.append(way.wait_for_room(before))

    one, two = way.repacking(), way.repacking()
    one.__enter__()
    two.__enter__()
    thread = threading.Thread(target=claim)
    thread.start()
    wait_until_waiting(way)
    one.__exit__(None, None, None)
    wait_until_waiting(way)
    assert answers == []
    two.__exit__(None, None, None)
    thread.join(DEADLINE_S)
    assert answers == [True]


def test_no_repack_begins_while_room_is_claimed(way: Way) -> None:
    begun = threading.Event()

    def repack() -> None:
        with way.repacking():
            begun.set()

    with way.claimed():
        thread = threading.Thread(target=repack)
        thread.start()
        wait_until_waiting(way)
        assert not begun.is_set()
        assert not way.wait_for_room(way.ended()), "what has not begun is not waited for"
    thread.join(DEADLINE_S)
    assert begun.is_set()


def test_a_sleep_that_has_room_claims_none(way: Way) -> None:
    with way.sleeping():
        assert (way.has_sleeps, way.is_claimed) == (True, False)
        with way.claimed():
            assert way.is_claimed
    assert (way.has_sleeps, way.is_claimed) == (False, False)


def test_who_was_told_to_stop_stays_told() -> None:
    reasons = [False]
    stop = Stop(lambda: False, lambda: reasons[0])
    assert not stop()
    reasons[0] = True
    assert stop()
    reasons[0] = False
    assert stop()
    assert stop.was_told
