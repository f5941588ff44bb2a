"""Removes packs that nothing needs: the one place where bytes of blocks go.

Rule: what is needed is collected from manifests, and what a pack has from the pack itself. While the needs of a version
are unknown, no pack goes; one that cannot be read never goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..answers import Finding
from ..errors import CorruptMarks, MarksLost, StoreError
from ..folder.marks import MARKS_FILE, Marks
from .core import StoreCore
from .frame_files import open_frames
from .needs import Needed


@dataclass(frozen=True, slots=True)
class Removed:
    """The packs that went, with their bytes; and why others could not be looked at."""

    packs: dict[str, int]
    problems: tuple[Finding, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(self.packs.values())


def needed_now(
    core: StoreCore, *, strips: Collection[str] = (), deletes: Collection[str] = (), pins: bool = True
) -> Needed:
    """The needs of all versions at this moment, and of what this process uses. Under `committing` it stays true. Where
    the marks are damaged or missing, no version counts as stripped; where the system does not read them, needs are
    unknown. A version behind which turns stand in the journal is not stripped: they become a version with its blocks.
    strips, deletes: for a dry run, as if these versions were stripped, or deleted. pins: whether what this process uses
    counts. Raises StoreIoError."""
    marked = _told(core)
    known = core.index.bundle_ids() | marked.versions
    pinned = core.pins.blocks() if pins else ()
    while True:
        needed = core.needs.now(known, marked.stripped.union(strips), pinned, deletes)
        gone = _deleted(core, known) if needed.unknown else frozenset()
        if not gone:
            return dataclasses.replace(needed, unknown=(*needed.unknown, *marked.unread))
        known -= gone


def told_versions(core: StoreCore) -> frozenset[str]:
    """The versions that something tells of, there or missing: the index, a tag or a pin, or turns in the journal that
    stand behind one. Raises StoreIoError."""
    return _told(core).versions.union(core.index.bundle_ids())


class _Told(NamedTuple):
    """The versions that tags, pins and turns tell of, those that are stripped, and why the marks were not read."""

    versions: frozenset[str]
    stripped: frozenset[str]
    unread: tuple[Finding, ...]


def _told(core: StoreCore) -> _Told:
    still = frozenset(core.marked_still)  # before the marks: what leaves it has none any more
    marks, unread = Marks(core.folder.uuid), tuple[Finding, ...]()
    try:
        marks = Marks.load(core.folder)
    except (CorruptMarks, MarksLost):
        pass  # no tag is known until they are put back, and deletes go on
    except StoreError as error:
        unread = (Finding.of(f"{core.path}/{MARKS_FILE}", error),)
    bases = frozenset(core.bases().values())
    return _Told((marks.named - still) | bases, marks.stripped - bases, unread)


def _deleted(core: StoreCore, known: Collection[str]) -> frozenset[str]:
    """Those of the versions that another thread, or a daemon beside us, has deleted since they were known: all that
    told of them goes before their manifests."""
    missing = frozenset(each for each in known if not core.folder.has_manifest(each))
    if not missing or (marked := _told(core)).unread:
        return frozenset()
    return missing - core.still_known(missing) - marked.versions


def remove_unneeded(
    core: StoreCore, names: Iterable[str], *, deletes: Collection[str] = (), dry_run: bool = False
) -> Removed:
    """Remove those of these packs of which no block is needed. Those that only this process uses wait until it does not
    (`remove_waiting`). Needs no room. Call it while `committing`, but for a dry run, which may count versions as
    deleted (`deletes`).

    Raises:
        StoreIoError, DurabilityLost: some of them may be gone.
    """
    packs = sorted(names)
    if not packs:
        return Removed({})
    needed = needed_now(core, deletes=deletes, pins=False)
    if needed.unknown:
        return Removed({}, needed.unknown)
    idle = _dead(core, packs, needed)
    dead = _dead(core, idle, needed_now(core, deletes=deletes)) if core.pins.blocks() else idle
    if not dry_run:
        core.remove_packs(dead)
        core.waiting.update(idle.keys() - dead.keys())
    return Removed(dead)


def _dead(core: StoreCore, names: Iterable[str], needed: Needed) -> dict[str, int]:
    return {name: size for name in names if (size := _dead_bytes(core, name, needed)) is not None}


def remove_waiting(core: StoreCore) -> None:
    """Remove the packs that a delete left because this process used them. Raises StoreError."""
    with core.committing():
        waiting = set(core.waiting)
        core.waiting.clear()
        remove_unneeded(core, waiting)


def _dead_bytes(core: StoreCore, name: str, needed: Needed) -> int | None:
    """The bytes of a pack of which no block is needed; None for one that is needed, missing or unreadable."""
    try:
        with open_frames(core.folder, name) as file:
            is_needed = any(block in needed.blocks for blocks in (file.frames, file.heads) for block in blocks)
            return None if is_needed else file.file_bytes
    except StoreError:
        return None


def packs_with(core: StoreCore, bundle_ids: Iterable[str]) -> set[str]:
    """The packs that may have blocks of these versions: where to look, and no more. Reads their manifests."""
    return packs_of(core, (block_id for bundle_id in bundle_ids for block_id in core.needs.of(bundle_id)))


def packs_of(core: StoreCore, block_ids: Iterable[bytes]) -> set[str]:
    """The packs that may have one of these blocks, or its header."""
    return {name for block_id in block_ids for name in core.index.packs_of(block_id, stripped=True)}
