"""Targets that are a whole store: with a hostile pack, manifest or index in it, and what is done to it.

The checks use the store as its users do. What was put to sleep is known, so that a wake is compared with the truth.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

from blake3 import blake3
from torpor.memvid.answers import VersionInfo
from torpor.memvid.errors import StoreError
from torpor.memvid.exchange.import_checks import ExportedFile, require_whole
from torpor.memvid.folder.folder import manifest_name
from torpor.memvid.index import index
from torpor.memvid.maintenance.repack_plan import RepackPolicy
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.reader import BundleReader
from torpor.tests.memvid import store_making
from torpor.tests.memvid.fuzz import index_program, pack_file
from torpor.tests.memvid.fuzz.target import MAX_SLOT_BYTES, SMALL, SOUND, Target, again, require, same_everywhere

INDEX_FILE: Final = "index.sqlite"
Version = tuple[SessionUri, int]


@dataclass(frozen=True)
class Truth:
    """What a version was when it was put to sleep; `needs` are the files that hold it, by the ids in their names."""

    bundle_id: str
    needs: frozenset[str]
    blocks: list[list[bytes]]


class Template:
    """A store with two sessions, four versions, blocks shared by two of them and a stripped one; what is in it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        agent, packed = store_making.URI, SessionUri("work", "packed")
        with same_everywhere(), Store.open(folder, writable=True) as store:
            first = store_making.sleep(store, 258, uri=agent, **SMALL)
            store_making.sleep(store, 260, uri=agent, before=first, **SMALL)
            store_making.sleep(store, 6, uri=packed, compressed=True, layers=2, heads=1, dim=2)
            store_making.sleep_compressed(store, packed)
            self.truths = {(row.uri, row.version): _truth(store, row.uri, row.version) for row in all_rows(store)}
            store_making.sleep(store, 9, uri=SessionUri("work", "bare"), **SMALL)
            store.strip(SessionUri("work", "bare"))
        self.index = (folder / INDEX_FILE).read_bytes()
        names = [*folder.rglob("*.mv?"), folder / "marks.json", *folder.glob("deletes.*")]
        self.files = {path: path.read_bytes() for path in names}
        self.packs = [data for path, data in self.files.items() if path.suffix == ".mvp"]
        self.manifests = [data for path, data in self.files.items() if path.suffix == ".mvm"]
        self.ids = {path.stem for path in self.files if path.suffix in (".mvp", ".mvm")}

    def put(self, name: str, data: bytes) -> Path:
        """Add a file, or replace one; until the next `restore`."""
        path = self.path / name
        write(path, data)
        return path

    def restore(self, indexed: bool) -> None:
        """Put the store back as it was; without its index if it is not `indexed`."""
        kept = {self.path / "store.json", self.path / "lock", *self.files}
        for folder, _, names in os.walk(self.path, topdown=False):
            for path in (Path(folder) / name for name in names):
                if path not in kept:
                    path.unlink()
        for path, data in self.files.items():
            if not path.exists() or path.read_bytes() != data:
                write(path, data)
        if indexed:
            write(self.path / INDEX_FILE, self.index)


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(0o700, exist_ok=True)
    store_making.put(path, data)


def all_rows(store: Store) -> list[VersionInfo]:
    return [row for latest in store.iter_sessions() for row in store.versions(latest.uri)]


def _truth(store: Store, uri: SessionUri, version: int) -> Truth:
    with store.open_session(uri, version) as reader:
        packs = {name for entry in reader.entries for name in store.index.packs_of(entry.id)}
        needs = {reader.bundle_id, *(Path(name).stem for name in packs)}
        return Truth(reader.bundle_id, frozenset(needs), store_making.contents(reader))  # type: ignore[arg-type]


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


def look_at(store: Store, truths: Mapping[Version, Truth], harmed: str | None) -> dict[str, bool]:
    """Wake every version, by bundle id: whether it woke. What is not harmed must be right.

    `harmed` is the id in the name of a file that was replaced, so that what needs it may be refused; None where it is
    the index that was changed, and anything may be refused.
    """
    seen: dict[str, bool] = {}
    known = {truth.bundle_id: truth for truth in truths.values()}
    for row in all_rows(store):
        truth = known.get(row.bundle_id)
        try:
            with store.open_session(row.uri, row.version) as reader:
                if reader.bundle_id != row.bundle_id:
                    continue  # two have one number
                blocks = read_checked(reader)
            seen[row.bundle_id] = True
            require(truth is None or blocks == truth.blocks, "a version woke with other content than it slept with")
        except StoreError:
            spared = truth is not None and harmed is not None and harmed not in truth.needs
            require(not spared, "a version that nobody touched is refused")
            seen[row.bundle_id] = False
    return seen


def agree_with_verify(store: Store, truths: Mapping[Version, Truth], seen: Mapping[str, bool]) -> bool:
    """Whether verify finds nothing; it must find something if a version of ours was refused."""
    report = store.verify(deep=True)
    refused = any(not seen.get(truth.bundle_id) for truth in truths.values())
    require(not (report.ok and refused), "verify finds nothing, but a version does not wake")
    return report.ok


def export_of(store: Store, uri: SessionUri, version: int, folder: Path) -> bytes | None:
    """An exported file that stands alone; None if the version is refused, and then nothing is left."""
    target = folder / "exported"
    before = set(folder.iterdir())
    try:
        store.export_session(uri, version, target)
    except StoreError:
        require(set(folder.iterdir()) == before, "a refused export left a file")
        return None
    try:
        again(lambda: require_alone(target))
        return target.read_bytes()
    finally:
        target.unlink()


def require_alone(path: Path) -> None:
    with contextlib.closing(ExportedFile(os.open(path, os.O_RDONLY), str(path))) as file:
        require_whole(file)
        listed = {entry.id for entry in file.manifest.blocks}
        require(listed == file.frames.frames.keys(), "an exported file lacks blocks, or has others")


class InStore(Target):
    """A target beside a store that is sound and known. Its input is a pack, unless it says otherwise."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._template = Template(folder / "store")

    def seeds(self) -> Iterable[bytes]:
        return list(self._template.packs)

    def change(self, data: bytes, rng: Random) -> bytes:
        return pack_file.change(data, rng)


class StoreTarget(InStore):
    """A pack under the name that it gives itself, in a store where it may take another's place. Each version is
    exported too."""

    name = "store"

    def check(self, data: bytes) -> str:
        return self._check(f"packs/{pack_file.pack_id(data).hex()}.mvp", data)

    def _check(self, name: str, data: bytes) -> str:
        chance = blake3(data).digest()[0]
        self._template.restore(indexed=bool(chance & 1))
        path = self._template.put(name, data)
        listings, sound = [], True
        for writable in (False, True) if chance & 2 else (False,):
            with Store.open(self._template.path, writable=writable) as store:
                seen = look_at(store, self._template.truths, Path(name).stem)
                sound = agree_with_verify(store, self._template.truths, seen) and sound
                for row in all_rows(store):
                    exported = export_of(store, row.uri, row.version, self.folder)
                    require(seen.get(row.bundle_id, True) or exported is None, "what does not wake was exported")
                listings.append(seen)
        require(all(listing == listings[0] for listing in listings), "a reader sees other versions than a writer")
        require(path.read_bytes() == data, "a file was changed by looking at it")
        return SOUND if sound else "reported"


class ManifestInStoreTarget(StoreTarget):
    """A manifest's file, of which the name fits the content; of one in four it is another's."""

    name = "version"

    def seeds(self) -> Iterable[bytes]:
        return list(self._template.manifests)

    def change(self, data: bytes, rng: Random) -> bytes:
        if rng.random() < 0.1:
            return pack_file.change_bytes(data, rng)
        return pack_file.manifest_file(pack_file.changed_manifest(data[64:], [], rng))

    def check(self, data: bytes) -> str:
        is_anothers = blake3(data).digest()[1] < 64
        name = min(self._template.ids) if is_anothers else blake3(data[64:]).hexdigest()
        return self._check(f"versions/{name}.mvm", data)


class IndexTarget(InStore):
    """A program that changes the pages of the index's file, which is sealed again: the store believes it. It may then
    refuse what is there; it may not give other bytes, nor let a removal lose any."""

    name = "index"
    max_bytes = 512

    def seeds(self) -> Iterable[bytes]:
        yield b""
        yield from (bytes([step, *range(1, 17)]) for step in range(index_program.STEPS))

    def change(self, data: bytes, rng: Random) -> bytes:
        return index_program.change(data, rng)

    def check(self, data: bytes) -> str:
        template = self._template
        template.restore(indexed=False)
        image = index_program.apply(template.index[:-40], data)
        with Store.open(template.path, writable=False) as store:
            sealed = image + index._tail_of(image, store._core.folder)
        write(template.path / INDEX_FILE, sealed)
        refused = False
        try:
            with Store.open(template.path, writable=True) as store:
                seen = look_at(store, template.truths, None)
                refused = not all(seen.get(truth.bundle_id) for truth in template.truths.values())
                store.repack(policy=RepackPolicy(max_packs=1, max_unneeded=0.0))
        except StoreError:
            refused = True
        (template.path / INDEX_FILE).unlink(missing_ok=True)
        with Store.open(template.path, writable=True) as store:
            seen = look_at(store, template.truths, b"")
            require(
                all(seen.get(one.bundle_id) for one in template.truths.values()), "a version is lost with the index"
            )
        return "refused" if refused else SOUND


class MaintenanceTarget(InStore):
    """2 bytes that say what is done, then a pack that lies in the store while it is done.

    Whatever the file is: what woke before an operation wakes after it with the same content, and a dry run changes
    nothing. A manifest may be away meanwhile, of which the index tells, while the version goes that it goes on from:
    what it needs is there once it is back.
    """

    name = "maintenance"

    def seeds(self) -> Iterable[bytes]:
        for number, data in enumerate(self._template.packs):
            yield bytes([number, 0]) + data
            yield bytes([number, 1]) + data

    def change(self, data: bytes, rng: Random) -> bytes:
        head = data[:2].ljust(2, b"\x00") if rng.random() < 0.7 else rng.randbytes(2)
        return head + pack_file.change(data[2:], rng)

    def check(self, data: bytes) -> str:
        steps, flags, file = data[:1] or b"\x00", data[1:2] or b"\x00", data[2:]
        name = pack_file.pack_id(file).hex()
        template = self._template
        template.restore(indexed=bool(flags[0] & 2))
        template.put(f"packs/{name}.mvp", file)
        away = None
        if flags[0] & 6 == 6:
            away = template.path / manifest_name(template.truths[store_making.URI, 2].bundle_id)
            away.unlink()
        refused = False
        with Store.open(template.path, writable=True) as store:
            for step in (steps[0], steps[0] // 4):
                refused |= self._do(store, OPERATIONS[step % len(OPERATIONS)], None if away else name)
            if away:
                store.delete_version(store_making.URI, 1)
        if away:
            write(away, template.files[away])
        with Store.open(template.path, writable=True) as store:
            look_at(store, template.truths, name)
        return "refused" if refused else SOUND

    def _do(self, store: Store, operation: str, name: str | None) -> bool:
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


OPERATIONS: Final = ("repack", "repair")


def contents_of(
    store: Store, truths: Mapping[Version, Truth], harmed: str | None
) -> dict[str, list[list[bytes]] | None]:
    """What every version that can be woken holds."""
    found = {}
    for bundle_id, woke in look_at(store, truths, harmed).items():
        if woke:
            with store.open_bundle(bundle_id) as reader:
                found[bundle_id] = read_checked(reader)
    return found


def snapshot(folder: Path) -> dict[Path, bytes]:
    """Every file of a store but the index, which may be brought up to date at any time."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != INDEX_FILE)
    return {path: path.read_bytes() for path in files}


TARGETS: Final[Sequence[type[Target]]] = (StoreTarget, ManifestInStoreTarget, IndexTarget, MaintenanceTarget)
