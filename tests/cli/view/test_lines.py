"""Lines of a log are alike: what one has no room for, none has, and a line says so."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from torpor.cli.view.lines import Lines


def drawn(lines: Lines, width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, color_system=None).print(lines)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("aligned", [True, False])
def test_a_part_that_one_line_has_no_room_for_is_left_out_of_all(aligned: bool) -> None:
    lines = Lines(1, ("name", "date", "size"), aligned)
    lines.add((("●", 0),), ("a", "monday", "7 MiB"))
    lines.add((("│", 0),), ())
    lines.add((("●", 0),), ("a-longer-name", "tuesday", "1 KiB"))
    whole = [each.split() for each in drawn(lines, 40)]
    assert whole == [["●", "a", "monday", "7", "MiB"], ["│"], ["●", "a-longer-name", "tuesday", "1", "KiB"]]
    cut = drawn(lines, 28)
    assert [each.split() for each in cut[:3]] == [["●", "a", "monday"], ["│"], ["●", "a-longer-name", "tuesday"]]
    assert " ".join(cut[3:]) == "not shown, for want of room: size (--json has all)"
    assert drawn(lines, 12)[2] == "●  a-longer…"


def test_nothing_is_no_line() -> None:
    assert drawn(Lines(1, ("name",)), 20) == []
