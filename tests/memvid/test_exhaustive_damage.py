"""T5: every bit flipped, every cut, and every swap of what looks alike with all digests but block ids made right."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.memvid.errors import StoreError
from torpor.memvid.exchange.import_checks import ExportedFile, require_whole
from torpor.memvid.format.blocks import BlockDraft, BlockEntry, BlockHeader, SlotDraft, SlotSpec, span_parents
from torpor.memvid.format.codecs import PLANES_CODE
from torpor.memvid.format.frames import require_promised
from torpor.memvid.format.manifest import decode_manifest
from torpor.memvid.format.records import Receipt
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.faults.beginnings import FIRST
from torpor.tests.memvid.faults.damage import files_of
from torpor.tests.memvid.faults.shim import repeatable
from torpor.tests.memvid.faults.worlds import Broken, Version, World, require_right
from torpor.tests.memvid.faults.worlds import sleep as put_to_sleep
from torpor.tests.memvid.fuzz import pack_file
from torpor.tests.memvid.fuzz.pack_file import Frame, Pack
from torpor.tests.memvid.store_making import OTHER_URI, sleep, write
from torpor.tests.shares import share


def tell(what: str, count: int) -> None:
    print(f"{what}: {count} tried, all detected")


# --- an exported file in parts that can be exchanged


def taken_apart(path: Path) -> Pack:
    return pack_file.take_apart(path.read_bytes())


def put_together(parts: Pack) -> bytes:
    """A file with every digest right that is not a block's id."""
    return dataclasses.replace(parts, directory=pack_file.directory_of(parts.frames)).encode()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[ExportedFile]:
    with contextlib.closing(ExportedFile(os.open(path, os.O_RDONLY), str(path))) as file:
        yield file


def verify_all(path: Path) -> None:
    """What a deep verify and an import ask of a file that stands alone."""
    with opened(path) as file:
        require_whole(file)


def wake_all(path: Path) -> list[bytes]:
    """What a wake reads."""
    found = []
    with opened(path) as file:
        manifest, frames = file.manifest, file.frames
        parents = span_parents(manifest.blocks)
        for entry in manifest.blocks:
            header, head = frames.read_head(entry.id)
            require_promised(header, entry, parents[entry.id], manifest.identity.digest, str(path))
            for number, (spec, _) in enumerate(header.slots):
                slot = bytearray(spec.size_bytes)
                frames.read_slots_into(entry.id, header, head, [(number, [memoryview(slot)])])
                found.append(bytes(slot))
    return found


def is_refused(path: Path, parts: Pack) -> bool:
    """Whether both ways of reading refuse a file."""
    path.write_bytes(put_together(parts))
    for read in (verify_all, wake_all):
        try:
            read(path)
        except StoreError:
            continue
        return False
    return True


def exported(store: Store, receipt: Receipt, path: Path) -> Path:
    store.export_session(receipt.uri, receipt.version, path, replacing=True)
    return path


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
def pair(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> tuple[Path, Pack, Pack, str]:
    """A place to write to, and the parts of two files that look alike in everything."""
    compressed: bool = request.param
    one = taken_apart(exported(store, alike(store, compressed=compressed), tmp_path / "one"))
    two = taken_apart(exported(store, alike(store, compressed=compressed, uri=OTHER_URI, seed=1), tmp_path / "two"))
    codes = {slot.codec for part in one.frames for slot in part.slots}
    assert (PLANES_CODE in codes) is compressed
    return tmp_path / "changed", one, two, request.node.callspec.id


def test_what_is_put_together_unchanged_is_the_file_that_was_taken_apart(store: Store, tmp_path: Path) -> None:
    """Else the tests below would find nothing but their own mistakes."""
    for seed, compressed in enumerate(CODECS.values()):
        path = exported(store, alike(store, compressed=compressed, seed=seed), tmp_path / "file")
        parts = taken_apart(path)
        assert put_together(parts) == path.read_bytes()
        moved = dataclasses.replace(parts, frames=parts.frames[::-1])
        (tmp_path / "moved").write_bytes(put_together(moved))
        assert wake_all(tmp_path / "moved") == wake_all(path), "frames in another order are the same bundle"


def shapes(part: Frame) -> list[tuple[str, tuple[int, ...]]]:
    return [(spec.dtype, spec.shape) for spec, _ in BlockHeader.decode(part.header).slots]


def places(parts: Pack) -> list[tuple[int, int, tuple[str, tuple[int, ...]]]]:
    return [(f, s, shape) for f, part in enumerate(parts.frames) for s, shape in enumerate(shapes(part))]


def test_t5_threats_5_6_every_swap_of_two_slots_of_one_shape_is_refused(pair: tuple[Path, Pack, Pack, str]) -> None:
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
def test_t5_threat_5_every_slot_of_another_bundle_is_refused(pair: tuple[Path, Pack, Pack, str]) -> None:
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


def test_t5_threat_5_every_frame_in_another_s_place_is_refused(pair: tuple[Path, Pack, Pack, str]) -> None:
    """The directory says one block, and there lies another: of this bundle or of the other."""
    path, parts, others, codec = pair
    tried = 0
    for at, part in enumerate(parts.frames):
        for frame in (*parts.frames, *others.frames):
            if frame is not part:
                parts.frames[at] = dataclasses.replace(frame, id=part.id)
                assert is_refused(path, parts), at
                tried += 1
        parts.frames[at] = part
    assert tried == 5 * (4 + 5)
    assert not is_refused(path, parts)
    tell(f"frames in the place of another, {codec}", tried)


def test_t5_threat_6_every_pair_of_blocks_traded_in_the_manifest_is_refused(
    pair: tuple[Path, Pack, Pack, str],
) -> None:
    """A manifest that lists the blocks in other places, with a bundle id that fits it: their headers tell."""
    path, parts, others, codec = pair
    manifest = decode_manifest(parts.manifest, "parts")
    foreign = decode_manifest(others.manifest, "others")
    tried = 0

    def refused(blocks: list[BlockEntry], frames: list[Frame]) -> bool:
        encoded = dataclasses.replace(manifest, blocks=tuple(blocks)).encode()
        return is_refused(path, dataclasses.replace(parts, frames=frames, manifest=encoded))

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
def original(tmp_path: Path) -> tuple[Path, World]:
    """A small store with all kinds of files."""
    path = tmp_path / "original" / "store"
    with repeatable(seed=1), Store.open(path, writable=True) as store:
        first = put_to_sleep(store, FIRST)
        put_to_sleep(store, FORK, first)
        put_to_sleep(store, _PLAIN)
        put_to_sleep(store, _BARE)
        store.strip(_BARE.uri)
        store.tag(FIRST.uri, 1, "kept")
    bare = dataclasses.replace(_BARE, whole=0, is_stripped=True)
    return path, frozenset({FIRST, FORK, _PLAIN, bare})


_PLAIN = Version(SessionUri("work", "plain"), 1, 20, seed=3, period=16)
_BARE = Version(SessionUri("work", "bare"), 1, 30, seed=4)
FORK = Version(OTHER_URI, 1, 300)


def harmed(path: Path, name: str, data: bytes, world: World) -> str:
    """How a store with this content in one of its files is not what it promises; "" if it is."""
    making.put(path / name, data)
    try:
        store = Store.open(path, writable=False)
    except StoreError:
        return "" if name == "store.json" else "it does not open"
    with store:
        if name == "store.json":
            return "a damaged store.json is believed"
        told = bool(store.opening.unreadable) or not store.verify(deep=True).ok
        if not told:
            return "nothing is told"
        for fact in sorted(world, key=str):
            try:
                require_right(store, fact)
            except Broken as error:
                return str(error)
            except StoreError:
                if name in ("index.sqlite", "marks.json"):
                    return f"{fact} does not wake"
    return ""


def every(original: Path, *, one_in: int) -> Iterator[tuple[str, bytes, bytes]]:
    """Each file, with one bit changed or cut off anywhere: its name, its content, and what becomes of it. Of the index,
    which has one digest over all of it, one bit of each byte, and each eighth cut."""
    number = itertools.count(share())
    names = [*files_of(original), "store.json"]
    for name in names:
        data = (original / name).read_bytes()
        step = 8 if name == "index.sqlite" else 1
        for place in range(0, 8 * len(data), step):
            if next(number) % one_in == 0:
                changed = bytearray(data)
                changed[place // 8] ^= 1 << (place // 8 + place) % 8
                yield name, data, bytes(changed)
        yield from ((name, data, data[:size]) for size in range(0, len(data), step) if next(number) % one_in == 0)


def require_found(original: tuple[Path, World], *, one_in: int) -> None:
    path, world = original
    tried, missed = 0, []
    for name, data, changed in every(path, one_in=one_in):
        tried += 1
        if why := harmed(path, name, changed, world):
            missed.append((name, why))
        making.put(path / name, data)
    assert not missed, missed[:5]
    assert tried > 50
    tell(f"bits changed and cuts in the files of a store, one in {one_in}", tried)


@pytest.mark.one_in(1)
def test_t5_bits_and_cuts_in_every_file_of_a_store_are_found(original: tuple[Path, World]) -> None:
    require_found(original, one_in=1009)


@pytest.mark.heavy
@pytest.mark.timeout(7200)
def test_t5_every_bit_and_every_cut_in_every_file_of_a_store_is_found(original: tuple[Path, World]) -> None:
    require_found(original, one_in=1)


@pytest.mark.heavy
@pytest.mark.timeout(3600)
def test_t5_every_bit_and_every_cut_of_an_exported_file_is_found(store: Store, tmp_path: Path) -> None:
    """A deep check refuses each; a wake refuses it, or gives the exact bytes (padding is not read by it)."""
    path = exported(store, sleep(store, 600, layers=1, dim=2, heads=1), tmp_path / "exported")
    data, intact = path.read_bytes(), wake_all(path)
    for byte, bit in itertools.product(range(len(data)), range(8)):
        changed = bytearray(data)
        changed[byte] ^= 1 << bit
        path.write_bytes(changed)
        with pytest.raises(StoreError):
            verify_all(path)
        if bit == byte % 8:
            with contextlib.suppress(StoreError):
                assert wake_all(path) == intact
    for size in range(len(data)):
        path.write_bytes(data[:size])
        for read in (verify_all, wake_all):
            with pytest.raises(StoreError):
                read(path)
    tell("bits changed and cuts in an exported file", 9 * len(data))
