"""What a version tells of the repair that saved its beginning."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torpor.memvid.format.blocks import BlockEntry
from torpor.memvid.format.identity import Identity
from torpor.memvid.format.manifest import Manifest, require_session_map
from torpor.memvid.format.salvaged import (
    SALVAGED,
    SALVAGED_FROM,
    Salvaged,
    keeps_unread,
    salvaged_from,
    salvaged_of,
    session_map_of_salvaged,
)
from torpor.memvid.limits import MAX_SESSION_MAP_BYTES
from torpor.memvid.uri import SessionUri

LOST = Manifest(
    SessionUri("default", "s"),
    1,
    None,
    Identity((("weights", "w"),)),
    2113,
    1,
    (BlockEntry(b"b" * 32, None, "span", 0, 2113, 8),),
    {"model": "demo"},
    {},
)
FROM = {SALVAGED_FROM: "ab" * 32}


def saved(lost: Manifest, tokens: int) -> Manifest:
    return dataclasses.replace(
        lost, token_count=tokens, session=session_map_of_salvaged(lost, tokens), environment=dict(FROM)
    )


def test_what_was_saved_tells_how_much_of_how_many() -> None:
    manifest = saved(LOST, 1024)
    assert salvaged_of(manifest) == Salvaged(1024, 2113)
    assert salvaged_from(manifest) == bytes.fromhex("ab" * 32)
    assert manifest.session["model"] == "demo"
    assert (salvaged_of(LOST), salvaged_from(LOST)) == (None, None)


def test_what_was_saved_of_what_was_saved_counts_from_the_first() -> None:
    assert salvaged_of(saved(saved(LOST, 1024), 512)) == Salvaged(512, 2113)


def test_what_was_saved_of_a_later_version_counts_from_that_one() -> None:
    later = dataclasses.replace(saved(LOST, 1024), token_count=3000, environment={})
    assert salvaged_of(later) == Salvaged(1024, 2113)
    assert salvaged_of(saved(later, 2048)) == Salvaged(2048, 3000)


def test_what_an_earlier_version_of_the_program_saved_tells_the_tokens_that_are_left() -> None:
    assert salvaged_of(dataclasses.replace(LOST, token_count=1024, environment=FROM)) == Salvaged(1024, None)


def test_a_session_map_without_room_stays_as_it_was() -> None:
    full = {"model": "m" * (MAX_SESSION_MAP_BYTES - 20)}
    require_session_map(full)
    manifest = saved(dataclasses.replace(LOST, session=full), 1024)
    assert manifest.session == full
    assert salvaged_of(manifest) == Salvaged(1024, None)


UNREAD_END = {"start": 2113, "tokens": bytes(4 * 7), "turn_open": True}


def test_a_ledger_before_which_nothing_is_lost_is_saved_with_what_it_stands_behind() -> None:
    manifest = saved(dataclasses.replace(LOST, session={"model": "demo", "unread": UNREAD_END}), 2113)
    assert manifest.session["unread"] == UNREAD_END
    assert salvaged_of(manifest) == Salvaged(2113, 2113)


@pytest.mark.parametrize("end", [UNREAD_END, {**UNREAD_END, "start": 2000}, b"strange"])
def test_a_ledger_before_which_something_is_lost_goes_with_that(end: Any) -> None:
    lost = dataclasses.replace(LOST, session={"unread": end})
    first = 1024 if end == UNREAD_END else 2113
    assert not keeps_unread(lost, first)
    manifest = saved(lost, first)
    assert "unread" not in manifest.session
    assert salvaged_of(manifest) == Salvaged(first, 2113 if end == b"strange" else 2120)


@pytest.mark.parametrize(
    "told",
    [7, [], {}, {"of": 3}, {"tokens": "9"}, {"tokens": True}, {"tokens": 0}, {"tokens": 9, "of": 8},
     {"tokens": 9, "of": 10, "more": 1}, {"tokens": 1 << 62}],
)  # fmt: skip
def test_what_others_wrote_in_its_place_tells_nothing(told: Any) -> None:
    assert salvaged_of(dataclasses.replace(LOST, session={SALVAGED: told})) is None


def test_where_a_session_was_cut_back_further_nothing_is_told() -> None:
    told = Salvaged(1024, 2113)
    assert (told.within(1024), told.within(1023)) == (told, None)
