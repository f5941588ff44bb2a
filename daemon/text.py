"""Tokens to text, one at a time, and the strings at which a generation stops.

What a client is shown is derived from the committed tokens, never the other way round (QX8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

# Tokens of context that decoding looks back on: enough for any tokenizer's merging of spaces and bytes.
CONTEXT_TOKENS = 8
# An incomplete UTF-8 sequence has at most 3 bytes; longer runs of replacement characters are the text itself.
MAX_HELD_TOKENS = 4
_REPLACEMENT = "�"


class Decodes(Protocol):
    """What is asked of a tokenizer here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of the ids."""


class TextStream:
    """The text that each committed token adds.

    Decodes with the tokens before it as context, so that a leading space or a character made of several tokens
    comes out as it would when all is decoded at once.
    """

    def __init__(self, tokenizer: Decodes, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._before = list(context[-CONTEXT_TOKENS:])
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        self._pending.append(token)
        text = self._text_of_pending()
        if text.endswith(_REPLACEMENT) and len(self._pending) < MAX_HELD_TOKENS:
            return ""
        self._before = (self._before + self._pending)[-CONTEXT_TOKENS:]
        self._pending = []
        return text

    def finish(self) -> str:
        """What is left when no more tokens come: an incomplete character shows as a replacement character."""
        text = self._text_of_pending() if self._pending else ""
        self._pending = []
        return text

    def _text_of_pending(self) -> str:
        before = self._tokenizer.decode(self._before, skip_special_tokens=True)
        both = self._tokenizer.decode(self._before + self._pending, skip_special_tokens=True)
        return both[len(before) :] if both.startswith(before) else both


class StopStrings:
    """Cuts a text at the first of several strings, holding back what might be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that may be shown. After `found`, nothing more comes."""
        if not self._stops or self.found:
            return "" if self.found else text
        self._held += text
        hits = [index for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if hits:
            self.found = True
            shown, self._held = self._held[: min(hits)], ""
            return shown
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def finish(self) -> str:
        """What was held back and turned out not to be a stop string."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that is a beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
