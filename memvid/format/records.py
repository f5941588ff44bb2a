"""What the store answers with: plain values, no behaviour, safe to keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..uri import SessionUri
from .blocks import BlockEntry
from .lossy import Lossy
from .salvaged import Salvaged

Progress = Callable[[int, int], None]
"""Told how much is done, and how much there is to do."""


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One version of one session, as the index tells it. `bundle_bytes` is its file, `logical_bytes` its raw state;
    `salvaged` is None unless a repair has saved its beginning from another. `unread_tokens`: how many of its ledger
    follow its state, and have none. `lossy` is None for one that is exact."""

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
    salvaged: Salvaged | None = None
    unread_tokens: int = 0
    lossy: Lossy | None = None

    @property
    def ledger_tokens(self) -> int:
        """All tokens of its ledger: those that a wake gives back."""
        return self.token_count + self.unread_tokens


@dataclass(frozen=True, slots=True)
class Receipt:
    """A sleep that is durable. `entries` is the full chain, ready to be the `reused` of the next sleep. unread_tokens:
    those of its ledger behind them."""

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
        """All tokens of its ledger: those that a wake gives back."""
        return self.token_count + self.unread_tokens


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be: where, the code of the error it is, and a sentence."""

    path: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class DeleteReport:
    """What a delete did. Bundles that others still need, or that are open, are `bundles_kept`.

    `unreadable` are the paths of bundles of unknown owner: a version of this session may be in one.
    `problems` tell what lies in quarantine and could not be marked as deleted, so that it may come back from there,
    which files were kept because they are another session's, whatever their names say, and beside which bundles no
    file was removed, because their needs are unknown.
    """

    uri: SessionUri
    versions_deleted: int
    bundles_deleted: int
    bundles_kept: int
    bytes_freed: int
    unreadable: tuple[str, ...] = ()
    problems: tuple[Finding, ...] = ()


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
    missing (`bundle_missing`). `rows_corrected` counts those that told something else than their files, which are of
    another moment than the index.
    """

    index_rebuilt: str | None
    rows_added: int
    rows_dropped: int
    leftovers_removed: int
    unreadable: tuple[Finding, ...]
    rows_corrected: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a maintenance operation: done, or (dry run) what would be done.

    `kind` is one of: remove, strip, rewrite, recompress, quarantine, restore, salvage, retire, unmark, index, import,
    export, quantise, heal, copy, keep. `path` is the file that it changes (the index and the marks have one too);
    `session` and `version` say whose it is, where somebody's. `size_bytes` is what the step frees, or, for one that
    only writes, what it writes. `reason` is a sentence for people.
    """

    kind: str
    path: str
    session: SessionUri | None
    version: int | None
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """What a maintenance operation did, in the order in which it was done; of a dry run, what it would do.

    `bytes_freed` counts what left the disk, `bytes_written` what was written for it. `problems` are what stays wrong
    or could not be done; what was put right stands in `actions`.
    """

    operation: str
    dry_run: bool
    actions: tuple[Action, ...]
    bytes_freed: int
    bytes_written: int
    problems: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class SessionUsage:
    """What one session takes.

    `logical_bytes` is the raw state of all its versions, each counted whole. `stored_bytes` are the files of its
    versions. `shared_bytes` are the frames that it needs and other sessions need too, wherever they lie: they stay when
    it goes. `exclusive_bytes` are the frames and manifests that nothing else needs: what a forget of it would free.
    """

    uri: SessionUri
    versions: int
    token_count: int
    logical_bytes: int
    stored_bytes: int
    shared_bytes: int
    exclusive_bytes: int


@dataclass(frozen=True, slots=True)
class UsageReport:
    """What the store takes, in two sums that come out even, and each session's part.

    By place: `file_bytes` = `live_bytes` + `retired_bytes` + `unreadable_bytes` + `quarantine_bytes` +
    `incoming_bytes` + `index_bytes` + `temp_bytes` + `other_bytes`.
    By need: `live_bytes` + `retired_bytes` = the sessions' `exclusive_bytes` + `shared_bytes` + `unneeded_bytes`.
    `shared_bytes` counts a frame that several sessions need once; `unneeded_bytes` is what gc and compact can give
    back. Bundles that cannot be read (`problems`) count as `unreadable_bytes` alone: their content is unknown.
    Versions whose files are missing are `problems` too, and have no bytes.
    `written_today_bytes` and `free_bytes` (of the disk) are what the budgets look at.
    """

    file_bytes: int
    live_bytes: int
    retired_bytes: int
    unreadable_bytes: int
    quarantine_bytes: int
    incoming_bytes: int
    index_bytes: int
    temp_bytes: int
    other_bytes: int
    logical_bytes: int
    shared_bytes: int
    unneeded_bytes: int
    written_today_bytes: int
    free_bytes: int
    sessions: tuple[SessionUsage, ...]
    problems: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorReport:
    """A version of a session whose arrays were written to one `.safetensors` file outside the store. unread_tokens: of
    its ledger behind these, which have no arrays yet."""

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
    """A version of a session that was written, with all that it needs, to one file outside the store.

    The file is a bundle of the same id: importing it gives the same version, bit for bit. token_count: all of its
    ledger.
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
class StoreStatistics:
    sessions: int
    versions: int
    bundle_files: int
    file_bytes: int
    bundles_pinned: int
    writable: bool
