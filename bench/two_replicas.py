"""Two real daemons beside their simulation: rates are measured in one part of a run, and the other part is predicted.

Each daemon is a process of its own with a store of its own, and the demo model. Both share a bucket in this process,
and each reaches it by a proxy that counts its requests (`tests/load/machines.py`). Two clients take turns with sessions
of their own, at either machine. So a session wakes from the disk, is fetched, and is asked for while it is awake
elsewhere. The two parts take turns, so that a machine whose other work changes does so for both.

What is told to the simulator of the predicted part: which turn comes when and where, and how long its answer was. What
it is not told: anything that was measured in that part.

A client needs the socket of a replica. To put replicas behind Ray Serve, give `Replica` their sockets, and leave
the choice of the machine to its router: then tell the simulator which one it chose, as an answer says.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from simulated import Session, Simulation
from stated import Rates, Settings
from synthetic import demo_shape
from torpor.daemon.api.events import TokenEvent
from torpor.errors import TorporError
from torpor.socket_api import Client
from torpor.tests.load.machines import Machine
from torpor.tests.memvid.remote.bucket_server import BucketServer

SETTINGS: Final = Settings(lease_s=6.0, turns_s=5.0, idle_s=float("inf"))
QUIET_S: Final = 1.5
REPLAYS: Final = 20
CONTEXT: Final = 0.9e-3
"""By how much a token takes longer to read for each token before it: of the demo model, by the times to read 512 and
7,680 tokens again in `docs/performance.md`."""
FIRST_TOKEN, MOST_TOKEN = 300, 4_000
"""Plain tokens of the demo model."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a client: of which session, at which machine, how many tokens are read, and written at most; after how
    many seconds it comes; and whether the session is put to sleep behind it."""

    session: str
    machine: int
    read: int
    write: int
    gap_s: float
    sleeps: bool


@dataclass
class Done:
    """What came of a turn. found: how it found its session. seconds: to its first token, and from that to its last one;
    of the sleep behind it, if it had one. tokens: of the session before it. written: tokens."""

    turn: Turn
    found: str
    tokens: int
    written: int
    first_s: float
    rest_s: float
    sleep_s: float | None = None


@dataclass
class Part:
    """What one part of the run did. requests: of the remote; sent_bytes: to it."""

    done: list[Done] = field(default_factory=list)
    requests: dict[str, int] = field(default_factory=lambda: {"writes": 0, "reads": 0})
    sent_bytes: int = 0
    scripts: list[list[list[Turn]]] = field(default_factory=list)


def measured_part(client: int, round_: int, chance: random.Random) -> list[Turn]:
    """Turns that show each rate: new, awake, from the disk, fetched; short and long texts and answers."""
    sizes = [(300, 8, False), (40, 40, False), (500, 24, False), (60, 8, True), (200, 30, True), (30, 8, True)]
    return [
        Turn(f"m{round_}-{client}", client if at < 5 else 1 - client, read, write, chance.uniform(0.8, 1.6), sleeps)
        for at, (read, write, sleeps) in enumerate(sizes)
    ]


def predicted_part(client: int, round_: int, chance: random.Random) -> list[Turn]:
    """Turns of other sizes, on sessions and machines by lot."""
    at = {f"p{round_}-{client}-{number}": client for number in range(2)}
    turns: list[Turn] = []
    for _ in range(9):
        name = chance.choice(list(at))
        if chance.random() < 0.3:
            at[name] = 1 - at[name]
        read, write = chance.randint(30, 400), chance.randint(4, 48)
        turns.append(Turn(name, at[name], read, write, chance.uniform(0.1, 1.6), chance.random() < 0.3))
    return turns


class Replicas:
    """The two daemons, and the bucket."""

    def __init__(self, folder: Path) -> None:
        self._bucket = BucketServer()
        self.machines = [
            Machine(
                folder / f"r{number}", self._bucket.port, lease_s=int(SETTINGS.lease_s), turns=str(SETTINGS.turns_s)
            )
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

    def run(self, scripts: list[list[Turn]], part: Part) -> None:
        """Let each client take its turns, at once; then put all to sleep."""
        firsts = [len(machine.proxy.asked) for machine in self.machines]
        with ThreadPoolExecutor(len(scripts)) as pool:
            for client in [pool.submit(self._take, script, part) for script in scripts]:
                client.result()
        self._until_quiet()
        for machine, first in zip(self.machines, firsts, strict=True):
            for asked in machine.proxy.asked[first:]:
                part.sent_bytes += asked.size_bytes
                if asked.method != "DELETE":
                    writes = asked.method in ("PUT", "POST") or "list-type" in asked.target
                    part.requests["writes" if writes else "reads"] += 1
        part.scripts.append(scripts)

    def _take(self, script: list[Turn], part: Part) -> None:
        links = [Client(machine.socket, timeout_s=300) for machine in self.machines]
        try:
            tokens: dict[str, int] = {}
            awake: dict[str, int | None] = {}
            for turn in script:
                time.sleep(turn.gap_s)
                part.done.append(self._turn(links, turn, tokens, awake))
            for name, at in awake.items():
                if at is not None:
                    links[at].sleep(name)
        finally:
            for link in links:
                link.close()

    def _turn(self, links: Sequence[Client], turn: Turn, tokens: dict[str, int], awake: dict[str, int | None]) -> Done:
        link, begun_s, first = links[turn.machine], time.monotonic(), []

        def heard(event: Any) -> None:
            if isinstance(event, TokenEvent) and not first:
                first.append(time.monotonic())

        found = "new"
        if turn.session in tokens:
            woken = link.wake(turn.session)
            was_elsewhere = awake[turn.session] not in (None, turn.machine)
            found = "asked for" if was_elsewhere else "awake" if woken.already_awake else "disk"
            found = "remote" if found == "disk" and woken.came_from is not None else found
        chance = random.Random(f"{turn.session}/{tokens.get(turn.session, 0)}")
        text = chance.choices(range(FIRST_TOKEN, MOST_TOKEN), k=turn.read)
        answer = link.generate(turn.session, tokens=text, max_tokens=turn.write, create=True, on_event=heard)
        ended_s = time.monotonic()
        before = tokens.get(turn.session, 0)
        tokens[turn.session], awake[turn.session] = answer.token_count, turn.machine
        done = Done(turn, found, before, len(answer.tokens), first[0] - begun_s, ended_s - first[0])
        if turn.sleeps:
            link.sleep(turn.session)
            done.sleep_s, awake[turn.session] = time.monotonic() - ended_s, None
        return done

    def _until_quiet(self) -> None:
        """Until nothing was asked of the remote for some time: all that was put to sleep is free."""
        counts, since_s = -1, time.monotonic()
        deadline_s = since_s + 120
        while time.monotonic() - since_s < QUIET_S:
            if (now := sum(len(machine.proxy.asked) for machine in self.machines)) != counts:
                counts, since_s = now, time.monotonic()
            if time.monotonic() > deadline_s:
                raise TorporError("The replicas are never quiet.")
            time.sleep(0.05)


WAYS: Final = ("awake", "new", "disk", "remote")


def rates_of(part: Part) -> Rates:
    """The rates that a part of a run shows, by least squares. What the bytes take is that of `docs/performance.md`:
    states of the demo model are too small to show it."""
    known = [each for each in part.done if each.found in WAYS]
    turn_s, read_s, *more_s = _fitted(
        [
            [1.0, each.turn.read * (1 + CONTEXT * (each.tokens + each.turn.read / 2))]
            + [float(each.found == way) for way in WAYS[1:]]
            for each in known
        ],
        [each.first_s for each in known],
    )
    new_s, disk_s, remote_s = more_s
    longer = [each for each in part.done if each.written > 1]
    return Rates(
        "a replica of the demo model",
        token_bytes=demo_shape().token_bytes,
        memory_bytes=2**40,
        disk_bytes=2**50,
        turn_s=turn_s,
        read_s=read_s,
        read_context_s=read_s * CONTEXT,
        write_s=0.0,
        write_row_s=sum(each.rest_s for each in longer) / sum(each.written for each in longer),
        write_context_s=0.0,
        wake_s=max(disk_s - new_s, 0.0),
        wake_bytes_s=3.06e9,
        sleep_s=float(np.mean([each.sleep_s for each in part.done if each.sleep_s is not None])),
        sleep_bytes_s=1.34e9,
        ask_s=new_s,
        fetch_s=max(remote_s - max(disk_s - new_s, 0.0), 0.0),
        fetch_bytes_s=0.28e9,
        send_s=4 * new_s,
        send_bytes_s=0.075e9,
    )


def paces_of(part: Part, rates: Rates) -> list[float]:
    """By how much each turn was slower or faster than by the rates: other work takes the processor by the second. Their
    mean is 1."""
    more_s = {
        "awake": 0.0,
        "new": rates.ask_s,
        "disk": rates.ask_s + rates.wake_s,
        "remote": rates.fetch_s + rates.wake_s,
    }
    paces = [
        (each.first_s + each.rest_s)
        / (
            more_s[each.found]
            + rates.turn_s
            + rates.reading_s(each.turn.read, each.tokens)
            + each.written * rates.write_row_s
        )
        for each in part.done
        if each.found in WAYS
    ]
    return [each / float(np.mean(paces)) for each in paces]


def _fitted(rows: list[list[float]], seconds: list[float]) -> list[float]:
    """Least squares; what comes out below nothing is nothing, and the others are fitted without it."""
    matrix, left = np.array(rows), list(range(len(rows[0])))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, left], np.array(seconds), rcond=None)
        if (found >= 0).all() or len(left) == 1:
            whole = [0.0] * len(rows[0])
            for at, each in zip(left, found, strict=True):
                whole[at] = max(float(each), 0.0)
            return whole
        left.remove(left[int(np.argmin(found))])


def predict(part: Part, rates: Rates, paces: Sequence[float]) -> dict[str, float]:
    """What the simulator says of a part, told how long its answers were: a mean of replays, in each of which a turn has
    one of the paces by lot."""
    written = {(each.turn.session, each.tokens): each.written for each in part.done}
    firsts: list[float] = []
    seconds, requests, sent = 0.0, {"writes": 0, "reads": 0}, 0
    for replay in range(REPLAYS):
        chance = random.Random(replay)
        for scripts in part.scripts:
            simulation = Simulation(rates, SETTINGS, 2, pace=partial(chance.choice, paces))
            clients = [_Scripted(simulation, script, written) for script in scripts]
            simulation.clock.run()
            seconds += sum(each.seconds for each in clients)
            firsts += simulation.told.firsts
            sent += simulation.told.sent_bytes
            for kind in requests:
                requests[kind] += simulation.told.requests[kind]
    means = {kind: count / REPLAYS for kind, count in requests.items()}
    return figures(firsts, len(part.done), seconds / REPLAYS, means, sent / REPLAYS)


def found_in(part: Part) -> dict[str, float]:
    """The same figures, as they were."""
    seconds = sum(each.first_s + each.rest_s + (each.sleep_s or 0.0) for each in part.done)
    return figures([each.first_s for each in part.done], len(part.done), seconds, part.requests, part.sent_bytes)


def figures(
    firsts: list[float], turns: int, seconds: float, requests: Mapping[str, float], sent: float
) -> dict[str, float]:
    return {
        "seconds in turns and sleeps": seconds,
        "turns a second of these": turns / seconds,
        "first token, mean": float(np.mean(firsts)),
        "first token, p50": float(np.percentile(firsts, 50)),
        "first token, p90": float(np.percentile(firsts, 90)),
        "requests that write": requests["writes"],
        "requests that read": requests["reads"],
        "bytes sent": sent,
    }


class _Scripted:
    """A client of a simulation that takes its turns, one after the other."""

    def __init__(self, simulation: Simulation, script: list[Turn], written: dict[tuple[str, int], int]) -> None:
        self._simulation, self._left, self._written = simulation, list(script), written
        self._sessions: dict[str, Session] = {}
        self.seconds = 0.0
        self._wait()

    def _wait(self) -> None:
        clock = self._simulation.clock
        if self._left:
            clock.at(clock.now_s + self._left[0].gap_s, self._take)
            return
        for session in self._sessions.values():
            if session.awake_at is not None:
                self._simulation.sleep(session)

    def _take(self) -> None:
        turn, simulation = self._left.pop(0), self._simulation
        session = self._sessions.setdefault(turn.session, Session())
        begun_s = simulation.clock.now_s
        write = self._written.get((turn.session, session.tokens), turn.write)

        def ended() -> None:
            until_s = simulation.clock.now_s
            if turn.sleeps:
                until_s += simulation.rates.sleeping_s(session.tokens - session.written)
                simulation.sleep(session)
            self.seconds += until_s - begun_s
            simulation.clock.at(until_s, self._wait)

        simulation.turn(session, simulation.machines[turn.machine], turn.read, write, ended)


def run(folder: Path, rounds: int, seed: int = 1) -> tuple[Part, Part]:
    """The part that is measured, and the one that is predicted."""
    measured, predicted = Part(), Part()
    with Replicas(folder) as replicas:
        for round_ in range(rounds):
            for make, part in ((measured_part, measured), (predicted_part, predicted)):
                chance = random.Random(f"{seed}/{round_}/{make.__name__}")
                replicas.run([make(client, round_, chance) for client in range(2)], part)
    return measured, predicted


def compare(measured: Part, predicted: Part) -> dict[str, Any]:
    """Each figure as it was and as it was predicted; the rates, and how the turns of that part found their sessions."""
    rates = rates_of(measured)
    was, said = found_in(predicted), predict(predicted, rates, paces_of(measured, rates))
    return {
        "turns": {"measured": len(measured.done), "predicted": len(predicted.done)},
        "rates": asdict(rates),
        "found": dict(Counter(each.found for each in predicted.done)),
        "figures": {name: {"was": was[name], "predicted": said[name]} for name in was},
    }
