"""The stream of events over HTTP: each reader is told what is for it, and goes on where it was."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torpor.daemon.events.bus import MAX_SUBSCRIBERS, Wanted
from torpor.daemon.events.events import Event, FirstToken, MemoryAwaited, ModelLoaded, PrefixHit, SessionDeleted
from torpor.memvid.uri import SessionUri
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread

A = SessionUri("default", "a")
B = SessionUri("lab", "b")


def publish(server: HttpThread, *events: Event) -> None:
    server.do(lambda: [server.service.bus.publish(event) for event in events] and None)


class Reading:
    """A client's end of the stream."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status, self.kind, self._answer = answer.status, answer.getheader("content-type"), answer

    def next(self) -> tuple[str, dict[str, Any]]:
        """The id and the data of the next event."""
        lines: list[str] = []
        while (line := self._answer.readline().decode().rstrip("\n")) or not lines:
            lines.append(line)
        fields = dict(each.split(": ", 1) for each in lines)
        return fields.get("id", ""), json.loads(fields["data"]) if "data" in fields else {}

    def rest(self) -> bytes:
        return self._answer.read()


@contextmanager
def reading(server: HttpThread, query: str = "", *, on_port: bool = False, **headers: str) -> Iterator[Reading]:
    connection = server.on_port() if on_port else server.on_unix()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET", f"/v1/events{query}", headers=named)
    answer = connection.getresponse()
    try:
        yield Reading(answer)
    finally:
        answer.close()
        connection.close()


def test_events_come_as_they_happen_with_all_that_the_socket_tells(server: HttpThread) -> None:
    with reading(server) as stream:
        assert (stream.status, stream.kind) == (200, "text/event-stream; charset=utf-8")
        assert stream.next()[1]["name"] == "subscribed"
        publish(server, FirstToken(A, 0.5))
        place, told = stream.next()
    assert (told["kind"], told["name"], told["session"], told["facts"]) == (
        *("notice", "first_token", str(A)),
        {"seconds": 0.5},
    )
    assert place.endswith(f"-{told['number']}")


def test_a_lost_connection_goes_on_behind_the_last_event(server: HttpThread) -> None:
    with reading(server, "?names=first_token") as stream:
        publish(server, FirstToken(A, 1.0))
        stream.next()
        publish(server, SessionDeleted(A, 1, 10))
        place, live = stream.next()
        assert place.endswith(f"-{live['number']}")
    publish(server, FirstToken(A, 2.0), SessionDeleted(A, 1, 10), FirstToken(A, 3.0))
    with reading(server, "?names=first_token&names=lost", Last_Event_ID=place) as stream:
        ids, told = zip(*(stream.next() for _ in range(3)), strict=True)
    run = place.split("-")[0]
    assert ids == ("", f"{run}-{told[1]['number']}", f"{run}-{told[2]['number']}")
    assert [each["name"] for each in told] == ["subscribed", "first_token", "first_token"]
    assert [each["facts"].get("seconds") for each in told] == [None, 2.0, 3.0]
    with reading(server, Last_Event_ID="00000000-7") as stream:
        assert stream.next()[1]["facts"] == {"count": None}, "of another daemon: it is told that some are missing"


def test_a_client_of_one_namespace_is_told_of_its_own_sessions_alone(server: HttpThread) -> None:
    with open(server.tokens_path, "a", encoding="utf-8") as file:
        file.write("lab lab-token-0123456789abcdefghij\n")
    theirs = {"Authorization": "Bearer lab-token-0123456789abcdefghij"}
    with reading(server, on_port=True, **theirs) as stream:
        stream.next()
        publish(server, FirstToken(A, 1.0), ModelLoaded(None, "m", 5, 0.5), PrefixHit(B, A, 9, 8, True, 0.5))
        publish(server, PrefixHit(B, B, 9, 8, True, 0.5), SessionDeleted(B, 3, 4096))
        publish(server, MemoryAwaited(B, 10, 20, 3))
        told = [stream.next()[1] for _ in range(4)]
    assert {each["session"] for each in told} == {str(B)}
    assert not {"number", "request"} & {name for each in told for name in each}, "they count what all do"
    assert [each["facts"].get("source") for each in told] == [None, str(B), None, None]
    assert told[2]["facts"] == {"versions": 3}, "the bytes are of blocks that others may have, too"
    assert told[3]["facts"] == {"wanted_bytes": 10}, "the rest is of all who share the memory"
    with reading(server, "?session=default%2Fa", on_port=True, **theirs) as stream:
        assert stream.status == 403
    with reading(server, on_port=True) as stream:
        assert stream.status == 401


@pytest.mark.parametrize(
    ("query", "status"), [("?names=nothing_like_it", 400), ("?names=", 400), ("?since=now", 400), ("?session=%00", 400)]
)
def test_what_cannot_be_told_is_refused_before_the_stream(server: HttpThread, query: str, status: int) -> None:
    with reading(server, query) as stream:
        assert (stream.status, stream.kind) == (status, "application/json")


def test_a_silent_stream_tells_that_it_is_there_and_its_place(begin: Begin) -> None:
    server = begin(silence_s=0.05)
    with reading(server, "?names=lost") as stream:
        first, _ = stream.next()
        assert stream.next() == (first, {})
        publish(server, FirstToken(A, 1.0))
        while (place := stream.next()[0]) == first:
            pass
        assert place == first.replace("-0", "-1"), "what is not for it, it need not ask for again"


def test_nothing_is_left_of_a_reader_that_has_gone_and_there_is_a_bound(server: HttpThread) -> None:
    server.do(server.service.bus._subscriptions.clear)
    with reading(server) as stream:
        stream.next()
        assert server.do(lambda: len(server.service.bus._subscriptions)) == 1
        assert server.server.works == 0, "a stop does not wait for it"
    server.wait_until(lambda: not server.service.bus._subscriptions)
    assert server.ask("HEAD", "/v1/events").status == 200
    server.wait_until(lambda: not server.service.bus._subscriptions)
    many = [server.do(lambda: server.service.bus.resume(Wanted(), None)) for _ in range(MAX_SUBSCRIBERS)]
    with reading(server) as stream:
        assert stream.status == 429
    server.do(lambda: [each.end() for each in many] and None)


def test_the_stream_ends_whole_when_the_daemon_has_stopped(begin: Begin) -> None:
    server = begin()
    with reading(server) as stream:
        stream.next()
        server.do(lambda: server.service.bus.publish(SessionDeleted(A, 1, 10)))
        server.do(server.service.bus.close)
        assert stream.next()[1]["name"] == "session_deleted"
        assert stream.rest() == b""
