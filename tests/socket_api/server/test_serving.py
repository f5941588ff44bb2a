"""The life of the daemon's process: ready, served, stopped by a signal, in a process of its own around a double."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torpor.socket_api import Client
from torpor.socket_api.errors import ApiError, DaemonUnreachable, RemoteError, SocketInUse, StopIncomplete
from torpor.socket_api.server.notifying import tell_supervisor
from torpor.socket_api.server.serving import _on_first_signal, harden_process, serve_until_signal
from torpor.tests.socket_api.server_rig import Here, poll

_SCRIPT = """
import json, os, sys
from torpor.tests.socket_api import fake_service
from torpor.errors import TorporError
from torpor.socket_api.server.notifying import tell_supervisor
from torpor.socket_api.server.serving import serve_until_signal
import resource
async def open_backend():
    service = fake_service.FakeService()
    service.fail_sleep = json.loads(sys.argv[2])
    return service
def ready(socket):
    umask = os.umask(0)
    os.umask(umask)
    facts = {"socket": socket, "umask": umask, "core": resource.getrlimit(resource.RLIMIT_CORE)[0]}
    print(json.dumps(facts), flush=True)
try:
    stopped = lambda report: print("stopped", flush=True)
    serve_until_signal(open_backend, sys.argv[1], on_ready=ready, on_stopped=stopped)
except TorporError as error:
    print(error.code, flush=True)
    sys.exit(1)
"""


class Daemon:
    def __init__(self, socket: Path, fail_sleep: dict[str, str]) -> None:
        command = [sys.executable, "-c", _SCRIPT, str(socket), json.dumps(fail_sleep)]
        self.log = socket.with_suffix(".log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(timeout=20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def daemons(short_path: Path) -> Iterator[list[Daemon]]:
    started: list[Daemon] = []
    yield started
    for daemon in started:
        daemon.end()


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """A stop in this process gives its signals away for good."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def start(daemons: list[Daemon], socket: Path, **fail_sleep: str) -> Daemon:
    daemons.append(Daemon(socket, fail_sleep))
    return daemons[-1]


@pytest.mark.parametrize("name", ["notify", "@torpor-tests-notify"])
def test_a_supervisor_is_told_at_a_file_or_at_a_name_of_the_kernel_s(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with supervisor(f"{name}-{os.getpid()}" if name[0] == "@" else str(short_path / name), monkeypatch) as told:
        tell_supervisor("READY=1")
        assert told.recv(99) == b"READY=1"


@pytest.mark.one_in(1)
def test_a_supervisor_is_told_when_the_daemon_is_ready_and_when_it_stops(
    daemons: list[Daemon], short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with supervisor(str(short_path / "notify"), monkeypatch) as told:
        daemon = start(daemons, short_path / "t.sock")
        assert told.recv(99) == b"READY=1"
        with Client(short_path / "t.sock"):  # it answers by then
            daemon.process.send_signal(signal.SIGTERM)
            assert told.recv(99) == b"STOPPING=1"
    assert daemon.process.wait(timeout=20) == 0


@contextmanager
def supervisor(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(address.replace("@", "\0", 1))
        bound.settimeout(20)
        yield bound


@pytest.mark.one_in(3)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_in_order(daemons: list[Daemon], short_path: Path, number: signal.Signals) -> None:
    socket = short_path / "t.sock"
    daemon = start(daemons, socket)
    facts = json.loads(daemon.line())
    assert facts == {"socket": str(socket), "umask": 0o077, "core": 0}  # threat 60
    with Client(socket) as client:
        client.create("s")
        stream = client.stream_generate("s", max_tokens=1_000_000)
        next(stream)
        daemon.process.send_signal(number)
        with pytest.raises(RemoteError, match="stopping"):
            list(stream)
    assert daemon.line() == "stopped"
    assert daemon.process.wait(timeout=20) == 0
    assert not socket.exists()


def test_a_stop_while_the_service_opens_gives_that_up(short_path: Path) -> None:
    """As while a model is downloaded."""
    steps: list[str] = []

    async def open_backend() -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            steps.append("given up")
            raise

    def never(socket: str) -> None:
        steps.append(socket)

    serve_until_signal(
        open_backend, short_path / "t.sock", on_ready=never, on_stopped=lambda report: steps.append(str(report.failed))
    )
    assert steps == ["given up", "{}"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("by", ["signal", "force"])
def test_sessions_that_cannot_be_put_to_sleep_are_an_error_at_the_end(
    daemons: list[Daemon], short_path: Path, by: str
) -> None:
    daemon = start(daemons, short_path / "t.sock", s="no space")
    daemon.line()
    if by == "signal":
        daemon.process.terminate()
    else:
        with Client(short_path / "t.sock") as client:
            assert client.shutdown(force=True).failed == {"s": "no space"}
    assert [daemon.line(), daemon.line()] == ["stopped", "stop_incomplete"]
    assert daemon.process.wait(timeout=20) == 1


@pytest.mark.one_in(2)
def test_a_client_stops_the_daemon_hears_how_it_went_and_the_process_ends_as_by_a_signal(
    daemons: list[Daemon], short_path: Path
) -> None:
    socket = short_path / "t.sock"
    daemon = start(daemons, socket)
    daemon.line()
    with Client(socket) as client:
        assert client.peer_pid == daemon.process.pid
        client.create("full")
        client.append("full", tokens=[1])
        client.create("void")
        stream = client.stream_generate("full", max_tokens=1_000_000)
        next(stream)
        report = client.shutdown()
    assert report.slept == ("torpor://default/full",)
    assert (report.failed, report.empty) == ({}, ("torpor://default/void",))
    assert daemon.line() == "stopped"
    assert daemon.process.wait(timeout=20) == 0  # an empty session is no failure
    assert not socket.exists()


@pytest.mark.one_in(3)
def test_a_stop_that_would_lose_something_is_refused_and_the_daemon_goes_on(
    daemons: list[Daemon], short_path: Path
) -> None:
    socket = short_path / "t.sock"
    daemon = start(daemons, socket, s="no space")
    daemon.line()
    with Client(socket) as client:
        client.create("s")
        stream = client.stream_generate("s", max_tokens=1_000_000)
        written = "".join(next(stream) for _ in range(3))
        with Client(socket) as other, pytest.raises(RemoteError) as refused:
            other.shutdown()
        assert refused.value.code == "stop_refused"
        assert refused.value.details == {"failed": {"s": "no space"}}
        assert "s: no space" in refused.value.message
        assert "torpor stop --force" in refused.value.message
        with pytest.raises(RemoteError) as cancelled:
            list(stream)
        assert cancelled.value.code == "shutting_down"
        tokens = cancelled.value.details["tokens"]
        assert cancelled.value.details["text"].startswith(written)
        assert client.generate("s", max_tokens=2).tokens == (len(tokens), len(tokens) + 1), "what was written stays"
    assert socket.exists()
    assert daemon.process.poll() is None


@pytest.mark.one_in(3)
def test_a_hangup_that_is_ignored_from_the_start_stays_ignored(daemons: list[Daemon], short_path: Path) -> None:
    """`nohup torpor serve` outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        daemon = start(daemons, short_path / "t.sock")
    finally:
        signal.signal(signal.SIGHUP, before)
    daemon.line()
    daemon.process.send_signal(signal.SIGHUP)
    with Client(short_path / "t.sock") as client:
        client.status()
        client.shutdown()
    assert daemon.process.wait(timeout=20) == 0


@pytest.fixture
def here(short_path: Path) -> Here:
    return Here(short_path / "t.sock")


async def test_several_who_stop_the_daemon_at_once_all_hear_how_it_went(here: Here) -> None:
    service, client = here.service, here.client
    service.close_gate.clear()
    await client.create("s")
    await client.append("s", tokens=[1])
    async with here.other() as other:
        asking = [asyncio.create_task(one.shutdown()) for one in (client, other, client)]
        await poll(lambda: service.closed)
        late = asyncio.create_task(other.shutdown())
        with pytest.raises(RemoteError, match="stopping") as refused:
            await other.create("too late")
        assert refused.value.code == "shutting_down"
        with pytest.raises(DaemonUnreachable):
            await here.other().connect()
        assert not any(one.done() for one in asking)
        os.kill(os.getpid(), signal.SIGTERM)  # does no harm: it is stopping already
        await asyncio.sleep(0)
        service.close_gate.set()
        heard = [await one for one in [*asking, late]]
    assert {one.slept for one in heard} == {("torpor://default/s",)}
    await here.serving
    assert [report.slept for report in here.reports] == [("torpor://default/s",)]


@pytest.mark.parametrize("by", ["force", "signal"])
async def test_while_a_stop_is_tried_the_door_is_open_and_force_or_a_signal_ends_the_trying(
    here: Here, by: str
) -> None:
    service, client = here.service, here.client
    service.fail_sleep = {"s": "no space"}
    service.prepare_gate.clear()
    asking = asyncio.create_task(client.shutdown())
    await here.until_asked("prepare_close")
    async with here.other() as other:
        assert not await other.list_sessions()
        forcing = asyncio.create_task(other.shutdown(force=True)) if by == "force" else None
        if forcing is None:
            os.kill(os.getpid(), signal.SIGTERM)
        await poll(lambda: service.closed)
        assert not here.path.exists()
        service.prepare_gate.set()
        if forcing is not None:
            assert (await forcing).failed == {"s": "no space"}
    assert (await asking).failed == {"s": "no space"}, "it was refused, but the daemon did not go on"
    assert service.calls.count(("prepare_close", {})) == 1
    with pytest.raises(StopIncomplete):
        await here.serving


async def test_a_stop_that_was_refused_is_granted_once_the_sessions_can_be_kept(here: Here) -> None:
    service, client = here.service, here.client
    await client.create("s")
    await client.append("s", tokens=[1])
    service.fail_sleep = {"s": "no space"}
    for _ in range(2):
        with pytest.raises(RemoteError, match="no space"):
            await client.shutdown()
    await client.append("s", tokens=[2])
    service.fail_sleep = {}
    assert (await client.shutdown()).slept == ("torpor://default/s",)


async def test_of_many_sessions_that_cannot_be_kept_a_few_are_told_behind_what_to_do_and_advice_is_told_once(
    here: Here,
) -> None:
    service, client = here.service, here.client
    service.fail_sleep = {f"s{number}": f"no_space: {number} bytes. Free some." for number in range(100)}
    with pytest.raises(RemoteError) as refused:
        await client.shutdown()
    assert refused.value.details["failed"] == service.fail_sleep
    assert refused.value.message.startswith("100 sessions cannot be put to sleep")
    assert refused.value.message.endswith(
        " with torpor stop --force. s0: no_space: 0 bytes. Free some; s1: no_space, too; s2: no_space, too; "
        "s3: no_space, too; s4: no_space, too; and 95 more."
    )
    service.fail_sleep = {}
    await client.shutdown()


async def test_a_stop_waits_for_the_sleep_that_is_in_flight(here: Here) -> None:
    service, client = here.service, here.client
    await client.create("s")
    service.hold()
    sleeping = asyncio.create_task(client.sleep("s"))
    await here.until_asked("sleep")
    stopping = asyncio.create_task(client.shutdown())
    await poll(lambda: not here.path.exists())
    assert not service.closed
    service.release()
    assert (await sleeping).version == 1
    await stopping


@pytest.mark.parametrize("by", ["force", "signal"])
async def test_from_a_signal_on_sessions_are_put_to_sleep_whatever_is_in_flight(here: Here, by: str) -> None:
    service, client = here.service, here.client
    await client.create("s")
    service.hold()
    sleeping = asyncio.create_task(client.sleep("s"))
    await here.until_asked("sleep")
    stopping = asyncio.create_task(client.shutdown(force=True)) if by == "force" else None
    if stopping is None:
        os.kill(os.getpid(), signal.SIGTERM)
    await here.until_asked("begin_close")
    assert not service.closed
    service.release()
    await sleeping
    if stopping is not None:
        await stopping


async def test_a_configuration_that_is_being_read_does_not_hold_up_the_beginning_of_a_stop(short_path: Path) -> None:
    async with Here(short_path / "t.sock", rereads=True) as here:
        read = asyncio.Event()

        async def reload_config() -> None:
            here.service.calls.append(("reload_config", {}))
            await read.wait()

        here.service.reload_config = reload_config  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGHUP)
        await here.until_asked("reload_config")
        os.kill(os.getpid(), signal.SIGTERM)
        await here.until_asked("begin_close")
        assert not here.service.closed, "it is read to its end before the service is closed"
        read.set()


async def test_a_client_that_asked_for_the_stop_and_left_does_not_hold_it_up(here: Here) -> None:
    here.service.close_gate.clear()
    leaving = await here.other().connect()
    asked = asyncio.create_task(leaving.shutdown())
    await poll(lambda: here.service.closed)
    await leaving.close()
    with pytest.raises(ApiError):
        await asked


async def test_the_first_signal_gives_the_signals_back_so_that_a_second_ends_at_once() -> None:
    stop = asyncio.Event()
    _on_first_signal(stop.set)
    os.kill(os.getpid(), signal.SIGTERM)
    await stop.wait()
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    assert [signal.getsignal(number) for number in signals] == [signal.SIG_DFL] * 3


@pytest.mark.one_in(3)
def test_a_second_daemon_on_the_socket_loads_nothing_and_leaves_the_first(
    daemons: list[Daemon], short_path: Path
) -> None:
    """Threat 34."""
    socket = short_path / "t.sock"
    start(daemons, socket).line()

    async def open_backend() -> object:
        raise AssertionError("a model would have been loaded")

    before = os.umask(0o022), resource.getrlimit(resource.RLIMIT_CORE)
    try:
        with pytest.raises(SocketInUse):
            serve_until_signal(open_backend, socket, on_ready=print, on_stopped=print)  # type: ignore[arg-type]
    finally:
        os.umask(before[0])
        resource.setrlimit(resource.RLIMIT_CORE, before[1])
    with Client(socket) as client:
        assert client.status().pid == daemons[0].process.pid


@pytest.mark.one_in(2)
def test_after_sigkill_the_next_daemon_takes_the_stale_socket(daemons: list[Daemon], short_path: Path) -> None:
    """Threat 35."""
    socket = short_path / "t.sock"
    first = start(daemons, socket)
    first.line()
    first.process.kill()
    first.process.wait(timeout=20)
    assert socket.exists()
    assert json.loads(start(daemons, socket).line())["socket"] == str(socket)
    with Client(socket) as client:
        client.status()


@pytest.mark.one_in(3)
def test_a_daemon_that_the_system_ends_leaves_where_it_was_in_its_log(daemons: list[Daemon], short_path: Path) -> None:
    """As where MLX gets no memory: it writes to address 0."""
    daemon = start(daemons, short_path / "t.sock")
    assert daemon.line()
    daemon.process.send_signal(signal.SIGSEGV)
    assert daemon.process.wait(timeout=20) == -signal.SIGSEGV
    logged = daemon.log.read_text(encoding="utf-8")
    assert "Segmentation fault" in logged
    assert "in _serve" in logged or "in serve_until_signal" in logged


def test_core_dumps_are_forbidden_whatever_the_limit_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threat 60: a dump would hold every session's text."""
    done: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (4096, 8192))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: done.append((kind, limits)))
    before = os.umask(0o022)
    try:
        harden_process()
    finally:
        os.umask(before)
    assert done == [(resource.RLIMIT_CORE, (0, 8192))]
