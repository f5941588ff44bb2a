"""A machine is lost for good, with its store, in the midst of turns: what of them wakes at another one.

Clients take turns at one machine, which is killed then, and whose store is removed. Another machine wakes each session
from the remote. What was told and is not there is lost; how long ago it was told is what `--remote-turns` bounds.

Run as a script: `python tests/load/machine_lost.py`.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torpor.errors import TorporError
from torpor.socket_api import Client, RemoteError
from torpor.tests.load.history import Told, Turns, tokens_of, wake_in_time
from torpor.tests.load.machines import Machine
from torpor.tests.memvid.remote.bucket_server import BucketServer

BESIDE_S = 3.0
"""What a turn may take to be sent, once it is due: others are sent before it, and the machines of tests are slow."""


@dataclass(frozen=True, slots=True)
class Plan:
    """remote_turns: as --remote-turns of the daemon. sleep_share: of the turns; a sleep behind each."""

    remote_turns: str
    sessions: int = 12
    clients: int = 4
    seconds: float = 40.0
    sleep_share: float = 0.02
    lease_s: int = 2
    seed: int = 1


@dataclass
class Report:
    """told, back: turns. oldest_lost_s: how long before the end that turn was told that was lost and told first."""

    remote_turns: str
    told: int = 0
    back: int = 0
    sleeps: int = 0
    oldest_lost_s: float | None = None
    wrong: list[str] = field(default_factory=list)


class Loss:
    """The machine that is lost, the other one, and what was told."""

    def __init__(self, plan: Plan, folder: Path, bucket_port: int) -> None:
        self.plan, self.report, self.turns = plan, Report(plan.remote_turns), Turns()
        self.lost, self.other = (
            Machine(folder / name, bucket_port, lease_s=plan.lease_s, turns=plan.remote_turns)
            for name in ("lost", "other")
        )
        self.told: list[list[Told]] = [[] for _ in range(plan.sessions)]
        self._counting = threading.Lock()

    def run(self) -> None:
        try:
            self.lost.start()
            with ThreadPoolExecutor(self.plan.clients) as pool:
                clients = [pool.submit(self._client, number) for number in range(self.plan.clients)]
                time.sleep(self.plan.seconds)
                self.lost.kill()
                ended_s = time.monotonic()
                for client in clients:
                    client.result()
            shutil.rmtree(self.lost.folder / "store")
            self.other.start()
            with Client(self.other.socket) as client:
                for number, told in enumerate(self.told):
                    self._look(client, f"s{number}", told, ended_s)
        finally:
            self.lost.close()
            self.other.close()

    def _client(self, number: int) -> None:
        """Turns of its own sessions, until the machine is gone."""
        chosen = random.Random(f"{self.plan.seed}/{number}")
        with Client(self.lost.socket) as client:
            for turn in range(number, sys.maxsize, self.plan.clients):
                session = chosen.randrange(number, self.plan.sessions, self.plan.clients)
                try:
                    self.told[session].append(self.turns.ask(client, f"s{session}", turn, 0))
                    if chosen.random() < self.plan.sleep_share:
                        client.sleep(f"s{session}")
                        with self._counting:
                            self.report.sleeps += 1
                except RemoteError as error:
                    self._wrong(f"s{session}: {error.code}: {error}")
                    return
                except (TorporError, OSError):
                    return

    def _look(self, client: Client, name: str, told: list[Told], ended_s: float) -> None:
        """What of a session is there: its first turns, and all that had to be."""
        turns: list[int] | None = []
        try:
            wake_in_time(client, name, 60)
            turns = self.turns.turns_in(tokens_of(client, name))
        except RemoteError as error:
            if error.code != "session_not_found":
                self._wrong(f"{name}: {error.code}: {error}")
        said = [each.turn for each in told]
        if turns is None or turns[: len(said)] != said[: len(turns)]:
            self._wrong(f"{name} has other turns than it was told, or not its first ones: {turns}, and not {said}")
            return
        lost = [each for each in told if each.turn not in turns]
        self.report.told += len(told)
        self.report.back += len(told) - len(lost)
        for each in lost[:1]:
            ago_s = ended_s - each.told_s
            self.report.oldest_lost_s = max(self.report.oldest_lost_s or 0.0, ago_s)
            if self.plan.remote_turns != "off" and ago_s > (float(self.plan.remote_turns) or -BESIDE_S) + BESIDE_S:
                self._wrong(f"{name} lost turn {each.turn}, which was told {ago_s:.1f} seconds before the end")

    def _wrong(self, sentence: str) -> None:
        with self._counting:
            self.report.wrong.append(sentence)


def run(plan: Plan) -> Report:
    with tempfile.TemporaryDirectory(prefix="torpor-lost-") as folder, BucketServer() as bucket:
        loss = Loss(plan, Path(folder), bucket.port)
        loss.run()
        return loss.report


def main() -> int:
    """Lose a machine at 0, at 5 seconds and at off; print what came of it, as JSON."""
    reports = [run(Plan(remote_turns)) for remote_turns in ("0", "5", "off")]
    print(json.dumps([asdict(report) for report in reports], indent=2))
    return 1 if any(report.wrong for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
