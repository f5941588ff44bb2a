"""The room on a disk: how much is free for this user, and whether that is little."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from ..units import format_bytes
from .paths import io_error

SHORT_BYTES: Final = 1 << 30
SHORT_SHARE: Final = 20
"""A disk is nearly full when it has less free than this, or than one part in so many."""


@dataclass(frozen=True, slots=True)
class Room:
    """The room on a disk for this user, in bytes."""

    free_bytes: int
    total_bytes: int

    def is_short(self, kept_bytes: int = 0) -> bool:
        """Whether the disk is nearly full. kept_bytes: of its room that no sleep may take."""
        return self.free_bytes - kept_bytes < min(SHORT_BYTES, self.total_bytes // SHORT_SHARE)


def free_bytes_of(folder_fd: int, path: str) -> int:
    """Free bytes for us on the disk of an open folder. Raises StoreIoError."""
    try:
        return _room_of(folder_fd).free_bytes
    except OSError as error:
        raise io_error(error, "ask for the free space of", path) from error


def room_at(path: str | os.PathLike[str]) -> Room | None:
    """The room on the disk of a file or folder; None if the system does not tell."""
    try:
        return _room_of(path)
    except OSError:
        return None


def short_sentence(path: str | os.PathLike[str], room: Room) -> str:
    """What a nearly full disk means, and what to do."""
    return (
        f"The disk of {os.fspath(path)} is nearly full: {format_bytes(room.free_bytes)} of"
        f" {format_bytes(room.total_bytes)} are free. Without room no session can sleep. Free some (`torpor prune`,"
        " `torpor rm`), or move the store."
    )


def _room_of(place: int | str | os.PathLike[str]) -> Room:
    status = os.statvfs(place)
    return Room(status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize)
