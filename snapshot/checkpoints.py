"""Whole state at earlier positions, for caches that cannot go back by themselves.

A window or a recurrence forgets its past. So sessions with such caches keep a record now and then, at the ends of full
blocks, and a wake at an earlier token computes only the tokens behind the nearest one. A byte budget limits them: when
one more would not fit, every second goes, and the distance doubles.

A client may mark places to which it will come back. For each a record more is taken: at the last end of a full block
before it that lies halfway between two places of the shortest distance. So its position alone tells a mark. The newest
few are kept, however long the session.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx

from ..memvid.format.blocks import BLOCK_TOKENS
from ..memvid.limits import MAX_TOKENS
from .kind import Record
from .kinds import kind_of, leaves
from .passes import Passes

CHECKPOINT_TOKENS: Final = 2 * BLOCK_TOKENS
"""The shortest distance of two checkpoints."""

DEFAULT_BUDGET_BYTES: Final = 256 * 1024 * 1024
"""The most bytes of all checkpoints of one session, in memory and in its bundles; its marks may take a quarter more."""

MAX_MARKS: Final = 4
"""Marks of one session: as many as one request of an API has."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a state record, in evaluated memory of its own.

    records: by the path of the cache. logits, random_key, passes: those of that position. canary: its canary's logits,
    None if none was taken.
    """

    position: int
    records: dict[str, Record]
    logits: mx.array
    random_key: mx.array
    passes: Passes
    canary: mx.array | None = None

    @property
    def size_bytes(self) -> int:
        arrays = [array for record in self.records.values() for array in record.arrays.values()]
        own = [self.logits, self.random_key, *([] if self.canary is None else [self.canary])]
        return sum(array.nbytes for array in (*arrays, *own))


def checkpoint_of(
    caches: Sequence[Any],
    position: int,
    logits: mx.array,
    random_key: mx.array,
    passes: Passes,
    canary: mx.array | None = None,
) -> Checkpoint:
    """The whole state of the caches as it is now, evaluated; later tokens do not change it."""
    records = {}
    for path, cache in leaves(caches):
        kind = kind_of(cache)
        record = None if kind.by_token or kind.is_empty(cache) else kind.record(cache)
        if record is not None:
            arrays = {name: mx.contiguous(array) for name, array in record.arrays.items()}
            records[path] = Record(record.numbers, arrays)
    mx.eval([list(record.arrays.values()) for record in records.values()], logits, random_key)
    return Checkpoint(position, records, logits, random_key, passes.copy(), canary)


@dataclass(slots=True)
class Checkpoints:
    """The checkpoints of one session, by position; None for one in its last snapshot and not in memory.

    record_bytes: the most bytes of one (`CacheLayout.record_bytes`). It and the position alone decide where they are
    taken, but for marks, so that a session that has slept reads its tokens in the same calls as one that has not.
    marks: where the present request wants some, in ascending order.
    """

    record_bytes: int = 0
    budget_bytes: int = DEFAULT_BUDGET_BYTES
    marks: tuple[int, ...] = ()
    _held: dict[int, Checkpoint | None] = field(default_factory=dict)

    @property
    def positions(self) -> tuple[int, ...]:
        """Of all, in memory or not, in ascending order."""
        return tuple(sorted(self._held))

    @property
    def resident_bytes(self) -> int:
        """Memory of those that are not durable yet."""
        return sum(each.size_bytes for each in self._held.values() if each is not None)

    def __iter__(self) -> Iterator[Checkpoint]:
        """Those in memory, in ascending order."""
        for position in self.positions:
            held = self._held[position]
            if held is not None:
                yield held

    def mark(self, positions: Collection[int]) -> None:
        """Want checkpoints at these positions and at no others, as far as the budget for marks goes."""
        half = CHECKPOINT_TOKENS // 2
        places = {at - (at - half) % CHECKPOINT_TOKENS for at in positions if at >= half}
        self.marks = tuple(sorted(places)[-self._most_marks :]) if self._most_marks else ()

    def next_due(self, position: int) -> int:
        """The next position for a checkpoint after this one; behind every session if there is none."""
        return min([self._next_on_grid(position), *(at for at in self.marks if at > position)])

    def _next_on_grid(self, position: int) -> int:
        due = position + 1
        if not self._fits:
            return MAX_TOKENS + due
        while True:
            distance = self._distance(due)
            due = -(-due // distance) * distance
            if self._distance(due) == distance:
                return due

    def is_due(self, position: int) -> bool:
        if position in self.marks:
            return True
        return self._fits and position > 0 and position % self._distance(position) == 0

    def growth_of(self, position: int) -> Callable[[int], int]:
        """A function of an end: the memory that checkpoints need at most beyond the present, once the tokens
        `[position, end)` are read."""
        left = self.budget_bytes + len(self.marks) * self.record_bytes - self.resident_bytes

        def growth(end: int) -> int:
            count, at = 0, position
            while (at := self.next_due(at)) <= end:
                count += 1
            return max(0, min(count * self.record_bytes, left))

        return growth

    def add(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, and drop those beyond the budget."""
        self._held[checkpoint.position] = checkpoint
        distance = self._distance(checkpoint.position)
        marks = [position for position in self.positions if _is_mark(position)]
        kept = set(marks[-self._most_marks :]) if self._most_marks else set()
        for position in self.positions:
            if position % distance and position not in kept:
                del self._held[position]

    def copy(self, up_to: int = MAX_TOKENS) -> Checkpoints:
        """Those in memory, up to a position, for another state: none is ever written to, so both may have it."""
        found = Checkpoints(self.record_bytes, self.budget_bytes)
        for each in self:
            if each.position <= up_to:
                found.add(each)
        return found

    def cut(self, token_count: int) -> None:
        """Forget those behind the first `token_count` tokens."""
        for position in self.positions:
            if position > token_count:
                del self._held[position]

    def became_durable(self, positions: Iterable[int], up_to: int = MAX_TOKENS) -> None:
        """A snapshot of `up_to` tokens holds exactly the checkpoints at these positions: memory need keep none of
        them."""
        later = {position: held for position, held in self._held.items() if position > up_to}
        self._held = dict.fromkeys(positions) | later

    @property
    def _fits(self) -> bool:
        return self.record_bytes <= self.budget_bytes

    @property
    def _most_marks(self) -> int:
        return min(MAX_MARKS, self.budget_bytes // 4 // max(1, self.record_bytes))

    def _distance(self, position: int) -> int:
        """The distance of checkpoints in a session of that length: doubled until they fit the budget."""
        most = max(1, self.budget_bytes // max(1, self.record_bytes))
        distance = CHECKPOINT_TOKENS
        while position // distance > most:
            distance *= 2
        return distance


def _is_mark(position: int) -> bool:
    return position % CHECKPOINT_TOKENS == CHECKPOINT_TOKENS // 2
