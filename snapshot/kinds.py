"""The kinds of cache that can be slept and woken, each with its adapter: `kinds_by_token.py`, `kinds_of_windows.py` and
`kinds_of_whole_state.py` have them. These files and this one alone name mlx-lm's classes.

A stored kind is a short string of ours with a version ("kv/1"), never a class name. An adapter translates between a
cache object and its stored arrays, by the object's attributes, never by mlx-lm's state tuples: their shape changes
between releases. A cache of any other class is refused by name.

A cache holds two sorts of state. *Span arrays* `[1, …, capacity, dim]` have a row for each token: they are cut by
token, and the rows of a token never change once it has been read. A *record* is whole state at one position: numbers
and arrays that the next token may change all over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from .errors import UnsupportedCache
from .kind import Kind
from .kinds_by_token import Concatenating, Plain, Quantized, Shared
from .kinds_of_whole_state import Pooled, Recurrent
from .kinds_of_windows import Chunked, Rotating
from .runs import SharedKVCache

# Exactly these classes: a subclass may keep more state than we would save.
_KIND_OF_CLASS: dict[type, Kind] = {
    SharedKVCache: Shared(),  # before the plain one, for which its name stands
    KVCache: Plain(),
    ConcatenateKVCache: Concatenating(),
    QuantizedKVCache: Quantized(),
    RotatingKVCache: Rotating(),
    ChunkedKVCache: Chunked(),
    ArraysCache: Recurrent(),
}
# Classes that a model defines: by name, so that only the module of a model in use is imported.
_KIND_OF_MODEL_CLASS: dict[str, Kind] = {"mlx_lm.models.deepseek_v41.LayerCache": Pooled()}
KINDS: Final = {kind.name: kind for kind in (*_KIND_OF_CLASS.values(), *_KIND_OF_MODEL_CLASS.values())}
"""Every adapter, by the name of its stored kind."""


def kind_named(name: str) -> Kind:
    """The adapter of a stored kind. Raises UnsupportedCache: this version of Torpor has no such kind."""
    kind = KINDS.get(name)
    if kind is None:
        raise UnsupportedCache(
            f"The snapshot holds a cache of kind {name!r}, which this version of Torpor does not know. Use the version "
            f"that wrote it; this one knows {', '.join(sorted(KINDS))}.",
            cache_kind=name,
        )
    return kind


def kind_of(cache: Any) -> Kind:
    """The adapter of a cache. Raises UnsupportedCache: its class has none."""
    known = type(cache)
    kind = _KIND_OF_CLASS.get(known) or _KIND_OF_MODEL_CLASS.get(f"{known.__module__}.{known.__qualname__}")
    if kind is None:
        raise UnsupportedCache(
            f"Caches of kind {known.__name__} cannot be slept: there is no adapter for them, and this model keeps at "
            "least one layer in one. Use another model, or a version of Torpor that knows them.",
            cache_kind=known.__name__,
        )
    return kind


def leaves(caches: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every cache of a model with its path, lists of caches opened: `3`, or `3.1` for the second of a list."""
    for index, cache in enumerate(caches):
        if type(cache) is CacheList:
            for path, leaf in leaves(cache.caches):
                yield f"{index}.{path}", leaf
        else:
            yield str(index), cache


def shareable(cache: Any) -> Any:
    """For an empty plain cache an empty one whose content forks can share; any other cache unchanged."""
    if type(cache) is CacheList:
        return CacheList(*(shareable(each) for each in cache.caches))
    return SharedKVCache() if type(cache) is KVCache else cache


def are_plain(caches: Sequence[Any]) -> bool:
    """Whether a state keeps all of its context in plain caches."""
    return bool(caches) and all(type(cache) is KVCache for cache in caches)


def is_shared(cache: Any) -> bool:
    """Whether forks share the content of a cache, which is no list."""
    return type(cache) is SharedKVCache


def holds_shared(caches: Sequence[Any]) -> bool:
    """Whether forks share the content of any of a model's caches."""
    return any(is_shared(cache) for _, cache in leaves(caches))


def quantized(cache: Any, *, bits: int, group_size: int) -> Any:
    """For an empty plain cache an empty one with quantized keys and values; any other cache unchanged."""
    if type(cache) is CacheList:
        return CacheList(*(quantized(each, bits=bits, group_size=group_size) for each in cache.caches))
    return QuantizedKVCache(group_size=group_size, bits=bits) if type(cache) is KVCache else cache
