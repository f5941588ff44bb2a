"""The name of a control token in a text is text, however the tokenizer has the token; other added tokens stay whole."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from torpor.daemon.engine.channels import Shown
from torpor.daemon.models.chat_template import Root
from torpor.daemon.models.models import LoadedModel, load_model
from torpor.daemon.sessions.encoding import Place
from torpor.daemon.sessions.transcripts import message_of
from torpor.snapshot.digests import DigestCache
from torpor.tests.daemon.models.template_families import (
    CHATML,
    DEEPSEEK,
    FLAGS,
    GEMMA3,
    GLM,
    MISTRAL,
    QWEN3,
    Family,
    Flags,
    write_family,
    write_family_tokenizer,
)
from torpor.tests.dialogues.oracle import InlineEncoder

LoadFamily = Callable[[Family, Flags], LoadedModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory, model_writer: Callable[..., Path]) -> LoadFamily:
    """Loads a tiny model with a family's tokenizer."""
    found: dict[tuple[str, Flags], LoadedModel] = {}

    def load_family(family: Family, flags: Flags) -> LoadedModel:
        if (family.name, flags) not in found:
            folder = tmp_path_factory.mktemp("families")
            write_family(folder / family.name, family, model_writer, flags=flags)
            digests = DigestCache(folder / "digests.sqlite")
            found[family.name, flags] = load_model(family.name, str(folder / family.name), digests)
        return found[family.name, flags]

    return load_family


def spelled(model: LoadedModel, text: str) -> int:
    """As many tokens as the plain text has: one a byte, but for harmless added tokens."""
    return len(model.encode_plain(text, opening=False))


@pytest.mark.one_in(1)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("family", [QWEN3, GLM, DEEPSEEK, MISTRAL], ids=lambda each: each.name)
def test_the_name_of_a_control_token_in_a_text_is_text(load: LoadFamily, family: Family, flags: Flags) -> None:
    model = load(family, flags)
    assert model.control_texts == frozenset(family.controls)
    for name in family.controls:
        text = f"a {name}b"
        assert spelled(model, text) == len(text.encode()), name
        assert str(model.tokenizer.decode(model.encode_plain(text, opening=False))) == text
        assert len(model.encode(text, opening=False)) == 4, "a template writes the token"


@pytest.mark.parametrize("flags", FLAGS)
def test_added_tokens_that_are_plain_text_stay_whole(load: LoadFamily, flags: Flags) -> None:
    model = load(GEMMA3, flags)
    assert model.control_texts.isdisjoint(GEMMA3.harmless)
    text = "a\n\nb    c<end_of_turn>"
    assert spelled(model, text) == len(text) - (2 - 1) - (4 - 1)
    assert len(model.encode(text, opening=False)) == 6


@pytest.mark.parametrize("name", ["covid", "\u2581\u2581", "----", " \t", "long word"])
def test_words_and_rows_of_signs_stay_whole(tiny_model: Path, tmp_path: Path, name: str) -> None:
    from mlx_lm.tokenizer_utils import load as load_tokenizer
    from torpor.daemon.models.control_tokens import settle_control_tokens

    family = dataclasses.replace(CHATML, harmless=(name,), unflagged=("<think>", "[x]", '<|"|>'))
    write_family_tokenizer(tmp_path, family)
    tokenizer = load_tokenizer(tmp_path, {})
    controls = settle_control_tokens(tokenizer)
    assert {controls.names[token] for token in controls.unflagged} == {"<think>", "[x]", '<|"|>'}
    assert len(tokenizer.encode(f"a{name}b", add_special_tokens=False, split_special_tokens=True)) == 3


LOOK = Root(({"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}},))


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("tools", [True, False])
def test_thinking_and_calls_are_told_however_their_marks_are_flagged(
    load: LoadFamily, flags: Flags, tools: bool
) -> None:
    model = load(QWEN3, flags)
    call = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
    said = f"<think>\nwhy\n</think>\n\nI look.{call if tools else ''}"
    shown = Shown(model, [], LOOK if tools else Root(arguments={"enable_thinking": True}), ())
    pieces = [piece for token in model.encode(said, opening=False) for piece in shown.push(token)]
    pieces += shown.finish()
    told = {name: "".join(each.text for each in pieces if each.channel == name) for name in ("text", "reasoning")}
    assert told == {"text": "I look.", "reasoning": "\nwhy\n"}
    assert [each.call.arguments for each in pieces if each.call] == [{"a": 1}] * tools


@pytest.mark.parametrize("flags", FLAGS)
def test_a_question_that_quotes_a_mark_begins_no_thinking(load: LoadFamily, flags: Flags) -> None:
    model = load(QWEN3, flags)
    asked = model.encode_plain("what is <think> for?", opening=False)
    assert not model.marks.thinks_behind(asked, model.end_tokens)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("Say <think> first.", "Say <think> first."),
        ("Then </think> closes it.", "Then </think> closes it."),
        ("`<think>` and `</think>`, twice: <think></think>", "`<think>` and `</think>`, twice: <think></think>"),
        ("<think>Is it <think>?</think>It is </think>.", "It is </think>."),
    ],
)
def test_an_answer_that_quotes_tags_is_read_as_it_was_written(
    load: LoadFamily, flags: Flags, said: str, words: str
) -> None:
    """By another session, too: a template that looks for the tags finds those alone that the text begins with."""
    model = load(QWEN3, flags)
    messages = [message_of("user", "Q"), message_of("assistant", said), message_of("user", "R")]
    with closing(InlineEncoder()) as encoder:
        ids = asyncio.run(encoder.messages(model, messages, Place(0, None, turn_open=False)))
    written = model.encode("<|im_start|>assistant\n", opening=False) + model.encode_plain(words, opening=False)
    assert any(ids[at : at + len(written)] == written for at in range(len(ids)))


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(
    ("stop", "is_there"),
    [("b<|im_start|>c", True), ("b<|im_start|>", True), ("<|im_start|>c", True), ("b<|im_start|>d", False)],
)
def test_a_stop_string_with_a_control_token_in_it_stops(
    load: LoadFamily, flags: Flags, stop: str, is_there: bool
) -> None:
    """Also where it is spelled; and nothing shows the token where it is no such string."""
    model = load(QWEN3, flags)
    for is_spelled in (False, True):
        encode = model.encode_plain if is_spelled else model.encode
        shown = Shown(model, [], None, (stop,))
        pieces = [piece.text for token in encode("ab<|im_start|>c", opening=False) for piece in shown.push(token)]
        text = "".join([*pieces, *(piece.text for piece in shown.finish())])
        alone = Shown(model, [], None, ())
        whole = "".join(piece.text for token in encode("ab<|im_start|>c", opening=False) for piece in alone.push(token))
        assert shown.stopped_by == (stop if is_there else None)
        assert text == ("ab<|im_start|>c".partition(stop)[0].removesuffix("<|im_start|>") if is_there else whole)


def test_a_first_token_that_a_text_has_is_not_put_there_again(load: LoadFamily) -> None:
    from tokenizers.processors import TemplateProcessing

    model = load(MISTRAL, "unlisted")
    backend = model.tokenizer.backend_tokenizer
    first = backend.token_to_id("<s>")
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    for text in ("[INST]hi[/INST]", "<s>[INST]hi[/INST]"):
        ids = model.encode(text, opening=True)
        assert (ids[0], ids.count(first)) == (first, 1)
    assert model.encode_plain("<s>", opening=True).count(first) == 1
