"""The slots of a model's caches, and their names, found once when the model is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, takewhile
from typing import Any, Final

import mlx.core as mx

from ..memvid.format.blocks import BLOCK_TOKENS, SlotSpec
from ..memvid.limits import MAX_SLOTS
from .kind import Kind, Record, name_of_dtype
from .kinds import kind_named, kind_of, leaves
from .lossy_kinds import Quantization, cache_kind_of, exact_of, is_beside

# the slots of a state record that are no cache's: the source of the next token, and how tokens were read
LOGITS_KIND: Final = "state.logits/1"
RANDOM_KEY_KIND: Final = "state.random_key/1"
PASSES_KIND: Final = "state.passes/1"
CANARY_KIND: Final = "state.canary/1"
STATE_KINDS: Final = (LOGITS_KIND, RANDOM_KEY_KIND, PASSES_KIND, CANARY_KIND)
NUMBERS: Final = "n"
"""Name of the slot with the numbers of a cache's record."""

_NOT_USED: Final = "not used"
# one description in the text of a layout, and its places; no description has an `@`
_TOLD: Final = re.compile(r"([a-z_]+/\d+ [^@]+) @ (\d+(?:[-.,]\d+)*)(?:; |$)")
_TOLD_SETTING: Final = re.compile(r"\b([a-z_]+)=(\d{1,18})\b")


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """One array of a cache. shape: None for a size that counts tokens or rows; without the batch axis if it is cut by
    token."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]

    def sized(self, count: int) -> tuple[int, ...]:
        """Its shape with that many tokens."""
        return tuple(count if size is None else size for size in self.shape)

    def __str__(self) -> str:
        """Its shape and type, without its name: `8xnx128 float32`."""
        return f"{'x'.join('n' if size is None else str(size) for size in self.shape)} {self.dtype}"

    def admits(self, slot: SlotSpec) -> bool:
        """Whether a stored slot is one of this array, for any number of tokens."""
        sizes = zip(slot.shape, self.shape, strict=False)
        return (
            slot.dtype == self.dtype
            and len(slot.shape) == len(self.shape)
            and all(wanted in (None, size) for size, wanted in sizes)
        )


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """How one cache of a model is kept. path: its place in the model's list, `3` or `3.1`.

    spans: its arrays that are cut by token, `[heads, tokens, dim]`; none for a cache that a model leaves empty. record:
    the arrays of its whole state; record_bytes: their most bytes. row_bytes: the bytes of one token.
    """

    path: str
    kind: str
    settings: tuple[tuple[str, int], ...]
    spans: tuple[ArrayLayout, ...]
    record: tuple[ArrayLayout, ...]
    in_use: bool = True
    record_bytes: int = field(default=0, compare=False)
    row_bytes: int = field(default=0, compare=False)

    def most_bytes(self, token_count: int, at_once: int) -> int:
        """The most memory for so many tokens, padding included, also while they are read: a copy of the whole state is
        kept to restore it after a failure. at_once: tokens of one call, at most."""
        if not self.in_use:
            return 0
        kind = kind_named(self.kind)
        copies = 1 if kind.by_token else 2
        return copies * self.row_bytes * kind.most_capacity(dict(self.settings), token_count, at_once)

    @property
    def has_record(self) -> bool:
        """Whether it has whole state, kept at one position."""
        return self.in_use and not kind_named(self.kind).by_token

    def slot(self, array: str, dtype: str, shape: tuple[int, ...]) -> SlotSpec:
        """The slot of one of its arrays."""
        family, _, version = self.kind.partition("/")
        return SlotSpec(f"{self.path}.{array}", f"{family}.{array}/{version}", dtype, shape)

    def span_slots(self, token_count: int) -> Iterator[SlotSpec]:
        """Its slots in a block of that many tokens."""
        for array in self.spans:
            yield self.slot(array.name, array.dtype, array.sized(token_count))

    @property
    def described(self) -> str:
        """Its kind and its arrays, in words: `kv/1 k, v 8xnx128 float32`."""
        held = _texts((array, "") for array in (*self.spans, *self.record))
        return f"{self.kind} {held if self.in_use else _NOT_USED}"

    def __str__(self) -> str:
        """Its description, without its place."""
        return " ".join([self.described, *(f"{name}={value}" for name, value in self.settings)])


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The layout of a model's caches, one by one, and the number of its logits."""

    entries: tuple[CacheEntry, ...]
    vocabulary: int

    def __str__(self) -> str:
        """All caches, those of one description together, with their places."""
        places: dict[str, list[str]] = {}
        for entry in self.entries:
            places.setdefault(str(entry), []).append(entry.path)
        return "; ".join(f"{description} @ {_ranges(paths)}" for description, paths in places.items())

    @property
    def by_token(self) -> bool:
        """Whether the whole state is cut by token: then any position can be had without computing."""
        return not any(entry.has_record for entry in self.entries)

    @property
    def record_bytes(self) -> int:
        """The most bytes of a state record: logits, the canary's logits, and every cache's whole state."""
        return 2 * self.logits_bytes + sum(entry.record_bytes for entry in self.entries)

    @property
    def logits_bytes(self) -> int:
        """Bytes of the logits for the next token."""
        return 4 * self.vocabulary

    def most_bytes(self, token_count: int, at_once: int) -> int:
        """The most memory of a state of so many tokens, also while it is read or woken, checkpoints apart. at_once:
        tokens of one model call, at most."""
        return self.logits_bytes + sum(entry.most_bytes(token_count, at_once) for entry in self.entries)

    def tokens_to_wake(self, held: int, at: int | None) -> int:
        """The number of tokens for which a wake takes memory, of a version that holds so many. at: how many are wanted,
        all if None. Blocks are read whole; if not all is cut by token, a record of a later position may be read."""
        if at is None or not self.by_token:
            return held
        return min(held, -(-at // BLOCK_TOKENS) * BLOCK_TOKENS)

    def span_slots(self, token_count: int) -> tuple[SlotSpec, ...]:
        """The slots of a block of `token_count` tokens in stored order, cache by cache, each `[heads, tokens, dim]`."""
        return tuple(slot for entry in self.entries for slot in entry.span_slots(token_count))

    def spans(self) -> Iterator[tuple[CacheEntry, ArrayLayout]]:
        """Every array that is cut by token, in stored order."""
        for entry in self.entries:
            for array in entry.spans:
                yield entry, array

    def recorded(self) -> tuple[CacheEntry, ...]:
        """The caches with whole state, in stored order."""
        return tuple(entry for entry in self.entries if entry.has_record)

    def state_slots(self, pass_count: int, *, canary: bool = False, is_lossy: bool = False) -> tuple[SlotSpec, ...]:
        """The first slots of each state record: the logits `[vocabulary]` and the random key `[2]` for the next token,
        and how many tokens were read at once (`passes.py`), how often in a row, `[passes, 2]`.

        If the state has records, or a loss that the logits above may not have, the canary's logits `[vocabulary]`
        follow, or `[0]` without one (canary: whether one was taken). Else the canary is the last token itself, with the
        logits above.
        """
        slots = (
            SlotSpec("logits", LOGITS_KIND, "float32", (self.vocabulary,)),
            SlotSpec("random_key", RANDOM_KEY_KIND, "uint32", (2,)),
            SlotSpec("passes", PASSES_KIND, "uint32", (pass_count, 2)),
        )
        if self.by_token and not is_lossy:
            return slots
        return (*slots, SlotSpec("canary", CANARY_KIND, "float32", (self.vocabulary if canary else 0,)))


def record_slots(entry: CacheEntry, record: Record) -> Iterator[SlotSpec]:
    """The slots of one cache's record: its numbers, then its arrays, batch axis included."""
    yield entry.slot(NUMBERS, "int64", (len(record.numbers),))
    for name, array in record.arrays.items():
        yield entry.slot(name, name_of_dtype(array), tuple(array.shape))


def _ranges(paths: Sequence[str]) -> str:
    """Places as text, neighbors joined: `0-3,5`."""
    if not all(path.isdigit() for path in paths):
        return ",".join(paths)
    found = []
    for _, run in groupby(enumerate(map(int, paths)), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        found.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ",".join(found)


@dataclass(frozen=True, slots=True)
class ToldCache:
    """The facts of one cache, from the text of a layout."""

    kind: str
    settings: Mapping[str, int]
    in_use: bool


def told_caches(text: str) -> dict[str, ToldCache]:
    """The caches in the text of a `CacheLayout`, by their places, for readers with a bundle and no model; none if it is
    another text, as for a layout with only its digest in the identity.

    At most MAX_SLOTS of them: no block has slots of more.
    """
    return dict(islice(_told(text), MAX_SLOTS))


def _told(text: str) -> Iterator[tuple[str, ToldCache]]:
    for description, places in _TOLD.findall(text):
        kind, _, rest = description.partition(" ")
        settings = {name: int(value) for name, value in _TOLD_SETTING.findall(rest)}
        cache = ToldCache(kind, settings, not rest.startswith(_NOT_USED))
        for path in _paths_in(places):
            yield path, cache


def _paths_in(places: str) -> Iterator[str]:
    for place in places.split(","):
        first, _, last = place.partition("-")
        if last:
            yield from map(str, range(int(first), int(last) + 1))
        else:
            yield first


def layout_of(caches: Sequence[Any], vocabulary: int) -> CacheLayout:
    """The layout of caches that hold at least one token. Raises UnsupportedCache: a cache is of a kind without adapter,
    or its arrays cannot be stored."""
    return CacheLayout(tuple(entry_of(path, cache) for path, cache in leaves(caches)), vocabulary)


def entry_of(path: str, cache: Any) -> CacheEntry:
    """The layout of one cache of a model that has read a token; an empty cache is one that the model does not use."""
    kind = kind_of(cache)
    settings = tuple(sorted(kind.settings(cache).items()))
    if kind.is_empty(cache):
        return CacheEntry(path, kind.name, settings, (), (), in_use=False)
    spans = tuple(_span_layout(name, array) for name, array in kind.spans(cache).items())
    record = None if kind.by_token else kind.record(cache)
    held = record.arrays if record else {}
    arrays = tuple(_record_layout(name, array, kind) for name, array in held.items())
    whole = sum(array.nbytes for array in held.values())
    rows = sum(array.nbytes // array.shape[-2] for array in kind.spans(cache).values())
    size = whole * kind.most_rows(dict(settings))
    return CacheEntry(path, kind.name, settings, spans, arrays, record_bytes=size, row_bytes=whole + rows)


def _span_layout(name: str, array: mx.array) -> ArrayLayout:
    sizes = list(array.shape[1:])
    return ArrayLayout(name, name_of_dtype(array), (*sizes[:-2], None, sizes[-1]))


def _record_layout(name: str, array: mx.array, kind: Kind) -> ArrayLayout:
    return ArrayLayout(name, name_of_dtype(array), _counted(array.shape, kind))


def _counted(shape: Sequence[int], kind: Kind) -> tuple[int | None, ...]:
    """A shape with None for each size that counts rows, or may."""
    return tuple(
        None if axis in kind.row_axes or (axis in kind.late_axes and size <= 1) else size
        for axis, size in enumerate(shape)
    )


def described(span_slots: Sequence[SlotSpec], state_slots: Sequence[SlotSpec]) -> tuple[str, ...]:
    """The caches of stored slots, in words, for readers of a bundle without its model.

    Raises:
        ValueError: a slot's name is none of a cache.
        UnsupportedCache: it is of a kind that this version does not know.
    """
    places: dict[str, list[tuple[SlotSpec, bool]]] = {}
    for slots, by_token in ((span_slots, True), (state_slots, False)):
        for slot in slots:
            if slot.kind not in STATE_KINDS:
                places.setdefault(path_of(slot), []).append((slot, by_token))
    ordered = sorted(places, key=lambda path: [int(part) for part in path.split(".")])
    return tuple(_described(path, places[path]) for path in ordered)


def path_of(slot: SlotSpec) -> str:
    path = ".".join(takewhile(str.isdigit, slot.name.split(".")))
    if not path or path == slot.name:
        raise ValueError(f"slot {slot.name!r} is of no cache")
    return path


def _described(path: str, slots: Sequence[tuple[SlotSpec, bool]]) -> str:
    kept = list(_exact(slots))
    kind = kind_named(cache_kind_of(kept[0][0].kind))
    arrays = []
    for slot, by_token, loss in kept:
        name = slot.name.removeprefix(f"{path}.")
        if name != NUMBERS:
            sizes = (*slot.shape[:-2], None, *slot.shape[-1:]) if by_token else _counted(slot.shape, kind)
            arrays.append((ArrayLayout(name, slot.dtype, sizes), loss))
    return f"{kind.name} {_texts(arrays)}"


def _exact(slots: Sequence[tuple[SlotSpec, bool]]) -> Iterator[tuple[SlotSpec, bool, str]]:
    """The slots as without a loss, each with the loss in words."""
    for at, (slot, by_token) in enumerate(slots):
        quantization = Quantization.of_kind(slot.kind)
        if quantization is None:
            yield slot, by_token, ""
        elif not is_beside(slot):
            loss = f" in {quantization.bits} bits, groups of {quantization.group_size}"
            yield exact_of(slot, slots[at + 1][0]), by_token, loss


def _texts(arrays: Iterable[tuple[ArrayLayout, str]]) -> str:
    """Arrays with their losses as text, those of one shape and type together: `k, v 8xnx128 float32`."""
    alike: dict[str, list[str]] = {}
    for array, loss in arrays:
        alike.setdefault(f"{array}{loss}", []).append(array.name)
    return "; ".join(f"{', '.join(names)} {text}" for text, names in alike.items())


PLAIN: Final = "float"
KV_BITS: Final = (8, 4)
KV_GROUPS: Final = (32, 64, 128)
DEFAULT_KV_GROUP: Final = 64
_QUANTIZED: Final = re.compile(r"q([0-9]+)g([0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class KvChoice:
    """The quantization of keys and values as they are computed: bits a number, and how many numbers share a scale."""

    bits: int
    group_size: int = DEFAULT_KV_GROUP


def kv_format_of(layout: CacheLayout) -> str:
    """`float`, or bits and group size as in `q8g64`; several, joined by `+`, if the caches differ."""
    return "+".join(sorted({_format_of(entry) for entry in layout.entries if entry.in_use})) or PLAIN


def serving(kv_format: str, model: str) -> str | None:
    """The daemon's options for this form of KV, as part of a sentence. None if no option gives it."""
    quantized = [part for part in kv_format.split("+") if part != PLAIN]
    if not quantized:
        return f"without --kv-bits for {model}"
    found = _QUANTIZED.fullmatch(quantized[0])
    if len(quantized) > 1 or found is None or int(found[1]) not in KV_BITS or int(found[2]) not in KV_GROUPS:
        return None
    return f"with --kv-bits {model}={found[1]} --kv-group {model}={found[2]}"


def _format_of(entry: CacheEntry) -> str:
    settings = dict(entry.settings)
    return f"q{settings['bits']}g{settings['group_size']}" if "bits" in settings else PLAIN
