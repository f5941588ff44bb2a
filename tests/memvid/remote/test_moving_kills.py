"""A machine is killed before or behind each request of a hand-over, the holder or who asks: what it had sent is there,
and the session goes on at either machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import pytest
from torpor.memvid import errors
from torpor.memvid.format.journal import JournalRecord
from torpor.memvid.format.manifest import UNREAD
from torpor.memvid.recovery.replaying import all_tokens
from torpor.memvid.remote import beyond
from torpor.memvid.remote.heads import Head
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.store import Store
from torpor.memvid.writing.core import StoreCore
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.remote.faulty_objects import FaultyObjects, Killed, MemoryObjects
from torpor.tests.memvid.store_making import URI

LEASE_S: Final = 10
Kill = Literal["killed_before", "killed_after"]


class Machine:
    """A machine that can die, and come back with its store. now: the clock of all."""

    def __init__(self, path: Path, bucket: MemoryObjects, now: Callable[[], float]) -> None:
        self._path, self._bucket, self._now = path, bucket, now
        self.objects = FaultyObjects(bucket)
        self._open()

    def _open(self) -> None:
        self.store = Store.open(self._path, writable=True)
        self.remote = RemoteSessions(self.store._core, self.objects, self._path.name, self._now)
        self.remote._proven = self.remote._objects.place()

    def comes_back(self) -> None:
        self.store.close()
        self.objects = FaultyObjects(self._bucket)
        self._open()

    def turn(self, tail: int) -> None:
        """A turn is sent, and then durable here, as a daemon does it for which each turn has to survive."""
        lease, record = self.remote.take(URI, LEASE_S), making.turn(self.store, tail)
        if not self.remote.send_turns(lease, record):  # that version is not there
            tokens = making.token_ids(0, record.held + tail)
            session = {**record.session, UNREAD: {"tokens": tokens}}
            alone = dataclasses.replace(record, base=None, held=0, identity=making.IDENTITY, session=session)
            assert self.remote.send_turns(lease, alone)
        self.store.acknowledge([record])

    def head(self) -> Head:
        """What the remote says of the session."""
        head = self.remote.heads.head(URI)
        assert head is not None
        return head

    def hands_over(self) -> None:
        """It has the session: it sleeps, is sent, and is free."""
        lease = self.remote.take(URI, LEASE_S)
        self.remote.pull(lease.head)
        self.store.replay_turns(URI)
        self.remote.push(lease)
        lease.release(asleep=True)

    def takes(self) -> bytes:
        """The tokens with which the session goes on here."""
        lease = self.remote.take(URI, LEASE_S)
        self.remote.pull(lease.head)
        self.store.replay_turns(URI)
        lease.require()
        with self.store._core.open_reader(self.store.require_session(URI).bundle_id) as reader:
            return all_tokens(reader)


def hand_over(holder: Machine, asker: Machine) -> None:
    """The requests of both, one after the other."""
    asker.remote.heads.head(URI)
    asker.remote.ask(URI)
    holder.hands_over()
    asker.takes()
    asker.turn(9)
    asker.hands_over()


@pytest.mark.one_in(1)
@pytest.mark.parametrize("kill", ["killed_before", "killed_after"])
@pytest.mark.parametrize("which", ["holder", "asker"])
@pytest.mark.parametrize("sleeps", [True, False], ids=["slept", "awake"])
def test_a_session_goes_on_whoever_dies_at_whichever_request(
    which: str, kill: Kill, tmp_path: Path, *, sleeps: bool
) -> None:
    """At the other machine, which adds to it, and sleeps or not; and then where it died, with all of that."""
    for number in itertools.count():
        time_s, bucket = [0.0], MemoryObjects()

        def now(time_s: list[float] = time_s) -> float:
            return time_s[0]

        machines = {name: Machine(tmp_path / f"{number}-{name}", bucket, now) for name in ("holder", "asker")}
        making.sleep(machines["holder"].store, 300)
        machines["holder"].hands_over()
        machines["holder"].turn(3)
        victim, other = machines.pop(which), *machines.values()
        victim.objects.plan = {len(victim.objects.asked) + number: kill}
        died = False
        try:
            hand_over(*((victim, other) if which == "holder" else (other, victim)))
        except Killed:
            died = True
        there = _takes_in_time(other, time_s)
        assert there in ([making.token_ids(0, 303)] if died else []) + [making.token_ids(0, 309)]
        other.turn(20)
        if sleeps:
            other.hands_over()
        victim.comes_back()
        assert _takes_in_time(victim, time_s) == making.token_ids(0, 320)
        victim.store.close()
        other.store.close()
        if not died:
            break
    assert number > 4


def _takes_in_time(machine: Machine, time_s: list[float]) -> bytes:
    """Once the lease of who died is over."""
    with contextlib.suppress(errors.LeaseHeld):
        return machine.takes()
    time_s[0] += 2 * LEASE_S
    return machine.takes()


def test_no_removal_takes_along_what_another_machine_told_before_it_died(tmp_path: Path) -> None:
    """Turns behind the newest version, which is here and they are not: they would be nowhere any more."""
    time_s, bucket = [0.0], MemoryObjects()
    holder, asker = (Machine(tmp_path / name, bucket, lambda: time_s[0]) for name in ("holder", "asker"))
    making.sleep(holder.store, 300)
    holder.hands_over()
    asker.takes()
    asker.turn(9)
    newest = holder.store.require_session(URI).bundle_id
    head = holder.head()
    with pytest.raises(errors.Diverged):
        holder.remote.require_droppable(head)
    with contextlib.suppress(errors.LeaseHeld):
        holder.remote.take(URI, LEASE_S)
    time_s[0] += 2 * LEASE_S
    lease = holder.remote.take(URI, LEASE_S)
    with pytest.raises(errors.Diverged):
        holder.remote.drop_version(lease, newest)
    assert holder.takes() == making.token_ids(0, 309)
    head = holder.head()
    holder.remote.require_droppable(head)
    holder.remote.drop_version(holder.remote.take(URI, LEASE_S), newest)


def test_what_is_written_while_both_are_compared_is_no_other_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turns here become a version, and the one that they stood behind is gone, before they are read."""
    time_s, bucket = [0.0], MemoryObjects()
    holder, asker = (Machine(tmp_path / name, bucket, lambda: time_s[0]) for name in ("holder", "asker"))
    making.sleep(holder.store, 300)
    holder.hands_over()
    holder.turn(3)
    with contextlib.suppress(errors.LeaseHeld):
        asker.takes()
    time_s[0] += 2 * LEASE_S
    assert asker.takes() == making.token_ids(0, 303)
    asker.turn(9)
    asker.hands_over()
    read = list[object]()

    def gone(core: StoreCore, record: JournalRecord) -> bytes:
        read.append(record)
        holder.store.replay_turns(URI)
        raise errors.BundleMissing("It is gone.", path="")

    monkeypatch.setattr(beyond, "ledger_of", gone)
    assert holder.takes() == making.token_ids(0, 309)
    assert len(read) == 1
