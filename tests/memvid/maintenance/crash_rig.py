"""Cuts an operation off at any of its changes of files, and looks at what is left."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.maintenance import repack as repacking
from torpor.memvid.store import Store


def all_blocks(store: Store) -> set[bytes]:
    found: set[bytes] = set()
    for name in store._core.folder.list_packs():
        with repacking.open_frames(store._core.folder, name) as file:
            found |= {*file.frames, *file.heads}
    return found


class Crash(BaseException):
    """The process is gone."""


def cut_off(patched: pytest.MonkeyPatch, name: str, at: int, *, after: bool) -> Callable[[], bool]:
    real, calls, crashed = getattr(StoreFolder, name), itertools.count(1), list[bool]()

    def call(*args: Any, **kwargs: Any) -> Any:
        is_now = next(calls) == at
        if crashed or (is_now and not after):
            crashed.append(True)
            raise Crash
        found = real(*args, **kwargs)
        if is_now:
            crashed.append(True)
            raise Crash
        return found

    patched.setattr(StoreFolder, name, call)
    return lambda: bool(crashed)
