"""A client sends its whole transcript and names no session: it goes on where the most of it was read."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.constraints import ToolChoice
from torpor.daemon.api.events import SessionEvent, TokenEvent
from torpor.daemon.errors import ContextOverflow, InvalidTranscript
from torpor.daemon.models.chat_template import Root
from torpor.daemon.sessions import said as said_module
from torpor.daemon.sessions.transcripts import message_of
from torpor.memvid.exchange.incoming import hand_over
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.conversing_rig import (
    SYSTEM,
    TOOLS,
    assistant,
    cold,
    converse,
    ledger,
    names,
    reply_with,
    thinking,
    user,
    with_template,
)
from torpor.tests.daemon.models.template_families import CHATML, STRICT, Family
from torpor.tests.daemon.session_rig import Gate, Rigged, as_killed, cancelled, until


async def test_ten_turns_go_on_in_one_session_and_nothing_is_read_twice(rig: Rigged) -> None:
    said: list[Any] = [SYSTEM]
    for number in range(10):
        said.append(user(f"q{number}"))
        held = len(ledger(rig)) if number else 0
        told = await converse(rig, said, f"a{number}")
        said.append(assistant(told.text))
        assert told.session == "torpor://default/a"
        assert told.prefilled_tokens == told.token_count - len(told.tokens) - held
    assert ledger(rig) == cold(rig, said)
    assert await names(rig) == {"a"}


async def test_the_digests_of_a_transcript_are_made_once_for_each_request(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = [each for at in range(30) for each in (user(f"q{at}"), assistant(f"a{at}"))]
    hashed: list[str] = []
    real = said_module.hashed
    monkeypatch.setattr(said_module, "hashed", lambda text: hashed.append(text) or real(text))
    for more in (user("on"), assistant("ja"), user("more")):
        said.append(more)
        if more["role"] == "user":
            await rig.service.measure("a", said)
            assert len(hashed) <= len(said) + 2
            hashed.clear()
            await converse(rig, said, "ja")
            assert len(hashed) <= len(said) + 2
            hashed.clear()


@pytest.mark.one_in(1)
async def test_max_tokens_may_be_above_what_fits(rig: Rigged) -> None:
    told = await converse(rig, [user("q" * 1900)], max_tokens=1_000_000)
    assert told.finish_reason == "length"
    assert told.token_count == rig.model.context_tokens
    with pytest.raises(ContextOverflow):
        await converse(rig, [user("q" * 1900), assistant(told.text), user("on")], max_tokens=1)


async def test_a_changed_message_goes_on_in_a_fork_and_the_session_stays_as_it_is(rig: Rigged) -> None:
    said = [user("one"), assistant("eins"), user("two")]
    await converse(rig, said[:1], "eins")
    await converse(rig, said, "zwei")
    held = ledger(rig)
    other = [*said[:2], user("three")]
    told = await converse(rig, other, "drei")
    fork = told.session.rpartition("/")[2]
    assert fork.startswith("a-")
    assert ledger(rig) == held
    assert ledger(rig, fork) == cold(rig, [*other, assistant("drei")])
    # Each goes on in its own session from now on.
    for name, before in (("a", [*said, assistant("zwei")]), (fork, [*other, assistant("drei")])):
        told = await converse(rig, [*before, user("on")], "ja")
        assert told.session == f"torpor://default/{name}"
    assert await names(rig) == {"a", fork}


async def test_an_earlier_place_is_forked_after_a_kill_too(open_rig: Any, store: Path) -> None:
    """Then the session stands in a ledger alone, until something uses it."""
    async with open_rig(endless=False) as rig:
        await converse(rig, [user("one")], "eins")
        await converse(rig, [user("one"), assistant("eins"), user("two")], "zwei")
        killed = as_killed(store)
    async with open_rig(store=killed, endless=False) as rig:
        other = [user("one"), assistant("eins"), user("three")]
        told = await converse(rig, other, "drei")
        assert told.prefilled_tokens < told.token_count
        assert ledger(rig, told.session.rpartition("/")[2]) == cold(rig, [*other, assistant("drei")])
        assert (await converse(rig, [user("one")], "eins")).session not in ("torpor://default/a", told.session)


@pytest.mark.parametrize("sleeps", [False, True])
async def test_a_fork_tells_why_the_transcript_left_its_session(rig: Rigged, sleeps: bool) -> None:
    said = [user("read a file"), assistant("ja"), user("it holds the text"), assistant("gut"), user("and now")]
    for turns, reply in ((1, "ja"), (3, "gut"), (5, "ende")):
        await converse(rig, said[:turns], reply)
    if sleeps:
        await rig.sleep("a")
    edited = [*said[:2], user("it is gone since"), *said[3:]]
    told = await converse(rig, edited, "nein", volatile="It is 12:00.\n" + "x" * 99)
    (why,) = (await rig.service.why(told.session)).requests
    assert (why.outcome, why.source, why.cause) == ("diverged", "torpor://default/a", "message")
    assert why.volatile == ("It is 12:00.", "x" * 80)
    assert "it " in why.expected_text
    assert "is gone" in why.found_text
    told = await converse(rig, [*edited, assistant("nein"), user("on")], "ja")
    *_, why = (await rig.service.why(told.session)).requests
    assert (why.outcome, why.source, why.volatile) == ("hit", told.session, ())


async def test_the_last_answer_wanted_again_is_another_branch(rig: Rigged) -> None:
    said = [user("one")]
    await converse(rig, said, "eins")
    told = await converse(rig, said, "uno")
    assert (told.text, told.session != "torpor://default/a", told.prefilled_tokens) == ("uno", True, 0)
    assert ledger(rig) == cold(rig, [*said, assistant("eins")])


async def test_another_beginning_is_another_session_under_the_same_name(rig: Rigged) -> None:
    first = await converse(rig, [SYSTEM, user("one")], "eins")
    title = await converse(rig, [user("give this a title")], "Ones")
    tools = await converse(rig, [SYSTEM, user("one")], "eins", tools=TOOLS)
    assert len({first.session, title.session, tools.session}) == 3
    told = await converse(rig, [SYSTEM, user("one"), assistant("eins"), user("two")], "zwei", tools=TOOLS)
    assert told.session == tools.session
    told = await converse(rig, [SYSTEM, user("one"), assistant("eins"), user("two")], "zwei")
    assert told.session == first.session


async def test_requests_at_once_under_one_name_harm_no_head(rig: Rigged) -> None:
    await converse(rig, [SYSTEM, user("one")], "eins")
    base = [SYSTEM, user("one"), assistant("eins")]
    asked = [[*base, user("main")], [*base, user("agent")], [user("title")]]
    rig.script.clear()
    told = await asyncio.gather(*(converse(rig, each, max_tokens=8) for each in asked))
    assert len({each.session for each in told}) == 3
    for messages, each in zip(asked, told, strict=True):
        name = each.session.rpartition("/")[2]
        count = each.token_count - len(each.tokens)
        assert ledger(rig, name)[:count] == rig.model.encode(rig.model.render(messages, True), opening=False)


async def test_requests_at_once_under_a_new_name_are_sessions_of_their_own(open_rig: Any) -> None:
    """A client's first requests come together: the main one, one for a title, one of a sub-agent."""
    async with open_rig(endless=False, prefix_reuse="exact") as rig:
        asked = [[SYSTEM, user("main")], [user("title")], [SYSTEM, user("agent")], [SYSTEM, user("main")]]
        told = await asyncio.gather(*(converse(rig, each, max_tokens=8) for each in asked))
        found = [each.session.rpartition("/")[2] for each in told]
        assert (found[0], len(set(found))) == ("a", 4)
        for messages, each, name in zip(asked, told, found, strict=True):
            text = rig.model.encode(rig.model.render(messages, True), opening=False)
            assert ledger(rig, name) == [*text, *each.tokens]
        said = [*asked[1], assistant(told[1].text), user("on")]
        again = await converse(rig, said, "ja")
        assert again.session == told[1].session


async def test_a_session_of_another_name_is_forked_and_not_gone_on_with(rig: Rigged) -> None:
    await converse(rig, [user("one")], "eins")
    held, said = ledger(rig), [user("one"), assistant("eins"), user("two")]
    told = await converse(rig, said, "zwei", "b")
    assert (told.session, ledger(rig)) == ("torpor://default/b", held)
    assert told.prefilled_tokens < 40
    told = await converse(rig, said, "zwei", "other/a")
    assert told.session == "torpor://other/a", "another namespace has heads of its own"
    assert ledger(rig, "torpor://other/a") == cold(rig, [*said, assistant("zwei")])


async def test_a_sleeping_session_is_found_after_a_restart(open_rig: Any) -> None:
    said = [SYSTEM, user("one"), assistant("eins"), user("two")]
    async with open_rig(endless=False) as rig:
        await converse(rig, said[:2], "eins", tools=TOOLS)
        held = ledger(rig)
    async with open_rig(endless=False) as rig:
        told = await converse(rig, said, "zwei", tools=TOOLS)
        assert (told.session, ledger(rig)[: len(held)]) == ("torpor://default/a", held)
        assert ledger(rig) == cold(rig, [*said, assistant("zwei")], Root(TOOLS))


async def test_a_fork_that_a_user_made_is_gone_on_with_under_its_name(rig: Rigged) -> None:
    await converse(rig, [user("one")], "eins")
    await rig.service.fork("a", "b")
    told = await converse(rig, [user("one"), assistant("eins"), user("two")], "zwei", "b")
    assert (told.session, await names(rig)) == ("torpor://default/b", {"a", "b"})
    assert told.cached_tokens == 0
    assert told.prefilled_tokens < 40


async def test_an_imported_session_is_found(open_rig: Any, store: Path, tmp_path: Path) -> None:
    async with open_rig(endless=False) as rig:
        await converse(rig, [user("one")], "eins")
        await rig.sleep("a")
    bundle = tmp_path / "a.mvb"
    with Store.open(store, writable=False) as opened:
        opened.export_session(SessionUri("default", "a"), None, bundle)
    async with open_rig(endless=False, store=tmp_path / "other") as rig:
        await rig.service.import_bundle(hand_over(str(tmp_path / "other"), str(bundle)))
        told = await converse(rig, [user("one"), assistant("eins"), user("two")], "zwei")
        assert (told.session, told.prefilled_tokens < 40) == ("torpor://default/a", True)


async def test_a_deleted_session_is_found_no_more(rig: Rigged) -> None:
    await converse(rig, [user("one")], "eins")
    await rig.sleep("a")
    await rig.service.delete("a")
    told = await converse(rig, [user("one"), assistant("eins"), user("two")], "zwei")
    assert (told.session, told.cached_tokens) == ("torpor://default/a", 0)
    assert told.prefilled_tokens == told.token_count - len(told.tokens)


async def test_the_session_that_answers_is_told_before_anything_is_read_for_it(rig: Rigged) -> None:
    said: list[Any] = [user("one")]
    for name, messages in (("a", said), ("b", [*said, assistant("eins"), user("two")])):
        heard: list[Any] = []
        told = await converse(rig, messages, "eins", name=name, on_event=heard.append)
        first, *others = (event for event in heard if getattr(event, "stage", None) != "wake")
        assert first == SessionEvent(told.session)
        assert not any(isinstance(event, SessionEvent) for event in others)
    assert told.session == "torpor://default/b", "a fork"


@pytest.mark.one_in(1)
@pytest.mark.parametrize("name", ["a", "b"], ids=["in its session", "in a fork"])
@pytest.mark.parametrize("sleeps", [False, True])
async def test_what_is_measured_is_what_is_read_behind_thinking_that_a_template_drops(
    open_rig: Any, sleeps: bool, name: str
) -> None:
    """Not a cold rendering: the ledger has the thinking, and the client has paid for it."""
    async with thinking(open_rig) as rig:
        said = [SYSTEM, user("one")]
        await converse(rig, said, "<think>hm, and hm again</think>eins")
        said = [*said, assistant("eins"), user("two")]
        if sleeps:
            await rig.sleep("a")
        cold_tokens = rig.model.encode(rig.model.render(said, True), opening=False)
        for reply in ("<think>so</think>zwei", "ja"):  # and the same request again
            measured = await rig.service.measure(name, said)
            told = await converse(rig, said, reply, name=name)
            assert measured.tokens == told.token_count - len(told.tokens) > len(cold_tokens)
        more = [*said, assistant("zwei"), user("three")]
        measured = await rig.service.measure(name, more)
        told = await converse(rig, more, "drei", name=name)
        assert measured.tokens == told.token_count - len(told.tokens)
        assert measured.cached_tokens == measured.tokens - told.prefilled_tokens


async def test_an_edited_history_is_measured_as_it_is_read(open_rig: Any) -> None:
    async with thinking(open_rig) as rig:
        await converse(rig, [user("one")], "<think>hm, and hm again</think>eins")
        for said in ([user("uno"), assistant("eins"), user("two")], [user("one"), assistant("uno"), user("two")]):
            measured = await rig.service.measure("a", said)
            told = await converse(rig, said, "zwei")
            assert measured.tokens == told.token_count - len(told.tokens)


COUNTS = (  # so no dialogue can go on behind an answer
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ messages | length }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def test_where_a_template_cannot_be_continued_each_dialogue_is_measured_and_read_anew(
    open_rig: Any, own_tiny_model: Path
) -> None:
    async with open_rig(with_template(own_tiny_model, COUNTS), endless=False) as rig:
        said = [SYSTEM]
        for number in range(3):
            said = [*said, user(f"q{number}")]
            measured = await rig.service.measure("a", said)
            told = await converse(rig, said, f"a{number}", name="a")
            said = [*said, assistant(told.text)]
            held = ledger(rig, told.session.rpartition("/")[2])
            assert held[: -len(told.tokens)] == rig.model.encode(rig.model.render(said[:-1], True), opening=False)
            assert measured.tokens == told.token_count - len(told.tokens)


async def test_a_fork_that_answers_nothing_is_taken_back(rig: Rigged) -> None:
    await converse(rig, [user("one")], "eins")
    with pytest.raises(ContextOverflow):
        await converse(rig, [user("one"), assistant("eins"), user("x" * 3000)], name="b")
    assert await names(rig) == {"a"}


async def test_a_fork_whose_client_leaves_stays_where_its_retry_has_found_it(rig: Rigged) -> None:
    said = [user("one"), assistant("eins"), user("three")]
    await converse(rig, said[:1], "eins")
    await converse(rig, [*said[:2], user("two")], "zwei")
    reply_with(rig, "drei")
    gate, forks = Gate(), list[SessionUri]()
    rig.network.before = lambda *_: gate.pass_through() if forks else None

    def on_event(event: object) -> None:
        if isinstance(event, SessionEvent):
            forks.append(SessionUri.parse(event.session))

    left = asyncio.ensure_future(converse(rig, said, on_event=on_event))
    await gate.reached()
    left.cancel()
    again = asyncio.ensure_future(converse(rig, said))
    await until(lambda: rig.service._parts.sessions.residency.turns.users(forks[0]) == 2)
    gate.open()
    await cancelled(left)
    told = await again
    assert (told.text, told.session) == ("drei", str(forks[0]))
    assert await names(rig) == {"a", forks[0].name}
    assert ledger(rig, forks[0].name) == cold(rig, [*said, assistant("drei")])


async def test_a_call_and_its_result_go_on_in_the_session_whatever_the_client_made_of_them(rig: Rigged) -> None:
    call = '<tool_call>{"name": "look", "arguments": {"path": ".", "all": true}}</tool_call>'
    told = await converse(rig, [user("hi")], call, tools=TOOLS, max_tokens=90)
    back = [{"name": "look", "arguments": {"all": True, "path": "."}, "id": "theirs"}]
    said = [user("hi"), message_of("assistant", " \n", back)]
    said.append({"role": "tool", "content": "a file", "tool_call_id": "theirs"})
    again = await converse(rig, said, "fine", tools=TOOLS)
    assert again.session == told.session
    assert again.prefilled_tokens < 60


LATER = {"name": "later", "description": "", "parameters": {"type": "object"}, "deferred": True}
HELD_LATER = '<tool_call>\n{"name": "later", "arguments": {}}\n</tool_call>'
CALL_LATER = '<tool_call>{"name": "later", "arguments": {}}</tool_call>'


@pytest.mark.one_in(1)
async def test_a_deferred_tool_is_called_and_nothing_is_read_anew_for_it(rig: Rigged) -> None:
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    told = await converse(rig, [user("hi")], call, tools=TOOLS, max_tokens=90)
    said = [user("hi"), message_of("assistant", "", [asdict(each) for each in told.tool_calls])]
    said.append({"role": "tool", "content": "later has no arguments", "tool_call_id": told.tool_calls[0].id})
    held = len(ledger(rig))
    told = await converse(rig, said, CALL_LATER, tools=(*TOOLS, LATER), max_tokens=90)
    assert [call.name for call in told.tool_calls] == ["later"]
    assert told.prefilled_tokens == told.token_count - len(told.tokens) - held
    assert "later" not in rig.model.tokenizer.decode(ledger(rig)[:held])
    only = await rig.service.measure("b", [user("hi")], tools=(LATER,))
    assert only.tokens == (await rig.service.measure("b", [user("hi")])).tokens
    alone = {"tools": (*TOOLS, LATER), "tool_choice": ToolChoice("required", ("later",))}
    assert (await converse(rig, said, HELD_LATER, **alone, max_tokens=90)).tool_calls[0].name == "later"


async def test_a_deferred_tool_is_not_offered_behind_an_answer(rig: Rigged) -> None:
    answer = "ab" * 16
    await converse(rig, [user("hi")], "well", tools=TOOLS, answer_id=answer)
    with_it = await converse(rig, [user("so")], CALL_LATER, after=answer, tools=(*TOOLS, LATER), max_tokens=90)
    assert [call.name for call in with_it.tool_calls] == ["later"]
    assert [each.role for each in (await rig.service.recall("a")).messages] == ["user", "assistant"] * 2


LOOKS = [f'{{"name": "look", "arguments": {{"path": "{path}"}}}}' for path in "ab"]


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "reply",
    [
        "one E<tool_call>{}</tool_call>\n<tool_call>{}</tool_call> two".format(*LOOKS),
        "one E<tool_call>[{}, {}]</tool_call> two".format(*LOOKS),
    ],
    ids=["each between marks", "together"],
)
async def test_where_calls_may_not_be_parallel_the_answer_ends_behind_its_first(rig: Rigged, reply: str) -> None:
    one = {"tools": TOOLS, "tool_choice": ToolChoice(parallel=False), "stop": ("END",), "max_tokens": 200}
    heard: list[Any] = []
    answer = "ab" * 16
    told = await converse(rig, [user("hi")], reply, **one, on_event=heard.append, answer_id=answer)
    assert (told.text, told.finish_reason) == ("one E", "tool_calls")
    assert [call.arguments for call in told.tool_calls] == [{"path": "a"}]
    assert [event.call for event in heard if isinstance(event, TokenEvent) and event.call] == list(told.tool_calls)
    assert rig.model.tokenizer.decode(list(told.tokens)).endswith("</tool_call>")
    recalled = await rig.service.recall(answer_id=answer)
    assert recalled.messages[-1].tool_calls == told.tool_calls
    assert recalled.messages[-1].finished
    said = [user("hi"), message_of("assistant", told.text, [asdict(call) for call in told.tool_calls])]
    said.append({"role": "tool", "content": "a file", "tool_call_id": told.tool_calls[0].id})
    again = await converse(rig, said, "fine", **one)
    assert (again.session, again.text) == (told.session, "fine")
    assert again.prefilled_tokens == again.token_count - len(again.tokens) - told.token_count


async def test_a_session_that_begins_has_the_labels_of_its_request_and_keeps_them_whoever_goes_on(rig: Rigged) -> None:
    """A fork, too: else `clear --label http` would delete what a client has named."""
    said = [user("one")]
    said.append(assistant((await converse(rig, said, "eins", labels=("http",))).text))
    await converse(rig, [*said, user("two")], "zwei", labels=("other",))
    named = await converse(rig, [*said, user("three")], "drei", "b")
    fork = await converse(rig, [*said, user("three"), assistant("drei"), user("four")], "vier", "c", labels=("http",))
    found = {each.name: each.labels for each in await rig.service.list_sessions()}
    assert found == {"a": ("http",), "b": (), "c": ("http",)}
    assert (named.session, fork.session) == ("torpor://default/b", "torpor://default/c")
    assert len((await rig.service.clear("http")).sessions) == 2
    assert await names(rig) == {"b"}


async def test_else_an_answer_may_have_several_calls(rig: Rigged) -> None:
    reply = "<tool_call>{}</tool_call>\n<tool_call>{}</tool_call>".format(*LOOKS)
    told = await converse(rig, [user("hi")], reply, tools=TOOLS, max_tokens=200)
    assert [call.arguments for call in told.tool_calls] == [{"path": "a"}, {"path": "b"}]


async def test_measure_counts_what_would_be_read(rig: Rigged) -> None:
    said = [SYSTEM, user("one"), assistant("eins"), user("two")]
    before = await rig.service.measure("a", said)
    assert (before.tokens, before.cached_tokens) == (
        len(rig.model.encode(rig.model.render(said, True), opening=False)),
        0,
    )
    await converse(rig, said[:2], "eins")
    measured = await rig.service.measure("a", said)
    told = await converse(rig, said, "zwei")
    assert measured.tokens == before.tokens == told.token_count - len(told.tokens)
    assert measured.tokens - measured.cached_tokens == told.prefilled_tokens
    assert measured.context_tokens == rig.model.context_tokens


ONE_SYSTEM = (
    "{% for m in messages[1:] %}{% if m.role == 'system' %}{{ raise_exception('One only') }}{% endif %}{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages[1:] %}{% if m.role == 'user' and messages[loop.index0].role == 'user' %}"
    "{{ raise_exception('Alternate') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("refuses", ["", ONE_SYSTEM, ONE_SYSTEM + ALTERNATING], ids=["nothing", "a second", "a run"])
async def test_a_system_text_in_the_midst_stays_there_and_is_a_marked_users_where_the_template_refuses_it(
    open_rig: Any, own_tiny_model: Path, refuses: str
) -> None:
    template = json.loads((own_tiny_model / "tokenizer_config.json").read_text())["chat_template"]
    async with open_rig(with_template(own_tiny_model, refuses + template), endless=False) as rig:
        said: list[Any] = [SYSTEM, user("one")]
        said.append(assistant((await converse(rig, said, "eins")).text))
        held = ledger(rig)
        said += [message_of("system", "Now in German."), user("two")]
        counted = await rig.service.measure("a", said)
        told = await converse(rig, said, "zwei")
        prompt = told.token_count - len(told.tokens)
        assert (counted.tokens, counted.cached_tokens) == (prompt, len(held))
        assert told.prefilled_tokens == prompt - len(held)
        text = rig.model.tokenizer.decode(ledger(rig)[len(held) : prompt])
        assert ("<system>" in text) is bool(refuses)
        assert text.index("Now in German.") < text.index("two")
        said += [assistant(told.text), user("three")]
        held = ledger(rig)
        told = await converse(rig, said, "drei")
        assert told.session == "torpor://default/a"
        assert told.prefilled_tokens == told.token_count - len(told.tokens) - len(held)


@pytest.mark.parametrize("family", [CHATML, STRICT], ids=lambda each: each.name)
async def test_two_answers_in_a_row_are_read_as_a_fresh_daemon_reads_them(
    open_rig: Any, own_tiny_model: Path, family: Family
) -> None:
    """Also behind a session that ends with the first of them: a template may make them one turn."""
    async with open_rig(with_template(own_tiny_model, family.template), endless=False) as rig:
        said: list[Any] = [user("one"), assistant((await converse(rig, [user("one")], "eins")).text)]
        said += [assistant("uno"), user("two"), user("three")]
        counted = await rig.service.measure("a", said)
        told = await converse(rig, said, "zwei")
        name = told.session.rpartition("/")[2]
        said.append(assistant(told.text))
        assert ledger(rig, name) == cold(rig, said)
        assert counted.tokens == told.token_count - len(told.tokens)
        held = len(ledger(rig, name))
        said.append(user("on"))
        told = await converse(rig, said, "drei")
        assert (told.session.rpartition("/")[2], ledger(rig, name)) == (name, cold(rig, [*said, assistant("drei")]))
        assert told.prefilled_tokens == told.token_count - len(told.tokens) - held


async def test_a_transcript_without_a_question_is_refused(rig: Rigged) -> None:
    with pytest.raises(InvalidTranscript):
        await converse(rig, [user("one"), assistant("eins")])
    assert await names(rig) == set()


async def test_measure_tells_the_strict_tools_that_cannot_be_held(rig: Rigged) -> None:
    good = {"name": "good", "description": "", "parameters": {"type": "object", "properties": {"a": {"const": 1}}}}
    choice = ToolChoice(strict=("good", "bad", "missing"))
    large = {"type": "object", "properties": {"a": {"const": 2**60}}}
    for wrong in ({"not": {}}, {"required": [[1]]}, {"required": 5}, {"x-guidance": 5, "not": {}}, {"format": ["a"]}):
        bad = {**good, "name": "bad", "parameters": {**large, **wrong}}
        for tools, told in (((good,), ()), ((good, bad), ("bad",)), ((bad,), ("bad",))):
            measured = await rig.service.measure("a", [user("q")], tools=tools, tool_choice=choice)
            assert measured.unheld == told
        loose = await rig.service.measure("a", [user("q")], tools=(bad,), tool_choice=ToolChoice())
        assert loose.unheld == ()
