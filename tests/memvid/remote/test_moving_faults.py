"""A session moves from one machine to another over a network that fails, at each request of either of them.

Whatever fails once: both go on, try again, and the session is there to the bit, held by one of them.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import pytest
from torpor.memvid import errors
from torpor.memvid.remote import cloud_objects
from torpor.memvid.remote.leases import Lease
from torpor.memvid.remote.objects import Objects
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.remote.fault_proxy import FAULTS, HANGING, Fault, FaultProxy
from torpor.tests.memvid.remote.s3_servers import SERVERS, open_s3, s3_server
from torpor.tests.memvid.store_making import URI

TRIES: Final = 4
Answer = TypeVar("Answer")


@pytest.fixture(scope="module", params=SERVERS)
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    with s3_server(request.param) as port:
        yield port


def again_if_it_fails(step: Callable[[], Answer]) -> Answer:
    """The answer of a step that is tried again after a refusal, as the daemon and people do."""
    for _ in range(TRIES - 1):
        try:
            return step()
        except errors.StoreError:
            pass
    return step()


def remote_of(store: Store, objects: Objects, machine: str, now: Callable[[], float]) -> RemoteSessions:
    remote = RemoteSessions(store._core, objects, machine, now)
    remote._is_proven = True  # the probe has tests of its own, and more requests than all else
    return remote


def give(remote: RemoteSessions) -> Lease:
    lease = again_if_it_fails(lambda: remote.take(URI))
    again_if_it_fails(lambda: remote.push(lease))
    again_if_it_fails(lambda: lease.release(asleep=True))
    return lease


def take(remote: RemoteSessions) -> Lease:
    lease = again_if_it_fails(lambda: remote.take(URI))
    again_if_it_fails(lambda: remote.pull(lease.head))
    return lease


@pytest.mark.one_in(1)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("which", ["giver", "taker"])
def test_a_session_moves_whatever_fails_once(
    which: str, fault: Fault, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_objects, "_RETRIES", 0)  # the client itself would hide most of what fails
    seconds = 0.3 if fault in HANGING else 10
    with Store.open(tmp_path / "here", writable=True) as here:
        receipt = making.sleep(here, 700)
        for number in itertools.count():
            prefix = uuid.uuid4().hex
            with FaultProxy(port) as proxy, Store.open(tmp_path / f"{number}", writable=True) as there:
                proxy.plan = {number: fault}
                ports = {"giver": port, "taker": port, which: proxy.port}
                bucket = {who: open_s3(monkeypatch, ports[who], prefix, seconds=seconds) for who in ports}
                given = give(remote_of(here, bucket["giver"], "giver", lambda: 0.0))
                taken = take(remote_of(there, bucket["taker"], "taker", lambda: 0.0))
                making.require_awake(there, 700)
                assert there.require_session(URI).bundle_id == receipt.bundle_id
                taken.require()
                with pytest.raises(errors.LeaseLost):
                    given.require()
                if len(proxy.asked) <= number:
                    break
        assert number > 4
