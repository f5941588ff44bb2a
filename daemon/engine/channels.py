"""What a model writes, told apart while it is written: text, reasoning, calls of tools.

The marks between them are the model's own, as mlx-lm knows them. Special tokens that are marks are seen too, though no
text shows them. A call in another form than the model's, or of a tool that nobody offered, is text. A call that
the limit of tokens has cut off is nothing.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from blake3 import blake3

from ..api.dialogue import Channel, ToolCall
from ..api.limits import MAX_ARGUMENTS_CHARS, MAX_CALL_ID_CHARS
from ..models.call_reading import CallEnd, read_calls, require_carried
from ..models.chat_template import Root
from ..models.marks import Marks
from ..models.models import LoadedModel
from .text import StopStrings, TextStream, overlap

MAX_CALL_CHARS: Final = 2 * MAX_ARGUMENTS_CHARS
"""Of what stands between the marks of a call. More is text."""


_FIRST_SIGN: Final = 0xD800
"""Of characters that no decoded text has: halves of surrogate pairs."""


class MarkedText:
    """The text that each committed token adds, with some control tokens written out. names: of control tokens. written:
    those that are written out. signs: for some others, the character that stands for each in the text."""

    def __init__(
        self,
        tokenizer: Any,
        context: Sequence[int],
        names: Mapping[int, str],
        written: Collection[int],
        signs: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._tokenizer = tokenizer
        self._names = names
        self._written = written
        self._signs = signs
        self._text = TextStream(tokenizer, context)

    def push(self, token: int, channel: Channel = "text") -> str:
        """The text that is certain now. channel: where it comes; in a call each control token is written out, for the
        parser of the call."""
        special = self._names.get(token)
        if special is None or not (channel == "call" or token in self._written):
            return self._text.push(token) + (self._signs.get(token, "") if channel == "text" else "")
        before = self._text.finish()
        self._text = TextStream(self._tokenizer, ())
        return before + special

    def finish(self) -> str:
        """The rest of the text after the last token."""
        return self._text.finish()


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of what a channel says. call: of the channel of that name, once it is whole."""

    channel: Channel
    text: str = ""
    call: ToolCall | None = None


class Channels:
    """Tells the channels of one answer apart. root: has the offered tools. name_call: gives the id of a call by its
    number in the answer. thinks: whether the answer begins within its thinking. is_plain: whether text that has begun
    is text to its end, with no marks in it. any_tool: whether calls of tools that are not offered are calls, too."""

    def __init__(
        self,
        marks: Marks,
        root: Root,
        name_call: Callable[[int], str],
        *,
        thinks: bool = False,
        is_plain: bool = False,
        any_tool: bool = False,
    ) -> None:
        self._marks = marks
        self._tools = root.tools
        self._end = CallEnd(marks)  # of the call that has begun
        self._told_as = root.told_as
        self._any_tool = any_tool
        self._name_call = name_call
        self._named = 0
        self._ids: set[str] = set()  # of the calls of this answer
        self.channel: Channel = "reasoning" if thinks else "text"
        self._held = ""
        self._is_plain = is_plain
        self._said = False  # whether text has begun
        self._blanks = ""  # at the end of a text: dropped if a call or the end of thinking stands beside them
        self._joins = not thinks  # whether blanks that come now belong to the text

    def push(self, text: str) -> Iterator[Piece]:
        """The pieces that are certain with this text."""
        self._held += text
        while (hit := self._next_mark()) is not None:
            at, mark = hit
            before, self._held = self._held[:at], self._held[at + len(mark) :]
            yield from self._passed(before, mark)
        yield from self._certain()

    def finish(self, *, is_cut: bool = False) -> Iterator[Piece]:
        """The rest, after the last text. is_cut: whether more was to come. Then a call that has only begun is not
        shown, nor an answer that ends within its first mark."""
        rest, self._held = self._held, ""
        if self.channel == "call":
            yield from self._call_or_text(rest, "", is_cut=is_cut)
        elif rest and (self._said or self.channel == "reasoning" or not is_cut):
            yield from self._shown(rest)
        if self._blanks and self._joins:
            yield Piece("text", self._blanks)

    def _wanted(self) -> list[str]:
        """The marks that end the present channel, which is no call."""
        if self.channel == "reasoning":
            return [self._marks.reasoning[1]] if self._marks.reasoning else []
        if self._is_plain and self._said:
            return []
        begins = [self._marks.call[0]] if self._told_as or self._any_tool else []
        thinks = [self._marks.reasoning[0]] if self._marks.reasoning and not self._said else []
        return [*begins, *self._marks.scaffold, *thinks]

    def _next_mark(self) -> tuple[int, str] | None:
        if self.channel == "call":
            end = self._end.find(self._held)
            return None if end < 0 else (end, self._marks.call[1])
        hits = [(at, mark) for mark in self._wanted() if (at := self._held.find(mark)) >= 0]
        return min((each for each in hits if self._is_mark(*each)), default=None)

    def _is_mark(self, at: int, mark: str) -> bool:
        """Whether what reads like a mark is one. Once text has begun, none begins thinking, and in a plain answer there
        are no more marks."""
        if self.channel != "text" or not (self._is_plain or mark in (self._marks.reasoning or ())):
            return True
        return not self._held[:at].strip()

    def _passed(self, before: str, mark: str) -> Iterator[Piece]:
        """Go on behind a mark."""
        if self.channel == "call":
            yield from self._call_or_text(before, mark)
            self.channel = "text"
            return
        if before:
            yield from self._shown(before)
        if mark == self._marks.call[0]:
            self.channel, self._end = "call", CallEnd(self._marks)
        elif self.channel == "reasoning":
            self.channel, self._joins = "text", False
        elif mark not in self._marks.scaffold:
            self.channel, self._blanks = "reasoning", ""

    def _certain(self) -> Iterator[Piece]:
        """All that is held but a possible beginning of a mark; of a call nothing, until it is whole."""
        if self.channel == "call":
            if len(self._held) > MAX_CALL_CHARS:
                body, self._held, self.channel = self._held, "", "text"
                yield from self._shown(self._marks.call[0] + body)
            return
        keep = max((overlap(self._held, mark) for mark in self._wanted()), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        if text:
            yield from self._shown(text)

    def _shown(self, text: str) -> Iterator[Piece]:
        if self.channel == "reasoning":
            yield Piece("reasoning", text)
            return
        self._said = self._said or bool(text.strip())
        if self._is_plain:
            yield Piece("text", text)
            return
        text = self._blanks + text if self._joins else text.lstrip()
        core = text.rstrip()
        self._blanks, self._joins = text[len(core) :], self._joins or bool(core)
        if core:
            yield Piece("text", core)

    def _call_or_text(self, body: str, end: str, *, is_cut: bool = False) -> Iterator[Piece]:
        calls = self._calls_in(body, is_ended=bool(end))
        if calls is None and not is_cut:
            self.channel = "text"
            yield from self._shown(f"{self._marks.call[0]}{body}{end}")
            return
        self._blanks, self._joins = "", False
        for call in calls or ():
            yield Piece("call", call=call)

    def _calls_in(self, body: str, *, is_ended: bool) -> list[ToolCall] | None:
        """The calls between two marks; None if they are malformed."""
        named, ids = self._named, set(self._ids)
        try:
            return [self._call(each) for each in read_calls(self._marks, body, self._tools, is_ended=is_ended)]
        except Exception:  # noqa: BLE001 - a reader may raise any error for what a model writes
            self._named, self._ids = named, ids
            return None

    def _call(self, parsed: Mapping[str, Any]) -> ToolCall:
        name, arguments, own_id = parsed["name"], parsed.get("arguments"), parsed.get("id")
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not (self._any_tool or name in self._told_as) or not isinstance(arguments, dict | None):
            raise ValueError("no call of an offered tool")
        require_carried(arguments)
        self._named += 1
        is_own = isinstance(own_id, str) and 0 < len(own_id) <= MAX_CALL_ID_CHARS and own_id.isprintable()
        named = str(own_id) if is_own and own_id not in self._ids else self._name_call(self._named)
        self._ids.add(named)
        return ToolCall(name, arguments or {}, named, self._told_as.get(name, ""))


class Shown:
    """What a client is shown of an answer, token by token.

    context: the ledger before it. root: of the conversation; None if all is text. is_plain: as of `Channels`. one_call:
    whether nothing is shown behind a call. answer: the answer's id; empty for none.
    """

    def __init__(
        self,
        model: LoadedModel,
        context: Sequence[int],
        root: Root | None,
        stop: Sequence[str],
        *,
        is_plain: bool = False,
        one_call: bool = False,
        answer: bytes = b"",
    ) -> None:
        self._one_call, self._has_called = one_call, False
        self._channels: Channels | None = None
        marks, written = model.marks, model.marks.shown
        if root is not None and (root.tools or marks.reasoning):
            thinks = marks.thinks_behind(context, model.end_tokens)
            self._channels = Channels(
                marks,
                root,
                lambda number: id_of_call(answer or _as_bytes(context), number),
                thinks=thinks,
                is_plain=is_plain,
            )
            written |= marks.in_marks
        self._names, self._stop_names = marks.special, frozenset(stop)
        within = [
            token
            for token, name in marks.special.items()
            if token not in written and any(name in each for each in stop)
        ]
        signs = {token: chr(_FIRST_SIGN + at) for at, token in enumerate(within)}
        self._stops = StopStrings(stop, {sign: marks.special[token] for token, sign in signs.items()})
        self._marked = MarkedText(model.tokenizer, context, marks.special, written, signs)

    @property
    def channel(self) -> Channel:
        """Where the last token was."""
        return self._channels.channel if self._channels is not None else "text"

    @property
    def stopped_by(self) -> str | None:
        """The stop string that has come, in the text: nothing is shown behind it. None before."""
        return self._stops.found

    @property
    def is_over(self) -> bool:
        """Whether nothing more is shown, whatever is written."""
        return bool(self.stopped_by) or (self._one_call and self._has_called)

    def push(self, token: int) -> Iterator[Piece]:
        """The pieces that a token makes certain."""
        if self.channel == "text" and (name := self._names.get(token)) in self._stop_names:
            yield from self.finish()
            self._stops.found = self._stops.found or name
        elif self._channels is None:
            yield from self._passed(_as_text(self._marked.push(token)))
        else:
            yield from self._passed(self._channels.push(self._marked.push(token, self.channel)))

    def finish(self, *, is_cut: bool = False) -> Iterator[Piece]:
        """The rest, after the last token; nothing behind what ended the answer. is_cut: as of `Channels`."""
        if self.is_over:
            pass
        elif self._channels is None:
            yield from self._passed(_as_text(self._marked.finish()))
        else:
            yield from self._passed(self._channels.push(self._marked.finish()))
            yield from self._passed(self._channels.finish(is_cut=is_cut))
        if not self.stopped_by and (rest := self._stops.finish()):
            yield Piece("text", rest)

    def _passed(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            # What stands on both sides of a call or a thought is no one text.
            if (piece.channel == "reasoning" or piece.call is not None) and (rest := self._stops.finish()):
                yield Piece("text", rest)
            if piece.channel != "text":
                self._has_called = self._has_called or piece.call is not None
                yield piece
            elif text := self._stops.push(piece.text):
                yield Piece("text", text)
            if self.is_over:
                return


def _as_text(text: str) -> Iterator[Piece]:
    if text:
        yield Piece("text", text)


def id_of_call(answer: bytes, number: int) -> str:
    """The id of a call in an answer, by its number: nine letters and digits, as the strictest template wants them. It
    follows from the answer's id, or, without one, from the ledger before it: so it is the same when it is told again,
    and a client that sends it back names the answer."""
    digest = blake3(answer + number.to_bytes(4, "little")).digest(8)
    return base64.b32encode(digest).decode().lower()[:9]


def _as_bytes(ledger: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in ledger)
