"""A bundle of format 1: a pack with another magic, trailer and directory. Stores that were carried over have such
files, and they are imported. Nothing writes one."""

from __future__ import annotations

import os
import struct
from functools import partial
from typing import Final

from .disk.paths import read_at, undoing
from .format.layout import Frame
from .format.manifest import bundle_id_of
from .format.pack import PackFile, TrailerForm, decode_frames, unpack_directory
from .format.sealing import BUNDLE_MAGIC, corrupt

_DOMAIN: Final = "torpor.directory/1"
_KEYS: Final = {"frames", "holders", "places"}  # the last two told where blocks of other bundles lay

TRAILER: Final = TrailerForm(b"MVTAIL\r\n", struct.Struct("<8sQQQQ32s32s"))
# magic, manifest offset, manifest bytes, directory bytes, file bytes, bundle id, digest of the directory


class BundleFile(PackFile):
    """An open bundle of format 1. The bundle id in its trailer is the digest of its manifest; one that only held blocks
    for others has none."""

    magic = BUNDLE_MAGIC
    form = TRAILER

    def _decode_directory(self, encoded: bytes) -> tuple[Frame, ...]:
        fields = unpack_directory(encoded, _DOMAIN, self.path)
        if not isinstance(fields, dict) or fields.keys() != _KEYS:
            corrupt(self.path, "directory", "its fields are not those of this format version")
        return decode_frames(fields["frames"], self.trailer.manifest_offset, self.path)

    def encoded_manifest(self) -> bytes:
        """The manifest; empty if there is none. Raises CorruptBundle."""
        encoded = self._read(self.trailer.manifest_offset, self.trailer.manifest_bytes)
        if encoded and bundle_id_of(encoded) != self.trailer.bundle_id.hex():
            corrupt(self.path, "manifest", "its bundle id is not the one in the trailer")
        return encoded


def open_any(fd: int, path: str) -> PackFile:
    """Open a pack, or a bundle of format 1, as its first bytes say; what its name says does not matter. Takes over
    `fd`; on an error it is closed.

    Raises:
        StoreIoError, UnsupportedFormat, Corruption, LimitExceeded
    """
    with undoing(partial(os.close, fd)):
        is_old = read_at(fd, 0, len(BUNDLE_MAGIC), path) == BUNDLE_MAGIC
    return (BundleFile if is_old else PackFile)(fd, path, None)
