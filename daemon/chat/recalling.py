"""What was said in a session, told from its tokens: nothing else of it is kept.

An answer is decoded as it was when it was written, so its thinking, its calls and their ids come out the same. Messages
that were read are taken out of the text that the template made of them. The digest of a message proves its words. Where
none does, the tokenizer or the template may have changed: the words are told as uncertain, those of messages that
cannot be told apart as one message.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice
from typing import Any, Final

from ...memvid.answers import VersionInfo
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ...snapshot.errors import MalformedSnapshot
from ...snapshot.state import token_array
from ..api.dialogue import Role, ToolCall
from ..api.limits import MAX_STOP_CHARS
from ..api.recalling import RecalledMessage, RecalledPiece
from ..disk.store_threads import StoreThreads
from ..engine.channels import Channels, Piece, Shown, id_of_call
from ..engine.generation import Written
from ..errors import InvalidTranscript, TemplateUnusable
from ..models.chat_template import Message, Root
from ..models.models import LoadedModel
from ..models.written_tools import written
from ..residency.residency import Residency
from ..sessions.chats import ROOT, opening_in
from ..sessions.encoding import Encoder, rendered
from ..sessions.interrupted import INTERRUPTED, Interrupted
from ..sessions.results import Called, calls_answered, told_ids
from ..sessions.sessions import Session
from ..sessions.transcripts import NewTurn, Turn, message_of
from ..sessions.turn_parts import blanks_around
from ..sessions.unprocessed_tail import text_map_in, unread_in
from ..sessions.words_proof import WordsProof
from ..versions.journal import TurnJournal
from .conversing import Dialogue

_WORDS: Final = "torporwordsplaceholder5e1a"
_BETWEEN: Final = re.compile(f"{_WORDS}[0-9]{{8}}")

_MOST_ENDS: Final = 4096
"""Places at which a message may end that are tried: where its words spell what the template writes behind it."""

_MOST_CLOSINGS: Final = 4
"""Beginnings of what stands behind a message that are tried at the end of a text."""

_MOST_PARSED: Final = 8
"""Of the ends, where a message of the model is read for its thinking and its calls."""


@dataclass(eq=False, repr=False)
class Recalling:
    _store: Store
    _threads: StoreThreads
    _encoder: Encoder
    _residency: Residency
    _journal: TurnJournal

    async def dialogue(self, uri: SessionUri, *, past_look: bool = False) -> Dialogue:
        """The words of a session, which stays asleep if it sleeps. past_look: those of its newest version while it is
        only looked at. Raises SessionNotFound, and the errors of a damaged bundle."""

        def of_awake() -> Dialogue | None:
            live = self._residency.awake.get(uri)
            return None if live is None or (past_look and live.is_mere_look) else Dialogue.of(live)

        if (dialogue := of_awake()) is not None:
            return dialogue
        async with self._residency.turn(uri):
            if (dialogue := of_awake()) is not None:
                return dialogue
            await self._journal.replay(uri)
            self._residency.standing.require_row(uri)
            return await self._threads.on_io(partial(self._of_asleep, uri))

    async def dialogue_of(self, row: VersionInfo) -> Dialogue:
        """The words of a stored version. Raises the errors of a damaged bundle."""
        return await self._threads.on_io(partial(self._of_asleep, row.uri, row.bundle_id))

    async def messages(self, model: LoadedModel, dialogue: Dialogue, first: int, last: int) -> list[RecalledMessage]:
        """The messages from number `first` to `last`, with all that were read together with one of them."""
        return await self._encoder.with_detokenizer(model, lambda _: list(_told(model, dialogue, first, last)))

    async def require_certain(self, live: Session, turn: NewTurn, count: int) -> None:
        """Refuse a turn whose last `count` messages could not be told from their tokens. Raises InvalidTranscript."""
        tokens = live.state.tokens[: turn.at] + array("I", turn.ids)
        dialogue = Dialogue(live.uri, live.model.name, tokens, turn.text_map, turn.root)
        end = len(turn.text_map.turns)
        messages = await self.messages(live.model, dialogue, end - count, end - 1)
        if not all(each.certain for each in messages):
            raise InvalidTranscript(
                "The words of these messages could not be told again: the model's template writes some of them, most "
                "often a call, in a form that nothing reads back. Give them as a part of the dialogue that a request "
                "answers, or leave them out. Nothing was read."
            )

    async def own(self, model: LoadedModel, dialogue: Dialogue, said: Mapping[bytes, Message]) -> dict[bytes, Message]:
        """Answers as the model wrote them, by their ids; those alone that were said in these words, with these ids of
        calls."""
        turns, read = enumerate(dialogue.text_map.turns), partial(self.messages, model, dialogue)
        places = {turn.answer: at for at, turn in turns if turn.answer in said and turn.proves(said[turn.answer])}
        messages = {answer: each for answer, at in places.items() for each in await read(at, at)}
        words = {answer: _with_ids(each) for answer, each in messages.items() if each.certain}
        return {answer: each for answer, each in words.items() if _ids_of(said[answer]) in ([], _ids_of(each))}

    def _of_asleep(self, uri: SessionUri, version: str | None = None) -> Dialogue:
        with self._store.open_session(uri, version) as reader:
            entries, unread = reader.manifest.session, unread_in(reader.manifest.session, uri)
            tokens = token_array(reader.tokens()) + (unread.tokens if unread else token_array())
            try:
                model, root = str(entries["model"]), Root.from_text(entries.get(ROOT))
                text_map = text_map_in(entries, uri)
                midway = Interrupted.from_map(entries.get(INTERRUPTED), len(tokens))
                system, opened_at = opening_in(entries, len(tokens))
                return Dialogue(uri, model, tokens, text_map, root, system, opened_at, midway)
            except KeyError as error:
                raise MalformedSnapshot(
                    f"The session map of {uri} names no model: another program has written it.", session=str(uri)
                ) from error
            except (TypeError, ValueError) as error:
                raise MalformedSnapshot(
                    f"The session map of {uri} is none of a session: {error}.", session=str(uri)
                ) from error


def _told(model: LoadedModel, dialogue: Dialogue, first: int, last: int) -> Iterator[RecalledMessage]:
    turns, at, start = dialogue.text_map.turns, 0, 0
    answered, calls = calls_answered(turns, first, last), dict[int, Sequence[ToolCall]]()
    answers = {number for called in answered.values() for number in called.answers}  # for the ids of their calls
    for end, group in groupby(turns, key=lambda turn: turn.end):
        read = list(group)
        behind, at = at, at + len(read)
        is_told = first < at and behind <= last
        if is_told or not answers.isdisjoint(range(behind, at)):
            there = replace(dialogue, root=dialogue.text_map.root_at(behind, dialogue.root))
            messages = _group(model, there, read, start, turns[at].role if at < len(turns) else "user")
            for number, (turn, message) in enumerate(zip(read, messages, strict=False), behind):
                message = _naming_calls(turn, message)
                calls[number] = message.tool_calls
                if number in answered:
                    message = _answering(message, answered[number], calls)
                if is_told:
                    instructed = dialogue.text_map.instructed_in(number, last) if message.role == "system" else 0
                    yield replace(message, number=number, instructed=instructed)
        start = end


def _naming_calls(turn: Turn, message: RecalledMessage) -> RecalledMessage:
    """A message whose calls have the ids that results may have."""
    ids = told_ids(turn, [call.id for call in message.tool_calls])
    calls = {call.id: replace(call, id=each) for call, each in zip(message.tool_calls, ids, strict=True)}
    pieces = [
        piece if piece.call is None else replace(piece, call=calls.get(piece.call.id, piece.call))
        for piece in message.pieces
    ]
    return replace(message, tool_calls=tuple(calls.values()), pieces=tuple(pieces))


def _answering(message: RecalledMessage, called: Called, calls: Mapping[int, Sequence[ToolCall]]) -> RecalledMessage:
    """A result with the id of its call; as it is if that is not known. calls: by the numbers of the answers."""
    those = [call for number in called.answers for call in calls.get(number, ())]
    if called.place >= len(those):
        return message
    call = those[called.place]
    return replace(message, tool_call_id=call.id, told_as=call.told_as)


def _group(
    model: LoadedModel, dialogue: Dialogue, turns: Sequence[Turn], start: int, following: Role
) -> list[RecalledMessage]:
    """Messages that end at one token. following: the role of the message behind them."""
    if not turns[0].own:
        messages = list(_read(model, dialogue, turns, start, following))
        # Older text maps do not tell which answers are the model's own.
        if messages[0].certain or not start or [turn.role for turn in turns] != ["assistant"]:
            return messages
    message, finished = _answer(model, dialogue, turns[0], start), turns[0].finished
    return [message if finished is None else replace(message, finished=finished)]


def _answer(model: LoadedModel, dialogue: Dialogue, turn: Turn, start: int) -> RecalledMessage:
    """An answer, as it was shown."""
    readings = _readings(partial(_decoded, model, dialogue, turn, start))
    first = next(readings)
    answer: RecalledMessage | None = None
    for each in chain([first], readings):
        if turn.proves(_as_message(each)):
            answer = answer or each
            # The digest tells nothing of the blanks around the words, and a stop string may be of those.
            if blanks_around(each.content) == turn.blanks:
                answer = each
                break
    return replace(first, certain=False) if answer is None else replace(answer, pieces=tuple(_pieces_of(answer)))


def _readings(decoded: Callable[..., RecalledMessage]) -> Iterator[RecalledMessage]:
    """What an answer may say, the likeliest first. decoded: as `_decoded`, of the answer."""
    for is_plain in (False, True):  # plain: a grammar held its text, and what looks like marks is text
        yield decoded(is_cut=True, is_plain=is_plain)
        # Its grammar ended it.
        whole = decoded(is_cut=False, is_plain=is_plain)
        yield whole
        # It was to have one call, and its marks hold more.
        yield replace(whole, tool_calls=whole.tool_calls[:1], finished=True)
        text = whole.content
        # A stop string ended it, which no client was shown.
        for size in range(len(text) - 1, -1, -1)[: 2 * MAX_STOP_CHARS]:
            yield replace(whole, content=text[:size], finished=True)


def _pieces_of(message: RecalledMessage) -> Iterator[RecalledPiece]:
    """The pieces of as much of an answer as counts: of its text a beginning, of its calls the first."""
    chars, calls = len(message.content), len(message.tool_calls)
    for piece in message.pieces:
        if piece.channel == "text" and chars:
            yield replace(piece, text=piece.text[:chars])
            chars -= min(chars, len(piece.text))
        elif piece.call is not None and calls:
            yield piece
            calls -= 1
        elif piece.channel == "reasoning":
            yield piece


def _joined(pieces: Iterable[Piece]) -> Iterator[RecalledPiece]:
    """Each call alone, and what stands together in another channel as one."""
    pieces = (piece for piece in pieces if piece.call is not None or (piece.text and piece.channel != "call"))
    for (channel, call), group in groupby(pieces, key=lambda piece: (piece.channel, piece.call)):
        yield RecalledPiece(channel, "".join(piece.text for piece in group), call)


def _decoded(
    model: LoadedModel, dialogue: Dialogue, turn: Turn, start: int, *, is_cut: bool, is_plain: bool
) -> RecalledMessage:
    """What the tokens of an answer say. is_cut: whether one without an end token was cut off. is_plain: as of
    `Shown`."""
    ledger, pieces = list(dialogue.tokens[:start]), list[Piece]()
    answer, finished = Written(), False
    view = Shown(model, ledger, dialogue.root, (), is_plain=is_plain, answer=turn.answer)
    for token in dialogue.tokens[start : turn.end]:
        ledger.append(token)  # grows while it is shown: the ids of calls follow from it
        shown = [] if token in model.end_tokens else list(view.push(token))
        finished = token in model.end_tokens or any(piece.call is not None for piece in shown)
        pieces += shown
    pieces += view.finish(is_cut=is_cut and dialogue.tokens[turn.end - 1] not in model.end_tokens)
    for piece in pieces:
        answer.add(piece)
    return RecalledMessage(
        "assistant",
        answer.text,
        reasoning=answer.reasoning,
        tool_calls=tuple(answer.calls),
        pieces=tuple(_joined(pieces)),
        answer_id=turn.answer.hex() or None,
        start=start,
        end=turn.end,
        finished=finished,
    )


def _as_message(message: RecalledMessage) -> Message:
    calls = [{"name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    return {**message_of(message.role, message.content, calls), "reasoning": message.reasoning}


def _with_ids(message: RecalledMessage) -> Message:
    calls = [{"name": call.name, "arguments": call.arguments, "id": call.id} for call in message.tool_calls]
    return {**message_of(message.role, message.content, calls), "reasoning": message.reasoning}


def _ids_of(message: Message) -> list[str]:
    """The ids of its calls that are given."""
    return [call["id"] for call in message.get("tool_calls", ()) if call.get("id")]


def _read(
    model: LoadedModel, dialogue: Dialogue, turns: Sequence[Turn], start: int, following: Role
) -> Iterator[RecalledMessage]:
    """Messages that were read together. following: as of `_group`."""
    end = turns[-1].end
    # They were not answered, and the answer has no token.
    unanswered = len(turns) > 1 and turns[-1].proves(message_of("assistant", ""))
    words = _told_apart(model, dialogue, turns, start, following)
    if words is None and unanswered:
        words = _told_apart(model, dialogue, turns[:-1], start, following)
    if words is None:
        text = str(model.tokenizer.decode(list(dialogue.tokens[start:end])))
        yield RecalledMessage("user", text, start=start, end=end, certain=False)
        return
    number, told_as = 0, dialogue.root.told_as
    for turn, message in zip(turns, words, strict=False):
        calls = []
        for name, arguments in message.calls:
            number += 1
            call_id = id_of_call(f"{dialogue.uri} {start}".encode(), number)
            calls.append(ToolCall(name, arguments, call_id, told_as.get(name, "")))
        yield RecalledMessage(
            turn.role,
            message.words,
            reasoning=message.reasoning,
            tool_calls=tuple(calls),
            start=start,
            end=turn.end,
        )


@dataclass(frozen=True, slots=True)
class _Words:
    """What a read message says. calls: names and arguments; a client's ids of them are in no ledger."""

    words: str
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()

    def as_message(self, role: str) -> Message:
        calls = [{"name": name, "arguments": arguments} for name, arguments in self.calls]
        return {**message_of(role, self.words, calls), "reasoning": self.reasoning}


def _told_apart(
    model: LoadedModel, dialogue: Dialogue, turns: Sequence[Turn], start: int, following: Role
) -> list[_Words] | None:
    """The words of messages that were read together, all proven; None if they cannot be told apart. following: as of
    `_group`."""
    end = turns[-1].end
    placeholders: list[Message] = [{**message_of(turn.role, f"{_WORDS}{at:08}")} for at, turn in enumerate(turns)]
    before = dialogue.before(start)
    place = replace(before.end, turn_open=True, follows=before.asked)
    text = str(model.tokenizer.decode(list(dialogue.tokens[start:end])))
    # A template may show the last answer otherwise than one that another turn follows.
    followed = list(placeholders)
    if turns[-1].role == "assistant":
        followed.append(message_of(following, f"{_WORDS}{len(turns):08}"))
    for form in (placeholders, written(placeholders, ()), followed, written(followed, ())):
        with suppress(TemplateUnusable):
            form_text = rendered(model, form, place, dialogue.root)
            around = _BETWEEN.split(form_text)[: len(turns) + 1]
            if len(around) != len(turns) + 1:
                continue
            if turns[-1].role == "assistant" and dialogue.tokens[end - 1] in model.end_tokens:
                closing = str(model.tokenizer.decode([dialogue.tokens[end - 1]]))
                around[-1] = around[-1].partition(closing)[0] + closing
            for last in _closings(around[-1], text):
                for each in ([*around[:-1], last], _without_scaffold(model, turns, [*around[:-1], last])):
                    if (words := _between(model, dialogue, turns, text, each)) is not None:
                        return words
    return None


def _closings(behind: str, text: str) -> Iterator[str]:
    """What of the words that the template writes behind a message may stand at the end of a text: all, or a beginning
    where a turn was left open or taken back."""
    shorter = (behind[:size] for size in range(len(behind) - 1, -1, -1))
    return chain([behind], islice((each for each in shorter if text.endswith(each)), _MOST_CLOSINGS))


def _without_scaffold(model: LoadedModel, turns: Sequence[Turn], around: Sequence[str]) -> list[str]:
    """What stands around messages, without the marks next to the assistant's that no channel shows: a template may
    write others around calls."""
    bared = list(around)
    for at in (at for at, turn in enumerate(turns) if turn.role == "assistant"):
        for mark in model.marks.scaffold:
            bared[at] = bared[at].removesuffix(mark)
            bared[at + 1] = bared[at + 1].removeprefix(mark)
    return bared


def _between(
    model: LoadedModel, dialogue: Dialogue, turns: Sequence[Turn], text: str, around: Sequence[str]
) -> list[_Words] | None:
    """The words of each message in a text, between those of the template; None if one is not proven. It takes time
    that grows as the text does."""
    if not text.startswith(around[0]):
        return None
    words, at = list[_Words](), len(around[0])
    for turn, behind in zip(turns, around[1:], strict=True):
        is_last = len(words) == len(turns) - 1
        part = _proven(model, dialogue, turn, text, at, _ends(text, at, behind, is_last=is_last))
        if part is None:
            return None
        words.append(part[0])
        at = part[1] + len(behind)
    return words


def _ends(text: str, at: int, behind: str, *, is_last: bool) -> Iterator[int]:
    """Where a message that begins at a place may end, before what stands behind it."""
    if is_last:
        if text.endswith(behind) and len(text) - len(behind) >= at:
            yield len(text) - len(behind)
        return
    for _ in range(_MOST_ENDS):
        if (at := text.find(behind, at)) < 0:
            return
        yield at
        at += 1


def _proven(
    model: LoadedModel, dialogue: Dialogue, turn: Turn, text: str, at: int, ends: Iterable[int]
) -> tuple[_Words, int] | None:
    """The words that a digest proves, and where they end."""
    proof, begins = WordsProof(turn), at
    for number, end in enumerate(ends):
        proof.push(text[at:end])
        at = end
        if (blanks := proof.proven_with()) is not None:
            return _Words(text[begins:end].strip().join(blanks)), end
        if turn.role == "assistant" and number < _MOST_PARSED:
            parsed = _parsed(model, dialogue.root, text[begins:end])
            if turn.proves(parsed.as_message(turn.role)):
                return replace(parsed, words=parsed.words.strip().join(turn.blanks)), end
    return None


def _parsed(model: LoadedModel, root: Root, text: str) -> _Words:
    """A rendered message of the model, read as the model's own words are."""
    channels, answer = Channels(model.marks, root, str, any_tool=True), Written()
    for piece in (*channels.push(text), *channels.finish()):
        answer.add(piece)
    calls = tuple((call.name, dict(call.arguments)) for call in answer.calls)
    return _Words(answer.text.strip(), answer.reasoning.strip(), calls)
