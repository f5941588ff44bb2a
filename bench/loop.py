"""A stream's gaps beside requests that look at every session of a store, and beside long reads.

The store has 10,000 sessions, small real bundles of random bytes that nobody wakes, made without flushes. One agent
streams from the demo model; a stranger in another process asks one thing over and over. Figures: the gaps between
two pieces of the stream, p50, p99 and the longest, with nothing beside it and beside each request; and how long the
request took. `clear` clears away a label of 60 sessions each time.

Then texts of 6,000 tokens are read beside the stream, one and three at a time: the gaps, and how many tokens a second
the reads have, beside what one has alone.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from figures import parser_for, plotted, save
from scale import make_store
from torpor.socket_api import Client

SESSIONS, QUICK_SESSIONS = 10_000, 100
SECONDS, QUICK_SECONDS = 15.0, 1.0
READ_TOKENS, QUICK_READ_TOKENS = 6_000, 600
CLEARED = 60
STREAM_TOKENS = 1_000
LEAST_GAPS = 20
_TORPOR = str(Path(sys.executable).with_name("torpor"))
ASKED = ("list", "stats", "status", "events", "clear")
_SPAWN = multiprocessing.get_context("spawn")
_WORDS = "an agent that has slept for an hour goes on at the next token with nothing read again "
_numbers = count()


@dataclass
class Beside:
    """What was seen while something went on. gaps, asked: seconds."""

    gaps: list[float] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    tokens_read: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, float | int]:
        ordered = sorted(self.gaps) or [0.0]
        return {
            "gaps": len(self.gaps),
            "p50_s": statistics.median(ordered),
            "p99_s": ordered[int(0.99 * (len(ordered) - 1))],
            "most_s": ordered[-1],
            "asked": len(self.asked),
            "answer_s": statistics.median(self.asked) if self.asked else 0.0,
            "read_tokens_a_second": self.tokens_read / self.seconds,
        }


class Daemon:
    """The daemon on that store."""

    def __init__(self, store: Path, socket: Path) -> None:
        self.socket = socket
        self._command = [_TORPOR, "serve", "--store", str(store), "--socket", str(self.socket), "--json"]
        self._command += ["--prefix-reuse", "off"]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Until the end of the block."""
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline()), "it says when it is ready"
            yield
            with Client(self.socket) as client:
                client.shutdown()
            process.wait(120)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def stream_for(self, seconds: float, found: Beside) -> None:
        """Stream from new sessions, one after the other, and note the gaps behind each one's first piece."""
        begun = time.perf_counter()
        with Client(self.socket) as client:
            while time.perf_counter() - begun < seconds or len(found.gaps) < LEAST_GAPS:
                name = f"stream-{next(_numbers)}"
                client.create(name)
                with client.stream_generate(name, text=_WORDS, max_tokens=STREAM_TOKENS) as stream:
                    last = None
                    for _ in stream:
                        now = time.perf_counter()
                        if last is not None:
                            found.gaps.append(now - last)
                        last = now
                        if now - begun >= seconds and len(found.gaps) >= LEAST_GAPS:
                            break
                client.delete(name)
        found.seconds = time.perf_counter() - begun


def _ask_over_and_over(socket: Path, what: str, ready: Any, stop: Any, told: Any) -> None:
    """A process of its own: what it takes to read the answers must not delay the stream's reader."""
    with Client(socket) as client:
        asks = asks_of(client)[what]
        taken = []
        ready.set()
        while not stop.is_set():
            begun = time.perf_counter()
            asks()
            taken.append(time.perf_counter() - begun)
    told.send(taken)


def asks_of(client: Client) -> dict[str, Callable[[], object]]:
    """What is asked beside the stream."""

    def clear() -> None:
        for number in range(CLEARED):
            client.create(f"cleared-{number}", labels=["cleared"])
        client.clear("cleared")

    def events() -> None:
        with client.events():
            pass

    return {
        "list": client.list_sessions,
        "stats": client.stats,
        "status": client.status,
        "events": events,
        "clear": clear,
    }


class Bench:
    """Everything beside a stream, one after the other."""

    def __init__(self, daemon: Daemon, seconds: float, read_tokens: int) -> None:
        self._daemon, self._seconds, self._read_tokens = daemon, seconds, read_tokens

    def run(self) -> dict[str, dict[str, float | int]]:
        """The figures by what went on."""
        found = {"nothing": Beside()}
        self._daemon.stream_for(self._seconds, found["nothing"])
        for what in ASKED:
            found[what] = self._beside_asking(what)
        found["one read alone"] = self._reading(1, streams=False)
        for reads in (1, 3):
            found[f"{reads} long reads"] = self._reading(reads, streams=True)
        return {what: each.figures() for what, each in found.items()}

    def _beside_asking(self, what: str) -> Beside:
        found, (mine, others) = Beside(), _SPAWN.Pipe()
        ready, stop = _SPAWN.Event(), _SPAWN.Event()
        asking = _SPAWN.Process(target=_ask_over_and_over, args=(self._daemon.socket, what, ready, stop, others))
        asking.start()
        others.close()  # so that its end is seen, whatever ends it
        try:
            assert ready.wait(60)
            self._daemon.stream_for(self._seconds, found)
            stop.set()
            found.asked = mine.recv()
        finally:
            asking.terminate()
            asking.join()
        return found

    def _reading(self, reads: int, *, streams: bool) -> Beside:
        """Long reads over and over, as many at a time."""
        found, until = Beside(), time.perf_counter() + self._seconds
        with ThreadPoolExecutor(reads + 1) as pool:
            work = [pool.submit(self._read_until, until) for _ in range(reads)]
            if streams:
                self._daemon.stream_for(self._seconds, found)
            taken = [each.result() for each in work]
        found.asked = [seconds for each in taken for seconds in each]
        found.tokens_read = self._read_tokens * len(found.asked)
        found.seconds = max(sum(each) for each in taken)
        return found

    def _read_until(self, until: float) -> list[float]:
        taken = []
        with Client(self._daemon.socket) as client:
            while time.perf_counter() < until:
                name, begun = f"read-{next(_numbers)}", time.perf_counter()
                client.create(name)
                client.append(name, tokens=[32 + at % 90 for at in range(self._read_tokens)])
                taken.append(time.perf_counter() - begun)
                client.delete(name)
        return taken


def report(figures: dict[str, Any], out: Path) -> None:
    """JSON, plot, and a table for a person."""
    document = save("loop", figures, out)
    beside = figures["beside"]
    streamed = {what: each for what, each in beside.items() if each["gaps"]}
    with plotted(out / "loop.png", document, f"a stream beside requests; {figures['sessions']:,} sessions") as axes:
        for name in ("p50_s", "p99_s", "most_s"):
            axes.plot([1000 * each[name] for each in streamed.values()], "o", label=name)
        axes.set_xticks(range(len(streamed)), list(streamed), rotation=30, fontsize=7)
        axes.set(ylabel="ms between two pieces", yscale="log")
        axes.legend(fontsize=7)
    print(f"{'beside':>16} {'p50':>8} {'p99':>8} {'most':>8} {'answer':>9}  ms   tokens read a second")
    for what, each in beside.items():
        gaps = " ".join(f"{1000 * each[name]:>8.1f}" for name in ("p50_s", "p99_s", "most_s"))
        print(f"{what:>16} {gaps} {1000 * each['answer_s']:>9.1f} {each['read_tokens_a_second']:>10,.0f}")


def main() -> None:
    """Measure and report."""
    parser = parser_for(__doc__, 1)
    parser.add_argument("--sessions", type=int, help=f"{SESSIONS:,} unless told")
    parser.add_argument("--seconds", type=float, help=f"of each stream; {SECONDS:g} unless told")
    parser.add_argument("--store", type=Path, help="make the store here and keep it, or use the one that is here")
    options = parser.parse_args()
    sessions = options.sessions or (QUICK_SESSIONS if options.quick else SESSIONS)
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.folder) as folder:
        store = options.store or Path(folder) / "store"
        if not store.exists():
            make_store(store, sessions, versions=1)
        daemon = Daemon(store, Path(folder) / "torpor.sock")
        with daemon.running():
            beside = Bench(daemon, seconds, QUICK_READ_TOKENS if options.quick else READ_TOKENS).run()
    report({"sessions": sessions, "beside": beside}, options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
