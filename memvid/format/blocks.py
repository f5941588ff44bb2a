"""Blocks as values: slot, draft, block header, and entry of a block list.

Owns the canonical block header and so the block id. Knows nothing of files, frames or codecs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NoReturn

import msgpack
from blake3 import blake3

from ..errors import CorruptBundle, InvalidDraft, StoreError
from ..limits import (
    MAX_BLOCK_HEADER_BYTES,
    MAX_DIM,
    MAX_RECORDS_AT_ONE_POSITION,
    MAX_SLOT_BYTES,
    MAX_SLOT_DIMS,
    MAX_SLOT_KIND_CHARS,
    MAX_SLOT_NAME_CHARS,
    MAX_SLOTS,
    MAX_TOKENS,
)
from .packing import unpack

BLOCK_TOKENS: Final = 256
"""Tokens of a full span. mlx-lm's KVCache grows in this step, so a block never straddles a reallocation."""

TOKEN_BYTES: Final = 4
"""A token id is a little-endian uint32."""

ID_BYTES: Final = 32
"""BLAKE3-256."""

BlockKind = Literal["span", "state"]
BLOCK_KINDS: Final[tuple[BlockKind, ...]] = ("span", "state")

DTYPE_BYTES: Final = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
}
"""The closed list of element types, with the bytes of one element."""

_DOMAIN: Final = "torpor.block/1"


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """A slot: its name within the block, its kind (how to use it), and its array's dtype and shape."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _require_spec(self)
        object.__setattr__(self, "size_bytes", _size_bytes(self.dtype, self.shape))

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


def _size_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    size = DTYPE_BYTES[dtype]  # exact integers: no product can wrap
    for dim in shape:
        size *= dim
    return size


def _require_spec(spec: SlotSpec) -> None:
    for label, text, most in (("name", spec.name, MAX_SLOT_NAME_CHARS), ("kind", spec.kind, MAX_SLOT_KIND_CHARS)):
        if not isinstance(text, str) or not 1 <= len(text) <= most or not text.isascii() or not text.isprintable():
            raise InvalidDraft(f"a slot's {label} must be 1 to {most} printable ASCII characters.", field=label)
    if not isinstance(spec.dtype, str) or spec.dtype not in DTYPE_BYTES:
        raise InvalidDraft(
            f"slot {spec.name}: the dtype {str(spec.dtype)[:40]!r} is not one of the format's.", slot=spec.name
        )
    shape: Any = spec.shape
    if not isinstance(shape, tuple) or len(shape) > MAX_SLOT_DIMS:
        raise InvalidDraft(f"slot {spec.name}: a shape is a tuple of at most {MAX_SLOT_DIMS} sizes.", slot=spec.name)
    if not all(type(dim) is int and 0 <= dim <= MAX_DIM for dim in shape):
        raise InvalidDraft(f"slot {spec.name}: each size of a shape is 0 to {MAX_DIM}.", slot=spec.name)
    if _size_bytes(spec.dtype, shape) > MAX_SLOT_BYTES:
        raise InvalidDraft(
            f"slot {spec.name}: {shape} {spec.dtype} is more than {MAX_SLOT_BYTES} bytes.", slot=spec.name
        )


@functools.lru_cache(maxsize=16384)
def _stored_spec(name: str, kind: str, dtype: str, shape: tuple[int, ...]) -> SlotSpec:
    """The same few specs stand in every block of a session: checked once, then shared."""
    return SlotSpec(name, kind, dtype, shape)


@dataclass(frozen=True, slots=True)
class SlotDraft:
    """A slot to be written. The buffers, in order, are its raw bytes; they are only borrowed."""

    spec: SlotSpec
    buffers: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class BlockDraft:
    """A block to be written: the KV of the tokens [start, start + n), or ("state") a whole-state record at `start`."""

    kind: BlockKind
    start: int
    tokens: bytes
    slots: Sequence[SlotDraft]

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """The canonical header: all facts of the block, and the digests of its bytes. The block id is its digest.

    `parent` is the id of the span block that ends where this block starts; None at the start of a session.
    """

    kind: BlockKind
    identity_digest: bytes
    start: int
    tokens: bytes
    parent: bytes | None
    slots: tuple[tuple[SlotSpec, bytes], ...]

    @property
    def token_count(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def raw_bytes(self) -> int:
        return sum(spec.size_bytes for spec, _ in self.slots)

    @property
    def said(self) -> tuple[object, ...]:
        """What it says of the block's place, to be compared with `BlockEntry.said_with`."""
        return self.kind, self.start, self.token_count, self.raw_bytes, self.parent, self.identity_digest

    def encode(self) -> bytes:
        """The one canonical encoding; its BLAKE3-256 is the block id."""
        slots = [[spec.name, spec.kind, spec.dtype, list(spec.shape), digest] for spec, digest in self.slots]
        document = [_DOMAIN, self.kind, self.identity_digest, self.start, self.tokens, self.parent, slots]
        return bytes(msgpack.packb(document, use_bin_type=True))

    @classmethod
    def decode(cls, data: bytes | memoryview) -> BlockHeader:
        """Decode a header; refuse all bytes that `encode` does not write.

        Raises:
            CorruptBundle, LimitExceeded
        """
        document = unpack(data, max_bytes=MAX_BLOCK_HEADER_BYTES, what="block header")
        if not isinstance(document, list) or len(document) != 7 or document[0] != _DOMAIN:
            _refuse("it is not a block header of this format version")
        _, kind, identity_digest, start, tokens, parent, slots = document
        if not isinstance(slots, list) or len(slots) > MAX_SLOTS:
            _refuse(f"its slots are not a list of at most {MAX_SLOTS}")
        header = cls(kind, identity_digest, start, tokens, parent, tuple(map(_decode_slot, slots)))
        header.require_valid()
        return header

    def require_valid(self) -> None:
        if self.kind not in BLOCK_KINDS:
            _refuse(f"its kind is {str(self.kind)[:40]!r}")
        if not _is_id(self.identity_digest) or not (self.parent is None or _is_id(self.parent)):
            _refuse(f"a digest in it does not have {ID_BYTES} bytes")
        if type(self.start) is not int or not 0 <= self.start <= MAX_TOKENS:
            _refuse("its start is outside the limit")
        if not isinstance(self.tokens, bytes) or len(self.tokens) % TOKEN_BYTES:
            _refuse("its tokens are not whole uint32 values")
        if (self.kind == "span") != (1 <= self.token_count <= BLOCK_TOKENS) or (self.kind == "state" and self.tokens):
            _refuse(f"a span has 1 to {BLOCK_TOKENS} tokens and a state record none; it has {self.token_count}")
        if (self.parent is None) != (self.start == 0):
            _refuse("exactly the blocks at position 0 have no parent")
        if len(self.slots) > MAX_SLOTS or len({spec.name for spec, _ in self.slots}) != len(self.slots):
            _refuse("it has too many slots, or two of one name")


def _decode_slot(item: Any) -> tuple[SlotSpec, bytes]:
    if not isinstance(item, list) or len(item) != 5:
        _refuse("a slot in it is malformed")
    name, kind, dtype, shape, digest = item
    if not isinstance(shape, list) or not _is_id(digest):
        _refuse("a slot in it is malformed")
    if not {int}.issuperset(map(type, shape)):  # True and 4.0 would hit the cached spec of 1 and 4
        _refuse("a size of a shape in it is no integer")
    try:
        return _stored_spec(name, kind, dtype, tuple(shape)), digest
    except StoreError as error:
        _refuse(error.message.rstrip("."))
    except TypeError:  # an unhashable value where text or a number belongs
        _refuse("a slot in it is malformed")


def _is_id(value: Any) -> bool:
    return isinstance(value, bytes) and len(value) == ID_BYTES


def _refuse(why: str) -> NoReturn:
    raise CorruptBundle(f"a block header is not valid: {why}.", part="block header")


def block_id(encoded_header: bytes | memoryview) -> bytes:
    return blake3(encoded_header).digest()


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """A block as a manifest lists it, without its place: a frame may be moved. `raw_bytes` is the sum of its raw
    slots."""

    id: bytes
    kind: BlockKind
    start: int
    token_count: int
    raw_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.token_count

    def said_with(self, parent: bytes | None, identity_digest: bytes) -> tuple[object, ...]:
        """What a manifest of this identity says of the block, which follows `parent` (threats 5 and 6)."""
        return self.kind, self.start, self.token_count, self.raw_bytes, parent, identity_digest


def most_blocks(token_count: int) -> int:
    """How many blocks a session of so many tokens can have: its spans, and a record at the end of each."""
    spans = -(-token_count // BLOCK_TOKENS)
    return spans + (spans + 1) * MAX_RECORDS_AT_ONE_POSITION


def require_chain(entries: Sequence[BlockEntry], token_count: int) -> str | None:
    """The fault of a block list as a chain, or None. A chain has spans back to back from 0, all full but the last, and
    at most one state record at the end of each span."""
    position, complete, records = 0, True, 0
    for entry in entries:
        if entry.start != position:
            return f"a {entry.kind} block starts at token {entry.start}, but the blocks before it end at {position}"
        if entry.kind == "state":
            records += 1
            if entry.token_count:
                return "a state record claims tokens"
            if records > MAX_RECORDS_AT_ONE_POSITION:
                return f"several state records are of the position behind token {position}"
            continue
        if not complete:
            return f"a span follows one of fewer than {BLOCK_TOKENS} tokens"
        if not 1 <= entry.token_count <= BLOCK_TOKENS:
            return f"a span has {entry.token_count} tokens"
        complete = entry.token_count == BLOCK_TOKENS
        position, records = position + entry.token_count, 0
    if position != token_count:
        return f"the spans hold {position} tokens, but the session says {token_count}"
    return None


def span_parents(entries: Sequence[BlockEntry]) -> dict[bytes, bytes | None]:
    """For each block of a chain, the id of the span before it: the parent in its header."""
    parents: dict[bytes, bytes | None] = {}
    span: bytes | None = None
    for entry in entries:
        parents[entry.id] = span
        if entry.kind == "span":
            span = entry.id
    return parents
