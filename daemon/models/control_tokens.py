"""Control tokens: what a template writes around turns, thinking and calls, and no text may spell.

A tokenizer flags most of them as special. Some it does not flag, such as Qwen 3's `<think>` and `<tool_call>`; those
are known by their names. Other added tokens are plain text that the model has learned whole: runs of blanks, line
breaks, words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from ..views.words import is_control


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The control tokens of a tokenizer. names: their texts, by their ids. unflagged: those that its files do not flag:
    a text that is decoded shows them."""

    names: Mapping[int, str]
    unflagged: frozenset[int]


NO_CONTROL_TOKENS: Final = ControlTokens({}, frozenset())


def settle_control_tokens(tokenizer: Any) -> ControlTokens:
    """Find the control tokens of a tokenizer, and flag all of them as special: then a text that is encoded without them
    has none, and the free text of a grammar neither. Tokens and what a template renders stay the same."""
    added = tokenizer.added_tokens_decoder
    unflagged = {token: each for token, each in added.items() if not each.special and is_control(each.content)}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and unflagged:
        for each in unflagged.values():
            each.special = True
        backend.add_special_tokens(list(unflagged.values()))
    names = {token: str(each.content) for token, each in added.items() if each.special or token in unflagged}
    return ControlTokens(names, frozenset(unflagged))


@dataclass(frozen=True, slots=True)
class Edges:
    """Which texts may be a part of a control token's name, with more written around them. begins: what such a name
    begins with; ends: what it ends with; names: all of them, in one text."""

    begins: frozenset[str]
    ends: frozenset[str]
    names: str

    def joins(self, text: str) -> tuple[bool, bool]:
        """Whether a name may reach over the beginning of a text, and over its end."""
        most = min(len(text), max(map(len, self.begins), default=0))
        before = any(text[:size] in self.ends for size in range(1, most + 1))
        behind = any(text[-size:] in self.begins for size in range(1, most + 1))
        return before, behind or (text != "" and text in self.names)


@lru_cache(maxsize=16)
def edges_of(names: frozenset[str]) -> Edges:
    """The edges of control tokens' names."""
    begins = frozenset(name[:size] for name in names for size in range(1, len(name)))
    ends = frozenset(name[size:] for name in names for size in range(1, len(name)))
    return Edges(begins, ends, "\0".join(names))


@lru_cache(maxsize=16)
def any_of(names: frozenset[str]) -> re.Pattern[str]:
    """What finds the names of control tokens in a text, of two at one place the longer; it captures them."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})" if names else "(?!)()")
