"""The checks on a file from outside the store, before anything of it is believed or copied.

An exported file is a version: its manifest, and all its frames. It is of this format, or a bundle of format 1.

Rules:
- Before anything is decompressed, the sizes that the file claims are added up, and each block is compared with the
  manifest's claim. So the work for a hostile file is bounded by its length (`MAX_EXPANSION`), which the sender had to
  send.
- Every byte of every block is then read and compared.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from ..disk.paths import Closing, open_foreign_file, read_at, stat_open, undoing
from ..errors import BlockMissing, BundleMismatch, CorruptBundle, LimitExceeded
from ..format.blocks import BlockEntry, span_parents
from ..format.frames import FrameReader, require_promised
from ..format.manifest import Manifest, bundle_id_of, decode_manifest
from ..format.records import Progress
from ..format.sealing import BUNDLE_MAGIC, PACK_MAGIC
from ..format_1 import open_any
from ..limits import MAX_EXPANSION, MAX_SMALL_BUNDLE_BYTES

_TENSORS_HEADER: Final = struct.Struct("<Q1s")  # a safetensors file: the length of its list, and the list's first byte


class ExportedFile(Closing):
    """An open file that `torpor export` has written: `manifest` is proven to be that of `bundle_id`, and no block is
    checked yet. Close it when done."""

    def __init__(self, fd: int, path: str, bundle_id: str | None = None) -> None:
        """Take over `fd`; on an error it is closed. bundle_id: the one that the file's name promises, if any.

        Raises:
            StoreIoError, CorruptBundle, Truncated, TrailingData, UnsupportedFormat, BundleMismatch, LimitExceeded
        """
        self.frames = file = open_any(fd, path)
        self.path = path
        with undoing(file.close):
            encoded = file.encoded_manifest()
            if not encoded:
                raise CorruptBundle(
                    f"{path} holds blocks of other versions and no session of its own; there is nothing to import.",
                    path=path,
                    part="manifest",
                )
            self.bundle_id = bundle_id_of(encoded)
            if bundle_id is not None and self.bundle_id != bundle_id:
                raise BundleMismatch(
                    f"{path} holds the bundle {self.bundle_id}: its content is not what its name promises.",
                    path=path,
                    expected=bundle_id,
                    found=self.bundle_id,
                )
            self.manifest: Manifest = decode_manifest(encoded, path)

    def close(self) -> None:
        self.frames.close()

    @contextmanager
    def holding(self, entry: BlockEntry, checked: bool) -> Iterator[FrameReader]:
        """The file to copy a block from; `require_whole` has checked it."""
        yield self.frames


def open_exported(path: str) -> int:
    """Open a file that is to be imported, and look at its first bytes: this refuses a wrong file before any copy.

    Raises:
        StoreIoError: it is not there, may not be read, or is a folder, a FIFO or a device.
        CorruptBundle: it does not begin as an exported file does.
    """
    fd = open_foreign_file(path)
    with undoing(partial(os.close, fd)):
        begin = read_at(fd, 0, max(len(BUNDLE_MAGIC), _TENSORS_HEADER.size), path)
        if not any(magic.startswith(begin[: len(magic)]) for magic in (PACK_MAGIC, BUNDLE_MAGIC)):
            what = "no exported session, or one whose beginning is damaged"
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


def require_whole(file: ExportedFile, on_progress: Progress | None = None) -> None:
    """Check every byte of a file's version, and that the file has all of it. `on_progress` is told (raw bytes done, in
    all).

    Raises:
        BlockMissing: it does not stand alone.
        LimitExceeded: it would unfold to more than any session of that length.
        CorruptBundle: it holds blocks that are not those of its manifest.
        Corruption: any other damage.
    """
    manifest, frames = file.manifest, file.frames
    for entry in manifest.blocks:
        if entry.id not in frames.frames:
            raise BlockMissing(
                f"{file.path} does not stand alone: its block at token {entry.start} is not in it. Export the session "
                "from its store with `torpor export`, and import that file.",
                path=file.path,
                block_id=entry.id.hex(),
            )
    require_in_proportion(manifest, file.frames.file_bytes, file.path)
    parents = span_parents(manifest.blocks)
    done = 0
    for entry in manifest.blocks:
        known = frames.read_head(entry.id)
        require_promised(known[0], entry, parents[entry.id], manifest.identity.digest, file.path)
        frames.check_block(entry.id, known=known)
        done += entry.raw_bytes
        if on_progress is not None:
            on_progress(done, manifest.logical_bytes)


def require_in_proportion(manifest: Manifest, file_bytes: int, path: str) -> None:
    """Refuse a manifest that claims more raw bytes than so many stored ones allow. Raises LimitExceeded."""
    most = max(MAX_EXPANSION * file_bytes, MAX_SMALL_BUNDLE_BYTES)
    if manifest.logical_bytes > most:
        raise LimitExceeded(
            f"{path} has {file_bytes} bytes and would unfold to more than {most}, which no exported session does: "
            "it was made to keep its reader busy, and is not taken.",
            path=path,
            size_bytes=file_bytes,
            limit=most,
        )
