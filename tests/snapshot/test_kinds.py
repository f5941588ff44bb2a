"""Every kind of cache: what is kept of it comes back bit for bit, and what it cannot do is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torpor.snapshot.caches import (
    arrays_of,
    can_truncate,
    growth_of,
    is_empty,
    keep,
    length,
    resident_bytes,
    truncate,
    without_last,
)
from torpor.snapshot.errors import InconsistentState, UnsupportedCache
from torpor.snapshot.kind import dtype_named, name_of_dtype
from torpor.snapshot.kinds import KINDS, kind_named, kind_of, leaves, quantized
from torpor.snapshot.layout import layout_of
from torpor.tests.snapshot import growers
from torpor.tests.snapshot.growers import (
    GROWERS,
    VOCABULARY,
    Grower,
    Run,
    fingerprint,
    read_arrays,
    read_chunked,
    read_kv,
)
from torpor.tests.snapshot.stored_rig import Shelf

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models import cache as caches  # isort: skip

pytestmark = pytest.mark.usefixtures("dirty_memory")

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
WAYS = {
    "one": [1],
    "one by one": [1] * 40,
    "to the window": [15, 1],
    "past the window by one": [16, 1],
    "past the window, then at once": [10, 1, 1, 20, 1, 1, 9],
    "255": [254, 1],
    "256": [255, 1],
    "257": [256, 1],
    "long": [256, 200, 1, 1, 1],
    "at once": [300],
}


def test_every_kind_has_a_grower() -> None:
    """By which the tests of all kinds, and the fixtures of a release, take it up."""
    grown = {kind_of(cache).name for grower in GROWERS.values() for _, cache in leaves([grower.make()])}
    assert grown == KINDS.keys(), "add a row to GROWERS in tests/snapshot/growers.py"


@pytest.mark.one_in(14)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", GROWERS)
def test_what_was_slept_wakes_bit_for_bit_and_goes_on_alike_t11(shelf: Shelf, kind: str, way: str) -> None:
    run = Run(GROWERS[kind], mx.float32)
    for count in WAYS[way]:
        run.read(count)
    shelf.put(run.state, run.layout())
    again = Run(GROWERS[kind], mx.float32)
    again.state = shelf.take(run.layout(), run.fresh())
    assert fingerprint(again.state.caches) == fingerprint(run.state.caches)
    assert again.state.tokens == run.state.tokens
    assert list(again.state.passes) == list(run.state.passes)
    assert again.state.is_consistent
    for count in (1, 1, 5, 1, 30, 1, 1):
        run.read(count)
        again.read(count)
        assert fingerprint(again.state.caches) == fingerprint(run.state.caches), f"after {count} more"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", GROWERS)
def test_every_element_type_comes_back_as_it_was_t11(shelf: Shelf, kind: str, dtype: mx.Dtype) -> None:
    run = Run(GROWERS[kind], dtype)
    for count in (20, 1):
        run.read(count)
    shelf.put(run.state, run.layout())
    assert fingerprint(shelf.take(run.layout(), run.fresh()).caches) == fingerprint(run.state.caches)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("way", ["one by one", "to the window", "past the window, then at once", "at once", "long"])
@pytest.mark.parametrize("kind", GROWERS)
def test_what_is_put_back_is_what_was_whatever_was_read_since_qx7(kind: str, way: str) -> None:
    run = Run(GROWERS[kind], mx.float32)
    for count in WAYS[way]:
        run.read(count)
    before = fingerprint(run.state.caches)
    put_back = run.state.kept()
    for count in (1, 20, 1, 1):
        run.read(count)
    put_back()
    assert fingerprint(run.state.caches) == before
    assert run.state.is_consistent
    for again in range(20):
        put_back = run.state.kept(one_token=True)
        before = fingerprint(run.state.caches)
        run.read(1)
        put_back()
        assert fingerprint(run.state.caches) == before, f"at token {again}"
        run.read(1)


@pytest.mark.parametrize("kind", GROWERS)
def test_a_failure_in_the_first_read_leaves_empty_caches_qx7(kind: str) -> None:
    run = Run(GROWERS[kind], mx.float32)
    put_back = keep(run.state.caches)
    GROWERS[kind].read(run.state.caches[0], 0, 5, mx.float32)
    put_back()
    assert is_empty(run.state.caches)
    assert resident_bytes(run.state.caches) == 0
    again, control = Run(GROWERS[kind], mx.float32), Run(GROWERS[kind], mx.float32)
    again.state.caches = run.state.caches
    again.read(3)
    control.read(3)
    assert fingerprint(again.state.caches) == fingerprint(control.state.caches)


@pytest.mark.parametrize("kind", ["plain", "concatenating", "quantised to 8 bits", "quantised to 4 bits"])
@pytest.mark.parametrize("count", [1, 255, 256, 257])
@pytest.mark.parametrize("grown", [0, 1, 3])
def test_a_failure_while_the_last_token_is_read_again_leaves_the_caches_as_they_were(
    kind: str, count: int, grown: int
) -> None:
    """grown: caches that had it again when the call failed."""
    run = Run(GROWERS[kind], mx.float32)
    run.read(count)
    before = fingerprint(run.state.caches)

    def fail() -> None:
        with without_last(run.state.caches, count):
            for cache in run.state.caches[:grown]:
                read_kv(cache, 7000, 1, mx.float32)
            raise RuntimeError("the model broke")

    with pytest.raises(RuntimeError, match="the model broke"):
        fail()
    assert fingerprint(run.state.caches) == before


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["plain", "concatenating", "quantised to 8 bits", "quantised to 4 bits"])
@pytest.mark.parametrize("at", [1, 255, 256, 257, 299, 300])
def test_what_is_cut_by_token_wakes_at_any_token(shelf: Shelf, kind: str, at: int) -> None:
    run, control = Run(GROWERS[kind], mx.float32), Run(GROWERS[kind], mx.float32)
    run.read(300)
    shelf.put(run.state, run.layout())
    control.read(at)
    woken = shelf.take(run.layout(), run.fresh(), at)
    assert fingerprint(woken.caches) == fingerprint(control.state.caches)
    assert woken.tokens == control.state.tokens
    assert (woken.last_logits is None) == (at != 300)
    more = Run(GROWERS[kind], mx.float32)
    more.state = woken
    for count in (1, 30):
        more.read(count)
        control.read(count)
        assert fingerprint(more.state.caches) == fingerprint(control.state.caches)


@pytest.mark.parametrize("held", [8, 15, 16, 17, 40])
def test_a_window_goes_back_only_while_nothing_has_left_it_ms3(held: int) -> None:
    """MS3: unwrapped it is cut, and goes on as one that never read further; one token past the window it is refused."""
    run, control = Run(GROWERS["rotating"], mx.float32), Run(GROWERS["rotating"], mx.float32)
    for _ in range(held):
        run.read(1)
    if held > 16:
        assert not can_truncate(run.state.caches, 7)
        with pytest.raises(InconsistentState, match="token 7"):
            truncate(run.state.caches, 7)
        assert length(run.state.caches) == held
        return
    control.read(7)
    truncate(run.state.caches, 7)
    del run.state.tokens[7:]
    assert fingerprint(run.state.caches) == fingerprint(control.state.caches)
    for count in (1, 1, 20, 1, 1):
        run.read(count)
        control.read(count)
        assert fingerprint(run.state.caches) == fingerprint(control.state.caches)


def test_a_window_that_was_filled_at_once_beyond_its_size_does_not_go_back_ms3() -> None:
    """MS3: all rows are still there, in a temporary buffer; a state of that length would have had fewer."""
    run = Run(GROWERS["rotating"], mx.float32)
    run.read(30)
    assert not can_truncate(run.state.caches, 20)


def test_a_chunk_goes_back_only_while_nothing_has_left_it() -> None:
    run = Run(GROWERS["chunked"], mx.float32)
    run.read(16)
    assert can_truncate(run.state.caches, 3)
    run.read(1)
    run.read(1)
    assert not can_truncate(run.state.caches, 17)
    assert can_truncate(run.state.caches, 18)


@pytest.mark.parametrize("kind", ["arrays", "pooled", "list"])
def test_a_recurrence_does_not_go_back_ms4(kind: str) -> None:
    run = Run(GROWERS[kind], mx.float32)
    run.read(5)
    assert not can_truncate(run.state.caches, 4)
    with pytest.raises(InconsistentState):
        truncate(run.state.caches, 4)


def test_a_cache_that_the_model_leaves_empty_is_empty_again_when_it_wakes(shelf: Shelf) -> None:
    idle = Grower(caches.KVCache, lambda *_: None)
    run = Run(idle, mx.float32)
    run.read(300)
    shelf.put(run.state, run.layout())
    again = shelf.take(run.layout(), run.fresh())
    assert [kind_of(cache).is_empty(cache) for cache in again.caches] == [True, False, True]
    assert again.is_consistent


def test_a_model_of_recurrent_caches_alone_sleeps_and_wakes(shelf: Shelf) -> None:
    class Alone(Run):
        def fresh(self) -> list[Any]:
            return [caches.ArraysCache(4)]

        def read(self, count: int) -> None:
            held = len(self.state.tokens)
            read_arrays(self.state.caches[0], held, count, self.dtype)
            self.state.passes.add(count)
            self.state.tokens.extend([1] * count)
            self.state.last_logits = mx.zeros((VOCABULARY,))
            mx.eval(arrays_of(self.state.caches), self.state.last_logits)

        def layout(self) -> Any:
            probe = Alone(self.grower, self.dtype)
            probe.read(1)
            return layout_of(probe.state.caches, VOCABULARY)

    run = Alone(GROWERS["arrays"], mx.float32)
    run.read(600)
    shelf.put(run.state, run.layout())
    again = shelf.take(run.layout(), run.fresh())
    assert fingerprint(again.caches) == fingerprint(run.state.caches)
    assert len(again.tokens) == 600
    assert length(again.caches) is None
    assert again.is_consistent


# --- what has no adapter


class Derived(caches.KVCache):
    """A subclass may keep more than we would save."""


@pytest.mark.parametrize("other", [Derived, lambda: None, lambda: caches.BatchKVCache([0])])
def test_a_cache_without_adapter_is_refused_by_its_name(other: Callable[[], Any]) -> None:
    name = type(other()).__name__
    for held in ([caches.KVCache(), other()], [caches.CacheList(caches.KVCache(), other())]):
        for use in (length, resident_bytes, keep, is_empty, lambda them: layout_of(them, VOCABULARY)):
            with pytest.raises(UnsupportedCache, match=name) as refusal:
                use(held)
            assert refusal.value.cache_kind == name


def test_a_stored_kind_without_adapter_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedCache, match="'hologram/3'") as refusal:
        kind_named("hologram/3")
    assert refusal.value.cache_kind == "hologram/3"


def test_a_recurrent_cache_in_a_batch_is_refused() -> None:
    cache = caches.ArraysCache(1, left_padding=[0])
    cache[0] = mx.zeros((1, 2))
    with pytest.raises(UnsupportedCache, match="batch"):
        layout_of([cache], VOCABULARY)


def test_an_element_type_that_cannot_be_stored_is_refused_threat_14() -> None:
    cache = caches.KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 1, 2), mx.complex64), mx.zeros((1, 1, 1, 2), mx.complex64))
    with pytest.raises(UnsupportedCache, match="complex64"):
        layout_of([cache], VOCABULARY)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int64, mx.uint32, mx.bool_, mx.uint8])
def test_a_stored_element_type_is_that_of_mlx(dtype: mx.Dtype) -> None:
    assert dtype_named(name_of_dtype(mx.zeros((1,), dtype))) == dtype


# --- quantized in the place of plain


def test_plain_caches_and_those_in_lists_can_be_quantised_and_others_stay() -> None:
    ring = caches.RotatingKVCache(max_size=4)
    listed = quantized(caches.CacheList(ring, caches.KVCache()), bits=4, group_size=32)
    assert listed[0] is ring
    assert (listed[1].bits, listed[1].group_size) == (4, 32)
    assert isinstance(quantized(caches.KVCache(), bits=8, group_size=64), caches.QuantizedKVCache)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", GROWERS)
def test_what_caches_take_is_never_more_than_was_said_before(kind: str, way: str) -> None:
    run, at_once = Run(GROWERS[kind], mx.float32), max(WAYS[way])
    layout = run.layout()
    for count in WAYS[way]:
        before, tokens = resident_bytes(run.state.caches), len(run.state.tokens) + count
        growth = growth_of(run.state.caches, layout, at_once)(tokens)
        run.read(count)
        assert resident_bytes(run.state.caches) - before <= growth
        assert resident_bytes(run.state.caches) <= layout.most_bytes(tokens, at_once)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "grower",
    [*GROWERS.values(), Grower(lambda: caches.ChunkedKVCache(2048), read_chunked)],
    ids=[*GROWERS, "chunked over 2048"],
)
def test_what_caches_take_after_long_calls_is_what_was_said_and_they_hold_the_same(
    grower: Grower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm keeps rows that do not suffice where the tokens end with a step, and adds as many as the call needs."""
    run, plain = (Run(grower, mx.float32) for _ in range(2))
    layout, calls = run.layout(), (712, 257, 55, 257)
    for count in calls:
        before, tokens = resident_bytes(run.state.caches), len(run.state.tokens) + count
        growth = growth_of(run.state.caches, layout, max(calls))(tokens)
        run.read(count)
        assert resident_bytes(run.state.caches) - before <= growth
        for entry, (_, cache) in zip(layout.entries, leaves(run.state.caches), strict=True):
            rows = kind_of(cache).most_capacity(dict(entry.settings), tokens, max(calls))
            assert not hasattr(cache, "keys") or cache.nbytes <= entry.row_bytes * rows, entry
    monkeypatch.setattr(growers, "make_room", lambda _caches, _count: None)
    for count in calls:
        plain.read(count)
    assert fingerprint(run.state.caches) == fingerprint(plain.state.caches)


def test_a_cache_that_has_the_rows_already_grows_by_nothing() -> None:
    run = Run(GROWERS["plain"], mx.float32)
    layout = run.layout()
    run.read(10)
    assert growth_of(run.state.caches, layout, 256)(256) == 0
    assert growth_of(run.state.caches, layout, 256)(257) == 3 * 256 * 2 * (64 + 32) * 4


def test_resident_bytes_count_the_padding() -> None:
    run = Run(GROWERS["plain"], mx.float32)
    run.read(1)
    assert resident_bytes(run.state.caches) == 3 * 256 * 2 * (64 + 32) * 4
