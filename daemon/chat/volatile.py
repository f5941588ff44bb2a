"""Volatile lines: what a client says anew in its system text with each request, such as the time.

There they would part each request from all that was read before. So they are taken out, and said as a system text of
their own before the newest question, unless they are the last that were said so. Those of earlier requests stay in the
ledger where they were read. No transcript has them there, so what compares transcripts passes them over
(`TextMap.said`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..models.chat_template import Message
from ..sessions.said import VOLATILE
from ..sessions.transcripts import MAX_SYSTEM_CHARS, TextMap, message_of


def parted(text: str, is_volatile: Callable[[str], bool]) -> tuple[str, str]:
    """A system text without its volatile lines, and these. One that no session keeps is not looked at: it is long."""
    if len(text) > MAX_SYSTEM_CHARS:
        return text, ""
    rest, lines = list[str](), list[str]()
    for line in text.split("\n"):
        (lines if is_volatile(line.rstrip()) else rest).append(line)
    return "\n".join(rest), "\n".join(lines)


def opening_parted(opening: Message, is_volatile: Callable[[str], bool]) -> tuple[Message, str]:
    """A system's message without its volatile lines, and these."""
    text, chars = opening["content"], opening.get("instructed", 0)
    sides = [parted(side, is_volatile) for side in (text[:chars], text[chars:])]
    (fields, _), (words, _) = sides
    lines = "\n".join(each for _, each in sides if each)
    instructed = {"instructed": len(fields)} if fields else {}
    return {**message_of("system", fields + words), **instructed}, lines


def with_volatile(
    known: TextMap, messages: Sequence[Message], lines: str | None, *, is_field: bool = False
) -> list[Message]:
    """New messages with volatile lines before the first question behind the last answer, or behind all; without them,
    if they are the last that were said so, or there are none. is_field: whether a field of the request has them."""
    if not lines or not messages or known.says_volatile(lines):
        return list(messages)
    last = max((at for at, each in enumerate(messages, 1) if each["role"] == "assistant"), default=0)
    at = next((at for at in range(last, len(messages)) if messages[at]["role"] == "user"), len(messages))
    instructed = {"instructed": len(lines)} if is_field else {}
    return [*messages[:at], {**message_of("system", lines), **instructed, VOLATILE: True}, *messages[at:]]
