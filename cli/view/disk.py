"""The disk of a store: its budgets, and a remark where it is nearly full."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...memvid.disk.room import room_at, short_sentence
from ...memvid.units import format_bytes, format_plural
from .output import Output, plain


def budgets_in(disk: Mapping[str, Any]) -> list[str]:
    """The budgets of a store, a phrase each. disk: as of a daemon's status."""
    phrases = (
        ("the store may hold", "store_budget_bytes"),
        ("its manifests and packs hold", "held_bytes"),
        ("a day may write", "daily_write_budget_bytes"),
        ("of the disk stay free", "keep_free_bytes"),
    )
    return [f"{what} {format_bytes(disk[field])}" for what, field in phrases if disk.get(field)]


def use_of_remote(remote: Mapping[str, Any]) -> str:
    """What was used of a remote today. remote: as of a daemon's status."""
    used = f"{format_bytes(remote['bytes_sent'])}, {format_plural(remote['requests'], 'request')}, about "
    used += f"${remote['dollars']:.2f} today"
    budget = remote["daily_budget"]
    waiting = f"; {format_plural(remote['waiting'], 'session')} to be sent tomorrow" if remote["waiting"] else ""
    failed = f"; its last request failed: {remote['problem']}" if remote["problem"] else ""
    sealed = ", sealed" if remote["sealed"] else ""
    return f"{remote['url']}{sealed}: {used}{f' of {budget}' if budget else ''}{waiting}{failed}"


def remark_on_room(output: Output, path: str | os.PathLike[str]) -> None:
    """Say that the disk of a store is nearly full, before it is."""
    room = room_at(path)
    if room is not None and room.is_short():
        output.remark(f"[yellow]{plain(short_sentence(path, room))}[/]")
