"""What is fuzzed: for each part of the store the seeds, the change of an input, and the check of one execution.

A check returns how the input was taken ("sound", or what it found), raises a StoreError for a refusal, and raises
anything else, `Broken` above all, for a fault. What is accepted must hold a second property, worked out without the
code that accepted it wherever that is possible.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from blake3 import blake3
from torpor.memvid.disk.paths import closing_fd
from torpor.memvid.errors import StoreError
from torpor.memvid.format.blocks import DTYPE_BYTES, BlockHeader
from torpor.memvid.format.codecs import PLANES_CODE, decode_chunks, decode_into
from torpor.memvid.format.manifest import decode_manifest, read_manifest
from torpor.memvid.format.pack import PackFile, decode_directory, encode_directory
from torpor.memvid.format.packing import pack, unpack
from torpor.memvid.limits import MAX_BLOCK_HEADER_BYTES, MAX_SESSION_MAP_BYTES
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making
from torpor.tests.memvid.fuzz import pack_file, zstd_frames
from torpor.tests.memvid.fuzz.diary_target import TARGETS as DIARY_TARGETS
from torpor.tests.memvid.fuzz.heads_target import TARGETS as HEADS_TARGETS
from torpor.tests.memvid.fuzz.journal_target import TARGETS as JOURNAL_TARGETS
from torpor.tests.memvid.fuzz.marks_target import TARGETS as MARKS_TARGETS
from torpor.tests.memvid.fuzz.mutation import change_bytes, change_document, change_int, parse
from torpor.tests.memvid.fuzz.outside_targets import TARGETS as OUTSIDE_TARGETS
from torpor.tests.memvid.fuzz.store_targets import TARGETS as STORE_TARGETS
from torpor.tests.memvid.fuzz.target import MAX_SLOT_BYTES, SMALL, SOUND, Target, again, require, same_everywhere


def samples(folder: Path) -> tuple[list[bytes], list[bytes]]:
    """Small files of every kind: packs (and exported files) of one span, several, compressed, stripped; manifests'
    files."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as path,
        same_everywhere(),
        Store.open(path, writable=True) as store,
    ):
        bare = SessionUri("work", "bare")
        store_making.sleep(store, 5, **SMALL)
        long = store_making.sleep(store, 258, uri=store_making.OTHER_URI, **SMALL)
        store_making.sleep(store, 262, uri=store_making.OTHER_URI, before=long, **SMALL)
        store_making.sleep_compressed(store, SessionUri("work", "packed"))
        store_making.sleep(store, 0, uri=SessionUri("work", "empty"))
        store_making.sleep(store, 3, uri=SessionUri("work", "wide"), layers=3, heads=2, dim=8, compressed=True)
        store_making.sleep(store, 7, uri=bare, seed=3, **SMALL)
        store.strip(bare)
        exported = Path(path, "..", "exported")
        store.export_session(store_making.OTHER_URI, None, exported)
        packs = [file.read_bytes() for file in (exported, *sorted(Path(path, "packs").glob("*.mvp")))]
        exported.unlink()
        return packs, [file.read_bytes() for file in sorted(Path(path, "versions").glob("*.mvm"))]


class PackingTarget(Target):
    """Canonical msgpack: one document has one encoding."""

    name = "packing"
    max_bytes = 1 << 17

    def seeds(self) -> Iterable[bytes]:
        yield from (pack(value, "seed") for value in (None, [], {"a": [1, -1, 1.5, "x", b"y", True]}, [[[{"k": [0]}]]]))
        for last in (["a", {"b": 2}], "x" * 40, [0] * 20, {f"key {n}": b"" for n in range(17)}):
            yield pack([bytes(66_000), last], "seed")  # large enough to be counted before it is built

    def change(self, data: bytes, rng: Random) -> bytes:
        return change_document(data, rng)

    def check(self, data: bytes) -> str:
        value = unpack(data, max_bytes=MAX_SESSION_MAP_BYTES, what="input")
        require(again(lambda: pack(value, "input")) == data, "an accepted document is packed otherwise")
        return SOUND


class ManifestTarget(Target):
    """A manifest's file under the name that its content gives it."""

    name = "manifest"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._path = str(folder / "input.mvm")

    def seeds(self) -> Iterable[bytes]:
        return samples(self.folder)[1]

    def change(self, data: bytes, rng: Random) -> bytes:
        if rng.random() < 0.05:
            return change_bytes(data, rng)
        return pack_file.manifest_file(pack_file.changed_manifest(data[64:], [], rng))

    def check(self, data: bytes) -> str:
        with closing_fd(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)) as fd:
            os.write(fd, data)
            manifest = read_manifest(fd, self._path, blake3(data[64:]).hexdigest())
        require(again(manifest.encode) == data[64:], "an accepted manifest is encoded otherwise")
        require(pack_file.manifest_file(data[64:]) == data, "an accepted file is sealed otherwise")
        require_sane(data[64:])
        return SOUND


def require_sane(data: bytes) -> None:
    """The rules of docs/reference/format.md for a manifest, looked at without the code that accepted it."""
    fields = dict(parse(data)[1])
    numbers = {"version": (1, (1 << 53) - 1), "token_count": (0, 1 << 24), "created_ns": (0, (1 << 63) - 1)}
    for key, (low, high) in numbers.items():
        require(type(fields[key]) is int and low <= fields[key] <= high, f"{key} is outside its limits")
    parent, labels = fields["parent"], dict(fields["session"]).get("labels", [])
    require(parent is None or (isinstance(parent, bytes) and len(parent) == 32), "the parent is no id")
    require(
        re.fullmatch(r"torpor://([A-Za-z0-9][A-Za-z0-9._-]{0,127}/?){2}", fields["uri"]) is not None, "the URI is none"
    )
    require(len(labels) <= 256 and all(type(label) is str and 1 <= len(label) <= 256 for label in labels), "bad labels")
    require(1 <= len(fields["identity"]) <= 64, "the identity has no parts, or too many")
    require(all(type(text) is str for pair in fields["environment"] for text in pair), "the environment is no text")
    require_chain(pack_file.lines_of(data, "blocks", pack_file.LINE), fields["token_count"])


def require_chain(lines: Sequence[tuple[Any, ...]], token_count: int) -> None:
    position, full = 0, True
    for line in lines:
        kind, tokens, start = line[pack_file.KIND], line[pack_file.TOKENS], line[pack_file.START]
        require(kind in (0, 1) and start == position, "a block is not where the ones before it end")
        require(tokens == 0 if kind else full and 1 <= tokens <= 256, "a block has a wrong number of tokens")
        full = full if kind else tokens == 256
        position += tokens
    require(position == token_count, "the tokens do not add up")


class DirectoryTarget(Target):
    """8 bytes of where the frames end, then a directory."""

    name = "directory"

    def seeds(self) -> Iterable[bytes]:
        for data in samples(self.folder)[0]:
            file = pack_file.take_apart(data)
            end = 64 + sum(len(frame.encode()) for frame in file.frames)
            yield end.to_bytes(8, "little") + file.directory

    def change(self, data: bytes, rng: Random) -> bytes:
        file = pack_file.Pack([], b"", data[8:])
        pack_file.change_directory(file, rng)
        end = data[:8]
        with contextlib.suppress(Exception):  # where the change left lines, the frames end where they say
            if rng.random() < 0.8:
                end = (64 + sum(line[2] for line in pack_file.frame_lines(file.directory))).to_bytes(8, "little")
        return end + file.directory

    def check(self, data: bytes) -> str:
        end, encoded = int.from_bytes(data[:8], "little"), data[8:]
        frames = decode_directory(encoded, end, "input")
        require(again(lambda: encode_directory(frames)) == encoded, "an accepted directory is encoded otherwise")
        offset = 64
        stripped_ids = {frame.id for frame in frames if frame.is_stripped}
        for block_id, start, size, head, stripped in pack_file.frame_lines(encoded):
            require(start == offset and stripped in (0, 1), "a frame is not behind the one before")
            require(64 <= head <= size <= 1 << 44 and size % 64 == head % 64 == 0, "a frame has a wrong length")
            require((block_id in stripped_ids) is bool(stripped), "a frame is stripped for one and not the other")
            require(not stripped or head == size, "a stripped frame has slots")
            offset += size
        require(offset == end and len({frame.id for frame in frames}) == len(frames), "bad frames")
        return SOUND


class BlockHeaderTarget(Target):
    name = "block_header"

    def seeds(self) -> Iterable[bytes]:
        return [frame.header for data in samples(self.folder)[0] for frame in pack_file.take_apart(data).frames]

    def change(self, data: bytes, rng: Random) -> bytes:
        return pack_file.change_header(data, rng)

    def check(self, data: bytes) -> str:
        header = BlockHeader.decode(data)
        require(again(header.encode) == data, "an accepted block header is encoded otherwise")
        require(len(data) <= MAX_BLOCK_HEADER_BYTES, "a block header above the limit was accepted")
        slots = parse(data)[6]
        sizes = [pack_file.size_of(listed)[0] for listed in slots]
        require(all(0 <= size <= 1 << 32 for size in sizes), "a slot above the limit was accepted")
        require(sum(sizes) == header.raw_bytes, "the raw bytes do not add up")
        require(all(len(digest) == 32 and len(shape) <= 8 for _, _, _, shape, digest in slots), "a slot is malformed")
        return SOUND


class SlotTarget(Target):
    """A stored slot behind 10 bytes: how many raw bytes it says it has (8), its codec, the bytes of an element (no type
    has elements without any)."""

    name = "slot"
    max_bytes = 1 << 18

    def seeds(self) -> Iterable[bytes]:
        for raw in (b"", b"aa", store_making.COMPRESSIBLE, bytes(5000), bytes(range(256)) * 300, bytes(65_600)):
            yield len(raw).to_bytes(8, "little") + b"\x02\x01" + zstd_frames.planes(raw, 1)
            yield len(raw).to_bytes(8, "little") + b"\x02\x02" + zstd_frames.planes(raw, 2, 1 << 16)

    def change(self, data: bytes, rng: Random) -> bytes:
        data = data.ljust(10, b"\x01")
        size, codec, element, payload = int.from_bytes(data[:8], "little"), data[8], data[9], data[10:]
        codec, payload, new_size, element = zstd_frames.change_slot(codec, payload, size, element or 1, rng)
        size = new_size if rng.random() < 0.9 else change_int(size, 64, rng)
        return (size % (1 << 64)).to_bytes(8, "little") + bytes([codec % 256, element % 256]) + payload

    def check(self, data: bytes) -> str:
        data = data.ljust(10, b"\x00")
        size, codec, element, stored = int.from_bytes(data[:8], "little"), data[8], data[9] or 1, data[10:]
        if codec != PLANES_CODE:
            return "another codec"
        if size > MAX_SLOT_BYTES:
            next(decode_chunks(stored, size, element, "input"))
            return "declares much"
        chunks = b"".join(bytes(chunk) for chunk in decode_chunks(stored, size, element, "input"))
        buffers = [memoryview(bytearray(size // 3)), memoryview(bytearray(size - size // 3))]
        decode_into(stored, buffers, element, "input")
        expected = zstd_frames.raw_of(codec, stored, size, element)
        require(b"".join(buffers) == chunks == expected, "two ways to decompress differ")
        return SOUND


class PackTarget(Target):
    """A whole pack, or an exported file, under the name that it gives itself."""

    name = "pack"
    max_bytes = 1 << 17

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._path = str(folder / "input.mvp")

    def seeds(self) -> Iterable[bytes]:
        return samples(self.folder)[0]

    def change(self, data: bytes, rng: Random) -> bytes:
        return pack_file.change(data, rng)

    def check(self, data: bytes) -> str:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.write(fd, data)
        with contextlib.closing(PackFile(fd, self._path, pack_file.pack_id(data))) as file:
            return check_pack(file, data)


def check_pack(file: PackFile, data: bytes) -> str:
    """Everything that can be read of a file that was accepted, against what the file is by a second opinion."""
    parts = pack_file.take_apart(data)
    require(file.encoded_manifest() == parts.manifest, "another manifest is found")
    if parts.manifest:
        with contextlib.suppress(StoreError):
            manifest = decode_manifest(parts.manifest, file.path)
            require(again(manifest.encode) == parts.manifest, "an accepted manifest is encoded otherwise")
    require(blake3(parts.directory).digest() == file.pack_id, "the directory has another id")
    whole = [frame.id for frame in parts.frames if not frame.is_stripped]
    bare = [frame.id for frame in parts.frames if frame.is_stripped]
    require((whole, bare) == (list(file.frames), list(file.heads)), "other frames are found")
    refusals, unread = 0, False
    for frame in parts.frames:
        try:
            header, _ = file.read_head(frame.id)
            unread |= header.raw_bytes > MAX_SLOT_BYTES
            if frame.is_stripped:
                require(blake3(header.encode()).digest() == frame.id, "a block has another id")
                require(not frame.slots and not frame.tail, "a stripped frame has slots")
            else:
                refusals += not _check_block(file, frame)
        except StoreError:
            refusals += 1
    if refusals:
        return "some blocks refused"
    if unread:
        return "declares much"
    require(parts.encode() == data, "a sound file is encoded otherwise")
    return SOUND


def _check_block(file: PackFile, frame: pack_file.Frame) -> bool:
    header, head = file.read_head(frame.id)
    require(blake3(header.encode()).digest() == frame.id, "a block has another id")
    require(header.encode() == frame.header, "a block header is read otherwise")
    if header.raw_bytes > MAX_SLOT_BYTES:
        return True
    readable = True
    for number, (spec, digest) in enumerate(header.slots):
        raw = bytearray(spec.size_bytes)
        try:
            file.read_slots_into(frame.id, header, head, [(number, [memoryview(raw)])])
        except StoreError:
            readable = False
            continue
        require(blake3(raw).digest() == digest, "a slot's bytes are not those of its digest")
        stored = frame.slots[number]
        second = zstd_frames.raw_of(stored.codec, stored.payload, spec.size_bytes, DTYPE_BYTES[spec.dtype])
        require(second == raw, "a slot is read otherwise")
    padded = any(slot.after.strip(b"\x00") for slot in frame.slots)
    try:
        file.check_block(frame.id)
    except StoreError:
        require(not readable or padded, "a block is refused by the deep check alone")
        return False
    require(readable, "the deep check accepts a block that cannot be read")
    require(not frame.tail, "a frame that its payloads do not fill was accepted")
    require(not padded, "bytes between payloads that are not zero were accepted")
    return True


MEMORY: Final = "/dev/shm"
TARGETS: Final[tuple[type[Target], ...]] = (
    PackingTarget,
    ManifestTarget,
    DirectoryTarget,
    BlockHeaderTarget,
    SlotTarget,
    PackTarget,
    *MARKS_TARGETS,
    *JOURNAL_TARGETS,
    *DIARY_TARGETS,
    *HEADS_TARGETS,
    *STORE_TARGETS,
    *OUTSIDE_TARGETS,
)


@contextlib.contextmanager
def opened(name: str, where: str | None = None) -> Iterator[Target]:
    """A target by name, with a folder of its own in `where`, or in memory, where the system has a place there."""
    kinds = {kind.name: kind for kind in TARGETS}
    memory = MEMORY if os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="torpor-fuzz-", dir=where or memory) as folder:
        yield kinds[name](Path(folder))
