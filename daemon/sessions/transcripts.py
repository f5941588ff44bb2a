"""Transcripts: finds by their text the messages of a full chat that a session has read already.

Owns the text map of a session (QX8): for each committed message digests of what it says, the ledger position at the end
of its read or write, and the id of an answer that has one; and a digest of what the template shows of the
conversation's root. Values only; nothing here renders, tokenizes or reads.

A text map ends where the ledger continues with text or tokens from outside a chat (QC7). Nothing is added after that,
so nothing there matches by text.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

from blake3 import blake3

from ...memvid.limits import MAX_TOKENS
from ..api.dialogue import Role, canonical
from ..models.chat_template import Message, Root
from ..views.roles import TEXT_MAP as TEXT_MAP
from ..views.roles import TURN_LINE, TURN_LINE_1
from .results import (
    DIGEST_BYTES,
    NOTHING,
    calls_before,
    hashed,
    ids_of_calls,
)
from .said import RECALLED, VOLATILE, Said, begun_chain, chained, is_alike
from .turn_parts import (
    blanks_around,
    packed_beyond,
    packed_blanks,
    packed_calls,
    packed_instructed,
    with_beyond,
    with_blanks,
    with_calls,
    with_few_blanks,
    with_few_calls,
    with_instructed,
)

MAX_TURNS: Final = 16_384
"""Messages of one text map (at most 1 MiB in each version) and of one transcript. A full text map takes no more."""

MAX_EARLIER_ROOT_CHARS: Final = 128 * 1024
"""Of all roots together that hold no more. Beyond it the oldest are forgotten, and words under them are uncertain."""

MAX_SYSTEM_CHARS: Final = 256 * 1024
"""The longest system text that is kept for rendering a conversation from its beginning: at most 1 MiB of UTF-8."""

_ROLES: Final[tuple[Role, ...]] = ("system", "user", "assistant", "tool")
_VOLATILE_ROLE: Final = len(_ROLES)
"""In place of the role of volatile lines."""

_OWN_SYSTEM: Final = "own_system"
ANSWER_ID_BYTES: Final = 16
_ANSWERS: Final = "answers"
_ANSWER: Final = struct.Struct(f"<I{ANSWER_ID_BYTES}s")
"""The number of a turn, and its id."""
_CALLS: Final = "calls"
_BEYOND: Final = "beyond"
_BLANKS: Final = "blanks"
_DISOWNED: Final = "disowned"
_FIELDS_SAID: Final = "fields_said"
_INSTRUCTED: Final = "instructed"
_ROOTS: Final = "roots"
_RUN: Final = struct.Struct("<II")
"""The first turns for which a root held, and its text's number; or the turns before instructions, and their length."""
_VERSION: Final = 3
_OLDER: Final = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """A committed message, by its digest. end: tokens of the ledger at its end: for an assistant's text its end token,
    if the template sets one; for others the end of the next such text, or of the request. answer: the id of an answer;
    empty without one. own: whether the model has written it. finished: whether such an answer came to its end; None if
    that is not known. beyond: what counts beside `digest`: `Said.thought` of the model's own answer, else `Said.exact`.
    calls: digests of the ids of its calls. blanks: around its words. instructed: how many of the first characters of a
    system text say fields of a request, and are no message of a client. volatile: whether it is a system text of lines
    that a client has anew with each request, which no transcript has there. chain: of all digests up to its own
    (`chained`); a text map gives it.
    """

    role: Role
    digest: bytes
    end: int
    answer: bytes = b""
    own: bool = False
    finished: bool | None = None
    beyond: bytes = NOTHING
    calls: tuple[bytes, ...] = ()
    blanks: tuple[str, str] = ("", "")
    instructed: int = 0
    volatile: bool = False
    chain: bytes = field(default=b"", compare=False)

    @classmethod
    def of(cls, message: Message, end: int, *, own: bool = False, finished: bool | None = None) -> Turn:
        said, own = Said.of(message), own or RECALLED in message
        beyond, calls = said.thought if own else said.exact, ids_of_calls(message)
        blanks, instructed = blanks_around(message["content"]), message.get("instructed", 0)
        turn = cls(said.role, said.digest, end, own=own, finished=finished, beyond=beyond, calls=calls)
        turn = replace(turn, volatile=True) if VOLATILE in message else turn
        return replace(turn, blanks=blanks, instructed=instructed) if instructed or any(blanks) else turn

    def is_mark_of(self, message: Message) -> bool:
        """Whether it is this message, for a dialogue that goes on behind it."""
        said = Said.of(message)
        return said.digest == self.digest and is_alike(said, self.beyond, own=self.own)

    def proves(self, message: Message) -> bool:
        """Whether these are its words, whatever stands around them and was thought."""
        return self.digest in (Said.of(message).digest, _older_digest(message))


@dataclass(frozen=True, slots=True)
class TextMap:
    """The committed messages of a session, from the beginning of its ledger. system: the text that opened its chat,
    unless it is too long to keep. root: the digest of what stands before it; empty for nothing. disowned: the ids that
    were taken from answers of the session, the newest last: older versions still have them. roots: those that the
    session had before its own, each as a number of turns and its text. It held up to so many turns, from where the one
    before it ended. instructed: the number of turns before a request, and how many of the first characters of `system`
    it had as instructions; the newest last.
    """

    turns: tuple[Turn, ...] = ()
    system: str | None = None
    root: bytes = b""
    disowned: tuple[bytes, ...] = ()
    roots: tuple[tuple[int, str], ...] = ()
    instructed: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """The tokens that it covers."""
        return self.turns[-1].end if self.turns else 0

    @property
    def said(self) -> tuple[Turn, ...]:
        """The turns that a transcript has."""
        return tuple(turn for turn in self.turns if not turn.volatile)

    @property
    def places(self) -> tuple[int, ...]:
        """The known positions between an assistant's text and the next turn."""
        ends = [*(turn.end for turn in self.turns[1:]), None]
        known = zip(self.turns, ends, strict=False)
        return tuple(turn.end for turn, following in known if turn.role == "assistant" and following != turn.end)

    def extended(
        self,
        messages: Sequence[Message],
        *,
        start: int,
        end: int,
        lengths: Sequence[int] = (),
        answer: bytes = b"",
        own: bool = False,
        finished: bool | None = None,
    ) -> TextMap:
        """Add messages that were read or written together, from `start` to `end`. Unchanged if it does not cover the
        ledger up to `start`, or would become too long.

        lengths: tokens behind `start` at the end of each message; if empty, all end together. answer: the id of the
        last of them. own: whether the model has written them.
        """
        if start != self.end or len(self.turns) + len(messages) > MAX_TURNS:
            return self
        ends = [start + length for length in lengths] or [end] * len(messages)
        new = (Turn.of(message, at, own=own, finished=finished) for message, at in zip(messages, ends, strict=True))
        turns = with_few_blanks(with_few_calls((*self.turns, *self._chained(new))))
        turns = (*turns[:-1], replace(turns[-1], answer=answer)) if answer else turns
        if self.turns or not messages:
            return replace(self, turns=turns)
        opening = messages[0]
        if opening["role"] != "system" or len(opening["content"]) > MAX_SYSTEM_CHARS:
            return replace(self, turns=turns, system=None, instructed=())
        chars = opening.get("instructed", 0)
        return replace(self, turns=turns, system=opening["content"], instructed=((0, chars),) if chars else ())

    def _chained(self, turns: Iterable[Turn]) -> Iterator[Turn]:
        """These turns behind its own."""
        chain = self.turns[-1].chain if self.turns else begun_chain(self.root)
        for turn in turns:
            chain = chain if turn.volatile else chained(chain, turn.digest)
            yield replace(turn, chain=chain)

    @property
    def ends_with_calls(self) -> bool:
        """Whether its last answer is known to have calls, and nothing but results stands behind that."""
        since = self.turns[calls_before(self.turns, len(self.turns)) :]
        return any(turn.calls for turn in since) and all(turn.role in ("assistant", "tool") for turn in since)

    def begun(self, root: bytes) -> TextMap:
        """The map with this root, if it tells of no message yet. Unchanged if it does. root: its digest."""
        return self if self.turns else replace(self, root=root, system=None, roots=(), instructed=())

    def root_at(self, turn: int, newest: Root) -> Root:
        """The root that held for a turn, by its number. newest: that of the session."""
        text = next((text for count, text in self.roots if turn < count), None)
        return newest if text is None else Root.from_text(text)

    def root_at_end(self, newest: Root) -> Root:
        """The root that held for the last turn; `newest` before the first. newest: that of the session."""
        return self.root_at(len(self.turns) - 1, newest) if self.turns else newest

    def changed(self, before: Root, now: Root) -> TextMap:
        """The map of a session whose root is another from here on."""
        if before == now or not self.turns:
            return self
        first = [each for each in self.roots if each[0] < len(self.turns)]
        roots = [*first, (len(self.turns), before.to_text())]
        while sum(map(len, {text for _, text in roots})) > MAX_EARLIER_ROOT_CHARS:
            del roots[0]
        return replace(self, roots=tuple(roots))

    def instructed_in(self, number: int, behind: int) -> int:
        """How many of the first characters of a system text were fields of a request. number: of its turn. behind: the
        turn with which that request ended, for another one may have had other fields in the same words."""
        if number or self.system is None:
            return self.turns[number].instructed
        return next((chars for count, chars in reversed(self.instructed) if count <= behind), 0)

    def answered(self, end: int) -> TextMap:
        """Close the last turn: with an empty answer, if it was given up before its first token. Unchanged if it does
        not cover the ledger up to `end`."""
        if self.end != end or not self.turns or self.turns[-1].role == "assistant":
            return self
        return self.extended([message_of("assistant", "")], start=end, end=end)

    def says(self, instructions: str) -> bool:
        """Whether these instructions hold: they are its newest system text, or what its opening one begins with."""
        newest = next((turn for turn in reversed(self.said) if turn.role == "system"), None)
        if newest is None or newest.is_mark_of(message_of("system", instructions)):
            return newest is not None
        return newest is self.turns[0] and (self.system or "")[: self._instructed_chars] == instructions

    def says_volatile(self, lines: str) -> bool:
        """Whether these are the last volatile lines that were said."""
        newest = next((turn for turn in reversed(self.turns) if turn.volatile), None)
        return newest is not None and newest.is_mark_of(message_of("system", lines))

    @property
    def _instructed_chars(self) -> int:
        return self.instructed[-1][1] if self.instructed else 0

    def asked_with(self, opening: Message) -> TextMap:
        """The map for a request that begins with this message: a system text, of which now another part may be
        instructions."""
        chars = opening.get("instructed", 0)
        if not self.turns or self.system is None or chars == self._instructed_chars:
            return self
        before = (each for each in self.instructed if each[0] < len(self.turns))
        return replace(self, instructed=(*before, (len(self.turns), chars)))

    def without_answers(self, answers: Sequence[bytes]) -> TextMap:
        """The map without the ids of answers, which stay as they are; it remembers that they were taken away."""
        gone = tuple(dict.fromkeys((*self.disowned, *answers)))[-MAX_TURNS:]
        turns = tuple(replace(turn, answer=b"") if turn.answer in answers else turn for turn in self.turns)
        return replace(self, turns=turns, disowned=gone) if answers else self

    def ending(self, tokens: int) -> TextMap:
        """The map with its last turns ending at `tokens`, before what was read behind them."""
        return replace(self, turns=tuple(replace(turn, end=min(turn.end, tokens)) for turn in self.turns))

    def cut(self, tokens: int) -> TextMap:
        """The text map of a ledger that is cut to `tokens`."""
        if self.end <= tokens:
            return self
        turns = tuple(turn for turn in self.turns if turn.end <= tokens)
        first = [each for each in self.roots if each[0] < len(turns)]
        here = [(len(turns), text) for _, text in self.roots[len(first) :][:1] if turns]
        instructed = tuple(each for each in self.instructed if each[0] < len(turns))
        return replace(self, turns=turns, roots=(*first, *here), instructed=instructed)

    def followed_by(self, turns: Sequence[Turn], moved: int) -> TextMap:
        """Add turns of another map; here they end `moved` tokens later (earlier if negative). Unchanged if it would
        become too long."""
        if len(self.turns) + len(turns) > MAX_TURNS:
            return self
        new = (replace(turn, end=turn.end + moved) for turn in turns)
        return replace(self, turns=(*self.turns, *self._chained(new)))

    def to_map(self) -> dict[str, Any]:
        lines = (TURN_LINE.pack(_line_role_of(turn), turn.end, turn.digest) for turn in self.turns)
        answers = b"".join(_ANSWER.pack(at, turn.answer) for at, turn in enumerate(self.turns) if turn.answer)
        entries = {"version": _VERSION, "turns": b"".join(lines), "system": self.system, "root": self.root}
        beyond = packed_beyond(self.turns)
        more: dict[str, Any] = {
            _ANSWERS: answers,
            _BEYOND: beyond,
            _BLANKS: packed_blanks(self.turns),
            _CALLS: packed_calls(self.turns),
            _DISOWNED: b"".join(self.disowned),
            _FIELDS_SAID: packed_instructed(self.turns),
        }
        texts = list(dict.fromkeys(text for _, text in self.roots))
        runs = b"".join(_RUN.pack(count, texts.index(text)) for count, text in self.roots)
        more[_ROOTS] = [runs, *texts] if runs else []
        more[_INSTRUCTED] = b"".join(_RUN.pack(*each) for each in self.instructed)
        return {**entries, **{name: packed for name, packed in more.items() if packed}}

    @classmethod
    def from_map(cls, stored: object) -> TextMap:
        """Read the map of `to_map`; None, in an older snapshot, gives an empty one. In older versions a digest of an
        assistant's text did not tell all of it: it proves words, and no dialogue goes on behind it. Raises ValueError:
        `to_map` does not make this."""
        if stored is None:
            return cls()
        if type(stored) is not dict:
            raise ValueError(f"{TEXT_MAP} is no map")
        version = stored.get("version", 1)
        needed, allowed = _FIELDS.get(version if type(version) is int else 0, ({""}, set()))
        if stored.keys() - allowed != needed:
            raise ValueError(f"{TEXT_MAP} has other fields than a text map")
        packed, system, root = stored["turns"], stored["system"], stored.get("root", b"")
        line = TURN_LINE_1 if version == 1 else TURN_LINE
        if type(packed) is not bytes or len(packed) % line.size or len(packed) > MAX_TURNS * line.size:
            raise ValueError(f"{TEXT_MAP} has turns of a wrong length")
        if not (system is None or type(system) is str):
            raise ValueError(f"{TEXT_MAP} has a system text that is none")
        if type(root) is not bytes or len(root) not in (0, DIGEST_BYTES):
            raise ValueError(f"{TEXT_MAP} has a root that is no digest")
        read = [_turn_of(*each) for each in line.iter_unpack(packed)]
        if version <= _OLDER:
            read = [replace(turn, digest=_as_older(turn.digest)) if turn.role == "assistant" else turn for turn in read]
        read = with_beyond(_with_answers(read, stored.get(_ANSWERS, b"")), stored.get(_BEYOND, b""))
        read = with_blanks(with_calls(read, stored.get(_CALLS, b"")), stored.get(_BLANKS, []))
        turns = tuple(with_instructed(read, stored.get(_FIELDS_SAID, b"")))
        if any(one.end > other.end for one, other in pairwise(turns)):
            raise ValueError(f"{TEXT_MAP} has turns that end before those ahead of them")
        chained_turns = tuple(cls(root=root)._chained(turns))
        roots = _roots_of(stored.get(_ROOTS, []), len(turns))
        instructed = _instructed_of(stored.get(_INSTRUCTED, b""), len(turns), len(system or ""))
        return cls(chained_turns, system, root, _disowned_of(stored.get(_DISOWNED, b"")), roots, instructed)


_FIELDS: Final[Mapping[int, tuple[set[str], set[str]]]] = {
    1: ({"turns", "system"}, {_OWN_SYSTEM}),
    2: ({"version", "turns", "system", "root"}, {_ANSWERS}),
    3: (
        {"version", "turns", "system", "root"},
        {_ANSWERS, _BEYOND, _BLANKS, _CALLS, _DISOWNED, _FIELDS_SAID, _INSTRUCTED, _ROOTS},
    ),
}
"""The fields of each version, and those that it may have."""


def own_system_of(text_map: object) -> str | None:
    """The session's own system text from an older text map; None without one."""
    return text_map["system"] if type(text_map) is dict and text_map.get(_OWN_SYSTEM) is True else None


@dataclass(frozen=True, slots=True)
class Overlap:
    """A transcript compared with a text map. common: committed leading messages. kept: how many of them end where the
    conversation can go on. at: the tokens of the ledger up to there."""

    common: int
    kept: int
    at: int


@dataclass(frozen=True, slots=True)
class NewTurn:
    """The tokens that a chat has to read, `ids` behind the first `at` tokens of the ledger, and the text map
    afterwards.

    common: leading messages of a transcript that are committed, by their text. If the ledger has more than `at` tokens,
    the transcript diverges there. root: of the conversation. begins_at: where its messages begin, of a
    transcript. begun: tokens behind `at` that are an answer to it, which was given up: it goes on behind them. marks:
    positions of the ledger at which a model of whole state keeps a checkpoint.
    """

    at: int
    ids: Sequence[int]
    text_map: TextMap
    root: Root
    common: int = 0
    begins_at: int = 0
    begun: Sequence[int] = ()
    marks: Sequence[int] = ()

    @property
    def kept(self) -> int:
        """The tokens of the ledger that stay."""
        return self.at + len(self.begun)

    @property
    def is_told(self) -> bool:
        """Whether the text map tells of its messages, and has room for an answer."""
        return self.text_map.end == self.at + len(self.ids) and len(self.text_map.turns) < MAX_TURNS


def message_of(role: str, content: str, calls: Sequence[Mapping[str, Any]] = ()) -> Message:
    """A message with nothing else."""
    return {"role": role, "content": content, **({"tool_calls": list(calls)} if calls else {})}


def spoken(messages: Sequence[Message], system: str | None) -> list[Message]:
    """A conversation with the session's own system text before it, unless it begins with one."""
    opening = [message_of("system", system)] if system and messages[0]["role"] != "system" else []
    return [*opening, *messages]


def overlap_of(text_map: TextMap, messages: Sequence[Message], root: bytes = b"") -> Overlap:
    """Compare a transcript with the committed messages. A conversation can go on behind an assistant's text. It cannot
    go on between messages that were read together, nor in a turn that was opened for the assistant, which another
    request may open in another way: their tokens have to be compared. With another root it cannot go on at all. root:
    its digest.
    """
    turns = text_map.said if text_map.root == root else ()
    pairs = enumerate(zip(turns, messages, strict=False))
    common = next((at for at, (turn, message) in pairs if not turn.is_mark_of(message)), min(len(turns), len(messages)))
    for count in range(min(common, len(messages) - 1), 0, -1):
        is_end = count == len(turns) or turns[count].end > turns[count - 1].end
        if is_end and goes_on(messages, count):
            return Overlap(common, count, turns[count - 1].end)
    return Overlap(common, 0, 0)


def goes_on(messages: Sequence[Message], count: int) -> bool:
    """Whether a conversation can go on behind so many messages of a transcript: at its end, at the assistant's turn, or
    behind an answer. Not between two answers: a template may make them one turn."""
    is_answer, *next_is_answer = [message["role"] == "assistant" for message in messages[count - 1 : count + 1]]
    return not is_answer if not next_is_answer else is_answer and not next_is_answer[0]


def _older_digest(message: Message) -> bytes:
    """What stands for the digest that a message has in maps of older versions."""
    role, text, calls = message["role"], message["content"], message.get("tool_calls")
    words = without_thinking(text).strip() if role == "assistant" else text
    called = canonical([[call["name"], call["arguments"]] for call in calls]) if calls else ""
    return _as_older(hashed(f"{role}\0{words}\0{called}" if called else f"{role}\0{words}"))


def _as_older(digest: bytes) -> bytes:
    """No message has this digest."""
    return blake3(b"older\0" + digest).digest(DIGEST_BYTES)


def without_thinking(text: str) -> str:
    """An assistant's text after its thinking, where tags alone tell it; empty if it was cut off while thinking."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return "" if text.lstrip().startswith("<think>") else text


def _disowned_of(packed: object) -> tuple[bytes, ...]:
    if type(packed) is not bytes or len(packed) % ANSWER_ID_BYTES or len(packed) > MAX_TURNS * ANSWER_ID_BYTES:
        raise ValueError(f"{TEXT_MAP} has disowned answers of a wrong length")
    return tuple(packed[at : at + ANSWER_ID_BYTES] for at in range(0, len(packed), ANSWER_ID_BYTES))


def _roots_of(stored: object, turns: int) -> tuple[tuple[int, str], ...]:
    if stored == []:
        return ()
    match stored:
        case [bytes(packed), *texts] if len(packed) % _RUN.size == 0 and len(packed) <= turns * _RUN.size:
            runs = list(_RUN.iter_unpack(packed))
            counts = [0, *(count for count, _ in runs)]
            if counts != sorted(set(counts)) or counts[-1] > turns or any(at >= len(texts) for _, at in runs):
                raise ValueError(f"{TEXT_MAP} has roots of turns that it has not")
            try:
                list(map(Root.from_text, texts))
            except ValueError as error:
                raise ValueError(f"{TEXT_MAP} has a root that is none: {error}") from error
            return tuple((count, str(texts[at])) for count, at in runs)
    raise ValueError(f"{TEXT_MAP} has roots of a wrong form")


def _instructed_of(packed: object, turns: int, chars: int) -> tuple[tuple[int, int], ...]:
    if type(packed) is not bytes or len(packed) % _RUN.size or len(packed) > (turns + 1) * _RUN.size:
        raise ValueError(f"{TEXT_MAP} has instructions of a wrong length")
    runs = tuple(_RUN.iter_unpack(packed))
    counts = [count for count, _ in runs]
    if counts != sorted(set(counts)) or any(count > turns or size > chars for count, size in runs):
        raise ValueError(f"{TEXT_MAP} has instructions that its system text has not")
    return runs


def _with_answers(turns: list[Turn], packed: object) -> list[Turn]:
    if type(packed) is not bytes or len(packed) % _ANSWER.size or len(packed) > len(turns) * _ANSWER.size:
        raise ValueError(f"{TEXT_MAP} has answers of a wrong length")
    for at, answer in _ANSWER.iter_unpack(packed):
        if at >= len(turns) or turns[at].role != "assistant":
            raise ValueError(f"{TEXT_MAP} has an answer that is none of the assistant's")
        turns[at] = replace(turns[at], answer=answer)
    return turns


def _line_role_of(turn: Turn) -> int:
    return _VOLATILE_ROLE if turn.volatile else _ROLES.index(turn.role)


def _turn_of(role: int, end: int, digest: bytes) -> Turn:
    if role == _VOLATILE_ROLE:
        return replace(_turn_of(_ROLES.index("system"), end, digest), volatile=True)
    if role >= len(_ROLES) or not 1 <= end <= MAX_TOKENS:
        raise ValueError(f"{TEXT_MAP} has a role or a position that cannot be")
    return Turn(_ROLES[role], digest, end)
