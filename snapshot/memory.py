"""Views of MLX memory as bytes, without a copy.

An array must be evaluated before its memory is looked at: raw access to an unevaluated one is undefined. A view
holds on to its array, and MLX never writes into memory that something else refers to, so what a view shows stays
as it was even when the cache goes on growing.
"""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx
import numpy as np

# Python's buffer protocol has no bfloat16, so memory is looked at through integers of the same width.
_INTEGER_OF_WIDTH = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def contiguous(array: mx.array) -> mx.array:
    """The array as integers of its own width and in row-major order: itself where it is so already."""
    return mx.contiguous(array).view(_INTEGER_OF_WIDTH[array.dtype.size])


def readable(array: mx.array) -> memoryview:
    """The bytes of an evaluated array from `contiguous`."""
    return memoryview(cast(Any, array)).cast("B")


def allocate(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Integers of the dtype's width, zero, evaluated: memory to be filled, then seen `as_dtype`."""
    array = mx.zeros(shape, dtype=_INTEGER_OF_WIDTH[dtype.size])
    mx.eval(array)
    return array


def writable(array: mx.array) -> memoryview:
    """The bytes of an evaluated array from `allocate`; what is written is seen by MLX."""
    return memoryview(cast(Any, np.asarray(array))).cast("B")


def as_dtype(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """The filled memory as elements of the dtype, not copied."""
    return array.view(dtype)


def head_runs(whole: memoryview, heads: int, capacity: int, row_bytes: int, start: int, count: int) -> list[memoryview]:
    """The bytes of tokens `[start, start + count)` of an array `[1, heads, capacity, dim]`: one run a head.

    row_bytes: bytes of one head's vector for one token.
    """
    runs = []
    for head in range(heads):
        first = (head * capacity + start) * row_bytes
        runs.append(whole[first : first + count * row_bytes])
    return runs
