"""What a client is shown: the text of the committed tokens, whole characters at a time, and never a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.daemon.engine.text import CONTEXT_TOKENS, StopStrings, TextStream


class Bytes:
    """A byte-level tokenizer: a token is a byte, and what is no UTF-8 shows as replacement characters."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode(errors="replace")


class ByteFallback:
    """Like SentencePiece with byte fallback: each byte of a run that is not UTF-8 shows as a replacement character,
    a word begins with a space, and the space at the start of a text is not shown."""

    WORDS = ("the", "cat", "sat")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text, run = "", b""
        for token in [*token_ids, None]:
            if token is not None and token < 256:
                run += bytes([token])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "�" * len(run)
            run = b""
            if token is not None:
                text += " " + self.WORDS[token - 256]
        return text.removeprefix(" ")


def streamed(tokenizer: Bytes | ByteFallback, context: Sequence[int], tokens: Sequence[int]) -> list[str]:
    stream = TextStream(tokenizer, context)
    return [*map(stream.push, tokens), stream.finish()]


@pytest.mark.one_in(2)
@given(st.text(), st.text())
def test_the_pieces_of_a_text_are_the_text(before: str, text: str) -> None:
    assert "".join(streamed(Bytes(), before.encode(), text.encode())) == text


@pytest.mark.one_in(1)
@given(st.text(), st.binary(max_size=60))
def test_the_pieces_of_any_bytes_are_what_decoding_all_of_them_gives(before: str, data: bytes) -> None:
    assert "".join(streamed(Bytes(), before.encode(), data)) == data.decode(errors="replace")


@pytest.mark.one_in(1)
@given(st.text(), st.lists(st.integers(0, 2)), st.text(max_size=6))
def test_words_keep_their_spaces_and_characters_of_several_tokens_come_whole(
    before: str, words: list[int], text: str
) -> None:
    context = [256, *before.encode()]
    tokens = [*(256 + word for word in words), *text.encode(), 257]
    whole = ByteFallback().decode(context + tokens, skip_special_tokens=True)
    known = ByteFallback().decode(context, skip_special_tokens=True)
    assert known + "".join(streamed(ByteFallback(), context, tokens)) == whole


@given(st.binary(max_size=12), st.binary(max_size=40))
def test_the_context_is_never_shown_again(before: bytes, data: bytes) -> None:
    """Whatever the tokens before were, half characters included, only what is new is shown."""
    shown = "".join(streamed(Bytes(), before, data))
    assert (before + data).decode(errors="replace").endswith(shown)
    assert len(shown) <= len(data) + 1


@given(st.text(alphabet="aé€😀", min_size=1))
def test_no_half_character_is_shown_while_the_rest_may_come(text: str) -> None:
    assert not any("�" in piece for piece in streamed(Bytes(), [], text.encode()))


def test_a_character_is_shown_with_its_last_byte() -> None:
    assert streamed(Bytes(), [], "a😀b".encode()) == ["a", "", "", "", "😀", "b", ""]


def test_a_character_that_never_ends_shows_as_a_replacement_at_the_end() -> None:
    assert streamed(Bytes(), [], "a😀".encode()[:-1]) == ["a", "", "", "", "�"]


def test_a_run_of_broken_bytes_is_not_held_back_for_ever() -> None:
    pieces = streamed(Bytes(), [], b"\xff" * 100)
    assert "".join(pieces) == "�" * 100
    assert max(map(len, pieces)) <= 4
    assert pieces[5] != ""


def test_memory_does_not_grow_with_the_text() -> None:
    """What is decoded for each token stays short, however long the text or a run of broken bytes gets."""

    class Counting(Bytes):
        longest = 0

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            self.longest = max(self.longest, len(token_ids))
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting()
    streamed(tokenizer, b"x" * 1000, (b"word " * 500) + b"\xff" * 500)
    assert tokenizer.longest <= 4 * CONTEXT_TOKENS


@given(st.binary(max_size=60))
def test_a_real_tokenizer_streams_what_it_decodes(tiny_tokenizer: object, data: bytes) -> None:
    stream = TextStream(tiny_tokenizer, [])  # type: ignore[arg-type]
    tokens = list(data)
    pieces = [*map(stream.push, tokens), stream.finish()]
    assert "".join(pieces) == tiny_tokenizer.decode(tokens, skip_special_tokens=True)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny_model: Path) -> object:
    from mlx_lm.tokenizer_utils import load

    return load(tiny_model)


# --- stop strings


def cut(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None]:
    stopper = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += stopper.push(piece)
        if stopper.found:
            break
    else:
        shown += stopper.finish()
    return shown, stopper.found


LETTERS = st.text(alphabet="abc", max_size=12)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3)


@given(STOPS, st.lists(LETTERS, max_size=8))
def test_no_stop_string_is_ever_shown(stops: list[str], pieces: list[str]) -> None:
    shown, found = cut(stops, pieces)
    assert not any(stop in shown for stop in stops)
    assert "".join(pieces).startswith(shown + (found or ""))
    assert (found is not None) == any(stop in "".join(pieces) for stop in stops)


@given(STOPS, st.lists(LETTERS, max_size=8))
def test_a_text_without_a_stop_string_is_shown_whole(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    shown, found = cut(stops, pieces)
    assert found or shown == text


@given(st.text(alphabet="abc", min_size=1, max_size=4), LETTERS)
def test_everything_before_a_stop_string_is_shown_however_the_text_is_cut(stop: str, text: str) -> None:
    letters, whole = cut([stop], list(text)), cut([stop], [text])
    assert letters == whole == (text.split(stop)[0], stop if stop in text else None)


def test_nothing_is_held_back_that_cannot_become_a_stop_string() -> None:
    stopper = StopStrings(["\n\nUser:"])
    assert [stopper.push(piece) for piece in ("hello", "\n", "world", "\n\nUs", "ed")] == [
        "hello",
        "",
        "\nworld",
        "",
        "\n\nUsed",
    ]


def test_nothing_comes_after_a_stop_string() -> None:
    stopper = StopStrings(["x"])
    assert stopper.push("axb") == "a"
    assert (stopper.push("more"), stopper.finish()) == ("", "")


def test_without_stop_strings_text_passes_through() -> None:
    stopper = StopStrings(["", ""])
    assert (stopper.push("abc"), stopper.finish(), stopper.found) == ("abc", "", None)
