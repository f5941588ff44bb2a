"""Values of the store that stay in the process: no behavior, safe to keep. What names a file, as a bundle id does, is
text: its hex digits. The id of a block is bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..answers import Finding, Lossy
from ..uri import SessionUri
from .blocks import BlockEntry

Progress = Callable[[int, int], None]
"""Told how much is done, and how much there is to do."""


VersionKey = int | str
"""A version of a session: its number, or its bundle id, which also tells two with one number apart."""


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One version of one session, from the index.

    `bundle_bytes` is what it wrote, or of a stripped one what is left of that; `logical_bytes` the size of its raw
    state. `unread_tokens`: tokens of its ledger without state. `lossy` is None for an exact one. `unnamed`: whether
    nobody had chosen the session's name when it was written; its newest version tells. `used_ns`: when it was woken or
    imported last, as far as the index was not lost since; 0 for never.
    """

    uri: SessionUri
    version: int
    bundle_id: str
    parent: str | None
    identity_digest: bytes
    token_count: int
    bundle_bytes: int
    logical_bytes: int
    created_ns: int
    model: str
    labels: tuple[str, ...]
    unread_tokens: int = 0
    lossy: Lossy | None = None
    unnamed: bool = False
    used_ns: int = 0

    @property
    def ledger_tokens(self) -> int:
        """All tokens of its ledger: a wake gives these back."""
        return self.token_count + self.unread_tokens


@dataclass(frozen=True, slots=True)
class Receipt:
    """A durable sleep. `entries` is the full chain, ready to be the `reused` of the next sleep. unread_tokens: tokens
    of its ledger behind that chain."""

    uri: SessionUri
    version: int
    bundle_id: str
    parent: str | None
    token_count: int
    bytes_written: int
    blocks_new: int
    blocks_reused: int
    entries: tuple[BlockEntry, ...]
    unread_tokens: int

    @property
    def ledger_tokens(self) -> int:
        """All tokens of its ledger: a wake gives these back."""
        return self.token_count + self.unread_tokens

    @property
    def logical_bytes(self) -> int:
        """The raw bytes of the whole state."""
        return sum(entry.raw_bytes for entry in self.entries)


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
