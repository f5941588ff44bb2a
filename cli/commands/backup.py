"""`torpor backup`: the store as it is now, in a folder that can take its place."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ...memvid.units import format_plural
from ..errors import Interrupted
from ..reach.daemon_link import find_daemon
from ..reach.options import JsonOption, SocketOption, StoreOption, argument
from ..reach.store_view import choose_store, open_store
from ..view.output import Output, describe_turns, plain
from .maintenance_report import write_report

FolderArgument = Annotated[Path, argument("DIR", "A new or empty folder, or an earlier backup of this store.")]


def backup(
    folder: FolderArgument, socket: SocketOption = None, store: StoreOption = None, as_json: JsonOption = False
) -> int:
    """Works beside a running daemon, which may sleep and repack meanwhile. What the folder has already is not copied
    again, and deleted versions stay in it. Every copied byte is checked. What an awake session has read since its last
    version is not in it: torpor sleep first. [cyan]torpor repair --from DIR[/] takes back what the store has lost.

    [bold]Examples[/]

    [cyan]torpor backup /mnt/disk/torpor[/]
    [cyan]torpor ls --store /mnt/disk/torpor[/]
    """
    output = Output(as_json=as_json)
    place = choose_store(store, socket)
    unslept = _find_unslept(socket, store)
    with open_store(place) as opened:
        journalled = [] if unslept else opened.acknowledged()
        try:
            with output.progress("copying", unit="bytes") as on_progress:
                report = opened.backup(folder, on_progress=on_progress)
        except KeyboardInterrupt:
            raise Interrupted(
                f"Interrupted. Each version in {folder} is there whole or not at all; run it again for the rest."
            ) from None
    status = write_report(output, "backup", report, nothing="all of it is there already")
    if unslept:
        output.remark(
            f"[yellow]not in it[/]  what {format_plural(len(unslept), 'awake session')} read and wrote since the last"
            f" sleep. Put these to sleep, then run it again: [cyan]torpor sleep {plain(' '.join(unslept))}[/]"
        )
    if journalled:
        output.remark(describe_turns(journalled))
    return status


def _find_unslept(socket: Path | None, store: Path | None) -> list[str]:
    """The sessions that have more in memory than in the store, if a daemon answers."""
    daemon = find_daemon(socket, store)
    if daemon is None:
        return []
    with daemon:
        return [f"{info.namespace}/{info.name}" for info in daemon.list_sessions() if info.dirty and info.token_count]
