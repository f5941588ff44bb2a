"""Clients that find the daemon crowded: they wait at the door, and go on after their place was needed."""

from __future__ import annotations

import asyncio
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from torpor.socket_api import AsyncClient, Client
from torpor.socket_api.client.reaching import MOST_REPEATS
from torpor.socket_api.errors import ApiError, DaemonBusy, DaemonUnreachable, TooFewDescriptors
from torpor.socket_api.limits import ServerLimits
from torpor.socket_api.server.descriptors import BESIDE_CONNECTIONS, FEWEST, limits_within, raise_limit
from torpor.tests.load.crowd import CALLS, crowd
from torpor.tests.socket_api.both_clients import both, connected
from torpor.tests.socket_api.server_rig import (
    EVICTION,
    HELLO,
    Last,
    Running,
    ServerThread,
    answer,
    frame,
    refusal,
    scripted,
    serving,
)

one_place = pytest.mark.parametrize("server_thread", [{"max_connections": 1, "reserved_connections": 1}], indirect=True)


@pytest.fixture
def short_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.socket_api.wire.listener._BACKLOG", 1)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.socket_api.client.reaching._LONGEST_PAUSE_S", 0.001)


def pid_of(path: Path) -> int:
    with Client(path) as client:
        return client.status().pid


@pytest.mark.one_in(1)
@pytest.mark.usefixtures("short_backlog")
def test_who_finds_the_door_crowded_tries_again_until_it_is_let_in(server_thread: ServerThread) -> None:
    path = server_thread.socket_path
    with ThreadPoolExecutor(24) as clients:
        assert len(set(clients.map(pid_of, [path] * 96))) == 1
    figures = asyncio.run(crowd(path, 150, stay=False))
    assert (figures.served, figures.failed) == (150, {})
    assert figures.again > 0, "nobody found the door crowded"


@pytest.mark.one_in(1)
async def test_a_crowd_that_stays_is_served_again_and_again(state: Running) -> None:
    """`tests/load/crowd.py` does it with a thousand."""
    figures = await crowd(state.path, 150, stay=True)
    assert (figures.served, figures.failed) == (150 * CALLS, {})


@pytest.mark.one_in(1)
@serving(max_connections=4, reserved_connections=2)
async def test_clients_that_stay_are_served_again_though_others_needed_their_places(state: Running) -> None:
    """There are fewer places than clients, and each of them is idle between two calls."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(state.path)) for _ in range(12)]
        for _ in range(3):
            for client in clients:
                assert (await client.status()).pid == clients[0].hello.pid
        assert state.server.connections <= 6


@one_place
def test_a_client_whose_place_was_needed_goes_on_with_its_next_call(server_thread: ServerThread) -> None:
    with Client(server_thread.socket_path) as one, Client(server_thread.socket_path) as other:
        for _ in range(3):
            assert one.status().pid == other.status().pid
        one.create("s")
        assert other.append("s", text="a b c").tokens_added == 3
        assert list(one.stream_generate("s", max_tokens=2)) == ["t3 ", "t4 "]


@one_place
def test_a_client_whose_place_was_needed_while_its_loop_stood_still_goes_on(server_thread: ServerThread) -> None:
    """It has not read that it was evicted when it writes."""

    async def use() -> int:
        async with AsyncClient(server_thread.socket_path) as one:
            with Client(server_thread.socket_path) as other:
                other.create("s")
                server_thread.wait_until(lambda: server_thread.server.connections == 1)
            return len(await one.list_sessions())

    assert asyncio.run(use()) == 1


async def test_what_comes_when_a_connection_is_being_evicted_is_not_begun(state: Running) -> None:
    client = await state.connect()
    (served,) = state.server._served
    client.ask(1, "create", session="s")
    while not served._reader._buffer:  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    served.evict()
    assert await client.error_code_then_end() == "connection_evicted"
    assert state.service.calls == []


@one_place
@both
def test_what_is_refused_on_a_connection_in_reserve_is_asked_again_until_a_place_is_free(
    server_thread: ServerThread, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused before it was begun, so asking again is safe."""
    refused = []

    def refuse(message: str, **facts: object) -> DaemonBusy:
        refused.append(message)
        return DaemonBusy(message, **facts)

    monkeypatch.setattr("torpor.socket_api.server.served.DaemonBusy", refuse)
    service = server_thread.service
    with Client(server_thread.socket_path) as worker, ThreadPoolExecutor(1) as asking:
        worker.create("s")
        server_thread.do(service.hold)
        with worker.stream_generate("s", max_tokens=1):
            server_thread.wait_until(lambda: service.running == 1)
            asked = asking.submit(ask, server_thread.socket_path, kind)
            server_thread.wait_until(lambda: len(refused) > 1)
            server_thread.do(service.release)
        worker.close()
        assert [each.session for each in asked.result(timeout=20)] == ["torpor://default/s"]


def evict(_asked: list[dict[str, Any]]) -> bytes:
    return EVICTION


def answer_last(asked: list[dict[str, Any]]) -> bytes:
    return Last(answer(asked[-1]["id"], sessions=()))


@both
def test_a_request_that_crossed_an_eviction_is_sent_again_for_nothing_of_it_was_begun(
    short_path: Path, kind: str
) -> None:
    with scripted(short_path / "e.sock", evict, evict, evict, answer_last) as asked:
        assert list(ask(short_path / "e.sock", kind)) == []
    assert [each["method"] for each in asked] == ["list"] * 4
    assert len({each["id"] for each in asked}) == 1


@pytest.mark.usefixtures("short_pauses")
@both
def test_a_client_that_is_evicted_over_and_over_gives_up(short_path: Path, kind: str) -> None:
    with scripted(short_path / "e.sock", *[evict] * (MOST_REPEATS + 1)) as asked, pytest.raises(ApiError) as caught:
        ask(short_path / "e.sock", kind)
    assert caught.value.code in ("connection_lost", "connection_evicted")
    assert len(asked) == MOST_REPEATS + 1


@pytest.mark.usefixtures("short_pauses")
@both
def test_a_client_that_is_only_ever_given_a_connection_in_reserve_gives_up_and_says_why(
    short_path: Path, kind: str
) -> None:
    def refuse(asked: list[dict[str, Any]]) -> bytes:
        return refusal(asked[-1]["id"], "daemon_busy")

    with scripted(short_path / "r.sock", refuse) as asked, pytest.raises(ApiError) as caught:
        ask(short_path / "r.sock", kind)
    assert caught.value.code == "daemon_busy"
    assert len(asked) == MOST_REPEATS + 1


def test_a_request_that_failed_with_the_renewal_is_never_sent_later(short_path: Path) -> None:
    """Its caller was told that it failed, and may have asked again: a text must not be read twice."""
    path = short_path / "e.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        with ThreadPoolExecutor(1) as greeting:
            greeted = greeting.submit(greet, listener)
            client = Client(path)
            with greeted.result() as connected:
                connected.sendall(EVICTION)
    path.unlink()
    with client:
        with pytest.raises(DaemonUnreachable):
            client.list_sessions()
        with scripted(path, answer_last) as asked:
            assert not client.list_sessions()
    assert [each["id"] for each in asked] == [2]


def greet(listener: socket.socket) -> socket.socket:
    connected, _ = listener.accept()
    connected.recv(65536)
    connected.sendall(frame(HELLO))
    return connected


def ask(path: Path, kind: str) -> Any:
    with connected(path, kind) as client:
        return client.list_sessions()


# --- open files


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = [256, resource.RLIM_INFINITY]

    def set_limit(_which: int, limits: tuple[int, int]) -> None:
        if limits[0] > 10_240:  # as on macOS
            raise ValueError("not allowed")
        limit[0] = limits[0]

    monkeypatch.setattr(resource, "getrlimit", lambda _which: tuple(limit))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert raise_limit() == limit[0] == 8192
    assert limits_within(8192) == ServerLimits()


def test_within_few_open_files_fewer_connections_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (256, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    assert raise_limit() == 1000
    limits = limits_within(1000)
    assert limits.max_connections + limits.reserved_connections + BESIDE_CONNECTIONS == 1000
    assert limits_within(FEWEST).max_connections > 16


def test_too_few_open_files_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (FEWEST - 1, FEWEST - 1))
    with pytest.raises(TooFewDescriptors, match="ulimit -n"):
        raise_limit()
