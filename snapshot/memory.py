"""Views of MLX memory as bytes, without a copy.

An array must be evaluated before its memory is looked at: raw access to an unevaluated one is undefined. A view holds
on to its array, and MLX never writes into memory that something else refers to. So the view's bytes stay the same even
while the cache grows.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from ..memvid.units import format_bytes
from .errors import NotEnoughMemory

# Python's buffer protocol has no bfloat16, so a view has integers of the same width.
_INTEGER_OF_WIDTH = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def contiguous(array: mx.array) -> mx.array:
    """The array as integers of its own width in row-major order; itself if it is that already."""
    return mx.contiguous(array).view(_INTEGER_OF_WIDTH[array.dtype.size])


def readable(array: mx.array) -> memoryview:
    """The bytes of an evaluated array from `contiguous`."""
    # Python cannot view a buffer without elements as bytes, and some caches have empty arrays.
    return memoryview(cast(Any, array)).cast("B") if array.size else memoryview(b"")


def evaluated(array: mx.array) -> memoryview:
    """The bytes of an array in row-major order, once it is evaluated."""
    words = contiguous(array)
    mx.eval(words)
    return readable(words)


def allocate(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Integers of the dtype's width, zero, evaluated: memory to be filled, then seen `as_dtype`."""
    array = mx.zeros(shape, dtype=_INTEGER_OF_WIDTH[dtype.size])
    mx.eval(array)
    return array


def unfilled(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """As `allocate`, but with undefined content, for a caller that fills all of it.

    Nothing is written, so the filling thread is the first and only one to touch a page. All of MLX's own ways to make
    an array write it.
    """
    if 0 in shape:
        return allocate(shape, dtype)
    with _reading_header:
        # The one call of `mx.load` in this package; it loads no file: the header is made below.
        return cast(mx.array, mx.load(cast(Any, _Unfilled(shape, dtype.size)), format="npy"))


def hand_back_cache() -> None:
    """Give MLX's cache of freed memory back to the system."""
    with _reading_header:
        mx.clear_cache()


def limit_cache(size_bytes: int) -> int:
    """Let MLX's cache of freed memory be no larger; the limit before, in bytes."""
    with _reading_header:
        return int(mx.set_cache_limit(size_bytes))


# MLX frees of its cache with Python's lock held, and waits for whoever reads with `mx.load` on another thread; that one
# waits for Python's lock, to read from an object. So each of two engines in a process waits until the other is done.
_reading_header = threading.Lock()


class _Unfilled:
    """A file in numpy's format that gives only its header. MLX takes memory for the elements and asks to read them into
    it; it is told that this is done."""

    name = "unfilled.npy"
    closed = False

    def __init__(self, shape: tuple[int, ...], element_bytes: int) -> None:
        sizes = "".join(f"{size}, " for size in shape)
        kind = f"{'|' if element_bytes == 1 else '<'}u{element_bytes}"
        text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({sizes})}}".encode()
        text += b" " * (-(len(text) + 11) % 16) + b"\n"
        self._header = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
        self._at = 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (self._at if whence == 1 else 0)
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        given = self._header[self._at : self._at + len(buffer)]
        buffer[: len(given)] = given
        self._at += len(buffer)
        return len(buffer)


class Grant:
    """Granted memory that is not all filled. The system still calls the unfilled rest available; so it is counted here
    until it is filled, or `done` is called, or this object is gone."""

    def __init__(self, size_bytes: int) -> None:
        self.unfilled_bytes = size_bytes

    def filled(self, size_bytes: int) -> None:
        """Count so many more bytes as written; from any thread."""
        with _granting:
            self.unfilled_bytes -= size_bytes

    def done(self) -> None:
        """No more will be filled: the filler has ended, or failed and frees the memory."""
        with _granting:
            self.unfilled_bytes = 0


_ADVICE = "Put other sessions to sleep"
_granting = threading.Lock()
# Weakly: a wake may end in many ways, and each of them frees its memory.
_grants: weakref.WeakSet[Grant] = weakref.WeakSet()


def granted_bytes() -> int:
    """The bytes granted in this process and still to be filled."""
    with _granting:
        return _granted_bytes()


def _granted_bytes() -> int:
    return sum(grant.unfilled_bytes for grant in _grants)


def grant(size_bytes: int) -> Grant:
    """Refuse memory that the system cannot give, beside earlier grants that are still to be filled. A failed allocation
    ends MLX's process, and so would several grants that fit one by one and are then filled together.

    Raises:
        NotEnoughMemory: with the sizes, if the system tells them.
    """
    with _granting:
        _require_available(size_bytes, _granted_bytes())
        granted = Grant(size_bytes)
        _grants.add(granted)
        return granted


def require_available(size_bytes: int, what: str = "The state", advice: str = _ADVICE) -> None:
    """Refuse memory that the system cannot give now, beside MLX's own store of freed memory: a failed allocation ends
    MLX's process. The memory is not reserved. The message has its user and the advice.

    Raises:
        NotEnoughMemory: with the sizes, if the system tells them.
    """
    with _granting:
        _require_available(max(0, size_bytes - mx.get_cache_memory()), _granted_bytes(), what, advice)


def _require_available(size_bytes: int, promised_bytes: int, what: str = "The state", advice: str = _ADVICE) -> None:
    available = _available()
    if available is not None and size_bytes > available - promised_bytes:
        promised = f", {format_bytes(promised_bytes)} of it for states that are just being read" * bool(promised_bytes)
        raise NotEnoughMemory(
            f"{what} needs {format_bytes(size_bytes)} of memory and {format_bytes(available)} are available"
            f"{promised}. {advice}{', or try again in a moment' * bool(promised_bytes)}.",
            size_bytes=size_bytes,
            available_bytes=available,
            promised_bytes=promised_bytes,
        )
    try:
        # Address space and limits of the process; given back at once, never touched.
        mmap.mmap(-1, max(1, size_bytes)).close()
    except (OSError, OverflowError, ValueError) as error:
        raise NotEnoughMemory(
            f"{what} needs {format_bytes(size_bytes)} of memory, and the system does not give this process so much. "
            f"{advice}.",
            size_bytes=size_bytes,
        ) from error


def available_bytes() -> int:
    """Bytes available without swapping, if the system tells; else all the memory of the machine."""
    available = _available()
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if available is None else available


def _available() -> int | None:
    """Bytes available without swapping; None if unknown. On a GPU with memory of its own the lesser of both: there MLX
    moves an array to the system's memory when its bytes are looked at, and back for a computation."""
    known = [each for each in (_available_in_system(), _available_on_gpu()) if each is not None]
    return min(known, default=None)


def _available_on_gpu() -> int | None:
    """Free bytes on the GPU. MLX tells this for CUDA alone: on Metal the memory is the system's."""
    if mx.default_device() == mx.Device(mx.cpu):
        return None
    free = mx.device_info().get("free_memory")
    return free if isinstance(free, int) else None


def _available_in_system() -> int | None:
    """Bytes that the system calls available; None if it does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return int(kibibytes) * 1024 if kibibytes is not None else None


def address_of(array: mx.array) -> int:
    """Where an evaluated array begins in memory: the same for all arrays that begin alike in one memory."""
    words = array.view(_INTEGER_OF_WIDTH[array.dtype.size])
    mx.eval(words)
    return int(np.asarray(words).__array_interface__["data"][0])


def writable(array: mx.array) -> memoryview:
    """The bytes of an evaluated array from `allocate` or `unfilled`; MLX sees all writes."""
    return memoryview(cast(Any, np.asarray(array).reshape(-1))).cast("B") if array.size else memoryview(bytearray())


def as_dtype(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """The filled memory as elements of the dtype, not copied."""
    return array.view(dtype)


@dataclass(frozen=True, slots=True)
class SpanSource:
    """The memory of one span array `[1, heads, capacity, dim]`: `heads` times `capacity` rows of `row_bytes`, each one
    head's vector of a token. Only tokens' rows are seen."""

    view: memoryview
    heads: int
    capacity: int
    row_bytes: int

    def runs(self, start: int, count: int) -> list[memoryview]:
        """The bytes of tokens `[start, start + count)`, one run a head."""
        firsts = ((head * self.capacity + start) * self.row_bytes for head in range(self.heads))
        return [self.view[first : first + count * self.row_bytes] for first in firsts]


def span_source(whole: mx.array) -> SpanSource:
    """The memory of a span array `[1, …, capacity, dim]`; evaluated."""
    *outer, capacity, dim = whole.shape
    return SpanSource(evaluated(whole), math.prod(outer), capacity, dim * whole.itemsize)


@dataclass(frozen=True, slots=True)
class SegmentSource:
    """As `SpanSource`, of rows that lie in segments: words `[heads, rows, dim]` of each, all of so many rows."""

    segments: tuple[np.ndarray, ...]

    def runs(self, start: int, count: int) -> list[memoryview]:
        """The bytes of tokens `[start, start + count)`, head by head."""
        heads, rows, _ = self.segments[0].shape
        end, found = start + count, []
        for head in range(heads):
            for at in range(start // rows, -(-end // rows)):
                first, last = max(0, start - at * rows), min(rows, end - at * rows)
                found.append(memoryview(cast(Any, self.segments[at][head, first:last])).cast("B"))
        return found


def segment_source(arrays: Sequence[mx.array]) -> SegmentSource:
    """The memory of arrays `[segments, heads, rows, dim]`, one behind the other; evaluated."""
    words = [array.view(_INTEGER_OF_WIDTH[array.dtype.size]) for array in arrays]
    mx.eval(words)
    return SegmentSource(tuple(segment for each in words for segment in np.asarray(each)))
