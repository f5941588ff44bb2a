"""What the blocking client alone has: one thread, interrupts and signals, streams that are dropped."""

from __future__ import annotations

import dataclasses
import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from torpor.daemon.api.creating import ShowRequest
from torpor.daemon.api.process import StatusResult
from torpor.socket_api import Client
from torpor.socket_api.errors import ClientBusy, DaemonUnreachable, RemoteError
from torpor.tests.socket_api.fake_service import FakeBusy
from torpor.tests.socket_api.server_rig import ServerThread


@pytest.fixture
def client(server_thread: ServerThread) -> Iterator[Client]:
    with Client(server_thread.socket_path, timeout_s=20) as connected:
        yield connected


def test_results_are_frozen(client: Client) -> None:
    info = client.create("s")
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "begin", [lambda client: client.stream_generate("s", max_tokens=1), lambda client: client.events()]
)
def test_an_interrupt_while_a_stream_begins_leaves_no_half_made_one_that_fails_at_its_end(
    client: Client, monkeypatch: pytest.MonkeyPatch, begin: Callable[[Client], object]
) -> None:
    def interrupted(_call: object) -> int:
        raise KeyboardInterrupt

    client.create("s")
    unraised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    monkeypatch.setattr(client._link, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin(client)
    gc.collect()
    assert unraised == []


def test_a_stream_that_is_dropped_without_with_is_cancelled(client: Client, server_thread: ServerThread) -> None:
    client.create("s")
    for _ in client.stream_generate("s", max_tokens=1_000_000):
        break
    gc.collect()
    server_thread.wait_until(lambda: server_thread.service.cancelled == 1)
    assert client.status().sessions_awake == 1


def test_a_signal_handler_may_cancel_what_its_own_thread_waits_for(client: Client, server_thread: ServerThread) -> None:
    """Ctrl-C in `torpor chat`."""
    client.create("s")
    server_thread.do(server_thread.service.hold)
    stream = client.stream_generate("s", max_tokens=3)
    before = signal.signal(signal.SIGUSR1, lambda *_: stream.cancel())
    try:
        server_thread.wait_until(lambda: server_thread.service.running == 1)
        timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
        timer.start()
        assert list(stream) == []
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert server_thread.service.cancelled == 1


def test_a_client_used_from_two_threads_says_so_and_goes_on(client: Client, server_thread: ServerThread) -> None:
    client.create("s")
    server_thread.do(server_thread.service.hold)
    first = threading.Thread(target=client.generate, args=("s",), kwargs={"max_tokens": 1})
    first.start()
    server_thread.wait_until(lambda: server_thread.service.running == 1)
    with pytest.raises(ClientBusy, match="each thread"):
        client.status()
    server_thread.do(server_thread.service.release)
    first.join(timeout=20)
    assert client.status().sessions_awake == 1


def test_an_interrupted_request_is_cancelled_and_the_client_goes_on(
    client: Client, server_thread: ServerThread
) -> None:
    client.create("s")

    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.generate("s", max_tokens=1_000_000, on_event=interrupt)
    server_thread.wait_until(lambda: server_thread.service.running == 0)
    assert client.show("s").info.name == "s"


def test_a_stream_whose_reading_was_interrupted_is_read_on(
    client: Client, server_thread: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    client.create("s")
    server_thread.do(server_thread.service.hold)
    with client.stream_generate("s", max_tokens=3) as stream, monkeypatch.context() as patched:
        patched.setattr(client._link._transport, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        patched.undo()
        server_thread.do(server_thread.service.release)
        assert "".join(stream) == stream.result.text == "t0 t1 t2 "


@pytest.mark.parametrize("pid", [-1, 0, 1, 2**31])
def test_a_process_id_that_would_mean_a_group_or_everything_is_no_status(pid: int) -> None:
    """It may be signalled."""
    fields = {"version": "1", "store": "/", "models": (), "sessions_awake": 0, "sessions_asleep": 0, "blas": "none"}
    counts = ("sessions_bytes", "reserved_bytes", "waiting", "slept_by_pressure", "slept_by_idling")
    fields |= {"memory": {"budget_bytes": 2, "weights_bytes": 1, **dict.fromkeys(counts, 0)}}
    fields |= {"queue": {"waiting": 0, "background": 0, "limit": 1}}
    TypeAdapter(StatusResult).validate_python({**fields, "uptime_s": 0.0, "pid": 4711})
    with pytest.raises(ValueError, match="pid"):
        TypeAdapter(StatusResult).validate_python({**fields, "uptime_s": 0.0, "pid": pid})


def test_what_a_request_that_failed_had_in_hand_is_let_go_of_without_a_garbage_collection(
    client: Client, server_thread: ServerThread
) -> None:
    """A session's memory, say; an error that is raised where it is answered holds that frame, and so itself."""
    had: list[weakref.ref[Box]] = []

    async def fail(_request: object) -> None:
        held = Box()
        had.append(weakref.ref(held))
        raise FakeBusy("No.")

    server_thread.service.answers[ShowRequest] = fail
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(RemoteError):
            client.show("s")
        server_thread.wait_until(lambda: had[0]() is None)
    finally:
        gc.enable()


class Box:
    """Something that can be seen to go."""


def test_where_a_daemon_is_by_default_it_is_started_without_a_path(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORPOR_SOCKET", str(short_path / "none.sock"))
    with pytest.raises(DaemonUnreachable, match=r"Start a daemon with `torpor ensure`\."):
        Client()
