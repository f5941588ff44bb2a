"""Session names: what is accepted, what is refused, and what a short name means (threat 19)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.memvid.answers import VersionInfo
from torpor.memvid.errors import AmbiguousVersion, InvalidTag, InvalidUri, SessionNotFound
from torpor.memvid.folder.marks import Marks
from torpor.memvid.folder.versions import describe_versions, select_version
from torpor.memvid.uri import (
    Reference,
    Selector,
    SessionUri,
    names_place,
    names_version,
    not_found,
    parse_reference,
    parse_selector,
    parse_version_reference,
    require_tag,
    session_in,
)
from torpor.tests.memvid.store_making import index_row

KNOWN = [SessionUri("default", "scout"), SessionUri("work", "scout"), SessionUri("work", "writer")]


def test_uri_reads_back_as_it_was_written() -> None:
    assert SessionUri.parse("torpor://work/writer-2.b_c") == SessionUri("work", "writer-2.b_c")
    assert str(SessionUri("work", "writer")) == "torpor://work/writer"


@pytest.mark.parametrize(
    "text",
    [
        "", "writer", "torpor://", "torpor://work", "torpor://work/", "torpor:///writer", "torpor://work/writer/extra",
        "torpor://work/../writer", "torpor://../writer", "torpor://work/..", "torpor://work/.",
        "torpor://work//etc/passwd", "torpor://work/.hidden", "torpor://work/-rf", "torpor://work/a b",
        "torpor://work/a\x00b", "torpor://work/a\n", "torpor://work/ｗriter", "torpor://wоrk/writer",  # a Cyrillic о
        "torpor://work/" + "a" * 129, "torpor://work/" + "a" * 4096, "TORPOR://work/writer", "http://work/writer",
    ],
)  # fmt: skip
def test_threat_19_a_text_that_is_no_uri_is_refused(text: str) -> None:
    with pytest.raises(InvalidUri) as refusal:
        SessionUri.parse(text)
    assert len(refusal.value.message) < 500
    assert refusal.value.message.isprintable()


def test_threat_19_parts_are_checked_however_a_uri_is_built() -> None:
    with pytest.raises(InvalidUri):
        SessionUri("..", "writer")
    with pytest.raises(InvalidUri):
        SessionUri("work", "a/b")


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("torpor://work/scout", SessionUri("work", "scout")),
        ("work/scout", SessionUri("work", "scout")),
        ("scout", SessionUri("default", "scout")),
        ("work/" + "a" * 128, SessionUri("work", "a" * 128)),
    ],
)
def test_a_name_means_its_session_and_a_bare_one_that_of_the_default_namespace(text: str, uri: SessionUri) -> None:
    assert parse_reference(text) == uri


def test_an_unknown_name_is_refused_with_what_comes_close_in_its_namespace_and_in_no_other() -> None:
    refusal = not_found(SessionUri("work", "writter"), KNOWN)
    assert refusal.suggestions == ["torpor://work/writer"]
    assert refusal.message == "There is no session torpor://work/writter. Did you mean torpor://work/writer?"
    for uri in (SessionUri("other", "writer"), SessionUri("default", "writter")):
        refusal = not_found(uri, KNOWN)
        assert (refusal.suggestions, "writer?" in refusal.message) == ([], False)


def test_a_name_that_only_shares_letters_is_not_offered() -> None:
    assert not_found(SessionUri("default", "nope"), [SessionUri("default", "notes")]).suggestions == []


@given(st.text(max_size=40))
def test_any_text_is_a_name_or_a_typed_refusal(text: str) -> None:
    try:
        uri = SessionUri.parse("torpor://default/" + text)
    except InvalidUri:
        return
    assert SessionUri.parse(str(uri)) == uri


# --- references to a version


def row(version: int, bundle_id: str) -> VersionInfo:
    return index_row(WRITER, version, bundle_id.ljust(64, "0"))


WRITER = SessionUri("work", "writer")
ROWS = [
    row(1, "3f9c01ab44"),
    row(2, "3f9c01ab55"),
    row(3, "00000004ff"),
    row(12345678, "aabbccddee"),
    row(12345679, "12345678ee"),
]
MARKS = Marks("store").tag(WRITER, ROWS[0].bundle_id, "before-refactor").tag(WRITER, "99" * 32, "lost")


def pick(selector: str, rows: list[VersionInfo] = ROWS, marks: Marks = MARKS) -> int:
    return select_version(WRITER, rows, marks, parse_selector(selector)).version


@pytest.mark.parametrize("session", ["writer", "work/writer", "torpor://work/writer"])
def test_a_reference_names_a_session_and_a_version_of_it_or_none(session: str) -> None:
    id_prefix = Selector("3F9c01ab", None, None, "3f9c01ab")
    assert parse_version_reference(session) == Reference(session)
    assert parse_version_reference(f"{session}@3") == Reference(session, Selector("3", 3, None, None))
    assert parse_version_reference(f"{session}@v1.0") == Reference(session, Selector("v1.0", None, "v1.0", None))
    assert parse_version_reference(f"{session}@3F9c01ab") == Reference(session, id_prefix)
    assert parse_version_reference(f"{session}~") == Reference(session, back=1)
    assert parse_version_reference(f"{session}~12:3") == Reference(session, back=12, token=3)
    assert parse_version_reference(f"{session}:500") == Reference(session, token=500)
    assert parse_version_reference(f"{session}@3F9c01ab~0:7") == Reference(session, id_prefix, 0, 7)
    for text in (session, f"{session}@3~1:2", f"{session}~1:2", f"{session}:2"):
        assert session_in(text) == session
        assert names_version(text) == ("~" in text)
        assert names_place(text) == (":2" in text)


@pytest.mark.parametrize(
    ("text", "namespace", "digits"),
    [
        ("3F9c01ab", None, "3f9c01ab"), ("@3F9c01ab", None, "3f9c01ab"), ("work/@3f9c01ab", "work", "3f9c01ab"),
        ("work/3f9c01ab", "work", "3f9c01ab"), ("torpor://work/@3f9c01ab~2:5", "work", "3f9c01ab"),
        ("3f9c01ab~1", None, "3f9c01ab"), ("3f9c01a", None, None), ("3f9c01ab@2", None, None),
        ("work/writer@3f9c01ab", "work", None), ("writer", None, None),
    ],
)  # fmt: skip
def test_the_digits_of_an_id_may_stand_alone(text: str, namespace: str | None, digits: str | None) -> None:
    reference = parse_version_reference(text)
    assert (reference.namespace, reference.id_alone) == (namespace, digits)


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("1", Selector("1", 1, None, None)),
        ("9007199254740991", Selector("9007199254740991", (1 << 53) - 1, None, "9007199254740991")),
        ("9007199254740992", Selector("9007199254740992", None, None, "9007199254740992")),
        ("12345678", Selector("12345678", 12345678, None, "12345678")),
        ("00000012", Selector("00000012", None, None, "00000012")),
        ("abcdef1", Selector("abcdef1", None, "abcdef1", None)),
        ("abcdef12", Selector("abcdef12", None, None, "abcdef12")),
        ("a" * 64, Selector("a" * 64, None, None, "a" * 64)),
        ("z" * 64, Selector("z" * 64, None, "z" * 64, None)),
    ],
)
def test_a_selector_is_read_in_every_way_that_it_can_be_meant(text: str, selector: Selector) -> None:
    assert parse_selector(text) == selector


@pytest.mark.parametrize(
    "text",
    [
        "writer@", "writer@0", "writer@03", "writer@-1", "writer@+1", "writer@1.5", "writer@1e3", "writer@1_000",
        "writer@３", "writer@ 3", "writer@3 ", "writer@3\n", "writer@3@4", "writer@@3", "writer@v1@v2",
        "writer@latest/..", "writer@../../etc/passwd", "writer@9abcdef",  # no tag begins with a digit
        "writer@" + "a" * 65, "writer@" + "9" * 17 + "x", "writer@" + "9" * 5000, "writer@tag\x00", "writer@тег", "@3",
        "@", "", "@before", "@1234567", "bad name/@3f9c01ab", "/@3f9c01ab", "a/b/@3f9c01ab", "../@3f9c01ab", "~1", ":5",
        "writer~-1", "writer~x", "writer~1~2", "writer~12345678", "writer~1@3", "writer:0", "writer:", "writer:05",
        "writer:5:6", "writer:5~1", "writer:5@3", "writer:-1", "writer:99999999999", "torpor:x", "torpor://work/writer:",
        "torpor://work@3/writer", "work@3/writer", "torpor://work/@3", "a b@3",
    ],
)  # fmt: skip
def test_threat_19_a_text_that_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(InvalidUri) as refusal:
        parse_version_reference(text)
    assert len(refusal.value.message) < 600
    assert refusal.value.message.isprintable()


@pytest.mark.parametrize("text", [None, 3, b"writer@3", ["writer"]])
def test_only_text_is_a_reference(text: Any) -> None:
    with pytest.raises(InvalidUri):
        parse_version_reference(text)


def test_a_refused_version_tells_the_grammar() -> None:
    with pytest.raises(InvalidUri) as refusal:
        parse_version_reference("writer@03")
    for part in ("version number", "tag", "hex digits", "SESSION@"):
        assert part in refusal.value.message


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_text_is_a_reference_or_a_typed_refusal(session: str, selector: str) -> None:
    try:
        reference = parse_version_reference(f"{session}@{selector}")
    except InvalidUri:
        return
    assert reference.session == session_in(session)
    if reference.session == session and not names_version(selector) and not names_place(selector):
        assert reference.selector == parse_selector(selector)
    assert reference.id_alone or parse_reference(reference.session)


@given(st.from_regex(r"[0-9A-Za-z._-]{1,66}", fullmatch=True))
def test_no_text_is_both_a_tag_and_something_else(text: str) -> None:
    """So that a tag can never hide a version number or an id."""
    try:
        selector = parse_selector(text)
    except InvalidUri:
        with pytest.raises(InvalidTag):
            require_tag(text)
        return
    if selector.tag is None:
        with pytest.raises(InvalidTag):
            require_tag(text)
    else:
        assert require_tag(text) == text
        assert selector.number is selector.id_prefix is None


def test_a_version_is_found_by_number_tag_and_id() -> None:
    found = {"3": 3, "before-refactor": 1, "3f9c01ab5": 2, "3F9C01AB5": 2, ROWS[1].bundle_id: 2, "00000004": 3}
    assert {selector: pick(selector) for selector in found} == found


def test_a_number_is_not_the_beginning_of_an_id() -> None:
    with pytest.raises(SessionNotFound):
        pick("4", rows=[row(1, "4" * 64)])


def test_several_versions_are_refused_with_a_reference_to_each_and_never_one_of_them_taken() -> None:
    with pytest.raises(AmbiguousVersion) as refusal:
        pick("3f9c01ab")
    assert refusal.value.candidates == [f"torpor://work/writer@{one.bundle_id}" for one in ROWS[:2]]
    assert [parse_version_reference(text).selector for text in refusal.value.candidates]
    assert "version 1" in refusal.value.message
    assert "version 2" in refusal.value.message
    assert [pick(text.partition("@")[2]) for text in refusal.value.candidates] == [1, 2]


def test_digits_that_are_a_number_and_an_id_are_refused_where_these_are_two_versions() -> None:
    with pytest.raises(AmbiguousVersion) as refusal:
        pick("12345678")
    assert len(refusal.value.candidates) == 2
    assert pick("12345678", rows=[row(12345678, "12345678")]) == 12345678


def test_a_long_list_of_versions_is_cut_in_the_message_but_not_in_the_facts() -> None:
    many = [row(number, f"3f9c01ab{number:02x}") for number in range(1, 100)]
    with pytest.raises(AmbiguousVersion) as refusal:
        pick("3f9c01ab", rows=many)
    assert len(refusal.value.candidates) == 99
    assert "and 91 more" in refusal.value.message
    assert len(refusal.value.message) < 1200


def test_an_unknown_version_is_refused_with_what_there_is() -> None:
    for selector in ("7", "nowhere", "ffffffff"):
        with pytest.raises(SessionNotFound) as refusal:
            pick(selector)
        assert f"it has {describe_versions([each.version for each in ROWS])} and the tags" in refusal.value.message
        assert "before-refactor" in refusal.value.message
    with pytest.raises(SessionNotFound, match="it has version 1"):
        pick("7", rows=[row(1, "3f")], marks=Marks("store"))
    with pytest.raises(SessionNotFound, match="no versions"):
        pick("7", rows=[], marks=Marks("store"))


def test_a_tag_of_a_version_that_is_gone_says_so_and_one_of_another_session_means_nothing() -> None:
    with pytest.raises(SessionNotFound, match=f"{'99' * 6}.*verify"):
        pick("lost")
    marks = Marks("store").tag(SessionUri("default", "writer"), ROWS[0].bundle_id, "stable")
    with pytest.raises(SessionNotFound):
        pick("stable", marks=marks)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], "no versions"),
        ([3], "version 3"),
        ([1, 2], "versions 1 and 2"),
        ([15, 1, 2, 3, 7], "versions 1 to 3, 7 and 15"),
        (range(1, 42), "versions 1 to 41"),
        (range(1, 42, 2), "versions 1, 3, 5, 7, 9, 11, 13, 15 and others up to 41"),
    ],
)
def test_versions_that_are_gone_are_not_said_to_be_there(numbers: Sequence[int], text: str) -> None:
    assert describe_versions(numbers) == text
