"""A store's files as commands inspect them: read-only, with no daemon or beside a live one. Owns the choice of the
store, and what only its files tell. Knows nothing of rendering.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import TorporError
from ...memvid.answers import Finding
from ...memvid.disk import lock
from ...memvid.disk.location import default_store_path
from ...memvid.disk.paths import closing_fd
from ...memvid.errors import PUT_BACK, StoreError
from ...memvid.folder.folder import StoreFolder, manifest_name
from ...memvid.folder.marks import MARKS_FILE, Marks, findings_of_missing, require_id, stripped_in
from ...memvid.folder.store_file import load_store_uuid, open_existing_root
from ...memvid.format.manifest import is_manifest_file, read_manifest_bytes
from ...memvid.store import Store
from ...memvid.units import format_bytes
from ...memvid.uri import parse_reference
from .daemon_link import find_daemon

_KEEP_AWAKE = "The session is awake, and all of it in memory: `torpor sleep {}` writes it anew, as another version."
_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MOST_COUNTED = 2000  # versions; to count the bytes of more takes seconds
_MOST_AT_A_LOOK = 1 << 20  # bytes; a longer manifest is read in full

if TYPE_CHECKING:
    from ...daemon.api.process import StatusResult


def choose_store(store: Path | None, socket: Path | None) -> Path:
    """Give the store to inspect: the named one, else the running daemon's, else the default."""
    return choose_served_store(store, socket)[0]


def choose_served_store(store: Path | None, socket: Path | None) -> tuple[Path, StatusResult | None]:
    """As `choose_store`, with the status of the daemon that serves it; None if none was asked."""
    daemon = find_daemon(socket, store)
    if daemon is None:
        return store or default_store_path(), None
    with daemon:
        status = daemon.status()
        return Path(status.store), status


def open_store(path: Path) -> Store:
    """Open a store to read it. Raises NoStore and memvid's other refusals."""
    return Store.open(path, writable=False)


def find_marks_problem(place: Path) -> Finding | None:
    """The fault of a store's tags and pins; None if they can be read.

    A command that leaves them out of its listing has to say so.
    """
    with _folder_of(place) as folder:
        if folder is None:
            return None
        try:
            Marks.load(folder)
        except StoreError as error:
            return Finding(f"{place}/{MARKS_FILE}", error.code, error.message)
    return None


def find_unreadable(place: Path, sessions: Sequence[MutableMapping[str, Any]]) -> list[Finding]:
    """Find the sessions of a listing whose newest version's manifest is missing or damaged. Sets `unreadable` in every
    session, and `stripped`."""
    problems = []
    with _folder_of(place) as folder:
        stripped = _stripped_in(folder)
        for info in sessions:
            bundle_id = info["bundle_id"]
            fault = None if folder is None or bundle_id is None else _fault_of_manifest(folder, bundle_id)
            info["unreadable"], info["stripped"] = fault is not None, bundle_id in stripped
            if fault is not None:
                why = fault.message.replace(PUT_BACK, "").strip()
                remedy = _KEEP_AWAKE.format(info["session"]) if info["state"] == "awake" else PUT_BACK
                session, version = info["session"], info["version"]
                message = f"Version {version} of {session} cannot be woken: {why} {remedy}"
                problems.append(Finding(fault.details["path"], fault.code, message, session, version))
    return problems


def find_missing(place: Path, session: str | None = None) -> list[Finding]:
    """Find the versions, of a session or of all, that a tag or a pin alone tells of. One may be newer than what the
    session wakes with. The index is read only if a version lacks its manifest."""
    only = None if session is None else parse_reference(session)
    with _folder_of(place) as folder, contextlib.suppress(StoreError):
        if folder is not None and findings_of_missing(folder, lambda _: False, only):
            with open_store(place) as opened:
                return findings_of_missing(folder, opened.index.knows, only)
    return []


def _stripped_in(folder: StoreFolder | None) -> frozenset[str]:
    """The bundle ids of stripped versions; none if the marks cannot be read, which is told elsewhere."""
    return (stripped_in(folder) if folder is not None else None) or frozenset()


def _fault_of_manifest(folder: StoreFolder, bundle_id: str) -> StoreError | None:
    """Why a manifest cannot be read, with its path; None if it can. A listing asks for each session: one that is sound
    at the first look is not looked at again."""
    try:
        fd = os.open(manifest_name(require_id(bundle_id)), _LOOK, dir_fd=folder.root_fd)
        try:
            data = os.read(fd, _MOST_AT_A_LOOK)
        finally:
            os.close(fd)
        if is_manifest_file(data, bundle_id):
            return None
    except (OSError, ValueError):
        pass
    try:
        fd, path = folder.open_name(manifest_name(require_id(bundle_id)))
        with closing_fd(fd):
            read_manifest_bytes(fd, path, bundle_id)
    except StoreError as error:
        return error
    except ValueError:  # no id: a daemon's fault
        pass
    return None


@contextlib.contextmanager
def _folder_of(place: Path) -> Iterator[StoreFolder | None]:
    """A store's folders, to look at; None if that fails: the fault is reported elsewhere."""
    try:
        root_fd = open_existing_root(os.path.abspath(place))
        try:
            folder = StoreFolder(str(place), root_fd, load_store_uuid(root_fd, str(place)))
        except BaseException:
            os.close(root_fd)
            raise
    except StoreError:
        yield None
        return
    try:
        yield folder
    finally:
        folder.close()


def sizes_of(path: Path, sessions: Sequence[str]) -> str:
    """A sentence behind a blank: what is freed if whole sessions go; nothing where it would take seconds to tell."""
    with contextlib.suppress(TorporError), open_store(path) as store:
        if len(store.index.bundle_ids()) <= _MOST_COUNTED:
            named = [store.named(each).require_whole() for each in sessions]
            if any(each.row is not None for each in named):
                return ""
            _, together = store.usage_together({each.uri for each in named})
            if together.sessions:
                whose = "its" if len(together.sessions) == 1 else "theirs"
                alone, shared = format_bytes(together.alone_bytes), format_bytes(together.shared_bytes)
                return f" {alone} is {whose} alone, and freed; {shared} is shared, and stays."
    return ""


def find_holder(place: Path) -> int | None:
    """The process that has a store for writing; None if none is known."""
    try:
        with closing_fd(open_existing_root(os.path.abspath(place))) as root_fd:
            return lock.find_holder(root_fd, str(place))
    except StoreError:
        return None  # no readable store: that is reported elsewhere


def describe_holder(pid: int, place: Path) -> str:
    """Name the process that has a store while no daemon answers, and say how it ends without a loss."""
    return (
        f"process {pid} has the store {place}: a daemon on another socket (--socket), one whose socket is gone"
        f" (`kill {pid}` puts its sessions to sleep and ends it), or a command at work on it"
    )
