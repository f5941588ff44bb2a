"""Where a view comes from: the daemon that runs, else the store's files. Both give the same record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from ...memvid.disk.location import default_store_path
from ...memvid.store import Store
from ...records import Result
from .daemon_link import ask_plainly, find_daemon
from .store_view import open_store

if TYPE_CHECKING:
    from ...socket_api.client.client import Client

R = TypeVar("R", bound=Result)


@dataclass(frozen=True, slots=True)
class View(Generic[R]):
    """A record, who gave it, and the path of the store."""

    source: Literal["daemon", "store"]
    place: Path
    record: R


def look(
    socket: Path | None,
    store: Path | None,
    ask: Callable[[Client], R],
    read: Callable[[Store], R],
    plainly: tuple[str, Mapping[str, Any], type[R]] | None = None,
) -> View[R]:
    """Ask the daemon for a view if one runs; else, or with a named store, make it of the files. plainly: what `ask`
    asks, as `ask_plainly` takes it, for a command that is to be quick. Raises the errors of either."""
    if plainly is not None and (told := ask_plainly(socket, store, plainly)):
        return View("daemon", Path(told[0].store), told[1])
    daemon = find_daemon(socket, store)
    if daemon is not None:
        with daemon:
            return View("daemon", Path(daemon.status().store), ask(daemon))
    place = store or default_store_path()
    with open_store(place) as opened:
        return View("store", place, read(opened))
