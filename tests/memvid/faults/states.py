"""Which states of a store have been checked: one that is the same in all that the store reads is not checked again.

A state is what the store has once it was opened: the bytes of all its files but the index, and all that the index says.
Most faults leave one of few states, and the check of one costs several times what the opening does.

One in `_ANEW` of those that were seen is checked all the same.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final, Generic, TypeVar

from torpor.memvid.store import Store

Found = TypeVar("Found")

_ANEW: Final = 16
_NOT_READ: Final = ("lock", "index.sqlite")


def state_of(store: Store) -> bytes:
    """A digest of an open store."""
    hasher = blake2b(digest_size=16)
    for name, content in _files(Path(store.path)):
        hasher.update(b"%s\0%d\0%s" % (name.encode(), len(content), content))
    blocks = "SELECT name, block, stripped FROM packs JOIN blocks ON pack = number ORDER BY name, block"
    hasher.update(repr((store.index.all_rows(), store.index.select(blocks, ()))).encode())
    return hasher.digest()


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Each file of a store but the index and the lock, and each folder: its name, and what is in it."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith(_NOT_READ):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield f"{entry.name}/", b""
            yield from ((f"{entry.name}/{name}", content) for name, content in _files(Path(entry.path)))
        else:
            yield entry.name, Path(entry.path).read_bytes()


class Seen(Generic[Found]):
    """What was found in states, each with what it was checked for."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Found] = {}
        self._asked = 0

    def find(self, key: Hashable) -> Found | None:
        """What was found there; None where it is to be checked."""
        if key not in self._found:
            return None
        self._asked += 1
        return self._found[key] if self._asked % _ANEW else None

    def add(self, key: Hashable, found: Found) -> None:
        """Note what a check has found. Where it was checked before, it must be the same."""
        assert self._found.setdefault(key, found) == found, "one state, and two findings: a digest leaves something out"
