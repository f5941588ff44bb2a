"""Small sessions made of nothing but arithmetic, for tests and for the crash child; and damage to a store's files."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import struct
import tracemalloc
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn
from unittest import mock

from blake3 import blake3
from torpor.memvid.answers import VersionInfo
from torpor.memvid.disk import durable
from torpor.memvid.disk.budget import left_to_repacks
from torpor.memvid.disk.durable import TempFile
from torpor.memvid.disk.paths import closing_fd
from torpor.memvid.folder.folder import StoreFolder, manifest_name
from torpor.memvid.folder.marks import Marks
from torpor.memvid.folder.store_file import open_or_make_root
from torpor.memvid.format.blocks import BlockDraft, BlockEntry, SlotDraft, SlotSpec
from torpor.memvid.format.identity import Identity
from torpor.memvid.format.journal import JournalRecord
from torpor.memvid.format.layout import Frame
from torpor.memvid.format.manifest import UNREAD
from torpor.memvid.format.pack import PackFile
from torpor.memvid.format.pack_writer import PackWriter
from torpor.memvid.format.records import Receipt
from torpor.memvid.index.index import INDEX_FILE
from torpor.memvid.recovery.opening import create_store
from torpor.memvid.store import Store, VersionDraft
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.frame_files import open_frames
from torpor.memvid.writing.reader import BundleReader

URI = SessionUri("default", "agent")
OTHER_URI = SessionUri("default", "other")
FORK_URI = SessionUri("default", "fork")
PLANES_URI = SessionUri("default", "planes")
HEIR_URI = SessionUri("default", "heir")
COMPRESSIBLE = (b"torpor sleeps, torpor wakes. " * 9)[:240]
IDENTITY = Identity((("compute_dtype", "float32"), ("weights", "0123456789abcdef")))


def new_folder(path: Path) -> StoreFolder:
    """The folder of a new store, without a store that is open in it."""
    root_fd = open_or_make_root(str(path))
    return StoreFolder(str(path), root_fd, create_store(root_fd, str(path)))


def id_of(store: Store, uri: SessionUri, version: int | None = None) -> bytes:
    """The bundle id of a version, the latest if none is named."""
    return store.require_session(uri, version).bundle_id


def token_ids(start: int, count: int, seed: int = 0) -> bytes:
    return struct.pack(f"<{count}I", *((position * 7 + seed * 13) % 50_000 for position in range(start, start + count)))


def raw_bytes(size_bytes: int, *salt: object) -> bytes:
    """Bytes that do not compress, the same for the same salt on every machine."""
    return hashlib.shake_128(repr(salt).encode()).digest(size_bytes)


PLANES_BYTES = (
    b"".join(struct.pack("<H", 0x3C00 + number * 7919 % 61) for number in range(163_840)),
    b"".join(bytes([low, 0x3C]) for low in raw_bytes(4096, "planes")),
)
"""The bits of float16 numbers near 1."""


def span(
    start: int, count: int, *, seed: int = 0, layers: int = 2, heads: int = 2, dim: int = 4, period: int = 0
) -> BlockDraft:
    """The KV of `count` tokens as bfloat16 [heads, count, dim], each head a buffer of its own; its bytes repeat after
    `period` of them, if it is not 0."""
    slots = []
    for layer in range(layers):
        for part in "kv":
            name = f"{layer}.{part}"
            spec = SlotSpec(name, f"kv.{part}/1", "bfloat16", (heads, count, dim))
            pattern = raw_bytes(period or spec.size_bytes, seed, name, start, count)
            data = memoryview(pattern * -(-spec.size_bytes // len(pattern)))[: spec.size_bytes]
            step = len(data) // heads
            slots.append(SlotDraft(spec, [data[at : at + step] for at in range(0, len(data), step)]))
    return BlockDraft("span", start, token_ids(start, count, seed), slots)


def state(position: int, *, seed: int = 0, size: int = 16) -> BlockDraft:
    """A whole-state record: last logits and a random key."""
    logits = SlotSpec("logits", "state.logits/1", "float32", (size,))
    key = SlotSpec("key", "state.key/1", "uint32", (2,))
    return BlockDraft(
        "state",
        position,
        b"",
        [
            SlotDraft(logits, [memoryview(raw_bytes(logits.size_bytes, seed, "logits", position))]),
            SlotDraft(key, [memoryview(raw_bytes(key.size_bytes, seed, "key", position))]),
        ],
    )


def drafts(token_count: int, *, first: int = 0, seed: int = 0, **sizes: int) -> list[BlockDraft]:
    """The blocks of a session of `token_count` tokens from token `first` (a multiple of 256) on, and its state."""
    spans = [span(at, min(256, token_count - at), seed=seed, **sizes) for at in range(first, token_count, 256)]
    return [*spans, state(token_count, seed=seed)]


# --- sessions


def sleep(
    store: Store,
    token_count: int = 300,
    *,
    uri: SessionUri = URI,
    seed: int = 0,
    before: Receipt | None = None,
    compressed: bool = False,
    unread: int = 0,
    **sizes: int,
) -> Receipt:
    """Put a session of `token_count` tokens to sleep; after `before`, reusing its full spans. unread: so many tokens of
    its ledger stand behind."""
    reused: tuple[BlockEntry, ...] = ()
    if before is not None:
        reused = tuple(entry for entry in before.entries if entry.kind == "span" and entry.token_count == 256)
    first = reused[-1].end if reused else 0
    return write(
        store,
        drafts(token_count, first=first, seed=seed, **sizes),
        token_count,
        uri=uri,
        parent=before.bundle_id if before else None,
        reused=reused,
        session={"model": "demo", "labels": ["test"], "sampling": {"temperature": 0.5}}
        | ({UNREAD: {"tokens": token_ids(token_count, unread, seed)}} if unread else {}),
        compressed=compressed,
    )


def sleep_each(store: Store, *token_counts: int, before: Receipt | None = None, **how: Any) -> list[Receipt]:
    """Versions of so many tokens, each behind the last."""
    made = []
    for token_count in token_counts:
        before = sleep(store, token_count, before=before, **how)
        made.append(before)
    return made


def write(store: Store, blocks: Iterable[BlockDraft], token_count: int, **changes: Any) -> Receipt:
    """Put these blocks to sleep. changes: what differs from the draft of a first version."""
    first = {"uri": URI, "identity": IDENTITY, "parent": None, "reused": (), "session": {}}
    return store.write_bundle(VersionDraft(blocks=blocks, block_tokens=token_count, **(first | changes)))


def sleep_compressed(store: Store, uri: SessionUri = URI) -> Receipt:
    """A small session whose slots do shrink, so that they are stored as zstd frames."""
    slot = SlotDraft(SlotSpec("0.k", "kv.k/1", "uint8", (2, 4, 30)), [memoryview(COMPRESSIBLE)])
    return write(store, [BlockDraft("span", 0, token_ids(0, 4), [slot])], 4, uri=uri, compressed=True)


def sleep_planes(store: Store, uri: SessionUri, *, compressed: bool = True) -> Receipt:
    """A session whose slots shrink on byte planes: one in two chunks, and one with a plane that stays as it is."""
    specs = SlotSpec("0.k", "kv.k/1", "float16", (2, 64, 1280)), SlotSpec("0.v", "kv.v/1", "float16", (2, 64, 32))
    slots = [SlotDraft(spec, [memoryview(data)]) for spec, data in zip(specs, PLANES_BYTES, strict=True)]
    return write(store, [BlockDraft("span", 0, token_ids(0, 64), slots)], 64, uri=uri, compressed=compressed)


def turn(store: Store, tail: int, *, uri: SessionUri = URI, seed: int = 0) -> JournalRecord:
    """So many tokens behind the newest version of a session, or the first ones of a new session, for the journal."""
    row = store.find_session(uri)
    held = row.block_tokens if row else 0
    return JournalRecord(
        uri=uri,
        session={"model": "demo", UNREAD: {"tokens": token_ids(held, tail, seed)}},
        newest=(row.version, row.bundle_id) if row else None,
        base=row.bundle_id if row else None,
        held=held,
        identity=None if row else IDENTITY,
    )


# --- what a store gives


def expected(token_count: int, *, seed: int = 0, **sizes: int) -> list[list[bytes]]:
    """The raw bytes of every slot of every block of such a session."""
    blocks = drafts(token_count, seed=seed, **sizes)
    return [[b"".join(slot.buffers) for slot in block.slots] for block in blocks]


def contents(reader: BundleReader) -> list[list[bytes]]:
    """The raw bytes of every slot of every block, as the reader gives them."""
    return [read_block(reader, entry) for entry in reader.entries]


def read_block(reader: BundleReader, entry: BlockEntry) -> list[bytes]:
    """The raw bytes of each slot of a block."""
    return [bytes(reader.read_slot(entry, slot)) for slot in range(len(reader.read_header(entry).slots))]


def require_awake(
    store: Store, token_count: int, *, uri: SessionUri = URI, version: int | None = None, seed: int = 0, **sizes: int
) -> None:
    """Wake a session and compare every byte with what was put to sleep."""
    with store.open_session(uri, version) as reader:
        assert reader.manifest.block_tokens == token_count
        assert reader.tokens() == token_ids(0, token_count, seed)
        assert contents(reader) == expected(token_count, seed=seed, **sizes)


def ledger(store: Store, uri: SessionUri = URI, version: int | None = None) -> bytes:
    """All tokens of a version, uint32 as bytes, with those that are not read yet."""
    with store.open_session(uri, version) as reader:
        return reader.tokens() + reader.manifest.tail


def reopened(store: Store, *, anew: bool = False) -> Store:
    """The store, closed and opened again. anew: its index is lost in between."""
    store.close()
    if anew:
        remove_index(Path(store.path))
    return Store.open(store.path, writable=True)


def index_row(uri: SessionUri, version: int, bundle_id: str, **changes: Any) -> VersionInfo:
    """The row of a version of so many tokens as its number."""
    sizes = {"token_count": version, "unread_tokens": 0, "bundle_bytes": 100, "logical_bytes": 1000, "created_ns": 1}
    facts = {"parent": None, "identity": "11" * 32, "model": "demo", "labels": (), "lossy": None}
    facts |= {"unnamed": False, "used_ns": 0}
    return VersionInfo(session=str(uri), version=version, bundle_id=bundle_id, **(sizes | facts | changes))  # type: ignore[arg-type]


# --- its files


def spoil_frame(file: Path, frame: Frame) -> None:
    flip(file, frame.offset + frame.head_bytes + 5)


def flip(file: Path, at: int, bits: int = 1) -> bytes:
    """Change bits of one byte of a file; what it held, to put it back."""
    good = file.read_bytes()
    bad = bytearray(good)
    bad[at] ^= bits
    file.write_bytes(bad)
    return good


def put(file: Path, data: bytes) -> None:
    """Write a file that belongs to its owner alone, as all of a store's do."""
    file.write_bytes(data)
    file.chmod(0o600)


HARMS: Final[dict[str, Callable[[Path, Path], object]]] = {
    "flipped": lambda file, _: flip(file, -40),
    "cut": lambda file, _: put(file, file.read_bytes()[:-1]),
    "empty": lambda file, _: put(file, b""),
    "huge": lambda file, _: os.truncate(file, 1 << 40),
    "hard link": lambda file, aside: os.link(file, aside),
    "link": lambda file, aside: file.symlink_to(file.rename(aside)),
    "fifo": lambda file, aside: (file.rename(aside), os.mkfifo(file, 0o600)),
    "folder": lambda file, aside: (file.rename(aside), file.mkdir()),
}
"""What may become of a file: other bytes; or something else has its place, and it is aside."""


def manifest_path(store: Store, bundle_id: str) -> Path:
    return Path(store.path, manifest_name(bundle_id))


def packs_of(store: Store, receipt: Receipt) -> list[Path]:
    """The packs with blocks of a version, each once, in the order of the blocks."""
    found = dict.fromkeys(name for entry in receipt.entries for name in store.index.packs_of(entry.id, stripped=True))
    return [Path(store.path, name) for name in found]


def pack_of(store: Store, receipt: Receipt, number: int = 0) -> Path:
    """The pack that has a block of a version."""
    return Path(store.path, store.index.packs_of(receipt.entries[number].id)[0])


def names(path: str | Path) -> set[str]:
    """The manifests, packs and temporary files of a store, by name."""
    root = Path(path)
    return {
        str(file.relative_to(root))
        for top in ("versions", "packs")
        for file in (root / top).rglob("*")
        if not file.is_dir()
    }


def frame_in(pack: Path, block_id: bytes) -> Frame:
    """Where a block's frame lies in a pack."""
    with PackFile(os.open(pack, os.O_RDONLY), str(pack), None) as file:
        return file.frame_of(block_id)


def all_blocks(store: Store) -> set[bytes]:
    """The blocks in all packs, also those whose header alone is there."""
    found: set[bytes] = set()
    for name in store._core.folder.list_packs():
        with open_frames(store._core.folder, name) as file:
            found |= {*file.frames, *file.heads}
    return found


def spoil(store: Store, receipt: Receipt, *numbers: int) -> None:
    """Damage the keys and values of blocks of a version, in the pack that is asked first."""
    for number in numbers:
        pack = pack_of(store, receipt, number)
        spoil_frame(pack, frame_in(pack, receipt.entries[number].id))


def swap(store: Store, pack: Path, data: bytes) -> None:
    """Let another file with these bytes take a pack's place, as one that is put back does."""
    other = Path(f"{store.path}.other")
    put(other, data)
    other.rename(pack)


def swap_spoilt(store: Store, pack: Path, block_id: bytes) -> None:
    """Let a copy of a pack take its place that has a damaged frame."""
    frame, data = frame_in(pack, block_id), bytearray(pack.read_bytes())
    data[frame.offset + frame.head_bytes + 5] ^= 1
    swap(store, pack, data)


def copy_blocks(
    store: Store, block_ids: Iterable[bytes], *, stripped: Container[bytes] = (), removing: Iterable[Path] = ()
) -> Path:
    """Write blocks into one new pack, of some the header alone, and then remove packs, as a repack does; the new."""
    core = store._core
    with core.folder.new_temp() as temp:
        writer = PackWriter(temp)
        for block_id in block_ids:
            with core.files.holding(core.index.packs_of(block_id)[0]) as file:
                (writer.add_stripped if block_id in stripped else writer.add_copy)(file, block_id)
        pack_id = writer.finish()
        with core.committing():
            new = core.publish_pack(temp, pack_id)
            core.remove_packs({f"packs/{pack.name}" for pack in removing} - {new})
    return Path(store.path, new)


def mark_stripped(store: Store, receipt: Receipt) -> None:
    """Mark a version as one that needs no keys and values, and leave them where they are."""
    core = store._core
    with core.committing():
        Marks.load(core.folder).strip({receipt.uri: [receipt.bundle_id]}).save(core.folder)


def tree(path: str | Path, pattern: str = "*") -> dict[str, bytes]:
    """Every file of a folder, or of those in it that fit, with its bytes."""
    root = Path(path)
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob(pattern)) if file.is_file()}


def of_a_later_version(data: bytes) -> bytes:
    """A file with a header whose digest says that the version after ours was written."""
    fixed = data[:8] + b"\3" + data[9:32]
    return fixed + blake3(fixed).digest() + data[64:]


def copy_pack(store: Store, pack: Path) -> Path:
    """Let the store have all blocks of a pack a second time; the other pack."""
    with open_frames(store._core.folder, f"packs/{pack.name}") as file:
        return copy_blocks(store, reversed([*file.frames]))


def in_pieces(store: Store, receipt: Receipt) -> Path:
    """Let a block lie in two packs, damaged in another slot in each; the second pack."""
    pack, block_id = pack_of(store, receipt), receipt.entries[0].id
    other = copy_pack(store, pack)
    first, last = frame_in(pack, block_id), frame_in(other, block_id)
    flip(pack, first.offset + first.head_bytes + 5)
    flip(other, last.offset + last.frame_bytes - 70)
    return other


def rotate(paths: list[Path]) -> None:
    """Let each file lie under the name of the next one."""
    contents = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [contents[-1], *contents], strict=False):
        path.unlink()
        put(path, content)


def remove_index(path: Path) -> None:
    (path / INDEX_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def temp_file(folder: Path) -> Iterator[TempFile]:
    """A temporary file in any folder."""
    with closing_fd(os.open(folder, os.O_RDONLY)) as fd, TempFile(fd, str(folder)) as temp:
        yield temp


@contextlib.contextmanager
def flushes() -> Iterator[list[str]]:
    """What is flushed meanwhile, by its path, in order."""
    told: list[str] = []
    real: Callable[[int, str], None] = durable._sync

    def sync(fd: int, path: str) -> None:
        told.append(path)
        real(fd, path)

    durable._sync = sync
    try:
        yield told
    finally:
        durable._sync = real


# --- what comes in between


def refusing(error: Exception | type[BaseException]) -> Callable[..., NoReturn]:
    """A call that the system or the store refuses, in place of the real one."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise error

    return refuse


@contextlib.contextmanager
def taking_at_most(size_bytes: int) -> Iterator[None]:
    """Python's own memory never grows by more than this meanwhile."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size_bytes
    finally:
        tracemalloc.stop()


def of_sleeps(size_bytes: int) -> int:
    """The budget of a store in which sleeps may fill so many bytes."""
    return next(most for most in itertools.count(size_bytes) if most - left_to_repacks(most) == size_bytes)


@contextlib.contextmanager
def meanwhile(owner: Any, name: str, act: Callable[[], object], *, at: int = 1, after: bool = False) -> Iterator[None]:
    """Let something happen in the so-many-th call of a function, before its work or after it. That call must come."""
    real, own, calls, happened = getattr(owner, name), vars(owner).get(name), itertools.count(1), list[bool]()

    def call(*args: Any, **kwargs: Any) -> Any:
        is_now = next(calls) == at
        happened.extend([True] * is_now)
        if is_now and not after:
            act()
        found = real(*args, **kwargs)
        if is_now and after:
            act()
        return found

    setattr(owner, name, call)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
    assert happened, f"{name} was called less than {at} times"


@contextlib.contextmanager
def unread(file: Path, call: str, number: int) -> Iterator[None]:
    """The system does not read a file meanwhile: such a call of `os` fails with this errno."""
    inode, real = file.stat(), getattr(os, call)

    def refuse(fd: int, *args: Any) -> Any:
        if os.path.samestat(os.fstat(fd), inode):
            raise OSError(number, os.strerror(number))
        return real(fd, *args)

    with mock.patch.object(os, call, refuse):
        yield


@contextlib.contextmanager
def away(file: Path) -> Iterator[None]:
    """A file is not there meanwhile, and is put back afterwards."""
    place = file.rename(file.parents[1] / f"away-{file.name}")
    try:
        yield
    finally:
        place.rename(file)


def rivals(store: Store) -> tuple[Receipt, Receipt]:
    """Two versions with the number 2, the older one first: its manifest is put back after that and its row were lost,
    and its number was given again."""
    older = sleep(store, 600, before=sleep(store, 300))
    with away(manifest_path(store, older.bundle_id)):
        store.index.drop([older.bundle_id])
        younger = sleep(store, 900, seed=2)
    assert older.version == younger.version == store.require_session(URI, older.bundle_id).version
    return older, younger
