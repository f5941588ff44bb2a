"""Many sessions in little memory: clients take random turns, the daemon is killed at times, and everything is compared.

A session's history follows from its number: what it reads first, and the text and the length of each of its turns. So
whatever the order in which clients come, and however often the daemon dies, a session that has been through so many
turns has said one and the same thing. What was said in the load is compared with what each session says alone, in
another daemon's service that reads every token itself, in deterministic mode.

A turn is one request, so what is durable is always a session behind a whole turn; which one, its count of tokens tells.
After a SIGKILL each session stands behind the last turn that was answered, though nobody asked for a sleep, or behind
the one that was under way then. No answered turn is asked for again.

Run as a script: `python tests/load/harness.py --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torpor.daemon.api.sampling import Sampling
from torpor.daemon.models.models import DEMO_MODEL_FOLDER
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
from torpor.errors import TorporError
from torpor.socket_api import Client, RemoteError
from torpor.tests.load.killable import Killable

SHARED_TOKENS = 768
"""What all sessions begin with, so that they can be made in minutes: three blocks that each takes over from another."""

TORPOR = Path(sys.executable).with_name("torpor")
POLL_S = 0.02
WORDS = "the agent reads a file and asks which test fails when the cache is cold and the disk full of old blocks"


@dataclass(frozen=True, slots=True)
class Plan:
    """One load.

    tokens: that each session begins with. held: how many sessions the budget is for, beside all models; both_fit:
    whether it is so, or else it is for not quite two models. kill_s: seconds between two SIGKILLs, none if None.
    sleep_share: of the turns, those behind which the client asks for a sleep; they survive without. compared: how many
    sessions are run again alone, all if None.
    """

    sessions: int = 1000
    tokens: int = 1000
    turns: int = 10_000
    clients: int = 8
    held: int = 40
    models: tuple[str, ...] = ("demo",)
    both_fit: bool = True
    kill_s: float | None = 60.0
    written: int = 4
    sleep_share: float = 0.0
    compared: int | None = None
    seed: int = 1

    def name(self, number: int) -> str:
        return f"s{number}"

    def model(self, number: int) -> str:
        return self.models[number % len(self.models)]

    def sampling(self, number: int) -> dict[str, Any]:
        """Every other session is greedy."""
        return {"temperature": 0.8 if number % 2 else 0.0, "seed": number}

    def beginning(self, number: int) -> list[int]:
        """The tokens that a session reads first: those that all have, and its own."""
        shared = random.Random(self.seed).choices(range(300, 4000), k=min(SHARED_TOKENS, self.tokens // 2))
        own = random.Random(f"{self.seed}/{number}").choices(range(300, 4000), k=self.tokens - len(shared))
        return [*shared, *own]

    def text(self, number: int, turn: int) -> str:
        words = random.Random(f"{self.seed}/{number}/{turn}").choices(WORDS.split(), k=4)
        return f" {turn}: {' '.join(words)}."


@dataclass
class History:
    """What a session has said, turn by turn, and how many tokens it had behind each. said: None for a turn that a kill
    left without its answer, and that is there. at: the turn it stands behind, -1 before the first; asked: the last one
    that was asked for; born: of which daemon `at` is known."""

    said: dict[int, tuple[int, ...] | None] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    at: int = -1
    asked: int = -1
    born: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Report:
    """What came of it. turns: that were answered; unanswered: those that a kill left without their answer, and that are
    there all the same. wrong: every sentence is a failure of a promise."""

    turns: int = 0
    unanswered: int = 0
    sleeps: int = 0
    kills: int = 0
    busy: int = 0
    compared_sessions: int = 0
    compared_turns: int = 0
    most_held_bytes: int = 0
    budget_bytes: int = 0
    weights_bytes: int = 0
    most_resident_bytes: int = 0
    first_resident_bytes: int = 0
    slept_by_pressure: int = 0
    most_awake: int = 0
    seconds: float = 0.0
    down_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Daemon(Killable):
    """`torpor serve`, with a number that each start makes larger."""

    def __init__(self, folder: Path, models: Sequence[str], budget: int) -> None:
        socket = folder / "torpor.sock"
        command = [str(TORPOR), "serve", "--store", str(folder / "store"), "--socket", str(socket)]
        command += ["--deterministic", "--memory-budget", str(budget), "--json"]
        for model in models:
            command += ["--model", f"{model}={DEMO_MODEL_FOLDER}"]
        self.number = 0
        super().__init__(socket, command)

    def start(self) -> dict[str, Any]:
        ready = super().start()
        self.number += 1
        return ready

    def resident_bytes(self) -> int:
        """What the system says of the process; 0 where it does not tell."""
        status = Path(f"/proc/{self.process.pid}/statm")
        return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


class Load:
    """The clients, who share the histories. A session is asked for by one of them at a time."""

    def __init__(self, plan: Plan, daemon: Daemon) -> None:
        self.plan, self.daemon, self.report = plan, daemon, Report()
        self.histories = [History() for _ in range(plan.sessions)]
        self._counting = threading.Lock()
        self._left = plan.turns
        self._up = threading.Event()
        self._done = threading.Event()

    def run(self) -> None:
        """All turns, with a kill now and then, while somebody looks at the memory."""
        self.daemon.start()
        self._up.set()
        begun = time.monotonic()
        with ThreadPoolExecutor(self.plan.clients + 2) as pool:
            watching = [pool.submit(self._watch), pool.submit(self._kill_at_times)]
            try:
                for client in [pool.submit(self._client, number) for number in range(self.plan.clients)]:
                    client.result()
            finally:
                self._done.set()
            for each in watching:
                each.result()
        self.report.seconds = time.monotonic() - begun

    def _kill_at_times(self) -> None:
        while self.plan.kill_s is not None and not self._done.wait(self.plan.kill_s):
            self._up.clear()
            begun = time.monotonic()
            self.daemon.kill()
            self.daemon.start()
            self.report.kills += 1
            self.report.down_s += time.monotonic() - begun
            self._up.set()

    def _watch(self) -> None:
        """What is held never is more than the budget, at whatever moment it is asked."""
        while not self._done.wait(0.1):
            try:
                with Client(self.daemon.socket) as client:
                    status = client.status()
            except (TorporError, OSError):
                continue
            memory = status.memory
            held = memory.weights_bytes + memory.sessions_bytes + memory.reserved_bytes
            if held > memory.budget_bytes:
                self._wrong(f"{held} bytes were held, and the budget is {memory.budget_bytes}")
            resident = self.daemon.resident_bytes()
            with self._counting:
                report = self.report
                report.budget_bytes, report.weights_bytes = memory.budget_bytes, memory.weights_bytes
                report.most_held_bytes = max(report.most_held_bytes, held)
                report.first_resident_bytes = report.first_resident_bytes or resident
                report.most_resident_bytes = max(report.most_resident_bytes, resident)
                report.slept_by_pressure = max(report.slept_by_pressure, memory.slept_by_pressure)
                report.most_awake = max(report.most_awake, status.sessions_awake)

    def _client(self, number: int) -> None:
        chosen = random.Random(f"{self.plan.seed}/client/{number}")
        link: Client | None = None
        while self._take_turn():
            session = chosen.randrange(self.plan.sessions)
            sleeps = chosen.random() < self.plan.sleep_share
            done = False
            while not done:
                self._up.wait()
                try:
                    link = link or Client(self.daemon.socket)
                    with self.histories[session].lock:
                        done = self._turn(link, session, sleeps=sleeps)
                except RemoteError as error:
                    if not error.code.endswith(("_busy", "busy")):
                        self._wrong(f"{self.plan.name(session)}: {error.code}: {error}")
                        done = True
                    self._count("busy")
                except (TorporError, OSError):  # the daemon was killed in the middle of it
                    link = self._closed(link)
                    time.sleep(POLL_S)
        self._closed(link)

    def _take_turn(self) -> bool:
        with self._counting:
            self._left -= 1
            return self._left >= 0 and len(self.report.wrong) < 20

    def _turn(self, client: Client, number: int, *, sleeps: bool) -> bool:
        """The session's next turn, behind wherever it stands."""
        name, history = self.plan.name(number), self.histories[number]
        if history.born != self.daemon.number:
            self._find_again(client, number)
        if history.at < 0:
            self._begin(client, number)
        turn = history.asked = history.at + 1
        result = client.generate(name, text=self.plan.text(number, turn), max_tokens=self.plan.written)
        self._note(number, turn, tuple(result.tokens), result.token_count)
        if sleeps:
            client.sleep(name)
            self._count("sleeps")
        return True

    def _begin(self, client: Client, number: int) -> None:
        plan, name = self.plan, self.plan.name(number)
        client.create(name, model=plan.model(number), sampling=Sampling(**plan.sampling(number)))
        self.histories[number].asked = 0
        read = client.append(name, tokens=plan.beginning(number))
        self._note(number, 0, (), read.token_count, is_turn=False)

    def _find_again(self, client: Client, number: int) -> None:
        """In a daemon that was started anew a session stands behind its last answered turn, or the one under way."""
        name, history, born = self.plan.name(number), self.histories[number], self.daemon.number
        try:
            count = client.show(name).info.token_count
        except RemoteError as error:
            if error.code != "session_not_found":
                raise
            count = 0
        answered = history.counts.get(history.at, 0)
        if count > answered and history.asked > history.at:
            history.at = history.asked
            history.said[history.at], history.counts[history.at] = None, count  # whether it is right, `compare` says
            self._count("unanswered")
        elif count != answered:
            self._wrong(f"{name} was answered turn {history.at} with {answered} tokens, and came back with {count}")
        history.born = born

    def _note(self, number: int, turn: int, said: tuple[int, ...], count: int, *, is_turn: bool = True) -> None:
        """What was said. No turn is asked for twice once it was answered."""
        history = self.histories[number]
        if turn in history.counts:
            self._wrong(f"{self.plan.name(number)} was asked for turn {turn} again")
        if is_turn:
            self._count("turns")
        history.said[turn], history.counts[turn], history.at = said, count, turn
        history.born = self.daemon.number

    def _wrong(self, sentence: str) -> None:
        with self._counting:
            self.report.wrong.append(sentence)

    def _count(self, what: str) -> None:
        with self._counting:
            setattr(self.report, what, getattr(self.report, what) + 1)

    @staticmethod
    def _closed(link: Client | None) -> None:
        if link is not None:
            link.close()


def _ignore(_event: object) -> None:
    """For events that nobody looks at."""


async def compare(plan: Plan, histories: Sequence[History], final: dict[int, str], report: Report) -> None:
    """Run sessions again, each alone, and say what differs: a reply, a count, or the logits at the very end."""
    chosen = [number for number, history in enumerate(histories) if history.said]
    if plan.compared is not None:
        chosen = random.Random(plan.seed).sample(chosen, min(plan.compared, len(chosen)))
    with tempfile.TemporaryDirectory(prefix="torpor-load-") as folder:
        models = {name: str(DEMO_MODEL_FOLDER) for name in plan.models}
        options = ServeOptions(store=Path(folder) / "store", prefix_reuse="off", batch=1, scrub_rate=0)
        service = await Service.open(options, models=models)
        try:
            for number in chosen:
                await _compare_one(service, plan, number, histories[number], final.get(number), report)
        finally:
            await service.close()


async def _compare_one(
    service: Service, plan: Plan, number: int, history: History, final: str | None, report: Report
) -> None:
    name = plan.name(number)
    await service.create(session=name, model=plan.model(number), sampling=Sampling(**plan.sampling(number)))
    await service.append(session=name, tokens=plan.beginning(number), on_event=_ignore)
    for turn in range(1, history.at + 1):
        result = await service.generate(
            session=name, text=plan.text(number, turn), max_tokens=plan.written, on_event=_ignore
        )
        said = result.tokens if history.said[turn] is None else history.said[turn]
        if (said, history.counts[turn]) != (result.tokens, result.token_count):
            report.wrong.append(f"{name} said something else in turn {turn} than it says alone")
        report.compared_turns += 1
    if final is not None:
        ended = await service.generate(session=name, max_tokens=1, prove=True, on_event=_ignore)
        if ended.final_logits_blake3 != final:
            report.wrong.append(f"{name} has other logits at its end than it has alone")
    report.compared_sessions += 1
    await service.delete(session=name)


def run(plan: Plan) -> Report:
    """The load, one token more of each session at the end with the digest of its logits, and the comparison."""
    with tempfile.TemporaryDirectory(prefix="torpor-load-") as folder:
        daemon = Daemon(Path(folder), plan.models, budget_of(plan))
        load = Load(plan, daemon)
        try:
            load.run()
            final = last_logits(load)
        finally:
            daemon.stop()
    if not load.report.wrong:
        asyncio.run(compare(plan, load.histories, final, load.report))
    return load.report


def last_logits(load: Load) -> dict[int, str]:
    """By session, the digest of the logits behind one token more, which says that all of its state is right."""
    found = {}
    with Client(load.daemon.socket) as client:
        for number, history in enumerate(load.histories):
            if history.at < 0:
                continue
            if history.born != load.daemon.number:
                load._find_again(client, number)
            if history.at >= 0:
                digest = client.generate(load.plan.name(number), max_tokens=1, prove=True).final_logits_blake3
                assert digest is not None
                found[number] = digest
    return found


def budget_of(plan: Plan) -> int:
    """The models and so many sessions of the size that they begin with; or not quite two models, so that one has to go
    before the other comes, and what one of them leaves is for sessions."""
    weights, session = asyncio.run(_sizes(plan))
    return len(plan.models) * weights + plan.held * session if plan.both_fit else int(1.9 * weights)


async def _sizes(plan: Plan) -> tuple[int, int]:
    with tempfile.TemporaryDirectory(prefix="torpor-load-") as folder:
        service = await Service.open(ServeOptions(store=Path(folder) / "store", scrub_rate=0))
        try:
            await service.create(session="one")
            await service.append(session="one", tokens=plan.beginning(0), on_event=_ignore)
            memory = (await service.status()).memory
            return memory.weights_bytes, memory.sessions_bytes
        finally:
            await service.close()


def main() -> int:
    """Run it and print what came of it, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plan = Plan()
    for name in ("sessions", "tokens", "turns", "clients", "held", "compared", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(plan, name))
    parser.add_argument("--kill-s", type=float, default=plan.kill_s, help="0: never")
    parser.add_argument("--sleep-share", type=float, default=plan.sleep_share, help="of the turns; a sleep behind each")
    parser.add_argument("--two-models", action="store_true", help="which do not fit into the budget together")
    options = vars(parser.parse_args())
    two = options.pop("two_models")
    options["kill_s"] = options["kill_s"] or None
    plan = replace(plan, **options)
    if two:
        plan = replace(plan, models=("one", "other"), both_fit=False)
    report = run(plan)
    print(json.dumps({"plan": asdict(plan), **asdict(report)}, indent=2))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
