"""`torpor inspect`: the inspector in a browser, or as a file."""

from __future__ import annotations

import json
import os
import sys
import webbrowser
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Annotated, Final

from ...memvid.units import format_bytes
from ...socket_api.tokens import OWNERS
from ..errors import HttpNotServed, InvalidUsage
from ..launch.filling import port_of, token_of
from ..reach.artifacts import ArtifactFile, OverwriteOption, require_file
from ..reach.daemon_link import connect
from ..reach.options import JsonOption, NamespaceChoice, SocketOption, StoreOption, option
from ..reach.page_answers import kept_of
from ..reach.viewing import answering
from ..view.output import Output, plain
from ..view.page_file import page_with

_LINK_PATH: Final = "/inspector/link"
_TIMEOUT_S: Final = 10.0
_MOST_BYTES: Final = 4096

NoOpenOption = Annotated[bool, option("--no-open", "Write the link, and open no browser.")]
HtmlOption = Annotated[
    str | None, option("--html FILE", "Write what the page shows to this file, which needs no daemon and no network.")
]
WithTextOption = Annotated[bool, option("--with-text", "With --html: also what the sessions say.")]


def inspect(
    no_open: NoOpenOption = False,
    html: HtmlOption = None,
    with_text: WithTextOption = False,
    overwrite: OverwriteOption = False,
    namespace: NamespaceChoice = None,
    socket: SocketOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """The page is on the daemon's port of HTTP (`torpor serve --http PORT`), for this machine alone. The link signs the
    browser in once, within two minutes, and has no token in it. Without a screen, the link is written; over SSH, pass
    the port on (`ssh -L 8677:127.0.0.1:8677 HOST`) and open it at home.

    With --html the page becomes one file to keep or to attach to a report. It has names, labels and figures, and with
    --with-text what the sessions say; it has no acts. With no daemon, or with --store, it is of the store's files. What
    it leaves out of a large store, it says.

    [bold]Examples[/]

    [cyan]torpor inspect[/]
    [cyan]torpor inspect --no-open[/]
    [cyan]torpor inspect --html report.html --store /backup/store[/]
    """
    output = Output(as_json=as_json)
    if html is not None:
        _write(output, html, with_text, overwrite, namespace, socket, store)
        return
    if with_text or overwrite or store is not None:
        raise InvalidUsage("--with-text, --overwrite and --store go with --html FILE.")
    with connect(socket) as daemon:
        url, tokens = port_of(daemon.status(), daemon.socket_path, "the inspector")
        link = f"{url}/#sign-in={_code(url, token_of(tokens, namespace or OWNERS), str(daemon.socket_path))}"
    if as_json:
        output.document("inspect", {"url": link})
        return
    output.whole_line(plain(link))
    if no_open or not _has_screen() or not webbrowser.open(link):
        output.remark("[dim]Open this link in a browser of this machine within two minutes; it is good once.[/]")


def _write(
    output: Output,
    target: str,
    with_text: bool,
    overwrite: bool,
    namespace: str | None,
    socket: Path | None,
    store: Path | None,
) -> None:
    """Write the page as a file, whole or not at all. Raises also the errors of `ArtifactFile`."""
    require_file(target, "inspect --html")
    with answering(socket, store) as (source, place):
        file = ArtifactFile(target, place, replacing=overwrite)
        with output.progress("gathering", unit="sessions") as on_progress:
            kept = kept_of(source, namespace=namespace, with_text=with_text, on_progress=on_progress)
    content = page_with(kept)
    file.write(content)
    if output.as_json:
        output.document("inspect", {"path": file.path, "bytes": len(content), "left_out": kept["left_out"]})
        return
    output.line(f"{plain(file.path)}  {format_bytes(len(content))}")
    for sentence in kept["left_out"]:
        output.remark(f"[dim]{plain(sentence)}[/]")


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
