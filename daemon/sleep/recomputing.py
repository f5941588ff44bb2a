"""Computes a state again from the stored tokens, in the same model calls as before.

Healing does so behind damage; a wake does so if it is faster and allowed (`choosing.py`). A wake compares the result
with the stored digests before any session uses it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import mlx.core as mx

from ...errors import TorporError
from ...memvid.format.lossy import LOSSY
from ...memvid.format.manifest import Manifest
from ...memvid.format.reader import BundleReader
from ...memvid.format.salvaged import salvaged_from
from ...memvid.uri import SessionUri
from ...snapshot.canary import Expectation, Verdict, agree
from ...snapshot.capture import cut
from ...snapshot.checkpoints import Checkpoint
from ...snapshot.identity import Difference, decide_bits, tokens_from_elsewhere
from ...snapshot.memory import readable
from ...snapshot.passes import UNREPEATABLE
from ...snapshot.proof import Sameness, compare
from ...snapshot.restore import WakePlan, read_checkpoint
from ...snapshot.state import LiveState, token_array
from ..api.limits import RecomputePolicy
from ..api.session import Recomputed
from ..engine.engine import Engine, Steps
from ..engine.generation import replay
from ..models.models import LoadedModel
from ..models.rates import Measured
from ..sessions.unprocessed_tail import unread_in
from .choosing import Calls, Choice, Work, choose, unrepeatable_calls

_LOG = logging.getLogger(__name__)

_MOST_REFUTED: Final = 1024
"""Remembered sessions that gave other bits when they were computed again."""


def read_again(model: LoadedModel, state: LiveState, tokens: Sequence[int], end: Checkpoint) -> Steps[bool]:
    """Bring a state with the first of `tokens` to their end, in the same calls as before. Gives whether the last logits
    equal those of `end`, the record there, to the bit.

    Raises GenerationFailed: the model failed; the state is not to be used."""
    start = len(state.tokens)
    yield from replay(model, state, tokens[start:], list(end.passes.between(start, len(tokens))))
    state.random_key = end.random_key
    assert state.last_logits is not None
    return bool(mx.array_equal(state.last_logits.view(mx.uint32), end.logits.view(mx.uint32)).item())


@dataclass(frozen=True, slots=True)
class Brought:
    """A restored or recomputed state. verdict: of its canary. unchanged_tokens: how many of its tokens equal the stored
    blocks. recomputed: its report if not all do."""

    state: LiveState
    verdict: Verdict
    bytes_read: int
    unchanged_tokens: int
    recomputed: Recomputed | None = None
    canary_seconds: float = 0.0


class Recomputing:
    """Chooses the way of a wake, and recomputes. measured: the rates of this daemon."""

    def __init__(self, engine: Engine, measured: Measured, policy: RecomputePolicy) -> None:
        self.policy = policy
        self.measured = measured
        self._engine = engine
        self._refuted: OrderedDict[SessionUri, None] = OrderedDict()

    def choose(
        self,
        reader: BundleReader,
        plan: WakePlan,
        model: LoadedModel,
        differs: tuple[Difference, ...],
        *,
        at_token: int | None,
    ) -> Choice:
        """Choose for one wake. at_token: None for the whole version."""
        known, unread = plan.passes, unread_in(reader.manifest.session, reader.manifest.uri)
        after = list(unread.passes.runs()) if unread and at_token is None else []
        behind = ((size, 1) for size in known.between(plan.resumed_tokens, plan.target_tokens))
        work = Work(
            read_bytes=plan.read_bytes,
            behind=Calls.of([*behind, *after]),
            again=Calls.of([*known.runs(), *after]),
            obstacle=_obstacle(reader, plan, at_token),
            inexact=self._inexact(reader.manifest, plan, differs),
        )
        return choose(work, self.measured.of(model), self.policy)

    def _inexact(self, manifest: Manifest, plan: WakePlan, differs: tuple[Difference, ...]) -> str | None:
        if decide_bits(differs) or tokens_from_elsewhere(manifest.session):
            return "another device, library or version computed what is stored, maybe to other bits"
        if unrepeatable := sum(count for size, count in plan.passes.runs() if size == UNREPEATABLE):
            return unrepeatable_calls(unrepeatable)
        if manifest.uri in self._refuted:
            return "what was computed of it since the daemon began was not, bit for bit, what is stored"
        return None

    async def compute(
        self,
        reader: BundleReader,
        plan: WakePlan,
        model: LoadedModel,
        begin: Callable[[], Awaitable[LiveState]],
        on_io: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> Brought | None:
        """Compute the state of a whole version again; None if that fails, or the policy refuses the result. on_io:
        reads the store off the event loop."""
        assert plan.state is not None
        try:
            end = await self._engine.call(partial(read_checkpoint, reader, plan.state, model.layout))
            state = await begin()
            same_logits = await self._engine.run(read_again(model, state, token_array(plan.tokens), end))
            computed = await self._engine.call(lambda: cut(state, model.layout, durable=(), unchanged_tokens=0))
            same: Sameness = await on_io(lambda: compare(computed, reader, plan))
            if not same.end:
                self._refute(reader.manifest.uri)
                if self.policy != "fastest":
                    _LOG.warning("%s was computed again to other bits, and is restored", reader.manifest.uri)
                    return None
            verdict = await self._engine.call(lambda: _verdict(model, state, end))
        except TorporError as error:
            _LOG.warning("%s cannot be computed again, and is restored: %s", reader.manifest.uri, error.message)
            return None
        state.checkpoints.became_durable(each for each in plan.checkpoints if each <= same.tokens)
        return Brought(state, verdict, plan.state.raw_bytes, same.tokens, _told(reader, plan, same, same_logits))

    def forget(self, uri: SessionUri) -> None:
        """Forget a session."""
        self._refuted.pop(uri, None)

    def _refute(self, uri: SessionUri) -> None:
        self._refuted[uri] = None
        while len(self._refuted) > _MOST_REFUTED:
            self._refuted.popitem(last=False)


def _obstacle(reader: BundleReader, plan: WakePlan, at_token: int | None) -> str | None:
    manifest = reader.manifest
    if at_token is not None and at_token != manifest.token_count:
        return "only its beginning is wanted, and nothing proves what that was"
    if plan.loss is not None or manifest.session.get(LOSSY) is not None:
        return "it was kept in fewer bits, which no model computes"
    if salvaged_from(manifest) is not None:
        return "it is what a repair saved of another version, and may yet give way to that"
    if plan.state is None or not plan.has_logits:
        return "it has no record of its end to be compared with"
    return None


def _verdict(model: LoadedModel, state: LiveState, end: Checkpoint) -> Verdict:
    """The canary's verdict: the last logits equal the stored ones, or nearly. Raises CanaryFailed: they differ."""
    assert state.last_logits is not None
    expected = Expectation(bytes(readable(end.logits)), exact=False)
    return agree(expected, state.last_logits, compute_dtype=model.compute_dtype, position=len(state.tokens))


def _told(reader: BundleReader, plan: WakePlan, same: Sameness, same_logits: bool) -> Recomputed | None:
    if same.end:
        return None
    start = min(same.tokens, plan.target_tokens - 1)
    return Recomputed(reader.manifest.version, start, plan.target_tokens - start, same_logits, damaged=False)
