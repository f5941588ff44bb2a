"""Folds: an exhausted session stays as a checkpoint, and a new, smaller one goes on with a summary of it and its end.

Owns what the new session reads: as if the assistant had been asked for a summary at the beginning of the conversation,
and had given it, and what followed were the last turns. So it is a conversation of the model's own template, and its
text map knows all of it. A session that is no chat begins with the summary's text instead.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ...memvid.units import format_count, format_plural
from ..errors import ContextOverflow, TemplateUnusable
from ..models.models import LoadedModel
from ..sessions.encoding import Encoder, Place
from ..sessions.sessions import Session
from ..sessions.transcripts import TextMap, Turn, message_of, spoken

REQUEST: Final = "Summarise our conversation so far."
"""What the assistant is asked for, in the session that is folded and at the beginning of the new one."""


@dataclass(frozen=True, slots=True)
class Exhausted:
    """What is to be folded, as it stood: its ledger, and what tells of it. Not its model, which may have to be unloaded
    for others meanwhile."""

    tokens: array[int]
    text_map: TextMap
    turn_open: bool
    system: str | None

    @classmethod
    def of(cls, live: Session) -> Exhausted:
        """A session now, whatever is read in it afterwards."""
        system = live.text_map.system if live.text_map.turns else live.system
        return cls(live.state.tokens[:], live.text_map, live.turn_open, system)

    @property
    def is_chat(self) -> bool:
        """Whether it goes on with turns of a chat."""
        return self.turn_open or bool(self.text_map.turns)


@dataclass(frozen=True, slots=True)
class Fold:
    """What the new session reads. tail_tokens: how many of `ids`, at their end, are the other session's last ones."""

    ids: list[int]
    tail_tokens: int
    text_map: TextMap
    turn_open: bool


@dataclass(frozen=True, slots=True)
class FirstTurn:
    """Where the first turn of a chat begins, behind its system text. closing: what stands between the assistant's words
    and such a turn where it is not the first, as far as it is no part of the ledger from there on; turns: all."""

    at: int
    closing: Sequence[int]
    turns: Sequence[Turn]


def tail_start(text_map: TextMap, count: int, tail: int, first: int | None = None) -> int:
    """Where the last `tail` of `count` tokens begin: at the first turn among them, if it is known where one begins.

    first: where the first turn of all does.
    """
    earliest = max(0, count - tail)
    if first is not None and earliest <= first:
        return first
    return next((place for place in text_map.places if earliest <= place < count), earliest)


def summarised_end(old: Exhausted, tail: int, wanted: int, context_tokens: int) -> int:
    """Where a summary of an exhausted session is asked for, if so many tokens are wanted behind that: behind the last
    turn that leaves room for them, or anywhere in what is no chat. The last `tail` tokens go along as they are.

    Raises:
        ContextOverflow: what follows would be neither in the summary nor in the tail.
    """
    count, room = len(old.tokens), context_tokens - wanted
    end = max((place for place in old.text_map.places if place <= room), default=0) if old.is_chat else max(0, room)
    if not end or tail_start(old.text_map, count, tail) > end:
        way = f"keep the last turns as they are, with a tail of {count - end} tokens or more; or " if end else ""
        raise ContextOverflow(
            f"Of the session's {format_plural(count, 'token')} only the first {format_count(end)} leave room in the "
            f"context to write a summary behind them. To fold it, {way}give a summary yourself.",
            token_count=count,
            wanted_tokens=wanted,
            context_tokens=context_tokens,
        )
    return end


async def folded(encoder: Encoder, model: LoadedModel, old: Exhausted, summary: str, tail: int) -> Fold:
    """What a session reads that goes on from a summary and the last `tail` tokens, or fewer, of another on the model.

    Raises:
        TemplateUnusable, ContextOverflow.
    """
    if not old.is_chat:
        rest = list(old.tokens[tail_start(old.text_map, len(old.tokens), tail) :])
        words = await encoder.plain(model, f"{summary}\n\n", opening=True)
        return Fold(words + rest, len(rest), TextMap(), turn_open=False)
    asked = spoken([message_of("user", REQUEST)], old.system)
    opening = await encoder.messages(model, asked, Place(0, None, turn_open=False))
    answer = await encoder.plain(model, summary, opening=False)
    first = await _first_turn(encoder, model, old, opening)
    at = tail_start(old.text_map, len(old.tokens), tail, first.at if first else None)
    turns: Sequence[Turn] = ()
    if first and at == first.at:
        closing, turns = first.closing, first.turns
    else:
        closing = _end_before(model, old, at)
        if at in old.text_map.places:
            turns = [turn for turn in old.text_map.turns if turn.end > at]
    rest = list(old.tokens[at:])
    ids = [*opening, *answer, *closing, *rest]
    said = len(opening) + len(answer)
    said += said < len(ids) and ids[said] in model.end_tokens
    known = TextMap().extended(asked, start=0, end=len(opening))
    known = known.extended([message_of("assistant", summary)], start=len(opening), end=said)
    known = known.followed_by(turns, len(ids) - len(old.tokens))
    return Fold(ids, len(rest), known, turn_open=old.turn_open if rest else True)


async def _first_turn(encoder: Encoder, model: LoadedModel, old: Exhausted, opening: Sequence[int]) -> FirstTurn | None:
    """None, if it cannot be told. It begins where what the two conversations open with is no longer what opens one, but
    what continues one as well.

    opening: of the new session, with the same system text and another first message.
    """
    spoken_system = bool(old.text_map.turns) and old.text_map.turns[0].role == "system"
    turns = old.text_map.turns[spoken_system:]
    if not turns or turns[0].role != "user" or spoken_system != bool(old.system):
        return None
    try:
        place = Place(len(opening), opening[-1], turn_open=True)
        continuing = await encoder.messages(model, [message_of("user", REQUEST)], place)
    except TemplateUnusable:
        return None
    pairs = zip(reversed(opening), reversed(continuing), strict=False)
    alike = next(
        (count for count, (one, other) in enumerate(pairs) if one != other), min(len(opening), len(continuing))
    )
    at = len(opening) - alike
    if list(old.tokens[:at]) != list(opening[:at]):
        return None
    return FirstTurn(at, continuing[: len(continuing) - alike], turns)


def _end_before(model: LoadedModel, old: Exhausted, at: int) -> Sequence[int]:
    """The end token of the turn before the tail, which the summary takes the place of."""
    return old.tokens[at - 1 : at] if at and old.tokens[at - 1] in model.end_tokens else ()
