"""What the store answers that goes to the screen and over the wire as it is: findings, reports and marks.

Sessions are named by their URIs as text, versions by their ids in hex. `records.py` of `format` has what stays within.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal

from ..errors import TorporError
from ..records import Count, Result
from .uri import SessionUri


class Finding(Result):
    """A fault: where, the code of the error it is, and a sentence. session, version: the version that is not whole by
    it, if it is one of a version. lost: what it tells of is gone for good, so no later run finds it again."""

    path: str
    code: str
    message: str
    session: str | None = None
    version: int | None = None
    lost: bool = False

    @classmethod
    def of(cls, path: str, error: TorporError) -> Finding:
        """What an error says of a file."""
        return cls(path, error.code, error.message)


class Action(Result):
    """One step of an operation on the store: done, or with `dry_run` what would be done.

    kind: `remove`, `rewrite`, `recompress`, `move`, `copy`, `unmark`, `strip`, `index`, `import`, `export`, `quantize`,
        `heal`, `leave` (of a remote: it is removed by a later operation), or `keep`: nothing is done, and why. path:
        the file that it changes; empty where there is none.
    session, version: its owner, if it has one. size_bytes: what the step frees, or writes if it only writes.
    """

    kind: str
    path: str
    session: str | None
    version: int | None
    size_bytes: Count
    reason: str


class MaintenanceReport(Result):
    """The report of an operation on the store, or with `dry_run` its plan: the steps in their order.

    bytes_freed, bytes_written: on the disk. problems: faults that remain, and steps that failed.
    Over the wire the lists are bounded; `actions_left_out` and `problems_left_out` count the entries cut off.
    """

    operation: str
    dry_run: bool
    actions: tuple[Action, ...] = ()
    actions_left_out: Count = 0
    bytes_freed: Count = 0
    bytes_written: Count = 0
    problems: tuple[Finding, ...] = ()
    problems_left_out: Count = 0

    @property
    def ok(self) -> bool:
        return not self.problems

    def then(self, later: MaintenanceReport) -> MaintenanceReport:
        """The report of an operation in two runs, with the problems that are left behind the later one, and what was
        lost in the earlier."""
        lost = [each for each in self.problems if each.lost]
        return replace(
            later,
            actions=(*self.actions, *later.actions),
            bytes_freed=self.bytes_freed + later.bytes_freed,
            bytes_written=self.bytes_written + later.bytes_written,
            problems=tuple(dict.fromkeys([*lost, *later.problems])),
        )


class DeleteReport(Result):
    """The result of a delete. bytes_freed: manifests and packs that went; packs that are being read go when they are
    closed. remote_objects: how many of the session the remote was seen to have no more. problems: why needs are
    unknown, so that no pack was removed, which marks found no room to go, what the remote has still, and that a remote
    which was not asked may have it; problems_left_out counts those cut off."""

    session: str
    versions_deleted: Count
    bytes_freed: Count
    problems: tuple[Finding, ...] = ()
    problems_left_out: Count = 0
    remote_objects: Count = 0


class Lossy(Result):
    """The loss of a session: the keys and values of its first `tokens` tokens were once kept in `bits` bits, and all
    later tokens were computed from those."""

    bits: Count
    tokens: Count

    def within(self, token_count: int) -> Lossy | None:
        """The loss of a session that is cut back to its first tokens."""
        return Lossy(self.bits, min(self.tokens, token_count)) if token_count else None


class VersionInfo(Result):
    """One version of a session, as the index tells of it. `session` is a URI; parent: the version before it, by its
    bundle id; identity: the digest of it, in hex.

    token_count: its whole ledger, of which the last `unread_tokens` have no state. bundle_bytes: what it wrote, or of a
    stripped one what is left of that; logical_bytes: its raw state. lossy: None for an exact one. unnamed: nobody had
    chosen the session's name when it was written; its newest version tells. used_ns: when it was woken or imported
    last, as far as the index was not lost since; 0 for never.
    """

    session: str
    version: int
    bundle_id: str
    parent: str | None
    identity: str
    token_count: Count
    unread_tokens: Count
    bundle_bytes: Count
    logical_bytes: Count
    created_ns: int
    model: str
    labels: tuple[str, ...]
    lossy: Lossy | None
    unnamed: bool
    used_ns: int

    @property
    def uri(self) -> SessionUri:
        return SessionUri.parse(self.session)

    @property
    def block_tokens(self) -> int:
        """The tokens in its blocks: those with state."""
        return self.token_count - self.unread_tokens


class ShownVersion(VersionInfo):
    """A version with its marks. stripped: it needs no keys and values."""

    tags: tuple[str, ...]
    pinned: bool
    stripped: bool


class MarkedVersion(Result):
    """The marks of one version; `version` is None for one that is gone. A version with a mark is never pruned."""

    session: str
    version: int | None
    bundle_id: str
    tags: tuple[str, ...]
    pinned: bool


class PartDiffers(Result):
    """A part of the identity that differs; None where the snapshot or the live model has none."""

    field: str
    stored: str | None
    live: str | None


class ExportReport(Result):
    """A version that was written, with all its blocks, to one file outside the store.

    The file is a bundle of the same id: an import gives the same version, bit for bit. token_count: its whole ledger.
    """

    session: str
    version: int
    bundle_id: str
    path: str
    token_count: int
    blocks: int
    logical_bytes: int
    file_bytes: int


class TensorReport(Result):
    """A version whose arrays were written to one `.safetensors` file outside the store. unread_tokens: tokens of its
    ledger without arrays."""

    session: str
    version: int
    bundle_id: str
    path: str
    kind: str
    labels: tuple[str, ...]
    token_count: int
    unread_tokens: int
    tensors: int
    file_bytes: int


COINS: Final = ("logical", "stored", "shared", "alone")
"""In which sizes are told, each as a field `COIN_bytes`: raw state; what of the disk is needed; of that, what others
need too, and what is needed alone, and is freed if it goes."""


Condition = Literal["whole", "stripped", "missing", "damaged"]
"""Of a block on the disk. stripped: its header is there alone. missing: no pack has it. damaged: a pack tells of it,
and it cannot be read."""


Standing = Literal["same", "ahead", "behind", "diverged", "absent"]
"""What a store has of a session, beside the newest version of a remote: that very one, later ones, an earlier one,
later ones that do not follow it, or nothing."""


class SessionUsage(Result):
    """The disk space of one session in the four coins, in bytes.

    logical_bytes: the raw state of all its versions, each counted whole. stored_bytes: what of the disk they need now,
    each byte once; that is `shared_bytes`, which other sessions need too and which stay when it goes, and
    `alone_bytes`, which only it needs: a forget frees them. Of its `versions`, `stripped_versions` need no keys and
    values.
    """

    session: str
    versions: int
    token_count: int
    logical_bytes: int
    stored_bytes: int
    shared_bytes: int
    alone_bytes: int
    stripped_versions: int = 0


class Together(Result):
    """The disk space of some sessions in the four coins, as if they were one: `shared_bytes` are what sessions beside
    them need too, and `alone_bytes` are freed if all of them go."""

    sessions: tuple[str, ...]
    logical_bytes: int
    stored_bytes: int
    shared_bytes: int
    alone_bytes: int


class SharedBytes(Result):
    """A part of the disk that some sessions need, each of them, and no other: `size_bytes`, counted once. sessions: of
    these, which are `session_count`, the eight that need most of the disk, the one that needs most first."""

    size_bytes: int
    sessions: tuple[str, ...]
    session_count: int


class UsageReport(Result):
    """The disk space of the store in bytes, split in two ways with the same sum, and each session's part.

    By place: `file_bytes` = `version_bytes` (manifests) + `pack_bytes` (with bundles of format 1) + `damaged_bytes` +
    `incoming_bytes` + `index_bytes` + `temp_bytes` + `journal_bytes` + `other_bytes`.
    By need: `file_bytes` = `stored_bytes` + `rest_bytes`, and `stored_bytes` = `alone_bytes` + `shared_bytes`.
    `alone_bytes` is the sum of the sessions'; `shared_bytes` counts once what several need, so it is less than the sum
    of theirs; `shared_by` are the twenty largest parts of it, by who shares them. The rest is `unneeded_bytes` +
    `unreadable_bytes` + all places but manifests and packs. A repack can free `unneeded_bytes`: frames that no version
    needs, and second copies. Manifests and packs that cannot be read (`problems`) count as `unreadable_bytes` alone.
    Versions whose manifests are missing are `problems` too, and have no bytes. The budgets compare
    `written_today_bytes`, as far as the index was not lost since, and `free_bytes` (of the disk). counted_ns: when this
    was.
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
    stored_bytes: int
    shared_bytes: int
    alone_bytes: int
    rest_bytes: int
    unneeded_bytes: int
    unreadable_bytes: int
    written_today_bytes: int
    free_bytes: int
    sessions: tuple[SessionUsage, ...]
    shared_by: tuple[SharedBytes, ...] = ()
    problems: tuple[Finding, ...] = ()
    counted_ns: int = 0
