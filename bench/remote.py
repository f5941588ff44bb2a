"""Versions through an object store: a fetch beside plain requests for as many bytes, an upload, and what a day costs.

- A fetch: a version of random bytes comes into a fresh store, proven, flushed and read back; beside it plain ranged
  GETs of as many bytes of the same object, eight at once, which keep nothing. Round by round, the order turned round. A
  wake is the same, and then every block into memory, as a daemon reads it: on two threads, into fresh large pages.
- An upload of the whole version, and of a delta of 200 tokens behind it.
- The upload and the fetch again, sealed.
- Requests and bytes, counted on the wire, of each thing that a daemon does with a remote, and of a day of one coding
  agent: what they cost at the public list prices.

Places: a folder, which is read with `pread`, and a server of S3 on loopback in a process of its own (`make
.venv-remote/.installed`). ministack keeps objects in memory. moto reads an object whole for each range of it, so it is
slow with large ones. Neither is an object store in a cloud: what counts here is what Torpor adds to the line. The shape
is four of the 28 layers of Qwen3-0.6B.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import plain
from figures import OURS, PEER, parser_for, plotted, rounds_of, save
from machine import spread
from synthetic import IDENTITY, QWEN3_06B, QWEN3_THIN, CacheMemory, fresh_memory, random_ledger, random_memory
from torpor.memvid.disk.clock import running_s
from torpor.memvid.disk.daily_budget import S3_STANDARD
from torpor.memvid.format.blocks import BLOCK_TOKENS, TOKEN_BYTES
from torpor.memvid.format.journal import JournalRecord
from torpor.memvid.format.records import Receipt
from torpor.memvid.limits import MAX_SENT_PACK_BYTES, MIB
from torpor.memvid.remote import cloud_objects
from torpor.memvid.remote.fetching import fetch
from torpor.memvid.remote.leases import LEASE_S
from torpor.memvid.remote.objects import Objects
from torpor.memvid.remote.opening import open_objects
from torpor.memvid.remote.sealed_objects import KEY_BYTES, SealedObjects
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.remote.uploading import send
from torpor.memvid.remote.versions import RemoteVersions
from torpor.memvid.store import Store, VersionDraft
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.reader import BundleReader
from torpor.snapshot.pages import LargePages
from torpor.tests.memvid.remote.bucket_server import BucketServer
from torpor.tests.memvid.remote.fault_proxy import FaultProxy
from torpor.tests.memvid.remote.s3_servers import BUCKET, s3_server

URI = SessionUri("bench", "remote")
SIZES_MIB, QUICK_SIZES_MIB = (16, 256), (8,)
STEP = 200
ROUNDS = 5
PIECE_BYTES, AT_ONCE = 8 * MIB, 8
"""Of the plain requests: as Torpor makes them, too."""
FILL_THREADS = 2
"""Of a wake: as many as a daemon has on two cores."""

PRICES = {
    "S3 Standard": {**asdict(S3_STANDARD), "out": 0.09},
    "R2 Standard": {"write": 4.50, "read": 0.36, "stored": 0.015, "out": 0.00},
}
"""Dollars: of a million requests that write (PUT, POST, LIST) or read (GET, HEAD), of a GB stored for a month, and of a
GB that leaves the cloud. Removals are free, and free allowances are left out. S3 in us-east-1:
aws.amazon.com/s3/pricing as others quoted it in 2026. R2: developers.cloudflare.com/r2/pricing, by its source in
cloudflare/cloudflare-docs."""

TURNS, TURN_TOKENS = 43, 3_302
"""Of a coding agent's session: the medians of vLLM's RFC 57103, 142 k tokens in 43 turns."""

DAY = {"start": 1, "take": 1, "turn": TURNS, "version": TURNS, "awake hour": 1, "release": 1, "wake": 1}
"""A day of such an agent: its turns, a version written behind each of them, an hour awake, the end of the last sleep,
and a wake on another machine."""


@dataclass
class Sleeper:
    """A store with a session of random bytes."""

    store: Store
    memory: CacheMemory = field(default_factory=lambda: random_memory(QWEN3_THIN))
    ledger: bytes = b""
    last: Receipt | None = None

    def go_on(self, tokens: int) -> Receipt:
        """Put the session to sleep with so many tokens more."""
        self.ledger += random_ledger(QWEN3_THIN, tokens, len(self.ledger))
        before = self.last.entries if self.last else ()
        reused = tuple(entry for entry in before if entry.kind == "span" and entry.token_count == BLOCK_TOKENS)
        self.last = self.store.write_bundle(
            VersionDraft(
                uri=URI,
                identity=IDENTITY,
                parent=self.last.bundle_id if self.last else None,
                reused=reused,
                blocks=self.memory.drafts(self.ledger, first=len(reused) * BLOCK_TOKENS),
                session={},
                block_tokens=len(self.ledger) // TOKEN_BYTES,
            )
        )
        return self.last


# --- speed


@contextlib.contextmanager
def place_of(name: str, folder: Path) -> Iterator[Callable[[str], Objects]]:
    """Opens the objects under a prefix, in a folder or at a server."""
    if name == "folder":

        def open_folder(prefix: str) -> Objects:
            path = folder / "share" / prefix
            path.mkdir(parents=True)
            return open_objects(f"file://{path}")

        yield open_folder
        return
    with s3_server(name) as port:
        yield opener_at(port)


def opener_at(port: int) -> Callable[[str], Objects]:
    """Opens the objects under a prefix of the bucket at a port of loopback."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_SESSION_TOKEN"):
        os.environ.pop(name, None)
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
        AWS_ACCESS_KEY_ID="AKIATORPORBENCH",
        AWS_SECRET_ACCESS_KEY="no-secret-at-all",
        AWS_REGION="us-east-1",
    )
    return lambda prefix: open_objects(f"s3://{BUCKET}/{prefix}")


class Line:
    """One size at one place: seconds by name, round by round."""

    def __init__(self, place: str, mib: int, folder: Path, opened: Callable[[str], Objects]) -> None:
        self.place, self.mib = place, mib
        self.seconds: dict[str, list[float]] = {}
        self.sent_bytes: dict[str, int] = {}
        self._folder, self._opened = folder, opened
        self._tokens = mib * MIB // QWEN3_THIN.token_bytes

    def run(self, rounds: int) -> None:
        """A round that is not counted, then the rounds."""
        with Store.open(self._folder / "here", writable=True) as store:
            sleeper = Sleeper(store)
            whole, delta = sleeper.go_on(self._tokens), sleeper.go_on(STEP)
            for number in range(rounds + 1):
                objects = self._opened(f"{self.mib}/{number}")
                sealed = SealedObjects(self._opened(f"{self.mib}/{number}-sealed"), os.urandom(KEY_BYTES))
                self._send(store, objects, "upload", whole)
                self._send(store, sealed, "upload sealed", whole)
                steps = [
                    partial(self._fetch, objects, whole),
                    partial(self._fetch, sealed, whole, " sealed"),
                    partial(self._plain, objects),
                ]
                for step in steps if number % 2 else reversed(steps):
                    plain.settle()
                    step()
                self._send(store, objects, "upload of a delta", delta)
                for each in (objects, sealed):
                    for entry in list(each.entries("packs/")):
                        each.remove(entry.key)
                    each.close()
                if not number:
                    self.seconds.clear()

    def _note(self, name: str, started: float) -> None:
        self.seconds.setdefault(name, []).append(time.perf_counter() - started)

    def _send(self, store: Store, objects: Objects, name: str, receipt: Receipt) -> None:
        plain.settle()
        started = time.perf_counter()
        sent = send(store._core, RemoteVersions(objects), receipt.bundle_id)
        self._note(name, started)
        self.sent_bytes[name] = sent.bytes_sent

    def _fetch(self, objects: Objects, receipt: Receipt, how: str = "") -> None:
        memory = fresh_memory(QWEN3_THIN, self._tokens)
        with (
            tempfile.TemporaryDirectory(prefix="there-", dir=self._folder) as name,
            Store.open(Path(name) / "store", writable=True) as store,
            ThreadPoolExecutor(FILL_THREADS) as threads,
        ):
            remote, started = RemoteVersions(objects), time.perf_counter()
            fetch(store._core, remote, remote.require_manifest(receipt.bundle_id), receipt.bundle_id)
            self._note(f"fetch{how}", started)
            with store.open_session(URI) as reader:
                list(threads.map(partial(_fill, reader, memory, LargePages()), range(QWEN3_THIN.layers)))
            self._note(f"wake{how}", started)

    def _plain(self, objects: Objects) -> None:
        get = self._getter(objects)
        spans = [
            (pack.key, at, min(PIECE_BYTES, pack.size_bytes - at))
            for pack in objects.entries("packs/")
            for at in range(0, pack.size_bytes, PIECE_BYTES)
        ]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            started = time.perf_counter()
            came = sum(threads.map(lambda span: get(*span), spans))
            self._note("plain", started)
        assert came == sum(size for _, _, size in spans)

    @staticmethod
    def _getter(objects: Objects) -> Callable[[str, int, int], int]:
        """Gets a part of an object, and gives how many bytes came."""
        if isinstance(objects, cloud_objects.CloudObjects):
            import obstore

            client = objects._large
            return lambda key, first, size: len(obstore.get_range(client, key, start=first, length=size))
        folder = Path(objects.url.removeprefix("file://"))

        def read(key: str, first: int, size: int) -> int:
            fd = os.open(folder / key, os.O_RDONLY)
            try:
                return len(os.pread(fd, size, first))
            finally:
                os.close(fd)

        return read

    def figures(self) -> dict[str, Any]:
        """Medians with spread, and the speeds beside plain requests."""
        of = {name: spread(values) for name, values in self.seconds.items()}
        plain_s = of["plain"]["median"]
        return {
            "place": self.place,
            "state_bytes": self.mib * MIB,
            "seconds": of,
            "sent_bytes": self.sent_bytes,
            "speed_over_plain": {
                name: {"of_medians": plain_s / of[name]["median"]}
                | spread([p / o for o, p in zip(self.seconds[name], self.seconds["plain"], strict=True)])
                for name in ("fetch", "wake", "fetch sealed", "wake sealed")
            },
            "sealed_over_not": {
                name: spread([s / p for s, p in zip(self.seconds[f"{name} sealed"], self.seconds[name], strict=True)])
                for name in ("upload", "fetch", "wake")
            },
        }


def _fill(reader: BundleReader, memory: CacheMemory, large: LargePages, layer: int) -> None:
    """One layer of the memory, as a daemon fills it: keys and values, block after block."""
    slots = (2 * layer, 2 * layer + 1)
    for slot in slots:
        large.back(np.frombuffer(memory.whole(slot), np.uint8))
    for entry in reader.entries[:-1]:
        reader.read_slots_into(entry, [(slot, memory.runs(slot, entry.start, entry.token_count)) for slot in slots])


# --- requests, and what they cost


class Wire(FaultProxy):
    """Counts what goes over it."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.came_bytes = 0

    def another(self, asked: Any, answer: Any, fault: Any) -> Any:
        """The answer as it is."""
        self.came_bytes += len(answer.body) if asked.method == "GET" else 0
        return answer

    @contextlib.contextmanager
    def counted(self, into: dict[str, dict[str, int]], name: str) -> Iterator[None]:
        """What goes over it meanwhile, by name."""
        first, came = len(self.asked), self.came_bytes
        yield
        asked = self.asked[first:]
        kinds = [_kind_of(each.method, each.target) for each in asked]
        into[name] = {
            **{f"{kind}s": kinds.count(kind) for kind in ("write", "read", "remove")},
            "sent_bytes": sum(each.size_bytes for each in asked),
            "came_bytes": self.came_bytes - came,
        }


def _kind_of(method: str, target: str) -> str:
    if method == "DELETE":
        return "remove"
    return "write" if method in ("PUT", "POST") or "list-type" in target else "read"


def count(folder: Path, turn_tokens: int) -> dict[str, dict[str, int]]:
    """Requests and bytes of each thing that a daemon does with a remote. A version has the tokens of a turn, behind
    those of two."""
    counts: dict[str, dict[str, int]] = {}
    with (
        BucketServer() as server,
        Wire(server.port) as wire,
        Store.open(folder / "one", writable=True) as store,
        Store.open(folder / "other", writable=True) as other,
    ):
        opened = opener_at(wire.port)
        objects = opened("counted")
        sessions = RemoteSessions(store._core, objects, "one", running_s)
        with wire.counted(counts, "first start"):
            sessions.require_proven()
        with wire.counted(counts, "take"):
            lease = sessions.take(URI)
        sleeper = Sleeper(store)
        receipt = sleeper.go_on(2 * turn_tokens)
        sessions.push(lease)
        for _ in range(2):  # the second one also removes the first
            with wire.counted(counts, "turn"):
                sessions.send_turns(lease, _record(receipt, sleeper.ledger, turn_tokens))
        with wire.counted(counts, "renewal"):
            lease.renew()
        sleeper.go_on(turn_tokens)
        with wire.counted(counts, "version"):
            sessions.push(lease)
        with wire.counted(counts, "release"):
            lease.release(asleep=True)
        there = RemoteSessions(other._core, opened("counted"), "other", running_s)
        with wire.counted(counts, "start"):
            there.require_proven()
        with wire.counted(counts, "wake"):
            there.pull(there.take(URI).head)
        for each in (sessions, there):
            each.close()
    counts["sleep"] = {name: value + counts["release"][name] for name, value in counts["version"].items()}
    renewals = 3600 * 3 // LEASE_S
    counts["awake hour"] = {name: renewals * value for name, value in counts["renewal"].items()}
    return counts


def _record(receipt: Receipt, ledger: bytes, tokens: int) -> JournalRecord:
    held = len(ledger) // TOKEN_BYTES // BLOCK_TOKENS * BLOCK_TOKENS
    unread = random_ledger(QWEN3_THIN, tokens, 1)
    return JournalRecord(URI, {"unread": unread}, (receipt.version, receipt.bundle_id), receipt.bundle_id, held, None)


def day_of(counts: dict[str, dict[str, int]], turn_tokens: int) -> dict[str, Any]:
    """Requests, bytes and dollars of a day of one agent, whose state is as large as Qwen3-0.6B's. A large object goes
    and comes in parts: one request each."""
    day = {name: sum(counts[what][name] * times for what, times in DAY.items()) for name in counts["turn"]}
    state = TURNS * TURN_TOKENS * QWEN3_06B.token_bytes
    for kind, name, part_bytes, what in (
        ("writes", "sent_bytes", cloud_objects._PART_BYTES, "version"),
        ("reads", "came_bytes", cloud_objects._PIECE_BYTES, "wake"),
    ):
        counted = DAY[what] * counts[what][name]
        day[kind] += state // part_bytes - counted // part_bytes
        day[kind] += 2 * (state - counted) // MAX_SENT_PACK_BYTES  # to begin and end a pack; to look at it twice
        day[name] += state - counted
    return {"counted_turn_tokens": turn_tokens, **day, "state_bytes": state, "dollars": _dollars(day, state)}


def dollars_of_requests(counted: dict[str, int]) -> dict[str, float]:
    """Of what was counted, in each cloud."""
    return {
        cloud: (counted["writes"] * price["write"] + counted["reads"] * price["read"]) / 1e6
        for cloud, price in PRICES.items()
    }


def _dollars(day: dict[str, int], state_bytes: int) -> dict[str, dict[str, float]]:
    requests = dollars_of_requests(day)
    return {
        cloud: {
            "requests": requests[cloud],
            "a month of the state": state_bytes / 1e9 * price["stored"],
            "one wake outside the cloud": day["came_bytes"] / 1e9 * price["out"],
        }
        for cloud, price in PRICES.items()
    }


# --- report


def report(lines: list[Line], counts: dict[str, dict[str, int]], turn_tokens: int, out: Path) -> None:
    """The figures as JSON and as a plot, and tables for a person."""
    figures = {
        "lines": [each.figures() for each in lines],
        "counts": counts,
        "dollars_of_requests": {what: dollars_of_requests(counted) for what, counted in counts.items()},
        "day": day_of(counts, turn_tokens),
    }
    document = save("remote", figures, out)
    rows = [
        (f"{each['place']}, {each['state_bytes'] // MIB} MiB, {what}", each["speed_over_plain"][what])
        for each in document["lines"]
        for what in ("fetch", "wake")
    ]
    title = "A fetch, which proves and flushes, beside plain requests for as many bytes"
    with plotted(out / "remote.png", document, title) as axes:
        for height, (_, ratio) in enumerate(rows):
            axes.plot([ratio["lowest"], ratio["highest"]], [-height] * 2, "-", color=OURS, linewidth=1)
            axes.plot(ratio["of_medians"], -height, "o", color=OURS, markersize=4)
        axes.axvline(1.0, color=PEER, linewidth=0.8)
        axes.set_yticks([-height for height in range(len(rows))], [name for name, _ in rows], fontsize=7)
        axes.set(xlabel="plain requests' time / Torpor's time")
        axes.set_xlim(left=0)
    for each in document["lines"]:
        print(f"== {each['place']}, {each['state_bytes'] // MIB} MiB")
        for name, seconds in each["seconds"].items():
            sent = f"   {each['sent_bytes'][name]:,} bytes" if name in each["sent_bytes"] else ""
            span = f"({1e3 * seconds['lowest']:.0f} to {1e3 * seconds['highest']:.0f})"
            print(f"  {name:18} {1e3 * seconds['median']:8.0f} ms {span}{sent}")
        for name, ratio in each["speed_over_plain"].items():
            print(f"  {name} over plain {ratio['of_medians']:.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f})")
        for name, ratio in each["sealed_over_not"].items():
            took = f"{ratio['median']:.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f})"
            print(f"  {name} sealed took {took} of the time of {name}")
    print(f"{'':12}" + "".join(f"{name:>15}" for name in counts["turn"]))
    for what, counted in counts.items():
        dollars = ", ".join(f"{cloud} ${value:.7f}" for cloud, value in dollars_of_requests(counted).items())
        print(f"{what:12}" + "".join(f"{value:15,}" for value in counted.values()) + f"   {dollars}")
    day = document["day"]
    print(f"{'a day':12}" + "".join(f"{day[name]:15,}" for name in counts["turn"]))
    for cloud, dollars in day["dollars"].items():
        print(f"  {cloud}: " + ", ".join(f"{what} ${value:.4f}" for what, value in dollars.items()))


def measure(places: list[str], sizes: tuple[int, ...], rounds: int, folder: Path | None) -> Iterator[Line]:
    """Each size at each place, one after the other."""
    for name in places:
        for mib in sizes:
            with (
                tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=folder) as at,
                place_of(name, Path(at)) as opened,
            ):
                line = Line(name, mib, Path(at), opened)
                line.run(rounds)
                yield line


def main() -> int:
    """Measure, write, and print."""
    parser = parser_for(__doc__, ROUNDS)
    parser.add_argument(
        "--places", nargs="+", choices=["folder", "own", "moto", "ministack"], help="folder and ministack"
    )
    options = parser.parse_args()
    places = options.places or ["folder", "own" if options.quick else "ministack"]
    turn_tokens = BLOCK_TOKENS if options.quick else TURN_TOKENS
    sizes = QUICK_SIZES_MIB if options.quick else SIZES_MIB
    lines = list(measure(places, sizes, rounds_of(options), options.folder))
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.folder) as at:
        counts = count(Path(at), turn_tokens)
    report(lines, counts, turn_tokens, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
