"""Each family's template is told a dialogue in a way that it takes, and what was read stays the beginning of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load
from torpor.daemon.models.chat_template import NO_ROOT, Message, Render, Root, continuation, renderer, rules_of
from torpor.daemon.models.turn_rules import TurnRules
from torpor.tests.daemon.models.template_families import (
    CHATML,
    DEEPSEEK,
    FAMILIES,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    LLAMA3,
    MISTRAL,
    QWEN3,
    SMOLLM3,
    STRICT,
    Family,
    write_family_tokenizer,
)

LOOK = Root(({"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}},))
IDS = ("abcdefgh1", "abcdefgh2")


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(*ids: str) -> list[dict[str, Any]]:
    return [{"name": "look", "arguments": {"at": at}, "id": each} for at, each in enumerate(ids)]


SYSTEM, ONE, TWO, THREE = said("system", "Zero."), said("user", "One."), said("user", "Two."), said("user", "Three.")
WELL, GOOD = said("assistant", "Well."), said("assistant", "Good.")
RESULTS = [said("tool", text, tool_call_id=each) for text, each in zip(("R1.", "R2."), IDS, strict=True)]
DIALOGUES: dict[str, list[dict[str, Any]]] = {
    "two users": [ONE, TWO],
    "two users behind an answer": [ONE, WELL, TWO, THREE, GOOD, ONE],
    "a system text": [SYSTEM, ONE, WELL, TWO],
    "a system text and two users": [SYSTEM, ONE, TWO, WELL, THREE],
    "a later system text": [ONE, WELL, SYSTEM, TWO, GOOD, THREE],
    "a later system text alone": [ONE, WELL, SYSTEM],
    "two system texts": [SYSTEM, said("system", "Be brief."), ONE, WELL, TWO],
    "a system text before an answer": [SYSTEM, WELL, ONE],
    "two answers": [ONE, WELL, GOOD, TWO],
    "an answer first": [WELL, ONE, GOOD, TWO],
    "a result": [ONE, said("assistant", "", tool_calls=calls(IDS[0])), RESULTS[0]],
    "two results": [ONE, said("assistant", "", tool_calls=calls(*IDS)), *RESULTS, GOOD, TWO],
    "a result and a text": [ONE, said("assistant", "", tool_calls=calls(IDS[0])), RESULTS[0], TWO, GOOD, THREE],
    "calls in two answers": [ONE, *(said("assistant", "", tool_calls=[each]) for each in calls(*IDS)), *RESULTS],
    "a text and a system text behind a result": [
        *(ONE, said("assistant", "", tool_calls=calls(IDS[0])), RESULTS[0], SYSTEM, TWO)
    ],
}
IDS_OF_OTHERS = ("toolu_01A", "call_1")


@pytest.fixture(scope="module")
def render_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], tuple[Render, TurnRules]]:
    found: dict[str, tuple[Render, TurnRules]] = {}

    def of(family: Family) -> tuple[Render, TurnRules]:
        if family.name not in found:
            folder: Path = tmp_path_factory.mktemp("template")
            write_family_tokenizer(folder, family)
            tokenizer = load(folder, {})
            rules = rules_of(tokenizer)
            found[family.name] = renderer(tokenizer, rules), rules
        return found[family.name]

    return of


Templates = Callable[[Family], tuple[Render, TurnRules]]


def root_for(dialogue: list[dict[str, Any]]) -> Root:
    return LOOK if any(message.get("tool_calls") for message in dialogue) else NO_ROOT


@pytest.mark.parametrize("what", DIALOGUES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.name)
def test_a_dialogue_is_told_whole_and_in_order_br28(render_of: Templates, family: Family, what: str) -> None:
    dialogue = DIALOGUES[what]
    render, _ = render_of(family)
    root = root_for(dialogue)
    whole, at = render(dialogue, True, root), 0
    for message in dialogue:
        at = whole.find(message["content"], at)
        assert at >= 0, message
        at += len(message["content"])
    for kept in range(1, len(dialogue)):
        if dialogue[kept - 1]["role"] == "assistant" != dialogue[kept]["role"]:
            rest: list[Message] = list(dialogue[kept:])
            assert whole.endswith(continuation(render, rest, root, turn_open=False, end_text="")), kept


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (CHATML, (False, True, True, True, 3)),
        (LLAMA3, (False, True, True, True, 3)),
        (MISTRAL, (True, True, False, False, 0)),
        (GEMMA2, (False, False, False, False, 0)),
        (GEMMA3, (False, True, False, False, 0)),
        (QWEN3, (True, True, True, True, 3)),
        (DEEPSEEK, (True, True, False, True, 3)),
        (GPT_OSS, (False, True, False, True, 2)),
        (SMOLLM3, (True, True, False, True, 3)),
        (STRICT, (False, False, False, False, 0)),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_the_rules_of_a_template_are_found(render_of: Templates, family: Family, expected: tuple[Any, ...]) -> None:
    """Those that refuse, and those that leave out or move: DeepSeek's later system text, gpt-oss's second call."""
    _, rules = render_of(family)
    told = (rules.tools, rules.system, rules.later_system, rules.answer_first, len(rules.in_a_row))
    assert told == expected
    assert rules.any_id is (family is not MISTRAL)


def test_neighbours_are_one_turn_where_turns_alternate(render_of: Templates) -> None:
    render, _ = render_of(STRICT)
    open_turn = "<|im_start|>assistant\n"
    assert render([SYSTEM, ONE, TWO], True) == f"<|im_start|>user\nZero.\n\nOne.\n\nTwo.<|im_end|>\n{open_turn}"
    assert open_turn + "Well.\n\nGood.<|im_end|>" in render([ONE, WELL, GOOD, TWO], True)
    assert render([WELL, ONE], True).startswith(f"<|im_start|>user\n<|im_end|>\n{open_turn}Well.")


def test_what_a_template_takes_is_told_as_it_is(render_of: Templates) -> None:
    render, _ = render_of(CHATML)
    dialogue = [SYSTEM, ONE, TWO, WELL, GOOD, SYSTEM, THREE]
    turns = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in dialogue)
    assert render(dialogue, False) == turns


def test_ids_of_other_servers_are_told_in_nine_letters_where_the_template_wants_those(render_of: Templates) -> None:
    render, _ = render_of(MISTRAL)
    results = [{**result, "tool_call_id": each} for result, each in zip(RESULTS, IDS_OF_OTHERS, strict=True)]
    dialogue = [ONE, said("assistant", "", tool_calls=calls(*IDS_OF_OTHERS)), *results]
    whole = render(dialogue, True, LOOK)
    assert whole.endswith(continuation(render, list(results), LOOK, turn_open=False, end_text=""))
    assert "R1." in whole
    assert "R2." in whole


@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.name)
def test_another_answer_behind_one_that_was_read_is_a_turn_of_its_own(render_of: Templates, family: Family) -> None:
    render, _ = render_of(family)
    rest = continuation(render, [GOOD, TWO], turn_open=False, end_text="")
    assert rest.index("Good.") < rest.index("Two.")


def test_a_turn_that_ends_otherwise_once_another_follows_is_closed_by_its_own_end_token(render_of: Templates) -> None:
    """gpt-oss closes the last answer with `<|return|>` and earlier ones with `<|end|>`."""
    render, _ = render_of(GPT_OSS)
    asked = "<|start|>user<|message|>One.<|end|><|start|>assistant"
    assert continuation(render, [ONE], turn_open=False, end_text="<|return|>") == asked
    assert continuation(render, [ONE], turn_open=True, end_text="<|return|>") == asked
    assert continuation(render, [ONE], turn_open=True, end_text="") == f"<|end|>{asked}"
