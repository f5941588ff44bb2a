"""Small sessions made of nothing but arithmetic, for tests, for the crash child and for the checked-in fixture.

Run as a script it writes a fixture store: `python tests/memvid/store_making.py tests/memvid/data/format-1`.
A fixture of a released format version is made once, by the release that introduces it, and never again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from torpor.memvid import (
    BlockDraft,
    BlockEntry,
    BundleReader,
    Identity,
    Receipt,
    SessionUri,
    SlotDraft,
    SlotSpec,
    Store,
)
from torpor.memvid.format.bundle import FrameFile
from torpor.memvid.format.directory import Frame
from torpor.memvid.format.journal import JournalRecord
from torpor.memvid.format.ledger_tail import UNREAD
from torpor.memvid.writing.rewriting import Contents, prepared

URI = SessionUri("default", "agent")
OTHER_URI = SessionUri("default", "other")
FORK_URI = SessionUri("default", "fork")
PLANES_URI = SessionUri("default", "planes")
HEIR_URI = SessionUri("default", "heir")
COMPRESSIBLE = (b"torpor sleeps, torpor wakes. " * 9)[:240]
IDENTITY = Identity((("compute_dtype", "float32"), ("weights", "0123456789abcdef")))


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
    return store.write_bundle(
        uri=uri,
        identity=IDENTITY,
        parent=before.bundle_id if before else None,
        reused=reused,
        blocks=drafts(token_count, first=first, seed=seed, **sizes),
        session={"model": "demo", "labels": ["test"], "sampling": {"temperature": 0.5}}
        | ({UNREAD: {"tokens": token_ids(token_count, unread, seed)}} if unread else {}),
        token_count=token_count,
        compressed=compressed,
    )


def write(store: Store, blocks: Iterable[BlockDraft], token_count: int, **changes: Any) -> Receipt:
    """Put these blocks to sleep. changes: other arguments of `Store.write_bundle` than those of a first version."""
    first = {"uri": URI, "identity": IDENTITY, "parent": None, "reused": (), "session": {}}
    return store.write_bundle(blocks=blocks, token_count=token_count, **(first | changes))


def turn(store: Store, tail: int, *, uri: SessionUri = URI, seed: int = 0) -> JournalRecord:
    """So many tokens behind the newest version of a session, or the first ones of a new session, for the journal."""
    row = store.find_session(uri)
    held = row.token_count if row else 0
    return JournalRecord(
        uri=uri,
        session={"model": "demo", UNREAD: {"tokens": token_ids(held, tail, seed)}},
        newest=(row.version, row.bundle_id) if row else None,
        base=row.bundle_id if row else None,
        held=held,
        identity=None if row else IDENTITY,
    )


def expected(token_count: int, *, seed: int = 0, **sizes: int) -> list[list[bytes]]:
    """The raw bytes of every slot of every block of such a session."""
    blocks = drafts(token_count, seed=seed, **sizes)
    return [[b"".join(slot.buffers) for slot in block.slots] for block in blocks]


def contents(reader: BundleReader) -> list[list[bytes]]:
    """The raw bytes of every slot of every block, as the reader gives them."""
    return [
        [bytes(reader.read_slot(entry, slot)) for slot in range(len(reader.read_header(entry).slots))]
        for entry in reader.entries
    ]


def require_awake(store: Store, token_count: int, *, uri: SessionUri = URI, seed: int = 0, **sizes: int) -> None:
    """Wake a session and compare every byte with what was put to sleep."""
    with store.open_session(uri) as reader:
        assert reader.manifest.token_count == token_count
        assert reader.tokens() == token_ids(0, token_count, seed)
        assert contents(reader) == expected(token_count, seed=seed, **sizes)


def bundle_path(store: Store, bundle_id: bytes) -> Path:
    name = bundle_id.hex()
    return Path(store.path) / "bundles" / name[:2] / f"{name}.mvb"


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


def frame_of(store: Store, entry: BlockEntry) -> Frame:
    """Where a block's frame lies in the file of the bundle that the entry names."""
    assert entry.bundle_id is not None
    path = bundle_path(store, entry.bundle_id)
    with contextlib.closing(FrameFile(os.open(path, os.O_RDONLY), str(path), entry.bundle_id)) as file:
        return file.frame_of(entry.id)


def spoil(store: Store, receipt: Receipt, *numbers: int) -> None:
    """Damage blocks of a version's file."""
    for number in numbers:
        spoil_frame(bundle_path(store, receipt.bundle_id), frame_of(store, receipt.entries[number]))


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


def reopened(store: Store, *, anew: bool = False) -> Store:
    """The store, closed and opened again. anew: its index is lost in between."""
    store.close()
    if anew:
        Path(store.path, "index.sqlite").unlink()
    return Store.open(store.path, writable=True)


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


def sleep_compressed(store: Store, uri: SessionUri = URI) -> Receipt:
    """A small session whose slots do shrink, so that they are stored as zstd frames."""
    spec = SlotSpec("0.k", "kv.k/1", "uint8", (2, 4, 30))
    slot = SlotDraft(spec, [memoryview(COMPRESSIBLE)])
    return store.write_bundle(
        uri=uri,
        identity=IDENTITY,
        parent=None,
        reused=(),
        blocks=[BlockDraft("span", 0, token_ids(0, 4), [slot])],
        session={},
        token_count=4,
        compressed=True,
    )


def sleep_planes(store: Store, uri: SessionUri) -> Receipt:
    """A session whose slots shrink on byte planes: one in two chunks, and one with a plane that stays as it is.

    The first shrinks so far (MAX_EXPANSION) that it is stored raw since; the fixture of format 1 has it on planes.
    """
    specs = SlotSpec("0.k", "kv.k/1", "float16", (2, 64, 1280)), SlotSpec("0.v", "kv.v/1", "float16", (2, 64, 32))
    slots = [SlotDraft(spec, [memoryview(data)]) for spec, data in zip(specs, PLANES_BYTES, strict=True)]
    return store.write_bundle(
        uri=uri,
        identity=IDENTITY,
        parent=None,
        reused=(),
        blocks=[BlockDraft("span", 0, token_ids(0, 64), slots)],
        session={},
        token_count=64,
        compressed=True,
    )


def adopt(store: Store, receipt: Receipt) -> None:
    """Write a bundle's file anew with all its blocks in it, as a compaction does."""
    with contextlib.closing(store._core.open_bundle(receipt.bundle_id)) as file:
        frames = [(entry.id, entry.bundle_id) for entry in file.entries if entry.bundle_id is not None]
    with prepared(store._core, receipt.bundle_id, Contents(frames, {})) as new:
        assert new.commit()


def move_all(store: Store, old: Receipt, new: Receipt) -> None:
    """Let the newer version's file take over every block, and the older one's file lose those."""
    adopt(store, new)
    moved = {entry.id: new.bundle_id for entry in old.entries if entry.id in {one.id for one in new.entries}}
    frames = [(entry.id, old.bundle_id) for entry in old.entries if entry.id not in moved]
    with prepared(store._core, old.bundle_id, Contents(frames, moved)) as rewritten:
        assert rewritten.commit()


def strip(store: Store, bundle_id: bytes) -> None:
    """Leave of a retired bundle's file what other bundles need, and nothing of what it was."""
    frames = []
    for user in store.index.users_of(bundle_id):
        with contextlib.closing(store._core.open_bundle(user)) as file:
            frames += [(entry.id, bundle_id) for entry in file.entries if entry.bundle_id == bundle_id]
    with prepared(store._core, bundle_id, Contents(frames, {}, with_manifest=False)) as new:
        assert new.commit()


def make_fixture(folder: Path) -> None:
    """A store with everything in it that the format has."""
    with Store.open(folder, writable=True) as store:
        third = sleep(store, 900, before=sleep(store, 600, before=sleep(store, 300)))
        adopt(store, third)
        sleep(store, 700, uri=FORK_URI)  # without a parent: its first blocks are found by their ids
        sleep_compressed(store, OTHER_URI)
        sleep_planes(store, PLANES_URI)
        gone = sleep(store, 600, uri=SessionUri("default", "gone"), seed=3)
        sleep(store, 800, uri=HEIR_URI, seed=3, before=gone)
        store.delete_session(gone.uri)
        strip(store, gone.bundle_id)
        store.tag(URI, 1, "before-refactor")
        store.pin(URI, 2)
    for name in ("index.sqlite", "index.sqlite-sums", "lock"):
        (folder / name).unlink(missing_ok=True)


if __name__ == "__main__":
    make_fixture(Path(sys.argv[1]))
