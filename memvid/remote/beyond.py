"""What a store has of a session that the remote does not name, beside what the remote has, by their tokens.

A machine that was killed or cut off comes back with turns that it had sent, and that another machine has gone on from:
here they are in the journal, or in a version of its own, and there in versions that this store has never seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Literal

from ..answers import VersionInfo
from ..errors import Corruption, StoreError
from ..folder.marks import Marks
from ..format.blocks import BlockHeader
from ..format.journal import JournalRecord
from ..format.manifest import Manifest
from ..recovery.replaying import all_tokens, keep_turns_behind, ledger_of
from ..uri import SessionUri
from ..writing.core import StoreCore
from ..writing.deletion import delete_versions
from .fetching import FetchedFrames
from .heads import Head
from .versions import RemoteVersions


@dataclass(frozen=True, slots=True)
class Beyond:
    """What a store has of a session behind what its head names: versions, oldest first, and turns in the journal."""

    uri: SessionUri
    rows: Sequence[VersionInfo]
    record: JournalRecord | None

    @classmethod
    def of(cls, core: StoreCore, head: Head) -> Beyond | None:
        """None: there is nothing. Raises CorruptJournal, StoreIoError."""
        rows = core.index.versions(head.uri)
        named = [at for at, row in enumerate(rows) if row.bundle_id in head.versions]
        rows, record = rows[named[-1] + 1 if named else 0 :], core.journal.find(head.uri)
        return cls(head.uri, rows, record) if rows or record is not None else None

    def beside(self, core: StoreCore, there: bytes) -> Literal["ahead", "behind", "diverged"]:
        """there: all tokens of what the remote has. ahead: a part of this has them, and others perhaps. behind: they
        begin with each part of this; what cannot be read is no part of them, and a version with a tag or a pin stays.
        Raises StoreError."""
        marks = Marks.load(core.folder)
        is_behind = not any(marks.of(row.bundle_id).keeps for row in self.rows)
        for here in self._tokens(core):
            if here is not None and here.startswith(there):
                return "ahead"
            is_behind = is_behind and here is not None and there.startswith(here)
        return "behind" if is_behind else "diverged"

    def _tokens(self, core: StoreCore) -> Iterator[bytes | None]:
        """Of each part, one at a time; None: it cannot be read."""
        if self.record is not None:
            here = None
            with suppress(Corruption):
                here = ledger_of(core, self.record)
            yield here
        for row in reversed(self.rows):
            here = None
            with suppress(Corruption), core.open_reader(row.bundle_id) as reader:
                here = all_tokens(reader)
            if here is not None or core.index.knows(row.bundle_id):
                yield here  # else a prune took it meanwhile: a later one has its tokens

    def let_go(self, core: StoreCore) -> None:
        """Remove it: the remote was seen to have all of it.

        Raises:
            StoreBusy: turns of another session stand behind it, and that one is being put to sleep.
            StoreIoError, DurabilityLost: a part of it may be gone.
        """
        core.needs.read_ahead()
        with core.committing(), core.journaling():
            keep_turns_behind(core, self.uri, [row.bundle_id for row in self.rows])
            core.journal.drop(self.uri)
            if self.rows:
                delete_versions(core, self.uri, self.rows, whole=False)


def tokens_of_version(core: StoreCore, remote: RemoteVersions, manifest: Manifest, bundle_id: str) -> bytes:
    """All tokens of a version in the remote: uint32, as bytes, those of each block proven by its id. A block whose
    header is here is not fetched.

    Raises:
        BundleMissing, Corruption, LimitExceeded: the remote does not have it whole. And as `Objects`.
    """
    spans = [entry for entry in manifest.blocks if entry.kind == "span"]
    here = {entry.id: header for entry in spans if (header := _header_here(core, entry.id)) is not None}
    lacking = {entry.id for entry in spans if entry.id not in here}
    tokens = []
    with closing(FetchedFrames(remote, manifest, remote.places_for(manifest, bundle_id), bundle_id, lacking)) as frames:
        for entry in spans:
            header = here[entry.id] if entry.id in here else frames.read_head(entry.id)[0]
            tokens.append(header.tokens)
    return b"".join(tokens) + manifest.tail


def _header_here(core: StoreCore, block_id: bytes) -> BlockHeader | None:
    for name in core.index.packs_of(block_id, stripped=True):
        with suppress(StoreError), core.files.holding(name) as file:
            return file.read_head(block_id)[0]
    return None
