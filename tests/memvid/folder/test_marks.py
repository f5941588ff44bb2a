"""Tags and pins: one meaning each, kept through every failure, and a file that is believed whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from torpor.memvid import errors
from torpor.memvid.disk import durable
from torpor.memvid.errors import CorruptMarks, DurabilityLost, InvalidTag, LimitExceeded, MarkNotFound, NoSpace
from torpor.memvid.folder import marks as marks_module
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.marks import (
    MARKS_FILE,
    Marks,
    SessionMarks,
    VersionMarks,
    decode_marks,
    encode_marks,
    findings_of_missing,
    is_stripped,
)
from torpor.memvid.limits import MAX_MARKS, MAX_MARKS_BYTES, MAX_MARKS_NODES, MAX_STRIPS
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.fuzz.marks_target import sealed
from torpor.tests.memvid.store_making import meanwhile, refusing, taking_at_most

UUID = "01234567-89ab-cdef-0123-456789abcdef"
SCOUT = SessionUri("default", "scout")
WRITER = SessionUri("work", "writer")
A, B, C, D = ("aa" * 32, "bb" * 32, "cc" * 32, "dd" * 32)


@pytest.fixture
def marked(folder: StoreFolder) -> Marks:
    """Marks that lie in the store."""
    marks = Marks(folder.uuid).tag(SCOUT, A, "before-refactor").pin(SCOUT, B).tag(WRITER, C, "draft")
    marks.save(folder)
    return marks


def file_of(folder: StoreFolder) -> Path:
    return Path(folder.path) / MARKS_FILE


def test_a_strip_is_known_at_once_and_the_file_is_read_once(folder: StoreFolder, monkeypatch: Any) -> None:
    Marks(folder.uuid).strip({SCOUT: [A]}).save(folder)
    decode, reads = marks_module.decode_marks, list[str]()
    monkeypatch.setattr(marks_module, "decode_marks", lambda *of: reads.append(of[-1]) or decode(*of))
    for _ in range(3):
        assert (is_stripped(folder, A), is_stripped(folder, B)) == (True, False)
        assert Marks.load(folder).stripped == {A}
    assert len(reads) == 1
    Marks(folder.uuid).strip({SCOUT: [B]}).save(folder)
    assert (is_stripped(folder, A), is_stripped(folder, B)) == (False, True)
    file_of(folder).write_bytes(b"rot")
    assert is_stripped(folder, B) is None
    file_of(folder).unlink()
    assert is_stripped(folder, B) is None


def test_a_missing_version_is_told_at_once_and_a_session_without_one_costs_no_listing(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = refusing(AssertionError("nothing is to be looked for"))
    Marks(folder.uuid).strip({SCOUT: [A]}).save(folder)
    with monkeypatch.context() as patch:
        patch.setattr(StoreFolder, "list_versions", never)
        assert findings_of_missing(folder, never) == []
        Marks(folder.uuid).tag(WRITER, B, "draft").save(folder)
        assert findings_of_missing(folder, never, SCOUT) == []
        assert findings_of_missing(folder, {B}.__contains__) == []
        patch.setattr(marks_module, "decode_marks", never)
        assert findings_of_missing(folder, never, SCOUT) == [], "the file is the one that was read"
    for uri in (None, WRITER):
        (told,) = findings_of_missing(folder, set[bytes]().__contains__, uri)
        assert B in told.path
    Marks(folder.uuid).save(folder)
    assert findings_of_missing(folder, set[bytes]().__contains__, WRITER) == []


def some_marks() -> Marks:
    return Marks(UUID).tag(SCOUT, A, "before-refactor").tag(SCOUT, A, "v1.0").pin(SCOUT, A).pin(SCOUT, B)


# --- what marks mean


def test_marks_read_back_as_they_were_saved(folder: StoreFolder) -> None:
    assert Marks.load(folder) == Marks(folder.uuid)
    marks = Marks(folder.uuid).tag(SCOUT, A, "before-refactor").pin(SCOUT, B).tag(WRITER, C, "draft")
    assert marks.save(folder) == file_of(folder).stat().st_size
    assert file_of(folder).stat().st_mode & 0o777 == 0o600
    assert Marks.load(folder) == marks
    assert marks.of(A) == VersionMarks(("before-refactor",), pinned=False)
    assert marks.of(B) == VersionMarks((), pinned=True)
    assert marks.session(SCOUT) == SessionMarks({"before-refactor": A}, frozenset({B}))
    marks.without_bundles([A, B]).save(folder)
    assert Marks.load(folder) == Marks(folder.uuid).tag(WRITER, C, "draft")
    assert b"scout" not in file_of(folder).read_bytes()


def test_a_tag_names_one_version_and_moves_only_on_purpose() -> None:
    marks = Marks(UUID).tag(SCOUT, A, "stable")
    with pytest.raises(errors.TagTaken) as refusal:
        marks.tag(SCOUT, B, "stable")
    assert refusal.value.bundle_id == A
    moved = marks.tag(SCOUT, B, "stable", move=True)
    assert moved.tagged(SCOUT, "stable") == B
    assert moved.of(A) == VersionMarks()


def test_taking_away_what_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(MarkNotFound, match=r"v1\.0"):
        some_marks().untag(SCOUT, "v1.1")
    with pytest.raises(MarkNotFound):
        some_marks().unpin(SCOUT, C)


def test_marks_of_two_are_all_there_and_a_tag_that_both_have_is_the_latters() -> None:
    later = Marks(UUID).tag(SCOUT, C, "v1.0").tag(WRITER, C, "draft")
    joined = some_marks().with_those_of(later)
    assert joined == some_marks().tag(SCOUT, C, "v1.0", move=True).tag(WRITER, C, "draft")


def test_a_tag_and_a_pin_name_a_version_and_a_strip_does_not() -> None:
    marks = some_marks().tag(WRITER, C, "draft").strip({WRITER: [D]})
    assert marks.named == {A, B, C}
    assert marks.without_bundles([A, B, C, D], strips=False) == Marks(UUID).strip({WRITER: [D]})


@pytest.mark.parametrize(
    "tag",
    ["", "1st", "-x", ".x", "_x", "a b", "a/b", "a@b", "a\n", "é", "ｔag", "a" * 65, "deadbeef", "DEADBEEF", "a" * 9],
)
def test_threat_19_a_text_that_is_no_tag_is_refused(tag: str) -> None:
    with pytest.raises(InvalidTag) as refusal:
        Marks(UUID).tag(SCOUT, A, tag)
    assert refusal.value.message.isprintable()
    with pytest.raises(InvalidTag):
        Marks(UUID).untag(SCOUT, tag)


@pytest.mark.parametrize("tag", ["a", "v1.0", "before-refactor", "abcdef1", "deadbeefs", "a" + "z" * 63])
def test_a_text_that_is_a_tag_is_accepted(tag: str) -> None:
    assert Marks(UUID).tag(SCOUT, A, tag).tagged(SCOUT, tag) == A


@pytest.mark.parametrize("bundle_id", ["", "aa" * 31, "aa" * 33, "AA" * 32, "../" * 22, b"\xaa" * 32])
def test_only_a_bundle_id_can_be_marked(bundle_id: Any) -> None:
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        Marks(UUID).tag(SCOUT, bundle_id, "stable")
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        Marks(UUID).pin(SCOUT, bundle_id)


def id_of(number: int) -> str:
    return f"{number:064x}"


def test_a_store_has_a_bounded_number_of_marks() -> None:
    full = Marks(UUID, {SCOUT: SessionMarks({}, frozenset(map(id_of, range(MAX_MARKS))))})
    with pytest.raises(LimitExceeded):
        full.pin(SCOUT, A)
    with pytest.raises(LimitExceeded):
        full.tag(WRITER, A, "one-more")
    assert full.pin(SCOUT, id_of(0)) == full
    stripped = full.strip({SCOUT: map(id_of, range(MAX_STRIPS))})
    with pytest.raises(LimitExceeded):
        stripped.strip({WRITER: [A]})


@pytest.mark.one_in(2)
def test_the_largest_marks_that_are_allowed_can_be_read_again() -> None:
    """The limits on bytes and values leave room for every set of marks that a store may have: tags take most."""
    longest = {
        SessionUri("n" * 128, f"{number:x}".rjust(128, "n")): SessionMarks({"t" * 64: id_of(number)})
        if number < MAX_MARKS
        else SessionMarks({}, frozenset(), frozenset({id_of(number)}))
        for number in range(MAX_MARKS + MAX_STRIPS)
    }
    data = encode_marks(Marks(UUID, longest))
    assert len(data) <= MAX_MARKS_BYTES
    assert decode_marks(data, UUID, "marks.json").sessions == longest


ids = st.binary(min_size=32, max_size=32).map(bytes.hex)
tags = st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{0,63}", fullmatch=True).filter(
    lambda tag: len(tag) < 8 or not set(tag.lower()) <= set("0123456789abcdef")
)
uris = st.builds(SessionUri, st.sampled_from(["default", "work"]), st.sampled_from(["scout", "writer", "x"]))


@st.composite
def marks_of_sessions(draw: st.DrawFn) -> SessionMarks:
    tagged = draw(st.dictionaries(tags, ids, max_size=4))
    pinned = draw(st.frozensets(ids, max_size=4))
    return SessionMarks(tagged, pinned, draw(st.frozensets(ids, max_size=4)))


@pytest.mark.one_in(2)
@given(st.dictionaries(uris, marks_of_sessions()))
def test_any_marks_read_back_as_they_were_written(sessions: dict[SessionUri, SessionMarks]) -> None:
    marks = Marks(UUID, sessions)
    data = encode_marks(marks)
    read = decode_marks(data, UUID, "marks.json")
    assert read == marks
    assert encode_marks(read) == data


# --- the file


def test_the_bytes_of_the_file_are_those_of_the_format() -> None:
    rest = (
        f'"format":"torpor.marks","sessions":{{"torpor://default/scout":{{"pins":["{B}"],"stripped":["{C}"],'
        f'"tags":{{"stable":"{A}"}}}}}},"store":"{UUID}","version":2}}\n'
    )
    digest = blake3(("{" + rest).encode()).hexdigest()
    marks = Marks(UUID).tag(SCOUT, A, "stable").pin(SCOUT, B).strip({SCOUT: [C]})
    assert encode_marks(marks).decode() == '{"digest":"' + digest + '",' + rest


def test_t5_every_flipped_bit_is_found() -> None:
    data = encode_marks(some_marks())
    for position in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptMarks):
            decode_marks(bytes(flipped), UUID, "marks.json")


def test_t5_every_truncation_and_every_added_byte_is_found() -> None:
    data = encode_marks(some_marks())
    for cut in [*(data[:length] for length in range(len(data))), data + b"\n", data + b"\x00", data + data]:
        with pytest.raises(CorruptMarks):
            decode_marks(cut, UUID, "marks.json")


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_t6_any_bytes_are_marks_or_a_typed_refusal(data: bytes) -> None:
    with pytest.raises(CorruptMarks) as refusal:
        decode_marks(data, UUID, "marks.json")
    assert len(refusal.value.message) < 700
    assert refusal.value.message.isprintable()


def document(marks: Marks) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode_marks(marks))
    del found["digest"]
    return found


def change(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found.update(changes)


def change_session(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda found: found["sessions"][str(SCOUT)].update(changes)


HEX = "aa" * 32
RESEALED: dict[str, Callable[[dict[str, Any]], None]] = {
    "another format": change(format="torpor.store"),
    "no format": lambda found: found.pop("format"),
    "version 0": change(version=0),
    "version as a float": change(version=1.0),
    "version as true": change(version=True),
    "version as text": change(version="3"),
    "version 1": change(version=1),
    "no version": lambda found: found.pop("version"),
    "a later version of another format": change(version=3, format="torpor.other"),
    "another store": change(store=UUID.replace("0", "1")),
    "no store": lambda found: found.pop("store"),
    "an unknown key": change(more=1),
    "no sessions": lambda found: found.pop("sessions"),
    "sessions as a list": change(sessions=[]),
    "sessions as null": change(sessions=None),
    "a session with a short name": change(sessions={"scout": {"pins": [HEX], "tags": {}, "stripped": []}}),
    "a session with a path as its name": change(
        sessions={"torpor://a/../b": {"pins": [HEX], "tags": {}, "stripped": []}}
    ),
    "a session without marks": change_session(pins=[], tags={}, stripped=[]),
    "a session with an unknown key": change_session(more=1),
    "a session without pins": lambda found: found["sessions"][str(SCOUT)].pop("pins"),
    "a session that is a list": change(sessions={str(SCOUT): [HEX]}),
    "a session without strips": lambda found: found["sessions"][str(SCOUT)].pop("stripped"),
    "versions of format 1": change_session(versions={HEX: 1, "bb" * 32: 2}),
    "strips as a map": change_session(stripped={HEX: 1}),
    "strips as text": change_session(stripped="ab"),
    "a strip twice": change_session(stripped=[HEX, HEX]),
    "strips out of order": change_session(stripped=["bb" * 32, HEX]),
    "a strip that is a number": change_session(stripped=[1]),
    "a strip in capitals": change_session(stripped=[HEX.upper()]),
    "pins as a map": change_session(pins={HEX: 1}),
    "pins as text": change_session(pins="ab"),
    "a pin twice": change_session(pins=[HEX, HEX]),
    "pins out of order": change_session(pins=["bb" * 32, HEX]),
    "a pin that is a number": change_session(pins=[1]),
    "a pin that is null": change_session(pins=[None]),
    "a pin in capitals": change_session(pins=[HEX.upper()]),
    "a pin too short": change_session(pins=[HEX[:-1]]),
    "a pin too long": change_session(pins=[HEX + "aa"]),
    "a pin with an end of line": change_session(pins=[HEX + "\n"]),
    "a pin in other digits": change_session(pins=["١" * 64]),
    "tags as a list": change_session(tags=[HEX]),
    "a tag that is no tag": change_session(tags={"no tag": HEX}),
    "a tag that looks like an id": change_session(tags={"deadbeef": HEX}),
    "a tag of null": change_session(tags={"stable": None}),
    "a tag of a list": change_session(tags={"stable": [HEX]}),
    "a tag of a tag": change_session(tags={"stable": "before-refactor"}),
}


@pytest.mark.parametrize("malformed", RESEALED.values(), ids=RESEALED)
def test_t6_a_malformed_file_with_a_right_digest_is_refused(malformed: Callable[[dict[str, Any]], None]) -> None:
    found = document(some_marks())
    assert decode_marks(sealed(found), UUID, "marks.json") == some_marks()
    malformed(found)
    with pytest.raises(CorruptMarks):
        decode_marks(sealed(found), UUID, "marks.json")


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda data: data[:-1],
        lambda data: b" " + data,
        lambda data: data.replace(b":", b": ", 1),
        lambda data: data.replace(b"scout", b"sc\\u006fut"),
        lambda data: json.dumps(dict(reversed(json.loads(data).items()))).encode(),
        lambda data: data.replace(b'"version":2', b'"version":2e0'),
        lambda data: data.replace(b'"version":2}', b'"version":2,"version":2}'),
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.decode().encode("utf-16"),
        lambda data: b"[" * 50_000,
        lambda data: b'{"a":' * 50_000,
        lambda data: b'{"version":' + b"9" * 1_000_000 + b"}",
    ],
)
def test_threat_17_what_encode_does_not_write_is_refused(rewrite: Callable[[bytes], bytes]) -> None:
    data = encode_marks(some_marks())
    assert rewrite(data) != data
    with pytest.raises(CorruptMarks):
        decode_marks(rewrite(data), UUID, "marks.json")


@pytest.mark.one_in(1)
@pytest.mark.parametrize("value", [b"[],", b"{},", b"0,", b'{"":', b"[["])
def test_t6_a_file_full_of_small_values_takes_little_memory(value: bytes) -> None:
    data = b"[" + value * (MAX_MARKS_BYTES // len(value) - 2) + b"0]"
    with taking_at_most(4 << 20), pytest.raises(CorruptMarks, match=str(MAX_MARKS_NODES)):
        decode_marks(data, UUID, "marks.json")


def test_a_file_larger_than_the_limit_is_not_read_to_its_end(folder: StoreFolder) -> None:
    file_of(folder).touch(0o600)
    os.truncate(file_of(folder), 1 << 40)
    with taking_at_most(4 * MAX_MARKS_BYTES), pytest.raises(CorruptMarks, match=str(MAX_MARKS_BYTES)):
        Marks.load(folder)


@pytest.mark.parametrize(("kind", "limit"), [("pins", MAX_MARKS), ("stripped", MAX_STRIPS)])
def test_too_many_marks_in_a_file_are_refused(kind: str, limit: int) -> None:
    found = document(some_marks())
    many = [id_of(number) for number in range(limit + 1)]
    found["sessions"] = {str(SCOUT): {"pins": [], "tags": {}, "stripped": []} | {kind: many}}
    with pytest.raises(CorruptMarks, match=str(limit)):
        decode_marks(sealed(found), UUID, "marks.json")


def test_threat_23_marks_of_a_later_version_are_refused_and_left_untouched(folder: StoreFolder) -> None:
    later = sealed({"format": "torpor.marks", "version": 3, "store": folder.uuid, "ribbons": {}})
    file_of(folder).write_bytes(later)
    with pytest.raises(errors.UnsupportedFormat) as refusal:
        Marks.load(folder)
    assert (refusal.value.found, refusal.value.supported) == (3, 2)
    assert file_of(folder).read_bytes() == later


def test_threat_23_damage_is_not_mistaken_for_a_later_version() -> None:
    data = encode_marks(some_marks()).replace(b'"version":2', b'"version":3')
    with pytest.raises(CorruptMarks, match="digest"):
        decode_marks(data, UUID, "marks.json")


def test_threat_26_marks_of_another_store_are_refused(folder: StoreFolder) -> None:
    file_of(folder).write_bytes(encode_marks(some_marks()))
    with pytest.raises(CorruptMarks, match="another store"):
        Marks.load(folder)


def test_threat_20_a_link_in_the_place_of_the_marks_is_replaced_and_not_written_through(
    folder: StoreFolder, tmp_path: Path
) -> None:
    target = tmp_path / "elsewhere.json"
    target.write_bytes(b"somebody's own")
    file_of(folder).unlink()
    file_of(folder).symlink_to(target)
    Marks(folder.uuid).pin(SCOUT, A).save(folder)
    assert target.read_bytes() == b"somebody's own"
    assert Marks.load(folder).of(A).pinned


# --- saving


@pytest.mark.parametrize(
    ("name", "error", "raised"),
    [
        ("open", errno.EIO, errors.StoreIoError),
        ("open", errno.ENOSPC, NoSpace),
        ("writev", errno.ENOSPC, NoSpace),
        ("writev", errno.EDQUOT, NoSpace),
        ("fsync", errno.EIO, DurabilityLost),
        ("rename", errno.ENOSPC, NoSpace),
    ],
)
def test_threat_30_marks_that_could_not_be_saved_are_as_they_were(
    folder: StoreFolder, marked: Marks, name: str, error: int, raised: type[Exception]
) -> None:
    with meanwhile(os, name, refusing(OSError(error, os.strerror(error)))), pytest.raises(raised):
        marked.pin(WRITER, A).save(folder)
    assert Marks.load(folder) == marked
    assert not list(Path(folder.path).rglob("*.tmp"))


def test_threat_31_a_folder_that_cannot_be_flushed_does_not_cost_both_the_old_and_the_new_marks(
    folder: StoreFolder, marked: Marks
) -> None:
    changed = marked.pin(WRITER, A)
    with meanwhile(os, "fsync", refusing(OSError(errno.EIO, "no")), at=2), pytest.raises(DurabilityLost):
        changed.save(folder)
    assert Marks.load(folder) == changed


def test_t3_the_order_of_a_save_is_write_flush_rename_flush_folder(
    folder: StoreFolder, marked: Marks, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    for name in ("writev", "fsync", "rename"):
        real = getattr(os, name)

        def spy(*args: Any, _name: str = name, _real: Callable[..., Any] = real, **kwargs: Any) -> Any:
            is_root = _name == "fsync" and os.path.samestat(os.fstat(args[0]), os.fstat(folder.root_fd))
            seen.append(f"{_name} {is_root}" if _name == "fsync" else _name)
            return _real(*args, **kwargs)

        monkeypatch.setattr(os, name, spy)
    marked.pin(WRITER, A).save(folder)
    assert seen == ["writev", "fsync False", "rename", "fsync True"]


def test_threat_28_what_a_save_that_was_killed_leaves_is_removed_as_a_leftover(
    folder: StoreFolder, marked: Marks, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_WRITTEN", set())  # as of a process that is gone then
        patch.setattr(durable.TempFile, "publish", refusing(OSError(errno.EIO, "Input/output error")))
        patch.setattr(durable.TempFile, "close", lambda temp: os.close(temp.fd))
        with pytest.raises(OSError, match="error"):
            marked.pin(WRITER, A).save(folder)
    assert Marks.load(folder) == marked
    assert len(folder.remove_leftovers()) == 1


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["tag", "move", "untag", "pin", "unpin", "gone"]), max_size=30), st.data())
def test_t7_marks_agree_with_a_dictionary(steps: list[str], data: st.DataObject) -> None:
    """Any run of changes gives what plain dictionaries give, and says no where they have nothing to take away."""
    marks = Marks(UUID)
    tags: dict[tuple[SessionUri, str], bytes] = {}
    pins: set[tuple[SessionUri, bytes]] = set()
    for step in steps:
        uri = data.draw(st.sampled_from([SCOUT, WRITER]))
        bundle_id = data.draw(st.sampled_from([A, B]))
        tag = data.draw(st.sampled_from(["x", "y"]))
        try:
            if step in ("tag", "move"):
                marks = marks.tag(uri, bundle_id, tag, move=step == "move")
                assert step == "move" or tags.get((uri, tag), bundle_id) == bundle_id
                tags[uri, tag] = bundle_id
            elif step == "untag":
                marks = marks.untag(uri, tag)
                del tags[uri, tag]
            elif step == "pin":
                marks = marks.pin(uri, bundle_id)
                pins.add((uri, bundle_id))
            elif step == "unpin":
                marks = marks.unpin(uri, bundle_id)
                pins.remove((uri, bundle_id))
            else:
                marks = marks.without_bundles([bundle_id])
                tags = {key: named for key, named in tags.items() if named != bundle_id}
                pins = {key for key in pins if key[1] != bundle_id}
        except errors.TagTaken:
            assert tags[uri, tag] != bundle_id
        except MarkNotFound:
            assert (uri, tag) not in tags if step == "untag" else (uri, bundle_id) not in pins
        assert {(uri, tag): named for uri, of in marks.sessions.items() for tag, named in of.tags.items()} == tags
        assert {(uri, pin) for uri, of in marks.sessions.items() for pin in of.pins} == pins
        for one in (A, B):
            assert marks.of(one).tags == tuple(sorted(tag for (_, tag), named in tags.items() if named == one))
            assert marks.of(one).pinned == any(pinned == one for _, pinned in pins)


def test_a_strip_names_versions_until_they_are_gone_and_stays_with_its_own_store() -> None:
    marks = Marks(UUID).strip({SCOUT: [A, B]}).strip({SCOUT: [B]})
    assert marks.stripped == {A, B}
    assert (marks.of(A).stripped, marks.of(A).keeps, marks.of(C).stripped) == (True, False, False)
    assert marks.without_bundles([A]).stripped == {B}
    assert marks.without_bundles([A, B]) == Marks(UUID)
    assert Marks(UUID).pin(SCOUT, C).with_those_of(marks).stripped == frozenset()
    assert marks.with_those_of(Marks(UUID).pin(SCOUT, C)).stripped == {A, B}
