"""The first 64 bytes of manifests, packs and bundles of format 1: kind, format version and length, sealed by a digest.

Rule: every version seals its first bytes in the same way, so that damage is not mistaken for a later version.
"""

from __future__ import annotations

import struct
from typing import Final, NoReturn

from blake3 import blake3

from ..errors import CorruptBundle, TrailingData, Truncated, UnsupportedFormat
from ..limits import MAX_BUNDLE_BYTES

FORMAT_VERSION: Final = 2
MANIFEST_MAGIC: Final = b"\x89MVM\r\n\x1a\n"  # like PNG's: a transfer in text mode breaks it
PACK_MAGIC: Final = b"\x89MVP\r\n\x1a\n"
BUNDLE_MAGIC: Final = b"\x89MVB\r\n\x1a\n"
_KINDS: Final = {MANIFEST_MAGIC: "manifest", PACK_MAGIC: "pack", BUNDLE_MAGIC: "bundle"}
_OLDER: Final = {BUNDLE_MAGIC: 1}
"""The format version of kinds that are not written any more."""

_HEADER: Final = struct.Struct("<8sIIQ8x")  # magic, version, header bytes, file bytes, zeros
DIGEST_BYTES: Final = 32
HEADER_BYTES: Final = _HEADER.size + DIGEST_BYTES


def encode_header(magic: bytes, file_bytes: int) -> bytes:
    fixed = _HEADER.pack(magic, FORMAT_VERSION, HEADER_BYTES, file_bytes)
    return fixed + blake3(fixed).digest()


def require_header(data: bytes, magic: bytes, actual_bytes: int, path: str) -> None:
    """Refuse a file that is not of this kind, or of a later version, or not as long as it was written.

    The digest is checked first, then the version, then the fields that a later version may lay out differently.

    Raises:
        Truncated, TrailingData, CorruptBundle, UnsupportedFormat
    """
    kind, supported = _KINDS[magic], _OLDER.get(magic, FORMAT_VERSION)
    if len(data) < HEADER_BYTES:
        raise Truncated(f"{path} ends after {len(data)} bytes, within its header.", path=path, size_bytes=actual_bytes)
    found, version, _, file_bytes = _HEADER.unpack_from(data)
    fixed = data[: _HEADER.size]
    if found != magic:
        corrupt(path, "header", f"it does not begin like a {kind}")
    if blake3(fixed).digest() != data[_HEADER.size : HEADER_BYTES]:
        corrupt(path, "header", "its digest differs")
    if version != supported:
        raise UnsupportedFormat(
            f"{path} has format version {version}; this program reads version {supported}. "
            "Use the Torpor that wrote it. The file was not touched.",
            path=path,
            found=version,
            supported=supported,
        )
    if fixed != _HEADER.pack(magic, version, HEADER_BYTES, file_bytes) or file_bytes > MAX_BUNDLE_BYTES:
        corrupt(path, "header", "its length is another, its unused bytes are not zero, or the file is too large")
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


def corrupt(path: str, part: str, why: str) -> NoReturn:
    """Refuse a file that has something in this part of it that no writer writes."""
    raise CorruptBundle(f"{path}: the {part} is damaged: {why}.", path=path, part=part)
