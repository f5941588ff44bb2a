"""What is removed leaves a remote over a network that fails, at each request: another session stays whole, and nothing
else does."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from torpor.memvid import errors
from torpor.memvid.remote import cloud_objects, collecting
from torpor.memvid.remote.objects import Objects
from torpor.memvid.remote.sealed_objects import SealedObjects
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.remote.bucket_server import BucketServer
from torpor.tests.memvid.remote.collecting_rig import drop, push
from torpor.tests.memvid.remote.fault_proxy import FAULTS, HANGING, Fault, FaultProxy
from torpor.tests.memvid.remote.hand_over_rig import again_if_it_fails, remote_of, require_signed_only
from torpor.tests.memvid.remote.s3_servers import SERVERS, open_s3, s3_server
from torpor.tests.memvid.store_making import FORK_URI, URI

PARTS: Final = 12
"""Each has every twelfth request of all."""

HASTY_S: Final = 0.3
PATIENT_S: Final = 10
"""For an answer. What hangs is given up soon at the first try of each step; a busy machine has time at the others."""

Opened = Callable[[float], Objects]
"""The objects, with so many seconds for each answer."""


@pytest.fixture(scope="module", params=SERVERS)
def running(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """Its name and its port."""
    with s3_server(request.param) as port:
        yield request.param, port


@pytest.fixture
def server(running: tuple[str, int]) -> Iterator[tuple[str, int]]:
    """As `running`. Ours is a new one: it goes through all that it has ever had for a listing."""
    if running[0] != "own":
        yield running
        return
    with BucketServer() as own:
        yield "own", own.port


def free(store: Store, opened: Opened, first_s: float) -> None:
    """Remove a session, and collect until all has gone. What fails is tried again later."""

    def drop_it(store: Store, objects: Objects) -> None:
        drop(remote_of(store, objects, "here"), URI)

    for step in (drop_it, collect, collect, collect):
        seconds = itertools.chain([first_s], itertools.repeat(PATIENT_S))
        again_if_it_fails(lambda step=step, seconds=seconds: step(store, opened(next(seconds))))


def collect(store: Store, objects: Objects) -> None:
    remote = remote_of(store, objects, "here")
    collected = remote.collect(dry_run=False)
    for uri, keys in collected.orphans.items():
        remote.sweep(uri, keys)
    if collected.report.problems:
        raise errors.RemoteUnclear(collected.report.problems[0].message)


@pytest.mark.one_in(PARTS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_removed_goes_and_all_else_stays_whatever_fails_once(
    fault: Fault, part: int, server: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_objects, "_RETRIES", 0)  # the client itself would hide most of what fails
    monkeypatch.setattr(collecting, "_GRACE_NS", 0)
    first_s = HASTY_S if fault in HANGING else PATIENT_S
    name, port = server
    with Store.open(tmp_path / "here", writable=True) as here:
        first = making.sleep(here, 300)
        making.sleep(here, 400, uri=FORK_URI, before=first)
        for number in itertools.count(part, PARTS):
            prefix = uuid.uuid4().hex
            sound = open_s3(monkeypatch, port, prefix)
            for uri in (URI, FORK_URI):
                push(remote_of(here, sound, "here"), uri)
            before = {entry.key for entry in sound.entries("packs/")}
            with FaultProxy(port) as proxy:
                proxy.plan = {number: fault}
                try:
                    free(here, partial(_opened, monkeypatch, proxy.port, prefix), first_s)
                except (errors.Corruption, errors.RemoteUnclear):  # a head is damaged: nothing goes
                    require_signed_only(fault, name)
                    continue
                is_last = len(proxy.asked) <= number
            with Store.open(tmp_path / f"{number}", writable=True) as there:
                remote = remote_of(there, sound, "there")
                remote.pull(remote.take(FORK_URI).head)
                making.require_awake(there, 400, uri=FORK_URI)
                free(here, partial(_opened, monkeypatch, port, prefix), PATIENT_S)
                kept = {entry.key.partition("/")[0] for entry in sound.entries("")}
                assert kept <= {"heads", "leaving", "packs", "places", "versions"}
                assert len(list(sound.entries("versions/"))) == len(list(sound.entries("places/"))) == 1
                assert {entry.key for entry in sound.entries("packs/")} <= before
            for entry in sound.entries(""):
                sound.remove(entry.key)
            if is_last:
                break
        assert number > 2 * PARTS


def _opened(patched: pytest.MonkeyPatch, port: int, prefix: str, seconds: float) -> Objects:
    return open_s3(patched, port, prefix, seconds=seconds)


def test_a_bucket_that_keeps_old_versions_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first object that is read or written, also where it is sealed or counted."""
    for is_versioned in (True, False):
        with BucketServer(is_versioned=is_versioned) as server:
            objects = open_s3(monkeypatch, server.port, "p")
            assert not objects.keeps_old
            objects.create("heads/a", b"1")
            assert objects.keeps_old is is_versioned
            assert SealedObjects(objects, bytes(32)).keeps_old is is_versioned
            again = open_s3(monkeypatch, server.port, "p")
            assert again.get("heads/a", 10) is not None
            assert again.keeps_old is is_versioned
