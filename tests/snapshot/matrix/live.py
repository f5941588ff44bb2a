"""What a session on a small network holds and says, told as digests that two processes can compare.

The caches are looked at here without any of the adapters that keep them: a mistake of an adapter cannot hide itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from blake3 import blake3
from torpor.daemon.engine import generation
from torpor.daemon.models.loaded_files import LoadedFiles
from torpor.daemon.models.models import LoadedModel
from torpor.memvid.format.identity import Identity
from torpor.snapshot.layout import layout_of
from torpor.snapshot.state import LiveState, token_array

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx.utils import tree_flatten
from torpor.tests.snapshot.matrix.architectures import Case, bits_of, digest_of_weights

GREEDY_TOKENS = 16
CONTEXT_TOKENS = 4096
_FIRST_KEY = 7
# The rows behind a cache's last token are nobody's: how many of them are live, by class.
_LIVE_ROWS = MappingProxyType(
    {
        "KVCache": lambda cache, rows: cache.offset,
        "QuantizedKVCache": lambda cache, rows: cache.offset,
        "ConcatenateKVCache": lambda cache, rows: cache.offset,
        "RotatingKVCache": lambda cache, rows: min(cache.offset, rows),
        "ChunkedKVCache": lambda cache, rows: cache.offset - cache.start_position,
    }
)


@dataclass(frozen=True, slots=True)
class SmallModel(LoadedModel):
    """A network of the matrix as the daemon would hold it, with the caches that the row asks for; it has no text."""

    case: Case = field(kw_only=True)

    def new_caches(self) -> list[Any]:
        """Empty caches."""
        return self.case.caches(self.network)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a state is, as digests: its ledger, its caches, and the logits that the next token is drawn from."""

    ledger: str
    caches: str
    logits: str


@dataclass(frozen=True, slots=True)
class GoneOn:
    """What came of going on from a state: the tokens, the digest of each one's logits, and the state in the end."""

    tokens: list[int]
    logits: list[str]
    end: Seen


class CannotRun(Exception):
    """mlx-lm cannot build this architecture here, or not read a single token with it: what it says of that.

    classes: of the caches that it would have kept, as far as it came.
    """

    def __init__(self, reason: str, classes: Sequence[str]) -> None:
        super().__init__(reason)
        self.classes = classes


def model_of(case: Case, dtype: str) -> SmallModel:
    """The row's network, ready to read.

    Raises:
        CannotRun: for want of something that has nothing to do with Torpor.
    """
    generation.PREFILL_CHUNK_TOKENS = case.chunk_tokens
    caches: list[Any] = []
    try:
        network = case.build(dtype)
        caches = case.caches(network)
        logits = network(mx.array([[0]]), cache=caches)
        mx.eval(logits)
    except Exception as error:  # mlx-lm and MLX raise anything
        raise CannotRun(f"{type(error).__name__}: {error}".splitlines()[0], classes_of(caches)) from error
    layout = layout_of(caches, int(logits.shape[-1]))
    parts = {
        "weights": digest_of_weights(network),
        "config": blake3(repr(case.config).encode()).hexdigest(),
        "compute_dtype": dtype,
        "cache_layout": str(layout),
    }
    return SmallModel(
        name="small",
        folder=Path(),
        network=network,
        tokenizer=None,
        identity=Identity(tuple(sorted(parts.items()))),
        backend={},
        layout=layout,
        compute_dtype=dtype,
        parameters=sum(int(value.size) for _, value in tree_flatten(network.parameters())),
        weights_bytes=sum(int(value.nbytes) for _, value in tree_flatten(network.parameters())),
        context_tokens=CONTEXT_TOKENS,
        end_tokens=frozenset(),
        control_texts=frozenset(),
        render=None,  # type: ignore[arg-type]  # nothing is rendered
        marks=None,  # type: ignore[arg-type]  # nothing is told apart
        grammars=None,  # type: ignore[arg-type]  # nothing is constrained
        files=LoadedFiles((), (), {}),
        case=case,
    )


def classes_of(caches: Sequence[Any]) -> list[str]:
    """The names of the classes of a model's caches, each once."""
    names = set()
    for cache in caches:
        inner = [type(each).__name__ for each in getattr(cache, "caches", ())]
        names.add(f"CacheList({', '.join(inner)})" if inner else type(cache).__name__)
    return sorted(names)


def prompt(model: SmallModel, count: int) -> list[int]:
    """That many pseudo-random tokens, the same in every process, others for every length."""
    drawn = np.random.default_rng(count).integers(0, min(256, model.layout.vocabulary), count)
    return [int(token) for token in drawn]


def new_state(model: SmallModel) -> LiveState:
    """A session that has read nothing."""
    return LiveState(token_array(), model.new_caches(), None, first_key())


def first_key() -> mx.array:
    """The random key of a new session."""
    key = mx.random.key(_FIRST_KEY)
    mx.eval(key)
    return key


def read(model: SmallModel, state: LiveState, tokens: Sequence[int]) -> None:
    """Read tokens as the daemon does."""
    for _ in generation.read(model, state, tokens, lambda done, total: None):
        pass


def replay(model: SmallModel, state: LiveState, tokens: Sequence[int], passes: Sequence[int]) -> None:
    """Read tokens in model calls of these sizes."""
    for _ in generation.replay(model, state, tokens, passes):
        pass


def go_on(model: SmallModel, state: LiveState) -> GoneOn:
    """Write the likeliest tokens."""
    tokens, logits = [], []
    for _ in range(GREEDY_TOKENS):
        assert state.last_logits is not None
        token = int(mx.argmax(state.last_logits).item())
        read(model, state, [token])
        tokens.append(token)
        logits.append(digest_of(state.last_logits))
    return GoneOn(tokens, logits, seen(state))


def seen(state: LiveState) -> Seen:
    """The state as it is now."""
    assert state.last_logits is not None
    hasher = blake3()
    for text, value in _parts(state.caches, "caches"):
        hasher.update(text.encode())
        if value is not None:
            hasher.update(bits_of(value))
    return Seen(blake3(state.tokens.tobytes()).hexdigest(), hasher.hexdigest(), digest_of(state.last_logits))


def digest_of(array: mx.array) -> str:
    """BLAKE3-256, as hex, of an array's type, shape and bits."""
    return blake3(f"{array.dtype} {array.shape}".encode() + bits_of(array)).hexdigest()


def _parts(value: Any, path: str) -> Iterator[tuple[str, mx.array | None]]:
    """All that a list of caches holds: each array with its place, type and shape, and each plain value as text."""
    if isinstance(value, mx.array):
        yield f"{path} {value.dtype} {value.shape}", value
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            yield from _parts(each, f"{path}.{index}")
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield f"{path} {value!r}", None
    else:
        yield f"{path} {type(value).__name__}", None
        live = _LIVE_ROWS.get(type(value).__name__)
        for name, held in sorted(vars(value).items()):
            yield from _parts(
                _cut(value, held, live) if live and name in ("keys", "values") else held, f"{path}.{name}"
            )


def _cut(cache: Any, held: Any, live: Any) -> Any:
    """Keys or values without the rows that are nobody's."""
    if held is None:
        return None
    if isinstance(held, (list, tuple)):
        return [_cut(cache, each, live) for each in held]
    return held[..., : live(cache, held.shape[-2]), :]
