"""A daemon is killed at each request of a hand-over, and of the one back: whoever has the session, and whoever asks.

Where it died, the request that it had sent has reached the remote or not. The other machine goes on with each turn that
was told; so does the one that died, once it runs again; and never both.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torpor.errors import TorporError
from torpor.socket_api import Client, RemoteError
from torpor.tests.load.history import Told, Turns, tokens_of, wake_in_time
from torpor.tests.load.machines import Machine
from torpor.tests.memvid.remote.bucket_server import BucketServer
from torpor.tests.memvid.remote.fault_proxy import Asked, Fault
from torpor.tests.shares import share

TURNS = Turns()
LEASE_S = 1
TRIES = 3
DEADLINE_S = 60.0
LEAST = 15
"""A machine has more requests than that in a hand-over and the one back."""


class HandOver:
    """Two machines, and one session after the other that goes from the first to the second and back."""

    def __init__(self, folder: Path, bucket_port: int) -> None:
        self.machines = [Machine(folder / name, bucket_port, lease_s=LEASE_S) for name in ("holder", "asker")]
        self.met: list[str] = []  # the requests at which one was killed
        self._numbers = itertools.count()
        self._sessions = itertools.count()

    def kill_at(self, number: int, victim: int, fault: Fault) -> bool:
        """Kill a machine at its request of this number, from the last turn before the hand-over on; whether it had so
        many. Whatever came of it, the session is where it should be, and asleep."""
        for machine in self.machines:
            if not machine.is_running:
                machine.start()
        self.name, self.told = f"s{next(self._sessions)}", list[Told]()
        self._turn(0)
        self._ask(0, lambda client: client.sleep(self.name))
        dies = threading.Event()
        self.machines[victim].proxy.plan = self._plan(number, victim, fault, dies)
        try:
            self._go_to_and_fro()
        except (TorporError, OSError):
            if not dies.is_set():
                raise
        self.machines[victim].proxy.plan = {}
        self._goes_on(1 - victim)
        if dies.is_set():
            self.machines[victim].process.wait(DEADLINE_S)
            self.machines[victim].start()
        self._is_refused(victim)
        self._goes_on(victim)
        self._is_refused(1 - victim)
        self._ask(victim, lambda client: client.sleep(self.name))
        return dies.is_set()

    def _plan(self, number: int, victim: int, fault: Fault, dies: threading.Event) -> Callable[[Asked], Fault | None]:
        counted = itertools.count()

        def plan(asked: Asked) -> Fault | None:
            if next(counted) != number:
                return None
            self.met.append(f"{asked.method} {asked.target.split('/')[3]}")
            dies.set()
            self.machines[victim].kill()
            return fault

        return plan

    def _go_to_and_fro(self) -> None:
        for at in (0, 1, 0):
            self._ask(at, lambda client: wake_in_time(client, self.name, DEADLINE_S))
            self._turn(at)
            if at:
                self._ask(at, lambda client: client.sleep(self.name))

    def _ask(self, at: int, question: Callable[[Client], object]) -> None:
        with Client(self.machines[at].socket) as client:
            question(client)

    def _turn(self, at: int) -> None:
        turn = next(self._numbers)
        self._ask(at, lambda client: self.told.append(TURNS.ask(client, self.name, turn, at)))

    def _goes_on(self, at: int) -> None:
        """The session wakes there with each turn that was told, and takes one more."""
        with Client(self.machines[at].socket) as client:
            wake_in_time(client, self.name, DEADLINE_S)
            turns = TURNS.turns_in(tokens_of(client, self.name))
        assert turns is not None
        assert TURNS.judge(self.name, [turns], self.told) == []
        self._turn(at)

    def _is_refused(self, at: int) -> None:
        """The other machine has it, unless that was so slow that its lease ran out: it takes it back then."""
        for _ in range(TRIES):
            try:
                self._turn(at)
            except RemoteError as error:
                if error.code != "lease_held":
                    raise
                return
            self._goes_on(1 - at)
        raise AssertionError(f"machine {at} takes a session that the other one has")


@pytest.fixture
def hand_over(tmp_path: Path) -> Iterator[HandOver]:
    with BucketServer() as bucket:
        made = HandOver(tmp_path, bucket.port)
        try:
            yield made
        finally:
            for machine in made.machines:
                machine.close()


WHERE = [
    pytest.mark.parametrize("fault", ["cut_before", "lost"], ids=["not-landed", "landed"]),
    pytest.mark.parametrize("victim", [0, 1], ids=["holder", "asker"]),
]


def at_each_place(test: Callable[..., None]) -> Callable[..., None]:
    for mark in WHERE:
        test = mark(test)
    return test


@pytest.mark.heavy
@at_each_place
def test_a_session_goes_on_whoever_is_killed_at_whichever_request_of_a_hand_over(
    victim: int, fault: Fault, hand_over: HandOver
) -> None:
    number = 0
    while hand_over.kill_at(number, victim, fault):
        print(number, hand_over.met[-1], flush=True)
        number += 1
    assert number > LEAST


@pytest.mark.one_in(4)
@at_each_place
def test_a_session_goes_on_whoever_is_killed_in_a_hand_over(victim: int, fault: Fault, hand_over: HandOver) -> None:
    assert hand_over.kill_at(share() % LEAST, victim, fault)
