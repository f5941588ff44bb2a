"""JSON as clients send it: measured before anything is built from it, and read in short calls (threats 41, 42).

The measure walks over the strings and brackets of a text, and builds nothing. It notes where what is long ends: a call
of the reader lets no other thread go on, so a long text is read a piece at a time, and a long list or object a run of
its members at a time.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import from_json

from ...daemon.api.dialogue import are_arguments
from ..errors import InvalidRequest

MAX_BODY_DEPTH: Final = 64
"""Levels of objects and arrays in a body. The schema of a tool takes the most: twenty are many."""

MAX_BODY_VALUES: Final = 262_144
"""Texts, lists, objects and commas of a body, so a bound on its values: 131,072 pairs of a name and a number, as many
as a request on the Unix socket may have."""

BYTES_AT_ONCE: Final = 64 * 1024
"""Of JSON that is walked over or read in one call: some milliseconds, whatever it says."""

_MARK: Final = re.compile(rb'["\[\]{},]')
_INSIDE: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_PIECE: Final = re.compile(rb'(?:[^"\\]++|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\[^u])*+', re.DOTALL)
"""The inside of a text, up to an escape that is not whole."""

_LOW_HALF: Final = re.compile(rb"\\u[dD][c-fC-F]..", re.DOTALL)
_ESCAPE: Final = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)
"""An escape in a text, or two that are a pair; the group is half a pair."""


@dataclass(frozen=True, slots=True)
class _Measure:
    """values: the texts, lists, objects and commas. depth: the levels. ends: where each text, list and object ends
    that is longer than BYTES_AT_ONCE, by where it begins."""

    values: int
    depth: int
    ends: Mapping[int, int]


class InnerJson:
    """Reads JSON in the texts of one body. All of it together has at most as many values as a body."""

    def __init__(self) -> None:
        self._values = 0

    def find(self, text: str) -> Any:
        """The value of a text; None if it is no JSON. Raises InvalidRequest: it has too many values."""
        raw = text.encode()
        measure = _measured(raw, already=self._values)
        self._values = measure.values
        try:
            return _value_of(raw, measure)
        except ValueError:
            return None

    def arguments_of(self, arguments: object) -> dict[str, Any]:
        """The arguments of a call that was made. What is no object, or none that a call may have, is read as the
        string of a tool that takes one: so a history is not refused for what some model wrote in it. Raises
        InvalidRequest: as `find`."""
        words = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if words.strip() in ("", "null"):
            return {}
        value = self.find(words) if isinstance(arguments, str) else arguments
        return value if are_arguments(value) else string_arguments(words)


def string_arguments(text: str | None) -> dict[str, Any]:
    """The arguments of a call that has a string: of a tool that takes one, or where a model gave no object."""
    return {"input": text or ""}


def object_of(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; an empty one for an empty body. Raises InvalidRequest: it is none, nested too deep, or
    has too many values or a number that no transport carries."""
    measure = require_bounded(body)
    if not body.strip():
        return {}
    try:
        value = _value_of(body, measure)
    except ValueError as error:  # its text tells the place and what was expected, and nothing of the body
        raise InvalidRequest(f"The body is not JSON: {error}.", field="body") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body is no JSON object.", field="body")
    _require_finite(value)
    return value


def require_bounded(body: bytes) -> _Measure:
    """Measure JSON that is not nested too deep and has not too many values. Raises InvalidRequest."""
    measure = _measured(body)
    if measure.depth > MAX_BODY_DEPTH:
        raise InvalidRequest(f"The body is nested deeper than {MAX_BODY_DEPTH} levels.", field="body")
    return measure


def _measured(body: bytes, *, already: int = 0) -> _Measure:
    """already: the values of others. Raises InvalidRequest: with those it has too many."""
    at = deepest = 0
    values, opened, ends = already, list[int](), dict[int, int]()
    while at < len(body):
        mark = _MARK.search(body, at, at + BYTES_AT_ONCE)
        if mark is None:
            at += BYTES_AT_ONCE
            continue
        begins, at = mark.start(), mark.end()
        if mark[0] == b'"':
            at = _behind_string(body, at)
        elif mark[0] in b"[{":
            opened.append(begins)
            deepest = max(deepest, len(opened))
        elif mark[0] in b"]}":
            begins = opened.pop() if opened else begins
        if at - begins > BYTES_AT_ONCE:
            ends[begins] = at
        if mark[0] in b'[{,"':
            values += 1
            if values > MAX_BODY_VALUES:
                raise InvalidRequest(
                    f"The body has more than {MAX_BODY_VALUES} texts, lists, objects and commas.", field="body"
                )
    return _Measure(values, deepest, ends)


def _behind_string(body: bytes, at: int) -> int:
    """Where the string ends whose first character is at `at`."""
    while at < len(body):
        inside = _INSIDE.match(body, at, at + BYTES_AT_ONCE)
        at = at if inside is None else inside.end()
        if body[at : at + 1] == b'"':
            return at + 1
        at += 2 if body[at : at + 1] == b"\\" else 0  # an escape over the end of the piece
    return at


def _value_of(raw: bytes, measure: _Measure) -> Any:
    """The value of JSON. Half a surrogate pair, as clients cut texts into, is a replacement character. Raises
    ValueError: it is no JSON."""
    if measure.depth > MAX_BODY_DEPTH:
        raise ValueError(f"it is nested deeper than {MAX_BODY_DEPTH} levels")
    begins, ends = len(raw) - len(raw.lstrip()), len(raw.rstrip())
    if measure.ends.get(begins) == ends:
        return _long(raw, begins, measure.ends)
    if ends - begins > BYTES_AT_ONCE:
        raise ValueError("it does not end where its first text, list or object ends")
    return _read(raw)


def _long(raw: bytes, begins: int, ends: Mapping[int, int]) -> Any:
    last = ends[begins] - 1
    if raw[begins : begins + 1] == b'"':
        return "".join(_texts(raw, begins + 1, last))
    opening, closing = raw[begins : begins + 1], raw[last : last + 1]
    items, members = list[Any](), dict[str, Any]()
    for run in _runs(raw, begins, ends):
        value = _read(opening + run.of(raw, ends) + closing, run.begins)
        if not value and raw[begins + 1 : last].strip():
            raise ValueError(f"nothing stands in front of a comma or an end, behind byte {run.begins}")
        if isinstance(value, list):
            items += value if run.inner is None else [_long(raw, run.inner, ends)]
        else:
            members |= value if run.inner is None else {next(iter(value)): _long(raw, run.inner, ends)}
    return items if opening == b"[" else members


@dataclass(frozen=True, slots=True)
class _Run:
    """Some members of a long list or object. inner: where the value of the only one begins, if that is long."""

    begins: int
    end: int
    inner: int | None = None

    def of(self, raw: bytes, ends: Mapping[int, int]) -> bytes:
        """Its JSON, with `null` in place of a long value."""
        if self.inner is None:
            return raw[self.begins : self.end]
        return raw[self.begins : self.inner] + b"null" + raw[ends[self.inner] : self.end]


def _runs(raw: bytes, begins: int, ends: Mapping[int, int]) -> Iterator[_Run]:
    run = member = at = begins + 1
    last, depth, inner = ends[begins] - 1, 0, None
    while (mark := _MARK.search(raw, at, last)) is not None:
        here, at = mark.start(), mark.end()
        if here in ends:
            if inner is not None or (raw[begins : begins + 1] == b"{" and not raw[member:here].strip()):
                raise ValueError(f"a long value stands behind byte {member} where none can stand")
            if member > run:
                yield _Run(run, member - 1)
            run, inner, at = member, here, ends[here]
        elif mark[0] == b'"':
            at = _behind_string(raw, at)
        elif mark[0] in b"[{":
            depth += 1
        elif mark[0] in b"]}":
            depth -= 1
        elif not depth:
            if inner is not None or here - run > BYTES_AT_ONCE:
                yield _Run(run, here, inner)
                run, inner = at, None
            member = at
    yield _Run(run, last, inner)


def _texts(raw: bytes, at: int, end: int) -> Iterator[str]:
    """The pieces of a long text. No character is cut, and no pair of escapes."""
    while at < end:
        piece = _PIECE.match(raw, at, min(end, at + BYTES_AT_ONCE))
        stop = at if piece is None else piece.end()
        if (half := _LOW_HALF.match(raw, stop, end)) is not None:
            stop = half.end()
        for _ in range(3):  # bytes that UTF-8 has behind the first of a character
            stop += stop < end and raw[stop] & 0xC0 == 0x80
        if stop == at:
            raise ValueError("an escape in a text is not whole")
        yield str(_read(b'"' + raw[at:stop] + b'"', at))
        at = stop


def _read(raw: bytes, behind: int = 0) -> Any:
    """behind: the byte of a longer text at which this begins."""
    try:
        return from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        without_halves = _without_halves(raw)
        if without_halves == raw:
            raise ValueError(f"{error}, counted from byte {behind}" if behind else str(error)) from None
    return from_json(without_halves, allow_inf_nan=False)


def _without_halves(raw: bytes) -> bytes:
    copy = bytearray(raw)
    for escape in _ESCAPE.finditer(raw):
        if escape[1]:
            copy[slice(*escape.span(1))] = b"ufffd"
    return bytes(copy)


def _require_finite(body: dict[str, Any]) -> None:
    """Refuse numbers as 1e400: they are JSON, and no transport carries what they are read as. Raises InvalidRequest."""
    lists: deque[tuple[str, Any]] = deque([("", body)])
    while lists:
        place, values = lists.popleft()
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            if isinstance(value, dict | list):
                lists.append((f"{place}{name}.", value))
            elif isinstance(value, float) and not math.isfinite(value):
                field = f"{place}{name}"
                raise InvalidRequest(f"{field:.200}: the number is too large; give a smaller one.", field=field[:200])
