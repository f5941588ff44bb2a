"""A stored version's arrays as numbers, piece by piece, without its model: the slots of its blocks and the identity
tell its caches.

Every byte comes through a `BundleReader`, so it is verified. At most one slot of one block is held at a time, and none
above `MAX_READ_SLOT_BYTES`. Nothing is computed by MLX, so any thread may do this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..memvid.format.blocks import BLOCK_TOKENS, BlockEntry, SlotSpec
from ..memvid.writing.reader import BundleReader
from .errors import MalformedSnapshot
from .figures import sums_bytes
from .kind import RecordShape
from .kinds import kind_named
from .layout import NUMBERS, STATE_KINDS, ToldCache, path_of, told_caches
from .lossy import StoredArray, arranged, expand
from .lossy_kinds import Quantization, cache_kind_of, exact_of, is_beside

MAX_READ_SLOT_BYTES: Final = 256 << 20
"""Of one slot held in memory: a window of 32,768 tokens has half of it."""

MAX_PIECE_ELEMENTS: Final = 16 << 20
"""Of vectors held as numbers: those of 256 tokens in 128 heads of 512. As float64 they have 128 MiB."""

MAX_SUMS_BYTES: Final = 256 << 20
"""Of the sums of one array."""

MAX_HEADS: Final = 1 << 10
"""Of one array: each has figures of its own, however short its vectors are."""

_MAX_NUMBERS_BYTES: Final = 4096

_PIECE_ELEMENTS: Final = 1 << 20
"""Elements of an array without tokens that become numbers at once."""

OnBytes = Callable[[int], None]

_NUMPY: Final = {
    "bool": "?", "uint8": "u1", "int8": "i1", "uint16": "<u2", "int16": "<i2", "float16": "<f2", "uint32": "<u4",
    "int32": "<i4", "float32": "<f4", "uint64": "<u8", "int64": "<i8", "float64": "<f8",
}  # fmt: skip
_FLOATS: Final = frozenset({"float16", "bfloat16", "float32", "float64"})
_QUANTIZED: Final = "kvq/1"
# The kinds with a record of token rows, and the order of rows by their numbers.
_RING: Final = "ring/1"
_CHUNK: Final = "chunk/1"

TOO_LARGE: Final = f"a slot of it has more than {MAX_READ_SLOT_BYTES} bytes"
_UNTOLD_QUANTIZATION: Final = "the identity does not tell its bits and group size"
_UNTOLD_WINDOW: Final = "the identity does not tell its window"
_UNTOLD_TOKENS: Final = "its numbers do not tell which tokens it holds"
TOO_MANY: Final = "it has too many heads or too long vectors"


@dataclass(frozen=True, slots=True)
class CacheArray:
    """One array of a cache.

    slots: its exact slots: one, or three in a quantized cache (integers, scales, biases).
    heads, dim: of its vectors, if it has tokens; else both 0.
    why_not: why it cannot be read as numbers; None if it can.
    """

    path: str
    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    slots: tuple[int, ...]
    in_spans: bool
    heads: int = 0
    dim: int = 0
    why_not: str | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether it is read as vectors of tokens, not as mere elements."""
        return self.in_spans or self.heads > 0


@dataclass(frozen=True, slots=True)
class StoredCache:
    """One cache, by its place. arrays: none for one that its model does not use."""

    path: str
    kind: str
    arrays: tuple[CacheArray, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Vectors `[heads, tokens, dim]` in float32 and the positions of their tokens, ascending."""

    values: NDArray[np.float32]
    positions: NDArray[np.int64]


class StoredVersion:
    """The arrays of one open version.

    Raises, from every method: StoreError for damaged bytes, MalformedSnapshot for blocks that this version of Torpor
    does not write.
    """

    def __init__(self, reader: BundleReader, on_bytes: OnBytes | None = None) -> None:
        """on_bytes: told how many bytes have been read, after each slot; its error ends the reading."""
        self.reader = reader
        self._on_bytes = on_bytes
        self.spans = [entry for entry in reader.entries if entry.kind == "span"]
        states = [entry for entry in reader.entries if entry.kind == "state"]
        self.token_count = reader.manifest.block_tokens
        # A version that ends in a ledger has its last record at an earlier position: that one is left out.
        self.state = states[-1] if states and states[-1].start == self.token_count else None
        # as without a loss: blocks differ in it
        self._span_slots = _exact_slots(_slots_of(reader, self.spans[0])) if self.spans else ()
        self._expected: dict[int, tuple[SlotSpec, ...]] = {}
        self._state_slots = _slots_of(reader, self.state) if self.state else ()
        self._told = told_caches(dict(reader.manifest.identity.parts).get("cache_layout", ""))
        self.caches = tuple(self._caches(self._told))
        self.arrays = {(array.path, array.name): array for cache in self.caches for array in cache.arrays}

    def pieces(self, array: CacheArray) -> Iterator[Piece]:
        """The vectors of an array that has tokens, in the order of their positions."""
        if array.in_spans:
            for entry in self.spans:
                yield self.piece(array, entry)
        elif self.state is not None:
            yield from self._record_pieces(array, self.state)

    def piece(self, array: CacheArray, entry: BlockEntry) -> Piece:
        kept = self._kept_in(entry)
        parts = []
        for index in array.slots:
            numbers = as_numbers(self._exact_bytes(entry, kept[index]), kept[index].exact.dtype)
            parts.append(numbers.reshape(-1, *kept[index].exact.shape[-2:]))
        values = parts[0] if len(parts) == 1 else self._dequantized(array, parts)
        return Piece(values, np.arange(entry.start, entry.end, dtype=np.int64))

    def lossy_tokens(self, array: CacheArray) -> int:
        """How many tokens are in blocks that keep the array with a loss."""
        if not array.in_spans:
            return 0
        lossy = (entry for entry in self.spans if self._kept_in(entry)[array.slots[0]].quantization is not None)
        return sum(entry.token_count for entry in lossy)

    def _kept_in(self, entry: BlockEntry) -> tuple[StoredArray, ...]:
        expected = self._expected.get(entry.token_count)
        if expected is None:  # all blocks but the last have as many tokens
            expected = tuple(_with_tokens(spec, entry.token_count) for spec in self._span_slots)
            self._expected[entry.token_count] = expected
        kept = arranged(_slots_of(self.reader, entry), expected)
        if kept is None:
            raise MalformedSnapshot(
                f"The block at token {entry.start} does not have the slots that the first one has.",
                block_id=entry.id.hex(),
                start=entry.start,
            )
        return kept

    def _exact_bytes(self, entry: BlockEntry, kept: StoredArray) -> bytearray | memoryview:
        parts = [self._read(entry, kept.first_slot + part) for part in range(len(kept.slots))]
        return parts[0] if kept.quantization is None else np.ascontiguousarray(expand(kept, parts)).data.cast("B")

    def elements(self, array: CacheArray) -> Iterator[NDArray[Any]]:
        """The elements of an array without tokens, flat."""
        if self.state is None:
            return
        spec = self._state_slots[array.slots[0]]
        data = memoryview(self._read(self.state, array.slots[0]))
        step = _PIECE_ELEMENTS * spec.element_bytes
        for start in range(0, len(data), step):
            yield as_numbers(data[start : start + step], spec.dtype)

    def state_array(self, name: str) -> CacheArray | None:
        """One of the record's arrays that are no cache's, such as the logits."""
        for index, spec in enumerate(self._state_slots):
            if spec.name == name and spec.kind in STATE_KINDS:
                return CacheArray("", spec.kind, name, spec.dtype, spec.shape, (index,), in_spans=False)
        return None

    def _read(self, entry: BlockEntry, index: int) -> bytearray:
        data = self.reader.read_slot(entry, index)
        if self._on_bytes is not None:
            self._on_bytes(len(data))
        return data

    def _caches(self, told: Mapping[str, ToldCache]) -> Iterator[StoredCache]:
        found: dict[str, list[CacheArray]] = {path: [] for path, cache in told.items() if not cache.in_use}
        kinds = {path: cache.kind for path, cache in told.items()}
        for slots, in_spans in ((self._span_slots, True), (self._state_slots, False)):
            for index, spec in enumerate(slots):
                if spec.kind in STATE_KINDS:
                    continue
                path, kind = _place_of(spec)
                kinds[path] = kind
                arrays = found.setdefault(path, [])
                name = spec.name.removeprefix(f"{path}.")
                if name != NUMBERS and "." not in name:
                    arrays.append(self._array(path, kind, name, index, told.get(path), in_spans=in_spans))
        for path in sorted(found, key=lambda each: [int(part) for part in each.split(".")]):
            yield StoredCache(path, kinds[path], tuple(found[path]))

    def _array(
        self, path: str, kind: str, name: str, index: int, told: ToldCache | None, *, in_spans: bool
    ) -> CacheArray:
        spec = (self._span_slots if in_spans else self._state_slots)[index]
        made = CacheArray(path, kind, name, spec.dtype, spec.shape, (index,), in_spans)
        if spec.size_bytes > MAX_READ_SLOT_BYTES:
            return replace(made, why_not=TOO_LARGE)
        if in_spans:
            return self._span_array(made, told)
        if spec.dtype not in _FLOATS and spec.dtype not in _NUMPY:
            return replace(made, why_not=f"{spec.dtype} is no type that figures are made of")
        if kind in (_RING, _CHUNK) and len(spec.shape) == 4 and spec.dtype in _FLOATS:
            return self._rows_of_tokens(made, told)
        return made

    def _span_array(self, array: CacheArray, told: ToldCache | None) -> CacheArray:
        if len(array.shape) < 3:
            return replace(array, why_not="it has no axis of heads")
        heads = math.prod(array.shape[:-2])
        if array.kind == _QUANTIZED:
            return self._quantized_array(array, heads, told)
        if array.dtype not in _FLOATS:
            return replace(array, why_not=f"{array.dtype} is no type that keys and values are read from")
        return _sized(array, heads, array.shape[-1])

    def _quantized_array(self, array: CacheArray, heads: int, told: ToldCache | None) -> CacheArray:
        named = {spec.name: (index, spec) for index, spec in enumerate(self._span_slots)}
        beside = [named.get(f"{array.path}.{array.name}.{part}") for part in ("scales", "biases")]
        bits, group = (told.settings.get(each, 0) for each in ("bits", "group_size")) if told else (0, 0)
        if not 1 <= bits <= 16 or group < 1:
            return replace(array, why_not=_UNTOLD_QUANTIZATION)
        words = array.shape[-1]
        dim = words * 32 // bits
        groups = [each[1].shape[-1] for each in beside if each is not None and each[1].dtype in _FLOATS]
        if array.dtype != "uint32" or words * 32 % bits or groups != [dim // group] * 2 or dim % group:
            return replace(array, why_not="its parts do not fit the bits and group size that the identity tells")
        slots = (array.slots[0], *(each[0] for each in beside if each is not None))
        return _sized(replace(array, slots=slots), heads, dim)

    def _rows_of_tokens(self, array: CacheArray, told: ToldCache | None) -> CacheArray:
        settings = dict(told.settings) if told else {}
        if array.kind == _RING and not {"keep", "max_size"} <= settings.keys():
            return replace(array, why_not=_UNTOLD_WINDOW)
        numbers, shapes = self._numbers(array.path), self._record_shapes(array.path)
        adapter = kind_named(array.kind)
        are_rows = shapes.keys() == {"k", "v"} and all(len(shape) == 4 and shape[0] == 1 for shape in shapes.values())
        if len(numbers) != adapter.number_count(settings) or not are_rows:
            return replace(array, why_not=_UNTOLD_TOKENS)
        if adapter.problem(settings, self.token_count, RecordShape(numbers, shapes)) is not None:
            return replace(array, why_not=_UNTOLD_TOKENS)
        return _sized(array, array.shape[1], array.shape[-1])

    def _numbers(self, path: str) -> tuple[int, ...]:
        for index, spec in enumerate(self._state_slots):
            if spec.name == f"{path}.{NUMBERS}" and spec.dtype == "int64" and spec.size_bytes <= _MAX_NUMBERS_BYTES:
                assert self.state is not None
                return tuple(map(int, np.frombuffer(self._read(self.state, index), dtype="<i8")))
        return ()

    def _record_shapes(self, path: str) -> dict[str, tuple[int, ...]]:
        prefix = f"{path}."
        return {
            spec.name.removeprefix(prefix): spec.shape
            for spec in self._state_slots
            if spec.name.startswith(prefix) and spec.name != f"{prefix}{NUMBERS}"
        }

    def _record_pieces(self, array: CacheArray, state: BlockEntry) -> Iterator[Piece]:
        rows = array.shape[-2]
        order, positions = self._order(array, rows)
        whole = np.frombuffer(self._read(state, array.slots[0]), dtype=np.uint8)
        held = whole.reshape(array.heads, rows, array.dim * self._state_slots[array.slots[0]].element_bytes)
        for start in range(0, rows, BLOCK_TOKENS):
            chosen = np.ascontiguousarray(held[:, order[start : start + BLOCK_TOKENS]])
            values = as_numbers(chosen.data.cast("B"), array.dtype).reshape(array.heads, chosen.shape[1], array.dim)
            yield Piece(values, positions[start : start + BLOCK_TOKENS])

    def _order(self, array: CacheArray, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The row of each token, in the order of the tokens."""
        offset, second = self._numbers(array.path)
        as_they_lie = np.arange(rows, dtype=np.int64)
        if array.kind == _CHUNK:
            return as_they_lie, as_they_lie + second
        if rows >= offset:
            return as_they_lie, as_they_lie
        keep = self._told[array.path].settings["keep"]
        order = np.concatenate([as_they_lie[:keep], as_they_lie[second:], as_they_lie[keep:second]])
        last = np.arange(offset - (rows - keep), offset, dtype=np.int64)
        return order, np.concatenate([as_they_lie[:keep], last])

    def _dequantized(self, array: CacheArray, parts: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        words, scales, biases = parts
        heads, count, width = words.shape
        bits = width * 32 // array.dim
        group = array.dim // scales.shape[-1]
        stream = np.unpackbits(words.astype("<u4").view(np.uint8), axis=-1, bitorder="little")
        weights = (1 << np.arange(bits)).astype(np.float32)
        integers = stream.reshape(heads, count, array.dim, bits).astype(np.float32) @ weights
        grouped = integers.reshape(heads, count, -1, group)
        values = grouped * scales[..., None].astype(np.float32) + biases[..., None].astype(np.float32)
        return np.asarray(values.reshape(heads, count, array.dim), dtype=np.float32)


def as_numbers(data: bytes | bytearray | memoryview, dtype: str) -> NDArray[Any]:
    """Stored bytes as flat numbers; bfloat16 is widened to float32, which is exact."""
    if dtype == "bfloat16":
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        return np.frombuffer(data, dtype="<f2").astype(np.float32)
    return np.frombuffer(data, dtype=_NUMPY[dtype])


def _slots_of(reader: BundleReader, entry: BlockEntry) -> tuple[SlotSpec, ...]:
    return tuple(spec for spec, _ in reader.read_header(entry).slots)


def _exact_slots(slots: Sequence[SlotSpec]) -> tuple[SlotSpec, ...]:
    """The slots as without a loss."""
    exact = []
    for at, slot in enumerate(slots):
        if Quantization.of_kind(slot.kind) is None:
            exact.append(slot)
        elif not is_beside(slot):
            try:
                exact.append(exact_of(slot, slots[at + 1]))
            except (ValueError, IndexError) as error:
                raise MalformedSnapshot(f"Slot {slot.name} is lossy, and not whole.", slot=slot.name) from error
    return tuple(exact)


def _with_tokens(spec: SlotSpec, token_count: int) -> SlotSpec:
    if len(spec.shape) < 2:
        return spec  # no array of keys or values like this is read
    return SlotSpec(spec.name, spec.kind, spec.dtype, (*spec.shape[:-2], token_count, spec.shape[-1]))


def _place_of(spec: SlotSpec) -> tuple[str, str]:
    try:
        path = path_of(spec)
    except ValueError as error:
        raise MalformedSnapshot(f"The snapshot has a slot that is of no cache: {error}.", slot=spec.name) from error
    return path, cache_kind_of(spec.kind)


def _sized(array: CacheArray, heads: int, dim: int) -> CacheArray:
    """The array as vectors of tokens, if there is memory for them."""
    too_large = heads * BLOCK_TOKENS * dim > MAX_PIECE_ELEMENTS or sums_bytes(heads, dim) > MAX_SUMS_BYTES
    if too_large or heads > MAX_HEADS:
        return replace(array, why_not=TOO_MANY)
    return replace(array, heads=heads, dim=dim)
