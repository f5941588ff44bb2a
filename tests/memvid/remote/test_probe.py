"""The probe takes an object store that holds to its conditions, and names what another one lets through."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from obstore.store import MemoryStore
from torpor.memvid.errors import RemoteError, RemoteUnclear, RemoteUnfit, RemoteUnreachable
from torpor.memvid.remote.cloud_objects import CloudObjects
from torpor.memvid.remote.folder_objects import FolderObjects
from torpor.memvid.remote.probe import probe
from torpor.tests.memvid.remote.faulty_objects import Asked, FaultyObjects, Killed, MemoryObjects, faults_of


class CreatesAnew(MemoryObjects):
    def create(self, key: str, data: bytes) -> str | None:
        self.set(key, data)
        return super().replace(key, data, self._tag(key))


class SaysNoAndWrites(MemoryObjects):
    def create(self, key: str, data: bytes) -> str | None:
        made = super().create(key, data)
        self.set(key, data)
        return made


class ForgetsTheTag(MemoryObjects):
    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        there = self.get(key, 1000)
        return None if there is None else super().replace(key, data, there.tag)


class ReplacesNothing(MemoryObjects):
    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        return super().replace(key, data, tag) if self.content(key) is not None else super().create(key, data)


class LooksThenWrites(MemoryObjects):
    """Holds to a condition while nobody else writes: all that look at once find it held."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self._verb = verb
        self._looked = threading.Barrier(4)

    def create(self, key: str, data: bytes) -> str | None:
        return super().create(key, data) if "at-once" not in key else self._racy("create", key, data, "")

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        return super().replace(key, data, tag) if "at-once" not in key else self._racy("replace", key, data, tag)

    def _racy(self, verb: str, key: str, data: bytes, tag: str) -> str | None:
        if verb != self._verb:
            return super().create(key, data) if verb == "create" else super().replace(key, data, tag)
        self._looked.wait()
        self.set(key, data)
        return self._tag(key)


UNFIT: dict[str, tuple[str, Callable[[], MemoryObjects]]] = {
    "creates anew": ("create_twice", CreatesAnew),
    "says no and writes": ("create_twice", SaysNoAndWrites),
    "forgets the tag": ("replace_stale", ForgetsTheTag),
    "replaces nothing": ("replace_missing", ReplacesNothing),
    "creates at once": ("create_at_once", lambda: LooksThenWrites("create")),
    "replaces at once": ("replace_at_once", lambda: LooksThenWrites("replace")),
}


@pytest.mark.parametrize("which", ["memory", "cloud", "folder"])
def test_an_object_store_that_holds_to_conditions_is_taken(which: str, tmp_path: Path) -> None:
    store = MemoryStore()
    objects = {
        "memory": MemoryObjects,
        "cloud": lambda: CloudObjects(lambda client, retries: store, "memory://"),
        "folder": lambda: FolderObjects(str(tmp_path), tmp_path.as_uri()),
    }[which]()
    probe(objects)
    assert list(objects.entries("")) == []


@pytest.mark.parametrize("which", UNFIT)
def test_one_that_lets_a_write_through_is_refused_by_name(which: str) -> None:
    check, make = UNFIT[which]
    objects = make()
    with pytest.raises(RemoteUnfit) as refused:
        probe(objects)
    assert refused.value.check == check
    assert check in refused.value.message
    assert not objects.keys()


def _requests() -> list[Asked]:
    objects = FaultyObjects(MemoryObjects())
    probe(objects)
    return objects.asked


def test_a_lost_answer_does_not_condemn_an_object_store() -> None:
    """Whatever goes wrong on the way: the probe passes, or says that it could not tell."""
    outcomes = set()
    for asked in _requests():
        for fault in set(faults_of(asked)) - {"flipped", "swapped", "shortened", "replayed"}:
            bucket = MemoryObjects()
            try:
                probe(FaultyObjects(bucket, {asked.number: fault}))
                outcomes.add("passed")
            except RemoteUnfit as error:
                pytest.fail(f"{fault} at {asked}: {error}")
            except (RemoteError, Killed) as error:
                outcomes.add(type(error).__name__)
            if fault.startswith("killed") or asked.verb == "remove":
                continue  # it could not take away what it wrote
            assert not bucket.keys(), f"{fault} at {asked}"
    assert outcomes >= {"passed", "RemoteUnreachable", "RemoteUnclear", "RemoteRefused", "Killed"}


def test_nothing_is_said_of_one_that_does_not_answer() -> None:
    with pytest.raises(RemoteUnreachable):
        probe(FaultyObjects(MemoryObjects(), lambda asked: "unreachable"))
    with pytest.raises(RemoteUnclear):
        probe(FaultyObjects(MemoryObjects(), lambda asked: "conflict" if asked.verb == "create" else None))
