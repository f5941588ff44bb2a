"""Lossy blocks: keys and values of plain caches in 8 or 4 bits, under slot kinds of their own.

An array of a span block is exact, or three slots in its place: words, scales and biases, as `mx.quantize` makes them of
rows in groups. Their kind names bits and group (`kv8g64.k/1`), so a reader knows that the slot is lossy, and a version
that does not know those bits refuses it by name.

A value is `scale * level + bias` in float32, product and sum each rounded, then rounded to the array's own type.
`mx.dequantize` of float32 gives the same if operations are not fused. It computes half types in their own arithmetic,
which loses more, and fused operations give other last bits. So the arithmetic here is ours, and each operation is
rounded in the same way everywhere: a lossy block holds the same numbers on every machine.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import mlx.core as mx
import numpy as np

from ..memvid.answers import Lossy
from ..memvid.format.blocks import BLOCK_TOKENS, SlotSpec
from . import memory
from .errors import MalformedSnapshot, NonFiniteState
from .kinds import is_shared, kind_of, leaves
from .layout import CacheLayout
from .lossy_kinds import BITS, Quantization, choose
from .memory import SpanSource, span_source

Buffer = memoryview | bytes | bytearray

_ROWS_AT_ONCE: Final = 512


def lossy_in(stored: object) -> Lossy | None:
    """Read a loss from a session map; None if it has none. Raises ValueError: it is no loss."""
    if stored is None:
        return None
    if not isinstance(stored, Mapping) or stored.keys() != {"bits", "tokens"}:
        raise ValueError("lossy is not bits and tokens")
    bits, tokens = stored["bits"], stored["tokens"]
    if type(bits) is not int or bits not in BITS or type(tokens) is not int or tokens < 1:
        raise ValueError(f"lossy says {bits!r} bits of {tokens!r} tokens")
    return Lossy(bits, tokens)


def worst(first: Lossy | None, second: Lossy | None) -> Lossy | None:
    """Both losses as one: the fewest bits, of the most tokens."""
    if first is None or second is None:
        return first or second
    return Lossy(min(first.bits, second.bits), max(first.tokens, second.tokens))


@dataclass(frozen=True, slots=True)
class StoredArray:
    """How a block keeps one span array. exact: its slot as without a loss. first_slot: its first slot in the block.
    quantization: None if it is exact."""

    exact: SlotSpec
    first_slot: int
    quantization: Quantization | None

    @property
    def slots(self) -> tuple[SlotSpec, ...]:
        return (self.exact,) if self.quantization is None else self.quantization.slots(self.exact)


@lru_cache(maxsize=64)  # most blocks of a session have the very same slots
def arranged(found: tuple[SlotSpec, ...], expected: tuple[SlotSpec, ...]) -> tuple[StoredArray, ...] | None:
    """The arrays in a block's slots; None unless they are the expected ones in order, each exact or lossy."""
    arrays, at = [], 0
    for exact in expected:
        quantization = None
        if at < len(found) and found[at] != exact:
            quantization = Quantization.of_kind(found[at].kind)
            if quantization is None or not quantization.fits(exact):
                return None
        array = StoredArray(exact, at, quantization)
        if found[at : at + len(array.slots)] != array.slots:
            return None
        arrays.append(array)
        at += len(array.slots)
    return tuple(arrays) if at == len(found) else None


def expand(stored: StoredArray, parts: Sequence[Buffer]) -> np.ndarray:
    """The values of words, scales and biases: integers of the array's own width, bit for bit its numbers, in the shape
    of the exact slot. Raises MalformedSnapshot: a scale or a bias is no number."""
    assert stored.quantization is not None
    *outer, dim = stored.exact.shape
    group = stored.quantization.group_size
    scales, biases = (_widened(part, stored.exact.dtype) for part in parts[1:])
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise MalformedSnapshot(
            f"{stored.exact.name} is kept with a scale that is no number.", slot=stored.slots[1].name
        )
    found = np.empty((*outer, dim), dtype=f"<u{stored.exact.element_bytes}")
    rows, octets = found.reshape(-1, dim), np.frombuffer(parts[0], dtype=np.uint8).reshape(scales.size, -1)
    with np.errstate(over="ignore"):
        # Few rows at a time: intermediate values stay in the processor's cache, and in memory already in use.
        groups = _ROWS_AT_ONCE * dim // group
        for at in range(0, scales.size, groups):
            some = slice(at, at + groups)
            values = _levels(octets[some], stored.quantization.bits).reshape(-1, group).astype(np.float32)
            values *= scales[some, None]
            values += biases[some, None]
            rows[at * group // dim :][: values.size // dim] = _narrowed(values.reshape(-1, dim), stored.exact.dtype)
    return found


def _levels(octets: np.ndarray, bits: int) -> np.ndarray:
    """The integers in words, in which the first one has the lowest bits."""
    return octets if bits == 8 else np.stack([octets & 15, octets >> 4], axis=-1)


def _widened(part: Buffer, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (np.frombuffer(part, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(part, dtype="<f4" if dtype == "float32" else "<f2").astype(np.float32)


def _narrowed(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to the nearest number of a type, to the even one of two; as integers of its width. Overwrites the
    values."""
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view("<u4")
    half = bits >> 16
    half &= 1
    half += 0x7FFF
    bits += half
    return bits.view("<u2")[..., 1::2]  # the upper halves


@dataclass(frozen=True, slots=True)
class LossyTokens:
    """Tokens `[start, end)` of a session in the form of lossy blocks, whole blocks of them.

    arrays: for each span array in stored order its form and the memory of its words, scales and biases; None for one
    that stays exact.
    """

    bits: int
    start: int
    end: int
    arrays: tuple[tuple[Quantization, tuple[SpanSource, ...]] | None, ...]

    def slots(
        self, index: int, exact: SlotSpec, start: int, count: int
    ) -> list[tuple[SlotSpec, list[memoryview]]] | None:
        """The bytes of one array in a block of these tokens; None if the block keeps the array itself."""
        kept = self.arrays[index]
        if kept is None or start < self.start or start + count > self.end:
            return None
        quantization, sources = kept
        return [
            (slot, source.runs(start - self.start, count))
            for slot, source in zip(quantization.slots(exact), sources, strict=True)
        ]


def stored_bytes(layout: CacheLayout, bits: int) -> int:
    """Raw bytes of a full span block with its arrays in that many bits, where they can be."""
    total = 0
    for exact in layout.span_slots(BLOCK_TOKENS):
        quantization = choose(exact, bits)
        slots = (exact,) if quantization is None else quantization.slots(exact)
        total += sum(slot.size_bytes for slot in slots)
    return total


def quantize(
    caches: Sequence[Any], layout: CacheLayout, bits: int, start: int, end: int
) -> Generator[None, None, LossyTokens]:
    """Quantize the tokens `[start, end)` of caches, array by array, and put in their place the values that a wake will
    give: the caches are then those of the slept session. Runs on the engine thread.

    start, end: at the ends of full blocks. Beside the caches it takes the bytes to be stored, and one array three
    times.

    Raises:
        NonFiniteState: a group spans more than its type can hold. Caches before it are quantized then: the state is not
            to be used any more.
        NotEnoughMemory: the system has too little for the bytes to be stored.
    """
    assert start % BLOCK_TOKENS == 0
    assert end % BLOCK_TOKENS == 0
    granted = memory.grant((end - start) // BLOCK_TOKENS * stored_bytes(layout, bits))
    arrays: list[tuple[Quantization, tuple[SpanSource, ...]] | None] = []
    try:
        for entry, (_, cache) in zip(layout.entries, leaves(caches), strict=True):
            kind = kind_of(cache)
            spans = kind.spans(cache) if entry.spans else {}
            for each in entry.spans:
                exact = entry.slot(each.name, each.dtype, each.sized(BLOCK_TOKENS))
                quantization = choose(exact, bits)
                if quantization is None:
                    arrays.append(None)
                    continue
                whole = spans[each.name]
                parts = mx.quantize(whole[..., start:end, :], group_size=quantization.group_size, bits=bits)
                sources = tuple(span_source(part) for part in parts)
                values = _values(StoredArray(exact, 0, quantization), sources, start, end)
                whole[..., start:end, :] = mx.array(values).view(whole.dtype)[None]
                mx.eval(whole)
                arrays.append((quantization, sources))
                granted.filled(sum(part.nbytes for part in parts))
                yield
            if is_shared(cache):
                kind.fill(cache, kind.offset(cache) or 0, spans, None)
    finally:
        granted.done()
    return LossyTokens(bits, start, end, tuple(arrays))


def _values(stored: StoredArray, sources: Sequence[SpanSource], start: int, end: int) -> np.ndarray:
    """A wake's values of an array's tokens `[start, end)`, at the start of the sources, block by block."""
    *outer, _, dim = stored.exact.shape
    values = np.empty((*outer, end - start, dim), dtype=f"<u{stored.exact.element_bytes}")
    for at in range(0, end - start, BLOCK_TOKENS):
        parts = [b"".join(source.runs(at, BLOCK_TOKENS)) for source in sources]
        try:
            values[..., at : at + BLOCK_TOKENS, :] = expand(stored, parts)
        except MalformedSnapshot as error:
            raise NonFiniteState(
                f"{stored.exact.name} spans more from token {start + at} on than can be kept in few bits; the session "
                "stays as it is.",
                slot=stored.exact.name,
                start=start + at,
            ) from error
    return values
