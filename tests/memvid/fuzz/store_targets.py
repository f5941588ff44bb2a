"""Targets that are a whole store: one with a hostile bundle in it, one with a hostile index.

The checks use the store as its users do. What was put to sleep is known, so that a wake is compared with the truth.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from blake3 import blake3
from torpor.memvid import IndexRow, SessionUri, Store, StoreError
from torpor.memvid.format.reader import BundleReader
from torpor.tests.memvid import store_making
from torpor.tests.memvid.fuzz import bundle_file, index_program
from torpor.tests.memvid.fuzz.target import MAX_SLOT_BYTES, SMALL, SOUND, Target, require, same_everywhere

INDEX_FILE: Final = "index.sqlite"
Version = tuple[SessionUri, int]


@dataclass(frozen=True)
class Truth:
    """What a version was when it was put to sleep."""

    bundle_id: bytes
    needs: frozenset[bytes]
    blocks: list[list[bytes]]


class Template:
    """A store with two sessions, three versions and a block shared by two of them, and what is in it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        agent, packed = store_making.URI, SessionUri("work", "packed")
        with same_everywhere(), Store.open(folder, writable=True) as store:
            first = store_making.sleep(store, 258, uri=agent, **SMALL)
            store_making.sleep(store, 260, uri=agent, before=first, **SMALL)
            store_making.sleep(store, 6, uri=packed, compressed=True, layers=2, heads=1, dim=2)
            store_making.sleep_compressed(store, packed)
            self.truths = {(row.uri, row.version): _truth(store, row.uri, row.version) for row in all_rows(store)}
        self.index = {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith("index.")}
        self.files = {path: path.read_bytes() for path in (folder / "bundles").glob("*/*.mvb")}
        self.ids = {bytes.fromhex(path.stem) for path in self.files}

    def put(self, name: bytes, data: bytes, ending: str = ".mvb") -> Path:
        """Add a bundle file, or replace one; until the next `restore`."""
        path = self.path / "bundles" / name.hex()[:2] / f"{name.hex()}{ending}"
        write(path, data)
        return path

    def restore(self, indexed: bool) -> None:
        """Put the store back as it was; without its index if it is not `indexed`."""
        kept = {self.path / "store.json", self.path / "lock", *self.files}
        for folder, _, names in os.walk(self.path, topdown=False):
            here = Path(folder)
            for path in (here / name for name in names):
                if path not in kept:
                    path.unlink()
            if here.parent.name == "bundles" and not any(here.iterdir()):
                here.rmdir()
        for path, data in self.files.items():
            if not path.exists() or path.read_bytes() != data:
                write(path, data)
        if indexed:
            for name, data in self.index.items():
                write(self.path / name, data)


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(0o700, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def all_rows(store: Store) -> list[IndexRow]:
    return [row for latest in store.iter_sessions() for row in store.versions(latest.uri)]


def _truth(store: Store, uri: SessionUri, version: int) -> Truth:
    with store.open_session(uri, version) as reader:
        needs = {entry.bundle_id for entry in reader.entries if entry.bundle_id} | {reader.bundle_id}
        return Truth(reader.bundle_id, frozenset(needs), store_making.contents(reader))


def read_checked(reader: BundleReader) -> list[list[bytes]] | None:
    """Every slot of every block, each against its digest and its block's id; None where that would be too much."""
    if reader.manifest.logical_bytes > MAX_SLOT_BYTES:
        return None
    blocks = []
    span = None
    for entry in reader.entries:
        header = reader.read_header(entry)
        require(blake3(header.encode()).digest() == entry.id, "a block has another id")
        require((header.start, header.parent) == (entry.start, span), "a block of another chain was accepted")
        require(header.identity_digest == reader.manifest.identity.digest, "a block of another identity was accepted")
        span = entry.id if header.kind == "span" else span
        slots = [bytes(reader.read_slot(entry, number)) for number in range(len(header.slots))]
        for (_, digest), slot in zip(header.slots, slots, strict=True):
            require(blake3(slot).digest() == digest, "a slot's bytes are not those of its digest")
        blocks.append(slots)
    reader.tokens()
    return blocks


def look_at(store: Store, truths: Mapping[Version, Truth], harmed: bytes | None) -> dict[Version, bytes | None]:
    """Wake every version: its bundle id, or None where it was refused. What is not harmed must be right.

    `harmed` is the bundle whose file was replaced under its own name, so that what needs it may be refused; None where
    it is the index that was changed, and anything may be refused.
    """
    seen: dict[Version, bytes | None] = {}
    for row in all_rows(store):
        truth = truths.get((row.uri, row.version))
        ours = truth is not None and truth.bundle_id == row.bundle_id
        try:
            with store.open_session(row.uri, row.version) as reader:
                blocks = read_checked(reader)
            seen[row.uri, row.version] = row.bundle_id
            require(
                not ours or blocks == (truth and truth.blocks), "a version woke with other content than it slept with"
            )
        except StoreError:
            spared = truth is not None and harmed is not None and harmed not in truth.needs
            require(not ours or not spared, "a version that nobody touched is refused")
            seen[row.uri, row.version] = None
    return seen


def agree_with_verify(store: Store, seen: Mapping[Version, bytes | None]) -> bool:
    """Whether verify finds nothing; it must find something if a wake was refused."""
    report = store.verify(deep=True)
    refused = any(bundle_id is None for bundle_id in seen.values())
    require(not (report.ok and refused), "verify finds nothing, but a version does not wake")
    store.statistics()
    return report.ok


class InStore(Target):
    """A target beside a store that is sound and known. Its input is a bundle file, unless it says otherwise."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._template = Template(folder / "store")

    def seeds(self) -> Iterable[bytes]:
        return list(self._template.files.values())

    def change(self, data: bytes, rng: Random) -> bytes:
        return bundle_file.change(data, rng)


class StoreTarget(InStore):
    """A bundle file under the name that it gives itself, in a store where it may take another's place."""

    name = "store"

    def check(self, data: bytes) -> str:
        chance = blake3(data).digest()[0]
        name = bundle_file.bundle_id(data)
        self._template.restore(indexed=bool(chance & 1))
        path = self._template.put(name, data)
        listings = []
        sound = True
        for writable in (False, True) if chance & 2 else (False,):
            with Store.open(self._template.path, writable=writable) as store:
                seen = look_at(store, self._template.truths, name)
                sound = agree_with_verify(store, seen) and sound
                listings.append(seen)
        require(all(listing == listings[0] for listing in listings), "a reader sees other versions than a writer")
        require(path.read_bytes() == data, "a file was changed by looking at it")
        return SOUND if sound else "reported"


class IndexTarget(InStore):
    """A program that changes the index file of a sound store."""

    name = "index"
    max_bytes = 512

    def seeds(self) -> Iterable[bytes]:
        yield b""
        yield bytes([index_program.RESUM])
        yield from (bytes([step, *range(1, 17)]) for step in range(index_program.STEPS))

    def change(self, data: bytes, rng: Random) -> bytes:
        return index_program.change(data, rng)

    def check(self, data: bytes) -> str:
        listings = [self._listing(data, writable) for writable in (False, True)]
        if None in listings:
            return "refused"
        return SOUND if all(listing == self._expected() for listing in listings) else "other listing"

    def _expected(self) -> dict[Version, bytes | None]:
        return {version: truth.bundle_id for version, truth in self._template.truths.items()}

    def _listing(self, data: bytes, writable: bool) -> dict[Version, bytes | None] | None:
        template = self._template
        template.restore(indexed=False)
        sums = next((name for name in sorted(template.index) if name != INDEX_FILE), None)
        image, wal, changed = index_program.apply(template.index[INDEX_FILE], template.index.get(sums or "", b""), data)
        write(template.path / INDEX_FILE, image)
        if wal:
            write(template.path / f"{INDEX_FILE}-wal", wal)
        if sums is not None:
            write(template.path / sums, changed)
        try:
            with Store.open(template.path, writable=writable) as store:
                seen = look_at(store, template.truths, None)
                agree_with_verify(store, seen)
        except StoreError:
            return None
        for (uri, version), bundle_id in seen.items():
            truth = template.truths.get((uri, version))
            require(
                bundle_id is None or (truth is not None and truth.bundle_id == bundle_id), "a version woke that is none"
            )
        if not index_program.resums(data):
            require_not_older(template.truths, seen)
        require(all(path.read_bytes() == kept for path, kept in template.files.items()), "a bundle was changed")
        return seen


def require_not_older(truths: Mapping[Version, Truth], seen: Mapping[Version, bytes | None]) -> None:
    """A session's latest version must be the latest there is: an older one woken in its place is a silent loss."""
    for uri in {uri for uri, _ in truths}:
        latest = max(version for name, version in truths if name == uri)
        listed = max((version for name, version in seen if name == uri), default=0)
        require(listed >= latest, "an older version stands for a session, or none")


class MaintenanceTarget(InStore):
    """2 bytes that say what is done, then a bundle file that lies in the store while it is done, live or retired.

    Whatever the file is: what woke before an operation wakes after it with the same content, and a dry run changes
    nothing.
    """

    name = "maintenance"

    def seeds(self) -> Iterable[bytes]:
        for number, data in enumerate(self._template.files.values()):
            yield bytes([number, 0]) + data
            yield bytes([number, 1]) + data

    def change(self, data: bytes, rng: Random) -> bytes:
        head = data[:2].ljust(2, b"\x00") if rng.random() < 0.7 else rng.randbytes(2)
        return head + bundle_file.change(data[2:], rng)

    def check(self, data: bytes) -> str:
        steps, flags, file = data[:1] or b"\x00", data[1:2] or b"\x00", data[2:]
        name = bundle_file.bundle_id(file)
        template = self._template
        template.restore(indexed=bool(flags[0] & 2))
        template.put(name, file, ".mvr" if flags[0] & 1 and name not in template.ids else ".mvb")
        refused = False
        with Store.open(template.path, writable=True) as store:
            for step in (steps[0] % 4, steps[0] // 4 % 4):
                refused |= self._do(store, OPERATIONS[step], name)
        with Store.open(template.path, writable=True) as store:
            look_at(store, template.truths, name)
        return "refused" if refused else SOUND

    def _do(self, store: Store, operation: str, name: bytes) -> bool:
        """Run one operation; whether it was refused."""
        before = contents_of(store, self._template.truths, name)
        try:
            files = snapshot(self._template.path)
            getattr(store, operation)(dry_run=True)
            require(snapshot(self._template.path) == files, f"a dry run of {operation} changed a file")
            getattr(store, operation)()
            refused = False
        except StoreError:
            refused = True
        after = contents_of(store, self._template.truths, name)
        for version, blocks in before.items():
            require(after.get(version) == blocks, f"{operation} lost or changed a version that could be woken")
        return refused


OPERATIONS: Final = ("gc", "empty_quarantine", "compact", "repair", "rebuild_index")


def contents_of(
    store: Store, truths: Mapping[Version, Truth], harmed: bytes
) -> dict[Version, list[list[bytes]] | None]:
    """What every version that can be woken holds."""
    found = {}
    for (uri, version), bundle_id in look_at(store, truths, harmed).items():
        if bundle_id is not None:
            with store.open_session(uri, version) as reader:
                found[uri, version] = read_checked(reader)
    return found


def snapshot(folder: Path) -> dict[Path, bytes]:
    """Every file of a store but the index, which may be brought up to date at any time."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("index.sqlite"))
    return {path: path.read_bytes() for path in files}


TARGETS: Final[Sequence[type[Target]]] = (StoreTarget, IndexTarget, MaintenanceTarget)
