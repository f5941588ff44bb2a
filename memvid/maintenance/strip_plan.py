"""What goes where a store has too little room, and in which order: a pure plan. Rows, needs and dates are values here.

Purpose: keys and values are a cache, the ledger is the memory. So a store stays within its budget by letting go the
keys and values that were used longest ago.

Rules:
- First go versions that the remote has, whoever named them: a wake fetches them back. Then the sessions that nobody
  named, each with all its versions; then earlier versions of named ones; then, where the policy says so, their newest
  versions. Among each of these the least recently used goes first.
- A version stays if it has a tag or a pin, if its session is in use, or if turns stand behind it; and if it was used in
  the last hour, unless the remote has it.
- What frees nothing is not stripped. Versions that have all their blocks in common with others go with the last of
  these.
- A use is a new version, a wake or an import. A date that cannot be believed counts as now: a clock that is wrong, or
  was for a while, costs no version. Where the clock is behind all dates, nothing goes.
- A session that nobody named is deleted once the store was written on so many days without a use of it. Time alone
  brings no such day, and a clock that runs ahead one for each day that it visits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..answers import VersionInfo
from ..disk.budget import utc_day
from ..folder.marks import Marks
from ..folder.retention import EARLIEST_NS
from ..limits import MAX_STRIPS
from ..units import format_plural
from ..uri import SessionUri

_MINUTE_NS: Final = 60 * 10**9
_HOUR_NS: Final = 60 * _MINUTE_NS
_DAY_NS: Final = 24 * _HOUR_NS

RECENT_NS: Final = _HOUR_NS
"""A version that was used within so long is not stripped: its user is about to come back."""


@dataclass(frozen=True, slots=True)
class RoomPolicy:
    """strip_named: whether the newest versions of named sessions may be stripped, too. delete_after_days: for how many
    days a session that nobody named stays without a use; None: for ever."""

    strip_named: bool = False
    delete_after_days: float | None = 30


@dataclass(frozen=True, slots=True)
class Stock:
    """What a store has. rows: all versions, by session, oldest first. busy: the sessions in use. bases: the versions
    behind which turns stand. days: those on which the store was written, counted from 1970. elsewhere: the versions
    that the remote has, too."""

    rows: Sequence[VersionInfo]
    marks: Marks
    busy: Collection[SessionUri] = ()
    bases: Collection[str] = ()
    days: Collection[int] = ()
    elsewhere: Collection[str] = ()

    def keeps(self, row: VersionInfo) -> bool:
        """Whether a version stays as it is, whatever its dates."""
        marked = self.marks.of(row.bundle_id)
        return marked.keeps or marked.stripped or row.uri in self.busy or row.bundle_id in self.bases

    def used_ns(self, rows: Iterable[VersionInfo], now_ns: int) -> int:
        """When the newest use of these versions was."""
        dates = [date for row in rows for date in (row.created_ns, row.used_ns or row.created_ns)]
        return now_ns if any(not EARLIEST_NS <= date <= now_ns for date in dates) else max(dates)

    def sessions(self) -> dict[SessionUri, list[VersionInfo]]:
        """Its versions by session."""
        sessions: dict[SessionUri, list[VersionInfo]] = {}
        for row in self.rows:
            sessions.setdefault(row.uri, []).append(row)
        return sessions


@dataclass(frozen=True, slots=True)
class Planned:
    """A step: versions of a session that are stripped, or a whole session that is deleted. bytes_freed: of a strip, as
    far as the packs tell."""

    uri: SessionUri
    rows: tuple[VersionInfo, ...]
    reason: str
    bytes_freed: int = 0


def plan_deletes(stock: Stock, policy: RoomPolicy, now_ns: int) -> Iterator[Planned]:
    """The sessions that nobody named and nobody has used for long, in the order of their names."""
    if policy.delete_after_days is None:
        return
    today = utc_day(now_ns)
    for uri, rows in stock.sessions().items():
        if not rows[-1].unnamed or uri in stock.busy or any(row.bundle_id in stock.bases for row in rows):
            continue
        if any(stock.marks.of(row.bundle_id).keeps for row in rows):
            continue
        used = utc_day(stock.used_ns(rows, now_ns))
        passed = sum(used < day <= today for day in stock.days)
        if passed > policy.delete_after_days:
            yield Planned(uri, tuple(rows), f"nobody named it, and the store was in use on {passed} days without it")


def plan_strips(
    stock: Stock,
    policy: RoomPolicy,
    now_ns: int,
    *,
    blocks_of: Callable[[str], Sequence[bytes]],
    held: Collection[bytes],
    bytes_of: Callable[[bytes], int],
    even_recent: bool = False,
) -> Iterator[Planned]:
    """All strips that there can be, in order; whoever needs so much room takes the first of them. even_recent: with
    what was used within the last hour, and stays for now.

    blocks_of: the blocks of a version whose keys and values go when it is stripped, by its bundle id. held: blocks that
    stay in any case. bytes_of: what leaves the disk with the keys and values of a block.
    """
    users, stripped = Counter(held), stock.marks.stripped.difference(stock.bases)
    for row in stock.rows:
        if row.bundle_id not in stripped:
            users.update(blocks_of(row.bundle_id))
    waiting: dict[bytes, list[Planned]] = {}
    gone: set[str] = set()
    for step in _candidates(stock, policy, now_ns, even_recent):
        blocks = [block for row in step.rows for block in blocks_of(row.bundle_id)]
        users.subtract(blocks)
        free = [block for block in dict.fromkeys(blocks) if not users[block]]
        bytes_freed = sum(map(bytes_of, free))
        if not bytes_freed:
            for block in dict.fromkeys(blocks):
                waiting.setdefault(block, []).append(step)
            continue
        others = {id(each): each for block in free for each in waiting.pop(block, ())}
        together = [each for each in others.values() if each.rows[0].bundle_id not in gone]
        for each in (*together, step):
            gone.update(row.bundle_id for row in each.rows)
        if len(gone) > MAX_STRIPS - len(stripped):
            return
        for each in together:
            yield replace(each, reason=f"{each.reason}; it has its blocks in common with {step.uri}")
        yield replace(step, bytes_freed=bytes_freed)


def _candidates(stock: Stock, policy: RoomPolicy, now_ns: int, even_recent: bool) -> Iterator[Planned]:
    """What may be stripped, in the order in which it goes, whether it frees anything or not."""
    steps: list[tuple[int, int, Planned]] = []

    def add(group: int, rows: Sequence[VersionInfo], used_by: Sequence[VersionInfo], reason: str) -> None:
        used_ns = stock.used_ns(used_by, now_ns)
        if rows and (even_recent or group == 0 or now_ns - used_ns >= RECENT_NS):
            why = f"{reason}, last used {_age(now_ns - used_ns)} ago"
            steps.append((group, used_ns, Planned(rows[0].uri, tuple(rows), why)))

    for rows in stock.sessions().values():
        free = [row for row in rows if not stock.keeps(row)]
        for row in free:
            if row.bundle_id in stock.elsewhere:
                add(0, [row], [row], "the remote has it")
        free = [row for row in free if row.bundle_id not in stock.elsewhere]
        if rows[-1].unnamed:
            add(1, free, rows, "nobody named the session")
            continue
        for row in free:
            if row is not rows[-1]:
                add(2, [row], [row], "an earlier version")
            elif policy.strip_named:
                add(3, [row], rows, "the newest version, which the settings let go")
    steps.sort(key=lambda each: (each[0], each[1], each[2].uri, each[2].rows[0].version))
    return iter(step for _, _, step in steps)


def _age(age_ns: int) -> str:
    units = ((_DAY_NS, "day", 2), (_HOUR_NS, "hour", 1), (_MINUTE_NS, "minute", 0))
    unit_ns, unit = next((unit_ns, unit) for unit_ns, unit, least in units if age_ns >= least * unit_ns)
    return format_plural(age_ns // unit_ns, unit)
