"""Verbs about answers by their ids, and about what was said."""

from __future__ import annotations

from dataclasses import KW_ONLY

from ...records import Count, Result
from .dialogue import AnswerId, Channel, Role, ToldAs, ToolCall
from .records import ModelName, Request, SessionText


class RecalledPiece(Result):
    """Some of what an answer says in one channel. call: of the channel of that name."""

    channel: Channel
    text: str = ""
    call: ToolCall | None = None


class RecalledMessage(Result):
    """A message, as its tokens tell it. number: how many messages of the session stand before it. told_as: of the call
    that a tool's message answers. instructed: how many of the first characters of a system's message say instructions
    or tools that a request had as fields. pieces: of an answer that the model wrote, in their order. answer_id: of an
    answer that has one. start, end: the tokens of the ledger before it, or before the messages that were read with it,
    and at its end. finished: whether an answer came to its end: to an end token, or to that of a call. certain: whether
    a digest proves the words. If not, the model's tokenizer or template may have changed since, and messages that were
    read together may be told as one."""

    role: Role
    content: str
    _: KW_ONLY
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    told_as: ToldAs = ""
    answer_id: AnswerId | None = None
    start: Count
    end: Count
    finished: bool = True
    certain: bool = True
    number: Count = 0
    instructed: Count = 0
    pieces: tuple[RecalledPiece, ...] = ()


class RecallResult(Result):
    """What was said. after: the id of the answer before; None without one."""

    session: str
    model: ModelName
    messages: tuple[RecalledMessage, ...]
    after: AnswerId | None = None


class RecallRequest(Request):
    """What was said in a session, decoded from its tokens; one that sleeps stays asleep. With `answer_id`: that answer,
    behind the messages since the answer before it that has an id.

    session: give it, or answer_id. namespace: where to look for an answer; all if None.
    """

    session: SessionText | None = None
    answer_id: AnswerId | None = None
    namespace: SessionText | None = None

    def require(self) -> None:
        if (self.session is None) == (self.answer_id is None):
            raise ValueError("either session or answer_id names what to tell; give one of them")


class DisownResult(Result):
    """The sessions that had the answer."""

    answer_id: AnswerId
    sessions: tuple[str, ...]


class DisownRequest(Request):
    """Take the id from an answer: nothing finds it by that any more. Its words stay in the sessions that have it;
    deleting those erases them."""

    answer_id: AnswerId
    namespace: SessionText | None = None
