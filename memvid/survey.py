"""Reading all that a store holds, to tell what can be woken and what is damaged. Changes nothing.

Owns the examination of each file by itself, and the judgement of each version by the files that hold its blocks.
Decides nothing about what is to be done.

Rules:
- Every byte is read. A block counts as sound where its frame was found good, whoever looks for it there. Padding that
  is not zero damages the file and not the block, which a wake reads as ever.
- What the system refuses to read, what is of a later version, or is no plain file of ours, is not judged, and no
  version that may need it is taken for lost.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from .bundle import FrameFile
from .core import StoreCore
from .errors import BundleMissing, StoreError, StoreIoError, UnsafePath, UnsupportedFormat
from .folder import LIVE_SUFFIX
from .index import SHADOWED
from .manifest import Manifest
from .paths import Stamp
from .records import Finding, IndexRow
from .salvage import DamagedFile

Judgement = Literal["intact", "mendable", "unjudged", "lost"]

_NOT_DAMAGE: Final = (StoreIoError, UnsafePath)


@dataclass(frozen=True, slots=True)
class FileState:
    """One bundle's file as it was found.

    places: for each block of the manifest the bundle that is said to hold it; None where no directory could be read.
    stamp: what tells it from a file that took its place, or was written over it, since.
    sound: the blocks whose frames in this file are good, in file order; damaged: those whose frames are not.
    damage: the first thing that is wrong with the file itself, as a sentence; "" for none.
    """

    bundle_id: bytes
    suffix: str
    path: str
    stamp: Stamp
    file_bytes: int
    manifest: Manifest | None
    places: Mapping[bytes, bytes] | None
    sound: tuple[bytes, ...]
    damaged: frozenset[bytes]
    damage: str

    @property
    def is_live(self) -> bool:
        return self.suffix == LIVE_SUFFIX


@dataclass(slots=True)
class Survey:
    """All files, the rows of versions, and for each block the bundles whose files hold a sound frame of it.

    `unjudged` are the files about which nothing is known, each with what refused to be read. `refs` are what the index
    says that those versions need whose own files do not say it any more.
    """

    rows: dict[bytes, IndexRow]
    shadowed: frozenset[bytes]
    files: dict[bytes, FileState] = field(default_factory=dict)
    unjudged: dict[bytes, Finding] = field(default_factory=dict)
    holders: dict[bytes, list[bytes]] = field(default_factory=dict)
    refs: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)

    def holds(self, bundle_id: bytes, block_id: bytes) -> bool:
        """Whether a bundle's file has a sound frame of a block."""
        return bundle_id in self.holders.get(block_id, ())

    def is_sound(self, block_id: bytes) -> bool:
        """Whether some file has a sound frame of a block."""
        return bool(self.holders.get(block_id))

    def judge(self, file: FileState) -> Judgement:
        """What can be done for the version that a file is.

        intact: nothing is wrong. mendable: every block is sound somewhere. unjudged: some block may be in a file that
        could not be read. lost: the manifest, or a block, is nowhere.
        """
        if file.manifest is None:
            return "lost"
        missing = [entry.id for entry in file.manifest.blocks if not self.is_sound(entry.id)]
        if missing:
            return "unjudged" if any(self._may_be_unread(file, block) for block in missing) else "lost"
        if file.damage or file.places is None:
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
    rows = {row.bundle_id: row for row in core.index.all_rows()}
    survey = Survey(rows, frozenset(core.index.with_status(SHADOWED)))
    for bundle_id in sorted(core.folder.list_bundles()):
        try:
            file = _examine(core, bundle_id)
        except BundleMissing:
            continue  # deleted since the folder was listed
        except StoreError as error:
            survey.unjudged[bundle_id] = Finding(core.folder.bundle_path(bundle_id), error.code, error.message)
            continue
        survey.files[bundle_id] = file
        for block_id in file.sound:
            survey.holders.setdefault(block_id, []).append(bundle_id)
    for bundle_id in rows:
        found = survey.files.get(bundle_id)
        if found is None or found.places is None:
            survey.refs[bundle_id] = core.index.refs_of(bundle_id)
    return survey


def open_source(core: StoreCore, file: FileState) -> FrameFile:
    """Open a surveyed file for the sound frames in it, also where its frame of reference is damaged."""
    return core.open_frames(file.bundle_id) if file.places is not None else _open_damaged(core, file.bundle_id)


def _examine(core: StoreCore, bundle_id: bytes) -> FileState:
    """Raises what is no damage: BundleMissing, UnsafePath, StoreIoError, UnsupportedFormat."""
    try:
        with contextlib.closing(core.open_bundle(bundle_id)) as file:
            if file.manifest is None and file.path.endswith(LIVE_SUFFIX):
                reason = f"{file.path} has the ending of a version, but no manifest."
                return _state_of(file, None, {}, reason)
            places = {entry.id: entry.bundle_id or bundle_id for entry in file.entries}
            return _state_of(file, file.manifest, places, "")
    except (BundleMissing, *_NOT_DAMAGE):
        raise
    except StoreError as error:
        return _examine_damaged(core, bundle_id, error)


def _examine_damaged(core: StoreCore, bundle_id: bytes, error: StoreError) -> FileState:
    with contextlib.closing(_open_damaged(core, bundle_id)) as file:
        # A later version seals its header; one flipped bit in the number of the version breaks the seal.
        if isinstance(error, UnsupportedFormat) and (file.has_sealed_header or not file.has_own_trailer):
            raise error
        return _state_of(file, file.manifest, None, error.message)


def _open_damaged(core: StoreCore, bundle_id: bytes) -> DamagedFile:
    fd, path = core.folder.open_bundle(bundle_id)
    return DamagedFile(fd, path, bundle_id)


def _state_of(
    file: FrameFile, manifest: Manifest | None, places: Mapping[bytes, bytes] | None, damage: str
) -> FileState:
    state = FileState(
        bundle_id=file.bundle_id,
        suffix=file.path[-len(LIVE_SUFFIX) :],
        path=file.path,
        stamp=file.stamp(),
        file_bytes=file.file_bytes,
        manifest=manifest,
        places=places,
        sound=(),
        damaged=frozenset(),
        damage=damage,
    )
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
    damaged = file.frames.keys() - set(sound)
    return dataclasses.replace(state, sound=tuple(sound), damaged=frozenset(damaged), damage=damage)
