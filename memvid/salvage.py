"""What can still be read of a bundle file whose header, directory, trailer or manifest is damaged.

Owns the recognition of frames and of the manifest by themselves, wherever in the file they stand. Nothing is guessed:
a frame is taken for what its own digest and its block's id prove it to be, a manifest only if it is the one whose
digest is the bundle's id. Writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from .blocks import block_id as block_id_of
from .bundle import FrameFile
from .directory import Frame
from .errors import StoreError, StoreIoError
from .layout import (
    FRAME_MAGIC,
    HEADER_BYTES,
    PREFIX_BYTES,
    TRAILER_BYTES,
    decode_frame_head,
    decode_trailer,
    head_bytes_told,
    is_sealed_header,
)
from .limits import CHUNK_BYTES, MAX_MANIFEST_BYTES
from .manifest import Manifest, bundle_id_of, decode_manifest
from .packing import length_of_first

_MANIFEST_START: Final = b"\x92\xb1torpor.manifest/1"  # a list of two, the first of them the manifest's domain
_MARKS: Final = re.compile(re.escape(FRAME_MAGIC) + b"|" + re.escape(_MANIFEST_START))
_OVERLAP_BYTES: Final = len(_MANIFEST_START) - 1
_WASTE_BYTES: Final = 8 * MAX_MANIFEST_BYTES


class DamagedFile(FrameFile):
    """A bundle file as a holder of the frames that can be recognised in it, and its manifest if that is whole.

    `frames` are those whose heads are good; their payloads are checked as ever, by `check_block`. `has_own_trailer`
    says whether the file ends with a whole trailer of this format version and of this bundle.
    """

    manifest: Manifest | None
    encoded: bytes
    has_own_trailer: bool
    has_sealed_header: bool

    def _load(self, expected_id: bytes | None) -> None:
        assert expected_id is not None  # the name is all that is certain
        self.bundle_id = expected_id
        self.manifest, self.encoded, self.frames = None, b"", {}
        self.has_own_trailer = self._ends_with_trailer()
        self.has_sealed_header = self.file_bytes >= HEADER_BYTES and is_sealed_header(self._read(0, HEADER_BYTES))
        # What looks like a beginning and is none costs time; a file made of such is not read to its end.
        waste = self.file_bytes + _WASTE_BYTES
        for offset, is_frame in self._beginnings():
            waste -= self._take_frame(offset) if is_frame else self._take_manifest(offset)
            if waste < 0:
                break

    def _ends_with_trailer(self) -> bool:
        if self.file_bytes < TRAILER_BYTES:
            return False
        try:
            data = self._read(self.file_bytes - TRAILER_BYTES, TRAILER_BYTES)
            return decode_trailer(data, self.file_bytes, self.path).bundle_id == self.bundle_id
        except StoreIoError:
            raise
        except StoreError:
            return False

    def _beginnings(self) -> Iterator[tuple[int, bool]]:
        """Where a frame (True) or a manifest (False) may begin, in file order."""
        for start in range(0, self.file_bytes, CHUNK_BYTES):
            data = self._read(start, min(CHUNK_BYTES + _OVERLAP_BYTES, self.file_bytes - start))
            for match in _MARKS.finditer(data):
                if match.start() < CHUNK_BYTES:
                    yield start + match.start(), match[0] == FRAME_MAGIC

    def _take_frame(self, offset: int) -> int:
        """Remember the frame that begins here; the bytes that were looked at for nothing."""
        left = self.file_bytes - offset
        head_bytes = head_bytes_told(self._read(offset, min(PREFIX_BYTES, left)))
        if head_bytes is None or head_bytes > left:
            return PREFIX_BYTES
        try:
            head = decode_frame_head(self._read(offset, head_bytes), self.path)
        except StoreIoError:
            raise
        except StoreError:
            return head_bytes
        if head.frame_bytes > left:
            return head_bytes
        block_id = block_id_of(head.block_header)
        self.frames.setdefault(block_id, Frame(block_id, offset, head.frame_bytes, head_bytes))
        return 0

    def _take_manifest(self, offset: int) -> int:
        """Remember the manifest that begins here, if it is the bundle's; the bytes that were looked at for nothing."""
        data = self._read(offset, min(MAX_MANIFEST_BYTES, self.file_bytes - offset))
        try:
            encoded = data[: length_of_first(data, "manifest")]
            if bundle_id_of(encoded) == self.bundle_id:
                self.manifest, self.encoded = decode_manifest(encoded, self.path), encoded
                return 0
        except StoreError:
            pass  # something else that begins like one
        return len(data)
