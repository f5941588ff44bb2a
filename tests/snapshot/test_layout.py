"""The slots that a cache is cut into."""

from __future__ import annotations

from collections.abc import Callable

from torpor.snapshot.kinds import LayerLayout
from torpor.snapshot.layout import CacheLayout, layers_of, layout_of
from torpor.snapshot.state import LiveState

LAYER = LayerLayout("kv/1", 2, 8, 4, "float16")
WIDE = LayerLayout("kv/1", 4, 16, 16, "float32")


def test_slots_go_layer_by_layer_keys_before_values() -> None:
    slots = CacheLayout((LAYER, WIDE), 50).span_slots(7)
    assert [(slot.name, slot.kind, slot.dtype, slot.shape) for slot in slots] == [
        ("0.k", "kv.k/1", "float16", (2, 7, 8)),
        ("0.v", "kv.v/1", "float16", (2, 7, 4)),
        ("1.k", "kv.k/1", "float32", (4, 7, 16)),
        ("1.v", "kv.v/1", "float32", (4, 7, 16)),
    ]


def test_the_state_record_is_logits_and_a_random_key() -> None:
    slots = CacheLayout((LAYER,), 50).state_slots()
    assert [(slot.name, slot.dtype, slot.shape, slot.size_bytes) for slot in slots] == [
        ("logits", "float32", (50,), 200),
        ("random_key", "uint32", (2,), 8),
    ]


def test_layers_are_told_from_the_slots_of_a_stored_span() -> None:
    layout = CacheLayout((LAYER, WIDE), 50)
    assert layers_of(layout.span_slots(9)) == layout.layers


def test_the_layout_of_caches_is_that_of_each_layer(make_state: Callable[..., LiveState]) -> None:
    layout = layout_of(make_state(1).caches, 50)
    assert layout == CacheLayout((LayerLayout("kv/1", 2, 8, 4, "float32"),) * 3, 50)


def test_a_layout_reads_as_runs_of_equal_layers() -> None:
    assert str(CacheLayout((LAYER, LAYER, WIDE), 50)) == "2 x kv/1 2x8+4 float16; 1 x kv/1 4x16 float32"


def test_layouts_that_differ_read_differently() -> None:
    """The text is a part of the identity."""
    texts = {
        str(CacheLayout(layers, 50))
        for layers in ((LAYER,), (LAYER, LAYER), (WIDE,), (LAYER, WIDE), (WIDE, LAYER), (LAYER, WIDE, LAYER))
    }
    assert len(texts) == 6
