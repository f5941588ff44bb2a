"""The life of the daemon's process: ready, served, stopped by a signal, in a process of its own around a double."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.socket_api import Client
from torpor.socket_api.errors import RemoteError, SocketInUse
from torpor.socket_api.serving import harden_process, serve_until_signal

_SCRIPT = """
import importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("fake_service", sys.argv[1])
fake_service = importlib.util.module_from_spec(spec)
sys.modules["fake_service"] = fake_service
spec.loader.exec_module(fake_service)
from torpor.errors import TorporError
from torpor.socket_api.serving import serve_until_signal
import resource
async def open_backend():
    service = fake_service.FakeService()
    service.fail_sleep = json.loads(sys.argv[3])
    return service
def ready(socket):
    umask = os.umask(0)
    os.umask(umask)
    facts = {"socket": socket, "umask": umask, "core": resource.getrlimit(resource.RLIMIT_CORE)[0]}
    print(json.dumps(facts), flush=True)
try:
    stopped = lambda report: print("stopped", flush=True)
    serve_until_signal(open_backend, sys.argv[2], on_ready=ready, on_stopped=stopped)
except TorporError as error:
    print(error.code, flush=True)
    sys.exit(1)
"""


class Daemon:
    def __init__(self, socket: Path, fail_sleep: dict[str, str]) -> None:
        fake = Path(__file__).with_name("fake_service.py")
        command = [sys.executable, "-c", _SCRIPT, str(fake), str(socket), json.dumps(fail_sleep)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

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


def start(daemons: list[Daemon], socket: Path, **fail_sleep: str) -> Daemon:
    daemons.append(Daemon(socket, fail_sleep))
    return daemons[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
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


def test_sessions_that_cannot_be_put_to_sleep_are_an_error_at_the_end(daemons: list[Daemon], short_path: Path) -> None:
    daemon = start(daemons, short_path / "t.sock", s="no space")
    daemon.line()
    daemon.process.terminate()
    assert [daemon.line(), daemon.line()] == ["stopped", "stop_incomplete"]
    assert daemon.process.wait(timeout=20) == 1


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
        assert client.status().pid == 1


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
