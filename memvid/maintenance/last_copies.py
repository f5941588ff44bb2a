"""Files in quarantine that must not go: listed versions need blocks that are sound nowhere else.

Only a repair settles that for good, by putting those blocks back in their places. Changes nothing.

How it scales: nothing is read while the quarantine is empty. Otherwise the directory of every listed version, and under
bundles/ every byte of those blocks that lie in quarantine too. Memory grows with the blocks there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..checking.set_aside_versions import list_waiting, open_for_frames
from ..errors import StoreError
from ..folder import duplicate_files
from ..format.bundle import BundleFile
from ..format.records import IndexRow
from ..writing.core import StoreCore


def find_last_copies(core: StoreCore) -> dict[str, IndexRow]:
    """The names of the files in quarantine that a listed version would miss, each with such a version.

    The needs of a version with a missing or unreadable file are unknown: each file of its bundle, or of its holders,
    counts.

    Raises:
        UnsafePath, StoreIoError: the quarantine cannot be looked into, or the index cannot be read.
    """
    search = _Search(core)
    found: dict[str, IndexRow] = {}
    for row in core.index.all_rows() if search.names else ():
        for name in search.needed_by(row.bundle_id):
            found.setdefault(name, row)
    return found


class _Search:
    """The blocks in quarantine, and those of them found under bundles/."""

    def __init__(self, core: StoreCore) -> None:
        self._core = core
        self.names: dict[bytes, list[str]] = {}
        self._holders: dict[bytes, list[str]] = {}
        self._sound: dict[tuple[bytes, bytes], bool] = {}
        for bundle_id, _, name in list_waiting(core.folder):
            self.names.setdefault(bundle_id, []).append(name)
            with contextlib.suppress(StoreError), open_for_frames(core.folder, name, bundle_id) as file:
                for block_id in file.frames:
                    self._holders.setdefault(block_id, []).append(name)

    def needed_by(self, bundle_id: bytes) -> Iterator[str]:
        core = self._core
        try:
            with BundleFile(*core.folder.open_bundle(bundle_id), bundle_id) as file:
                wanted = [(entry.id, entry.bundle_id or bundle_id) for entry in file.entries]
        except StoreError:
            for place in (bundle_id, *core.index.refs_of(bundle_id)):
                yield from self.names.get(place, ())
            return
        for block_id, place in wanted:
            if block_id in self._holders and not self._is_sound(block_id, place):
                yield from self._holders[block_id]

    def _is_sound(self, block_id: bytes, place: bytes) -> bool:
        """In its place, or else anywhere under bundles/, where a repair can find it."""
        holders = (one for one in self._core.index.holders_of(block_id) if one != place)
        return self._is_sound_in(place, block_id) or any(self._is_sound_in(one, block_id) for one in holders)

    def _is_sound_in(self, place: bytes, block_id: bytes) -> bool:
        if (place, block_id) not in self._sound:
            self._sound[place, block_id] = False
            with (
                contextlib.suppress(StoreError),
                duplicate_files.open_frames(self._core.folder, place) as file,
            ):
                if block_id in file.frames:
                    file.check_payloads(block_id)
                    self._sound[place, block_id] = True
        return self._sound[place, block_id]
