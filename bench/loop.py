"""A stream's gaps beside requests that look at every session of a store, and beside long reads.

The store has 10,000 sessions, small real bundles of random bytes that nobody wakes, made without flushes. One agent
streams from the demo model; a stranger in another process asks one thing over and over. Figures: the gaps between
two pieces of the stream, p50, p99 and the longest, with nothing beside it and beside each request; and how long the
request took. `clear` clears away a label of 60 sessions each time. `large` asks a session to read a million tokens, the
most that a frame holds, and is refused once they have been checked.

Then texts of 6,000 tokens are read beside the stream, one and three at a time, until the last of them is read: the
gaps, and how many tokens a second the reads have, beside what one has alone.

Each of these phases lasts so many seconds or gaps, whichever come first; one that sees too few by then goes on, but to
its limit at most. What fails in a phase is noted, the others follow, and the benchmark then ends with 1.
"""

from __future__ import annotations

import json
import multiprocessing
import socket as sockets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from figures import OURS, parser_for, plotted, save
from scale import make_store
from torpor.daemon.api.events import ProgressEvent
from torpor.errors import TorporError
from torpor.socket_api import Client, RemoteError

SESSIONS, QUICK_SESSIONS = 10_000, 100
SECONDS, QUICK_SECONDS = 15.0, 1.0
READ_TOKENS, QUICK_READ_TOKENS = 6_000, 600
CLEARED = 60
STREAM_TOKENS = 1_000
LARGE_TOKENS = 1_000_000
LEAST_GAPS, MOST_GAPS = 20, 10_000
LIMIT_S, QUICK_LIMIT_S = 60.0, 15.0
"""Of a phase. A stream that has a gap and reads end then, in the middle; another request's answer is waited for."""
ANSWER_S = 120.0
"""For how long anything may keep a phase waiting."""
_TORPOR = str(Path(sys.executable).with_name("torpor"))
ASKED = ("list", "GET /v1/sessions", "torpor ls", "stats", "status", "events", "clear", "large")
_SPAWN = multiprocessing.get_context("spawn")
_WORDS = "an agent that has slept for an hour goes on at the next token with nothing read again "
_numbers = count()


@dataclass
class Beside:
    """What was seen while something went on. gaps, asked: seconds. failed: what ended it before its time."""

    gaps: list[float] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    tokens_read: int = 0
    seconds: float = 0.0
    failed: str | None = None

    def figures(self) -> dict[str, Any]:
        ordered = sorted(self.gaps) or [0.0]
        return {
            "gaps": len(self.gaps),
            "p50_s": statistics.median(ordered),
            "p99_s": ordered[int(0.99 * (len(ordered) - 1))],
            "most_s": ordered[-1],
            "asked": len(self.asked),
            "answer_s": statistics.median(self.asked) if self.asked else 0.0,
            "read_tokens_a_second": self.tokens_read / self.seconds if self.seconds else 0.0,
            "failed": self.failed,
        }


class Daemon:
    """The daemon on that store."""

    def __init__(self, store: Path, socket: Path) -> None:
        self.socket = socket
        self._command = [_TORPOR, "serve", "--store", str(store), "--socket", str(self.socket), "--json"]
        self._command += ["--prefix-reuse", "off", "--http-socket", str(_http_beside(socket))]

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
            process.wait(ANSWER_S)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def stream(self, found: Beside, is_over: Callable[[], bool], limit_s: float) -> None:
        """Stream from new sessions, one after the other, and note the gaps behind each one's first piece."""
        begun = time.perf_counter()

        def is_enough() -> bool:
            is_late = found.gaps and time.perf_counter() - begun >= limit_s
            if len(found.gaps) >= MOST_GAPS or is_late:
                return True
            return len(found.gaps) >= LEAST_GAPS and is_over()

        with Client(self.socket, timeout_s=ANSWER_S) as client:
            while not is_enough():
                name = f"stream-{next(_numbers)}"
                client.create(name)
                with client.stream_generate(name, text=_WORDS, max_tokens=STREAM_TOKENS) as stream:
                    last = None
                    for _ in stream:
                        now = time.perf_counter()
                        if last is not None:
                            found.gaps.append(now - last)
                        last = now
                        if is_enough():
                            break
                client.delete(name)
        found.seconds = time.perf_counter() - begun


def _after(seconds: float) -> Callable[[], bool]:
    """Whether so long has passed from now on."""
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= until


def _ask_over_and_over(socket: Path, what: str, ready: Any, stop: Any, told: Any) -> None:
    """A process of its own: what it takes to read the answers must not delay the stream's reader. It tells how long
    each answer took, and what failed."""
    taken: list[float] = []
    try:
        with Client(socket, timeout_s=ANSWER_S) as client:
            asks = asks_of(client, socket)[what]
            ready.set()
            while not (taken and stop.is_set()):
                begun = time.perf_counter()
                asks()
                taken.append(time.perf_counter() - begun)
    except (TorporError, OSError) as error:
        ready.set()
        told.send((taken, str(error)))
    else:
        told.send((taken, None))


def _http_beside(socket: Path) -> Path:
    """The socket on which the daemon serves HTTP."""
    return socket.with_suffix(".http")


def get_sessions(path: Path) -> None:
    """Ask for all sessions over HTTP, and take the answer as a page does."""
    with closing(sockets.socket(sockets.AF_UNIX)) as connected:
        connected.settimeout(ANSWER_S)
        connected.connect(str(path))
        asked = HTTPConnection("localhost")
        asked.sock = connected
        asked.request("GET", "/v1/sessions")
        json.loads(asked.getresponse().read())["sessions"]


def asks_of(client: Client, socket: Path) -> dict[str, Callable[[], object]]:
    """What is asked beside the stream."""
    ls = [_TORPOR, "ls", "--socket", str(socket)]

    def clear() -> None:
        for number in range(CLEARED):
            client.create(f"cleared-{number}", labels=["cleared"])
        client.clear("cleared")

    def events() -> None:
        with client.events():
            pass

    large = [32 + at % 90 for at in range(LARGE_TOKENS)]

    def read_large() -> None:
        try:
            client.append("large", tokens=large, create=True)
        except RemoteError as refused:
            if refused.code != "context_overflow":
                raise

    return {
        "list": client.list_sessions,
        "GET /v1/sessions": partial(get_sessions, _http_beside(socket)),
        "torpor ls": partial(subprocess.run, ls, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL),
        "stats": client.stats,
        "status": client.status,
        "events": events,
        "clear": clear,
        "large": read_large,
    }


class Bench:
    """Everything beside a stream, one after the other."""

    def __init__(self, daemon: Daemon, seconds: float, limit_s: float, read_tokens: int) -> None:
        self._daemon, self._seconds, self._limit_s, self._read_tokens = daemon, seconds, limit_s, read_tokens

    def run(self) -> dict[str, dict[str, Any]]:
        """The figures by what went on."""
        print(f"{'beside':>16} {'p50':>8} {'p99':>8} {'most':>8} {'answer':>9}  ms   tokens read a second")
        phases: dict[str, Callable[[Beside], None]] = {"nothing": self._beside_nothing}
        phases |= {what: partial(self._beside_asking, what) for what in ASKED}
        phases["one read alone"] = partial(self._reading, 1, streams=False)
        phases |= {f"{reads} long reads": partial(self._reading, reads, streams=True) for reads in (1, 3)}
        figures = {}
        for what, phase in phases.items():
            found = Beside()
            try:
                phase(found)
            except (TorporError, OSError, EOFError, TimeoutError) as error:
                found.failed = f"{type(error).__name__}: {error}"
            figures[what] = found.figures()
            print(_line(what, figures[what]), flush=True)
        return figures

    def _beside_nothing(self, found: Beside) -> None:
        self._daemon.stream(found, _after(self._seconds), self._limit_s)

    def _beside_asking(self, what: str, found: Beside) -> None:
        mine, others = _SPAWN.Pipe()
        ready, stop = _SPAWN.Event(), _SPAWN.Event()
        told = (self._daemon.socket, what, ready, stop, others)
        asking = _SPAWN.Process(target=_ask_over_and_over, args=told, daemon=True)
        asking.start()
        others.close()  # so that its end is seen, whatever ends it
        try:
            if not ready.wait(ANSWER_S):
                raise TimeoutError("the process that asks did not start")
            self._daemon.stream(found, _after(self._seconds), self._limit_s)
            stop.set()
            if not mine.poll(ANSWER_S):
                raise TimeoutError("the last answer did not come")
            found.asked, found.failed = mine.recv()
        finally:
            asking.kill()
            asking.join()

    def _reading(self, reads: int, found: Beside, *, streams: bool) -> None:
        """Long reads over and over, as many at a time; the stream lasts as long as they do."""
        is_over, is_late = _after(self._seconds), _after(self._limit_s)
        with ThreadPoolExecutor(reads) as pool:
            work = [pool.submit(self._read_until, is_over, is_late) for _ in range(reads)]
            if streams:
                self._daemon.stream(found, lambda: all(each.done() for each in work), self._limit_s)
            read = [each.result() for each in work]
        found.asked = [seconds for taken, _ in read for seconds in taken]
        found.tokens_read = sum(tokens for _, tokens in read)
        found.seconds = max(sum(taken) for taken, _ in read)

    def _read_until(self, is_over: Callable[[], bool], is_late: Callable[[], bool]) -> tuple[list[float], int]:
        """How long each read took, and the tokens of all; of one that is late, up to where it was."""
        taken: list[float] = []
        tokens = 0
        with Client(self._daemon.socket, timeout_s=ANSWER_S) as client:
            while not (taken and is_over()):
                name, begun, done = f"read-{next(_numbers)}", time.perf_counter(), 0

                def note(event: object) -> None:
                    nonlocal done
                    done = event.done if isinstance(event, ProgressEvent) else done
                    if is_late():
                        raise _TooLateError

                client.create(name)
                with suppress(_TooLateError):
                    client.append(name, tokens=[32 + at % 90 for at in range(self._read_tokens)], on_event=note)
                    done = self._read_tokens
                taken.append(time.perf_counter() - begun)
                tokens += done
                client.delete(name)
        return taken, tokens


class _TooLateError(Exception):
    """A read went on for longer than its phase."""


def _line(what: str, each: dict[str, Any]) -> str:
    """A row of the table."""
    gaps = " ".join(f"{1000 * each[name]:>8.1f}" for name in ("p50_s", "p99_s", "most_s"))
    failed = f"  failed: {each['failed']}" if each["failed"] else ""
    return f"{what:>16} {gaps} {1000 * each['answer_s']:>9.1f} {each['read_tokens_a_second']:>10,.0f}{failed}"


def report(figures: dict[str, Any], out: Path) -> None:
    """JSON and plot."""
    document = save("loop", figures, out)
    beside = figures["beside"]
    streamed = {what: each for what, each in beside.items() if each["gaps"]}
    title = f"How long a stream waits for its next piece beside other requests, {figures['sessions']:,} sessions"
    with plotted(out / "loop.png", document, title, 9) as axes:
        for name, label, marker in (("p50_s", "median", "|"), ("p99_s", "99 %", "o"), ("most_s", "longest", ">")):
            waits = [1000 * each[name] for each in streamed.values()]
            axes.plot(waits, range(len(streamed)), marker, color=OURS)
            axes.annotate(label, (waits[-1], len(streamed) - 1), xytext=(0, 8), textcoords="offset points", fontsize=7)
        axes.set_yticks(range(len(streamed)), list(streamed), fontsize=8)
        axes.set(xlabel="ms between two pieces", xscale="log")


def main() -> int:
    """Measure and report."""
    parser = parser_for(__doc__, 1)
    parser.add_argument("--sessions", type=int, help=f"{SESSIONS:,} unless told")
    parser.add_argument("--seconds", type=float, help=f"of each stream; {SECONDS:g} unless told")
    parser.add_argument("--store", type=Path, help="make the store here and keep it, or use the one that is here")
    options = parser.parse_args()
    sessions = options.sessions or (QUICK_SESSIONS if options.quick else SESSIONS)
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    limit_s = QUICK_LIMIT_S if options.quick else LIMIT_S
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.folder) as folder:
        store = options.store or Path(folder) / "store"
        if not store.exists():
            make_store(store, sessions, versions=1)
        daemon = Daemon(store, Path(folder) / "torpor.sock")
        with daemon.running():
            beside = Bench(daemon, seconds, limit_s, QUICK_READ_TOKENS if options.quick else READ_TOKENS).run()
            report({"sessions": sessions, "beside": beside}, options.out)
    print(f"figures and plot in {options.out}")
    return 1 if any(each["failed"] for each in beside.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
