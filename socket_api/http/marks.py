"""Marks for a cache in a request: the places to which its client will come back, and for how long.

They never change a token (`cache_control` of Anthropic's API and of gateways, `prompt_cache_breakpoint` of OpenAI's). A
model that cannot go back to every token keeps its state there, and the session stays awake for the longest time given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from ...daemon.api.limits import MAX_CHECKPOINTS, MAX_KEEP_AWAKE_S

_NAMES: Final = ("cache_control", "prompt_cache_breakpoint")
_TIME: Final = re.compile(r"([0-9]{1,6})([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


class Marks:
    """The marks of one request, in the order of its messages. are_given: whether there are any."""

    def __init__(self) -> None:
        self.are_given = False
        self.keep_awake_s: float | None = None
        self._counts: list[int] = []

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Behind how many messages the newest of them stand."""
        return tuple(self._counts[-MAX_CHECKPOINTS:])

    def add(self, mark: object, count: int) -> None:
        """Add a mark behind so many messages; nothing, if it is null."""
        if mark is None:
            return
        self.are_given = True
        if count not in self._counts[-1:]:
            self._counts.append(count)
        self.keep(mark.get("ttl") if isinstance(mark, Mapping) else None)

    def add_of(self, parts: object, count: int) -> None:
        """Add the marks of a message's parts, as they came."""
        for part in parts if isinstance(parts, list) else ():
            for name in _NAMES:
                self.add(part.get(name) if isinstance(part, Mapping) else None, count)

    def keep(self, ttl: object) -> None:
        """Take a time over: of a mark, or of all."""
        found = _TIME.fullmatch(ttl) if isinstance(ttl, str) else None
        if found is not None:
            asked = float(min(int(found[1]) * _SECONDS[found[2]], MAX_KEEP_AWAKE_S))
            self.keep_awake_s = max(asked, self.keep_awake_s or 0.0)
