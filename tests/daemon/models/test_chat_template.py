"""Chat: only the new turn is tokenised, and the conversation is the one that a cold rendering gives (BR28, MS6)."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from torpor.daemon.errors import TemplateUnusable
from torpor.daemon.models import chat_template
from torpor.daemon.models.chat_template import NO_ROOT, Message, Root, continuation, opening, renderer, rules_of
from torpor.daemon.sessions.transcripts import spoken
from torpor.tests.daemon.session_rig import END, Rigged, reply_with


async def chat(rig: Rigged, message: str, **options: Any) -> Any:
    return await rig.service.chat("a", message=message, **({"max_tokens": 60} | options))


def ledger(rig: Rigged) -> list[int]:
    return list(rig.live("a").state.tokens)


def cold(rig: Rigged, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """The tokens of the whole conversation, rendered at once."""
    return rig.model.encode(rig.model.render(messages, False), opening=False)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# --- conversations on the service


@pytest.fixture
def rig(open_rig: Any) -> Any:
    """Its answers end where the model ends them."""
    return open_rig(endless=False)


@pytest.mark.parametrize("system", [None, "Be brief."])
async def test_three_turns_are_the_tokens_of_a_cold_rendering_br28(rig: Rigged, system: str | None) -> None:
    await rig.service.create("a", system=system)
    messages = [message("system", system)] if system else []
    for number in range(3):
        reply_with(rig, f"answer {number}")
        result = await chat(rig, f"question {number}?")
        assert (result.text, result.finish_reason) == (f"answer {number}", "stop")
        messages += [message("user", f"question {number}?"), message("assistant", f"answer {number}")]
        # The template ends a conversation with a line break that belongs to the turn after it.
        whole = cold(rig, messages)
        assert whole[-1:] == rig.model.encode("\n", opening=False)
        assert ledger(rig) == whole[:-1]


async def test_the_system_text_opens_the_chat_of_a_session_that_has_read_something_before(rig: Rigged) -> None:
    await rig.service.create("a", system="Be brief.")
    await rig.service.append("a", text="a document")
    held = ledger(rig)
    for number in range(2):
        reply_with(rig, f"answer {number}")
        await chat(rig, f"question {number}?")
    opening = [message("system", "Be brief."), message("user", "question 0?"), message("assistant", "answer 0")]
    conversation = [*opening, message("user", "question 1?"), message("assistant", "answer 1")]
    assert ledger(rig) == held + cold(rig, conversation)[:-1], "once, and before the first question"


async def test_a_reply_that_was_cut_short_is_closed_before_the_next_turn(rig: Rigged) -> None:
    await rig.service.create("a")
    reply_with(rig, "it never stops talk", end=False)
    result = await chat(rig, "hello", max_tokens=19)
    assert result.finish_reason == "length"
    reply_with(rig, "ok")
    await chat(rig, "stop")
    conversation = [
        message("user", "hello"),
        message("assistant", "it never stops talk"),
        message("user", "stop"),
        message("assistant", "ok"),
    ]
    assert ledger(rig) == cold(rig, conversation)[:-1]


async def test_the_end_token_is_kept_in_the_ledger_but_not_shown(rig: Rigged) -> None:
    await rig.service.create("a")
    reply_with(rig, "yes")
    events: list[Any] = []
    result = await rig.service.chat("a", message="?", max_tokens=9, on_event=events.append)
    assert (result.tokens[-1], ledger(rig)[-1], result.text) == (END, END, "yes")
    assert "".join(getattr(event, "text", "") for event in events) == "yes"


async def test_text_that_was_appended_in_between_closes_no_turn(rig: Rigged) -> None:
    await rig.service.create("a")
    await rig.service.append("a", text="A document.")
    reply_with(rig, "ok")
    await chat(rig, "hello")
    assert rig.model.tokenizer.decode(ledger(rig)) == (
        "A document.<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nok<|im_end|>"
    )


async def test_a_role_is_the_templates_affair(rig: Rigged) -> None:
    await rig.service.create("a")
    reply_with(rig, "ok")
    await chat(rig, "42", role="tool")
    assert rig.model.tokenizer.decode(ledger(rig)).startswith("<|im_start|>tool\n42<|im_end|>")


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no roles here') }}", "{{ nonsense( }}"])
async def test_a_template_that_is_missing_or_raises_is_refused_and_the_session_stays_usable(
    open_rig: Any, own_tiny_model: Path, template: str | None
) -> None:
    path = own_tiny_model / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("chat_template")
    path.write_text(json.dumps(settings | ({"chat_template": template} if template else {})))
    async with open_rig(own_tiny_model) as rig:
        await rig.service.create("a")
        with pytest.raises(TemplateUnusable):
            await chat(rig, "hello")
        assert ledger(rig) == []
        await rig.service.append("a", text="hello")
        assert len((await rig.write("a", 3))[0]) == 3
        await rig.sleep("a")


# --- the functions


def chatml(messages: Sequence[Message], open_turn: bool, root: Root = NO_ROOT) -> str:
    text = "".join(f"<{each['role']}>{each['content']}</s>\n" for each in messages)
    return text + ("<assistant>" if open_turn else "")


def test_a_first_turn_has_the_system_prompt_before_it() -> None:
    messages = spoken([message("user", "hi")], "S")
    assert opening(chatml, messages) == "<system>S</s>\n<user>hi</s>\n<assistant>"
    assert opening(chatml, spoken([message("user", "hi")], None)) == "<user>hi</s>\n<assistant>"


@pytest.mark.parametrize(
    ("turn_open", "end_text", "expected"),
    [
        (False, "", "<user>hi</s>\n<assistant>"),
        (True, "", "</s>\n<user>hi</s>\n<assistant>"),
        (True, "</s>", "\n<user>hi</s>\n<assistant>"),
        (True, "<other end>", "</s>\n<user>hi</s>\n<assistant>"),
    ],
)
def test_a_next_turn_closes_what_is_open_and_no_more(turn_open: bool, end_text: str, expected: str) -> None:
    assert continuation(chatml, [message("user", "hi")], turn_open=turn_open, end_text=end_text) == expected


@pytest.mark.parametrize("placeholder", [chat_template._USER, chat_template._ASSISTANT])
def test_a_message_that_quotes_a_placeholder_is_just_text(placeholder: str) -> None:
    """Agents read and discuss source code, this one too."""
    text = continuation(chatml, [message("user", f"what is {placeholder}?")], turn_open=False, end_text="")
    assert text == f"<user>what is {placeholder}?</s>\n<assistant>"


def test_a_template_that_renders_old_turns_differently_is_refused() -> None:
    def forgetful(messages: Sequence[Message], open_turn: bool, root: Root = NO_ROOT) -> str:
        # Like templates that drop the thinking of all turns but the last.
        shown = [
            each["content"] + ("[last]" if index == len(messages) - 1 else "") for index, each in enumerate(messages)
        ]
        return "|".join(shown)

    with pytest.raises(TemplateUnusable, match="differently"):
        continuation(forgetful, [message("user", "hi")], turn_open=False, end_text="")


def test_a_template_that_does_not_show_the_assistants_words_is_refused() -> None:
    with pytest.raises(TemplateUnusable, match="does not show"):
        continuation(lambda *_messages, **_root: "constant", [message("user", "hi")], turn_open=False, end_text="")


def test_what_a_template_raises_is_told_in_one_sentence() -> None:
    def refuse(*_args: object, **_options: object) -> str:
        raise ValueError("roles must alternate")

    tokenizer = SimpleNamespace(chat_template="x", apply_chat_template=refuse)
    render = renderer(tokenizer, rules_of(tokenizer))
    with pytest.raises(TemplateUnusable, match="roles must alternate"):
        render([message("user", "hi")], True)


# --- tools

TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
CALLED = {**message("assistant", ""), "tool_calls": [{"name": "look", "arguments": {"path": "."}, "id": "c00000001"}]}
RESULT = {**message("tool", "a file"), "tool_call_id": "c00000001"}
KNOWS_TOOLS = (
    "{% for tool in tools or [] %}[{{ tool.function | tojson }}]{% endfor %}"
    "{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "(call {{ call.function.name }} {{ call.function.arguments | tojson }})"
    "{% endfor %}"
    "</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if think is defined and not think %}no thoughts:{% endif %}{% endif %}"
)


def by(template: str) -> chat_template.Render:
    """A rendering by a template, as a tokenizer does it."""
    tokenizer = SimpleNamespace(chat_template=template, apply_chat_template=functools.partial(apply, template))
    return renderer(tokenizer, rules_of(tokenizer))


def apply(template: str, messages: Any, *, tokenize: bool, add_generation_prompt: bool, **given: Any) -> str:
    assert not tokenize
    compiled = ImmutableSandboxedEnvironment().from_string(template)
    return str(compiled.render(messages=messages, add_generation_prompt=add_generation_prompt, **given))


def test_a_template_that_knows_tools_writes_them() -> None:
    render = by(KNOWS_TOOLS)
    asked = [message("user", "hi")]
    assert opening(render, asked, Root((TOOL,))).startswith('[{"description": "Looks.", "name": "look"')
    rest = continuation(render, [RESULT], Root((TOOL,)), turn_open=True, end_text="")
    assert rest == "</s>\n<tool>a file</s>\n<assistant>"
    assert render([*asked, CALLED], False, Root((TOOL,))).endswith('<assistant>(call look {"path": "."})</s>\n')


@pytest.mark.parametrize("turn_open", [True, False])
def test_a_result_continues_a_conversation_as_a_cold_rendering_has_it_br28(turn_open: bool) -> None:
    for template in (KNOWS_TOOLS, CHATML):
        render, root, asked = by(template), Root((TOOL,)), [message("user", "hi")]
        before, after = render([*asked, CALLED], False, root), render([*asked, CALLED, RESULT], True, root)
        end = "</s>\n" if template == KNOWS_TOOLS else "<|im_end|>\n"
        ledger = before.removesuffix(end) if turn_open else before
        assert ledger + continuation(render, [RESULT], root, turn_open=turn_open, end_text="") == after


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("system", [True, False])
def test_a_template_that_knows_no_tools_gets_them_as_texts(system: bool) -> None:
    render = by(CHATML)
    said = [message("system", "S")] * system + [message("user", "hi"), CALLED, RESULT]
    text = render(said, True, Root((TOOL,)))
    assert text.startswith("<|im_start|>system\nS\n\nYou may call" if system else "<|im_start|>system\nYou may call")
    assert '{"type": "function", "function": {"name": "look", "description": "Looks."' in text
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {"path": "."}}\n</tool_call><|im_end|>'
        in text
    )
    assert "<|im_start|>user\nThe tool says:\na file<|im_end|>" in text


def test_the_arguments_of_a_conversation_reach_its_template() -> None:
    render, asked = by(KNOWS_TOOLS), [message("user", "hi")]
    plain, quiet = opening(render, asked), opening(render, asked, Root(arguments={"think": False}))
    assert (plain[-11:], quiet[-12:]) == ("<assistant>", "no thoughts:")
    assert continuation(render, asked, Root(arguments={"think": False}), turn_open=False, end_text="").endswith(":")


@pytest.mark.parametrize("name", ["messages", "tokenize", "add_generation_prompt", "eos_token"])
def test_no_argument_replaces_what_the_daemon_sets(name: str) -> None:
    with pytest.raises(TemplateUnusable, match=name):
        opening(by(KNOWS_TOOLS), [message("user", "hi")], Root(arguments={name: "x"}))


async def test_the_template_itself_is_no_argument(rig: Rigged) -> None:
    with pytest.raises(TemplateUnusable, match="chat_template"):
        rig.model.render([message("user", "hi")], True, Root(arguments={"chat_template": "{{ 7 * 7 }}"}))


def test_a_root_comes_back_as_it_was_kept() -> None:
    root = Root((TOOL, {**TOOL, "name": "see"}), {"think": False, "x": [1, {"y": None}]})
    assert Root.from_text(root.to_text()) == root
    assert Root.from_text(None) is NO_ROOT


@pytest.mark.parametrize("stored", [1, "", "[]", "{}", '{"tools": [1], "arguments": {}}', "[" * 100_000])
def test_what_is_no_root_is_refused(stored: object) -> None:
    with pytest.raises(ValueError, match=r"root|Expecting"):
        Root.from_text(stored)
