"""The checks of each repair step, under the lock: all facts of its plan.

A delete, a sleep, an import or a compaction may have come between. Each guard then raises `Changed`.
"""

from __future__ import annotations

from collections.abc import Container

from ..errors import BundleMissing, StoreError
from ..folder.marks import Marks
from ..format.layout import LIVE_SUFFIX
from ..format.manifest import Manifest
from ..format.salvaged import SALVAGED_FROM
from ..index.rows import IndexedBundle
from ..uri import SessionUri
from ..writing.core import StoreCore
from .plan_steps import Restore, SetAside
from .repair_run import Changed, RepairRun
from .survey import FileState


class Guards:
    def __init__(self, run: RepairRun) -> None:
        self._run = run

    def require_row(self, bundle_id: bytes) -> None:
        """Raise unless a bundle is still the version that it was, or still none."""
        if self._run.core.index.rows_of([bundle_id]).get(bundle_id) != self._run.survey.rows.get(bundle_id):
            raise Changed

    def require_standing(self, file: FileState) -> None:
        """Raise unless a version is as it was at the look: its session may have been deleted or forgotten since."""
        if self._run.is_changed(file.bundle_id):
            raise Changed
        self.require_row(file.bundle_id)

    def require_number(self, manifest: Manifest, file: FileState) -> None:
        """Raise if another bundle has become this file's version."""
        row = self._run.core.index.find(manifest.uri, manifest.version)
        if row is not None and row.bundle_id != file.bundle_id:
            raise Changed

    def require_newest(self, uri: SessionUri, version: int) -> None:
        """Raise if a session has slept since the look, or is about to: the rest of an old version would be newer than
        the state just put to sleep."""
        latest = self._run.core.index.find(uri)
        known = max((row.version for row in self._run.survey.rows.values() if row.uri == uri), default=0)
        if (latest.version if latest else 0) > known or any(one < version for one in self._run.core.being_written(uri)):
            raise Changed

    def require_still_so(self, step: SetAside) -> None:
        """Raise unless the reason to set a file aside still holds: the other bundle of its version, the live file with
        all its frames, or the lack of its blocks. A sleep or an import may have written these since."""
        file, manifest, index = step.file, step.file.manifest, self._run.core.index
        if step.role == "twin":
            with self._run.core.open_bundle(file.bundle_id) as live:
                is_all = live.path.endswith(LIVE_SUFFIX) and live.frames.keys() >= set(file.sound)
            if not is_all or self._run.core.folder.stamp_of(file.bundle_id, file.suffix) != file.stamp:
                raise Changed
        elif step.role == "superseded" and manifest is not None:
            self.require_newest(manifest.uri, manifest.version)
            source = manifest.environment[SALVAGED_FROM]
            marked = Marks.load(self._run.core.folder).of(file.bundle_id)
            if marked or not index.rows_of([bytes.fromhex(source)]):
                raise Changed
        elif step.role == "rival" and manifest is not None:
            row = index.find(manifest.uri, manifest.version)
            if row is None or row.bundle_id == file.bundle_id:
                raise Changed
        elif step.role == "lost":
            self.require_still_lost(file)

    def require_still_lost(self, file: FileState) -> None:
        if not self._is_still_lost(file):
            raise Changed

    def _is_still_lost(self, file: FileState) -> bool:
        """Whether the blocks that a version lacks are still nowhere: no file that may hold one, by its directory or by
        the index, has come or changed since the look."""
        if file.manifest is None:
            return True
        missing = [entry.id for entry in file.manifest.blocks if not self._run.survey.is_sound(entry.id)]
        if file.places is None:
            holders = set(self._run.survey.refs.get(file.bundle_id, ()))
        else:
            holders = {file.places[block_id] for block_id in missing}
        holders.update(holder for block_id in missing for holder in self._run.core.index.holders_of(block_id))
        return not any(map(self._run.is_changed, holders))

    def require_free(self, file: FileState) -> None:
        """Raise unless the file is as it was, and no reader has it open: no sleep is about to refer to its frames."""
        self.require_standing(file)
        if self._run.core.pins.count(file.bundle_id):
            raise Changed

    def require_unneeded(self, file: FileState, stays: frozenset[bytes]) -> None:
        """Raise if a version needs a block in a file that leaves with it: a sleep may have ended since the needs were
        counted."""
        leaving = set(file.sound) - stays
        users = self._run.core.index.users_of(file.bundle_id) if leaving else []
        if any(self._looks_for(user, file.bundle_id, leaving) for user in users):
            raise Changed

    def _looks_for(self, user: bytes, holder: bytes, blocks: Container[bytes]) -> bool:
        """Whether a version that is to stay needs one of these blocks there; the needs of a lost one are lost with
        it."""
        known = self._run.survey.files.get(user)
        is_lost = known is not None and self._run.survey.judge(known) == "lost"
        if known is not None and is_lost and not self._run.is_changed(user) and self._is_still_lost(known):
            return False
        try:
            with self._run.core.open_bundle(user) as opened:
                return any(entry.bundle_id == holder and entry.id in blocks for entry in opened.entries)
        except BundleMissing:
            return False

    def require_still_aside(self, step: Restore) -> None:
        index, row = self._run.core.index, step.row
        is_listed = row.bundle_id in self._run.survey.rows  # its file is missing, and it was not given up
        present = index.rows_of([row.bundle_id]) if is_listed else index.given_up()
        used = index.find(row.uri, row.version)
        if present.get(row.bundle_id) != row or (used is not None and used.bundle_id != row.bundle_id):
            raise Changed  # its session was deleted, or it is back already
        if self._run.stamp(row.bundle_id, LIVE_SUFFIX) is not None or self._run.is_changed(row.bundle_id):
            raise Changed


def require_held(
    core: StoreCore, manifest: Manifest, bundle: IndexedBundle, but_for: Container[bytes] = frozenset()
) -> None:
    """Raise unless every block without a frame in the new file is in its place, at this moment. Leaves out `but_for`,
    whose turn comes."""
    here = set(bundle.blocks)
    elsewhere = {entry.id for entry in manifest.blocks} - here
    if any(holder in but_for for holder in bundle.refs):
        return
    for holder in bundle.refs:
        try:
            with core.open_frames(holder) as file:
                elsewhere -= file.frames.keys()
        except StoreError as error:
            raise Changed from error
    if elsewhere:
        raise Changed
