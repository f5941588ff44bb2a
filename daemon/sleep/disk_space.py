"""Room on the disk for sleeps: counts sleeps and repacks, and makes repacks stop for sleeps.

While it writes, a repack has a temporary file beside the packs that it replaces. A sleep without room waits for all
such files to go: its session's state is nowhere else.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Way:
    """Shared by the sleeps and repacks of one store. Safe from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sleeps = 0
        self._claims = 0
        self._repacks = 0
        self._ended = 0

    # --- for sleeps

    @contextlib.contextmanager
    def sleeping(self) -> Iterator[None]:
        """Count a sleep while it is written."""
        self._count(sleeps=1)
        try:
            yield
        finally:
            self._count(sleeps=-1)

    def ended(self) -> int:
        """The number of repacks that have ended."""
        with self._changed:
            return self._ended

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """While a sleep has no room, every repack stops at its next step, and none begins."""
        self._count(claims=1)
        try:
            yield
        finally:
            self._count(claims=-1)

    def wait_for_room(self, ended_before: int) -> bool:
        """Within a claim, wait until running repacks have stopped and removed their temporary files. False if none
        has run since `ended` was `ended_before`: then there is no more room than before."""
        with self._changed:
            had_one = self._repacks > 0 or self._ended != ended_before
            self._changed.wait_for(lambda: not self._repacks or not self._claims)
            return had_one

    # --- for repacks

    @contextlib.contextmanager
    def repacking(self) -> Iterator[None]:
        """Count a repack while it runs. It begins when no sleep claims room."""
        with self._changed:
            self._changed.wait_for(lambda: not self._claims)
            self._repacks += 1
        try:
            yield
        finally:
            with self._changed:
                self._repacks -= 1
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
    """A repack calls this between its steps; it remembers an order to stop."""

    def __init__(self, *reasons: Callable[[], bool]) -> None:
        self._reasons = reasons
        self.was_told = False

    def __call__(self) -> bool:
        self.was_told = self.was_told or any(reason() for reason in self._reasons)
        return self.was_told
