"""The memory that the branches of one tree hold, what several hold counted once. Only what changes is counted again: a
walk over a tree of a thousand would take longer than a fork."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Account:
    """Memory by its holders, what several hold counted once. total: the bytes of all together."""

    total: int = 0
    _held: dict[int, tuple[int, Mapping[int, int]]] = field(default_factory=dict)
    _pieces: dict[int, list[int]] = field(default_factory=dict)
    """The bytes of each piece, and how many hold it."""

    def enter(self, held: Mapping[int, tuple[int, Mapping[int, int]]]) -> None:
        """Note what some holders have now: bytes that each alone has, and those that others may have, too, by the place
        of each piece."""
        self.leave(held)  # all of them first: a place that one has left may be another's now
        for holder, (own, shared) in held.items():
            self._held[holder] = own, shared
            self.total += own
            for place, size in shared.items():
                piece = self._pieces.setdefault(place, [size, 0])
                self.total += 0 if piece[1] else size
                piece[1] += 1

    def leave(self, holders: Iterable[int]) -> None:
        """Note that some have nothing any more."""
        for holder in holders:
            own, shared = self._held.pop(holder, (0, {}))
            self.total -= own
            for place in shared:
                piece = self._pieces[place]
                piece[1] -= 1
                if not piece[1]:
                    self.total -= piece[0]
                    del self._pieces[place]
