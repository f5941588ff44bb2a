"""Frames: a length of four bytes, little-endian, and one msgpack map of that many bytes.

Cuts a byte stream into maps, and back. Every limit is checked before memory is spent. Does no I/O, and does not know
the meaning of the maps.

Rules: a prefix above the limit is refused by its four bytes alone. After any error the decoder is dead: the rest of the
stream cannot be trusted. Frames before the fault are still handed out. Arrays come out as tuples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

import msgpack

from ..errors import FrameTooLarge, LocalProtocolError, MalformedFrame, TruncatedFrame
from ..limits import MAX_ARRAY_ITEMS, FrameLimits
from .shape import require_bounded, require_bounded_in_pieces

PREFIX_BYTES = 4

Frame = dict[str, Any]
Result = TypeVar("Result")
Pieces = Generator[None, None, Result]

_ITEMS_AT_ONCE: Final = 128
_PLAIN_ITEMS_AT_ONCE: Final = 4096
"""Items of an array that one piece of work packs or builds: about a millisecond. Plain ones are not maps."""

_LEVELS_TAKEN_APART: Final = 2
"""A message, and its parameters or result."""


def whole(pieces: Pieces[Result]) -> Result:
    """Do all pieces of some work, and give its result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: Result = end.value
            return result


def encode_frame(message: Frame, *, max_frame_bytes: int) -> bytes:
    """Return prefix and payload. Raises LocalProtocolError: the message cannot be expressed, or is larger than the peer
    accepts (`size_bytes`)."""
    with _expressible(message):
        payload = msgpack.packb(message, use_bin_type=True)
    return _framed([payload], max_frame_bytes)


def encode_in_pieces(message: Frame, *, max_frame_bytes: int) -> Pieces[bytes]:
    """As `encode_frame`, for a large message: yields behind each piece of the work."""
    with _expressible(message):
        payload = yield from _packed(message, msgpack.Packer(use_bin_type=True), _LEVELS_TAKEN_APART)
    return _framed(payload, max_frame_bytes)


@contextlib.contextmanager
def _expressible(message: Frame) -> Iterator[None]:
    try:
        yield
    except OverflowError as error:
        place = next(_places_of_large(message), "")
        raise LocalProtocolError(
            f"This message cannot be sent: {place or 'one of its numbers'} has more than 64 bits, and an integer on the"
            " socket has at most so many. Give it as a text.",
            field=place,
        ) from error
    except (ValueError, TypeError) as error:
        raise LocalProtocolError(f"This message cannot be sent: {error}.") from error


def _places_of_large(value: object, place: str = "") -> Iterator[str]:
    """Where a message has integers that msgpack has no form for: `params.tools.0.parameters.maximum`."""
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in inner:
        yield from _places_of_large(item, f"{place}.{key}".removeprefix("."))
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        yield place


def _framed(payload: Sequence[bytes], max_frame_bytes: int) -> bytes:
    size_bytes = sum(map(len, payload))
    if size_bytes > max_frame_bytes:
        raise LocalProtocolError(
            f"This message has {size_bytes} bytes; a frame holds {max_frame_bytes}. Send it in smaller parts.",
            size_bytes=size_bytes,
            limit_bytes=max_frame_bytes,
        )
    return b"".join([size_bytes.to_bytes(PREFIX_BYTES, "little"), *payload])


def _packed(value: Any, packer: msgpack.Packer, levels: int) -> Pieces[list[bytes]]:
    """A value as msgpack. levels: how far maps are taken apart, so that long arrays in them are packed in pieces."""
    if isinstance(value, dict) and levels:
        parts = [packer.pack_map_header(len(value))]
        for key, item in value.items():
            parts.append(packer.pack(key))
            parts += yield from _packed(item, packer, levels - 1)
        return parts
    if isinstance(value, (list, tuple)) and len(value) > _ITEMS_AT_ONCE:
        parts = [packer.pack_array_header(len(value))]
        at_once = _ITEMS_AT_ONCE if isinstance(value[0], dict) else _PLAIN_ITEMS_AT_ONCE
        for start in range(0, len(value), at_once):
            parts += map(packer.pack, value[start : start + at_once])
            yield
        return parts
    return [packer.pack(value)]


class FrameDecoder:
    """Turns the bytes of one direction into maps.

    Call `feed` with received bytes, then `next_frame` until it returns None. Holds at most one incomplete frame and the
    last bytes fed.
    """

    def __init__(self, limits: FrameLimits) -> None:
        self._limits = limits
        self._buffer = bytearray()
        self._dead = False

    @property
    def waiting_bytes(self) -> int:
        """Bytes of an incomplete frame; 0 between frames."""
        return len(self._buffer)

    @property
    def next_frame_bytes(self) -> int:
        """Size of the frame that has begun, with its prefix; 0 before the prefix is there, or if it will be refused."""
        if len(self._buffer) < PREFIX_BYTES:
            return 0
        size = int.from_bytes(self._buffer[:PREFIX_BYTES], "little")
        return PREFIX_BYTES + size if size <= self._limits.max_frame_bytes else 0

    @property
    def is_frame_whole(self) -> bool:
        """Whether all of the next frame is there."""
        return 0 < self.next_frame_bytes <= len(self._buffer)

    def feed(self, data: bytes) -> None:
        """Take bytes; they are copied. Does nothing after an error."""
        if not self._dead:
            self._buffer += data

    def next_frame(self) -> Frame | None:
        """Return the next map, or None until more bytes are fed. Raises FrameTooLarge, MalformedFrame: the stream is
        broken; so does every later call."""
        with self._dead_if_broken():
            payload = self._cut()
            return None if payload is None else _decode(payload, self._limits.max_values)

    def next_frame_in_pieces(self) -> Pieces[Frame | None]:
        """As `next_frame`, for a large frame: yields behind each piece of the work."""
        with self._dead_if_broken():
            payload = self._cut()
            return None if payload is None else (yield from _decode_in_pieces(payload, self._limits.max_values))

    def require_empty(self) -> None:
        """Check that the stream did not end inside a frame. Raises TruncatedFrame: with `received_bytes`."""
        if self._buffer:
            raise TruncatedFrame(
                f"The connection ended inside a frame, after {len(self._buffer)} bytes of it.",
                received_bytes=len(self._buffer),
            )

    @contextlib.contextmanager
    def _dead_if_broken(self) -> Iterator[None]:
        if self._dead:
            raise MalformedFrame("This stream was given up after a broken frame. Open a new connection.")
        try:
            yield
        except (FrameTooLarge, MalformedFrame):
            self._dead = True
            self._buffer = bytearray()
            raise

    def _cut(self) -> bytes | None:
        if len(self._buffer) < PREFIX_BYTES:
            return None
        size = int.from_bytes(self._buffer[:PREFIX_BYTES], "little")
        if size > self._limits.max_frame_bytes:
            raise FrameTooLarge(
                f"A frame announces {size} bytes; at most {self._limits.max_frame_bytes} are taken."
                " Send the work in smaller parts.",
                size_bytes=size,
                limit_bytes=self._limits.max_frame_bytes,
            )
        end = PREFIX_BYTES + size
        if len(self._buffer) < end:
            return None
        payload = bytes(memoryview(self._buffer)[PREFIX_BYTES:end])
        del self._buffer[:end]
        return payload


def _decode(payload: bytes, max_values: int) -> Frame:
    require_bounded(payload, max_values=max_values)
    with _readable():
        message = msgpack.unpackb(payload, **_READING)
    return _require_map(message)


def _decode_in_pieces(payload: bytes, max_values: int) -> Pieces[Frame]:
    yield from require_bounded_in_pieces(payload, max_values=max_values)
    with _readable():
        unpacker = msgpack.Unpacker(max_buffer_size=len(payload), **_READING)
        unpacker.feed(payload)
        message = yield from _unpacked(payload, unpacker, _LEVELS_TAKEN_APART)
    return _require_map(message)


def _unpacked(payload: bytes, unpacker: msgpack.Unpacker, levels: int) -> Pieces[Any]:
    """The next value. levels: how far maps are taken apart, so that long arrays in them are built in pieces. The
    lengths were checked before."""
    tag = payload[unpacker.tell()]
    if levels and (0x80 <= tag <= 0x8F or tag in (0xDE, 0xDF)):
        pairs = []
        for _ in range(unpacker.read_map_header()):
            key = unpacker.unpack()
            pairs.append((key, (yield from _unpacked(payload, unpacker, levels - 1))))
        return _require_plain_map(pairs)
    if tag not in (0xDC, 0xDD):
        return unpacker.unpack()
    items: list[Any] = []
    count = unpacker.read_array_header()
    while len(items) < count:
        at_once = _ITEMS_AT_ONCE if not items or isinstance(items[-1], dict) else _PLAIN_ITEMS_AT_ONCE
        items += islice(unpacker, min(at_once, count - len(items)))
        yield
    return tuple(items)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedFrame(f"A frame's bytes are not msgpack as this protocol uses it: {error}.") from error


def _require_map(message: Any) -> Frame:
    if not isinstance(message, dict):
        raise MalformedFrame("A frame holds something other than a map. Send one msgpack map for each frame.")
    return message


def _require_plain_map(pairs: list[tuple[Any, Any]]) -> Frame:
    """Build a map. A repeated key is refused: two readers could see two messages (msgpack keeps the last)."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a map repeats a key")
    if not all(isinstance(key, str) for key in result):
        raise ValueError("a map has a key that is not text")
    return result


_READING: Final[dict[str, Any]] = {
    "raw": False,
    "use_list": False,
    "strict_map_key": True,
    "object_pairs_hook": _require_plain_map,
    "max_array_len": MAX_ARRAY_ITEMS,
    "max_map_len": MAX_ARRAY_ITEMS,
}
