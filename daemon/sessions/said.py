"""Messages by their digests: what of a message counts, and what a client may change in it.

Clients change what the model has written: they drop its thinking and blanks around its text, and write its calls with
the same values in another way. So an answer of the model is known by its text and the values of its calls, with its own
thinking or without any. A message that was read is known by all of it, for a template may show all of it. The ids of
calls alone do not count, for clients make new ones with each request; which of the calls a result answers does, where
the results are not in the order of the newest calls. So a text map has the ids of calls, for results that come behind
them in another request. Thinking is what the engine or the client has told apart from the text, whatever tags are in
that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3

from ..api.dialogue import Role, canonical
from ..models.chat_template import Message
from ..tasks.pieces import Pieces
from .results import DIGEST_BYTES, NOTHING, Results, hashed

if TYPE_CHECKING:
    from .transcripts import Turn

_MESSAGES_AT_ONCE: Final = 64
"""Messages whose digests are made in one piece of work, which takes about a millisecond."""

_KNOWN_AT_ONCE: Final = 512
"""Messages in one piece of work that have their digests."""

_CHARS_AT_ONCE: Final = 512 * 1024
"""Characters whose digest is made in one piece of work."""

RECALLED: Final = "recalled"
"""A field of a message that is an answer of the model as its tokens tell it, and not as a client spells it."""

VOLATILE: Final = "volatile"
"""A field of a system's message that says lines which a client has anew with each request."""


@dataclass(frozen=True, slots=True)
class Said:
    """A message, by its digests. digest: of its role, its text and the values of its calls; of an assistant's text
    without blanks around it. thought: of its thinking. exact: of all that a template may show beyond `digest`."""

    role: Role
    digest: bytes
    thought: bytes = NOTHING
    exact: bytes = NOTHING

    @classmethod
    def of(cls, message: Message) -> Said:
        if isinstance(message, _Digested):
            return message.said
        role, text = message["role"], message["content"]
        if role != "assistant":
            return cls(role, hashed(f"{role}\0{text}"))
        core, thinking, calls = text.strip(), message.get("reasoning") or "", message.get("tool_calls") or ()
        values = [call["arguments"] for call in calls]
        digest = hashed(f"{role}\0{core}")
        if calls:
            called = canonical([[call["name"], call["arguments"]] for call in calls])
            digest = hashed(f"calls\0{called}\0{core}")  # no JSON has this separator in it
        before, core_and_after = text[: len(text) - len(text.lstrip())], text.lstrip()
        around = [before, core_and_after[len(core) :]]
        is_plain = core == text and not thinking and all(_written(each) == canonical(each) for each in values)
        exact = NOTHING if is_plain else hashed(_written([around, thinking, values]))
        return cls(role, digest, hashed(thinking.strip()) if thinking.strip() else NOTHING, exact)


def begun_chain(root: bytes) -> bytes:
    """A chain before the first message. root: the digest of what stands before that."""
    return blake3(root).digest(DIGEST_BYTES)


def chained(chain: bytes, digest: bytes) -> bytes:
    """The chain with the digest of one message more: it stands for the words up to there."""
    return blake3(chain + digest).digest(DIGEST_BYTES)


class _Digested(dict[str, Any]):
    """A message with its digests. There are many at a time, and what each has besides is work for Python's collector,
    which holds up all else."""

    __slots__ = ("said",)
    said: Said


def digested(messages: Sequence[Message], before: Sequence[Turn] = ()) -> Pieces[tuple[Message, ...]]:
    """The messages with their digests, which are made once then, however often they are compared. before: the turns
    before the messages, whose calls these may answer."""
    copies: list[Message] = []
    count = chars = 0
    results = yield from Results.behind(before)
    for at, message in enumerate(messages, 1):
        exact = results.push(message)
        if isinstance(message, _Digested) and (message["role"] != "tool" or message.said.exact == exact):
            copies.append(message)
        else:
            copies.append((yield from _digested(message, exact)))
            count, chars = count + 1, chars + len(message["content"])
        if count == _MESSAGES_AT_ONCE or chars > _CHARS_AT_ONCE or at % _KNOWN_AT_ONCE == 0:
            count = chars = 0
            yield
    return tuple(copies)


def _digested(message: Message, exact: bytes) -> Pieces[_Digested]:
    copy = _Digested(message)
    is_long = len(message["content"]) > _CHARS_AT_ONCE and message["role"] != "assistant"
    if is_long and not isinstance(message, _Digested):
        copy.said = yield from _said_of_long(message)
    else:
        copy.said = Said.of(message)
    if message["role"] == "tool":
        copy.said = replace(copy.said, exact=exact)
    return copy


def _said_of_long(message: Message) -> Pieces[Said]:
    hashed, text = blake3(f"{message['role']}\0".encode()), message["content"]
    for at in range(0, len(text), _CHARS_AT_ONCE):
        hashed.update(text[at : at + _CHARS_AT_ONCE].encode("utf-8", "surrogatepass"))
        yield
    return Said(message["role"], hashed.digest(DIGEST_BYTES))


def is_alike(said: Said, beyond: bytes, *, own: bool) -> bool:
    """Whether a message with the words of a turn is that message. beyond, own: of the turn."""
    return said.thought in (NOTHING, beyond) if own else said.exact == beyond


def _written(value: object) -> str:
    """A JSON value as a template may show it: its keys in their order, its numbers as they are."""
    return _WRITES.encode(value)


_WRITES: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
