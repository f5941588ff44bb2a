"""T5: every bit flipped, every cut, and every swap of what looks alike with all digests but block ids made right.

The heavy tests take a bundle of 64 KiB. With TORPOR_DAMAGE_REPORT=FILE each test adds its counts to that file, as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.memvid import BlockDraft, BlockEntry, Receipt, SessionUri, SlotDraft, SlotSpec, Store
from torpor.memvid.errors import StoreError, Truncated
from torpor.memvid.format.blocks import BlockHeader, span_parents
from torpor.memvid.format.bundle import BundleFile, require_promised
from torpor.memvid.format.codecs import PLANES_CODE
from torpor.memvid.format.directory import Directory, Frame, digest_of
from torpor.memvid.format.layout import (
    HEADER_BYTES,
    StoredSlot,
    Trailer,
    aligned,
    encode_frame_head,
    encode_header,
    frame_bytes_for,
)
from torpor.memvid.format.manifest import bundle_id_of, decode_manifest
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import OTHER_URI, sleep, write

REPORT = "TORPOR_DAMAGE_REPORT"


def tell(what: str, count: int) -> None:
    """Print a count, and add it to the report if there is to be one."""
    print(f"{what}: {count} tried, all detected")
    if name := os.environ.get(REPORT):
        path = Path(name)
        counts = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(counts | {what: {"tried": count, "undetected": 0}}, indent=1, sort_keys=True) + "\n")


# --- a bundle's file in parts that can be exchanged


@dataclasses.dataclass
class FrameParts:
    """A frame: what the directory calls it, its block header, and each slot's storage line and stored bytes."""

    claimed_id: bytes
    header: bytes
    slots: list[tuple[StoredSlot, bytes]]


@dataclasses.dataclass
class Parts:
    frames: list[FrameParts]
    manifest: bytes


def taken_apart(path: Path) -> Parts:
    data = path.read_bytes()
    with opened(path) as file:
        frames = []
        for frame in file.directory.frames:
            _, head = file.read_head(frame.id)
            slots = []
            for stored, offset in zip(head.stored, head.payload_offsets, strict=True):
                start = frame.offset + offset
                slots.append((stored, data[start : start + stored.stored_bytes]))
            frames.append(FrameParts(frame.id, head.block_header, slots))
        return Parts(frames, file.encoded_manifest())


def put_together(parts: Parts) -> bytes:
    """A file with every digest right that is not a block's id."""
    body, frames = bytearray(HEADER_BYTES), []
    for part in parts.frames:
        stored = [line for line, _ in part.slots]
        head = encode_frame_head(part.header, stored)
        frames.append(Frame(part.claimed_id, len(body), frame_bytes_for(len(head), stored), len(head)))
        body += head
        for line, payload in part.slots:
            body += payload + bytes(aligned(line.stored_bytes) - len(payload))
    blocks = decode_manifest(parts.manifest, "parts").blocks
    directory = Directory.of(frames, blocks, {}).encode()
    trailer = Trailer(
        len(body), len(parts.manifest), len(directory), bundle_id_of(parts.manifest), digest_of(directory)
    )
    body[:HEADER_BYTES] = encode_header(trailer.file_bytes)
    return bytes(body) + parts.manifest + directory + trailer.encode()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BundleFile]:
    with contextlib.closing(BundleFile(os.open(path, os.O_RDONLY), str(path), None)) as file:
        yield file


def verify_all(path: Path) -> None:
    """What a deep verify and an import ask of a file that stands alone."""
    with opened(path) as file:
        manifest = file.manifest
        assert manifest is not None
        parents = span_parents(manifest.blocks)
        for entry in manifest.blocks:
            header = file.check_block(entry.id)
            require_promised(header, entry, parents[entry.id], manifest.identity.digest, str(path))


def wake_all(path: Path) -> list[bytes]:
    """What a wake reads."""
    found = []
    with opened(path) as file:
        manifest = file.manifest
        assert manifest is not None
        parents = span_parents(manifest.blocks)
        for entry in manifest.blocks:
            header, head = file.read_head(entry.id)
            require_promised(header, entry, parents[entry.id], manifest.identity.digest, str(path))
            for number, (spec, _) in enumerate(header.slots):
                slot = bytearray(spec.size_bytes)
                file.read_slots_into(entry.id, header, head, [(number, [memoryview(slot)])])
                found.append(bytes(slot))
    return found


def is_refused(path: Path, parts: Parts) -> bool:
    """Whether both ways of reading refuse a file."""
    path.write_bytes(put_together(parts))
    for read in (verify_all, wake_all):
        try:
            read(path)
        except StoreError:
            continue
        return False
    return True


def alike(store: Store, *, compressed: bool, uri: SessionUri = making.URI, seed: int = 0) -> Receipt:
    """Three full spans and a partial one, of two layers; all K and V of a span have one shape. Half of it shrinks."""

    def span(start: int, count: int) -> BlockDraft:
        slots = []
        for layer, part in itertools.product(range(2), "kv"):
            spec = SlotSpec(f"{layer}.{part}", f"kv.{part}/1", "float16", (1, count, 2))
            noise = making.raw_bytes(spec.size_bytes // 2, seed, spec.name, start)
            data = b"".join(bytes([low, 0x3C]) for low in noise)
            slots.append(SlotDraft(spec, [memoryview(data)]))
        return BlockDraft("span", start, making.token_ids(start, count, seed), slots)

    blocks = [*(span(at, 256) for at in range(0, 768, 256)), span(768, 100), making.state(868, seed=seed)]
    return write(store, blocks, 868, uri=uri, compressed=compressed)


CODECS = {"raw": False, "planes": True}


@pytest.fixture(params=CODECS.values(), ids=CODECS)
def pair(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> tuple[Path, Parts, Parts, str]:
    """A place to write to, and the parts of two bundles that look alike in everything."""
    compressed: bool = request.param
    one = taken_apart(making.bundle_path(store, alike(store, compressed=compressed).bundle_id))
    two = taken_apart(making.bundle_path(store, alike(store, compressed=compressed, uri=OTHER_URI, seed=1).bundle_id))
    codes = {line.codec for part in one.frames for line, _ in part.slots}
    assert (PLANES_CODE in codes) is compressed
    return tmp_path / "changed.mvb", one, two, request.node.callspec.id


def test_what_is_put_together_unchanged_is_the_file_that_was_taken_apart(store: Store, tmp_path: Path) -> None:
    """Else the tests below would find nothing but their own mistakes."""
    for seed, compressed in enumerate(CODECS.values()):
        path = making.bundle_path(store, alike(store, compressed=compressed, seed=seed).bundle_id)
        parts = taken_apart(path)
        assert put_together(parts) == path.read_bytes()
        moved = dataclasses.replace(parts, frames=parts.frames[::-1])
        (tmp_path / "moved").write_bytes(put_together(moved))
        assert wake_all(tmp_path / "moved") == wake_all(path), "frames in another order are the same bundle"


def shapes(part: FrameParts) -> list[tuple[str, tuple[int, ...]]]:
    return [(spec.dtype, spec.shape) for spec, _ in BlockHeader.decode(part.header).slots]


def places(parts: Parts) -> list[tuple[int, int, tuple[str, tuple[int, ...]]]]:
    return [(f, s, shape) for f, part in enumerate(parts.frames) for s, shape in enumerate(shapes(part))]


def test_t5_threats_5_6_every_swap_of_two_slots_of_one_shape_is_refused(pair: tuple[Path, Parts, Parts, str]) -> None:
    path, parts, _, codec = pair
    tried = 0
    for (f, s, shape), (g, t, other) in itertools.combinations(places(parts), 2):
        if shape != other:
            continue
        one, two = parts.frames[f].slots, parts.frames[g].slots
        one[s], two[t] = two[t], one[s]
        assert is_refused(path, parts), (f, s, g, t)
        one[s], two[t] = two[t], one[s]
        tried += 1
    assert tried == 12 * 11 // 2 + 4 * 3 // 2  # three full spans of 4 slots, one partial span of 4
    assert not is_refused(path, parts)
    tell(f"slots swapped within a bundle, {codec}", tried)


@pytest.mark.one_in(2)
def test_t5_threat_5_every_slot_of_another_bundle_is_refused(pair: tuple[Path, Parts, Parts, str]) -> None:
    path, parts, others, codec = pair
    tried = 0
    for (f, s, shape), (g, t, other) in itertools.product(places(parts), places(others)):
        mine, foreign = parts.frames[f].slots[s], others.frames[g].slots[t]
        if shape != other or mine == foreign:
            continue
        parts.frames[f].slots[s] = foreign
        assert is_refused(path, parts), (f, s, g, t)
        parts.frames[f].slots[s] = mine
        tried += 1
    assert tried >= 12 * 12 + 4 * 4 + 2
    assert not is_refused(path, parts)
    tell(f"slots taken from another bundle, {codec}", tried)


def test_t5_threat_5_every_frame_in_another_s_place_is_refused(pair: tuple[Path, Parts, Parts, str]) -> None:
    """The directory says one block, and there lies another: of this bundle or of the other."""
    path, parts, others, codec = pair
    tried = 0
    for at, part in enumerate(parts.frames):
        for frame in (*parts.frames, *others.frames):
            if frame is not part:
                parts.frames[at] = dataclasses.replace(frame, claimed_id=part.claimed_id)
                assert is_refused(path, parts), at
                tried += 1
        parts.frames[at] = part
    assert tried == 5 * (4 + 5)
    assert not is_refused(path, parts)
    tell(f"frames in the place of another, {codec}", tried)


def test_t5_threat_6_every_pair_of_blocks_traded_in_the_manifest_is_refused(
    pair: tuple[Path, Parts, Parts, str],
) -> None:
    """A manifest that lists the blocks in other places, with a bundle id that fits it: their headers tell."""
    path, parts, others, codec = pair
    manifest = decode_manifest(parts.manifest, "parts")
    foreign = decode_manifest(others.manifest, "others")
    tried = 0

    def refused(blocks: list[BlockEntry], frames: list[FrameParts]) -> bool:
        encoded = dataclasses.replace(manifest, blocks=tuple(blocks)).encode()
        return is_refused(path, Parts(frames, encoded))

    for one, two in itertools.combinations(range(len(manifest.blocks)), 2):
        blocks = list(manifest.blocks)
        blocks[one] = dataclasses.replace(manifest.blocks[one], id=manifest.blocks[two].id)
        blocks[two] = dataclasses.replace(manifest.blocks[two], id=manifest.blocks[one].id)
        assert refused(blocks, parts.frames), (one, two)
        tried += 1
    for at, entry in enumerate(foreign.blocks):
        blocks = list(manifest.blocks)
        blocks[at] = entry  # the block of the same place, size and identity, of another conversation
        frames = [*parts.frames[:at], others.frames[at], *parts.frames[at + 1 :]]
        if at in (len(blocks) - 1, len(blocks) - 2):
            continue  # the end of a chain, of which nothing depends: below
        assert refused(blocks, frames), at
        tried += 1
    assert tried == 10 + 3
    tell(f"blocks traded in a manifest, {codec}", tried)


# --- every bit, every length


@pytest.fixture
def big(store: Store) -> Path:
    receipt = sleep(store, 1664, layers=2, dim=4, heads=1)
    path = making.bundle_path(store, receipt.bundle_id)
    assert 65_536 <= path.stat().st_size < 70_000
    return path


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_t5_every_single_bit_flip_of_a_64_kib_bundle_is_found(big: Path) -> None:
    """A deep check refuses each; a wake refuses it, or gives the exact bytes (padding is not read by it)."""
    data, intact = big.read_bytes(), wake_all(big)
    fd = os.open(big, os.O_RDWR)
    missed = []
    for byte, value in enumerate(data):
        for bit in range(8):
            os.pwrite(fd, bytes([value ^ 1 << bit]), byte)
            try:
                verify_all(big)
                missed.append((byte, bit))
            except StoreError:
                pass
            if bit == byte % 8:
                with contextlib.suppress(StoreError):
                    assert wake_all(big) == intact
        os.pwrite(fd, bytes([value]), byte)
    os.close(fd)
    assert not missed
    assert wake_all(big) == intact
    tell("bits flipped in a bundle of 64 KiB", len(data) * 8)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_t5_every_truncation_of_a_64_kib_bundle_is_found(big: Path) -> None:
    data = big.read_bytes()
    for size in range(len(data) - 1, -1, -1):
        os.truncate(big, size)
        for read in (verify_all, wake_all):
            with pytest.raises(Truncated):
                read(big)
    tell("truncations of a bundle of 64 KiB", len(data))
