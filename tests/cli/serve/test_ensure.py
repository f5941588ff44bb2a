"""`torpor ensure` and `Client.ensure`: one daemon that answers, whoever asks for it and how many at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.cli.reach.background import is_running
from torpor.socket_api import AsyncClient, Client
from torpor.socket_api.errors import DaemonNotStarted, DaemonUnreachable
from torpor.socket_api.wire.address import default_socket_path
from torpor.tests.cli.cli_rig import Torpor
from torpor.tests.hub_rig import serving
from torpor.tests.model_making import write_model

COMMAND = [sys.executable, "-P", "-m", "torpor.cli.main", "ensure", "--json"]


@pytest.fixture(autouse=True)
def home(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store, a socket and a log of this test; the daemon that it leaves is stopped."""
    monkeypatch.setenv("TORPOR_STORE", str(short_path / "store"))
    monkeypatch.setenv("XDG_STATE_HOME", str(short_path / "state"))
    yield
    try:
        with Client() as daemon:
            pid = daemon.peer_pid
            daemon.shutdown(force=True)
    except DaemonUnreachable:
        return
    deadline = time.monotonic() + 60
    while pid is not None and is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.one_in(3)
def test_several_at_once_start_one_daemon_and_all_have_it(torpor: Torpor, short_path: Path) -> None:
    running = [subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    told = [(process.communicate(timeout=240), process.returncode) for process in running]
    assert [status for _, status in told] == [0, 0, 0], told
    documents = [json.loads(out) for (out, _), _ in told]
    assert sorted(each["started"] for each in documents) == [False, False, True]
    (pid,) = {each["pid"] for each in documents}
    again = torpor("ensure")
    assert (again.status, f"(pid {pid}), as it did before" in again.out) == (0, True)
    assert "not taken over" not in again.err
    ignored = " ".join(torpor("ensure", "--log", short_path / "other.log").err.split())
    assert "not taken over: --log. Options hold only for a daemon that is started" in ignored
    with Client() as daemon:
        (demo,) = daemon.status().models
    for model, status in ((f"demo={demo.path}", 0), ("nope=/nonexist", 2), (f"demo={short_path}", 2)):
        named = torpor("ensure", "--model", model)
        assert named.status == status, model
        assert "not taken over" not in named.err
        assert ("To have the model, stop the daemon first" in " ".join(named.err.split())) == bool(status)
    refused = torpor("ensure", "--store", "/elsewhere")
    assert (refused.status, "Leave --store out" in " ".join(refused.err.split())) == (2, True)
    with Client.ensure() as daemon:
        assert daemon.status().pid == pid

    async def ensured() -> int:
        async with AsyncClient.ensure() as daemon:
            return (await daemon.status()).pid

    assert asyncio.run(ensured()) == pid


@pytest.mark.one_in(4)
def test_a_daemon_that_cannot_start_is_told_and_leaves_no_process(torpor: Torpor, short_path: Path) -> None:
    config = short_path / "torpor.toml"
    config.write_text("memory_budget = 'much'\n")
    ran = torpor("ensure", "--config", config)
    assert (ran.status, "invalid_configuration" in ran.err) == (2, True)
    assert "ended without a stop" not in ran.err
    default_socket_path().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as killed:  # a daemon that is killed leaves its socket
        killed.bind(str(default_socket_path()))
    told = " ".join(torpor("ensure", "--config", config).err.split())
    assert "ended without a stop. The next start brings each session back" in told
    assert "Start it again" not in told, "that is what this command does"
    with pytest.raises(DaemonNotStarted, match=r"none was started: .*memory_budget"):
        Client.ensure(config=config)
    with pytest.raises(DaemonUnreachable):
        Client()
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in found.splitlines() if str(short_path) in line and "detached" in line]


@pytest.mark.one_in(1)
def test_after_a_crash_a_daemon_starts_with_the_options_that_it_had(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torpor ensure` alone would start it without HTTP and on another store."""
    monkeypatch.delenv("TORPOR_STORE")
    store, door = short_path / "its-own-store", short_path / "h"
    serve = ["serve", "--detach", "--store", store, "--http-socket", door, "--keep-free", "1MiB"]
    subprocess.run([*COMMAND[:-2], *map(str, serve)], check=True, capture_output=True)
    with Client() as daemon:
        pid = daemon.peer_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    (kept,) = default_socket_path().parent.glob("*.options")
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "no_such_thing": True}))
    ran = subprocess.run(COMMAND[:-1], check=True, capture_output=True, text=True)
    assert "not taken over: --no-such-thing." in " ".join(ran.stderr.split())
    assert "starts with the options that it had: --keep-free 1048576 --http-socket" in " ".join(ran.stderr.split())
    with Client() as daemon:
        status, pid = daemon.status(), daemon.peer_pid
        assert (Path(status.store), status.disk and status.disk.keep_free_bytes) == (store, 1 << 20)
        assert door.is_socket()
        daemon.shutdown()
    while is_running(pid or 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not list(default_socket_path().parent.glob("*.options")), "a stop leaves nothing behind"


@pytest.mark.one_in(1)
def test_an_interrupted_download_leaves_no_process_and_goes_on_at_the_next_start(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = "model.safetensors"
    with serving({"owner/tiny": write_model(short_path / "model", intermediate_size=3000)}) as hub:
        for name, value in hub.environment(short_path / "cache").items():
            monkeypatch.setenv(name, value)
        hub.most_bytes, hub.goes_on = 2 << 20, threading.Event()
        supervisor = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        supervisor.bind(str(short_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(short_path / "notify"))
        command = [*COMMAND[:-1], "--model", "m=owner/tiny"]
        ensuring = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not [part for part in short_path.glob("cache/*/blobs/*.incomplete") if part.stat().st_size >= 1 << 20]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ensuring.send_signal(signal.SIGINT)
        _, err = ensuring.communicate(timeout=60)
        assert (ensuring.returncode, "downloading m (" in err) == (130, True)
        running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert not [line for line in running.splitlines() if str(short_path) in line and "detached" in line]
        hub.goes_on.set()
        hub.asked.clear()
        events: list[Any] = []
        with Client.ensure(models={"m": "owner/tiny"}, on_event=events.append) as daemon:
            assert daemon.status().models[0].resident
        assert (events[0].done >= 1 << 20, events[-1].done) == (True, events[-1].total)
        assert [first >= 1 << 20 for name, first in hub.asked if name == weights] == [True]
        with supervisor:
            assert supervisor.recv(99) == b"EXTEND_TIMEOUT_USEC=60000000", "systemd waits for a download"
        with Client.ensure(models={"m": "owner/tiny"}):
            pass  # it is the one that is served
        with pytest.raises(DaemonNotStarted, match=r"serves m=.* names m=owner/other"):
            Client.ensure(models={"m": "owner/other"})
        with pytest.raises(DaemonNotStarted, match=r"serves m=.*, and --model names other=owner/tiny"):
            Client.ensure(models={"other": "owner/tiny"})
