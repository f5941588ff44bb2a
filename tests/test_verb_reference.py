"""The reference of the verbs is what the table says."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.daemon.api.verbs import VERBS
from verb_reference import reference

WRITTEN = Path(__file__).parents[1].joinpath("docs", "reference", "verbs.md").read_text()


def test_the_reference_that_is_checked_in_is_that_of_the_table() -> None:
    assert reference() in WRITTEN, "make reference writes it anew"


def test_each_verb_has_its_chapter() -> None:
    assert not [name for name in VERBS if f"\n## `{name}`\n" not in WRITTEN]


@pytest.mark.one_in(1)
def test_kinds_and_bounds_are_told_in_words() -> None:
    told = WRITTEN.split("## `append`")[1].split("## `")[0]
    assert "| `text` | text (1 to 16,777,216 characters) or null | `None` |" in told
    assert "| `tokens` | list of whole number (0 to 4,294,967,295) (1 to 1,048,576 items) or null | `None` |" in told
    assert "on_event" in told.split("| field")[0]
    assert "on_event" not in told.split("| field")[1], "it is never sent"
    assert "Can be cancelled. Nothing of it was read." in told
