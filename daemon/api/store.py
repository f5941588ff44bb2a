"""Verbs about the store: maintenance, marks, figures of labels, and deletes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ...memvid.answers import Finding
from ...memvid.uri import session_in
from ...records import Count, Result
from ...spellings import present
from .events import Listener, Reporting
from .limits import MAX_DAYS, MAX_KIND_CHARS, MAX_NUMBER, MAX_PAGE_TOKENS, MAX_TAG_CHARS
from .records import Label, Labels, Position, Request, Seconds, SessionText


class LabelFigures(Result):
    """All sessions of a label together; `label` is None for all sessions that were looked at, with or without labels.

    written_bytes: what all their versions wrote. hits: since the daemon began, how often a warm found one of
    them awake, or another session took over its tokens.
    """

    label: str | None
    sessions: Count
    awake: Count
    tokens: Count
    resident_bytes: Count
    written_bytes: Count
    hits: Count


class StatsResult(Result):
    """Figures of all sessions, and of those of each label. One with several labels counts in each."""

    total: LabelFigures
    labels: tuple[LabelFigures, ...]


class AnalysisResult(Result):
    """Figures of a stored version. artifact: the document of figures, as JSON.

    awake_tokens: the session's tokens in memory, which may be more than were analyzed, or others; None if it sleeps.
    """

    session: str
    version: int
    bundle_id: str
    token_count: Count
    awake_tokens: Count | None
    artifact: str
    seconds: Seconds


class ClearResult(Result):
    """The sessions that a clear removed, or with `dry_run` would remove: their URIs and their totals.

    bytes_freed: on the disk; less than written_bytes where others share blocks, and 0 in a dry run. failed: URI to
    reason.
    problems: as in `DeleteReport`, of all of them.
    """

    label: str
    dry_run: bool
    sessions: tuple[str, ...]
    tokens: Count
    resident_bytes: Count
    written_bytes: Count
    bytes_freed: Count
    failed: dict[str, str]
    problems: tuple[Finding, ...] = ()
    problems_left_out: Count = 0


Tag = Annotated[str, Field(min_length=1, max_length=MAX_TAG_CHARS)]
Days = Annotated[float, Field(ge=0, le=MAX_DAYS)]
DaysKept = Annotated[float, Field(gt=0, le=MAX_DAYS)]
Operation = Annotated[Literal["repack", "repair", "prune", "strip", "forget", "quantize"], BeforeValidator(present)]
Bits = Literal[8, 4]

# The options of an operation beside `dry_run`; all are optional but those that `MaintainRequest` requires.
OPERATION_OPTIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "repack": frozenset({"session", "cold_after_days", "remote"}),
        "repair": frozenset(),
        "prune": frozenset({"session", "keep_last", "keep_days"}),
        "strip": frozenset({"session"}),
        "forget": frozenset({"session"}),
        "quantize": frozenset({"session", "bits"}),
    }
)
_ALL_OPTIONS = frozenset().union(*OPERATION_OPTIONS.values())


class MaintainRequest(Request):
    """Run an operation on the daemon's store: repack, repair, prune, strip, forget or quantize, with its own options;
    any other option is refused, not ignored.

    session: with strip also one version of it (`NAME@3`). A strip without one has to be a plan (`dry_run`): of what
        goes next by itself where the store needs room, and why.
    remote: free the daemon's remote of what no session needs, and not the store. It takes nothing else but `dry_run`.

    It reports no progress and may take long; `dry_run` returns the plan and changes nothing. Operations run one after
    the other; sessions are served meanwhile.
    """

    operation: Operation
    _: KW_ONLY
    session: SessionText | None = None
    dry_run: bool = False
    keep_last: Annotated[int, Field(ge=1, le=MAX_NUMBER)] | None = None
    keep_days: DaysKept | None = None
    cold_after_days: Days | None = None
    bits: Bits | None = None
    remote: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "operation", present(self.operation))

    def require(self) -> None:
        given = {name for name in _ALL_OPTIONS if getattr(self, name) is not (False if name == "remote" else None)}
        if strange := sorted(given - OPERATION_OPTIONS[self.operation]):
            raise ValueError(f"{self.operation} takes no {' and no '.join(strange)}")
        if self.remote and given != {"remote"}:
            raise ValueError(f"a remote is freed whole: leave {' and '.join(sorted(given - {'remote'}))} out")
        is_plan = self.operation == "strip" and self.dry_run
        if self.operation in ("forget", "strip") and self.session is None and not is_plan:
            raise ValueError(f"{self.operation} needs the session to {self.operation}")
        if self.operation == "prune" and self.keep_last is None and self.keep_days is None:
            raise ValueError("prune needs keep_last, keep_days or both; without them every version stays")
        if self.operation == "quantize" and self.bits is None:
            raise ValueError("quantize needs bits, 8 or 4")
        if self.operation == "quantize" and self.session is None:
            raise ValueError("quantize needs the session to keep in fewer bits")


class MarkRequest(Request):
    """Put one mark on a version (`NAME@3`; the latest of a bare name), or take one off: `tag`, `untag` or `pinned`.

    move: take the tag from the version that has it. With `untag`, `session` names a session without a version.
    """

    session: SessionText
    _: KW_ONLY
    tag: Tag | None = None
    untag: Tag | None = None
    pinned: bool | None = None
    move: bool = False

    def require(self) -> None:
        if [self.tag, self.untag, self.pinned].count(None) != 2:
            raise ValueError("give exactly one of tag, untag and pinned")
        if self.move and self.tag is None:
            raise ValueError("only a tag can be moved")
        if self.untag is not None and session_in(self.session) != self.session:
            raise ValueError("untag takes a session without a version: the tag says which one has it")


class ImportRequest(Request):
    """Adopt a bundle that was put into the store's folder `incoming` under its id: as its own session, or another."""

    bundle_id: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    _: KW_ONLY
    session: SessionText | None = None


class AnalyzeRequest(Reporting):
    """Figures of a stored version (`NAME@3`; the newest of a bare name), as a JSON document in `artifact`.

    kind, labels: name the artifact; by default `kv-analysis`, and the session's labels, its model and the version.
    """

    session: SessionText
    _: KW_ONLY
    kind: Annotated[str, Field(min_length=1, max_length=MAX_KIND_CHARS)] | None = None
    labels: Labels | None = None
    on_event: Listener = None


class BlocksRequest(Request):
    """The blocks of the session's newest version, or of another one (`NAME@3`): what they hold, how they lie on the
    disk, and how many sessions need them. deep: read every byte, so that all damage is seen."""

    session: SessionText
    _: KW_ONLY
    deep: bool = False


class ContentsRequest(Request):
    """The text of a session or a version, as the model saw it, page by page; of a place (`NAME:500`) up to there. An
    awake session is told as it is in memory.

    start, end: tokens of the ledger, from and to before. most: tokens of a page. tokens: also each token with its text.
    apart: tell messages apart that were read in one go, where the model is in memory and proves their words. manifest:
        the manifest of the version instead.
    """

    session: SessionText
    _: KW_ONLY
    start: Annotated[int, Field(ge=0, le=MAX_NUMBER)] = 0
    end: Position | None = None
    most: Annotated[int, Field(ge=1, le=MAX_PAGE_TOKENS)] = MAX_PAGE_TOKENS
    tokens: bool = False
    apart: bool = False
    manifest: bool = False


class DifferenceRequest(Request):
    """How two memories differ: sessions, versions (`NAME~2`) or places (`NAME:500`: up to there). An awake session is
    compared as it is in memory. tokens: a diff of tokens, and not of lines of text."""

    session: SessionText
    other: SessionText
    _: KW_ONLY
    tokens: bool = False


class UsageRequest(Request):
    """The disk space of the store, by place and by need, and the part of each session: of this namespace's, or of all.
    A count of a large store may be some minutes old (`counted_ns`)."""

    namespace: SessionText | None = None


class StatsRequest(Request):
    """Figures of all sessions, or of those of a label or namespace: together, and by label."""

    label: Label | None = None
    namespace: SessionText | None = None


class DeleteRequest(Request):
    """Remove the session and all its versions, from memory and from disk; of `NAME@3` that version alone, from disk.
    Bytes that others share stay."""

    session: SessionText


class ClearRequest(Request):
    """Delete all sessions of a label, in one `namespace` or all, from memory and disk; `dry_run` tells which, and
    changes nothing."""

    label: Label
    _: KW_ONLY
    namespace: SessionText | None = None
    dry_run: bool = False
