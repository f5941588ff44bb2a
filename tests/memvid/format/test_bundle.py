"""What a reader does with damage: every flipped bit, every cut, every swap (threats 1 to 9, 15, 23; GM2, GM3, QX14)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blake3 import blake3
from torpor.memvid import BlockEntry, Identity, Store
from torpor.memvid.errors import (
    BlockMissing,
    BundleMismatch,
    BundleMissing,
    CorruptBlock,
    CorruptBundle,
    Corruption,
    IndexMismatch,
    LimitExceeded,
    OwnerMismatch,
    ParentMismatch,
    ReadBackFailed,
    StoreError,
    TrailingData,
    Truncated,
    UnsupportedFormat,
    VersionMismatch,
)
from torpor.memvid.format import bundle, writer
from torpor.memvid.format.blocks import BlockHeader
from torpor.memvid.format.bundle import BundleFile
from torpor.memvid.format.directory import Directory
from torpor.memvid.format.layout import HEADER_BYTES, TRAILER_BYTES, StoredSlot
from torpor.memvid.format.manifest import decode_manifest
from torpor.memvid.format.reader import BundleReader
from torpor.tests.memvid.resealing import Parts, reseal, taken_apart
from torpor.tests.memvid.store_making import (
    OTHER_URI,
    URI,
    bundle_path,
    contents,
    expected,
    flip,
    frame_of,
    reopened,
    require_awake,
    sleep,
    sleep_compressed,
)


def read_all(path: Path, bundle_id: bytes) -> list[list[bytes]]:
    """What a wake reads of a bundle that needs no other."""
    with contextlib.closing(BundleFile(os.open(path, os.O_RDONLY), str(path), bundle_id)) as file:
        blocks = []
        for block_id in file.frames:
            header, head = file.read_head(block_id)
            slots = []
            for number, (spec, _) in enumerate(header.slots):
                slot = bytearray(spec.size_bytes)
                file.read_slots_into(block_id, header, head, [(number, [memoryview(slot)])])
                slots.append(bytes(slot))
            blocks.append(slots)
        return blocks


def check_all(path: Path, bundle_id: bytes) -> None:
    """What a deep verify reads of it."""
    with contextlib.closing(BundleFile(os.open(path, os.O_RDONLY), str(path), bundle_id)) as file:
        for block_id in file.frames:
            file.check_block(block_id)


@pytest.fixture
def wake_twice(store: Store) -> Iterator[tuple[Store, Path]]:
    """A sleeping session, and its file to damage; afterwards the other session must be as it was."""
    sleep(store, 200, uri=OTHER_URI, seed=9)
    receipt = sleep(store, 300)
    yield store, bundle_path(store, receipt.bundle_id)
    require_awake(store, 200, uri=OTHER_URI, seed=9)


def wake(store: Store) -> list[list[bytes]]:
    with store.open_session(URI) as reader:
        reader.tokens()
        return contents(reader)


# --- one flipped bit


def place(file: Path, part: str) -> int:
    """A byte of each part of a bundle whose first frame has four slots."""
    data = file.read_bytes()
    manifest_offset = int.from_bytes(data[-TRAILER_BYTES + 8 :][:8], "little")
    header_bytes = int.from_bytes(data[HEADER_BYTES + 8 :][:4], "little")
    return {
        "header digest": 40,
        "header length": 17,
        "frame prefix": HEADER_BYTES + 16,
        "frame prefix zeros": HEADER_BYTES + 30,
        "frame digest": HEADER_BYTES + 33,
        "block header": HEADER_BYTES + 64 + header_bytes // 2,
        "storage table codec": HEADER_BYTES + 64 + header_bytes,
        "storage table zeros": HEADER_BYTES + 64 + header_bytes + 4,
        "storage table length": HEADER_BYTES + 64 + header_bytes + 8,
        "storage table digest": HEADER_BYTES + 64 + header_bytes + 20,
        "payload": manifest_offset // 2,
        "manifest": manifest_offset + 50,
        "block list": data.index(b"\xa6blocks") + 30,
        "directory": data.index(b"\xa6frames") + 30,
        "trailer magic": len(data) - TRAILER_BYTES,
        "trailer offset": len(data) - TRAILER_BYTES + 8,
        "trailer id": len(data) - TRAILER_BYTES + 40,
        "trailer digest": len(data) - 1,
    }[part]


@pytest.mark.parametrize(
    "part",
    [
        *("header digest", "header length", "frame prefix", "frame prefix zeros", "frame digest", "block header"),
        *("storage table codec", "storage table zeros", "storage table length", "storage table digest", "payload"),
        *("manifest", "block list", "directory", "trailer magic", "trailer offset", "trailer id", "trailer digest"),
    ],
)
def test_threat_2_one_flipped_bit_is_refused_by_a_wake(wake_twice: tuple[Store, Path], part: str) -> None:
    store, file = wake_twice
    flip(file, place(file, part))
    with pytest.raises(CorruptBlock if part == "payload" else CorruptBundle) as refusal:
        wake(store)
    assert str(file) in refusal.value.message
    report = store.verify(deep=True)
    assert [finding.path for finding in report.findings] == [str(file)]
    flip(file, place(file, part))
    require_awake(store, 300)


def sweep(store: Store, bundle_id: bytes) -> int:
    """Flip each bit of a bundle in turn: a deep check must refuse, a wake must refuse or give the exact bytes."""
    file = bundle_path(store, bundle_id)
    original = file.read_bytes()
    intact = read_all(file, bundle_id)
    missed = []
    fd = os.open(file, os.O_RDWR)
    for byte, value in enumerate(original):
        for bit in range(8):
            os.pwrite(fd, bytes([value ^ 1 << bit]), byte)
            try:
                check_all(file, bundle_id)
                missed.append((byte, bit))
            except StoreError:
                pass
            if bit == byte % 8:  # the wake path on every byte, one bit each
                with contextlib.suppress(StoreError):
                    assert read_all(file, bundle_id) == intact
        os.pwrite(fd, bytes([value]), byte)
    os.close(fd)
    assert not missed
    check_all(file, bundle_id)
    return len(original) * 8


@pytest.mark.one_in(6)
def test_t5_every_single_bit_flip_of_a_small_bundle_is_found(store: Store) -> None:
    receipt = sleep(store, 14, layers=2, dim=14)
    assert sweep(store, receipt.bundle_id) > 32_000


def test_t5_every_single_bit_flip_of_a_compressed_bundle_is_found(store: Store) -> None:
    receipt = sleep_compressed(store)
    assert b"\x28\xb5\x2f\xfd" in bundle_path(store, receipt.bundle_id).read_bytes()
    assert sweep(store, receipt.bundle_id) > 6_000


# --- cuts and additions


@pytest.mark.parametrize("compressed", [False, True])
def test_threat_1_a_bundle_cut_at_any_byte_is_truncated(store: Store, compressed: bool) -> None:
    receipt = sleep(store, 4, layers=1, dim=3) if not compressed else sleep_compressed(store)
    file = bundle_path(store, receipt.bundle_id)
    data = file.read_bytes()
    for size in range(len(data) - 1, -1, -1):
        os.truncate(file, size)
        with pytest.raises(Truncated):
            read_all(file, receipt.bundle_id)
    assert [finding.code for finding in store.verify(deep=False).findings] == ["truncated"]
    file.write_bytes(data)
    assert store.verify(deep=True).ok


@pytest.mark.parametrize(
    "addition",
    [lambda data: b"\0", lambda data: b"garbage", lambda data: bytes(4096), lambda data: data],
    ids=["a zero", "garbage", "a page of zeros", "the bundle again"],
)
def test_threat_4_bytes_after_the_trailer_are_refused(
    wake_twice: tuple[Store, Path], addition: Callable[[bytes], bytes]
) -> None:
    store, file = wake_twice
    data = file.read_bytes()
    file.write_bytes(data + addition(data))
    with pytest.raises(TrailingData):
        wake(store)


def test_threat_3_a_tail_of_zeros_is_refused(wake_twice: tuple[Store, Path]) -> None:
    store, file = wake_twice
    data = file.read_bytes()
    for kept in (0, HEADER_BYTES, len(data) // 2, len(data) - TRAILER_BYTES):
        file.write_bytes(data[:kept] + bytes(len(data) - kept))
        with pytest.raises(CorruptBundle):
            wake(store)


def test_a_file_that_is_gone_is_named(wake_twice: tuple[Store, Path]) -> None:
    store, file = wake_twice
    file.unlink()
    with pytest.raises(BundleMissing) as refusal:
        wake(store)
    assert refusal.value.path == str(file)


def test_threat_23_a_bundle_of_a_later_version_is_refused_and_not_touched(store: Store) -> None:
    sleep(store, 200, uri=OTHER_URI, seed=9)
    file = bundle_path(store, sleep(store, 300).bundle_id)
    data = bytearray(file.read_bytes())
    data[8] = 2
    data[32:64] = blake3(bytes(data[:32])).digest()
    file.write_bytes(data)
    with pytest.raises(UnsupportedFormat) as refusal:
        wake(store)
    assert (refusal.value.found, refusal.value.supported) == (2, 1)
    assert file.read_bytes() == data
    with reopened(store) as again:
        assert file.read_bytes() == data
        require_awake(again, 200, uri=OTHER_URI, seed=9)
        with pytest.raises(UnsupportedFormat):
            wake(again)


def test_a_damaged_version_number_is_damage_and_no_later_version(wake_twice: tuple[Store, Path]) -> None:
    store, file = wake_twice
    for bit in range(32):
        good = flip(file, 8 + bit // 8, 1 << bit % 8)
        with pytest.raises(CorruptBundle, match="its digest differs"):
            wake(store)
        file.write_bytes(good)


# --- a sound bundle that is not the promised one


def edit_index(store: Store, statement: str, *values: object) -> None:
    """Change a row behind the store's back, as a hand that knows the index would."""
    with store.index._transaction():  # nobody else can open the file
        assert store.index._connection.execute(statement, values).rowcount == 1


@pytest.fixture
def twins(store: Store) -> tuple[Store, bytes, bytes]:
    """Two sessions of the same model, length and labels, with other contents."""
    return store, sleep(store, 300, seed=1).bundle_id, sleep(store, 300, uri=OTHER_URI, seed=2).bundle_id


def repoint(store: Store, mine: bytes, others: bytes) -> None:
    edit_index(store, "UPDATE bundles SET bundle_id = x'00' WHERE bundle_id = ?", others)
    edit_index(store, "UPDATE bundles SET bundle_id = ? WHERE bundle_id = ?", others, mine)
    edit_index(store, "UPDATE bundles SET bundle_id = ? WHERE bundle_id = x'00'", mine)


def test_threat_7_gm2_a_row_repointed_to_another_session_s_bundle_is_refused(twins: tuple[Store, bytes, bytes]) -> None:
    store, mine, others = twins
    repoint(store, mine, others)
    with pytest.raises(OwnerMismatch) as refusal:
        store.open_session(URI)
    assert (refusal.value.expected, refusal.value.found) == (str(URI), str(OTHER_URI))
    assert {finding.code for finding in store.verify(deep=False).findings} == {"owner_mismatch", "index_mismatch"}
    assert {finding.code for finding in store.verify(URI, deep=False).findings} == {"owner_mismatch", "index_mismatch"}
    repoint(store, others, mine)
    require_awake(store, 300, seed=1)
    require_awake(store, 300, uri=OTHER_URI, seed=2)


@pytest.mark.parametrize("writable", [True, False])
def test_threat_7_a_repointed_row_is_refused_by_a_store_that_is_opened_later(
    twins: tuple[Store, bytes, bytes], writable: bool
) -> None:
    store, mine, others = twins
    repoint(store, mine, others)
    store.close()
    with Store.open(store.path, writable=writable) as again:
        assert again.opening.index_rebuilt is None
        for uri in (URI, OTHER_URI):
            with pytest.raises(OwnerMismatch):
                again.open_session(uri)


def test_threat_7_gm2_files_of_two_sessions_swapped_are_refused(twins: tuple[Store, bytes, bytes]) -> None:
    store, mine, others = twins
    one, two = bundle_path(store, mine), bundle_path(store, others)

    def swap() -> None:
        one.rename(one.with_suffix(".x"))
        two.rename(one)
        one.with_suffix(".x").rename(two)

    swap()
    for uri in (URI, OTHER_URI):
        with pytest.raises(BundleMismatch):
            store.open_session(uri)
    assert {finding.code for finding in store.verify(deep=False).findings} == {"bundle_mismatch"}
    swap()
    require_awake(store, 300, seed=1)


def test_gm3_an_older_version_passed_off_as_the_latest_is_refused(store: Store) -> None:
    first, second = sleep(store, 300, seed=1), sleep(store, 300, seed=2)
    repoint(store, first.bundle_id, second.bundle_id)
    with pytest.raises(VersionMismatch):
        store.open_session(URI)


def test_another_parent_in_the_index_is_refused(store: Store) -> None:
    first = sleep(store, 300)
    second = sleep(store, 400, before=first)
    edit_index(store, "UPDATE bundles SET parent = ? WHERE bundle_id = ?", bytes(32), second.bundle_id)
    with pytest.raises(ParentMismatch):
        store.open_session(URI)


@pytest.mark.parametrize(
    ("column", "value", "field"),
    [
        ("identity_digest", bytes(32), "identity"),
        ("token_count", 299, "token_count"),
        ("token_count", 1 << 62, "token_count"),
        ("token_count", -1, "token_count"),
        ("logical_bytes", 1, "facts"),
        ("created_ns", 1, "facts"),
        ("model", "another", "facts"),
        ("labels", "[]", "facts"),
    ],
)
def test_threat_8_any_other_fact_in_the_index_is_refused(store: Store, column: str, value: object, field: str) -> None:
    receipt = sleep(store, 300)
    edit_index(store, f"UPDATE bundles SET {column} = ? WHERE bundle_id = ?", value, receipt.bundle_id)
    with pytest.raises(IndexMismatch) as refusal:
        store.open_session(URI)
    assert refusal.value.field == field


# --- bundles resealed by a hand that knows the format: every digest but the block ids is right


def refused_when_read(store: Store, bundle_id: bytes, kind: type[StoreError] = Corruption) -> None:
    """A wake refuses it, and so does a deep verify, which finds it among the files."""
    with pytest.raises(kind), store.open_bundle(bundle_id) as reader:
        assert (reader.tokens(), contents(reader)) != ()
    path = str(bundle_path(store, bundle_id))
    assert [finding for finding in store.verify(deep=True).findings if finding.path == path]


def test_a_resealed_copy_is_accepted(store: Store) -> None:
    """The helper below must make bundles that differ from good ones in nothing but the change."""
    receipt = sleep(store, 300)
    copy = reseal(store, receipt.bundle_id, lambda parts: None)
    assert copy == receipt.bundle_id
    with store.open_bundle(copy) as reader:
        assert contents(reader) == expected(300)


@pytest.mark.parametrize(("kept", "kind"), [("nothing", CorruptBundle), ("head", CorruptBlock)])
def test_threat_5_a_frame_or_payloads_of_another_bundle_are_refused(
    store: Store, kept: str, kind: type[StoreError]
) -> None:
    mine, others = sleep(store, 300, seed=1), sleep(store, 300, uri=OTHER_URI, seed=2)
    frame = frame_of(store, mine.entries[0])
    foreign = bundle_path(store, others.bundle_id).read_bytes()
    start, end = frame.offset + (frame.head_bytes if kept == "head" else 0), frame.offset + frame.frame_bytes

    def change(parts: Parts) -> None:
        parts.frames[start:end] = foreign[start:end]

    refused_when_read(store, reseal(store, mine.bundle_id, change), kind)


Change = Callable[[Parts], object]


def swap_k_and_v(parts: Parts) -> None:
    """Of the first layer, both as long as each other."""
    frame, size = parts.directory.frames[0], 2 * 256 * 4 * 2
    k = frame.offset + frame.head_bytes
    parts.frames[k : k + 2 * size] = parts.frames[k + size : k + 2 * size] + parts.frames[k : k + size]


def listed(edit: Callable[..., tuple[BlockEntry, ...]]) -> Change:
    return lambda parts: parts.change_manifest(blocks=edit(*decode_manifest(parts.manifest, "original").blocks))


def first_listed(**changes: object) -> Change:
    return listed(lambda first, *others: (dataclasses.replace(first, **changes), *others))


def first_frame(**changes: object) -> Change:
    """Under the same bundle id, as is all that changes nothing but the directory."""

    def change(parts: Parts) -> None:
        first, *others = parts.directory.frames
        parts.change_directory(frames=(dataclasses.replace(first, **changes), *others))

    return change


def name_itself_as_another_holder(parts: Parts) -> None:
    first, *others = parts.directory.frames
    del parts.frames[first.offset : first.offset + first.frame_bytes]
    moved = tuple(dataclasses.replace(frame, offset=frame.offset - first.frame_bytes) for frame in others)
    parts.change_directory(frames=moved, places=(1, 0, 0), holders=(parts.original,))


LIES: dict[str, tuple[Change, type[StoreError]]] = {
    "4: zeros that no digest covers": (lambda parts: parts.frames.extend(bytes(64)), CorruptBundle),
    "4: bytes that no digest covers": (lambda parts: parts.frames.extend(b"x" * 64), CorruptBundle),
    "6: keys for values": (swap_k_and_v, CorruptBlock),
    "6: blocks in another order": (listed(lambda one, two, state: (two, one, state)), Corruption),
    # Two full spans of one chain, of one size: only what their headers say of place and parent tells them apart.
    "6: blocks that trade their ids": (
        listed(lambda a, b, state: (dataclasses.replace(a, id=b.id), dataclasses.replace(b, id=a.id), state)),
        Corruption,
    ),
    **{
        f"8: a length of {count}": (functools.partial(Parts.change_manifest, token_count=count), Corruption)
        for count in (511, 513, 1 << 40)
    },
    "8: no bytes in a block": (first_listed(raw_bytes=0), Corruption),
    "8: another start": (first_listed(start=256), Corruption),
    "8: fewer tokens": (first_listed(token_count=10), Corruption),
    "8: another kind": (first_listed(kind="state"), Corruption),
    "8: another block": (first_listed(id=bytes(32)), Corruption),
    "9: another identity": (
        functools.partial(Parts.change_manifest, identity=Identity((("weights", "another"),))),
        Corruption,
    ),
    **{
        f"15: a frame with {next(iter(change.items()))!r}": (first_frame(**change), CorruptBundle)
        for change in (
            *({"offset": 128}, {"offset": 1 << 49}, {"head_bytes": 64}, {"head_bytes": 1 << 31}),
            *({"frame_bytes": 64}, {"frame_bytes": 1 << 43}, {"id": bytes(32)}),
        )
    },
    **{
        f"15: places {places} of {len(holders)} holders": (
            functools.partial(Parts.change_directory, places=places, holders=holders),
            CorruptBundle,
        )
        for places, holders in (
            *(((0, 0), ()), ((0, 0, 0, 0), ()), ((0, 0, 1), ()), ((0, 0, 0), (b"h" * 32,)), ((1, 0, 0), (b"h" * 32,))),
            *(((0, 2, 1), (b"h" * 32, b"i" * 32)), ((1, 2, 0), (b"h" * 32, b"h" * 32))),
        )
    },
    "15: itself as another holder": (name_itself_as_another_holder, CorruptBundle),
}
"""By the number of the threat."""


@pytest.mark.parametrize(("change", "kind"), LIES.values(), ids=LIES)
def test_threats_4_6_8_9_15_a_resealed_bundle_that_lies_is_refused(
    store: Store, change: Change, kind: type[StoreError]
) -> None:
    refused_when_read(store, reseal(store, sleep(store, 512).bundle_id, change), kind)


def blocks_of(store: Store, bundle_id: bytes) -> tuple[BlockEntry, ...]:
    return decode_manifest(taken_apart(store, bundle_id).manifest, "original").blocks


def led_to(parts: Parts, blocks: tuple[BlockEntry, ...], holders: dict[bytes, bytes]) -> None:
    """Let a bundle list other blocks, and look for those that are not its own where `holders` says."""
    parts.change_manifest(blocks=tuple(entry.held_by(None) for entry in blocks))
    parts.directory = Directory.of(parts.directory.frames, blocks, holders)


def test_a_block_of_another_bundle_that_follows_another_parent_is_refused(store: Store) -> None:
    """The second span of one session, put behind the first span of another."""
    one = sleep(store, 512, seed=1)
    two = sleep(store, 512, uri=OTHER_URI, seed=2)
    own = blocks_of(store, one.bundle_id)
    mixed = (own[0], two.entries[1], own[2])
    changed = reseal(store, one.bundle_id, lambda parts: led_to(parts, mixed, {two.entries[1].id: two.bundle_id}))
    refused_when_read(store, changed, CorruptBundle)


def test_a_block_of_the_bundle_itself_that_follows_another_parent_is_refused(store: Store) -> None:
    one = sleep(store, 256, seed=1)
    two = sleep(store, 256, uri=OTHER_URI, seed=2)
    delta = sleep(store, 300, seed=1, before=one)
    edited = (two.entries[0], *blocks_of(store, delta.bundle_id)[1:])
    changed = reseal(store, delta.bundle_id, lambda parts: led_to(parts, edited, {two.entries[0].id: two.bundle_id}))
    refused_when_read(store, changed, CorruptBundle)


def test_a_head_above_the_limit_is_refused_before_it_is_read(store: Store) -> None:
    mine = sleep(store, 300)
    path = bundle_path(store, mine.bundle_id)
    file = BundleFile(os.open(path, os.O_RDONLY), str(path), None)
    first = mine.entries[0].id
    file.frames[first] = dataclasses.replace(file.frames[first], head_bytes=1 << 40)
    with contextlib.closing(file), pytest.raises(LimitExceeded):
        file.read_head(first)


@pytest.mark.parametrize(
    "stored",
    [*(StoredSlot(code, 8, bytes(32)) for code in (1, 3)), StoredSlot(2, 64, bytes(32)), StoredSlot(0, 63, bytes(32))],
)
def test_threat_14_a_slot_stored_in_an_unknown_or_growing_way_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch, stored: StoredSlot
) -> None:
    """Written by a writer that errs, and so already refused when it is read back."""
    data = [memoryview(bytes(stored.stored_bytes))]
    monkeypatch.setattr(writer, "_stored", lambda *_, **__: (stored, data))
    with pytest.raises(ReadBackFailed) as refusal:
        sleep(store, 1, layers=1, dim=4)
    assert refusal.value.cause == "corrupt_bundle"


def test_a_store_with_a_slot_of_the_codec_that_went_opens_and_refuses_that_version_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 was zstd without planes, and no release wrote it."""
    sleep(store, 300, uri=OTHER_URI)
    monkeypatch.setattr(writer, "PLANES_CODE", 1)
    monkeypatch.setattr(bundle, "CODES", (0, 1))
    sleep_compressed(store)
    monkeypatch.undo()
    path = store.path
    store.close()
    with Store.open(path, writable=True) as again:
        assert again.opening.unreadable == ()
        require_awake(again, 300, uri=OTHER_URI)
        with again.open_session(URI) as reader, pytest.raises(CorruptBundle, match="unknown codec 1"):
            read_blocks(reader)
        assert not again.verify(deep=True).ok
        again.delete_session(URI)
        assert again.verify(deep=True).ok


def test_an_ancestor_that_lost_its_block_is_refused(store: Store) -> None:
    first = sleep(store, 600)
    sleep(store, 700, before=first)
    file = bundle_path(store, first.bundle_id)
    frame = frame_of(store, first.entries[0])
    flip(file, frame.offset + frame.head_bytes + 5)
    with store.open_session(URI) as reader:
        assert len(reader.tokens()) == 2800
        with pytest.raises(CorruptBlock, match=first.bundle_id.hex()):
            contents(reader)
    file.unlink()
    with store.open_session(URI) as reader, pytest.raises(BundleMissing):
        reader.tokens()
    codes = {finding.code for finding in store.verify(URI, deep=True).findings}
    assert codes == {"bundle_missing"}


def test_a_holder_that_does_not_hold_the_block_is_refused(store: Store) -> None:
    first = sleep(store, 600)
    second = sleep(store, 700, before=first)
    other = sleep(store, 300, uri=OTHER_URI, seed=5)
    moved = {entry.id: other.bundle_id for entry in second.entries if entry.bundle_id == first.bundle_id}
    blocks = blocks_of(store, second.bundle_id)
    assert reseal(store, second.bundle_id, lambda parts: led_to(parts, blocks, moved)) == second.bundle_id
    refused_when_read(store, second.bundle_id, BlockMissing)


def test_a_live_bundle_without_a_manifest_is_refused_and_reported(store: Store) -> None:
    """Under the version's own name, every digest right: only a retired file may hold nothing but blocks."""
    mine = sleep(store, 300)

    def strip(parts: Parts) -> None:
        parts.manifest = b""
        parts.change_directory(places=())

    stripped = bundle_path(store, reseal(store, mine.bundle_id, strip, keep_id=True))
    refused_when_read(store, mine.bundle_id, CorruptBundle)
    path = store.path
    store.close()
    for writable in (True, False):
        with Store.open(path, writable=writable) as again:
            assert [finding.code for finding in again.verify(deep=True).findings] == ["corrupt_bundle"]
    (Path(path) / "index.sqlite").unlink()
    with Store.open(path, writable=True) as again:
        assert [finding.path for finding in again.opening.unreadable] == [str(stripped)]


# --- slots of a block, read together


def read_blocks(reader: BundleReader) -> list[list[bytes]]:
    """Every slot of every block, each block's in one call."""
    headers = [reader.read_header(entry) for entry in reader.entries]
    read = []
    for entry, header in zip(reader.entries, headers, strict=True):
        targets = buffers_for(header)
        reader.read_slots_into(entry, enumerate(targets))
        read.append([b"".join(buffers) for buffers in targets])
    return read


def buffers_for(header: BlockHeader) -> list[list[memoryview]]:
    """Memory for each slot of a block, each in three pieces, one of them of no bytes."""
    targets = []
    for spec, _ in header.slots:
        whole = memoryview(bytearray(b"\xee" * spec.size_bytes))
        targets.append([whole[:5], whole[5:5], whole[5:]])
    return targets


@pytest.mark.parametrize("compressed", [False, True])
def test_slots_read_together_are_what_each_of_them_is(store: Store, compressed: bool) -> None:
    sleep(store, 300, compressed=compressed, period=64)
    with store.open_session(URI) as reader:
        assert read_blocks(reader) == expected(300, period=64)
        some = buffers_for(reader.read_header(reader.entries[0]))
        reader.read_slots_into(reader.entries[0], [(1, some[1])])
        assert b"".join(some[1]) == expected(300, period=64)[0][1]


def test_buffers_that_do_not_add_up_are_refused_before_anything_is_read(store: Store) -> None:
    sleep(store, 30)
    with store.open_session(URI) as reader:
        for wrong in (0, 7, 1 << 20):
            target = memoryview(bytearray(b"\xee" * wrong))
            with pytest.raises(LimitExceeded):
                reader.read_slots_into(reader.entries[0], [(0, [target])])
            assert set(target) <= {0xEE}


def test_a_flip_in_raw_bytes_is_seen(wake_twice: tuple[Store, Path]) -> None:
    store, file = wake_twice
    flip(file, place(file, "payload"))
    with store.open_session(URI) as reader, pytest.raises(CorruptBlock):
        read_blocks(reader)
    flip(file, place(file, "payload"))


@pytest.mark.parametrize(
    "part",
    ["frame prefix", "frame digest", "block header", "storage table codec", "storage table length", "block list"],
)
def test_a_read_refuses_all_damage_outside_of_raw_bytes(wake_twice: tuple[Store, Path], part: str) -> None:
    store, file = wake_twice
    flip(file, place(file, part))
    with pytest.raises(CorruptBundle), store.open_session(URI) as reader:
        read_blocks(reader)
    flip(file, place(file, part))


def test_a_read_refuses_compressed_bytes_that_are_not_those_that_were_written(store: Store) -> None:
    receipt = sleep_compressed(store)
    file = bundle_path(store, receipt.bundle_id)
    flip(file, file.read_bytes().index(b"\x28\xb5\x2f\xfd") + 10)
    with store.open_session(URI) as reader, pytest.raises(CorruptBlock):
        read_blocks(reader)


def test_a_read_of_a_file_that_was_cut_since_it_was_opened_is_truncated(store: Store) -> None:
    receipt = sleep(store, 600)
    file = bundle_path(store, receipt.bundle_id)
    with store.open_session(URI) as reader:
        for entry in reader.entries:
            reader.read_header(entry)
        os.truncate(file, file.stat().st_size // 2)
        with pytest.raises(Truncated):
            read_blocks(reader)


@pytest.mark.parametrize("read_bytes", [1, 2000, 1 << 20])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [1, 2], [0, 3], [2, 2]])
def test_slots_come_in_whatever_order_and_however_many_are_read_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, order: list[int], read_bytes: int
) -> None:
    monkeypatch.setattr(bundle, "READ_BYTES", read_bytes)
    sleep(store, 30)
    with store.open_session(URI) as reader:
        entry = reader.entries[0]
        targets = [(index, buffers_for(reader.read_header(entry))[index]) for index in order]
        reader.read_slots_into(entry, targets)
        assert [b"".join(buffers) for _, buffers in targets] == [expected(30)[0][index] for index in order]


def test_slots_that_lie_side_by_side_are_read_in_one_call(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep(store, 32)  # slots of 512 bytes: no padding between them
    calls, real = list[int](), os.preadv
    with store.open_session(URI) as reader:
        entry = reader.entries[0]
        targets = buffers_for(reader.read_header(entry))
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: calls.append(len(buffers)) or real(fd, buffers, at))
        reader.read_slots_into(entry, enumerate(targets))
    assert calls == [sum(map(len, targets))]
