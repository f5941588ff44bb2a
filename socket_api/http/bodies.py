"""The body of a request: read within a bound, and what is made of it made where it holds nobody (threats 41 to 43).

A decoded body takes its text, of at most MAX_BODY_BYTES (four times that where each text has a character beyond the
first 65,536 of Unicode), and some 100 bytes for each of at most MAX_BODY_VALUES values. All bodies together are bounded
in bytes, too.

A long body is decoded and read on a thread: the loop and the engine get their turn every few milliseconds, for no call
there is long.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final, TypeVar

from starlette.requests import Request

from ...daemon.tasks.cancellation import to_the_end
from ..errors import HttpRefused
from ..server.budget import Held, RequestBudget
from .json_reading import object_of
from .limits import MAX_BODY_BYTES, HttpLimits
from .work import ClientLeft

T = TypeVar("T")
Fill = Callable[[Request, dict[str, Any], int], Awaitable[tuple[dict[str, Any], int]]]
"""Puts in what the body of a request only names. It gets the bytes that this may take, and gives those that it does."""

_SHORT_BYTES: Final = 16 * 1024
"""Of a body that is decoded and read on the loop: some milliseconds, whatever it says."""

_LONG_AT_ONCE: Final = 3
"""Long bodies that are decoded at a time: for each of them the loop may wait some milliseconds for its turn."""


class Bodies:
    """Reads the bodies of all requests. One holds its bytes of the common bound while it is read; until it is answered,
    as many as what was made of it takes."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._budget = RequestBudget(limits.max_bodies_bytes, largest_bytes=MAX_BODY_BYTES)
        self._decoding = asyncio.Semaphore(_LONG_AT_ONCE)

    @contextlib.asynccontextmanager
    async def read(self, request: Request, fill: Fill | None = None) -> AsyncIterator[dict[str, Any]]:
        """The JSON object in the body of a request; an empty one for an empty body.

        Raises:
            HttpRefused: it is too large, comes too slowly, or is encoded.
            InvalidRequest: it is no JSON object, or nested too deep.
            TorporError: as `fill`.
        """
        async with self._held() as held:
            yield (await self._filled(request, held, fill))[0]

    @contextlib.asynccontextmanager
    async def made(
        self, request: Request, make: Callable[[dict[str, Any]], T], fill: Fill | None = None
    ) -> AsyncIterator[T]:
        """As `read`, what is made of the body. The body goes: fields without effect take no room from others while the
        answer is written. Raises as `read` and `make`."""
        async with self._held() as held:
            found, size_bytes = await self._made(await self._filled(request, held, fill), make)
            self._budget.give_back(held, but_bytes=size_bytes)
            yield found

    async def _made(self, body: tuple[dict[str, Any], int], make: Callable[[dict[str, Any]], T]) -> tuple[T, int]:
        given, size_bytes = body
        return await self._worked(size_bytes, lambda: with_memory(make(given)))

    async def _filled(self, request: Request, held: Held, fill: Fill | None) -> tuple[dict[str, Any], int]:
        """The body with what it only names, and the bytes of both."""
        raw = await self._whole(request, held)
        size_bytes = len(raw)
        given = await self._worked(size_bytes, lambda: object_of(raw))
        if fill is not None:
            given, more_bytes = await fill(request, given, MAX_BODY_BYTES - size_bytes)
            await self._take(held, size_bytes, more_bytes)
            size_bytes += more_bytes
        self._budget.complete(held)
        return given, size_bytes

    async def _worked(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Work over a body of a size."""
        if size_bytes <= _SHORT_BYTES:
            return work()
        async with self._decoding:
            return await to_the_end(asyncio.to_thread(work))

    async def _take(self, held: Held, had_bytes: int, more_bytes: int) -> None:
        """Take room for more of a body that has so many bytes."""
        counted = min(more_bytes, had_bytes + more_bytes - self._limits.free_body_bytes)
        if counted > 0:
            await self._budget.take(held, counted)

    @contextlib.asynccontextmanager
    async def _held(self) -> AsyncIterator[Held]:
        held = Held()
        try:
            yield held
        finally:
            self._budget.give_back(held)

    async def _whole(self, request: Request, held: Held) -> bytes:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HttpRefused("The body has a Content-Encoding. Send it as plain JSON.", status=415)
        if int_of(request.headers.get("content-length")) > MAX_BODY_BYTES:
            raise _too_large()
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                raw = await self._receive(request, held)
        except TimeoutError:
            raise HttpRefused(
                f"The body was not complete after {self._limits.body_timeout_s:g} s.", status=408
            ) from None
        return raw

    async def _receive(self, request: Request, held: Held) -> bytes:
        pieces, size_bytes = [], 0
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            piece = message.get("body", b"")
            if size_bytes + len(piece) > MAX_BODY_BYTES:
                raise _too_large()
            pieces.append(piece)
            await self._take(held, size_bytes, len(piece))
            size_bytes += len(piece)
            if not message.get("more_body", False):
                return b"".join(pieces)


def with_memory(value: T) -> tuple[T, int]:
    """A value, and the bytes that it takes."""
    return value, memory_of(value)


def memory_of(value: object) -> int:
    """The bytes that the texts, lists and numbers in a value take, about; in records, those of their fields."""
    found, left = 0, [value]
    while left:
        each = left.pop()
        found += sys.getsizeof(each)
        if is_dataclass(each):
            left += [getattr(each, field.name) for field in fields(each)]
        elif isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            left += each
    return found


def int_of(header: str | None) -> int:
    """The number in a header; 0 for another text."""
    return int(header) if header is not None and re.fullmatch(r"[0-9]{1,20}", header) else 0


def _too_large() -> HttpRefused:
    return HttpRefused(f"The body has more than {MAX_BODY_BYTES // 1024**2} MiB. Send less at a time.", status=413)
