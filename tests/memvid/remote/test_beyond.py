"""What is here of a session and not in the remote goes if the remote has all of it, token for token; else it stays."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.memvid import errors
from torpor.memvid.format.records import Receipt
from torpor.memvid.remote.beyond import Beyond
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.remote.tails import put_record
from torpor.memvid.remote.versions import RemoteVersions
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.memvid.writing.core import StoreCore
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.remote.faulty_objects import MemoryObjects
from torpor.tests.memvid.store_making import FORK_URI, URI

ANOTHER = "00000000-0000-5000-8000-000000000000"


class Machine:
    """A store, and what it has of the remote."""

    def __init__(self, path: Path, bucket: MemoryObjects) -> None:
        self.store = Store.open(path, writable=True)
        self.remote = RemoteSessions(self.store._core, bucket, path.name, lambda: 0.0)
        self.remote._proven = self.remote._objects.place()

    def give(self) -> None:
        lease = self.remote.take(URI)
        self.remote.push(lease)
        lease.release(asleep=True)

    def pull(self) -> None:
        head = self.remote.heads.head(URI)
        assert head is not None
        self.remote.pull(head)

    def newest(self) -> str:
        return self.store.require_session(URI).bundle_id


@pytest.fixture
def bucket() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture
def one(tmp_path: Path, bucket: MemoryObjects) -> Iterator[Machine]:
    """The fixture: the machine that was away. Its first version is everywhere."""
    one = Machine(tmp_path / "one", bucket)
    with one.store:
        making.sleep(one.store, 300)
        one.give()
        yield one


@pytest.fixture
def gone_on(tmp_path: Path, bucket: MemoryObjects, one: Machine) -> Receipt:
    """The fixture: the version that another machine went on to, of 700 tokens."""
    two = Machine(tmp_path / "two", bucket)
    with two.store:
        two.pull()
        receipt = making.sleep(two.store, 700)
        two.give()
        return receipt


def test_what_the_remote_begins_with_makes_way(one: Machine, gone_on: Receipt) -> None:
    """A version, and turns in the journal behind it."""
    making.sleep(one.store, 500)
    one.store.acknowledge([making.turn(one.store, 0)])
    one.pull()
    assert one.newest() == gone_on.bundle_id
    assert [row.version for row in one.store.index.versions(URI)] == [1, 2]
    making.require_awake(one.store, 700)
    assert one.store.verify(deep=True).ok


@pytest.mark.parametrize("more", [0, 9], ids=["version", "turns"])
def test_what_makes_way_stays_until_what_takes_its_place_has_come(
    more: int, one: Machine, bucket: MemoryObjects, tmp_path: Path
) -> None:
    """It was told here. Where the remote has other bytes than it took, or none, nothing else may have it."""
    one.store.acknowledge([making.turn(one.store, 3)])
    before = set(bucket.keys())
    two = Machine(tmp_path / "two", bucket)
    with two.store:
        two.pull()
        making.sleep(two.store, 700)
        two.give()
        if more:
            assert two.remote.send_turns(two.remote.take(URI), making.turn(two.store, more))
    (pack,) = (key for key in bucket.keys() - before if key.startswith("packs/"))
    sound = bucket.content(pack) or b""
    at = 2 * len(sound) // 3
    for wrong in (sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :], None):
        bucket.set(pack, wrong)
        with pytest.raises(errors.Corruption):
            one.pull()
        one.store.replay_turns(URI)
        assert one.store.require_session(URI).token_count == 303
    bucket.set(pack, sound)
    one.pull()
    assert one.store.require_session(URI).token_count == 700 + more
    assert [row.version for row in one.store.index.versions(URI)] == ([1, 2, 3] if more else [1, 2])


def test_other_tokens_stay(one: Machine, gone_on: Receipt) -> None:
    mine = making.sleep(one.store, 500, seed=1)
    with pytest.raises(errors.Diverged):
        one.pull()
    assert one.newest() == mine.bundle_id


def test_what_has_more_tokens_stays(one: Machine, gone_on: Receipt) -> None:
    """Also behind the same ones."""
    mine = making.sleep(one.store, 900)
    one.pull()
    assert one.newest() == mine.bundle_id


def test_what_has_a_tag_stays(one: Machine, gone_on: Receipt) -> None:
    mine = making.sleep(one.store, 500)
    one.store.tag(URI, mine.version, "mine")
    with pytest.raises(errors.Diverged):
        one.pull()
    assert one.newest() == mine.bundle_id


def test_what_cannot_be_read_stays(one: Machine, gone_on: Receipt) -> None:
    mine = making.sleep(one.store, 500)
    making.manifest_path(one.store, mine.bundle_id).write_bytes(b"nothing")
    with pytest.raises(errors.Diverged):
        one.pull()
    assert one.newest() == mine.bundle_id


def test_a_version_that_a_prune_takes_meanwhile_does_not_count(one: Machine, gone_on: Receipt) -> None:
    head = one.remote.heads.head(URI)
    assert head is not None
    first, second = making.sleep_each(one.store, 400, 500)
    beyond = Beyond.of(one.store._core, head)
    assert beyond is not None
    one.store.delete_version(URI, first.version)
    assert beyond.beside(one.store._core, making.token_ids(0, 700)) == "behind"
    beyond.let_go(one.store._core)
    assert one.store.require_session(URI).version == second.version - 2


def test_nothing_goes_for_a_version_of_another_session(
    one: Machine, gone_on: Receipt, bucket: MemoryObjects, tmp_path: Path
) -> None:
    """Whoever writes there may have put it into the head."""
    mine = making.sleep(one.store, 500)
    with Store.open(tmp_path / "other", writable=True) as other:
        foreign = making.sleep(other, 900, uri=FORK_URI)
        remote = RemoteSessions(other._core, bucket, "other", lambda: 0.0)
        remote._proven = remote._objects.place()
        remote.push(remote.take(FORK_URI))
        remote.take(URI).change(lambda head: head.with_version(foreign.bundle_id))
    with pytest.raises(errors.OwnerMismatch):
        one.pull()
    assert one.newest() == mine.bundle_id


def test_turns_that_this_store_sent_are_older_than_its_own(one: Machine) -> None:
    """It may have rewound the session since."""
    lease = one.remote.take(URI)
    one.remote.send_turns(lease, making.turn(one.store, 9))
    record = making.turn(one.store, 3)
    one.store.acknowledge([record])
    one.pull()
    assert one.store._core.journal.find(URI) == record
    assert one.store.require_session(URI).version == 1


def test_turns_of_others_take_the_place_of_those_that_they_begin_with(
    one: Machine, bucket: MemoryObjects, tmp_path: Path
) -> None:
    two = Machine(tmp_path / "two", bucket)
    one.store.acknowledge([making.turn(one.store, 3)])
    with two.store:
        two.pull()
        two.remote.send_turns(two.remote.take(URI), making.turn(two.store, 9))
    one.pull()
    assert not one.store.has_turns(URI)
    assert one.store.require_session(URI).token_count == 309


def test_turns_that_no_version_can_have_are_not_kept_here(one: Machine, bucket: MemoryObjects, tmp_path: Path) -> None:
    """Once the remote has others the session goes on: a journal that kept them would refuse it for good."""
    sound = making.turn(one.store, 9)
    versions = RemoteVersions(bucket)
    keys = [put_record(versions, each, ANOTHER) for each in (dataclasses.replace(sound, held=9000), sound)]
    two = Machine(tmp_path / "two", bucket)
    with two.store:
        one.remote.heads.change(URI, lambda head: dataclasses.replace(head, tail=(keys[0],)))
        for _ in range(2):
            with pytest.raises(errors.InvalidDraft):
                two.pull()
        assert not two.store.has_turns(URI)
        one.remote.heads.change(URI, lambda head: dataclasses.replace(head, tail=(keys[1],)))
        two.pull()
        assert two.store.require_session(URI).version == 2


def test_a_version_that_begins_to_be_written_while_it_is_pulled_is_no_other_history(
    one: Machine, gone_on: Receipt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pull is to be tried again: that number was taken for one that the session had gone on to here."""
    reserve = StoreCore.next_version

    @contextlib.contextmanager
    def beside_another(core: StoreCore, uri: SessionUri, least: int = 1) -> Iterator[int]:
        with reserve(core, uri), reserve(core, uri, least) as version:
            yield version

    with monkeypatch.context() as patch:
        patch.setattr(StoreCore, "next_version", beside_another)
        with pytest.raises(errors.StoreBusy):
            one.pull()
    one.pull()
    assert one.newest() == gone_on.bundle_id
