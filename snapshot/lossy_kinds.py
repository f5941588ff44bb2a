"""The stored kinds of lossy arrays: their names, and the arrays that can have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..memvid.format.blocks import SlotSpec

BITS: Final = (8, 4)
"""The possible bits of a value."""

_GROUP_SIZES: Final = (64, 32)
_FLOATS: Final = frozenset({"float16", "bfloat16", "float32"})
_EXACT_FAMILY, _VERSION = "kv", "1"
_SCALES, _BIASES = ".scales", ".biases"


def cache_kind_of(slot_kind: str) -> str:
    """The kind of the cache that a slot is of, by the slot's kind: `kv/1` for `kv.k/1`."""
    return f"{slot_kind.partition('.')[0]}/{slot_kind.partition('/')[2]}"


@dataclass(frozen=True, slots=True)
class Quantization:
    """How an array is kept: `bits` a value, and a scale and a bias for each `group_size` values of a row."""

    bits: int
    group_size: int

    @property
    def family(self) -> str:
        """The first part of its slots' kinds, `kv8g64`."""
        return f"{_EXACT_FAMILY}{self.bits}g{self.group_size}"

    @property
    def kind(self) -> str:
        """Its stored kind, in the form of the caches' kinds: `kv8g64/1`."""
        return f"{self.family}/{_VERSION}"

    @classmethod
    def of_kind(cls, slot_kind: str) -> Quantization | None:
        """The quantization of a slot of this kind; None for an exact slot, and for an unknown kind."""
        return _KNOWN.get(cache_kind_of(slot_kind))

    def fits(self, exact: SlotSpec) -> bool:
        """Whether an array with this exact slot can be kept so: keys or values of a plain cache, in whole groups."""
        plain = cache_kind_of(exact.kind) == f"{_EXACT_FAMILY}/{_VERSION}" and exact.dtype in _FLOATS
        return plain and len(exact.shape) > 1 and exact.shape[-1] > 0 and exact.shape[-1] % self.group_size == 0

    def slots(self, exact: SlotSpec) -> tuple[SlotSpec, SlotSpec, SlotSpec]:
        """The slots of its words, scales and biases, in place of the exact one that `fits`."""
        *outer, dim = exact.shape
        array = exact.kind.partition(".")[2].partition("/")[0]
        groups = dim // self.group_size

        def slot(part: str, dtype: str, size: int) -> SlotSpec:
            return SlotSpec(f"{exact.name}{part}", f"{self.family}.{array}{part}/{_VERSION}", dtype, (*outer, size))

        return (
            slot("", "uint32", dim * self.bits // 32),
            slot(_SCALES, exact.dtype, groups),
            slot(_BIASES, exact.dtype, groups),
        )


_KNOWN: Final = {each.kind: each for bits in BITS for size in _GROUP_SIZES for each in [Quantization(bits, size)]}
KINDS: Final = frozenset(_KNOWN)
"""The stored kinds that this version can read, in the form of the caches' kinds."""


def choose(exact: SlotSpec, bits: int) -> Quantization | None:
    """Its quantization to that many bits, in the largest groups that divide its rows. None if it stays exact."""
    kept = (Quantization(bits, size) for size in _GROUP_SIZES)
    return next((each for each in kept if each.fits(exact)), None)


def is_beside(slot: SlotSpec) -> bool:
    """Whether a slot holds scales or biases: they are described with their words."""
    return Quantization.of_kind(slot.kind) is not None and slot.name.endswith((_SCALES, _BIASES))


def exact_of(words: SlotSpec, scales: SlotSpec) -> SlotSpec:
    """The exact slot of words and their scales. Raises ValueError: they are not of one array."""
    quantization = Quantization.of_kind(words.kind)
    if quantization is None:
        raise ValueError(f"slot {words.name!r} is not lossy")
    array = words.kind.partition(".")[2]
    shape = (*scales.shape[:-1], scales.shape[-1] * quantization.group_size) if scales.shape else ()
    exact = SlotSpec(words.name, f"{_EXACT_FAMILY}.{array}", scales.dtype, shape)
    if not quantization.fits(exact) or quantization.slots(exact)[:2] != (words, scales):
        raise ValueError(f"slots {words.name!r} and {scales.name!r} are not of one array")
    return exact
