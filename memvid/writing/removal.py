"""Removes packs that nothing needs: the one place where bytes of blocks go.

Rule: what is needed is collected from manifests, and what a pack has from the pack itself. While the needs of a version
are unknown, no pack goes; one that cannot be read never goes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ..errors import StoreError
from ..folder.marks import Marks, marks_in
from ..format.records import Finding
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
    core: StoreCore, *, strips: Collection[bytes] = (), deletes: Collection[bytes] = (), pins: bool = True
) -> Needed:
    """The needs of all versions at this moment, and of what this process uses. Under `committing` it stays true. Where
    the marks cannot be read, no version counts as stripped. Nor does one behind which turns stand in the journal: they
    become a version with its blocks. strips, deletes: for a dry run, as if these versions were stripped, or deleted.
    pins: whether what this process uses counts. Raises StoreIoError."""
    named, stripped = _told(core)
    known = core.index.bundle_ids() | named
    pinned = core.pins.blocks() if pins else ()
    while True:
        needed = core.needs.now(known, stripped.union(strips), pinned, deletes)
        gone = _deleted(core, known) if needed.unknown else frozenset()
        if not gone:
            return needed
        known -= gone


def told_versions(core: StoreCore) -> frozenset[bytes]:
    """The versions that something tells of, there or missing: the index, a tag or a pin, or turns in the journal that
    stand behind one. Raises StoreIoError."""
    return _told(core)[0].union(core.index.bundle_ids())


def _told(core: StoreCore) -> tuple[frozenset[bytes], frozenset[bytes]]:
    """The versions that tags, pins and turns tell of, and those that are stripped."""
    still = frozenset(core.marked_still)  # before the marks: what leaves it has none any more
    marks, bases = marks_in(core.folder) or Marks(core.folder.uuid), frozenset(core.bases().values())
    return (marks.named - still) | bases, marks.stripped - bases


def _deleted(core: StoreCore, known: Collection[bytes]) -> frozenset[bytes]:
    """Those of the versions that another thread, or a daemon beside us, has deleted since they were known: all that
    told of them goes before their manifests."""
    missing = frozenset(each for each in known if not core.folder.has_manifest(each))
    return missing - core.still_known(missing) - _told(core)[0] if missing else missing


def remove_unneeded(
    core: StoreCore, names: Iterable[str], *, deletes: Collection[bytes] = (), dry_run: bool = False
) -> Removed:
    """Remove those of these packs of which no block is needed. Those that only this process uses wait until it does not
    (`remove_waiting`). Needs no room. Call it while `committing`, but for a dry run, which may count versions as
    deleted (`deletes`).

    Raises:
        StoreIoError, DurabilityLost: some of them may be gone.
    """
    asked = sorted(names)
    if not asked:
        return Removed({})
    needed = needed_now(core, deletes=deletes, pins=False)
    if needed.unknown:
        return Removed({}, needed.unknown)
    idle = _dead(core, asked, needed)
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


def packs_with(core: StoreCore, bundle_ids: Iterable[bytes]) -> set[str]:
    """The packs that may have blocks of these versions: where to look, and no more. Reads their manifests."""
    return packs_of(core, (block_id for bundle_id in bundle_ids for block_id in core.needs.of(bundle_id)))


def packs_of(core: StoreCore, block_ids: Iterable[bytes]) -> set[str]:
    """The packs that may have one of these blocks, or its header."""
    return {name for block_id in block_ids for name in core.index.packs_of(block_id, stripped=True)}
