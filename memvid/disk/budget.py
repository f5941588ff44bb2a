"""Budgets: how many bytes the store may hold, may write in a day, and must leave free on the disk.

An account of running work, whose meters are asked before each write. A delete needs no permission: freeing space is
always allowed.

Sleeps come first: a repack leaves half of the day's writes to them, and they are not refused for what it writes. But
for a moment a new pack lies beside the old one. So what a repack writes must fit beside all that the store holds, and
sleeps leave it a part of the store's budget, for repacks make room.

A day is a UTC day by the clock, with its own count. A clock that is set back finds that day's count as it was left; one
that runs ahead begins a new day early, and finds the old count again once it is put right. So a wrong clock gives at
most one day's budget for each day that it visits. A write counts for the day on which it was begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Final, Literal

from ..errors import BudgetExceeded, InvalidPolicy
from ..limits import GIB, MAX_BUNDLE_BYTES
from ..units import format_bytes

STORE_BYTES: Final = "max_store_bytes"
DAY_BYTES: Final = "max_bytes_per_day"
FREE_BYTES: Final = "min_free_bytes"

MAX_BUDGET_BYTES: Final = 1024 * MAX_BUNDLE_BYTES
_PARTS: Final = 64

_DEFAULT_SHARE: Final = 5
_MOST_BY_DEFAULT: Final = 100 * GIB
_DAY_NS: Final = 24 * 60 * 60 * 10**9


@dataclass(frozen=True, slots=True)
class Budget:
    """The user's limits, in bytes; None: no bound. Raises InvalidPolicy for a value that is no number of bytes.
    `max_bytes_per_day` spares a disk that wears; `min_free_bytes` leaves room for others."""

    max_store_bytes: int | None = None
    max_bytes_per_day: int | None = None
    min_free_bytes: int = 0

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None and one.name != FREE_BYTES:
                continue
            if type(value) is not int or not 0 <= value <= MAX_BUDGET_BYTES:
                raise InvalidPolicy(
                    f"{one.name} is a whole number of bytes from 0 to {MAX_BUDGET_BYTES}.", field=one.name
                )


UNLIMITED: Final = Budget()


def left_to_repacks(most_bytes: int) -> int:
    """The part of a store's budget that sleeps may not use."""
    return most_bytes // _PARTS


def default_store_bytes(held_bytes: int, free_bytes: int) -> int:
    """What a store may hold where nobody says: a fifth of the free space, at most 100 GiB of it, beside what it holds
    already, so that an upgrade lets nothing go."""
    return max(1, held_bytes + min(free_bytes // _DEFAULT_SHARE, _MOST_BY_DEFAULT))


Beyond = Literal["budgets", "reserve"]
"""The limits that a piece of work may exceed: the budgets of the store and the day, or `min_free_bytes` too."""


def _exceeded(which: str, *, limit: int, used: int, needed: int, standing: str, advice: str) -> BudgetExceeded:
    more = f"; this needs {format_bytes(needed)} more" if needed else ""  # asked ahead, before the size is known
    return BudgetExceeded(
        f"{standing}{more}. {advice} The store is as it was.", which=which, limit=limit, used=used, needed=needed
    )


class Account:
    """The work under way in one open store, held against its budgets. Safe from several threads. Each write asks for
    the figures anew: `held_bytes` of the store's files, `written_on` a day by work that has ended, and `free_bytes` of
    the disk."""

    def __init__(
        self,
        budget: Budget,
        *,
        held_bytes: Callable[[], int],
        written_on: Callable[[int], int],
        free_bytes: Callable[[], int],
    ) -> None:
        self.budget = budget
        self._held_bytes = held_bytes
        self._written_on = written_on
        self._free_bytes = free_bytes
        self.lock = threading.Lock()
        self._meters: list[Meter] = []

    def hold_to(self, most_bytes: int) -> None:
        """The store may hold so many bytes from now on. Raises as its figures."""
        self._held_bytes()  # which are counted now, and not before the first write
        self.budget = replace(self.budget, max_store_bytes=most_bytes)

    def begin(self, day: int, *, replacing: bool = False, beyond: Beyond | None = None) -> Meter:
        """A meter for a piece of work. `replacing`: its output replaces files. `beyond`: the limits that it may exceed;
        its writes are counted all the same."""
        budget = self.budget
        if beyond is not None:
            budget = UNLIMITED if beyond == "reserve" else Budget(min_free_bytes=budget.min_free_bytes)
        meter = Meter(self, budget, day, replacing)
        with self.lock:
            self._meters.append(meter)
        return meter

    def end(self, meter: Meter, keep: Callable[[int, int], None]) -> None:
        """The work is done or given up; `keep` adds its bytes to its day for `written_on`."""
        with self.lock:
            try:
                if meter.written_bytes:
                    keep(meter.day, meter.written_bytes)
            finally:
                self._meters.remove(meter)

    def require(self, meter: Meter, size_bytes: int) -> None:
        """Raise BudgetExceeded if writing `size_bytes` more would go past a budget of this work. A figure without a
        bound is not looked at."""
        if meter.budget.max_store_bytes is not None:
            self._require_store(meter, meter.budget.max_store_bytes, size_bytes)
        if meter.budget.max_bytes_per_day is not None:
            self._require_day(meter, meter.budget.max_bytes_per_day, size_bytes)
        least = meter.budget.min_free_bytes
        if least and (free := self._free_bytes()) - size_bytes < least:
            raise _exceeded(
                FREE_BYTES,
                limit=least,
                used=free,
                needed=size_bytes,
                standing=f"The disk must keep {format_bytes(least)} free and has {format_bytes(free)}",
                advice="Free some space (`torpor rm` works), or serve with a smaller `--keep-free`.",
            )

    def _require_store(self, meter: Meter, most: int, size_bytes: int) -> None:
        held = self._held_bytes()
        if meter.replacing and held > most:
            return  # a store beyond its budget becomes smaller by repacks alone
        used = held + sum(other.reserved_bytes for other in self._meters if other.replacing == meter.replacing)
        left = 0 if meter.replacing else left_to_repacks(most)
        if used + size_bytes > most - left:
            raise _exceeded(
                STORE_BYTES,
                limit=most,
                used=used,
                needed=size_bytes,
                standing=f"The store may hold {format_bytes(most)}"
                f"{f', {format_bytes(left)} of it for repacks,' if left else ''} and holds {format_bytes(used)}",
                advice="Strip sessions of what can be computed again (`torpor strip`), drop old versions"
                " (`torpor prune`) or sessions (`torpor rm`), or serve with a larger `--store-budget`.",
            )

    def _require_day(self, meter: Meter, most: int, size_bytes: int) -> None:
        may = f"The store may write {format_bytes(most)} a day"
        if meter.replacing:
            most //= 2
            may = f"A repack may write until {format_bytes(most)} were written in a day"
        written = self._written_on(meter.day)
        written += sum(other.written_bytes for other in self._meters if other.day == meter.day)
        if written + size_bytes > most:
            raise _exceeded(
                DAY_BYTES,
                limit=most,
                used=written,
                needed=size_bytes,
                standing=f"{may}, and {format_bytes(written)} were written since midnight UTC",
                advice="Try again tomorrow, or serve with a larger `--daily-write-budget`.",
            )


class Meter:
    """One piece of work's part of an account: called with each number of bytes just before they are written."""

    def __init__(self, account: Account, budget: Budget, day: int, replacing: bool) -> None:
        self.budget = budget
        self.day = day
        self.replacing = replacing
        self.written_bytes = 0
        self.reserved_bytes = 0
        self._account = account

    def __call__(self, size_bytes: int) -> None:
        """Ask for so many bytes, and count them. Raises BudgetExceeded, and counts nothing."""
        with self._account.lock:
            self._account.require(self, size_bytes)
            self.written_bytes += size_bytes
            self.reserved_bytes += size_bytes

    @property
    def is_bounded(self) -> bool:
        return self.budget != UNLIMITED

    def require(self, size_bytes: int) -> None:
        """Ask ahead for so many bytes, and count none. Raises BudgetExceeded."""
        with self._account.lock:
            self._account.require(self, size_bytes)

    def settle(self) -> None:
        """Its output is among the store's files now, and counts there."""
        with self._account.lock:
            self.reserved_bytes = 0


def utc_day(instant_ns: int) -> int:
    """The day of an instant, counted from 1970."""
    return instant_ns // _DAY_NS
