"""Turns of a chat: the tokens that a session has to read, and the way back where a transcript diverges.

`transcripts.py` compares texts and `encoding.py` makes tokens. A transcript is matched by committed text first. The
rest is rendered, tokenized and compared with the ledger. So no token is read again for an answer that would be
tokenized otherwise than it was sampled, or for a template that drops the model's thinking.

To go back, the session is made durable as it stands, and woken at an earlier token. If nothing is read there after all,
it is left asleep, and the next use finds it as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import Any, Final

from ...memvid.units import format_plural
from ...memvid.uri import SessionUri
from ..api.dialogue import Role, canonical
from ..api.events import OnEvent
from ..engine import generation
from ..engine.engine import Engine
from ..engine.sampler import initial_key
from ..errors import ContextOverflow, InvalidTranscript, TemplateUnusable, TranscriptDiverged
from ..events.bus import Bus
from ..events.events import SessionRewound
from ..memory.line import Use
from ..models.call_formats import call_shape
from ..models.chat_template import Message, Root
from ..models.marks import Marks
from ..models.models import LoadedModel
from ..models.written_tools import offer_of
from ..prefixes.prefixes import tokens_in_common
from ..residency.residency import Residency
from ..sessions.encoding import Encoder, Place
from ..sessions.interrupted import Interrupted
from ..sessions.said import VOLATILE, digested
from ..sessions.sessions import Session
from ..sessions.transcripts import MAX_TURNS, NewTurn, TextMap, message_of, overlap_of, spoken
from ..tasks.cancellation import to_the_end
from ..tasks.pieces import in_pieces
from ..versions.orders import WakeOrder
from .volatile import with_volatile

ROLES: Final = frozenset({"system", "user", "assistant", "tool"})


def require_transcript(messages: Sequence[Message]) -> None:
    """Refuse messages that no chat can go on with. Raises InvalidTranscript: there are none, too many, one of an
    unknown role, or the last is the assistant's own."""
    if not 0 < len(messages) <= MAX_TURNS:
        raise InvalidTranscript(
            f"A transcript has 1 to {MAX_TURNS} messages, and this has {len(messages)}.",
            messages=len(messages),
            limit=MAX_TURNS,
        )
    strange = next((at for at, message in enumerate(messages) if message["role"] not in ROLES), None)
    if strange is not None:
        raise InvalidTranscript(
            f"Message {strange} has a role that is none of {', '.join(sorted(ROLES))}.", message_index=strange
        )
    if messages[-1]["role"] == "assistant":
        raise InvalidTranscript(
            "The last message of a transcript is the assistant's own, so there is nothing to answer. End it with the "
            "message that is to be answered.",
            message_index=len(messages) - 1,
        )


@dataclass(frozen=True, slots=True)
class Behind:
    """Where new messages stand: behind an answer that ends at a token, or at the session's end. instructions, volatile:
    a system text, and volatile lines, said there unless they are known."""

    at: int | None
    instructions: str | None = None
    volatile: str | None = None


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The words of a session: its ledger, its messages, and what stands before them. model: its name. system,
    opened_at: as of the session. midway: the request in whose midst it ends."""

    uri: SessionUri
    model: str
    tokens: Sequence[int]
    text_map: TextMap
    root: Root
    system: str | None = None
    opened_at: int | None = None
    midway: Interrupted | None = None

    @classmethod
    def of(cls, live: Session) -> Dialogue:
        """The words of an awake session, as they are now."""
        tokens, midway = live.state.tokens[:], live.left_midway
        return cls(
            live.uri,
            live.model.name,
            tokens,
            live.chat.text_map,
            live.chat.root,
            live.chat.system,
            live.chat.opened_at,
            midway,
        )

    @property
    def unsaid(self) -> str | None:
        """A system text of its own that the next turn says."""
        is_said = self.opened_at is not None and self.opened_at < len(self.tokens)
        return None if is_said else self.system or None

    def before(self, at: int) -> Dialogue:
        """The words before a token."""
        text_map = self.text_map.cut(at)
        root = text_map.root_at_end(self.root)
        return replace(self, tokens=self.tokens[:at], text_map=text_map, root=root, midway=None)

    def for_retry(self, request: bytes) -> Dialogue:
        """The words before the request in whose midst it ends, if that was not read whole, or is this one. request: its
        digest."""
        midway = self.midway
        if midway is None or (midway.request != request and midway.end >= midway.answer_at):
            return self
        return self.before(midway.begins_at)

    @property
    def asked(self) -> Role | None:
        """The role of its last message, if it ends in the turn that was opened for an answer to that; None else."""
        turns = self.text_map.turns
        waits = bool(turns) and turns[-1].role != "assistant" and self.text_map.end == len(self.tokens)
        return turns[-1].role if waits else None

    @property
    def end(self) -> Place:
        """Where messages stand that come next: in the turn of the assistant, if anything was said."""
        last = self.tokens[-1] if self.tokens else None
        return Place(len(self.tokens), last, turn_open=bool(self.tokens), called=self.text_map.ends_with_calls)


def root_of(before: Root, tools: Sequence[Mapping[str, Any]] | None, arguments: Mapping[str, Any] | None) -> Root:
    """The root of a conversation: as a request says, else as before."""
    root = before if tools is None else replace(before, tools=tuple(tools))
    return root if arguments is None else replace(root, arguments=arguments)


def said_behind(
    dialogue: Dialogue,
    root: Root,
    instructions: str | None,
    messages: Sequence[Message],
    marks: Marks,
    volatile: str | None = None,
) -> list[Message]:
    """New messages with what changes there: instructions, volatile lines, and the tools of another root, in the model's
    own form of calls. It stands behind the results of calls, which templates want next to them."""
    messages = with_volatile(dialogue.text_map, messages, volatile, is_field=True)
    said = "" if instructions is None or dialogue.text_map.says(instructions) else instructions
    opening = dialogue.unsaid or ""
    if not dialogue.tokens:
        text = "\n\n".join(filter(None, (said, opening)))
        return [*([_system(text, instructed=len(said))] if text else []), *messages]
    others = canonical(list(root.shown_tools)) != canonical(list(dialogue.root.shown_tools))
    fields = [*([offer_of(root.shown_tools, call_shape(marks))] if others else []), *([said] if said else [])]
    changes = [*([_system(opening)] if opening else []), *(_system(text, instructed=len(text)) for text in fields)]
    results = len(list(takewhile(lambda message: message["role"] == "tool", messages)))
    return [*messages[:results], *changes, *messages[results:]]


def _system(text: str, *, instructed: int = 0) -> Message:
    return {**message_of("system", text), **({"instructed": instructed} if instructed else {})}


def behind_kept(messages: Sequence[Message], count: int, at: int, ledger: Sequence[int]) -> Place:
    """Where the rest of a transcript stands, whose first `count` messages end at a token of a ledger."""
    called = bool(count and messages[count - 1].get("tool_calls"))
    return Place(at, ledger[at - 1] if at else None, turn_open=True, called=called)


def _rest_of(live: Session, turn: NewTurn, request: bytes | None) -> NewTurn:
    """What the ledger has not yet of a turn; with the answer so far, if it was given up."""
    ledger = live.state.tokens
    count = tokens_in_common(ledger[turn.at :], turn.ids)
    rest = replace(turn, at=turn.at + count, ids=turn.ids[count:], begins_at=turn.at)
    midway = live.left_midway
    if midway is None or midway.request != request or rest.ids or midway.answer_at != rest.at:
        return rest
    return replace(rest, begun=ledger[rest.at :])


class Conversing:
    """Finds the tokens that a chat has to read. Its callers hold the session alone."""

    def __init__(self, encoder: Encoder, residency: Residency, engine: Engine, bus: Bus) -> None:
        self._encoder = encoder
        self._residency = residency
        self._engine = engine
        self._bus = bus

    async def message(self, live: Session, message: Message) -> NewTurn:
        """One new message at the session's end; before a message that it has read in part. Raises TemplateUnusable,
        ContextOverflow."""
        held, root = live.whole_tokens, live.chat.root
        opens = not held or live.chat.has_system_to_say
        messages = [message_of("system", live.chat.system or ""), message] if live.chat.has_system_to_say else [message]
        called = live.chat.text_map.ends_with_calls
        place = Place(held, None if opens else live.state.tokens[held - 1], live.chat.turn_open, called=called)
        ids = await self._encoder.messages(live.model, messages, place, root)
        before = live.chat.text_map.begun(await self._encoder.shown_root(live.model, root)).answered(held)
        text_map = before.extended(messages, start=held, end=held + len(ids))
        return NewTurn(held, ids, text_map, root)

    async def behind(
        self, live: Session, place: Behind, messages: Sequence[Message], root: Root, request: bytes | None = None
    ) -> NewTurn:
        """New messages behind an answer, or at the session's end. request: as for `transcript`. Raises
        TranscriptDiverged: the session does not end behind the answer; TemplateUnusable, ContextOverflow."""
        held, at, midway = len(live.state.tokens), place.at, live.left_midway
        goes_on = midway is not None and midway.request == request
        if at is None:
            at = midway.begins_at if midway is not None and goes_on else live.whole_tokens
        elif held != at and not goes_on:
            raise TranscriptDiverged(
                f"{live.uri} has gone on behind the answer. Ask again, and a fork answers.",
                session=str(live.uri),
                position=place.at,
                token_count=held,
            )
        dialogue = Dialogue.of(live).before(at)
        messages = await in_pieces(digested(messages, dialogue.text_map.turns))
        new = said_behind(dialogue, root, place.instructions, messages, live.model.marks, place.volatile)
        where = await self.place(live.model, dialogue, new, root, again=goes_on)
        ids, lengths = await self._encoded(live, new, where, root)
        if new[-1]["role"] == "assistant":  # nothing is to be answered, so no turn is opened
            ids = ids[: await self._encoder.answer_end(live.model, new, where, ids, root)]
            lengths = [min(each, len(ids)) for each in lengths]
        before = dialogue.text_map.begun(await self._encoder.shown_root(live.model, root)).changed(dialogue.root, root)
        at = where.held
        before = before.ending(at) if where.follows else before.answered(at)
        extend = partial(before.extended, new, start=at, end=at + len(ids), lengths=lengths)
        return _rest_of(live, NewTurn(at, ids, await self._encoder.aside(extend), root), request)

    def require_told(self, live: Session, turn: NewTurn) -> None:
        """Refuse a turn that nothing could tell again. Raises InvalidTranscript."""
        if not turn.is_told:
            raise InvalidTranscript(
                f"{live.uri} holds text or tokens that are no messages, or {MAX_TURNS:,} messages, so nothing that"
                " comes now could be told again. Begin another session, with the messages that count. Nothing was read."
            )

    async def place(
        self, model: LoadedModel, dialogue: Dialogue, new: Sequence[Message], root: Root, *, again: bool = False
    ) -> Place:
        """Where new messages stand behind a dialogue: at its end, or in the turn that was opened there for an answer.
        They then take the place of those tokens of it that the template does not write before them. again: the request
        was given up before, so these tokens are gone already."""
        if dialogue.asked is not None:
            with suppress(TemplateUnusable):
                back = [] if again else await self._encoder.taken_back(model, dialogue.asked, new, root)
                at = len(dialogue.tokens) - len(back)
                if list(dialogue.tokens[at:]) == back:
                    return Place(at, dialogue.tokens[at - 1], turn_open=True, follows=dialogue.asked)
        return dialogue.end

    async def transcript(
        self,
        live: Session,
        messages: Sequence[Message],
        root: Root,
        request: bytes | None = None,
        marked: Sequence[int] = (),
        volatile: str | None = None,
    ) -> NewTurn:
        """The new part of a transcript. request: by which a request that was given up is known again. marked: behind
        how many of the messages the client has marks. volatile: lines that it has beside them. Raises TemplateUnusable,
        ContextOverflow."""
        ledger, text_map = live.state.tokens, live.chat.text_map
        whole = spoken(await in_pieces(digested(messages)), live.chat.system)
        shown_root = await self._encoder.shown_root(live.model, root)
        overlap = await self._encoder.aside(lambda: overlap_of(text_map, whole, shown_root))
        before, is_field = text_map.cut(overlap.at), "instructed" in whole[0]
        new = with_volatile(before, whole[overlap.kept :], volatile, is_field=is_field)
        place = behind_kept(whole, overlap.kept, overlap.at, ledger)
        ids, lengths = await self._encoded(live, new, place, root) if new else ([], ())
        end = overlap.at + len(ids)
        before = before.begun(shown_root).changed(before.root_at_end(live.chat.root), root).asked_with(whole[0])
        extend = partial(before.extended, new, start=overlap.at, end=end, lengths=lengths)
        new_map = await self._encoder.aside(extend)
        opening = len(whole) - len(messages)
        common = max(0, overlap.common - opening)
        counts = [count + opening - overlap.kept for count in marked]
        marks = await self._marks(live, new, place, ids, root, [each for each in counts if each > 0 or not overlap.at])
        return _rest_of(live, NewTurn(overlap.at, ids, new_map, root, common, marks=marks), request)

    async def _encoded(
        self, live: Session, new: Sequence[Message], place: Place, root: Root
    ) -> tuple[list[int], Sequence[int]]:
        """The tokens of new messages, and the lengths within them at the end of each. Raises TemplateUnusable,
        ContextOverflow."""
        ids = await self._encoder.messages(live.model, new, place, root)
        return ids, await self._encoder.lengths(live.model, new, place, ids, root)

    async def _marks(
        self,
        live: Session,
        new: Sequence[Message],
        place: Place,
        ids: Sequence[int],
        root: Root,
        counts: Sequence[int],
    ) -> list[int]:
        """The places at which the first so many (`counts`) of new messages end: up to there their tokens are the same
        whatever follows. None for a model that goes back to every token anyway."""
        ends: list[int] = []
        for count in () if live.model.layout.by_token else counts:
            beginning = new[: count + any(VOLATILE in each for each in new[:count])]
            if not beginning or beginning[-1]["role"] not in ("user", "tool"):
                beginning = [*beginning, message_of("user", "?")]
            with suppress(TemplateUnusable, ContextOverflow):
                alike = await self._encoder.messages(live.model, beginning, place, root)
                ends.append(place.held + tokens_in_common(ids, alike))
        return ends

    def require_no_divergence(self, live: Session, turn: NewTurn, messages: Sequence[Message]) -> None:
        """Refuse a transcript that diverges from the ledger. Raises TranscriptDiverged: with the place and the
        remedies."""
        held = len(live.state.tokens)
        if turn.kept == held:
            return
        where = (
            f"Message {turn.common} of the transcript differs from the one of {live.uri}"
            if turn.common < len(messages)
            else f"{live.uri} goes on behind the last message of the transcript"
        )
        way = (
            f"To go on from there, fork it at token {turn.at} and send the transcript to the fork"
            if turn.at
            else "They have nothing in common: send the transcript to a new session"
        )
        raise TranscriptDiverged(
            f"{where}: of its {format_plural(held, 'token')} the first {turn.at} are the transcript's. {way}; or send "
            'it with on_divergence "rewind" (torpor chat: `--on-divergence rewind`), which puts the session back there '
            "and keeps its present state as an earlier version. Nothing has changed.",
            session=str(live.uri),
            message_index=turn.common,
            position=turn.at,
            token_count=held,
        )

    async def go_back(self, use: Use, live: Session, turn: NewTurn, emit: OnEvent) -> Session:
        """Make the session durable, and give it at the token where the transcript diverges. Raises as a sleep and a
        wake; the session is then as it was, awake or asleep, but that a look has ended."""
        had = len(live.state.tokens)
        if not turn.at:
            async with self._residency.models.using(live.model.name, use) as model:
                receipt = await to_the_end(self._residency.putting_away.put_away(live, emit, "rewind"))
                back = await self._begin_anew(live, model)
        else:
            if live.is_mere_look:
                self._residency.standing.row_of_awake(live)  # raises if there is nothing to go back in
            receipt = await to_the_end(self._residency.putting_away.put_away(live, emit, "rewind"))
            await self._residency.bring_back(use, WakeOrder(receipt.version, turn.at), emit)
            back = self._residency.awake[live.uri]
        self._bus.publish(SessionRewound(live.uri, receipt.version, had, turn.at))
        return back

    async def _begin_anew(self, live: Session, model: LoadedModel) -> Session:
        """The session before its first token, as a look: its next version follows the one just put away."""
        state = await self._engine.call(lambda: model.new_state(initial_key()))
        anew = replace(
            live,
            model=model,
            state=state,
            chat=replace(live.chat, opened_at=None, turn_open=False),
            unchanged_tokens=0,
            provenance=live.provenance.begun_anew(),
            loss=None,
            stay=replace(live.stay, held_bytes=0),
        )
        self._residency.awake.admit(anew)
        return anew

    def leave_asleep(self, before: Session) -> None:
        """Undo `go_back` if nothing was read or written after it: the next use finds the newest version."""
        live = self._residency.awake.get(before.uri)
        if live is not None and live is not before and live.is_mere_look:
            self._residency.awake.drop(before.uri)

    def require_room(self, live: Session, turn: NewTurn, max_tokens: int) -> None:
        """Refuse a turn that does not fit into the context. Raises ContextOverflow: with both sizes."""
        generation.require_room(live.model, turn.at, len(turn.ids) + max_tokens)
