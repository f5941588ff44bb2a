"""Whose a session is: never two machines' at a time, whatever the network, the clocks and the machines do."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore
from torpor.memvid.disk.clock import running_s
from torpor.memvid.errors import LeaseHeld, LeaseLost, RemoteError, RemoteUnclear, RemoteUnreachable, SessionNotFound
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.seen_heads import SeenHeads
from torpor.memvid.folder.store_file import load_store_uuid, open_existing_root
from torpor.memvid.limits import MAX_LEASE_S, MAX_MACHINE_CHARS, MAX_VERSION
from torpor.memvid.remote.cloud_objects import CloudObjects
from torpor.memvid.remote.folder_objects import FolderObjects
from torpor.memvid.remote.heads import Head, Heads, Party, key_of
from torpor.memvid.remote.leases import LEASE_S, Lease, Watch, ask, take, withdraw
from torpor.memvid.remote.sealed_objects import KEY_BYTES, SealedObjects
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.remote.faulty_objects import FaultyObjects, MemoryObjects
from torpor.tests.memvid.remote.lease_world import Change, Code, World, changed_code, find
from torpor.tests.memvid.store_making import new_folder
from torpor.tests.shares import share

URI = SessionUri("work", "notes")
STORES = [f"00000000-0000-4000-8000-00000000000{number}" for number in range(3)]
STEPS = 150


class Machine:
    """A machine with a store, a clock that is set by hand, and an own way to the object store."""

    def __init__(self, bucket: MemoryObjects, party: Party, seen: SeenHeads) -> None:
        self.now_s = 1000.0
        self.party = party
        self.objects = FaultyObjects(bucket)
        self.heads = Heads(self.objects, seen)
        self.watch = Watch(party, lambda: self.now_s)

    def take(self, lease_s: int = LEASE_S) -> Lease:
        return take(self.heads, URI, self.watch, lease_s=lease_s)

    def fail(self, *faults: str | None) -> None:
        """What goes wrong with the next requests."""
        first = len(self.objects.asked)
        plan: dict[int, Any] = {first + at: fault for at, fault in enumerate(faults) if fault}
        self.objects.plan = plan


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Machine]:
    bucket = MemoryObjects()

    def make(name: str, store: int | None = None) -> Machine:
        number = "abc".index(name[0]) if store is None else store
        return Machine(bucket, Party(STORES[number], name), SeenHeads(new_folder(tmp_path / name)))

    return make


# --- all that may happen, by chance


def seeds(count: int) -> range:
    return range(share() * count, (share() + 1) * count)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.heavy) for part in range(1, 20))])
def test_no_two_machines_ever_have_a_session_and_nothing_is_lost(part: int) -> None:
    for seed in seeds(300):
        world = World(20 * seed + part)
        try:
            world.run(STEPS)
        except BaseException as error:
            error.add_note("\n".join([f"seed {20 * seed + part}", *world.told[-60:]]))
            raise


@dataclasses.dataclass(frozen=True)
class Plant:
    """A rule that is broken on purpose: changes of the code, or another clock."""

    name: str
    changes: tuple[Change, ...] = ()
    clock_kind: str = "running"

    def world(self) -> Callable[[int], World]:
        code = changed_code(self.changes) if self.changes else Code()
        return lambda seed: World(seed, code, self.clock_kind)


def in_leases(before: str, after: str) -> Change:
    return Change("leases", before, after)


def in_heads(before: str, after: str) -> Change:
    return Change("heads", before, after)


PLANTS = (
    Plant("no margin", (in_leases("_MARGIN: Final = 0.1", "_MARGIN: Final = 0.0"),)),
    Plant("a clock that people set", clock_kind="wall"),
    Plant("a clock that stands still in a suspend", clock_kind="awake"),
    Plant(
        "a lease counts from the answer",
        (in_leases("seen, self._pulses[self._pulse]", "seen, self._clock()"),),
    ),
    Plant(
        "a holder is watched from before the read",
        (
            in_leases(
                "    pulses: dict[bytes, float] = {}\n",
                "    pulses: dict[bytes, float] = {}\n    begun_s = watch.clock()\n",
            ),
            in_leases("watch.wait_s(head))", "watch.wait_s(head, begun_s))"),
            in_leases("def wait_s(self, head: Head)", "def wait_s(self, head, now_s)"),
            in_leases("now_s, sign = self.clock(), (head.epoch, holder.pulse)", "sign = (head.epoch, holder.pulse)"),
        ),
    ),
    Plant("the pulse is not looked at", (in_leases("(head.epoch, holder.pulse)", "(head.epoch, b'')"),)),
    Plant("the epoch is not raised", (in_leases("epoch=epoch, ", ""),)),
    Plant(
        "a copy of a store is the store",
        (in_leases("or holder.party == self.me:", "or holder.party.store == self.me.store:"),),
    ),
    Plant(
        "whoever holds it, it is ours",
        (
            in_leases(" or head.epoch != self.epoch", ""),
            in_leases("holder.party != self._me or holder.pulse not in self._pulses", "False"),
        ),
    ),
    Plant(
        "a release ends the lease when it has landed",
        (
            in_leases(
                "            self._is_released, self._renewed_s = True, -math.inf\n"
                "            with contextlib.suppress(LeaseLost):\n"
                "                self._heads.change(self.uri, released, self._seen)",
                "            with contextlib.suppress(LeaseLost):\n"
                "                self._heads.change(self.uri, released, self._seen)\n"
                "            self._is_released, self._renewed_s = True, -math.inf",
            ),
        ),
    ),
    Plant(
        "an unclear answer is taken for yes",
        (in_heads("tag, unclear = None, error", "tag, unclear = 'landed', error"),),
    ),
    Plant("an answer no is taken for yes", (in_heads("if tag is not None:", "if tag is not None or not unclear:"),)),
    Plant("no token is read back", (in_heads("found.head.token in sent", "False"),)),
    Plant(
        "a head is put, and not compared",
        (in_heads("self._objects.replace(key, data, found.tag)", "self._objects.put(key, data)"),),
    ),
)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_rule_that_is_broken_is_noticed(plant: Plant) -> None:
    assert find(range(4000), STEPS, plant.world()) is not None


# --- one by one


def test_a_session_is_had_by_one_until_it_sleeps(machine: Callable[..., Machine]) -> None:
    a, b = machine("a"), machine("b")
    lease = a.take()
    lease.require()
    with pytest.raises(LeaseHeld, match=r"work/notes is awake on a\. `torpor wake \S+` here asks") as caught:
        b.take()
    assert (caught.value.machine, caught.value.store, caught.value.is_asked) == ("a", STORES[0], False)
    assert caught.value.wait_s == pytest.approx(LEASE_S * 1.1)
    lease.change(lambda head: head.with_version("ab" * 32))
    lease.release(asleep=True)
    seen = b.heads.read(URI)
    assert seen is not None
    assert (seen.head.awake_at, seen.head.holder and seen.head.holder.party.machine) == (None, "a")
    assert (seen.head.newest, seen.head.epoch) == ("ab" * 32, 1)
    later = b.take()
    assert (later.epoch, b.heads.read(URI).head.versions) == (2, ("ab" * 32,))  # type: ignore[union-attr]
    with pytest.raises(LeaseLost):
        lease.require()


def test_who_has_died_is_waited_out_by_the_own_clock_alone(machine: Callable[..., Machine]) -> None:
    a, b = machine("a"), machine("b")
    a.now_s = 10.0**9
    a.take()
    for _ in range(11):
        with pytest.raises(LeaseHeld):
            b.take()
        b.now_s += 6
    assert b.take().epoch == 2


def test_a_renewal_begins_the_wait_anew_and_a_request_does_not(machine: Callable[..., Machine]) -> None:
    a, b, c = machine("a"), machine("b"), machine("c")
    lease = a.take()
    with pytest.raises(LeaseHeld):
        b.take()
    b.now_s += 60
    lease.renew()
    with pytest.raises(LeaseHeld) as caught:
        b.take()
    assert caught.value.wait_s == pytest.approx(66)
    b.now_s += 60
    ask(c.heads, URI, c.party)
    with pytest.raises(LeaseHeld) as caught:
        b.take()
    assert caught.value.wait_s == pytest.approx(6)
    b.now_s += 6
    assert b.take().request is None, "whoever has asked the one before is answered"


def test_a_lease_is_due_in_time_and_counts_from_the_start_of_its_renewal(machine: Callable[..., Machine]) -> None:
    a = machine("a")
    lease = a.take(30)
    assert (lease.due_s, lease.left_s) == (10, 27)
    a.now_s += 10
    assert lease.due_s == 0
    a.fail("unreachable")
    with pytest.raises(RemoteUnreachable):
        lease.renew()
    assert (lease.due_s, lease.left_s) == (2.5, 17), "not at once, and not only after as long as a renewal lasts"
    a.now_s += 2.5
    assert lease.due_s == 0
    lease.renew()
    assert (lease.due_s, lease.left_s) == (10, 27)
    a.now_s += 27
    with pytest.raises(LeaseLost, match="at the moment"):
        lease.require()
    lease.renew()
    lease.require()


def test_a_renewal_is_one_request_and_asking_whether_it_counts_is_none(machine: Callable[..., Machine]) -> None:
    a = machine("a")
    lease = a.take()
    before = len(a.objects.asked)
    lease.renew()
    lease.renew()
    assert [each.verb for each in a.objects.asked[before:]] == ["replace", "replace"]
    lease.require()
    assert (lease.request, len(a.objects.asked)) == (None, before + 2)


def test_a_store_takes_its_own_session_back_at_once_and_a_copy_of_it_does_not(machine: Callable[..., Machine]) -> None:
    a, again, copy = machine("a"), machine("a2", 0), machine("c", 0)
    again.watch.me = a.party
    a.take()
    with pytest.raises(LeaseHeld):
        copy.take()
    assert again.take().epoch == 2


def test_a_twin_of_the_same_name_is_found_out_at_the_next_renewal(machine: Callable[..., Machine]) -> None:
    """As of a virtual machine that was copied while it ran: both go on with what was in memory."""
    a, twin = machine("a"), machine("a2", 0)
    lease = a.take()
    twins = Lease(
        twin.heads,
        twin.heads.read(URI),
        a.party,
        lambda: twin.now_s,
        dict(lease._pulses),  # type: ignore[arg-type]
        None,
    )
    lease.renew()
    with pytest.raises(LeaseLost, match="is on a now"):
        twins.renew()
    with pytest.raises(LeaseLost):
        twins.require()
    lease.renew()


def test_a_lost_lease_stays_lost_and_tells_who_has_the_session(machine: Callable[..., Machine]) -> None:
    a, b = machine("a"), machine("b")
    lease = a.take()
    with pytest.raises(LeaseHeld):
        b.take()
    b.now_s += 66
    theirs = b.take()
    told = [r"is on b now: .* `torpor wake torpor://work/notes` asks", "is not this machine's any more"]
    for text in told:
        with pytest.raises(LeaseLost, match=text) as caught:
            lease.change(lambda head: head.with_version("cd" * 32))
        assert caught.value.machine == ("b" if text is told[0] else None)
    theirs.require()
    assert b.heads.read(URI).head.versions == ()  # type: ignore[union-attr]
    lease.release(asleep=True)
    theirs.renew()


@pytest.mark.parametrize("asleep", [True, False])
def test_a_release_ends_a_lease_though_it_fails_and_may_be_repeated(
    asleep: bool, machine: Callable[..., Machine]
) -> None:
    a, b = machine("a"), machine("b")
    lease = a.take()
    a.fail(*["unclear", None] * 20)
    with pytest.raises(RemoteUnclear):
        lease.release(asleep=asleep)
    with pytest.raises(LeaseLost):
        lease.require()
    with pytest.raises(LeaseLost):
        lease.renew()
    a.fail()
    lease.release(asleep=asleep)
    lease.release(asleep=asleep)
    holder = b.heads.read(URI).head.holder  # type: ignore[union-attr]
    assert (holder and holder.asleep) == (True if asleep else None)
    assert b.take().epoch == 2


@pytest.mark.parametrize("fault", ["lost", "landed_twice"])
def test_an_answer_that_was_lost_is_read_back(fault: str, machine: Callable[..., Machine]) -> None:
    a = machine("a")
    a.fail(None, fault)
    lease = a.take()
    assert lease.epoch == 1
    a.fail(fault)
    lease.change(lambda head: head.with_version("ab" * 32))
    seen = a.heads.read(URI)
    assert seen is not None
    assert (seen.head.revision, seen.head.versions) == (2, ("ab" * 32,))
    assert [each.verb for each in a.objects.asked] == ["get", "create", "get", "replace", "get", "get"]


def test_a_release_ends_a_lease_whose_renewal_is_under_way(machine: Callable[..., Machine]) -> None:
    a, b = machine("a"), machine("b")
    lease = a.take()
    is_asked, goes_on = threading.Event(), threading.Event()

    def within(asked: Any) -> None:
        is_asked.set()
        assert goes_on.wait(60)

    a.objects.within = within
    renewing, releasing = (
        threading.Thread(target=lease.renew),
        threading.Thread(target=partial(lease.release, asleep=True)),
    )
    renewing.start()
    assert is_asked.wait(60)
    releasing.start()
    goes_on.set()
    renewing.join()
    releasing.join()
    with pytest.raises(LeaseLost):
        lease.require()
    assert b.take().epoch == 2


@pytest.mark.parametrize("kind", ["memory", "cloud", "folder", pytest.param("sealed", marks=pytest.mark.one_in(1))])
def test_many_at_once_take_it_one_after_the_other(kind: str, tmp_path: Path) -> None:
    """With object stores that are none of ours: each version that was told stays, and each epoch is had once."""
    store, shared = MemoryStore(), tmp_path / "shared"
    shared.mkdir()
    objects = {
        "memory": MemoryObjects,
        "cloud": lambda: CloudObjects(lambda client, retries: store, "memory://"),
        "folder": lambda: FolderObjects(str(shared), shared.as_uri()),
        "sealed": lambda: SealedObjects(MemoryObjects(), bytes(KEY_BYTES)),
    }[kind]()
    epochs, told, has = list[int](), list[str](), threading.Lock()

    def work(number: int) -> None:
        folder = new_folder(tmp_path / str(number))
        heads, watch = Heads(objects, SeenHeads(folder)), Watch(Party.of(folder, "a"), running_s)  # type: ignore[arg-type]
        left = 12
        while left:
            try:
                lease = take(heads, URI, watch)
                assert has.acquire(blocking=False), "another has it"
                bundle_id = f"{number:032x}{left:032x}"
                lease.change(lambda head, bundle_id=bundle_id: head.with_version(bundle_id))  # type: ignore[misc]
                lease.require()
                epochs.append(lease.epoch)
                told.append(bundle_id)
                left -= 1
                has.release()
                lease.release(asleep=True)
            except (LeaseHeld, RemoteUnreachable):
                continue
        folder.close()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, number) for number in range(1, 5)]:
            done.result(timeout=120)
    seen = Heads(objects, SeenHeads(new_folder(tmp_path / "reader"))).read(URI)  # type: ignore[arg-type]
    assert seen is not None
    assert list(seen.head.versions) == told
    assert epochs == sorted(set(epochs))
    assert len(told) == 48


def test_a_copy_of_a_store_is_another_party_and_the_same_store_is_not(tmp_path: Path) -> None:
    folder = new_folder(tmp_path / "store")
    party = Party.of(folder, "a")
    folder.close()
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    (tmp_path / "store").rename(tmp_path / "moved")
    parties = []
    for name in ("moved", "copy"):
        root_fd = open_existing_root(str(tmp_path / name))
        opened = StoreFolder(str(tmp_path / name), root_fd, load_store_uuid(root_fd, str(tmp_path / name)))
        parties.append(Party.of(opened, "a"))
        opened.close()
    assert parties[0] == party
    assert parties[1].store != party.store


@pytest.mark.parametrize("name", ["", "\n", "a\x1b[31mb", "x" * 1000])
def test_a_machine_of_any_name_may_hold_a_session(
    name: str, machine: Callable[..., Machine], folder: StoreFolder
) -> None:
    a = machine("a")
    a.watch.me = Party.of(folder, name)
    a.take().require()
    assert 1 <= len(a.watch.me.machine) <= MAX_MACHINE_CHARS


# --- a hand-over


def test_a_session_is_asked_for_and_handed_over(machine: Callable[..., Machine]) -> None:
    a, b = machine("a"), machine("b")
    with pytest.raises(SessionNotFound):
        ask(b.heads, URI, b.party)
    lease = a.take()
    ask(b.heads, URI, b.party)
    with pytest.raises(LeaseHeld) as caught:
        b.take()
    assert caught.value.is_asked
    assert lease.request is None
    lease.renew()
    assert lease.request == b.party
    lease.release(asleep=True)
    assert b.take().request is None


def test_a_request_is_declined_or_withdrawn(machine: Callable[..., Machine]) -> None:
    a, b, c = machine("a"), machine("b"), machine("c")
    lease = a.take()
    ask(b.heads, URI, b.party)
    lease.decline()
    assert lease.request is None
    with pytest.raises(LeaseHeld) as caught:
        b.take()
    assert not caught.value.is_asked
    ask(b.heads, URI, b.party)
    withdraw(c.heads, URI, c.party)
    with pytest.raises(LeaseHeld) as caught:
        c.take()
    assert not caught.value.is_asked, "another has asked"
    lease.renew()
    assert lease.request == b.party, "nobody withdraws another's"
    withdraw(b.heads, URI, b.party)
    lease.renew()
    assert lease.request is None


def test_who_asks_twice_writes_once(machine: Callable[..., Machine]) -> None:
    a, b = machine("a"), machine("b")
    a.take()
    ask(b.heads, URI, b.party)
    before = len(b.objects.asked)
    ask(b.heads, URI, b.party)
    assert [each.verb for each in b.objects.asked[before:]] == ["get"]


def test_a_lease_is_as_long_as_its_taker_says(machine: Callable[..., Machine]) -> None:
    a, b = machine("a"), machine("b")
    a.take(30).release(asleep=False)
    assert (b.take(90).lease_s, b.heads.read(URI).head.lease_s) == (90, 90)  # type: ignore[union-attr]


def test_the_longest_lease_there_may_be_and_none_beyond(machine: Callable[..., Machine]) -> None:
    a = machine("a")
    with pytest.raises(Exception, match="out of range"):
        a.take(MAX_LEASE_S + 1)
    a.take(MAX_LEASE_S).require()


def test_a_forged_head_with_the_largest_numbers_keeps_nobody_out(machine: Callable[..., Machine]) -> None:
    """They stay as they are then, and leases are told apart by their pulses."""
    one, two = machine("a"), machine("b")
    one.heads.change(URI, lambda _: Head(URI, MAX_VERSION, LEASE_S))
    data = dataclasses.replace(one.heads.read(URI).head, revision=MAX_VERSION).encode()  # type: ignore[union-attr]
    one.objects.put(key_of(URI), [data], len(data))
    mine = one.take()
    assert mine.change(lambda head: head.with_version("11" * 32)).versions
    mine.release(asleep=True)
    theirs = two.take()
    assert theirs.change(lambda head: head.with_version("22" * 32)).versions == ("11" * 32, "22" * 32)
    assert (theirs.epoch, theirs.head.revision) == (MAX_VERSION, MAX_VERSION)
    theirs.release(asleep=True)
    again, newest = two.take(), two.take()  # of one store, which takes its own session back
    with pytest.raises(LeaseLost):
        again.renew()
    newest.renew()


@pytest.mark.parametrize("first", [None, "lost"])
def test_a_lease_outlives_an_outage_in_which_nobody_takes_it(
    first: str | None, machine: Callable[..., Machine]
) -> None:
    a = machine("a")
    lease = a.take()
    a.fail(first, *["unreachable"] * 2000)
    for _ in range(100 if first else 1000):
        with contextlib.suppress(RemoteError):
            lease.renew()
    assert len(lease._pulses) < 300
    a.now_s += 3600
    a.fail()
    lease.renew()
    lease.require()
