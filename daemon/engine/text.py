"""Tokens to text, one at a time, and the strings at which a generation stops.

The text for a client is derived from the committed tokens, never the other way round (QX8).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os.path import commonprefix
from types import MappingProxyType
from typing import Protocol

# Tokens of context that decoding looks back on: enough for any tokenizer's merging of spaces and bytes.
CONTEXT_TOKENS = 8
# An incomplete UTF-8 sequence has at most 3 bytes, so at most 3 tokens and 3 replacement characters.
MAX_INCOMPLETE = 3
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decodes(Protocol):
    """The methods of a tokenizer that this module uses."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of the ids."""


class TextStream:
    """The text that each committed token adds.

    Decodes with the tokens before it as context, so that a leading space or a character of several tokens comes out
    right. Replacement characters at the end are held back, because the next token may complete the character; longer
    runs of them are the text itself.
    """

    def __init__(self, tokenizer: Decodes, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(context[-CONTEXT_TOKENS:])
        for _ in range(MAX_INCOMPLETE):  # a window must not begin inside a character
            if len(context) > CONTEXT_TOKENS and self._decoded().startswith(_REPLACEMENT):
                del self._window[0]
        self._shown = self._decoded()
        self._boundaries = [len(self._window)]  # positions in the window between two whole characters

    def push(self, token: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        self._window.append(token)
        text = self._decoded()
        incomplete = min(len(text) - len(text.rstrip(_REPLACEMENT)), MAX_INCOMPLETE)
        if not incomplete:
            self._boundaries.append(len(self._window))
        certain = text[: len(text) - incomplete]
        waited = len(self._window) - max(self._boundaries, default=0)
        if not certain.startswith(self._shown) and 0 < waited <= MAX_INCOMPLETE:
            return ""  # some tokenizers break whole characters, too, until the next one is complete
        piece = self._not_yet_shown(certain)
        if len(self._window) > 2 * CONTEXT_TOKENS:
            self._move_window(max(0, len(text) - len(self._shown)))
        return piece

    def finish(self) -> str:
        """The rest of the text after the last token: an incomplete character shows as a replacement character."""
        return self._not_yet_shown(self._decoded())

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=True)

    def _not_yet_shown(self, text: str) -> str:
        """The text from its first difference: a half character that was shown may be complete now."""
        piece = text[len(commonprefix([self._shown, text])) :]  # noqa: RUF071 - compares characters
        if piece:
            self._shown = text
        return piece

    def _move_window(self, held_characters: int) -> None:
        """Drop tokens that are no longer needed as context."""
        latest = len(self._window) - CONTEXT_TOKENS
        start = max((position for position in self._boundaries if position <= latest), default=0)
        if not start and len(self._window) >= 4 * CONTEXT_TOKENS:
            start = latest  # a long run of broken bytes has no boundary
        if start:
            del self._window[:start]
            self._boundaries = [position - start for position in self._boundaries if position > start]
            text = self._decoded()
            self._shown = text[: len(text) - held_characters]


class StopStrings:
    """Cuts a text at the first of several strings, and holds back a possible beginning of one. signs: characters that
    stand for control tokens, with their names: what is shown has none. found: the string that was there; None before.
    """

    def __init__(self, stops: Sequence[str], signs: Mapping[str, str] = MappingProxyType({})) -> None:
        self._stops = {stop: stop for stop in stops if stop}
        for sign, name in signs.items():
            self._stops |= {stop.replace(name, sign): original for stop, original in self._stops.items()}
        self._unsigned = str.maketrans(dict.fromkeys(signs))
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown. After `found`, nothing more comes."""
        if not self._stops or self.found:
            return "" if self.found else text
        self._held += text
        hits = [(index, stop) for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if hits:
            first, stop = min(hits)
            self.found = self._stops[stop]
            output, self._held = self._held[:first], ""
            return output.translate(self._unsigned)
        keep = max(overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        output, self._held = self._held[:cut], self._held[cut:]
        return output.translate(self._unsigned)

    def finish(self) -> str:
        """The text held back that turned out not to be a stop string."""
        output, self._held = self._held, ""
        return output.translate(self._unsigned)


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that is a beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
