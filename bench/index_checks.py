"""What it takes to know that an index is what was written, in a store of 100,000 versions: page sums, and beside them
SQLite's own checks and a digest of the whole file.

    python bench/index_checks.py [--versions N] [--rounds N]

The index alone is made, with rows as `bench/scale.py` has them and no bundles. Then one bit is flipped, at many places
of the file in turn, and each check is asked whether it finds it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sqlite3
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from blake3 import blake3
from torpor.memvid import SessionUri
from torpor.memvid.disk.paths import open_root
from torpor.memvid.format.records import IndexRow
from torpor.memvid.index.index import Index
from torpor.memvid.index.page_sums import INDEX_FILE, PageSums
from torpor.memvid.index.rows import LIVE, IndexedBundle

VERSIONS = 5
_STORE = str(uuid.UUID(int=7))
_FLIPS = 200


def rows(count: int) -> Iterator[IndexedBundle]:
    """Sessions of five versions, each of which needs the one before."""
    source, last = random.Random(0), b""
    for number in range(count):
        uri = SessionUri(f"team-{number % 4}", f"agent-{number // VERSIONS:06d}")
        bundle_id, version = source.randbytes(32), number % VERSIONS + 1
        parent = last if version > 1 else None
        row = IndexRow(uri, version, bundle_id, parent, bytes(32), 256 * version, 2000, 512, number, "none", ("bench",))
        stamp = (0, number, 2000, number, number)
        refs = (parent,) if parent else ()
        yield IndexedBundle(bundle_id, LIVE, row, refs, (source.randbytes(32), source.randbytes(32)), stamp)
        last = bundle_id


def checks(root_fd: int, path: Path) -> dict[str, Callable[[], bool]]:
    """Each gives whether it believes the index."""

    def says(ask: Callable[[sqlite3.Connection], bool]) -> bool:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{path / INDEX_FILE}?mode=ro", uri=True)) as connection:
                return ask(connection)
        except (sqlite3.Error, ValueError, OverflowError):
            return False

    whole = blake3((path / INDEX_FILE).read_bytes()).digest()
    return {
        "page sums": lambda: PageSums.stored(root_fd, str(path)) is not None,
        "a digest of the file": lambda: blake3((path / INDEX_FILE).read_bytes()).digest() == whole,
        "quick_check": lambda: says(lambda one: one.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)),
        "integrity_check": lambda: says(lambda one: one.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)),
    }


def flips_found(path: Path, asked: dict[str, Callable[[], bool]], count: int) -> dict[str, int]:
    """How many of so many single flipped bits each check finds."""
    found = dict.fromkeys(asked, 0)
    source = random.Random(1)
    with (path / INDEX_FILE).open("r+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for _ in range(count):
            at, bit = source.randrange(100, size), 1 << source.randrange(8)
            byte = os.pread(file.fileno(), 1, at)[0]
            os.pwrite(file.fileno(), bytes([byte ^ bit]), at)
            for name, ask in asked.items():
                found[name] += not ask()
            os.pwrite(file.fileno(), bytes([byte]), at)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flips", type=int, default=_FLIPS, help="bits to flip in an index of 2,000 versions")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = make_index(Path(folder), wanted.versions)
        root_fd = open_root(str(path), "store.json")
        print(f"{wanted.versions} versions, {os.path.getsize(path / INDEX_FILE) / 2**20:.1f} MiB")
        for name, ask in checks(root_fd, path).items():
            seconds = []
            for _ in range(wanted.rounds):
                started = time.perf_counter()
                assert ask()
                seconds.append(time.perf_counter() - started)
            print(f"{name}:", _told(seconds))
        os.close(root_fd)
        print("a row dropped, and the sums of its pages with it:", _told(drops(path, 4 * wanted.rounds)))
    with tempfile.TemporaryDirectory() as folder:
        path = make_index(Path(folder), 2000)
        root_fd = open_root(str(path), "store.json")
        print(f"of {wanted.flips} flipped bits:", flips_found(path, checks(root_fd, path), wanted.flips))
        os.close(root_fd)


def drops(path: Path, count: int) -> list[float]:
    """Seconds for each of so many rows that are dropped and brought into the file, as every delete does."""
    root_fd = open_root(str(path), "store.json")
    index = Index.open(str(path), root_fd, _STORE)
    seconds = []
    for bundle_id in sorted(index.bundle_ids())[:count]:
        started = time.perf_counter()
        index.drop([bundle_id])
        seconds.append(time.perf_counter() - started)
    index.close()
    os.close(root_fd)
    return seconds


def _told(seconds: Sequence[float]) -> str:
    median, least, most = (1000 * one(seconds) for one in (statistics.median, min, max))
    return f"{median:.1f} ms ({least:.1f} to {most:.1f})"


def make_index(folder: Path, versions: int) -> Path:
    """A store's folder with an index of so many versions and no bundles."""
    path = folder / "store"
    path.mkdir(mode=0o700)
    (path / "bundles").mkdir(mode=0o700)
    root_fd = os.open(path, os.O_RDONLY)
    index = Index.create_in_memory(str(path), _STORE, rows(versions), root_fd=root_fd)
    index.return_to_file()
    index.close()
    os.close(root_fd)
    return path


if __name__ == "__main__":
    main()
