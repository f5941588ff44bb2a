"""The places of blocks: the frames in one file, and the holders of a manifest's other blocks.

Owns the directory's encoding and its agreement with file and manifest. The bundle id does not cover it: a file may be
rewritten with other frames, and its bundle stays the same. Knows nothing of the content of blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from blake3 import blake3

from ..errors import CorruptBundle, LimitExceeded, StoreError
from ..limits import MAX_BLOCKS, MAX_DIRECTORY_BYTES, MAX_FRAME_BYTES, MAX_FRAMES, MAX_HOLDERS
from .blocks import ID_BYTES, BlockEntry
from .layout import ALIGNMENT, HEADER_BYTES, PREFIX_BYTES, TRAILER_BYTES
from .packing import pack, unpack

_DOMAIN: Final = "torpor.directory/1"
_KEYS: Final = {"frames", "holders", "places"}
_FRAME: Final = struct.Struct("<32sQQII")  # block id, offset, frame bytes, head bytes, zero
_PLACE: Final = struct.Struct("<I")  # 0: a frame of this file, n: n-th holder


@dataclass(frozen=True, slots=True)
class Frame:
    """One block's frame in a file. `offset`, `frame_bytes` and `head_bytes` are in bytes."""

    id: bytes
    offset: int
    frame_bytes: int
    head_bytes: int


@dataclass(frozen=True, slots=True)
class Directory:
    """`frames` in file order; `holders` in the order of first use; `places` for each block of the manifest."""

    frames: tuple[Frame, ...]
    holders: tuple[bytes, ...]
    places: tuple[int, ...]

    @classmethod
    def of(cls, frames: Iterable[Frame], blocks: Sequence[BlockEntry], holders: Mapping[bytes, bytes]) -> Directory:
        """The directory of a file with these frames, for a manifest with these blocks.

        `holders` gives the bundle of each block that has no frame here.
        """
        here = tuple(frames)
        own = {frame.id for frame in here}
        numbers: dict[bytes, int] = {}
        places = []
        for entry in blocks:
            if entry.id in own:
                places.append(0)
            else:
                places.append(numbers.setdefault(holders[entry.id], len(numbers) + 1))
        return cls(here, tuple(numbers), tuple(places))

    def holder_of(self, position: int) -> bytes | None:
        """The bundle that holds the manifest's block at `position`; None for this file."""
        place = self.places[position]
        return None if place == 0 else self.holders[place - 1]

    def encode(self) -> bytes:
        """The canonical bytes. Raises LimitExceeded."""
        if len(self.frames) > MAX_FRAMES or len(self.holders) > MAX_HOLDERS or len(self.places) > MAX_BLOCKS:
            raise LimitExceeded(
                f"a file holds at most {MAX_FRAMES} frames and refers to at most {MAX_HOLDERS} others.",
                limit=MAX_FRAMES,
                size=len(self.frames),
            )
        document = {
            "frames": b"".join(
                _FRAME.pack(frame.id, frame.offset, frame.frame_bytes, frame.head_bytes, 0) for frame in self.frames
            ),
            "holders": b"".join(self.holders),
            "places": b"".join(map(_PLACE.pack, self.places)),
        }
        return pack([_DOMAIN, document], "directory")


def file_bytes_with(
    frames: Iterable[Frame], blocks: Sequence[BlockEntry], holders: Mapping[bytes, bytes], manifest_bytes: int
) -> int:
    """The size of a bundle's file with these frames, in bytes, before it is written. Raises LimitExceeded."""
    here = tuple(frames)
    directory = Directory.of(here, blocks, holders).encode()
    return HEADER_BYTES + sum(frame.frame_bytes for frame in here) + manifest_bytes + len(directory) + TRAILER_BYTES


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


def require_covers(directory: Directory, blocks: Sequence[BlockEntry], bundle_id: bytes, path: str) -> None:
    """Refuse a directory that lacks the place of one of the manifest's blocks."""
    if len(directory.places) != len(blocks):
        _refuse(path, f"it places {len(directory.places)} blocks, but the manifest has {len(blocks)}")
    if bundle_id in directory.holders:
        _refuse(path, "it names its own bundle as another holder")
    here = {frame.id for frame in directory.frames}
    for entry, place in zip(blocks, directory.places, strict=True):
        if (place == 0) != (entry.id in here):
            _refuse(path, f"the block at token {entry.start} is not where it says")


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
