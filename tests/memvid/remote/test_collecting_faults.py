"""What is removed leaves a remote over a network that fails, at each request: another session stays whole, and nothing
else does."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
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


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """Its name and its port."""
    with s3_server(request.param) as port:
        yield request.param, port


def free(store: Store, objects: Objects) -> None:
    """Remove a session, and collect until all has gone. What fails is tried again later."""
    again_if_it_fails(lambda: drop(remote_of(store, objects, "here"), URI))
    for _ in range(3):
        again_if_it_fails(lambda: collect(store, objects))


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
    seconds = 0.3 if fault in HANGING else 10
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
                    free(here, open_s3(monkeypatch, proxy.port, prefix, seconds=seconds))
                except (errors.Corruption, errors.RemoteUnclear):  # a head is damaged: nothing goes
                    require_signed_only(fault, name)
                    continue
                is_last = len(proxy.asked) <= number
            with Store.open(tmp_path / f"{number}", writable=True) as there:
                remote = remote_of(there, sound, "there")
                remote.pull(remote.take(FORK_URI).head)
                making.require_awake(there, 400, uri=FORK_URI)
                free(here, sound)
                kept = {entry.key.partition("/")[0] for entry in sound.entries("")}
                assert kept <= {"heads", "leaving", "packs", "places", "versions"}
                assert len(list(sound.entries("versions/"))) == len(list(sound.entries("places/"))) == 1
                assert {entry.key for entry in sound.entries("packs/")} <= before
            if is_last:
                break
        assert number > 2 * PARTS


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
