"""Which tokens' log-probabilities are those of the text, where in it they stand, and which bytes they are."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.daemon.api.dialogue import ToolCall
from torpor.daemon.api.events import Channel, TokenEvent
from torpor.daemon.api.logprobs import TokenLogprobs
from torpor.daemon.engine.channels import Shown
from torpor.daemon.engine.logprobs import Logprobs
from torpor.daemon.models.control_tokens import settle_control_tokens
from torpor.daemon.models.marks import Marks
from torpor.daemon.models.models import DEMO_MODEL_FOLDER, LoadedModel
from torpor.socket_api.http.logprobs import Told, Untold, columns_of, each_of
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
def test_the_bytes_are_those_of_the_text_and_the_offsets_those_of_its_characters(
    model: Any, text: str, before: str
) -> None:
    context = model.encode_plain(before, opening=True) if before else []
    shown, told = answered(model, model.tokenizer.encode(text, add_special_tokens=False), context=context)
    assert shown in (text, text.removeprefix(" "), f" {text}")
    found = own_bytes(told)
    assert found in (shown.encode(), b" " + shown.encode()), "a tokenizer may drop a blank that begins a text"
    begins = len(found) - len(shown.encode())
    offsets = columns_of(told)["text_offset"]
    for each, offset in zip(each_of(told), offsets, strict=True):
        whole = shown.encode()[: max(0, begins)].decode(errors="ignore")
        assert offset == len(whole), (each, offset)
        begins += len(each["bytes"])


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
