"""Values of the store that stay in the process: no behavior, safe to keep. What names a file, as a bundle id does, is
text: its hex digits. The id of a block is bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..answers import Finding
from ..uri import SessionUri
from .blocks import BlockEntry
from .manifest import Manifest

Progress = Callable[[int, int], None]
"""Told how much is done, and how much there is to do."""


VersionKey = int | str
"""A version of a session: its number, or its bundle id, which also tells two with one number apart."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """A version that is in the store, and what writing it took: nothing, if it was there.

    token_count: its whole ledger, of which the last `unread_tokens` stand behind the blocks. entries: the full chain,
    ready to be the `reused` of the next version.
    """

    uri: SessionUri
    version: int
    bundle_id: str
    parent: str | None
    token_count: int
    unread_tokens: int
    entries: tuple[BlockEntry, ...]
    bytes_written: int = 0
    blocks_new: int = 0

    @property
    def block_tokens(self) -> int:
        """The tokens in its blocks."""
        return self.token_count - self.unread_tokens

    @property
    def blocks_reused(self) -> int:
        return len(self.entries) - self.blocks_new

    @property
    def logical_bytes(self) -> int:
        """The raw bytes of the whole state."""
        return sum(entry.raw_bytes for entry in self.entries)

    @classmethod
    def of(cls, manifest: Manifest, bundle_id: str, bytes_written: int = 0, blocks_new: int = 0) -> Receipt:
        return cls(
            manifest.uri, manifest.version, bundle_id, manifest.parent, manifest.token_count, manifest.unread_tokens,
            manifest.blocks, bytes_written, blocks_new,
        )  # fmt: skip

    def repeated(self) -> Receipt:
        """The receipt of a sleep that has nothing to write, and reuses all blocks (threat 46: a second request is
        safe)."""
        return replace(self, bytes_written=0, blocks_new=0)


@dataclass(frozen=True, slots=True)
class DamagedVersion:
    """A version that is not whole. Its first `whole_up_to` tokens have sound keys and values; no pack has a sound copy
    of `blocks` (ids). Without a sound manifest: 0, and no blocks. `is_stripped`: only what is needed for its tokens
    counts."""

    uri: SessionUri
    version: int
    bundle_id: str
    whole_up_to: int
    blocks: tuple[bytes, ...] = ()
    is_stripped: bool = False


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was read, and what is wrong with it. Without findings, all of it is as it was written. `damaged`: the
    versions that are not whole, each of which is a finding too. A finding of a pack alone harms no version: others have
    sound copies of its blocks."""

    findings: tuple[Finding, ...]
    bundles_checked: int
    blocks_checked: int
    bytes_checked: int
    damaged: tuple[DamagedVersion, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.findings


@dataclass(frozen=True, slots=True)
class OpenReport:
    """What an opening found, to be reported.

    `index_rebuilt`: why the whole index was made anew; None: it was not. `rows_added` counts versions new to the index.
    `unreadable` lists manifests and packs that were to be read and cannot be, and versions whose manifests are missing
    (`bundle_missing`). `turns_replayed` counts the sessions with turns from the journal; `journal` says which turns
    cannot be read or become no version.
    """

    index_rebuilt: str | None
    rows_added: int
    leftovers_removed: int
    unreadable: tuple[Finding, ...]
    turns_replayed: int = 0
    journal: tuple[Finding, ...] = ()
