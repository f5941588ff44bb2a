"""Lines of parts, as a log has them, each behind the lanes of a graph if it has one.

Piped, a tab stands between two parts. On a terminal `drawing.py` draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .graph import Piece
from .markup import unmarked


@dataclass(slots=True)
class Lines:
    """Lines, each with its lanes and the markup of its parts, of which `names` are the names. On a terminal none is
    broken: parts for which one line has no room are left out of all, from the last one on, and a line below says so; of
    the first `needed` the end is cut. aligned: the parts of all lines stand below each other there."""

    needed: int
    names: Sequence[str]
    aligned: bool = False
    rows: list[tuple[Sequence[Piece], Sequence[str]]] = field(default_factory=list)

    def add(self, lanes: Sequence[Piece], parts: Sequence[str]) -> None:
        self.rows.append((lanes, parts))

    def lines(self) -> Iterator[str]:
        """The lines as a pipe gets them."""
        for lanes, parts in self.rows:
            drawn = ["".join(signs for signs, _ in lanes)] if lanes else []
            yield "\t".join([*drawn, *map(unmarked, parts)])

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from .drawing import draw_lines  # for a terminal alone

        return draw_lines(self, console, options)
