"""The object store that does wrong what a plan says: each fault does what its name says."""

from __future__ import annotations

import pytest
from torpor.memvid.errors import RemoteRefused, RemoteUnclear, RemoteUnreachable
from torpor.tests.memvid.remote.faulty_objects import Asked, FaultyObjects, Killed, MemoryObjects, faults_of

VERBS = {
    "get": lambda objects: objects.get("packs/1", 100),
    "size": lambda objects: objects.size("packs/1"),
    "get_ranges": lambda objects: [
        b"".join(each) for each in objects.get_ranges([("packs/1", 0, 4), ("packs/1", 4, 4)])
    ],
    "create": lambda objects: objects.create("packs/3", b"new"),
    "replace": lambda objects: objects.replace("packs/1", b"new", '"2"'),
    "put": lambda objects: objects.put("packs/1", [b"ne", b"w"], 3),
    "remove": lambda objects: objects.remove("packs/1"),
    "entries": lambda objects: [each.key for each in objects.entries("packs/")],
}
CASES = [(verb, fault) for verb in VERBS for fault in faults_of(Asked(0, verb, ""))]
READ = {
    ("get", "flipped"): b"0123\x24567",
    ("get", "shortened"): b"0123",
    ("get", "swapped"): b"another",
    ("get", "replayed"): b"before",
    ("get_ranges", "flipped"): [b"0123", b"45\x267"],
    ("get_ranges", "shortened"): [b"0123", b"45"],
    ("get_ranges", "swapped"): [b"anot", b"her"],
    ("get_ranges", "replayed"): [b"befo", b"re"],
    ("entries", "stale"): ["packs/1"],
}
RAISES = {
    "unreachable": RemoteUnreachable,
    "refused": RemoteRefused,
    "lost": RemoteUnclear,
    "unclear": RemoteUnclear,
    "cut": RemoteUnreachable,
    "killed_before": Killed,
    "killed_after": Killed,
}
LANDS = {"lost", "landed_twice", "killed_after"}


@pytest.fixture
def bucket() -> MemoryObjects:
    made = MemoryObjects()
    for key, content in (("packs/1", b"before"), ("packs/1", b"01234567"), ("packs/2", b"another")):
        made.set(key, content)
    return made


@pytest.mark.parametrize(("verb", "fault"), CASES)
def test_a_fault_does_what_its_name_says(bucket: MemoryObjects, verb: str, fault: str) -> None:
    before = {key: bucket.content(key) for key in bucket.keys()}  # noqa: SIM118
    objects = FaultyObjects(bucket, {0: fault})
    if fault in RAISES:
        with pytest.raises(RAISES[fault]):
            VERBS[verb](objects)
    else:
        got = VERBS[verb](objects)
        expected = READ.get((verb, fault))
        assert (got.data if verb == "get" else got) == expected
    after = {key: bucket.content(key) for key in bucket.keys()}  # noqa: SIM118
    writes = verb in ("create", "replace", "put", "remove")
    assert (after != before) == (writes and fault in LANDS)
    assert [(each.number, each.verb) for each in objects.asked] == [(0, verb)]


@pytest.mark.parametrize("verb", VERBS)
def test_nothing_goes_wrong_without_a_plan(bucket: MemoryObjects, verb: str) -> None:
    assert VERBS[verb](FaultyObjects(bucket)) == VERBS[verb](bucket) or verb in ("create", "replace")


def test_a_client_that_was_killed_asks_nothing_more(bucket: MemoryObjects) -> None:
    objects = FaultyObjects(bucket, lambda asked: "killed_after" if asked.verb == "create" else None)
    assert objects.size("packs/1") == 8
    with pytest.raises(Killed):
        objects.create("packs/3", b"new")
    with pytest.raises(Killed):
        objects.size("packs/1")
    assert FaultyObjects(bucket).size("packs/3") == 3


def test_what_happens_between_two_requests(bucket: MemoryObjects) -> None:
    def within(asked: Asked) -> None:
        if asked.verb == "replace":
            bucket.set("packs/1", b"of somebody else")

    objects = FaultyObjects(bucket, within=within)
    found = objects.get("packs/1", 100)
    assert found is not None
    assert objects.replace("packs/1", b"mine", found.tag) is None
    assert bucket.content("packs/1") == b"of somebody else"
