"""A store of 100,000 versions: what it takes to open it, to look things up in it, and to make its index anew.

First the store is made: 20,000 sessions of five versions, each a real bundle that goes on from the one before and
refers to it, through `write_bundle`. Only for this the flushes to the disk are left out (`os.fsync` does nothing),
because it would take hours; everything that is measured flushes as it always does.

Then each thing is done a few times, interleaved, each time in a fresh process with a clock inside it, so that the
highest memory use is of that thing alone. The page cache is warm: all files were written just before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from figures import OURS, parser_for, plotted, rounds_of, save
from machine import spread
from synthetic import IDENTITY, Shape, random_memory
from torpor.memvid.format.blocks import BLOCK_TOKENS, TOKEN_BYTES, BlockEntry
from torpor.memvid.format.records import Receipt
from torpor.memvid.store import Store, VersionDraft
from torpor.memvid.uri import SessionUri

SHAPE = Shape("one layer of two bytes a token", layers=1, heads=1, dim=1, dtype="uint8", vocabulary=1)
VERSIONS = 5
NAMESPACES = 4
ROUNDS = 3
_LOOKUPS = 200
_MIB = 2**20


def session_uri(number: int) -> SessionUri:
    """The sessions' names; each is in one of a few namespaces."""
    return SessionUri(f"team-{number % NAMESPACES}", f"agent-{number:06d}")


# --- making the store


def make_store(path: Path, sessions: int, versions: int = VERSIONS) -> float:
    """Make the store; seconds that it took."""
    started = time.perf_counter()
    with _without_flushes(), Store.open(path, writable=True) as store:
        memory, source = random_memory(SHAPE), random.Random(0)
        for number in range(sessions):
            ledger, last = b"", None
            for _ in range(versions):
                ledger += source.randbytes(BLOCK_TOKENS * TOKEN_BYTES)
                last = _write(store, session_uri(number), ledger, memory.drafts, last)
            if sys.stderr.isatty() and number % 500 == 0:
                print(f"\rmaking the store: {number} of {sessions} sessions", end="", file=sys.stderr)
    os.sync()
    return time.perf_counter() - started


def _write(store: Store, uri: SessionUri, ledger: bytes, drafts: Callable[..., Any], last: Receipt | None) -> Receipt:
    entries: tuple[BlockEntry, ...] = last.entries if last else ()
    reused = tuple(entry for entry in entries if entry.kind == "span")
    return store.write_bundle(
        VersionDraft(
            uri=uri,
            identity=IDENTITY,
            parent=last.bundle_id if last else None,
            reused=reused,
            blocks=drafts(ledger, first=len(reused) * BLOCK_TOKENS),
            session={"model": "none", "labels": ["bench"]},
            block_tokens=len(ledger) // TOKEN_BYTES,
        )
    )


@contextlib.contextmanager
def _without_flushes() -> Iterator[None]:
    flush = os.fsync
    os.fsync = lambda fd: None
    try:
        yield
    finally:
        os.fsync = flush


# --- what is measured, each in a process of its own


def open_to_write(path: Path, sessions: int) -> dict[str, float]:
    """A sound index, writable: until the store can be used."""
    return {"open": _timed_open(path, writable=True)}


def open_to_read(path: Path, sessions: int) -> dict[str, float]:
    """A sound index, read-only."""
    return {"open": _timed_open(path, writable=False)}


def make_index_anew(path: Path, sessions: int) -> dict[str, float]:
    """The copy of the index is gone, and is made again from all manifests and packs when the store is opened."""
    (path / "index.sqlite").unlink()
    started = time.perf_counter()
    with Store.open(path, writable=True) as store:
        seconds = time.perf_counter() - started
        assert store.opening.index_rebuilt is not None
        assert sum(1 for _ in store.iter_sessions()) == sessions
    return {"open": seconds}


def look_up(path: Path, sessions: int) -> dict[str, float]:
    """Listing, and looking up one of them: by its URI, by the name that a person types, all its versions."""
    source = random.Random(1)
    uris = [session_uri(source.randrange(sessions)) for _ in range(_LOOKUPS)]
    with Store.open(path, writable=True) as store:
        found = {"list all sessions": _timed(lambda: len(list(store.iter_sessions())) == sessions)}
        found["find one by its URI"] = _each(lambda uri: store.find_session(uri) is not None, uris)
        found["find one by its name"] = _each(lambda uri: store.resolve(f"{uri.namespace}/{uri.name}") == uri, uris)
        found["its versions"] = _each(lambda uri: len(store.versions(uri)) == VERSIONS, uris)
        found["open one to be woken"] = _each(lambda uri: _opens(store, uri), uris)
    return found


def write_and_delete(path: Path, sessions: int) -> dict[str, float]:
    """A sleep of a new session, its next version, and its delete: in the large store as in a small one."""
    memory, uri = random_memory(SHAPE), SessionUri("bench", "visitor")
    ledgers = [os.urandom(BLOCK_TOKENS * TOKEN_BYTES)]
    ledgers.append(ledgers[0] + os.urandom(BLOCK_TOKENS * TOKEN_BYTES))
    with Store.open(path, writable=True) as store:
        started = time.perf_counter()
        first = _write(store, uri, ledgers[0], memory.drafts, None)
        first_done = time.perf_counter()
        _write(store, uri, ledgers[1], memory.drafts, first)
        second_done = time.perf_counter()
        store.delete_session(uri)
        deleted = time.perf_counter()
    return {
        "sleep, first version": first_done - started,
        "sleep, next version": second_done - first_done,
        "delete both": deleted - second_done,
    }


OPERATIONS = {
    "open to write": open_to_write,
    "open to read": open_to_read,
    "look up": look_up,
    "write and delete": write_and_delete,
    "make the index anew": make_index_anew,
}


def _timed_open(path: Path, *, writable: bool) -> float:
    started = time.perf_counter()
    with Store.open(path, writable=writable) as store:
        seconds = time.perf_counter() - started
        assert store.opening.index_rebuilt is None
    return seconds


def _opens(store: Store, uri: SessionUri) -> bool:
    with store.open_session(uri) as reader:
        return reader.manifest.uri == uri


def _timed(work: Callable[[], bool]) -> float:
    started = time.perf_counter()
    assert work()
    return time.perf_counter() - started


def _each(work: Callable[[SessionUri], bool], uris: list[SessionUri]) -> float:
    """Seconds of one of them."""
    return _timed(lambda: all(work(uri) for uri in uris)) / len(uris)


def run_operation(name: str, path: Path, sessions: int) -> dict[str, Any]:
    """In the child: do it, and say how long it took and how much memory there was at most."""
    before = _peak_bytes()
    seconds = OPERATIONS[name](path, sessions)
    return {"seconds": seconds, "peak_bytes": _peak_bytes(), "peak_bytes_before": before}


def _peak_bytes() -> int:
    """Linux carries ru_maxrss over from the parent; VmHWM is of this program alone."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


# --- rounds and report


def measure(path: Path, sessions: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Every operation, round by round."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in OPERATIONS}
    for _ in range(rounds):
        for name, found in results.items():
            os.sync()
            command = [sys.executable, __file__, "--operation", name, "--store", str(path), "--sessions", str(sessions)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found.append(json.loads(done.stdout))
    return results


def figures_of(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians with spread, by operation and by what was timed in it."""
    return {
        name: {
            "seconds": {what: spread([each["seconds"][what] for each in found]) for what in found[0]["seconds"]},
            "peak_bytes": spread([each["peak_bytes"] for each in found]),
            "peak_bytes_before": spread([each["peak_bytes_before"] for each in found]),
        }
        for name, found in results.items()
    }


def report(figures: dict[str, Any], out: Path) -> None:
    """JSON, plot, and a table for a person."""
    document = save("scale", figures, out)
    rows = [
        (name if what == "open" else what, seconds)
        for name, found in figures["operations"].items()
        for what, seconds in found["seconds"].items()
    ]
    title = f"a store of {figures['versions']:,} versions of {figures['sessions']:,} sessions"
    slowest = max(rows, key=lambda row: row[1]["median"])
    finding = f"Nothing takes longer than {_readable(slowest[1]['median'])} with {figures['versions']:,} versions"
    with plotted(out / "scale.png", document, finding) as axes:
        names = [name for name, _ in rows][::-1]
        middles = [seconds["median"] for _, seconds in rows][::-1]
        bars = axes.barh(names, middles, color=OURS)
        axes.bar_label(bars, [_readable(middle) for middle in middles], fontsize=8, padding=2)
        axes.set(xlabel=f"seconds, {title}", xscale="log")
        axes.margins(x=0.2)
    print(f"{title}: made in {figures['making_seconds']:.0f} s without flushes")
    for name, seconds in rows:
        low, high = _readable(seconds["lowest"]), _readable(seconds["highest"])
        print(f"  {name:26} {_readable(seconds['median']):>10}   ({low} to {high})")
    for name, found in figures["operations"].items():
        peak, before = found["peak_bytes"]["median"], found["peak_bytes_before"]["median"]
        print(f"  memory at most, {name:20} {peak / _MIB:7.0f} MiB, of them {before / _MIB:.0f} before it began")


def _readable(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def run(path: Path, sessions: int, options: argparse.Namespace) -> None:
    """Make the store unless it is there, measure, report."""
    making = make_store(path, sessions) if not path.exists() else 0.0
    results = measure(path, sessions, rounds_of(options))
    figures = {
        "sessions": sessions,
        "versions": sessions * VERSIONS,
        "making_seconds": making,
        "operations": figures_of(results),
    }
    report(figures, options.out)
    print(f"figures and plot in {options.out}")


def main() -> None:
    """Measure and report; or, as the child, do one thing."""
    parser = parser_for(__doc__, ROUNDS)
    parser.add_argument("--sessions", type=int, help=f"sessions of {VERSIONS} versions (20,000 unless told)")
    parser.add_argument("--store", type=Path, help="make the store here and keep it, or use the one that is here")
    parser.add_argument("--operation", choices=sorted(OPERATIONS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sessions = options.sessions or (40 if options.quick else 20_000)
    if options.operation:
        print(json.dumps(run_operation(options.operation, options.store, sessions)))
    elif options.store:
        run(options.store, sessions, options)
    else:
        with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.folder) as place:
            run(Path(place) / "store", sessions, options)


if __name__ == "__main__":
    main()
