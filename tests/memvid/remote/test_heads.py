"""A head says what it was made to say, of the session that it is asked of, and changes by compare-and-swap alone."""

from __future__ import annotations

import dataclasses
import string
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from torpor.memvid.errors import (
    CorruptHead,
    Corruption,
    HeadReplayed,
    InvalidDraft,
    LimitExceeded,
    RemoteError,
    RemoteTooLarge,
    RemoteUnclear,
    RemoteUnreachable,
    UnsupportedFormat,
)
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.seen_heads import SeenHeads
from torpor.memvid.format.packing import pack
from torpor.memvid.limits import (
    MAX_HEAD_BYTES,
    MAX_HEAD_VERSIONS,
    MAX_LEASE_S,
    MAX_MACHINE_CHARS,
    MAX_NAME_CHARS,
    MAX_TAIL_KEY_CHARS,
    MAX_TAIL_SEGMENTS,
    MAX_VERSION,
)
from torpor.memvid.remote.heads import Head, Heads, Holder, Party, key_of, tails_of, uri_in
from torpor.memvid.remote.objects import MAX_PART_CHARS, is_key
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.remote.faulty_objects import FaultyObjects, MemoryObjects
from torpor.tests.memvid.store_making import new_folder

URI = SessionUri("work", "notes")
PARTY = Party("00000000-0000-4000-8000-000000000001", "a machine of Ana's")
ID = "ab" * 32
OTHER_ID = "cd" * 32
SMALL = Head(URI, 1, 60, revision=1, token=b"t" * 16)
FULL_URI = SessionUri("n" * MAX_NAME_CHARS, "N" * MAX_NAME_CHARS)
TURNS = f"{tails_of(URI)}/1"
FULL = Head(
    FULL_URI,
    MAX_VERSION,
    MAX_LEASE_S,
    Holder(Party(PARTY.store, "ä" * MAX_MACHINE_CHARS), b"p" * 16, asleep=True),
    tuple(f"{number:064x}" for number in range(MAX_HEAD_VERSIONS)),
    tuple(f"{tails_of(FULL_URI)}/{number:0>100}" for number in range(MAX_TAIL_SEGMENTS)),
    Party(PARTY.store, "ä" * MAX_MACHINE_CHARS),
    MAX_VERSION,
    b"t" * 16,
)


MANY = b"".join(number.to_bytes(32, "big") for number in range(MAX_HEAD_VERSIONS + 1))


@pytest.fixture
def bucket() -> MemoryObjects:
    return MemoryObjects()


@pytest.fixture
def objects(bucket: MemoryObjects) -> FaultyObjects:
    return FaultyObjects(bucket)


@pytest.fixture
def heads(objects: FaultyObjects, folder: StoreFolder) -> Heads:
    return Heads(objects, SeenHeads(folder))


def with_id(bundle_id: str) -> Any:
    return lambda head: (head or Head(URI, 1, 60)).with_version(bundle_id)


# --- bytes


@pytest.mark.parametrize("head", [SMALL, FULL], ids=["small", "full"])
def test_a_head_reads_as_it_was_written_and_has_one_form(head: Head) -> None:
    data = head.encode()
    assert len(data) <= MAX_HEAD_BYTES
    assert Head.decode(data, "it") == head


def fields_of(head: Head) -> dict[str, Any]:
    return {
        "uri": str(head.uri),
        "epoch": head.epoch,
        "revision": head.revision,
        "holder": None,
        "lease_s": head.lease_s,
        "token": head.token,
        "versions": b"",
        "tail": [],
        "request": None,
    }


def sealed(*document: Any) -> bytes:
    packed = pack(list(document), "head")
    return blake3(packed).digest() + packed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("uri", "notes"),
        ("uri", 5),
        *((name, value) for name in ("epoch", "revision", "lease_s") for value in (0, -1, 1 << 53, True, 1.0, None)),
        ("lease_s", MAX_LEASE_S + 1),
        *(("token", value) for value in (b"", b"t" * 15, "t" * 16, None)),
        *(("holder", value) for value in (5, [], "abcd", [PARTY.store, "a", b"p" * 16])),
        ("holder", [PARTY.store, "a", b"p" * 16, 1]),
        ("holder", [PARTY.store, "a", b"p", True]),
        *(("request", value) for value in ("ab", [PARTY.store], ["store", "a"], [PARTY.store.upper() + "A", "a"])),
        *(("request", [PARTY.store, name]) for name in ("", "a\nb", "\x1b[2J", "a" * (MAX_MACHINE_CHARS + 1), 5, None)),
        ("request", ["{00000000-0000-4000-8000-000000000001}", "a"]),
        *(("versions", value) for value in (b"a" * 33, b"a" * 64, MANY, "", [], None)),
        *(("tail", value) for value in ("a", None, [5], [f"{TURNS}A"], ["../a"], [""], [TURNS] * 257)),
        ("tail", [TURNS.ljust(MAX_TAIL_KEY_CHARS + 1, "1")]),
        *(("tail", [key]) for key in ("heads/work/notes", "tails/work/other/1", f"{TURNS}/1", "packs/1", "tails/work")),
    ],
)  # fmt: skip
def test_a_field_that_no_writer_writes_is_refused(field: str, value: Any) -> None:
    """Turns of another session among them: a holder removes what its head names once a version has it."""
    assert Head.decode(sealed("torpor.head/1", fields_of(SMALL)), "it") == SMALL
    with pytest.raises(CorruptHead):
        Head.decode(sealed("torpor.head/1", {**fields_of(SMALL), field: value}), "it")


def test_fields_are_those_of_a_head_and_no_others() -> None:
    fields = fields_of(SMALL)
    less = {name: value for name, value in fields.items() if name != "tail"}
    for document in (
        ("torpor.head/1", less),
        ("torpor.head/1", {**fields, "more": 1}),
        ("torpor.head/1", []),
        ("torpor.head/1",),
        ("torpor.head/1", fields, 1),
        ("torpor.places/1", fields),
        (5, fields),
    ):
        with pytest.raises(CorruptHead):
            Head.decode(sealed(*document), "it")


def test_a_later_version_is_not_taken_for_damage() -> None:
    data = sealed("torpor.head/2", {"else": 1})
    with pytest.raises(UnsupportedFormat, match=r"reads torpor.head/1\. Use the Torpor that wrote it"):
        Head.decode(data, "it")
    with pytest.raises(CorruptHead, match="digest"):
        Head.decode(data[:-1] + b"\x02", "it")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_head_or_refused(data: bytes) -> None:
    for given_bytes in (data, blake3(data).digest() + data):
        with pytest.raises(CorruptHead):
            Head.decode(given_bytes, "it")


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    data = dataclasses.replace(SMALL, holder=Holder(PARTY, b"p" * 16), versions=(ID,), request=PARTY).encode()
    for at in range(len(data)):
        with pytest.raises(CorruptHead):
            Head.decode(data[:at], "it")
        for bit in range(8):
            with pytest.raises(CorruptHead):
                Head.decode(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :], "it")


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch": 0},
        {"lease_s": 0},
        {"versions": ("abc",)},
        {"versions": ("ab" * 31,)},
        {"versions": (ID, ID)},
        {"tail": ("A",)},
        {"request": Party("store", "a")},
        {"request": Party(PARTY.store, "a\n")},
        {"token": b""},
    ],
)
def test_what_no_reader_reads_is_not_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidDraft, match="cannot be written"):
        dataclasses.replace(SMALL, **wrong).encode()


def test_versions_come_last_and_once_and_not_beyond_the_limit() -> None:
    head = SMALL.with_version(ID).with_version(OTHER_ID, tail=[TURNS])
    assert (head.versions, head.newest, head.tail) == ((ID, OTHER_ID), OTHER_ID, (TURNS,))
    assert head.with_version(ID).versions == (ID, OTHER_ID)
    assert head.without_versions({ID, "ef" * 32}).versions == (OTHER_ID,)
    assert FULL.with_version(FULL.versions[5]).versions == FULL.versions
    with pytest.raises(LimitExceeded, match="4096 versions"):
        FULL.with_version(ID)


# --- keys


letters = string.ascii_letters + string.digits
names = st.builds(str.__add__, st.sampled_from(letters), st.text(letters + "._-", max_size=MAX_NAME_CHARS - 1))


@given(names, names)
def test_each_session_has_a_key_of_its_own_and_back(namespace: str, name: str) -> None:
    uri = SessionUri(namespace, name)
    key = key_of(uri)
    assert uri_in(key) == uri
    assert is_key(key)
    assert max(map(len, key.split("/"))) <= MAX_PART_CHARS - 60, "a folder has temporary names beside it"


@given(names)
def test_names_that_differ_in_large_letters_alone_have_other_keys(name: str) -> None:
    keys = {key_of(SessionUri("a", each)) for each in {name, name.lower(), name.upper(), name.swapcase()}}
    assert len(keys) == len({name, name.lower(), name.upper(), name.swapcase()})
    assert keys == {key.lower() for key in keys}


@pytest.mark.parametrize(
    "key",
    [
        *("heads/a", "heads/a/b/c", "heads//b", "packs/a", "heads/a/.b", "heads/a/b=", "heads/a/b=0", "heads/a/b=2"),
        *("heads/a/b=01", "heads/a/1=1", "heads/a/b=-1", "heads/a/b=1=1", "heads/a/b=x", "heads/a/B", "heads/a/%62"),
    ],
)
def test_what_no_head_has_for_a_key_names_no_session(key: str) -> None:
    assert uri_in(key) is None


def test_the_sessions_of_a_remote_are_listed(heads: Heads, bucket: MemoryObjects) -> None:
    for uri in (URI, SessionUri("work", "Notes"), SessionUri("Home", "x")):
        heads.change(uri, lambda head, uri=uri: Head(uri, 1, 60))  # type: ignore[misc]
    bucket.set("heads/work/b=0", b"")
    bucket.set("versions/a", b"")
    assert set(heads.uris()) == {URI, SessionUri("work", "Notes"), SessionUri("Home", "x")}


# --- changes


def test_a_head_is_made_changed_and_read(heads: Heads, bucket: MemoryObjects) -> None:
    assert heads.read(URI) is None
    made = heads.change(URI, with_id(ID))
    later = heads.change(URI, with_id(OTHER_ID))
    assert heads.read(URI) == later
    assert (later.head.versions, later.head.revision) == ((ID, OTHER_ID), 2)
    assert len({made.head.token, later.head.token}) == 2
    assert len(bucket.written[key_of(URI)]) == 2
    assert heads.change(URI, with_id(ID)) == later, "what changes nothing is not written"
    assert len(bucket.written[key_of(URI)]) == 2


def test_a_revision_grows_with_what_a_replay_would_take_back(heads: Heads) -> None:
    changes = (
        with_id(ID),
        lambda head: dataclasses.replace(head, request=PARTY),
        lambda head: dataclasses.replace(head, epoch=2),
        lambda head: dataclasses.replace(head, tail=(TURNS,)),
        lambda head: head.without_versions([ID]),
    )
    assert [heads.change(URI, change).head.revision for change in changes] == [1, 1, 2, 3, 4]


def test_what_others_change_in_between_is_kept(heads: Heads, objects: FaultyObjects, bucket: MemoryObjects) -> None:
    other = Heads(bucket, heads._seen)
    ids = iter(f"{number:064x}" for number in range(1, 9))
    meets = {1: 1, 3: 3, 5: 5}

    def within(asked: Any) -> None:
        if asked.number in meets:
            other.change(URI, with_id(next(ids)))

    objects.within = within
    seen = heads.change(URI, with_id(ID))
    assert set(seen.head.versions) == {ID, *(f"{number:064x}" for number in range(1, 4))}


def test_a_change_gives_up_when_others_are_always_faster(
    heads: Heads, objects: FaultyObjects, bucket: MemoryObjects
) -> None:
    other, numbers = Heads(bucket, heads._seen), iter(range(1, 99))

    def within(asked: Any) -> None:
        if asked.verb != "get":
            other.change(URI, with_id(f"{next(numbers):064x}"))

    objects.within = within
    with pytest.raises(RemoteUnreachable, match="Try again later"):
        heads.change(URI, with_id(ID))
    assert len(objects.asked) < 30
    assert ID not in other.read(URI).head.versions  # type: ignore[union-attr]


def test_a_change_that_is_unclear_to_the_end_says_so(heads: Heads, objects: FaultyObjects) -> None:
    objects.plan = lambda asked: None if asked.verb == "get" else "unclear"
    with pytest.raises(RemoteUnclear):
        heads.change(URI, with_id(ID))
    assert [each.verb for each in objects.asked] == ["get", "create"] * 8 + ["get"], "the last one is read back, too"


@pytest.mark.parametrize("fault", ["lost", "landed_twice"])
def test_an_own_write_is_known_by_its_token(fault: Any, heads: Heads, objects: FaultyObjects) -> None:
    objects.plan = lambda asked: None if asked.verb == "get" else fault
    seen = heads.change(URI, with_id(ID))
    later = heads.change(URI, with_id(OTHER_ID), seen)
    assert (later.head.versions, later.head.revision) == ((ID, OTHER_ID), 2)
    assert [each.verb for each in objects.asked] == ["get", "create", "get", "replace", "get"]
    objects.plan = {}
    assert heads.read(URI) == later


def test_a_change_may_give_up(heads: Heads, objects: FaultyObjects) -> None:
    def give_up(head: Head | None) -> Head:
        raise KeyError("no")

    with pytest.raises(KeyError):
        heads.change(URI, give_up)
    assert [each.verb for each in objects.asked] == ["get"]


# --- what may lie there


def test_another_sessions_head_is_refused(heads: Heads, bucket: MemoryObjects) -> None:
    other = SessionUri("work", "other")
    heads.change(other, lambda head: Head(other, 1, 60))
    bucket.set(key_of(URI), bucket.content(key_of(other)))
    for use in (heads.read, lambda uri: heads.change(uri, with_id(ID))):
        with pytest.raises(CorruptHead, match="the head of another session, torpor://work/other") as caught:
            use(URI)
        assert isinstance(caught.value, RemoteError)
        assert isinstance(caught.value, Corruption)


@pytest.mark.parametrize("fault", ["flipped", "shortened"])
def test_damage_on_the_way_is_refused(fault: Any, heads: Heads, objects: FaultyObjects) -> None:
    heads.change(URI, with_id(ID))
    objects.plan = lambda asked: fault
    with pytest.raises(CorruptHead, match="Put it back as it was"):
        heads.read(URI)


def test_too_many_bytes_are_not_taken_in(heads: Heads, bucket: MemoryObjects) -> None:
    bucket.set(key_of(URI), bytes(MAX_HEAD_BYTES + 1))
    with pytest.raises(RemoteTooLarge):
        heads.read(URI)


def test_an_older_head_than_before_is_refused_and_none_too(
    heads: Heads, objects: FaultyObjects, bucket: MemoryObjects, folder: StoreFolder
) -> None:
    key = key_of(URI)
    heads.change(URI, with_id(ID))
    old = bucket.content(key)
    heads.change(URI, with_id(OTHER_ID))
    after_a_restart = Heads(objects, SeenHeads(folder))
    for replayed, found in ((old, 1), (None, None)):
        bucket.set(key, replayed)
        for each in (heads, after_a_restart):
            for use in (each.read, lambda uri, each=each: each.change(uri, with_id(ID))):  # type: ignore[misc]
                with pytest.raises(HeadReplayed, match="Put the newer head back") as caught:
                    use(URI)
                assert (caught.value.seen, caught.value.found) == (2, found)
    assert bucket.content(key) is None, "nothing was written"


def test_what_was_read_counts_as_seen_and_what_only_renews_is_not_written_down(
    heads: Heads, bucket: MemoryObjects, folder: StoreFolder, tmp_path: Path
) -> None:
    elsewhere = new_folder(tmp_path / "elsewhere")
    file = Path(folder.path, "heads.json")
    heads.change(URI, with_id(ID))
    old, before = bucket.content(key_of(URI)), file.read_bytes()
    heads.change(URI, lambda head: dataclasses.replace(head, request=PARTY))  # type: ignore[type-var]
    assert file.read_bytes() == before
    Heads(bucket, SeenHeads(elsewhere)).change(URI, with_id(OTHER_ID))
    heads.read(URI)
    bucket.set(key_of(URI), old)
    with pytest.raises(HeadReplayed):
        heads.read(URI)


def test_the_versions_that_heads_have_are_known_without_asking(heads: Heads, objects: FaultyObjects) -> None:
    """Those that this store wrote, and those that it read; a listing, of all sessions, is not remembered."""
    assert heads.versions == {}
    heads.change(URI, with_id(ID))
    heads.change(URI, with_id(OTHER_ID))
    assert heads.versions == {URI: (ID, OTHER_ID)}
    again = Heads(objects, heads._seen)
    again.read(URI, noting=False)
    assert again.versions == {}
    again.read(URI)
    assert again.versions == {URI: (ID, OTHER_ID)}
    heads.change(URI, lambda head: dataclasses.replace(head, versions=()))
    assert heads.versions == {}
