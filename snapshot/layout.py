"""The slots that a model's cache is cut into, and their names, found once when the model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..memvid.blocks import SlotSpec
from .kinds import KV_KIND, LayerLayout, layer_layout

# Slot kinds: keys and values of a plain cache; the records that make up the state at one position.
KEYS_KIND = "kv.k/1"
VALUES_KIND = "kv.v/1"
LOGITS_KIND = "state.logits/1"
RANDOM_KEY_KIND = "state.random_key/1"


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How a model's cache is laid out, layer by layer, and how many logits it gives."""

    layers: tuple[LayerLayout, ...]
    vocabulary: int

    def __str__(self) -> str:
        runs = [(str(layer), len(list(run))) for layer, run in groupby(self.layers)]
        return "; ".join(f"{count} x {layer}" for layer, count in runs)

    def span_slots(self, token_count: int) -> tuple[SlotSpec, ...]:
        """The slots of a block of `token_count` tokens, in stored order: layer by layer, keys before values.

        Each has the shape `[heads, token_count, dim]`.
        """
        slots = []
        for index, layer in enumerate(self.layers):
            for name, kind, dim in (("k", KEYS_KIND, layer.key_dim), ("v", VALUES_KIND, layer.value_dim)):
                slots.append(SlotSpec(f"{index}.{name}", kind, layer.dtype, (layer.heads, token_count, dim)))
        return tuple(slots)

    def state_slots(self) -> tuple[SlotSpec, ...]:
        """The slots of the state record: the logits `[vocabulary]` that the next token is drawn from, and the
        random key `[2]` that draws it."""
        return (
            SlotSpec("logits", LOGITS_KIND, "float32", (self.vocabulary,)),
            SlotSpec("random_key", RANDOM_KEY_KIND, "uint32", (2,)),
        )


def layers_of(slots: Sequence[SlotSpec]) -> tuple[LayerLayout, ...]:
    """The layers that the slots of a stored span are of, for those who look at a bundle without its model."""
    layers = []
    for keys, values in zip(slots[::2], slots[1::2], strict=True):
        heads, _, key_dim = keys.shape
        layers.append(LayerLayout(KV_KIND, heads, key_dim, values.shape[2], keys.dtype))
    return tuple(layers)


def layout_of(caches: Sequence[Any], vocabulary: int) -> CacheLayout:
    """The layout of caches that hold at least one token.

    Raises:
        UnsupportedCache: a layer's cache is of a kind without adapter.
    """
    return CacheLayout(tuple(layer_layout(cache) for cache in caches), vocabulary)
