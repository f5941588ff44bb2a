"""A manifest as a file: header, then the manifest's bytes. Its name is the bundle id, the digest of these bytes."""

from __future__ import annotations

from ..disk.paths import read_at, stat_open
from ..errors import BundleMismatch, LimitExceeded
from ..limits import MAX_MANIFEST_BYTES
from .manifest import Manifest, bundle_id_of, decode_manifest
from .sealing import HEADER_BYTES, MANIFEST_MAGIC, encode_header, require_header


def manifest_file_bytes(encoded: bytes) -> int:
    """The size of the file of a manifest, in bytes."""
    return HEADER_BYTES + len(encoded)


def encode_manifest_file(encoded: bytes) -> bytes:
    """The file of an encoded manifest."""
    return encode_header(MANIFEST_MAGIC, manifest_file_bytes(encoded)) + encoded


def read_manifest_bytes(fd: int, path: str, bundle_id: bytes | None) -> bytes:
    """The manifest's bytes in an open file, whose digest is `bundle_id`; None: whatever it is.

    Raises:
        UnsupportedFormat, Truncated, TrailingData, CorruptBundle, BundleMismatch, LimitExceeded, StoreIoError
    """
    size_bytes = stat_open(fd, path).st_size
    if size_bytes > MAX_MANIFEST_BYTES + HEADER_BYTES:
        raise LimitExceeded(
            f"{path} has {size_bytes} bytes; a manifest has at most {MAX_MANIFEST_BYTES}.",
            path=path,
            size_bytes=size_bytes,
            limit=MAX_MANIFEST_BYTES,
        )
    data = read_at(fd, 0, size_bytes, path)
    require_header(data[:HEADER_BYTES], MANIFEST_MAGIC, len(data), path)
    encoded = data[HEADER_BYTES:]
    found = bundle_id_of(encoded)
    if bundle_id is not None and found != bundle_id:
        raise BundleMismatch(
            f"{path} is damaged, or another version's: its content is not what its name promises.",
            path=path,
            expected=bundle_id.hex(),
            found=found.hex(),
        )
    return encoded


def read_manifest(fd: int, path: str, bundle_id: bytes) -> Manifest:
    """The manifest in an open file. Raises as `read_manifest_bytes`, and CorruptBundle where it is not valid."""
    return decode_manifest(read_manifest_bytes(fd, path, bundle_id), path)
