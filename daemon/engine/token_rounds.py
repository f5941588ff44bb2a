"""Decodes one token for each of several states of a model in one call: of sessions, or of branches.

Nothing stays together between two rounds: caches stay where they are, of whatever lengths, and any states of a kind may
be in the next round. After a failure every state is as it was before the token, and decodes alone, so that only the
failing one gets the error.

- Sessions that keep all in plain caches (`models/company.py`). A token has the bits that it has alone where that was
  tried for so many rows; elsewhere its ledger has it as `UNREPEATABLE`.
- Branches (`models/sharing.py`). Each gets the bits that it gets alone; a call may be filled up with rows that compute
  for nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import mlx.core as mx

from ...snapshot.caches import arrays_of
from ...snapshot.kind import copied
from ...snapshot.kinds import are_plain, holds_shared
from ...snapshot.passes import SEGMENTED, UNREPEATABLE
from ..errors import GenerationFailed
from ..events.bus import code_of
from ..events.events import BatchFailed, Event
from ..models.models import LoadedModel
from .alone import tried
from .asking import Decode
from .sampler import can_draw

_LOG = logging.getLogger(__name__)

_FEWEST: Final = 2

MOST_FAILURES: Final = 3
"""Calls for several states of a model that may fail, without a failing state in them, before there are no more."""

Outcomes = dict[int, mx.array | BaseException]
"""The logits or the error of each state that was decoded, by its id."""


class TokenRounds:
    """The rounds of all models, for one kind of states. most_rows: states of one round, at most; tell: publishes an
    event. tokens: decoded in rounds so far."""

    def __init__(self, most_rows: int, tell: Callable[[Event], None]) -> None:
        self._most_rows = most_rows
        self._tell = tell
        self._failures: Counter[bytes] = Counter()
        self.tokens = 0

    def decode(self, asked: Sequence[Decode], along: Sequence[Decode], outcomes: Outcomes) -> None:
        """Decode those that can go into one call with others, and leave the rest. along: decoded where a call for the
        others has room."""
        for model in {id(each.model): each.model for each in asked}.values():
            if self._failures[model.identity.digest] >= MOST_FAILURES:
                continue
            first, beside = (
                [each for each in them if each.model is model and self._takes(each)] for them in (asked, along)
            )
            while first and (count := min(len(first) + len(beside), self._most_rows)) >= _FEWEST:
                size, rows = self._rows_for(model, count)
                if size < _FEWEST:
                    break
                more = max(0, size - len(first))
                self._decode_round(model, [*first[:size], *beside[:more]], rows, outcomes)
                first, beside = first[size:], beside[more:]

    def _takes(self, asked: Decode) -> bool:
        """Whether the state is of the kind, and may be in one call with others."""
        raise NotImplementedError

    def _rows_for(self, model: LoadedModel, wanted: int) -> tuple[int, int]:
        """How many states go into the next call, and how many rows it has."""
        raise NotImplementedError

    def _pass_of(self, model: LoadedModel, rows: int) -> int:
        """What the ledger says of a token that was read in such a call, as `Passes` has it."""
        raise NotImplementedError

    def _decode_round(self, model: LoadedModel, asked: Sequence[Decode], rows: int, outcomes: Outcomes) -> None:
        states = [each.state for each in asked]
        put_back = [state.kept(one_token=True) for state in states]
        try:
            size = self._pass_of(model, rows)
            logits = model.run_round([each.token for each in asked], [state.caches for state in states], rows)
            are_sound = mx.all(can_draw(logits))
            copies = [copied(logits[row]) for row in range(len(states))]  # a row alone would keep all in memory
            mx.eval(copies, are_sound, [arrays_of(state.caches) for state in states])
            if are_sound.item():
                for state, copy in zip(states, copies, strict=True):
                    state.computed_tokens += 1
                    state.passes.add(size)
                    outcomes[id(state)] = copy
                self.tokens += len(states)
                return
            code = GenerationFailed.code
        except BaseException as error:  # noqa: BLE001 - the failing state raises it again, alone
            _LOG.warning("A round of %d states of model %r failed: %s", len(states), model.name, error)
            code = code_of(error)
        for each in put_back:
            each()
        self._tell(BatchFailed(None, model.name, len(states), code))
        outcomes.update((id(one.state), tried(one)) for one in asked)
        if not any(isinstance(outcomes[id(state)], BaseException) for state in states):
            self._failures[model.identity.digest] += 1


class BranchRounds(TokenRounds):
    """Of branches."""

    def _takes(self, asked: Decode) -> bool:
        return asked.model.sharing.in_rounds and not asked.alone and holds_shared(asked.state.caches)

    def _rows_for(self, model: LoadedModel, wanted: int) -> tuple[int, int]:
        return model.sharing.rows_for(model.network, wanted)

    def _pass_of(self, model: LoadedModel, rows: int) -> int:
        return SEGMENTED


class SessionRounds(TokenRounds):
    """Of sessions whose caches are plain."""

    def _takes(self, asked: Decode) -> bool:
        return not asked.alone and are_plain(asked.state.caches)

    def _rows_for(self, model: LoadedModel, wanted: int) -> tuple[int, int]:
        return (wanted, wanted) if model.can_read_in_rounds else (0, 0)

    def _pass_of(self, model: LoadedModel, rows: int) -> int:
        return 1 if model.company.repeats(model.network, rows) else UNREPEATABLE
