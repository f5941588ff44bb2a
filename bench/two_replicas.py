"""Two real daemons beside their simulation: rates are measured apart, and a run of other turns is predicted.

Each daemon is a process of its own with a store of its own, and the demo model, which computes on one thread: the two
have a machine of two cores. Both share a bucket in this process, and each reaches it by a proxy that counts its
requests (`tests/load/machines.py`).

- What is predicted: several clients at once, each with sessions of its own, at either machine, by lot. A session sleeps
  where its machine lets it, and so it is found awake, on the disk, in the remote, or awake elsewhere: none of this is
  told to the simulator. It is told which turn comes when and where, and how long its answer was.
- What is measured: one turn at a time, of other sessions and other sizes, with nothing beside it. So each rate is that
  of a machine alone, and all waiting in the prediction is the simulator's own. Such a part stands before and behind
  each predicted one, and how turns vary is taken from these two: a machine's other work comes and goes by the minute.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from simulated import Session, Simulation
from stated import Rates, Settings, value
from synthetic import demo_shape
from torpor.daemon.api.events import TokenEvent
from torpor.errors import TorporError
from torpor.socket_api import Client
from torpor.tests.load.machines import Machine
from torpor.tests.memvid.remote.bucket_server import BucketServer

SETTINGS: Final = Settings(lease_s=6.0, turns_s=5.0, idle_s=3.0)
CLIENTS, SESSIONS, TURNS = 4, 2, 10
"""Of a predicted part: clients, sessions of each, turns of each client."""
SEED: Final = 38
"""Of the turns. While the model was mended, others were used."""
QUIET_S: Final = 0.4
REPLAYS: Final = 20
FIRST_TOKEN, MOST_TOKEN = 300, 4_000
"""Plain tokens of the demo model."""
THREADS: Final = "OPENBLAS_NUM_THREADS"

MEASURED: Final = (
    ((100, 8), None, (60, 30), None, (30, 8)),
    ((300, 8), (40, 40), (500, 24), (900, 8), None, (200, 16), None, (60, 8)),
)
"""Of a small session, and of a large one: tokens that each turn reads and writes; None: it sleeps, and the remote has
it. The last turn comes to the other machine."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a client: of which session, at which machine, how many tokens are read, and written at most; after how
    many seconds it comes."""

    session: str
    machine: int
    read: int
    write: int
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a turn. found: how it found its session. tokens: of the session before it; written: by it. seconds:
    until its session was awake, until its first token, and from that to its end."""

    turn: Turn
    found: str
    tokens: int
    written: int
    wake_s: float
    first_s: float
    rest_s: float


@dataclass(frozen=True, slots=True)
class Slept:
    """A sleep with nothing beside it: seconds until its receipt, and from there until the remote had it; bytes."""

    sleep_s: float
    send_s: float
    sent_bytes: int


@dataclass
class Part:
    """A part of the run. seconds: from its begin to the end of its last turn. Bytes and requests of the remote."""

    done: list[Done] = field(default_factory=list)
    slept: list[Slept] = field(default_factory=list)
    scripts: list[list[Turn]] = field(default_factory=list)
    seconds: float = 0.0
    writes: int = 0
    reads: int = 0
    sent_bytes: int = 0
    came_bytes: int = 0


def scripts_of(round_: int, seed: int) -> list[list[Turn]]:
    """What each client does in a predicted part."""
    chance, scripts = random.Random(f"{seed}/{round_}"), []
    for client in range(CLIENTS):
        at = {f"p{round_}-{client}-{number}": chance.randrange(2) for number in range(SESSIONS)}
        turns: list[Turn] = []
        for _ in range(TURNS):
            name = chance.choice(list(at))
            if chance.random() < 0.3:
                at[name] = 1 - at[name]
            gap_s = min(chance.lognormvariate(-0.7, 1.0), 6.0)
            turns.append(Turn(name, at[name], chance.randint(30, 400), chance.randint(4, 48), gap_s))
        scripts.append(turns)
    return scripts


class Replicas:
    """The two daemons, and the bucket."""

    def __init__(self, folder: Path) -> None:
        os.environ[THREADS] = "1"  # of the daemons
        self._bucket = BucketServer()
        lease_s, more = int(SETTINGS.lease_s), ("--idle-sleep", str(SETTINGS.idle_s))
        self.machines = [
            Machine(folder / f"r{number}", self._bucket.port, lease_s=lease_s, turns=str(SETTINGS.turns_s), more=more)
            for number in range(2)
        ]

    def __enter__(self) -> Replicas:
        self._bucket.__enter__()
        for machine in self.machines:
            machine.start()
        self._until_quiet()
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            machine.close()
        self._bucket.__exit__()

    def measure(self, round_: int) -> Part:
        """One turn at a time."""
        part = Part()
        with _Client(self.machines) as client:
            for machine in range(2):
                for number, steps in enumerate(MEASURED):
                    name = f"m{round_}-{machine}-{number}"
                    for step in steps[:-1]:
                        if step is None:
                            part.slept.append(self._sleep(client, machine, name))
                        else:
                            part.done.append(client.take(Turn(name, machine, *step)))
                    part.slept.append(self._sleep(client, machine, name))
                    self._until_quiet()  # else the other machine would have to ask for it
                    part.done.append(client.take(Turn(name, 1 - machine, *steps[-1])))
                    part.slept.append(self._sleep(client, 1 - machine, name))
        self._until_quiet()
        return part

    def _sleep(self, client: _Client, machine: int, name: str) -> Slept:
        proxy, begun_s = self.machines[machine].proxy, time.monotonic()
        first = len(proxy.asked)
        client.links[machine].sleep(name)
        slept_s = time.monotonic()
        client.links[machine].sleep(name, remote=True)
        sent_s = time.monotonic()
        return Slept(slept_s - begun_s, sent_s - slept_s, sum(each.size_bytes for each in proxy.asked[first:]))

    def run(self, scripts: list[list[Turn]]) -> Part:
        """Let each client take its turns, at once, and wait until all sleep."""
        part = Part(scripts=scripts)
        firsts = [len(machine.proxy.asked) for machine in self.machines]
        begun_s = time.monotonic()
        with ThreadPoolExecutor(len(scripts)) as pool:
            for done in pool.map(self._take, scripts):
                part.done += done
        part.seconds = time.monotonic() - begun_s
        time.sleep(SETTINGS.idle_s + 2 * QUIET_S)  # until all sleep
        self._until_quiet()
        for machine, first in zip(self.machines, firsts, strict=True):
            for asked in machine.proxy.asked[first:]:
                part.sent_bytes += asked.size_bytes
                if asked.span:
                    start, _, end = asked.span.removeprefix("bytes=").partition("-")
                    part.came_bytes += int(end) + 1 - int(start)
                if asked.method in ("PUT", "POST") or "list-type" in asked.target:
                    part.writes += 1
                elif asked.method != "DELETE":
                    part.reads += 1
        return part

    def _take(self, script: list[Turn]) -> list[Done]:
        with _Client(self.machines) as client:
            return [client.take(turn) for turn in script]

    def _until_quiet(self) -> None:
        """Until nothing was asked of the remote for some time: all that sleeps is free."""
        counts, since_s = -1, time.monotonic()
        deadline_s = since_s + 120
        while time.monotonic() - since_s < QUIET_S:
            if (now := sum(len(machine.proxy.asked) for machine in self.machines)) != counts:
                counts, since_s = now, time.monotonic()
            if time.monotonic() > deadline_s:
                raise TorporError("The replicas are never quiet.")
            time.sleep(0.05)


class _Client:
    """Who takes turns, one after the other."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._stack = ExitStack()
        self.links = [self._stack.enter_context(Client(machine.socket, timeout_s=300)) for machine in machines]
        self._tokens: Counter[str] = Counter()

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def take(self, turn: Turn) -> Done:
        time.sleep(turn.gap_s)
        link, name, firsts, begun_s = self.links[turn.machine], turn.session, [], time.monotonic()
        found, before = "new", self._tokens[name]
        if before:
            woken = link.wake(name)
            found = "awake" if woken.already_awake else "disk" if woken.came_from is None else "remote"
        awake_s = time.monotonic()

        def heard(event: Any) -> None:
            if isinstance(event, TokenEvent):
                firsts.append(time.monotonic())

        text = random.Random(f"{name}/{before}").choices(range(FIRST_TOKEN, MOST_TOKEN), k=turn.read)
        answer = link.generate(name, tokens=text, max_tokens=turn.write, create=True, on_event=heard)
        ended_s = time.monotonic()
        self._tokens[name] = answer.token_count
        seconds = (awake_s - begun_s, firsts[0] - begun_s, ended_s - firsts[0])
        return Done(turn, found, before, len(answer.tokens), *seconds)


# --- rates


def rates_of(parts: Sequence[Part]) -> Rates:
    """The rates that measured parts show, by least squares. What the bytes of a wake and a sleep take is that of
    `docs/performance.md`: states of the demo model are too small to show it."""
    done = [each for part in parts for each in part.done]
    slept = [each for part in parts for each in part.slept]
    token_bytes = demo_shape().token_bytes
    turn_s, read_s, read_context_s, ask_s = _fitted(
        [
            [1.0, each.turn.read, each.turn.read * (each.tokens + each.turn.read / 2), float(each.found == "new")]
            for each in done
        ],
        [each.first_s - (each.wake_s if each.found in ("disk", "remote") else 0.0) for each in done],
    )
    write_row_s, write_context_s = _fitted(
        [[each.written, each.written * (each.tokens + each.turn.read)] for each in done], [each.rest_s for each in done]
    )
    disk_s = float(np.mean([each.wake_s for each in done if each.found == "disk"]))
    wake_s = max(disk_s - ask_s, 0.0)
    remote = [each for each in done if each.found == "remote"]
    fetch_s, fetch_byte_s = _fitted(
        [[1.0, each.tokens * token_bytes] for each in remote], [each.wake_s - wake_s for each in remote]
    )
    send_s, send_byte_s = _fitted([[1.0, each.sent_bytes] for each in slept], [each.send_s for each in slept])
    return Rates(
        "a replica of the demo model",
        token_bytes=token_bytes,
        memory_bytes=2**40,
        disk_bytes=2**50,
        turn_s=turn_s,
        read_s=read_s,
        read_context_s=read_context_s,
        write_s=0.0,
        write_row_s=write_row_s,
        write_context_s=write_context_s,
        wake_s=wake_s,
        wake_bytes_s=value("Mac wake"),
        sleep_s=float(np.mean([each.sleep_s for each in slept])),
        sleep_bytes_s=value("sleep"),
        ask_s=ask_s,
        fetch_s=fetch_s,
        fetch_bytes_s=1 / max(fetch_byte_s, 1e-12),
        send_s=send_s,
        send_bytes_s=1 / max(send_byte_s, 1e-12),
    )


def paces_of(part: Part, rates: Rates) -> list[float]:
    """By how much each turn was slower or faster than by the rates."""
    return [
        (each.first_s + each.rest_s - (each.wake_s if each.found in ("disk", "remote") else 0.0))
        / (
            rates.turn_s
            + rates.ask_s * (each.found == "new")
            + rates.reading_s(each.turn.read, each.tokens)
            + each.written * rates.row_s(each.tokens + each.turn.read)
        )
        for each in part.done
    ]


def _fitted(rows: list[list[float]], seconds: list[float]) -> list[float]:
    """Least squares of the relative errors: a turn that other work made long does not outweigh the others. What comes
    out below nothing is nothing, and the others are fitted without it."""
    matrix, left = np.array(rows) / np.array(seconds)[:, None], list(range(len(rows[0])))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, left], np.ones(len(seconds)), rcond=None)
        if (found >= 0).all() or len(left) == 1:
            whole = [0.0] * len(rows[0])
            for at, each in zip(left, found, strict=True):
                whole[at] = max(float(each), 0.0)
            return whole
        left.remove(left[int(np.argmin(found))])


# --- what is compared


@dataclass
class Figures:
    """Of predicted parts: seconds to each first token; how turns found their sessions; seconds of the parts; of the
    remote requests and bytes. times: as often as all of it was done."""

    times: int = 1
    firsts: list[float] = field(default_factory=list)
    found: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    writes: int = 0
    reads: int = 0
    sent_bytes: int = 0
    came_bytes: int = 0

    def told(self) -> dict[str, float]:
        turns, times = self.found.total(), self.times
        return {
            **{f"first token, s, p{at}": float(np.percentile(self.firsts, at)) for at in (50, 90, 99)},
            "first token, s, mean": float(np.mean(self.firsts)),
            "turns a second": turns / self.seconds,
            **{f"found: {way}, %": 100 * self.found[way] / turns for way in ("new", "awake", "disk", "remote")},
            "requests that write": self.writes / times,
            "requests that read": self.reads / times,
            "MB sent": self.sent_bytes / times / 1e6,
            "MB fetched": self.came_bytes / times / 1e6,
        }


def found_in(parts: Sequence[Part]) -> Figures:
    """As it was."""
    done = [each for part in parts for each in part.done]
    sums = ("seconds", "writes", "reads", "sent_bytes", "came_bytes")
    return Figures(
        firsts=[each.first_s for each in done],
        found=Counter(each.found for each in done),
        **{name: sum(getattr(part, name) for part in parts) for name in sums},
    )


def predict(parts: Sequence[Part], measured: Sequence[Part], rates: Rates) -> Figures:
    """What the simulator says: of replays, in each of which a turn has by lot the pace of one that was measured before
    or behind its part."""
    paces = [paces_of(part, rates) for part in measured]
    figures = Figures(REPLAYS)
    for replay in range(REPLAYS):
        chance = random.Random(replay)
        for number, part in enumerate(parts):
            near = paces[number] + paces[number + 1]
            _simulate(part, Simulation(rates, SETTINGS, 2, pace=partial(chance.choice, near)), figures)
    return figures


def _simulate(part: Part, simulation: Simulation, figures: Figures) -> None:
    written = {(each.turn.session, each.tokens): each.written for each in part.done}
    clock, told, sessions = simulation.clock, simulation.told, {name: Session() for name, _ in written}
    ends = [0.0]

    def take(turns: Iterator[Turn]) -> None:
        if (turn := next(turns, None)) is None:
            ends.append(clock.now_s)
            return

        def begin() -> None:
            session = sessions[turn.session]
            write = written[turn.session, session.tokens]
            simulation.turn(session, simulation.machines[turn.machine], turn.read, write, lambda: take(turns))

        clock.at(clock.now_s + turn.gap_s, begin)

    for script in part.scripts:
        take(iter(script))
    clock.run()
    clock.now_s = max(ends) + SETTINGS.idle_s
    simulation.settle(sessions.values())
    figures.seconds += max(ends)
    figures.firsts += told.firsts
    figures.found.update(told.found)
    figures.writes += told.requests["writes"]
    figures.reads += told.requests["reads"]
    figures.sent_bytes += told.sent_bytes
    figures.came_bytes += told.came_bytes


def run(folder: Path, rounds: int, seed: int = SEED) -> tuple[list[Part], list[Part]]:
    """The parts that are measured, one more, and between them those that are predicted."""
    with Replicas(folder) as replicas:
        replicas.measure(-1)  # what is used for the first time
        measured, predicted = [replicas.measure(0)], []
        for round_ in range(rounds):
            predicted.append(replicas.run(scripts_of(round_, seed)))
            measured.append(replicas.measure(round_ + 1))
    return measured, predicted


def compare(measured: Sequence[Part], predicted: Sequence[Part]) -> dict[str, Any]:
    """Each figure as it was and as it was predicted; the rates; and the seconds within which so many hundredths of the
    turns had their first token."""
    rates = rates_of(measured)
    was, said = found_in(predicted), predict(predicted, measured, rates)
    return {
        "turns": {name: sum(len(part.done) for part in parts)
                  for name, parts in (("measured", measured), ("predicted", predicted))},
        "rounds": len(predicted),
        "load_average": os.getloadavg()[1],
        "rates": asdict(rates),
        "figures": {name: {"was": was.told()[name], "predicted": value} for name, value in said.told().items()},
        "hundredths": {name: [float(np.percentile(of.firsts, at)) for at in range(100)]
                       for name, of in (("was", was), ("predicted", said))},
    }  # fmt: skip
