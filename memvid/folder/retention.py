"""A pure plan of the versions of a session that a retention keeps, and why.

Rules:
- The newest version, tagged ones, pinned ones and those that turns in the journal stand behind always stay. A retention
  without rules keeps everything.
- A version stays if any rule keeps it. Version numbers define newer and older, never a clock.
- A version that cannot be woken counts for nothing. The newest one that can be woken stays, and all newer ones beside
  it; `keep_last` and `keep_days` count from there. A session without one that can be woken loses nothing.
- Days are counted back from that version, not from now: neither time alone nor a clock that is ahead removes anything.
  `now_ns` only tells which dates lie in the future.
- A version that ends in a ledger alone does not count for `keep_last`: torpor wrote it by itself, and it goes by itself
  (`maintenance/pruning.py`).
- An impossible date (in the future, or before this program existed) keeps its version: a clock that was wrong for a
  while must not cost a version. A version never counts as older than the versions before it.
- A gap remains: a newest version made under a clock that is still ahead makes the others look old. With `keep_last`
  beside `keep_days`, no clock can remove the last versions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from ..answers import VersionInfo
from ..errors import InvalidPolicy
from ..limits import MAX_KEEP_DAYS, MAX_VERSION
from ..uri import SessionUri
from .marks import Marks

EARLIEST_NS: Final = 1_735_689_600 * 10**9
"""2025-01-01 UTC. No bundle is older than the program; an earlier date is a clock that was never set."""

_DAY_NS: Final = 24 * 60 * 60 * 10**9


@dataclass(frozen=True, slots=True)
class Retention:
    """The rules for each session. None: no such rule; no rule at all keeps everything. Raises InvalidPolicy."""

    keep_last: int | None = None
    keep_days: float | None = None

    def __post_init__(self) -> None:
        last, days = self.keep_last, self.keep_days
        if last is not None and (type(last) is not int or not 1 <= last <= MAX_VERSION):
            raise InvalidPolicy(
                "keep_last is a whole number of versions, 1 or more. The newest one always stays: delete or forget the "
                "session to be rid of it.",
                field="keep_last",
            )
        if days is not None and (type(days) not in (int, float) or not 0 < days <= MAX_KEEP_DAYS):  # so no NaN
            raise InvalidPolicy(
                f"keep_days is a number of days, more than 0 and at most {MAX_KEEP_DAYS}.", field="keep_days"
            )


@dataclass(frozen=True, slots=True)
class Kept:
    """A version that stays, with all reasons."""

    row: VersionInfo
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """By session, oldest version first: the order in which to drop."""

    keep: tuple[Kept, ...]
    drop: tuple[VersionInfo, ...]


def plan_retention(
    rows: Iterable[VersionInfo],
    marks: Marks,
    retention: Retention,
    now_ns: int,
    unsound: Collection[str] = (),
    bases: Collection[str] = (),
) -> RetentionPlan:
    """Decide for every version in `rows`: all versions of one or more sessions, in any order. `unsound` bundles cannot
    be woken; the more of them, the more stays. Turns in the journal stand behind the `bases`."""
    sessions: defaultdict[SessionUri, list[VersionInfo]] = defaultdict(list)
    for row in rows:
        sessions[row.uri].append(row)
    keep: list[Kept] = []
    drop: list[VersionInfo] = []
    for _, versions in sorted(sessions.items()):
        versions.sort(key=lambda row: row.version)
        recent = _within_days(versions, retention.keep_days, now_ns, unsound)
        sound = [row for row in versions if row.bundle_id not in unsound]
        newer, whole = len(sound), sum(not row.unread_tokens for row in sound)
        for row in versions:
            is_sound = row.bundle_id not in unsound
            newer, whole = newer - is_sound, whole - (is_sound and not row.unread_tokens)
            reasons = ["newest" if row is versions[-1] else "no later version can be woken"] if newer == 0 else []
            reasons += [*_reasons(row, whole, marks, retention), *recent.get(row.bundle_id, ())]
            reasons += ["needed by the journal"] if row.bundle_id in bases else []
            if reasons:
                keep.append(Kept(row, tuple(reasons)))
            else:
                drop.append(row)
    return RetentionPlan(tuple(keep), tuple(drop))


def _reasons(row: VersionInfo, newer: int, marks: Marks, retention: Retention) -> list[str]:
    """Why a version stays, apart from its date and from being the newest; `newer` counts the later versions that can be
    woken and are whole."""
    marked = marks.of(row.bundle_id)
    reasons = ["pinned"] if marked.pinned else []
    reasons += [f"tagged {tag}" for tag in marked.tags]
    if retention == Retention():
        reasons.append("nothing is to be dropped")
    if retention.keep_last is not None and newer < retention.keep_last:
        reasons.append(f"among the last {retention.keep_last}")
    return reasons


def _within_days(
    versions: Sequence[VersionInfo], days: float | None, now_ns: int, unsound: Collection[str]
) -> dict[str, list[str]]:
    """Which versions their dates keep, by bundle id; `versions` are one session's, oldest first."""
    if days is None:
        return {}
    dated = _dates(versions, now_ns)
    counting = (date for row, date in zip(versions, dated, strict=True) if row.bundle_id not in unsound)
    newest_ns = max((date for date in counting if date is not None), default=0)
    oldest_ns = newest_ns - int(days * _DAY_NS)
    reasons = {}
    for row, date_ns in zip(versions, dated, strict=True):
        if date_ns is None:
            reasons[row.bundle_id] = ["its date cannot be believed"]
        elif date_ns >= oldest_ns:
            reasons[row.bundle_id] = [f"within {days:g} days"]
    return reasons


def _dates(versions: Sequence[VersionInfo], now_ns: int) -> list[int | None]:
    """The dates of versions as far as they can be believed: none before the versions that it follows."""
    dates: list[int | None] = []
    latest_ns = 0
    for row in versions:
        believable = EARLIEST_NS <= row.created_ns <= now_ns
        if believable:
            latest_ns = max(latest_ns, row.created_ns)
        dates.append(latest_ns if believable else None)
    return dates
