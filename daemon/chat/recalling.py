"""What was said in a session, told from its tokens: nothing else of it is kept.

An answer is decoded as it was when it was written, so its thinking, its calls and their ids come out the same. Messages
that were read are taken out of the text that the template made of them. Where that cannot be told apart, all of it is
told as one message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Final

from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ...snapshot.errors import MalformedSnapshot
from ...snapshot.state import token_array
from ..api.dialogue import ToolCall
from ..api.limits import MAX_STOP_CHARS
from ..api.recalling import RecalledMessage
from ..engine.channels import Shown
from ..engine.generation import Written
from ..models.chat_template import Message, Root
from ..models.models import LoadedModel
from ..residency.residency import Residency
from ..sessions.encoding import Encoder, Place, rendered
from ..sessions.sessions import ROOT
from ..sessions.transcripts import TEXT_MAP, TextMap, Turn, message_of
from ..sessions.unprocessed_tail import unread_in
from ..sleep.store_threads import StoreThreads
from ..sleep.turn_journal import TurnJournal
from .conversing import Dialogue

_WORDS: Final = "torporwordsplaceholder5e1a"


@dataclass(eq=False, repr=False)
class Recalling:
    _store: Store
    _threads: StoreThreads
    _encoder: Encoder
    _residency: Residency
    _journal: TurnJournal

    async def known(self, uri: SessionUri, *, past_look: bool = False) -> Dialogue:
        """The words of a session, which stays asleep if it sleeps. past_look: those of its newest version while it is
        only looked at. Raises SessionNotFound, and the errors of a damaged bundle."""

        def of_awake() -> Dialogue | None:
            live = self._residency.putting_away.live(uri)
            return None if live is None or (past_look and live.is_mere_look) else Dialogue.of(live)

        if (known := of_awake()) is not None:
            return known
        async with self._residency.turn(uri):
            if (known := of_awake()) is not None:
                return known
            await self._journal.replay(uri)
            self._residency.standing.require_row(uri)
            return await self._threads.on_io(partial(self._of_asleep, uri))

    async def messages(self, model: LoadedModel, known: Dialogue, first: int, last: int) -> list[RecalledMessage]:
        """The messages from number `first` to `last`; the first of a read that is told is the first of it."""
        return await self._encoder.with_words(model, lambda _: list(_told(model, known, first, last)))

    async def thoughts(self, model: LoadedModel, known: Dialogue, said: Mapping[bytes, Message]) -> dict[bytes, str]:
        """What was thought in answers, by their ids; of those alone that were said in these words."""
        marks = {
            turn.answer: at
            for at, turn in enumerate(known.text_map.turns)
            if turn.answer in said and turn.proves(said[turn.answer])
        }
        return {
            answer: told.reasoning for answer, at in marks.items() for told in await self.messages(model, known, at, at)
        }

    def _of_asleep(self, uri: SessionUri) -> Dialogue:
        with self._store.open_session(uri) as reader:
            kept, unread = reader.manifest.session, unread_in(reader.manifest.session, uri)
            tokens = token_array(reader.tokens()) + (unread.tokens if unread else token_array())
            text_map = unread.text_map if unread else TextMap.from_map(kept.get(TEXT_MAP))
            try:
                return Dialogue(uri, str(kept["model"]), tokens, text_map, Root.from_text(kept.get(ROOT)))
            except KeyError as error:
                raise MalformedSnapshot(
                    f"The session map of {uri} names no model: another program has written it.", session=str(uri)
                ) from error


def _told(model: LoadedModel, known: Dialogue, first: int, last: int) -> Iterator[RecalledMessage]:
    at = start = 0
    calls: Sequence[ToolCall] = ()
    for end, group in groupby(known.text_map.turns, key=lambda turn: turn.end):
        read = list(group)
        behind, at = at, at + len(read)
        if first <= at and behind <= last:  # the one before, too, for the ids of its calls
            if [turn.role for turn in read] == ["assistant"] and start:
                told = [_answer(model, known, read[0], start)]
            else:
                told = _read(model, known, read, start, calls)
            yield from told if at > first else ()
            calls = told[-1].tool_calls
        start = end


def _answer(model: LoadedModel, known: Dialogue, turn: Turn, start: int) -> RecalledMessage:
    """An answer, as it was shown."""
    told = _decoded(model, known, turn, start, is_cut=True)
    if turn.is_mark_of(_as_message(told)):
        return told
    # Its grammar ended it. Or a stop string did, and was shown to nobody. Or it was to have one call, and its marks
    # hold more.
    whole = _decoded(model, known, turn, start, is_cut=False)
    text = whole.content
    shorter = (text[:size] for size in range(len(text) - 1, -1, -1)[: 2 * MAX_STOP_CHARS])
    others = [whole, replace(whole, tool_calls=whole.tool_calls[:1], finished=True)]
    others += [replace(whole, content=each, finished=True) for each in shorter]
    return next((each for each in others if turn.is_mark_of(_as_message(each))), told)


def _decoded(model: LoadedModel, known: Dialogue, turn: Turn, start: int, *, is_cut: bool) -> RecalledMessage:
    """What the tokens of an answer say. is_cut: whether one without an end token was cut off."""
    ledger = list(known.tokens[:start])
    shown, written, finished = Shown(model, ledger, known.root, (), answer=turn.answer), Written(), False
    for token in known.tokens[start : turn.end]:
        ledger.append(token)  # grows while it is shown: the ids of calls follow from it
        pieces = [] if token in model.end_tokens else list(shown.push(token))
        finished = token in model.end_tokens or any(piece.call is not None for piece in pieces)
        for piece in pieces:
            written.add(piece)
    for piece in shown.finish(is_cut=is_cut and known.tokens[turn.end - 1] not in model.end_tokens):
        written.add(piece)
    return RecalledMessage(
        "assistant",
        written.text,
        reasoning=written.reasoning,
        tool_calls=tuple(written.calls),
        answer_id=turn.answer.hex() or None,
        start=start,
        end=turn.end,
        finished=finished,
    )


def _as_message(told: RecalledMessage) -> Message:
    calls = [{"name": call.name, "arguments": call.arguments} for call in told.tool_calls]
    return message_of(told.role, told.content, calls)


def _read(
    model: LoadedModel, known: Dialogue, turns: Sequence[Turn], start: int, calls: Sequence[ToolCall]
) -> list[RecalledMessage]:
    """Messages that were read together. calls: of the answer before them."""
    told = _told_apart(model, known, turns, start, calls)
    if told is None and len(turns) > 1 and turns[-1].is_mark_of(message_of("assistant", "")):
        told = _told_apart(
            model, known, turns[:-1], start, calls
        )  # they were not answered, and the answer has no token
    if told is None:
        text = str(model.tokenizer.decode(list(known.tokens[start : turns[-1].end])))
        return [RecalledMessage("user", text, start=start, end=turns[-1].end)]
    return told


def _told_apart(
    model: LoadedModel, known: Dialogue, turns: Sequence[Turn], start: int, calls: Sequence[ToolCall]
) -> list[RecalledMessage] | None:
    """As `_read`; None if the messages cannot be told apart."""
    end, ids = turns[-1].end, [call.id for call in calls]
    answered = [ids.pop(0) if turn.role == "tool" and ids else "" for turn in turns]
    named = [
        {**message_of(turn.role, f"{_WORDS}{at:08}"), **({"tool_call_id": call} if call else {})}
        for at, (turn, call) in enumerate(zip(turns, answered, strict=True))
    ]
    place = Place(start, known.tokens[start - 1] if start else None, turn_open=True)
    around = re.split(f"{_WORDS}[0-9]{{8}}", rendered(model, named, place, known.root))
    if turns[-1].role == "assistant" and known.tokens[end - 1] in model.end_tokens:
        closing = str(model.tokenizer.decode([known.tokens[end - 1]]))
        around[-1] = around[-1].partition(closing)[0] + closing
    text = str(model.tokenizer.decode(list(known.tokens[start:end])))
    found = re.fullmatch("(.*?)".join(map(re.escape, around)), text, re.DOTALL)
    if found is None or len(found.groups()) != len(turns):
        return None
    told = [
        RecalledMessage(turn.role, words, tool_call_id=call, start=start, end=turn.end)
        for turn, words, call in zip(turns, found.groups(), answered, strict=True)
    ]
    spelled = any(mark.strip() in each.content for each in told for mark in around[1:])
    certain = not spelled or all(turn.is_mark_of(_as_message(each)) for turn, each in zip(turns, told, strict=True))
    return told if certain else None
