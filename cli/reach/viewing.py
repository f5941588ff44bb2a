"""Where a view comes from: the daemon that runs, else the store's files. Both give the same record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from ...memvid.disk.location import default_store_path
from ...memvid.store import Store
from .daemon_link import find_daemon
from .store_view import open_store

if TYPE_CHECKING:
    from ...socket_api.client.client import Client

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class View(Generic[R]):
    """A record, who gave it, and the path of the store."""

    source: Literal["daemon", "store"]
    place: Path
    record: R


def look(socket: Path | None, store: Path | None, ask: Callable[[Client], R], read: Callable[[Store], R]) -> View[R]:
    """Ask the daemon for a view if one runs; else, or with a named store, make it of the files. Raises the errors of
    either."""
    daemon = find_daemon(socket, store)
    if daemon is not None:
        with daemon:
            return View("daemon", Path(daemon.status().store), ask(daemon))
    place = store or default_store_path()
    with open_store(place) as opened:
        return View("store", place, read(opened))
