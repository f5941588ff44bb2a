"""A version goes into a remote, and comes into another store bit for bit, whatever fails on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid import errors
from torpor.memvid.limits import MAX_PLACES_BYTES
from torpor.memvid.remote import uploading, versions
from torpor.memvid.remote.fetching import FetchedFrames, fetch
from torpor.memvid.remote.leaving import read_leaving
from torpor.memvid.remote.objects import Objects, Part, Span
from torpor.memvid.remote.places import Place, decode_places, encode_places, manifest_key, places_key
from torpor.memvid.remote.sealed_objects import KEY_BYTES, SealedObjects
from torpor.memvid.remote.uploading import Sent, send
from torpor.memvid.remote.versions import RemoteVersions
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.remote.faulty_objects import FaultyObjects, Killed, MemoryObjects, faults_of
from torpor.tests.memvid.remote.hand_over_rig import remote_of
from torpor.tests.memvid.store_making import FORK_URI, URI


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The fixture: a store whose session is to go elsewhere."""
    with Store.open(tmp_path / "here", writable=True) as here:
        yield here


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Store]:
    """The fixture: an empty store."""
    with Store.open(tmp_path / "there", writable=True) as there:
        yield there


def sent(store: Store, objects: Any, bundle_id: str) -> Sent:
    return send(store._core, RemoteVersions(objects), bundle_id)


def fetched(store: Store, objects: Any, bundle_id: str) -> None:
    remote = RemoteVersions(objects)
    fetch(store._core, remote, remote.require_manifest(bundle_id), bundle_id)


def plain(objects: Objects) -> Objects:
    return objects


def sealed(objects: Objects) -> Objects:
    return SealedObjects(objects, bytes(KEY_BYTES))


def packs_in(bucket: MemoryObjects) -> set[str]:
    return {entry.key for entry in bucket.entries("packs/")}


def others_in(bucket: MemoryObjects) -> set[str]:
    return {entry.key for entry in bucket.entries("")} - packs_in(bucket)


def test_a_version_comes_back_from_a_remote_to_the_bit(store: Store, elsewhere: Store) -> None:
    """Each version has its own number, id and bytes there."""
    bucket = MemoryObjects()
    for receipt in making.sleep_each(store, 300, 700, 1300):
        sent(store, bucket, receipt.bundle_id)
        fetched(elsewhere, bucket, receipt.bundle_id)
        making.require_awake(elsewhere, receipt.token_count, version=receipt.version)
        assert elsewhere.require_session(URI).bundle_id == receipt.bundle_id
    assert elsewhere.verify(deep=True).ok


def test_only_what_is_lacking_is_sent_and_fetched(store: Store, elsewhere: Store) -> None:
    """Blocks of the version before, of a fork's origin, and a version that is there whole."""
    bucket = MemoryObjects()
    first, second = making.sleep_each(store, 1024, 1280)
    fork = making.sleep(store, 1100, uri=FORK_URI, before=first)
    assert sent(store, bucket, first.bundle_id).blocks_sent == len(first.entries)
    delta = sent(store, bucket, second.bundle_id)
    assert (delta.blocks_sent, delta.blocks) == (2, len(second.entries)), "one span, and the record of its end"
    assert sent(store, bucket, fork.bundle_id).blocks_sent == 2
    again = sent(store, bucket, second.bundle_id)
    assert (again.blocks_sent, again.bytes_sent) == (0, 0)
    fetched(elsewhere, bucket, first.bundle_id)
    asked = FaultyObjects(bucket)
    fetched(elsewhere, asked, fork.bundle_id)
    got = sum(each.size_bytes for each in asked.asked if each.verb == "get_ranges")
    assert got < 2 * 256 * 64 + 4096, "the last span and the record alone"
    making.require_awake(elsewhere, 1100, uri=FORK_URI)


def test_what_the_remote_has_is_not_sent_again_once_the_store_has_let_its_version_go(store: Store) -> None:
    """As after each write behind, whose version goes once a sleep covers it."""
    remote = remote_of(store, MemoryObjects(), "one")
    first = making.sleep(store, 1024)
    lease = remote.take(URI)
    remote.push(lease)
    second = making.sleep(store, 1280, before=first)
    store.delete_version(URI, first.version)
    assert remote.push(lease).sent.blocks_sent == 2, f"of {len(second.entries)}"


def test_a_pack_is_sent_and_fetched_in_parts(store: Store, elsewhere: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the memory that is stated, however long the session is: a frame is written before the next is taken in.
    All is asked for at once, so that it is on its way meanwhile."""
    monkeypatch.setattr(uploading, "MAX_SENT_PACK_BYTES", 40_000)
    bucket, taken = MemoryObjects(), list[int]()
    receipt = making.sleep(store, 2600)
    sent(store, bucket, receipt.bundle_id)
    assert len(packs_in(bucket)) > 3
    asked = FaultyObjects(bucket)
    get_ranges = asked.get_ranges

    def noted(spans: Sequence[Span]) -> Iterator[Part | None]:
        assert {key for key, _, _ in spans} == packs_in(bucket), "no pack is asked for behind the other"
        for part in get_ranges(spans):
            taken.append(sum(file.stat().st_size for file in Path(elsewhere.path).rglob("*.tmp")))
            yield part

    monkeypatch.setattr(asked, "get_ranges", noted)
    fetched(elsewhere, asked, receipt.bundle_id)
    assert len([each for each in asked.asked if each.verb == "get_ranges"]) == len(packs_in(bucket))
    assert len(set(taken)) == len(receipt.entries)
    assert taken == sorted(taken)
    making.require_awake(elsewhere, 2600)


def test_frames_that_are_read_in_another_order_are_the_same(store: Store) -> None:
    bucket = MemoryObjects()
    receipt = making.sleep(store, 1300)
    sent(store, bucket, receipt.bundle_id)
    remote = RemoteVersions(bucket)
    manifest = remote.require_manifest(receipt.bundle_id)
    places = remote.places_for(manifest, receipt.bundle_id)
    ids = [entry.id for entry in manifest.blocks]
    with FetchedFrames(remote, manifest, places, receipt.bundle_id, ids[::2]) as frames:
        for block_id in (*ids, *reversed(ids), *ids[::2]):
            assert frames.check_block(block_id).start == manifest.blocks[ids.index(block_id)].start


def test_a_version_that_is_not_whole_is_not_sent(store: Store) -> None:
    bucket = MemoryObjects()
    receipt = making.sleep(store, 700)
    making.spoil(store, receipt, 1)
    with pytest.raises(errors.Corruption):
        sent(store, bucket, receipt.bundle_id)
    assert not others_in(bucket)


def test_a_stripped_version_goes_and_comes_as_its_headers(store: Store, elsewhere: Store) -> None:
    """It is stripped there, too; and a whole one that is stripped here gets its keys and values back."""
    bucket = MemoryObjects()
    first, second = making.sleep_each(store, 300, 700)
    store.strip(URI)
    sent(store, bucket, second.bundle_id)
    fetched(elsewhere, bucket, second.bundle_id)
    assert elsewhere.marks(URI).stripped == {second.bundle_id}
    assert making.ledger(elsewhere) == making.token_ids(0, 700)
    assert elsewhere.verify(deep=True).ok
    fetched(elsewhere, bucket, second.bundle_id)
    whole = making.sleep(store, 300, uri=FORK_URI)
    sent(store, bucket, whole.bundle_id)
    store.strip(FORK_URI)
    fetched(store, bucket, whole.bundle_id)
    assert not store.marks(FORK_URI).stripped
    making.require_awake(store, 300, uri=FORK_URI)
    assert first.version == 1


def test_an_upload_that_was_cut_off_sends_no_pack_twice(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploading, "MAX_SENT_PACK_BYTES", 40_000)
    bucket = MemoryObjects()
    receipt = making.sleep(store, 2600)
    cut = FaultyObjects(bucket, lambda asked: "killed_before" if asked.verb == "create" else None)
    with pytest.raises(Killed):
        sent(store, cut, receipt.bundle_id)
    assert packs_in(bucket)
    again = FaultyObjects(bucket)
    sent(store, again, receipt.bundle_id)
    assert not [each for each in again.asked if each.verb == "put"]
    assert others_in(bucket) == {
        manifest_key(receipt.bundle_id),
        places_key(receipt.bundle_id),
    }


# --- every fault at every request


@pytest.mark.one_in(4)
@pytest.mark.parametrize("over", [plain, sealed])
def test_no_fault_of_an_upload_leaves_anything_wrong(
    store: Store, tmp_path: Path, over: Callable[[Objects], Objects]
) -> None:
    """Each fault at each request, then the same again without: the version is there, and only what is right."""
    first, second = making.sleep_each(store, 700, 1300)
    whole = FaultyObjects(MemoryObjects())
    for receipt in (first, second):
        sent(store, over(whole), receipt.bundle_id)
    tried = 0
    for asked in whole.asked:
        for fault in faults_of(asked):
            bucket, tried = MemoryObjects(), tried + 1
            faulty = FaultyObjects(bucket, {asked.number: fault})
            try:
                for receipt in (first, second):
                    sent(store, over(faulty), receipt.bundle_id)
            except (errors.StoreError, Killed):
                for receipt in (first, second):
                    sent(store, over(bucket), receipt.bundle_id)
            with Store.open(tmp_path / f"{tried}", writable=True) as there:
                for receipt in (first, second):
                    fetched(there, over(bucket), receipt.bundle_id)
                making.require_awake(there, 1300)
    assert tried > 60


@pytest.mark.parametrize("over", [plain, pytest.param(sealed, marks=pytest.mark.one_in(1))])
def test_no_fault_of_a_fetch_mounts_anything_wrong(
    store: Store, tmp_path: Path, over: Callable[[Objects], Objects]
) -> None:
    """Flipped, swapped, shortened and older bytes are refused; the store is as it was, and the next try has it."""
    bucket = MemoryObjects()
    receipts = [making.sleep(store, 700), making.sleep(store, 900, uri=FORK_URI, seed=3)]
    for receipt in receipts:
        sent(store, over(bucket), receipt.bundle_id)
    with Store.open(tmp_path / "whole", writable=True) as there:
        whole = FaultyObjects(bucket)
        fetched(there, over(whole), receipts[0].bundle_id)
    wrong = 0
    for asked in whole.asked:
        for fault in faults_of(asked):
            with Store.open(tmp_path / f"{asked.number}{fault}", writable=True) as there:
                before = making.tree(there.path, "packs/*") | making.tree(there.path, "versions/*")
                try:
                    fetched(there, over(FaultyObjects(bucket, {asked.number: fault})), receipts[0].bundle_id)
                except (errors.StoreError, Killed):
                    wrong += 1
                    assert making.tree(there.path, "packs/*") | making.tree(there.path, "versions/*") == before
                    assert there.find_session(URI) is None
                    fetched(there, over(bucket), receipts[0].bundle_id)
                making.require_awake(there, 700)
    assert wrong > 12


def test_bytes_that_are_wrong_in_the_remote_are_named_and_pushed_again(store: Store, elsewhere: Store) -> None:
    """A damaged manifest or list of places is written again by the next push."""
    bucket = MemoryObjects()
    receipt = making.sleep(store, 700)
    sent(store, bucket, receipt.bundle_id)
    for key in (manifest_key(receipt.bundle_id), places_key(receipt.bundle_id)):
        data = bucket.content(key)
        assert data is not None
        bucket.set(key, data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(errors.Corruption, match=key):
            fetched(elsewhere, bucket, receipt.bundle_id)
        for wrong in (data[:-1] + bytes([data[-1] ^ 1]), data + bytes(1), bytes(MAX_PLACES_BYTES + 1)):
            bucket.set(key, wrong)
            sent(store, bucket, receipt.bundle_id)
            assert bucket.content(key) == data


@pytest.mark.parametrize("over", [plain, sealed])
@pytest.mark.parametrize("damage", ["first frame", "payload", "last bytes", "end is missing"])
def test_a_pack_that_was_read_and_is_wrong_is_sent_again_by_who_has_its_blocks(
    over: Callable[[Objects], Objects], damage: str, store: Store, elsewhere: Store
) -> None:
    """Its length says nothing: who reads it lists it among those that leave, and it is sent under another name."""
    bucket = MemoryObjects()
    receipt = making.sleep(store, 700)
    sent(store, over(bucket), receipt.bundle_id)
    (pack,) = packs_in(bucket)
    data = bucket.content(pack)
    assert data is not None
    at = {"first frame": 100, "payload": 5000}.get(damage, len(data) - 3000)
    bucket.set(pack, data[:at] + (b"" if damage == "end is missing" else bytes([data[at] ^ 1]) + data[at + 1 :]))
    for _ in range(2):
        with pytest.raises(errors.StoreError):
            fetched(elsewhere, over(bucket), receipt.bundle_id)
    assert elsewhere.find_session(URI) is None
    assert len(read_leaving(over(bucket)).packs) == 1
    assert sent(store, over(bucket), receipt.bundle_id).bytes_sent > 0
    assert len(packs_in(bucket)) == 2
    fetched(elsewhere, over(bucket), receipt.bundle_id)
    making.require_awake(elsewhere, 700)
    assert sent(store, over(bucket), receipt.bundle_id).bytes_sent == 0


def test_places_have_one_form_and_no_byte_of_them_may_change(store: Store) -> None:
    bucket = MemoryObjects()
    receipt = making.sleep(store, 700)
    sent(store, bucket, receipt.bundle_id)
    data = bucket.content(places_key(receipt.bundle_id))
    assert data is not None
    places = decode_places(data, receipt.bundle_id, "here")
    assert places.keys() == {entry.id for entry in receipt.entries}
    assert encode_places(receipt.bundle_id, places.values()) == data
    for at in range(len(data)):
        with pytest.raises(errors.Corruption):
            decode_places(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], receipt.bundle_id, "here")
        with pytest.raises(errors.Corruption):
            decode_places(data[:at], receipt.bundle_id, "here")
    with pytest.raises(errors.CorruptBundle, match="not those of this version"):
        decode_places(data, "0" * 64, "here")


def test_places_that_mean_nothing_are_refused(store: Store) -> None:
    """Sealed as ours are, by one who may write the remote: a strange key, frames that overlap, a block in two packs."""
    bucket = MemoryObjects()
    receipt = making.sleep(store, 700)
    sent(store, bucket, receipt.bundle_id)
    places = list(decode_places(bucket.content(places_key(receipt.bundle_id)) or b"", receipt.bundle_id, "").values())
    one, two = places[0], places[1]
    for wrong in (
        [Place("../elsewhere", one.frame)],
        [Place("versions/" + "0" * 64, one.frame)],
        [one, Place("packs/" + "0" * 64 + ".0", one.frame)],
        [one, Place(one.pack, dataclasses.replace(two.frame, offset=one.frame.offset))],
        [Place(one.pack, dataclasses.replace(one.frame, offset=1 << 60))],
    ):
        with pytest.raises(errors.CorruptBundle):
            decode_places(encode_places(receipt.bundle_id, wrong), receipt.bundle_id, "here")


def test_a_remote_that_lacks_places_of_blocks_is_told(store: Store, elsewhere: Store) -> None:
    bucket = MemoryObjects()
    receipt = making.sleep(store, 700)
    sent(store, bucket, receipt.bundle_id)
    key = places_key(receipt.bundle_id)
    places = decode_places(bucket.content(key) or b"", receipt.bundle_id, "")
    some = [place for block, place in places.items() if block != receipt.entries[0].id]
    bucket.set(key, encode_places(receipt.bundle_id, some))
    with pytest.raises(errors.CorruptBundle, match="no place for the block at token 0"):
        fetched(elsewhere, bucket, receipt.bundle_id)
    bucket.set(key, None)
    with pytest.raises(errors.BundleMissing, match="Push it again"):
        fetched(elsewhere, bucket, receipt.bundle_id)
    assert RemoteVersions(bucket).manifest("0" * 64) is None


def test_places_of_few_versions_are_remembered(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_REMEMBERED", 2)
    bucket = MemoryObjects()
    receipts = making.sleep_each(store, 300, 600, 900)
    for receipt in receipts:
        sent(store, bucket, receipt.bundle_id)
    asked = FaultyObjects(bucket)
    remote = RemoteVersions(asked)
    for receipt in (*receipts, *reversed(receipts)):
        assert remote.places_seen(receipt.bundle_id)
    assert [each.verb for each in asked.asked] == ["get"] * 4


def test_an_upload_that_was_told_to_stop_goes_on_where_it_was(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a day's budget: between two packs, and no byte is sent twice."""
    bucket = MemoryObjects()
    receipt = making.sleep(store, 1300)
    monkeypatch.setattr(uploading, "MAX_SENT_PACK_BYTES", 1)
    answers = iter([True, True, False])
    remote = RemoteVersions(bucket)
    assert send(store._core, remote, receipt.bundle_id, lambda: next(answers)) is None
    landed = packs_in(bucket)
    assert (len(landed), others_in(bucket)) == (2, set())
    whole = send(store._core, RemoteVersions(bucket), receipt.bundle_id)
    assert whole is not None
    assert whole.bytes_sent == sum(entry.size_bytes for entry in bucket.entries("packs/") if entry.key not in landed)
    assert others_in(bucket) == {manifest_key(receipt.bundle_id), places_key(receipt.bundle_id)}
