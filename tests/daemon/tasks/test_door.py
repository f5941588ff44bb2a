"""What a daemon takes while it stops."""

from __future__ import annotations

import pytest
from torpor.daemon.errors import ServiceClosed
from torpor.daemon.tasks.door import Door, Phase


def takes(door: Door) -> tuple[bool, bool]:
    """Whether requests are taken, and work for sessions."""
    taken = []
    for require in (door.require_open, door.require_working):
        try:
            require()
            taken.append(True)
        except ServiceClosed:
            taken.append(False)
    assert taken[1] is door.is_working
    return taken[0], taken[1]


@pytest.mark.parametrize("phase", Phase)
def test_what_is_taken_in_each_phase(phase: Phase) -> None:
    door = Door()
    door.begin_to_stop(phase, 1.0)
    assert takes(door) == (phase is not Phase.CLOSED, phase is Phase.OPEN)


def test_a_stop_goes_only_forward_and_its_time_begins_once() -> None:
    door = Door()
    first = door.begin_to_stop(Phase.STOPPING, 5.0)
    assert door.begin_to_stop(Phase.SLEEPING, 100.0) is first is door.stopping
    assert door.phase is Phase.STOPPING


def test_a_stop_behind_a_refused_one_has_its_whole_time() -> None:
    door = Door()
    first = door.begin_to_stop(Phase.SLEEPING, 0.0)
    door.go_on()
    assert (takes(door), door.stopping) == ((True, True), None)
    second = door.begin_to_stop(Phase.SLEEPING, 100.0)
    assert first.until is not None
    assert second.until is not None
    assert second.until > first.until + 99
