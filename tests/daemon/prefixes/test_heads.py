"""A transcript finds the session that has read it, and no session that has read another one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torpor.daemon.models.chat_template import Root
from torpor.daemon.prefixes.heads import digest_of_request
from torpor.daemon.sessions import encoding
from torpor.daemon.sessions.transcripts import message_of
from torpor.tests.daemon.conversing_rig import (  # noqa: F401
    TOOLS,
    assistant,
    cold,
    converse,
    ledger,
    names,
    script,
    thinking,
    user,
    with_template,
)
from transformers.utils import chat_template_utils

SHOWS_ALL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% if words %}{{ words }}{% endif %}{% endif %}"
)
"""All of each message, and what opens an answer by an argument."""


def called(text: str, **arguments: Any) -> dict[str, Any]:
    return dict(message_of("assistant", text, [{"name": "look", "arguments": arguments, "id": "c1"}]))


def thought(text: str, reasoning: str) -> dict[str, Any]:
    return {**assistant(text), "reasoning": reasoning}


ALIKE = [
    (assistant("Sets. </think> ends it"), assistant("Sockets, and threads. </think> ends it")),
    (assistant("<think>a list"), assistant("<think>another")),
    (assistant("why</think>eins"), assistant("eins")),
    (assistant(" eins"), assistant("eins")),
    (assistant("eins"), assistant("eins\n\n")),
    (thought("eins", "hm"), thought("eins", "ah")),
    (thought("eins", "hm"), assistant("eins")),
    (called("eins", a=1, b=2), called("eins", b=2, a=1)),
    (called("eins", a=1), called("eins", a=1.0)),
]


@pytest.mark.one_in(1)
@pytest.mark.parametrize("sleeps", [False, True])
async def test_two_dialogues_are_never_taken_for_one(open_rig: Any, own_tiny_model: Path, sleeps: bool) -> None:
    """Whatever differs in an answer that a client brought, a template may show it."""
    async with open_rig(with_template(own_tiny_model, SHOWS_ALL), endless=False) as rig:
        for at, pair in enumerate(ALIKE if sleeps else [*ALIKE, *((two, one) for one, two in ALIKE)]):
            sessions = []
            for answer in pair:
                said = [user(f"{at}?"), answer, user("on")]
                told = await converse(rig, said, "ja", f"s{at}")
                name = told.session.rpartition("/")[2]
                assert ledger(rig, name) == cold(rig, [*said, assistant("ja")])
                sessions.append(name)
                if sleeps:
                    await rig.sleep(name)
                    await rig.service.heads.learn(rig.service.resolve(name))
            assert len(set(sessions)) == 2
            # And each still finds its own.
            again = await converse(
                rig, [user(f"{at}?"), pair[0], user("on"), assistant("ja"), user("more")], "so", f"s{at}"
            )
            assert again.session.rpartition("/")[2] == sessions[0]


@pytest.mark.parametrize("back", [{}, {"reasoning": "hm"}, {"reasoning": " hm\n"}])
async def test_an_answer_goes_on_with_its_thinking_and_without(
    open_rig: Any, own_tiny_model: Path, back: Mapping[str, str]
) -> None:
    async with thinking(open_rig, model=with_template(own_tiny_model, SHOWS_ALL)) as rig:
        await converse(rig, [user("one")], "<think>hm</think>eins")
        held = len(ledger(rig))
        said = [user("one"), {**assistant(" eins\n"), **back}, user("two")]
        told = await converse(rig, said, "<think>ah</think>zwei")
        assert (told.session, told.cached_tokens) == ("torpor://default/a", 0)
        assert told.prefilled_tokens == told.token_count - len(told.tokens) - held
        # The older answer without its thinking, the newer one with it.
        said = [user("one"), assistant("eins"), user("two"), thought("zwei", "ah"), user("three")]
        assert (await converse(rig, said, "drei")).session == "torpor://default/a"
        other = [user("one"), thought("eins", "something else"), user("two")]
        assert (await converse(rig, other, "deux")).session != "torpor://default/a"


@pytest.mark.parametrize(
    ("arguments", "goes_on"),
    [({"unused": 1}, True), ({"words": "so"}, True), ({}, True), ({"words": "so", "unused": [2]}, True)],
)
async def test_an_argument_that_changes_no_message_is_no_other_conversation(
    open_rig: Any, own_tiny_model: Path, arguments: dict[str, Any], goes_on: bool
) -> None:
    """It counts for what is rendered from now on, be it the opening of an answer."""
    async with open_rig(with_template(own_tiny_model, SHOWS_ALL), endless=False) as rig:
        await converse(rig, [user("one")], "eins", template_arguments={"words": "well"})
        held = len(ledger(rig))
        said = [user("one"), assistant("eins"), user("two")]
        measured = await rig.service.measure("a", said, template_arguments=arguments)
        assert measured.cached_tokens == held
        told = await converse(rig, said, "zwei", template_arguments=arguments)
        assert told.session == "torpor://default/a"
        opening = rig.model.encode(arguments.get("words", ""), opening=False)
        behind = ledger(rig)[: -len(told.tokens)]
        assert behind[len(behind) - len(opening) :] == opening
        assert await names(rig) == {"a"}


async def test_tools_and_arguments_that_a_template_shows_begin_another_conversation(
    open_rig: Any, own_tiny_model: Path
) -> None:
    shows = "{% if brief %}Be brief.{% endif %}{% if tools %}{{ tools | tojson }}{% endif %}" + SHOWS_ALL
    turned = ({"parameters": {"type": "object"}, "description": "Looks.", "name": "look"},)
    roots: list[dict[str, Any]] = [
        {},
        {"tools": TOOLS},
        {"tools": ({**TOOLS[0], "description": "Sees."},)},
        {"tools": turned},
        {"template_arguments": {"brief": True}},
        {"tools": TOOLS, "template_arguments": {"brief": True}},
    ]
    async with open_rig(with_template(own_tiny_model, shows), endless=False) as rig:
        found = []
        for root in roots:
            told = await converse(rig, [user("one")], "eins", **root)
            found.append(told.session)
            name = told.session.rpartition("/")[2]
            as_root = Root(tuple(root.get("tools", ())), root.get("template_arguments", {}))
            assert ledger(rig, name) == cold(rig, [user("one"), assistant("eins")], as_root)
        assert len(set(found)) == len(roots)
        for root, session in zip(roots, found, strict=True):
            again = await converse(rig, [user("one"), assistant("eins"), user("two")], "zwei", **root)
            assert again.session == session


async def test_the_date_in_a_template_begins_no_other_conversation(
    open_rig: Any, own_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated = "{{ strftime_now('%d %b') }}{% if tools %}{{ tools | tojson }}{% endif %}" + SHOWS_ALL
    async with open_rig(with_template(own_tiny_model, dated), endless=False) as rig:
        encoder, model = rig.service.encoder, rig.model
        shown = await encoder.shown_root(model, Root(TOOLS))
        assert shown != await encoder.shown_root(model, Root()) == b""
        tomorrow = datetime.now().astimezone() + timedelta(days=1)
        for module in (encoding, chat_template_utils):
            monkeypatch.setattr(module, "datetime", Mock(now=lambda: tomorrow))
        encoder._shown_roots.clear()
        assert tomorrow.strftime("%d %b") in model.render([user("a")], False, Root(TOOLS))
        assert await encoder.shown_root(model, Root(TOOLS)) == shown


def test_a_request_with_other_thinking_is_no_retry() -> None:
    one, two = ([user("a"), thought("eins", each), user("b")] for each in ("hm", "ah"))
    assert digest_of_request("m", Root(), one) != digest_of_request("m", Root(), two)
    assert digest_of_request("m", Root(), one) == digest_of_request("m", Root(), [dict(each) for each in one])
