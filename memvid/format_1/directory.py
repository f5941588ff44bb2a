"""The directory of a bundle's file of format 1: the frames in it. Its holders and places are checked, and not used."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from blake3 import blake3

from ..errors import CorruptBundle, StoreError
from ..format.blocks import ID_BYTES
from ..format.layout import ALIGNMENT, PREFIX_BYTES, Frame
from ..format.packing import unpack
from ..format.sealing import HEADER_BYTES
from ..limits import MAX_BLOCKS, MAX_DIRECTORY_BYTES, MAX_FRAME_BYTES, MAX_FRAMES, MAX_HOLDERS

_DOMAIN: Final = "torpor.directory/1"
_KEYS: Final = {"frames", "holders", "places"}
_FRAME: Final = struct.Struct("<32sQQII")  # block id, offset, frame bytes, head bytes, zero
_PLACE: Final = struct.Struct("<I")  # 0: a frame of this file, n: n-th holder


@dataclass(frozen=True, slots=True)
class Directory:
    """`frames` in file order; `holders` in the order of first use; `places` for each block of the manifest."""

    frames: tuple[Frame, ...]
    holders: tuple[bytes, ...]
    places: tuple[int, ...]


def digest_of(encoded: bytes) -> bytes:
    """BLAKE3-256 of an encoded directory, as the trailer holds it."""
    return blake3(encoded).digest()


def decode_directory(data: bytes, frames_end: int, path: str) -> Directory:
    """Decode a directory whose digest has been compared; refuse all bytes that `encode` does not write.

    `frames_end` is where the file's frames must end: they fill it from the header on, in order, without a gap.

    Raises:
        CorruptBundle
    """
    try:
        document = unpack(data, max_bytes=MAX_DIRECTORY_BYTES, what="directory")
    except StoreError as error:
        _refuse(path, error.message.rstrip("."))
    if not isinstance(document, list) or len(document) != 2 or document[0] != _DOMAIN:
        _refuse(path, "it is not a directory of this format version")
    fields = document[1]
    if not isinstance(fields, dict) or fields.keys() != _KEYS:
        _refuse(path, "its fields are not those of this format version")
    lines = _bytes_of(fields["frames"], _FRAME.size, MAX_FRAMES, path)
    ids = _bytes_of(fields["holders"], ID_BYTES, MAX_HOLDERS, path)
    numbers = _bytes_of(fields["places"], _PLACE.size, MAX_BLOCKS, path)
    frames = _decode_frames(lines, frames_end, path)
    holders = tuple(ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES))
    places = tuple(number for (number,) in _PLACE.iter_unpack(numbers))
    _require_holders_in_order(holders, places, path)
    return Directory(frames, holders, places)


def _decode_frames(lines: bytes, frames_end: int, path: str) -> tuple[Frame, ...]:
    frames = []
    offset = HEADER_BYTES
    for block_id, start, frame_bytes, head_bytes, zero in _FRAME.iter_unpack(lines):
        if start != offset:
            _refuse(path, f"a frame is said to be at {start} instead of {offset}")
        if zero or frame_bytes > MAX_FRAME_BYTES or not PREFIX_BYTES <= head_bytes <= frame_bytes:
            _refuse(path, "a line of it is outside its limits")
        if frame_bytes % ALIGNMENT or head_bytes % ALIGNMENT:
            _refuse(path, "a line of it is not aligned")
        offset += frame_bytes
        frames.append(Frame(block_id, start, frame_bytes, head_bytes))
    if offset != frames_end:
        _refuse(path, f"the frames end at {offset}, but the manifest begins at {frames_end}")
    if len({frame.id for frame in frames}) != len(frames):
        _refuse(path, "it has two frames of one block")
    return tuple(frames)


def _require_holders_in_order(holders: Sequence[bytes], places: Sequence[int], path: str) -> None:
    used = tuple(dict.fromkeys(place for place in places if place))
    if used != tuple(range(1, len(holders) + 1)) or len(set(holders)) != len(holders):
        _refuse(path, "its other bundles are not each named once, in the order of use")


def _bytes_of(value: Any, step: int, most: int, path: str) -> bytes:
    if not isinstance(value, bytes) or len(value) % step or len(value) > most * step:
        _refuse(path, "a list in it has a wrong length")
    return value


def _refuse(path: str, why: str) -> NoReturn:
    raise CorruptBundle(f"{path}: the directory is not valid: {why}.", path=path, part="directory")
