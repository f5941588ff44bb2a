"""Room on the disk for sleeps: who is writing one, which compactions are under way, and which of them stop for whom.

A compaction has a temporary file beside the one that it is to replace, for as long as it writes. A sleep that finds no
room waits for that file to go, for every compaction: its session's state is nowhere else.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Way:
    """Shared by the sleeps and compactions of one store, which share its disk space. Safe from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sleeps = 0
        self._claims = 0
        self._compactions = 0
        self._ended = 0

    # --- for sleeps

    @contextlib.contextmanager
    def sleeping(self) -> Iterator[None]:
        """A sleep is being written."""
        self._count(sleeps=1)
        try:
            yield
        finally:
            self._count(sleeps=-1)

    def ended(self) -> int:
        """How many compactions have come to their end so far."""
        with self._changed:
            return self._ended

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """A sleep has found no room: every compaction stops at its next step, and none begins."""
        self._count(claims=1)
        try:
            yield
        finally:
            self._count(claims=-1)

    def wait_for_room(self, ended_before: int) -> bool:
        """Wait until what is under way has stopped and given its temporary file back, within a claim. False if nothing
        was under way since `ended` was `ended_before`: then there is no more room than there was."""
        with self._changed:
            had_one = self._compactions > 0 or self._ended != ended_before
            self._changed.wait_for(lambda: not self._compactions or not self._claims)
            return had_one

    # --- for compactions

    @contextlib.contextmanager
    def compacting(self) -> Iterator[None]:
        """A compaction is under way. It begins when no sleep claims room."""
        with self._changed:
            self._changed.wait_for(lambda: not self._claims)
            self._compactions += 1
        try:
            yield
        finally:
            with self._changed:
                self._compactions -= 1
                self._ended += 1
                self._changed.notify_all()

    @property
    def has_sleeps(self) -> bool:
        return self._sleeps > 0

    @property
    def is_claimed(self) -> bool:
        return self._claims > 0

    def _count(self, *, sleeps: int = 0, claims: int = 0) -> None:
        with self._changed:
            self._sleeps += sleeps
            self._claims += claims
            self._changed.notify_all()


class Stop:
    """One compaction calls this between its steps; it remembers whether it was told to stop."""

    def __init__(self, *reasons: Callable[[], bool]) -> None:
        self._reasons = reasons
        self.was_told = False

    def __call__(self) -> bool:
        self.was_told = self.was_told or any(reason() for reason in self._reasons)
        return self.was_told
