"""What is left on the disk of stripped versions: the index tells of that, and no more of what they wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace

from ..answers import VersionInfo
from ..errors import StoreError
from ..folder.folder import manifest_name
from .core import StoreCore


def count_stripped(core: StoreCore, bundle_ids: Collection[str]) -> None:
    """Let the rows of these stripped versions tell of the bytes that are left: of their manifests, and of the blocks
    that no earlier version of the session names. Call it where no version can be deleted meanwhile: while `committing`,
    or at the opening."""
    changed = []
    for uri in {row.uri for row in core.index.rows_of(bundle_ids).values()}:
        earlier: set[bytes] = set()
        for row in core.index.versions(uri):
            blocks = core.needs.of(row.bundle_id)
            if row.bundle_id in bundle_ids:
                bytes_left = _bytes_left(core, row, set(blocks) - earlier)
                changed.append(replace(row, bundle_bytes=min(row.bundle_bytes, bytes_left)))
            earlier.update(blocks)
    core.index.add_all(changed)


def _bytes_left(core: StoreCore, row: VersionInfo, own: set[bytes]) -> int:
    """The bytes of a manifest, and of these blocks in packs: of a pack with others, too, their part."""
    bytes_left = core.folder.bytes_of(manifest_name(row.bundle_id))
    for name in core.index.packs_with(own, stripped=True):
        with contextlib.suppress(StoreError), core.files.holding(name) as file:
            frames = {**file.heads, **file.frames}
            here = own & frames.keys()
            own = own - here
            in_all = sum(frame.frame_bytes for frame in frames.values())
            bytes_left += file.file_bytes * sum(frames[each].frame_bytes for each in here) // max(1, in_all)
    return bytes_left
