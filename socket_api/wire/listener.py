"""The listening socket's file: made where only this user can reach it, never in place of a live one, removed by its
maker.

Owns the file and its folder. Does not accept connections.

Order (each step has a test): the path fits → the folder is there (made with mode 0700), ours, and writable by no other
user → no other user can replace it or a folder above it → the folder is locked, so that two starting daemons take turns
→ a socket at the path that no process answers on is removed; anything else there is refused → bind under a umask that
leaves 0600 → listen → unlock. It must listen before it unlocks: a bound socket that does not listen yet looks like the
leftover of a dead daemon.

Where a supervisor has made the socket and hands it over, as systemd does (sd_listen_fds), it is used as it is, and its
file stays: clients wait in its queue until the next daemon.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import SocketInUse, UnsafeSocketPath
from .address import require_path_fits

_BACKLOG = 4096
"""Clients that may wait for an accept; a system with a lower limit takes its own."""
_LOCK_TIMEOUT_S = 10.0
_LOCK_POLL_S = 0.02
_MOST_LINKS = 40  # as Linux
_FIRST_HANDED_OVER = 3  # SD_LISTEN_FDS_START
_MOST_HANDED_OVER = 16
_GONE = (errno.ECONNREFUSED, errno.ENOENT)


@dataclass(frozen=True, slots=True)
class Listener:
    """A bound, listening, non-blocking socket and the identity of its file: zeros for one that is a supervisor's."""

    socket: socket.socket
    path: str
    device: int
    inode: int

    def remove(self) -> None:
        """Close, and remove the file if it is still the one we made. Idempotent."""
        self.socket.close()
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == (self.device, self.inode):
                os.unlink(self.path)


def open_listener(path: str | os.PathLike[str]) -> Listener:
    """Bind and listen. May wait for another starting daemon, so not for the event loop's thread. Raises
    SocketPathTooLong, UnsafeSocketPath, SocketInUse: nothing has changed, but the folder may have been made."""
    absolute = require_path_fits(path)
    with _locked_folder(os.path.dirname(absolute)):
        if (handed_over := _handed_over(absolute)) is not None:
            return _taken_over(handed_over, absolute)
        _remove_stale(absolute)
        return _bind(absolute)


def require_free(path: str | os.PathLike[str]) -> None:
    """Check early, before a model is loaded, that `open_listener` would succeed. Waits and raises as it does."""
    absolute = require_path_fits(path)
    with _locked_folder(os.path.dirname(absolute)):
        if (handed_over := _handed_over(absolute)) is not None:
            handed_over.close()
        else:
            _find_stale(absolute)


@contextlib.contextmanager
def _locked_folder(folder: str) -> Iterator[None]:
    descriptor = _open_folder(folder)
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while not _try_lock(descriptor, folder):
            if time.monotonic() > deadline:
                raise SocketInUse(f"Another daemon is starting in {folder} and does not finish. End it.", path=folder)
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)  # unlocks


def _open_folder(folder: str) -> int:
    try:
        with _umask(0o077), contextlib.suppress(FileExistsError):  # under any umask: 0277 would lock us out
            os.makedirs(folder, 0o700)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise UnsafeSocketPath(
            f"The socket's folder {folder} cannot be used: {error.strerror}. Name a folder of your own, not a link.",
            path=folder,
        ) from error
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        os.close(descriptor)
        # A sticky folder, or another user's, is shared on purpose: to close it would break the work of others there.
        shared = status.st_mode & stat.S_ISVTX or status.st_uid != os.geteuid()
        remedy = f"a folder in it, as {folder}/torpor/socket" if shared else f"another folder, or: chmod 700 {folder}"
        raise UnsafeSocketPath(
            f"The socket's folder {folder} is not yours alone (owner {status.st_uid}, mode"
            f" {stat.S_IMODE(status.st_mode):04o}): others could put a socket of theirs in its place."
            f" Use {remedy}",
            path=folder,
            owner=status.st_uid,
            mode=f"{stat.S_IMODE(status.st_mode):04o}",
        )
    try:
        _require_safe_parents(folder)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_safe_parents(folder: str) -> None:
    """Refuse a folder that others could replace, or one with such a folder or link on the way. A sticky folder of
    root's (/tmp) is safe: there users can move only their own."""
    for step in sorted(_way_to(folder)):
        status = os.lstat(step)
        mode = stat.S_IMODE(status.st_mode)
        is_shared = stat.S_ISDIR(status.st_mode) and mode & 0o022 and not mode & stat.S_ISVTX
        if status.st_uid not in (0, os.geteuid()) or is_shared:
            raise UnsafeSocketPath(
                f"{step}, on the way to the socket, belongs to user {status.st_uid} and has mode {mode:04o}."
                f" Others could put another in the place of {folder}. Choose a path below your own home with"
                f" --socket, or take from others the right to write there: chmod go-w {step}",
                path=step,
                owner=status.st_uid,
                mode=f"{mode:04o}",
            )


def _way_to(folder: str) -> set[str]:
    """The folders and links that the kernel passes on the way to an absolute path."""
    way, at, left, links = set(), "/", folder.split("/")[::-1], 0
    while left:
        way.add(at)
        part = left.pop()
        step = os.path.dirname(at) if part == ".." else os.path.join(at, part) if part not in ("", ".") else at
        if not os.path.islink(step):
            at = step
            continue
        way.add(step)
        links += 1
        if links > _MOST_LINKS:
            raise UnsafeSocketPath(f"{folder} leads through too many links. Name a folder of your own.", path=folder)
        target = os.readlink(step)
        left += target.split("/")[::-1]
        at = "/" if target.startswith("/") else at
    return way


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    previous = os.umask(mask)
    try:
        yield
    finally:
        os.umask(previous)


def _try_lock(descriptor: int, folder: str) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UnsafeSocketPath(
            f"The socket's folder {folder} cannot be locked: {error.strerror}. Its file system keeps no two daemons"
            " apart. Choose a folder on a disk of this machine with --socket.",
            path=folder,
        ) from error
    return True


def _find_stale(path: str) -> os.stat_result | None:
    """Return the socket that a dead daemon left at the path, or None if there is none.

    Raises:
        UnsafeSocketPath: something else is there.
        SocketInUse: a process answers.
    """
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise UnsafeSocketPath(
            f"{path} exists and is not a socket of yours. Remove it, or choose another path with --socket.", path=path
        )
    if _answers(path):
        raise SocketInUse(
            f"A daemon is serving on {path} already. Use it, or stop it first (torpor stop). For a second "
            "daemon, choose another --socket.",
            path=path,
        )
    return found


def _remove_stale(path: str) -> None:
    found = _find_stale(path)
    if found is not None and os.path.samestat(found, os.lstat(path)):
        os.unlink(path)


def _answers(path: str) -> bool:
    """Whether a process listens. A full backlog (EAGAIN) counts; only a refusal does not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) not in _GONE


def _bind(path: str) -> Listener:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The mode must be right from the first instant: a later chmod would leave a gap (threat 40).
        with _umask(0o177):
            bound.bind(path)
        bound.listen(_BACKLOG)
        bound.setblocking(False)
        status = os.lstat(path)
    except OSError as error:
        bound.close()
        raise UnsafeSocketPath(f"No socket can be made at {path}: {error.strerror}.", path=path) from error
    return Listener(bound, path, status.st_dev, status.st_ino)


# --- a supervisor's


def _handed_over(path: str) -> socket.socket | None:
    """The socket at the path that a supervisor has made for this process; None if it has made none."""
    count = os.environ.get("LISTEN_FDS", "")
    if os.environ.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return None
    for number in range(min(int(count), _MOST_HANDED_OVER)):
        with contextlib.suppress(OSError):
            found = socket.socket(fileno=os.dup(_FIRST_HANDED_OVER + number))
            if (found.family, found.type) == (socket.AF_UNIX, socket.SOCK_STREAM) and found.getsockname() == path:
                return found
            found.close()
    return None


def _taken_over(handed_over: socket.socket, path: str) -> Listener:
    try:
        status = os.lstat(path)
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise UnsafeSocketPath(
                f"The socket {path} that a supervisor has made is not yours alone (owner {status.st_uid}, mode"
                f" {stat.S_IMODE(status.st_mode):04o}). A unit of systemd needs SocketMode=0600.",
                path=path,
            )
        handed_over.listen(_BACKLOG)  # anew: who connects is told that this process listens, and not its supervisor
        handed_over.setblocking(False)
    except OSError as error:
        handed_over.close()
        raise UnsafeSocketPath(f"The socket at {path} cannot be taken over: {error.strerror}.", path=path) from error
    except BaseException:
        handed_over.close()
        raise
    return Listener(handed_over, path, 0, 0)
