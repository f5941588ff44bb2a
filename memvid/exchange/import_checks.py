"""The checks on a file from outside the store, before anything of it is believed or copied.

Rules:
- Before anything is decompressed, the sizes that the file claims are added up, and each block is compared with the
  manifest's claim. So the work for a hostile file is bounded by its length (`MAX_EXPANSION`), which the sender had to
  send.
- Every byte of every block is then read and compared.
"""

from __future__ import annotations

import os
import struct
from functools import partial
from typing import Final

from ..disk.paths import open_foreign_file, read_at, stat_open, undoing
from ..errors import BlockMissing, CorruptBundle, LimitExceeded
from ..format.blocks import span_parents
from ..format.bundle import BundleFile, require_promised
from ..format.layout import HEADER_MAGIC
from ..format.manifest import Manifest
from ..format.records import Progress
from ..limits import MAX_EXPANSION, MAX_SMALL_BUNDLE_BYTES

_TENSORS_HEADER: Final = struct.Struct("<Q1s")  # a safetensors file: the length of its list, and the list's first byte


def open_exported(path: str) -> int:
    """Open a file that is to be imported, and look at its first bytes: this refuses a wrong file before any copy.

    Raises:
        StoreIoError: it is not there, may not be read, or is a folder, a FIFO or a device.
        CorruptBundle: it does not begin as a bundle does.
    """
    fd = open_foreign_file(path)
    with undoing(partial(os.close, fd)):
        begin = read_at(fd, 0, max(len(HEADER_MAGIC), _TENSORS_HEADER.size), path)
        magic = begin[: len(HEADER_MAGIC)]
        if not HEADER_MAGIC.startswith(magic):
            what = "no bundle, or one whose beginning is damaged"
            if _begins_as_tensors(begin, stat_open(fd, path).st_size):
                what = "a safetensors file, such as `torpor export-kv` writes for other tools"
            raise CorruptBundle(
                f"{path} is {what}. Only a file that `torpor export` has written can be imported.",
                path=path,
                part="header",
            )
    return fd


def _begins_as_tensors(begin: bytes, file_bytes: int) -> bool:
    if len(begin) < _TENSORS_HEADER.size:
        return False
    list_bytes, first = _TENSORS_HEADER.unpack_from(begin)
    return bool(first == b"{" and list_bytes <= file_bytes)


def require_whole(file: BundleFile, on_progress: Progress | None = None) -> Manifest:
    """Check every byte of a file, and that it needs no other file. `on_progress` is told (raw bytes done, in all).

    Raises:
        CorruptBundle: it holds no session of its own, or blocks that are not those of its manifest.
        BlockMissing: it does not stand alone.
        LimitExceeded: it would unfold to more than any session of that length.
        Corruption: any other damage.
    """
    manifest = require_manifest(file)
    for entry in manifest.blocks:
        if entry.id not in file.frames:
            raise BlockMissing(
                f"{file.path} does not stand alone: its block at token {entry.start} is in another bundle. Export the "
                "session from its store with `torpor export`, and import that file.",
                path=file.path,
                block_id=entry.id.hex(),
            )
    _require_in_proportion(file, manifest)
    parents = span_parents(manifest.blocks)
    done = 0
    for entry in manifest.blocks:
        known = file.read_head(entry.id)
        require_promised(known[0], entry, parents[entry.id], manifest.identity.digest, file.path)
        file.check_block(entry.id, known=known)
        done += entry.raw_bytes
        if on_progress is not None:
            on_progress(done, manifest.logical_bytes)
    return manifest


def require_manifest(file: BundleFile) -> Manifest:
    """A file's manifest. Raises CorruptBundle if it only holds blocks for others."""
    if file.manifest is None:
        raise CorruptBundle(
            f"{file.path} holds blocks for other bundles and no session of its own; there is nothing to import.",
            path=file.path,
            part="manifest",
        )
    return file.manifest


def _require_in_proportion(file: BundleFile, manifest: Manifest) -> None:
    """Refuse a manifest that claims more raw bytes than the file's length allows."""
    most = max(MAX_EXPANSION * file.file_bytes, MAX_SMALL_BUNDLE_BYTES)
    if manifest.logical_bytes > most:
        raise LimitExceeded(
            f"{file.path} has {file.file_bytes} bytes and would unfold to more than {most}, which no exported "
            "session does: it was made to keep its reader busy, and is not taken.",
            path=file.path,
            size_bytes=file.file_bytes,
            limit=most,
        )
