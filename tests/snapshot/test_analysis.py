"""The artifact of a stored version: found by its kind and labels, the same bytes each time, and of the live cache."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torpor import __version__
from torpor.memvid.errors import CorruptBlock
from torpor.snapshot.analysis import FORMAT, analyze, encode
from torpor.tests.snapshot.stored_rig import HEADS, KEY_DIM, VALUE_DIM, Kept, spoil

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models import cache as caches  # isort: skip
from mlx_lm.models.deepseek_v41 import LayerCache  # isort: skip

MakeKept = Callable[..., Kept]


def one_layer() -> list[Any]:
    return [caches.KVCache()]


def analyzed(session: Kept, **options: Any) -> dict[str, Any]:
    document = analyze(session.open(), None, **options)
    assert json.loads(encode(document)) == document
    return document


def test_an_artifact_says_of_what_it_is(kept: MakeKept) -> None:
    session = kept(one_layer, slept=5)
    session.read(5)
    receipt = session.sleep(labels=["draft"])
    found = analyzed(session)
    assert {name: found[name] for name in ("format", "session", "version", "bundle_id", "model", "token_count")} == {
        "format": FORMAT,
        "session": "torpor://default/agent",
        "version": 2,
        "bundle_id": receipt.bundle_id,
        "model": "m",
        "token_count": 10,
    }
    assert found["parent"] == receipt.parent
    assert found["made_by"] == f"torpor {__version__}"
    assert found["identity"]["weights"] == "w" * 64


def test_kind_and_labels_default_to_what_an_artifact_is_found_by_gm6(kept: MakeKept) -> None:
    session = kept(one_layer)
    session.read(5)
    session.sleep(labels=["draft", "m", "old"])
    found = analyzed(session)
    assert found["kind"] == "kv-analysis"
    assert found["labels"] == ["draft", "m", "old", "v1"]
    given = analyzed(session, kind="probe", labels=["b", "a", "b"])
    assert (given["kind"], given["labels"]) == ("probe", ["b", "a"])
    assert analyzed(session, labels=[])["labels"] == []


def test_the_same_bundle_gives_the_same_bytes(kept: MakeKept) -> None:
    session = kept(lambda: [*one_layer(), caches.RotatingKVCache(max_size=8), caches.ArraysCache(3)], slept=20)
    once = encode(analyze(session.open(), None))
    assert once == encode(analyze(session.open(), None))
    assert once.endswith(b"}\n")
    assert once.isascii()


def test_figures_are_those_of_the_live_cache(kept: MakeKept) -> None:
    session = kept(one_layer, dtype=mx.bfloat16, slept=300)
    keys, values = analyzed(session)["layers"][0]["arrays"]
    assert {name: keys[name] for name in ("name", "dtype", "heads", "dim", "tokens", "first_token", "why")} == {
        "name": "k",
        "dtype": "bfloat16",
        "heads": HEADS,
        "dim": KEY_DIM,
        "tokens": 300,
        "first_token": 0,
        "why": None,
    }
    for told, array in ((keys, session.state.caches[0].keys), (values, session.state.caches[0].values)):
        live = np.array(array[0, :, :300].astype(mx.float32)).astype(float)
        lengths = np.sqrt((live**2).mean(axis=2))
        assert told["rms"]["mean"] == pytest.approx(lengths.mean(axis=1).tolist(), rel=6e-6)
        assert told["rms"]["max_at"] == lengths.argmax(axis=1).tolist()


KINDS: dict[str, Callable[[], Any]] = {
    "plain": caches.KVCache,
    "concatenating": caches.ConcatenateKVCache,
    "quantised": lambda: caches.QuantizedKVCache(group_size=32, bits=4),
    "window": lambda: caches.RotatingKVCache(max_size=16, keep=4),
    "chunked": lambda: caches.ChunkedKVCache(16),
    "list": lambda: caches.CacheList(caches.KVCache()),
}


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_that_holds_keys_and_values_has_figures_of_its_heads(kept: MakeKept, kind: str, count: int) -> None:
    session = kept(lambda: [KINDS[kind](), caches.KVCache()])
    if kind == "list":
        session._fill = _fill_list  # type: ignore[method-assign]
    for _ in range(count):
        session.read(1)
    session.sleep()
    layer = analyzed(session)["layers"][0]
    assert [each["name"] for each in layer["arrays"]] == ["k", "v"]
    for told in layer["arrays"]:
        assert told["why"] is None
        assert all(isinstance(mean, float) for mean in told["rms"]["mean"])
        assert (None in told["spectrum"]["effective_rank"]) == (count == 1)


def _fill_list(held: list[Any], start: int, count: int) -> None:
    for cache in (held[0].caches[0], held[1]):
        cache.update_and_fetch(*(mx.random.normal((1, HEADS, count, dim)) for dim in (KEY_DIM, VALUE_DIM)))


def test_arrays_without_tokens_have_norms_and_outliers(kept: MakeKept) -> None:
    session = kept(lambda: [caches.ArraysCache(3)])
    session.read(9)
    session.state.caches[0][0][0, 5] = 1000.0
    session.sleep()
    first, third = analyzed(session)["layers"][0]["arrays"]
    live = np.array(session.state.caches[0][0]).astype(float)
    assert first["rms"] == pytest.approx(np.sqrt((live**2).mean()), rel=6e-6)
    assert first["shape"] == list(live.shape)
    assert (first["outliers"]["count"], first["max_at"]) == (1, 5)
    assert (third["name"], third["dtype"], third["max_abs"], third["max_at"]) == ("a2", "int64", 8.0, 2)
    assert "coherence" not in first


def test_a_pooled_cache_has_norms_and_outliers(kept: MakeKept) -> None:
    session = kept(lambda: [LayerCache(16)])

    def fill(held: list[Any], start: int, count: int) -> None:
        held[0].update_window(mx.ones((1, count, 8)))

    session._fill = fill  # type: ignore[method-assign]
    session.read(3)
    session.sleep()
    (window,) = analyzed(session)["layers"][0]["arrays"]
    assert (window["name"], window["rms"], window["max_abs"]) == ("window", 1.0, 1.0)


def test_a_cache_that_the_model_leaves_empty_is_told_with_a_reason(kept: MakeKept) -> None:
    session = kept(lambda: [caches.KVCache(), caches.KVCache()], idle=[1], slept=3)
    assert analyzed(session)["layers"][1] == {
        "path": "1",
        "kind": "kv/1",
        "arrays": [],
        "why": "the model keeps nothing in this cache",
    }


def test_an_array_that_cannot_be_read_says_why_and_leaves_the_others_their_figures(
    kept: MakeKept, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = kept(one_layer, slept=20)
    monkeypatch.setattr("torpor.snapshot.stored_version.MAX_READ_SLOT_BYTES", 4 * 20 * HEADS * VALUE_DIM)
    keys, values = analyzed(session)["layers"][0]["arrays"]
    assert "more than" in keys["why"]
    assert keys["shape"] == [HEADS, 20, KEY_DIM]
    assert values["why"] is None


def test_the_drift_is_that_against_the_parent_or_says_why_there_is_none(kept: MakeKept) -> None:
    session = kept(one_layer, slept=256)
    first = session.last
    session.read(9)
    session.sleep()
    found = analyze(session.open(), session.open(first))["drift"]
    assert found["blocks"]["same_share"] == 1.0
    assert found["why"] is None
    none = analyzed(session, why_no_parent="it was pruned")["drift"]
    assert (none["why"], none["blocks"], none["arrays"]) == ("it was pruned", None, [])


def test_a_flipped_bit_ends_the_analysis(kept: MakeKept) -> None:
    session = kept(one_layer, slept=20)
    spoil(session.store, session.numbers(0, 0, 0, 1, KEY_DIM)[0].tobytes())
    with pytest.raises(CorruptBlock):
        analyze(session.open(), None)


def test_progress_comes_to_its_end_and_may_stop_the_work(kept: MakeKept) -> None:
    session = kept(one_layer, slept=600)
    told: list[tuple[int, int]] = []
    analyze(session.open(), None, on_progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert len({total for _, total in told}) == 1
    assert told[-1][0] > 0.9 * told[-1][1]

    class Stopped(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        analyze(session.open(), None, on_progress=stop)


def test_memory_does_not_grow_with_the_session(kept: MakeKept) -> None:
    def peak(name: str, count: int) -> int:
        session = kept(one_layer, name=name)
        session.read(count)
        session.sleep()
        reader = session.open()
        list(reader.tokens())  # headers are remembered by the reader whoever reads them
        tracemalloc.start()
        try:
            analyze(reader, None)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak("first", 300)
    small, large = peak("small", 512), peak("large", 4096)
    assert large < small * 1.05 + 65536


def test_every_field_of_the_document_is_in_its_description(kept: MakeKept) -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "artifacts.md").read_text()
    session = kept(lambda: [caches.KVCache(), caches.ArraysCache(3)], slept=256)
    first = session.last
    session.read(9)
    session.sleep()
    found = analyze(session.open(), session.open(first))

    def names(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for name, inner in value.items():
                yield name
                yield from names(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from names(inner)

    told = set(names({name: value for name, value in found.items() if name != "identity"}))
    of_the_parent_and_reasons = {"parent", "figure", "heads", "why", "identity"}
    missing = {name for name in told - of_the_parent_and_reasons if f"`{name}`" not in text}
    assert missing == set()
    assert f"`{FORMAT}`" in text
