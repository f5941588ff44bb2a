"""What is recognised in a bundle file whose frame of reference is damaged, and how much of it is read to that end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from blake3 import blake3
from torpor.memvid import BlockDraft, SlotDraft, SlotSpec, Store
from torpor.memvid.format import salvage
from torpor.memvid.format.blocks import BlockHeader
from torpor.memvid.format.bundle import FrameFile
from torpor.memvid.format.layout import StoredSlot, encode_frame_head
from torpor.memvid.format.salvage import DamagedFile
from torpor.tests.memvid.store_making import IDENTITY, URI, bundle_path, sleep, token_ids


def opened(path: Path, bundle_id: bytes = bytes(32)) -> DamagedFile:
    return DamagedFile(os.open(path, os.O_RDONLY), str(path), bundle_id)


def head_of(number: int, payload_bytes: int, digest: bytes = b"\1" * 32) -> bytes:
    spec = SlotSpec("k", "k", "uint8", (payload_bytes,))
    header = BlockHeader("span", bytes(32), 0, number.to_bytes(4, "little"), None, ((spec, digest),))
    return encode_frame_head(header.encode(), [StoredSlot(0, payload_bytes, digest)])


def nested(size_bytes: int) -> bytes:
    """Heads back to back, each of a frame that claims all the rest of the file."""
    heads = bytearray()
    while (left := (size_bytes - len(heads) - 512) // 64 * 64) > 0:
        heads += head_of(len(heads), left)
    return bytes(heads) + bytes(size_bytes - len(heads))


@pytest.mark.parametrize("size_kib", [256, 1024])
def test_frames_that_lie_inside_each_other_are_not_read_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size_kib: int
) -> None:
    path = tmp_path / "nested"
    path.write_bytes(nested(size_kib * 1024))
    monkeypatch.setattr(salvage, "_WASTE_BYTES", 256 * 1024)
    read, real = 0, FrameFile._read_into

    def counting(self: FrameFile, offset: int, buffers: Sequence[memoryview]) -> None:
        nonlocal read
        read += sum(buffer.nbytes for buffer in buffers)
        real(self, offset, buffers)

    monkeypatch.setattr(FrameFile, "_read_into", counting)
    with contextlib.closing(opened(path)) as file:
        assert file.frames == {}
    assert 0 < read < 6 * path.stat().st_size + 4 * 256 * 1024


def test_what_looks_like_a_frame_inside_a_payload_is_payload(store: Store) -> None:
    fake = bytes(64)
    digest = blake3(fake).digest()
    inside = head_of(1, len(fake), digest) + fake
    spec = SlotSpec("k", "k", "uint8", (len(inside),))
    block = BlockDraft("span", 0, token_ids(0, 4), [SlotDraft(spec, [memoryview(inside)])])
    receipt = store.write_bundle(
        uri=URI, identity=IDENTITY, parent=None, reused=(), blocks=[block], session={}, token_count=4
    )
    path = bundle_path(store, receipt.bundle_id)
    with contextlib.closing(opened(path, receipt.bundle_id)) as file:
        assert set(file.frames) == {receipt.entries[0].id}
        assert file.manifest is not None


def test_behind_a_frame_whose_payload_is_damaged_the_next_ones_are_found(store: Store) -> None:
    receipt = sleep(store, 600)
    path = bundle_path(store, receipt.bundle_id)
    data = bytearray(path.read_bytes())
    with contextlib.closing(opened(path, receipt.bundle_id)) as file:
        first, *others = sorted(file.frames.values(), key=lambda frame: frame.offset)
    data[first.offset + first.frame_bytes - 100] ^= 1
    path.write_bytes(data)
    with contextlib.closing(opened(path, receipt.bundle_id)) as file:
        assert set(file.frames) == {frame.id for frame in others}
        assert file.manifest is not None
