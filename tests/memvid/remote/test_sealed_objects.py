"""Objects that others hold: they tell nothing, and no bit, no place and no age of them is believed that is not ours.

That they are objects as all others is in `test_objects.py`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
from torpor.memvid.errors import CorruptObject, HeadReplayed, InvalidRemote, RemoteTooLarge
from torpor.memvid.folder.seen_heads import SeenHeads
from torpor.memvid.limits import MAX_NAME_CHARS, MAX_TAIL_KEY_CHARS
from torpor.memvid.remote import sealed_objects
from torpor.memvid.remote.heads import Head, Heads, key_of
from torpor.memvid.remote.objects import MAX_PART_CHARS, is_key
from torpor.memvid.remote.sealed_objects import (
    KEY_BYTES,
    SALT_BYTES,
    TAG_BYTES,
    SealedObjects,
    content_bytes,
    sealed_bytes,
)
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.remote.faulty_objects import FaultyObjects, MemoryObjects
from torpor.tests.memvid.store_making import new_folder

KEY, OTHER_KEY = bytes(range(KEY_BYTES)), bytes(range(1, KEY_BYTES + 1))
SEGMENT = 64


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_objects, "SEGMENT_BYTES", SEGMENT)
    monkeypatch.setattr(sealed_objects, "_SEALED_SEGMENT", SEGMENT + TAG_BYTES)


@pytest.fixture
def bucket() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture
def objects(bucket: MemoryObjects) -> SealedObjects:
    return SealedObjects(bucket, KEY)


def lies_there(bucket: MemoryObjects, name: str) -> bytes:
    data = bucket.content(name)
    assert data is not None
    return data


def ranges(objects: SealedObjects, key: str, *spans: tuple[int, int]) -> list[bytes]:
    return [b"".join(part or ()) for part in objects.get_ranges([(key, *span) for span in spans])]


# --- names


KEYS = (
    "heads/a/b",
    f"heads/{'n' * MAX_NAME_CHARS}/{'n' * MAX_NAME_CHARS}={'f' * (MAX_NAME_CHARS // 4)}",
    f"packs/{'0' * 64}.0",
    f"marked/tails/{'t' * 190}/{'s' * (MAX_TAIL_KEY_CHARS - 197)}",
    f"a/{'b' * MAX_PART_CHARS}",
)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_has_one_name_which_leads_back_to_it_and_tells_nothing(objects: SealedObjects, key: str) -> None:
    name, (first, _, rest) = objects.name_of(key), key.partition("/")
    assert (name, objects.key_of(name)) == (SealedObjects(MemoryObjects(), KEY).name_of(key), key)
    assert is_key(name)
    assert name.split("/")[0] == first
    assert not {each for each in rest.split("/") if len(each) > 3 and each in name}
    other = SealedObjects(MemoryObjects(), OTHER_KEY)
    assert other.name_of(key) != name
    assert other.key_of(name) is None


def test_a_name_that_is_not_ours_in_each_letter_is_nobodys(objects: SealedObjects, bucket: MemoryObjects) -> None:
    """Letters changed, added and left out, cuts elsewhere, under another first part, in plain: no listing has them."""
    name = objects.name_of(KEYS[1])
    first, *parts = name.split("/")
    text = "".join(parts)
    wrong = {f"{first}/{text[:at]}{letter}{text[at + 1 :]}" for at in range(len(text)) for letter in "a7="}
    wrong |= {name[:-1], name[:-8], name + "a", name + "=", f"packs/{'/'.join(parts)}"}
    wrong |= {KEYS[0], "remote.json", "heads/a"}
    wrong |= {f"{first}/{text[:at]}/{text[at:]}" for at in (1, 8, 199, 201)} | {f"{first}/{text}"}
    wrong.discard(name)
    for each in wrong:
        assert objects.key_of(each) is None, each
        if is_key(each):
            bucket.set(each, b"not ours")
    assert list(objects.entries("")) == []
    objects.create(KEYS[1], b"ours")
    assert [(each.key, each.size_bytes) for each in objects.entries("heads/")] == [(KEYS[1], 4)]


def test_a_key_of_one_part_is_none(objects: SealedObjects) -> None:
    with pytest.raises(ValueError, match="one part"):
        objects.create("remote.json", b"")


# --- sizes


def test_the_size_of_a_content_follows_from_that_of_its_object_and_of_others_is_0() -> None:
    sealed = [sealed_bytes(size) for size in range(5 * SEGMENT)]
    assert sealed == sorted(set(sealed))
    for size, there in enumerate(sealed):
        assert content_bytes(there) == size
    assert {content_bytes(size) for size in set(range(sealed[-1])) - set(sealed)} == {0}


def test_a_large_object_is_refused_by_the_size_of_its_content(objects: SealedObjects) -> None:
    objects.create("packs/a", bytes(SEGMENT + 1))
    with pytest.raises(RemoteTooLarge) as refused:
        objects.get("packs/a", SEGMENT)
    assert (refused.value.limit, refused.value.key) == (SEGMENT, "packs/a")


# --- contents


SIZES = (0, 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 3 * SEGMENT, 3 * SEGMENT + 7)


def content(size: int, seed: int = 0) -> bytes:
    return Random(seed).randbytes(size)


def all_ways(objects: SealedObjects, key: str, size: int) -> Iterator[Callable[[], object]]:
    """Each way to read a whole content."""
    yield lambda: objects.get(key, size + SEGMENT)
    if size:
        yield lambda: ranges(objects, key, (0, size))
        yield lambda: ranges(objects, key, *((at, 1) for at in range(size)))


@pytest.mark.parametrize("size", SIZES)
def test_no_bit_may_be_another_and_no_byte_too_few_or_too_many(
    objects: SealedObjects, bucket: MemoryObjects, size: int
) -> None:
    objects.create("packs/a", content(size))
    name = objects.name_of("packs/a")
    good = lies_there(bucket, name)
    for bit in range(8 * len(good)):
        bucket.set(name, good[: bit // 8] + bytes([good[bit // 8] ^ 1 << bit % 8]) + good[bit // 8 + 1 :])
        with pytest.raises(CorruptObject, match=f"packs/a, there as {name}, is not what was written"):
            objects.get("packs/a", size)
    for wrong in [good[:at] for at in range(len(good))] + [good + bytes(more) for more in (1, 16, 17, SEGMENT + 16)]:
        bucket.set(name, wrong)
        with pytest.raises(CorruptObject):
            objects.get("packs/a", size + 2 * SEGMENT)
        if size and len(wrong) < len(good):
            with pytest.raises(CorruptObject):
                ranges(objects, "packs/a", (0, size))
    bucket.set(name, good)
    found = objects.get("packs/a", size)
    assert found is not None
    assert found.data == content(size)


def test_no_flipped_bit_comes_in_a_range(objects: SealedObjects, bucket: MemoryObjects) -> None:
    """A range that lies in other segments is whole."""
    size = 3 * SEGMENT + 7
    objects.put("packs/a", [content(size)], size)
    name = objects.name_of("packs/a")
    good = lies_there(bucket, name)
    for at in range(len(good)):
        bucket.set(name, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        for number in range(4):
            first, wide = number * SEGMENT, min(SEGMENT, size - number * SEGMENT)
            begins = SALT_BYTES + number * (SEGMENT + TAG_BYTES)
            if at < SALT_BYTES or begins <= at < begins + wide + TAG_BYTES:
                with pytest.raises(CorruptObject):
                    ranges(objects, "packs/a", (first, wide))
            else:
                assert ranges(objects, "packs/a", (first, wide)) == [content(size)[first : first + wide]]


def test_segments_that_are_moved_doubled_or_left_out_are_refused(objects: SealedObjects, bucket: MemoryObjects) -> None:
    """Also those of another content that the same object had, and of another object."""
    size, step = 3 * SEGMENT, SEGMENT + TAG_BYTES
    name, parts = objects.name_of("packs/a"), list[list[bytes]]()
    for key, seed in (("packs/a", 1), ("packs/a", 0), ("packs/b", 0)):
        objects.put(key, [content(size, seed)], size)
        data = lies_there(bucket, objects.name_of(key))
        parts.append([data[:SALT_BYTES], *(data[at : at + step] for at in range(SALT_BYTES, len(data), step))])
    earlier, ours, others = parts
    wrong = [[ours[0], *order] for count in range(5) for order in itertools.product(ours[1:], repeat=count)]
    wrong += [[*ours[:at], theirs[at], *ours[at + 1 :]] for theirs in (earlier, others) for at in range(4)]
    assert (wrong.count(ours), len(wrong)) == (1, 129)
    for each in wrong:
        if each != ours:
            bucket.set(name, b"".join(each))
            with pytest.raises(CorruptObject):
                objects.get("packs/a", 2 * size)
            if each[: len(ours)] == ours:
                assert ranges(objects, "packs/a", (0, size)) == [content(size)], "what lies behind it is not read"
                continue
            with pytest.raises(CorruptObject):
                ranges(objects, "packs/a", (0, size))


def test_an_object_under_the_name_of_another_is_refused(objects: SealedObjects, bucket: MemoryObjects) -> None:
    """Also of the same content, and with another key."""
    keys = ("heads/a/b", "heads/a/c", "packs/a/b", "tails/a/b")
    for key in keys:
        objects.create(key, b"alike")
    names = [objects.name_of(key) for key in keys]
    contents = [lies_there(bucket, name) for name in names]
    assert len(set(contents)) == len(keys)
    for (at, name), other in itertools.product(enumerate(names), contents):
        bucket.set(name, other)
        for read in all_ways(objects, keys[at], 5):
            if other != contents[at]:
                with pytest.raises(CorruptObject):
                    read()
            else:
                read()
    theirs = SealedObjects(bucket, OTHER_KEY)
    theirs.create("heads/a/b", b"alike")
    bucket.set(names[0], lies_there(bucket, theirs.name_of("heads/a/b")))
    with pytest.raises(CorruptObject):
        objects.get("heads/a/b", 5)


def test_nothing_is_written_twice_alike_and_what_was_written_lies_nowhere(
    objects: SealedObjects, bucket: MemoryObjects
) -> None:
    """So that nobody learns which contents are the same, and no key encrypts two."""
    data = bytes(3 * SEGMENT)
    tag = objects.create("heads/a/b", data)
    assert tag is not None
    objects.replace("heads/a/b", data, tag)
    objects.put("heads/a/b", [data], len(data))
    (written,) = bucket.written.values()
    blocks = [each[at : at + 16] for each in written if each for at in range(0, len(each) - 16, 16)]
    assert len(set(blocks)) == len(blocks) > 30


def test_ranges_are_those_of_the_content_and_ask_for_little_more(objects: SealedObjects, bucket: MemoryObjects) -> None:
    """All in one call, the salt first; of a segment that two neighbors lie in once."""
    size, random = 20 * SEGMENT + 5, Random(7)
    data = content(size)
    objects.put("packs/a", iter([data[:100], b"", data[100:]]), size)
    for _ in range(200):
        firsts = sorted(random.randrange(size + 20) for _ in range(random.randrange(1, 6)))
        spans = [(first, random.choice((0, 1, SEGMENT, random.randrange(300)))) for first in firsts]
        asked = FaultyObjects(bucket)
        assert ranges(SealedObjects(asked, KEY), "packs/a", *spans) == [data[at : at + wide] for at, wide in spans]
        assert len(asked.asked) == any(wide for _, wide in spans), "one request, and none for nothing"
        most = SALT_BYTES + sum(wide + 2 * (SEGMENT + 2 * TAG_BYTES) + wide // 2 for _, wide in spans)
        assert sum(one.size_bytes for one in asked.asked) <= most
    asked = FaultyObjects(bucket)
    ranges(SealedObjects(asked, KEY), "packs/a", *((at, 10) for at in range(0, 2 * SEGMENT, 10)))
    assert asked.asked[0].size_bytes == SALT_BYTES + 3 * (SEGMENT + TAG_BYTES)


def test_a_large_object_goes_and_comes_a_segment_at_a_time(objects: SealedObjects, bucket: MemoryObjects) -> None:
    """No more is taken of what is written, or was asked for, than is given."""
    given, size = list[int](), 40 * SEGMENT

    def parts() -> Iterator[bytes]:
        for number in range(40):
            given.append(number)
            yield bytes(SEGMENT)

    came = list[int]()

    class Taking(MemoryObjects):
        def put(self, key: str, parts: Any, size_bytes: int) -> None:
            for number, _ in enumerate(parts):
                came.append(len(given) - number)

    SealedObjects(Taking(), KEY).put("packs/a", parts(), size)
    assert came == [0] * 41
    objects.put("packs/a", parts(), size)
    assert next(objects.get_ranges([("packs/a", 0, SEGMENT), ("packs/a", size - 1, 1)])) == [bytes(SEGMENT)]


# --- heads


def test_an_old_head_is_found_and_costs_no_more_requests(bucket: MemoryObjects, tmp_path: Any) -> None:
    folder, uri, asked = new_folder(tmp_path / "store"), SessionUri("work", "Notes"), FaultyObjects(bucket)
    objects = SealedObjects(asked, KEY)
    heads, name = Heads(objects, SeenHeads(folder)), objects.name_of(key_of(uri))
    heads.change(uri, lambda head: Head(uri, 1, 60))
    old = bucket.content(name)
    seen = heads.change(uri, lambda head: Head(uri, 2, 60))
    assert [each.verb for each in asked.asked] == ["get", "create", "get", "replace"]
    assert heads.read(uri) == seen
    assert list(heads.uris()) == [uri]
    for replayed in (old, None):
        bucket.set(name, replayed)
        with pytest.raises(HeadReplayed):
            heads.read(uri)
    folder.close()


def test_a_head_whose_answer_was_lost_is_known_again(bucket: MemoryObjects, tmp_path: Any) -> None:
    """Though it is other bytes each time that it is written."""
    folder, uri = new_folder(tmp_path / "store"), SessionUri("work", "notes")
    asked = FaultyObjects(bucket, {1: "lost", 4: "landed_twice"})
    heads = Heads(SealedObjects(asked, KEY), SeenHeads(folder))
    heads.change(uri, lambda head: head or Head(uri, 1, 60))
    assert heads.change(uri, lambda head: Head(uri, 2, 60)).head.revision == 2
    assert [each.verb for each in asked.asked] == ["get", "create", "get", "get", "replace", "get"]
    folder.close()


def test_without_the_package_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, bucket: MemoryObjects) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(InvalidRemote, match=r"pip install 'torpor\[remote\]'"):
        SealedObjects(bucket, KEY)
