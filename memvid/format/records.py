"""The answers of the store: plain values, no behaviour, safe to keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..answers import Finding, Lossy
from ..uri import SessionUri
from .blocks import BlockEntry

Progress = Callable[[int, int], None]
"""Told how much is done, and how much there is to do."""


VersionKey = int | bytes
"""A version of a session: its number, or its bundle id, which also tells two with one number apart."""


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One version of one session, from the index.

    `bundle_bytes` is what it wrote, or of a stripped one what is left of that; `logical_bytes` the size of its raw
    state. `unread_tokens`: tokens of its ledger without state. `lossy` is None for an exact one.
    """

    uri: SessionUri
    version: int
    bundle_id: bytes
    parent: bytes | None
    identity_digest: bytes
    token_count: int
    bundle_bytes: int
    logical_bytes: int
    created_ns: int
    model: str
    labels: tuple[str, ...]
    unread_tokens: int = 0
    lossy: Lossy | None = None

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
    bundle_id: bytes
    parent: bytes | None
    token_count: int
    bytes_written: int
    logical_bytes: int
    blocks_new: int
    blocks_reused: int
    entries: tuple[BlockEntry, ...]
    unread_tokens: int

    @property
    def ledger_tokens(self) -> int:
        """All tokens of its ledger: a wake gives these back."""
        return self.token_count + self.unread_tokens


@dataclass(frozen=True, slots=True)
class TensorReport:
    """A version whose arrays were written to one `.safetensors` file outside the store. unread_tokens: tokens of its
    ledger without arrays."""

    uri: SessionUri
    version: int
    bundle_id: bytes
    path: str
    kind: str
    labels: tuple[str, ...]
    token_count: int
    unread_tokens: int
    tensors: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class ExportReport:
    """A version that was written, with all its blocks, to one file outside the store.

    The file is a bundle of the same id: an import gives the same version, bit for bit. token_count: its whole ledger.
    """

    uri: SessionUri
    version: int
    bundle_id: bytes
    path: str
    token_count: int
    blocks: int
    logical_bytes: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class DamagedVersion:
    """A version that is not whole. Its first `whole_up_to` tokens have sound keys and values; no pack has a sound copy
    of `blocks` (ids). Without a sound manifest: 0, and no blocks. `is_stripped`: only what is needed for its tokens
    counts."""

    uri: SessionUri
    version: int
    bundle_id: bytes
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
class SessionUsage:
    """The disk space of one session, in bytes.

    `logical_bytes` is the raw state of all its versions, each counted whole. `stored_bytes` is what its versions wrote,
    of stripped ones what is left of that.
    `shared_bytes` are the frames that other sessions need too: they stay when it is deleted. `exclusive_bytes` are the
    frames and manifests that only it needs: a forget frees them. `stripped_versions` of its `versions` need no keys and
    values.
    """

    uri: SessionUri
    versions: int
    token_count: int
    logical_bytes: int
    stored_bytes: int
    shared_bytes: int
    exclusive_bytes: int
    stripped_versions: int = 0


@dataclass(frozen=True, slots=True)
class UsageReport:
    """The disk space of the store in bytes, split in two ways with the same sum, and each session's part.

    By place: `file_bytes` = `version_bytes` (manifests) + `pack_bytes` (with bundles of format 1) + `damaged_bytes` +
    `incoming_bytes` + `index_bytes` + `temp_bytes` + `journal_bytes` + `other_bytes`.
    By need: `version_bytes` + `pack_bytes` = the sessions' `exclusive_bytes` + `shared_bytes` + `unneeded_bytes` +
    `unreadable_bytes`.
    `shared_bytes` counts a frame that several sessions need once; a repack can free `unneeded_bytes`: frames that no
    version needs, and second copies. Manifests and packs that cannot be read (`problems`) count as `unreadable_bytes`
    alone. Versions whose manifests are missing are `problems` too, and have no bytes. The budgets compare
    `written_today_bytes`, as far as the index was not lost since, and `free_bytes` (of the disk).
    """

    file_bytes: int
    version_bytes: int
    pack_bytes: int
    damaged_bytes: int
    incoming_bytes: int
    index_bytes: int
    temp_bytes: int
    journal_bytes: int
    other_bytes: int
    logical_bytes: int
    shared_bytes: int
    unneeded_bytes: int
    unreadable_bytes: int
    written_today_bytes: int
    free_bytes: int
    sessions: tuple[SessionUsage, ...]
    problems: tuple[Finding, ...] = ()


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
