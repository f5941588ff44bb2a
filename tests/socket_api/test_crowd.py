"""Clients that find the daemon crowded: they wait at the door, and go on after their place was needed."""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from torpor.socket_api import AsyncClient, Client
from torpor.socket_api.client.reaching import MOST_REPEATS
from torpor.socket_api.errors import ApiError, DaemonBusy, DaemonUnreachable, TooFewDescriptors
from torpor.socket_api.limits import REQUEST_LIMITS, ServerLimits
from torpor.socket_api.server.descriptors import BESIDE_CONNECTIONS, FEWEST, limits_within, raise_limit
from torpor.socket_api.wire.framing import FrameDecoder

sys.path.insert(0, str(Path(__file__).parents[1] / "load"))
from crowd import CALLS, crowd

from .client.test_client import HELLO, frame
from .conftest import ServerThread
from .server.test_server import QUICK, running

EVICTION = {"type": "error", "id": None, "error": {"code": "connection_evicted", "message": "Gone.", "details": {}}}

BUSY = {"code": "daemon_busy", "message": "All work.", "details": {}}


@pytest.fixture
def short_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.socket_api.wire.listener._BACKLOG", 1)


def pid_of(path: Path) -> int:
    with Client(path) as client:
        return client.status().pid


@pytest.mark.usefixtures("short_backlog")
def test_who_finds_the_door_crowded_tries_again_until_it_is_let_in(short_path: Path) -> None:
    server = ServerThread(short_path / "t.sock", limits=QUICK)
    try:
        with ThreadPoolExecutor(24) as clients:
            assert len(set(clients.map(pid_of, [short_path / "t.sock"] * 96))) == 1
        figures = asyncio.run(crowd(short_path / "t.sock", 150, stay=False))
        assert (figures.served, figures.failed) == (150, {})
        assert figures.again > 0, "nobody found the door crowded"
    finally:
        server.stop()


def test_a_crowd_that_stays_is_served_again_and_again(short_path: Path) -> None:
    """`tests/load/crowd.py` does it with a thousand."""

    async def run() -> None:
        async with running(short_path) as state:
            figures = await crowd(state.path, 150, stay=True)
            assert (figures.served, figures.failed) == (150 * CALLS, {})

    asyncio.run(run())


def test_clients_that_stay_are_served_again_though_others_needed_their_places(short_path: Path) -> None:
    """There are fewer places than clients, and each of them is idle between two calls."""

    async def run() -> None:
        limits = replace(QUICK, max_connections=4, reserved_connections=2)
        async with running(short_path, limits=limits) as state, AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(AsyncClient(state.path)) for _ in range(12)]
            for _ in range(3):
                for client in clients:
                    assert (await client.status()).pid == clients[0].hello.pid
            assert state.server.connections <= 6

    asyncio.run(run())


def test_a_client_whose_place_was_needed_goes_on_with_its_next_call(short_path: Path) -> None:
    server = ServerThread(short_path / "t.sock", limits=replace(QUICK, max_connections=1, reserved_connections=1))
    try:
        with Client(short_path / "t.sock") as one, Client(short_path / "t.sock") as other:
            for _ in range(3):
                assert one.status().pid == other.status().pid
            one.create("s")
            assert other.append("s", text="a b c").tokens_added == 3
            assert list(one.stream_generate("s", max_tokens=2)) == ["t3 ", "t4 "]
    finally:
        server.stop()


def test_what_comes_when_a_connection_is_being_evicted_is_not_begun(short_path: Path) -> None:
    async def run() -> None:
        async with running(short_path) as state:
            client = await state.connect()
            (served,) = state.server._served
            client.ask(1, "create", session="s")
            while not served._reader._buffer:  # type: ignore[attr-defined]
                await asyncio.sleep(0)
            served.evict()
            assert await client.error_code_then_end() == "connection_evicted"
            assert state.service.calls == []

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_is_refused_on_a_connection_in_reserve_is_asked_again_until_a_place_is_free(
    short_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused before it was begun, so asking again is safe."""
    refused = []

    def refuse(message: str, **facts: object) -> DaemonBusy:
        refused.append(message)
        return DaemonBusy(message, **facts)

    monkeypatch.setattr("torpor.socket_api.server.served.DaemonBusy", refuse)
    server = ServerThread(short_path / "t.sock", limits=replace(QUICK, max_connections=1, reserved_connections=1))
    try:
        with Client(short_path / "t.sock") as worker, ThreadPoolExecutor(1) as asking:
            worker.create("s")
            server.do(server.service.hold)
            with worker.stream_generate("s", max_tokens=1):
                server.wait_until(lambda: server.service.running == 1)
                asked = asking.submit(ask, short_path / "t.sock", kind)
                server.wait_until(lambda: len(refused) > 1)
                server.do(server.service.release)
            worker.close()
            assert [each.session for each in asked.result(timeout=20)] == ["torpor://default/s"]
    finally:
        server.stop()


class Evicting:
    """A daemon that greets, takes a request, and needs the place of that connection, so many times; then it answers."""

    def __init__(self, path: Path, times: int) -> None:
        self.taken: list[dict[str, object]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(8)
        self._times = times
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for turn in range(self._times + 1):
            connected, _ = self._listener.accept()
            with connected:
                decoder = FrameDecoder(REQUEST_LIMITS)
                self._next(connected, decoder)
                connected.sendall(frame(HELLO))
                request = self._next(connected, decoder)
                self.taken.append(request)
                if turn < self._times:
                    connected.sendall(frame(EVICTION))
                else:
                    connected.sendall(frame({"type": "result", "id": request["id"], "result": {"sessions": ()}}))

    def _next(self, connected: socket.socket, decoder: FrameDecoder) -> dict[str, object]:
        while (message := decoder.next_frame()) is None:
            data = connected.recv(65536)
            assert data, "the client went away"
            decoder.feed(data)
        return message

    def end(self) -> None:
        self._thread.join(timeout=10)
        self._listener.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_request_that_crossed_an_eviction_is_sent_again_for_nothing_of_it_was_begun(
    short_path: Path, kind: str
) -> None:
    daemon = Evicting(short_path / "e.sock", 3)
    assert list(ask(short_path / "e.sock", kind)) == []
    daemon.end()
    assert [each["method"] for each in daemon.taken] == ["list"] * 4
    assert len({each["id"] for each in daemon.taken}) == 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_client_that_is_evicted_over_and_over_gives_up(short_path: Path, kind: str) -> None:
    daemon = Evicting(short_path / "e.sock", MOST_REPEATS + 1)
    with pytest.raises(ApiError) as caught:
        ask(short_path / "e.sock", kind)
    assert caught.value.code in ("connection_lost", "connection_evicted")
    assert len(daemon.taken) == MOST_REPEATS + 1
    with socket.socket(socket.AF_UNIX) as last:  # which the daemon still waits for
        last.connect(str(short_path / "e.sock"))
        last.sendall(frame({"type": "hello"}) + frame({"type": "request", "id": 0}))
        daemon.end()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_client_that_is_only_ever_given_a_connection_in_reserve_gives_up_and_says_why(
    short_path: Path, kind: str
) -> None:
    daemon = Refusing(short_path / "r.sock", MOST_REPEATS)
    with pytest.raises(ApiError) as caught:
        ask(short_path / "r.sock", kind)
    daemon.end()
    assert caught.value.code == "daemon_busy"
    assert len(daemon.taken) == MOST_REPEATS + 1


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
                connected.sendall(frame(EVICTION))
    path.unlink()
    with client:
        with pytest.raises(DaemonUnreachable):
            client.list_sessions()
        daemon = Evicting(path, 0)
        assert not client.list_sessions()
        daemon.end()
    assert [each["id"] for each in daemon.taken] == [2]


class Refusing(Evicting):
    """A daemon that greets on a connection in reserve, and refuses all that it is asked there, once and so many times
    more."""

    def _serve(self) -> None:
        connected, _ = self._listener.accept()
        with connected:
            decoder = FrameDecoder(REQUEST_LIMITS)
            self._next(connected, decoder)
            connected.sendall(frame(HELLO))
            for _ in range(self._times + 1):
                request = self._next(connected, decoder)
                self.taken.append(request)
                connected.sendall(frame({"type": "error", "id": request["id"], "error": BUSY}))


def greet(listener: socket.socket) -> socket.socket:
    connected, _ = listener.accept()
    connected.recv(65536)
    connected.sendall(frame(HELLO))
    return connected


def ask(path: Path, kind: str) -> object:
    async def run() -> object:
        async with AsyncClient(path) as client:
            return await client.list_sessions()

    if kind == "async":
        return asyncio.run(run())
    with Client(path) as client:
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
