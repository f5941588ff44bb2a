"""`cat`: its pages are of one version, though the session goes on between two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torpor.cli.commands.cat import _write, asking
from torpor.cli.view.output import Output
from torpor.daemon.api.contents import Contents, Passage
from torpor.tests.cli.cli_rig import pretend_terminal, unstyled

NAME = "torpor://default/notes"
ONE, OTHER = "ab" * 32, "cd" * 32
FACTS: dict[str, Any] = {"model": "demo", "labels": (), "created_ns": 1, "unread_tokens": 0, "lossy": None}
PAGE = Contents(NAME, 3, ONE, None, **FACTS, token_count=90, changed=False, has_roles=True, start=0, end=9, following=9)


class Daemon:
    """Gives these pages, one after the other."""

    def __init__(self, *pages: Contents) -> None:
        self.pages, self.asked = iter(pages), list[tuple[str, int, int | None]]()

    def contents(self, session: str, *, start: int, end: int | None) -> Contents:
        self.asked.append((session, start, end))
        return next(self.pages)


@pytest.mark.parametrize(("text", "end", "stop"), [("notes", None, 90), ("notes~1:50", 70, 50), ("@abababab", 70, 70)])
def test_all_pages_are_of_the_version_that_the_first_one_is_of(text: str, end: int | None, stop: int) -> None:
    daemon = Daemon(PAGE, PAGE, PAGE)
    turn = asking(daemon.contents, text, end, Output(as_json=False))
    for start in (0, 9, 18):
        turn(start)
    assert daemon.asked == [(text, 0, end), (f"{NAME}@{ONE}", 9, stop), (f"{NAME}@{ONE}", 18, stop)]


@pytest.mark.parametrize("first", [replace(PAGE, changed=True), replace(PAGE, bundle_id=None, version=None)])
@pytest.mark.parametrize(
    ("now", "tells"), [({}, False), ({"token_count": 95}, True), ({"bundle_id": OTHER, "version": 4}, True)]
)
def test_where_no_version_has_all_of_it_a_change_is_told_once(
    first: Contents, now: dict[str, Any], tells: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    later = replace(first, **now)
    daemon = Daemon(first, later, later)
    turn = asking(daemon.contents, "notes", None, Output(as_json=False))
    for start in (0, 9, 18):
        turn(start)
    assert daemon.asked == [("notes", 0, None), ("notes", 9, None), ("notes", 18, None)]
    assert capsys.readouterr().err.count(f"{NAME} has changed: from token 9 on this is what it has now.") == tells


def test_a_pipe_gets_the_text_to_the_byte_and_a_terminal_a_last_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = replace(PAGE, following=None, passages=(Passage(0, 9, "user", 0, 9, "one\ntwo"),))
    for is_terminal in (False, True):
        if is_terminal:
            pretend_terminal(monkeypatch, 80)
        turn = asking(Daemon().contents, "notes", None, Output(as_json=False))
        assert _write(Output(as_json=False), page, turn, roles=False, tokens=False, header=False, begin=0)
        assert unstyled(capsys.readouterr().out) == "one\ntwo" + "\n" * is_terminal
