"""Caches that share runs: what they hold is what a plain cache holds, and memory counts once (BR7, BR8, BR24)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from torpor.snapshot.caches import arrays_of, keep, length, resident_bytes, truncate, without_last
from torpor.snapshot.capture import cut
from torpor.snapshot.forking import fork, held_bytes, share
from torpor.snapshot.kinds import kind_of, shareable
from torpor.snapshot.layout import layout_of
from torpor.snapshot.runs import SEGMENT_TOKENS
from torpor.snapshot.state import LiveState, token_array
from torpor.tests.snapshot.growers import VOCABULARY, read_kv

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models.cache import KVCache  # isort: skip

LAYERS = 2
SEGMENT_BYTES = SEGMENT_TOKENS * 2 * (64 + 32) * 4  # of keys and values in a layer


def fresh(*, shared: bool = True) -> list[Any]:
    plain = [KVCache() for _ in range(LAYERS)]
    return [shareable(cache) for cache in plain] if shared else plain


def state_of(count: int, *, shared: bool = True) -> LiveState:
    state = LiveState(token_array(), fresh(shared=shared), None, mx.random.key(7))
    if count:
        read(state, count)
    return state


def read(state: LiveState, count: int, salt: int = 0) -> None:
    """Read tokens whose keys and values follow from their place and the salt."""
    for cache in state.caches:
        read_kv(cache, len(state.tokens) + 1000 * salt, count, mx.float32)
    state.passes.add(count)
    state.tokens.extend((len(state.tokens) + at) % VOCABULARY for at in range(count))
    state.last_logits = mx.zeros((VOCABULARY,))
    mx.eval(arrays_of(state.caches), state.last_logits)


def held(state: LiveState) -> list[np.ndarray]:
    found = []
    for cache in state.caches:
        kind = kind_of(cache)
        if not kind.is_empty(cache):
            found += [np.array(array[..., : cache.offset, :]) for array in kind.spans(cache).values()]
    return found


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("way", [[1], [63, 1], [64], [65], [1] * 130, [300, 1, 1, 90, 1], [64, 64, 1], [200, 120]])
def test_a_shareable_cache_holds_and_fetches_what_a_plain_one_does(way: list[int]) -> None:
    mine, plain = state_of(0), state_of(0, shared=False)
    for count in way:
        masks = [each.caches[0].make_mask(count, return_array=False, window_size=None) for each in (mine, plain)]
        assert masks[0] == masks[1]
        read(mine, count)
        read(plain, count)
        assert length(mine.caches) == length(plain.caches)
        assert same(held(mine), held(plain))


@pytest.mark.parametrize("count", [1, 64, 100, 257])
def test_a_fork_of_a_plain_state_sees_its_memory_and_the_plain_state_goes_on_apart_br7_br8(count: int) -> None:
    source = state_of(count, shared=False)
    child = fork(source, fresh())
    before = held(source)
    assert same(held(child), before)
    whole = count // SEGMENT_TOKENS
    assert all(sum(part.segments for part in cache.parts) == whole for cache in child.caches)
    if whole:
        lie = [address(cache.keys) for cache in source.caches]
        assert [address(cache.parts[0].run.keys) for cache in child.caches] == lie
    tail = sum(int(array.nbytes) for cache in child.caches for array in cache.tail())
    assert held_bytes([source, child]) == resident_bytes(source.caches) + tail
    read(source, 3, salt=5)
    if whole:
        assert held_bytes([source, child]) == resident_bytes(source.caches) + resident_bytes(child.caches)
    assert same(held(child), before)
    read(child, 2, salt=9)
    assert same([array[..., :count, :] for array in held(source)], before)


def address(array: mx.array) -> int:
    return int(np.asarray(array).__array_interface__["data"][0])


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_a_fork_copies_no_more_than_the_tail_br7(count: int) -> None:
    root = state_of(count)
    fork(root, fresh())
    alone = resident_bytes(root.caches)
    forks = [fork(root, fresh()) for _ in range(8)]
    tail = sum(int(array.nbytes) for cache in root.caches for array in cache.tail())
    assert tail <= LAYERS * SEGMENT_BYTES
    assert held_bytes([root, *forks]) == alone + 8 * tail


def test_forks_of_forks_share_each_run_and_a_fork_lives_on_without_them_br12_br14() -> None:
    root = state_of(130)
    child = fork(root, fresh())
    read(child, 100, salt=1)
    grandchild = fork(child, fresh())
    read(grandchild, 70, salt=2)
    runs = {id(part.run) for state in (root, child, grandchild) for part in state.caches[0].parts}
    assert len(runs) == 2
    wanted, before = held(grandchild), held_bytes([root, child, grandchild])
    own = sum(int(array.nbytes) for cache in root.caches for array in cache.tail())
    assert held_bytes([child, grandchild]) == before - own
    del root, child
    assert same(held(grandchild), wanted)


@pytest.mark.parametrize("common", [0, 1, 63, 64, 100, 128, 200, 300])
@pytest.mark.parametrize("more", [0, 5, 150])
def test_states_share_what_they_have_in_common_and_nothing_else_br7(common: int, more: int) -> None:
    """The source is of several runs, and goes on in another way; the other state was read apart."""
    source = state_of(min(common, 130))
    if common > 130:
        read(source, common - 130)
    fork(source, fresh())
    read(source, 40, salt=1)
    apart = state_of(common)
    read(apart, more + 1, salt=2)
    wanted = held(source), held(apart)
    share(apart, source)
    assert same(held(source), wanted[0])
    assert same(held(apart), wanted[1])
    theirs = {id(part.run) for part in source.caches[0].parts}
    found = sum(part.segments for part in apart.caches[0].parts if id(part.run) in theirs)
    assert found == common // SEGMENT_TOKENS
    if found:
        own = sum(part.segments for part in apart.caches[0].parts) - found
        tails = sum(int(array.nbytes) for cache in apart.caches for array in cache.tail())
        assert held_bytes([source, apart]) == held_bytes([source]) + own * LAYERS * SEGMENT_BYTES + tails
    read(apart, 3, salt=3)
    assert same(held(source), wanted[0])


@pytest.mark.parametrize("back", [0, 1, 63, 64, 65, 127, 128, 150, 199, 200, 230, 260])
def test_a_state_goes_back_to_any_token_and_leaves_no_row_behind(back: int) -> None:
    root = state_of(150)
    child = fork(root, fresh())
    read(child, 110)
    control = [array[..., :back, :] for array in held(child)] if back else []
    truncate(child.caches, back)
    assert (length(child.caches) or 0) == back
    assert same(held(child), control)
    for cache in child.caches:
        rows = cache.tail_tokens
        for tail in cache.tail():
            laid = np.array(tail.swapaxes(0, 1)).reshape(tail.shape[1], -1, tail.shape[3])
            assert not laid[:, rows:].any()
    read(child, 3, salt=4)
    assert same([array[..., :back, :] for array in held(child)][: len(control)], control)
    assert same([array[..., :150, :] for array in held(root)], held(state_of(150)))


@pytest.mark.parametrize("one_token", [True, False])
@pytest.mark.parametrize("count", [1, 64, 100, 128, 191])
def test_what_was_kept_comes_back_after_a_call_that_left_nan(count: int, *, one_token: bool) -> None:
    state = state_of(count)
    fork(state, fresh())
    before = held(state)
    put_back = keep(state.caches, one_token=one_token)
    for cache in state.caches:
        cache.append(mx.full((1, 2, 1, 64), float("nan")), mx.full((1, 2, 1, 32), float("nan")))
    mx.eval(arrays_of(state.caches))
    put_back()
    assert same(held(state), before)
    assert all(bool(mx.all(mx.isfinite(tail)).item()) for cache in state.caches for tail in cache.tail())


@pytest.mark.parametrize("count", [1, 64, 65, 128, 200])
def test_without_its_last_token_a_state_keeps_its_runs(count: int) -> None:
    state = state_of(count)
    fork(state, fresh())
    before, runs = held(state), [id(part.run) for cache in state.caches for part in cache.parts]
    with without_last(state.caches, count):
        assert (length(state.caches) or 0) == count - 1
        for cache in state.caches:
            read_kv(cache, 5000, 1, mx.float32)
    assert same(held(state), before)
    assert [id(part.run) for cache in state.caches for part in cache.parts] == runs


@pytest.mark.parametrize("count", [1, 64, 255, 256, 257, 600])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_shared_state_is_cut_into_the_blocks_of_a_plain_one(count: int, dtype: mx.Dtype) -> None:
    plain = LiveState(token_array(), fresh(shared=False), None, mx.random.key(7))
    for cache in plain.caches:
        read_kv(cache, 0, count, dtype)
    plain.tokens.extend(at % VOCABULARY for at in range(count))
    plain.passes.add(count)
    plain.last_logits = mx.zeros((VOCABULARY,))
    mx.eval(arrays_of(plain.caches), plain.last_logits)
    child = fork(plain, fresh())
    grandchild = fork(child, fresh())
    layout = layout_of(plain.caches, VOCABULARY)
    assert layout_of(grandchild.caches, VOCABULARY) == layout

    def blocks(state: LiveState) -> list[bytes]:
        drafts = cut(state, layout, durable=(), unchanged_tokens=0).drafts()
        return [b"".join(b"".join(slot.buffers) for slot in draft.slots) for draft in drafts]

    wanted = blocks(plain)
    assert blocks(child) == wanted
    assert blocks(grandchild) == wanted


def accounted(states: dict[int, LiveState]) -> int:
    """The bytes of what these states hold, told apart by where it lies."""
    buffers: dict[int, int] = {}
    own = 0
    for state in states.values():
        for cache in state.caches:
            own += sum(int(array.nbytes) for array in cache.tail())
            buffers |= {id(part.run): part.run.held_bytes for part in cache.parts}
    return own + sum(buffers.values())


@pytest.mark.one_in(1)
@pytest.mark.parametrize("steps", [1_000, pytest.param(10_000, marks=pytest.mark.heavy)])
def test_random_forks_reads_and_prunes_are_counted_exactly_and_leave_nothing_br24(steps: int) -> None:
    chance = random.Random(steps)
    mx.clear_cache()
    base = mx.get_active_memory()
    states, ledgers, number = {0: state_of(70)}, {0: [0] * 70}, 0
    for step in range(steps):
        name = chance.choice(list(states))
        act = chance.random()
        if act < 0.35 and len(states) < 40:
            number += 1
            states[number], ledgers[number] = fork(states[name], fresh()), list(ledgers[name])
        elif act < 0.75 or len(states) == 1:
            count, salt = chance.choice([1, 1, 1, 1, 5, 64]), chance.randrange(1, 50)
            if len(states[name].tokens) < 400:
                read(states[name], count, salt)
                ledgers[name] += [salt] * count
        else:
            del states[name], ledgers[name]
        if not step % 50:
            assert held_bytes(states.values()) == accounted(states)
            name = chance.choice(list(states))
            assert_holds(states[name], ledgers[name])
        if not step % 200:
            assert mx.get_active_memory() - base <= accounted(states) + 40 * 4096
    for name, state in states.items():
        assert_holds(state, ledgers[name])
    states.clear()
    del state
    assert held_bytes(states.values()) == 0
    assert mx.get_active_memory() - base <= 0


def assert_holds(state: LiveState, salts: list[int]) -> None:
    """The state holds what its history says: for each token the salt with which it was read."""
    cache, at = state.caches[0], 0
    keys = np.array(cache.gathered()[0])
    while at < len(salts):
        end = at
        while end < len(salts) and salts[end] == salts[at]:
            end += 1
        control = KVCache()
        read_kv(control, at + 1000 * salts[at], end - at, mx.float32)
        assert np.array_equal(keys[:, :, at:end], np.array(control.keys[:, :, : end - at]))
        at = end
