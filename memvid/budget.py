"""Budgets: how many bytes the store may hold, may write in a day, and must leave free on the disk.

Pure decisions over figures that the caller brings, and a meter that a writer asks before each write. Knows nothing of
what is written. Deleting is never asked about: whatever frees space is always allowed.

A day is a day of UTC by the clock, and each day has a count of its own. A clock that is set back finds the count of
that earlier day as it was left; one that runs ahead begins a new day early, and comes back to the old count when it is
put right. So a wrong clock gives at most one day's budget for each day that it visits, and never locks beyond the day
that it shows. What is begun before midnight counts for the day on which it was begun.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

from .errors import BudgetExceeded, InvalidPolicy
from .limits import MAX_BUNDLE_BYTES
from .paths import io_error

STORE_BYTES: Final = "max_store_bytes"
DAY_BYTES: Final = "max_bytes_per_day"
FREE_BYTES: Final = "min_free_bytes"

_MAX_BUDGET_BYTES: Final = 1024 * MAX_BUNDLE_BYTES
_DAY_NS: Final = 24 * 60 * 60 * 10**9


@dataclass(frozen=True, slots=True)
class Budget:
    """What the user allows; None: no bound. Raises InvalidPolicy for what is no number of bytes, however it is built.

    `max_bytes_per_day` spares a disk that wears; `min_free_bytes` leaves room for everybody else.
    """

    max_store_bytes: int | None = None
    max_bytes_per_day: int | None = None
    min_free_bytes: int = 0

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None and one.name != FREE_BYTES:
                continue
            if type(value) is not int or not 0 <= value <= _MAX_BUDGET_BYTES:
                raise InvalidPolicy(
                    f"{one.name} is a whole number of bytes from 0 to {_MAX_BUDGET_BYTES}.", field=one.name
                )


UNLIMITED: Final = Budget()


@dataclass(frozen=True, slots=True)
class Standing:
    """The figures that a budget is held against, as of one moment.

    `store_bytes` is what the store holds: None where what is written takes the place of what is there, as in a
    compaction. `written_today` is what was written this UTC day, `free_bytes` what the disk has left for us.
    """

    store_bytes: int | None
    written_today: int
    free_bytes: int


def require_room(budget: Budget, standing: Standing, size_bytes: int) -> None:
    """Raise BudgetExceeded if writing `size_bytes` more would go past a budget."""
    most, held = budget.max_store_bytes, standing.store_bytes
    if most is not None and held is not None and held + size_bytes > most:
        raise _exceeded(
            STORE_BYTES,
            limit=most,
            used=held,
            needed=size_bytes,
            sentence=f"The store may hold {most} bytes and holds {held}; this needs {size_bytes} more. Delete sessions "
            f"(`torpor rm`), drop old versions, or raise {STORE_BYTES}.",
        )
    most, written = budget.max_bytes_per_day, standing.written_today
    if most is not None and written + size_bytes > most:
        raise _exceeded(
            DAY_BYTES,
            limit=most,
            used=written,
            needed=size_bytes,
            sentence=f"The store may write {most} bytes a day and has written {written} since midnight UTC; this needs "
            f"{size_bytes} more. Try again tomorrow, or raise {DAY_BYTES}.",
        )
    least, free = budget.min_free_bytes, standing.free_bytes
    if least and free - size_bytes < least:
        raise _exceeded(
            FREE_BYTES,
            limit=least,
            used=free,
            needed=size_bytes,
            sentence=f"The disk must keep {least} bytes free and has {free}; this needs {size_bytes}. Free some space "
            f"(`torpor rm` works), or lower {FREE_BYTES}.",
        )


def _exceeded(which: str, *, limit: int, used: int, needed: int, sentence: str) -> BudgetExceeded:
    return BudgetExceeded(f"{sentence} The store is as it was.", which=which, limit=limit, used=used, needed=needed)


class Meter:
    """Counts one operation's bytes against a budget, before each write. One thread at a time.

    The free space is asked for anew each time, for others write to the disk too, and what this operation wrote is in
    the answer; the other figures are those of its begin, plus what it has counted.
    """

    def __init__(
        self,
        budget: Budget,
        *,
        store_bytes: int | None,
        written_today: int,
        day: int,
        free_bytes: Callable[[], int],
    ) -> None:
        self.budget = budget
        self.day = day
        self.written_bytes = 0
        self._store_bytes = store_bytes
        self._written_today = written_today
        self._free_bytes = free_bytes

    def require(self, size_bytes: int) -> None:
        """Raise BudgetExceeded if so many bytes more would go past the budget. Counts nothing."""
        budget = self.budget
        held = None if self._store_bytes is None else self._store_bytes + self.written_bytes
        free = self._free_bytes() if budget.min_free_bytes else 0
        require_room(budget, Standing(held, self._written_today + self.written_bytes, free), size_bytes)

    def add(self, size_bytes: int) -> None:
        """Ask for so many bytes, just before they are written, and count them. Raises BudgetExceeded."""
        self.require(size_bytes)
        self.written_bytes += size_bytes


def utc_day(now_ns: int) -> int:
    """The day of an instant, counted from 1970; a clock before that shows day 0."""
    return max(now_ns, 0) // _DAY_NS


def free_bytes_of(folder_fd: int, path: str) -> int:
    """What the disk of an open folder has left for us. Raises StoreIoError."""
    try:
        status = os.statvfs(folder_fd)
    except OSError as error:
        raise io_error(error, "ask for the free space of", path) from error
    return status.f_bavail * status.f_frsize
