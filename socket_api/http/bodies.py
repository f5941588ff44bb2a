"""The body of a request: read within a bound, and its JSON checked before anything is built from it (threats 41 to 43).

The check walks over the strings and brackets of a body, and builds nothing. Behind it a decoded body takes its text, of
at most MAX_BODY_BYTES (four times that where each text has a character beyond the first 65,536 of Unicode), and some
100 bytes for each of at most MAX_BODY_VALUES values. All bodies together are bounded in bytes, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final, TypeVar

from pydantic_core import from_json
from starlette.requests import Request

from ...daemon.api.dialogue import are_arguments
from ...daemon.tasks.pieces import Pieces, in_pieces
from ..errors import HttpRefused, InvalidRequest
from ..server.budget import Held, RequestBudget
from ..wire.framing import whole
from . import string_tools
from .limits import MAX_BODY_BYTES, MAX_BODY_DEPTH, MAX_BODY_VALUES, HttpLimits
from .work import ClientLeft

T = TypeVar("T")

_STEPS_AT_ONCE: Final = 4096
"""Strings and brackets that one piece of work walks over: about a millisecond."""

_BYTES_AT_ONCE: Final = 64 * 1024
"""As above, of a long string: three milliseconds if all of it is escapes."""

_MARK: Final = re.compile(rb'["\[\]{},]')
_INSIDE: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_ESCAPE: Final = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)
"""An escape in a text, or two that are a pair; the group is half a pair."""


class Bodies:
    """Reads the bodies of all requests. One holds its bytes of the common bound while it is read; until it is answered,
    as many as what was made of it takes."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._budget = RequestBudget(limits.max_bodies_bytes, largest_bytes=MAX_BODY_BYTES)

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """The JSON object in the body of a request; an empty one for an empty body.

        Raises:
            HttpRefused: it is too large, comes too slowly, or is encoded.
            InvalidRequest: it is no JSON object, or nested too deep.
        """
        async with self._held() as held:
            yield await in_pieces(_decoded(await self._whole(request, held)))

    @contextlib.asynccontextmanager
    async def made(self, request: Request, make: Callable[[dict[str, Any]], T]) -> AsyncIterator[T]:
        """As `read`, what is made of the body. The body goes: fields without effect take no room from others while the
        answer is written. Raises as `read` and `make`."""
        async with self._held() as held:
            found = make(await in_pieces(_decoded(await self._whole(request, held))))
            self._budget.give_back(held, but_bytes=memory_of(found))
            yield found

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
        self._budget.complete(held)
        return raw

    async def _receive(self, request: Request, held: Held) -> bytes:
        pieces, size_bytes = [], 0
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            piece = message.get("body", b"")
            size_bytes += len(piece)
            if size_bytes > MAX_BODY_BYTES:
                raise _too_large()
            pieces.append(piece)
            await self._budget.take(held, len(piece))
            if not message.get("more_body", False):
                return b"".join(pieces)


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


class InnerJson:
    """Reads JSON in the texts of one body. All of it together has at most as many values as a body."""

    def __init__(self) -> None:
        self._values = 0

    def find(self, text: str) -> Any:
        """The value of a text; None if it is no JSON. Raises InvalidRequest: it has too many values."""
        raw = text.encode()
        self._values, _ = whole(_measured(raw, already=self._values))
        try:
            return whole(_value_of(raw))
        except ValueError:
            return None

    def arguments_of(self, given: object) -> dict[str, Any]:
        """The arguments of a call that was made. What is no object, or none that a call may have, is read as the
        string of a tool that takes one: so a history is not refused for what some model wrote in it. Raises
        InvalidRequest: as `find`."""
        words = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        if words.strip() in ("", "null"):
            return {}
        found = self.find(words) if isinstance(given, str) else given
        return found if are_arguments(found) else string_tools.arguments_of(words)


def require_bounded(body: bytes) -> Pieces[None]:
    """Refuse JSON that is nested too deep or has too many values. Raises InvalidRequest."""
    _, depth = yield from _measured(body)
    if depth > MAX_BODY_DEPTH:
        raise InvalidRequest(f"The body is nested deeper than {MAX_BODY_DEPTH} levels.", field="body")


def _measured(body: bytes, *, already: int = 0) -> Pieces[tuple[int, int]]:
    """How many values JSON has, with those that others have `already`, and how many levels. Raises InvalidRequest: it
    has too many values."""
    at = depth = deepest = steps = 0
    values = already
    while at < len(body):
        mark = _MARK.search(body, at, at + _BYTES_AT_ONCE)
        at = at + _BYTES_AT_ONCE if mark is None else mark.end()
        steps += 1
        if mark is None or steps % _STEPS_AT_ONCE == 0:
            yield
        if mark is None:
            continue
        if mark[0] == b'"':
            at = yield from _behind_string(body, at)
        elif mark[0] in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        elif mark[0] in b"]}":
            depth -= 1
        if mark[0] in b'[{,"':
            values += 1
            if values > MAX_BODY_VALUES:
                raise InvalidRequest(
                    f"The body has more than {MAX_BODY_VALUES} texts, lists, objects and commas.", field="body"
                )
    return values, deepest


def _behind_string(body: bytes, at: int) -> Pieces[int]:
    """Where the string ends whose first character is at `at`."""
    while at < len(body):
        inside = _INSIDE.match(body, at, at + _BYTES_AT_ONCE)
        at = at if inside is None else inside.end()
        if body[at : at + 1] == b'"':
            return at + 1
        at += 2 if body[at : at + 1] == b"\\" else 0  # an escape over the end of the piece
        yield
    return at


def _decoded(body: bytes) -> Pieces[dict[str, Any]]:
    yield from require_bounded(body)
    if not body.strip():
        return {}
    try:
        found = yield from _value_of(body)
    except ValueError as error:  # its text tells the place and what was expected, and nothing of the body
        raise InvalidRequest(f"The body is not JSON: {error}.", field="body") from None
    if not isinstance(found, dict):
        raise InvalidRequest("The body is no JSON object.", field="body")
    yield from _require_finite(found)
    return found


def _value_of(raw: bytes) -> Pieces[Any]:
    """The value of JSON. Half a surrogate pair, as clients cut texts into, is a replacement character. Raises
    ValueError: it is no JSON."""
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError:
        without_halves = yield from _without_halves(raw)
        if without_halves == raw:
            raise
    return from_json(without_halves, allow_inf_nan=False)


def _without_halves(raw: bytes) -> Pieces[bytes]:
    found = bytearray(raw)
    for steps, escape in enumerate(_ESCAPE.finditer(raw), 1):
        if escape[1]:
            found[slice(*escape.span(1))] = b"ufffd"
        if steps % _STEPS_AT_ONCE == 0:
            yield
    return bytes(found)


def _require_finite(body: dict[str, Any]) -> Pieces[None]:
    """Refuse numbers as 1e400: they are JSON, and no transport carries what they are read as. Raises InvalidRequest."""
    lists: deque[tuple[str, Any]] = deque([("", body)])
    steps = 0
    while lists:
        place, values = lists.popleft()
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            if isinstance(value, dict | list):
                lists.append((f"{place}{name}.", value))
            elif isinstance(value, float) and not math.isfinite(value):
                field = f"{place}{name}"
                raise InvalidRequest(f"{field:.200}: the number is too large; give a smaller one.", field=field[:200])
        steps += 1 + len(values)
        if steps > _STEPS_AT_ONCE:
            steps = 0
            yield


def _too_large() -> HttpRefused:
    return HttpRefused(f"The body has more than {MAX_BODY_BYTES // 1024**2} MiB. Send less at a time.", status=413)
