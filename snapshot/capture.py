"""Cuts live state into blocks, copying nothing: drafts hold views of the cache's own memory.

`cut` runs on the engine thread, because it evaluates. What it returns is evaluated memory, which any thread may
read, hash and write; the store does that while the engine serves others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..memvid.blocks import BLOCK_TOKENS, BlockDraft, BlockEntry, SlotDraft
from . import memory
from .errors import InconsistentState, NonFiniteState
from .finite import is_drawable, is_finite
from .kinds import live_arrays
from .layout import CacheLayout
from .state import LiveState


@dataclass(frozen=True, slots=True)
class Cut:
    """A snapshot that is ready to be written: blocks that are durable already, then the new ones.

    tokens: the ledger's bytes at the moment of the cut.
    layers: keys' and values' memory of each layer with the capacity of its arrays in tokens.
    """

    reused: tuple[BlockEntry, ...]
    token_count: int
    tokens: bytes
    layout: CacheLayout
    layers: tuple[tuple[memoryview, memoryview, int], ...]
    logits: memoryview
    random_key: memoryview

    def drafts(self) -> Iterator[BlockDraft]:
        """The new blocks in the order of the chain, then the state record.

        Raises:
            NonFiniteState: keys or values of a new block, or the logits, hold NaN or infinity.
        """
        for start in range(self.reused_tokens, self.token_count, BLOCK_TOKENS):
            yield self._span(start, min(BLOCK_TOKENS, self.token_count - start))
        if not is_drawable(self.logits):
            raise NonFiniteState(
                "The logits of the last token hold NaN or infinity: no token could be drawn after a wake. The session "
                "was not put to sleep; wake its last version, or start anew.",
                slot="logits",
                start=self.token_count,
            )
        specs = self.layout.state_slots()
        records = (self.logits, self.random_key)
        slots = [SlotDraft(spec, [record]) for spec, record in zip(specs, records, strict=True)]
        yield BlockDraft(kind="state", start=self.token_count, tokens=b"", slots=slots)

    @property
    def reused_tokens(self) -> int:
        """Tokens whose KV is in durable blocks already."""
        return len(self.reused) * BLOCK_TOKENS

    def _span(self, start: int, count: int) -> BlockDraft:
        slots = []
        for index, spec in enumerate(self.layout.span_slots(count)):
            keys, values, capacity = self.layers[index // 2]
            heads = spec.shape[0]
            row_bytes = spec.size_bytes // (heads * count)
            source = values if index % 2 else keys
            runs = memory.head_runs(source, heads, capacity, row_bytes, start, count)
            if not is_finite(runs, spec.dtype):
                raise NonFiniteState(
                    f"Layer {index // 2} holds NaN or infinity between token {start} and {start + count}: what the "
                    "session would say after it is garbage. It was not put to sleep; wake its last version, or start "
                    "anew.",
                    layer=index // 2,
                    slot=spec.name,
                    start=start,
                )
            slots.append(SlotDraft(spec, runs))
        return BlockDraft(kind="span", start=start, tokens=self.tokens[4 * start : 4 * (start + count)], slots=slots)


def plan_reuse(durable: Sequence[BlockEntry], unchanged_tokens: int) -> tuple[BlockEntry, ...]:
    """The leading blocks of the last snapshot that still hold what the cache holds, however many files they lie in:
    a sleep writes only what is new.

    unchanged_tokens: how many leading tokens have neither been dropped nor rewritten since. A last block that was
    not full is written again, so that blocks always stand back to back.
    """
    reused = []
    for entry in durable:
        full = entry.kind == "span" and entry.token_count == BLOCK_TOKENS
        if not full or entry.start + BLOCK_TOKENS > unchanged_tokens:
            break
        reused.append(entry)
    return tuple(reused)


def cut(state: LiveState, layout: CacheLayout, *, durable: Sequence[BlockEntry], unchanged_tokens: int) -> Cut:
    """A consistent snapshot of the state as it is now.

    Raises:
        InconsistentState: ledger and caches do not describe one span, or nothing has been read yet.
    """
    if not state.tokens or state.last_logits is None:
        raise InconsistentState("A session that has read nothing has no state to keep.", token_count=0)
    if not state.is_consistent:
        raise InconsistentState(
            f"The ledger has {len(state.tokens)} tokens and the caches do not.", token_count=len(state.tokens)
        )
    pairs = [live_arrays(cache) for cache in state.caches]
    arrays = [memory.contiguous(array) for pair in pairs for array in pair]
    records = [memory.contiguous(state.last_logits), memory.contiguous(state.random_key)]
    mx.eval(arrays, records)
    views = [memory.readable(array) for array in arrays]
    layers = tuple((views[2 * index], views[2 * index + 1], pair[0].shape[2]) for index, pair in enumerate(pairs))
    logits, random_key = (memory.readable(record) for record in records)
    return Cut(
        reused=plan_reuse(durable, unchanged_tokens),
        token_count=len(state.tokens),
        tokens=state.tokens.tobytes(),
        layout=layout,
        layers=layers,
        logits=logits,
        random_key=random_key,
    )
