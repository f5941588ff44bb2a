"""A remote whose time is told by the test, machines that use it, and what has to hold at every moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from torpor.memvid.errors import RemoteUnreachable
from torpor.memvid.limits import REMOTE_GRACE_S
from torpor.memvid.remote.collecting import Collected
from torpor.memvid.remote.fetching import fetch
from torpor.memvid.remote.heads import Head
from torpor.memvid.remote.places import Places, manifest_key, places_key
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.remote.tails import record_of
from torpor.memvid.remote.versions import RemoteVersions
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.remote.faulty_objects import FaultyObjects, MemoryObjects

GRACE_S: Final = REMOTE_GRACE_S
TRIES: Final = 4


class World:
    """A bucket, and the time that all its machines and the object store itself go by. remembered: the places that each
    of its machines has seen."""

    def __init__(self, bucket: MemoryObjects) -> None:
        self.bucket = bucket
        self.remembered: dict[str, Places] = {}

    def copy(self) -> World:
        world = World(self.bucket.copy())
        world.remembered = self.remembered
        return world

    def now(self) -> float:
        return self.bucket.now_ns / 1e9

    def passes(self, seconds: float) -> None:
        self.bucket.now_ns += int(seconds * 1e9)

    def machine(self, store: Store, **faults: Any) -> RemoteSessions:
        objects = FaultyObjects(self.bucket, **faults)
        remote = RemoteSessions(store._core, objects, Path(store.path).name, self.now)
        remote._versions._places.update(self.remembered)
        remote._proven = remote._objects.place()  # the probe has tests of its own, and more requests than all else
        return remote

    def heads(self) -> list[Head]:
        keys = sorted(self.keys("heads"))
        return [Head.decode(self.bucket.content(key) or b"", key) for key in keys]

    def keys(self, *folders: str) -> set[str]:
        return {key for folder in folders for key in sorted(self.bucket.keys()) if key.startswith(f"{folder}/")}

    def require_whole(self) -> None:
        """All that a head names is there."""
        versions = RemoteVersions(self.bucket, self.now)
        for head in self.heads():
            bases = [record_of(self.bucket, key, head.uri).base for key in head.tail]
            for bundle_id in (*head.versions, *(base for base in bases if base is not None)):
                manifest = versions.require_manifest(bundle_id)
                for place in versions.places_for(manifest, bundle_id).values():
                    there = self.bucket.content(place.pack)
                    assert there is not None, f"{head.uri} needs {place.pack}, and it is gone"
                    assert len(there) >= place.frame.offset + place.frame.frame_bytes

    def require_nothing_else(self) -> None:
        """Nothing is there that no head names, but for the list of packs that leave."""
        named = {each for head in self.heads() for each in head.versions}
        versions = RemoteVersions(self.bucket, self.now)
        packs = {place.pack for each in named for place in (versions.places(each) or {}).values()}
        tails = {key for head in self.heads() for key in head.tail}
        wanted = packs | tails | {f(each) for each in named for f in (manifest_key, places_key)}
        assert self.keys("packs", "versions", "places", "tails", "probes") == wanted

    def require_awake(self, path: Path, uri: SessionUri, tokens: int) -> None:
        """Another machine gets the newest version to the bit."""
        versions = RemoteVersions(self.bucket, self.now)
        (head,) = (each for each in self.heads() if each.uri == uri)
        assert head.newest is not None
        with Store.open(path, writable=True) as there:
            fetch(there._core, versions, versions.require_manifest(head.newest), head.newest)
            making.require_awake(there, tokens, uri=uri)


def collect(remote: RemoteSessions) -> Collected:
    """A collection, and what a daemon does behind it."""
    collected = remote.collect(dry_run=False)
    for uri, keys in collected.orphans.items():
        remote.sweep(uri, keys)
    return collected


def collect_all(world: World, store: Store) -> None:
    """As many collections as it takes until all has gone that goes, each a grace behind the one before."""
    for _ in range(4):
        world.passes(GRACE_S + 1)
        collect(world.machine(store))


def push(remote: RemoteSessions, uri: SessionUri) -> None:
    """As a daemon does it: again if it took too long."""
    lease = remote.take(uri)
    for _ in range(TRIES - 1):
        try:
            remote.push(lease)
            break
        except RemoteUnreachable:
            pass
    else:
        remote.push(lease)
    lease.release(asleep=True)


def drop(remote: RemoteSessions, uri: SessionUri) -> None:
    remote.drop(remote.take(uri))
