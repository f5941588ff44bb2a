"""STORE/used.json: what each of the last days has used of remotes, so that the next daemon goes on with the count.

A day is a UTC day by the clock, with its own count, as in `disk/budget.py`. The file is never needed: without it, or if
it is damaged, the count begins anew. A crash loses the count of a few requests at most.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import astuple
from typing import Any, Final

from ..disk import durable
from ..disk.budget import utc_day
from ..disk.clock import now_ns
from ..disk.daily_budget import Used
from ..disk.paths import read_small
from ..disk.sealed_json import SealedFormat
from ..errors import NoSpace, StoreError, StoreIoError
from .folder import StoreFolder

USED_FILE: Final = "used.json"
_DAYS: Final = 16
"""Days that are kept: a clock that is put right finds the count of its day again."""

_REQUESTS_UNSAVED: Final = 64
_FORMAT: Final = SealedFormat("torpor.used", 1, 8192, 8 * _DAYS + 64)


class UsedDays:
    """What each day has used. Safe from several threads. The file is read at the first use. `add` and `save` need the
    store's lock."""

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._loaded: dict[int, Used] | None = None
        self._unsaved = 0
        self._why_anew: str | None = None

    @property
    def _days(self) -> dict[int, Used]:
        """By day, counted from 1970; the one that was noted last stands last. Within `_lock`."""
        if self._loaded is None:
            self._loaded, self._why_anew = _load(self._folder)
        return self._loaded

    @property
    def why_anew(self) -> str | None:
        """Why the count has begun anew, a sentence; None if it goes on."""
        with self._lock:
            _ = self._days
            return self._why_anew

    def today(self) -> Used:
        """What was used since midnight UTC."""
        with self._lock:
            return self._days.get(utc_day(now_ns()), Used())

    def add(self, used: Used) -> None:
        """Count it for today. Saved behind bytes that were sent, and behind some requests. Raises DurabilityLost."""
        with self._lock:
            days, day = self._days, utc_day(now_ns())
            days[day] = days.pop(day, Used()) + used
            while len(days) > _DAYS:
                del days[next(iter(days))]
            self._unsaved += _REQUESTS_UNSAVED if used.bytes_sent else used.requests
            if self._unsaved >= _REQUESTS_UNSAVED:
                self._save()

    def save(self) -> None:
        """Write what was counted since the last time, if anything. Raises DurabilityLost."""
        with self._lock:
            if self._unsaved:
                self._save()

    def _save(self) -> None:
        """Where the disk takes no change, the next one writes it."""
        data = _FORMAT.encode({"days": [[day, *astuple(used)] for day, used in self._days.items()]})
        with contextlib.suppress(NoSpace, StoreIoError):
            durable.write_file(self._folder.root_fd, USED_FILE, data, self._folder.path, replacing=True)
            self._unsaved = 0


def _load(folder: StoreFolder) -> tuple[dict[int, Used], str | None]:
    path = folder.path_of(USED_FILE)
    why = f"{path} cannot be read, or is damaged: what was used of the remote today is counted anew."
    try:
        days = _FORMAT.decode(read_small(folder.root_fd, USED_FILE, _FORMAT.max_bytes, path), path).get("days")
        return dict(map(_line, days if isinstance(days, list) else [None])), None
    except FileNotFoundError:
        return {}, f"There is no {path}: what is used of the remote is counted from now on."
    except (OSError, StoreError, ValueError, TypeError, RecursionError):
        return {}, why


def _line(line: Any) -> tuple[int, Used]:
    day, *used = line
    if any(type(each) is not int or each < 0 for each in line):
        raise ValueError("no count")
    return day, Used(*used)
