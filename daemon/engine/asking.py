"""What a generating step asks the engine for: the logits after one more token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ...snapshot.state import LiveState
from ..models.models import LoadedModel


@dataclass(frozen=True, slots=True, eq=False)
class Decode:
    """A generating step yields this: the next token for its state. It is sent the logits, float32 `[vocabulary]`,
    evaluated together with the caches; or an error is thrown into it, and the state is as before. From then on the
    caches belong to the decoder, until the step ends.

    alone: not in one call with tokens of others. behind: work on the caches, given the logits, once the token is in
        them and before it counts; only with `alone`.
    """

    model: LoadedModel
    state: LiveState
    token: int
    alone: bool = False
    behind: Callable[[mx.array], None] | None = None
