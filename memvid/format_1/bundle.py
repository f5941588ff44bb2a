"""A bundle's file of format 1, as a holder of frames: a pack like those of format 2."""

from __future__ import annotations

from ..errors import (
    PUT_BACK,
    BundleMismatch,
    CorruptBundle,
)
from ..format.frames import FrameReader
from ..format.manifest import Manifest, bundle_id_of, decode_manifest
from ..format.sealing import HEADER_BYTES
from .directory import Directory, decode_directory, digest_of
from .layout import (
    LIVE_SUFFIX,
    TRAILER_BYTES,
    Trailer,
    decode_trailer,
    require_header,
)


class FrameFile(FrameReader):
    """A bundle file as a holder of frames: header, trailer and directory were checked. Its manifest is not read."""

    trailer: Trailer
    bundle_id: bytes
    directory: Directory

    def _load(self, expected_id: bytes | None) -> None:
        require_header(self._read(0, min(HEADER_BYTES, self.file_bytes)), self.file_bytes, self.path)
        data = self._read(self.file_bytes - TRAILER_BYTES, TRAILER_BYTES)
        trailer = self.trailer = decode_trailer(data, self.file_bytes, self.path)
        self.bundle_id = trailer.bundle_id
        if expected_id is not None and self.bundle_id != expected_id:
            raise BundleMismatch(
                f"{self.path} holds the bundle {self.bundle_id.hex()}: its content is not what its name promises. "
                f"{PUT_BACK}",
                path=self.path,
                expected=expected_id.hex(),
                found=self.bundle_id.hex(),
            )
        encoded = self._read(trailer.directory_offset, trailer.directory_bytes)
        if digest_of(encoded) != trailer.directory_digest:
            raise CorruptBundle(
                f"{self.path}: the directory is damaged: its digest is not the one in the trailer.",
                path=self.path,
                part="directory",
            )
        self.directory = decode_directory(encoded, trailer.manifest_offset, self.path)
        self.frames = {frame.id: frame for frame in self.directory.frames}


class BundleFile(FrameFile):
    """A bundle file with a checked manifest, and so with a checked bundle id.

    `manifest` is None in a file that only holds blocks for others, under the name of a deleted bundle. A live bundle's
    file always has one.
    """

    manifest: Manifest | None

    def _load(self, expected_id: bytes | None) -> None:
        super()._load(expected_id)
        self.manifest = self._load_manifest() if self.trailer.manifest_bytes else None
        if self.manifest is None and self.path.endswith(LIVE_SUFFIX):
            raise CorruptBundle(
                f"{self.path} has the ending of a version, but no manifest: its session cannot be told. Put the right "
                "file back from a backup.",
                path=self.path,
                part="manifest",
            )

    def _load_manifest(self) -> Manifest:
        encoded = self.encoded_manifest()
        if bundle_id_of(encoded) != self.bundle_id:
            raise CorruptBundle(
                f"{self.path}: the manifest is damaged: its bundle id is not the one in the trailer.",
                path=self.path,
                part="manifest",
            )
        return decode_manifest(encoded, self.path)

    def encoded_manifest(self) -> bytes:
        """The manifest as it lies in the file; empty if there is none."""
        return self._read(self.trailer.manifest_offset, self.trailer.manifest_bytes)
