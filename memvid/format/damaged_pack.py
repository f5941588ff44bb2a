"""Recovers the sound frames of a pack whose header, directory, trailer or frames are damaged.

Owns the search for frames anywhere in the file. It guesses nothing: its own digest and its block id prove a frame.
Writes nothing. Works on a bundle of format 1, too: frames are the same there.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Final

from ..errors import StoreClosed, StoreError, StoreIoError
from ..limits import CHUNK_BYTES, MAX_MANIFEST_BYTES
from .blocks import BlockHeader
from .blocks import block_id as block_id_of
from .frames import FrameReader, Head
from .layout import (
    FRAME_MAGIC,
    PREFIX_BYTES,
    Frame,
    FrameHead,
    decode_frame_head,
    head_bytes_told,
)

_MARK: Final = re.compile(re.escape(FRAME_MAGIC))
_OVERLAP_BYTES: Final = len(FRAME_MAGIC) - 1
_WASTE_BYTES: Final = 8 * MAX_MANIFEST_BYTES
_HARD: Final = (StoreIoError, StoreClosed)


class DamagedPack(FrameReader):
    """A damaged pack as a holder of the frames found in it.

    `frames` are sound in every byte in use; `heads` are those of stripped blocks. `torn` are frames with a sound head
    and damaged keys and values: `read_head` still tells their tokens. Frames do not nest: a frame-like part of a sound
    one is its payload. Reads that find nothing are bounded by the file's size, so the work is linear in it, even for a
    hostile file.
    """

    def _load(self, expected_id: bytes | None) -> None:
        self.frames, self.torn = {}, {}
        waste = self.file_bytes + _WASTE_BYTES  # false starts cost time; a file full of them is not read to its end
        taken_to = 0
        for offset in self._beginnings():
            if offset < taken_to:
                continue  # a payload may hold anything
            end, wasted = self._take(offset)
            taken_to = max(taken_to, end)
            waste -= wasted
            if waste < 0:
                break
        self.heads = {each: frame for each, frame in self.heads.items() if each not in self.frames}
        self.torn = {each: frame for each, frame in self.torn.items() if each not in self.frames | self.heads}

    def frame_of(self, block_id: bytes) -> Frame:
        """As every file with frames, and a torn one too: some slots of it may be sound."""
        return self.torn.get(block_id) or super().frame_of(block_id)

    def read_head(self, block_id: bytes) -> Head:
        """As every file with frames, and of a torn one too."""
        frame = self.torn.get(block_id)
        if frame is None:
            return super().read_head(block_id)
        head = decode_frame_head(self._read(frame.offset, frame.head_bytes), self.path)
        return BlockHeader.decode(head.block_header), head

    def _beginnings(self) -> Iterator[int]:
        """The offsets where a frame may begin, in file order."""
        for start in range(0, self.file_bytes, CHUNK_BYTES):
            data = self._read(start, min(CHUNK_BYTES + _OVERLAP_BYTES, self.file_bytes - start))
            for match in _MARK.finditer(data):
                if match.start() < CHUNK_BYTES:
                    yield start + match.start()

    def _take(self, offset: int) -> tuple[int, int]:
        """Remember the frame that begins here, as far as it is sound. Its end, and the bytes read in vain."""
        rest_bytes = self.file_bytes - offset
        head_bytes = head_bytes_told(self._read(offset, min(PREFIX_BYTES, rest_bytes)))
        if head_bytes is None or head_bytes > rest_bytes:
            return 0, PREFIX_BYTES
        try:
            head = decode_frame_head(self._read(offset, head_bytes), self.path)
            header = BlockHeader.decode(head.block_header)
        except _HARD:
            raise
        except StoreError:
            return 0, head_bytes
        frame = Frame(block_id_of(head.block_header), offset, head.frame_bytes, head_bytes)
        if frame.id in self.frames:
            return 0, head_bytes
        if header.slots and not head.stored:
            self.heads[frame.id] = dataclasses.replace(frame, is_stripped=True)
            return offset + head.frame_bytes, 0
        if len(head.stored) != len(header.slots):
            return 0, head_bytes  # what its head says of its slots is of no use
        return self._take_full(frame, head, rest_bytes)

    def _take_full(self, frame: Frame, head: FrameHead, rest_bytes: int) -> tuple[int, int]:
        if head.frame_bytes > rest_bytes:
            self.torn[frame.id] = frame
            return 0, frame.head_bytes
        stripped, torn = self.heads.pop(frame.id, None), self.torn.pop(frame.id, frame)
        self.frames[frame.id] = frame
        try:
            self.check_payloads(frame.id)
        except _HARD:
            raise
        except StoreError:
            del self.frames[frame.id]
            self.torn[frame.id] = torn
            if stripped is not None:
                self.heads[frame.id] = stripped
            return 0, head.frame_bytes
        return frame.offset + head.frame_bytes, 0
