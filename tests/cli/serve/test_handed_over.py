"""A daemon whose socket a supervisor has made: who comes early waits for it, and the socket outlives it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torpor.socket_api import Client

AS_SYSTEMD = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.execv(sys.executable, [sys.executable, "-m", "torpor.cli.main", "serve", *sys.argv[2:]])
"""


@pytest.mark.one_in(2)
def test_a_client_that_comes_before_the_daemon_is_answered_and_the_socket_stays(
    short_path: Path, tiny_model: Path
) -> None:
    path = short_path / "t.sock"
    where = ("--socket", str(path), "--store", str(short_path / "store"), "--model", f"tiny={tiny_model}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(str(path))
        path.chmod(0o600)
        made.listen(8)
        command = [sys.executable, "-c", AS_SYSTEMD, str(made.fileno()), *where]
        daemon = subprocess.Popen(command, pass_fds=[made.fileno()], stdout=subprocess.DEVNULL)
        try:
            with Client(path, timeout_s=120) as early:
                assert early.status().pid == daemon.pid
                with Client(path) as client:
                    assert client.peer_pid == daemon.pid, "the one that answers, and not the supervisor"
                early.shutdown()
            assert daemon.wait(60) == 0
        finally:
            daemon.kill()
            daemon.wait()
        assert path.is_socket()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as next_one:
            next_one.connect(os.fspath(path))  # it would wait for the next daemon
