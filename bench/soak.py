"""An hour of agents that come and go in a memory that does not hold them all: what the daemon takes must not grow.

Four clients take random turns with sixty sessions on the demo model: a text is read, some tokens are written, at times
the session sleeps, is forked, is deleted and begun anew, or is woken at an earlier token. The memory budget is for
fifteen. Each second the daemon's resident memory, open files and threads are noted, and the files of its store; and how
long each turn took.

With `--models 2` every other session is on a second model, and the budget is for one of them and two sessions: so the
models leave memory for each other all the time. Turns take longer then, so sessions are begun anew sooner: the store
has its usual number of files by the second quarter. Where it has more in the last, the daemon had more to know of.

Growth is what the last quarter of the run has more than the quarter behind the warm-up, by the medians.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from figures import label_at_end, panels, parser_for, save
from torpor.daemon.models.models import DEMO_MODEL_FOLDER
from torpor.socket_api import Client, RemoteError

MINUTES = 60.0
QUICK_MINUTES = 0.3
SESSIONS, CLIENTS = 60, 4
MOST_TOKENS = {1: 3_000, 2: 600}
"""Of a session before it is deleted, by how many models there are."""
WEIGHTS_BYTES, SESSION_BYTES = 23_100_000, 9_000_000
SESSIONS_IN_MEMORY = {1: 15, 2: 2}
"""By how many models there are. With two, what sessions may take beside the one is less than the other would."""
DEADLINE_S = 120.0
_TORPOR = str(Path(sys.executable).with_name("torpor"))
_WORDS = "an agent that has slept for an hour goes on at the next token with nothing read again"


NOTED = ("resident_bytes", "open_files", "threads", "stored_files")


@dataclass
class Sample:
    """One moment of the daemon. at: seconds since the start. stored_files: in its store."""

    at: float
    resident_bytes: int
    open_files: int
    threads: int
    stored_files: int


@dataclass
class Soak:
    """All that was noted. turns: when each ended, and the seconds that it took. loads: of models."""

    samples: list[Sample] = field(default_factory=list)
    turns: list[tuple[float, float]] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=dict)
    loads: int = 0

    def figures(self) -> dict[str, Any]:
        found = {name: _growth([(each.at, getattr(each, name)) for each in self.samples]) for name in NOTED}
        return {
            **found,
            "turn_s": _growth(self.turns),
            "turns": len(self.turns),
            "refusals": self.refusals,
            "model_loads": self.loads,
            "seconds": self.samples[-1].at,
            "samples": [[each.at, *(getattr(each, name) for name in NOTED)] for each in self.samples[::10]],
        }


def _growth(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Medians of the second and of the last quarter, and by how much the one is more than the other."""
    end = points[-1][0]
    early = statistics.median(value for at, value in points if 0.25 * end <= at < 0.5 * end)
    late = statistics.median(value for at, value in points if at >= 0.75 * end)
    return {"second_quarter": early, "last_quarter": late, "growth": late / early - 1}


class Agents:
    """The clients, and the daemon that they use."""

    def __init__(self, folder: Path, seconds: float, models: int) -> None:
        self.socket, self._store = folder / "torpor.sock", folder / "store"
        self._seconds, self._models = seconds, models
        budget = WEIGHTS_BYTES + SESSIONS_IN_MEMORY[models] * SESSION_BYTES
        self._command = [_TORPOR, "serve", "--store", str(self._store), "--socket", str(self.socket), "--json"]
        self._command += ["--memory-budget", str(budget), "--idle-sleep", "30"]
        for number in range(models):
            self._command += ["--model", f"{_model_name(number)}={DEMO_MODEL_FOLDER}"]
        self._locks = [threading.Lock() for _ in range(SESSIONS)]
        self._noting = threading.Lock()
        self.soak = Soak()

    def run(self) -> Soak:
        """Until the time is over."""
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            self._begun = time.monotonic()
            with ThreadPoolExecutor(CLIENTS + 1) as pool:
                work = [pool.submit(self._client, number) for number in range(CLIENTS)]
                work.append(pool.submit(self._sample, process.pid))
                for each in work:
                    each.result()
            with Client(self.socket) as client:
                self.soak.loads = sum(each.loads for each in client.status().models)
                client.shutdown()
            process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        return self.soak

    def _now(self) -> float:
        return time.monotonic() - self._begun

    def _sample(self, pid: int) -> None:
        place, next_at = Path(f"/proc/{pid}"), 0.0
        while (now := self._now()) < self._seconds:
            if now >= next_at:
                resident = int((place / "statm").read_text().split()[1]) * 4096
                files, threads = len(list((place / "fd").iterdir())), len(list((place / "task").iterdir()))
                stored = sum(len(names) for _, _, names in os.walk(self._store))
                self.soak.samples.append(Sample(now, resident, files, threads, stored))
                next_at += 1.0
            time.sleep(0.05)

    def _client(self, number: int) -> None:
        chosen = random.Random(number)
        with Client(self.socket) as client:
            while self._now() < self._seconds:
                session = chosen.randrange(SESSIONS)
                with self._locks[session]:
                    begun = time.monotonic()
                    try:
                        self._turn(client, f"s{session}", _model_name(session % self._models), chosen)
                    except RemoteError as error:
                        with self._noting:
                            self.soak.refusals[error.code] = self.soak.refusals.get(error.code, 0) + 1
                    with self._noting:
                        self.soak.turns.append((self._now(), time.monotonic() - begun))

    def _turn(self, client: Client, name: str, model: str, chosen: random.Random) -> None:
        try:
            held = client.show(name).info.token_count
        except RemoteError as error:
            if error.code != "session_not_found":
                raise
            client.create(name, model=model)
            held = 0
        if held > MOST_TOKENS[self._models]:
            client.delete(name)
            return
        client.generate(name, text=" ".join(chosen.choices(_WORDS.split(), k=40)), max_tokens=chosen.randrange(4, 24))
        what = chosen.random()
        if what < 0.1:
            client.sleep(name)
        elif what < 0.13:
            client.fork(name, f"{name}-fork-{chosen.getrandbits(40):x}")
        elif what < 0.16:
            client.sleep(name)
            client.wake(name, at_token=max(1, held // 2))
            client.sleep(name)
        elif what < 0.19:
            for fork in client.list_sessions():
                if f"/{name}-fork-" in fork.session:
                    client.delete(fork.session)


def _model_name(number: int) -> str:
    return f"model-{number}"


def report(soak: Soak, models: int, out: Path) -> None:
    """The figures as JSON and as a plot, and a few lines for a person."""
    figures = save("soak", {"models": models, **soak.figures()}, out)
    draw(soak, figures, out / "soak.png")
    for what in (*NOTED, "turn_s"):
        early, late, growth = (figures[what][when] for when in ("second_quarter", "last_quarter", "growth"))
        print(f"{what:>15} {early:>14,.3f} {late:>14,.3f} {100 * growth:>+7.2f} %")
    print(
        f"{figures['turns']} turns in {figures['seconds']:.0f} s, models loaded {figures['model_loads']} times; "
        f"refused: {figures['refusals']}"
    )


def draw(soak: Soak, figures: dict[str, Any], path: Path) -> None:
    """What the daemon takes, and how long a turn takes, minute by minute."""
    growth = 100 * figures["resident_bytes"]["growth"]
    title = f"{figures['turns']:,} turns in {figures['seconds'] / 60:.0f} minutes: memory {growth:+.1f} % at the end"
    with panels(path, figures, title, (4, 1), (8, 7.5), sharex=True) as (memory, held, files, turns):
        minutes = [each.at / 60 for each in soak.samples]
        memory.plot(minutes, [each.resident_bytes / 2**20 for each in soak.samples], color="tab:blue", linewidth=0.8)
        memory.set(ylabel="resident, MiB", ylim=(0, None))
        for what, colour in (("open_files", "tab:orange"), ("threads", "tab:green")):
            held.plot(minutes, [getattr(each, what) for each in soak.samples], color=colour, linewidth=0.8)
            label_at_end(held, minutes, [getattr(each, what) for each in soak.samples], what.replace("_", " "), colour)
        held.set(ylabel="of the daemon", ylim=(0, None))
        files.plot(minutes, [each.stored_files for each in soak.samples], color="tab:purple", linewidth=0.8)
        files.set(ylabel="files in the store", ylim=(0, None))
        by_minute = _by_minute(soak.turns)
        for share, name in ((0.5, "median"), (0.99, "p99")):
            taken = [_quantile(each, share) for each in by_minute.values()]
            turns.plot(list(by_minute), taken, color="tab:red", linewidth=1 if share == 0.5 else 0.6)
            label_at_end(turns, list(by_minute), taken, name, "tab:red")
        turns.set(xlabel="minutes", ylabel="a turn, s", ylim=(0, None))


def _by_minute(turns: Sequence[tuple[float, float]]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for at, taken in turns:
        found.setdefault(int(at // 60), []).append(taken)
    return dict(sorted(found.items()))


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Soak and report."""
    parser = parser_for(__doc__, 1)
    parser.add_argument("--minutes", type=float, help=f"{MINUTES:.0f} unless told")
    parser.add_argument("--models", type=int, choices=sorted(SESSIONS_IN_MEMORY), default=1, help="1 unless told")
    options = parser.parse_args()
    minutes = options.minutes or (QUICK_MINUTES if options.quick else MINUTES)
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.folder) as folder:
        report(Agents(Path(folder), 60 * minutes, options.models).run(), options.models, options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
