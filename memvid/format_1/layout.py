"""Header and trailer of a bundle's file of format 1, byte by byte. Its frames are those of `format/layout.py`."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NoReturn

from blake3 import blake3

from ..errors import CorruptBundle
from ..format import sealing
from ..format.layout import ALIGNMENT
from ..format.sealing import BUNDLE_MAGIC, HEADER_BYTES
from ..limits import MAX_DIRECTORY_BYTES, MAX_MANIFEST_BYTES

LIVE_SUFFIX: Final = ".mvb"
TRAILER_MAGIC: Final = b"MVTAIL\r\n"
_TRAILER: Final = struct.Struct("<8sQQQQ32s32s")
# magic, manifest offset, manifest bytes, directory bytes, file bytes, bundle id, digest of the directory
_DIGEST_BYTES: Final = 32
TRAILER_BYTES: Final = _TRAILER.size + _DIGEST_BYTES
MIN_FILE_BYTES: Final = HEADER_BYTES + 1 + TRAILER_BYTES


def require_header(data: bytes, actual_bytes: int, path: str) -> None:
    """Refuse a file that is not a bundle of format 1, or not as long as it was written. Raises as
    `sealing.require_header`."""
    sealing.require_header(data, BUNDLE_MAGIC, actual_bytes, path)
    if actual_bytes < MIN_FILE_BYTES:
        _corrupt(path, "header", "it is too short for a bundle")


@dataclass(frozen=True, slots=True)
class Trailer:
    """Where manifest and directory are, back to back before it. A file without a manifest has 0 bytes of it."""

    manifest_offset: int
    manifest_bytes: int
    directory_bytes: int
    bundle_id: bytes
    directory_digest: bytes

    @property
    def directory_offset(self) -> int:
        return self.manifest_offset + self.manifest_bytes

    @property
    def file_bytes(self) -> int:
        return self.directory_offset + self.directory_bytes + TRAILER_BYTES


def decode_trailer(data: bytes, file_bytes: int, path: str) -> Trailer:
    """Read the last TRAILER_BYTES of a file whose length the header has confirmed."""
    magic, manifest_offset, manifest_bytes, directory_bytes, claimed_bytes, bundle_id, digest = _TRAILER.unpack_from(
        data
    )
    fixed = data[: _TRAILER.size]
    if magic != TRAILER_MAGIC or blake3(fixed).digest() != data[_TRAILER.size :]:
        _corrupt(path, "trailer", "its magic or its digest differs")
    trailer = Trailer(manifest_offset, manifest_bytes, directory_bytes, bundle_id, digest)
    if claimed_bytes != file_bytes or trailer.file_bytes != file_bytes:
        _corrupt(path, "trailer", "its lengths do not add up to the file's")
    if manifest_bytes > MAX_MANIFEST_BYTES or manifest_offset < HEADER_BYTES or manifest_offset % ALIGNMENT:
        _corrupt(path, "trailer", "the manifest's place is outside its limits")
    if not 1 <= directory_bytes <= MAX_DIRECTORY_BYTES:
        _corrupt(path, "trailer", "the directory's length is outside its limits")
    return trailer


def _corrupt(path: str, part: str, why: str) -> NoReturn:
    raise CorruptBundle(f"{path}: the {part} is damaged: {why}.", path=path, part=part)
