"""By what a request is known to belong to a session, before any replica sees it.

A client may name the session or the answer that it goes on from. Most give an id of their own for the conversation.
Others give nothing, and send the whole dialogue again: they are known by the longest part of it that was seen before.
Only what a person or a program said counts there, for clients do not send a model's answers back as they were.

A key decides where a request goes, and nothing else: the replica finds the session by itself, from all that was said.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final
from urllib.parse import unquote

from ...errors import TorporError
from ...memvid.uri import parse_reference, session_in
from ..http.sessions import PATH as SESSIONS_PATH
from ..http.turns import ANY_CONVERSATION, SESSION_HEADER, answer_in, name_for
from ..wire.naming import name_in

_SAID_BY: Final = ("user",)
_TOLD_BY: Final = ("system", "developer")
_MOST_SAID: Final = 4096
"""Messages of a dialogue that are looked at, the last ones of a longer one not."""

_ANSWER_PATH: Final = re.compile(r"/v1/(?:responses|conversations|chat/completions)/([^/]+)")


@dataclass(frozen=True, slots=True)
class Key:
    """What tells the session of a request. session: the URI that the client names, or that of its own id for the
    conversation. answers: ids of answers that it goes on from. dialogue: a digest of each beginning of what was said,
    the longest first; empty where the session is named on purpose. head: a digest of what stands before the first
    message, and head_bytes its size."""

    session: str | None = None
    answers: tuple[str, ...] = ()
    dialogue: tuple[bytes, ...] = ()
    head: bytes = b""
    head_bytes: int = 0


def key_of(namespace: str, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> Key:
    """The key of a request. namespace: the caller's. path: as it was sent, without the query. body: empty for one
    without."""
    if path.startswith(f"{SESSIONS_PATH}/"):
        return Key(uri_in(namespace, unquote(path[len(SESSIONS_PATH) + 1 :].partition("/")[0])))
    answers = tuple(_answers(path, body))
    cache_key = body.get("prompt_cache_key")
    name = name_for(headers, cache_key if isinstance(cache_key, str) else None)
    named = None if name.text == ANY_CONVERSATION else uri_in(namespace, name.text)
    if SESSION_HEADER in headers:
        return Key(named, answers)
    messages = _messages(body)
    opening = _opening(body, messages)
    tools = body.get("tools")
    head = _digest(namespace.encode(), named or "", str(body.get("model")), opening)
    head_bytes = len(opening.encode("utf-8", "surrogatepass")) + (len(str(tools)) if isinstance(tools, list) else 0)
    return Key(named, answers, tuple(_chain(head, messages))[::-1], head if head_bytes else b"", head_bytes)


def uri_in(namespace: str, session: str) -> str | None:
    """The URI of a session as a client or a replica names it; None for no valid name, which the replica refuses in the
    client's own API."""
    with suppress(TorporError):
        return str(parse_reference(session_in(name_in(namespace, session))))
    return None


def _answers(path: str, body: Mapping[str, Any]) -> Iterator[str]:
    in_path = _ANSWER_PATH.fullmatch(path)
    conversation = body.get("conversation")
    named = conversation.get("id") if isinstance(conversation, Mapping) else conversation
    for minted in (in_path[1] if in_path else None, body.get("previous_response_id"), named):
        if isinstance(minted, str) and (answer := answer_in(minted)) is not None:
            yield answer


def _messages(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What was said, as each API has it."""
    said = body.get("messages", body.get("input", body.get("prompt")))
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    if not isinstance(said, list):
        return []
    return [each for each in islice(said, _MOST_SAID) if isinstance(each, Mapping)]


def _opening(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    """What stands before the first message of a person."""
    told = [_text(body.get("system")), _text(body.get("instructions"))]
    for message in messages:
        if message.get("role") not in _TOLD_BY:
            break
        told.append(_text(message.get("content")))
    return "\n".join(each for each in told if each)


def _text(content: Any) -> str:
    """The text of a message, however its parts are marked."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "\n".join(text for text in texts if isinstance(text, str))


def _chain(head: bytes, messages: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """A digest of each beginning, the shortest first."""
    link = head
    for message in messages:
        if message.get("role") in _SAID_BY and (text := _text(message.get("content"))):
            link = _digest(link, text)
            yield link


def _digest(first: bytes, *texts: str) -> bytes:
    digest = hashlib.blake2b(first, digest_size=16)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
