"""A whole sealed remote of a small session, in which each object is damaged, cut and swapped in turn."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
from torpor.memvid.errors import CorruptObject, HeadReplayed
from torpor.memvid.recovery.replaying import all_tokens
from torpor.memvid.remote.heads import HEADS, key_of
from torpor.memvid.remote.remote_file import REMOTE_FILE
from torpor.memvid.remote.sealed_objects import KEY_BYTES, SEGMENT_BYTES, SealedObjects
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.remote.collecting_rig import GRACE_S, World, collect, drop, push
from torpor.tests.memvid.remote.faulty_objects import MemoryObjects
from torpor.tests.memvid.store_making import FORK_URI, OTHER_URI, URI

KEY = bytes(range(KEY_BYTES))
KINDS = ("heads", "packs", "places", "tails", "versions")
TOKENS, TURN = 3, 2


@dataclass
class Remote:
    """What lies in the bucket of a session of two versions, one pack each, and a turn behind them: by name. older: what
    the newest version does not need."""

    bucket: MemoryObjects
    contents: dict[str, bytes]
    older: set[str]
    sealed: SealedObjects

    def set(self, changed: dict[str, bytes | None]) -> None:
        for name, data in (self.contents | changed).items():
            if self.bucket.content(name) != data:
                self.bucket.set(name, data)

    def names(self, kind: str) -> list[str]:
        return [name for name in self.contents if name.startswith(f"{kind}/")]


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    bucket = MemoryObjects()
    with Store.open(tmp_path / "here", writable=True) as store:
        sessions = RemoteSessions.open(store._core, bucket, KEY)
        lease = sessions.take(URI)
        making.sleep(store, 2)
        sessions.push(lease)
        older = {entry.key for kind in ("packs/", "places/", "versions/") for entry in bucket.entries(kind)}
        making.sleep(store, TOKENS)
        sessions.push(lease)
        assert sessions.send_turns(lease, making.turn(store, TURN))
        lease.release(asleep=True)
    contents = {name: bucket.content(name) or b"" for name in sorted(bucket.keys())}
    assert {name.partition("/")[0] for name in contents} == {*KINDS, REMOTE_FILE}
    return Remote(bucket, contents, older, SealedObjects(bucket, KEY))


def pull(store: Store, remote: Remote) -> None:
    """As a wake does, with nothing remembered."""
    sessions = RemoteSessions(store._core, remote.bucket, "there", lambda: 0.0, KEY)
    sessions._proven = sessions._objects.place()
    assert [each.head.uri for each in sessions.listed()[0]] in ([], [URI])
    head = sessions.heads.head(URI, noting=False)
    assert head is not None
    sessions.pull(head)
    with store.open_session(URI) as reader:
        assert all_tokens(reader) == making.token_ids(0, TOKENS + TURN)


@pytest.mark.parametrize("most", [100, pytest.param(10**6, marks=pytest.mark.heavy)], ids=["some", "all"])
def test_no_bit_of_any_object_may_be_another(remote: Remote, most: int) -> None:
    """A hundred bits of each, or all; each bit of contents of all forms is tried in `test_sealed_objects.py`."""
    for name, good in remote.contents.items():
        key = remote.sealed.key_of(name)
        if key is None:
            assert name == REMOTE_FILE
            continue
        for bit in range(8 * len(good))[:: 1 + 8 * len(good) // most]:
            at = bit // 8
            remote.bucket.written[name] = [good[:at] + bytes([good[at] ^ 1 << bit % 8]) + good[at + 1 :]]
            with pytest.raises(CorruptObject):
                remote.sealed.get(key, SEGMENT_BYTES)


def test_what_is_damaged_cut_or_swapped_is_refused_and_comes_nowhere(remote: Remote, tmp_path: Path) -> None:
    """Each object, and each two of them, unless it is the older version's alone."""
    wrong: list[dict[str, bytes | None]] = []
    for name, data in remote.contents.items():
        if name != REMOTE_FILE:
            middle = len(data) // 2
            wrong += [
                {name: data[:middle]},
                {name: b""},
                {name: data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]},
            ]
    swapped = itertools.combinations((name for name in remote.contents if name != REMOTE_FILE), 2)
    wrong += [{one: remote.contents[other], other: remote.contents[one]} for one, other in swapped]
    needed = [changed for changed in wrong if not remote.older.issuperset(changed)]
    assert (len(needed), len(wrong)) == (40, 52)
    for number, changed in enumerate(needed):
        remote.set(changed)
        with Store.open(tmp_path / f"there-{number}", writable=True) as there:
            with pytest.raises(CorruptObject):
                pull(there, remote)
            assert not there.index.versions(URI), "a version does not come without the turns behind it"
    remote.set(dict.fromkeys(remote.older, b"damaged"))
    with Store.open(tmp_path / "there", writable=True) as there:
        pull(there, remote)


def test_a_head_of_before_is_refused_by_who_saw_a_newer_one(remote: Remote, tmp_path: Path) -> None:
    """A machine of the same key that never saw the session cannot tell, and the documents say so."""
    name = remote.sealed.name_of(key_of(URI))
    old = [data for data in remote.bucket.written[name] if data is not None and data != remote.contents[name]]
    assert len(old) == 4
    with Store.open(tmp_path / "there", writable=True) as there:
        pull(there, remote)
        sessions = RemoteSessions.open(there._core, remote.bucket, KEY)
        assert sessions.heads.head(URI) is not None
        for data in old[:-1]:  # the last one differs by its holder alone, and he let the session go
            remote.set({name: data})
            with pytest.raises(HeadReplayed):
                sessions.heads.head(URI)


def test_a_push_writes_again_what_is_damaged(remote: Remote, tmp_path: Path) -> None:
    """The manifest and the places, though what is there is of other bytes each time."""
    needed = [name for kind in ("places", "versions") for name in remote.names(kind) if name not in remote.older]
    with Store.open(tmp_path / "here", writable=True) as store:
        for name in needed:
            for wrong in (remote.contents[name][:-1], b"", bytes(100), remote.contents[name][1:]):
                remote.bucket.set(name, wrong)
                sessions = RemoteSessions.open(store._core, remote.bucket, KEY)
                sessions.push(sessions.take(URI))
                found = remote.sealed.get(remote.sealed.key_of(name) or "", SEGMENT_BYTES)
                assert found is not None


def test_nothing_is_sent_twice_and_no_head_written_for_nothing(remote: Remote, tmp_path: Path) -> None:
    remote.set({})
    packs = set(remote.names("packs"))
    with Store.open(tmp_path / "here", writable=True) as store:
        sessions = RemoteSessions.open(store._core, remote.bucket, KEY)
        assert sessions.push(sessions.take(URI)).sent.bytes_sent == 0
    assert {entry.key for entry in remote.bucket.entries("packs/")} == packs
    assert [entry.key for entry in remote.sealed.entries(HEADS)] == [key_of(URI)]


def test_what_no_session_needs_leaves_a_sealed_remote(tmp_path: Path) -> None:
    """And what another session needs stays, as do objects that are nobody's."""
    world = World(MemoryObjects())

    def machine(store: Store) -> RemoteSessions:
        return RemoteSessions.open(store._core, world.bucket, KEY)

    with Store.open(tmp_path / "here", writable=True) as store:
        first = making.sleep(store, 256)
        push(machine(store), URI)
        making.sleep(store, 300, uri=FORK_URI, before=first)
        making.sleep(store, 5, uri=OTHER_URI, seed=1)
        push(machine(store), FORK_URI)
        push(machine(store), OTHER_URI)
        strangers = {f"packs/{'0' * 64}.0", "packs/a", "versions/a", "places/a"}
        for name in strangers:
            world.bucket.set(name, b"not ours")
        before = world.keys("packs", "versions", "places")
        drop(machine(store), URI)
        drop(machine(store), OTHER_URI)
        for _ in range(4):
            world.passes(GRACE_S + 1)
            collect(RemoteSessions(store._core, world.bucket, "here", world.now, KEY))
    kept = world.keys("packs", "versions", "places")
    assert strangers < kept < before
    assert sorted(name.partition("/")[0] for name in before - kept) == ["packs", *["places"] * 2, *["versions"] * 2]
    with Store.open(tmp_path / "there", writable=True) as there:
        sessions = machine(there)
        sessions.pull(sessions.take(FORK_URI).head)
        making.require_awake(there, 300, uri=FORK_URI)
