"""Whoever follows a lane down, sign by sign, comes to what the thing came from, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.cli.view.graph import join_line, laid_out, node_line

# Of each thing how far below it stands what it came from: None for nothing, and some lead beyond the last.
Histories = st.lists(st.none() | st.integers(1, 7), max_size=24)


def drawn(things: list[tuple[int, int | None]], *, ascii_only: bool = False) -> tuple[list[str], dict[int, int]]:
    """The lines of a graph, and the line of each thing."""
    lines, place = list[str](), dict[int, int]()
    for (thing, _), row in zip(things, laid_out(things), strict=True):
        place[thing] = len(lines)
        lines.append(_text(node_line(row, "o" if row.ends else "*", ascii_only=ascii_only)))
        if joined := join_line(row, ascii_only=ascii_only):
            lines.append(_text(joined))
    return lines, place


def _text(pieces: list[tuple[str, int | None]]) -> str:
    return "".join(signs for signs, _ in pieces)


def followed(lines: list[str], line: int) -> int | None:
    """The line of the thing to which the lane of the thing on this line leads; None if it has none."""
    at = next(place for place, sign in enumerate(lines[line]) if sign in "*o")
    if lines[line][at] == "o":
        below = lines[line + 1] if line + 1 < len(lines) else ""
        assert at >= len(below) or below[at] == " ", "what ended seems to go on"
        return None
    for number, below in enumerate(lines[line + 1 :], line + 1):
        sign = below[at]
        if sign in "*o":
            return number
        if sign == "╯":
            bends = below.rindex("├", 0, at)
            assert set(below[bends + 1 : at : 2]) <= {"─"}
            assert set(below[bends + 2 : at : 2]) <= {"─", "│"}
            at = bends
        else:
            assert sign in "│├", f"the lane is lost at {sign!r}"
    raise AssertionError("the lane leads out of the graph")


@given(Histories)
def test_each_lane_leads_to_what_the_thing_came_from(offsets: list[int | None]) -> None:
    things = [(at, None if offset is None else at + offset) for at, offset in enumerate(offsets)]
    lines, place = drawn(things)
    for thing, origin in things:
        assert followed(lines, place[thing]) == place.get(-1 if origin is None else origin)


@given(Histories)
def test_in_ascii_the_same_lanes_stand_in_the_same_columns(offsets: list[int | None]) -> None:
    things = [(at, None if offset is None else at + offset) for at, offset in enumerate(offsets)]
    lines, place = drawn(things, ascii_only=True)
    same, same_place = drawn(things)
    assert place == same_place
    turned = {ord("│"): "|", ord("├"): "|", ord("╯"): " ", ord("─"): "_"}
    assert [line.translate(turned)[::2].rstrip() for line in same] == [line[::2].rstrip() for line in lines]


def test_a_history_is_drawn_as_a_person_would() -> None:
    things = [("d2", "d1"), ("c1", "b1"), ("e1", None), ("d1", "a1"), ("b1", "a1"), ("a1", None)]
    numbered = {name: at for at, (name, _) in enumerate(things)}
    lines, _ = drawn([(numbered[name], numbered.get(origin or "")) for name, origin in things], ascii_only=True)
    assert lines == ["*", "| *", "| | o", "* |", "| *", "|/", "o"]


def test_a_wide_join_passes_the_lanes_between() -> None:
    things: list[tuple[int, int | None]] = [(0, 3), (1, 4), (2, 3), (3, None), (4, None)]
    assert drawn(things)[0] == ["*", "│ *", "│ │ *", "├─│─╯", "o │", "  o"]
    assert drawn(things, ascii_only=True)[0] == ["*", "| *", "| | *", "|_|/", "o |", "  o"]


def test_a_lane_keeps_its_number_so_that_it_keeps_its_color() -> None:
    rows = list(laid_out([(0, 2), (1, 3), (2, 4), (3, 4), (4, None)]))
    assert [row.lanes for row in rows] == [(0,), (0, 1), (0, 1), (0, 1), (0,)]


@pytest.mark.one_in(1)
def test_a_line_shows_so_many_lanes_and_says_that_there_are_more() -> None:
    things = [(at, 2000 + at) for at in range(2000)] + [(2000 + at, None) for at in range(2000)]
    lines, _ = drawn(things)
    assert max(map(len, lines)) == 24 + 24 + 1
    assert (lines[23], lines[24]) == ("│ " * 23 + "*", "│ " * 23 + "│ …")
    assert drawn(things, ascii_only=True)[0][1000] == "| " * 23 + "| ..."
