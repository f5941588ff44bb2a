"""What is found in a damaged pack: sound frames, headers, and nothing that was not written."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
from torpor.memvid.format import damaged_pack
from torpor.memvid.format.blocks import BlockDraft, SlotDraft, SlotSpec
from torpor.memvid.format.damaged_pack import DamagedPack
from torpor.memvid.format.layout import FRAME_MAGIC
from torpor.memvid.format.pack_writer import PackWriter
from torpor.memvid.format.records import Receipt
from torpor.memvid.format_1 import BundleFile
from torpor.memvid.store import Store
from torpor.memvid.writing.frame_files import open_frames
from torpor.tests.memvid.format_1_stores import bundle_of, case
from torpor.tests.memvid.fuzz import pack_file
from torpor.tests.memvid.store_making import OTHER_URI, URI, flip, frame_in, pack_of, put, sleep, token_ids, write


def ids(receipt: Receipt) -> list[bytes]:
    return [entry.id for entry in receipt.entries]


def opened(path: Path) -> DamagedPack:
    return DamagedPack(os.open(path, os.O_RDONLY), str(path), None)


@pytest.mark.parametrize("at", [0, 8, 40, -1, -20, -110, -150])
def test_all_frames_are_found_where_header_directory_or_trailer_are_damaged(store: Store, at: int) -> None:
    receipt = sleep(store, 700)
    pack = pack_of(store, receipt)
    flip(pack, at)
    with opened(pack) as file:
        assert list(file.frames) == ids(receipt)
        assert (file.torn, file.heads) == ({}, {})
        for block_id in file.frames:
            file.check_block(block_id)


def test_a_frame_with_damaged_keys_and_values_still_tells_its_header(store: Store) -> None:
    receipt = sleep(store, 700)
    pack = pack_of(store, receipt)
    frame = frame_in(pack, ids(receipt)[1])
    flip(pack, frame.offset + frame.head_bytes)
    with opened(pack) as file:
        assert set(file.frames) == {*ids(receipt)} - {frame.id}
        assert list(file.torn) == [frame.id]
        assert file.read_head(frame.id)[0].start == 256


def test_a_frame_with_a_damaged_head_is_not_found(store: Store) -> None:
    receipt = sleep(store, 700)
    pack = pack_of(store, receipt)
    frame = frame_in(pack, ids(receipt)[1])
    for at in (0, 9, 70, frame.head_bytes - 1):
        good = flip(pack, frame.offset + at)
        with opened(pack) as file:
            assert frame.id not in {*file.frames, *file.heads, *file.torn}
            assert len(file.frames) == 3
        put(pack, good)


@pytest.mark.parametrize("cut", [1, 500, 9_000])
def test_what_stands_before_a_cut_is_found_and_of_a_cut_frame_its_header(store: Store, cut: int) -> None:
    receipt = sleep(store, 700)
    pack = pack_of(store, receipt)
    size = pack.stat().st_size
    frames = [frame_in(pack, block_id) for block_id in ids(receipt)]
    put(pack, pack.read_bytes()[:-cut])
    left = size - cut
    with opened(pack) as file:
        assert list(file.frames) == [each.id for each in frames if each.offset + each.frame_bytes <= left]
        cut_off = [each.id for each in frames if each.offset + each.head_bytes <= left < each.offset + each.frame_bytes]
        assert list(file.torn) == cut_off


def test_stripped_blocks_are_found_as_headers(store: Store, tmp_path: Path) -> None:
    receipt = sleep(store, 700)
    name = store.index.packs_of(ids(receipt)[0])[0]
    with open_frames(store._core.folder, name) as source, store._core.folder.new_temp() as temp:
        writer = PackWriter(temp)
        for block_id in ids(receipt):
            writer.add_stripped(source, block_id)
        writer.finish()
        put(tmp_path / "pack", Path(temp.path).read_bytes()[:-1])
    with opened(tmp_path / "pack") as file:
        assert (list(file.heads), file.frames, file.torn) == (ids(receipt), {}, {})
        assert [file.read_head(each)[0].start for each in file.heads] == [0, 256, 512, 700]


def test_frames_among_other_bytes_are_found_and_frames_in_a_payload_are_not_taken_twice(
    store: Store, tmp_path: Path
) -> None:
    receipt = sleep(store, 700)
    data = pack_of(store, receipt).read_bytes()
    put(tmp_path / "pack", os.urandom(1001) + FRAME_MAGIC + data + FRAME_MAGIC * 3 + data)
    with opened(tmp_path / "pack") as file:
        assert list(file.frames) == ids(receipt)
        assert max(frame.offset for frame in file.frames.values()) < len(data) + 1100


def test_a_frame_in_the_payload_of_a_sound_frame_is_none_of_the_pack(store: Store) -> None:
    inner = sleep(store, 20)
    frame = frame_in(pack_of(store, inner), ids(inner)[0])
    data = pack_of(store, inner).read_bytes()[frame.offset : frame.offset + frame.frame_bytes]
    slot = SlotDraft(SlotSpec("0.k", "kv.k/1", "uint8", (len(data),)), [memoryview(data)])
    outer = write(store, [BlockDraft("span", 0, token_ids(0, 4), [slot])], 4, uri=OTHER_URI)
    flip(pack_of(store, outer), -1)
    with opened(pack_of(store, outer)) as file:
        assert list(file.frames) == ids(outer)


def test_a_frame_whose_storage_table_has_another_number_of_slots_is_not_found(store: Store, tmp_path: Path) -> None:
    parts = pack_file.take_apart(pack_of(store, sleep(store, 300)).read_bytes())
    first, *others = parts.frames
    first.slots.append(first.slots[0])
    put(tmp_path / "lying", b"".join(frame.encode() for frame in parts.frames))
    with opened(tmp_path / "lying") as file:
        assert (set(file.frames), file.torn) == ({frame.id for frame in others}, {})


def test_a_sound_frame_is_found_behind_a_torn_one_of_its_block(store: Store, tmp_path: Path) -> None:
    pack = pack_of(store, receipt := sleep(store, 300))
    frame, sound = frame_in(pack, ids(receipt)[0]), pack.read_bytes()
    flip(pack, frame.offset + frame.head_bytes)
    put(tmp_path / "both", pack.read_bytes() + sound)
    with opened(tmp_path / "both") as file:
        assert (set(file.frames), file.torn) == ({*ids(receipt)}, {})


def test_a_frame_that_begins_between_two_reads_is_found(store: Store) -> None:
    receipt = sleep(store, 20)
    with mock.patch.object(damaged_pack, "CHUNK_BYTES", 67), opened(pack_of(store, receipt)) as file:
        assert list(file.frames) == ids(receipt)


def test_a_file_full_of_false_starts_is_given_up_in_time(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damaged_pack, "_WASTE_BYTES", 0)
    receipt = sleep(store)
    put(tmp_path / "pack", FRAME_MAGIC * 5000 + pack_of(store, receipt).read_bytes())
    with opened(tmp_path / "pack") as file:
        assert file.frames == {}


def test_an_empty_file_has_nothing(tmp_path: Path) -> None:
    put(tmp_path / "pack", b"")
    with opened(tmp_path / "pack") as file:
        assert file.frames == {}


def test_a_bundle_of_format_1_is_read_too(tmp_path: Path) -> None:
    path = bundle_of(case("chain", tmp_path / "old"), URI)
    with BundleFile(os.open(path, os.O_RDONLY), str(path), None) as file:
        known = dict(file.frames)
    flip(path, -1)
    with opened(path) as damaged:
        assert damaged.frames == known
