"""A file from outside the store: what must be true of it before anything of it is believed or copied.

Owns that list. Who brings the file, and what becomes of it, others decide.

Rules:
- Nothing is decompressed before all that the file claims to hold was added up: the work that a stranger's file may
  cause is bounded by the file's length (`MAX_EXPANSION`), which whoever sent it had to send.
- Every byte of every block is then read and compared, and each block must be what the manifest says.
"""

from __future__ import annotations

from collections.abc import Callable

from .blocks import span_parents
from .bundle import BundleFile, require_promised
from .errors import BlockMissing, CorruptBundle, LimitExceeded
from .limits import MAX_EXPANSION, MAX_SMALL_BUNDLE_BYTES
from .manifest import Manifest

Progress = Callable[[int, int], None]


def require_whole(file: BundleFile, on_progress: Progress | None = None) -> Manifest:
    """Check every byte of a file, and that it needs no other one. `on_progress` is told (raw bytes done, in all).

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
    done = 0
    for entry in manifest.blocks:
        file.check_block(entry.id)
        done += entry.raw_bytes
        if on_progress is not None:
            on_progress(done, manifest.logical_bytes)
    return manifest


def require_manifest(file: BundleFile) -> Manifest:
    """A file's manifest. Raises CorruptBundle where it only holds blocks for others."""
    if file.manifest is None:
        raise CorruptBundle(
            f"{file.path} holds blocks for other bundles and no session of its own; there is nothing to import.",
            path=file.path,
            part="manifest",
        )
    return file.manifest


def _require_in_proportion(file: BundleFile, manifest: Manifest) -> None:
    """Refuse a file whose blocks, as their own headers describe them, have more raw bytes than its length explains."""
    parents = span_parents(manifest.blocks)
    most = max(MAX_EXPANSION * file.file_bytes, MAX_SMALL_BUNDLE_BYTES)
    total = 0
    for entry in manifest.blocks:
        header, _ = file.read_head(entry.id)
        require_promised(header, entry, parents[entry.id], manifest.identity.digest, file.path)
        total += header.raw_bytes
        if total > most:
            raise LimitExceeded(
                f"{file.path} has {file.file_bytes} bytes and would unfold to more than {most}, which no exported "
                "session does: it was made to keep its reader busy, and is not taken.",
                path=file.path,
                size_bytes=file.file_bytes,
                limit=most,
            )
