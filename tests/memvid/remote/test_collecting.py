"""What no session needs leaves a remote, and nothing that one needs: whoever works there meanwhile, whatever fails."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from torpor.memvid.errors import Corruption, LeaseHeld, RemoteUnreachable, StoreError
from torpor.memvid.remote import sessions
from torpor.memvid.remote.leaving import LEAVING_KEY, encode_leaving, read_leaving
from torpor.memvid.remote.places import manifest_key, places_key
from torpor.memvid.remote.uploading import send
from torpor.memvid.remote.versions import LOOK_S, RemoteVersions
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.remote.collecting_rig import GRACE_S, World, collect, collect_all, drop, push
from torpor.tests.memvid.remote.faulty_objects import Asked, Fault, Killed, MemoryObjects, faults_of
from torpor.tests.memvid.store_making import FORK_URI, URI

THIRD_URI = SessionUri("default", "third")
OF_A_VERSION = (manifest_key, places_key)
HOUR_AND_MORE = GRACE_S + 60


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """The fixture: the store of the machine that has the sessions."""
    with Store.open(tmp_path / "here", writable=True) as here:
        yield here


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    """The fixture: the store of another machine, which has nothing."""
    with Store.open(tmp_path / "other", writable=True) as there:
        yield there


@pytest.fixture
def world(store: Store) -> World:
    """The fixture: a session of two versions is there since long, a fork of the first one is not."""
    world = World(MemoryObjects())
    first = making.sleep(store, 512)
    push(world.machine(store), URI)
    making.sleep(store, 768, before=first)
    remote = world.machine(store)
    push(remote, URI)
    world.remembered = dict(remote._versions._places)
    making.sleep(store, 600, uri=FORK_URI, before=first)
    world.passes(GRACE_S * 10)
    return world


def grow(store: Store) -> None:
    """A third version of the session."""
    making.sleep(store, 1024)


def test_what_was_dropped_goes_in_two_steps_and_is_told(world: World, store: Store, tmp_path: Path) -> None:
    """At once what is the session's alone; packs once they have been listed for an hour; what another needs stays."""
    push(world.machine(store), FORK_URI)
    world.passes(GRACE_S * 2)
    drop(world.machine(store), URI)
    (head,) = [each for each in world.heads() if each.uri == URI]
    assert (head.versions, head.tail, head.holder) == ((), (), None)
    assert world.keys("versions", "places") == {
        key(making.id_of(store, FORK_URI)) for key in (manifest_key, places_key)
    }, "and at once"
    packs = world.keys("packs")
    first = collect(world.machine(store))
    assert world.keys("packs") == packs
    assert [each.kind for each in first.report.actions] == ["leave"] * len(first.leaving)
    assert 0 < len(first.leaving) < len(packs)
    world.passes(GRACE_S - 60)
    assert not collect(world.machine(store)).report.actions, "it is too early"
    world.passes(120)
    planned = world.machine(store).collect(dry_run=True)
    assert world.keys("packs") == packs
    second = collect(world.machine(store))
    assert second.report.actions == planned.report.actions
    assert {each.kind for each in second.report.actions} == {"remove"}
    assert second.report.bytes_freed > 0
    assert world.keys("packs") == packs - set(first.leaving)
    assert second.is_left
    world.passes(HOUR_AND_MORE)
    assert not collect(world.machine(store)).is_left
    assert read_leaving(world.bucket).packs == {}
    world.require_whole()
    world.require_nothing_else()
    world.require_awake(tmp_path / "there", FORK_URI, 600)


def test_a_version_that_is_dropped_alone_leaves_the_others_whole(world: World, store: Store) -> None:
    newest, first = (making.id_of(store, URI, version) for version in (2, 1))
    remote = world.machine(store)
    assert [each.versions for each in world.heads()] == [(first, newest)]
    lease = remote.take(URI)
    remote.drop_version(lease, newest)
    assert world.keys("versions") == {manifest_key(first)}
    collect_all(world, store)
    world.require_whole()
    world.require_nothing_else()


def test_packs_of_an_upload_under_way_do_not_leave(world: World, store: Store, other: Store) -> None:
    """Else it would send all of them again. An hour later, they are what an upload left that was cut off."""
    killed = world.machine(store)
    lease = killed.take(FORK_URI)
    killed._objects.plan = lambda asked: "killed_before" if asked.verb == "create" else None  # type: ignore[attr-defined]
    with pytest.raises(Killed):
        killed.push(lease)
    collected = collect(world.machine(other))
    assert [each.kind for each in collected.report.actions] == ["keep"]
    world.passes(HOUR_AND_MORE)
    assert len(collect(world.machine(other)).leaving) == 1


# --- an upload and a collection, side by side


def interrupted(world: World, store: Store, within: Callable[[World, Asked], None]) -> int:
    """Push the fork, which needs packs of the dropped session; and have others work before each of its requests. How
    many there were."""
    remote = world.machine(store, within=lambda asked: within(world, asked))
    push(remote, FORK_URI)
    return len(remote._objects.asked)  # type: ignore[attr-defined]


COLLECTED_AND_LATER: list[tuple[str, list[float]]] = [
    ("a collection", [0]),
    ("one, and the next", [0, HOUR_AND_MORE]),
    ("three, so that the names are free again", [0, HOUR_AND_MORE, HOUR_AND_MORE]),
    ("one, after which little time is left for the upload", [0, LOOK_S - 30]),
    ("one an hour ago", [-1, HOUR_AND_MORE]),
]


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("what", "steps"), COLLECTED_AND_LATER)
@pytest.mark.parametrize("later_s", [0, LOOK_S - 30, HOUR_AND_MORE])
@pytest.mark.parametrize("drops_first", [True, False])
def test_whatever_is_collected_between_two_requests_of_an_upload_it_is_whole(
    what: str, steps: list[float], later_s: float, world: World, store: Store, other: Store, *, drops_first: bool
) -> None:
    """The session whose packs it needs is dropped, before the upload or between these requests. steps: how long before
    each collection; -1: before the upload."""
    if drops_first:
        drop(world.machine(store), URI)
    if steps[0] < 0:
        collect(world.machine(other))
        world.passes(HOUR_AND_MORE / 2)

    def within(world: World, asked: Asked, number: int) -> None:
        if asked.number == number:
            if not drops_first:
                drop(world.machine(store), URI)
            for seconds in steps:
                if seconds >= 0:
                    world.passes(seconds)
                    with contextlib.suppress(RemoteUnreachable):
                        collect(world.machine(other))
            world.passes(later_s)

    number = 0
    while True:
        at = world.copy()
        count = interrupted(at, store, lambda world, asked, number=number: within(world, asked, number))  # type: ignore[misc]
        at.require_whole()
        for _ in range(3):
            at.passes(HOUR_AND_MORE)
            collect(at.machine(other))
            at.require_whole()
        number += 1
        if number > count:
            break
    assert number > 8


def test_an_upload_that_takes_longer_than_a_look_holds_looks_again(world: World, store: Store, other: Store) -> None:
    """And sends anew what leaves since; the daemon need not try again."""

    def within(asked: Asked) -> None:
        if asked.verb == "put" and asked.key.startswith("packs/"):
            if len(read_leaving(world.bucket).packs) < 2:
                drop(world.machine(other), URI)
                collect(world.machine(other))
            world.passes(LOOK_S + 1)

    remote = world.machine(store, within=within)
    lease = remote.take(FORK_URI)
    assert remote.push(lease).sent.bytes_sent > 0
    assert len([each for each in remote._objects.asked if each.verb == "put"]) == 2  # type: ignore[attr-defined]
    world.require_whole()


def test_no_head_lands_by_a_look_of_hours_ago(world: World, store: Store, other: Store) -> None:
    """The answer to its first try is lost, and the machine is suspended and then killed: another would have a version
    whose packs have gone."""

    def plan(asked: Asked) -> Fault | None:
        writes = [each for each in remote._objects.asked if each.verb == "replace"]  # type: ignore[attr-defined]
        if asked.verb == "get" and asked.key.startswith("heads/") and writes:
            drop(world.machine(other), URI)
            collect_all(world, other)
        if asked.verb == "replace":
            return "killed_after" if len(writes) > 1 else "unclear"
        return None

    remote = world.machine(store, plan=plan)
    lease = remote.take(FORK_URI)
    with contextlib.suppress(Killed, RemoteUnreachable):
        remote.push(lease)
    world.require_whole()


def test_a_collection_that_was_suspended_removes_nothing_that_was_sent_since(
    world: World, store: Store, other: Store
) -> None:
    """Others have removed the packs meanwhile, and one is there again, under the same name."""
    collections = [0]

    def within(asked: Asked) -> None:
        if removals and asked.verb == "size" and collections[0] < 3:
            while collections[0] < 3:
                collections[0] += 1
                collect(world.machine(other))
                world.passes(HOUR_AND_MORE)
            push(world.machine(store), URI)
        if asked.verb == "remove" and asked.key.startswith("packs/"):
            removals.append(asked.key)

    removals: list[str] = []
    drop(world.machine(store), URI)
    collect_all(world, store)
    world.remembered = {}
    push(world.machine(store), URI)
    push(world.machine(store), FORK_URI)
    for uri in (URI, FORK_URI):
        drop(world.machine(store), uri)
    world.passes(HOUR_AND_MORE)
    assert len(collect(world.machine(store)).leaving) == 2
    world.passes(HOUR_AND_MORE)
    collect(world.machine(store, within=within))
    assert len(removals) == 1
    world.require_whole()
    assert all(key.endswith(".0") for key in world.keys("packs")), "else this would prove nothing"


def test_of_two_collections_at_once_one_ends_and_tells_nothing(world: World, store: Store, other: Store) -> None:
    drop(world.machine(store), URI)

    def within(asked: Asked) -> None:
        if asked.verb in ("create", "replace") and asked.key == LEAVING_KEY:
            world.passes(1)
            assert collect(world.machine(other)).leaving

    with pytest.raises(RemoteUnreachable, match="Another machine frees"):
        collect(world.machine(store, within=within))


def test_a_pack_leaves_from_when_it_was_listed_and_not_from_when_the_collection_began(
    world: World, store: Store, other: Store
) -> None:
    """One that takes long lists what an upload has looked at by then, which then changes its head."""
    uploader = world.machine(store)
    lease = uploader.take(FORK_URI)
    packs = world.keys("packs")
    drop(world.machine(store), URI)

    def within(asked: Asked) -> None:
        if asked.verb == "get" and asked.key == "heads/default/agent":
            world.passes(GRACE_S - 600)
            uploader._versions.look()
            assert all(map(uploader._versions.has_pack, packs))

    assert collect(world.machine(other, within=within)).leaving
    world.passes(660)
    assert not [each for each in collect(world.machine(other)).report.actions if each.kind == "remove"]
    with mock.patch.object(uploader._versions, "look"):
        uploader.push(lease)
    world.require_whole()


@pytest.mark.one_in(1)
def test_whatever_is_uploaded_between_two_requests_of_a_collection_it_is_whole(
    world: World, store: Store, other: Store, tmp_path: Path
) -> None:
    """Before each request of each of three collections; and once the one that was held up goes on hours later, after
    others of another machine."""
    drop(world.machine(store), URI)
    tried = 0
    for earlier in range(3):
        begun = world.copy()
        for _ in range(earlier):
            collect(begun.machine(other))
            begun.passes(HOUR_AND_MORE)
        for others in range(4):
            number = 0
            while True:
                at = begun.copy()

                def within(asked: Asked, at: World = at, others: int = others, number: int = number) -> None:
                    if asked.number == number:
                        for _ in range(others):
                            with contextlib.suppress(RemoteUnreachable):
                                collect(at.machine(store))
                            at.passes(HOUR_AND_MORE)
                        push(at.machine(store), FORK_URI)

                remote = at.machine(other, within=within)
                with contextlib.suppress(StoreError):
                    collect(remote)
                tried += 1
                at.require_whole()
                if number >= len(remote._objects.asked):  # type: ignore[attr-defined]
                    break
                collect_all(at, other)
                at.require_whole()
                number += 1
    assert tried > 100


def test_names_that_leave_are_taken_by_no_upload(world: World, store: Store, tmp_path: Path) -> None:
    """It sends the packs again under others, and the next version relies on these."""
    drop(world.machine(store), URI)
    collect(world.machine(store))
    packs = world.keys("packs")
    push(world.machine(store), URI)
    (pack,) = world.keys("packs") - packs
    drop(world.machine(store), URI)
    world.passes(HOUR_AND_MORE)
    assert pack in collect(world.machine(store)).leaving
    remote = world.machine(store)
    push(remote, URI)
    world.require_whole()
    assert world.keys("packs") == {pack, f"{pack.removesuffix('.0')}.1"}
    grow(store)
    push(remote, URI)
    world.require_whole()
    collect_all(world, store)
    world.require_whole()
    world.require_nothing_else()
    world.require_awake(tmp_path / "there", URI, 1024)


# --- whatever fails


def after_a_drop(world: World, store: Store, collections: int) -> World:
    """The fork is there, the session was dropped, and so many collections have been."""
    at = world.copy()
    push(at.machine(store), FORK_URI)
    drop(at.machine(store), URI)
    for _ in range(collections):
        at.passes(HOUR_AND_MORE)
        collect(at.machine(store))
    at.passes(HOUR_AND_MORE)
    return at


@pytest.mark.one_in(1)
@pytest.mark.parametrize("earlier", range(3))
def test_no_fault_of_a_collection_leaves_anything_wrong(earlier: int, world: World, store: Store) -> None:
    """Each fault at each request of it, kills among them. Later ones do the rest."""
    begun = after_a_drop(world, store, earlier)
    whole = begun.copy()
    remote = whole.machine(store)
    collect(remote)
    tried = 0
    for asked in remote._objects.asked:  # type: ignore[attr-defined]
        for fault in faults_of(asked):
            at, tried = begun.copy(), tried + 1
            with contextlib.suppress(StoreError, Killed):
                collect(at.machine(store, plan={asked.number: fault}))
            at.require_whole()
            at.passes(HOUR_AND_MORE)
            with contextlib.suppress(StoreError):
                push(at.machine(store), URI)
            at.require_whole()
            drop(at.machine(store), URI)
            collect_all(at, store)
            at.require_whole()
            at.require_nothing_else()
    assert tried > 60


@pytest.mark.one_in(1)
def test_a_drop_that_is_cut_off_leaves_what_a_collection_finds(world: World, store: Store) -> None:
    """Each fault at each request of it. The session is there, or nothing names it any more."""
    with store._core.committing(), store._core.journaling():
        pass
    remote = world.machine(store)
    lease = remote.take(URI)
    assert remote.send_turns(lease, making.turn(store, 5))
    whole = world.copy()
    remote = whole.machine(store)
    drop(remote, URI)
    whole.require_whole()
    assert not whole.keys("versions", "places", "tails")
    tried = 0
    for asked in remote._objects.asked:  # type: ignore[attr-defined]
        for fault in faults_of(asked):
            at, tried = world.copy(), tried + 1
            with contextlib.suppress(StoreError, Killed):
                drop(at.machine(store, plan={asked.number: fault}), URI)
            (head,) = at.heads()
            if head.versions:
                at.require_whole()
                drop(at.machine(store), URI)
            at.machine(store).take(URI).release(asleep=False)  # who was killed comes back
            collect_all(at, store)
            at.require_nothing_else()
            assert not at.keys("packs", "versions", "places", "tails")
    assert tried > 20


# --- what may be told wrongly


@pytest.mark.parametrize("way", ["drop", "push", "damaged"])
def test_a_forged_head_removes_no_version_of_another_session(
    way: str, world: World, store: Store, other: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a plain remote anybody may write one. Whose a version is, its manifest says: the one here, or the one there.
    Where neither does, it stays."""
    push(world.machine(store), FORK_URI)
    theirs = {each.uri: each for each in world.heads()}[URI].versions
    mine = making.sleep(other, 300, uri=THIRD_URI)
    lease = world.machine(other).take(THIRD_URI)
    lease.release(asleep=True, edit=lambda head: dataclasses.replace(head, versions=theirs))
    if way == "damaged":
        key = manifest_key(theirs[0])
        content = world.bucket.content(key)
        assert content is not None
        world.bucket.put(key, [content[:-1] + bytes([content[-1] ^ 1])], len(content))
    before = world.keys("versions", "places", "tails")
    if way == "push":
        monkeypatch.setattr(sessions, "MAX_HEAD_VERSIONS", len(theirs))
        push(world.machine(other), THIRD_URI)
        named = {each.uri: each for each in world.heads()}[THIRD_URI].versions
        assert named == (*theirs[1:], mine.bundle_id)
        assert world.keys("versions", "places", "tails") == before | {f(mine.bundle_id) for f in OF_A_VERSION}
    else:
        with contextlib.suppress(Corruption) if way == "damaged" else contextlib.nullcontext():
            drop(world.machine(other), THIRD_URI)
        assert world.keys("versions", "places", "tails") == before
    if way != "damaged":
        world.require_whole()


def test_a_damaged_manifest_of_a_version_that_is_here_goes_with_its_session(world: World, store: Store) -> None:
    for head in world.heads():
        for key in map(manifest_key, head.versions):
            world.bucket.put(key, [b"other"], 5)
    drop(world.machine(store), URI)
    assert not world.keys("versions", "places", "tails")


def test_a_head_that_no_listing_has_is_found_by_its_manifests(world: World, store: Store, other: Store) -> None:
    """So no pack of it is listed to leave."""
    remote = world.machine(other)
    entries = remote._objects.entries
    remote._objects.entries = lambda prefix: iter(  # type: ignore[method-assign]
        each for each in entries(prefix) if not each.key.startswith("heads/")
    )
    collected = collect(remote)
    assert (collected.leaving, collected.orphans) == ([], {})


@pytest.mark.parametrize("what", ["head", "places", "turns"])
def test_where_anything_that_is_needed_cannot_be_read_no_pack_goes(what: str, world: World, store: Store) -> None:
    """And that is told, until it is mended."""
    push(world.machine(store), FORK_URI)
    if what == "turns":
        remote = world.machine(store)
        lease = remote.take(FORK_URI)
        record = making.turn(store, 5, uri=FORK_URI)
        assert remote.send_turns(lease, record)
        lease.release(asleep=True)
    drop(world.machine(store), URI)
    (head,) = (each for each in world.heads() if each.uri == FORK_URI)
    key = {"head": "heads/default/fork", "places": places_key(head.newest or ""), "turns": (*head.tail, "")[0]}[what]
    data = world.bucket.content(key)
    assert data is not None
    world.passes(HOUR_AND_MORE)
    for wrong in (data[:-1] + bytes([data[-1] ^ 1]), None):
        if wrong is None and what == "head":
            continue  # then it is another session's no more
        world.bucket.set(key, wrong)
        collected = collect(world.machine(store))
        assert [each.code for each in collected.report.problems]
        assert not collected.leaving
        assert world.bucket.content(LEAVING_KEY) is None
    world.bucket.set(key, data)
    assert collect(world.machine(store)).leaving


def test_the_version_behind_which_turns_stand_is_needed_though_no_head_names_it(world: World, store: Store) -> None:
    """As long as the turns are: who takes the session makes a version of both."""
    remote = world.machine(store)
    lease = remote.take(URI)
    record = making.turn(store, 5)
    assert remote.send_turns(lease, record)
    assert record.base is not None
    lease.change(lambda head: head.with_version("0" * 64, head.tail))  # a later one, which does not have the turns
    remote.drop_version(lease, record.base)
    lease.change(lambda head: head.without_versions(["0" * 64]))
    lease.release(asleep=True)
    (head,) = world.heads()
    assert (len(head.versions), len(head.tail)) == (1, 1)
    places = world.bucket.content(places_key(record.base))
    assert places is not None
    world.bucket.set(places_key(record.base), places[:-1])
    assert collect(world.machine(store)).report.problems
    world.bucket.set(places_key(record.base), places)
    collect_all(world, store)
    world.require_whole()
    assert world.bucket.content(manifest_key(record.base)) is not None
    push(world.machine(store), URI)
    collect_all(world, store)
    world.require_whole()
    world.require_nothing_else()


def test_a_list_that_is_damaged_is_made_anew_and_nothing_is_sent_before(world: World, store: Store) -> None:
    push(world.machine(store), FORK_URI)
    drop(world.machine(store), URI)
    world.passes(HOUR_AND_MORE)
    leaving = collect(world.machine(store)).leaving
    data = world.bucket.content(LEAVING_KEY)
    assert data is not None
    for at in range(len(data)):
        world.bucket.set(LEAVING_KEY, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(StoreError, match="leaving/packs"):
            read_leaving(world.bucket)
    with pytest.raises(StoreError, match="torpor repack --remote"):
        send(store._core, RemoteVersions(world.bucket, world.now), making.id_of(store, FORK_URI))
    assert collect(world.machine(store)).leaving == leaving
    assert read_leaving(world.bucket).packs.keys() == set(leaving)
    world.bucket.set(LEAVING_KEY, encode_leaving({}))
    assert read_leaving(world.bucket).packs == {}


def test_what_a_head_names_by_now_is_not_swept(world: World, store: Store, other: Store) -> None:
    """An upload that was cut off as a collection looked, and came to its end behind that."""
    killed = world.machine(store)
    lease = killed.take(FORK_URI)
    killed._objects.plan = lambda asked: "killed_before" if asked.verb == "replace" else None  # type: ignore[attr-defined]
    with pytest.raises(Killed):
        killed.push(lease)
    keys = world.machine(store).collect(dry_run=False).orphans[FORK_URI]
    push(world.machine(store), FORK_URI)
    assert world.machine(store).sweep(FORK_URI, keys) == []
    world.require_whole()


def test_what_a_head_does_not_name_goes_only_where_nobody_has_the_session(
    world: World, store: Store, other: Store
) -> None:
    """An upload that was cut off before its head, while its machine has the session, and once it has it no more."""
    killed = world.machine(store)
    lease = killed.take(URI)
    grow(store)
    killed._objects.plan = lambda asked: "killed_before" if asked.verb == "replace" else None  # type: ignore[attr-defined]
    with pytest.raises(Killed):
        killed.push(lease)
    assert len(world.keys("versions")) == 3
    collected = collect(world.machine(other))
    assert list(collected.orphans) == [URI]
    assert len(world.keys("versions")) == 3
    with pytest.raises(LeaseHeld):
        world.machine(other).take(URI)
    world.machine(store).take(URI).release(asleep=True)  # it comes back
    collect(world.machine(other))
    assert len(world.keys("versions")) == 3, "it sleeps at that machine, which sees to it"
    collect(world.machine(store))
    assert len(world.keys("versions", "places")) == 4
    (head,) = world.heads()
    assert head.holder is not None
    assert (head.holder.asleep, head.awake_at) == (True, None)
    world.require_whole()
