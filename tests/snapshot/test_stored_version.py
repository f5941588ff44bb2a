"""A stored version's arrays come out as the numbers that the live caches hold, for every kind, without the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torpor.memvid.format.blocks import BlockDraft, SlotDraft, SlotSpec
from torpor.memvid.format.identity import Identity
from torpor.memvid.store import Store
from torpor.memvid.writing.reader import BundleReader
from torpor.snapshot import stored_version
from torpor.snapshot.errors import MalformedSnapshot
from torpor.snapshot.lossy import LossyTokens, quantize
from torpor.snapshot.stored_version import StoredVersion, as_numbers
from torpor.tests.snapshot.stored_rig import HEADS, KEY_DIM, VALUE_DIM, Kept, write

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models import cache as caches  # isort: skip

MakeKept = Callable[..., Kept]
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


def vectors(version: StoredVersion, path: str, name: str) -> tuple[np.ndarray, list[int]]:
    pieces = list(version.pieces(version.arrays[path, name]))
    return np.concatenate([piece.values for piece in pieces], axis=1), [
        int(at) for piece in pieces for at in piece.positions
    ]


def as_live(array: mx.array) -> np.ndarray:
    wide = array.astype(mx.float32)
    mx.eval(wide)
    return np.array(wide)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [caches.KVCache, caches.ConcatenateKVCache])
@pytest.mark.parametrize("count", [1, 256, 300])
def test_keys_and_values_are_those_of_the_live_cache(kept: MakeKept, make: Any, dtype: mx.Dtype, count: int) -> None:
    session = kept(lambda: [make(), make()], dtype=dtype, slept=count)
    version = StoredVersion(session.open())
    for layer, cache in enumerate(session.state.caches):
        for name, array in (("k", cache.keys), ("v", cache.values)):
            values, positions = vectors(version, str(layer), name)
            assert values.dtype == np.float32
            assert np.array_equal(values, as_live(array[..., :count, :]))
            assert positions == list(range(count))
    assert (version.arrays["0", "k"].heads, version.arrays["0", "k"].dim) == (HEADS, KEY_DIM)
    assert version.arrays["0", "v"].dim == VALUE_DIM


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_quantised_values_are_those_that_mlx_makes_of_them(kept: MakeKept, bits: int, dtype: mx.Dtype) -> None:
    session = kept(lambda: [caches.QuantizedKVCache(group_size=32, bits=bits)], dtype=dtype, slept=270)
    version = StoredVersion(session.open())
    for name, parts in (("k", session.state.caches[0].keys), ("v", session.state.caches[0].values)):
        words, scales, biases = (each[..., :270, :] for each in parts)
        wide = mx.dequantize(words, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=bits)
        values, _ = vectors(version, "0", name)
        np.testing.assert_allclose(values, as_live(wide), rtol=1e-6, atol=1e-6)
        # What has been quantized is still what was read, but for the steps that so few bits have.
        read = session.numbers(0, 0 if name == "k" else 1, 0, 270, KEY_DIM if name == "k" else VALUE_DIM)
        assert np.abs(values - read).max() < 8 / (2**bits - 1) + 0.05


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_that_were_kept_with_a_loss_give_the_numbers_that_a_wake_gives(kept: MakeKept, dtype: mx.Dtype) -> None:
    session = kept(lambda: [caches.KVCache(), caches.KVCache()], dtype=dtype)
    session.read(600)
    session.sleep(lossy=quantized(session, 512, bits=4))
    version = StoredVersion(session.open())
    for layer, cache in enumerate(session.state.caches):
        for name, array in (("k", cache.keys), ("v", cache.values)):
            values, positions = vectors(version, str(layer), name)
            assert np.array_equal(values, as_live(array[..., :600, :]))
            assert positions == list(range(600))
            assert version.lossy_tokens(version.arrays[str(layer), name]) == 512
    assert list(version.arrays) == [("0", "k"), ("0", "v"), ("1", "k"), ("1", "v")]


def quantized(session: Kept, token_count: int, *, bits: int) -> LossyTokens:
    """The first tokens in few bits, in the live caches too."""
    work = quantize(session.state.caches, session.layout, bits, 0, token_count)
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


@pytest.mark.parametrize(("keep", "count"), [(0, 10), (0, 16), (0, 17), (4, 17), (4, 50), (0, 300)])
def test_the_rows_of_a_window_come_in_the_order_of_their_tokens(kept: MakeKept, keep: int, count: int) -> None:
    session = kept(lambda: [caches.RotatingKVCache(max_size=16, keep=keep)])
    session.read(min(count, 12))
    for _ in range(min(count, 12), count):
        session.read(1)
    session.sleep()
    values, positions = vectors(StoredVersion(session.open()), "0", "k")
    last = min(count, 16)
    assert positions == ([*range(keep), *range(count - last + keep, count)] if count > 16 else list(range(count)))
    read = session.numbers(0, 0, 0, count, KEY_DIM)
    assert np.array_equal(values, read[:, positions])


def test_a_window_that_was_filled_at_once_has_all_its_rows(kept: MakeKept) -> None:
    session = kept(lambda: [caches.RotatingKVCache(max_size=300, keep=4)])
    for count in (200, 290):
        session.read(count)
    session.sleep()
    version = StoredVersion(session.open())
    values, positions = vectors(version, "0", "v")
    assert positions[:4] == [0, 1, 2, 3]
    assert positions[4:] == list(range(490 - (len(positions) - 4), 490))
    assert len(positions) > 300
    assert np.array_equal(values, session.numbers(0, 1, 0, 490, VALUE_DIM)[:, positions])
    assert len(list(version.pieces(version.arrays["0", "v"]))) > 1


def test_the_rows_of_a_chunked_cache_begin_where_its_chunk_does(kept: MakeKept) -> None:
    session = kept(lambda: [caches.ChunkedKVCache(16)])
    for count in (10, 10, 10, 1):
        session.read(count)
    session.sleep()
    values, positions = vectors(StoredVersion(session.open()), "0", "k")
    begin = session.state.caches[0].start_position
    assert begin > 0
    assert positions == list(range(begin, 31))
    assert np.array_equal(values, session.numbers(0, 0, 0, 31, KEY_DIM)[:, positions])


def test_arrays_without_tokens_come_as_elements(kept: MakeKept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_version, "_PIECE_ELEMENTS", 50)
    session = kept(
        lambda: [caches.ArraysCache(3), caches.CacheList(caches.KVCache(), caches.KVCache())], idle=[1], slept=9
    )
    version = StoredVersion(session.open())
    first, third = version.arrays["0", "a0"], version.arrays["0", "a2"]
    assert not first.has_tokens
    pieces = list(version.elements(first))
    assert [len(piece) for piece in pieces] == [50, 50, 28]
    assert np.array_equal(np.concatenate(pieces), as_live(session.state.caches[0][0][None]).ravel())
    assert [int(x) for piece in version.elements(third) for x in piece] == [6, 7, 8]


def test_the_caches_that_a_model_leaves_empty_are_named(kept: MakeKept) -> None:
    session = kept(
        lambda: [caches.KVCache(), caches.KVCache(), caches.CacheList(caches.KVCache())], idle=[1, 2], slept=5
    )
    version = StoredVersion(session.open())
    assert [(cache.path, cache.kind, len(cache.arrays)) for cache in version.caches] == [
        ("0", "kv/1", 2),
        ("1", "kv/1", 0),
        ("2.0", "kv/1", 0),
    ]


def test_the_arrays_of_the_record_that_are_no_cache_s_are_had_by_name(kept: MakeKept) -> None:
    session = kept(lambda: [caches.KVCache()], slept=5)
    version = StoredVersion(session.open())
    logits = version.state_array("logits")
    assert np.concatenate(list(version.elements(logits))).tolist() == session.state.last_logits.tolist()  # type: ignore[union-attr]
    assert version.state_array("0.k") is None
    assert version.state_array("passes").shape == (1, 2)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "make",
    [lambda: [caches.QuantizedKVCache(group_size=32, bits=4)], lambda: [caches.RotatingKVCache(max_size=16)]],
    ids=["quantised", "window"],
)
def test_what_the_identity_does_not_tell_leaves_an_array_unread_with_a_reason(kept: MakeKept, make: Any) -> None:
    session = kept(make)
    session.read(20)
    session.sleep(identity=Identity((("cache_layout", "ab" * 32),)))
    version = StoredVersion(session.open())
    assert {array.why_not for array in version.arrays.values()} <= {
        stored_version._UNTOLD_QUANTIZATION,
        stored_version._UNTOLD_WINDOW,
    }


def test_a_told_quantisation_that_does_not_fit_is_not_believed(kept: MakeKept) -> None:
    session = kept(lambda: [caches.QuantizedKVCache(group_size=32, bits=4)])
    session.read(20)
    told = str(session.layout)
    session.sleep(identity=Identity((("cache_layout", told.replace("bits=4", "bits=8")),)))
    assert all("do not fit" in str(array.why_not) for array in StoredVersion(session.open()).arrays.values())


def test_no_slot_above_the_limit_is_held(kept: MakeKept, monkeypatch: pytest.MonkeyPatch) -> None:
    session = kept(lambda: [caches.KVCache(), caches.RotatingKVCache(max_size=16)], slept=40)
    monkeypatch.setattr(stored_version, "MAX_READ_SLOT_BYTES", 4 * HEADS * 16 * KEY_DIM)
    version = StoredVersion(session.open())
    told = {place: array.why_not for place, array in version.arrays.items()}
    assert told["0", "k"] == stored_version.TOO_LARGE
    assert told["1", "v"] is None or told["1", "v"] == stored_version.TOO_LARGE


@pytest.mark.parametrize("limit", ["MAX_PIECE_ELEMENTS", "MAX_SUMS_BYTES"])
def test_no_array_is_read_whose_numbers_or_sums_would_be_too_many(
    kept: MakeKept, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    session = kept(lambda: [caches.KVCache()], slept=3)
    monkeypatch.setattr(stored_version, limit, 1000)
    assert StoredVersion(session.open()).arrays["0", "k"].why_not == stored_version.TOO_MANY


def test_every_byte_that_is_read_is_told(kept: MakeKept) -> None:
    session = kept(lambda: [caches.KVCache()], dtype=mx.bfloat16, slept=300)
    told: list[int] = []
    version = StoredVersion(session.open(), told.append)
    for array in version.arrays.values():
        list(version.pieces(array))
    assert sum(told) == 2 * 300 * HEADS * (KEY_DIM + VALUE_DIM)


def made_by_hand(store: Store, session: Kept, *blocks: list[SlotSpec]) -> BundleReader:
    """A version whose blocks have these slots, all zeros."""
    drafts = []
    for number, slots in enumerate(blocks):
        filled = [SlotDraft(spec, [memoryview(bytes(spec.size_bytes))]) for spec in slots]
        count = 256 if number < len(blocks) - 1 else 4
        drafts.append(BlockDraft(kind="span", start=256 * number, tokens=bytes(4 * count), slots=filled))
    identity = Identity((("cache_layout", "x"),))
    return session.open(write(store, session.uri, identity, drafts, 256 * (len(blocks) - 1) + 4))


def test_a_record_that_is_not_of_the_end_is_not_that_of_the_version(store: Store, kept: MakeKept) -> None:
    """As in what a repair has saved of a version: its last record may lie before its last token."""
    session = kept(lambda: [caches.ArraysCache(3), caches.KVCache()])
    session.read(256)
    whole = session.sleep()
    last = SlotSpec("1.k", "kv.k/1", "float32", (HEADS, 4, KEY_DIM))
    draft = BlockDraft(
        kind="span", start=256, tokens=bytes(16), slots=[SlotDraft(last, [memoryview(bytes(last.size_bytes))])]
    )
    identity = session.open().manifest.identity
    receipt = write(store, session.uri, identity, [draft], 260, before=whole, reused=whole.entries)
    version = StoredVersion(session.open(receipt))
    assert version.state is None
    assert version.state_array("logits") is None
    assert [cache.path for cache in version.caches] == ["1"]


def test_a_slot_of_no_cache_is_a_malformed_snapshot(store: Store, kept: MakeKept) -> None:
    reader = made_by_hand(store, kept(list), [SlotSpec("what", "kv.k/1", "float32", (1, 4, 2))])
    with pytest.raises(MalformedSnapshot, match="of no cache"):
        StoredVersion(reader)


@pytest.mark.parametrize(
    "second", [[], [SlotSpec("0.k", "kv.k/1", "float32", (1, 4, 3))], [SlotSpec("0.k", "kv.k/1", "float32", (1, 3, 2))]]
)
def test_blocks_of_unlike_slots_are_a_malformed_snapshot(store: Store, kept: MakeKept, second: list[SlotSpec]) -> None:
    first = [SlotSpec("0.k", "kv.k/1", "float32", (1, 256, 2))]
    version = StoredVersion(made_by_hand(store, kept(list), first, second))
    with pytest.raises(MalformedSnapshot, match="does not have the slots"):
        list(version.pieces(version.arrays["0", "k"]))


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (SlotSpec("0.k", "kv.k/1", "float32", (4, 2)), "no axis of heads"),
        (SlotSpec("0.k", "kv.k/1", "float32", ()), "no axis of heads"),
        (SlotSpec("0.k", "later.k/9", "uint8", (1, 4, 2)), "no type that keys and values"),
        (SlotSpec("0.k", "kv.k/1", "float32", (1 << 20, 4, 0)), "too many heads"),
        (SlotSpec("0.k", "kvq.k/1", "uint32", (1, 4, 2)), "does not tell its bits"),
    ],
)
def test_a_span_array_that_is_no_keys_or_values_is_left_with_a_reason(
    store: Store, kept: MakeKept, spec: SlotSpec, why: str
) -> None:
    array = StoredVersion(made_by_hand(store, kept(list), [spec])).arrays["0", "k"]
    assert why in str(array.why_not)


def test_bfloat16_is_widened_exactly() -> None:
    words = np.arange(65536, dtype=np.uint16)
    found = as_numbers(words.tobytes(), "bfloat16")
    live = np.array(mx.array(words).view(mx.bfloat16).astype(mx.float32))
    assert np.array_equal(found.view(np.uint32), live.view(np.uint32))
