"""What is typed while an answer comes does not stand in it, and is there at the next prompt."""

from __future__ import annotations

import os
import select
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.cli.reach.dialogue import unseen_typing


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The far end of a terminal that is this process's standard input."""
    far, near = os.openpty()
    with os.fdopen(near) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        yield far
    os.close(far)


def echoes() -> bool:
    return bool(termios.tcgetattr(sys.stdin)[3] & termios.ECHO)


def test_what_is_typed_meanwhile_is_not_shown_and_is_read_next(keyboard: int) -> None:
    assert echoes()
    with unseen_typing():
        os.write(keyboard, b"typed ahead\n")
        assert select.select([sys.stdin], [], [], 20)[0], "it has come to this end"
        assert not echoes()
    assert echoes()
    assert sys.stdin.readline() == "typed ahead\n"
    os.set_blocking(keyboard, False)
    with pytest.raises(BlockingIOError):
        os.read(keyboard, 64)  # nothing of it was shown


def test_the_terminal_is_as_it_was_after_an_interrupt(keyboard: int) -> None:
    with pytest.raises(KeyboardInterrupt), unseen_typing():
        raise KeyboardInterrupt
    assert echoes()


def test_where_there_is_no_terminal_nothing_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "questions").write_text("one\n")
    with (tmp_path / "questions").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        with unseen_typing():
            assert file.readline() == "one\n"
