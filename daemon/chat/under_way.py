"""An answer under way, as its session tells of it: its text, and the request that may go on with it.

A session may leave memory in the midst of an answer, and a client may leave for good. So what is noted is true of the
ledger at each moment in which the engine does not write.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass
from typing import Final

import mlx.core as mx

from ..engine.generation import WriteOrder, Written
from ..sessions.interrupted import Interrupted
from ..sessions.sessions import Session
from ..sessions.transcripts import message_of


@dataclass(frozen=True, slots=True)
class Known:
    """By what a request and its answer are known again. request: the digest of all that decides its answer; None:
    never. begins_at: the token at which its messages begin. answer_id: names the answer; empty for none."""

    request: bytes | None = None
    begins_at: int = 0
    answer_id: bytes = b""


NEVER: Final = Known()


@dataclass(frozen=True, slots=True)
class UnderWay:
    """begins: the token at which it begins. own_key: the session's random key before it."""

    order: WriteOrder
    written: Written
    begins: int
    known: Known
    own_key: mx.array

    def note(self, live: Session, *, goes_on: bool) -> None:
        """Note what is written, as the client was shown it (QX8). goes_on: whether the same request may go on; not with
        log-probabilities, for the logits of what is written are gone."""
        live.dirty, end = True, len(live.state.tokens)
        live.interrupted = None
        known = self.known
        if goes_on and known.request is not None and self.order.logprobs is None:
            seed = self.order.sampling.seed if self.order.seeded else None
            live.interrupted = Interrupted(known.request, known.begins_at, self.begins, end, seed)
        if self.order.keep_end:
            # A failure here must not cost the answer; the map then ends before it, and nothing matches by text (QC10).
            with contextlib.suppress(Exception):
                answer = message_of("assistant", self.written.text, [asdict(call) for call in self.written.calls])
                before = live.text_map.cut(self.begins)
                live.text_map = before.extended([answer], start=self.begins, end=end, answer=known.answer_id)

    def end(self, live: Session, *, has_written: bool) -> None:
        """Give the session its own random key back, where this answer has not used it."""
        if self.order.seeded or not has_written:
            live.state.random_key = self.own_key
