"""The daemon's events over the wire: told as they happen, beside other requests, and ended cleanly by either side."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from torpor.daemon.api.events import NoticeEvent
from torpor.daemon.events.events import Event, FirstToken, PrefillProgress, SleepEnded
from torpor.memvid.uri import SessionUri
from torpor.socket_api.client import reaching
from torpor.socket_api.client.aclient import AsyncClient
from torpor.socket_api.client.client import Client
from torpor.socket_api.errors import InvalidRequest, LocalProtocolError, RemoteError
from torpor.socket_api.wire.messages import EventMessage
from torpor.tests.socket_api.both_clients import both, connected
from torpor.tests.socket_api.server_rig import Running, ServerThread, poll

A = SessionUri("default", "a")
SLEPT = SleepEnded(A, "idle", 2, 30, 4096, 8192, 1, 0, 0.25)


@pytest.fixture
def client(server_thread: ServerThread) -> Iterator[Client]:
    with Client(server_thread.socket_path) as connected:
        yield connected


def publish(server: ServerThread, *events: Event) -> None:
    server.do(lambda: [server.service.bus.publish(event) for event in events] and None)


def test_events_come_with_all_that_the_daemon_tells(client: Client, server_thread: ServerThread) -> None:
    with client.events() as events:
        assert events.first is not None
        assert events.first.name == "subscribed"
        publish(server_thread, SLEPT, FirstToken(None, 0.5))
        slept, first = next(events), next(events)
    assert (slept.name, slept.number, slept.session, slept.request) == ("sleep_ended", 1, str(A), None)
    assert slept.facts == SLEPT.facts()
    assert slept.time_ns > 0
    assert (first.name, first.session, first.facts) == ("first_token", None, {"seconds": 0.5})


def test_a_client_is_told_what_it_asked_for(client: Client, server_thread: ServerThread) -> None:
    client.events(["sleep_ended"], session="a", namespace="lab").close()
    client.events("sleep_ended").close()
    assert [arguments for method, arguments in server_thread.service.calls if method == "subscribe"] == [
        {"names": ("sleep_ended",), "session": "a", "namespace": "lab"},
        {"names": ("sleep_ended",)},
    ]
    with pytest.raises(RemoteError) as caught:
        client.events(["nothing_like_it"])
    assert caught.value.code == "unknown_event"
    for wrong in ({"names": []}, {"names": [""]}, {"session": ""}, {"names": ["x" * 65]}):
        with pytest.raises(InvalidRequest):
            client.events(**wrong)  # type: ignore[arg-type]


def test_other_requests_go_on_between_events(client: Client, server_thread: ServerThread) -> None:
    with client.events() as events:
        client.create("s")
        publish(server_thread, SLEPT)
        with client.stream_generate("s", max_tokens=3, text="one two") as pieces:
            assert len(list(pieces)) == 3
        assert client.status().sessions_awake == 1
        assert next(events).name == "sleep_ended"
        seen: list[Any] = []
        client.sleep("s", on_event=seen.append)
        assert all(event.kind == "progress" for event in seen), "a notice is none of the events of a request"


@both
def test_a_client_keeps_few_events_that_nobody_takes_and_tells_of_the_others(
    server_thread: ServerThread, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaching, "MAX_WAITING_NOTICES", 5)
    with connected(server_thread.socket_path, kind) as client, client.events() as events:
        publish(server_thread, *[FirstToken(None, 0.5)] * 20)
        publish(server_thread, SLEPT)
        waiting = client._link._inboxes[events._id]
        while not ended(waiting):
            client.status()  # which reads whatever comes
        told = [next(events) for _ in range(6)]
    assert [each.name for each in told] == ["lost", *["first_token"] * 4, "sleep_ended"]
    assert told[0].facts == {"count": 16}


def ended(waiting: reaching.Inbox) -> bool:
    """Whether the event that was published last has come."""
    last = waiting._messages[-1] if waiting else None
    return isinstance(last, EventMessage) and isinstance(last.event, NoticeEvent) and last.event.name == "sleep_ended"


@pytest.mark.parametrize("how", ["close", "client", "dropped", "socket"])
def test_a_subscription_that_is_given_up_leaves_nothing_behind(server_thread: ServerThread, how: str) -> None:
    client = Client(server_thread.socket_path)
    events = client.events()
    assert server_thread.do(lambda: server_thread.service.bus.is_watched)
    if how == "close":
        events.close()
        with pytest.raises(StopIteration):
            next(events)
        assert client.status().version
    elif how == "dropped":
        del events
        assert client.status().version
    elif how == "socket":
        client._link._transport._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
    else:
        client.close()
    server_thread.wait_until(lambda: not server_thread.service.bus.is_watched)
    client.close()
    server_thread.wait_until(lambda: server_thread.server.connections == 0)


def test_a_subscription_ends_with_a_result_when_the_service_has_ended(
    client: Client, server_thread: ServerThread
) -> None:
    events = client.events()
    with pytest.raises(LocalProtocolError):
        _ = events.result
    publish(server_thread, SLEPT)
    server_thread.do(server_thread.service.bus.close)
    assert [event.name for event in events] == ["sleep_ended"]
    assert (events.result.delivered, events.result.lost) == (2, 0)


def test_a_stop_waits_for_no_subscription_and_tells_it_to_the_last(server_thread: ServerThread) -> None:
    with Client(server_thread.socket_path) as client:
        events = client.events()
        server_thread.do(server_thread.server.quiesce)
        publish(server_thread, SLEPT)
        server_thread.do(server_thread.service.bus.close)
        server_thread.do(server_thread.server.stop)
        assert [event.name for event in events] == ["sleep_ended"]
        assert events.result.delivered == 2


def test_a_server_that_ends_without_its_service_ends_subscriptions_too(server_thread: ServerThread) -> None:
    with Client(server_thread.socket_path) as client:
        events = client.events()
        server_thread.do(server_thread.server.stop)
        with pytest.raises(RemoteError) as caught:
            next(events)
        assert caught.value.code == "shutting_down"


def test_a_stop_that_is_refused_ends_no_subscription(client: Client, server_thread: ServerThread) -> None:
    events = client.events()
    server_thread.service.fail_sleep["s"] = "no room"
    with Client(server_thread.socket_path) as other, pytest.raises(RemoteError) as caught:
        other.shutdown()
    assert caught.value.code == "stop_refused"
    publish(server_thread, SLEPT)
    assert next(events).name == "sleep_ended"


def test_silence_is_no_fault_of_a_daemon_that_has_nothing_to_tell(server_thread: ServerThread) -> None:
    with Client(server_thread.socket_path, timeout_s=0.05) as client:
        events = client.events()
        loop = server_thread._loop
        loop.call_soon_threadsafe(loop.call_later, 0.3, server_thread.service.bus.publish, SLEPT)
        assert next(events).name == "sleep_ended"


@pytest.mark.parametrize(
    "server_thread", [{"max_waiting_notice_bytes": 2048, "max_waiting_event_bytes": 8192}], indirect=True
)
def test_a_client_that_reads_slowly_is_told_how_many_it_lost_and_is_not_dropped(
    client: Client, server_thread: ServerThread
) -> None:
    async def flood() -> None:
        """As many as no socket's buffer takes, with time for the connection between them."""
        for number in range(20_000):
            server_thread.service.bus.publish(PrefillProgress(A, number, 20_000))
            if number % 4 == 0:
                await asyncio.sleep(0)

    with client.events() as events:
        server_thread.do(flood)
        got = told = 0
        while got + told < 20_000:
            event = next(events)
            told += int(event.facts["count"] or 0) if event.name == "lost" else 0
            got += event.name == "prefill_progress"
    assert got + told == 20_000
    assert told > 0


async def test_the_asynchronous_client_is_told_too(state: Running) -> None:
    bus = state.service.bus
    async with AsyncClient(state.path) as client:
        async with client.events(["sleep_ended", "lost"]) as events:
            assert events.first is not None
            bus.publish(FirstToken(A, 0.1))
            bus.publish(SLEPT)
            assert (await anext(events)).facts == SLEPT.facts()
            assert (await client.status()).version
        await poll(lambda: not bus.is_watched)
        with pytest.raises(StopAsyncIteration):
            await anext(events)

        iterated = client.events()
        waiting = asyncio.ensure_future(anext(iterated))
        await poll(lambda: bus.is_watched)
        bus.publish(SLEPT)
        assert (await waiting).name == "sleep_ended"
        waiting = asyncio.ensure_future(anext(iterated))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        bus.publish(SLEPT)
        assert (await anext(iterated)).number == 4, "a wait that was cancelled loses nothing"
        bus.close()
        assert [event async for event in iterated] == []
        assert iterated.result.delivered == 3

        dropped = client.events()
        await dropped.close()
        assert [event async for event in dropped] == []
