"""A long request tells how far it is, to a client that accepts server-sent events, and its answer at the end."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from torpor.daemon.api.events import ProgressEvent
from torpor.daemon.api.store import AnalyzeRequest
from torpor.daemon.errors import ServiceClosed
from torpor.tests.socket_api.http.http_rig import Answer, Begin, HttpThread, asked

PATH = "/v1/sessions/a/analysis"
STREAM = "text/event-stream"


@pytest.fixture
def asleep(server: HttpThread) -> HttpThread:
    server.ask("POST", "/v1/sessions", {"session": "a"})
    server.ask("POST", "/v1/sessions/a/sleep")
    return server


def events_of(answer: Answer) -> list[Any]:
    parts = answer.body.decode().split("\n\n")
    assert parts.pop() == ""
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_it_is_told_how_far_it_is_and_then_the_answer(asleep: HttpThread) -> None:
    whole = asleep.ask("GET", PATH)
    assert (whole.status, whole.json["session"]) == (200, "torpor://default/a")
    told = asleep.ask("GET", PATH, accept=STREAM)
    assert told.headers["content-type"].startswith(STREAM)
    assert events_of(told)[-1] == {"result": whole.json}
    assert events_of(told)[:-1] in (
        [],
        [{"stage": "analyze", "done": 1, "total": 1, "machine": None, "kind": "progress"}],
    )


def test_a_refusal_before_the_first_word_has_its_status(asleep: HttpThread) -> None:
    refused = asleep.ask("GET", "/v1/sessions/nobody/analysis", accept=STREAM)
    assert (refused.status, refused.json["error"]["code"]) == (404, "session_not_found")


def test_progress_comes_while_the_work_goes_on_and_a_failure_is_the_last_event(asleep: HttpThread) -> None:
    service = asleep.service
    asleep.do(service.open_gate.clear)

    async def fail(request: AnalyzeRequest) -> Any:
        request.emit(ProgressEvent("analyze", 1, 2))
        await service.open_gate.wait()
        raise ServiceClosed("The daemon stops.")

    service.answers[AnalyzeRequest] = fail
    connection = asleep.on_unix()
    connection.request("GET", PATH, headers={"accept": STREAM})
    answer = connection.getresponse()
    assert json.loads(answer.readline().removeprefix(b"data: ")) == {
        "stage": "analyze",
        "done": 1,
        "total": 2,
        "machine": None,
        "kind": "progress",
    }
    asleep.do(service.release)
    told = json.loads(answer.read().strip().removeprefix(b"data: "))
    assert (told.keys(), told["error"]["code"]) == ({"error"}, "service_closed")
    connection.close()


def test_a_client_that_leaves_ends_the_work(asleep: HttpThread) -> None:
    service, ended = asleep.service, threading.Event()
    asleep.do(service.open_gate.clear)

    async def wait(request: AnalyzeRequest) -> Any:
        request.emit(ProgressEvent("analyze", 1, 2))
        try:
            await service.open_gate.wait()
        finally:
            ended.set()

    service.answers[AnalyzeRequest] = wait
    connection = asleep.on_unix()
    connection.request("GET", PATH, headers={"accept": STREAM})
    connection.getresponse().readline()
    connection.close()
    assert ended.wait(20)
    asleep.wait_until(lambda: asleep.server.works == 0)


def test_others_than_the_owner_are_told_of_no_analysis(begin: Begin) -> None:
    """It names the parent, which may be another namespace's."""
    server = begin()
    server.tokens_path.write_text("team a-token-of-some-length\n")
    connection = server.on_port()
    refused = asked(connection, "GET", "/v1/sessions/team%2Fa/analysis", x_api_key="a-token-of-some-length")
    connection.close()
    assert refused.status == 403
