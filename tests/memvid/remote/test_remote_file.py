"""remote.json: one key, or none, for all of a remote, from its first object on; others are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.memvid.errors import CorruptObject, RemoteKeyWrong, RemoteUnclear, RemoteUnreachable, UnsupportedFormat
from torpor.memvid.remote import remote_file
from torpor.memvid.remote.remote_file import REMOTE_FILE, RemoteFile
from torpor.memvid.remote.sealed_objects import KEY_BYTES, SealedObjects
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.store import Store
from torpor.tests.memvid.remote.faulty_objects import FaultyObjects, MemoryObjects
from torpor.tests.memvid.store_making import URI, sleep

KEY, OTHER_KEY = bytes(range(KEY_BYTES)), bytes(KEY_BYTES)
USES: tuple[bytes | None, ...] = (None, KEY, OTHER_KEY)


def opened(bucket: MemoryObjects | FaultyObjects, key: bytes | None) -> RemoteFile:
    return RemoteFile(bucket, None if key is None else SealedObjects(bucket, key))


@pytest.mark.parametrize("made_with", USES)
@pytest.mark.parametrize("used_with", USES)
def test_a_remote_is_used_with_the_key_of_its_first_user(made_with: bytes | None, used_with: bytes | None) -> None:
    bucket = MemoryObjects()
    assert not opened(bucket, made_with).is_there()
    opened(bucket, made_with).make()
    if made_with == used_with:
        assert opened(bucket, used_with).is_there()
        opened(bucket, used_with).make()
    else:
        says = "is sealed, and no key" if used_with is None else "not sealed" if made_with is None else "another key"
        for use in (opened(bucket, used_with).is_there, opened(bucket, used_with).make):
            with pytest.raises(RemoteKeyWrong, match=f"memory:// .*{says}.*--remote-key"):
                use()
    assert len(bucket.written[REMOTE_FILE]) == 1
    assert KEY.hex().encode() not in (bucket.content(REMOTE_FILE) or b"")


@pytest.mark.parametrize("fault", ["lost", "landed_twice", "unclear", "conflict"])
def test_an_answer_that_was_lost_is_read_back(fault: str) -> None:
    asked = FaultyObjects(MemoryObjects(), {0: fault})  # type: ignore[dict-item]
    if fault in ("unclear", "conflict"):
        with pytest.raises(RemoteUnclear):
            opened(asked, KEY).make()
    else:
        opened(asked, KEY).make()
        assert opened(asked, KEY).is_there()


def test_of_two_that_come_first_one_is() -> None:
    bucket = MemoryObjects()
    ours, theirs = opened(bucket, KEY), opened(bucket, OTHER_KEY)
    assert not ours.is_there()
    assert not theirs.is_there()
    theirs.make()
    with pytest.raises(RemoteKeyWrong, match="another key"):
        ours.make()


def test_each_damage_is_told_and_a_later_version_too() -> None:
    bucket = MemoryObjects()
    opened(bucket, KEY).make()
    data = bucket.content(REMOTE_FILE) or b""
    for at in range(len(data)):
        for wrong in (data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], data[:at]):
            bucket.set(REMOTE_FILE, wrong)
            with pytest.raises(CorruptObject, match=r"remote\.json is damaged"):
                opened(bucket, KEY).is_there()
    later = remote_file.SealedFormat("torpor.remote", 2, 4096, 16)
    bucket.set(REMOTE_FILE, later.encode({"anything": 1}))
    with pytest.raises(UnsupportedFormat):
        opened(bucket, KEY).is_there()


@pytest.mark.parametrize("made_with", USES)
def test_a_remote_is_refused_by_name_before_anything_is_written(tmp_path: Path, made_with: bytes | None) -> None:
    """Also if it did not answer as it was opened; and without its remote.json, if it is not sealed by this key."""
    folder = tmp_path / "remote"
    folder.mkdir()
    with Store.open(tmp_path / "store", writable=True) as store, Store.open(tmp_path / "other", writable=True) as other:
        sleep(store, 5)
        sessions = store.open_remote(folder.as_uri(), made_with)
        sessions.push(sessions.take(URI))
        sessions.close()
        for is_there in (True, False):
            if not is_there:
                (folder / REMOTE_FILE).unlink()
            before = sorted(each.stat().st_mtime_ns for each in folder.rglob("*"))
            for key in USES:
                if key != made_with:
                    with pytest.raises(RemoteKeyWrong):
                        other.open_remote(folder.as_uri(), key)
            assert sorted(each.stat().st_mtime_ns for each in folder.rglob("*")) == before
        other.open_remote(folder.as_uri(), made_with).close()
        assert (folder / REMOTE_FILE).exists()


def test_a_remote_that_did_not_answer_is_refused_when_it_does(tmp_path: Path) -> None:
    bucket = MemoryObjects()
    opened(bucket, OTHER_KEY).make()
    asked = FaultyObjects(bucket, {0: "unreachable", 1: "unreachable"})
    with Store.open(tmp_path / "store", writable=True) as store:
        sessions = RemoteSessions.open(store._core, asked, KEY)
        with pytest.raises(RemoteUnreachable):
            sessions.listed()
        for use in (sessions.listed, lambda: sessions.take(URI), lambda: sessions.heads):
            with pytest.raises(RemoteKeyWrong, match="another key"):
                use()
    assert {each.verb for each in asked.asked} == {"get"}
