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
from .errors import ContextTooShort, LayoutMismatch, MalformedSnapshot, NonFiniteState, UnsupportedCache
from .finite import is_drawable, is_finite
from .identity import require_same
from .kinds import SHORTENED_KINDS, capacity_for, dtype_named, rebuilt
from .layout import CacheLayout
from .state import LiveState, token_array

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class WakePlan:
    """What a wake will read, decided from the manifest and the block headers, before any memory is taken.

    spans: the blocks of the chain in order; state: the record at its end, None for what a repair salvaged of a damaged
        snapshot, which has none; tokens: the ledger's bytes.
    """

    layout: CacheLayout
    spans: tuple[BlockEntry, ...]
    state: BlockEntry | None
    token_count: int
    tokens: bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of state that the wake reads and verifies."""
        spans = sum(slot.size_bytes for entry in self.spans for slot in self.layout.span_slots(entry.token_count))
        return spans + (sum(slot.size_bytes for slot in self.layout.state_slots()) if self.state else 0)


def plan_wake(
    reader: BundleReader, identity: Identity, layout: CacheLayout, *, model: str, context_tokens: int
) -> WakePlan:
    """Check that the bundle is of this very model and has the slots that its cache has (GM3: before any use).

    Raises:
        IdentityMismatch: listing every part that differs.
        ContextTooShort: the snapshot is longer than the model's context.
        LayoutMismatch: a block's slots are not those of the model's cache.
        MalformedSnapshot: the chain is not spans with at most one state record, at their end, or a token is not in the
            vocabulary.
        UnsupportedCache: there is no state record, and a cache is of a kind that cannot do without.
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
    spans, state = _chain_of(reader)
    for entry in spans:
        _require_slots(reader, entry, layout.span_slots(entry.token_count))
    if state is None:
        _require_shortened(layout)
    else:
        _require_slots(reader, state, layout.state_slots())
    tokens = reader.tokens()
    highest = max(token_array(tokens), default=0)
    if highest >= layout.vocabulary:
        raise MalformedSnapshot(
            f"The ledger has token {highest}, and the model's vocabulary ends at {layout.vocabulary - 1}.",
            token=highest,
            vocabulary=layout.vocabulary,
        )
    return WakePlan(layout, spans, state, reader.manifest.token_count, tokens)


def _chain_of(reader: BundleReader) -> tuple[tuple[BlockEntry, ...], BlockEntry | None]:
    """A bundle's spans, and the state record at their end, if there is one."""
    entries, token_count = reader.entries, reader.manifest.token_count
    has_state = bool(entries) and (entries[-1].kind, entries[-1].start) == ("state", token_count)
    spans = entries[:-1] if has_state else entries
    if not token_count or any(entry.kind != "span" for entry in spans):
        raise MalformedSnapshot(
            "The bundle is not a chain of spans with at most one state record, at its end.",
            bundle_id=reader.bundle_id.hex(),
        )
    return spans, entries[-1] if has_state else None


def _require_shortened(layout: CacheLayout) -> None:
    """Refuse by name a cache that cannot drop its last token, to read it again for its logits."""
    for layer in layout.layers:
        if layer.kind not in SHORTENED_KINDS:
            raise UnsupportedCache(
                f"The snapshot has no state record, and a cache of kind {layer.kind} cannot be woken without one.",
                cache_kind=layer.kind,
            )


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
            NonFiniteState: keys or values hold NaN or infinity.
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
        if self.plan.state is not None:
            self._logits = reader.read_slot(self.plan.state, 0)
            self._random_key = reader.read_slot(self.plan.state, 1)

    def assemble(self, random_key: mx.array | None = None) -> LiveState:
        """The caches, over the filled memory, with ledger, logits and random key.

        random_key: for a snapshot without a state record; its logits are then missing too (None).

        Raises:
            NonFiniteState: no token can be drawn from the logits (threat 11).
        """
        if self.plan.state is None:
            return self._state(None, random_key)
        if not is_drawable(self._logits):
            raise NonFiniteState(
                "The snapshot's logits hold NaN or infinity; wake an earlier version.",
                slot="logits",
                start=self.plan.token_count,
            )
        logits = mx.array(np.frombuffer(self._logits, dtype="<f4"))
        return self._state(logits, mx.array(np.frombuffer(self._random_key, dtype="<u4")))

    def _state(self, logits: mx.array | None, random_key: mx.array | None) -> LiveState:
        assert random_key is not None  # who has no record of one brings another
        caches = []
        for layer, (keys, values) in zip(self.plan.layout.layers, self.arrays, strict=True):
            dtype = dtype_named(layer.dtype)
            caches.append(rebuilt(memory.as_dtype(keys, dtype), memory.as_dtype(values, dtype), self.plan.token_count))
        return LiveState(
            tokens=token_array(self.plan.tokens),
            caches=caches,
            last_logits=logits,
            random_key=random_key,
        )

    def _fill_slot(self, reader: BundleReader, index: int) -> None:
        target = memory.writable(self.arrays[index // 2][index % 2])
        of_one_token = self.plan.layout.span_slots(1)[index]
        heads = of_one_token.shape[0]
        row_bytes = of_one_token.size_bytes // heads
        for entry in self.plan.spans:
            runs = memory.head_runs(target, heads, self.capacity, row_bytes, entry.start, entry.token_count)
            reader.read_slot_into(entry, index, runs)
            if not is_finite(runs, of_one_token.dtype):
                raise NonFiniteState(
                    f"The snapshot's layer {index // 2} holds NaN or infinity behind token {entry.start}; wake an "
                    "earlier version.",
                    layer=index // 2,
                    slot=of_one_token.name,
                    start=entry.start,
                )


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
