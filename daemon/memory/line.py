"""The requests that wait for memory: in which order, and whether anything else is under way that may free some."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...errors import TorporError
from ..sessions.sessions import Turns
from .claims import Claim


class Line:
    """Those that wait, the first in front.

    stalled: requests that wait for another one, each with whether it does still. apart: those that hold no session's
        turn.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.waiting: list[Claim] = []
        self.stalled: dict[Claim, Callable[[], bool]] = {}
        self.apart: set[Claim] = set()

    def order(self) -> None:
        """Put those that stand back behind the others, and all in the order of their coming."""
        now = time.monotonic()
        self.waiting.sort(key=lambda each: (each.stands_back(now), each.number))
        last = -1
        for each in self.waiting:
            last = max(last, each.number)
            if each.number < last and each.passed_at is None:
                each.passed_at = now

    def refuse(self, use: Claim, error: TorporError) -> None:
        """Take a request out of the line, and tell it why."""
        self.waiting.remove(use)
        if use.answer is not None and not use.answer.done():
            use.answer.set_exception(error)

    def refuse_all(self, error: Callable[[], TorporError]) -> None:
        """Tell all that wait that they do so in vain."""
        for use in tuple(self.waiting):
            self.refuse(use, error())

    def others_at_work(self, first: Claim) -> bool:
        """Whether a request goes on that waits for no other: at its end at the latest it lets go of what it has. So it
        is in as much of a hurry as the first that waits."""
        still = {*self.waiting, *(claim for claim, waits in self.stalled.items() if waits())}
        turns = {uri for claim in still for uri in (claim.uri, claim.also)}
        working, apart_from_all = self._turns.in_use() - turns, self.apart - still
        if not first.stands_back(time.monotonic()):
            for uri in working:
                self._turns.lift(uri)
        return bool(working or apart_from_all)
