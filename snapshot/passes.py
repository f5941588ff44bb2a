"""How a ledger was read: the number of tokens in each model call, run by run.

Numbers can differ in the last bits if tokens are read in other chunks. So to compute a state again, from an earlier one
or from nothing, its tokens are read as they were before, and the bits are the same.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Final

from ..memvid.format.blocks import BLOCK_TOKENS
from ..memvid.limits import MAX_TOKENS

MAX_PASS_TOKENS: Final = 2048
"""The most that one model call reads. Its temporary memory may grow with the square of that, so a larger stored number
could take all memory when tokens are computed again."""

UNREPEATABLE: Final = 0
"""Stands in place of a size for each token whose call cannot be made again: it was read beside other sessions' tokens,
or by a call that read on and was cut back, or nobody knows how. Alone the same token may get other bits."""


SEGMENTED: Final = 0xFFFF_FFFF
"""In place of a size, for a call that read one token as a branch does: its attention was taken segment by segment
(`runs.py`), which gives other last bits. A session with such a call goes on so."""


PASSES: Final = "passes"
"""The entry of a session map for how the tokens in its version's blocks were read, where no state record ends these."""


def tokens_of(size: int) -> int:
    """Tokens of this ledger that a call of that size read."""
    return 1 if size in (UNREPEATABLE, SEGMENTED) else size


@dataclass(slots=True)
class Passes:
    """Runs of model calls of one size, as uint32: the size, `UNREPEATABLE` or `SEGMENTED`, and the number of calls."""

    _runs: array[int] = field(default_factory=lambda: array("I"))
    token_count: int = 0

    @classmethod
    def in_map(cls, session_map: Mapping[str, Any]) -> Passes:
        """The passes that stand in a session map; empty if none do. They may read more tokens than the version has: a
        repair may have cut it. Raises ValueError: as `from_bytes`, or they read more than a session may have."""
        stored = session_map.get(PASSES, b"")
        if type(stored) is not bytes or len(stored) % 8:
            raise ValueError(f"{PASSES} is not how tokens were read")
        runs = array("I")
        runs.frombytes(stored)
        read = sum(tokens_of(size) * count for size, count in zip(runs[::2], runs[1::2], strict=True))
        if read > MAX_TOKENS:
            raise ValueError(f"the passes read {read} tokens")
        return cls.from_bytes(stored, read)

    @classmethod
    def from_bytes(cls, stored: bytes | bytearray | memoryview, token_count: int) -> Passes:
        """Passes as they are stored. Raises ValueError: they do not read exactly `token_count` tokens, or one call
        reads more than `MAX_PASS_TOKENS`."""
        runs = array("I")
        runs.frombytes(stored)
        sizes, counts = runs[::2], runs[1::2]
        read = sum(tokens_of(size) * count for size, count in zip(sizes, counts, strict=True))
        if not all(counts) or read != token_count:
            raise ValueError(f"the passes do not read {token_count} tokens")
        if (most := max(map(tokens_of, sizes), default=0)) > MAX_PASS_TOKENS:
            raise ValueError(f"a pass reads {most} tokens, and {MAX_PASS_TOKENS} are the most")
        return cls(runs, token_count)

    def tobytes(self) -> bytes:
        """As they are stored: uint32 `[runs, 2]`, little-endian."""
        return self._runs.tobytes()

    @property
    def run_count(self) -> int:
        return len(self._runs) // 2

    def copy(self) -> Passes:
        return Passes(self._runs[:], self.token_count)

    def add(self, size: int) -> None:
        """Count one model call that has read that many tokens, or one of one token that is `UNREPEATABLE` or
        `SEGMENTED`."""
        if len(self._runs) and self._runs[-2] == size:
            self._runs[-1] += 1
        else:
            self._runs.extend((size, 1))
        self.token_count += tokens_of(size)

    def runs(self) -> Iterator[tuple[int, int]]:
        """For each run the size of its calls, `UNREPEATABLE` or `SEGMENTED`, and the number of calls."""
        for at in range(0, len(self._runs), 2):
            yield self._runs[at], self._runs[at + 1]

    def __iter__(self) -> Iterator[int]:
        """The size of each call, `UNREPEATABLE` or `SEGMENTED`."""
        for size, count in self.runs():
            yield from repeat(size, count)

    @property
    def is_segmented(self) -> bool:
        """Whether a token was read as a branch reads it."""
        return SEGMENTED in self._runs

    def between(self, start: int, end: int) -> Iterator[int]:
        """How many of the tokens `[start, end)` each call read, or `SEGMENTED`; a call that began before or ended after
        them is cut there."""
        return (1 if size == UNREPEATABLE else size for size in self._between(start, end))

    def _between(self, start: int, end: int) -> Iterator[int]:
        position = 0
        for size in self:
            first, last = max(position, start), min(position + tokens_of(size), end)
            if first < last:
                yield last - first if tokens_of(size) == size else size
            position += tokens_of(size)
            if position >= end:
                return

    def end_behind(self, token_count: int) -> int:
        """The first end of a call at or behind so many tokens; all tokens if there is none."""
        position = 0
        for size, count in self.runs():
            step = tokens_of(size)
            if position + step * count >= token_count:
                return position + step * max(0, -(-(token_count - position) // step))
            position += step * count
        return position

    def whole_calls(self, token_count: int) -> int:
        """The tokens of the whole calls among the first tokens: reading can go on behind them as before."""
        position = 0
        for size in self:
            if position + tokens_of(size) > token_count:
                break
            position += tokens_of(size)
        return position

    def after(self, token_count: int) -> Passes:
        """The passes behind the first tokens; a call across that point is cut."""
        behind = Passes()
        for size in self._between(token_count, self.token_count):
            behind.add(size)
        return behind

    @property
    def ends_alone(self) -> bool:
        """Whether the last call read one token alone or as a branch, so that reading it again in that way gives the
        same bits."""
        return len(self._runs) > 0 and self._runs[-2] in (1, SEGMENTED)

    def cut(self, token_count: int) -> Passes:
        """The passes to read the first tokens by: as they were read, or in calls of one block each if that is
        unknown."""
        first = Passes()
        for size in self._between(0, token_count):
            first.add(size)
        while first.token_count < token_count:
            first.add(min(BLOCK_TOKENS, token_count - first.token_count))
        return first

    def cut_back(self, token_count: int) -> Passes:
        """The passes by which caches hold the first tokens. The rest of a call that read on, and unknown calls, are
        `UNREPEATABLE`, so that they do not count as calls that were made."""
        whole = Passes()
        for size in self:
            if whole.token_count + tokens_of(size) > token_count:
                break
            whole.add(size)
        for _ in range(whole.token_count, token_count):
            whole.add(UNREPEATABLE)
        return whole
