"""The pieces of a call that are read as one: an end mark in a text that the call quotes is part of that text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_MARKS: Final = ('"""', "'''", '"', "'")
"""Of a text in which a backslash escapes. Three of them come first, as Python reads them."""


@dataclass(frozen=True, slots=True)
class Quote:
    """A piece of a call. opens: an expression. closes: the text that ends the piece. escapes: whether a backslash makes
    the character behind it text. hides: whether an end mark in it is text."""

    opens: str
    closes: str
    escapes: bool = False
    hides: bool = True

    def end_in(self, text: str, at: int, upto: int) -> tuple[int, bool]:
        """Go on within it: how far it goes, and whether it has ended there."""
        if self.escapes:
            at = _PLAIN[self.closes].match(text, at, upto).end()  # type: ignore[union-attr]  # it matches no text, too
            is_closed = text.startswith(self.closes, at, upto)
            return at + len(self.closes) * is_closed, is_closed
        place = text.find(self.closes, at, upto)
        return (max(at, upto - len(self.closes) + 1), False) if place < 0 else (place + len(self.closes), True)


_PLAIN: Final = {mark: re.compile(rf"(?s:[^{mark[0]}\\]+|\\.|(?!{mark}){mark[0]})*+") for mark in _MARKS}

JSON: Final = (Quote('"', '"', escapes=True),)

# A prefix changes no end: in a raw text, too, a quote behind a backslash ends nothing. A call with a comment is none: a
# mark ends it also within the comment, but a quote there opens no text.
PYTHON: Final = (*(Quote(mark, mark, escapes=True) for mark in _MARKS), Quote("#", "\n", hides=False))
