"""Draws the next token from logits, by a number that follows from the seed and the token's place. The filters are
mlx-lm's. The draw is not: mlx-lm's samplers use the global `mx.random` state, which all sessions share. A seeded
session must give the same tokens beside any others, after any number of sleeps, and again where it goes back.

A session of before has a random key that goes on with each token drawn, and keeps to it, so that it draws what it would
have drawn. The key of a new one is always `BY_PLACE`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np
from blake3 import blake3
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from ..api.sampling import Sampling

BY_PLACE: Final = (0x746F7270, 0x6F722E32)
"""The random key of a session whose draws follow from seed and place. A key that goes on is never this one, but for a
chance of 2^-64 at each token."""

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


def initial_key() -> mx.array:
    """The random key of a new session, uint32 `[2]`."""
    return mx.array(np.array(BY_PLACE, np.uint32))


def draw(
    sampling: Sampling,
    logits: mx.array,
    ledger: array[int],
    key: mx.array,
    allowed: np.ndarray[Any, np.dtype[np.bool_]] | None = None,
    *,
    answer_at: int = 0,
) -> Draw:
    """Draw the token behind a ledger, from float32 logits `[vocabulary]` without NaN or positive infinity; the logits
    do not change (QX9). allowed: the tokens that may be drawn, bool `[vocabulary]`, at least one; None allows all.
    answer_at: the place in the ledger where the answer begins. `logit_bias` is in the logits already, or among what is
    not allowed."""
    adjusted = _less_repeated(sampling, _penalised(sampling, logits, ledger), ledger, answer_at)
    if allowed is not None:
        adjusted = mx.where(mx.array(allowed), mx.maximum(adjusted, _LEAST_ALLOWED), -mx.inf)
    if sampling.temperature == 0:
        return Draw(_whole(mx.argmax(adjusted)), key)
    filters, by_place = _filters(sampling, logits.shape[-1]), tuple(cast("list[int]", key.tolist())) == BY_PLACE
    # The same order as mlx-lm's samplers: normalize, filter, then temper.
    if filters or not by_place:
        adjusted = adjusted - mx.logsumexp(adjusted, keepdims=True)
    for apply in filters:
        adjusted = apply(adjusted[None])[0]
    if by_place:
        return Draw(_chosen(adjusted, sampling.temperature, number_at(sampling.seed, len(ledger))), key)
    next_key, draw_key = mx.random.split(key)
    choice = mx.random.categorical(adjusted * (1.0 / sampling.temperature), key=draw_key)
    mx.eval(choice, next_key)
    return Draw(_whole(choice), next_key)


def can_draw(logits: mx.array) -> mx.array:
    """Whether a token can be drawn from logits `[…, vocabulary]`, unevaluated bool `[…]`: none is NaN or positive
    infinity, and not all are minus infinity. The highest tells it, in a sixtieth of the time of a log-sum-exp."""
    return mx.isfinite(mx.max(logits, axis=-1))


def number_at(seed: int, place: int) -> float:
    """The random number that draws a token, at least 0 and less than 1. place: how many tokens stand before it."""
    digest = blake3(seed.to_bytes(8, "little") + place.to_bytes(8, "little")).digest(8)
    # 52 bits: its product with any float64 sum is less than the sum.
    return (int.from_bytes(digest, "little") >> 12) / 2**52


def _chosen(logits: mx.array, temperature: float, number: float) -> int:
    """The token at which the sum of probabilities, in the order of ids, passes the number."""
    values = np.asarray(logits).astype(np.float64)
    sums = np.exp((values - np.max(values)) / temperature).cumsum()
    return int(np.searchsorted(sums, number * sums[-1], side="right"))


def _whole(choice: mx.array) -> int:
    return int(cast(int, choice.item()))


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


def _less_repeated(sampling: Sampling, logits: mx.array, ledger: array[int], answer_at: int) -> mx.array:
    """By OpenAI's definition, which counts what was drawn. mlx-lm's processors count the prompt, too, and of all only
    the last 20 tokens."""
    if not (sampling.presence_penalty or sampling.frequency_penalty) or answer_at == len(ledger):
        return logits
    counts = np.bincount(ledger[answer_at:], minlength=logits.shape[-1])
    penalties = counts * sampling.frequency_penalty + (counts > 0) * sampling.presence_penalty
    return logits - mx.array(penalties.astype(np.float32))


def _filters(sampling: Sampling, vocabulary: int) -> list[Filter]:
    filters: list[Filter] = []
    if sampling.top_p < 1.0:
        filters.append(lambda logprobs: apply_top_p(logprobs, sampling.top_p))
    if sampling.min_p > 0.0:
        filters.append(lambda logprobs: apply_min_p(logprobs, sampling.min_p))
    if 0 < sampling.top_k < vocabulary:
        filters.append(lambda logprobs: apply_top_k(logprobs, sampling.top_k))
    return filters
