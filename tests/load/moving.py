"""Sessions that move between machines, which are killed and cut off: what was told is there once, wherever it goes on.

Each machine is a daemon with a store of its own; all have one remote, short leases, and send each turn before it is
told. Clients take random sessions at random machines, several the same one at a time. A turn is a number of its own, in
tokens: so the tokens of a session at the end are its history, and are compared with what was told and when.

Run as a script: `python tests/load/moving.py --help`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torpor.daemon.models.models import DEMO_MODEL_FOLDER
from torpor.errors import TorporError
from torpor.socket_api import Client, RemoteError
from torpor.tests.load.killable import Killable

TORPOR = Path(sys.executable).with_name("torpor")
FIRST_TOKEN, DIGITS = 300, 2000
"""Two tokens are the number of a turn: plain ones of the demo model."""

NO_ANSWER = ("lease_held", "lease_lost", "remote_unreachable", "remote_unclear", "head_replayed")
"""Refusals: the turn was not told. It may be there all the same, once."""


@dataclass(frozen=True, slots=True)
class Plan:
    """turn_tokens: of each turn. fault_s: seconds between two faults, none if None. stop_s: for how long a machine
    stands still, longer than its lease."""

    machines: int = 2
    sessions: int = 50
    turns: int = 2000
    clients: int = 6
    turn_tokens: int = 40
    lease_s: int = 2
    fault_s: float | None = 8.0
    stop_s: float = 3.0
    compared: int | None = None
    seed: int = 1

    def tokens(self, turn: int) -> list[int]:
        """What a turn appends: its number, and tokens that follow from it."""
        number = [FIRST_TOKEN + turn // DIGITS, FIRST_TOKEN + turn % DIGITS]
        return [*number, *random.Random(turn).choices(range(FIRST_TOKEN, 4000), k=self.turn_tokens - 2)]

    def turns_in(self, tokens: Sequence[int]) -> list[int] | None:
        """The turns of which a session consists; None: it has other tokens."""
        size = self.turn_tokens
        turns = [
            (tokens[at] - FIRST_TOKEN) * DIGITS + tokens[at + 1] - FIRST_TOKEN for at in range(0, len(tokens) - 1, size)
        ]
        return turns if [token for turn in turns for token in self.tokens(turn)] == list(tokens) else None


@dataclass(frozen=True, slots=True)
class Told:
    """A turn that was answered: how many tokens the session had then; from when to when it was asked for, by one
    clock; and at which machine."""

    turn: int
    token_count: int
    begun_s: float
    told_s: float
    machine: int


@dataclass
class Report:
    """What came of it. wrong: every sentence is a failure of a promise."""

    told: int = 0
    moves: int = 0
    kills: int = 0
    stops: int = 0
    untold_there: int = 0
    compared: int = 0
    seconds: float = 0.0
    refused: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Machine(Killable):
    """A daemon with a store of its own. up: it is not about to be killed."""

    def __init__(self, folder: Path, remote: Path, plan: Plan) -> None:
        folder.mkdir()
        command = [str(TORPOR), "serve", "--store", str(folder / "store"), "--socket", str(folder / "t.sock"), "--json"]
        command += ["--deterministic", "--model", f"demo={DEMO_MODEL_FOLDER}", "--remote", f"file://{remote}"]
        command += ["--remote-lease", str(plan.lease_s), "--remote-turns", "0"]
        self.up = threading.Event()
        super().__init__(folder / "t.sock", command, log=folder / "log")


class Moving:
    """The clients, the faults, and what was told of each session."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.report = plan, Report()
        remote = folder / "remote"
        remote.mkdir()
        self.machines = [Machine(folder / f"m{number}", remote, plan) for number in range(plan.machines)]
        self.told: list[list[Told]] = [[] for _ in range(plan.sessions)]
        self._turns = itertools.count()
        self._counting = threading.Lock()
        self._left = plan.turns
        self._done = threading.Event()

    def run(self) -> None:
        """All turns, then the end of each session at each machine."""
        begun = time.monotonic()
        for machine in self.machines:
            machine.start()
            machine.up.set()
        try:
            with ThreadPoolExecutor(self.plan.clients + 1) as pool:
                faults = pool.submit(self._do_harm)
                try:
                    for client in [pool.submit(self._client, number) for number in range(self.plan.clients)]:
                        client.result()
                finally:
                    self._done.set()
                faults.result()
            self._check()
        finally:
            for machine in self.machines:
                machine.kill()
        self.report.told = sum(map(len, self.told))
        self.report.seconds = time.monotonic() - begun

    # --- while it runs

    def _do_harm(self) -> None:
        chosen = random.Random(f"{self.plan.seed}/harm")
        while self.plan.fault_s is not None and not self._done.wait(self.plan.fault_s):
            machine = chosen.choice(self.machines)
            if chosen.random() < 0.5:
                machine.up.clear()
                machine.kill()
                self._done.wait(chosen.choice([0.0, 1.5 * self.plan.lease_s]))
                machine.start()
                machine.up.set()
                self.report.kills += 1
            else:
                machine.process.send_signal(signal.SIGSTOP)
                self._done.wait(self.plan.stop_s)
                machine.process.send_signal(signal.SIGCONT)
                self.report.stops += 1

    def _client(self, number: int) -> None:
        chosen = random.Random(f"{self.plan.seed}/client/{number}")
        links: dict[int, Client] = {}
        try:
            while self._takes_turn():
                self._turn(chosen.randrange(self.plan.sessions), chosen.randrange(self.plan.machines), links)
        finally:
            for link in links.values():
                link.close()

    def _takes_turn(self) -> bool:
        with self._counting:
            self._left -= 1
            return self._left >= 0 and len(self.report.wrong) < 20

    def _turn(self, session: int, at: int, links: dict[int, Client]) -> None:
        """One turn, which is told or not; the same turn is asked for once."""
        turn, name, machine = next(self._turns), f"s{session}", self.machines[at]
        machine.up.wait()
        try:
            link = links[at] = links.get(at) or Client(machine.socket)
            try:
                link.wake(name)
            except RemoteError as error:
                if error.code != "session_not_found":
                    raise
            begun = time.monotonic()
            answer = link.append(name, tokens=self.plan.tokens(turn), create=True)
            told = Told(turn, answer.token_count, begun, time.monotonic(), at)
            with self._counting:
                known = self.told[session]
                self.report.moves += bool(known) and known[-1].machine != at
                known.append(told)
        except RemoteError as error:
            with self._counting:
                self.report.refused[error.code] = self.report.refused.get(error.code, 0) + 1
            if error.code not in NO_ANSWER and not error.code.endswith("busy"):
                self._wrong(f"{name} at machine {at}: {error.code}: {error}")
        except (TorporError, OSError):  # the machine was killed in the middle of it
            with self._counting:
                self.report.refused["no answer"] = self.report.refused.get("no answer", 0) + 1
            if (broken := links.pop(at, None)) is not None:
                broken.close()

    def _wrong(self, sentence: str) -> None:
        with self._counting:
            self.report.wrong.append(sentence)

    # --- behind it

    def _check(self) -> None:
        compared = range(self.plan.sessions if self.plan.compared is None else self.plan.compared)
        for session, told in enumerate(self.told):
            if not told:
                continue
            name = f"s{session}"
            ledgers = [self._ledger(machine, name) for machine in self.machines]
            if any(ledger != ledgers[0] for ledger in ledgers):
                self._wrong(f"{name} has {[len(ledger) for ledger in ledgers]} tokens at the machines")
            turns = self.plan.turns_in(ledgers[-1])
            if turns is None:
                self._wrong(f"{name} has tokens that are no turn")
                continue
            self.report.wrong += judge(name, turns, told, self.plan.turn_tokens)
            self.report.untold_there += len(turns) - len(told)
            if session in compared:
                self._compare(self.machines[-1], name, turns)

    def _ledger(self, machine: Machine, name: str) -> list[int]:
        """All tokens of a session, once it is awake at a machine."""
        with Client(machine.socket) as client:
            until = time.monotonic() + 60
            while True:
                try:
                    client.wake(name)
                    break
                except RemoteError as error:
                    if error.code not in NO_ANSWER or time.monotonic() > until:
                        self._wrong(f"{name} does not wake at the end: {error.code}: {error}")
                        return []
                    time.sleep(0.1)
            tokens: list[int] = []
            while True:
                page = client.contents(name, start=len(tokens), tokens=True)
                tokens += page.tokens
                if page.following is None:
                    return tokens

    def _compare(self, machine: Machine, name: str, turns: Sequence[int]) -> None:
        """The state computes what one computes that read the same tokens in the same calls, there."""
        with Client(machine.socket) as client:
            control = f"control-{name}"
            for turn in turns:
                client.append(control, tokens=self.plan.tokens(turn), create=True)
            ended = [client.generate(each, max_tokens=4, prove=True) for each in (name, control)]
            client.delete(control)
        if ended[0].tokens != ended[1].tokens or ended[0].final_logits_blake3 != ended[1].final_logits_blake3:
            self._wrong(f"{name} has other logits at its end than it has alone")
        self.report.compared += 1


def judge(name: str, turns: Sequence[int], told: Sequence[Told], turn_tokens: int) -> list[str]:
    """What is wrong with the turns of a session, beside those that were told."""
    wrong, places = [], {turn: at for at, turn in enumerate(turns)}
    if len(places) != len(turns):
        twice = [turn for turn, count in Counter(turns).items() if count > 1]
        wrong.append(f"{name} has turns twice: {twice}")
    for each in told:
        if each.turn not in places:
            wrong.append(f"{name} was told turn {each.turn} by machine {each.machine}, and it is lost")
        elif each.token_count != (places[each.turn] + 1) * turn_tokens:
            wrong.append(f"{name} was told turn {each.turn} with {each.token_count} tokens, and it ends elsewhere")
    counts = Counter(each.token_count for each in told)
    wrong += [f"{name} was told {count} turns that end at {place}" for place, count in counts.items() if count > 1]
    for one, other in itertools.permutations(told, 2):
        if one.told_s < other.begun_s and places.get(one.turn, -1) > places.get(other.turn, len(turns)):
            wrong.append(f"{name} has turn {other.turn} before turn {one.turn}, which was told before it began")
    return wrong


def run(plan: Plan) -> Report:
    with tempfile.TemporaryDirectory(prefix="torpor-moving-") as folder:
        moving = Moving(plan, Path(folder))
        moving.run()
        if moving.report.wrong:
            for machine in moving.machines:
                print((machine.socket.parent / "log").read_text()[-3000:], file=sys.stderr)
        return moving.report


def main() -> int:
    """Run it and print what came of it, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plan = Plan()
    for name in ("machines", "sessions", "turns", "clients", "turn_tokens", "lease_s", "compared", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(plan, name))
    parser.add_argument("--fault-s", type=float, default=plan.fault_s, help="0: none")
    parser.add_argument("--stop-s", type=float, default=plan.stop_s)
    options = vars(parser.parse_args())
    report = run(Plan(**{**options, "fault_s": options["fault_s"] or None}))
    print(json.dumps(asdict(report), indent=2))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
