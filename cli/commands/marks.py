"""`torpor tag`, `untag`, `pin` and `unpin`: names for versions, and versions that stay."""

from __future__ import annotations

from typing import Annotated

from ...daemon.api.store import MarkRequest
from ...memvid.answers import MarkedVersion
from ...memvid.uri import require_tag
from ..reach.interrupts import ignore_interrupts
from ..reach.options import (
    JsonOption,
    SessionArgument,
    SocketOption,
    VersionArgument,
    WrittenStoreOption,
    argument,
    option,
)
from ..view.output import Output, plain
from .upkeep import set_mark

TagArgument = Annotated[
    str, argument("TAG", "1 to 64 letters, digits, '.', '_' or '-', beginning with a letter.", callback=require_tag)
]


MoveOption = Annotated[bool, option("--move", "Take it from the version that has it.")]


def tag(
    version: VersionArgument,
    name: TagArgument,
    move: MoveOption = False,
    socket: SocketOption = None,
    store: WrittenStoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """A version with a tag is never pruned. A tag that another version of the session has is refused without --move.

    [bold]Examples[/]

    [cyan]torpor tag notes before-refactor[/]
    [cyan]torpor tag notes@3 before-refactor --move[/]
    """
    _write(Output(as_json=as_json), "tag", set_mark(MarkRequest(version, tag=name, move=move), socket, store))


def untag(
    session: SessionArgument,
    name: TagArgument,
    socket: SocketOption = None,
    store: WrittenStoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """[bold]Examples[/]

    [cyan]torpor untag notes before-refactor[/]
    """
    _write(Output(as_json=as_json), "untag", set_mark(MarkRequest(session, untag=name), socket, store))


def pin(
    version: VersionArgument, socket: SocketOption = None, store: WrittenStoreOption = None, as_json: JsonOption = False
) -> None:
    """[bold]Examples[/]

    [cyan]torpor pin notes[/]
    [cyan]torpor pin notes@3f9c01ab[/]
    """
    _write(Output(as_json=as_json), "pin", set_mark(MarkRequest(version, pinned=True), socket, store))


def unpin(
    version: VersionArgument, socket: SocketOption = None, store: WrittenStoreOption = None, as_json: JsonOption = False
) -> None:
    """[bold]Examples[/]

    [cyan]torpor unpin notes@3[/]
    """
    _write(Output(as_json=as_json), "unpin", set_mark(MarkRequest(version, pinned=False), socket, store))


def _write(output: Output, command: str, marks: MarkedVersion) -> None:
    ignore_interrupts()
    if output.told(command, marks):
        return
    words = [f"tagged {plain(', '.join(marks.tags))}"] if marks.tags else []
    words += ["pinned"] if marks.pinned else []
    output.line(f"{plain(marks.session)}  version {marks.version}: {', '.join(words) or 'no marks'}")
