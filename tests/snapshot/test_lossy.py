"""Keys and values in few bits: what comes back is what was promised of them, and all else is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from torpor.memvid.answers import Lossy
from torpor.memvid.errors import CorruptBlock
from torpor.memvid.format.blocks import BLOCK_TOKENS, BlockDraft, SlotDraft, SlotSpec
from torpor.snapshot import memory
from torpor.snapshot.caches import truncate
from torpor.snapshot.capture import Cut, cut
from torpor.snapshot.checkpoints import checkpoint_of
from torpor.snapshot.errors import LayoutMismatch, MalformedSnapshot, NonFiniteState, UnsupportedCache
from torpor.snapshot.kinds import kind_of, leaves
from torpor.snapshot.layout import described, layout_of
from torpor.snapshot.lossy import LossyTokens, StoredArray, arranged, expand, lossy_in, quantize, stored_bytes, worst
from torpor.snapshot.lossy_kinds import Quantization, choose
from torpor.snapshot.restore import read_checkpoint
from torpor.snapshot.state import LiveState, token_array
from torpor.tests.snapshot.growers import GROWERS, VOCABULARY, Run, fingerprint
from torpor.tests.snapshot.stored_rig import Shelf, spoil

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models.cache import KVCache  # isort: skip

pytestmark = pytest.mark.usefixtures("dirty_memory")

HEADS, KEY_DIM, VALUE_DIM = 2, 64, 96
FLOATS = [mx.float32, mx.float16, mx.bfloat16]


def state_of(count: int, *, dtype: mx.Dtype = mx.float32, key_dim: int = KEY_DIM, layers: int = 2) -> LiveState:
    """Plain caches of random numbers of all sizes, keys and values in groups of 64 and of 32."""
    caches = [KVCache() for _ in range(layers)]
    for layer, cache in enumerate(caches):
        key = mx.random.key(layer)
        sizes = mx.exp(1.5 * mx.random.normal((1, HEADS, count, 1), key=key))
        cache.update_and_fetch(
            (sizes * mx.random.normal((1, HEADS, count, key_dim), key=key)).astype(dtype),
            (sizes * mx.random.normal((1, HEADS, count, VALUE_DIM), key=key)).astype(dtype),
        )
    state = LiveState(token_array(), caches, mx.random.normal((VOCABULARY,)), mx.random.key(7))
    state.tokens.extend(at % VOCABULARY for at in range(count))
    state.passes.add(count)
    mx.eval(state.last_logits, state.random_key, [cache.state[:2] for cache in caches])
    return state


def run(steps: Any) -> Any:
    """The result of steps, all of them at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def lossy_of(state: LiveState, tokens: int, bits: int, start: int = 0) -> LossyTokens:
    found = run(quantize(state.caches, layout_of(state.caches, VOCABULARY), bits, start, tokens))
    assert isinstance(found, LossyTokens)
    return found


def there_and_back(rows: mx.array, bits: int) -> mx.array:
    """What MLX makes of rows in that many bits, computed in float32 and rounded once. A GPU would round once less."""
    size = 64 if rows.shape[-1] % 64 == 0 else 32
    words, scales, biases = mx.quantize(rows, group_size=size, bits=bits)
    wide = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), size, bits, stream=mx.cpu)
    return wide.astype(rows.dtype)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [256, 600])
def test_what_comes_back_is_quantised_and_dequantised_by_mlx_bit_for_bit(
    shelf: Shelf, count: int, bits: int, dtype: mx.Dtype
) -> None:
    state, before = state_of(count, dtype=dtype), state_of(count, dtype=dtype)
    kept = count - count % BLOCK_TOKENS
    shelf.put(state, lossy=lossy_of(state, kept, bits))
    again = shelf.wake(state)
    for found, cache in zip(again.caches, before.caches, strict=True):
        for name in ("keys", "values"):
            was, now = getattr(cache, name)[..., :count, :], getattr(found, name)[..., :count, :]
            assert mx.array_equal(now[..., :kept, :], there_and_back(was[..., :kept, :], bits))
            assert mx.array_equal(now[..., kept:, :], was[..., kept:, :]), "the block that is not full stays exact"
            assert not mx.array_equal(now[..., :kept, :], was[..., :kept, :])
            assert now.dtype == dtype


@pytest.mark.parametrize("bits", [8, 4])
def test_float32_is_what_dequantize_gives_of_it(shelf: Shelf, bits: int) -> None:
    state, before = state_of(256), state_of(256)
    shelf.put(state, lossy=lossy_of(state, 256, bits))
    again = shelf.wake(state)
    for found, cache in zip(again.caches, before.caches, strict=True):
        for name, size in (("keys", 64), ("values", 32)):
            was, now = getattr(cache, name)[..., :256, :], getattr(found, name)[..., :256, :]
            parts = mx.quantize(was, group_size=size, bits=bits)
            assert mx.allclose(now, mx.dequantize(*parts, size, bits, stream=mx.cpu), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_session_goes_to_sleep_as_what_a_wake_gives_back(shelf: Shelf, dtype: mx.Dtype) -> None:
    """So a canary of it can be taken before it is written."""
    state = state_of(700, dtype=dtype)
    shelf.put(state, lossy=lossy_of(state, 512, 4))
    assert fingerprint(shelf.wake(state).caches) == fingerprint(state.caches)


def test_ledger_logits_random_key_and_passes_are_exact(shelf: Shelf) -> None:
    state = state_of(600)
    shelf.put(state, lossy=lossy_of(state, 512, 4))
    again = shelf.wake(state)
    assert again.tokens == state.tokens
    assert bytes(memoryview(again.last_logits)) == bytes(memoryview(state.last_logits))  # type: ignore[arg-type]
    assert again.random_key.tolist() == state.random_key.tolist()
    assert list(again.passes) == list(state.passes)
    assert again.computed_tokens == 0


@pytest.mark.parametrize(("bits", "share"), [(8, 72 / 256), (4, 40 / 256)])
def test_it_takes_the_share_of_the_disk_that_was_told(shelf: Shelf, bits: int, share: float) -> None:
    state = state_of(512, key_dim=64)
    for cache in state.caches:
        cache.values = cache.values[..., :64]
    exact = sum(draft_bytes(draft) for draft in cut_of(state).drafts() if draft.kind == "span")
    lossy = lossy_of(state, 512, bits)
    layout = layout_of(state.caches, VOCABULARY)
    receipt = shelf.put(state, lossy=lossy)
    spans = [entry.raw_bytes for entry in receipt.entries if entry.kind == "span"]
    assert sum(spans) == exact * share
    assert spans == [stored_bytes(layout, bits)] * 2
    assert receipt.bytes_written < exact * share + 20_000
    assert shelf.plan(layout).read_bytes == sum(entry.raw_bytes for entry in receipt.entries)


def draft_bytes(draft: BlockDraft) -> int:
    return sum(slot.spec.size_bytes for slot in draft.slots)


def cut_of(state: LiveState, lossy: LossyTokens | None = None) -> Cut:
    layout = layout_of(state.caches, VOCABULARY)
    return cut(state, layout, durable=(), unchanged_tokens=0, is_lossy=lossy is not None, lossy=lossy)


@pytest.mark.parametrize("part", ["words", "scales", "biases"])
def test_damage_in_any_of_its_slots_is_found_as_in_any_other(shelf: Shelf, part: str) -> None:
    state = state_of(512)
    lossy = lossy_of(state, 512, 8)
    shelf.put(state, lossy=lossy)
    assert lossy.arrays[1] is not None
    source = lossy.arrays[1][1][["words", "scales", "biases"].index(part)]
    spoil(shelf.store, bytes(source.runs(256, 256)[1]))
    with pytest.raises(CorruptBlock):
        shelf.wake(state)


def changed(draft: BlockDraft, change: Callable[[SlotSpec], SlotSpec]) -> BlockDraft:
    return replace(draft, slots=[SlotDraft(change(slot.spec), slot.buffers) for slot in draft.slots])


@pytest.mark.parametrize("family", ["kv3g64", "kv8g16", "kv16g64", "kv8", "kv8g64x"])
def test_bits_and_groups_that_this_version_does_not_know_are_refused_by_name(shelf: Shelf, family: str) -> None:
    state = state_of(256)
    snapshot = cut_of(state, lossy_of(state, 256, 8))

    def strange(spec: SlotSpec) -> SlotSpec:
        return replace(spec, kind=spec.kind.replace("kv8g64", family))

    shelf.write([changed(draft, strange) for draft in snapshot.drafts()], snapshot.token_count)
    with pytest.raises(UnsupportedCache, match=f"{family}/1") as refusal:
        shelf.wake(state)
    assert refusal.value.details["cache_kind"] == f"{family}/1"


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: replace(spec, kind=spec.kind.replace("kv8g64", "kv4g64")),
        lambda spec: replace(spec, kind=spec.kind.replace("kv8g64", "kv8g32")),
        lambda spec: replace(spec, kind=spec.kind.replace("/1", "/1").replace("k.scales", "k.biases")),
        lambda spec: replace(spec, dtype="int32") if spec.dtype == "uint32" else spec,
        lambda spec: replace(spec, name=spec.name.replace("0.k", "0.q")),
    ],
    ids=["bits", "group", "part", "type", "name"],
)
def test_slots_that_are_not_those_of_the_models_arrays_are_refused(shelf: Shelf, change: Any) -> None:
    state = state_of(256)
    snapshot = cut_of(state, lossy_of(state, 256, 8))
    span, record = snapshot.drafts()
    shelf.write([changed(span, change), record], snapshot.token_count)
    with pytest.raises(LayoutMismatch):
        shelf.wake(state)


@pytest.mark.parametrize("left_out", [0, 2, 5, 11])
def test_a_block_that_lacks_one_of_the_slots_is_refused(shelf: Shelf, left_out: int) -> None:
    state = state_of(256)
    snapshot = cut_of(state, lossy_of(state, 256, 8))
    span, record = snapshot.drafts()
    slots = [slot for at, slot in enumerate(span.slots) if at != left_out]
    shelf.write([replace(span, slots=slots), record], snapshot.token_count)
    with pytest.raises(LayoutMismatch):
        shelf.wake(state)


def test_a_scale_that_is_no_number_is_refused() -> None:
    exact = SlotSpec("0.k", "kv.k/1", "bfloat16", (1, 1, 64))
    stored = StoredArray(exact, 0, Quantization(8, 64))
    nan, one = np.array([0x7FC0], dtype="<u2").tobytes(), np.array([0x3F80], dtype="<u2").tobytes()
    assert expand(stored, [bytes(64), one, one]).tolist() == [[[0x3F80] * 64]]
    for parts in ([bytes(64), nan, one], [bytes(64), one, nan]):
        with pytest.raises(MalformedSnapshot):
            expand(stored, parts)


def test_values_too_far_apart_for_their_type_are_not_quantised() -> None:
    state = state_of(512)
    state.caches[1].values[..., 300:301, :2] = mx.array([3e38, -3e38])
    mx.eval(state.caches[1].values)
    with pytest.raises(NonFiniteState) as refusal:
        lossy_of(state, 512, 8)
    assert refusal.value.details == {"slot": "1.v", "start": 256}


def test_one_chain_may_hold_both_and_blocks_of_different_bits(shelf: Shelf) -> None:
    state, before = state_of(1000), state_of(1000)
    first = shelf.put(state, lossy=lossy_of(state, 256, 4))
    layout = layout_of(state.caches, VOCABULARY)
    assert shelf.plan(layout).loss == Lossy(4, 256)
    second = shelf.put(state, lossy=lossy_of(state, 512, 8, start=256), before=first, unchanged=256)
    assert second.blocks_reused == 1
    assert shelf.plan(layout).loss == Lossy(4, 512)
    again = shelf.wake(state)
    assert fingerprint(again.caches) == fingerprint(state.caches), "what was lossy is not quantized once more"
    for found, cache in zip(again.caches, before.caches, strict=True):
        keys, was = found.keys, cache.keys
        assert mx.array_equal(keys[..., :256, :], there_and_back(was[..., :256, :], 4))
        assert mx.array_equal(keys[..., 256:512, :], there_and_back(was[..., 256:512, :], 8))
        assert mx.array_equal(keys[..., 512:1000, :], was[..., 512:1000, :])


def test_the_next_sleep_refers_to_lossy_blocks_and_writes_new_ones_exact(shelf: Shelf) -> None:
    state = state_of(600)
    first = shelf.put(state, lossy=lossy_of(state, 512, 8))
    woken = shelf.wake(state)
    for cache in woken.caches:
        cache.update_and_fetch(mx.ones((1, HEADS, 300, KEY_DIM)), mx.ones((1, HEADS, 300, VALUE_DIM)))
    woken.tokens.extend([1] * 300)
    woken.passes.add(300)
    second = shelf.put(woken, before=first, unchanged=600)
    spans = [entry for entry in second.entries if entry.kind == "span"]
    assert [entry.id for entry in spans[:2]] == [entry.id for entry in first.entries[:2]]
    assert spans[2].raw_bytes == 2 * HEADS * 256 * (KEY_DIM + VALUE_DIM) * 4
    assert fingerprint(shelf.wake(woken).caches) == fingerprint(woken.caches)


@pytest.mark.parametrize("at", [1, 255, 256, 300, 512, 599])
def test_it_can_be_cut_back_to_any_token_and_says_how_much_of_it_is_lossy(shelf: Shelf, at: int) -> None:
    state = state_of(600)
    shelf.put(state, lossy=lossy_of(state, 512, 8))
    again = shelf.wake(state, at)
    truncate(state.caches, at)
    assert fingerprint(again.caches) == fingerprint(state.caches)
    assert shelf.plan(layout_of(state.caches, VOCABULARY), at).loss == Lossy(8, min(at, 512))


@pytest.mark.parametrize(
    ("kind", "dtype", "dim"),
    [
        ("kv.k/1", "float32", 80),
        ("kv.k/1", "float32", 16),
        ("kv.k/1", "int32", 64),
        ("kv.k/1", "float32", 0),
        ("kvcat.k/1", "float32", 64),
        ("kvq.k/1", "uint32", 64),
        ("kv.k/2", "float32", 64),
        ("ring.k/1", "float32", 64),
    ],
)
def test_what_cannot_be_cut_into_groups_stays_exact(kind: str, dtype: str, dim: int) -> None:
    assert choose(SlotSpec("0.k", kind, dtype, (2, 256, dim)), 8) is None


def test_arrays_that_stay_exact_stand_beside_others_in_one_block(shelf: Shelf) -> None:
    state, before = state_of(300, key_dim=48), state_of(300, key_dim=48)
    lossy = lossy_of(state, 256, 8)
    assert [kept is None for kept in lossy.arrays] == [True, False] * 2
    shelf.put(state, lossy=lossy)
    again = shelf.wake(state)
    for found, cache in zip(again.caches, before.caches, strict=True):
        assert mx.array_equal(found.keys[..., :300, :], cache.keys[..., :300, :])
        assert mx.array_equal(found.values[..., :256, :], there_and_back(cache.values[..., :256, :], 8))


@pytest.mark.one_in(1)
@pytest.mark.parametrize("name", sorted(set(GROWERS) - {"plain"}))
def test_every_other_kind_of_cache_is_left_as_it_is(shelf: Shelf, name: str) -> None:
    """The plain ones between them become lossy; records do not."""
    grown = Run(GROWERS[name], mx.float32)
    grown.read(200)
    grown.read(200)
    before = dict(kept_of(grown.state.caches))
    layout = grown.layout()
    lossy = run(quantize(grown.state.caches, layout, 4, 0, 256))
    snapshot = cut(grown.state, layout, durable=(), unchanged_tokens=0, is_lossy=True, lossy=lossy)
    shelf.write(snapshot.drafts(), snapshot.token_count)
    again = shelf.take(layout, grown.fresh())
    assert fingerprint(again.caches) == fingerprint(grown.state.caches)
    for path, held in kept_of(again.caches):
        assert (held == before[path]) == (not path.endswith("kv/1")), path


def kept_of(caches: list[Any]) -> Iterable[tuple[str, Any]]:
    for path, cache in leaves(caches):
        yield f"{path} {kind_of(cache).name}", fingerprint([cache])[2:]


def test_a_state_record_can_be_read_as_the_checkpoint_that_it_was_but_for_its_canary(shelf: Shelf) -> None:
    grown = Run(GROWERS["list"], mx.float16)
    grown.read(512)
    state = grown.state
    assert state.last_logits is not None
    canary = mx.arange(VOCABULARY).astype(mx.float32)
    was = checkpoint_of(state.caches, 512, state.last_logits, state.random_key, state.passes, canary)
    state.checkpoints.add(was)
    grown.read(100)
    receipt = shelf.put(state)
    entry = next(each for each in receipt.entries if each.kind == "state" and each.start == 512)
    with shelf.store.open_session(shelf.uri) as reader:
        found = read_checkpoint(reader, entry, grown.layout())
    assert found.canary is None
    assert (found.position, list(found.passes)) == (512, list(was.passes))
    assert bytes(memoryview(found.logits)) == bytes(memoryview(was.logits))
    assert found.random_key.tolist() == was.random_key.tolist()
    assert {path: record.numbers for path, record in found.records.items()} == {
        path: record.numbers for path, record in was.records.items()
    }
    for path, record in was.records.items():
        assert list(found.records[path].arrays) == list(record.arrays)
        for name, array in record.arrays.items():
            again = found.records[path].arrays[name]
            assert again.dtype == array.dtype
            assert mx.array_equal(again, array)


def test_the_block_says_in_words_that_it_is_lossy(shelf: Shelf) -> None:
    state = state_of(256, layers=1)
    drafts = list(cut_of(state, lossy_of(state, 256, 4)).drafts())
    slots = [[slot.spec for slot in draft.slots] for draft in drafts]
    told = "kv/1 k 2xnx64 float32 in 4 bits, groups of 64; v 2xnx96 float32 in 4 bits, groups of 32"
    assert described(slots[0], slots[1]) == (told,)
    for broken in (slots[0][:1], [slots[0][0], *slots[0][2:]]):
        with pytest.raises((ValueError, IndexError)):
            described(broken, slots[1])


def test_another_block_under_the_same_identity_has_another_id(shelf: Shelf) -> None:
    state = state_of(256)
    exact = shelf.put(state)
    lossy = shelf.put(state, lossy=lossy_of(state, 256, 8), before=exact)
    assert exact.entries[0].id != lossy.entries[0].id
    with shelf.store.open_session(shelf.uri, 1) as first, shelf.store.open_session(shelf.uri, 2) as second:
        assert first.manifest.identity == second.manifest.identity


def test_arrangement_needs_every_slot_in_its_place() -> None:
    exact = SlotSpec("0.k", "kv.k/1", "float32", (2, 256, 64))
    other = replace(exact, name="0.v", kind="kv.v/1")
    lossy = Quantization(8, 32).slots(exact)
    found = arranged((*lossy, other), (exact, other))
    assert found is not None
    assert [(each.first_slot, each.quantization) for each in found] == [(0, Quantization(8, 32)), (3, None)]
    for slots in ([*lossy], [other, *lossy], [*lossy, other, other], [lossy[0], lossy[2], lossy[1], other], []):
        assert arranged(tuple(slots), (exact, other)) is None


def test_losses_add_up_to_the_worst_of_both_and_outlive_a_cut() -> None:
    assert worst(None, None) is None
    assert worst(Lossy(8, 512), None) == worst(None, Lossy(8, 512)) == Lossy(8, 512)
    assert worst(Lossy(8, 512), Lossy(4, 256)) == Lossy(4, 512)
    assert Lossy(8, 512).within(300) == Lossy(8, 300)
    assert Lossy(8, 512).within(0) is None
    assert lossy_in(asdict(Lossy(4, 512))) == Lossy(4, 512)
    assert lossy_in(None) is None


@pytest.mark.parametrize(
    "stored", [{}, 8, {"bits": 8}, {"bits": 5, "tokens": 1}, {"bits": 8, "tokens": 0}, {"bits": True, "tokens": 1}, []]
)
def test_a_mark_that_is_not_ours_is_refused(stored: object) -> None:
    with pytest.raises(ValueError, match="lossy"):
        lossy_in(stored)


def test_what_quantising_is_still_to_take_is_kept_from_others() -> None:
    state = state_of(512)
    layout = layout_of(state.caches, VOCABULARY)
    whole = 2 * stored_bytes(layout, 8)
    keys, first_layer, more_keys, both_layers = [
        memory.granted_bytes() for _ in quantize(state.caches, layout, 8, 0, 512)
    ]
    # In bytes a row: 64 and 96 words, and 8 for each group of 64 and of 32.
    assert (whole - keys, first_layer - more_keys) == (whole // 2 * 72 // 192,) * 2
    assert (first_layer, both_layers) == (whole // 2, 0)
