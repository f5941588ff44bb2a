"""A session moves from one machine to another over a network that fails, at each request of either of them; or is
dropped, and what it left is collected.

Whatever fails once: they go on, try again, and the session is there to the bit, held by one of them; or all of it has
gone, and nothing else.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import pytest
from torpor.memvid import errors
from torpor.memvid.remote import cloud_objects, collecting
from torpor.memvid.remote.heads import key_of
from torpor.memvid.remote.leases import Lease
from torpor.memvid.remote.leaving import LEAVING_KEY
from torpor.memvid.remote.objects import Objects
from torpor.memvid.remote.sealed_objects import KEY_BYTES, SealedObjects
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.remote import collecting_rig
from torpor.tests.memvid.remote.fault_proxy import FAULTS, HANGING, Fault, FaultProxy
from torpor.tests.memvid.remote.s3_servers import SERVERS, open_s3, s3_server
from torpor.tests.memvid.store_making import URI

TRIES: Final = 4
OTHER: Final = SessionUri("default", "other")
Answer = TypeVar("Answer")


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """Its name and its port."""
    with s3_server(request.param) as port:
        yield request.param, port


def again_if_it_fails(step: Callable[[], Answer]) -> Answer:
    """The answer of a step that is tried again after a refusal, as the daemon and people do."""
    for _ in range(TRIES - 1):
        try:
            return step()
        except errors.StoreError:
            pass
    return step()


def remote_of(store: Store, objects: Objects, machine: str) -> RemoteSessions:
    remote = RemoteSessions(store._core, objects, machine, lambda: 0.0)
    remote._is_proven = True  # the probe has tests of its own, and more requests than all else
    return remote


def hand_over(giver: RemoteSessions, taker: RemoteSessions, giving: Store) -> tuple[Lease, Lease]:
    """A version and a turn behind it are sent. The other one asks for the session, and it sleeps with that turn, is
    sent, and is free; the leases of both."""
    given = again_if_it_fails(lambda: giver.take(URI))
    again_if_it_fails(lambda: giver.push(given))
    record = making.turn(giving, 9)
    assert again_if_it_fails(lambda: giver.send_turns(given, record))
    giving.acknowledge([record])
    again_if_it_fails(lambda: taker.ask(URI))
    for _ in range(2):  # who is told wrongly that one has landed finds it out with the next
        again_if_it_fails(given.renew)
    assert given.request == taker.me
    giving.replay_turns(URI)
    again_if_it_fails(lambda: giver.push(given))
    again_if_it_fails(lambda: given.release(asleep=True))
    taken = again_if_it_fails(lambda: taker.take(URI))
    again_if_it_fails(lambda: taker.pull(taken.head))
    return given, taken


def open_both(
    patched: pytest.MonkeyPatch, ports: Sequence[int], fault: Fault, key: bytes | None = None
) -> Iterator[Objects]:
    """Objects of one new prefix, by each of the ports."""
    prefix, seconds = uuid.uuid4().hex, 0.3 if fault in HANGING else 10
    for port in ports:
        objects = open_s3(patched, port, prefix, seconds=seconds)
        yield objects if key is None else SealedObjects(objects, key)


def require_signed_only(fault: Fault, server: str) -> None:
    """These two take a body that is not the one that was signed. What was damaged so says it of itself: no more can be
    done once who wrote it has given the session away."""
    assert fault == "flipped_request"
    assert server in ("moto", "ministack")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("which", ["giver", "taker"])
@pytest.mark.parametrize("key", [None, bytes(KEY_BYTES)], ids=["plain", "sealed"])
def test_a_session_moves_whatever_fails_once(
    which: str,
    fault: Fault,
    key: bytes | None,
    server: tuple[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cloud_objects, "_RETRIES", 0)  # the client itself would hide most of what fails
    name, port = server
    for number in itertools.count():
        with (
            FaultProxy(port) as proxy,
            Store.open(tmp_path / f"{number}-giver", writable=True) as giving,
            Store.open(tmp_path / f"{number}-taker", writable=True) as taking,
        ):
            making.sleep(giving, 700)
            proxy.plan = {number: fault}
            ports = (proxy.port, port) if which == "giver" else (port, proxy.port)
            giver, taker = (
                remote_of(store, objects, machine)
                for machine, store, objects in zip(
                    ("giver", "taker"), (giving, taking), open_both(monkeypatch, ports, fault, key), strict=True
                )
            )
            try:
                given, taken = hand_over(giver, taker, giving)
            except errors.Corruption:
                require_signed_only(fault, name)
                continue
            assert making.ledger(taking) == making.token_ids(0, 709)
            making.require_awake(taking, 700)
            assert taking.require_session(URI).bundle_id == giving.require_session(URI).bundle_id
            taken.require()
            with pytest.raises(errors.LeaseLost):
                given.require()
            if len(proxy.asked) <= number:
                break
    assert number > 6


@pytest.mark.one_in(16)
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_dropped_goes_and_the_rest_stays_whatever_fails_once(
    fault: Fault, server: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_objects, "_RETRIES", 0)
    monkeypatch.setattr(collecting, "_GRACE_NS", 0)  # nobody waits for an hour here
    reading, readings = collecting._Collection._now_ns, itertools.count()  # in seconds, so each is a later one
    monkeypatch.setattr(collecting._Collection, "_now_ns", lambda self: reading(self) + next(readings) * 10**9)
    name, port = server
    with Store.open(tmp_path / "here", writable=True) as here:
        for seed, uri in enumerate((URI, OTHER)):
            making.sleep(here, 300, uri=uri, seed=seed)
        for number in itertools.count():
            with FaultProxy(port) as proxy, Store.open(tmp_path / f"{number}", writable=True) as there:
                faulty, direct = open_both(monkeypatch, (proxy.port, port), fault)
                remote, beside, taker = (
                    remote_of(store, objects, store.path)
                    for store, objects in ((here, faulty), (here, direct), (there, direct))
                )
                collecting_rig.push(beside, URI)
                dropped = keys(direct)
                collecting_rig.push(beside, OTHER)
                kept = keys(direct) - dropped
                proxy.plan = {number: fault}
                try:
                    drop_and_collect(remote)
                except errors.Corruption:
                    require_signed_only(fault, name)
                    continue
                collecting_rig.collect(beside)
                if collecting_rig.collect(beside).report.problems:  # where a head is damaged, nothing goes
                    require_signed_only(fault, name)
                    continue
                assert keys(direct) == {*kept, key_of(URI), LEAVING_KEY}
                taker.pull(taker.take(OTHER).head)
                making.require_awake(there, 300, uri=OTHER, seed=1)
                if len(proxy.asked) <= number:
                    break
    assert number > 20


def keys(objects: Objects) -> set[str]:
    return {entry.key for entry in objects.entries("")}


def drop_and_collect(remote: RemoteSessions) -> None:
    """Its packs are listed to leave, and go."""
    again_if_it_fails(lambda: remote.drop(remote.take(URI)))
    again_if_it_fails(lambda: collecting_rig.collect(remote))
    again_if_it_fails(lambda: collecting_rig.collect(remote))
