"""Bounds on a msgpack payload, checked by a walk over its headers before anything is built from it.

The walk builds no objects: its memory is a stack of at most MAX_DEPTH integers. The decoder that runs afterwards checks
that strings are UTF-8.

Why: msgpack allocates an array's slots when it reads the header, allows a depth of 1,024, and does not bound the number
of values. Nested headers or millions of empty maps make a small frame cost gigabytes or seconds (threat 17).

How: each header tells its bytes and its children. One regular expression steps over runs of 256 non-negative integers
(token lists), so a list of a million tokens costs milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from ..errors import MalformedFrame
from ..limits import MAX_ARRAY_ITEMS, MAX_DEPTH

_RUN = 256
_STEPS_AT_ONCE: Final = 2048
"""Values that one piece of work walks over: about a millisecond. A run takes as long as 16 of them."""

_STEPS_OF_A_RUN: Final = 16
_INTEGER_RUN = re.compile(rb"(?:[\x00-\x7f]|\xcc.|\xcd.{2}|\xce.{4}){%d}" % _RUN, re.DOTALL)

# First byte -> bytes of the whole value, where the first byte alone tells them.
_FIXED_SIZES = dict.fromkeys([*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3], 1)
_FIXED_SIZES |= {0xCC: 2, 0xD0: 2, 0xCD: 3, 0xD1: 3, 0xCE: 5, 0xD2: 5, 0xCA: 5, 0xCF: 9, 0xD3: 9, 0xCB: 9}
_FIXED_SIZES |= {0xA0 + length: 1 + length for length in range(32)}

# First byte -> bytes of the length that follows it.
_BYTES_HEADERS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAY_HEADERS = {0xDC: 2, 0xDD: 4}
_MAP_HEADERS = {0xDE: 2, 0xDF: 4}


def require_bounded(payload: bytes, *, max_values: int) -> None:
    """Refuse a payload that is incomplete, nested too deep, or has too many values or an extension type. Raises
    MalformedFrame: with `offset`, the byte where the walk stopped."""
    for _ in require_bounded_in_pieces(payload, max_values=max_values):
        pass


def require_bounded_in_pieces(payload: bytes, *, max_values: int) -> Iterator[None]:
    """As `require_bounded`; yields behind each piece of the work."""
    position = values = integers = next_run_at = 0
    pause_at = _STEPS_AT_ONCE
    awaited = [1]  # children still to come, for each open level
    while awaited:
        if awaited[-1] == 0:
            awaited.pop()
            continue
        if values + integers // _RUN * _STEPS_OF_A_RUN >= pause_at:
            pause_at += _STEPS_AT_ONCE
            yield
        if awaited[-1] >= _RUN and values >= next_run_at:
            if run := _INTEGER_RUN.match(payload, position):
                position = run.end()
                awaited[-1] -= _RUN
                integers += _RUN
                if integers > MAX_ARRAY_ITEMS:
                    raise _malformed(f"the frame has more than {MAX_ARRAY_ITEMS} integers", position)
                continue
            next_run_at = values + _RUN  # so that failed attempts cannot add up
        values += 1
        if values > max_values:
            raise _malformed(f"the frame has more than {max_values} values", position)
        awaited[-1] -= 1
        position, children = _step(payload, position)
        if children:
            awaited.append(children)
            if len(awaited) - 1 > MAX_DEPTH:
                raise _malformed(f"the frame is nested deeper than {MAX_DEPTH} levels", position)
    if position != len(payload):
        raise _malformed(f"{len(payload) - position} bytes follow the frame's message", position)


def _step(payload: bytes, position: int) -> tuple[int, int]:
    """Return the position behind one value's own bytes, and the number of its children."""
    if position >= len(payload):
        raise _malformed("the frame ends inside its message", position)
    tag = payload[position]
    children = 0
    if (size := _FIXED_SIZES.get(tag)) is not None:
        end = position + size
    elif (width := _BYTES_HEADERS.get(tag)) is not None:
        end = position + 1 + width + _length(payload, position, width)
    elif 0x80 <= tag <= 0x9F:
        end, children = position + 1, (tag & 0x0F) * (2 if tag < 0x90 else 1)
    elif (width := _ARRAY_HEADERS.get(tag)) is not None:
        end, children = position + 1 + width, _length(payload, position, width)
    elif (width := _MAP_HEADERS.get(tag)) is not None:
        end, children = position + 1 + width, 2 * _length(payload, position, width)
    else:
        raise _malformed(f"byte 0x{tag:02x} begins no value that the protocol uses", position)
    if end + children > len(payload):  # a value takes at least one byte
        raise _malformed("a length in the frame points past its end", position)
    if children > MAX_ARRAY_ITEMS:
        raise _malformed(f"the frame has an array or map of more than {MAX_ARRAY_ITEMS} values", position)
    return end, children


def _length(payload: bytes, position: int, width: int) -> int:
    return int.from_bytes(payload[position + 1 : position + 1 + width], "big")


def _malformed(what: str, offset: int) -> MalformedFrame:
    return MalformedFrame(f"Not a valid frame: {what}. Send one msgpack map for each frame.", offset=offset)
