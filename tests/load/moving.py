"""Sessions that move between machines, which are killed, stand still, are cut off, and have their clocks set: what was
told is there once, wherever it goes on.

Each machine is a daemon with a store and a network of its own; all have one remote, and short leases. Clients take
random sessions at random machines, several the same one at a time. A turn is a number of its own, in tokens: so the
tokens of a session at the end are its history, and are compared with what was told and when.

Where turns are sent only some time after they were told, a session may go on at two places. Then a client does what the
refusal says: it keeps what is here as a fork, removes it, and wakes what the remote has.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torpor.errors import TorporError
from torpor.socket_api import Client, RemoteError
from torpor.tests.load.history import NO_ANSWER, Told, Turns, tokens_of, wake_in_time
from torpor.tests.load.machines import Machine
from torpor.tests.memvid.remote.bucket_server import BucketServer

DEADLINE_S = 120.0
CUTS = ("cut_before", "silent")
"""What meets each request of a machine that is cut off: no connection, or no answer."""


@dataclass(frozen=True, slots=True)
class Plan:
    """turn_tokens: of each turn. remote_turns: as --remote-turns of the daemons. fault_s: seconds between two faults,
    none if None. stop_s: for how long a machine stands still or is cut off, longer than its lease. clock_s: by how much
    a clock is set forward or back. compared: sessions whose state is compared, all if None."""

    machines: int = 2
    sessions: int = 50
    turns: int = 2000
    clients: int = 6
    turn_tokens: int = 40
    lease_s: int = 2
    remote_turns: str = "0"
    fault_s: float | None = 8.0
    stop_s: float = 3.0
    clock_s: int = 3600
    compared: int | None = None
    seed: int = 1


@dataclass
class Report:
    """What came of it. parted: how often a session had gone on at two places. only_in_forks: told turns that only such
    a fork has. wrong: every sentence is a failure of a promise."""

    told: int = 0
    moves: int = 0
    kills: int = 0
    stops: int = 0
    cuts: int = 0
    clock_steps: int = 0
    parted: int = 0
    only_in_forks: int = 0
    untold_there: int = 0
    compared: int = 0
    seconds: float = 0.0
    refused: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


class Moving:
    """The clients, the faults, and what was told of each session."""

    def __init__(self, plan: Plan, folder: Path, bucket_port: int) -> None:
        self.plan, self.report = plan, Report()
        self.turns = Turns(plan.turn_tokens)
        self.machines = [
            Machine(folder / f"m{number}", bucket_port, lease_s=plan.lease_s, turns=plan.remote_turns)
            for number in range(plan.machines)
        ]
        self.told: list[list[Told]] = [[] for _ in range(plan.sessions)]
        self._forks: dict[str, tuple[str, int]] = {}  # of which session, and at which machine
        self._parting = [threading.Lock() for _ in self.machines]
        self._numbers = itertools.count()
        self._counting = threading.Lock()
        self._left = plan.turns
        self._done = threading.Event()

    def run(self) -> None:
        """All turns, then the end of each session at each machine."""
        begun = time.monotonic()
        try:
            for machine in self.machines:
                machine.start()
                machine.up.set()
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
                machine.close()
        self.report.told = sum(map(len, self.told))
        self.report.seconds = time.monotonic() - begun

    # --- while it runs

    def _do_harm(self) -> None:
        chosen = random.Random(f"{self.plan.seed}/harm")
        for harm in itertools.cycle([self._kill, self._stop, self._cut_off, self._set_clock]):
            if self.plan.fault_s is None or self._done.wait(self.plan.fault_s):
                return
            harm(chosen.choice(self.machines), chosen)

    def _kill(self, machine: Machine, chosen: random.Random) -> None:
        """Once it runs again, others have its sessions, or not yet."""
        machine.up.clear()
        machine.kill()
        self._done.wait(chosen.choice([0.0, 1.5 * self.plan.lease_s]))
        machine.start()
        machine.up.set()
        self.report.kills += 1

    def _stop(self, machine: Machine, _: random.Random) -> None:
        machine.process.send_signal(signal.SIGSTOP)
        self._done.wait(self.plan.stop_s)
        machine.process.send_signal(signal.SIGCONT)
        self.report.stops += 1

    def _cut_off(self, machine: Machine, chosen: random.Random) -> None:
        machine.cut_off(chosen.choice(CUTS))
        self._done.wait(self.plan.stop_s)
        machine.cut_off(None)
        self.report.cuts += 1

    def _set_clock(self, machine: Machine, chosen: random.Random) -> None:
        """An hour forward or back, and the next time right again."""
        machine.set_clock(0.0 if machine.clock_is_off_s else chosen.choice([-1, 1]) * self.plan.clock_s)
        self.report.clock_steps += 1

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
        turn, name, machine = next(self._numbers), f"s{session}", self.machines[at]
        machine.up.wait()
        try:
            link = links[at] = links.get(at) or Client(machine.socket)
            if self._wake(link, name, at):
                told = self.turns.ask(link, name, turn, at)
                with self._counting:
                    known = self.told[session]
                    self.report.moves += bool(known) and known[-1].machine != at
                    known.append(told)
        except RemoteError as error:
            self._refuse(error.code)
            if error.code not in NO_ANSWER and not error.code.endswith("busy"):
                self._wrong(f"{name} at machine {at}: {error.code}: {error}")
        except (TorporError, OSError):  # the machine was killed in the middle of it
            self._refuse("no answer")
            if (broken := links.pop(at, None)) is not None:
                broken.close()

    def _wake(self, link: Client, name: str, at: int) -> bool:
        """False: it had gone on at two places, and was removed here. Raises RemoteError."""
        try:
            link.wake(name)
        except RemoteError as error:
            if error.code == "diverged" and self.plan.remote_turns != "0":
                self._part(link, name, at)
                return False
            if error.code != "session_not_found":
                raise
        return True

    def _part(self, link: Client, name: str, at: int) -> None:
        """Keep what is here as a fork, and remove it, unless another client has done so."""
        with self._parting[at]:
            try:
                link.wake(name)
            except RemoteError as error:
                if error.code != "diverged":
                    raise
                self.report.parted += 1
                fork = f"{name}-{at}-{self.report.parted}"
                self._forks[fork] = name, at
                link.fork(name, fork)
                link.delete(name)

    def _refuse(self, why: str) -> None:
        with self._counting:
            self.report.refused[why] = self.report.refused.get(why, 0) + 1

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
            ledgers = [self._ledger(at, name) for at in range(self.plan.machines)]
            if not all(ledgers):
                continue  # it was said why
            if any(ledger != ledgers[0] for ledger in ledgers):
                self._wrong(f"{name} has {[len(ledger) for ledger in ledgers]} tokens at the machines")
            forks = [self._ledger(at, fork, is_fork=True) for fork, (of, at) in [*self._forks.items()] if of == name]
            lines = [self.turns.turns_in(tokens) for tokens in [ledgers[-1], *forks]]
            if any(line is None for line in lines):
                self._wrong(f"{name} has tokens that are no turn")
                continue
            turns, *parted = [line for line in lines if line is not None]
            self.report.wrong += self.turns.judge(name, [turns, *parted], told)
            self.report.only_in_forks += len({each.turn for each in told} - set(turns))
            self.report.untold_there += len(set(turns) - {each.turn for each in told})
            if session in compared:
                self._compare(self.machines[-1], name, turns)

    def _ledger(self, at: int, name: str, *, is_fork: bool = False) -> list[int]:
        """All tokens of a session, once it is awake at a machine. is_fork: it may never have been made."""
        with Client(self.machines[at].socket) as client:
            try:
                try:
                    wake_in_time(client, name, DEADLINE_S)
                except RemoteError as error:
                    if error.code != "diverged" or self.plan.remote_turns == "0":
                        raise
                    self._part(client, name, at)
                    wake_in_time(client, name, DEADLINE_S)
            except RemoteError as error:
                if not (is_fork and error.code == "session_not_found"):
                    self._wrong(f"{name} does not wake at the end: {error.code}: {error}")
                return []
            return tokens_of(client, name)

    def _compare(self, machine: Machine, name: str, turns: Sequence[int]) -> None:
        """The state computes what one computes that read the same tokens in the same calls, there. Not compared: what
        the machine could not answer for."""
        control = f"control-{name}"
        with Client(machine.socket) as client:
            try:
                for turn in turns:
                    client.append(control, tokens=self.turns.tokens(turn), create=True)
                ended = []
                for each in (name, control):
                    wake_in_time(client, each, DEADLINE_S)  # its lease may have run out while others were compared
                    ended.append(client.generate(each, max_tokens=4, prove=True))
                    client.sleep(each)
                client.delete(control)
            except RemoteError as error:
                self._refuse(error.code)
                if error.code not in NO_ANSWER:
                    self._wrong(f"{name} cannot be compared: {error.code}: {error}")
                return
        if ended[0].tokens != ended[1].tokens or ended[0].final_logits_blake3 != ended[1].final_logits_blake3:
            self._wrong(f"{name} has other logits at its end than it has alone")
        self.report.compared += 1


def run(plan: Plan) -> Report:
    with tempfile.TemporaryDirectory(prefix="torpor-moving-") as folder, BucketServer() as bucket:
        moving = Moving(plan, Path(folder), bucket.port)
        moving.run()
        if moving.report.wrong:
            for machine in moving.machines:
                print((machine.folder / "log").read_text()[-3000:], file=sys.stderr)
        return moving.report


def main() -> int:
    """Run it and print what came of it, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plan = Plan()
    for name in ("machines", "sessions", "turns", "clients", "turn_tokens", "lease_s", "clock_s", "compared", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(plan, name))
    parser.add_argument("--remote-turns", default=plan.remote_turns, help="as of `torpor serve`")
    parser.add_argument("--fault-s", type=float, default=plan.fault_s, help="0: none")
    parser.add_argument("--stop-s", type=float, default=plan.stop_s)
    options = vars(parser.parse_args())
    report = run(Plan(**{**options, "fault_s": options["fault_s"] or None}))
    print(json.dumps(asdict(report), indent=2))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
