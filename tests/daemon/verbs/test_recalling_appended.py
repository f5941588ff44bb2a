"""Messages that are appended, and results of calls, are told as they were said, in one request or in several."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.dialogue import Role
from torpor.daemon.errors import InvalidTokens, InvalidTranscript
from torpor.daemon.sessions.said import digested
from torpor.daemon.sessions.transcripts import TextMap, message_of
from torpor.daemon.tasks.pieces import in_pieces
from torpor.tests.daemon.conversing_rig import (
    END,
    SYSTEM,
    THINKS,
    TOOLS,
    assistant,
    called,
    cold,
    converse,
    ledger,
    result_of,
    two_calls,
    user,
    with_template,
)
from torpor.tests.daemon.models.template_families import (
    CHATML,
    DEEPSEEK,
    GEMMA3,
    GLM,
    GRANITE,
    MISTRAL,
    QWEN3,
    Family,
    write_family,
)
from torpor.tests.daemon.session_rig import Rigged
from torpor.tests.dialogues.forms import ALL_FAMILIES

ONE, TWO = (f"{number:032x}" for number in (1, 2))
CALL = '<tool_call>{"name": "look", "arguments": {"path": "."}}</tool_call>'


async def test_an_answer_that_a_client_brings_stands_in_the_turn_that_was_opened_for_it(rig: Rigged) -> None:
    """Whether the messages come one by one or together: the next answer is the same."""
    said = [SYSTEM, user("one"), assistant("eins"), user("two"), called("f", x=1), user("and?"), assistant("so")]
    await rig.service.append("a", messages=said[:2], create=True)
    for message in said[2:]:
        await rig.service.append("a", messages=[message])
    told = await converse(rig, [user("on")], "ja", at_end=True)
    assert ledger(rig) == cold(rig, [*said, user("on"), assistant("ja")])
    messages = (await rig.service.recall("a")).messages
    assert [each.role for each in messages] == [each["role"] for each in (*said, user("on"), assistant("ja"))]
    assert all(each.certain for each in messages)
    again = await converse(rig, [*said, user("on"), assistant("ja"), user("more")], "nein")
    assert (again.session, again.cached_tokens) == (told.session, 0)
    assert again.prefilled_tokens == again.token_count - len(again.tokens) - told.token_count


@pytest.mark.parametrize("slept", [False, True])
async def test_an_answer_that_a_template_opens_otherwise_takes_the_place_of_the_opened_turn(
    open_rig: Any, own_tiny_model: Path, *, slept: bool
) -> None:
    """Else it would be a second turn behind an empty one, and the next answer another than where all came at once."""
    said = [user("one"), assistant("eins"), user("two"), called("f", x=1), user("and?"), assistant("so"), user("on")]
    async with open_rig(with_template(own_tiny_model, THINKS), endless=False) as rig:
        for message in said[:-2]:
            await rig.service.append("a", messages=[message], create=True)
            assert all(each.certain for each in (await rig.service.recall("a")).messages)
            if slept:
                await rig.sleep("a")
        measured = await rig.service.measure("a", said[-2:], at_end=True)
        told = await converse(rig, said[-2:], "ja", at_end=True)
        assert measured.tokens == told.token_count - len(told.tokens)
        opened = rig.model.encode(rig.model.render(said, True), opening=False)
        assert ledger(rig) == [*opened, *rig.model.encode("ja", opening=False), END]
        messages = (await rig.service.recall("a")).messages
        assert [each.role for each in messages] == [each["role"] for each in (*said, assistant("ja"))]
        again = await converse(rig, [*said, assistant("ja"), user("more")], "nein")
        assert (again.session, again.cached_tokens) == (told.session, 0)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("family", [DEEPSEEK, GLM, GRANITE, GEMMA3, MISTRAL], ids=lambda family: family.name)
async def test_messages_that_are_appended_one_by_one_are_those_that_come_at_once(
    open_rig: Any, tmp_path: Path, model_writer: Callable[..., Path], family: Family
) -> None:
    """DeepSeek's template opens a turn behind the user alone, and with thinking, which it does not show later."""
    look = {"name": "look", "arguments": {"at": 1}, "id": "call00001"}
    calls = {**assistant(""), "tool_calls": [look]}
    seen = {"role": "tool", "content": "20", "tool_call_id": "call00001"}
    said = [user("one"), assistant("eins"), user("two"), calls, seen, assistant("so"), user("on")]
    async with open_rig(write_family(tmp_path / "model", family, model_writer), endless=False) as rig:
        for message in said:
            await rig.service.append("a", messages=[message], create=True)
        assert ledger(rig) == rig.model.encode(rig.model.render(said, True), opening=False)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("slept", [False, True])
@pytest.mark.parametrize("family", [CHATML, QWEN3, MISTRAL, GEMMA3], ids=lambda family: family.name)
async def test_results_behind_calls_that_were_read_before_are_told_at_the_calls_that_they_answer(
    open_rig: Any, tmp_path: Path, model_writer: Callable[..., Path], family: Family, *, slept: bool
) -> None:
    """Clients that run calls side by side send the results as they come. So the dialogue in which the same results
    answer the calls the other way round is another one."""
    calls = two_calls("call0000a", "call0000b")
    async with open_rig(write_family(tmp_path / "model", family, model_writer), endless=False) as rig:
        said = [user("q"), calls]
        await rig.service.append("a", messages=said, create=True)
        if slept:
            await rig.sleep("a")
        results = [result_of("call0000b", "of b"), result_of("call0000a", "of a")]
        told = await converse(rig, results, "ja", at_end=True)
        messages = (await rig.service.recall("a")).messages
        by_id = {call.id: call.arguments["at"] for each in messages for call in each.tool_calls}
        answered = [(by_id[each.tool_call_id], each.content) for each in messages if each.role == "tool"]
        assert answered == [("call0000b", "of b"), ("call0000a", "of a")]
        assert len(by_id) == 2
        swapped = [result_of("call0000a", "of b"), result_of("call0000b", "of a")]
        for asked, goes_on in ((swapped, False), (results, True)):
            again = await converse(rig, [*said, *asked, assistant(told.text), user("more")])
            assert (again.session == told.session) is goes_on


async def test_results_stand_behind_their_calls_where_no_tool_is_offered(
    open_rig: Any, tmp_path: Path, model_writer: Callable[..., Path]
) -> None:
    """Mistral's template takes no answer behind a result that answers no call, and shows calls without tools, too."""
    said = [user("q"), two_calls("call0000a"), result_of("call0000a", "of a"), assistant("w"), user("on")]
    async with open_rig(write_family(tmp_path / "model", MISTRAL, model_writer), endless=False) as rig:
        await rig.service.append("a", messages=said[:2], create=True)
        await rig.service.append("a", messages=said[2:])
        assert ledger(rig) == rig.model.encode(rig.model.render(said, True), opening=False)


UNREADABLE = {"deepseek", "granite"}
"""Families whose calls mlx-lm has no parser for."""


PLAIN = [user("q"), assistant("w"), user("on"), assistant("w2")]


CALLED = [user("q"), two_calls("call0000a", "call0000b"), result_of("call0000b", "r"), result_of("call0000a", "s")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("family", ALL_FAMILIES, ids=lambda family: family.name)
async def test_messages_of_every_template_are_told_wherever_they_end_or_are_refused_before_they_are_read(
    open_rig: Any, tmp_path: Path, model_writer: Callable[..., Path], family: Family, *, one_by_one: bool
) -> None:
    async with open_rig(write_family(tmp_path / "model", family, model_writer), endless=False) as rig:
        for number, said in enumerate([*(PLAIN[:end] for end in (2, 3, 4)), *(CALLED[:end] for end in (2, 4))]):
            name, count = f"s{number}", 0
            parts = [[each] for each in said] if one_by_one and said[-1]["role"] != "tool" else [said]
            for part in parts:
                if family.name in UNREADABLE and any("tool_calls" in each for each in part):
                    with pytest.raises(InvalidTranscript, match="could not be told again"):
                        await rig.service.append(name, messages=part, create=True, certain=True)
                    break
                await rig.service.append(name, messages=part, create=True, certain=True)
                count += len(part)
            told = (await rig.service.recall(name)).messages if count else ()
            assert [each.role for each in told] == [each["role"] for each in said[:count]]
            assert [each.content for each in told] == [each["content"] for each in said[:count]]
            assert [len(each.tool_calls) for each in told] == [len(each.get("tool_calls", ())) for each in said[:count]]
            assert all(each.certain for each in told)


async def test_results_may_have_the_ids_under_which_calls_are_told(rig: Rigged) -> None:
    """Of a client's ids there are only digests: what is told instead names the same calls."""
    await rig.service.append("a", messages=[user("q"), two_calls("one", "two")], create=True)
    one, two = (await rig.service.recall("a")).messages[-1].tool_calls
    assert {one.id, two.id}.isdisjoint({"one", "two"})
    await converse(rig, [result_of(two.id, "of two"), result_of("one", "of one")], "ja", at_end=True)
    results = [each for each in (await rig.service.recall("a")).messages if each.role == "tool"]
    assert [each.tool_call_id for each in results] == [two.id, one.id]


@pytest.mark.one_in(1)
@pytest.mark.parametrize("between", [None, "system", "user"])
@pytest.mark.parametrize("requests", [("a", "c", "b"), ("c", "ab"), ("b", "a"), ("ac", "b"), ("bca",)])
async def test_results_may_come_in_several_requests(
    rig: Rigged, requests: tuple[str, ...], between: Role | None
) -> None:
    """No answer stands between them: it is the dialogue in which they come at once, also with words between."""
    words = [] if between is None else [message_of(between, "note")]
    parts = [[*(result_of(each, f"of {each}") for each in ids), *words] for ids in requests]
    await rig.service.append("a", messages=[user("q"), two_calls("a", "b", "c")], create=True)
    for part in parts:
        await rig.service.append("a", messages=part)
    told = (await rig.service.recall("a")).messages
    by_id = {call.id: f"of {call.arguments['at']}" for each in told for call in each.tool_calls}
    results = [each for each in told if each.role == "tool"]
    assert [by_id[each.tool_call_id] for each in results] == [f"of {each}" for ids in requests for each in ids]
    assert [each.content for each in results] == [by_id[each.tool_call_id] for each in results]
    said = [user("q"), two_calls("a", "b", "c"), *chain(*parts)]
    at_once = TextMap().extended(await in_pieces(digested(said)), start=0, end=9)
    assert [turn.beyond for turn in rig.live("a").chat.text_map.turns] == [turn.beyond for turn in at_once.turns]
    if between is None:  # a template without tools shows a result behind words as another role
        assert ledger(rig) == rig.model.encode(rig.model.render(said, True), opening=False)


@pytest.mark.parametrize("slept", [False, True])
async def test_a_result_behind_a_later_answer_is_told_at_its_call(rig: Rigged, *, slept: bool) -> None:
    said = [user("q"), two_calls("a", "b"), user("wait"), assistant("so"), user("on"), two_calls("c", "d")]
    await rig.service.append("a", messages=said, create=True)
    if slept:
        await rig.sleep("a")
    await rig.service.append("a", messages=[result_of("c", "of c"), result_of("b", "of b"), user("well")])
    await rig.service.append("a", messages=[assistant("hm"), result_of("d", "of d")])
    told = (await rig.service.recall("a")).messages
    by_id = {call.id: f"of {call.arguments['at']}" for each in told for call in each.tool_calls}
    results = [each for each in told if each.role == "tool"]
    assert [by_id[each.tool_call_id] for each in results] == [each.content for each in results]
    assert [each.content for each in results] == ["of c", "of b", "of d"]


async def test_results_beside_calls_without_ids_are_told_at_their_own(rig: Rigged) -> None:
    nameless = {**assistant(""), "tool_calls": [{"name": "look", "arguments": {"at": "aa"}}]}
    said = [user("q"), nameless, two_calls("b", "c"), result_of("c", "of c"), result_of("b", "of b"), user("on")]
    await converse(rig, said, "ja")
    told = (await rig.service.recall("a")).messages
    by_id = {call.id: f"of {call.arguments['at']}" for each in told for call in each.tool_calls}
    results = [each for each in told if each.role == "tool"]
    assert [by_id[each.tool_call_id] for each in results] == ["of c", "of b"] == [each.content for each in results]


async def test_what_is_no_message_ends_what_can_be_told_and_nothing_is_taken_behind_it(rig: Rigged) -> None:
    await rig.service.append("a", messages=[user("one"), assistant("two")], create=True)
    await rig.service.append("a", text="A text.")
    held = ledger(rig)
    with pytest.raises(InvalidTranscript, match="no messages"):
        await rig.service.append("a", messages=[user("three")], certain=True)
    with pytest.raises(InvalidTranscript, match="no messages"):
        await converse(rig, [user("three")], "drei", at_end=True, answer_id=ONE)
    assert ledger(rig) == held
    await converse(rig, [user("three")], "drei", at_end=True)
    assert [each.content for each in (await rig.service.recall("a")).messages] == ["one", "two"]


async def test_results_of_the_models_own_calls_may_come_in_any_order(rig: Rigged) -> None:
    told = await converse(
        rig, [user("q")], CALL + CALL.replace('"."', '"x"'), tools=TOOLS, answer_id=ONE, max_tokens=180
    )
    first, second = (call.id for call in told.tool_calls)
    await converse(rig, [result_of(second, "2"), result_of(first, "1")], "ja", after=ONE, answer_id=TWO)
    results = (await rig.service.recall(answer_id=TWO)).messages[:2]
    assert [(each.content, each.tool_call_id) for each in results] == [("2", second), ("1", first)]


WITHOUT_ANSWERS = [
    [user("one"), user("two")],
    [user("one"), user("two"), assistant("eins"), user("three")],
    [user("one"), assistant("eins"), user("two"), user("three")],
    [user("q"), two_calls("call0000a", "call0000b"), result_of("call0000a", "ra"), result_of("call0000b", "rb")],
    [user("q"), two_calls("call0000a"), result_of("call0000a", "ra"), user("so?")],
    [user("one"), message_of("system", "be"), user("two")],
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("family", ALL_FAMILIES, ids=lambda family: family.name)
async def test_no_answer_stands_between_messages_that_come_one_by_one(
    open_rig: Any, tmp_path: Path, model_writer: Callable[..., Path], family: Family
) -> None:
    """The dialogue is the one in which they come at once, also where a template joins neighbours of one role."""
    async with open_rig(write_family(tmp_path / "model", family, model_writer), endless=False) as rig:
        for number, said in enumerate(WITHOUT_ANSWERS):
            name = f"s{number}"
            for message in said:
                await rig.service.append(name, messages=[message], create=True)
            if family.name not in ("qwen3", "gpt-oss") or number in (0, 5):  # those differ by "thinking", "another end"
                assert ledger(rig, name) == rig.model.encode(rig.model.render(said, True), opening=False)
            told = (await rig.service.recall(name)).messages
            if family.name not in UNREADABLE or not any("tool_calls" in each for each in said):
                assert all(each.certain for each in told)
                assert [(each.role, each.content) for each in told] == [
                    (each["role"], each["content"]) for each in said
                ]
            measured = await rig.service.measure(name, [user("on")], at_end=True)
            answered = await converse(rig, [user("on")], "ja", name, at_end=True, max_tokens=2)
            assert measured.tokens == answered.token_count - len(answered.tokens)


async def test_messages_of_which_the_template_shows_nothing_are_refused_with_what_to_do(
    open_rig: Any, tmp_path: Path, model_writer: Callable[..., Path]
) -> None:
    said, empty, behind = [user("one"), assistant("two")], assistant(""), user("three")
    async with open_rig(write_family(tmp_path / "model", MISTRAL, model_writer), endless=False) as rig:
        await rig.service.append("a", messages=said, create=True)
        with pytest.raises(InvalidTokens, match="send them with the message that follows"):
            await rig.service.append("a", messages=[empty])
        assert (await rig.service.append("a", messages=[empty, behind])).tokens_added > 0
