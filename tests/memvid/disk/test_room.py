"""A disk that is nearly full is told before it is full."""

from __future__ import annotations

from pathlib import Path

from torpor.memvid.disk.budget import Room, room_at, short_sentence

GIB = 1 << 30


def test_a_disk_is_nearly_full_with_less_than_a_gibibyte_or_a_twentieth() -> None:
    assert Room(GIB - 1, 1000 * GIB).is_short()
    assert not Room(GIB, 1000 * GIB).is_short()
    assert not Room(GIB // 4, 4 * GIB).is_short(), "a small disk has little"
    assert Room(GIB // 4 - 1, 5 * GIB).is_short()


def test_what_no_sleep_may_take_is_no_room() -> None:
    assert Room(10 * GIB, 1000 * GIB).is_short(kept_bytes=10 * GIB)


def test_the_room_is_that_of_the_disk_of_a_path(tmp_path: Path) -> None:
    room = room_at(tmp_path)
    assert room is not None
    assert 0 <= room.free_bytes <= room.total_bytes
    assert room_at(tmp_path / "nowhere") is None
    assert "512 MiB of 4.00 GiB are free" in short_sentence("/s", Room(GIB // 2, 4 * GIB))
