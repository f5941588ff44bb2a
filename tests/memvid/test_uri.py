"""Session names: what is accepted, what is refused, and what a short name means (threat 19)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.memvid import SessionUri, resolve
from torpor.memvid.errors import AmbiguousName, InvalidUri, SessionNotFound

KNOWN = [SessionUri("default", "scout"), SessionUri("work", "scout"), SessionUri("work", "writer")]


def test_uri_reads_back_as_it_was_written() -> None:
    assert SessionUri.parse("torpor://work/writer-2.b_c") == SessionUri("work", "writer-2.b_c")
    assert str(SessionUri("work", "writer")) == "torpor://work/writer"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "writer",
        "torpor://",
        "torpor://work",
        "torpor://work/",
        "torpor:///writer",
        "torpor://work/writer/extra",
        "torpor://work/../writer",
        "torpor://../writer",
        "torpor://work/..",
        "torpor://work/.",
        "torpor://work//etc/passwd",
        "torpor://work/.hidden",
        "torpor://work/-rf",
        "torpor://work/a b",
        "torpor://work/a\x00b",
        "torpor://work/a\n",
        "torpor://work/ｗriter",
        "torpor://wоrk/writer",  # a Cyrillic о
        "torpor://work/" + "a" * 129,
        "torpor://work/" + "a" * 4096,
        "TORPOR://work/writer",
        "http://work/writer",
    ],
)
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


def test_a_name_of_the_longest_length_is_accepted() -> None:
    assert SessionUri("work", "a" * 128).name == "a" * 128


def test_a_full_uri_and_a_qualified_name_find_their_session() -> None:
    assert resolve("torpor://work/scout", KNOWN) == KNOWN[1]
    assert resolve("work/scout", KNOWN) == KNOWN[1]


def test_a_bare_name_finds_the_only_session_that_has_it() -> None:
    assert resolve("writer", KNOWN) == KNOWN[2]


def test_an_ambiguous_name_is_refused_with_its_candidates() -> None:
    with pytest.raises(AmbiguousName) as refusal:
        resolve("scout", KNOWN)
    assert refusal.value.candidates == ["torpor://default/scout", "torpor://work/scout"]
    assert "torpor://work/scout" in refusal.value.message


@pytest.mark.parametrize("text", ["scuot", "work/nobody", "torpor://default/writer"])
def test_an_unknown_name_is_refused(text: str) -> None:
    with pytest.raises(SessionNotFound):
        resolve(text, KNOWN)


def test_an_unknown_name_is_refused_with_the_names_that_come_close() -> None:
    with pytest.raises(SessionNotFound) as refusal:
        resolve("writter", KNOWN)
    assert refusal.value.suggestions == ["torpor://work/writer"]


@given(st.text(max_size=40))
def test_any_text_is_a_name_or_a_typed_refusal(text: str) -> None:
    try:
        uri = SessionUri.parse("torpor://default/" + text)
    except InvalidUri:
        return
    assert SessionUri.parse(str(uri)) == uri
