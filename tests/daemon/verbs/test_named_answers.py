"""A transcript names answers by ids that the daemon made or was given: they tell which of equal words are meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.models.chat_template import Root
from torpor.daemon.sessions.transcripts import message_of
from torpor.tests.daemon.conversing_rig import SYSTEM, assistant, cold, converse, ledger, thinking, user, with_template
from torpor.tests.daemon.session_rig import Rigged

TOOLS = ({"name": "look", "description": "Looks.", "parameters": {"type": "object"}},)
ONE, TWO, THREE = (f"{number:032x}" for number in (1, 2, 3))
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
SHOWS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def named(text: str, answer_id: str, **more: Any) -> dict[str, Any]:
    return {**message_of("assistant", text), "answer_id": answer_id, **more}


async def test_of_equal_words_the_named_answer_is_gone_on_from(open_rig: Any) -> None:
    async with thinking(open_rig) as rig:
        asked, found = [user("one")], {}
        for answer_id, thought in ((ONE, "hm"), (TWO, "ah"), (THREE, "oh")):
            told = await converse(rig, asked, f"<think>{thought}</think>eins", answer_id=answer_id)
            assert (told.text, told.reasoning) == ("eins", thought)
            found[answer_id] = told.session
        assert len(set(found.values())) == 3
        for answer_id, session in found.items():
            told = await converse(rig, [*asked, named("eins", answer_id), user("two")], "zwei")
            assert told.session == session


@pytest.mark.one_in(1)
async def test_of_equal_words_the_one_with_the_named_call_is_gone_on_from(open_rig: Any) -> None:
    async with thinking(open_rig) as rig:
        asked, found = [user("one")], {}
        for answer_id, thought in ((ONE, "hm"), (TWO, "ah"), (THREE, "oh")):
            reply = f"<think>{thought}</think>{CALL}"
            told = await converse(rig, asked, reply, tools=TOOLS, answer_id=answer_id, max_tokens=90)
            found[told.tool_calls[0].id] = told.session
        assert len(set(found.values())) == len(found) == 3
        for call_id, session in found.items():
            called = message_of("assistant", "", [{"name": "look", "arguments": {}, "id": call_id}])
            result = {"role": "tool", "content": "a file", "tool_call_id": call_id}
            told = await converse(rig, [*asked, called, result], "ja", tools=TOOLS)
            assert told.session == session


async def test_a_named_answer_goes_on_in_its_session_whatever_the_request_is_called(rig: Rigged) -> None:
    await converse(rig, [user("one")], "eins", "mine", answer_id=ONE)
    said = [user("one"), named("eins", ONE), user("two")]
    told = await converse(rig, said, "zwei", "chat", answer_id=TWO)
    assert told.session == "torpor://default/mine"
    # The session has gone on since, so the same answer is forked.
    told = await converse(rig, said, "deux", "chat")
    assert told.session == "torpor://default/chat"
    # A session of the request's own name comes first, though one of another name ends there.
    await rig.service.fork("mine", "kept")
    held = ledger(rig, "mine")
    said = [user("one"), assistant("eins"), user("two"), named("zwei", TWO), user("three")]
    assert (await converse(rig, said, "drei", "mine")).session == "torpor://default/mine"
    other = await converse(rig, [*said[:-1], user("four")], "quatre", "mine")
    assert other.session.startswith("torpor://default/mine-")
    assert (await rig.service.show("kept")).info.token_count == len(held)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("forged", ["f" * 32, TWO, THREE])
async def test_a_forged_or_foreign_id_changes_nothing(rig: Rigged, forged: str) -> None:
    await converse(rig, [user("one")], "eins", answer_id=ONE)
    await converse(rig, [user("other")], "eins", "b", answer_id=TWO)
    await converse(rig, [user("one")], "eins", "theirs/c", answer_id=THREE)
    held, theirs = ledger(rig, "b"), ledger(rig, "torpor://theirs/c")
    calls = [{"name": "look", "arguments": {}, "id": "zzzzzzzzz"}]
    for wrong in (named("eins", forged), named("uno", forged), named("eins", forged, tool_calls=calls)):
        told = await converse(rig, [user("one"), wrong, user("two")], "zwei", "a")
        name = told.session.rpartition("/")[2]
        assert told.session.startswith("torpor://default/a")
        assert ledger(rig, name)[: len(told.tokens) * -1] == rig.model.encode(
            rig.model.render([user("one"), wrong, user("two")], True), opening=False
        )
    assert (ledger(rig, "b"), ledger(rig, "torpor://theirs/c")) == (held, theirs)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("sleeps", [False, True])
async def test_what_a_named_answer_thought_is_read_again_with_it(
    open_rig: Any, own_tiny_model: Path, sleeps: bool
) -> None:
    """Whatever the client makes of the thinking; and not where the words are others."""
    async with thinking(open_rig, model=with_template(own_tiny_model, SHOWS_THOUGHTS)) as rig:
        await converse(rig, [SYSTEM, user("one")], "<think>hm</think>eins", answer_id=ONE)
        before = [user("one"), named("eins", ONE), user("two")]
        await converse(rig, [SYSTEM, *before], "<think>ah</think>zwei", answer_id=TWO)
        if sleeps:
            await rig.sleep("a")
        later = [message_of("system", "Be long."), user("one"), named("eins", ONE, reasoning="forged"), user("two")]
        later += [named("zwei", TWO), user("three")]
        measured = await rig.service.measure("a", later)
        told = await converse(rig, later, "drei")
        assert told.cached_tokens == 0
        thoughts = {1: "hm", 3: "ah"}
        whole = [
            {**each, "reasoning": thoughts[at - 1]} if at - 1 in thoughts else each for at, each in enumerate(later)
        ]
        name = told.session.rpartition("/")[2]
        assert ledger(rig, name) == cold(rig, [*whole, assistant("drei")])
        assert measured.tokens == told.token_count - len(told.tokens)
        other = [message_of("system", "Be odd."), user("one"), named("uno", ONE, reasoning="mine"), user("two")]
        told = await converse(rig, other, "dos")
        assert ledger(rig, told.session.rpartition("/")[2]) == cold(rig, [*other, assistant("dos")])


async def test_calls_have_the_same_ids_when_they_are_told_again(rig: Rigged) -> None:
    told = await converse(rig, [user("one")], CALL * 2, tools=TOOLS, answer_id=ONE, max_tokens=150)
    ids = [call.id for call in told.tool_calls]
    assert len(set(ids)) == 2
    (*_, again) = (await rig.service.recall(answer_id=ONE)).messages
    assert [call.id for call in again.tool_calls] == ids
    assert ledger(rig)[: -len(told.tokens)] == rig.model.encode(
        rig.model.render([user("one")], True, Root(TOOLS)), opening=False
    )


SHOWS_ALL = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.tool_call_id }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }}{{ c.function.name }}{{ c.function.arguments | tojson }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if thinks is defined %}{{ thinks }}{% endif %}{% endif %}"
)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("text", ["\n\n  eins", "eins \n\n", "\teins\t"])
async def test_an_id_vouches_for_no_other_spelling_of_an_answer(open_rig: Any, own_tiny_model: Path, text: str) -> None:
    """It is read as the model wrote it, so the dialogue with that spelling is answered from the same state."""
    async with thinking(open_rig, model=with_template(own_tiny_model, SHOWS_ALL)) as rig:
        await converse(rig, [user("one")], "eins", answer_id=ONE)
        other = [user("other"), named(text, ONE), user("two")]
        plain = [user("other"), assistant("eins"), user("two")]
        for said in (other, plain):
            told = await converse(rig, said, "zwei")
            held = ledger(rig, told.session.rpartition("/")[2])
            assert held == cold(rig, [*plain, assistant("zwei")])


async def test_an_id_vouches_for_no_other_ids_of_calls(open_rig: Any, own_tiny_model: Path) -> None:
    async with open_rig(endless=False, model=with_template(own_tiny_model, SHOWS_ALL)) as rig:
        wrote = await converse(rig, [user("one")], CALL, tools=TOOLS, answer_id=ONE, max_tokens=90)
        for call_id in ("another01", wrote.tool_calls[0].id):
            call = {"name": "look", "arguments": {}, "id": call_id}
            result = {"role": "tool", "content": "a file", "tool_call_id": call_id}
            said = [user("other"), named("", ONE, tool_calls=[call]), result]
            told = await converse(rig, said, "ja", tools=TOOLS)
            held = ledger(rig, told.session.rpartition("/")[2])
            assert held == cold(rig, [*said, assistant("ja")], Root(TOOLS))


async def test_results_are_told_apart_by_the_calls_that_they_answer(open_rig: Any, own_tiny_model: Path) -> None:
    async with open_rig(endless=False, model=with_template(own_tiny_model, SHOWS_ALL)) as rig:
        calls = [{"name": "look", "arguments": {"at": at}, "id": f"call0000{at}"} for at in (1, 2)]
        asked = [user("one"), {**assistant(""), "tool_calls": calls}]
        for ids in ((1, 2), (2, 1), (1, 1)):
            results = [{"role": "tool", "content": "10", "tool_call_id": f"call0000{at}"} for at in ids]
            said = [*asked, *results]
            for more in ([], [assistant("ja"), user("two")]):
                said = [*said, *more]
                told = await converse(rig, said, "ja", tools=TOOLS)
                held = ledger(rig, told.session.rpartition("/")[2])
                assert held == cold(rig, [*said, assistant("ja")], Root(TOOLS))


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("first", "then"), [({}, {"thinks": "hm"}), ({"thinks": "hm"}, {}), ({"thinks": "a"}, {"thinks": "b"})]
)
@pytest.mark.parametrize("turns", [0, 1])
async def test_the_same_dialogue_is_answered_in_a_turn_that_opens_as_its_template_arguments_say(
    open_rig: Any, own_tiny_model: Path, first: Any, then: Any, turns: int
) -> None:
    async with open_rig(endless=False, model=with_template(own_tiny_model, SHOWS_ALL)) as rig:
        said = [user("one")]
        for _ in range(turns):
            await converse(rig, said, "eins")
            said += [assistant("eins"), user("two")]
        for arguments in (first, then, first):
            told = await converse(rig, said, "zwei", template_arguments=arguments)
            held = ledger(rig, told.session.rpartition("/")[2])
            opened = rig.model.render(said, True, Root(arguments=arguments))
            assert held == rig.model.encode(f"{opened}zwei<|im_end|>", opening=False)


async def test_behind_an_answer_empty_tools_and_arguments_hold_and_left_out_ones_stay(
    open_rig: Any, own_tiny_model: Path
) -> None:
    async with open_rig(endless=False, model=with_template(own_tiny_model, SHOWS_ALL)) as rig:
        await converse(rig, [user("one")], "eins", answer_id=ONE, tools=TOOLS, template_arguments={"thinks": "hm"})
        for given, thinks, offers in (
            ({}, True, True),
            ({"template_arguments": {}}, False, True),
            ({"tools": ()}, True, False),
            ({"tools": (), "template_arguments": {}}, False, False),
        ):
            measured = await rig.service.measure("a", [user("two")], after=ONE, **given)
            told = await converse(rig, [user("two")], "zwei", after=ONE, **given)
            live = rig.live(told.session.rpartition("/")[2])
            assert (bool(live.chat.root.tools), live.chat.root.arguments) == (
                offers,
                {"thinks": "hm"} if thinks else {},
            )
            text = rig.model.tokenizer.decode(list(live.state.tokens))
            assert text.endswith("assistant\nhmzwei<|im_end|>") is thinks
            assert ("You may call no tools." in text) is not offers
            assert measured.tokens == told.token_count - len(told.tokens)
