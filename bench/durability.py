"""What it costs that answers are durable: turns a second, and the time to the last token, with none, turn and sleep.

One daemon on the demo model. In each way 1, 8 and 64 sessions take turns at once, each on a thread of its own: a
message is read, and a few tokens are written.

    none    sessions to be thrown away (`durability="none"`): no turn waits for the disk
    turn    what is usual: an answer comes once its turn stands in the journal, flushed
    sleep   as `none`, and the session is put to sleep behind each turn, which wakes it again

The ways take turns within each round, and the sessions of all ways read the same texts, so that they do the same work.
Beside them the flush alone: as many bytes as a flush of the journal has, written into a file of the same disk that is
long enough, and flushed. It comes behind each turn of one session of those to be thrown away, so at the pace of turns:
flushes one behind the other would be shorter. The daemon runs in a process of its own that counts what it writes into
its journal, how often it flushes that, and how long this takes.

Goals: at one session, an answer with `turn` within 5 % of one with `none` and one flush; at 64, below 0.2 flushes a
turn.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

import plain
from figures import OURS, PEER, panels, parser_for, rounds_of, save
from machine import spread
from spawned import SPAWN, answering, serve
from torpor.memvid.disk import durable
from torpor.memvid.folder.journal import TURNS_FILE
from torpor.memvid.limits import MIB
from torpor.socket_api import Client

WAYS: Final = ("none", "turn", "sleep")
SESSIONS: Final = (1, 8, 64)
QUICK_SESSIONS: Final = (1, 4)
TURNS: Final = {1: 12, 8: 4, 64: 3}
"""Of each session in each round and way."""
ROUNDS: Final = 4
MOST_TOKENS: Final = 16
FLUSHED_BYTES: Final = 1 * MIB
"""Of the file for the flush alone."""
ANSWER_S: Final = 120.0
_numbers = count()


class Counted:
    """What the daemon has done to its journal, counted in its process and read in this one."""

    def __init__(self) -> None:
        self._flushes, self._bytes = SPAWN.Value("q", 0), SPAWN.Value("q", 0)
        self._seconds = SPAWN.Value("d", 0.0)

    def count(self) -> None:
        """From now on, in this process."""
        sync_file, write_at = durable.sync_file, durable.write_at

        def counting_sync(fd: int, path: str) -> None:
            begun = time.perf_counter()
            sync_file(fd, path)
            if path.endswith(TURNS_FILE):
                self._seconds.value += time.perf_counter() - begun
                self._flushes.value += 1

        def counting_write(fd: int, place: int, data: bytes, path: str) -> None:
            write_at(fd, place, data, path)
            if path.endswith(TURNS_FILE):
                self._bytes.value += len(data)

        durable.sync_file, durable.write_at = counting_sync, counting_write

    def now(self) -> tuple[int, int, float]:
        """Flushes so far, the bytes written for them, and how long they took."""
        return self._flushes.value, self._bytes.value, self._seconds.value


def _serve(store: Path, socket: Path, counted: Counted) -> None:
    """The daemon, in a process of its own."""
    counted.count()
    serve(store, socket)


@contextmanager
def _serving(store: Path, socket: Path, counted: Counted) -> Iterator[None]:
    with answering(_serve, store, socket, counted) as daemon:
        yield
        with Client(socket, timeout_s=ANSWER_S) as client:
            client.shutdown()
        daemon.join(ANSWER_S)


@dataclass
class Load:
    """So many sessions that take turns at once in one way. answers: of each round, seconds from a request to its last
    token. turns_a_second, flushes, flushed_bytes, flush_s: of each round; flushes and bytes are a turn's. flush_alone:
    seconds, of each round of `none`."""

    way: str
    sessions: int
    answers: list[list[float]] = field(default_factory=list)
    turns_a_second: list[float] = field(default_factory=list)
    flushes: list[float] = field(default_factory=list)
    flushed_bytes: list[float] = field(default_factory=list)
    flush_s: list[float] = field(default_factory=list)
    flush_alone: list[list[float]] = field(default_factory=list)

    @property
    def medians(self) -> list[float]:
        """The time to the last token, round by round."""
        return [statistics.median(each) for each in self.answers]

    def figures(self) -> dict[str, Any]:
        ordered = sorted(taken for each in self.answers for taken in each)
        return {
            "turns": len(ordered),
            "turns_a_second": spread(self.turns_a_second),
            "last_token_s": spread(self.medians) | {"p99": ordered[int(0.99 * (len(ordered) - 1))]},
            "flushes_a_turn": spread(self.flushes),
            "flush_s": spread(self.flush_s) if self.flush_s else None,
        }


class Bench:
    """Sessions of every way on one daemon."""

    def __init__(self, folder: Path, socket: Path, counted: Counted, turns: dict[int, int]) -> None:
        self._folder, self._socket, self._counted, self._turns = folder, socket, counted, turns
        self._record_bytes = 4096

    def run(self, sessions: int, rounds: int) -> list[Load]:
        """So many sessions of each way, and all rounds of them."""
        loads = [Load(way, sessions) for way in WAYS]
        names = {way: [f"{way}-{sessions}-{number}" for number in range(sessions)] for way in WAYS}
        with ExitStack() as stack, ThreadPoolExecutor(sessions) as pool:
            clients = [stack.enter_context(Client(self._socket, timeout_s=ANSWER_S)) for _ in range(sessions)]
            for way, each in names.items():
                for name in each:
                    clients[0].create(name, durability=None if way == "turn" else "none")
            for number in range(rounds + 1):
                for load in loads[number % len(loads) :] + loads[: number % len(loads)]:
                    plain.settle()
                    # the first round warms up: threads, memory, the room of the journal
                    noted = load if number else Load(load.way, sessions)
                    self._round(noted, clients, names[load.way], pool, number)
            for each in names.values():
                for name in each:
                    clients[0].delete(name)
        return loads

    def _round(
        self, load: Load, clients: list[Client], names: list[str], pool: ThreadPoolExecutor, number: int
    ) -> None:
        turns, together = self._turns[load.sessions], threading.Barrier(load.sessions + 1)
        alone: list[float] = []

        def take_turns(client: Client, name: str) -> list[float]:
            taken = []
            together.wait()
            for turn in range(turns):
                text = f"In round {number} of turn {turn}, agent {name.partition('-')[2]} reports what it has found. "
                begun = time.perf_counter()
                client.generate(name, text=text, max_tokens=MOST_TOKENS)
                taken.append(time.perf_counter() - begun)
                if load.way == "sleep":
                    client.sleep(name)
                elif load.way == "none" and name == names[0]:
                    alone.append(self._flush_alone())
            return taken

        work = [pool.submit(take_turns, client, name) for client, name in zip(clients, names, strict=True)]
        flushes, flushed_bytes, seconds = self._counted.now()
        together.wait()
        begun = time.perf_counter()
        answers = [taken for each in work for taken in each.result()]
        load.turns_a_second.append(len(answers) / (time.perf_counter() - begun))
        load.answers.append(answers)
        load.flush_alone.append(alone)
        made = self._counted.now()[0] - flushes
        load.flushes.append(made / len(answers))
        if made:
            load.flush_s.append((self._counted.now()[2] - seconds) / made)
            load.flushed_bytes.append((self._counted.now()[1] - flushed_bytes) / made)
            self._record_bytes = round(load.flushed_bytes[-1])

    def _flush_alone(self) -> float:
        """Seconds for the bytes of a flush of the journal, written into a file that is long enough, and flushed."""
        path, record = self._folder / "flushed", os.urandom(self._record_bytes)
        is_new = not path.exists()
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if is_new:
                durable.write_at(fd, 0, bytes(FLUSHED_BYTES), str(path))
                durable.sync_file(fd, str(path))
            begun = time.perf_counter()
            durable.write_at(fd, next(_numbers) * len(record) % (FLUSHED_BYTES - len(record)), record, str(path))
            durable.sync_file(fd, str(path))
            return time.perf_counter() - begun
        finally:
            os.close(fd)


def figures_of(loads: dict[int, list[Load]]) -> dict[str, Any]:
    """Medians with spread; `turn` beside `none` and one flush, round by round."""
    cases = []
    for sessions, ways in loads.items():
        by_way = {load.way: load for load in ways}
        flushes = [statistics.median(each) for each in by_way["none"].flush_alone]
        ratios = [
            turn / (none + flush)
            for turn, none, flush in zip(by_way["turn"].medians, by_way["none"].medians, flushes, strict=True)
        ]
        cases.append(
            {
                "sessions": sessions,
                "ways": {load.way: load.figures() for load in ways},
                "flush_alone_s": spread(flushes),
                "turn_over_none_and_a_flush": spread(ratios),
            }
        )
    return {"written_tokens": MOST_TOKENS, "cases": cases}


def report(figures: dict[str, Any], out: Path) -> None:
    """JSON, plot, and a table for a person."""
    document = save("durability", figures, out)
    one, many = figures["cases"][0], figures["cases"][-1]
    title = (
        f"An answer that is durable takes {one['turn_over_none_and_a_flush']['median']:.2f} times what one takes that "
        f"is not, and a flush; {many['sessions']} sessions share flushes, {_flushes(many):.2f} a turn"
    )
    with panels(out / "durability.png", document, title, (1, len(figures["cases"])), (11, 3.6)) as grid:
        for axes, case in zip(grid, figures["cases"], strict=True):
            for height, (way, each) in enumerate(reversed(case["ways"].items())):
                taken, colour = each["last_token_s"], OURS if way == "turn" else PEER
                axes.plot([1000 * taken["lowest"], 1000 * taken["highest"]], [height] * 2, "-", color=colour)
                axes.plot(1000 * taken["median"], height, "o", color=colour)
            axes.set_yticks(range(len(WAYS)), reversed(WAYS))
            axes.set_title(f"{case['sessions']} at once", fontsize=9)
            axes.set(xlabel="ms to the last token")
            axes.set_xlim(left=0)
    heads = f"{'sessions':>8} {'way':>6} {'turns/s':>8} {'last token ms':>26} {'p99':>8}"
    print(f"{heads} {'flushes/turn':>13} {'flush ms':>9}")
    for case in figures["cases"]:
        for way, each in case["ways"].items():
            taken, flush = each["last_token_s"], each["flush_s"]
            print(
                f"{case['sessions']:>8} {way:>6} {each['turns_a_second']['median']:>8.1f} {_ms(taken):>26} "
                f"{1000 * taken['p99']:>8.1f} {each['flushes_a_turn']['median']:>13.2f} "
                f"{1000 * flush['median'] if flush else 0.0:>9.2f}"
            )
        ratio = case["turn_over_none_and_a_flush"]
        print(
            f"  turn / (none + a flush): {ratio['median']:.3f} ({ratio['lowest']:.3f} to {ratio['highest']:.3f})",
            end="",
        )
        print(f"; a flush alone: {_ms(case['flush_alone_s'])} ms")


def _flushes(case: dict[str, Any]) -> float:
    return float(case["ways"]["turn"]["flushes_a_turn"]["median"])


def _ms(taken: dict[str, Any]) -> str:
    lowest, median, highest = (1000 * taken[which] for which in ("lowest", "median", "highest"))
    return f"{median:.1f} ({lowest:.1f} to {highest:.1f})"


def main() -> None:
    """Measure and report."""
    parser = parser_for(__doc__, ROUNDS)
    parser.add_argument("--sessions", type=int, nargs="+", help=f"how many at once; {SESSIONS} unless told")
    options = parser.parse_args()
    sessions = options.sessions or (QUICK_SESSIONS if options.quick else SESSIONS)
    turns = {each: 2 if options.quick else TURNS.get(each, 3) for each in sessions}
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.folder) as place:
        folder, counted = Path(place), Counted()
        bench = Bench(folder, folder / "torpor.sock", counted, turns)
        with _serving(folder / "store", folder / "torpor.sock", counted):
            loads = {each: bench.run(each, rounds_of(options)) for each in sorted(sessions)}
    report(figures_of(loads), options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
