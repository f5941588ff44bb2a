"""What can still be read of a bundle file whose header, directory, trailer or manifest is damaged.

Owns the recognition of frames and of the manifest by themselves, wherever in the file they stand. Nothing is guessed:
a frame is taken for what its own digest and its block's id prove it to be, a manifest only if it is the one whose
digest is the bundle's id. Writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from ..errors import StoreError, StoreIoError
from ..limits import CHUNK_BYTES, MAX_DIRECTORY_BYTES, MAX_MANIFEST_BYTES
from .blocks import block_id as block_id_of
from .bundle import FrameFile
from .directory import Frame
from .layout import (
    FRAME_MAGIC,
    PREFIX_BYTES,
    TRAILER_BYTES,
    decode_frame_head,
    head_bytes_told,
)
from .manifest import Manifest, bundle_id_of, decode_manifest
from .packing import length_of_first

_MANIFEST_START: Final = b"\x92\xb1torpor.manifest/1"  # a list of two, the first of them the manifest's domain
_MARKS: Final = re.compile(re.escape(FRAME_MAGIC) + b"|" + re.escape(_MANIFEST_START))
_OVERLAP_BYTES: Final = len(_MANIFEST_START) - 1
_WASTE_BYTES: Final = 8 * MAX_MANIFEST_BYTES
_END_BYTES: Final = MAX_MANIFEST_BYTES + MAX_DIRECTORY_BYTES + TRAILER_BYTES


class DamagedFile(FrameFile):
    """A bundle file as a holder of the frames that can be recognised in it, and its manifest if that is whole.

    `frames` are those whose every byte that is used is right. None lies in another: what looks like a frame inside a
    sound one is its payload. What is read for nothing is bounded by the file's size, so that the work is linear in it,
    whatever somebody has put there.
    """

    manifest: Manifest | None
    encoded: bytes

    def _load(self, expected_id: bytes | None) -> None:
        self._begin(expected_id)
        # What looks like a beginning and is none costs time; a file made of such is not read to its end.
        waste = self.file_bytes + _WASTE_BYTES
        taken_to = 0
        for offset, is_frame in self._beginnings():
            if offset < taken_to:
                continue  # a payload may hold anything
            end, wasted = self._take_frame(offset) if is_frame else self._take_manifest(offset)
            taken_to = max(taken_to, end)
            waste -= wasted
            if waste < 0:
                break

    def _begin(self, expected_id: bytes | None) -> None:
        assert expected_id is not None  # the name is all that is certain
        self.bundle_id = expected_id
        self.manifest, self.encoded, self.frames = None, b"", {}

    def _beginnings(self, first: int = 0) -> Iterator[tuple[int, bool]]:
        """Where a frame (True) or a manifest (False) may begin, in file order, `first` being where to begin."""
        for start in range(first, self.file_bytes, CHUNK_BYTES):
            data = self._read(start, min(CHUNK_BYTES + _OVERLAP_BYTES, self.file_bytes - start))
            for match in _MARKS.finditer(data):
                if match.start() < CHUNK_BYTES:
                    yield start + match.start(), match[0] == FRAME_MAGIC

    def _take_frame(self, offset: int) -> tuple[int, int]:
        """Remember the frame that begins here, if all of it is sound: where it ends, and the bytes that were looked at
        for nothing."""
        left = self.file_bytes - offset
        head_bytes = head_bytes_told(self._read(offset, min(PREFIX_BYTES, left)))
        if head_bytes is None or head_bytes > left:
            return 0, PREFIX_BYTES
        try:
            head = decode_frame_head(self._read(offset, head_bytes), self.path)
        except StoreIoError:
            raise
        except StoreError:
            return 0, head_bytes
        block_id, end = block_id_of(head.block_header), offset + head.frame_bytes
        if head.frame_bytes > left or block_id in self.frames:
            return 0, head_bytes
        self.frames[block_id] = Frame(block_id, offset, head.frame_bytes, head_bytes)
        try:
            self.check_payloads(block_id)
        except StoreIoError:
            raise
        except StoreError:
            del self.frames[block_id]
            return 0, head.frame_bytes
        return end, 0

    def _take_manifest(self, offset: int) -> tuple[int, int]:
        """Remember the manifest that begins here, if it is the bundle's, as `_take_frame`."""
        data = self._read(offset, min(MAX_MANIFEST_BYTES, self.file_bytes - offset))
        try:
            encoded = data[: length_of_first(data, "manifest")]
            if bundle_id_of(encoded) == self.bundle_id:
                self.manifest, self.encoded = decode_manifest(encoded, self.path), encoded
                return offset + len(encoded), 0
        except StoreError:
            pass  # something else that begins like one
        return 0, len(data)


class NamedFile(DamagedFile):
    """A bundle file that is only asked whose version it is: no frame in it is looked at.

    The end of the file is searched first, where the manifest stands unless something was added behind it. That reads
    the file once, and for what only looks like a manifest no more than a bounded number of bytes.
    """

    def _load(self, expected_id: bytes | None) -> None:
        self._begin(expected_id)
        waste = _WASTE_BYTES
        for first in (max(self.file_bytes - _END_BYTES, 0), 0):
            for offset, is_frame in self._beginnings(first):
                waste -= 0 if is_frame else self._take_manifest(offset)[1]
                if self.manifest is not None or waste < 0:
                    return
