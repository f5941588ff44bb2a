"""A transcript finds the session that has read it, and no session that has read another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from torpor.daemon.models.chat_template import Root
from torpor.daemon.prefixes import heads as heads_module
from torpor.daemon.prefixes.heads import Chain, Heads, digest_of_request
from torpor.daemon.sessions import encoding, transcripts
from torpor.daemon.sessions.said import Said, chained, is_alike
from torpor.daemon.sessions.sessions import Session
from torpor.daemon.sessions.transcripts import TextMap, message_of
from torpor.memvid.uri import SessionUri
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
                    await rig.service._parts.sessions.heads.learn(rig.service._parts.sessions.resolve(name))
            assert len(set(sessions)) == 2
            # And each still finds its own.
            again = await converse(
                rig, [user(f"{at}?"), pair[0], user("on"), assistant("ja"), user("more")], "so", f"s{at}"
            )
            assert again.session.rpartition("/")[2] == sessions[0]


@pytest.mark.one_in(1)
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
        encoder, model = rig.service._parts.models.encoder, rig.model
        shown = await encoder.shown_root(model, Root(TOOLS))
        assert shown != await encoder.shown_root(model, Root()) == b""
        tomorrow = datetime.now().astimezone() + timedelta(days=1)
        for module in (encoding, chat_template_utils):
            monkeypatch.setattr(module, "datetime", Mock(now=lambda: tomorrow))
        encoder._shown_roots.clear()
        assert tomorrow.strftime("%d %b") in model.render([user("a")], False, Root(TOOLS))
        assert await encoder.shown_root(model, Root(TOOLS)) == shown


async def test_a_date_in_a_clients_tool_counts_though_the_template_writes_the_same(
    open_rig: Any, own_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated = "{{ strftime_now('%d %b') }}{% if tools %}{{ tools | tojson }}{% endif %}" + SHOWS_ALL
    today = datetime.now().astimezone()
    tomorrow = today + timedelta(days=1)
    async with open_rig(with_template(own_tiny_model, dated), endless=False) as rig:
        seen = []
        for now in (today, tomorrow):
            for module in (encoding, chat_template_utils):
                monkeypatch.setattr(module, "datetime", Mock(now=lambda now=now: now))
            rig.service._parts.models.encoder._shown_roots.clear()
            for word in ("", today.strftime("%d %b"), tomorrow.strftime("%d %b")):
                tools = ({"name": "orders", "description": f"Orders of {word}.", "parameters": {}},)
                seen.append(await rig.service._parts.models.encoder.shown_root(rig.model, Root(tools)))
        assert len({*seen[:3]}) == len({*seen[3:]}) == 3
        assert seen[0] == seen[3]
        assert seen[1] != seen[5]


def test_a_request_with_other_thinking_is_no_retry() -> None:
    one, two = ([user("a"), thought("eins", each), user("b")] for each in ("hm", "ah"))
    assert digest_of_request("m", Root(), one) != digest_of_request("m", Root(), two)
    assert digest_of_request("m", Root(), one) == digest_of_request("m", Root(), [dict(each) for each in one])


def told(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {**message_of(role, content), **more}


class Noting:
    """Heads of sessions that stand only in text maps."""

    def __init__(self) -> None:
        self.heads = Heads(Mock(), Mock())

    def note(self, name: str, text_map: TextMap, namespace: str = "default") -> None:
        tokens = list(range(text_map.end))
        self.heads.note(
            cast(
                Session,
                SimpleNamespace(
                    uri=SessionUri(namespace, name),
                    model=SimpleNamespace(name="m"),
                    chat=SimpleNamespace(text_map=text_map),
                    state=SimpleNamespace(tokens=tokens),
                    left_midway=None,
                ),
            )
        )

    def found(self, messages: Sequence[Mapping[str, Any]], answers: Iterable[bytes]) -> list[object]:
        asked = [[*messages[:end], told("user", "on")] for end in range(1, len(messages) + 1)]
        places = [self.heads.find("default", "m", Chain.of(each, b"")) for each in asked]
        return [*places, *(self.heads.behind("default", answer) for answer in answers)]


def test_heads_noted_turn_by_turn_are_those_noted_at_once() -> None:
    """Whatever was cut off, said again in other words, or with the same words and other thoughts, between two notes."""
    chance = Random(31)
    for _ in range(250):
        by_turn, text_map, spoken, answers = (
            Noting(),
            TextMap(),
            list[dict[str, Any]](),
            [bytes([n]) * 16 for n in (1, 2)],
        )
        for _ in range(12):
            if spoken and chance.random() < 0.4:
                kept = chance.randrange(len(spoken))
                text_map = text_map.cut(text_map.turns[kept - 1].end if kept else 0)
                spoken = spoken[: len(text_map.turns)]
            else:
                role = ("user", "assistant")[len(spoken) % 2]
                said = told(role, chance.choice("aab"))
                own = role == "assistant"
                if own:
                    said["reasoning"] = chance.choice(["", "hm", "ah"])
                named = chance.choice([*answers, b""]) if own else b""
                end = text_map.end + chance.choice([1, 2])
                text_map = text_map.extended([said], start=text_map.end, end=end, answer=named, own=own)
                spoken.append(said)
            if chance.random() < 0.6:
                by_turn.note("s", text_map)
        at_once = Noting()
        by_turn.note("s", text_map)
        at_once.note("s", text_map)
        without = [{name: value for name, value in each.items() if name != "reasoning"} for each in spoken]
        for asked in (spoken, without):
            assert by_turn.found(asked, answers) == at_once.found(asked, answers)
        assert by_turn.heads._counts == at_once.heads._counts
        by_turn.heads.forget(SessionUri("default", "s"))
        assert not by_turn.heads._at
        assert by_turn.heads._counts.total() == 0


def test_a_turn_more_costs_as_much_as_it_adds_however_long_the_dialogue_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop does it, and nobody else goes on meanwhile."""
    noting, changed, set_one, hashed = Noting(), list[bytes](), Heads._set, list[bytes]()
    text_map = TextMap()
    for at in range(400):
        said = told(("user", "assistant")[at % 2], f"{at}")
        text_map = text_map.extended([said], start=text_map.end, end=text_map.end + 1)
    noting.note("s", text_map)

    def counted(heads: Heads, words: Any, key: bytes, at: int) -> None:
        changed.append(key)
        set_one(heads, words, key, at)

    def counted_chain(chain: bytes, digest: bytes) -> bytes:
        hashed.append(digest)
        return chained(chain, digest)

    monkeypatch.setattr(Heads, "_set", counted)
    monkeypatch.setattr(transcripts, "chained", counted_chain)
    for at in range(2):
        said = told(("user", "assistant")[at % 2], f"more {at}")
        text_map = text_map.extended([said], start=text_map.end, end=text_map.end + 1)
    noting.note("s", text_map)
    assert len(changed) == len(hashed) == 2


def test_places_of_many_sessions_take_none_of_another_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client of one namespace could make those of others read their dialogues anew."""
    monkeypatch.setattr(heads_module, "MAX_HEADS", 20)
    noting, spoken = Noting(), [told("user", "mine"), told("assistant", "yes")]
    text_map = TextMap().extended(spoken[:1], start=0, end=1).extended(spoken[1:], start=1, end=2, own=True)

    def found(namespace: str) -> int:
        return len(noting.heads.find(namespace, "m", Chain.of([*spoken, told("user", "on")], b"")))

    noting.note("s", text_map, "mine")
    for at in range(40):
        noting.note(f"s{at}", text_map, "theirs")
    assert found("mine") == 1
    assert 0 < found("theirs") < 20


def test_messages_that_are_unlike_all_the_way_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transcript with the words of a session, and another thought in its midst, fits at no place behind that."""
    noting, compared = Noting(), list[int]()
    messages = [told(("user", "assistant")[at % 2], f"{at}") for at in range(200)]
    text_map = TextMap()
    for message in messages:
        own = message["role"] == "assistant"
        text_map = text_map.extended([message], start=text_map.end, end=text_map.end + 1, own=own)
    noting.note("s", text_map)

    def counted(said: Said, beyond: bytes, *, own: bool) -> bool:
        compared.append(1)
        return is_alike(said, beyond, own=own)

    monkeypatch.setattr(heads_module, "is_alike", counted)
    asked = [*messages, told("user", "on")]
    asked[99] = {**asked[99], "reasoning": "another"}
    (head,) = noting.heads.find("default", "m", Chain.of(asked, b""))
    assert head.messages == 98
    assert len(compared) <= len(messages)
