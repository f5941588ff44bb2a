"""Session states of random bytes in the shapes of real models' caches: what a store is measured with, without a model.

Owns the shapes, and how a cache's memory is laid out and cut into drafts (as `torpor.snapshot` does it: per layer keys
and values `[heads, capacity, dim]`, a block's slot one run a head). Knows no store and no clock.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torpor.memvid.format.blocks import BLOCK_TOKENS, DTYPE_BYTES, TOKEN_BYTES, BlockDraft, SlotDraft, SlotSpec
from torpor.memvid.format.identity import Identity

IDENTITY = Identity((("weights", "random bytes"),))
_DEMO_CONFIG = Path(__file__).resolve().parents[1] / "daemon" / "demo_model" / "config.json"


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides the size of its state."""

    name: str
    layers: int
    heads: int
    dim: int
    dtype: str
    vocabulary: int

    @property
    def token_bytes(self) -> int:
        """State of one token."""
        return 2 * self.layers * self.row_bytes * self.heads

    @property
    def row_bytes(self) -> int:
        """One head's key, or value, of one token."""
        return self.dim * DTYPE_BYTES[self.dtype]

    def span_slots(self, count: int) -> tuple[SlotSpec, ...]:
        """The slots of a block of `count` tokens: layer by layer, keys before values."""
        return tuple(
            SlotSpec(f"{layer}.{part}", f"kv.{part}/1", self.dtype, (self.heads, count, self.dim))
            for layer in range(self.layers)
            for part in "kv"
        )

    def state_slots(self) -> tuple[SlotSpec, ...]:
        """The slots of the record at the end: the logits, and the key that the next token is drawn with."""
        logits = SlotSpec("logits", "state.logits/1", "float32", (self.vocabulary,))
        return logits, SlotSpec("random_key", "state.random_key/1", "uint32", (2,))


QWEN3_06B = Shape("Qwen3-0.6B", layers=28, heads=8, dim=128, dtype="bfloat16", vocabulary=151_936)
QWEN3_THIN = Shape("4 of 28 layers of Qwen3-0.6B", layers=4, heads=8, dim=128, dtype="bfloat16", vocabulary=151_936)


def demo_shape() -> Shape:
    """The demo model's, from its own configuration; its cache is float32 on the CPU."""
    config = json.loads(_DEMO_CONFIG.read_text(encoding="utf-8"))
    return Shape(
        "demo model",
        layers=config["num_hidden_layers"],
        heads=config["num_key_value_heads"],
        dim=config["head_dim"],
        dtype="float32",
        vocabulary=config["vocab_size"],
    )


class CacheMemory:
    """The memory of a cache: for each layer keys and values. A session longer than it repeats it from the start."""

    def __init__(self, shape: Shape, capacity: int, arrays: list[memoryview], record: list[memoryview]) -> None:
        """`capacity` in tokens, whole blocks; `record` are the slots of the record at the end."""
        self.shape = shape
        self.capacity = capacity
        self.record = record
        self._arrays = arrays

    def whole(self, slot: int) -> memoryview:
        """The memory of a slot of all blocks."""
        return self._arrays[slot]

    def runs(self, slot: int, start: int, count: int) -> list[memoryview]:
        """The memory of a block's slot: one run a head."""
        row_bytes, array = self.shape.row_bytes, self._arrays[slot]
        firsts = [(head * self.capacity + start % self.capacity) * row_bytes for head in range(self.shape.heads)]
        return [array[first : first + count * row_bytes] for first in firsts]

    def block_runs(self, start: int, count: int) -> list[memoryview]:
        """The memory of a whole block, slot by slot."""
        return [run for slot in range(2 * self.shape.layers) for run in self.runs(slot, start, count)]

    def drafts(self, ledger: bytes, first: int = 0) -> Iterator[BlockDraft]:
        """The blocks of a session with these tokens from token `first` (where a block starts) on, and its record."""
        end = len(ledger) // TOKEN_BYTES
        for start, count in blocks(first, end):
            slots = [
                SlotDraft(spec, self.runs(slot, start, count)) for slot, spec in enumerate(self.shape.span_slots(count))
            ]
            tokens = ledger[TOKEN_BYTES * start : TOKEN_BYTES * (start + count)]
            yield BlockDraft("span", start, tokens, slots)
        record = [SlotDraft(spec, [data]) for spec, data in zip(self.shape.state_slots(), self.record, strict=True)]
        yield BlockDraft("state", end, b"", record)


def blocks(first: int, end: int) -> list[tuple[int, int]]:
    """(start, tokens) of the blocks that hold the tokens `[first, end)`."""
    return [(start, min(BLOCK_TOKENS, end - start)) for start in range(first, end, BLOCK_TOKENS)]


def random_memory(shape: Shape, tokens: int = BLOCK_TOKENS, seed: int = 0) -> CacheMemory:
    """Memory of at least so many tokens, full of random bytes: nothing in it compresses."""
    random, capacity = np.random.default_rng(seed), _capacity(tokens)
    size = capacity * shape.heads * shape.row_bytes
    arrays = [memoryview(random.bytes(size)) for _ in range(2 * shape.layers)]
    return CacheMemory(
        shape, capacity, arrays, [memoryview(random.bytes(spec.size_bytes)) for spec in shape.state_slots()]
    )


def fresh_memory(shape: Shape, tokens: int) -> CacheMemory:
    """Memory that nothing has touched yet: each page of it faults when it is first written."""
    capacity = _capacity(tokens)
    size = capacity * shape.heads * shape.row_bytes
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # as an allocator takes it; Python's default would be shared
    arrays = [memoryview(mmap.mmap(-1, size, flags=private)) for _ in range(2 * shape.layers)]
    return CacheMemory(
        shape, capacity, arrays, [memoryview(bytearray(spec.size_bytes)) for spec in shape.state_slots()]
    )


def random_ledger(shape: Shape, tokens: int, *salt: int) -> bytes:
    """The token ids of a session, another one for each salt: so the blocks are others even where the bytes are not."""
    return np.random.default_rng(salt).integers(0, shape.vocabulary, tokens, dtype="<u4").tobytes()


def _capacity(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
