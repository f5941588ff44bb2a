"""Sessions over caches of every kind, slept into a store with the identity that a model's layout gives, and opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from torpor.memvid.format.blocks import BlockDraft, BlockEntry
from torpor.memvid.format.identity import Identity
from torpor.memvid.format.records import Receipt
from torpor.memvid.store import Store, VersionDraft
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.reader import BundleReader
from torpor.snapshot.caches import arrays_of
from torpor.snapshot.capture import cut
from torpor.snapshot.layout import CacheLayout, layout_of
from torpor.snapshot.lossy import LossyTokens
from torpor.snapshot.restore import WakePlan, allocate, plan_wake
from torpor.snapshot.state import LiveState, token_array

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models.cache import KVCache  # isort: skip

VOCABULARY = 50
HEADS, KEY_DIM, VALUE_DIM = 2, 64, 32
CONTEXT_TOKENS = 10_000


def write(
    store: Store,
    uri: SessionUri,
    identity: Identity,
    blocks: Iterable[BlockDraft],
    token_count: int,
    *,
    before: Receipt | None = None,
    reused: tuple[BlockEntry, ...] = (),
    labels: Sequence[str] = (),
    **options: Any,
) -> Receipt:
    """Write these blocks as a version, the next one after `before`."""
    parent, session = before.bundle_id if before else None, {"model": "m", "labels": list(labels)}
    return store.write_bundle(
        VersionDraft(
            uri=uri,
            identity=identity,
            parent=parent,
            reused=reused,
            blocks=blocks,
            session=session,
            block_tokens=token_count,
            **options,
        )
    )


def spoil(store: Store, payload: bytes) -> None:
    """Flip a bit where these bytes stand last, in the one pack of the store that has them."""
    (path,) = (path for path in Path(store.path).glob("packs/*.mvp") if payload in path.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.rindex(payload)] ^= 1
    path.write_bytes(data)


class Shelf:
    """Puts states into a store, as versions of one session, and takes them out again.

    Where no layout is told, it is the one that the state's own caches have.
    """

    def __init__(self, store: Store, uri: SessionUri, identity: Identity, pool: ThreadPoolExecutor) -> None:
        self.store, self.uri, self.identity, self.pool = store, uri, identity, pool

    def put(
        self,
        state: LiveState,
        layout: CacheLayout | None = None,
        *,
        before: Receipt | None = None,
        unchanged: int = 0,
        lossy: LossyTokens | None = None,
        **options: Any,
    ) -> Receipt:
        loss = {"is_lossy": lossy is not None or before is not None, "lossy": lossy}
        durable = before.entries if before else ()
        layout = layout or layout_of(state.caches, VOCABULARY)
        snapshot = cut(state, layout, durable=durable, unchanged_tokens=unchanged, **loss)
        options |= {"before": before, "reused": snapshot.reused}
        return self.write(snapshot.drafts(), snapshot.token_count, **options)

    def write(self, blocks: Iterable[BlockDraft], token_count: int, **options: Any) -> Receipt:
        return write(self.store, self.uri, self.identity, blocks, token_count, **options)

    def plan(
        self,
        layout: CacheLayout,
        at: int | None = None,
        *,
        identity: Identity | None = None,
        most: int = CONTEXT_TOKENS,
    ) -> WakePlan:
        """The plan of a wake. most: how many tokens the model's context holds."""
        with self.store.open_session(self.uri) as reader:
            return plan_wake(reader, identity or self.identity, layout, model="m", context_tokens=most, at=at)

    def take(self, layout: CacheLayout, caches: list[Any], at: int | None = None, **options: Any) -> LiveState:
        """Wake into empty caches."""
        with self.store.open_session(self.uri) as reader:
            filling = allocate(
                plan_wake(reader, self.identity, layout, model="m", context_tokens=CONTEXT_TOKENS, at=at)
            )
            filling.run(reader, self.pool, **options)
            return filling.assemble(caches, mx.random.key(0))

    def wake(self, like: LiveState, at: int | None = None, **options: Any) -> LiveState:
        """Wake into plain caches, as many as another state has."""
        return self.take(layout_of(like.caches, VOCABULARY), [KVCache() for _ in like.caches], at, **options)


class Kept:
    """One session: `read` tokens, `sleep`, `open` what slept.

    make: makes its caches, empty. idle: places of those that the model does not use.
    """

    def __init__(
        self,
        store: Store,
        make: Callable[[], list[Any]],
        *,
        dtype: mx.Dtype = mx.float32,
        idle: Sequence[int] = (),
        salt: int = 0,
        name: str = "agent",
    ) -> None:
        self.store, self.make, self.dtype, self.idle, self.salt = store, make, dtype, idle, salt
        self.uri = SessionUri("default", name)
        self.state = LiveState(token_array(), make(), None, mx.random.key(7))
        self.last: Receipt | None = None
        self.opened = ExitStack()

    def read(self, count: int, *, token: int | None = None) -> None:
        """Append tokens: in every layer, head and position other numbers, the same however many come at once."""
        held = len(self.state.tokens)
        self._fill(self.state.caches, held, count)
        self.state.passes.add(count)
        self.state.tokens.extend((at if token is None else token) % VOCABULARY for at in range(held, held + count))
        self.state.last_logits = mx.random.normal((VOCABULARY,), key=mx.random.key(held + count))
        mx.eval(arrays_of(self.state.caches), self.state.last_logits, self.state.random_key)

    def _fill(self, caches: list[Any], start: int, count: int) -> None:
        for layer, cache in enumerate(caches):
            if layer in self.idle:
                continue
            if hasattr(cache, "maybe_trim_front"):
                cache.maybe_trim_front()
            if hasattr(cache, "cache"):
                cache[0] = mx.array(self.numbers(layer, 0, start + count - 1, 1, KEY_DIM)[:, 0])
                cache[2] = mx.arange(start + count - 3, start + count, dtype=mx.int64)[None]
                continue
            keys = self.numbers(layer, 0, start, count, KEY_DIM)
            values = self.numbers(layer, 1, start, count, VALUE_DIM)
            cache.update_and_fetch(*(mx.array(each)[None].astype(self.dtype) for each in (keys, values)))

    def numbers(self, layer: int, side: int, start: int, count: int, dim: int) -> np.ndarray:
        """Vectors `[heads, count, dim]` of tokens from `start` on."""
        rows = [
            np.random.default_rng([self.salt, layer, side, at]).normal(size=(HEADS, 1, dim))
            for at in range(start, start + count)
        ]
        return np.concatenate(rows, axis=1).astype(np.float32)

    @property
    def layout(self) -> CacheLayout:
        caches = self.make()
        self._fill(caches, 0, 1)
        return layout_of(caches, VOCABULARY)

    def sleep(
        self,
        *,
        reuse: bool = True,
        labels: Sequence[str] = (),
        identity: Identity | None = None,
        lossy: LossyTokens | None = None,
    ) -> Receipt:
        """Put what has been read to sleep, referring to the last version's blocks unless told otherwise."""
        durable = self.last.entries if self.last and reuse else ()
        unchanged = self.last.token_count if self.last and reuse else 0
        loss = {"is_lossy": lossy is not None, "lossy": lossy}
        snapshot = cut(self.state, self.layout, durable=durable, unchanged_tokens=unchanged, **loss)
        parts = (("cache_layout", str(self.layout)), ("weights", "w" * 64))
        options: dict[str, Any] = {"before": self.last, "reused": snapshot.reused, "labels": labels}
        named = identity or Identity(parts)
        self.last = write(self.store, self.uri, named, snapshot.drafts(), snapshot.token_count, **options)
        return self.last

    def open(self, receipt: Receipt | None = None) -> BundleReader:
        """A reader of a version, the newest by default; `opened.close()` ends them all."""
        found = receipt or self.last
        return self.opened.enter_context(self.store.open_bundle(found.bundle_id))
