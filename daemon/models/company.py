"""Whether sessions of a model can be read side by side in one call, and with which bits. It is found by trying, when
two sessions first write at the same time.

The attention of a session in such a round is the one that it has alone (`attention.py`). Other layers see all rows at
once, and may compute a row to other last bits than alone: a BLAS has kernels for small products. So each number of rows
is tried before a token of such a call counts as one that can be read again alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
import numpy as np

from ...snapshot.caches import arrays_of
from ...snapshot.canary import tolerance_of
from ...snapshot.kind import with_room
from ...snapshot.kinds import are_plain, kind_of
from .attention import install, run_round
from .sharing import difference, has_experts

_LOG = logging.getLogger(__name__)

_MOST_ROWS: Final = 16
"""Calls of more rows are not tried: their tokens do not count as ones that can be read again alone."""

_LENGTHS: Final = (12, 1, 7, 3)
"""Tokens of the sessions of a trial. They take the rows in turns, as in some networks a row depends on what the others
say."""


@dataclass(slots=True, repr=False)
class Company:
    """What was found for one model; nothing before `settle`. On the engine thread.

    in_rounds: whether several sessions go into one call.
    """

    in_rounds: bool = False
    _is_settled: bool = False
    _trials: list[tuple[int, list[Any]]] = field(default_factory=list)
    _alone: list[bytes] = field(default_factory=list)
    _repeats: dict[int, bool] = field(default_factory=dict)

    def settle(self, network: Any, new_caches: Callable[[], list[Any]], vocabulary: int, compute_dtype: str) -> None:
        """Find it, at the first call: sessions of unlike lengths must say in a round, and after it, what they say
        alone. new_caches: makes empty caches of the model."""
        if self._is_settled:
            return
        self._is_settled = True
        tolerance = tolerance_of(compute_dtype)
        try:
            if not are_plain(new_caches()):
                return
            install(network)
            for row, count in enumerate(_LENGTHS):
                caches = new_caches()
                mx.eval(network(mx.arange(count)[None] % vocabulary, cache=caches), arrays_of(caches))
                self._trials.append((row % vocabulary, _copied(caches)))
            alone = [_decoded(network, _copied(caches), [token] * 2) for token, caches in self._trials]
            self._alone = [_bits(logits[0]) for logits in alone]
            pairs = zip(alone, self._together(network), strict=False)
            self.in_rounds = all(difference(*each) <= tolerance for pair in pairs for each in zip(*pair, strict=True))
        except Exception as error:  # noqa: BLE001 - models are code of many authors, and may raise any error
            _LOG.warning("Sessions of a model are not read in rounds: %s: %s", type(error).__name__, error)

    def repeats(self, network: Any, rows: int) -> bool:
        """Whether each row of such a call has the bits that its session has alone; tried once."""
        if rows not in self._repeats:
            self._repeats[rows] = rows <= _MOST_ROWS and not has_experts(network) and self._is_as_alone(network, rows)
        return self._repeats[rows]

    def _together(self, network: Any) -> list[list[mx.array]]:
        """The logits of two sessions after a token in a round, and after the same one alone."""
        tokens, trials = zip(*self._trials[:2], strict=True)
        rows = [_copied(caches) for caches in trials]
        first = run_round(network, tokens, rows, len(rows))
        mx.eval(first, [arrays_of(caches) for caches in rows])
        each = zip(first, tokens, rows, strict=True)
        return [[logits, *_decoded(network, caches, [token])] for logits, token, caches in each]

    def _is_as_alone(self, network: Any, rows: int) -> bool:
        for start in range(0, len(self._trials), rows):
            chosen = [(start + row) % len(self._trials) for row in range(rows)]
            tokens, states = zip(*(self._trials[each] for each in chosen), strict=True)
            logits = run_round(network, tokens, [_copied(caches) for caches in states], rows)
            if [_bits(row) for row in logits] != [self._alone[each] for each in chosen]:
                return False
        return True


def _decoded(network: Any, caches: list[Any], tokens: Sequence[int]) -> list[mx.array]:
    """The logits after each token, read alone."""
    logits = []
    for token in tokens:
        logits.append(network(mx.array([[token]]), cache=caches)[0, -1].astype(mx.float32))
        mx.eval(logits, arrays_of(caches))
    return logits


def _bits(logits: mx.array) -> bytes:
    return np.asarray(logits).tobytes()


def _copied(caches: Sequence[Any]) -> list[Any]:
    """Plain caches of their own, with room for no more than one token."""
    copies = []
    for cache in caches:
        kind, own = kind_of(cache), type(cache)()
        if not kind.is_empty(cache):
            count = int(cache.offset)
            kind.fill(
                own, count, {name: with_room(each, count, count + 1) for name, each in kind.spans(cache).items()}, None
            )
        copies.append(own)
    return copies
