"""Cuts live state into blocks. Span arrays are not copied: drafts hold views of the cache's own memory.

`cut` runs on the engine thread, because it evaluates. Its result is evaluated memory, which any thread may read, hash
and write; the store does that while the engine serves others.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import numpy as np

from ..memvid.format.blocks import BLOCK_TOKENS, BlockDraft, BlockEntry, SlotDraft, SlotSpec
from . import memory
from .checkpoints import Checkpoint, checkpoint_of
from .errors import InconsistentState, NonFiniteState
from .kinds import kind_of, leaves
from .layout import CANARY_KIND, LOGITS_KIND, CacheLayout, record_slots
from .lossy import LossyTokens
from .memory import SegmentSource, SpanSource
from .state import LiveState

# By dtype: the smallest word with an exponent of all ones (NaN and infinity only), without and with a sign.
_LOWEST_NOT_FINITE: Final[dict[str, tuple[np.signedinteger, np.unsignedinteger]]] = {
    "float16": (np.int16(0x7C00), np.uint16(0xFC00)),
    "bfloat16": (np.int16(0x7F80), np.uint16(0xFF80)),
    "float32": (np.int32(0x7F80_0000), np.uint32(0xFF80_0000)),
    "float64": (np.int64(0x7FF0_0000_0000_0000), np.uint64(0xFFF0_0000_0000_0000)),
}


def is_finite(runs: Iterable[memoryview], dtype: str) -> bool:
    """Whether all values in these bytes are finite. Each run holds whole elements; integers always are.

    Read as signed integers, non-finite values without a sign bit are the largest; read as unsigned, those with one are.
    So two searches for a maximum find both, at the speed of the processor's cache.
    """
    lowest = _LOWEST_NOT_FINITE.get(dtype)
    if lowest is None:
        return True
    for run in runs:
        for bound in lowest if run.nbytes else ():
            if np.frombuffer(run, dtype=bound.dtype).max() >= bound:
                return False
    return True


def is_drawable(logits: memoryview | bytes | bytearray) -> bool:
    """Whether a token can be drawn from these float32 logits: minus infinity forbids one token, NaN or infinity all."""
    values = np.frombuffer(logits, dtype="<f4")
    return bool(values.size) and bool(np.isfinite(values.max()))


@dataclass(frozen=True, slots=True)
class StateSource:
    """A state record to be written: its slots with their bytes."""

    start: int
    slots: tuple[tuple[SlotSpec, memoryview], ...]

    def draft(self) -> BlockDraft:
        """The block. Raises NonFiniteState: an array of it, or its logits, hold NaN or infinity."""
        for spec, view in self.slots:
            drawn = spec.kind in (LOGITS_KIND, CANARY_KIND) and view.nbytes
            if not (is_drawable(view) if drawn else is_finite([view], spec.dtype)):
                raise NonFiniteState(
                    f"The state at token {self.start} holds NaN or infinity ({spec.name}): what the session would say "
                    "after it is garbage. It was not put to sleep; wake its last version, or start anew.",
                    slot=spec.name,
                    start=self.start,
                )
        drafts = [SlotDraft(spec, [view]) for spec, view in self.slots]
        return BlockDraft(kind="state", start=self.start, tokens=b"", slots=drafts)


@dataclass(frozen=True, slots=True)
class Cut:
    """A snapshot to be written: the blocks that are durable already, then the new ones.

    tokens: the ledger's bytes at the moment of the cut. spans: the memory of each span array, in stored order.
    checkpoints: the state records in between that are not durable yet, by position; state: the record at the end, None
        without one.
    lossy: the first tokens in few bits, None if all are kept exact.
    """

    reused: tuple[BlockEntry, ...]
    token_count: int
    tokens: bytes
    layout: CacheLayout
    spans: tuple[SpanSource | SegmentSource, ...]
    checkpoints: Mapping[int, StateSource]
    state: StateSource | None
    lossy: LossyTokens | None = None

    def drafts(self) -> Iterator[BlockDraft]:
        """The new blocks in the order of the chain, the state record last, if there is one. Raises NonFiniteState: keys
        or values of a new block, or a state record, hold NaN or infinity."""
        for start in range(self.reused_tokens, self.token_count, BLOCK_TOKENS):
            if start in self.checkpoints:
                yield self.checkpoints[start].draft()
            yield self._span(start, min(BLOCK_TOKENS, self.token_count - start))
        if self.state is not None:
            yield self.state.draft()

    def copied(self, start: int) -> list[BlockDraft]:
        """The new block at a token, in memory of its own, with the state records around it: the session may go on while
        they are written. Raises as `drafts`."""
        count = min(BLOCK_TOKENS, self.token_count - start)
        before = [self.checkpoints[start].draft()] if start in self.checkpoints else []
        at_end = [self.state.draft()] if self.state is not None and start + count == self.token_count else []
        return [*before, _copied(self._span(start, count)), *at_end]

    @property
    def reused_tokens(self) -> int:
        """Tokens whose KV is in durable blocks already."""
        return max((entry.end for entry in self.reused), default=0)

    def _span(self, start: int, count: int) -> BlockDraft:
        slots = []
        for spec, runs in self._runs(start, count):
            if not is_finite(runs, spec.dtype):
                raise NonFiniteState(
                    f"{spec.name} holds NaN or infinity between token {start} and {start + count}: what the session "
                    "would say after it is garbage. It was not put to sleep; wake its last version, or start anew.",
                    slot=spec.name,
                    start=start,
                )
            slots.append(SlotDraft(spec, runs))
        return BlockDraft(kind="span", start=start, tokens=self.tokens[4 * start : 4 * (start + count)], slots=slots)

    def _runs(self, start: int, count: int) -> Iterator[tuple[SlotSpec, list[memoryview]]]:
        """The slots of a span block with their bytes, exact or not."""
        for index, (source, spec) in enumerate(zip(self.spans, self.layout.span_slots(count), strict=True)):
            kept = self.lossy.slots(index, spec, start, count) if self.lossy else None
            yield from kept if kept is not None else [(spec, source.runs(start, count))]


def _copied(draft: BlockDraft) -> BlockDraft:
    slots = [SlotDraft(slot.spec, [memoryview(b"".join(slot.buffers))]) for slot in draft.slots]
    return BlockDraft(kind=draft.kind, start=draft.start, tokens=draft.tokens, slots=slots)


def plan_reuse(
    durable: Sequence[BlockEntry], unchanged_tokens: int, checkpoints: Sequence[int] = ()
) -> tuple[BlockEntry, ...]:
    """The leading blocks of the last snapshot, in any number of files, that still match the cache: a sleep writes only
    new blocks.

    unchanged_tokens: how many leading tokens were neither dropped nor rewritten since. A partial last block is written
        again, so that blocks always stand back to back.
    checkpoints: the positions of the state records to keep; others are left out.
    """
    reused: list[BlockEntry] = []
    for entry in durable:
        if entry.kind == "state":
            if entry.start in checkpoints and entry.start <= unchanged_tokens:
                reused.append(entry)
            continue
        if entry.token_count != BLOCK_TOKENS or entry.start + BLOCK_TOKENS > unchanged_tokens:
            break
        reused.append(entry)
    return tuple(reused)


def cut(
    state: LiveState,
    layout: CacheLayout,
    *,
    durable: Sequence[BlockEntry],
    unchanged_tokens: int,
    canary: mx.array | None = None,
    is_lossy: bool = False,
    lossy: LossyTokens | None = None,
    end: int | None = None,
) -> Cut:
    """A consistent snapshot of the state as it is now.

    canary: float32 `[vocabulary]`, the canary's logits, if the state has records or is lossy.
    is_lossy: whether keys and values of the session were ever kept in few bits.
    lossy: the first tokens in the form to be kept, if that is in few bits.
    end: how many of the tokens, if not all: only the record of a checkpoint there can end them. The caches may hold any
        more of them, also such as are not in the ledger yet.

    Raises:
        InconsistentState: ledger and caches do not describe one span, or nothing has been read yet.
    """
    if not state.tokens:
        raise InconsistentState("A session that has read nothing has no state to keep.", token_count=0)
    is_whole = state.is_consistent and state.last_logits is not None
    if not (is_whole if end is None else state.holds(end)):
        raise InconsistentState(
            f"The ledger has {len(state.tokens)} tokens and the caches do not.", token_count=len(state.tokens)
        )
    count = len(state.tokens) if end is None else end
    # the end's record is at the end itself, and a position has room for one
    before_end = [position for position in state.checkpoints.positions if position < count]
    reused = plan_reuse(durable, unchanged_tokens, before_end)
    kept = {entry.start for entry in reused if entry.kind == "state"}
    between = [each for each in state.checkpoints if each.position not in kept]
    if end is None:
        assert state.last_logits is not None
        at_end = [checkpoint_of(state.caches, count, state.last_logits, state.random_key, state.passes, canary)]
    else:
        at_end = [each for each in state.checkpoints if each.position == end]
    return Cut(
        reused=reused,
        token_count=count,
        tokens=state.tokens.tobytes(),
        layout=layout,
        spans=span_sources(state, layout),
        checkpoints={each.position: _state_source(each, layout, is_lossy=is_lossy) for each in between},
        state=_state_source(at_end[0], layout, is_lossy=is_lossy) if at_end else None,
        lossy=lossy,
    )


def span_sources(state: LiveState, layout: CacheLayout) -> tuple[SpanSource | SegmentSource, ...]:
    """The memory of the span arrays as it is now, in stored order. Who holds this has the next model call copy all of
    it. Raises as `cut`."""
    return tuple(source for cache in _used(state, layout) for source in kind_of(cache).sources(cache))


def _used(state: LiveState, layout: CacheLayout) -> list[Any]:
    """The caches that the model uses. Raises InconsistentState: a cache is of another kind than the model's, or is
    empty or filled against the model's use."""
    found = []
    for entry, (path, cache) in zip(layout.entries, leaves(state.caches), strict=True):
        kind = kind_of(cache)
        if kind.name != entry.kind:
            raise InconsistentState(
                f"Cache {path} is of kind {kind.name}, and was {entry.kind} when the model was loaded.", path=path
            )
        if kind.is_empty(cache) == entry.in_use:
            raise InconsistentState(
                f"Cache {path} is {'empty' if entry.in_use else 'in use'}, unlike when the model was loaded.", path=path
            )
        if entry.in_use:
            found.append(cache)
    return found


def _state_source(checkpoint: Checkpoint, layout: CacheLayout, *, is_lossy: bool) -> StateSource:
    passes = memoryview(checkpoint.passes.tobytes())
    own = layout.state_slots(checkpoint.passes.run_count, canary=checkpoint.canary is not None, is_lossy=is_lossy)
    views = [memory.evaluated(checkpoint.logits), memory.evaluated(checkpoint.random_key), passes]
    if len(own) > len(views):
        views.append(memoryview(b"") if checkpoint.canary is None else memory.evaluated(checkpoint.canary))
    slots = list(zip(own, views, strict=True))
    for entry in layout.recorded():
        record = checkpoint.records[entry.path]
        numbers = memoryview(array("q", record.numbers).tobytes())
        views = [numbers, *(memory.evaluated(held) for held in record.arrays.values())]
        slots += zip(record_slots(entry, record), views, strict=True)
    return StateSource(checkpoint.position, tuple(slots))
