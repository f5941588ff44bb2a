"""The steps of a repair as values: the subject of each, and the file it will write."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..format.blocks import BlockEntry
from ..format.ledger_tail import unread_of
from ..format.manifest import Manifest
from ..format.records import Finding, IndexRow
from ..format.salvaged import SALVAGED_FROM, keeps_unread, session_map_of_salvaged
from ..writing.sleeping import environment
from .survey import FileState

Role = Literal["rival", "damaged", "unneeded", "twin", "lost", "superseded"]


@dataclass(frozen=True, slots=True)
class Layout:
    """The content of a new file: frames in order, each with the key of its source file; the bundles that hold the rest;
    and the estimated bytes of the whole file."""

    frames: tuple[tuple[bytes, bytes], ...]
    holders: Mapping[bytes, bytes]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Mend:
    """A new file for a version that lacks only its file, or only right places for its blocks."""

    file: FileState
    layout: Layout


@dataclass(frozen=True, slots=True)
class Restore:
    """A version in quarantine with all blocks sound somewhere again. `layout` is None if its file goes back as it
    is."""

    row: IndexRow
    file: FileState
    layout: Layout | None

    def holders(self) -> set[bytes]:
        """The bundles that it needs once it is back."""
        places = self.layout.holders if self.layout is not None else self.file.places or {}
        return set(places.values()) - {self.file.bundle_id}


@dataclass(frozen=True, slots=True)
class Return:
    """A version whose whole file somebody has put back, while the index says that it is no version."""

    file: FileState


@dataclass(frozen=True, slots=True)
class Salvage:
    """A new version of a session from the beginning of a lost one."""

    file: FileState
    blocks: tuple[BlockEntry, ...]
    layout: Layout

    @property
    def token_count(self) -> int:
        return self.blocks[-1].end

    @property
    def ledger_tokens(self) -> int:
        assert self.file.manifest is not None
        return ledger_saved(self.file.manifest, self.token_count)

    def manifest(self, version: int) -> Manifest:
        """The environment of the new version."""
        lost = self.file.manifest
        assert lost is not None
        return dataclasses.replace(
            lost,
            version=version,
            parent=self.file.bundle_id,
            token_count=self.token_count,
            blocks=self.blocks,
            session=session_map_of_salvaged(lost, self.token_count),
            environment={**environment(), SALVAGED_FROM: self.file.bundle_id.hex()},
        )


@dataclass(frozen=True, slots=True)
class Shelve:
    """The sound frames of a file that is to leave and that others need: they become a retired file of the same
    bundle."""

    file: FileState
    layout: Layout


@dataclass(frozen=True, slots=True)
class SetAside:
    """A file that leaves bundles/ for the quarantine. `kept`: the blocks that others need stay."""

    file: FileState
    role: Role
    reason: str
    kept: bool = False
    loss: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    row: IndexRow
    path: str
    loss: str


@dataclass(frozen=True, slots=True)
class RepairPlan:
    shelves: tuple[Shelve, ...] = ()
    mends: tuple[Mend, ...] = ()
    restores: tuple[Restore, ...] = ()
    returns: tuple[Return, ...] = ()
    salvages: tuple[Salvage, ...] = ()
    aside: tuple[SetAside, ...] = ()
    rows: tuple[GiveUp, ...] = ()
    problems: tuple[Finding, ...] = ()

    @property
    def bundle_ids(self) -> set[bytes]:
        steps: Iterable[Shelve | Mend | Restore | Return | SetAside] = (
            *self.shelves,
            *self.mends,
            *self.restores,
            *self.returns,
            *self.aside,
        )
        return {*(step.file.bundle_id for step in steps), *(step.row.bundle_id for step in self.rows)}


def ledger_saved(lost: Manifest, token_count: int) -> int:
    """How many tokens of a lost version are saved with its first ones, which have blocks."""
    return token_count + (unread_of(lost) if keeps_unread(lost, token_count) else 0)
