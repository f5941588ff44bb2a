"""Volatile lines: what a client says anew in its system text with each request, such as the time.

There they would part each request from all that was read before. So they are taken out, and said as a system text of
their own before the newest question, unless they are the last that were said so. Those of earlier requests stay in the
ledger where they were read. No transcript has them there, so what compares transcripts passes them over
(`TextMap.said`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from ..models.chat_template import Message
from ..options.line_patterns import STATUS_BEGINS, STATUS_LINES, matcher_of
from ..sessions.said import VOLATILE
from ..sessions.transcripts import MAX_SYSTEM_CHARS, TextMap, message_of


def parted(text: str, is_volatile: Callable[[str], bool]) -> tuple[str, str]:
    """A system text without its volatile lines, and these; `STATUS_LINES` are such behind `STATUS_BEGINS`. One that no
    session keeps is not looked at: it is long."""
    if len(text) > MAX_SYSTEM_CHARS:
        return text, ""
    rest, lines, is_status = list[str](), list[str](), False
    begins_status, is_of_status = matcher_of((STATUS_BEGINS,)), matcher_of(STATUS_LINES)
    for line in text.split("\n"):
        words = line.rstrip()
        is_status = is_status or begins_status(words)
        goes = is_volatile(words) or (is_status and is_of_status(words))
        (lines if goes else rest).append(line)
    return "\n".join(rest), "\n".join(lines)


def opening_parted(messages: Sequence[Message], is_volatile: Callable[[str], bool]) -> tuple[Sequence[Message], str]:
    """A transcript without the volatile lines of the system texts that open it, and these. None are, if those texts are
    long all together."""
    opening, lines = list[Message](), list[str]()
    texts = list(takewhile(lambda each: each["role"] == "system", messages))
    if sum(len(each["content"]) for each in texts) > MAX_SYSTEM_CHARS:
        return messages, ""
    for message in texts:
        text, chars = message["content"], message.get("instructed", 0)
        fields, of_fields = parted(text[:chars], is_volatile)
        words, of_words = parted(text[chars:], is_volatile)
        instructed = {"instructed": len(fields)} if fields else {}
        opening.append({**message_of("system", fields + words), **instructed})
        lines += filter(None, (of_fields, of_words))
    return [*opening, *messages[len(opening) :]], "\n".join(lines)


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
