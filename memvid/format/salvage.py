"""Recovers the readable parts of a bundle file whose header, directory, trailer or manifest is damaged.

Owns the search for frames and the manifest anywhere in the file. It guesses nothing: its own digest and its block id
prove a frame, and the bundle id, its digest, proves the manifest. Writes nothing.
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
from .layout import FRAME_MAGIC, PREFIX_BYTES, TRAILER_BYTES, decode_frame_head, head_bytes_told
from .manifest import Manifest, bundle_id_of, decode_manifest
from .packing import length_of_first

_MANIFEST_START: Final = b"\x92\xb1torpor.manifest/1"  # a list of two, the first of them the manifest's domain
_MARKS: Final = re.compile(re.escape(FRAME_MAGIC) + b"|" + re.escape(_MANIFEST_START))
_OVERLAP_BYTES: Final = len(_MANIFEST_START) - 1
_WASTE_BYTES: Final = 8 * MAX_MANIFEST_BYTES
_END_BYTES: Final = MAX_MANIFEST_BYTES + MAX_DIRECTORY_BYTES + TRAILER_BYTES


class DamagedFile(FrameFile):
    """A damaged bundle file as a holder of the frames found in it, and its manifest if that is whole.

    `frames` are sound in every byte in use. They do not nest: a frame-like part of a sound frame is its payload. Reads
    that find nothing are bounded by the file's size, so the work is linear in it, even for a hostile file.
    """

    manifest: Manifest | None

    def _load(self, expected_id: bytes | None) -> None:
        self._begin(expected_id)
        # False starts cost time; a file full of them is not read to its end.
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
        assert expected_id is not None  # only the name is certain
        self.bundle_id = expected_id
        self.manifest, self.frames = None, {}

    def _beginnings(self, first: int = 0) -> Iterator[tuple[int, bool]]:
        """The offsets where a frame (True) or a manifest (False) may begin, in file order, from `first` on."""
        for start in range(first, self.file_bytes, CHUNK_BYTES):
            data = self._read(start, min(CHUNK_BYTES + _OVERLAP_BYTES, self.file_bytes - start))
            for match in _MARKS.finditer(data):
                if match.start() < CHUNK_BYTES:
                    yield start + match.start(), match[0] == FRAME_MAGIC

    def _take_frame(self, offset: int) -> tuple[int, int]:
        """Remember the frame that begins here, if it is sound. Returns its end, and the bytes read in vain."""
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
        """Remember the manifest that begins here, if it is the bundle's. Returns as `_take_frame`."""
        data = self._read(offset, min(MAX_MANIFEST_BYTES, self.file_bytes - offset))
        try:
            encoded = data[: length_of_first(data, "manifest")]
            if bundle_id_of(encoded) == self.bundle_id:
                self.manifest = decode_manifest(encoded, self.path)
                return offset + len(encoded), 0
        except StoreError:
            pass  # a false start
        return 0, len(data)


class NamedFile(DamagedFile):
    """A bundle file read only for its session and version: no frame in it is read.

    The end of the file is searched first: the manifest is there unless something was added behind it. This reads the
    file once, and a bounded number of bytes for false starts of a manifest.
    """

    def _load(self, expected_id: bytes | None) -> None:
        self._begin(expected_id)
        waste = _WASTE_BYTES
        for first in (max(self.file_bytes - _END_BYTES, 0), 0):
            for offset, is_frame in self._beginnings(first):
                waste -= 0 if is_frame else self._take_manifest(offset)[1]
                if self.manifest is not None or waste < 0:
                    return
