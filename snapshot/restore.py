"""Puts a bundle's state back, aside: nothing that is live is touched until all of it has been verified.

Three steps, because MLX belongs to the engine thread and reading does not: `allocate` (engine) makes the caches'
memory, `Filling.run` (I/O threads) reads each slot straight into it and hashes it in place, layer by layer, and
`Filling.assemble` (engine) turns the memory into caches.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..memvid.blocks import BlockEntry
from ..memvid.bundle import BundleReader
from ..memvid.identity import Identity
from . import memory
from .errors import ContextTooShort, LayoutMismatch, MalformedSnapshot
from .identity import require_same
from .kinds import capacity_for, dtype_named, rebuilt
from .layout import CacheLayout
from .state import LiveState, token_array

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class WakePlan:
    """What a wake will read, decided from the manifest and the block headers, before any memory is taken.

    spans: the blocks of the chain in order; state: the record at its end; tokens: the ledger's bytes.
    """

    layout: CacheLayout
    spans: tuple[BlockEntry, ...]
    state: BlockEntry
    token_count: int
    tokens: bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of state that the wake reads and verifies."""
        spans = sum(slot.size_bytes for entry in self.spans for slot in self.layout.span_slots(entry.token_count))
        return spans + sum(slot.size_bytes for slot in self.layout.state_slots())


def plan_wake(
    reader: BundleReader, identity: Identity, layout: CacheLayout, *, model: str, context_tokens: int
) -> WakePlan:
    """Check that the bundle is of this very model and has the slots that its cache has (GM3: before any use).

    Raises:
        IdentityMismatch: listing every part that differs.
        ContextTooShort: the snapshot is longer than the model's context.
        LayoutMismatch: a block's slots are not those of the model's cache.
        MalformedSnapshot: the chain is not spans followed by one state record, or a token is not in the vocabulary.
        StoreError: a header is damaged.
    """
    require_same(reader.manifest.identity, identity, model=model)
    if reader.manifest.token_count > context_tokens:
        raise ContextTooShort(
            f"The snapshot holds {reader.manifest.token_count} tokens, and the context of model {model!r} ends at "
            f"{context_tokens}.",
            token_count=reader.manifest.token_count,
            context_tokens=context_tokens,
        )
    entries, token_count = reader.entries, reader.manifest.token_count
    is_chain = (
        token_count > 0
        and (entries[-1].kind, entries[-1].start) == ("state", token_count)
        and all(entry.kind == "span" for entry in entries[:-1])
    )
    if not is_chain:
        raise MalformedSnapshot(
            "The bundle is not a chain of spans with one state record at its end.", bundle_id=reader.bundle_id.hex()
        )
    *spans, state = entries
    for entry in spans:
        _require_slots(reader, entry, layout.span_slots(entry.token_count))
    _require_slots(reader, state, layout.state_slots())
    tokens = reader.tokens()
    highest = max(token_array(tokens), default=0)
    if highest >= layout.vocabulary:
        raise MalformedSnapshot(
            f"The ledger has token {highest}, and the model's vocabulary ends at {layout.vocabulary - 1}.",
            token=highest,
            vocabulary=layout.vocabulary,
        )
    return WakePlan(layout, tuple(spans), state, token_count, tokens)


@dataclass(slots=True)
class Filling:
    """Memory that is being filled: per layer, keys and values as integers `[1, heads, capacity, dim]`."""

    plan: WakePlan
    capacity: int
    arrays: list[tuple[mx.array, mx.array]]
    _logits: bytearray = field(default_factory=bytearray)
    _random_key: bytearray = field(default_factory=bytearray)

    def run(self, reader: BundleReader, pool: Executor, on_progress: OnProgress | None = None) -> None:
        """Read and verify every slot, first layers first, on the threads of the pool.

        Raises:
            StoreError: a byte is not what its block id says; nothing live has been touched.
        """
        jobs = [pool.submit(self._fill_slot, reader, index) for index in range(2 * len(self.plan.layout.layers))]
        try:
            for done, job in enumerate(jobs, start=1):
                job.result()
                if on_progress is not None:
                    on_progress(self.plan.read_bytes * done // len(jobs), self.plan.read_bytes)
        finally:
            # After a failure the rest is not worth reading, but none may go on writing into memory that is let go.
            for job in jobs:
                job.cancel()
            for job in jobs:
                if not job.cancelled():
                    job.exception()
        self._logits = reader.read_slot(self.plan.state, 0)
        self._random_key = reader.read_slot(self.plan.state, 1)

    def assemble(self) -> LiveState:
        """The caches, over the filled memory, with ledger, logits and random key.

        Raises:
            MalformedSnapshot: no token can be drawn from the logits (threat 11).
        """
        logits = np.frombuffer(self._logits, dtype="<f4")
        if not np.isfinite(logits.max()):
            raise MalformedSnapshot("The snapshot's logits contain NaN or infinity; wake an earlier version.")
        caches = []
        for layer, (keys, values) in zip(self.plan.layout.layers, self.arrays, strict=True):
            dtype = dtype_named(layer.dtype)
            caches.append(rebuilt(memory.as_dtype(keys, dtype), memory.as_dtype(values, dtype), self.plan.token_count))
        return LiveState(
            tokens=token_array(self.plan.tokens),
            caches=caches,
            last_logits=mx.array(logits),
            random_key=mx.array(np.frombuffer(self._random_key, dtype="<u4")),
        )

    def _fill_slot(self, reader: BundleReader, index: int) -> None:
        target = memory.writable(self.arrays[index // 2][index % 2])
        of_one_token = self.plan.layout.span_slots(1)[index]
        heads = of_one_token.shape[0]
        row_bytes = of_one_token.size_bytes // heads
        for entry in self.plan.spans:
            runs = memory.head_runs(target, heads, self.capacity, row_bytes, entry.start, entry.token_count)
            reader.read_slot_into(entry, index, runs)


def allocate(plan: WakePlan) -> Filling:
    """Memory for the caches, of the capacity that mlx-lm would have given them.

    Raises:
        NotEnoughMemory: the system does not have it; MLX itself would end the process.
    """
    capacity = capacity_for(plan.token_count)
    memory.require_available(sum(slot.size_bytes for slot in plan.layout.span_slots(capacity)))
    arrays = []
    for layer in plan.layout.layers:
        dtype = dtype_named(layer.dtype)
        keys = memory.allocate((1, layer.heads, capacity, layer.key_dim), dtype)
        values = memory.allocate((1, layer.heads, capacity, layer.value_dim), dtype)
        arrays.append((keys, values))
    return Filling(plan, capacity, arrays)


def _require_slots(reader: BundleReader, entry: BlockEntry, expected: tuple[object, ...]) -> None:
    header = reader.read_header(entry)
    found = tuple(spec for spec, _ in header.slots)
    if found == expected:
        return
    differing = [str(spec) for spec, wanted in zip(found, expected, strict=False) if spec != wanted]
    raise LayoutMismatch(
        f"The block at token {entry.start} has {len(found)} slots where the model's cache has {len(expected)}"
        + (f", and {differing[0]} is not one of them." if differing else "."),
        block_id=entry.id.hex(),
        start=entry.start,
    )
