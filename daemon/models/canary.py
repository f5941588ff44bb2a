"""Takes the canary of a state before it sleeps, and runs it on the restored state (`snapshot/canary.py`)."""

from __future__ import annotations

import mlx.core as mx

from ...snapshot.caches import arrays_of, keep, without_last
from ...snapshot.canary import Expectation, Verdict, agree
from ...snapshot.state import LiveState
from ..errors import GenerationFailed
from .models import LoadedModel

__all__ = ("check", "take")


def take(model: LoadedModel, state: LiveState, last: int | None = None, *, is_lossy: bool = False) -> mx.array | None:
    """The logits `[vocabulary]` of the last token, run once more behind itself; the state is as it was. None if the
    last logits serve as the canary.

    last: the last token in the caches, if the ledger does not have it yet.
    is_lossy: whether the caches may hold other values than at the time of the last logits. Then the last token is run
    again on the state before it, instead of None.
    """
    if model.layout.by_token:
        return _logits_of_last(model, state) if is_lossy else None
    put_back = keep(state.caches, one_token=True)
    try:
        return _logits(model, state, state.tokens[-1] if last is None else last)
    finally:
        put_back()


def check(model: LoadedModel, state: LiveState, expected: Expectation) -> Verdict:
    """Run the canary on a restored state, and compare. The state is as it was.

    Raises:
        CanaryFailed: it does not agree.
        GenerationFailed: the model failed on it.
    """
    logits = take(model, state)
    if logits is None:
        logits = _logits_of_last(model, state)
    return agree(expected, logits, compute_dtype=model.compute_dtype, position=len(state.tokens))


def _logits_of_last(model: LoadedModel, state: LiveState) -> mx.array:
    """The last token's logits, run again on the state before it."""
    with without_last(state.caches, len(state.tokens)):
        return _logits(model, state, state.tokens[-1])


def _logits(model: LoadedModel, state: LiveState, token: int) -> mx.array:
    try:
        logits = model.run([token], state.caches)[0, -1].astype(mx.float32)
        mx.eval(logits, arrays_of(state.caches))
    except Exception as error:  # a model's code may raise any error for a state of a wrong shape
        raise GenerationFailed(
            f"The model failed on the canary at token {len(state.tokens)}: {type(error).__name__}: {error}.",
            position=len(state.tokens),
        ) from error
    return logits
