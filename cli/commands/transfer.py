"""`torpor export` and `torpor import`: one version of a session as one file, out of a store and into another."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated

from ...memvid.units import format_bytes, format_plural
from ..errors import Interrupted, InvalidUsage, UnreadableInput
from ..reach.artifacts import OverwriteOption, require_file
from ..reach.interrupts import ignore_interrupts
from ..reach.options import (
    CommandLine,
    JsonOption,
    SocketOption,
    StoreOption,
    VersionArgument,
    WrittenStoreOption,
    argument,
    option,
    require_sessions,
)
from ..reach.store_view import choose_store, open_store
from ..view.formatting import format_id
from ..view.output import Output, describe_turns, plain
from .upkeep import import_bundle


def _require_name(context: CommandLine, value: str | None) -> str | list[str] | None:
    if value == "":
        raise InvalidUsage("--as takes a name. Leave it out to take the session under its own.", option="--as")
    return require_sessions(context, value)


TargetArgument = Annotated[str, argument("FILE", "The file to write, such as notes.mvb.")]
SourceArgument = Annotated[Path, argument("FILE", "A file that export has written.")]
AsOption = Annotated[
    str | None,
    option(
        "--as NAME", "Take it under this name instead of its own. Its own name changes nothing.", callback=_require_name
    ),
]


def export(
    version: VersionArgument,
    target: TargetArgument,
    overwrite: OverwriteOption = False,
    socket: SocketOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Reads the files of --store, of the running daemon's store, or of the default one; what an awake session has read
    since its last version is not in it. Every byte is checked on the way.

    [bold]Examples[/]

    [cyan]torpor export notes notes.mvb[/]
    [cyan]torpor export notes@before-refactor /backup/notes.mvb --json[/]
    """
    output = Output(as_json=as_json)
    require_file(target, "export")
    place = choose_store(store, socket)
    with open_store(place) as opened, output.progress("exporting", unit="bytes") as on_progress:
        row = opened.resolve_version(version, look=True)
        try:
            report = opened.export_session(row.uri, row.bundle_id, target, replacing=overwrite, on_progress=on_progress)
        except KeyboardInterrupt:
            raise Interrupted(f"Interrupted. {target} is there whole or not at all.") from None
        ignore_interrupts()
        if opened.has_turns(row.uri):
            output.remark(describe_turns([row.uri]))
    if output.told("export", report):
        return
    output.line(
        f"{plain(report.session)}  version {report.version} exported: {format_plural(report.token_count, 'token')},"
        f" {format_bytes(report.file_bytes)} in {plain(report.path)}"
    )


def import_(
    source: SourceArgument,
    as_name: AsOption = None,
    socket: SocketOption = None,
    store: WrittenStoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Every byte is checked before anything is taken, and what is there already is not taken twice. An import
    adds to no session: take a file whose name is not free under another one (--as).

    [bold]Examples[/]

    [cyan]torpor import notes.mvb[/]
    [cyan]torpor import notes.mvb --as notes-of-june[/]
    """
    output = Output(as_json=as_json)
    _require_readable(source)
    try:
        with output.progress("importing", unit="bytes") as on_progress:
            receipt, newest = import_bundle(source, as_name, socket, store, on_progress)
    except KeyboardInterrupt:
        raise Interrupted(
            "Interrupted. The import may have ended all the same. Import the file again: nothing is taken twice."
        ) from None
    ignore_interrupts()
    if output.told("import", receipt):
        return
    if not receipt.bytes_written:
        output.line(
            f"{plain(receipt.session)}  is there already as version {receipt.version}, bundle"
            f" {plain(format_id(receipt.bundle_id))}: nothing was written"
        )
    else:
        output.line(
            f"{plain(receipt.session)}  imported as version {receipt.version}, bundle"
            f" {plain(format_id(receipt.bundle_id))}: {format_plural(receipt.token_count, 'token')},"
            f" {format_bytes(receipt.bytes_written)} written"
        )
    if newest is not None and newest > receipt.version:
        output.remark(f"version {newest} is newer, so the next wake gives that one")


def _require_readable(source: Path) -> None:
    """Refuse a source that is missing, unreadable or no regular file, before the daemon is asked."""
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer must not block
    except OSError as error:
        raise UnreadableInput(f"{source} cannot be read: {error.strerror}.", path=str(source)) from error
    try:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)
    if not is_file:
        raise UnreadableInput(f"{source} is no regular file. Name one that export has written.", path=str(source))
