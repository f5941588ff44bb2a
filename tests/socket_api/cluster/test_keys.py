"""By what each client's requests are known to be of one conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torpor.socket_api.cluster.keys import Key, key_of
from torpor.socket_api.cluster.passing import Answered
from torpor.tests.socket_api.cluster.routing import PAGE, file_of, places_of, rows
from torpor.tests.socket_api.http.replay import shapes_in

CHAT = "/v1/chat/completions"
ANSWER = "0" * 31 + "7"

PLACES = {
    "claude_code": "ABAAAA",  # the sub-agent has an id of its own
    "codex": "AAA",
    "opencode": "AAAA",  # its title has the id of the conversation
    "pi": "AAA",
    "anthropic-py-2.12.0": "AAAB",
    "claude-code-2.1.330-interactive-compact": "AAAAAAAAA",
    "claude-code-subagents": "AABCDADDCCBBAA",
    "codex-0.169.0-headless": "AAAA",
    "langgraph-langchain-openai": "AAAAAB",  # the fifth begins with the first one's words
    "litellm-1.83.0": "AAAA",
    "llm-0.36": "AABC",
    "openai-agents-0.24.0": "AAAAAAAA",
    "openai-py-3.54.0-chat": "AAABB",
    "opencode-1.18.33-chat": "AAAAA",
    "opencode-1.18.33-responses": "AAAAA",
    "pi-0.73.1-anthropic": "AAAA",
    "pi-0.73.1-responses": "AAAA",
    "pydantic-ai-2.68.0": "AAAAAAAAAAAA",
}
"""A letter for each recorded request: where it goes, if each new conversation goes to another place."""


def key(body: Mapping[str, Any], path: str = CHAT, **headers: str) -> Key:
    return key_of("default", path, {name.replace("_", "-"): value for name, value in headers.items()}, body)


def said(*texts: str, system: str = "") -> dict[str, Any]:
    told = [{"role": "system", "content": system}] if system else []
    turns = [{"role": role, "content": text} for text in texts for role in ("assistant", "user")]
    return {"model": "m", "messages": [*told, *turns[1:]]}


@pytest.mark.parametrize("name", PLACES)
def test_a_client_goes_on_where_its_conversation_is(name: str) -> None:
    file = file_of(name)
    if file is None:
        pytest.skip("no recorded shapes lie beside the repository")
    assert places_of(shapes_in(file, scale=0.02)) == PLACES[name]


def test_the_page_tells_of_each_client_where_its_requests_go_and_by_what() -> None:
    page = PAGE.read_text()
    assert [row for row in rows() if row not in page] == []


@pytest.mark.parametrize(
    ("asked", "session"),
    [
        (key({}, x_torpor_session="notes"), "torpor://default/notes"),
        (key({}, x_torpor_session="team/notes@3"), "torpor://team/notes"),
        (key({}, x_claude_code_session_id="s", x_claude_code_agent_id="a"), "torpor://default/s-a"),
        (key({"prompt_cache_key": "k"}, path="/v1/responses"), "torpor://default/k"),
        (key({}, path="/v1/sessions/team%2Fnotes/fork"), "torpor://team/notes"),
        (key({}, path="/v1/sessions"), None),
        (key({}, x_torpor_session="no name"), None),
        (key({"prompt_cache_key": 7}), None),
    ],
)
def test_a_named_session_is_the_key(asked: Key, session: str | None) -> None:
    assert asked.session == session


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "go on", "previous_response_id": f"resp_{ANSWER}"}),
        (f"/v1/responses/resp_{ANSWER}", {}),
        ("/v1/responses", {"input": "go on", "conversation": {"id": f"conv_{ANSWER}"}}),
    ],
)
def test_an_answer_leads_to_its_session(path: str, body: dict[str, Any]) -> None:
    answered, begun = Answered(), key({"input": "begin"}, path="/v1/responses")
    answered.learn(begun, session="torpor://default/s", replica="r", answer=ANSWER)
    found = answered.wanted(key(body, path=path))
    assert (found.session, found.was_at) == ("torpor://default/s", "r")


def test_an_answer_without_a_session_leads_to_its_replica() -> None:
    answered = Answered()
    answered.learn(Key(), session=None, replica="r", answer=ANSWER)
    assert answered.wanted(Key(answers=(ANSWER,))).was_at == "r"


def test_the_longest_beginning_that_was_seen_wins() -> None:
    answered = Answered()
    for replica, texts in (("a", ["one"]), ("b", ["one", "two"])):
        answered.learn(key(said(*texts)), session=f"torpor://default/{replica}", replica=replica, answer=None)
    assert answered.wanted(key(said("one", "two", "three"))).was_at == "b"
    assert answered.wanted(key(said("one", "other"))).was_at == "a"
    assert answered.wanted(key(said("other"))).was_at is None


def test_how_a_client_marks_its_texts_changes_nothing() -> None:
    plain, marked = said("one", system="s"), said("one", system="s")
    marked["messages"][1]["content"] = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]
    assert key(plain) == key(marked)


def test_conversations_of_two_namespaces_or_names_have_nothing_in_common() -> None:
    body = said("one", system="s")
    keys = [key_of("a", CHAT, {}, body), key_of("b", CHAT, {}, body), key(body, x_session_id="n"), key(body)]
    assert len({each.dialogue for each in keys}) == len(keys)


def test_who_has_read_the_text_before_the_first_message_is_remembered() -> None:
    answered = Answered()
    answered.learn(key(said("one", system="long")), session="torpor://default/s", replica="r", answer=None)
    wanted = answered.wanted(key(said("other", system="long")))
    assert (wanted.session, wanted.head_bytes, wanted.read_at) == (None, 4, {"r"})


def test_what_was_used_last_is_remembered() -> None:
    answered = Answered(most=2)
    for name in ("a", "b"):
        answered.learn(Key(), session=name, replica=name, answer=None)
    assert answered.wanted(Key("a")).was_at == "a"
    answered.learn(Key(), session="c", replica="c", answer=None)
    assert [answered.wanted(Key(name)).was_at for name in ("a", "b", "c")] == ["a", None, "c"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": 3},
        {"messages": [3, {"role": "user"}, {"role": "user", "content": [4, {"text": 5}]}]},
        {"tools": {}},
    ],
)
def test_a_body_that_makes_no_sense_has_a_key(body: dict[str, Any]) -> None:
    assert key(body).dialogue == ()
