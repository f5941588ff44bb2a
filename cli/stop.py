"""`torpor stop`: end the daemon; it puts every session to sleep first."""

from __future__ import annotations

from typing import Annotated

import typer

from .background import end
from .daemon_link import connect
from .options import JsonOption, SocketOption
from .output import Output

TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, metavar="SECONDS", help="How long to wait for sessions to be slept.")
]


def stop(timeout: TimeoutOption = 300.0, socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """Stop the daemon, after it has put every awake session to sleep.

    Returns when its process is gone. Sessions wake by themselves when they are used after the next [cyan]torpor
    serve[/].

    [bold]Examples[/]

    [cyan]torpor stop[/]
    [cyan]torpor stop --timeout 20 --json[/]
    """
    output = Output(as_json=as_json)
    with connect(socket) as client:
        status = client.status()
    end(status.pid, timeout)
    if as_json:
        output.document("stop", {"pid": status.pid, "sessions_awake": status.sessions_awake})
    else:
        output.line(f"daemon {status.pid} has stopped; {status.sessions_awake} awake sessions were put to sleep")
