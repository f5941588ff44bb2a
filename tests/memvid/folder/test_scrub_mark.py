"""How far the scrub has come is kept between daemons, tells no name, and costs nothing when it is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.memvid.folder.scrub_mark import ScrubMark, left_of, place_of
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.store_making import OTHER_URI, require_awake, sleep

SESSIONS = [SessionUri("default", f"agent-{number}") for number in range(50)]


def test_a_round_has_each_session_once_and_goes_on_behind_the_last_one() -> None:
    order = left(b"")
    assert sorted(order) == sorted(SESSIONS)
    assert left(place_of(order[20])) == order[21:]
    assert left(place_of(order[20])[:2]) == order[20:], "what was cut off may read one again, never skip one"
    assert left(place_of(order[-1])) == []


def left(after: bytes) -> list[SessionUri]:
    """What is left of a round, of which it is said behind each page."""
    pieces = left_of((SESSIONS[start : start + 20] for start in range(0, len(SESSIONS), 20)), after)
    for _ in range(3):
        next(pieces)
    with pytest.raises(StopIteration) as end:
        next(pieces)
    found: list[SessionUri] = end.value.value
    return found


def test_a_mark_is_there_for_the_next_daemon_and_names_nobody(store: Store, store_path: Path) -> None:
    assert store.load_scrub_mark() == ScrubMark()
    store.save_scrub_mark(ScrubMark(place_of(SESSIONS[0]), 5, 7))
    store.save_scrub_mark(ScrubMark(place_of(SESSIONS[1]), 5, 9))
    assert store.load_scrub_mark() == ScrubMark(place_of(SESSIONS[1])[:2], 5, 9)
    written = (store_path / "scrub.json").read_bytes()
    assert place_of(SESSIONS[1]).hex().encode()[:8] not in written
    sleep(store, 20, uri=OTHER_URI)
    require_awake(store, 20, uri=OTHER_URI)


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff" * 100, b"[" * 5000])
def test_a_mark_that_is_damaged_is_as_none(store: Store, store_path: Path, damage: bytes) -> None:
    def is_as_none() -> bool:
        return store.load_scrub_mark() == ScrubMark()

    store.save_scrub_mark(ScrubMark(b"ab", 5, 7))
    path = store_path / "scrub.json"
    data = path.read_bytes()
    assert not is_as_none()
    path.write_bytes(damage)
    assert is_as_none()
    path.write_bytes(data.replace(b":7", b":8"))
    assert is_as_none()
    path.unlink()
    path.symlink_to("/dev/zero")
    assert is_as_none()
