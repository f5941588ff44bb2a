"""What a line of `torpor log` says of a version."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torpor.cli.commands.log import _lines_of
from torpor.daemon.api.history import HistoryEntry, HistoryResult, InMemory

ENTRY = HistoryEntry(
    session="torpor://default/notes",
    version=2,
    bundle_id="ab" * 32,
    parent=None,
    identity="cd" * 32,
    token_count=1200,
    unread_tokens=175,
    bundle_bytes=1,
    logical_bytes=1,
    created_ns=1,
    model="demo",
    labels=(),
    lossy=None,
    unnamed=False,
    used_ns=0,
    tags=(),
    pinned=False,
    stripped=False,
    way="began",
    origin=None,
    parent_version=None,
    back_at=None,
    added_tokens=1200,
    branches=0,
)


def awake(added: int, back_at: int | None = None, *, look: bool = False) -> InMemory:
    tokens = added + (1200 if back_at is None else back_at)
    return InMemory(ENTRY.session, ENTRY.bundle_id, 2, tokens, added, back_at, look)


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ((), "began, +1,200 tokens, the last 175 to compute"),
        ((awake(0),), "began, +1,200 tokens"),
        ((awake(5),), "began, +1,200 tokens"),
        ((awake(0, 700, look=True),), "began, +1,200 tokens, the last 175 to compute"),
        ((awake(500, 700),), "began, +1,200 tokens, the last 175 to compute"),
    ],
)
def test_nothing_is_to_compute_of_what_is_in_memory(states: tuple[InMemory, ...], says: str) -> None:
    *_, line = _lines_of(HistoryResult((ENTRY,), in_memory=states), bare=True)
    assert line.parts[2] == says


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (awake(5), "+5 tokens"),
        (awake(32, 12), "back: the first 12 tokens of @2, +32 tokens"),
        (awake(0, 700), "back: the first 700 tokens of @2"),
        (awake(0, 700, look=True), "a look back: the first 700 tokens of @2"),
        (replace(awake(9), bundle_id=None, version=None), "no version yet, +9 tokens"),
    ],
)
def test_what_is_in_memory_is_told_in_the_words_of_versions(state: InMemory, says: str) -> None:
    line, _ = _lines_of(HistoryResult((ENTRY,), in_memory=(state,)), bare=True)
    assert line.parts[2] == says


@pytest.mark.parametrize(
    ("token", "says"),
    [(12, "back: the first 12 tokens of @1, +32 tokens"), (None, "back to @1, +32 tokens")],
    ids=["read", "unread"],
)
def test_a_version_that_went_back_says_to_where(token: int | None, says: str) -> None:
    entry = replace(ENTRY, way="went_back", parent_version=1, back_at=token, added_tokens=32, unread_tokens=0)
    (line,) = _lines_of(HistoryResult((entry,)), bare=True)
    assert line.parts[2] == says


def test_a_session_of_another_machine_is_marked_at_its_newest_version_alone() -> None:
    entries = (ENTRY, replace(ENTRY, version=1, bundle_id="ef" * 32))
    marked = [line.parts[1] for line in _lines_of(HistoryResult(entries, machines={ENTRY.session: "desk"}), bare=True)]
    assert marked == ["[bold]notes@2[/] [green](at desk)[/]", "[bold]notes@1[/]"]
