"""`torpor inspect`: the inspector in a browser."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from http.client import HTTPConnection, HTTPException
from typing import Annotated, Final

from ...socket_api.tokens import OWNERS
from ..errors import HttpNotServed
from ..launch.filling import port_of, token_of
from ..reach.daemon_link import connect
from ..reach.options import JsonOption, NamespaceChoice, SocketOption, option
from ..view.output import Output, plain

_LINK_PATH: Final = "/inspector/link"
_TIMEOUT_S: Final = 10.0
_MOST_BYTES: Final = 4096

NoOpenOption = Annotated[bool, option("--no-open", "Write the link, and open no browser.")]


def inspect(
    no_open: NoOpenOption = False,
    namespace: NamespaceChoice = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """The page is on the daemon's port of HTTP (`torpor serve --http PORT`), for this machine alone. The link signs the
    browser in once, within two minutes, and has no token in it. Without a screen, the link is written; over SSH, pass
    the port on (`ssh -L 8677:127.0.0.1:8677 HOST`) and open it at home.

    [bold]Examples[/]

    [cyan]torpor inspect[/]
    [cyan]torpor inspect --no-open[/]
    """
    output = Output(as_json=as_json)
    with connect(socket) as daemon:
        url, tokens = port_of(daemon.status(), daemon.socket_path, "the inspector")
        link = f"{url}/#sign-in={_code(url, token_of(tokens, namespace or OWNERS), str(daemon.socket_path))}"
    if as_json:
        output.document("inspect", {"url": link})
        return
    output.line(plain(link))
    if no_open or not _has_screen() or not webbrowser.open(link):
        output.remark("[dim]Open this link in a browser of this machine within two minutes; it is good once.[/]")


def _has_screen() -> bool:
    """Whether a browser would open in a window, and not on this terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _code(url: str, token: str, socket: str) -> str:
    """A code for one sign-in. Raises HttpNotServed: the daemon has no inspector, or does not answer."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=_TIMEOUT_S)
    try:
        connection.request("POST", _LINK_PATH, b"{}", {"Authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        told = answer.read(_MOST_BYTES)
        if answer.status == 200:
            return str(json.loads(told)["code"])
    except (OSError, HTTPException, ValueError, KeyError) as error:
        raise HttpNotServed(f"The daemon does not answer on {url} ({error}). Try again.", socket=socket) from error
    finally:
        connection.close()
    raise HttpNotServed(
        f"The daemon on {url} leaves out the inspector (--no-inspector). Stop it, and start it without that option.",
        socket=socket,
    )
