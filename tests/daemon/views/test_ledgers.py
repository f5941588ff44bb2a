"""What two ledgers have in common, and what a session holds by the files: a version, or what the journal has since."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torpor.daemon.api.blocks import Stretch
from torpor.daemon.views.ledgers import Ledger, PlainLedger, Present, common_tokens, present_in_files
from torpor.memvid.errors import SessionNotFound
from torpor.memvid.format.journal import JournalRecord
from torpor.memvid.format.manifest import UNREAD
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import URI, sleep, token_ids, turn


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store", writable=True) as opened:
        yield opened


def plain(*tokens: int) -> Ledger:
    return PlainLedger(len(tokens), (), lambda start, end: array("I", tokens[start:end]))


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [((), (1,), 0), ((1, 2, 3), (1, 2), 2), ((1, 2, 3), (1, 5, 3), 1), (range(9000), (*range(8999), 1), 8999)],
)
def test_ledgers_are_compared_to_the_first_token_that_differs(
    one: tuple[int, ...], other: tuple[int, ...], common: int
) -> None:
    assert common_tokens(plain(*one), plain(*other)) == common == common_tokens(plain(*other), plain(*one))


def test_of_blocks_that_both_have_no_token_is_read(store: Store) -> None:
    sleep(store, 700)
    with store.open_session(URI) as reader:
        one = PlainLedger.of_version(reader)
        read = list[tuple[int, int]]()
        other = replace(
            one, entries=one.entries[:2], read=lambda start, end: (read.append((start, end)), one.read(start, end))[1]
        )
        assert (common_tokens(one, other), read) == (700, [(512, 700)])


def back_at(store: Store, at: int, tail: int) -> JournalRecord:
    """A turn of a session that went back to a token of its version, and read others there."""
    behind, held = turn(store, 0), at // 256 * 256
    tokens = token_ids(held, at - held) + token_ids(at, tail, seed=9)
    return replace(behind, held=held, session={**behind.session, UNREAD: {"tokens": tokens}})


def held(present: Present) -> tuple[int, int, list[Stretch]]:
    return present.row.version, present.common, list(present.stretches())


def test_turns_that_went_on_stand_behind_all_of_a_version(store: Store) -> None:
    with pytest.raises(SessionNotFound):
        present_in_files(store, URI)
    sleep(store, 600, unread=30)
    assert held(present_in_files(store, URI)) == (1, 630, [Stretch(600, 630, "ledger")])
    store.acknowledge([turn(store, 50)])
    assert held(present_in_files(store, URI)) == (
        *(1, 630),
        [Stretch(600, 630, "ledger"), Stretch(630, 650, "journal")],
    )


@pytest.mark.parametrize("at", [0, 9, 256, 300])
def test_turns_of_a_session_that_went_back_stand_behind_what_it_has_in_common(store: Store, at: int) -> None:
    sleep(store, 400)
    store.acknowledge([back_at(store, at, 200)])
    assert held(present_in_files(store, URI)) == (1, at, [Stretch(at, at + 200, "journal")])


def test_turns_behind_an_earlier_version_stand_on_that(store: Store) -> None:
    first = sleep(store, 300)
    early = back_at(store, 256, 40)
    second = sleep(store, 600, before=first)
    store.acknowledge([replace(early, newest=(2, second.bundle_id))])
    assert held(present_in_files(store, URI)) == (1, 256, [Stretch(256, 296, "journal")])


def test_what_is_in_memory_alone_stands_behind_the_journal(store: Store) -> None:
    row = store.require_session(sleep(store, 300).uri)
    assert list(Present(row, 280, 290, 310).stretches()) == [Stretch(280, 290, "journal"), Stretch(290, 310, "memory")]
    assert list(Present(row, 280, 0, 280).stretches()) == []
    assert list(Present(row, 280, 900, 310).stretches()) == [Stretch(280, 310, "journal")]
