"""The kinds of options: which texts and values they take."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.daemon.options.kinds import CommandLine, Duration, Place


@pytest.mark.parametrize("written", ["0", " 0 ", 0, 0.0, Duration(word="off").argument(0.0)])
def test_a_duration_with_a_word_is_zero_too_wherever_it_is_written(written: object) -> None:
    """On a command line it is text, in the configuration a number."""
    assert Duration(word="off").read(written) == 0.0
    with pytest.raises(ValueError, match="duration"):
        Duration().read(written)


def test_a_place_in_a_file_begins_at_the_root_or_at_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon in the background has any folder for its own."""
    monkeypatch.setenv("HOME", "/home/ana")
    assert Place().read("~/key") == Path("/home/ana/key")
    assert Place().read("/etc/key") == Path("/etc/key")
    assert Place().read_text("key") == Path("key")
    for written in ("key", "", 5, None):
        with pytest.raises(ValueError, match="begins with / or ~"):
            Place().read(written)


def test_a_command_is_a_text_that_is_not_empty() -> None:
    assert CommandLine().read("pass show 'a key'") == "pass show 'a key'"
    for written in ("", " ", 5, ["pass"]):
        with pytest.raises(ValueError, match="must be a command"):
            CommandLine().read(written)
