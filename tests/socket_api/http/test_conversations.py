"""Conversations over HTTP, around a service without a model, and by OpenAI's client with the demo model."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.conversing import MeasureRequest, MeasureResult
from torpor.daemon.api.creating import CreateRequest
from torpor.daemon.api.dialogue import ToolCall
from torpor.daemon.api.reading import AppendRequest, AppendResult
from torpor.daemon.api.recalling import RecalledMessage, RecalledPiece, RecallRequest, RecallResult
from torpor.memvid.errors import SessionNotFound
from torpor.tests.socket_api.http.answers import asked_for
from torpor.tests.socket_api.http.http_rig import HttpThread
from torpor.tests.socket_api.http.serving import serving

PATH = "/v1/conversations"
NOBODY = f"{PATH}/conv_{'0' * 32}"


def texts(items: Any) -> list[str]:
    return [each.content[0].text for each in items]


@pytest.mark.one_in(1)
def test_a_conversation_grows_by_items_and_responses_and_survives_a_kill(short_path: Path) -> None:
    import openai

    system: Any = {"type": "message", "role": "system", "content": "You are terse."}
    said: Any = [{"role": "user", "content": "What is a set?"}, {"role": "assistant", "content": "A bag."}]
    options: Any = {"model": "demo", "max_output_tokens": 8}
    with contextlib.ExitStack() as running:
        now = running.enter_context(serving(short_path))
        with now.openai() as client:
            made = client.conversations.create(items=[system, *said], metadata={"topic": "sets"})
            first = client.responses.create(
                conversation=made.id, input="And a list?", instructions="Be kind.", **options
            )
            assert first.conversation is not None
            assert first.conversation.id == made.id
            client.conversations.update(made.id, metadata={"topic": "lists"})
            added = client.conversations.items.create(made.id, items=[{"role": "user", "content": "One more."}])
            assert texts(added.data) == ["One more."]
        now.daemon.end(kill=True)
        now = running.enter_context(serving(short_path))
        with now.openai() as client:
            assert client.conversations.retrieve(made.id).metadata == {"topic": "lists"}
            counted = client.responses.input_tokens.count(model="demo", input="On.", conversation=made.id)
            second = client.responses.create(conversation=made.id, input="On.", stream=False, **options)
            assert second.usage is not None
            assert second.usage.input_tokens == counted.input_tokens
            assert second.usage.input_tokens_details.recomputed_tokens > first.usage.total_tokens  # type: ignore[union-attr]
            items = client.conversations.items.list(made.id, order="asc", limit=50).data
            cut = [first.output[-1], second.output[-1]]
            assert [each.status for each in cut] == ["incomplete"] * 2  # type: ignore[union-attr]
            assert [items[4].status, items[-1].status] == ["incomplete"] * 2  # type: ignore[union-attr]
            assert texts(items) == [
                *("You are terse.", "What is a set?", "A bag.", "And a list?", first.output_text),
                *("One more.", "On.", second.output_text),
            ]
            assert client.conversations.items.retrieve(items[1].id or "", conversation_id=made.id) == items[1]
            with pytest.raises(openai.BadRequestError, match="cannot be taken out"):
                client.conversations.items.delete(items[1].id or "", conversation_id=made.id)
            # A response in it can be gone on from like any other, in a fork.
            other = client.responses.create(previous_response_id=first.id, input="No.", **options)
            assert other.usage is not None
            shared = other.usage.input_tokens_details
            # A fork computes the token before it again.
            assert (shared.cached_tokens, shared.recomputed_tokens) == (first.usage.total_tokens - 1, 1)  # type: ignore[attr-defined]
            assert client.conversations.delete(made.id).deleted
            with pytest.raises(openai.NotFoundError):
                client.responses.create(conversation=made.id, input="On.", **options)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", NOBODY, None),
        ("POST", f"{NOBODY}/items", {"items": [{"role": "user", "content": "a"}]}),
        ("POST", "/v1/responses", {"input": "a", "conversation": NOBODY.removeprefix(f"{PATH}/")}),
        ("POST", "/v1/responses", {"input": "a", "conversation": {"id": "conv_x"}, "stream": True}),
    ],
)
def test_a_conversation_that_is_not_there_is_refused_in_words_about_conversations(
    server: HttpThread, method: str, path: str, body: Any
) -> None:
    async def measure(request: MeasureRequest) -> MeasureResult:
        raise SessionNotFound(f"There is no session {request.session}.", session=request.session)

    server.service.answers[MeasureRequest] = measure
    answer = server.ask(method, path, body)
    assert answer.status == 404
    assert "or had no messages when the daemon ended" in answer.json["error"]["message"]


def test_a_conversation_and_a_previous_response_exclude_each_other(server: HttpThread) -> None:
    asked = {"input": "a", "conversation": f"conv_{'0' * 32}", "previous_response_id": f"resp_{'0' * 32}"}
    answer = server.ask("POST", "/v1/responses", asked)
    assert (answer.status, answer.json["error"]["param"]) == (400, "previous_response_id")


def test_a_response_in_a_conversation_goes_on_at_its_end(server: HttpThread) -> None:
    made = server.ask("POST", PATH, {}).json
    for named in (made["id"], {"id": made["id"]}):
        asked = {"input": "a", "conversation": named, "instructions": "Be brief.", "prompt_cache_key": "other"}
        assert server.ask("POST", "/v1/responses", asked).json["conversation"] == {"id": made["id"]}
    for given in asked_for(server, "converse"):
        assert (given["session"], given["at_end"], given["instructions"]) == (made["id"], True, "Be brief.")


def test_what_has_no_effect_in_items_is_named(server: HttpThread) -> None:
    items = [
        {"type": "web_search_call", "id": "ws_1"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
        {"role": "user", "content": "a"},
    ]
    made = server.ask("POST", PATH, {"items": items, "foo": 1})
    ignored = "foo, items.web_search_call, items.input_image"
    assert made.headers["x-torpor-ignored"] == ignored
    update = server.ask("POST", f"{PATH}/{made.json['id']}", {"metadata": {}, "foo": 1})
    assert update.headers["x-torpor-ignored"] == "foo"
    assert "x-torpor-ignored" not in server.ask("POST", PATH, {}).headers


def test_items_come_back_as_what_they_were(server: HttpThread) -> None:
    call = ToolCall("look", {"path": "."}, "c1")
    said = [
        RecalledMessage("user", "q", start=0, end=4),
        RecalledMessage("assistant", "hm", reasoning="so", tool_calls=(call,), start=0, end=9, number=1),
        RecalledMessage("tool", "a file", tool_call_id="c1", start=9, end=12, number=2),
    ]

    async def recalled(request: RecallRequest) -> RecallResult:
        return RecallResult(request.session or "", "fake", tuple(said))

    async def appended(request: AppendRequest) -> AppendResult:
        said.append(RecalledMessage("assistant", "", tool_calls=(call, call), start=12, end=20, number=3))
        return AppendResult(request.session, 8, 20, 8, 0, 0.1)

    server.service.answers |= {RecallRequest: recalled, AppendRequest: appended}
    made = server.ask("POST", PATH, {}).json["id"]
    items = server.ask("GET", f"{PATH}/{made}/items?order=asc").json["data"]
    kinds = ["message", "reasoning", "message", "function_call", "function_call_output"]
    assert [each["type"] for each in items] == kinds
    assert (items[3]["call_id"], items[4]["call_id"], items[3]["arguments"]) == ("c1", "c1", '{"path":"."}')
    assert len({each["id"] for each in items}) == len(items)
    given = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    added = server.ask("POST", f"{PATH}/{made}/items", {"items": [given, given]}).json["data"]
    assert [each["type"] for each in added] == ["function_call"] * 2
    assert server.ask("GET", f"{PATH}/{made}/items?order=asc").json["data"] == [*items, *added]
    said[0] = replace(said[0], certain=False)
    assert server.ask("GET", f"{PATH}/{made}/items").status == 404


def test_an_answer_without_its_id_is_told_in_the_order_of_its_pieces_and_as_it_ended(server: HttpThread) -> None:
    """A response that was deleted loses its id alone."""
    call = ToolCall("look", {"path": "."}, "c1")
    pieces = (RecalledPiece("call", call=call), RecalledPiece("text", "and so"))
    answer = RecalledMessage("assistant", "and so", tool_calls=(call,), start=4, end=9, number=1, pieces=pieces)
    said = [RecalledMessage("user", "q", start=0, end=4), replace(answer, finished=False)]

    async def recalled(request: RecallRequest) -> RecallResult:
        return RecallResult(request.session or "", "fake", tuple(said))

    server.service.answers |= {RecallRequest: recalled}
    made = server.ask("POST", PATH, {}).json["id"]
    items = server.ask("GET", f"{PATH}/{made}/items?order=asc").json["data"]
    assert [(each["type"], each["status"]) for each in items[1:]] == [
        ("function_call", "completed"),
        ("message", "incomplete"),
    ]
    assert [each["id"] for each in items[1:]] == [f"{items[1]['id']}", f"{items[1]['id']}_1"]


def test_what_a_request_had_as_fields_is_no_item(server: HttpThread) -> None:
    """A client that hands on its items, and its instructions and tools with them, would give these twice."""
    opening = "Be brief.\n\n\nYou are terse."
    said = [
        RecalledMessage("system", opening, start=0, end=4, instructed=9),
        RecalledMessage("user", "q", start=0, end=4, number=1),
        RecalledMessage("assistant", "a", start=4, end=9, number=2),
        RecalledMessage("system", "You may call tools.", start=9, end=12, number=3, instructed=19),
        RecalledMessage("system", "Be kind.", start=9, end=12, number=4),
    ]

    async def recalled(request: RecallRequest) -> RecallResult:
        return RecallResult(request.session or "", "fake", tuple(said))

    server.service.answers |= {RecallRequest: recalled}
    made = server.ask("POST", PATH, {}).json["id"]
    items = server.ask("GET", f"{PATH}/{made}/items?order=asc").json["data"]
    assert [each["content"][0]["text"] for each in items] == ["\nYou are terse.", "q", "a", "Be kind."]
    assert items[-1]["id"].endswith("_4"), "the others keep their places"


def test_a_reference_among_the_items_of_a_conversation_stands_for_its_item(server: HttpThread) -> None:
    answer_id = "0" * 31 + "1"
    answer = RecalledMessage(
        "assistant", "hi", answer_id=answer_id, pieces=(RecalledPiece("text", "hi"),), start=4, end=9
    )
    appended = []

    async def recalled(request: RecallRequest) -> RecallResult:
        return RecallResult("a", "fake", (answer,))

    async def append(request: AppendRequest) -> AppendResult:
        appended.append([(each["role"], each["content"]) for each in request.messages or ()])
        return AppendResult(request.session, 5, 9, 5, 0, 0.1)

    server.service.answers |= {RecallRequest: recalled, AppendRequest: append}
    user = {"role": "user", "content": "a"}
    items = [user, {"type": "item_reference", "id": f"msg_{answer_id}_0"}, user]
    made = server.ask("POST", PATH, {"items": items}).json["id"]
    assert server.ask("POST", f"{PATH}/{made}/items", {"items": items}).status == 200
    assert appended == [[("user", "a"), ("assistant", "hi"), ("user", "a")]] * 2
    unknown = {"items": [{"type": "item_reference", "id": f"msg_{answer_id}_7"}]}
    for path in (PATH, f"{PATH}/{made}/items"):
        error = server.ask("POST", path, unknown).json["error"]
        assert (error["code"], error["param"]) == ("previous_response_not_found", "items.0.id")


def test_an_empty_answer_that_is_added_is_told_as_no_item(server: HttpThread) -> None:
    said = [RecalledMessage("user", "q", start=0, end=4)]

    async def recalled(request: RecallRequest) -> RecallResult:
        return RecallResult(request.session or "", "fake", tuple(said))

    async def appended(request: AppendRequest) -> AppendResult:
        said.append(RecalledMessage("assistant", "", start=4, end=9))
        return AppendResult(request.session, 5, 9, 5, 0, 0.1)

    server.service.answers |= {RecallRequest: recalled, AppendRequest: appended}
    made = server.ask("POST", PATH, {}).json["id"]
    nothing = server.ask("POST", f"{PATH}/{made}/items", {"items": [{"role": "assistant", "content": ""}]}).json
    assert (nothing["data"], nothing["first_id"]) == ([], None)


def test_an_empty_system_text_opens_a_conversation_with_nothing(server: HttpThread) -> None:
    opened = []

    async def created(request: CreateRequest) -> Any:
        opened.append(request.system)
        raise SessionNotFound("Enough is known.", session="a")

    server.service.answers |= {CreateRequest: created}
    for text in ("", "Be kind."):
        server.ask("POST", PATH, {"items": [{"role": "system", "content": text}]})
    assert opened == [None, "Be kind."]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", NOBODY, None, 404),
        ("GET", f"{PATH}/conv_x", None, 404),
        ("DELETE", f"{PATH}/chat", None, 404),
        ("POST", NOBODY, {"metadata": {}}, 404),
        ("POST", NOBODY, {}, 400),
        ("POST", f"{NOBODY}/items", {"items": []}, 400),
        ("POST", f"{NOBODY}/items", {"items": [{"role": "user", "content": "a"}]}, 404),
        ("DELETE", f"{NOBODY}/items/in_1", None, 400),
        ("POST", PATH, {"metadata": {"a": "x" * 255}}, 400),
        ("POST", PATH, {"metadata": {"a=b": "x"}}, 400),
        ("POST", PATH, {"metadata": {str(at): "x" for at in range(17)}}, 400),
        ("POST", PATH, {"items": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400),
        ("POST", "/v1/responses", {"input": "a", "conversation": "chat"}, 404),
    ],
)
def test_what_is_wrong_is_refused(server: HttpThread, method: str, path: str, body: Any, status: int) -> None:
    assert server.ask(method, path, body).status == status
