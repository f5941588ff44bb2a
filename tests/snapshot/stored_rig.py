"""Sessions over caches of every kind, slept into a store with the identity that a model's layout gives, and opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from torpor.memvid import BundleReader, Identity, Receipt, SessionUri, Store
from torpor.snapshot.caches import arrays_of
from torpor.snapshot.capture import cut
from torpor.snapshot.layout import CacheLayout, layout_of
from torpor.snapshot.lossy import LossyTokens
from torpor.snapshot.state import LiveState, token_array

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

VOCABULARY = 50
HEADS, KEY_DIM, VALUE_DIM = 2, 64, 32


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
        self.last = self.store.write_bundle(
            uri=self.uri,
            identity=identity or Identity(parts),
            parent=self.last.bundle_id if self.last else None,
            reused=snapshot.reused,
            blocks=snapshot.drafts(),
            session={"model": "m", "labels": list(labels)},
            token_count=snapshot.token_count,
        )
        return self.last

    def open(self, receipt: Receipt | None = None) -> BundleReader:
        """A reader of a version, the newest by default; `opened.close()` ends them all."""
        found = receipt or self.last
        assert found is not None
        return self.opened.enter_context(self.store.open_bundle(found.bundle_id))
