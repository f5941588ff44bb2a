"""Where a view comes from: the daemon that runs, else the store's files. Both give the same record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from ...memvid.disk.location import default_store_path
from ...records import Result
from .daemon_link import ask_plainly, find_daemon
from .files import Files
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


@contextmanager
def answering(socket: Path | None, store: Path | None) -> Iterator[tuple[Client | Files, Path]]:
    """Who answers, and the path of the store: the daemon that runs, else, or for a named store, the files. Raises the
    errors of `find_daemon` and of `open_store`."""
    daemon = find_daemon(socket, store)
    if daemon is not None:
        with daemon:
            yield daemon, Path(daemon.status().store)
        return
    place = store or default_store_path()
    with open_store(place) as opened:
        yield Files(opened), place


def look(
    socket: Path | None,
    store: Path | None,
    ask: Callable[[Client | Files], R],
    plainly: tuple[str, Mapping[str, Any], type[R]] | None = None,
) -> View[R]:
    """Ask who answers for a view. plainly: what `ask` asks of a daemon, as `ask_plainly` takes it, for a command that
    is to be quick. Raises also the errors of the view."""
    if plainly is not None and (told := ask_plainly(socket, store, plainly)):
        return View("daemon", Path(told[0].store), told[1])
    with answering(socket, store) as (source, place):
        return View("store" if isinstance(source, Files) else "daemon", place, ask(source))
