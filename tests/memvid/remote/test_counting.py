"""Each use of an object store is counted as its prices know it, and what got no answer is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torpor.memvid.disk.daily_budget import Used
from torpor.memvid.errors import RemoteUnreachable
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.used_days import UsedDays
from torpor.memvid.limits import MIB
from torpor.memvid.remote.counting import CountedObjects
from torpor.tests.memvid.remote.faulty_objects import MemoryObjects


class Away(MemoryObjects):
    """No answer to anything; of an upload one part is taken."""

    def put(self, key: str, parts: Any, size_bytes: int) -> None:
        next(iter(parts))
        raise RemoteUnreachable("No answer.")

    def get(self, key: str, most_bytes: int) -> Any:
        raise RemoteUnreachable("No answer.")


@pytest.fixture
def used(folder: StoreFolder) -> UsedDays:
    return UsedDays(folder)


def listed(objects: CountedObjects) -> int:
    return sum(1 for _ in objects.entries(""))


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda objects: objects.get("a", 10), Used(reads=1)),
        (lambda objects: objects.get("none", 10), Used(reads=1)),
        (lambda objects: objects.size("a"), Used(reads=1)),
        (lambda objects: list(objects.get_ranges([("a", 0, 1), ("a", 2, 1)])), Used(reads=2)),
        (lambda objects: next(objects.get_ranges([("a", 0, 20 * MIB)])), Used(reads=3)),
        (lambda objects: objects.create("b", b"12345"), Used(5, writes=1)),
        (lambda objects: objects.create("a", b"12345"), Used(5, writes=1)),
        (lambda objects: objects.replace("a", b"12345", "no tag"), Used(5, writes=1)),
        (lambda objects: objects.put("b", [b"12", b"345"], 5), Used(5, writes=1)),
        (lambda objects: objects.put("b", [bytes(MIB)] * 11, 11 * MIB), Used(11 * MIB, writes=5)),
        (lambda objects: objects.remove("a"), Used(removals=1)),
        (listed, Used(writes=1)),
    ],
)
def test_each_use_is_counted(ask: Callable[[CountedObjects], object], expected: Used, used: UsedDays) -> None:
    bucket = MemoryObjects()
    bucket.create("a", b"123")
    ask(CountedObjects(bucket, used))
    assert used.today() == expected


def test_a_listing_is_a_request_for_each_thousand(used: UsedDays) -> None:
    bucket = MemoryObjects()
    objects = CountedObjects(bucket, used)
    assert listed(objects) == 0
    assert used.today() == Used(writes=1)
    for number in range(1001):
        bucket.create(f"a{number}", b"")
    assert listed(objects) == 1001
    assert used.today() == Used(writes=3)


def test_what_gets_no_answer_is_not_counted_but_for_bytes_of_an_upload(used: UsedDays) -> None:
    objects = CountedObjects(Away(), used)

    def parts() -> Iterator[bytes]:
        yield b"123"
        yield b"45"

    with pytest.raises(RemoteUnreachable):
        objects.get("a", 10)
    assert used.today() == Used()
    with pytest.raises(RemoteUnreachable):
        objects.put("a", parts(), 5)
    assert used.today() == Used(3, writes=1)
