"""A pack's bytes: all that is damaged, cut, longer, out of place or of another kind is refused, in little memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torpor.memvid import errors
from torpor.memvid.format import pack as module
from torpor.memvid.format.layout import Frame, encode_frame_head
from torpor.memvid.format.pack import (
    TRAILER,
    PackFile,
    Trailer,
    decode_directory,
    encode_directory,
    pack_id_of,
)
from torpor.memvid.format.pack_writer import PackWriter
from torpor.memvid.format.records import Receipt
from torpor.memvid.format.sealing import HEADER_BYTES, MANIFEST_MAGIC, PACK_MAGIC, encode_header, require_header
from torpor.memvid.limits import MAX_DIRECTORY_BYTES, MAX_MANIFEST_BYTES
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import OTHER_URI, URI, contents, drafts, expected, pack_of, put, sleep, write

TINY = {"layers": 1, "heads": 1, "dim": 1}


def id_of(pack: Path) -> bytes:
    return bytes.fromhex(pack.stem)


def opened(pack: Path, expected_id: bytes | None = None) -> PackFile:
    return PackFile(os.open(pack, os.O_RDONLY), str(pack), expected_id or id_of(pack))


def check_all(pack: Path) -> None:
    """What a deep verify reads of it."""
    with opened(pack) as file:
        file.encoded_manifest()
        for block_id in file.frames:
            file.check_block(block_id)
        for block_id in file.heads:
            file.read_head(block_id)


@pytest.fixture
def made(store: Store) -> Iterator[tuple[Receipt, Path]]:
    """A small session and its pack to damage; afterwards the other session must be as it was."""
    sleep(store, 20, uri=OTHER_URI, seed=9)
    receipt = write(store, drafts(5, **TINY), 5)
    yield receipt, pack_of(store, receipt)
    making.require_awake(store, 20, uri=OTHER_URI, seed=9)


# --- damage


@pytest.mark.parametrize("kind", ["raw", "compressed"])
def test_t5_threat_2_a_flipped_bit_in_any_byte_is_found_and_no_wake_gives_other_bytes(store: Store, kind: str) -> None:
    receipt = write(store, drafts(3, **TINY), 3) if kind == "raw" else making.sleep_compressed(store)
    pack = pack_of(store, receipt)
    good = pack.read_bytes()
    with store.open_session(URI) as reader:
        right = contents(reader)
    for byte in range(len(good)):
        bad = bytearray(good)
        bad[byte] ^= 1 << byte % 8
        pack.write_bytes(bad)
        with pytest.raises((errors.Corruption, errors.UnsupportedFormat)):
            check_all(pack)
        if byte % 31 == 0:
            with contextlib.suppress(errors.StoreError), store.open_session(URI) as reader:
                assert contents(reader) == right
    pack.write_bytes(good)
    check_all(pack)


def test_threats_1_3_a_pack_cut_at_any_byte_or_ending_in_zeros_is_refused(made: tuple[Receipt, Path]) -> None:
    _, pack = made
    good = pack.read_bytes()
    for size in range(len(good)):
        pack.write_bytes(good[:size])
        with pytest.raises(errors.Truncated):
            opened(pack)
        if size % 256 == 0:
            pack.write_bytes(good[:size].ljust(len(good), b"\0"))  # as a filesystem leaves what was never written
            with pytest.raises(errors.CorruptBundle):
                opened(pack)


@pytest.mark.parametrize("more", [b"\0", b"x" * 64, b"\0" * 5000])
def test_threat_4_bytes_after_the_end_are_refused(made: tuple[Receipt, Path], more: bytes) -> None:
    _, pack = made
    pack.write_bytes(pack.read_bytes() + more)
    with pytest.raises(errors.TrailingData):
        opened(pack)


def test_threat_7_a_pack_under_another_name_is_refused(made: tuple[Receipt, Path]) -> None:
    _, pack = made
    with pytest.raises(errors.BundleMismatch):
        opened(pack, bytes(32))


def test_threat_23_a_pack_of_a_later_version_is_refused_and_damage_is_not_taken_for_one(
    made: tuple[Receipt, Path],
) -> None:
    _, pack = made
    good = pack.read_bytes()
    later = making.of_a_later_version(good)
    pack.write_bytes(later[:32] + good[32:])
    with pytest.raises(errors.CorruptBundle):
        opened(pack)
    pack.write_bytes(later)
    with pytest.raises(errors.UnsupportedFormat) as refused:
        opened(pack)
    assert (refused.value.found, refused.value.supported) == (3, 2)
    assert pack.read_bytes() == later


def test_a_manifest_is_no_pack_and_a_pack_no_manifest() -> None:
    for magic, other in ((PACK_MAGIC, MANIFEST_MAGIC), (MANIFEST_MAGIC, PACK_MAGIC)):
        with pytest.raises(errors.CorruptBundle):
            require_header(encode_header(magic, 64), other, 64, "x")
        require_header(encode_header(magic, 64), magic, 64, "x")


def test_a_directory_that_names_another_block_is_refused_when_the_pack_is_opened(made: tuple[Receipt, Path]) -> None:
    """Else a pack could be taken for one that has it, or not."""
    receipt, pack = made
    good = pack.read_bytes()
    at = good.rindex(receipt.entries[0].id)
    pack.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    with pytest.raises(errors.CorruptBundle, match="directory"):
        opened(pack)


# --- a hand that knows the format


@dataclasses.dataclass
class Parts:
    """A pack taken apart, to be changed."""

    frames: bytearray  # header included
    directory: tuple[Frame, ...]

    def first(self, **changes: object) -> None:
        first, *others = self.directory
        self.directory = (dataclasses.replace(first, **changes), *others)  # type: ignore[arg-type]

    def write(self, folder: Path) -> Path:
        """Under its new id, with every digest right but those of blocks and slots."""
        encoded = encode_directory(self.directory)
        trailer = Trailer(len(self.frames), 0, len(encoded), pack_id_of(encoded))
        pack = folder / f"{trailer.pack_id.hex()}.mvp"
        put(pack, encode_header(PACK_MAGIC, trailer.file_bytes) + self.frames[64:] + encoded + trailer.encode())
        return pack


def taken_apart(pack: Path) -> Parts:
    with opened(pack) as file:
        directory = (*file.frames.values(), *file.heads.values())
        return Parts(bytearray(pack.read_bytes()[: file.trailer.manifest_offset]), directory)


def test_a_resealed_copy_is_the_pack_itself(made: tuple[Receipt, Path], tmp_path: Path) -> None:
    _, pack = made
    copy = taken_apart(pack).write(tmp_path)
    assert (copy.name, copy.read_bytes()) == (pack.name, pack.read_bytes())


LIES: dict[str, Callable[[Parts], object]] = {
    "zeros that no digest covers": lambda parts: parts.frames.extend(bytes(64)),
    "bytes that no digest covers": lambda parts: parts.frames.extend(b"x" * 64),
    "another offset": lambda parts: parts.first(offset=128),
    "an offset far away": lambda parts: parts.first(offset=1 << 49),
    "a short head": lambda parts: parts.first(head_bytes=64),
    "a huge head": lambda parts: parts.first(head_bytes=1 << 31),
    "a short frame": lambda parts: parts.first(frame_bytes=64),
    "a huge frame": lambda parts: parts.first(frame_bytes=1 << 43),
    "another block's id": lambda parts: parts.first(id=bytes(32)),
    "a frame less": lambda parts: setattr(parts, "directory", parts.directory[:-1]),
    "a frame twice": lambda parts: setattr(parts, "directory", (*parts.directory, parts.directory[0])),
    "stripped, with slots": lambda parts: parts.first(is_stripped=True),
}


@pytest.mark.parametrize("change", LIES.values(), ids=LIES)
def test_threats_4_8_15_a_resealed_pack_that_lies_is_refused(
    made: tuple[Receipt, Path], tmp_path: Path, change: Callable[[Parts], object]
) -> None:
    _, pack = made
    parts = taken_apart(pack)
    change(parts)
    lying = parts.write(tmp_path)
    with making.taking_at_most(8 << 20), pytest.raises((errors.Corruption, errors.LimitExceeded)):
        check_all(lying)


def test_threat_9_tokens_that_were_edited_beside_right_keys_and_values_are_refused(
    made: tuple[Receipt, Path], tmp_path: Path
) -> None:
    """A block's id covers them, also where the frame is sealed anew."""
    receipt, pack = made
    parts = taken_apart(pack)
    frame = parts.directory[0]
    with opened(pack) as file:
        header, head = file.read_head(frame.id)
    edited = dataclasses.replace(header, tokens=b"\xff\0\0\0" + header.tokens[4:])
    parts.frames[frame.offset : frame.offset + frame.head_bytes] = encode_frame_head(edited.encode(), head.stored)
    with opened(parts.write(tmp_path)) as file, pytest.raises(errors.CorruptBundle, match="another block id"):
        file.read_head(receipt.entries[0].id)


def test_threat_6_payloads_of_another_block_are_refused(store: Store, tmp_path: Path) -> None:
    mine, other = sleep(store, 300, seed=1), sleep(store, 300, uri=OTHER_URI, seed=2)
    parts, foreign = taken_apart(pack_of(store, mine)), taken_apart(pack_of(store, other))
    frame = parts.directory[0]
    start, end = frame.offset + frame.head_bytes, frame.offset + frame.frame_bytes
    parts.frames[start:end] = foreign.frames[start:end]
    put(pack_of(store, mine), parts.write(tmp_path).read_bytes())
    with store.open_session(URI) as reader, pytest.raises(errors.CorruptBlock):
        contents(reader)


def test_threat_5_a_block_that_follows_another_parent_or_identity_is_refused(store: Store) -> None:
    """The block is sound, and not the one that the manifest describes."""
    receipt = sleep(store, 600)
    with store.open_session(URI) as reader:
        one = reader.entries[0]
        for lie in ({"start": 256}, {"token_count": 10}, {"raw_bytes": 1}, {"kind": "state"}):
            with pytest.raises((errors.Corruption, errors.BlockMissing)):
                reader.read_header(dataclasses.replace(one, **lie))  # type: ignore[arg-type]
        assert contents(reader) == expected(600)
    assert receipt.entries[0] == one


def test_a_directory_is_read_in_one_form_only() -> None:
    frame = Frame(b"a" * 32, HEADER_BYTES, 128, 64)
    assert decode_directory(encode_directory([frame]), HEADER_BYTES + 128, "x") == (frame,)
    assert decode_directory(encode_directory([]), HEADER_BYTES, "x") == ()
    stripped = dataclasses.replace(frame, head_bytes=128, is_stripped=True)
    assert decode_directory(encode_directory([stripped]), HEADER_BYTES + 128, "x") == (stripped,)
    data = encode_directory([frame])
    bad = [
        b"", b"\xc0", data[:-1], data + b"\0", b"\x90", data.replace(b"pack/2", b"pack/3"),
        b"\xdd\xff\xff\xff\xff" * 9,
    ]  # fmt: skip
    for changed in (*bad, data.replace(b"\0\0\0\0", b"\2\0\0\0")):
        with pytest.raises(errors.CorruptBundle):
            decode_directory(changed, HEADER_BYTES + 128, "x")
    with pytest.raises(errors.CorruptBundle):
        decode_directory(data, HEADER_BYTES + 192, "x")


@pytest.mark.parametrize(
    "trailer",
    [
        Trailer(HEADER_BYTES + 1, 0, 10, b"p" * 32),
        Trailer(0, 0, 10, b"p" * 32),
        Trailer(HEADER_BYTES, MAX_MANIFEST_BYTES + 33, 10, b"p" * 32),
        Trailer(HEADER_BYTES, 0, 0, b"p" * 32),
        Trailer(HEADER_BYTES, 0, MAX_DIRECTORY_BYTES + 1, b"p" * 32),
    ],
)
def test_threat_15_a_trailer_outside_its_limits_is_refused(trailer: Trailer) -> None:
    with pytest.raises(errors.CorruptBundle, match="limits"):
        TRAILER.decode(trailer.encode(), trailer.file_bytes, "x")
    good = Trailer(HEADER_BYTES, 0, 10, b"p" * 32)
    assert TRAILER.decode(good.encode(), good.file_bytes, "x") == good
    with pytest.raises(errors.CorruptBundle, match="add up"):
        TRAILER.decode(good.encode(), good.file_bytes + 1, "x")
    assert len(good.encode()) == TRAILER.size_bytes


def test_a_directory_has_a_bounded_number_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    two = [Frame(b"a" * 32, 64, 64, 64), Frame(b"b" * 32, 128, 64, 64)]
    monkeypatch.setattr(module, "MAX_FRAMES", 1)
    with pytest.raises(errors.LimitExceeded):
        encode_directory(two)


# --- copies and stripped blocks


def test_a_pack_of_copies_has_the_same_blocks_and_a_stripped_one_their_headers(store: Store, tmp_path: Path) -> None:
    for receipt in (sleep(store, 300), making.sleep_planes(store, OTHER_URI)):
        pack = pack_of(store, receipt)
        with opened(pack) as file, making.temp_file(tmp_path) as temp:
            writer = PackWriter(temp)
            first, *others = file.frames
            for block_id in others:
                writer.add_copy(file, block_id)
                writer.add_copy(file, block_id)
            writer.add_stripped(file, first)
            pack_id = writer.finish()
            with PackFile(temp.duplicate(), "copy", pack_id) as copy:
                assert (set(copy.frames), set(copy.heads)) == ({*others}, {first})
                assert copy.read_head(first)[0] == file.read_head(first)[0]
                with pytest.raises(errors.BlockMissing):
                    copy.check_block(first)
                for block_id in others:
                    copy.check_block(block_id)
                    assert b"".join(map(bytes, copy.frame_chunks(block_id))) == b"".join(
                        map(bytes, file.frame_chunks(block_id))
                    )


def test_damage_in_a_frame_that_is_copied_is_found_when_the_copy_is_read_back(store: Store, tmp_path: Path) -> None:
    receipt = sleep(store, 300)
    pack = pack_of(store, receipt)
    with opened(pack) as file:
        frame = file.frames[receipt.entries[0].id]
        making.flip(pack, frame.offset + frame.head_bytes)
        with making.temp_file(tmp_path) as temp:
            writer = PackWriter(temp)
            writer.add_copy(file, frame.id)
            with pytest.raises(errors.Corruption):
                writer.finish()
    assert list(tmp_path.glob("*.tmp")) == []
    assert len(making.names(store.path)) == 2
