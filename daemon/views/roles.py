"""Which tokens of a ledger belong to which message, as far as a session map tells it: a text map has the end of each
message. Values only.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from ...memvid.format.manifest import UNREAD

TEXT_MAP: Final = "text_map"
"""The key of a text map in the session map."""

TURN_LINE: Final = struct.Struct("<BI16s")
"""A message in a text map: the number of its role, the tokens of the ledger at its end, and its digest."""

TURN_LINE_1: Final = struct.Struct("<BI16x16s")
"""The same in the first version of a text map, which had two digests for a message: the second is that of later
versions."""

ROLES: Final = ("system", "user", "assistant", "tool", "system")
"""By number. The last one is of lines that a client has anew with each request."""

ROOT: Final = "chat_root"
"""The key of the tools and template arguments of a chat."""

_NO_TOOLS: Final = '{"tools": []'

TEXT: Final = "text"
"""In place of a role, of tokens that no message has."""

RoleSpan = tuple[int, int, str]
"""Tokens from, up to, and whose they are."""


def role_spans(session: Mapping[str, Any], token_count: int) -> tuple[RoleSpan, ...]:
    """The messages of a ledger of so many tokens, without gaps; none if the session map knows no messages, or not in a
    form that this program writes. Messages that were read in one go have one end: their roles are joined by `+`."""
    ends = _ends_in(session)
    spans: list[RoleSpan] = []
    for end, turns in groupby(ends, key=lambda turn: turn[0]):
        start = spans[-1][1] if spans else 0
        if not start < end <= token_count:
            continue
        roles = [role for _, role in turns]
        if not spans and _has_tools(session):
            roles.insert(0, "tools")
        spans.append((start, end, "+".join(dict.fromkeys(roles))))
    if spans and spans[-1][1] < token_count:
        spans.append((spans[-1][1], token_count, TEXT))
    return tuple(spans)


def with_thinking(spans: Sequence[RoleSpan], thoughts: Sequence[tuple[int, int]]) -> tuple[RoleSpan, ...]:
    """The same with the thoughts of answers apart. thoughts: tokens from and up to, in order."""
    told: list[RoleSpan] = []
    for start, end, role in spans:
        at = start
        for begins, ends in thoughts:
            begins, ends = max(begins, at), min(ends, end)
            if role == "assistant" and begins < ends:
                told += [(at, begins, role)] * (at < begins) + [(begins, ends, "thinking")]
                at = ends
        told += [(at, end, role)] * (at < end)
    return tuple(told)


def held_in(spans: Sequence[RoleSpan], start: int, end: int) -> dict[str, int]:
    """How many of these tokens each role has, in the order of their first."""
    held: dict[str, int] = {}
    for begins, ends, role in spans:
        if (count := min(ends, end) - max(begins, start)) > 0:
            held[role] = held.get(role, 0) + count
    return held


def _has_tools(session: Mapping[str, Any]) -> bool:
    root = session.get(ROOT)
    return isinstance(root, str) and not root.startswith(_NO_TOOLS)


def _ends_in(session: Mapping[str, Any]) -> list[tuple[int, str]]:
    """The end and the role of each message."""
    unread = session.get(UNREAD)
    stored = unread.get(TEXT_MAP) if isinstance(unread, dict) else session.get(TEXT_MAP)
    turns = stored.get("turns") if isinstance(stored, dict) else None
    if not isinstance(stored, dict) or not isinstance(turns, bytes):
        return []
    line = TURN_LINE if "version" in stored else TURN_LINE_1
    if len(turns) % line.size:
        return []
    read = list(line.iter_unpack(turns))
    return [(end, ROLES[role]) for role, end, _ in read] if all(role < len(ROLES) for role, _, _ in read) else []
