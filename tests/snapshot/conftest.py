"""Caches with something in them, and a store to put them into."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid.format.identity import Identity
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.snapshot import memory
from torpor.snapshot.state import LiveState, token_array
from torpor.tests.snapshot.stored_rig import Kept, Shelf

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models.cache import KVCache  # isort: skip

VOCABULARY = 50
HEADS, KEY_DIM, VALUE_DIM = 2, 8, 4
Grow = Callable[..., None]


@pytest.fixture
def dirty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a wake gets to fill is full of NaN, so that nothing comes back right that was not put there."""
    unfilled = memory.unfilled

    def dirty(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        array = unfilled(shape, dtype)
        memory.writable(array)[:] = b"\xff" * array.nbytes
        return array

    monkeypatch.setattr(memory, "unfilled", dirty)


@pytest.fixture
def grow() -> Grow:
    """Appends tokens to a state as a model would: other numbers in every layer, head and position."""

    def append(state: LiveState, count: int, dtype: mx.Dtype = mx.float32) -> None:
        held = len(state.tokens)
        for layer, cache in enumerate(state.caches):
            key = mx.random.key(1000 * layer + held)
            keys = mx.random.normal((1, HEADS, count, KEY_DIM), key=key).astype(dtype)
            values = mx.random.normal((1, HEADS, count, VALUE_DIM), key=key).astype(dtype)
            cache.update_and_fetch(keys, values)
        state.passes.add(count)
        state.tokens.extend((held + index) % VOCABULARY for index in range(count))
        state.last_logits = mx.random.normal((VOCABULARY,), key=mx.random.key(held + count))
        mx.eval(state.last_logits, [cache.state[:2] for cache in state.caches])

    return append


@pytest.fixture
def make_state(grow: Grow) -> Callable[..., LiveState]:
    """A state of that many tokens over plain caches of unlike key and value sizes."""

    def make(count: int, *, layers: int = 3, dtype: mx.Dtype = mx.float32) -> LiveState:
        state = LiveState(token_array(), [KVCache() for _ in range(layers)], None, mx.random.key(7))
        if count:
            grow(state, count, dtype)
        mx.eval(state.random_key)
        return state

    return make


@pytest.fixture
def identity() -> Identity:
    return Identity((("compute_dtype", "float32"), ("weights", "w" * 64)))


@pytest.fixture
def uri() -> SessionUri:
    return SessionUri("default", "agent")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", writable=True) as opened:
        yield opened


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as opened:
        yield opened


@pytest.fixture
def shelf(store: Store, uri: SessionUri, identity: Identity, pool: ThreadPoolExecutor) -> Shelf:
    return Shelf(store, uri, identity, pool)


def live_bytes(array: mx.array, count: int) -> bytes:
    """The bytes of the first tokens of an array `[1, heads, capacity, dim]`."""
    plain = mx.contiguous(array[:, :, :count]).view(mx.uint8)
    mx.eval(plain)
    return bytes(memoryview(plain))


@pytest.fixture
def kv_of() -> Callable[[LiveState], list[tuple[bytes, bytes]]]:
    """Keys' and values' live bytes of each layer."""

    def look(state: LiveState) -> list[tuple[bytes, bytes]]:
        count = len(state.tokens)
        caches: list[Any] = state.caches
        return [(live_bytes(cache.keys, count), live_bytes(cache.values, count)) for cache in caches]

    return look


@pytest.fixture
def kept(store: Store) -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []

    def make(*args: Any, slept: int = 0, **options: Any) -> Kept:
        """slept: how many tokens it has read and put to sleep."""
        made.append(Kept(store, *args, **options))
        if slept:
            made[-1].read(slept)
            made[-1].sleep()
        return made[-1]

    yield make
    for each in made:
        each.opened.close()
