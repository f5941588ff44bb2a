"""Reads a whole store, to tell which versions can be woken and which files are damaged. Changes nothing.

Owns the examination of each file by itself, and the judgement of each version by the files that hold its blocks. The
plan decides on the steps.

Rules:
- Every byte is read. A block is sound if its frame was found good, for every version that looks for it there. Padding
  other than zeros damages the file and not the block, which a wake reads as ever.
- A file that the system refuses to read, that is of a later version, or that is no plain file of ours, is not judged;
  no version that may need it counts as lost.
- All files are judged as of one moment: a file written anew while others were read, which may have gained or lost their
  blocks, is read again, until nothing changes; after LOOKS times once more under the lock. A change may follow at once,
  so each step checks again.
- A file that a delete has emptied for want of room, and that no version needs, counts as absent.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from ..checking.set_aside_versions import list_waiting, version_in
from ..disk.paths import Stamp
from ..errors import BundleMismatch, BundleMissing, StoreError, StoreIoError, UnsafePath, UnsupportedFormat
from ..folder import quarantine
from ..folder.marks import Marks
from ..folder.store_file import QUARANTINE
from ..format.bundle import BundleFile, FrameFile
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.manifest import Manifest
from ..format.records import Finding, IndexRow
from ..format.salvage import DamagedFile
from ..index.rows import SHADOWED
from ..writing.core import StoreCore

Judgement = Literal["intact", "mendable", "unjudged", "lost"]

LOOKS: Final = 4
"""Looks at the files, each at those that changed during the one before; the few that still change are then read under
the lock."""

_NOT_DAMAGE: Final = (StoreIoError, UnsafePath, UnsupportedFormat)


@dataclass(frozen=True, slots=True)
class FileState:
    """One bundle's file as it was found.

    places: for each block of the manifest its holder; None if no directory could be read.
    stamp: another file in its place, or a write to it, has another.
    is_aside: whether it lies in quarantine.
    sound: the blocks whose frames in this file are good, in file order.
    frame_bytes: the sizes of the sound frames.
    damage: the first fault of the file itself, as a sentence; "" for none.
    content: the whole bundle in it, if its name says another; else None.
    """

    bundle_id: bytes
    suffix: str
    path: str
    is_aside: bool
    stamp: Stamp
    file_bytes: int
    manifest: Manifest | None
    places: Mapping[bytes, bytes] | None
    sound: tuple[bytes, ...]
    frame_bytes: Mapping[bytes, int]
    damage: str
    content: bytes | None = None

    @property
    def is_live(self) -> bool:
        return self.suffix == LIVE_SUFFIX

    @property
    def key(self) -> bytes:
        return os.fsencode(self.path)


@dataclass(slots=True)
class Survey:
    """All files, the rows of versions, and for each block the files that hold a sound frame of it.

    files: one for each bundle, the live one of two; twins: the retired ones beside live ones; aside: the files in
        quarantine under the name of a version, the newest of each first.
    unjudged: the files about which nothing is known, each with the error.
    refs: the needs, by the index, of versions whose own files do not tell them any more.
    misnamed: the bundles that lie whole under the names of others, of no use until they are set aside.
    given_up: the rows of versions that repair has set aside; unread: of bundles that could not be read when the store
        was opened, with a known owner.
    marked: the bundles with tags or pins; None if the marks cannot be read.
    """

    rows: dict[bytes, IndexRow]
    shadowed: frozenset[bytes]
    files: dict[bytes, FileState] = field(default_factory=dict)
    twins: dict[bytes, FileState] = field(default_factory=dict)
    unjudged: dict[bytes, Finding] = field(default_factory=dict)
    holders: dict[bytes, list[FileState]] = field(default_factory=dict)
    refs: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)
    by_key: dict[bytes, FileState] = field(default_factory=dict)
    given_up: dict[bytes, IndexRow] = field(default_factory=dict)
    unread: dict[bytes, IndexRow] = field(default_factory=dict)
    aside: dict[bytes, list[FileState]] = field(default_factory=dict)
    misnamed: set[bytes] = field(default_factory=set)
    marked: Container[bytes] | None = None

    def take(self, file: FileState) -> None:
        """Note a file, and its sound blocks."""
        if file.is_aside:
            if file.is_live:
                self.aside.setdefault(file.bundle_id, []).append(file)
        elif self.files.setdefault(file.bundle_id, file) is not file:
            self.twins[file.bundle_id] = file
        if file.content is not None:
            self.misnamed.add(file.content)
        self.by_key[file.key] = file
        for block_id in file.sound:
            self.holders.setdefault(block_id, []).append(file)

    def of(self, bundle_id: bytes) -> list[FileState]:
        """A bundle's files, the one that counts first."""
        found = (self.files.get(bundle_id), self.twins.get(bundle_id))
        return [file for file in found if file is not None]

    def holds(self, bundle_id: bytes, block_id: bytes) -> bool:
        """Whether a bundle's file under bundles/, or one of its two, has a sound frame of a block."""
        return any(file.bundle_id == bundle_id and not file.is_aside for file in self.holders.get(block_id, ()))

    def best_aside(self, bundle_id: bytes) -> FileState | None:
        """The file in quarantine from which a version would come back: one without damage, else the newest."""
        found = [file for file in self.aside.get(bundle_id, ()) if file.manifest is not None]
        return min(found, key=lambda file: bool(file.damage), default=None)

    def row_of(self, bundle_id: bytes) -> IndexRow | None:
        """The row of a bundle that is, or was, a version, in any status; None without one."""
        found = (rows.get(bundle_id) for rows in (self.rows, self.given_up, self.unread))
        return next((row for row in found if row is not None), None)

    def is_sound(self, block_id: bytes) -> bool:
        return bool(self.holders.get(block_id))

    def judge(self, file: FileState) -> Judgement:
        """The prospects of a file's version.

        intact: nothing is wrong. mendable: every block is sound somewhere. unjudged: some block may be in a file that
        could not be read. lost: the manifest, or a block, is nowhere. For a bundle with two files the live one is
        judged: it is mendable also if only the retired one holds a block.
        """
        if file.manifest is None:
            return "unjudged" if file.bundle_id in self.unjudged else "lost"
        missing = [entry.id for entry in file.manifest.blocks if not self.is_sound(entry.id)]
        if missing:
            return "unjudged" if any(self._may_be_unread(file, block) for block in missing) else "lost"
        twin = self.twins.get(file.bundle_id)
        if file.damage or file.places is None or (twin is not None and not set(file.sound).issuperset(twin.sound)):
            return "mendable"
        elsewhere = any(not self.holds(place, block) for block, place in file.places.items())
        return "mendable" if elsewhere else "intact"

    def _may_be_unread(self, file: FileState, block_id: bytes) -> bool:
        if file.places is None:
            return bool(self.unjudged)
        return file.places[block_id] in self.unjudged


def take_survey(core: StoreCore) -> Survey:
    """Read every bundle file of a store to the last byte.

    Raises:
        StoreIoError: the folder, or the index, cannot be read.
    """
    survey, seen = _looked_at(core)
    for target, file in seen.items():
        if isinstance(file, FileState):
            survey.take(file)
        elif target.name is None and file.code != BundleMissing.code:  # a missing one was deleted meanwhile
            survey.unjudged[target.bundle_id] = file
    rows = survey.rows
    for bundle_id in rows.keys() & survey.files.keys():
        file = survey.files[bundle_id]
        if file.manifest is None:  # then any other file of the bundle may tell the version
            others = (survey.twins.get(bundle_id), survey.best_aside(bundle_id))
            manifest = next((other.manifest for other in others if other is not None and other.manifest), None)
            survey.files[bundle_id] = dataclasses.replace(file, manifest=manifest)
    for bundle_id in rows:
        found = survey.files.get(bundle_id)
        if found is None or found.places is None:
            survey.refs[bundle_id] = core.index.refs_of(bundle_id)
    with contextlib.suppress(StoreError):
        survey.marked = Marks.load(core.folder).bundle_ids
    return survey


@dataclass(frozen=True, slots=True)
class Target:
    """A file to be examined: a bundle's with one ending, or the one of this name in quarantine."""

    bundle_id: bytes
    suffix: str
    name: str | None = None

    def path(self, core: StoreCore) -> str:
        if self.name is None:
            return core.folder.bundle_path(self.bundle_id, self.suffix)
        return f"{core.path}/{QUARANTINE}/{self.name}"

    def stamp(self, core: StoreCore) -> Stamp | None:
        if self.name is None:
            return core.folder.stamp_of(self.bundle_id, self.suffix)
        return quarantine.stamp_of_name(core.folder, self.name)

    def open(self, core: StoreCore) -> tuple[int, str]:
        if self.name is None:
            return core.folder.open_as(self.bundle_id, self.suffix)
        return quarantine.open_name(core.folder, self.name)


def _looked_at(core: StoreCore) -> tuple[Survey, dict[Target, FileState | Finding]]:
    """The rows of the index, and the state of each file, as of one moment."""
    seen: dict[Target, FileState | Finding] = {}
    before: tuple[Survey, list[Target]] | None = None
    for _ in range(LOOKS):
        survey, targets = _known(core), _targets(core)
        if (survey, targets) == before and all(_is_as_seen(core, target, seen[target]) for target in targets):
            return survey, seen
        before = survey, targets
        seen = {target: _seen(core, target, seen.get(target)) for target in targets}
    with core.committing() if core.writable else contextlib.nullcontext():
        survey, targets = _known(core), _targets(core)
        return survey, {target: _seen(core, target, seen.get(target)) for target in targets}


def _known(core: StoreCore) -> Survey:
    rows = {row.bundle_id: row for row in core.index.all_rows()}
    index = core.index
    shadowed = frozenset(index.with_status(SHADOWED))
    return Survey(rows, shadowed, given_up=index.given_up(), unread=index.unreadable())


def _targets(core: StoreCore) -> list[Target]:
    """The files that are there, in the order of their names; those in quarantine last, the newest of each first."""
    files, twins = core.folder.list_with_twins()
    named = sorted([*files.items(), *((twin, RETIRED_SUFFIX) for twin in twins)])
    return [
        *(Target(*one) for one in named if one[1] == LIVE_SUFFIX or not _is_leftover(core, one[0])),
        *(Target(*one) for one in list_waiting(core.folder)),
    ]


def _is_leftover(core: StoreCore, bundle_id: bytes) -> bool:
    return core.folder.is_emptied(bundle_id) and not core.index.users_of(bundle_id)


def _seen(core: StoreCore, target: Target, before: FileState | Finding | None) -> FileState | Finding:
    """The state of a file, read again only if it changed; or the error."""
    if before is not None and _is_as_seen(core, target, before):
        return before
    try:
        return _examine(core, target)
    except StoreError as error:
        return Finding(target.path(core), error.code, error.message)


def _is_as_seen(core: StoreCore, target: Target, seen: FileState | Finding) -> bool:
    try:
        stamp = target.stamp(core)
    except UnsafePath:
        stamp = None
    if isinstance(seen, Finding):
        return seen.code != BundleMissing.code or stamp is None
    return stamp == seen.stamp


def open_source(core: StoreCore, file: FileState) -> FrameFile:
    """Open a surveyed file for its sound frames, also if its frame of reference is damaged."""
    return (FrameFile if file.places is not None else DamagedFile)(*_opened(core, file), file.bundle_id)


def open_frames_of(core: StoreCore, file: FileState) -> FrameFile:
    """Open a surveyed file for its heads, also of damaged frames. Raises StoreError."""
    return FrameFile(*_opened(core, file), None)


def _opened(core: StoreCore, file: FileState) -> tuple[int, str]:
    name = os.path.basename(file.path) if file.is_aside else None
    return Target(file.bundle_id, file.suffix, name).open(core)


def _examine(core: StoreCore, target: Target) -> FileState:
    """Raises errors that are no damage: BundleMissing, UnsafePath, StoreIoError, UnsupportedFormat."""
    fd, path = target.open(core)
    try:
        with BundleFile(fd, path, target.bundle_id) as file:
            places = {entry.id: entry.bundle_id or target.bundle_id for entry in file.entries}
            return _state_of(file, file.manifest, places, "", target)
    except _NOT_DAMAGE:
        raise
    except StoreError as error:
        return _examine_damaged(core, target, error)


def _examine_damaged(core: StoreCore, target: Target, error: StoreError) -> FileState:
    fd, path = target.open(core)
    with DamagedFile(fd, path, target.bundle_id) as file:
        state = _state_of(file, file.manifest, None, error.message, target)
    if not isinstance(error, BundleMismatch):
        return state
    return dataclasses.replace(state, content=version_in(functools.partial(target.open, core)))


def _state_of(
    file: FrameFile, manifest: Manifest | None, places: Mapping[bytes, bytes] | None, damage: str, target: Target
) -> FileState:
    stamp = file.stamp()  # before the frames are read: a write meanwhile is a change
    sound: list[bytes] = []
    for block_id in sorted(file.frames, key=lambda one: file.frames[one].offset):
        try:
            file.check_payloads(block_id)
            sound.append(block_id)
            file.check_block(block_id)
        except StoreIoError:
            raise
        except StoreError as error:
            damage = damage or error.message
    return FileState(
        bundle_id=file.bundle_id,
        suffix=target.suffix,
        path=file.path,
        stamp=stamp,
        file_bytes=file.file_bytes,
        manifest=manifest,
        places=places,
        is_aside=target.name is not None,
        sound=tuple(sound),
        frame_bytes={block_id: file.frames[block_id].frame_bytes for block_id in sound},
        damage=damage,
    )
