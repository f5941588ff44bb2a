"""Reads tokens for one state, in a call of its own; what fails is undone and told."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ...errors import TorporError
from ...snapshot.caches import arrays_of
from ...snapshot.state import LiveState
from ..errors import GenerationFailed
from ..models.models import LoadedModel
from .asking import Decode
from .sampler import can_draw


def logits_after(model: LoadedModel, state: LiveState, tokens: Sequence[int]) -> mx.array:
    """Float32 logits `[vocabulary]` after reading the tokens, evaluated with all that the caches hold. Raises
    GenerationFailed: no token can be drawn from them; an argmax over NaN would quietly give token 0."""
    logits = model.extend(tokens, state)[0, -1].astype(mx.float32)
    is_sound = can_draw(logits)
    mx.eval(logits, is_sound, arrays_of(state.caches))
    if not is_sound.item():
        raise GenerationFailed(
            f"The model's logits after token {len(state.tokens)} contain NaN or infinity: its weights are damaged, or "
            "its numbers overflow. The session is as it was.",
            position=len(state.tokens),
        )
    return logits


def raise_as_failure(error: BaseException, position: int) -> None:
    """Turn an error of a model into GenerationFailed; our own errors and a closing of the steps pass."""
    if isinstance(error, Exception) and not isinstance(error, TorporError):
        raise GenerationFailed(
            f"The model failed after token {position}: {type(error).__name__}: {error}. The session is as it was.",
            position=position,
        ) from error


def decode_alone(asked: Decode) -> mx.array:
    """The logits after the token, in a call of its own. Raises GenerationFailed: the model failed; the state is as it
    was."""
    state = asked.state
    put_back = state.kept(one_token=True)
    try:
        logits = logits_after(asked.model, state, [asked.token])
        if asked.behind is not None:
            asked.behind(logits)
        return logits
    except BaseException as error:
        put_back()
        raise_as_failure(error, len(state.tokens))
        raise


def tried(asked: Decode) -> mx.array | BaseException:
    """As `decode_alone`, with its error as the result."""
    try:
        return decode_alone(asked)
    except BaseException as error:  # noqa: BLE001 - it belongs to the asking session, even a SystemExit
        return error
