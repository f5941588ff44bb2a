"""Draws the next token from logits with the session's own random key. The filters are mlx-lm's. The draw is not:
mlx-lm's samplers use the global `mx.random` state, which all sessions share. A seeded session must give the same tokens
beside any others, and after any number of sleeps.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from ..api.sampling import Sampling

# The last tokens that the repetition penalty looks at.
PENALTY_WINDOW_TOKENS = 64

# No logit of a token that may be drawn counts as less: a model may give minus infinity to all of them.
_LEAST_ALLOWED = -1e30

Filter = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class Draw:
    """A drawn token, and the key for the next draw."""

    token: int
    next_key: mx.array


def initial_key(sampling: Sampling) -> mx.array:
    """The first random key of a session, uint32 `[2]`."""
    key: mx.array = mx.random.key(sampling.seed)
    mx.eval(key)
    return key


def draw(
    sampling: Sampling,
    logits: mx.array,
    ledger: array[int],
    key: mx.array,
    allowed: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
) -> Draw:
    """Draw from float32 logits `[vocabulary]` without NaN or positive infinity; the logits do not change (QX9).
    allowed: the tokens that may be drawn, bool `[vocabulary]`, at least one; None allows all."""
    adjusted = _penalised(sampling, logits, ledger)
    if allowed is not None:
        adjusted = mx.where(mx.array(allowed), mx.maximum(adjusted, _LEAST_ALLOWED), -mx.inf)
    if sampling.temperature == 0:
        choice, next_key = mx.argmax(adjusted), key
    else:
        next_key, draw_key = mx.random.split(key)
        # The same order as mlx-lm's samplers: normalise, filter, then temper.
        logprobs = adjusted - mx.logsumexp(adjusted, keepdims=True)
        for apply in _filters(sampling, logits.shape[-1]):
            logprobs = apply(logprobs[None])[0]
        choice = mx.random.categorical(logprobs * (1.0 / sampling.temperature), key=draw_key)
    mx.eval(choice, next_key)
    return Draw(int(cast(int, choice.item())), next_key)


def _penalised(sampling: Sampling, logits: mx.array, ledger: array[int]) -> mx.array:
    if sampling.repetition_penalty == 1.0 or not ledger:
        return logits
    recent = mx.array(list(ledger[-PENALTY_WINDOW_TOKENS:]))
    (penalise,) = make_logits_processors(
        repetition_penalty=sampling.repetition_penalty, repetition_context_size=PENALTY_WINDOW_TOKENS
    )
    # mlx-lm's processor writes into its input, so it gets a copy.
    penalised: mx.array = penalise(recent, mx.array(logits)[None])
    return penalised[0]


def _filters(sampling: Sampling, vocabulary: int) -> list[Filter]:
    filters: list[Filter] = []
    if sampling.top_p < 1.0:
        filters.append(lambda logprobs: apply_top_p(logprobs, sampling.top_p))
    if sampling.min_p > 0.0:
        filters.append(lambda logprobs: apply_min_p(logprobs, sampling.min_p))
    if 0 < sampling.top_k < vocabulary:
        filters.append(lambda logprobs: apply_top_k(logprobs, sampling.top_k))
    return filters
