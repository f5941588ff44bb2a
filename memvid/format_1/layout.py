"""Header and trailer of a bundle's file of format 1, byte by byte. Its frames are those of `format/layout.py`."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, NoReturn

from blake3 import blake3

from ..errors import CorruptBundle, TrailingData, Truncated, UnsupportedFormat
from ..format.layout import ALIGNMENT
from ..limits import MAX_BUNDLE_BYTES, MAX_DIRECTORY_BYTES, MAX_MANIFEST_BYTES

FORMAT_VERSION: Final = 1
LIVE_SUFFIX: Final = ".mvb"
HEADER_MAGIC: Final = b"\x89MVB\r\n\x1a\n"
TRAILER_MAGIC: Final = b"MVTAIL\r\n"
_HEADER: Final = struct.Struct("<8sIIQ8x")  # magic, version, header bytes, file bytes, zeros
_TRAILER: Final = struct.Struct("<8sQQQQ32s32s")
# magic, manifest offset, manifest bytes, directory bytes, file bytes, bundle id, digest of the directory
_DIGEST_BYTES: Final = 32
HEADER_BYTES: Final = _HEADER.size + _DIGEST_BYTES
TRAILER_BYTES: Final = _TRAILER.size + _DIGEST_BYTES
MIN_FILE_BYTES: Final = HEADER_BYTES + 1 + TRAILER_BYTES


def require_header(data: bytes, actual_bytes: int, path: str) -> None:
    """Refuse a file that is not a bundle, or of a later version, or not as long as it was written.

    The digest is checked first, then the version, then the fields that a later version may lay out differently: every
    later version seals its first bytes in the same way.
    """
    if len(data) < HEADER_BYTES:
        raise Truncated(f"{path} ends after {len(data)} bytes, within its header.", path=path, size_bytes=actual_bytes)
    magic, version, _, file_bytes = _HEADER.unpack_from(data)
    if magic != HEADER_MAGIC:
        _corrupt(path, "header", "it does not begin like a bundle")
    fixed = data[: _HEADER.size]
    if blake3(fixed).digest() != data[_HEADER.size : HEADER_BYTES]:
        _corrupt(path, "header", "its digest differs")
    if version != FORMAT_VERSION:
        raise UnsupportedFormat(
            f"{path} has bundle format version {version}; this program reads version {FORMAT_VERSION}. "
            "Use the Torpor that wrote it. The file was not touched.",
            path=path,
            found=version,
            supported=FORMAT_VERSION,
        )
    if fixed != _HEADER.pack(magic, version, HEADER_BYTES, file_bytes) or file_bytes > MAX_BUNDLE_BYTES:
        _corrupt(path, "header", "its length is another, its unused bytes are not zero, or the file is too large")
    if actual_bytes < file_bytes:
        raise Truncated(
            f"{path} is cut off: it has {actual_bytes:,} of its {file_bytes:,} bytes.",
            path=path,
            size_bytes=actual_bytes,
            expected=file_bytes,
        )
    if actual_bytes > file_bytes:
        raise TrailingData(
            f"{path} has {actual_bytes - file_bytes} bytes after its end.",
            path=path,
            size_bytes=actual_bytes,
            expected=file_bytes,
        )
    if file_bytes < MIN_FILE_BYTES:
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
