"""A pack on its way to a remote: laid out from the heads of its frames, then given out byte by byte. No file is made.

Rules: a pack's id is the digest of its directory, so its name is known before the first byte. The same blocks in the
same order, as the same bytes, make the same pack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

from ..errors import StoreBusy
from ..format.blocks import BlockEntry
from ..format.frames import FrameReader
from ..format.layout import Frame, encode_frame_head
from ..format.pack import Trailer, encode_directory, pack_id_of
from ..format.sealing import HEADER_BYTES, PACK_MAGIC, encode_header

Source = Callable[[BlockEntry, bool], AbstractContextManager[FrameReader]]
"""The file to copy a block from, or, of a stripped version, its header; True: with every byte of it right."""


class PackStream:
    """A pack of these blocks, each from a file of a store.

    Raises the errors of `source`, and LimitExceeded.
    """

    def __init__(self, entries: Sequence[BlockEntry], source: Source) -> None:
        self.entries = entries
        self._source = source
        self.frames: list[Frame] = []
        end = HEADER_BYTES
        for entry in entries:
            with source(entry, False) as file:
                frame = _laid_out(file, entry.id, end)
            self.frames.append(frame)
            end += frame.frame_bytes
        self._directory = encode_directory(self.frames)
        self.pack_id = pack_id_of(self._directory)
        self._trailer = Trailer(end, 0, len(self._directory), self.pack_id)

    @property
    def size_bytes(self) -> int:
        """The length of the whole pack."""
        return self._trailer.file_bytes

    def parts(self) -> Iterator[bytes]:
        """The pack, part after part, each block checked before it is given out. Raises also StoreBusy: a repack wrote a
        block in other bytes meanwhile."""
        yield encode_header(PACK_MAGIC, self.size_bytes)
        for entry, frame in zip(self.entries, self.frames, strict=True):
            with self._source(entry, True) as file:
                if _laid_out(file, entry.id, frame.offset) != frame:
                    raise StoreBusy("A block was packed anew while it was sent. Nothing is lost. Try again.")
                if frame.is_stripped:
                    yield _header_alone(file, entry.id)
                    continue
                for chunk in file.frame_chunks(entry.id):
                    yield bytes(chunk)
        yield self._directory + self._trailer.encode()


def _laid_out(file: FrameReader, block_id: bytes, offset: int) -> Frame:
    """The frame of a block at an offset: a copy of the whole one if the file has it, else of its header."""
    if block_id not in file.heads:
        frame = file.frame_of(block_id)
        return Frame(block_id, offset, frame.frame_bytes, frame.head_bytes)
    size_bytes = len(_header_alone(file, block_id))
    return Frame(block_id, offset, size_bytes, size_bytes, is_stripped=True)


def _header_alone(file: FrameReader, block_id: bytes) -> bytes:
    """The frame of a stripped block."""
    return encode_frame_head(file.read_head(block_id)[1].block_header, ())
