"""A session moves from one machine to another over a network that fails, at each request of either of them.

Whatever fails once: both go on, try again, and the session is there to the bit, held by one of them.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from torpor.memvid import errors
from torpor.memvid.remote import cloud_objects
from torpor.memvid.remote.leases import Lease
from torpor.memvid.remote.objects import Objects
from torpor.memvid.remote.sealed_objects import KEY_BYTES, SealedObjects
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.remote.fault_proxy import FAULTS, HANGING, Fault, FaultProxy
from torpor.tests.memvid.remote.hand_over_rig import again_if_it_fails, remote_of, require_signed_only
from torpor.tests.memvid.remote.s3_servers import SERVERS, open_s3, s3_server
from torpor.tests.memvid.store_making import URI


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """Its name and its port."""
    with s3_server(request.param) as port:
        yield request.param, port


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
