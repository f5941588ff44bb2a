"""Counts what is asked of an object store: requests as its prices know them, and the bytes that are sent.

It stands right at the client, so what it counts is what is sent. A request without an answer is not counted, as none is
billed, but for the bytes of an upload that was cut off. What the client sends again by itself is not seen here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from ..disk.daily_budget import Used
from ..errors import RemoteUnreachable
from ..folder.used_days import UsedDays
from .cloud_objects import requests_to_get, requests_to_put
from .objects import Entry, Object, Objects, OverObjects, Part, Span

_LISTED: Final = 1000
"""Objects that one request lists at most."""

Result = TypeVar("Result")


class CountedObjects(OverObjects):
    """Objects, whose uses are counted. A shared folder is counted as if it were an object store."""

    def __init__(self, objects: Objects, used: UsedDays) -> None:
        super().__init__(objects)
        self._used = used

    def get(self, key: str, most_bytes: int) -> Object | None:
        return self._counted(Used(reads=1), lambda: self._objects.get(key, most_bytes))

    def size(self, key: str) -> int | None:
        return self._counted(Used(reads=1), lambda: self._objects.size(key))

    def get_ranges(self, spans: Sequence[Span]) -> Iterator[Part | None]:
        """All of its requests count once the first part is there, also of who reads no further."""
        parts = self._objects.get_ranges(spans)
        yield from self._counted(Used(reads=requests_to_get(spans)), lambda: list(itertools.islice(parts, 1)))
        yield from parts

    def create(self, key: str, data: bytes) -> str | None:
        return self._counted(Used(len(data), writes=1), lambda: self._objects.create(key, data))

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        return self._counted(Used(len(data), writes=1), lambda: self._objects.replace(key, data, tag))

    def put(self, key: str, parts: Iterable[bytes], size_bytes: int) -> None:
        sent = 0

        def told() -> Iterator[bytes]:
            nonlocal sent
            for part in parts:
                sent += len(part)
                yield part

        try:
            self._objects.put(key, told(), size_bytes)
        finally:
            self._used.add(Used(sent, writes=requests_to_put(sent)))

    def remove(self, key: str) -> None:
        self._counted(Used(removals=1), lambda: self._objects.remove(key))

    def entries(self, prefix: str) -> Iterator[Entry]:
        listed = 0
        for entry in self._objects.entries(prefix):
            if listed % _LISTED == 0:
                self._used.add(Used(writes=1))
            listed += 1
            yield entry
        if not listed:
            self._used.add(Used(writes=1))

    def close(self) -> None:
        self._used.save()
        super().close()

    def _counted(self, used: Used, ask: Callable[[], Result]) -> Result:
        is_answered = True
        try:
            return ask()
        except RemoteUnreachable:
            is_answered = False
            raise
        finally:
            if is_answered:
                self._used.add(used)
