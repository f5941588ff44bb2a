"""What the store answers with: plain values, no behaviour, safe to keep."""

from __future__ import annotations

from dataclasses import dataclass

from .blocks import BlockEntry
from .uri import SessionUri


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One version of one session, as the index tells it. `bundle_bytes` is its file, `logical_bytes` its raw state."""

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


@dataclass(frozen=True, slots=True)
class Receipt:
    """A sleep that is durable. `entries` is the full chain, ready to be the `reused` of the next sleep."""

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


@dataclass(frozen=True, slots=True)
class DeleteReport:
    """What a delete did. Bundles that others still need, or that are open, are `bundles_kept`.

    `unreadable` are the paths of bundles that nobody can tell the owner of: a version of this session may be in one.
    """

    uri: SessionUri
    versions_deleted: int
    bundles_deleted: int
    bundles_kept: int
    bytes_freed: int
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be: where, the code of the error it is, and a sentence."""

    path: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """`deep` says that every byte was read. No findings means that all of it is as it was written."""

    deep: bool
    findings: tuple[Finding, ...]
    bundles_checked: int
    blocks_checked: int
    bytes_checked: int

    @property
    def ok(self) -> bool:
        return not self.findings


@dataclass(frozen=True, slots=True)
class OpenReport:
    """What opening the store had to put right, so that it can be told.

    `index_rebuilt` says why the whole index was made anew (None: it was not); `rows_added` counts bundles that the
    index did not know; `rows_dropped` those that it knew, that were no version of a session, and that are gone.
    `unreadable` are, at each opening, all bundles whose manifest cannot be read, and all versions whose file is
    missing (`bundle_missing`).
    """

    index_rebuilt: str | None
    rows_added: int
    rows_dropped: int
    leftovers_removed: int
    unreadable: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class StoreStatistics:
    sessions: int
    versions: int
    bundle_files: int
    file_bytes: int
    bundles_pinned: int
    writable: bool
