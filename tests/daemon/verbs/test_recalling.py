"""An answer is found by its id: a dialogue goes on behind it, and it is told from its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torpor.daemon.api.constraints import Constraint, ToolChoice
from torpor.daemon.api.dialogue import ToolCall
from torpor.daemon.api.events import TokenEvent
from torpor.daemon.errors import AnswerNotFound, InvalidTranscript, SessionAwake
from torpor.daemon.models.call_formats import call_shape
from torpor.daemon.models.chat_template import Root
from torpor.daemon.models.written_tools import offer_of
from torpor.daemon.sessions.transcripts import TEXT_MAP, TextMap, message_of
from torpor.memvid.store import VersionDraft
from torpor.memvid.uri import SessionUri
from torpor.snapshot.errors import MalformedSnapshot
from torpor.tests.daemon.conversing_rig import (
    SYSTEM,
    TOOLS,
    assistant,
    called,
    cold,
    converse,
    ledger,
    names,
    thinking,
    user,
    with_template,
)
from torpor.tests.daemon.models.template_families import QWEN3, write_family
from torpor.tests.daemon.session_rig import MODEL, Rigged, open_rigged
from torpor.tests.shares import share

ONE, TWO, THREE = (f"{number:032x}" for number in (1, 2, 3))
CALL = '<tool_call>{"name": "look", "arguments": {"path": "."}}</tool_call>'


async def test_an_answer_is_gone_on_from_by_its_id_and_only_what_is_new_crosses_the_wire(rig: Rigged) -> None:
    await converse(rig, [SYSTEM, user("one")], "eins", answer_id=ONE)
    held = len(ledger(rig))
    told = await converse(rig, [user("two")], "zwei", after=ONE, answer_id=TWO)
    assert told.session == "torpor://default/a"
    assert told.prefilled_tokens == told.token_count - len(told.tokens) - held
    said = [SYSTEM, user("one"), assistant("eins"), user("two"), assistant("zwei")]
    assert ledger(rig) == cold(rig, said)
    # The same conversation is found by what was said, too.
    assert (await converse(rig, [*said, user("on")], "ja")).session == told.session
    assert await names(rig) == {"a"}


async def test_an_older_answer_is_gone_on_from_in_a_fork(rig: Rigged) -> None:
    await converse(rig, [user("one")], "eins", answer_id=ONE)
    await converse(rig, [user("two")], "zwei", after=ONE, answer_id=TWO)
    held = ledger(rig)
    told = await converse(rig, [user("three")], "drei", after=ONE, answer_id=THREE)
    fork = told.session.rpartition("/")[2]
    assert (ledger(rig), fork != "a") == (held, True)
    assert ledger(rig, fork) == cold(rig, [user("one"), assistant("eins"), user("three"), assistant("drei")])
    # Each goes on where it is last, under whatever name.
    for after, session in ((TWO, "a"), (THREE, fork)):
        told = await converse(rig, [user("on")], "ja", "elsewhere", after=after)
        assert told.session == f"torpor://default/{session}"


async def test_requests_at_once_behind_one_answer_all_go_on_from_it(rig: Rigged) -> None:
    await converse(rig, [user("one")], "eins", answer_id=ONE)
    held = len(ledger(rig))
    rig.script.clear()
    asked = (converse(rig, [user(f"q{at}")], after=ONE, max_tokens=8) for at in range(3))
    told = await asyncio.gather(*asked)
    assert len({each.session for each in told}) == 3
    assert all(each.token_count - len(each.tokens) - each.prefilled_tokens == held for each in told)


async def test_an_answer_is_found_after_a_restart_and_in_a_deleted_session_no_more(open_rig: Any) -> None:
    async with open_rig(endless=False) as rig:
        await converse(rig, [user("one")], "eins", answer_id=ONE)
        held = ledger(rig)
    async with open_rig(endless=False) as rig:
        assert (await rig.service.recall(answer_id=ONE)).messages[-1].content == "eins"
        assert not rig.service._parts.sessions.residency.awake, "it was told from the disk"
        await converse(rig, [user("two")], "zwei", after=ONE)
        assert ledger(rig)[: len(held)] == held
        await rig.service.delete("a")
        with pytest.raises(AnswerNotFound):
            await converse(rig, [user("two")], after=ONE)
        with pytest.raises(AnswerNotFound):
            await rig.service.measure("a", [user("two")], after=ONE)
        with pytest.raises(AnswerNotFound):
            await rig.service.recall(answer_id=ONE)


async def test_instructions_stay_and_others_are_said_once(rig: Rigged) -> None:
    opening = {**message_of("system", "Be brief.\n\nYou are in a test."), "instructed": len("Be brief.")}
    await converse(rig, [opening, user("one")], "eins", answer_id=ONE)
    after = ONE
    said: list[Any] = [opening, user("one"), assistant("eins")]
    for number, (instructions, new) in enumerate(
        [
            (None, []),
            ("Be brief.", []),
            ("Be brief.\n\nYou are in a test.", []),
            ("Be loud.", [message_of("system", "Be loud.")]),
            ("Be loud.", []),
            (None, []),
        ]
    ):
        answer_id = f"{number + 10:032x}"
        measured = await rig.service.measure("a", [user("on")], after=after, instructions=instructions)
        told = await converse(
            rig, [user("on")], f"a{number}", after=after, answer_id=answer_id, instructions=instructions
        )
        assert measured.tokens == told.token_count - len(told.tokens)
        assert measured.cached_tokens == measured.tokens - told.prefilled_tokens
        said += [*new, user("on"), assistant(f"a{number}")]
        assert ledger(rig) == cold(rig, said)
        after = answer_id
    told = (await rig.service.recall("a")).messages
    instructed = [(each.content, each.instructed) for each in told if each.role == "system"]
    assert instructed == [(opening["content"], len("Be brief.")), ("Be loud.", len("Be loud."))]


async def test_other_fields_in_the_same_words_are_those_of_the_request_that_had_them(rig: Rigged) -> None:
    said, asked = message_of("system", "Be brief.\n\nYou are in a test."), dict[str, Any]()
    for name, chars in ((ONE, len("Be brief.")), (TWO, 0), (THREE, len(said["content"]))):
        opening = {**said, **({"instructed": chars} if chars else {})}
        messages = [opening, user("one"), assistant("eins"), user(name[-1])]
        await converse(rig, messages, "ja", answer_id=name)
        asked[name] = (await rig.service.recall(answer_id=name)).messages[0].instructed
    assert asked == {ONE: 9, TWO: 0, THREE: len(said["content"])}


@pytest.mark.parametrize("slept", [False, True])
async def test_what_fields_of_a_request_say_is_told_apart_from_messages(rig: Rigged, *, slept: bool) -> None:
    """Instructions stand before a system text of the session's own that is not said yet, as in a whole dialogue."""
    await rig.service.create("a", system="You are in a test.", model=MODEL)
    await converse(rig, [user("one")], "eins", at_end=True, instructions="Be brief.")
    opening = message_of("system", "Be brief.\n\nYou are in a test.")
    assert ledger(rig) == cold(rig, [opening, user("one"), assistant("eins")])
    if slept:
        await rig.service.sleep("a")
    await converse(rig, [user("two")], "zwei", at_end=True, instructions="Be brief.", tools=TOOLS)
    await converse(rig, [message_of("system", "Go on."), user("three")], "drei", at_end=True)
    if slept:
        await rig.service.sleep("a")
    told = [each for each in (await rig.service.recall("a")).messages if each.role == "system"]
    texts = [opening["content"], told[1].content, "Go on."]
    assert [(each.content, each.instructed) for each in told] == list(zip(texts, (9, len(texts[1]), 0), strict=True))
    assert "schemas" in texts[1]


@pytest.mark.parametrize("slept", [False, True])
async def test_instructions_that_are_the_beginning_of_those_before_are_others(rig: Rigged, *, slept: bool) -> None:
    """A client's own words may stand behind them in one text. A paragraph that it leaves out must not hold."""
    long = "Be brief.\n\nAnswer in French only."
    for number, (instructed, new) in enumerate(((len(long), 1), (len("Be brief."), 0), (0, 1))):
        name = f"s{number}"
        opening = {**message_of("system", long), "instructed": instructed}
        await converse(rig, [opening, user(name)], "eins", name, answer_id=ONE)
        if slept:
            await rig.sleep(name)
        await converse(rig, [user("on")], "ja", name, after=ONE, answer_id=TWO, instructions="Be brief.")
        said = [message_of("system", "Be brief.")] * new
        whole = cold(rig, [opening, user(name), assistant("eins"), *said, user("on"), assistant("ja")])
        assert ledger(rig, name) == whole
        await rig.service.delete(name)


async def test_what_another_client_had_as_instructions_does_not_count(rig: Rigged) -> None:
    long = "Be brief.\n\nAnswer in French only."
    said = [user("one"), assistant("eins"), user("two")]
    first, second = ({**message_of("system", long), "instructed": chars} for chars in (len("Be brief."), len(long)))
    await converse(rig, [first, *said[:1]], "eins", answer_id=ONE)
    await converse(rig, [second, *said], "zwei", answer_id=TWO)
    told = await converse(rig, [user("on")], "ja", after=TWO, answer_id=THREE, instructions="Be brief.")
    assert ledger(rig, told.session.rpartition("/")[2]) == cold(
        rig, [second, *said, assistant("zwei"), message_of("system", "Be brief."), user("on"), assistant("ja")]
    )
    told = await converse(rig, [user("else")], "so", after=ONE, instructions="Be brief.")
    held = ledger(rig, told.session.rpartition("/")[2])
    assert held == cold(rig, [first, *said[:2], user("else"), assistant("so")])


@pytest.mark.one_in(1)
async def test_tools_that_are_left_out_stay_and_others_are_offered_behind_the_results(rig: Rigged) -> None:
    other = ({"name": "count", "description": "Counts.", "parameters": {"type": "object"}},)
    told = await converse(rig, [user("hi")], CALL, tools=TOOLS, answer_id=ONE, max_tokens=90)
    result = {"role": "tool", "content": "a file", "tool_call_id": told.tool_calls[0].id}
    await converse(rig, [result], CALL, after=ONE, answer_id=TWO, max_tokens=90)
    told = await converse(rig, [result], CALL.replace("look", "count"), after=TWO, tools=other, max_tokens=90)
    assert [call.name for call in told.tool_calls] == ["count"]
    messages = (await rig.service.recall("a")).messages
    assert [each.role for each in messages[-4:]] == ["assistant", "tool", "system", "assistant"]
    assert messages[-2].content == offer_of(other, call_shape(rig.model.marks))


SHOWS_ROOT = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ thinks | default('') }}{% endif %}"
)
OTHER: Any = ({"name": "count", "description": "Counts.", "parameters": {"type": "object"}},)
ROOTS: dict[str, Any] = {
    "tools": [{"tools": ()}, {"tools": TOOLS}],
    "other tools": [{"tools": TOOLS}, {"tools": OTHER}],
    "no tools": [{"tools": TOOLS}, {"tools": ()}],
    "an argument": [{}, {"template_arguments": {"thinks": "<no>"}}],
    "no argument": [{"template_arguments": {"thinks": "<no>"}}, {"template_arguments": {}}],
    "back and forth": [
        {"tools": TOOLS},
        {"template_arguments": {"thinks": "<no>"}},
        {"tools": OTHER},
        {"tools": TOOLS},
    ],
}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("roots", ROOTS.values(), ids=list(ROOTS))
async def test_what_was_said_is_told_whatever_root_a_later_request_has(
    open_rig: Any, own_tiny_model: Path, roots: list[Any]
) -> None:
    """It was read under the root of its time. So it was asleep, and in a fork."""
    async with open_rig(with_template(own_tiny_model, SHOWS_ROOT), endless=False) as rig:
        for at, root in enumerate(roots, 1):
            await converse(
                rig,
                [user(f"q{at}")],
                f"a{at}",
                after=f"{at - 1:032x}" if at > 1 else None,
                **root,
                answer_id=f"{at:032x}",
            )
        await rig.service.fork("a", "b")
        for name in "aab":
            told = (await rig.service.recall(name)).messages
            assert all(each.certain for each in told)
            said = [each.content for each in told if each.role != "system"]
            assert said == [f"{who}{at}" for at in range(1, len(roots) + 1) for who in "qa"]
            await rig.sleep(name)


async def test_a_fork_at_an_older_answer_has_the_root_of_that_place(open_rig: Any, own_tiny_model: Path) -> None:
    """Tools that were offered behind it are offered anew, and those of then stay where none are given."""
    async with open_rig(with_template(own_tiny_model, SHOWS_ROOT), endless=False) as rig:
        await converse(rig, [user("q1")], "a1", tools=TOOLS, answer_id=ONE)
        await converse(rig, [user("q2")], "a2", tools=OTHER, after=ONE, answer_id=TWO)
        held = [user("q1"), assistant("a1")]
        for more, offered in (
            ({"tools": OTHER}, [message_of("system", offer_of(OTHER, call_shape(rig.model.marks)))]),
            ({}, []),
            ({"tools": TOOLS}, []),
        ):
            measured = await rig.service.measure("a", [user("q3")], after=ONE, **more)
            told = await converse(rig, [user("q3")], "a3", after=ONE, **more)
            name = told.session.rpartition("/")[2]
            said = [*held, *offered, user("q3"), assistant("a3")]
            assert name != "a"
            assert ledger(rig, name) == cold(rig, said, Root(TOOLS))
            assert measured.tokens == told.token_count - len(told.tokens)


async def test_a_transcript_under_another_argument_leaves_what_was_said_certain(
    open_rig: Any, own_tiny_model: Path
) -> None:
    async with open_rig(with_template(own_tiny_model, SHOWS_ROOT), endless=False) as rig:
        said: list[Any] = []
        for at in range(3):
            said.append(user(f"q{at}"))
            arguments = {"thinks": "<no>"} if at % 2 else {}
            said.append(assistant((await converse(rig, said, f"a{at}", template_arguments=arguments)).text))
        assert await names(rig) == {"a"}
        told = (await rig.service.recall("a")).messages
        assert all(each.certain for each in told)
        assert [each.content for each in told] == [each["content"] for each in said]


async def test_another_model_than_the_answers_is_refused(store: Path, tiny_model: Path, digest_cache: Path) -> None:
    models = {"tiny": str(tiny_model), "other": str(tiny_model)}
    async with open_rigged(store, models, digest_cache, endless=False) as rig:
        await converse(rig, [user("one")], "eins", answer_id=ONE)
        with pytest.raises(InvalidTranscript, match="other"):
            await converse(rig, [user("two")], after=ONE, model="other")


async def test_what_was_said_is_told_from_the_tokens(rig: Rigged) -> None:
    opening = [SYSTEM, user("say <|im_end|> or\n\nso"), assistant("well"), user("now")]
    told = await converse(rig, opening, CALL, tools=TOOLS, answer_id=ONE, max_tokens=90)
    result = {"role": "tool", "content": "a file", "tool_call_id": told.tool_calls[0].id}
    stopped = await converse(rig, [result, user("and?")], "fine END", after=ONE, answer_id=TWO, stop=["END"])
    whole = await rig.service.recall("a")
    assert [(each.role, each.content) for each in whole.messages] == [
        *((each["role"], each["content"]) for each in opening),
        ("assistant", ""),
        ("tool", "a file"),
        ("user", "and?"),
        ("assistant", stopped.text),
    ]
    call, tool = whole.messages[4:6]
    assert call.tool_calls == (ToolCall("look", {"path": "."}, told.tool_calls[0].id),)
    assert (tool.tool_call_id, call.answer_id, whole.messages[-1].answer_id) == (call.tool_calls[0].id, ONE, TWO)
    assert whole.messages[-1].end == len(ledger(rig))
    first, second = [await rig.service.recall(answer_id=answer_id) for answer_id in (ONE, TWO)]
    assert (first.messages, first.after) == (whole.messages[:5], None)
    assert (second.messages, second.after) == (whole.messages[5:], ONE)


@pytest.mark.one_in(1)
async def test_a_call_and_its_result_are_told_as_the_tool_was_offered(rig: Rigged) -> None:
    """Also where it is offered otherwise later, and where the call was read; no token is another for it."""
    plain, custom, spaced = TOOLS, ({**TOOLS[0], "told_as": "custom:"},), ({**TOOLS[0], "told_as": "function:files"},)
    first = await converse(rig, [user("one")], CALL, tools=custom, answer_id=ONE, max_tokens=90)
    (call,) = first.tool_calls
    result = {"role": "tool", "content": "a file", "tool_call_id": call.id}
    second = await converse(rig, [result], CALL, tools=spaced, after=ONE, answer_id=TWO, max_tokens=90)
    result = {**result, "tool_call_id": second.tool_calls[0].id}
    third = await converse(rig, [result], CALL, tools=plain, after=TWO, max_tokens=90)
    told = [*first.tool_calls, *second.tool_calls, *third.tool_calls]
    assert [each.told_as for each in told] == ["custom:", "function:files", ""]
    assert {each.session for each in (first, second, third)} == {first.session}
    whole = await rig.service.recall("a")
    assert [each.role for each in whole.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [call for each in whole.messages for call in each.tool_calls] == told
    assert [each.told_as for each in whole.messages if each.role == "tool"] == ["custom:", "function:files"]
    counts = [(await rig.service.measure("b", [user("hi")], tools=tools)).tokens for tools in (plain, custom, spaced)]
    assert len(set(counts)) == 1
    call = {"name": "look", "arguments": {"path": "."}, "id": "theirs"}
    said = [user("one"), {**assistant(""), "tool_calls": [call]}]
    said.append({"role": "tool", "content": "a file", "tool_call_id": "theirs"})
    await converse(rig, said, "well", "read", tools=custom)
    _, asked, result, _ = (await rig.service.recall("read")).messages
    assert (asked.tool_calls[0].told_as, result.told_as) == ("custom:", "custom:")


async def test_an_answer_that_was_cut_off_is_told_so(rig: Rigged) -> None:
    told = await converse(rig, [user("one")], "a long answer", answer_id=ONE, max_tokens=3)
    (*_, answer) = (await rig.service.recall(answer_id=ONE)).messages
    assert (answer.content, answer.finished, answer.end - answer.start) == (told.text, False, 3)


QUOTING = Constraint(regex=r'see [^.]*[.]"[^.]*[.]')


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("reply", "asked", "finished"),
    [
        ("abcdef", {"constraint": Constraint(regex="[a-z]{6}")}, True),
        ('"said"', {"constraint": Constraint(json_schema='{"enum": ["said"]}')}, True),
        ("abcdef" * 20, {"constraint": Constraint(regex="[a-z]{99}"), "max_tokens": 9}, False),
        (f"see {CALL}.", {"tools": TOOLS, "constraint": QUOTING, "max_tokens": 200}, True),
        ("so END of it", {"stop": ("END",)}, True),
        ("so  it goes\n and on", {"stop": ("\n",)}, True),
        ("\n so it goes", {"stop": ("s",)}, True),
        ("so it goes, and so on", {"stop": ("END",), "max_tokens": 9}, False),
        (
            CALL.replace(">{", ">\n{").replace("}<", "}\n<"),
            {"tools": TOOLS, "tool_choice": ToolChoice("required"), "max_tokens": 200},
            True,
        ),
    ],
    ids=[
        "grammar",
        "schema",
        "cut off in a grammar",
        "a call quoted in a grammar",
        "stop string",
        "blank stop string",
        "blanks before a stop string",
        "cut off",
        "call",
    ],
)
async def test_an_answer_is_told_as_finished_wherever_it_ended(
    open_rig: Any, reply: str, asked: Any, finished: bool
) -> None:
    """No token tells it of a grammar's end. It outlives a sleep."""
    async with open_rig(endless=True) as rig:
        told = await converse(rig, [user("one")], reply, answer_id=ONE, **asked)
        assert (told.finish_reason != "length") == finished
        for _ in range(2):
            (*_, answer) = (await rig.service.recall(answer_id=ONE)).messages
            assert (answer.content, answer.tool_calls) == (told.text, told.tool_calls)
            assert (answer.finished, answer.certain) == (finished, True)
            await rig.sleep("a")


async def test_an_answer_that_is_cut_off_behind_a_whole_call_is_not_finished(rig: Rigged) -> None:
    limit = len(rig.model.encode(CALL, opening=False))
    asked: Any = {"tools": TOOLS, "max_tokens": limit, "answer_id": ONE}
    told = await converse(rig, [user("one")], CALL + CALL, **asked)
    (*_, answer) = (await rig.service.recall(answer_id=ONE)).messages
    assert (told.finish_reason, len(answer.tool_calls), answer.finished) == ("length", 1, False)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("choice", [None, ToolChoice("required")], ids=["its own", "forced"])
async def test_a_call_that_was_cut_off_anywhere_is_no_text_and_is_told_and_sent_again_alike(
    rig: Rigged, choice: ToolChoice | None
) -> None:
    """At every ninth place; at other commits at others."""
    call = CALL.replace(">{", ">\n{")
    for limit in range(1 + share() % 9, len(rig.model.encode(call.partition("}")[0], opening=False)), 9):
        said, answer_id = [user(f"{choice} {limit}?")], f"{limit:032x}"
        heard: list[Any] = []
        asked: Any = {"tools": TOOLS, "tool_choice": choice, "max_tokens": limit}
        told = await converse(rig, said, call, **asked, answer_id=answer_id, on_event=heard.append)
        assert (told.text, told.tool_calls, told.finish_reason) == ("", (), "length")
        assert not [event for event in heard if isinstance(event, TokenEvent) and (event.text or event.call)]
        (*_, answer) = (await rig.service.recall(answer_id=answer_id)).messages
        assert (answer.content, answer.finished, answer.end - answer.start) == ("", False, limit)
        again = await converse(rig, [*said, assistant(""), user("on")], "ja", tools=TOOLS)
        assert (again.session, again.text) == (told.session, "ja")
        assert again.prefilled_tokens == again.token_count - len(again.tokens) - told.token_count


async def test_a_disowned_answer_is_found_no_more_in_any_fork_and_after_a_restart(open_rig: Any) -> None:
    async with open_rig(endless=False) as rig:
        await converse(rig, [user("one")], "eins", answer_id=ONE)
        await converse(rig, [user("two")], "zwei", after=ONE, answer_id=TWO)
        await converse(rig, [user("three")], "drei", after=ONE, answer_id=THREE)
        await rig.sleep("a")
        assert len((await rig.service.disown(ONE)).sessions) == 2
        with pytest.raises(AnswerNotFound):
            await rig.service.recall(answer_id=ONE)
    async with open_rig(endless=False) as rig:
        with pytest.raises(AnswerNotFound):
            await rig.service.disown(ONE)
        for answer_id, text in ((TWO, "zwei"), (THREE, "drei")):
            assert (await rig.service.recall(answer_id=answer_id)).messages[-1].content == text


@pytest.mark.one_in(1)
@pytest.mark.parametrize("slept", [False, True])
async def test_a_disowned_answer_comes_back_with_no_older_version_and_no_fork_of_one(
    open_rig: Any, *, slept: bool
) -> None:
    """Also where the session has not slept since."""

    async def forked(whole: str, cut: str) -> None:
        await rig.service.fork(f"a@{first.version}", whole)
        await rig.service.fork(f"a@{first.version}", cut, at_token=first.token_count - 1)
        with pytest.raises(AnswerNotFound):
            await rig.service.recall(answer_id=ONE)

    async with open_rig(endless=False) as rig:
        await converse(rig, [user("one")], "eins", answer_id=ONE)
        first = await rig.sleep("a")
        await converse(rig, [user("two")], "zwei", after=ONE, answer_id=TWO)
        if slept:
            await rig.sleep("a")
        await rig.service.disown(ONE)
        await (rig.sleep("a") if slept else forked("b", "c"))
    async with open_rig(endless=False) as rig:
        await forked("whole", "cut")
        await rig.wake("a", first.version)
        await converse(rig, [user("one"), assistant("eins"), user("deux")], "zwo")
        await rig.sleep("a")
        await rig.service._parts.sessions.heads.learned()
        for again in range(2):
            with pytest.raises(AnswerNotFound):
                await rig.service.recall(answer_id=ONE)
            await rig.wake("a", first.version)
            await rig.service.append("a", messages=[user(f"on {again}")])
            await rig.sleep("a")


async def test_messages_keep_their_numbers(rig: Rigged) -> None:
    """Also where they are told from an answer on, and behind one that has lost its id."""
    for text, answer in (("one", ONE), ("two", TWO), ("three", THREE)):
        await converse(rig, [user(text)], text.upper(), **({"at_end": True} if answer != ONE else {}), answer_id=answer)
    whole = [each.number for each in (await rig.service.recall("a")).messages]
    assert whole == list(range(6))
    for _ in range(2):
        assert [(each.number, each.content) for each in (await rig.service.recall(answer_id=THREE)).messages][-2:] == [
            (4, "three"),
            (5, "THREE"),
        ]
        if _ == 0:
            await rig.service.disown(TWO)
    assert [each.number for each in (await rig.service.recall("a")).messages] == whole


async def test_to_disown_an_answer_writes_one_version_whatever_the_daemon_keeps(open_rig: Any) -> None:
    for name in ("sleep", "turn"):
        async with open_rig(endless=False, durability=name) as rig:
            await converse(rig, [user("one")], "eins", name, answer_id=ONE)
            slept = await rig.sleep(name)
            await rig.service.disown(ONE)
            newest = rig.service._parts.store.disk.find_session(rig.service._parts.sessions.resolve(name))
            assert newest is not None
            assert newest.version == slept.version + 1


async def test_a_fork_that_is_made_beside_does_not_keep_a_disowned_answer(rig: Rigged) -> None:
    await converse(rig, [user("one")], "eins", answer_id=ONE)
    _, disowned = await asyncio.gather(rig.service.fork("a", "b"), rig.service.disown(ONE))
    assert disowned.sessions == ("torpor://default/a", "torpor://default/b")
    with pytest.raises(AnswerNotFound):
        await rig.service.recall(answer_id=ONE)


@pytest.mark.parametrize("kept", ["nothing", "answered", "disowned", "appended"])
async def test_what_was_acknowledged_as_durable_outlives_a_kill_whatever_the_daemon_keeps(
    open_rig: Any, kept: str
) -> None:
    async with open_rig(endless=False, durability="sleep", close=False) as rig:
        await converse(rig, [user("one")], "eins", answer_id=ONE, durable=kept != "nothing")
        if kept == "disowned":
            await rig.service.disown(ONE)
        elif kept == "appended":
            await rig.service.append("a", messages=[user("two")], durable=True)
        stored, uri = rig.service._parts.store.disk, rig.service._parts.sessions.resolve("a")
        assert [row.uri for row in stored.index.all_rows()][-1:] == [uri] * (kept != "nothing")
        if kept != "nothing":
            with stored.open_session(uri) as reader:
                text_map = TextMap.from_map(reader.manifest.session[TEXT_MAP])
            owned = [turn.answer for turn in text_map.turns if turn.answer]
            assert owned == [bytes.fromhex(ONE)] * (kept != "disowned")
            assert len(text_map.turns) == 2 + (kept == "appended")
        await rig.service.close()


@pytest.mark.one_in(1)
@pytest.mark.parametrize("first", [True, False])
async def test_a_dialogue_that_is_asked_again_with_thinking_switched_is_measured_as_it_is_read(
    open_rig: Any, tmp_path: Path, model_writer: Callable[..., Path], *, first: bool
) -> None:
    said = [user("one"), assistant("eins"), user("two")]
    async with open_rig(write_family(tmp_path / "model", QWEN3, model_writer), endless=False) as rig:
        for thinks in (first, not first, first):
            asked = {"template_arguments": {"enable_thinking": thinks}}
            measured = await rig.service.measure("a", said, **asked)
            told = await converse(rig, said, "ja", **asked)
            assert measured.tokens == told.token_count - len(told.tokens)
        again = await rig.service.measure("a", said, **asked)
        told = await converse(rig, said, "so", **asked)
        assert again.cached_tokens == again.tokens - told.prefilled_tokens - told.recomputed_tokens
        assert (again.cached_tokens, told.recomputed_tokens) == (again.tokens - 1, 1)


@pytest.mark.parametrize("begun", ["empty", "awake", "slept"])
async def test_a_system_text_that_is_not_said_yet_is_told_and_measured(rig: Rigged, begun: str) -> None:
    await rig.service.create("a", system="You are in a test.", model=MODEL)
    if begun != "empty":
        await rig.service.append("a", text="A text.")
    if begun == "slept":
        await rig.sleep("a")
    (opening,) = (await rig.service.recall("a")).messages
    assert (opening.role, opening.content) == ("system", "You are in a test.")
    measured = await rig.service.measure("a", [user("one")], at_end=True)
    told = await converse(rig, [user("one")], "eins", at_end=True)
    assert measured.tokens == told.token_count - len(told.tokens)
    if begun == "empty":
        whole = (await rig.service.recall("a")).messages
        assert [(each.role, each.number) for each in whole] == [("system", 0), ("user", 1), ("assistant", 2)]


async def test_an_answer_is_told_from_where_it_was_given_and_not_behind_a_fold(rig: Rigged) -> None:
    await converse(rig, [user("one " * 60)], "eins", answer_id=ONE)
    await converse(rig, [user("two")], "zwei", after=ONE, answer_id=TWO)
    before = await rig.service.recall(answer_id=TWO)
    await rig.service.fold("a", name="Aaa", summary="One.", tail=before.messages[-1].end - before.messages[0].start)
    assert TWO in {each.answer_id for each in (await rig.service.recall("Aaa")).messages}
    assert await rig.service.recall(answer_id=TWO) == before


async def test_at_a_look_answers_are_those_of_the_newest_version_and_none_is_disowned(rig: Rigged) -> None:
    await converse(rig, [user("one")], "eins", answer_id=ONE)
    first = await rig.sleep("a")
    await converse(rig, [user("two")], "zwei", after=ONE, answer_id=TWO)
    whole = await rig.sleep("a")
    await rig.wake("a", first.version)
    assert (await rig.service.recall(answer_id=TWO)).messages[-1].content == "zwei"
    for answer_id in (ONE, TWO):
        with pytest.raises(SessionAwake, match="a look changes nothing"):
            await rig.service.disown(answer_id)
    told = await converse(rig, [user("on")], "ja", after=TWO)
    assert told.session != "torpor://default/a"
    assert told.token_count > whole.token_count
    await rig.sleep("a")  # ends the look
    assert (await rig.service.show("a")).info.token_count == whole.token_count
    await rig.service.disown(TWO)
    assert (await rig.service.show("a")).info.token_count == whole.token_count
    with pytest.raises(AnswerNotFound):
        await rig.service.recall(answer_id=TWO)


async def test_an_id_that_was_given_twice_names_the_last_answer(rig: Rigged) -> None:
    await converse(rig, [user("one")], "eins", answer_id=ONE)
    await converse(rig, [user("two")], "zwei", after=ONE, answer_id=ONE)
    told = await converse(rig, [user("three")], "drei", after=ONE, answer_id=TWO)
    assert told.session == "torpor://default/a"
    assert (await rig.service.recall(answer_id=ONE)).messages[-1].content == "zwei"
    await rig.service.delete("a")


async def test_a_turn_is_in_the_journal_before_it_is_found_by_its_words(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what goes wrong in the finding costs no turn."""
    stored, heads, seen = rig.service._parts.store.disk, rig.service._parts.sessions.heads, []
    monkeypatch.setattr(heads, "note", lambda live: seen.append(stored.has_turns(live.uri)))
    await converse(rig, [user("one")], "eins", answer_id=ONE)
    assert seen == [True]


async def copied(rig: Rigged, name: str, session: dict[str, Any]) -> None:
    """A version of another session with the blocks of `a`, which sleeps, and this session map."""
    stored = rig.service._parts.store.disk
    with stored.open_session(rig.service._parts.sessions.resolve("a")) as reader:
        stored.write_bundle(
            VersionDraft(
                uri=SessionUri("default", name),
                identity=reader.manifest.identity,
                parent=reader.bundle_id,
                reused=reader.entries,
                blocks=(),
                session=session,
                block_tokens=reader.manifest.block_tokens,
            )
        )


async def test_a_bundle_of_another_program_hides_no_answer_after_a_restart(open_rig: Any) -> None:
    async with open_rig(endless=False) as rig:
        await converse(rig, [user("one")], "eins", answer_id=ONE)
        await rig.sleep("a")
        await copied(rig, "0", {})
    async with open_rig(endless=False) as rig:
        assert (await rig.service.recall(answer_id=ONE)).messages[-1].content == "eins"
        with pytest.raises(MalformedSnapshot, match="names no model"):
            await rig.service.recall("0")


@pytest.mark.parametrize("strange", [{"system": 7}, {"chat_root": "no JSON"}, {"interrupted": 7}, {TEXT_MAP: 7}])
async def test_a_session_map_that_no_session_makes_is_refused_by_name(rig: Rigged, strange: dict[str, Any]) -> None:
    await converse(rig, [user("one")], "eins", answer_id=ONE)
    await rig.sleep("a")
    with rig.service._parts.store.disk.open_session(SessionUri("default", "a")) as reader:
        kept = dict(reader.manifest.session)
    await copied(rig, "0", kept | strange)
    with pytest.raises(MalformedSnapshot, match=r"torpor://default/0"):
        await rig.service.recall("0")


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "c"}


def as_said(messages: Any) -> list[tuple[Any, ...]]:
    """What they say, without the ids of calls."""
    calls = [[(each.name, each.arguments) for each in message.tool_calls] for message in messages]
    return [(each.role, each.content, each.reasoning, of_it) for each, of_it in zip(messages, calls, strict=True)]


READ: dict[str, list[Any]] = {
    "what the template writes between them": [user("a<|im_end|>\n<|im_start|>user\nb"), user("c")],
    "a call with its result": [user("q"), called("f", x=1), result("r"), user("and?")],
    "two calls and a text": [
        user("q"),
        {
            **message_of(
                "assistant", "Look:", [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"y": [None]}}]
            )
        },
        result("r"),
        result("s"),
        user("and?"),
    ],
    "a call that nothing answers": [user("q"), called("f", x=1), user("never mind")],
    "many rounds": [
        *(each for at in range(40) for each in (user(f"question {at}"), assistant(f"answer {at}"))),
        *(user("q"), called("f"), result("r")),
    ],
    "texts that spell calls": [user('<tool_call>{"name": "f"}</tool_call>'), assistant("</tool_call>"), user("on")],
    "a system text in the midst": [SYSTEM, user("q"), message_of("system", "Be loud."), user("r")],
    "blanks": [user("  q\n\n"), assistant("a"), user("\n")],
    "nothing": [user(""), assistant("a"), user("")],
}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("messages", READ.values(), ids=list(READ))
async def test_what_was_read_is_told_as_it_was_said_and_proven(rig: Rigged, messages: list[Any]) -> None:
    """In time that grows as the text does: with a pattern that goes back, many rounds took days."""
    await converse(rig, messages, "hm")
    *told, answer = (await rig.service.recall("a")).messages
    assert as_said(told) == [
        (each["role"], each["content"], "", [(one["name"], one["arguments"]) for one in each.get("tool_calls", ())])
        for each in messages
    ]
    assert all(each.certain for each in (*told, answer))
    ids = [one.id for each in told for one in each.tool_calls]
    answered = [each.tool_call_id for each in told if each.role == "tool"]
    assert answered == ids[: len(answered)]
    assert len(set(ids)) == len(ids)


TRIMS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


SPACED = (" ", "\n", "\t\n ", "    return x", "x\n\n\n", "\r\n x \u00a0\t", "x")


@pytest.mark.parametrize("slept", [False, True])
async def test_blanks_that_a_template_takes_away_are_told(open_rig: Any, own_tiny_model: Path, *, slept: bool) -> None:
    """Also of calls, of results and of answers that were read, and where messages were read together."""
    calls = {**assistant(" \n"), "tool_calls": [{"name": "look", "arguments": {}, "id": "c"}]}
    said = [each for text in SPACED for each in (user(text), assistant(text), user(text), user(text))]
    said += [calls, {"role": "tool", "content": "\t20 ", "tool_call_id": "c"}, message_of("system", " so "), user(" ")]
    async with open_rig(with_template(own_tiny_model, TRIMS), endless=False) as rig:
        await converse(rig, said, "zwei")
        assert "return x<|im_end|>" in rig.model.tokenizer.decode(ledger(rig))
        if slept:
            await rig.sleep("a")
        told = (await rig.service.recall("a")).messages
        assert [each.content for each in told] == [*(each["content"] for each in said), "zwei"]
        assert all(each.certain for each in told)


async def test_words_whose_blanks_no_text_map_has_are_told_where_their_end_is_a_usual_one(
    open_rig: Any, own_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torpor.daemon.sessions.turn_parts.MAX_BLANKS", 0)
    async with open_rig(with_template(own_tiny_model, TRIMS), endless=False) as rig:
        await converse(rig, [user("one\n"), assistant("eins"), user("two")], "zwei")
        assert [each.content for each in (await rig.service.recall("a")).messages] == ["one\n", "eins", "two", "zwei"]
        await converse(rig, [user("\t one"), user("two")], "zwei", "b")
        whole, answer = (await rig.service.recall("b")).messages
        assert (whole.certain, answer.certain, answer.content) == (False, True, "zwei")
        assert "one<|im_end|>" in whole.content


OPENS_THE_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "said",
    [
        [user("q"), assistant("a"), user("r")],
        [SYSTEM, user("q"), assistant("a"), user("r"), assistant("b"), user("s")],
        [user("q"), {**assistant(""), "tool_calls": [{"name": "look", "arguments": {}}]}, user("r")],
    ],
    ids=["one", "two", "call"],
)
async def test_an_answer_that_a_template_shows_otherwise_in_its_last_turn_is_told(
    open_rig: Any, own_tiny_model: Path, said: list[Any]
) -> None:
    """As Qwen 3's does."""
    async with open_rig(with_template(own_tiny_model, OPENS_THE_LAST), endless=False) as rig:
        await converse(rig, said, "z")
        *told, answer = (await rig.service.recall("a")).messages
        assert all(each.certain for each in (*told, answer))
        assert [(each.role, each.content) for each in told] == [(each["role"], each["content"]) for each in said]


async def test_words_that_other_tokens_tell_now_are_told_as_uncertain(rig: Rigged) -> None:
    """A tokenizer that has changed since makes other words of the same tokens."""
    await converse(rig, [user("one"), assistant("eins"), user("two")], "zwei", answer_id=ONE)
    tokenizer = rig.model.tokenizer
    turned = Mock(wraps=tokenizer, decode=lambda *given, **how: tokenizer.decode(*given, **how).swapcase())
    place = rig.service._parts.models.shelf.places[MODEL]
    place.model = replace(place.model, tokenizer=turned)
    told = (await rig.service.recall("a")).messages
    assert [each.certain for each in told] == [False] * len(told)
    assert not (await rig.service.recall(answer_id=ONE)).messages[-1].certain


async def test_the_pieces_of_an_answer_are_told_in_their_order(open_rig: Any) -> None:
    async with thinking(open_rig) as rig:
        heard: list[Any] = []
        reply = f"<think>hm</think>one {CALL} two {CALL} three END"
        asked: Any = {"tools": TOOLS, "answer_id": ONE, "max_tokens": 200, "on_event": heard.append}
        told = await converse(rig, [user("hi")], reply, stop=("END",), **asked)
        (*_, answer) = (await rig.service.recall(answer_id=ONE)).messages
        assert (answer.content, answer.certain) == (told.text, True)
        events = [each for each in heard if isinstance(each, TokenEvent) and (each.text or each.call)]
        joined = [
            (channel, "".join(each.text for each in group))
            for channel, group in groupby(events, key=lambda each: each.channel)
        ]
        assert [(each.channel, each.text) for each in answer.pieces] == joined
        assert [each.call for each in answer.pieces if each.call] == list(told.tool_calls)
        assert [channel for channel, _ in joined] == ["reasoning", "text", "call", "text", "call", "text"]
