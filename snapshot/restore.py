"""Puts a bundle's state back, aside: nothing live is touched until all of it has been verified.

Three steps, because MLX belongs to the engine thread and reading does not: `allocate` (engine) makes the caches'
memory, `Filling.run` (I/O threads) reads each slot straight into it and hashes it in place, cache by cache, and
`Filling.assemble` (engine) turns the memory into caches.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ..memvid.answers import Lossy
from ..memvid.format.blocks import BlockEntry
from ..memvid.format.identity import Identity
from ..memvid.units import format_plural
from ..memvid.writing.reader import BundleReader
from . import memory
from .caches import truncate
from .canary import Expectation
from .capture import is_drawable
from .checkpoints import Checkpoint
from .errors import ContextTooShort, MalformedSnapshot, NonFiniteState, NoSuchPosition
from .identity import circumstances_in, require_same, tokens_from_elsewhere
from .kind import Record, dtype_named
from .kinds import kind_named, kind_of, leaves
from .layout import ArrayLayout, CacheLayout
from .lossy import StoredArray, expand
from .pages import LargePages
from .passes import Passes
from .records import CANARY_SLOT, LOGITS_SLOT, RANDOM_KEY_SLOT, StoredRecord, require_spans, stored_state
from .state import LiveState, token_array

OnProgress = Callable[[int, int], None]
ReadSlots = Callable[[BlockEntry, Sequence[tuple[int, Sequence[memoryview]]]], None]


@dataclass(frozen=True, slots=True)
class WakePlan:
    """The plan of a wake, made from the manifest and the block headers before any memory is taken.

    spans: the blocks to read, in order. arrays: the places of the span arrays in each. filled_tokens: how many tokens
        are in them.
    state: the record to read, None if none at or before the position can be used. records: its content, cache by cache.
    resumed_tokens: tokens in the caches once they are filled and cut back.
    target_tokens: tokens wanted; those in between have to be computed.
    tokens: the ledger's bytes up to the target; where keys and values are not there, up to the end of the call that
        read the target: all of that call is computed, and then cut back. passes: how it was read, as far as it is
        known. held_passes: the same for the caches' content.
    checkpoints: positions of the records in between that stay usable.
    has_canary: whether the record has a slot for the canary's logits.
    end: the record at the target, where the keys and values before it are not there, as of a stripped version: what is
        computed again ends as it says, or differs. None else. ends_within: the keys and values before the target are
        not there, and the session went on behind it: whole calls are computed, and cut back to it.
    """

    layout: CacheLayout
    spans: tuple[BlockEntry, ...]
    arrays: tuple[tuple[StoredArray, ...], ...]
    filled_tokens: int
    state: BlockEntry | None
    records: tuple[StoredRecord, ...]
    resumed_tokens: int
    target_tokens: int
    tokens: bytes
    passes: Passes
    held_passes: Passes
    checkpoints: tuple[int, ...]
    has_canary: bool = False
    end: BlockEntry | None = None
    ends_within: bool = False

    @property
    def has_logits(self) -> bool:
        """Whether the record's position is the one at which the caches resume."""
        return self.state is not None and self.state.start == self.resumed_tokens

    @property
    def is_cut_back(self) -> bool:
        """Whether the blocks to read go on past the position at which the caches resume."""
        return self.filled_tokens > self.resumed_tokens or (
            self.state is not None and self.state.start > self.resumed_tokens
        )

    @property
    def replayed_tokens(self) -> int:
        """Tokens to compute for the target; at least one if its logits are missing."""
        behind = len(self.tokens) // 4 - self.resumed_tokens
        return behind + int(self.ends_within) if behind else int(not self.has_logits)

    @property
    def read_bytes(self) -> int:
        """Bytes of state that the wake reads and verifies."""
        return sum(entry.raw_bytes for entry in self.spans) + (self.state.raw_bytes if self.state else 0)

    @property
    def loss(self) -> Lossy | None:
        """The loss of the blocks to read; None where all of them are exact."""
        kept = [
            (array.quantization.bits, entry.end)
            for entry, arrays in zip(self.spans, self.arrays, strict=True)
            for array in arrays
            if array.quantization is not None
        ]
        if not kept:
            return None
        return Lossy(min(bits for bits, _ in kept), min(max(end for _, end in kept), self.target_tokens))

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the caches take, padding included."""
        shapes = [(each.dtype, shape) for each, shape in self.span_shapes()]
        shapes += [(slot.dtype, slot.shape) for record in self.records for slot in record.slots]
        return sum(dtype_named(dtype).size * math.prod(shape) for dtype, shape in shapes)

    def span_shapes(self) -> Iterator[tuple[ArrayLayout, tuple[int, ...]]]:
        """The span arrays to fill, in the shape that mlx-lm would have given them."""
        for entry, each in self.layout.spans() if self.filled_tokens else ():
            yield each, (1, *each.sized(kind_named(entry.kind).capacity(self.filled_tokens)))


def plan_wake(
    reader: BundleReader,
    identity: Identity,
    layout: CacheLayout,
    *,
    model: str,
    context_tokens: int,
    at: int | None = None,
) -> WakePlan:
    """Check that the bundle is of this very model and has the slots of its caches (GM3: before any use), and plan the
    read.

    at: how many of the session's tokens are wanted, all if None. Caches that can be cut back to it are cut; else the
    nearest state record before it is read, and the rest is computed. So it is where the keys and values of later blocks
    are not there, as of a stripped version.

    Raises:
        IdentityMismatch: listing every part that differs.
        ContextTooShort: the snapshot is longer than the model's context.
        LayoutMismatch: a block's slots are not those of the model's caches.
        MalformedSnapshot: the chain is not spans with state records between them, or a token is not in the vocabulary.
        NoSuchPosition: the session has fewer tokens than are wanted.
        UnsupportedCache: a block holds a kind of cache that this version does not know.
        StoreError: a header is damaged.
    """
    require_same(reader.manifest.identity, identity, model=model)
    target = _target(reader, at)
    if target > context_tokens:
        raise ContextTooShort(
            f"The snapshot holds {format_plural(target, 'token')}, and the context of model {model!r} ends at "
            f"{context_tokens}.",
            token_count=target,
            context_tokens=context_tokens,
        )
    spans, states = _chain_of(reader)
    expected = functools.cache(layout.span_slots)  # the same for all blocks but the last
    near = [entry for entry in spans if entry.start < target]  # what stands behind need not be there
    arrays = {entry.id: require_spans(reader, entry, expected(entry.token_count)) for entry in near}
    return _planned(reader, layout, spans, arrays, states, target)


def _ledger(reader: BundleReader, layout: CacheLayout, spans: Sequence[BlockEntry], count: int) -> bytes:
    """The first tokens of a version, uint32, from the headers of its blocks. Raises MalformedSnapshot, StoreError."""
    tokens = b"".join(reader.read_header(entry).tokens for entry in spans if entry.start < count)[: 4 * count]
    highest = int(np.frombuffer(tokens, dtype="<u4").max(initial=0))
    if highest >= layout.vocabulary:
        raise MalformedSnapshot(
            f"The ledger has token {highest}, and the model's vocabulary ends at {layout.vocabulary - 1}.",
            token=highest,
            vocabulary=layout.vocabulary,
        )
    return tokens


def _passes_of(reader: BundleReader) -> Passes:
    """How the tokens of a version were read that no state record ends, as far as it tells. Raises MalformedSnapshot."""
    try:
        return Passes.in_map(reader.manifest.session)
    except ValueError as error:
        raise MalformedSnapshot(f"The snapshot does not say how its tokens were read: {error}.") from error


def _planned(
    reader: BundleReader,
    layout: CacheLayout,
    spans: Sequence[BlockEntry],
    arrays: Mapping[bytes, tuple[StoredArray, ...]],
    states: Sequence[BlockEntry],
    target: int,
) -> WakePlan:
    """The blocks to read for the first `target` tokens: those that leave the least to compute."""
    state: BlockEntry | None = None
    records: tuple[StoredRecord, ...] = ()
    has_canary = False
    resumed = target
    is_end_told = bool(states) and (states[-1].start <= target or reader.has(states[-1]))
    end = stored_state(reader, states[-1], layout) if is_end_told else None
    later = next((each for each in states if each.start >= target and reader.has(each)), None)
    if later is not None:
        found = end if end and later is states[-1] else stored_state(reader, later, layout)
        if later.start == target or all(record.reaches_back for record in found.records):
            state, records, has_canary = later, found.records, found.has_canary
    read_by = end.passes if end else _passes_of(reader)
    held, at_end, reach = _held(reader, spans, target), None, target
    if held < target:
        at_end = later if later is not None and later.start == target else None
        reach = read_by.end_behind(target) if layout.by_token else target
        state, records, has_canary = None, (), False
        resumed = read_by.whole_calls(held)
    if state is None and not layout.by_token:
        state = next((each for each in reversed(states) if each.start <= held and reader.has(each)), None)
        resumed = state.start if state else 0
        if state is not None:
            found = stored_state(reader, state, layout)
            records, has_canary = found.records, found.has_canary
    wanted = tuple(entry for entry in spans if entry.start < resumed)
    return WakePlan(
        layout=layout,
        spans=wanted,
        arrays=tuple(arrays[entry.id] for entry in wanted),
        filled_tokens=wanted[-1].end if wanted else 0,
        state=state,
        records=records,
        resumed_tokens=resumed,
        target_tokens=target,
        tokens=_ledger(reader, layout, spans, reach),
        passes=read_by.cut(reach),
        held_passes=read_by.cut_back(resumed),
        checkpoints=tuple(
            each.start for each in states if each.start <= target and each is not states[-1] and reader.has(each)
        ),
        has_canary=has_canary,
        end=at_end,
        ends_within=held < target < reader.manifest.block_tokens and layout.by_token,
    )


def _held(reader: BundleReader, spans: Sequence[BlockEntry], target: int) -> int:
    """How many of the first `target` tokens have keys and values that are there, in whole blocks."""
    lacking = next((each for each in spans if each.start < target and not reader.has(each)), None)
    return target if lacking is None else lacking.start


def _target(reader: BundleReader, at: int | None) -> int:
    held, unread = reader.manifest.block_tokens, reader.manifest.unread_tokens
    if not held and not unread:
        raise MalformedSnapshot("The bundle holds no tokens.", bundle_id=reader.bundle_id)
    if at is None:
        return held
    if not 1 <= at <= held:
        raise no_such_position(f"Version {reader.manifest.version} of {reader.manifest.uri}", held, at, unread)
    return at


def no_such_position(what: str, held: int, at: int, unread: int = 0, *, is_awake: bool = False) -> NoSuchPosition:
    """The error for a position beyond the `held` tokens of a version or of an awake session. what: its name. unread:
    tokens of its ledger behind those. is_awake: whether its session has to sleep before a wake at a token."""
    if held < at <= held + unread:
        return NoSuchPosition(
            f"{what} has the state of {format_plural(held, 'token')}, and {format_plural(unread, 'token')} more "
            f"as a ledger alone, so it cannot be had at token {at} now. Wake it whole first and put it to sleep; "
            "then it can be.",
            token_count=held,
            at=at,
        )
    first = "put the session to sleep, and " if is_awake else ""
    return NoSuchPosition(
        f"{what} holds {format_plural(held + unread, 'token')}, and there is no position {at} in it; "
        f"{first}give one from 1 to {held}.",
        token_count=held,
        at=at,
    )


def _chain_of(reader: BundleReader) -> tuple[list[BlockEntry], list[BlockEntry]]:
    """A bundle's spans and its state records, each in order. The store promises that they stand back to back."""
    spans = [entry for entry in reader.entries if entry.kind == "span"]
    states = [entry for entry in reader.entries if entry.kind == "state"]
    if len({entry.start for entry in states} - {0}) != len(states):
        raise MalformedSnapshot(
            "The bundle has a state record at token 0, or two at one token.", bundle_id=reader.bundle_id
        )
    return spans, states


@dataclass(slots=True)
class Filling:
    """Memory that is being filled.

    spans: for each span array in stored order integers `[1, heads, capacity, dim]`. records: for each record its
    arrays. granted: the part that is still to be filled. expected: the canary's logits, once read; None if none was
    kept for the position at which the caches resume.
    """

    plan: WakePlan
    spans: list[mx.array]
    records: list[list[mx.array]]
    granted: memory.Grant
    expected: Expectation | None = None
    _logits: bytearray = field(default_factory=bytearray)
    _random_key: bytearray = field(default_factory=bytearray)

    def run(self, reader: BundleReader, pool: Executor, on_progress: OnProgress | None = None) -> None:
        """Read and verify every slot, on the threads of the pool.

        Raises:
            StoreError: a byte does not match its block id; nothing live has been changed.
        """
        jobs = [pool.submit(job) for job in self._jobs(reader.read_slots_into, LargePages())]
        try:
            for done, job in enumerate(jobs, start=1):
                job.result()
                if on_progress is not None:
                    on_progress(self.plan.read_bytes * done // len(jobs), self.plan.read_bytes)
        finally:
            # After a failure the rest is not worth reading, but no thread may go on writing into freed memory.
            for job in jobs:
                job.cancel()
            for job in jobs:
                if not job.cancelled():
                    job.exception()
            self.granted.done()
        if self.plan.state is not None:
            self._logits = reader.read_slot(self.plan.state, LOGITS_SLOT)
            self._random_key = reader.read_slot(self.plan.state, RANDOM_KEY_SLOT)
            self._expect(reader, self.plan.state)

    def _expect(self, reader: BundleReader, state: BlockEntry) -> None:
        if not self.plan.has_logits:
            return
        # The session map tells only the environment that computed the end. A record that was the end of a snapshot
        # before it went on elsewhere, and is so again, may come from another.
        manifest = reader.manifest
        device = circumstances_in(manifest.session.get("backend")).get("device", "cpu")
        is_told = state.start == manifest.block_tokens and state.start > tokens_from_elsewhere(manifest.session)
        if not self.plan.has_canary:
            # the last token is run again alone: the same bits only if it was read alone
            is_exact = is_told and self.plan.passes.cut(state.start).ends_alone
            self.expected = Expectation(bytes(self._logits), is_exact, device)
        elif logits := reader.read_slot(state, CANARY_SLOT):
            self.expected = Expectation(bytes(logits), is_told, device)

    def assemble(self, caches: list[Any], random_key: mx.array) -> LiveState:
        """The caches, over the filled memory, cut back to where they resume, with ledger, logits and random key.

        caches: empty ones of the model's own making; the state becomes their owner.
        random_key: for a state without its own, because no record is of its position; its logits are then missing too
            (None).

        Raises:
            NonFiniteState: no token can be drawn from the logits (threat 11).
        """
        self._fill(caches)
        plan = self.plan
        logits = None
        if plan.has_logits:
            if not is_drawable(self._logits):
                raise NonFiniteState(
                    "The snapshot's logits hold NaN or infinity; wake an earlier version.",
                    slot="logits",
                    start=plan.resumed_tokens,
                )
            logits = mx.array(np.frombuffer(self._logits, dtype="<f4"))
            random_key = mx.array(np.frombuffer(self._random_key, dtype="<u4"))
        state = LiveState(
            tokens=token_array(plan.tokens[: 4 * plan.resumed_tokens]),
            caches=caches,
            last_logits=logits,
            random_key=random_key,
            passes=plan.held_passes,
        )
        state.checkpoints.record_bytes = plan.layout.record_bytes
        state.checkpoints.became_durable(plan.checkpoints)
        return state

    def _fill(self, caches: list[Any]) -> None:
        plan = self.plan
        if not plan.resumed_tokens:
            return
        spans = iter(self.spans)
        records = {
            stored.entry.path: _record(stored, arrays)
            for stored, arrays in zip(plan.records, self.records, strict=True)
        }
        for entry, (path, cache) in zip(plan.layout.entries, leaves(caches), strict=True):
            if entry.in_use:
                held = {each.name: memory.as_dtype(next(spans), dtype_named(each.dtype)) for each in entry.spans}
                kind_of(cache).fill(cache, plan.filled_tokens, held, records.get(path))
        if plan.is_cut_back:
            truncate(caches, plan.resumed_tokens)

    def _jobs(self, source: ReadSlots, large: LargePages) -> Iterator[Callable[[], None]]:
        """The reads that fill each array."""
        if self.spans:
            paths = [entry.path for entry, _ in self.plan.layout.spans()]
            for _, indexes in itertools.groupby(range(len(paths)), key=paths.__getitem__):
                yield partial(self._fill_spans, source, large, list(indexes))
        for record, arrays in zip(self.plan.records, self.records, strict=True):
            for slot, words in enumerate(arrays, start=record.first_slot):
                yield partial(self._fill_whole, source, large, slot, words)

    def _fill_spans(self, source: ReadSlots, large: LargePages, indexes: Sequence[int]) -> None:
        """Fill one cache's span arrays, which lie side by side in each block."""
        for index in indexes:
            large.back(self.spans[index])
        for entry, arrays in zip(self.plan.spans, self.plan.arrays, strict=True):
            reads: list[tuple[int, Sequence[memoryview]]] = []
            packed = []
            for index in indexes:
                stored = arrays[index]
                if stored.quantization is None:
                    reads.append((stored.first_slot, self._runs(index, entry)))
                else:
                    parts = [memoryview(bytearray(slot.size_bytes)) for slot in stored.slots]
                    reads += [(stored.first_slot + at, [part]) for at, part in enumerate(parts)]
                    packed.append((index, stored, parts))
            source(entry, reads)
            for index, stored, parts in packed:
                np.asarray(self.spans[index])[0, ..., entry.start : entry.end, :] = expand(stored, parts)
        for index in indexes:
            # The memory may hold old values, and a NaN among them would outlive a mask's zero.
            np.asarray(self.spans[index])[..., self.plan.filled_tokens :, :] = 0
            self.granted.filled(self.spans[index].nbytes)

    def _runs(self, index: int, entry: BlockEntry) -> list[memoryview]:
        words = self.spans[index]
        *outer, capacity, dim = words.shape
        whole = memory.SpanSource(memory.writable(words), math.prod(outer), capacity, dim * words.itemsize)
        return whole.runs(entry.start, entry.token_count)

    def _fill_whole(self, source: ReadSlots, large: LargePages, slot: int, words: mx.array) -> None:
        assert self.plan.state is not None
        large.back(words)
        source(self.plan.state, [(slot, [memory.writable(words)])])
        self.granted.filled(words.nbytes)


def read_checkpoint(reader: BundleReader, entry: BlockEntry, layout: CacheLayout) -> Checkpoint:
    """A state record as a checkpoint in memory, verified. Leaves out its canary's logits: it is for a chain with other
    blocks before it, from which the canary would compute something else. Runs on the engine thread.

    Raises:
        LayoutMismatch, UnsupportedCache, MalformedSnapshot; StoreError if it is damaged.
    """
    stored = stored_state(reader, entry, layout)
    records = {}
    for record in stored.records:
        arrays = []
        for slot, spec in enumerate(record.slots, start=record.first_slot):
            words = memory.allocate(spec.shape, dtype_named(spec.dtype))
            reader.read_slots_into(entry, [(slot, [memory.writable(words)])])
            arrays.append(words)
        records[record.entry.path] = _record(record, arrays)
    logits = mx.array(np.frombuffer(reader.read_slot(entry, LOGITS_SLOT), dtype="<f4"))
    random_key = mx.array(np.frombuffer(reader.read_slot(entry, RANDOM_KEY_SLOT), dtype="<u4"))
    mx.eval([list(record.arrays.values()) for record in records.values()], logits, random_key)
    return Checkpoint(entry.start, records, logits, random_key, stored.passes)


def _record(stored: StoredRecord, arrays: Sequence[mx.array]) -> Record:
    named = zip(stored.array_names(), stored.slots, arrays, strict=True)
    return Record(
        stored.numbers, {name: memory.as_dtype(words, dtype_named(slot.dtype)) for name, slot, words in named}
    )


def allocate(plan: WakePlan) -> Filling:
    """Memory for the caches, of the capacity that mlx-lm would have given them. Raises NotEnoughMemory: the system does
    not have it; MLX itself would end the process."""
    granted = memory.grant(plan.memory_bytes)
    spans = [memory.unfilled(shape, dtype_named(each.dtype)) for each, shape in plan.span_shapes()]
    records = [
        [memory.unfilled(slot.shape, dtype_named(slot.dtype)) for slot in record.slots] for record in plan.records
    ]
    return Filling(plan, spans, records, granted)
