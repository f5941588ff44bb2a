"""Where the memory of an array lies that is cut by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from . import memory


@dataclass(frozen=True, slots=True)
class SpanSource:
    """The memory of one span array: `heads` times `capacity` rows of `row_bytes`. Only the tokens' are looked at."""

    view: memoryview
    heads: int
    capacity: int
    row_bytes: int

    def runs(self, start: int, count: int) -> list[memoryview]:
        """The bytes of tokens `[start, start + count)`, one run a head."""
        return memory.head_runs(self.view, self.heads, self.capacity, self.row_bytes, start, count)


def span_source(whole: mx.array) -> SpanSource:
    """Where a span array `[1, …, capacity, dim]` lies; evaluated."""
    words = memory.contiguous(whole)
    mx.eval(words)
    *outer, capacity, dim = whole.shape
    return SpanSource(memory.readable(words), math.prod(outer), capacity, dim * whole.itemsize)
