"""The heads of stored blocks, checked against the model's caches before any memory is taken."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from ..memvid.format.blocks import BlockEntry, SlotSpec
from ..memvid.writing.reader import BundleReader
from .errors import LayoutMismatch, MalformedSnapshot
from .kind import MOST_LATE_ROWS, RecordShape, is_storable
from .kinds import kind_named
from .layout import NUMBERS, STATE_KINDS, CacheEntry, CacheLayout
from .lossy import StoredArray, arranged
from .lossy_kinds import KINDS as LOSSY_KINDS
from .lossy_kinds import cache_kind_of
from .passes import Passes

MAX_ARRAY_SIZE: Final = 2**31 - 1
"""One size of an MLX array's shape."""

# their places in a state record
LOGITS_SLOT, RANDOM_KEY_SLOT, PASSES_SLOT, CANARY_SLOT = range(4)


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One cache's part of a state record. slots: of its arrays, in order; first_slot: its place in the block."""

    entry: CacheEntry
    numbers: tuple[int, ...]
    slots: tuple[SlotSpec, ...]
    first_slot: int

    @property
    def reaches_back(self) -> bool:
        """Whether it still has all of the cache's content at any earlier position."""
        return kind_named(self.entry.kind).reaches_back(dict(self.entry.settings), self.numbers)

    def array_names(self) -> Iterator[str]:
        """The names of its arrays within the cache."""
        for slot in self.slots:
            yield slot.name.removeprefix(f"{self.entry.path}.")


@dataclass(frozen=True, slots=True)
class StoredState:
    """The head of a state record; only its numbers have been read."""

    records: tuple[StoredRecord, ...]
    passes: Passes
    has_canary: bool


def require_spans(reader: BundleReader, entry: BlockEntry, expected: tuple[SlotSpec, ...]) -> tuple[StoredArray, ...]:
    """For each span block the places of the caches' span arrays: exactly the expected ones, each exact or lossy.

    Raises:
        LayoutMismatch, UnsupportedCache
    """
    found = tuple(spec for spec, _ in reader.read_header(entry).slots)
    arrays = arranged(found, expected)
    if arrays is None:
        _require_known(found)
        _refuse_slots(entry, found, expected)
    return arrays


def stored_state(reader: BundleReader, entry: BlockEntry, layout: CacheLayout) -> StoredState:
    """A state record's parts; the model's caches must be able to have each at that position.

    Raises:
        LayoutMismatch, UnsupportedCache, MalformedSnapshot; StoreError if it is damaged.
    """
    slots = [spec for spec, _ in reader.read_header(entry).slots]
    _require_known([slot for slot in slots if slot.kind not in STATE_KINDS])
    shapes = {slot.name: slot.shape for slot in slots}
    canary = shapes.get("canary")
    pass_count = (shapes.get("passes") or (0,))[0]
    own = layout.state_slots(pass_count, canary=canary != (0,), is_lossy=canary is not None)
    if tuple(slots[: len(own)]) != own:
        _refuse_slots(entry, slots, own)
    try:
        passes = Passes.from_bytes(reader.read_slot(entry, PASSES_SLOT), entry.start)
    except ValueError as error:
        raise _malformed(entry, f"{error}") from error
    records, at = [], len(own)
    for cache in layout.recorded():
        record = _stored_record(reader, entry, cache, slots, at)
        records.append(record)
        at = record.first_slot + len(record.slots)
    if at != len(slots):
        raise _malformed(entry, f"it has {len(slots) - at} slots too many")
    return StoredState(tuple(records), passes, canary is not None)


def _stored_record(
    reader: BundleReader, entry: BlockEntry, cache: CacheEntry, slots: Sequence[SlotSpec], at: int
) -> StoredRecord:
    kind, settings = kind_named(cache.kind), dict(cache.settings)
    numbers_slot = cache.slot(NUMBERS, "int64", (kind.number_count(settings),))
    if tuple(slots[at : at + 1]) != (numbers_slot,):
        _refuse_slots(entry, slots[at : at + 1], (numbers_slot,))
    numbers = array("q")
    numbers.frombytes(reader.read_slot(entry, at))
    prefix = f"{cache.path}."
    arrays: dict[str, SlotSpec] = {}
    for slot in slots[at + 1 :]:
        name = slot.name.removeprefix(prefix)
        if name == slot.name or slot.kind != cache.slot(name, slot.dtype, slot.shape).kind:
            break
        arrays[name] = slot
    _require_admitted(entry, cache, arrays)
    problem = kind.problem(
        settings, entry.start, RecordShape(tuple(numbers), {name: slot.shape for name, slot in arrays.items()})
    )
    if problem is not None:
        raise _malformed(entry, f"cache {cache.path}: {problem}")
    return StoredRecord(cache, tuple(numbers), tuple(arrays.values()), at + 1)


def _require_admitted(entry: BlockEntry, cache: CacheEntry, arrays: dict[str, SlotSpec]) -> None:
    """Refuse arrays that the cache cannot have: another type or shape, more rows than tokens, or too many."""
    kind, known = kind_named(cache.kind), {each.name: each for each in cache.record}
    for name, slot in arrays.items():
        if name not in known:
            if not _may_come_late(cache, slot):
                raise _malformed(entry, f"{slot.name} is an array that the model's cache does not have")
            continue
        if not known[name].admits(slot):
            _refuse_slots(entry, [slot], [cache.slot(name, known[name].dtype, known[name].sized(0))])
        most = min(entry.start, MOST_LATE_ROWS) if kind.late_axes else entry.start
        for axis, size in enumerate(known[name].shape):
            if size is None and slot.shape[axis] > most:
                raise _malformed(entry, f"{slot.name} has {slot.shape[axis]} rows, where it can have {most} at most")


def _may_come_late(cache: CacheEntry, slot: SlotSpec) -> bool:
    """Whether the cache can have made this array after its first token."""
    alike = {len(each.shape) for each in cache.record}
    return (
        kind_named(cache.kind).late_arrays
        and is_storable(slot.dtype)
        and len(slot.shape) in alike
        and slot.shape[0] == 1
        and all(size <= MAX_ARRAY_SIZE for size in slot.shape)
    )


def _require_known(slots: Sequence[SlotSpec]) -> None:
    for kind in dict.fromkeys(slot.kind for slot in slots):
        if (cache_kind := cache_kind_of(kind)) not in LOSSY_KINDS:
            kind_named(cache_kind)


def _refuse_slots(entry: BlockEntry, found: Sequence[SlotSpec], expected: Sequence[SlotSpec]) -> NoReturn:
    differing = [str(spec) for spec, wanted in zip(found, expected, strict=False) if spec != wanted]
    raise LayoutMismatch(
        f"The block at token {entry.start} has {len(found)} slots where the model's caches have {len(expected)}"
        + (f", and {differing[0]} is not one of them." if differing else "."),
        block_id=entry.id.hex(),
        start=entry.start,
    )


def _malformed(entry: BlockEntry, why: str) -> MalformedSnapshot:
    return MalformedSnapshot(
        f"The state record at token {entry.start} is not one that this version writes: {why}.",
        block_id=entry.id.hex(),
        start=entry.start,
    )
