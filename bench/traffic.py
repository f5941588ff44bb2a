"""Agents that begin at random times and take turns: what the simulation of many machines serves (`simulated.py`)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from simulated import Session, Simulation
from stated import HUMAN, TOOL, drawn_between, value

DAY_S = 86_400.0


@dataclass
class Agents:
    """Agents on a simulation's machines. daily: main sessions that begin a day, evenly, the whole day long. A session
    with sub-agents begins them at a turn of its own, and does not wait for them. context: tokens behind the last turn
    of a median session. sessions: all that ever began. busy: the share of the time that was counted in which an engine
    worked, of all machines. kept_tokens: that a session has at its end, with its sub-agents."""

    simulation: Simulation
    daily: float
    seed: int = 1
    context: float = value("context")
    sessions: list[Session] = field(default_factory=list)
    busy: float = 0.0
    kept_tokens: float = 0.0

    def __post_init__(self) -> None:
        self._begun = 0
        self._read_tokens = max(self.context / value("turns") - value("answer"), 1.0)

    def run(self, warm_s: float, seconds: float) -> Simulation:
        """First what nothing is counted of, then what is told; the simulation behind it."""
        clock = self.simulation.clock
        self.simulation.told.since_s = warm_s
        clock.at(0.0, self._begin)
        clock.run(warm_s)
        clock.now_s = warm_s
        before_s = sum(each.engine.settle() for each in self.simulation.machines)
        clock.run(warm_s + seconds)
        clock.now_s = warm_s + seconds
        worked_s = sum(each.engine.settle() for each in self.simulation.machines) - before_s
        self.busy = worked_s / seconds / len(self.simulation.machines)
        self.simulation.settle(self.sessions)
        ended = [session.tokens for session in self.sessions if not session.left and not session.busy]
        self.kept_tokens = sum(ended) / len(ended) * len(self.sessions) / self._begun if ended else 0.0
        return self.simulation

    def _begin(self) -> None:
        """A session begins, and the next one will. Each has a seed of its own: what machines do changes no draw."""
        clock, chance = self.simulation.clock, random.Random(f"{self.seed}/{self._begun}")
        self._begun += 1
        clock.at(clock.now_s + chance.expovariate(self.daily / DAY_S), self._begin)
        if clock.now_s >= self.simulation.told.since_s:
            self.simulation.told.begun += 1
        turns = _lognormal(chance, value("turns"), value("turns, spread"))
        at = chance.randint(1, turns) if chance.random() < value("with sub-agents") else 0
        self._turn(self._new(turns), chance, at)

    def _new(self, turns: int) -> Session:
        session = Session()
        session.left = turns
        self.sessions.append(session)
        return session

    def _turn(self, session: Session, chance: random.Random, with_others_at: int = 0) -> None:
        """One turn, and the wait for the next one. with_others_at: turns that are left when sub-agents begin."""
        if session.left == with_others_at:
            for number in range(int(value("sub-agents")) if with_others_at else 0):
                self._turn(self._new(int(value("their turns"))), random.Random(f"{chance.random()}/{number}"))
        session.left -= 1
        spread = value("answer, spread")
        read = _lognormal(chance, self._read_tokens * math.exp(-(spread**2) / 2), spread)
        write = _lognormal(chance, value("answer"), spread)
        after_s = drawn_between(chance, HUMAN if chance.random() < value("human") else TOOL)
        if session.tokens > value("most tokens"):  # the agent sums up, and goes on with that
            self.simulation.empty(session)
            read += int(value("summed up"))
        clock, machine = self.simulation.clock, self.simulation.place(session, read)

        def ended() -> None:
            if session.left:
                clock.at(clock.now_s + after_s, lambda: self._turn(session, chance, with_others_at))

        self.simulation.turn(session, machine, read, write, ended)


def _lognormal(chance: random.Random, median: float, sigma: float) -> int:
    return max(1, round(median * math.exp(chance.gauss(0, sigma))))
