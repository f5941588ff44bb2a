"""Decodes one token for each generating session: in rounds (`token_rounds.py`), in mlx-lm's batches, or each alone.

Rules of batches, which are for models that decode in no rounds:
- A state stays in a batch while its request generates. Meanwhile its caches are rows of the batch, and
  `LiveState.caches` is empty; code that needs them calls `release`.
- After a failure every state is as it was before the token: the batch is restored and taken apart, and each state
  decodes its token alone, so that only the failing one gets the error.
- Numbers computed in a batch may differ in the last bits from those computed alone, so a ledger records which tokens
  were decoded in a batch (`passes.UNREPEATABLE`).
- A model decodes in batches only after a test that a batch computes the same as a single state.
- Tokens that are decoded *along* need no extra call: their states take free rows of the batch, and give them up to
  other states that have none.

Everything here runs on the engine thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import mlx.core as mx
import numpy as np

from ...memvid.units import format_plural
from ...snapshot import batches
from ...snapshot.caches import arrays_of
from ...snapshot.canary import tolerance_of
from ...snapshot.passes import UNREPEATABLE
from ...snapshot.state import LiveState
from ..errors import GenerationFailed
from ..events.bus import code_of
from ..events.events import BatchFailed, Event
from ..models.models import LoadedModel
from ..models.sharing import difference
from ..options.serve_options import ServeOptions
from .alone import tried
from .asking import Decode
from .sampler import can_draw
from .token_rounds import MOST_FAILURES, BranchRounds, Outcomes, SessionRounds

_LOG = logging.getLogger(__name__)

_ROUNDS_TO_COPY: Final = 2
"""Copying a row takes about the time of decoding it this many times, with some thousands of tokens."""

MOST_PADDING: Final = 0.25
"""The most padding of a batch, as a part of its content, and the most empty rows, as a part of all rows. A session much
shorter or longer than a batch decodes in another one, or alone."""

_BLOCKS_BY_PLACE: Final = "index_block_size"
"""An attribute of mlx-lm's layers that pick blocks of keys. They cut them by place, and padding moves places: in a
batch such a session says something else."""


@dataclass(slots=True, eq=False)
class _Batch:
    """States that decode together, one in each row. A state that leaves makes its row None: it computes for nothing
    until another state takes it, or until that has cost as much as a copy of all others.

    like: empty caches of the model. tell: publishes an event, from the engine thread. rooms: `batches.rooms_of` of each
    state, by its id. width: tokens of the longest row. idle_rows: rows that were computed for nothing.
    """

    model: LoadedModel
    like: list[Any]
    tell: Callable[[Event], None]
    rows: list[LiveState | None] = field(default_factory=list)
    caches: batches.Batch = field(default_factory=list)
    rooms: dict[int, batches.Rooms] = field(default_factory=dict)
    width: int = 0
    idle_rows: int = 0

    @property
    def states(self) -> list[LiveState]:
        """The states in it now."""
        return [state for state in self.rows if state is not None]

    def has_room(self, more: Sequence[LiveState], most_rows: int, *, without: LiveState | None = None) -> bool:
        """Whether the batch stays within its rows and its padding with these states. without: as if that one had
        left."""
        lengths = [len(state.tokens) for state in (*self.states, *more) if state is not without]
        widest = max(self.width, *lengths)
        return len(lengths) <= most_rows and widest * len(lengths) <= (1 + MOST_PADDING) * sum(lengths)

    def join(self, states: Sequence[LiveState]) -> None:
        """Take over the caches of states, in free rows or new ones. Raises MLX's error if there is no memory; states
        that are not in it then have their caches, or are lost."""
        self.rooms |= {id(state): batches.rooms_of(state.caches) for state in states}
        rest = [state for state in states if not self._placed(state)]
        if rest:
            merged = self._merged(rest)
            if self.rows:
                self._extend(merged, rest)
            else:
                self.caches = merged
            self.rows += rest
        self.width = max(self.width, *(len(state.tokens) for state in states))

    def leave(self, states: Sequence[LiveState]) -> None:
        """Give states their caches back; a state without memory for that is lost. If all leave, the layers are freed
        one by one."""
        gone = {id(state) for state in states}
        leaving = [row for row, state in enumerate(self.rows) if state is not None and id(state) in gone]
        if len(leaving) == len(self.states):
            self._dissolve()
            return
        for row in leaving:
            state, self.rows[row] = self.rows[row], None
            if state is not None:
                self._give_back(state, partial(batches.extract, self.caches, row, self.rooms.pop(id(state))))
        if leaving and not batches.has_places(self.like):
            self.close_ranks()

    def close_ranks(self) -> None:
        """Copy the rows in use, so that no other is computed."""
        places = [row for row, state in enumerate(self.rows) if state is not None]
        try:
            batches.retain(self.caches, places)
        except BaseException:
            self._lose(self.states)
            raise
        self.rows = [self.rows[row] for row in places]
        self.width = max(len(state.tokens) for state in self.states)
        self.idle_rows = 0

    @property
    def wastes(self) -> bool:
        """Whether the free rows have cost as much as a copy of the others, or take too much memory."""
        too_many = self.rows.count(None) > MOST_PADDING * len(self.rows)
        return too_many or self.idle_rows >= _ROUNDS_TO_COPY * len(self.rows)

    def decode(self, asked: Mapping[int, Decode]) -> list[mx.array] | None:
        """The logits of each state, in order, after its token. asked: by the state's id. None if the call failed for
        any state: then the batch is as it was."""
        put_back = None
        places = [row for row, state in enumerate(self.rows) if state is not None]
        try:
            tokens = [0 if state is None else asked[id(state)].token for state in self.rows]
            put_back = batches.keep(self.caches, self.like)
            logits = self.model.run_batch(tokens, self.caches)
            logits_in_use = logits if len(places) == len(tokens) else logits[mx.array(places)]
            are_sound = mx.all(can_draw(logits_in_use))
            rows = [logits_in_use[row] for row in range(len(places))]
            mx.eval(rows, are_sound, batches.arrays(self.caches))
            if are_sound.item():
                for state in self.states:
                    state.computed_tokens += 1
                    state.passes.add(UNREPEATABLE)
                self.width += 1
                self.idle_rows += len(tokens) - len(places)
                return rows
            self._tell_failed(GenerationFailed.code)
        except BaseException as error:  # noqa: BLE001 - the failing state raises it again, alone
            _LOG.warning("A batch of %d sessions of model %r failed: %s", len(places), self.model.name, error)
            self._tell_failed(code_of(error))
        if put_back is not None:
            put_back()
        return None

    def _tell_failed(self, code: str) -> None:
        self.tell(BatchFailed(None, self.model.name, len(self.states), code))

    def _placed(self, state: LiveState) -> bool:
        if None not in self.rows or not batches.fits_place(self.caches, state.caches):
            return False
        row, caches = self.rows.index(None), _given_up(state)
        try:
            batches.place(self.caches, row, caches)
        except BaseException:
            _take_back(state, caches)
            raise
        self.rows[row] = state
        if None not in self.rows:
            self.idle_rows = 0
        return True

    def _merged(self, states: Sequence[LiveState]) -> batches.Batch:
        rows = [_given_up(state) for state in states]
        try:
            return batches.merge(rows)
        except BaseException:
            for state, caches in zip(states, rows, strict=True):
                _take_back(state, caches)
            raise

    def _extend(self, merged: batches.Batch, joining: Sequence[LiveState]) -> None:
        try:
            batches.extend(self.caches, merged)
        except BaseException:
            self._dissolve(merged, joining)
            raise

    def _dissolve(self, merged: batches.Batch | None = None, joining: Sequence[LiveState] = ()) -> None:
        """Give all states their caches back, also those about to join, in a batch of their own."""
        places = [row for row, state in enumerate(self.rows) if state is not None]
        states = [*self.states, *joining]
        rooms = [self.rooms.pop(id(state)) for state in states]
        try:
            all_caches = batches.take_apart(self.caches, places, rooms, merged, range(len(joining)))
        except BaseException as error:  # noqa: BLE001 - there is no memory to give them back to
            _LOG.error("The state of %d sessions is lost: %s: %s", len(states), type(error).__name__, error)
            self._lose(states)
            return
        for state, caches in zip(states, all_caches, strict=True):
            self._give_back(state, lambda caches=caches: caches)  # type: ignore[misc]
        self.caches, self.rows = [], []

    def _give_back(self, state: LiveState, caches: Callable[[], list[Any]]) -> None:
        try:
            state.caches = caches()
            if state.last_logits is not None:  # a row of a shared array
                state.last_logits = mx.array(np.array(state.last_logits))
        except BaseException as error:  # noqa: BLE001 - there is no memory to give them back to
            _LOG.error("The state of a session is lost: %s: %s", type(error).__name__, error)
            state.caches, state.is_lost = [], True

    def _lose(self, states: Sequence[LiveState]) -> None:
        for state in states:
            state.caches, state.is_lost = [], True
        self.caches, self.rows = [], []


def _given_up(state: LiveState) -> list[Any]:
    """Take a state's caches from it."""
    caches, state.caches = list(state.caches), []
    return caches


def _take_back(state: LiveState, caches: list[Any]) -> None:
    """Give a state its caches back; it is lost if one is missing."""
    state.is_lost = any(cache is None for cache in caches)
    state.caches = [] if state.is_lost else caches


def lost(state: LiveState) -> GenerationFailed:
    """The error for the user of a lost state."""
    return GenerationFailed(
        f"There was no memory to keep the state of {format_plural(len(state.tokens), 'token')}, so it is lost. The "
        "session goes on from its last sleep. Start the daemon with a smaller --memory-budget.",
        position=len(state.tokens),
    )


_Joining = dict[int, tuple[_Batch, list[LiveState]]]


def _to_nobody(event: Event) -> None:
    """The default listener."""


class Decoder:
    """Decodes the tokens of generating steps, round by round. most_rows: of one batch; 1: always each alone."""

    def __init__(self, most_rows: int = ServeOptions.batch, tell: Callable[[Event], None] = _to_nobody) -> None:
        self._most_rows = most_rows
        self._tell = tell
        self._batches: list[_Batch] = []
        self._fit: dict[bytes, bool] = {}
        self._failures: Counter[bytes] = Counter()
        self._rounds = BranchRounds(most_rows, tell), SessionRounds(most_rows, tell)
        self._batched_tokens = 0

    @property
    def batched_tokens(self) -> int:
        """Tokens that were decoded in one call with others."""
        return self._batched_tokens + sum(each.tokens for each in self._rounds)

    def decode(self, asked: Sequence[Decode], along: Sequence[Decode] = ()) -> list[mx.array | BaseException | None]:
        """Decode one token for each; returns the logits or the error of each. along: decoded if they fit the calls of
        the others; None for one that did not."""
        outcomes: Outcomes = {}
        for rounds in self._rounds:
            rounds.decode(asked, along, outcomes)
        rest, beside = ([each for each in them if id(each.state) not in outcomes] for them in (asked, along))
        self._decode_in_batches(rest, beside, outcomes)
        for each in asked:
            if id(each.state) not in outcomes:
                outcomes[id(each.state)] = tried(each)
        # An error's traceback refers to this frame, so the frame must not keep the error.
        return [outcomes.pop(id(each.state), None) for each in (*asked, *along)]

    def _decode_in_batches(self, asked: Sequence[Decode], along: Sequence[Decode], outcomes: Outcomes) -> None:
        by_state = {id(each.state): each for each in (*asked, *along)}
        try:
            self._settle(asked, along)
        except BaseException as error:  # noqa: BLE001 - a state without a batch decodes alone
            _LOG.warning("Batches could not be settled: %s: %s", type(error).__name__, error)
        outcomes.update((key, lost(each.state)) for key, each in by_state.items() if each.state.is_lost)
        self._batches = [batch for batch in self._batches if batch.states]
        for batch in self._batches_with(asked):
            rows = batch.decode(by_state)
            if rows is not None:
                self._batched_tokens += len(rows)
                outcomes.update((id(state), row) for state, row in zip(batch.states, rows, strict=True))
                continue
            self._take_apart(batch, by_state, outcomes)

    def release(self, states: Sequence[LiveState]) -> None:
        """Give states that are in a batch their caches back. A batch of one is dissolved."""
        wanted = {id(state) for state in states}
        for batch in list(self._batches):
            leaving = [state for state in batch.states if id(state) in wanted]
            if leaving:
                staying = len(batch.states) - len(leaving)
                try:
                    batch.leave(leaving if staying > 1 else batch.states)
                except BaseException as error:  # noqa: BLE001 - states without their caches are lost
                    _LOG.error("A batch was lost: %s: %s", type(error).__name__, error)
        self._batches = [batch for batch in self._batches if batch.states]

    def _batches_with(self, asked: Sequence[Decode]) -> list[_Batch]:
        """The batches with one of these states."""
        wanted = {id(each.state) for each in asked}
        return [batch for batch in self._batches if any(id(state) in wanted for state in batch.states)]

    def _settle(self, asked: Sequence[Decode], along: Sequence[Decode]) -> None:
        """Decide which states decode together: batches go on, and the others join them or each other."""
        going_on = {id(each.state) for each in (*asked, *along) if not each.alone}
        self.release([state for batch in self._batches for state in batch.states if id(state) not in going_on])
        for model in {id(each.model): each.model for each in asked}.values():
            self._admit(model, self._waiting(model, asked), along)
        for batch in self._batches:
            if batch.wastes:
                batch.close_ranks()

    def _waiting(self, model: LoadedModel, asked: Sequence[Decode]) -> list[LiveState]:
        """The states that could be in a batch of the model and are in none, the shortest first."""
        if self._most_rows < 2:
            return []
        batched = {id(state) for batch in self._batches for state in batch.states}
        states = [each.state for each in asked if each.model is model and not each.alone]
        waiting = [each for each in states if id(each) not in batched and batches.can_batch(each.caches)]
        return sorted(waiting, key=lambda state: len(state.tokens))

    def _admit(self, model: LoadedModel, states: list[LiveState], along: Sequence[Decode]) -> None:
        joinable, yielding = self._waiting(model, along), {id(each.state) for each in along}
        running = [batch for batch in self._batches if batch.model is model]
        idle = [batch for batch in running if all(id(state) in yielding for state in batch.states)]
        if not (states or joinable or idle) or (not running and len(states) + len(joinable) < 2):
            return
        if not self._is_fit(model):
            return
        joining: _Joining = {id(batch): (batch, []) for batch in running}
        for state in states:
            place = self._place_in(joining, state)
            place = self._place_given_up(joining, state, yielding) if place is None else place
            if place is not None:
                place.append(state)
            else:
                fresh = _Batch(model, model.new_caches(), self._tell)
                joining[id(fresh)] = (fresh, [state])
        for batch in idle:
            if not joining[id(batch)][1]:
                del joining[id(batch)]
                self.release(batch.states)  # so that they can join a batch that decodes
        for state in joinable:
            if (place := self._place_in(joining, state)) is not None:
                place.append(state)
        for batch, more in joining.values():
            if more and len(batch.states) + len(more) > 1:
                if not batch.rows:
                    self._batches.append(batch)
                batch.join(more)

    def _place_in(self, joining: _Joining, state: LiveState) -> list[LiveState] | None:
        """The joining states of a batch that has room for this state, too."""
        return next((more for batch, more in joining.values() if batch.has_room([*more, state], self._most_rows)), None)

    def _place_given_up(self, joining: _Joining, state: LiveState, yielding: Collection[int]) -> list[LiveState] | None:
        """As `_place_in`, in a batch that another state leaves, which was only decoded along."""
        for batch, more in joining.values():
            for other in batch.states:
                if id(other) in yielding and batch.has_room([*more, state], self._most_rows, without=other):
                    self.release([other])
                    return more
        return None

    def _is_fit(self, model: LoadedModel) -> bool:
        """Whether the model computes the same in a batch as alone; tested once for each model."""
        digest = model.identity.digest
        if digest not in self._fit:
            self._fit[digest] = is_fit_for_batches(model)
            if not self._fit[digest]:
                _LOG.warning("Model %r does not decode in batches; its sessions decode one by one.", model.name)
        return self._fit[digest]

    def _take_apart(self, batch: _Batch, by_state: dict[int, Decode], outcomes: Outcomes) -> None:
        """Decode each state of a failed batch alone; if none fails, the batch is at fault."""
        states = list(batch.states)
        self.release(states)
        for state in states:
            outcomes[id(state)] = lost(state) if state.is_lost else tried(by_state[id(state)])
        if not any(isinstance(outcomes[id(state)], BaseException) for state in states):
            digest = batch.model.identity.digest
            self._failures[digest] += 1
            self._fit[digest] = self._failures[digest] < MOST_FAILURES


def is_fit_for_batches(model: LoadedModel) -> bool:
    """Whether two sessions of different lengths give the same logits in a batch, and after it, as alone, but for the
    last bits."""
    if any(getattr(module, _BLOCKS_BY_PLACE, None) for module in model.network.modules()):
        return False
    most = model.layout.vocabulary - 1
    prompts, steps = [[min(token, most) for token in each] for each in (range(1, 13), [4])], ([0, 1], [1, 0])
    tolerance = tolerance_of(model.compute_dtype)
    try:
        alone = [_decoded(model, _read(model, prompt), step) for prompt, step in zip(prompts, steps, strict=True)]
        together = _decoded_together(model, prompts, steps)
        return all(
            difference(one, other) <= tolerance
            for ours, theirs in zip(alone, together, strict=True)
            for one, other in zip(ours, theirs, strict=True)
        )
    except Exception as error:  # noqa: BLE001 - models are code of many authors, and may raise any error
        _LOG.warning("Model %r cannot decode a batch: %s: %s", model.name, type(error).__name__, error)
        return False


def _decoded_together(
    model: LoadedModel, prompts: Sequence[Sequence[int]], steps: Sequence[Sequence[int]]
) -> list[list[mx.array]]:
    """As `_decoded` for each, but with the first tokens in one batch."""
    rows = [_read(model, prompt) for prompt in prompts]
    if not all(batches.can_batch(caches) for caches in rows):
        raise ValueError("its caches cannot be batched")
    batch = batches.merge(rows)
    first = model.run_batch([step[0] for step in steps], batch)
    mx.eval(first, batches.arrays(batch))
    return [[first[row], *_decoded(model, batches.extract(batch, row), step[1:])] for row, step in enumerate(steps)]


def _decoded(model: LoadedModel, caches: list[Any], steps: Sequence[int]) -> list[mx.array]:
    """The logits after each step."""
    logits = []
    for token in steps:
        logits.append(model.run([token], caches)[0, -1])
        mx.eval(logits, arrays_of(caches))
    return logits


def _read(model: LoadedModel, prompt: Sequence[int]) -> list[Any]:
    caches = model.new_caches()
    mx.eval(model.run(prompt, caches), arrays_of(caches))
    return caches
