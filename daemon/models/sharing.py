"""How the branches of a model share memory and model calls. It is found by trying, at a model's first branch.

Two things are tried. *Which caches are shared*: a network reads a few tokens with shared caches, and must say what it
says with its own. *How many rows a call may have*: a linear layer computes a row to other bits in a call of another
size, as its BLAS has kernels for small products. So there is a least number of rows, filled up with rows that compute
for nothing, and each larger number is tried before a round has it. A row then has the bits that it has alone. Rows of a
trial read several tokens: in some networks, what a row computes depends on what the others say.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import mlx.core as mx
import numpy as np

from ...snapshot.caches import arrays_of
from ...snapshot.canary import tolerance_of
from ...snapshot.kinds import is_shared, kind_of, leaves, shareable
from ...snapshot.runs import SEGMENT_TOKENS, SharedKVCache
from .attention import install, over_segments, run_round

_LOG = logging.getLogger(__name__)

Route = Literal["shared", "gathered", "copied"]
"""What becomes of one cache in a fork: shared memory and shared attention; shared memory, but keys and values are
copied together for each token; or a copy."""

MOST_ROWS: Final = 32
"""Branches in one model call, at most."""

_TRIAL_TOKENS: Final = 70
"""A run of one segment, and a tail."""

_ROW_TOKENS: Final = 4
"""The rows of a trial read so many tokens in turns."""

_SURE_ROWS: Final = 8
"""If a call of so many rows has the bits of calls of one, one is the least."""

_BY: Final = 4
"""A call may be filled up to a multiple of so many rows: kernels take rows by fours."""

_FILLED_ROWS: Final = (16, 12, 8, 4)
"""Else the least number is the first one that has the bits of a call of so many, for the first of these in which all
rows have the same."""


@dataclass(slots=True, repr=False)
class Sharing:
    """What was found for one model; nothing before `settle`. On the engine thread.

    routes: of each cache, by its path. in_rounds: whether several branches go into one call.
    """

    routes: dict[str, Route] = field(default_factory=dict)
    in_rounds: bool = False
    _is_settled: bool = False
    _least: int = 1
    _right: dict[int, bool] = field(default_factory=dict)
    _trial: tuple[Sequence[Any], Sequence[int]] = ((), ())
    _wanted: bytes | None = None

    @property
    def takes_segments(self) -> bool:
        """Whether the attention of a branch's token is taken in segments, in one layer at least."""
        return "shared" in self.routes.values()

    def settle(self, network: Any, new_caches: Callable[[], list[Any]], vocabulary: int, compute_dtype: str) -> None:
        """Find it, at the first call. new_caches: makes empty caches of the model."""
        if self._is_settled:
            return
        self._is_settled = True
        install(network)
        tolerance = tolerance_of(compute_dtype)
        prompt = [at % vocabulary for at in range(1, _TRIAL_TOKENS + 1)]
        try:
            plain, shared = new_caches(), [shareable(cache) for cache in new_caches()]
            plain_logits, shared_logits = (_said(network, caches, prompt) for caches in (plain, shared))
            if not all(difference(*each) <= tolerance for each in zip(plain_logits, shared_logits, strict=True)):
                raise ValueError("with shared caches it says something else")
            if not _adds_up_in_order():
                raise ValueError("sums depend on where runs end")
            self.routes = {path: _route_of(cache) for path, cache in leaves(shared)}
            self.in_rounds = self._is_dense(network, shared) and self._find_least(network, shared, prompt[:_ROW_TOKENS])
        except Exception as error:  # noqa: BLE001 - models are code of many authors, and may raise any error
            _LOG.warning("The branches of a model are copies: %s: %s", type(error).__name__, error)
            self.routes, self.in_rounds = {path: "copied" for path, _ in leaves(new_caches())}, False

    def _is_dense(self, network: Any, caches: Sequence[Any]) -> bool:
        """Whether every row goes the same way, through shared caches."""
        return not has_experts(network) and all(
            is_shared(cache) and (cache.takes_segments or kind_of(cache).is_empty(cache)) for cache in caches
        )

    def _find_least(self, network: Any, caches: Sequence[Any], tokens: Sequence[int]) -> bool:
        self._trial = caches, tokens
        alone, sure = self._bits(network, 1), self._bits(network, _SURE_ROWS)
        if alone == sure:
            self._least, self._wanted = 1, alone
            return True
        for filled in _FILLED_ROWS:
            if (wanted := self._bits(network, filled)) is not None:
                self._wanted = wanted
                self._least = next(each for each in range(2, filled + 1) if self._bits(network, each) == wanted)
                return True
        self._least, self._wanted = 1, alone
        return alone is not None

    def _is_right(self, network: Any, rows: int) -> bool:
        """Whether each row of such a call has the bits that it has alone; tried once."""
        if rows not in self._right:
            self._right[rows] = self._bits(network, rows) == self._wanted
        return self._right[rows]

    def _bits(self, network: Any, rows: int) -> bytes | None:
        """The logits of each token of the trial, in calls of so many rows; None if they differ beside other tokens."""
        caches, tokens = self._trial
        bits: dict[int, bytes] = {}
        for order in (tokens, tokens[::-1]):
            for start in range(0, len(order), rows):
                row_tokens = [order[(start + row) % len(order)] for row in range(rows)]
                branches = [[_forked(cache) for cache in caches] for _ in row_tokens]
                row_bits = [row.tobytes() for row in np.asarray(run_round(network, row_tokens, branches, rows))]
                if any(bits.setdefault(*each) != each[1] for each in zip(row_tokens, row_bits, strict=True)):
                    return None
        return b"".join(bits[token] for token in tokens)

    @property
    def least_rows(self) -> int:
        """Rows of a call for one branch alone."""
        return self._least

    def rows_for(self, network: Any, wanted: int) -> tuple[int, int]:
        """How many of the branches go into the next call, and how many rows it has."""
        wanted = min(wanted, MOST_ROWS)
        first = max(wanted, self._least)
        for rows in range(first, -(-first // _BY) * _BY + 1):
            if self._is_right(network, rows):
                return wanted, rows
        for rows in range(wanted - 1, self._least, -1):
            if self._is_right(network, rows):
                return rows, rows
        return min(wanted, self._least), self._least

    def shared(self, caches: Sequence[Any]) -> list[Any]:
        """For empty caches of the model those of a branch."""
        return [shareable(cache) for cache in caches] if self._shares else list(caches)

    @property
    def _shares(self) -> bool:
        return any(route != "copied" for route in self.routes.values())


def has_experts(network: Any) -> bool:
    """Whether each row of a call has experts of its own: who shares a product with it then depends on what the others
    say."""
    return any("Switch" in type(module).__name__ for module in network.modules())


def difference(one: mx.array, other: mx.array) -> float:
    """The largest difference of a log-probability between two logits `[vocabulary]`. Equal infinities do not differ."""

    def probabilities(logits: mx.array) -> mx.array:
        wide = logits.astype(mx.float32)
        return wide - mx.logsumexp(wide)

    first, second = probabilities(one), probabilities(other)
    return float(np.asarray(mx.max(mx.where(first == second, 0, mx.abs(first - second)))))


def _said(network: Any, caches: list[Any], prompt: Sequence[int]) -> list[mx.array]:
    """The logits of two single tokens behind a prompt."""
    network(mx.array(list(prompt))[None], cache=caches)
    mx.eval(arrays_of(caches))
    logits = []
    for token in prompt[:2]:
        logits.append(network(mx.array([[token]]), cache=caches)[0, -1])
        mx.eval(logits, arrays_of(caches))
    return logits


def _route_of(cache: Any) -> Route:
    if not is_shared(cache):
        return "copied"
    return "shared" if cache.takes_segments else "gathered"


def _forked(cache: Any) -> Any:
    empty = SharedKVCache()
    cache.fork(empty)
    return empty


def _adds_up_in_order() -> bool:
    """Whether attention has the same bits wherever the runs of a cache end, and beside another query."""
    tokens, shape = 5 * SEGMENT_TOKENS + 7, (1, 2, 5 * SEGMENT_TOKENS + 7, 32)
    keys, values = (mx.random.normal(shape, key=mx.random.key(number)) for number in (1, 2))
    queries = mx.random.normal((2, 4, 1, 32), key=mx.random.key(3))
    results = []
    for ends in ((tokens,), (2 * SEGMENT_TOKENS, tokens), (SEGMENT_TOKENS, 4 * SEGMENT_TOKENS, tokens)):
        cache, start = SharedKVCache(), 0
        for end in ends:
            cache.append(keys[:, :, start:end], values[:, :, start:end])
            cache, start = _forked(cache), end
        beside = _forked(cache)
        beside.append(keys[:, :, :1], values[:, :, :1])
        alone, together = (over_segments(queries[:count], [cache, beside][:count], 0.2) for count in (1, 2))
        results += [alone, together[:1]]
    return all(bool(mx.array_equal(each.view(mx.uint32), results[0].view(mx.uint32)).item()) for each in results)
