"""Tries whether an object store holds to its conditions.

Heads are changed on conditions alone: `create` of what is there, and `replace` of what has changed, must be refused.
Some object stores take a condition and write all the same, or hold to it only while nobody else writes. There two
machines would own one session. So a remote is tried before it is used, with small objects under names of its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Final

from ..errors import RemoteError, RemoteUnclear, RemoteUnfit
from .objects import Objects

PROBES: Final = "probes"
_AT_ONCE: Final = 4
_MOST_BYTES: Final = 64


def probe(objects: Objects) -> None:
    """Raises RemoteUnfit; and as `Objects`, where nothing can be said of it now. Leaves nothing behind, unless it can
    no longer reach the object store."""
    name = os.urandom(16).hex()
    keys = [f"{PROBES}/{name}-{each}" for each in ("there", "missing", "at-once")]
    try:
        _Probe(objects, *keys).run()
    finally:
        for key in keys:
            with contextlib.suppress(RemoteError):
                objects.remove(key)


class _Probe:
    def __init__(self, objects: Objects, there: str, missing: str, at_once: str) -> None:
        self._objects = objects
        self._there = there
        self._missing = missing
        self._at_once = at_once

    def run(self) -> None:
        first = self._landed(self._objects.create(self._there, b"first"), "create")
        if self._objects.create(self._there, b"again") is not None or self._content(self._there) != b"first":
            raise self._unfit("create_twice", "makes an object anew where there is one")
        self._landed(self._objects.replace(self._there, b"second", first), "replace")
        if self._objects.replace(self._there, b"third", first) is not None or self._content(self._there) != b"second":
            raise self._unfit("replace_stale", "replaces an object that was changed since it was read")
        if (
            self._objects.replace(self._missing, b"fourth", first) is not None
            or self._content(self._missing) is not None
        ):
            raise self._unfit("replace_missing", "replaces an object that is not there")
        self._one_lands("create_at_once", lambda data: self._objects.create(self._at_once, data))
        found = self._objects.get(self._at_once, _MOST_BYTES)
        if found is None:
            raise self._unfit("create_at_once", "has lost an object that it took")
        self._one_lands("replace_at_once", lambda data: self._objects.replace(self._at_once, data, found.tag))

    def _one_lands(self, check: str, write: Callable[[bytes], str | None]) -> None:
        """Of several writes of one object at once, one lands and is there."""
        landed: list[bytes] = []
        failed: list[BaseException] = []
        begin = threading.Barrier(_AT_ONCE)

        def try_it(data: bytes) -> None:
            begin.wait()
            try:
                if write(data) is not None:
                    landed.append(data)
            except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
                failed.append(error)

        threads = [
            threading.Thread(target=try_it, args=(f"{check} {number}".encode(),), name="torpor-probe")
            for number in range(_AT_ONCE)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        there = self._content(self._at_once)
        if landed and landed != [there]:
            raise self._unfit(check, "lets more than one change through, of those that are made at once")
        if failed:
            raise failed[0]
        if there is None or not there.startswith(check.encode()):  # each was refused for the others
            raise self._unclear(check)

    def _content(self, key: str) -> bytes | None:
        found = self._objects.get(key, _MOST_BYTES)
        return None if found is None else found.data

    def _landed(self, tag: str | None, action: str) -> str:
        """The tag of a write that nothing stood against."""
        if tag is None:
            raise self._unclear(action)
        return tag

    def _unfit(self, check: str, what: str) -> RemoteUnfit:
        return RemoteUnfit(
            f"{self._objects.url} {what} (the check {check}). Two machines could own one session there, so Torpor does "
            "not use it. Choose another object store, or a newer version of this one.",
            url=self._objects.url,
            check=check,
        )

    def _unclear(self, check: str) -> RemoteUnclear:
        return RemoteUnclear(
            f"{self._objects.url} gave no clear answer when it was tried (the check {check}). Try again.",
            url=self._objects.url,
            check=check,
        )
