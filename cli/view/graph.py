"""Lanes for a history: each thing stands below all that came from it, and a lane leads down to what it came from.

Pure. A thing comes from one other, or from none, so no lane ever splits on its way down: two join where they lead to
the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

Piece = tuple[str, int | None]
"""Characters of a line, and the number of the lane that they belong to; None: of none."""

SIGNS: Final = "│─├╯"
"""The characters of lanes, where the stream has them; else ASCII."""

_MOST_LANES: Final = 24
"""That a line shows: there may be one for each session."""


@dataclass(frozen=True, slots=True)
class Row:
    """One thing. lanes: in each column, from the left, the number of the lane there, its own too. column: its own.
    ends: no lane leads down from it. join: below it, the lane of the first column bends into that of the second."""

    lanes: tuple[int | None, ...]
    column: int
    ends: bool
    join: tuple[int, int] | None


def laid_out(things: Sequence[tuple[Hashable, Hashable | None]]) -> Iterator[Row]:
    """The rows of things, each with what it came from; one by one, for each may have as many lanes as there are things.
    Where what a thing came from does not stand below it, its lane ends. A lane has one number as long as it goes on, so
    that it can have a color."""
    places = {thing: at for at, (thing, _) in enumerate(things)}
    columns: list[tuple[Hashable, int] | None] = []  # where the lane of each leads to, and its number
    lanes_made, just_ended = 0, -1
    for at, (thing, origin) in enumerate(things):
        column = _column_of(thing, columns)
        if column is None:
            column = _free_column(columns, just_ended)
            columns[column], lanes_made = (thing, lanes_made), lanes_made + 1
        lanes = tuple(each and each[1] for each in columns)
        ends, join = places.get(origin, -1) <= at, None
        if ends:
            columns[column] = None
        elif (other := _column_of(origin, columns)) is None:
            columns[column] = (origin, lanes[column] or 0)
        else:
            join = (max(column, other), min(column, other))
            columns[join[0]], columns[join[1]] = None, (origin, lanes[join[1]] or 0)
        just_ended = column if ends else -1
        while columns and columns[-1] is None:
            columns.pop()
        yield Row(lanes, column, ends, join)


def _column_of(thing: Hashable, columns: Sequence[tuple[Hashable, int] | None]) -> int | None:
    return next((at for at, each in enumerate(columns) if each is not None and each[0] == thing), None)


def _free_column(columns: list[tuple[Hashable, int] | None], but: int) -> int:
    """The first free column; not the one of a lane that ended in the row above, whose end would look like a link."""
    found = next((at for at, each in enumerate(columns) if each is None and at != but), len(columns))
    found += found == but
    columns += [None] * (found + 1 - len(columns))
    return found


def node_line(row: Row, sign: str, *, ascii_only: bool) -> list[Piece]:
    """The line on which a thing stands."""
    bar = "|" if ascii_only else SIGNS[0]
    shown = enumerate(row.lanes[:_MOST_LANES])
    pieces = [(sign if at == row.column else " " if lane is None else bar, lane) for at, lane in shown]
    return _cut(row, _spaced(pieces, lambda _: (" ", None)), ascii_only=ascii_only)


def join_line(row: Row, *, ascii_only: bool) -> list[Piece]:
    """The line below it, on which a lane joins another; empty if none does."""
    if row.join is None:
        return []
    (start, end), own = row.join, row.lanes[row.join[0]]
    bar, dash, into, bend = ("|", "_", "|", " ") if ascii_only else SIGNS

    def piece(at: int, lane: int | None) -> Piece:
        if at in (start, end):
            return (bend, own) if at == start else (into, lane)
        return (bar, lane) if lane is not None else (dash, own) if end < at < start else (" ", None)

    def gap(at: int) -> Piece:
        if not end <= at < start:
            return " ", None
        return ("/" if ascii_only and at == start - 1 else dash), own

    spaced = _spaced([piece(at, lane) for at, lane in enumerate(row.lanes[:_MOST_LANES])], gap)
    return _cut(row, spaced, ascii_only=ascii_only)


def _cut(row: Row, line: list[Piece], *, ascii_only: bool) -> list[Piece]:
    """Say so where lanes are left out."""
    return [*line, (" ..." if ascii_only else " …", None)] if len(row.lanes) > _MOST_LANES else line


def _spaced(pieces: Sequence[Piece], gap: Callable[[int], Piece]) -> list[Piece]:
    """Put a gap behind each column but the last; `gap` gets the column before it."""
    line = [one for at, each in enumerate(pieces) for one in (each, gap(at))][:-1]
    while line and line[-1][0] == " ":
        line.pop()
    return line
