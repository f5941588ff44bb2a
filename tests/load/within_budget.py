"""Far more conversations over HTTP than the store may hold, in three namespaces, with a daemon that is killed: the
budget holds at each moment, every answer is that of the conversation alone, and what was stripped goes on once it was
read again.

A client sends its whole transcript each time, and takes the answer up in it. Who gets none asks again, as agents do.
Answers are greedy, so each follows from its transcript: a daemon without a budget says the same, one conversation at a
time. The daemon strips what it otherwise would not before an hour has passed; nothing else differs.

Run as a script: `python -m torpor.tests.load.within_budget --help`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import random
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torpor.errors import TorporError
from torpor.socket_api import Client
from torpor.tests.load.killable import DEADLINE_S, Killable
from torpor.tests.model_making import write_model

NAMESPACES = ("default", "one", "other")
WORDS = ("the", "agent", "reads", "a", "file", "and", "asks", "which", "test", "fails", "when", "it", "is", "cold")


@dataclass(frozen=True, slots=True)
class Plan:
    """One load. tokens: of each conversation's first message. held: how many conversations the store may hold, awake:
    and the memory. kill_s: seconds between two SIGKILLs, none if None. compared: how many conversations are asked
    again, all if None."""

    conversations: int = 500
    tokens: int = 2000
    turns: int = 1500
    held: int = 40
    awake: int = 12
    clients: int = 6
    written: int = 12
    kill_s: float | None = 30.0
    compared: int | None = None
    seed: int = 1

    def beginning(self, number: int) -> str:
        chosen = random.Random(f"{self.seed}/{number}")
        return f"{number}: {' '.join(chosen.choices(WORDS, k=self.tokens))}"[: self.tokens]


@dataclass
class Conversation:
    """What was said in it."""

    messages: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Report:
    """What came of it. most_held_bytes: of manifests and packs together, at any look; most_with_temporary_bytes: with
    what was being written. stripped: sessions in the order in which they went. wrong: every sentence is a failure."""

    turns: int = 0
    kills: int = 0
    retries: int = 0
    budget_bytes: int = 0
    most_held_bytes: int = 0
    most_with_temporary_bytes: int = 0
    looks: int = 0
    stripped: list[str] = field(default_factory=list)
    read_again: int = 0
    tokens_read_again: int = 0
    refused_sleeps: int = 0
    planned: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    compared: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Daemon(Killable):
    """A daemon with a token for each namespace."""

    def __init__(self, folder: Path, model: Path, **options: Any) -> None:
        self.store = folder / "store"
        given = {
            "model": {"tiny": str(model)},
            "store": str(self.store),
            "socket": str(folder / "torpor.sock"),
            "http": 0,
            "batch": 1,
            "scrub_rate": 0,
            **options,
        }
        config = folder / "config" / "torpor"
        config.mkdir(parents=True, mode=0o700)
        self.tokens = {namespace: secrets.token_hex(16) for namespace in NAMESPACES}
        lines = "".join(f"{namespace} {token}\n" for namespace, token in self.tokens.items())
        (config / "http-tokens").write_text(lines)
        (config / "http-tokens").chmod(0o600)
        self.port = 0
        super().__init__(
            folder / "torpor.sock",
            [sys.executable, "-m", "torpor.tests.load.within_budget", "--serve", json.dumps(given)],
            environment={**os.environ, "XDG_CONFIG_HOME": str(folder / "config")},
            log=folder / "log",
        )

    def start(self) -> dict[str, Any]:
        ready = super().start()
        self.port = int(ready["http"][0].split("/")[2].rpartition(":")[2])
        return ready

    def ask(self, namespace: str, messages: Sequence[dict[str, str]], written: int) -> dict[str, Any]:
        """The body of an answer. Raises OSError, HTTPException: the daemon was killed meanwhile."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            body = {"model": "tiny", "messages": messages, "max_tokens": written, "temperature": 0}
            headers = {"authorization": f"Bearer {self.tokens[namespace]}", "content-type": "application/json"}
            link.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = link.getresponse()
            found: dict[str, Any] = json.loads(answer.read())
            if answer.status != 200:
                raise AssertionError(f"{answer.status}: {found}")
            return found
        finally:
            link.close()

    def files(self) -> dict[str, int]:
        """The bytes of manifests and packs by name, temporary ones too."""
        found = dict[str, int]()
        for top in ("versions", "packs"):
            with contextlib.suppress(FileNotFoundError), os.scandir(self.store / top) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found[entry.name] = entry.stat().st_size
        return found


class Load:
    """The clients, each with a conversation at a time."""

    def __init__(self, plan: Plan, daemon: Daemon, budget: int) -> None:
        self.plan, self.daemon, self.report = plan, daemon, Report(budget_bytes=budget)
        self.conversations = [Conversation() for _ in range(plan.conversations)]
        self._numbers = itertools.count()
        self._up, self._done, self._counting = threading.Event(), threading.Event(), threading.Lock()

    def run(self) -> None:
        begun = time.monotonic()
        self.daemon.start()
        self._up.set()
        with ThreadPoolExecutor(self.plan.clients + 3) as pool:
            watching = [pool.submit(each) for each in (self._kill_at_times, self._watch, self._listen)]
            try:
                for each in [pool.submit(self._client, number) for number in range(self.plan.clients)]:
                    each.result()
                self._compare_with_plan()
            finally:
                self._done.set()
                wait(watching[:1])  # what it has killed it starts again
                self.daemon.stop()
            for each in watching:
                each.result()
        self.report.seconds = time.monotonic() - begun

    def _watch(self) -> None:
        """A look takes a while, so a moment has what two looks in a row have seen alike."""
        before = dict[str, int]()
        while not self._done.wait(0.01):
            now = self.daemon.files()
            sizes = dict(before.items() & now.items())
            before = now
            held = sum(size for name, size in sizes.items() if not name.endswith(".tmp"))
            report = self.report
            report.looks += 1
            report.most_held_bytes = max(report.most_held_bytes, held)
            report.most_with_temporary_bytes = max(report.most_with_temporary_bytes, sum(sizes.values()))
            if held > report.budget_bytes and len(report.wrong) < 20:
                report.wrong.append(f"the store held {held} bytes, and may hold {report.budget_bytes}")

    def _kill_at_times(self) -> None:
        while self.plan.kill_s is not None and not self._done.wait(self.plan.kill_s):
            with self._counting:
                if self.report.turns >= self.plan.turns:
                    return
            self._up.clear()
            self.daemon.kill()
            self.daemon.start()
            self.report.kills += 1
            self._up.set()

    def _listen(self) -> None:
        names = ["versions_stripped", "sleep_failed"]
        while not self._done.is_set():
            self._up.wait()
            try:
                with Client(self.daemon.socket) as client, client.events(names) as happening:
                    for event in happening:
                        if event.name == "versions_stripped":
                            self.report.stripped.append(str(event.session).removeprefix("torpor://"))
                        elif event.name == "sleep_failed" and event.facts["code"] == "budget_exceeded":
                            self.report.refused_sleeps += 1
            except (TorporError, OSError):
                time.sleep(0.05)

    def _client(self, number: int) -> None:
        chosen = random.Random(f"{self.plan.seed}/client/{number}")
        while (turn := next(self._numbers)) < self.plan.turns and not (self.report.wrong or self._done.is_set()):
            # Each conversation begins in its turn, then any goes on; the later ones more often.
            first = turn < self.plan.conversations
            at = turn if first else self.plan.conversations - 1 - int(chosen.expovariate(4 / self.plan.conversations))
            self._turn(max(at, 0) % self.plan.conversations)

    def _turn(self, at: int) -> None:
        conversation = self.conversations[at]
        with conversation.lock:
            said = f"And turn {len(conversation.messages)}?" if conversation.messages else self.plan.beginning(at)
            messages = [*conversation.messages, {"role": "user", "content": said}]
            answer = self._ask(NAMESPACES[at % len(NAMESPACES)], messages)
            if answer is None:
                return
            told = answer["choices"][0]["message"]["content"] or ""
            conversation.messages = [*messages, {"role": "assistant", "content": told}]
        details = answer["usage"]["prompt_tokens_details"]
        with self._counting:
            self.report.turns += 1
            if details.get("recomputed_because") == "stripped":
                self.report.read_again += 1
                self.report.tokens_read_again += details["recomputed_tokens"]

    def _ask(self, namespace: str, messages: Sequence[dict[str, str]]) -> dict[str, Any] | None:
        while not self._done.is_set():
            self._up.wait()
            try:
                return self.daemon.ask(namespace, messages, self.plan.written)
            except (OSError, http.client.HTTPException, ValueError):  # it was killed in the middle of it
                self.report.retries += 1
                time.sleep(0.02)
            except AssertionError as error:
                self.report.wrong.append(str(error))
                return None
        return None

    def _compare_with_plan(self) -> None:
        """Now that it is quiet: what goes next is what the plan says. What was in memory at the plan, and leaves it
        since, is not in it."""
        report = self.report
        for number in range(4 * self.plan.awake):
            with Client(self.daemon.socket) as client:
                before, plan = len(report.stripped), client.maintain("strip", dry_run=True)
            planned = [str(action.session).removeprefix("torpor://") for action in plan.actions]
            report.planned = list(dict.fromkeys(planned))
            self.daemon.ask("default", [{"role": "user", "content": self.plan.beginning(-1 - number)}], 1)
            time.sleep(0.5)
            report.done = report.stripped[before:]
            if report.planned and report.done:
                break
        both = min(len(report.done), len(report.planned))
        if not both or report.done[:both] != report.planned[:both]:
            report.wrong.append(f"{report.done[:3]} went, and {report.planned[:3]} was the plan")


def compare(plan: Plan, conversations: Sequence[Conversation], daemon: Daemon, report: Report) -> None:
    """Ask for each answer again, one conversation after the other, where nothing is stripped."""
    daemon.start()
    try:
        longest = sorted(range(len(conversations)), key=lambda each: -len(conversations[each].messages))
        for number in longest[: plan.compared]:
            conversation = conversations[number]
            for at in range(1, len(conversation.messages), 2):
                told = daemon.ask(NAMESPACES[number % len(NAMESPACES)], conversation.messages[:at], plan.written)
                if (told["choices"][0]["message"]["content"] or "") != conversation.messages[at]["content"]:
                    report.wrong.append(f"conversation {number} was answered otherwise in turn {at // 2}")
                report.compared += 1
    finally:
        daemon.stop()


def run(plan: Plan) -> Report:
    """The load, then the comparison."""
    with tempfile.TemporaryDirectory(prefix="torpor-budget-") as name:
        folder = Path(name)
        model = write_model(folder / "tiny", max_position_embeddings=4096, num_hidden_layers=2)
        alone = _daemon(folder / "alone", model)
        session, stored = _sizes(plan, alone)
        budget = plan.held * stored
        weights = (model / "model.safetensors").stat().st_size
        load = Load(
            plan,
            _daemon(folder / "load", model, store_budget=budget, memory_budget=2 * weights + plan.awake * session),
            budget,
        )
        load.run()
        if not load.report.wrong:
            compare(plan, load.conversations, alone, load.report)
    return load.report


def _daemon(folder: Path, model: Path, **options: Any) -> Daemon:
    folder.mkdir()
    return Daemon(folder, model, **{"store_budget": 0, "memory_budget": 8 << 30, **options})


def _sizes(plan: Plan, daemon: Daemon) -> tuple[int, int]:
    """The bytes of a conversation behind its first answer, in memory and on the disk."""
    daemon.start()
    try:
        daemon.ask("default", [{"role": "user", "content": plan.beginning(-1000)}], plan.written)
        with Client(daemon.socket) as client:
            (info,) = client.list_sessions()
            client.sleep(info.session)
            stored = next(each.written_bytes for each in client.list_sessions())
            client.delete(info.session)
            return info.resident_bytes, stored
    finally:
        daemon.stop()


def serve(given: dict[str, Any]) -> None:
    """Become the daemon, to which no version is too young to be stripped."""
    from torpor.memvid.maintenance import strip_plan
    from torpor.socket_api.main import run as run_daemon

    strip_plan.RECENT_NS = 0  # type: ignore[misc]
    run_daemon({**given, "store": Path(given["store"]), "socket": Path(given["socket"])}, as_json=True)


def main() -> int:
    """Run it and print what came of it, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    plan = Plan()
    for name in ("conversations", "tokens", "turns", "held", "awake", "clients", "compared", "written", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(plan, name))
    parser.add_argument("--kill-s", type=float, default=plan.kill_s, help="0: never")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    if (given := options.pop("serve")) is not None:
        serve(given)
        return 0
    plan = replace(plan, **{**options, "kill_s": options["kill_s"] or None})
    report = run(plan)
    times = Counter(report.stripped)
    told = {
        **asdict(report),
        "stripped": f"{len(report.stripped)} times, {len(times)} sessions: {report.stripped[:5]} …",
    }
    print(json.dumps({"plan": asdict(plan), **told, "planned": report.planned[:5]}, indent=2))
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
