"""Small sessions made of nothing but arithmetic, for tests, for the crash child and for the checked-in fixture.

Run as a script it writes a fixture store: `python tests/memvid/store_making.py tests/memvid/data/format-1`.
A fixture of a released format version is made once, by the release that introduces it, and never again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import sys
from pathlib import Path

from torpor.memvid import (
    RAW,
    BlockDraft,
    BlockEntry,
    BundleReader,
    Codec,
    Identity,
    Receipt,
    SessionUri,
    SlotDraft,
    SlotSpec,
    Store,
    zstd,
)
from torpor.memvid.bundle import FrameFile
from torpor.memvid.directory import Frame

URI = SessionUri("default", "agent")
OTHER_URI = SessionUri("default", "other")
COMPRESSIBLE = (b"torpor sleeps, torpor wakes. " * 9)[:240]
IDENTITY = Identity((("compute_dtype", "float32"), ("weights", "0123456789abcdef")))


def token_ids(start: int, count: int, seed: int = 0) -> bytes:
    return struct.pack(f"<{count}I", *((position * 7 + seed * 13) % 50_000 for position in range(start, start + count)))


def raw_bytes(size_bytes: int, *salt: object) -> bytes:
    """Bytes that do not compress, the same for the same salt on every machine."""
    return hashlib.shake_128(repr(salt).encode()).digest(size_bytes)


def span(start: int, count: int, *, seed: int = 0, layers: int = 2, heads: int = 2, dim: int = 4) -> BlockDraft:
    """The KV of `count` tokens as bfloat16 [heads, count, dim], each head a buffer of its own."""
    slots = []
    for layer in range(layers):
        for part in "kv":
            name = f"{layer}.{part}"
            spec = SlotSpec(name, f"kv.{part}/1", "bfloat16", (heads, count, dim))
            data = memoryview(raw_bytes(spec.size_bytes, seed, name, start, count))
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
    codec: Codec = RAW,
    **sizes: int,
) -> Receipt:
    """Put a session of `token_count` tokens to sleep; after `before`, reusing its full spans."""
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
        session={"model": "demo", "labels": ["test"], "sampling": {"temperature": 0.5}},
        token_count=token_count,
        codec=codec,
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


def frame_of(store: Store, entry: BlockEntry) -> Frame:
    """Where a block's frame lies in the file of the bundle that the entry names."""
    assert entry.bundle_id is not None
    path = bundle_path(store, entry.bundle_id)
    with contextlib.closing(FrameFile(os.open(path, os.O_RDONLY), str(path), entry.bundle_id)) as file:
        return file.frame_of(entry.id)


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
        codec=zstd(19),
    )


def make_fixture(folder: Path) -> None:
    with Store.open(folder, writable=True) as store:
        first = sleep(store, 300)
        sleep(store, 600, before=first)
        sleep_compressed(store, OTHER_URI)
    for name in ("index.sqlite", "lock"):
        (folder / name).unlink()


if __name__ == "__main__":
    make_fixture(Path(sys.argv[1]))
