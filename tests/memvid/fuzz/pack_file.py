"""A pack, or an exported file, taken apart, changed, and sealed again: digests and ids made right after it, or not.

Written from docs/reference/format.md and not from memvid's code, so that it is a second opinion on what a file means.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from blake3 import blake3
from torpor.tests.memvid.fuzz import zstd_frames
from torpor.tests.memvid.fuzz.mutation import Lines, Pairs, change_bytes, change_document, change_int, pack, parse

HEADER: Final = struct.Struct("<8sIIQ8s")
PREFIX: Final = struct.Struct("<8sIIQ8s")
STORED: Final = struct.Struct("<IIQ32s")
TRAILER: Final = struct.Struct("<8sQQQQ32s")
LINE: Final = struct.Struct("<32sQQHHI")  # of the block list: id, start, raw bytes, tokens, kind, zero
FRAME_LINE: Final = struct.Struct("<32sQQII")  # of the directory: id, offset, frame bytes, head bytes, 1 if stripped
DIRECTORY: Final = "torpor.pack/2"
START, RAW, TOKENS, KIND = 1, 2, 3, 4  # fields of LINE
DIGEST_BYTES: Final = 32
TRAILER_BYTES: Final = TRAILER.size + DIGEST_BYTES
MAX_RAW_BYTES: Final = 1 << 22  # of a slot that the sealer decompresses to find its digest


class Unparsable(Exception):
    """The file is too far from a pack to be taken apart."""


def digest(*parts: bytes) -> bytes:
    hasher = blake3()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def aligned(size: int) -> int:
    return -(-size // 64) * 64


@dataclass
class Slot:
    codec: int
    payload: bytes
    lies: dict[int, int] = field(default_factory=dict)  # field of the storage table's line → value
    after: bytes = b""  # instead of zeros up to the next payload


@dataclass
class Frame:
    id: bytes  # as the file names it before it is sealed again
    header: bytes
    slots: list[Slot]
    lies: dict[int, int] = field(default_factory=dict)  # field of the prefix → value
    tail: bytes = b""  # in the frame, but in no payload of it
    readable: bool = True  # False: the file has no such frame where it says that it has
    is_stripped: bool = False

    def head(self) -> bytes:
        table = b"".join(_stored_line(slot) for slot in self.slots)
        rest = self.header + table
        rest += bytes(aligned(64 + len(rest)) - 64 - len(rest))
        size = 64 + len(rest) + sum(aligned(len(slot.payload)) for slot in self.slots) + len(self.tail)
        fields: list[Any] = [b"MVBLOCK\x00", len(self.header), len(self.slots), size, bytes(8)]
        fixed = pack_fields(PREFIX, fields, self.lies)
        return fixed + digest(fixed, rest) + rest

    def encode(self) -> bytes:
        return self.head() + b"".join(map(_payload, self.slots)) + self.tail


def _stored_line(slot: Slot) -> bytes:
    return pack_fields(STORED, [slot.codec, 0, len(slot.payload), digest(slot.payload)], slot.lies)


def _payload(slot: Slot) -> bytes:
    missing = aligned(len(slot.payload)) - len(slot.payload)
    return slot.payload + (slot.after + bytes(missing))[:missing]


def pack_fields(form: struct.Struct, fields: list[Any], lies: dict[int, int]) -> bytes:
    sizes = {"I": 32, "Q": 64, "H": 16}
    letters = [letter for letter in form.format if letter.isalpha()]
    for at, value in lies.items():
        if isinstance(fields[at], bytes):
            fields[at] = value.to_bytes(32, "little")[: len(fields[at])]
        else:
            fields[at] = value % (1 << sizes[letters[at]])
    return form.pack(*fields)


@dataclass
class Pack:
    frames: list[Frame]
    manifest: bytes
    directory: bytes
    version: int = 2
    manifest_lies: bool = False  # its digest is another one
    directory_kept: bool = False  # its lines were changed on purpose: the sealer leaves them
    header_lies: dict[int, int] = field(default_factory=dict)
    trailer_lies: dict[int, int] = field(default_factory=dict)

    def _section(self) -> bytes:
        """The manifest behind its digest."""
        return digest(self.manifest, b"!" * self.manifest_lies) + self.manifest if self.manifest else b""

    def encode(self) -> bytes:
        """The file, with every length and digest of its outer parts as they should be, but for the lies."""
        body = b"".join(frame.encode() for frame in self.frames)
        offset = 64 + len(body)
        section = self._section()
        size = offset + len(section) + len(self.directory) + TRAILER_BYTES
        fixed = pack_fields(HEADER, [b"\x89MVP\r\n\x1a\n", self.version, 64, size, bytes(8)], self.header_lies)
        header = fixed + digest(fixed)
        lengths = [offset, len(section), len(self.directory), size]
        fields: list[Any] = [b"MVPTAIL\n", *lengths, digest(self.directory)]
        fixed = pack_fields(TRAILER, fields, self.trailer_lies)
        return header + body + section + self.directory + fixed + digest(fixed)


def pack_id(data: bytes) -> bytes:
    """The id that the file gives itself: its name in a store, wherever the bytes are at all."""
    at = len(data) - TRAILER_BYTES + 40
    return (data[at : at + 32] if at >= 0 else b"").ljust(32, b"\x00")


def manifest_file(encoded: bytes) -> bytes:
    """The file of a manifest."""
    fixed = HEADER.pack(b"\x89MVM\r\n\x1a\n", 2, 64, 64 + len(encoded), bytes(8))
    return fixed + digest(fixed) + encoded


def take_apart(data: bytes) -> Pack:
    """Raises Unparsable for what is not nearly a pack. A frame that is none is marked unreadable."""
    try:
        return _take_apart(data)
    except (struct.error, ValueError, TypeError, LookupError, OverflowError) as error:
        raise Unparsable(str(error)) from error


def _take_apart(data: bytes) -> Pack:
    if not TRAILER_BYTES <= len(data) <= 1 << 24:
        raise ValueError("it is too short or too long")
    _, offset, manifest_bytes, directory_bytes, _, _ = TRAILER.unpack_from(data, len(data) - TRAILER_BYTES)
    section = data[offset : offset + manifest_bytes]
    directory = data[offset + manifest_bytes : offset + manifest_bytes + directory_bytes]
    if (len(section), len(directory)) != (manifest_bytes, directory_bytes):
        raise ValueError("manifest or directory is not there")
    frames = [_frame(data, line) for line in frame_lines(directory)]
    version, manifest = HEADER.unpack_from(data)[1], section[DIGEST_BYTES:]
    is_lie = section[:DIGEST_BYTES] != digest(manifest) and bool(section)
    return Pack(frames, manifest, directory, version, is_lie)


def frame_lines(directory: bytes) -> list[tuple[Any, ...]]:
    table = parse(directory)[1]
    return list(FRAME_LINE.iter_unpack(table[: len(table) // FRAME_LINE.size * FRAME_LINE.size]))


def lines_of(document: bytes, key: str, form: struct.Struct) -> list[tuple[Any, ...]]:
    """The lines of a table in a packed manifest."""
    table = dict(parse(document)[1])[key]
    return list(form.iter_unpack(table[: len(table) // form.size * form.size]))


def _frame(data: bytes, line: tuple[Any, ...]) -> Frame:
    try:
        return _readable_frame(data, line)
    except (struct.error, ValueError, OverflowError):
        return Frame(line[0], b"", [], readable=False, is_stripped=bool(line[4]))


def _readable_frame(data: bytes, line: tuple[Any, ...]) -> Frame:
    start = line[1]
    _, header_bytes, count, _, _ = PREFIX.unpack_from(data, start)
    position = start + 64 + header_bytes
    header = data[start + 64 : position]
    if count > 5000:
        raise ValueError("too many slots")
    table = [STORED.unpack_from(data, position + at * STORED.size) for at in range(count)]
    position = start + aligned(64 + header_bytes + count * STORED.size)
    slots = []
    for codec, _, size, _ in table:
        payload = data[position : position + size]
        after = data[position + size : position + aligned(size)]
        position += aligned(size)
        if len(payload) != size:
            raise ValueError("a payload is not there")
        slots.append(Slot(codec, payload, after=after))
    return Frame(line[0], header, slots, tail=data[position : start + line[2]], is_stripped=bool(line[4]))


# --- sealing


def seal(file: Pack, *, ids: bool = True, places: bool = True, facts: bool = True, raw: bool = True) -> bytes:
    """Encode, after making inner references right: raw digests, block ids and parents, places, facts of the lines."""
    renamed: dict[bytes, bytes] = {}
    for frame in file.frames:
        if raw or ids:
            frame.header = _relinked(frame, renamed if ids else {}, raw)
        new_id = digest(frame.header)
        renamed[frame.id] = new_id
        frame.id = new_id
    if file.manifest:
        file.manifest = relisted(file, renamed if ids else {}, facts)
    if places and not file.directory_kept:
        file.directory = directory_of(file.frames)
    return file.encode()


def _relinked(frame: Frame, renamed: dict[bytes, bytes], raw: bool) -> bytes:
    try:
        document = parse(frame.header)
        document[5] = renamed.get(document[5], document[5])
        if raw:
            for listed, slot in zip(document[6], frame.slots, strict=False):
                size, element = size_of(listed)
                data = zstd_frames.raw_of(slot.codec, slot.payload, size, element) if size <= MAX_RAW_BYTES else None
                if data is not None and isinstance(listed[4], bytes):
                    listed[4] = digest(data)
        return pack(document)
    except Exception:  # a header that is no header any more stays as it is
        return frame.header


def relisted(file: Pack, renamed: dict[bytes, bytes], facts: bool) -> bytes:
    try:
        document = parse(file.manifest)
        fields = document[1]
        lines = [list(line) for line in lines_of(file.manifest, "blocks", LINE)]
        headers = {frame.id: frame.header for frame in file.frames}
        for line in lines:
            line[0] = renamed.get(line[0], line[0])
            if facts and line[0] in headers:
                _copy_facts(headers[line[0]], line)
        set_value(fields, "blocks", b"".join(LINE.pack(*line) for line in lines))
        if facts:
            set_value(fields, "token_count", sum(line[TOKENS] for line in lines if line[KIND] == 0))
        return pack(document)
    except Exception:  # a manifest that is no manifest any more stays as it is
        return file.manifest


def directory_of(frames: Sequence[Frame]) -> bytes:
    """A directory for these frames, under the ids that they have."""
    offset, table = 64, b""
    for frame in frames:
        size, head = len(frame.encode()), len(frame.head())
        table += FRAME_LINE.pack(frame.id, offset, size, head, int(size == head and frame.is_stripped))
        offset += size
    return pack([DIRECTORY, table])


def _copy_facts(header: bytes, line: list[Any]) -> None:
    try:
        _, kind, _, start, tokens, _, slots = parse(header)
        line[KIND] = {"span": 0, "state": 1}.get(kind, line[KIND])
        line[TOKENS], line[START] = len(tokens) // 4, start
        line[RAW] = sum(size_of(listed)[0] for listed in slots)
        LINE.pack(*line)
    except Exception:  # no facts in there
        return


WIDTHS: Final = {"bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2, "uint32": 4,
                 "int32": 4, "float32": 4, "uint64": 8, "int64": 8, "float64": 8, "complex64": 8}  # fmt: skip


def size_of(listed: Sequence[Any]) -> tuple[int, int]:
    """(raw bytes, bytes of an element) of a slot as a block header lists it. Raises for what is not that."""
    element = WIDTHS[listed[2]]
    size = element
    for dim in listed[3]:
        size *= dim
    return size, element


def set_value(pairs: Pairs, key: str, value: Any) -> None:
    for at, (name, _) in enumerate(pairs):
        if name == key:
            pairs[at] = (key, value)


# --- changing


def change(data: bytes, rng: Random) -> bytes:
    """A pack with something changed; most of the time sealed again, so that the change gets past the digests."""
    if rng.random() < 0.04:
        return change_bytes(data, rng)
    try:
        file = take_apart(data)
        if not all(frame.readable for frame in file.frames):
            raise Unparsable
    except Unparsable:
        return _resealed_outside(change_bytes(data, rng))
    keep = {name: rng.random() > 0.12 for name in ("ids", "places", "facts", "raw")}
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(_CHANGES)(file, rng)
    return seal(file, **keep)


def _resealed_outside(data: bytes) -> bytes:
    """Header and trailer digests made right over whatever the bytes are."""
    if len(data) < 64 + TRAILER_BYTES:
        return data
    header = data[:16] + len(data).to_bytes(8, "little") + data[24:32]
    fixed = data[-TRAILER_BYTES:-DIGEST_BYTES]
    return header + digest(header) + data[64:-TRAILER_BYTES] + fixed + digest(fixed)


def change_manifest(file: Pack, rng: Random) -> None:
    if not file.manifest:
        if rng.random() < 0.05:
            file.manifest = rng.randbytes(40)
    elif rng.random() < 0.02:
        file.manifest = b""
    elif rng.random() < 0.02:
        file.manifest_lies = True
    else:
        file.manifest = changed_manifest(file.manifest, [frame.id for frame in file.frames], rng)


def changed_manifest(encoded: bytes, ids: Sequence[bytes], rng: Random) -> bytes:
    if rng.random() < 0.5:
        return change_document(encoded, rng)
    try:
        document = parse(encoded)
        table = dict(document[1])["blocks"]
        set_value(document[1], "blocks", Lines(LINE).change(table, rng, lambda: [*ids, bytes(32)]))
        return pack(document)
    except Exception:  # there is no such table: bytes then
        return change_bytes(encoded, rng)


def change_directory(file: Pack, rng: Random) -> None:
    file.directory_kept = rng.random() < 0.8
    if rng.random() < 0.3:
        file.directory = change_document(file.directory, rng)
        return
    try:
        document = parse(file.directory)
        pool = [*(frame.id for frame in file.frames), bytes(32)]
        document[1] = Lines(FRAME_LINE).change(document[1], rng, lambda: pool)
        file.directory = pack(document)
    except Exception:  # there is no such table: bytes then
        file.directory = change_bytes(file.directory, rng)


DIMS: Final = (0, 1, 2, 3, 1 << 16, 1 << 31, (1 << 31) + 1, 1 << 32, (1 << 32) + 1, -1)


def change_header(header: bytes, rng: Random) -> bytes:
    """A block header with something changed: any value, or the shape or digest of a slot."""
    if rng.random() < 0.6:
        return change_document(header, rng)
    try:
        document = parse(header)
        listed = rng.choice(document[6])
        if rng.random() < 0.7:
            listed[3] = [rng.choice(DIMS) for _ in range(rng.choice((0, 1, 2, 3, 4, 8, 9)))]
            listed[2] = rng.choice((listed[2], *WIDTHS))
        else:
            listed[4] = change_bytes(listed[4], rng)
        return pack(document)
    except Exception:  # not a header: bytes then
        return change_bytes(header, rng)


def _change_frame(file: Pack, rng: Random) -> None:
    if not file.frames:
        return
    frame = rng.choice(file.frames)
    choice = rng.randrange(6)
    if choice < 2 or not frame.slots:
        frame.header = change_header(frame.header, rng)
    elif choice == 2:
        rng.choice(frame.slots).payload = change_bytes(rng.choice(frame.slots).payload, rng)
    elif choice == 3:
        _change_codec(frame, rng)
    elif choice == 4:
        slots = frame.slots
        at, other = rng.randrange(len(slots)), rng.randrange(len(slots))
        if rng.random() < 0.5:
            slots[at], slots[other] = slots[other], slots[at]
        elif rng.random() < 0.5:
            del slots[at]
        else:
            slots.insert(at, slots[other])
    elif rng.random() < 0.1:
        frame.is_stripped = not frame.is_stripped
    elif rng.random() < 0.2:
        frame.tail = rng.choice((bytes(64), rng.randbytes(64), bytes(8), b""))
    else:
        slot = rng.choice(frame.slots)
        if rng.random() < 0.3:
            slot.after = rng.randbytes(64)
        else:
            slot.lies[rng.randrange(4)] = change_int(len(slot.payload), 64, rng)


DTYPES: Final = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64"}


def _change_codec(frame: Frame, rng: Random) -> None:
    """Another codec for a slot; its shape then says, most of the time, what the new payload decompresses to."""
    at = rng.randrange(len(frame.slots))
    slot = frame.slots[at]
    try:
        document = parse(frame.header)
        size, element = size_of(document[6][at])
        slot.codec, slot.payload, size, element = zstd_frames.change_slot(slot.codec, slot.payload, size, element, rng)
        if rng.random() < 0.8:
            document[6][at][2:4] = [DTYPES[element], [size // element]]
            frame.header = pack(document)
    except Exception:  # no header to change
        slot.payload = change_bytes(slot.payload, rng)


def _change_order(file: Pack, rng: Random) -> None:
    frames = file.frames
    if not frames:
        return
    at, other = rng.randrange(len(frames)), rng.randrange(len(frames))
    choice = rng.randrange(4)
    if choice == 0:
        frames[at], frames[other] = frames[other], frames[at]
    elif choice == 1:
        del frames[at]
    elif choice == 2:
        twin = frames[other]
        frames.insert(at, Frame(twin.id, twin.header, [Slot(slot.codec, slot.payload) for slot in twin.slots]))
    else:
        frames[at].id = frames[other].id


def _lie(file: Pack, rng: Random) -> None:
    choice = rng.randrange(4)
    if choice == 0:
        file.header_lies[rng.randrange(5)] = change_int(64, 64, rng)
    elif choice == 1:
        file.trailer_lies[rng.randrange(6)] = change_int(len(file.manifest), 64, rng)
    elif choice == 2 and file.frames:
        frame = rng.choice(file.frames)
        frame.lies[rng.randrange(5)] = change_int(len(frame.header), 64, rng)
    else:
        file.version = rng.choice((0, 1, 3, 255, 1 << 31))


_CHANGES: Final = (
    _change_frame,
    _change_frame,
    change_manifest,
    change_manifest,
    change_directory,
    change_directory,
    _change_order,
    _lie,
)
