"""OpenAI's chat over HTTP, around a service without a model."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from torpor.daemon.api.conversing import ConverseRequest, MeasureRequest, MeasureResult
from torpor.daemon.api.events import ProgressEvent, SessionEvent
from torpor.daemon.api.reading import GenerateResult
from torpor.daemon.errors import ContextOverflow, EngineBusy
from torpor.tests.socket_api.http.answers import (
    asked_for,
    chats,
    result,
    says,
)
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread

PATH = "/v1/chat/completions"
HELLO = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]}


def test_tokens_that_were_computed_again_are_no_cache_and_are_told_and_counted(server: HttpThread) -> None:
    def counts() -> list[float]:
        lines = dict(line.rsplit(" ", 1) for line in server.ask("GET", "/metrics").body.decode().splitlines())
        kinds = ("reused", "read", "recomputed", "written")
        return [float(lines.get(f'torpor_http_tokens_total{{kind="{kind}",model="fake"}}', 0)) for kind in kinds]

    says(server, recomputed_tokens=5)
    before = counts()
    details = server.ask("POST", PATH, HELLO).json["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": 2, "cache_write_tokens": 8, "recomputed_tokens": 5}
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [2, 8, 5, 2]


NO = "I cannot help with that."
LINE = "[audio left out: this model reads text alone]"
OLD_CALL = {"name": "f", "arguments": '{"a": 1}'}
A_CALL = {"name": "f", "arguments": {"a": 1}, "id": ""}


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"refusal": NO}, {"content": NO}),
        ({"content": [{"type": "refusal", "refusal": NO}]}, {"content": NO}),
        ({"content": "Well.", "refusal": NO, "audio": None, "function_call": None}, {"content": f"Well.\n{NO}"}),
        ({"refusal": None, "content": "Well."}, {"content": "Well."}),
        ({"audio": {"id": "audio_1"}}, {"content": LINE}),
        ({"audio": {"id": "audio_1", "data": "UklGRg==", "transcript": "Hello."}}, {"content": "Hello."}),
        ({"audio": {"id": "audio_1"}, "content": "Hello."}, {"content": "Hello."}),
        ({"function_call": OLD_CALL}, {"content": "", "tool_calls": [A_CALL]}),
        (
            {"function_call": OLD_CALL, "tool_calls": [{"id": "c", "type": "function", "function": OLD_CALL}]},
            {"content": "", "tool_calls": [{**A_CALL, "id": "c"}]},
        ),
        (
            {"function_call": {"name": "f", "arguments": ""}},
            {"content": "", "tool_calls": [{**A_CALL, "arguments": {}}]},
        ),
    ],
)
def test_an_answer_is_read_in_each_form_that_it_has_had(
    server: HttpThread, given: dict[str, Any], read: dict[str, Any]
) -> None:
    answer = {"role": "assistant", "content": None, **given}
    result = {"role": "function", "name": "f", "content": "3"}
    told = server.ask("POST", PATH, {**HELLO, "messages": [*HELLO["messages"], answer, result]})
    assert told.status == 200
    assert told.headers.get("x-torpor-ignored") == ("content.audio" if read["content"] == LINE else None)
    *_, asked = asked_for(server, "converse")
    _, found, behind = asked["messages"]
    assert found == {"role": "assistant", **read}
    assert behind == {"role": "tool", "content": "3"}


def test_the_header_of_an_older_codex_has_an_underscore(server: HttpThread) -> None:
    connection = server.on_unix()
    connection.request("POST", PATH, json.dumps(HELLO), {"session_id": "0199-ab"})
    assert connection.getresponse().status == 200
    connection.close()
    (given,) = asked_for(server, "converse")
    assert given["session"] == "0199-ab"


def test_ids_that_are_no_names_become_different_ones(server: HttpThread) -> None:
    """QX10."""
    long = "x" * 200
    for each in ("a/b", "a b", "--", "é", long + "1", long + "2"):
        answer = server.ask("POST", PATH, {**HELLO, "prompt_cache_key": each})
        assert answer.status == 200
    names = [given["session"] for given in asked_for(server, "converse")]
    assert len(set(names)) == 6


def test_a_stream_whose_session_is_not_chosen_yet_begins_by_the_clock_and_names_none(begin: Begin) -> None:
    """A name that was only wanted would be another conversation's."""
    server = begin(first_event_s=0.01, silence_s=0.1)
    is_waiting = asyncio.Event()

    async def chat(request: ConverseRequest) -> GenerateResult:
        await is_waiting.wait()
        request.emit(SessionEvent(request.session))
        return result(request.session)

    chats(server, chat)
    connection = server.on_unix()
    connection.request("POST", PATH, json.dumps({**HELLO, "stream": True}))
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.getheader("x-torpor-session") is None
    server.do(is_waiting.set)
    assert answer.read().endswith(b"data: [DONE]\n\n")
    connection.close()


def test_a_wake_begins_no_stream_for_the_turn_may_still_not_fit(server: HttpThread) -> None:
    overflow = ContextOverflow("No.", token_count=50, wanted_tokens=70, context_tokens=100)
    says(server, ProgressEvent("wake", 1, 1), fails=overflow)
    assert server.ask("POST", PATH, {**HELLO, "stream": True}).status == 400


def test_a_stream_begins_once_its_request_fits_before_anything_is_read(begin: Begin) -> None:
    server = begin(first_event_s=0.01, silence_s=1000)
    server.do(server.service.hold)
    connection = server.on_unix()
    connection.request("POST", PATH, json.dumps({**HELLO, "stream": True, "max_tokens": 1}))
    answer = connection.getresponse()
    assert json.loads(answer.readline()[6:])["choices"][0]["delta"]["role"] == "assistant"
    server.do(server.service.release)
    assert answer.read().endswith(b"data: [DONE]\n\n")
    connection.close()


def test_a_stream_whose_request_is_not_measured_yet_may_still_be_refused(begin: Begin) -> None:
    server = begin(first_event_s=0.01, silence_s=1000)

    async def measure(_request: MeasureRequest) -> MeasureResult:
        await asyncio.sleep(0.1)
        raise EngineBusy("Too many wait.")

    server.service.answers[MeasureRequest] = measure
    refused = server.ask("POST", PATH, {**HELLO, "stream": True})
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")


def held_stream(server: HttpThread) -> Any:
    """A stream that has begun, and whose next token does not come. Gives its connection and the answer."""
    connection = server.on_unix()
    connection.request("POST", PATH, json.dumps({**HELLO, "stream": True, "max_tokens": 1_000_000}))
    answer = connection.getresponse()
    assert b"assistant" in answer.readline()
    server.do(server.service.hold)
    return connection, answer


def test_a_client_that_leaves_in_the_middle_cancels_its_answer(server: HttpThread) -> None:
    """Threat 45, QX16."""
    connection, answer = held_stream(server)
    assert server.service.running == 1
    answer.close()
    connection.close()
    server.wait_until(lambda: server.service.running == 0)
    assert server.service.cancelled == 1
    assert server.server.works == 0


def test_a_client_that_leaves_before_the_answer_cancels_it(server: HttpThread) -> None:
    server.do(server.service.hold)
    connection = server.on_unix()
    connection.request("POST", PATH, json.dumps(HELLO))
    server.wait_until(lambda: server.service.running == 1)
    connection.close()
    server.wait_until(lambda: server.server.works == 0)
    assert server.service.cancelled == 1


def test_a_stop_ends_a_stream_with_an_error_event(begin: Begin) -> None:
    server = begin()
    connection, answer = held_stream(server)
    server.do(server.server.quiesce)
    last = answer.read().decode().rstrip().rpartition("data: ")[2]
    assert json.loads(last)["error"]["code"] == "shutting_down"
    connection.close()


@pytest.mark.parametrize("limits", [{"stall_timeout_s": 0.05}, {"max_waiting_event_bytes": 1}])
def test_a_client_that_does_not_read_is_dropped_and_its_answer_cancelled_threat_44(
    begin: Begin, limits: dict[str, Any]
) -> None:
    """Threat 44."""
    server = begin(**limits)
    server.service.piece = "x" * 100_000
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with client:
        client.connect(str(server.socket_path))
        body = json.dumps({**HELLO, "stream": True, "max_tokens": 1_000_000}).encode()
        client.sendall(b"POST %s HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (PATH.encode(), len(body)) + body)
        server.wait_until(lambda: server.service.cancelled == 1)
        server.wait_until(lambda: server.server.works == 0)
