"""What every object store has to do: one contract, for each that is here without a server."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore
from torpor.memvid.errors import RemoteTooLarge
from torpor.memvid.remote.cloud_objects import CloudObjects
from torpor.memvid.remote.folder_objects import FolderObjects
from torpor.memvid.remote.objects import MAX_PART_CHARS, Objects, parts_of
from torpor.memvid.remote.sealed_objects import KEY_BYTES, SealedObjects
from torpor.tests.memvid.remote.faulty_objects import FaultyObjects, MemoryObjects
from torpor.tests.memvid.remote.s3_servers import SERVERS, open_s3, s3_server

KEY = "heads/default/na%2fme=1.x"
MIB = 1 << 20


WITHOUT_SERVER = ("memory", "faulty", "cloud", "folder", "sealed cloud", "sealed folder")


@pytest.fixture(scope="module")
def ports() -> Iterator[dict[str, int]]:
    with contextlib.ExitStack() as running:
        yield {name: running.enter_context(s3_server(name)) for name in SERVERS}


@pytest.fixture(params=[*WITHOUT_SERVER, *SERVERS])
def objects(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ports: dict[str, int]
) -> Iterator[Objects]:
    store, name = MemoryStore(), request.param
    makers: dict[str, Callable[[], Objects]] = {
        "memory": MemoryObjects,
        "faulty": lambda: FaultyObjects(MemoryObjects()),
        "cloud": lambda: CloudObjects(lambda times, retries: store, "memory://"),
        "folder": lambda: FolderObjects(str(tmp_path), tmp_path.as_uri()),
        "sealed cloud": lambda: SealedObjects(makers["cloud"](), bytes(KEY_BYTES)),
        "sealed folder": lambda: SealedObjects(makers["folder"](), bytes(KEY_BYTES)),
    }
    opened = makers[name]() if name in makers else open_s3(monkeypatch, ports[name], f"a/{uuid.uuid4()}")
    yield opened
    opened.close()


def read(objects: Objects, key: str) -> bytes | None:
    found = objects.get(key, 64 * MIB)
    return None if found is None else found.data


def ranges(objects: Objects, key: str, *spans: tuple[int, int]) -> list[bytes]:
    parts = list(objects.get_ranges([(key, *span) for span in spans]))
    assert None not in parts
    return [b"".join(part) for part in parts if part is not None]


def test_what_is_not_there_is_a_value(objects: Objects) -> None:
    assert objects.get("heads/none", 10) is None
    assert objects.size("heads/none") is None
    assert list(objects.get_ranges([("heads/none", 0, 1)])) == [None]
    objects.put("packs/1", [b"0123"], 4)
    spans = [("packs/1", 1, 2), ("packs/2", 0, 9), ("packs/2", 2, 1), ("packs/1", 0, 1)]
    assert [part and b"".join(part) for part in objects.get_ranges(spans)] == [b"12", None, None, b"0"]
    objects.remove("packs/1")
    assert list(objects.entries("heads/")) == []
    objects.remove("heads/none")


def test_an_object_is_made_once(objects: Objects) -> None:
    tag = objects.create(KEY, b"first")
    assert tag is not None
    assert objects.create(KEY, b"second") is None
    found = objects.get(KEY, 5)
    assert found is not None
    assert (found.data, found.tag) == (b"first", tag)
    assert objects.size(KEY) == 5


def test_an_object_is_replaced_by_who_knows_its_tag(objects: Objects) -> None:
    first = objects.create(KEY, b"first")
    assert first is not None
    second = objects.replace(KEY, b"second", first)
    assert second not in (None, first)
    assert objects.replace(KEY, b"third", first) is None
    assert read(objects, KEY) == b"second"
    assert objects.replace(KEY, b"third", second) is not None
    assert read(objects, KEY) == b"third"


def test_what_is_missing_is_not_replaced(objects: Objects) -> None:
    tag = objects.create(KEY, b"first")
    assert tag is not None
    assert objects.replace("heads/none", b"second", tag) is None
    assert objects.get("heads/none", 10) is None
    objects.remove(KEY)
    assert objects.replace(KEY, b"second", tag) is None
    assert objects.get(KEY, 10) is None


@pytest.mark.parametrize("verb", ["create", "replace"])
def test_one_of_many_at_once_lands(objects: Objects, verb: str) -> None:
    tag = objects.create(KEY, b"first") if verb == "replace" else None
    landed: list[bytes] = []
    begin = threading.Barrier(16)

    def write(data: bytes) -> None:
        begin.wait()
        if objects.create(KEY, data) if tag is None else objects.replace(KEY, data, tag):
            landed.append(data)

    threads = [threading.Thread(target=write, args=(f"writer {number}".encode(),)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert landed == [read(objects, KEY)]


def test_a_large_object_is_refused_before_it_is_taken_in(objects: Objects) -> None:
    objects.put(KEY, [b"x" * MIB], MIB)
    with pytest.raises(RemoteTooLarge) as refused:
        objects.get(KEY, MIB - 1)
    assert refused.value.limit == MIB - 1
    assert read(objects, KEY) == b"x" * MIB


def test_ranges_come_in_the_order_asked_for(objects: Objects) -> None:
    data = bytes(range(256)) * 4096 * 20  # 20 MiB: more than one request may bring
    objects.put(KEY, [data[:MIB], data[MIB : 3 * MIB], data[3 * MIB :]], len(data))
    spans = [(5 * MIB, 3), (0, 10 * MIB), (7, 0), (7, 1), (8, 2), (len(data) - 1, 1)]
    assert ranges(objects, KEY, *spans) == [data[first : first + size] for first, size in spans]
    assert ranges(objects, KEY) == []


def test_a_range_that_ends_early_gives_what_there_is(objects: Objects) -> None:
    objects.put(KEY, [b"0123456789"], 10)
    assert ranges(objects, KEY, (8, 5), (10, 1), (0, 1), (3 * MIB, 2)) == [b"89", b"", b"0", b""]


@pytest.mark.parametrize("size", [0, 1, 9 * MIB])
def test_a_put_writes_over_what_is_there(objects: Objects, size: int) -> None:
    objects.create(KEY, b"before")
    objects.put(KEY, (b"x" for _ in range(0)) if not size else iter([b"x" * (size - 1), b"y"]), size)
    assert read(objects, KEY) == (b"x" * (size - 1) + b"y" if size else b"")


@pytest.mark.parametrize("size", [1, 9 * MIB])
@pytest.mark.parametrize("error", [LookupError, FileNotFoundError])
def test_parts_that_fail_leave_what_was_there(objects: Objects, size: int, error: type[Exception]) -> None:
    """What they raise is raised, also what a client of object stores raises itself."""

    def parts() -> Iterator[bytes]:
        yield b"x" * size
        raise error("a block is damaged")

    with pytest.raises(error, match="a block is damaged"):
        objects.put(KEY, parts(), size + 1)
    assert objects.get(KEY, 10) is None
    objects.create(KEY, b"before")
    with pytest.raises(error):
        objects.put(KEY, parts(), size + 1)
    assert read(objects, KEY) == b"before"


@pytest.mark.parametrize(("parts", "size"), [([b"12"], 3), ([b"12"], 1), ([b"x" * 9 * MIB, b"y"], 9 * MIB)])
def test_parts_of_another_size_are_no_object(objects: Objects, parts: list[bytes], size: int) -> None:
    with pytest.raises(ValueError):
        objects.put(KEY, parts, size)
    assert objects.size(KEY) is None


def test_a_listing_has_the_objects_of_whole_parts(objects: Objects) -> None:
    for key in ("heads/a/x", "heads/a/y", "heads/ab/x", "packs/1"):
        objects.create(key, key.encode())
    listed = {entry.key: entry.size_bytes for entry in objects.entries("heads/a/")}
    assert listed == {"heads/a/x": 9, "heads/a/y": 9}
    assert {entry.key for entry in objects.entries("")} == {"heads/a/x", "heads/a/y", "heads/ab/x", "packs/1"}
    objects.remove("heads/a/x")
    assert [entry.key for entry in objects.entries("heads/a/")] == ["heads/a/y"]


@pytest.mark.parametrize(
    "key", ["", "/", "a/", "/a", "a//b", ".a", "a/..", "A", "a b", "a\\b", "ä", "a\n", "a" * (MAX_PART_CHARS + 1)]
)
def test_a_text_that_is_no_key_reaches_no_object_store(objects: Objects, key: str) -> None:
    with pytest.raises(ValueError):
        parts_of(key)
    for call in (
        lambda: objects.get(key, 1),
        lambda: objects.size(key),
        lambda: list(objects.get_ranges([(key, 0, 1)])),
        lambda: objects.create(key, b""),
        lambda: objects.replace(key, b"", "tag"),
        lambda: objects.put(key, [], 0),
        lambda: objects.remove(key),
    ):
        with pytest.raises(ValueError):
            call()
