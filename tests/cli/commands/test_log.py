"""What a line of `torpor log` says of a version."""

from __future__ import annotations

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
    added_tokens=1200,
    branches=0,
)


def awake(added: int, *, look: bool = False) -> InMemory:
    return InMemory(ENTRY.session, ENTRY.bundle_id, 1200 + added, added, look)


@pytest.mark.parametrize(
    ("states", "says"),
    [
        ((), "began, +1,200 tokens, the last 175 to compute"),
        ((awake(0),), "began, +1,200 tokens"),
        ((awake(5),), "began, +1,200 tokens"),
        ((awake(-500, look=True),), "began, +1,200 tokens, the last 175 to compute"),
    ],
)
def test_nothing_is_to_compute_of_what_is_in_memory(states: tuple[InMemory, ...], says: str) -> None:
    *_, line = _lines_of(HistoryResult((ENTRY,), in_memory=states), bare=True)
    assert line.parts[2] == says
