"""Which tokens' log-probabilities are those of the text, where in it they stand, and which bytes they are."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torpor.daemon.api.dialogue import ToolCall
from torpor.daemon.api.events import Channel, TokenEvent
from torpor.daemon.api.logprobs import TokenLogprobs
from torpor.daemon.engine.channels import Channels, Shown
from torpor.daemon.engine.logprobs import Logprobs
from torpor.daemon.engine.text import StopStrings
from torpor.daemon.models.chat_template import Root
from torpor.daemon.models.control_tokens import ControlTokens, settle_control_tokens
from torpor.daemon.models.marks import Marks
from torpor.daemon.models.models import DEMO_MODEL_FOLDER, LoadedModel
from torpor.socket_api.http.telling import Told, Untold, columns_of, each_of
from torpor.tests.model_making import CHAT_TEMPLATE, write_tokenizer

CALL = ToolCall("f", {}, "c")


def told_of(*tokens: tuple[str, Channel, str] | tuple[str, Channel, str, ToolCall]) -> list[tuple[str, int]]:
    """What is told of tokens, each with its channel and with the text that it shows, or its call."""
    untold = Untold()
    for at, (text, channel, shown, *call) in enumerate(tokens):
        untold.add(TokenEvent(at, shown, channel, *call, logprobs=TokenLogprobs(at, text, -1.0)))
    return [(each.likelihood.text, each.offset) for each in untold.take()]


def test_a_text_that_was_held_back_comes_with_the_next_one() -> None:
    found = told_of(("a", "text", "a"), (" ", "text", ""), ("<", "text", ""), ("b", "text", " <b"))
    assert found == [("a", 0), (" ", 1), ("<", 2), ("b", 3)]


def test_the_tokens_of_a_calls_mark_are_no_text() -> None:
    mark: list[tuple[str, Channel, str]] = [("<", "text", ""), ("tool_call", "text", ""), (">", "call", "")]
    assert told_of(("a", "text", "a"), *mark, ("{}", "call", "", CALL), ("b", "text", "b")) == [("a", 0), ("b", 1)]


def test_the_tokens_of_a_call_that_is_told_as_text_are_told() -> None:
    whole = "<call>{</call>"
    found = told_of(("a", "text", "a"), ("<call>", "call", ""), ("{", "call", ""), ("</call>", "text", whole))
    assert found == [("a", 0), ("<call>", 1), ("{", 7), ("</call>", 8)]


def test_a_stop_string_is_no_text_and_the_token_that_it_begins_in_is_told_whole() -> None:
    assert told_of(("a", "text", "a"), ("EN", "text", ""), ("D", "text", "")) == [("a", 0)]
    assert told_of(("a", "text", "a"), ("bEN", "text", "b"), ("D", "text", "")) == [("a", 0), ("bEN", 1)]


def test_blanks_that_no_client_is_shown_are_not_told() -> None:
    thought: tuple[str, Channel, str] = ("</think>", "reasoning", "")
    assert told_of(thought, ("\n\n", "text", ""), ("a", "text", "a"), ("\n", "text", "")) == [("a", 0)]
    assert told_of(thought, (" a", "text", "a"), ("b", "text", "b")) == [(" a", 0), ("b", 1)]


def kimi_told(*said: str, stop: Sequence[str] = ()) -> tuple[str, list[tuple[str, int]]]:
    """The text of an answer of Kimi K3 of these tokens, which has marks that no channel shows, and what is told of it:
    each token with its number in the answer."""
    parser = importlib.import_module("mlx_lm.tool_parsers.kimi_k3")
    tokenizer = SimpleNamespace(
        has_thinking=True,
        think_start="<|open|>think<|sep|>",
        think_end="<|close|>think<|sep|>",
        think_start_tokens=(1, 9, 3),
        think_end_tokens=(2, 9, 3),
        has_tool_calling=True,
        tool_call_start=parser.tool_call_start,
        tool_call_end=parser.tool_call_end,
        tool_parser=parser.parse_tool_call,
        structural_markers=tuple(f"<|{name}|>response<|sep|>" for name in ("open", "close")),
    )
    controls = ControlTokens({1: "<|open|>", 2: "<|close|>", 3: "<|sep|>"}, frozenset())
    channels, stops = Channels(Marks.of(tokenizer, controls), Root(()), str), StopStrings(stop)
    untold, text = Untold(), ""
    for at, token in enumerate((*said, None)):
        pieces = channels.push(token) if token is not None else channels.finish()
        shown = "".join(stops.push(piece.text) for piece in pieces) + (stops.finish() if token is None else "")
        likely = None if token is None else TokenLogprobs(at, token, -1.0)
        untold.add(TokenEvent(None if token is None else at, shown, "text", logprobs=likely))
        text += shown
    told = untold.take()
    assert [each.offset for each in told] == sorted(each.offset for each in told)
    return text, [(each.likelihood.text, each.likelihood.token) for each in told]


BEGIN: Final = ("<|open|>", "response", "<|sep|>")
END: Final = ("<|close|>", "response", "<|sep|>")


def test_the_tokens_of_a_mark_that_no_channel_shows_are_not_told_for_the_same_words_behind_it() -> None:
    assert kimi_told(*BEGIN, "response", " is") == ("response is", [("response", 3), (" is", 4)])
    assert kimi_told(*BEGIN, "re", "sp") == ("resp", [("re", 3), ("sp", 4)]), "a part of the mark's word"
    assert kimi_told(*BEGIN, "response\n", "s") == ("response\ns", [("response\n", 3), ("s", 4)])
    assert kimi_told(*BEGIN, ">", " a") == ("> a", [(">", 3), (" a", 4)]), "the mark's end"
    assert kimi_told(*BEGIN, "<", "|", "o", "x") == ("<|ox", [("<", 3), ("|", 4), ("o", 5), ("x", 6)])
    assert kimi_told("a", *END, *BEGIN, "response", "b") == ("aresponseb", [("a", 0), ("response", 7), ("b", 8)])


def test_a_text_that_goes_on_behind_a_hidden_mark_has_no_token_of_it() -> None:
    blank = kimi_told("a", "\n", *BEGIN, "response")
    assert blank == ("a\nresponse", [("a", 0), ("\n", 1), ("response", 5)]), "a blank is held back before the mark"
    held = kimi_told("a", "x", *BEGIN, "response", stop=["xy"])
    assert held == ("axresponse", [("a", 0), ("x", 1), ("response", 5)]), "what may begin a stop string is"
    assert kimi_told(*BEGIN, "response", " is", stop=["response!"])[1] == [("response", 3), (" is", 4)]
    assert kimi_told("a<", *BEGIN, "<", "x") == ("a<<x", [("a<", 0), ("<", 4), ("x", 5)])


def test_what_waits_behind_a_text_has_no_token_of_it_though_its_words_are_the_same() -> None:
    found = kimi_told(*"aaab", stop=["aac"])
    assert found == ("aaab", [("a", 0), ("a", 1), ("a", 2), ("b", 3)])
    assert kimi_told(*"aaac", stop=["aac"]) == ("a", [("a", 0)])
    thought: tuple[str, Channel, str] = ("</think>", "reasoning", "")
    held: list[tuple[str, Channel, str]] = [("\n", "text", ""), ("a", "text", ""), ("a", "text", "a")]
    assert told_of(thought, *held, ("b", "text", "ab")) == [("a", 0), ("a", 1), ("b", 2)]


class Counted(bytes):
    """Bytes that count how many of them are copied."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(found, int):
            return found
        Counted.copied += len(found)
        return Counted(found)


class CountedText(str):
    def encode(self, *_: Any) -> Counted:
        return Counted(super().encode())


@pytest.mark.parametrize("mark", [(), BEGIN], ids=["as it waited", "behind a hidden mark"])
def test_the_tokens_of_a_long_held_text_are_found_with_work_that_its_length_bounds(
    monkeypatch: pytest.MonkeyPatch, mark: Sequence[str]
) -> None:
    monkeypatch.setattr(Counted, "copied", 0)
    untold, count = Untold(), 2_000
    for at, text in enumerate((*mark, *["word"] * count)):
        untold.add(TokenEvent(at, "", "call", logprobs=TokenLogprobs(at, text, -1.0)))
    whole = CountedText("word" * count)
    untold.add(TokenEvent(None, whole))
    assert [each.offset for each in untold.take()] == list(range(0, 4 * count, 4))
    assert len(whole) <= Counted.copied <= 10 * len(whole)


# --- with tokenizers


def model_of(folder: Path) -> Any:
    """The parts of a model that tell its tokens."""
    from mlx_lm.tokenizer_utils import load

    tokenizer = load(folder)
    controls = settle_control_tokens(tokenizer)
    ends = frozenset(int(each) for each in tokenizer.eos_token_ids)
    made = SimpleNamespace(tokenizer=tokenizer, marks=Marks.of(tokenizer, controls), end_tokens=ends)
    made.decode, made.encode_plain = partial(LoadedModel.decode, made), partial(LoadedModel.encode_plain, made)
    return made


def write_merging(folder: Path) -> None:
    """A byte-level tokenizer whose tokens end within characters, and begin there."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from torpor.daemon.models.token_bytes import BYTE_SYMBOLS

    symbols = {byte: symbol for symbol, byte in BYTE_SYMBOLS.items()}
    vocabulary = {symbols[byte]: byte for byte in range(256)}
    pairs = [("a", "ð"), ("Ł", "¦"), ("ð", "Ł"), ("ī", "b"), ("Ġ", "Ġ"), ("Ã", "©"), ("Ġ", "Ã"), ("¬", "ð")]
    for first, second in pairs:
        vocabulary.setdefault(first + second, len(vocabulary))
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


def write_falling_back(folder: Path) -> None:
    """A tokenizer as SentencePiece makes them: a blank begins each text and is dropped at its decoding, and what is
    not in the vocabulary is bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += [*"▁abcdé<>", "▁▁", "▁a", "ab"]
    merges = [("▁", "▁"), ("▁", "a"), ("a", "b")]
    vocabulary = {"<unk>": 0, **{piece: at for at, piece in enumerate(pieces, start=1)}}
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.save(str(folder / "tokenizer.json"))


SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, "eos_token": "<eos>"}


@pytest.fixture(scope="module", params=["bytes", "merging", "falling back", "demo"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of each kind of tokenizer, without its network."""
    if request.param == "demo":
        return model_of(DEMO_MODEL_FOLDER)
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    {"bytes": write_tokenizer, "merging": write_merging, "falling back": write_falling_back}[request.param](folder)
    return model_of(folder)


def answered(
    model: Any,
    tokens: Sequence[int],
    *,
    context: Sequence[int] = (),
    stop: Sequence[str] = (),
) -> tuple[str, list[Told]]:
    """The text of an answer of these tokens, and what is told of them."""
    telling, logits = Logprobs(model, 1), mx.array(np.zeros(len(model.tokenizer), np.float32))
    shown, untold, text = Shown(model, context, None, stop), Untold(), ""
    for token in (*tokens, None):
        pieces = list(shown.push(token) if token is not None else shown.finish())
        told = telling.of(logits, token) if token is not None else None
        for at, piece in enumerate(pieces or [None]):
            found = ("", "text", None) if piece is None else (piece.text, piece.channel, piece.call)
            untold.add(TokenEvent(token, *found, None if at else told))  # type: ignore[arg-type]
            text += found[0] if found[1] == "text" else ""
        if shown.is_over:
            break
    return text, untold.take()


TEXTS = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("aé🦉 \n b<▁€😀ab\N{REPLACEMENT CHARACTER}")),
    max_size=30,
)


def own_bytes(told: Sequence[Told]) -> bytes:
    return b"".join(bytes(each["bytes"]) for each in each_of(told))


@pytest.mark.one_in(1)
@given(text=TEXTS, before=st.sampled_from(["", "a", "é "]))
@example(text="a ab", before="")
def test_the_bytes_are_those_of_the_text_and_the_offsets_those_of_its_characters(
    model: Any, text: str, before: str
) -> None:
    context = model.encode_plain(before, opening=True) if before else []
    shown, told = answered(model, model.tokenizer.encode(text, add_special_tokens=False), context=context)
    assert shown in (text, text.removeprefix(" "), f" {text}")
    found = own_bytes(told)
    assert found in (shown.encode(), b" " + shown.encode()), "a tokenizer may drop a blank that begins a text"
    begins = len(shown.encode()) - len(found)
    offsets = columns_of(told)["text_offset"]
    for each, offset in zip(each_of(told), offsets, strict=True):
        whole = shown.encode()[: max(0, begins)].decode(errors="ignore")
        assert offset == len(whole), (each, offset)
        begins += len(each["bytes"])


@pytest.mark.one_in(1)
@given(text=TEXTS, stop=st.text("abé🦉 ", min_size=1, max_size=3))
def test_a_stop_string_leaves_the_tokens_of_the_text_before_it(model: Any, text: str, stop: str) -> None:
    shown, told = answered(model, model.encode_plain("a" + text, opening=False), stop=[stop])
    assert stop not in shown
    *before, last = [bytes(each["bytes"]) for each in each_of(told)] or [b""]
    found = b"".join(before)
    assert (found + last).lstrip().startswith(shown.lstrip().encode())
    assert shown.lstrip().encode().startswith(found.lstrip()), "no token but the last has more than the text"


def test_the_parts_of_a_character_have_names_of_their_own(model: Any) -> None:
    shown, told = answered(model, model.tokenizer.encode("a🦉b", add_special_tokens=False))
    parts = columns_of(told)["tokens"]
    assert shown == "a🦉b"
    assert re.search(r"bytes:(\\x[0-9a-f]{2})+", "".join(parts)) or "🦉" in parts
    assert [each["token"] for each in each_of(told)] == [part.removeprefix("bytes:") for part in parts]
    assert len(set(parts)) == len(parts), "two parts are two keys among the likeliest"
