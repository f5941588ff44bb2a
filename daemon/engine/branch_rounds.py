"""Decodes one token for each of several branches in one model call, and each gets the bits that it gets alone.

Nothing stays together between two rounds: a branch's tail and the runs that it shares stay where they are, and any
branches of one model may be in the next round. How many rows a call may have says the model (`models/sharing.py`); a
call is filled up to it with rows that compute for nothing.

After a failure every branch is as it was before the token, and decodes alone, so that only the failing one gets the
error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

import mlx.core as mx

from ...snapshot.caches import arrays_of
from ...snapshot.kind import copied
from ...snapshot.kinds import holds_shared
from ...snapshot.passes import SEGMENTED
from ..errors import GenerationFailed
from ..events.bus import code_of
from ..events.events import BatchFailed, Event
from .asking import Decode
from .sampler import can_draw

_LOG = logging.getLogger(__name__)

_FEWEST: Final = 2


class BranchRounds:
    """The rounds of all models. most_rows: branches of one round, at most; tell: publishes an event. tokens: decoded in
    rounds so far."""

    def __init__(self, most_rows: int, tell: Callable[[Event], None]) -> None:
        self._most_rows = most_rows
        self._tell = tell
        self.tokens = 0

    def decode(self, asked: Sequence[Decode], along: Sequence[Decode] = ()) -> dict[int, mx.array]:
        """The logits of each branch that was decoded, by the id of its state; others are to decode alone. along: only
        with others that are asked for."""
        found: dict[int, mx.array] = {}
        for model in {id(each.model): each.model for each in asked}.values():
            waiting = [each for each in asked if each.model is model and _is_branch(each)]
            if waiting:
                waiting += [each for each in along if each.model is model and _is_branch(each)]
            while min(len(waiting), self._most_rows) >= _FEWEST:
                taken, rows = model.sharing.rows_for(model.network, min(len(waiting), self._most_rows))
                if taken < _FEWEST:
                    break
                round_, waiting = waiting[:taken], waiting[taken:]
                found.update(self._decode_round(round_, rows))
        return found

    def _decode_round(self, asked: Sequence[Decode], rows: int) -> dict[int, mx.array]:
        model, states = asked[0].model, [each.state for each in asked]
        put_back = [state.kept(one_token=True) for state in states]
        try:
            logits = model.run_round([each.token for each in asked], [state.caches for state in states], rows)
            are_sound = mx.all(can_draw(logits))
            found = [copied(logits[row]) for row in range(len(states))]  # a row alone would keep all in memory
            mx.eval(found, are_sound, [arrays_of(state.caches) for state in states])
            if are_sound.item():
                for state in states:
                    state.computed_tokens += 1
                    state.passes.add(SEGMENTED)
                self.tokens += len(states)
                return {id(state): row for state, row in zip(states, found, strict=True)}
            code = GenerationFailed.code
        except BaseException as error:  # noqa: BLE001 - the failing state raises it again, alone
            _LOG.warning("A round of %d branches of model %r failed: %s", len(states), model.name, error)
            code = code_of(error)
        for each in put_back:
            each()
        self._tell(BatchFailed(None, model.name, len(states), code))
        return {}


def _is_branch(asked: Decode) -> bool:
    return asked.model.sharing.in_rounds and not asked.alone and holds_shared(asked.state.caches)
