"""Markup as lines, remarks and cells have it: `[cyan]…[/]`, as rich reads it, without rich.

Most output goes to a pipe, and rich takes longer to import than the rest of a short command. What a terminal shows is
rich's work (`drawing.py`).
"""

from __future__ import annotations

import re

_TAG = re.compile(r"(\\*)\[([a-z#/@][^[]*?)\]")


def escape(text: str) -> str:
    """Markup of a text that has none: what looks like a tag in it is text."""
    if "[" in text:
        text = _TAG.sub(lambda found: f"{found[1]}{found[1]}\\{found[0][len(found[1]) :]}", text)
    return f"{text}\\" if text.endswith("\\") and not text.endswith("\\\\") else text


def unmarked(markup: str) -> str:
    """The text of markup, without its styles."""
    if "[" not in markup:
        return markup
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
