"""Markup as lines, remarks and cells have it: `[cyan]…[/]`, as rich reads it, without rich.

Most output goes to a pipe, and rich takes longer to import than the rest of a short command. What a terminal shows is
rich's work (`drawing.py`).
"""

from __future__ import annotations

import re
from functools import lru_cache

_TAG = re.compile(r"(?<!\\)(\\*)\[([a-z#/@][^[]*?)\]")
_BEFORE_TAG = re.compile(r"(?<!\\)(\\*)(\[|\Z)")
_NOTHING = "[none][/none]"
_ESCAPED = {"[": "\\[", "": ""}


def escape(text: str) -> str:
    """Markup of a text that has none, whatever stands behind it: two texts in one line could make a tag together.
    rich reads a backslash by what follows, so where a tag may follow, one does."""
    if "[" not in text and not text.endswith("\\"):
        return text
    return _BEFORE_TAG.sub(lambda found: f"{2 * found[1]}{found[1] and _NOTHING}{_ESCAPED[found[2]]}", text)


def unmarked(markup: str) -> str:
    """The text of markup, without its styles."""
    return _unmarked(markup) if "[" in markup else markup


@lru_cache(maxsize=1024)  # the same stands in many rows
def _unmarked(markup: str) -> str:
    # A backslash escapes a tag or another backslash before a tag; elsewhere it is itself.
    pieces, place = [], 0
    for found in _TAG.finditer(markup):
        pieces.append(markup[place : found.start()].replace("\\[", "["))
        whole, escaped = divmod(len(found[1]), 2)
        pieces.append("\\" * whole)
        if escaped:
            pieces.append(found[0][len(found[1]) :])
        place = found.end()
    pieces.append(markup[place:].replace("\\[", "["))
    return "".join(pieces)
