"""What a dialogue had in it before does not stop it: what cannot be read is a line, a call with broken arguments keeps
its words, and only the newest message is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torpor.tests.socket_api.http.answers import asked_for
from torpor.tests.socket_api.http.http_rig import HttpThread

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
DATA = "data:image/png;base64,aGk="
PICTURES: dict[str, dict[str, Any]] = {
    CHAT: {"type": "image_url", "image_url": {"url": DATA}},
    RESPONSES: {"type": "input_image", "image_url": DATA},
    MESSAGES: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
}
TEXT_KINDS = {CHAT: "text", RESPONSES: "input_text", MESSAGES: "text"}
each_path = pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])


def call_of(path: str, arguments: object, id: str = "c1") -> Any:
    if path == CHAT:
        call = {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if path == RESPONSES:
        return {"type": "function_call", "call_id": id, "name": "look", "arguments": arguments}
    return {"role": "assistant", "content": [{"type": "tool_use", "id": id, "name": "look", "input": arguments}]}


def result_of(path: str, content: object, id: str = "c1", **more: Any) -> Any:
    if path == CHAT:
        return {"role": "tool", "tool_call_id": id, "content": content}
    if path == RESPONSES:
        return {"type": "function_call_output", "call_id": id, "output": content}
    result = {"type": "tool_result", "tool_use_id": id, "content": content, **more}
    return {"role": "user", "content": [result]}


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def read(server: HttpThread, path: str, *messages: Any) -> tuple[list[dict[str, Any]], str]:
    """The messages that the daemon is asked to read, and what the answer says was left out."""
    given = {"input": list(messages)} if path == RESPONSES else {"messages": list(messages), "max_tokens": 2}
    answer = server.ask("POST", path, given)
    assert answer.status == 200, answer
    (asked,) = asked_for(server, "converse")
    return list(asked["messages"]), answer.headers.get("x-torpor-ignored", "")


@each_path
def test_a_picture_before_the_newest_message_is_a_line(server: HttpThread, path: str) -> None:
    picture, text = PICTURES[path], {"type": TEXT_KINDS[path], "text": "what is it?"}
    said, left_out = read(
        server,
        path,
        user([picture, text]),
        {"role": "assistant", "content": "A cat."},
        user("Look again."),
        call_of(path, "{}" if path != MESSAGES else {}),
        result_of(path, [picture]),
    )
    line = f"[{picture['type']} left out: this model reads text alone]"
    assert [each["content"] for each in said] == [f"{line}\nwhat is it?", "A cat.", "Look again.", "", line]
    assert left_out.endswith(f".{picture['type']}")


@each_path
def test_a_picture_in_the_newest_message_is_refused(server: HttpThread, path: str) -> None:
    messages = [user("hi"), {"role": "assistant", "content": "ok"}, user([PICTURES[path]])]
    given = {"input": messages} if path == RESPONSES else {"messages": messages, "max_tokens": 2}
    answer = server.ask("POST", path, given)
    assert answer.status == 400
    assert answer.json["error"]["message"].startswith(("messages.2.content", "input.2.content"))
    assert not server.service.calls


@pytest.mark.one_in(1)
@each_path
@pytest.mark.parametrize(
    ("given", "arguments"),
    [
        ('{"cmd": "ls', {"input": '{"cmd": "ls'}),
        ("ls -l", {"input": "ls -l"}),
        ("[1]", {"input": "[1]"}),
        ('{"a": 1e400}', {"input": '{"a": 1e400}'}),
        ('{"a":' * 40 + "1" + "}" * 40, {"input": '{"a":' * 40 + "1" + "}" * 40}),
        ("[" * 100_000, {"input": "[" * 100_000}),
        ('{"a": NaN}', {"input": '{"a": NaN}'}),
        ('{"a": "\\ud83d"}', {"a": "\ufffd"}),
        ('{"a": 1' + "0" * 30 + "}", {"a": 10**31 // 10}),
        ("null", {}),
        (" ", {}),
        (None, {}),
        ({"a": [1]}, {"a": [1]}),
        ([1], {"input": "[1]"}),
        (7, {"input": "7"}),
    ],
)
def test_a_call_with_arguments_that_are_no_object_keeps_its_words(
    server: HttpThread, path: str, given: object, arguments: dict[str, Any]
) -> None:
    """Some model wrote them once; if they were refused, so would be each later request."""
    said, _ = read(server, path, user("hi"), call_of(path, given), result_of(path, "r"), user("go"))
    ((call,),) = [each["tool_calls"] for each in said if "tool_calls" in each]
    assert (call["name"], call["arguments"]) == ("look", arguments)


def test_a_call_that_is_nested_too_deep_is_read_as_its_words_also_where_it_is_no_text(server: HttpThread) -> None:
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"a": deep}
    said, _ = read(server, MESSAGES, user("hi"), call_of(MESSAGES, deep), result_of(MESSAGES, "r"))
    assert said[1]["tool_calls"][0]["arguments"] == {"input": json.dumps(deep)}


@each_path
def test_a_long_id_of_a_call_is_a_shorter_one_and_its_results(server: HttpThread, path: str) -> None:
    """Gateways keep what was thought in it."""
    ids = ["call_" + "x" * 600, "call_" + "x" * 600 + "y", "call_1"]
    said: list[Any] = [user("hi")]
    for each in ids:
        said += [call_of(path, None, each), result_of(path, "r", each)]
    asked, _ = read(server, path, *said)
    calls = [each["tool_calls"][0]["id"] for each in asked if "tool_calls" in each]
    assert calls == [each["tool_call_id"] for each in asked if each["role"] == "tool"]
    assert len({*calls}) == 3
    assert max(map(len, calls)) <= 512
    assert calls[2] == "call_1"


def test_a_result_that_is_an_error_is_read_as_one(server: HttpThread) -> None:
    results = [result_of(MESSAGES, "no such file", is_error=True), result_of(MESSAGES, "fine", is_error=False)]
    said, left_out = read(server, MESSAGES, user("hi"), call_of(MESSAGES, {}), *results, user("go"))
    assert [each["content"] for each in said if each["role"] == "tool"] == ["Error: no such file", "fine"]
    assert not left_out


def test_a_document_that_is_text_is_read(server: HttpThread) -> None:
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "One."}}
    parts = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Two."}]}}
    found = {"type": "search_result", "source": "a", "title": "b", "content": [{"type": "text", "text": "Three."}]}
    said, left_out = read(server, MESSAGES, user([plain, parts, found]))
    assert ([each["content"] for each in said], left_out) == (["One.\nTwo.\nThree."], "")


def test_blocks_of_other_servers_tools_are_lines(server: HttpThread) -> None:
    """Their contents have other shapes, too: an object where others have a list."""
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "a"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "error", "error_code": "x"}},
        {"type": "text", "text": "So."},
    ]
    said, _ = read(server, MESSAGES, user("hi"), {"role": "assistant", "content": blocks}, user("go"))
    assert said[1]["content"].endswith("[web_search_tool_result left out: this model reads text alone]\nSo.")


@each_path
@pytest.mark.parametrize("wrong", [3, {"type": "text", "text": "a"}, True])
def test_a_content_of_another_shape_is_a_400_that_names_it(server: HttpThread, path: str, wrong: object) -> None:
    given = {"input": [user(wrong)]} if path == RESPONSES else {"messages": [user(wrong)], "max_tokens": 2}
    answer = server.ask("POST", path, given)
    assert answer.status == 400
    assert ".content: " in answer.json["error"]["message"]
