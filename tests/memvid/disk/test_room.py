"""The free space of a disk; one that is nearly full is told before it is full."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torpor.memvid.disk.paths import closing_fd
from torpor.memvid.disk.room import Room, free_bytes_of, room_at, short_sentence
from torpor.memvid.errors import StoreIoError

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


def test_the_free_space_is_what_the_disk_has_for_us(tmp_path: Path) -> None:
    with closing_fd(os.open(tmp_path, os.O_RDONLY)) as fd:
        free, status = free_bytes_of(fd, str(tmp_path)), os.statvfs(tmp_path)
    assert 0 <= free <= status.f_blocks * status.f_frsize
    assert abs(free - status.f_bavail * status.f_frsize) < 1 << 30  # others write while we look
    with pytest.raises(StoreIoError) as refusal:
        free_bytes_of(-1, "store")
    assert refusal.value.path == "store"


def test_room_for_the_superuser_alone_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk:
        f_bavail, f_bfree, f_blocks, f_frsize, f_bsize = 10, 20, 30, 512, 4096

    monkeypatch.setattr(os, "statvfs", lambda fd: Disk)
    assert free_bytes_of(0, "store") == 5120
