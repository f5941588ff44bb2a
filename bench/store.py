"""A sleep and a wake's reading beside plain system calls for the same bytes, in one process and run.

For each size a session of random bytes in the shape of a model's cache, and then, round by round and interleaved:

- sleep: `write_bundle`, until the receipt: hashed, written, flushed, read back and verified, published, indexed; beside
  `writev` of the very same buffers into one file of the same folder, and its flush;
- read, verified: `open_session`, every header, every slot with its digest, on one thread and on two, into memory that
  was in use before (warm) and into memory that nothing has touched (fresh); beside `preadv` of as many bytes of the
  same file into as many buffers of the same sizes. The file is in the page cache for all of these;
- the same after the system was told to forget the file's pages (cold), into fresh memory.

Where a sleep's and a read's time goes is taken once per size, apart from the rounds. Nothing else should run.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import os
import pstats
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import plain
from figures import OURS, PEER, panels, parser_for, rounds_of, save
from machine import spread
from parts import Parts, timed_parts
from synthetic import (
    IDENTITY,
    QWEN3_06B,
    CacheMemory,
    Shape,
    blocks,
    demo_shape,
    fresh_memory,
    random_ledger,
    random_memory,
)
from torpor.memvid.store import Store, VersionDraft
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.reader import BundleReader

URI = SessionUri("bench", "sleeper")
ROUNDS = 5
THREADS = (1, 2)
_MIB = 2**20
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Case:
    """One shape at one size."""

    shape: Shape
    tokens: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the spans' state, which a read moves."""
        return self.tokens * self.shape.token_bytes


@dataclass
class Result:
    """The rounds of one case: seconds by name, and the parts of one sleep and one read."""

    case: Case
    seconds: dict[str, list[float]] = field(default_factory=dict)
    sleep_parts: Parts | None = None
    read_parts: Parts | None = None
    file_bytes: int = 0
    cold: bool = True

    def note(self, name: str, seconds: float) -> None:
        """One measurement of one round."""
        self.seconds.setdefault(name, []).append(seconds)

    def figures(self) -> dict[str, Any]:
        """Medians with spread, speeds, and each ratio taken round by round."""
        size = self.case.size_bytes
        pairs = [("sleep", "plain_write")]
        pairs += [(name, name.replace("verified", "plain")) for name in self.seconds if name.startswith("verified")]
        return {
            "shape": self.case.shape.name,
            "tokens": self.case.tokens,
            "state_bytes": size,
            "file_bytes": self.file_bytes,
            "cold_cache_was_empty": self.cold,
            "seconds": {name: spread(values) for name, values in self.seconds.items()},
            "gb_per_second": {
                name: spread([size / value / _GB for value in values])
                for name, values in self.seconds.items()
                if name != "plain_flush"
            },
            "share_of_plain_speed": {
                ours: spread([p / o for o, p in zip(self.seconds[ours], self.seconds[theirs], strict=True)])
                for ours, theirs in pairs
            },
            "sleep_parts": self.sleep_parts.as_data() if self.sleep_parts else None,
            "read_parts": self.read_parts.as_data() if self.read_parts else None,
        }


def measure(cases: Iterable[Case], rounds: int, folder: Path | None) -> list[Result]:
    """Every case, in a store of its own."""
    results = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=folder) as place:
            bench = Bench(case, Path(place))
            try:
                results.append(bench.run(rounds))
            finally:
                bench.close()
    return results


class Bench:
    """One case: its memory, its store, and what is measured on them."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.result = Result(case)
        self._folder = folder
        self._store = Store.open(folder / "store", writable=True)
        self._source = random_memory(case.shape, case.tokens)
        self._warm = fresh_memory(case.shape, case.tokens)
        self._pools = {threads: ThreadPoolExecutor(threads) for threads in THREADS}
        self._plain_file = folder / "plain"
        self._path = Path()

    def close(self) -> None:
        """Let go of store and threads."""
        self._store.close()
        for pool in self._pools.values():
            pool.shutdown()

    def run(self, rounds: int) -> Result:
        """A sleep that is not counted and touches all memory, one sleep and one read in parts, then the rounds."""
        self._write(0)
        self._forget()
        self._sleep_in_parts()
        self._read_in_parts()
        self._forget()
        for number in range(1, rounds + 1):
            self._round(number)
        return self.result

    def _round(self, number: int) -> None:
        steps: list[Callable[[], None]] = [lambda: self._sleep(number), self._plain_write]
        for step in steps if number % 2 else reversed(steps):  # neither always finds the disk as the other left it
            plain.settle()
            step()
        self._read_all(number)
        self._forget()

    def _sleep(self, salt: int) -> None:
        started = time.perf_counter()
        receipt = self._write(salt)
        self.result.note("sleep", time.perf_counter() - started)
        self.result.file_bytes = receipt

    def _write(self, salt: int) -> int:
        """Put the session to sleep under tokens that no version of it had before. Returns the file's size."""
        ledger = random_ledger(self.case.shape, self.case.tokens, salt)
        receipt = self._store.write_bundle(
            VersionDraft(
                uri=URI,
                identity=IDENTITY,
                parent=None,
                reused=(),
                blocks=self._source.drafts(ledger),
                session={},
                block_tokens=self.case.tokens,
            )
        )
        return receipt.bytes_written

    def _plain_write(self) -> None:
        whole, flush = plain.write_and_flush(self._plain_file, self._block_runs(self._source))
        self.result.note("plain_write", whole)
        self.result.note("plain_flush", flush)

    def _read_all(self, number: int) -> None:
        (self._path,) = Path(self._store.path).glob("packs/*")
        for threads in THREADS:
            for kind in ("warm", "fresh"):
                self._read_pair(f"{kind}_{threads}", threads, kind, number)
        for threads in THREADS:
            self._read_pair(f"cold_{threads}", threads, "cold", number)

    def _read_pair(self, name: str, threads: int, kind: str, number: int) -> None:
        pair = [("verified", self._read_verified), ("plain", self._read_plain)]
        for who, read in pair if number % 2 else reversed(pair):
            if kind == "cold":
                plain.settle()
                self.result.cold &= plain.drop_from_cache(self._path)
            target = self._warm if kind == "warm" else fresh_memory(self.case.shape, self.case.tokens)
            started = time.perf_counter()
            read(target, threads)
            self.result.note(f"{who}_{name}", time.perf_counter() - started)

    def _read_verified(self, target: CacheMemory, threads: int) -> None:
        """What a wake does, but for MLX: session, headers and ledger first, then slot by slot over all blocks."""
        with self._store.open_session(URI) as reader:
            for entry in reader.entries:
                reader.read_header(entry)
            reader.tokens()
            slots = range(2 * self.case.shape.layers)
            list(self._pools[threads].map(lambda slot: _read_slot(reader, target, slot), slots))
            for slot, record in enumerate(target.record):
                reader.read_slots_into(reader.entries[-1], [(slot, [record])])

    def _read_plain(self, target: CacheMemory, threads: int) -> None:
        fd = os.open(self._path, os.O_RDONLY)
        try:
            sizes = [(runs, sum(run.nbytes for run in runs)) for runs in self._block_runs(target)]
            offsets = itertools.accumulate((size for _, size in sizes), initial=0)
            jobs = [(runs, offset) for (runs, _), offset in zip(sizes, offsets, strict=False)]
            list(self._pools[threads].map(lambda job: plain.read_at(fd, job[1], job[0]), jobs))
        finally:
            os.close(fd)

    def _block_runs(self, memory: CacheMemory) -> list[list[memoryview]]:
        return [memory.block_runs(start, count) for start, count in blocks(0, self.case.tokens)]

    def _sleep_in_parts(self) -> None:
        with timed_parts() as parts:
            self._write(0)
        self.result.sleep_parts = parts

    def _read_in_parts(self) -> None:
        self._read_verified(self._warm, 1)  # so that the memory is warm
        with timed_parts() as parts, self._store.open_session(URI) as reader:
            for slot in range(2 * self.case.shape.layers):
                _read_slot(reader, self._warm, slot)
        self.result.read_parts = parts

    def _forget(self) -> None:
        self._store.delete_session(URI)
        self._plain_file.unlink(missing_ok=True)
        plain.settle()

    def profile(self) -> None:
        """Print where Python's own time goes in one sleep and one read: for work on the store, not for the figures."""
        work: dict[str, Callable[[], object]] = {
            "sleep": lambda: self._write(0),
            "read": lambda: _read_all(self._store, self._warm),
        }
        for name, call in work.items():
            profiler = cProfile.Profile()
            profiler.runcall(call)
            print(f"-- profile of one {name}, {self.case.size_bytes / _MIB:.0f} MiB of {self.case.shape.name}")
            pstats.Stats(profiler).sort_stats("tottime").print_stats(16)


def _read_slot(reader: BundleReader, target: CacheMemory, slot: int) -> None:
    for entry in reader.entries:
        if entry.kind == "span":
            reader.read_slots_into(entry, [(slot, target.runs(slot, entry.start, entry.token_count))])


def _read_all(store: Store, target: CacheMemory) -> None:
    with store.open_session(URI) as reader:
        for slot in range(2 * target.shape.layers):
            _read_slot(reader, target, slot)


def cases_of(options: argparse.Namespace) -> list[Case]:
    """What is measured: the shape of Qwen3-0.6B at each size, and the demo model's longest session."""
    if options.quick:
        return [Case(demo_shape(), 700), Case(QWEN3_06B, 140)]
    sized = [Case(QWEN3_06B, size * _MIB // QWEN3_06B.token_bytes) for size in sorted(options.mib)]
    return [Case(demo_shape(), 7680), *sized]


def report(results: list[Result], out: Path) -> None:
    """JSON, plot, and a table for a person."""
    document = save("store", {"cases": [result.figures() for result in results]}, out)
    shares = [share["median"] for case in document["cases"] for share in case["share_of_plain_speed"].values()]
    title = f"Sleeps and reads run at {min(shares):.1f} to {max(shares):.1f} of the speed of plain system calls"
    shape, size = (1, len(document["cases"])), (10, 4.2)
    with panels(out / "store.png", document, title, shape, size, sharey=True, sharex=True) as grid:
        for axes, case in zip(grid, document["cases"], strict=True):
            _draw(axes, case)
    for result, figures in zip(results, document["cases"], strict=True):
        print(f"== {figures['shape']}, {figures['tokens']} tokens, {figures['state_bytes'] / _MIB:.0f} MiB")
        for ours, share in figures["share_of_plain_speed"].items():
            theirs = "plain_write" if ours == "sleep" else ours.replace("verified", "plain")
            speeds = figures["gb_per_second"]
            print(
                f"  {ours:18} {speeds[ours]['median']:6.2f} GB/s   plain {speeds[theirs]['median']:6.2f} GB/s   "
                f"share {share['median']:5.2f} ({share['lowest']:.2f} to {share['highest']:.2f})"
            )
        for name, parts in (("sleep", result.sleep_parts), ("read, warm, one thread", result.read_parts)):
            if parts is not None:
                print(f"  where the time of one {name} goes ({1000 * parts.whole:.1f} ms with the clocks)")
                print("\n".join(parts.lines()))
        if not result.cold:
            print("  the page cache could not be emptied: the cold figures are not cold")


def _draw(axes: Any, case: dict[str, Any]) -> None:
    """One size: the median of each operation, and from the lowest to the highest."""
    shares = case["share_of_plain_speed"]
    for height, share in enumerate(shares.values()):
        axes.plot([share["lowest"], share["highest"]], [height] * 2, "-", color=OURS, linewidth=1)
        axes.plot(share["median"], height, "o", color=OURS, markersize=4)
    axes.axvline(1.0, color=PEER, linewidth=0.8)
    axes.set_yticks(range(len(shares)), [_readable(name) for name in shares], fontsize=8)
    axes.set_title(f"{case['shape']}, {case['state_bytes'] / _MIB:.0f} MiB", fontsize=9)
    axes.set(xlabel="speed / plain system calls", xscale="log")
    axes.minorticks_off()
    axes.set_xticks([0.2, 0.5, 1, 2], ["0.2", "0.5", "1", "2"])


def _readable(name: str) -> str:
    """`verified_cold_2` as "read, cold cache, 2 threads"."""
    if "_" not in name:
        return name
    _, memory, threads = name.split("_")
    place = "cold cache" if memory == "cold" else f"{memory} memory"
    return f"read, {place}, {threads} thread{'' if threads == '1' else 's'}"


def main() -> None:
    """Measure and report."""
    parser = parser_for(__doc__, ROUNDS)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256, 1024], help="sizes in the shape of Qwen3-0.6B")
    parser.add_argument("--profile", action="store_true", help="profile one sleep and one read of each case instead")
    options = parser.parse_args()
    if options.profile:
        for case in cases_of(options):
            with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.folder) as place:
                bench = Bench(case, Path(place))
                bench.profile()
                bench.close()
        return
    report(measure(cases_of(options), rounds_of(options), options.folder), options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
