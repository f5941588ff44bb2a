"""Canonical msgpack, and a strict reader of it. Knows nothing of the meaning of values.

Rules: null, booleans, 64-bit integers, float64, UTF-8 text, bytes, lists, and maps with text keys in code-point order,
each in its shortest form. No extension types. A document has exactly one encoding. The reader packs each document again
and refuses one with other bytes.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgpack

from ..errors import CorruptBundle, InvalidDraft, LimitExceeded
from ..limits import MAX_CLAIMED_ELEMENTS, MAX_DEPTH, MAX_NODES, MAX_UNSCANNED_BYTES


class _Refused(Exception):  # turned into a typed error at the edge of this module
    pass


def pack(value: Any, what: str) -> bytes:
    """Encode a value canonically. `what` names it in an error.

    Raises:
        InvalidDraft: a type, key or integer outside the format, or nesting beyond MAX_DEPTH.
        LimitExceeded: more values than MAX_NODES, which no reader would accept.
    """
    try:
        data = bytes(msgpack.packb(_canonical(value, 0), use_bin_type=True))
        if len(data) > MAX_UNSCANNED_BYTES:
            _require_few_nodes(memoryview(data), what)
        return data
    except (_Refused, ValueError, OverflowError, TypeError) as error:
        raise InvalidDraft(f"{what} cannot be packed: {error}. Use plain values with text keys.", what=what) from error


def _canonical(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise _Refused(f"nesting is deeper than {MAX_DEPTH}")
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, list | tuple):
        return [_canonical(item, depth + 1) for item in value]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise _Refused("a map key is not text")
        return {key: _canonical(value[key], depth + 1) for key in sorted(value)}
    raise _Refused(f"values of type {type(value).__name__} are not part of the format")


_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
"""The types that msgpack builds for a value without elements; never a subclass of one of them."""


def _require_canonical(value: Any, depth: int) -> None:
    """Refuse a value that `_canonical` would change or refuse, without copying it."""
    if depth > MAX_DEPTH:
        raise _Refused(f"nesting is deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        items: Iterable[Any] = value
    elif isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise _Refused("a map key is not text")
        if any(former >= key for former, key in itertools.pairwise(value)):
            raise _Refused("its keys are out of order")
        items = value.values()
    elif type(value) in _SCALARS:
        return
    else:
        raise _Refused(f"values of type {type(value).__name__} are not part of the format")
    for item in items:
        # a call for each scalar would take a third of the time for a block header
        if type(item) not in _SCALARS or depth == MAX_DEPTH:
            _require_canonical(item, depth + 1)


def unpack(data: bytes | bytearray | memoryview, *, max_bytes: int, what: str) -> Any:
    """Decode one canonical document that fills `data` exactly.

    Raises:
        LimitExceeded: more than `max_bytes`, or more values than MAX_NODES.
        CorruptBundle: bytes that `pack` does not write.
    """
    if len(data) > max_bytes:
        raise LimitExceeded(
            f"{what} has {len(data)} bytes, the limit is {max_bytes}.", what=what, size_bytes=len(data), limit=max_bytes
        )
    try:
        if len(data) > MAX_UNSCANNED_BYTES or _may_claim(data) > MAX_CLAIMED_ELEMENTS:
            _require_few_nodes(memoryview(data), what)
        most = min(MAX_NODES, len(data))  # each element takes a byte at least
        value = msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_str_len=max_bytes,
            max_bin_len=max_bytes,
            max_array_len=most,
            max_map_len=most,
            max_ext_len=0,
        )
        _require_canonical(value, 0)
        if msgpack.packb(value, use_bin_type=True) != data:
            raise _Refused("it is not in canonical form")  # also where a key is there twice
    except (
        _Refused, ValueError, TypeError, OverflowError, RecursionError, MemoryError, msgpack.UnpackException
    ) as error:  # fmt: skip
        raise CorruptBundle(f"{what} is not valid: {error}.", part=what) from error
    return value


def _may_claim(data: bytes | bytearray | memoryview) -> int:
    """An upper bound on the elements that all containers of a document claim, present or not: msgpack allocates room
    for the claimed number before it reads the first element (threat 17)."""
    plain = bytes(data)
    return len(plain) * sum(plain.count(first) for first in _LARGE_CONTAINERS)


def _refuse_extension(code: int, data: bytes) -> Any:
    raise _Refused("it holds an extension type")


# Each first byte says what follows: (bytes of a length field, whether it is a container, values for each counted
# element) or a fixed number of payload bytes. Needed because msgpack builds every value before anything can count them.
_FIXED: Final = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8} | {first: 1 << (first & 3) for first in range(0xCC, 0xD4)}
_SIZED: Final = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_LARGE_CONTAINERS: Final = (b"\xdc", b"\xdd", b"\xde", b"\xdf")
_COUNTED: Final = {0xDC: (">H", 1), 0xDD: (">I", 1), 0xDE: (">H", 2), 0xDF: (">I", 2)}


def _require_few_nodes(data: memoryview, what: str) -> None:
    """Walk the document without building it; a hostile 32 MiB of empty lists would take gigabytes once built."""
    position, nodes, open_values = 0, 0, 1
    end = len(data)
    while open_values:
        if position >= end:
            raise _Refused("it ends too early")
        nodes += 1
        open_values -= 1
        if nodes > MAX_NODES or open_values > MAX_NODES:
            raise LimitExceeded(f"{what} holds more than {MAX_NODES} values.", what=what, limit=MAX_NODES)
        skip, added = _node(data, position)
        position += skip
        open_values += added


def _node(data: memoryview, position: int) -> tuple[int, int]:
    """(this value's bytes without its elements, the number of elements after it)."""
    first = data[position]
    if first < 0x80 or first >= 0xE0:
        return 1, 0
    if first < 0x90:
        return 1, 2 * (first & 0x0F)
    if first < 0xA0:
        return 1, first & 0x0F
    if first < 0xC0:
        return 1 + (first & 0x1F), 0
    if first in _FIXED:
        return 1 + _FIXED[first], 0
    try:
        if first in _SIZED:
            (size,) = struct.unpack_from(_SIZED[first], data, position + 1)
            return 1 + struct.calcsize(_SIZED[first]) + size, 0
        if first in _COUNTED:
            layout, per_element = _COUNTED[first]
            (count,) = struct.unpack_from(layout, data, position + 1)
            return 1 + struct.calcsize(layout), count * per_element
    except struct.error as error:
        raise _Refused("it ends too early") from error
    raise _Refused("it holds an extension type")
