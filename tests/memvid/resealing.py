"""Bundles resealed by a hand that knows the format: every digest but the block ids is right."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable

from blake3 import blake3
from torpor.memvid import Store
from torpor.memvid.format.bundle import BundleFile
from torpor.memvid.format.directory import Directory
from torpor.memvid.format.layout import HEADER_BYTES, Trailer, encode_header
from torpor.memvid.format.manifest import decode_manifest
from torpor.tests.memvid.store_making import (
    bundle_path,
)


@dataclasses.dataclass
class Parts:
    """A bundle file taken apart, to be changed."""

    frames: bytearray  # header included
    manifest: bytes
    directory: Directory
    original: bytes  # the bundle id

    def change_manifest(self, **changes: object) -> None:
        """Other fields, honestly encoded."""
        self.manifest = dataclasses.replace(decode_manifest(self.manifest, "original"), **changes).encode()

    def change_directory(self, **changes: object) -> None:
        self.directory = dataclasses.replace(self.directory, **changes)


def taken_apart(store: Store, bundle_id: bytes) -> Parts:
    path = bundle_path(store, bundle_id)
    with contextlib.closing(BundleFile(os.open(path, os.O_RDONLY), str(path), bundle_id)) as file:
        frames = bytearray(path.read_bytes()[: file.trailer.manifest_offset])
        return Parts(frames, file.encoded_manifest(), file.directory, bundle_id)


def reseal(store: Store, bundle_id: bytes, change: Callable[[Parts], object], *, keep_id: bool = False) -> bytes:
    """Let `change` edit a bundle's parts, make every digest right again, and publish the result under its new id."""
    parts = taken_apart(store, bundle_id)
    change(parts)
    directory = parts.directory.encode()
    new_id = bundle_id if keep_id else blake3(parts.manifest).digest()
    trailer = Trailer(len(parts.frames), len(parts.manifest), len(directory), new_id, blake3(directory).digest())
    path = bundle_path(store, new_id)
    path.parent.mkdir(exist_ok=True)
    header = encode_header(trailer.file_bytes)
    path.write_bytes(header + parts.frames[HEADER_BYTES:] + parts.manifest + directory + trailer.encode())
    path.parent.chmod(0o700)
    return new_id
