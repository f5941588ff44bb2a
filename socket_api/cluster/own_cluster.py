"""A Ray of this machine alone, for a cluster that no other one was given for: it begins and ends with the cluster.

Ray's daemon of a machine (the raylet) starts two agents, waits 15 seconds until they have told their ports, and ends
itself if they have not. Ray then says after 30 seconds that the node has timed out. No setting has these bounds, and a
machine that is busy, or reads Ray's files for the first time, goes beyond them. So it is tried again, with those files
in memory, and with as few processes beside the agents as Ray can do with.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from ..errors import DaemonNotStarted

_HOST: Final = "127.0.0.1"
_TRIES: Final = 5
_STARTED: Final = "Ray runtime started"
_TOLD_LINES: Final = 12

_PATIENT: Final = {
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_worker_register_timeout_seconds": "180",
}
"""Bounds of Ray's own start, which a busy machine reaches at 30 and 60 seconds."""

_PR_SET_PDEATHSIG: Final = 1


@contextmanager
def own_cluster(places: int) -> Iterator[str]:
    """Ray on this machine, on loopback, without its dashboard; its address. places: replicas that it has room for,
    however many processors there are. To be entered before Ray is imported, which reads its token then.

    Raises DaemonNotStarted with the last lines of what Ray said."""
    environment = {**_PATIENT, **os.environ}
    # Who may speak with Ray may run any program here; a token of this cluster alone keeps other users out.
    os.environ["RAY_AUTH_TOKEN"] = environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    os.environ["RAY_AUTH_MODE"] = environment["RAY_AUTH_MODE"] = "token"
    said = None
    for _ in range(_TRIES):
        with _started(places, environment) as (ray, address):
            said = _said(ray)
            if said is None:
                yield address
                return
    raise DaemonNotStarted(
        f"Ray has not started on this machine, in {_TRIES} tries. It gives its own parts 15 seconds: try again when the"
        " machine has less to do, or start Ray by itself (ray start --head), and give RAY_ADDRESS=auto. It said last:\n"
        f"{said}"
    )


@contextmanager
def _started(places: int, environment: dict[str, str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process that starts all others of Ray, watches them, and ends them with itself; and Ray's address."""
    port, for_clients = _free_ports(2)
    given = [f"--port={port}", f"--ray-client-server-port={for_clients}", "--dashboard-agent-listen-port=0"]
    given += [f"--node-ip-address={_HOST}", f"--num-cpus={max(places, os.cpu_count() or 1)}"]
    given += ["--include-dashboard=false", "--include-log-monitor=false"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", *given]
    prctl = ctypes.CDLL(None).prctl  # looked up here, as between fork and exec as little as possible is done
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is for us: replicas put sessions to sleep before Ray ends
        preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    with process:
        try:
            yield process, f"{_HOST}:{port}"
        finally:
            process.terminate()
            assert process.stdout is not None
            process.stdout.close()


def _said(ray: subprocess.Popen[str]) -> str | None:
    """None once Ray has started; else, when it has ended, what it said last."""
    assert ray.stdout is not None
    last: deque[str] = deque(maxlen=_TOLD_LINES)
    for line in ray.stdout:
        if _STARTED in line:
            return None
        if line.strip():
            last.append(line.rstrip())
    return "\n".join(last)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody has. Another program may take one before Ray does: then it is tried again."""
    with ExitStack() as kept:
        taken = [kept.enter_context(socket.create_server((_HOST, 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in taken]
