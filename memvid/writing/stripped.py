"""What is left on the disk of stripped versions: the index tells of that, and no more of what they wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace

from ..errors import StoreError
from ..folder.folder import manifest_name
from ..format.records import IndexRow
from .core import StoreCore


def count_stripped(core: StoreCore, bundle_ids: Collection[bytes]) -> None:
    """Let the rows of these stripped versions tell of the bytes that are left. Call it where no version can be deleted
    meanwhile: while `committing`, or at the opening."""
    rows = core.index.rows_of(bundle_ids).values()
    core.index.add_all([replace(row, bundle_bytes=min(row.bundle_bytes, _bytes_left(core, row))) for row in rows])


def _bytes_left(core: StoreCore, row: IndexRow) -> int:
    """The bytes of its manifest, and those that packs still have of the blocks that the version before does not name.
    Of a pack with blocks of others, too, its part."""
    own = set(core.needs.of(row.bundle_id)) - set(core.needs.of(row.parent) if row.parent is not None else ())
    status = core.folder.status_of(manifest_name(row.bundle_id))
    bytes_left = status.st_size if status is not None else 0
    for name in core.index.packs_with(own, stripped=True):
        with contextlib.suppress(StoreError), core.files.holding(name) as file:
            frames = {**file.heads, **file.frames}
            here = own & frames.keys()
            own -= here
            in_all = sum(frame.frame_bytes for frame in frames.values())
            bytes_left += file.file_bytes * sum(frames[each].frame_bytes for each in here) // max(1, in_all)
    return bytes_left
