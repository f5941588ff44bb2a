"""Where the heads of many sessions are read, some requests are under way at once, and no more than that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid.errors import CorruptHead, RemoteUnreachable
from torpor.memvid.remote.heads import HEADS, READ_AT_ONCE, Head, key_of
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.remote.collecting_rig import World
from torpor.tests.memvid.remote.faulty_objects import MemoryObjects

URIS = [SessionUri("work", f"n{number:02}") for number in range(3 * READ_AT_ONCE)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The fixture: a store that has nothing."""
    with Store.open(tmp_path / "here", writable=True) as store:
        yield store


@pytest.fixture
def bucket() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture
def remote(store: Store, bucket: MemoryObjects) -> RemoteSessions:
    """The fixture: a remote with many sessions."""
    remote = World(bucket).machine(store)
    for uri in URIS:
        remote.heads.change(uri, lambda _, uri=uri: Head(uri, 1, 60))  # type: ignore[misc]
    return remote


WAYS: dict[str, Callable[[RemoteSessions], Any]] = {
    "each": lambda remote: list(remote.heads.each(URIS)),
    "listed": lambda remote: remote.listed(),
    "behind_of": lambda remote: remote.behind_of(URIS),
    "collect": lambda remote: remote.collect(dry_run=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_heads_are_read_side_by_side(way: str, remote: RemoteSessions, monkeypatch: pytest.MonkeyPatch) -> None:
    """No head comes before as many are asked for as may be."""
    together, most, lock, get = threading.Barrier(READ_AT_ONCE), [0, 0], threading.Lock(), remote._objects.get

    def waits(key: str, most_bytes: int) -> Any:
        if not key.startswith(HEADS):
            return get(key, most_bytes)
        with lock:
            most[:] = [most[0] + 1, max(most[0] + 1, most[1])]
        together.wait(60)
        with lock:
            most[0] -= 1
        return get(key, most_bytes)

    monkeypatch.setattr(remote._objects, "get", waits)
    WAYS[way](remote)
    assert most == [0, READ_AT_ONCE]


def test_each_head_has_its_place_and_what_cannot_be_read_says_why(
    remote: RemoteSessions, bucket: MemoryObjects
) -> None:
    bucket.set(key_of(URIS[1]), b"no head")
    missing = SessionUri("work", "none")
    found = list(remote.heads.each([*URIS, missing]))
    assert [uri for uri, _ in found] == [*URIS, missing]
    assert isinstance(found[1][1], CorruptHead)
    assert [head.uri for _, head in found if isinstance(head, Head)] == [URIS[0], *URIS[2:]]
    assert found[-1][1] is None


def test_behind_are_those_that_lack_something_and_those_that_cannot_be_read(
    remote: RemoteSessions, store: Store, bucket: MemoryObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the remote does not answer, nothing is told: none of the others would be read."""
    new = SessionUri("work", "new")
    making.sleep(store, 5, uri=new)
    bucket.set(key_of(URIS[1]), b"no head")
    assert remote.behind_of([*URIS, new]) == [URIS[1], new]
    asked = list[str]()

    def silent(key: str, _: int) -> Any:
        asked.append(key)
        raise RemoteUnreachable("No answer.")

    monkeypatch.setattr(remote._objects, "get", silent)
    with pytest.raises(RemoteUnreachable):
        remote.behind_of(URIS)
    assert len(asked) <= READ_AT_ONCE
