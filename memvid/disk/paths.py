"""Opens files in a store without leaving it: one component at a time, never through a link, never by a client's text.

Owns the refusal of links, FIFOs, devices, second hard links and foreign owners.

Rules: every open is relative to an open folder and carries O_NOFOLLOW and O_CLOEXEC; files also O_NONBLOCK, for a FIFO
would block forever. The store's own path is the user's choice and is resolved once; inside it no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Self

from ..errors import StoreIoError, UnsafePath

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600

Stamp = tuple[int, int, int, int, int]
"""Device, inode, size, modification and change time of a file. The change time cannot be set back."""

_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_READ_BYTES: Final = 16 << 20
_MAX_PATH_BYTES: Final = 1023 if sys.platform == "darwin" else 4095
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_CHOOSE_ANOTHER: Final = "It is no store either: choose a folder of your own (--store, or $TORPOR_STORE)."
_PUT_THE_FILE: Final = (
    "Inside a store nothing is followed. Put the file itself in its place; or move this out of the store, and let "
    "`torpor repair` save what needed it."
)


@contextlib.contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """Undo something if the block fails."""
    try:
        yield
    except BaseException:
        undo()
        raise


class Closing:
    """Something open that a `with` statement closes at its end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def whole_path(path: str | os.PathLike[str]) -> str:
    """A path that the user names, from the root on. Raises StoreIoError: no file can have it."""
    whole = os.path.abspath(os.fspath(path))
    try:
        encoded = os.fsencode(whole)
    except UnicodeError:
        encoded = b"\0"
    if b"\0" in encoded or len(encoded) > _MAX_PATH_BYTES:
        raise StoreIoError("That is no path that a file can have.", path=ascii(whole)[:160], action="open", errno=0)
    return whole


def open_root(path: str, mark: str) -> int:
    """Open the store's own folder; links above it are the user's choice. A folder without the file `mark` is no store:
    its refusal does not say how to make it usable. Raises FileNotFoundError, UnsafePath, StoreIoError."""
    try:
        fd = os.open(os.path.realpath(path), _FOLDER_FLAGS)
    except PermissionError as error:
        raise _shut_out(error, path) from error
    try:
        is_marked = mark in os.listdir(fd)
    except OSError:
        is_marked = False
    return _require_private_folder(fd, path, "" if is_marked else _CHOOSE_ANOTHER)


def open_folder(parent_fd: int, name: str, path: str) -> int:
    """Open a folder inside the store. Raises FileNotFoundError, UnsafePath."""
    try:
        fd = os.open(name, _FOLDER_FLAGS, dir_fd=parent_fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _why_refused(error, path) from error
    return _require_private_folder(fd, path)


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened_folder(parent_fd: int, name: str, path: str) -> Iterator[int]:
    """A folder inside the store, open for the block. Raises FileNotFoundError, UnsafePath."""
    with closing_fd(open_folder(parent_fd, name, path)) as fd:
        yield fd


def open_file(parent_fd: int, name: str, flags: int, path: str) -> int:
    """Open a regular file of our own with a single name. Raises FileNotFoundError, UnsafePath, StoreIoError."""
    try:
        fd = os.open(name, flags | _FILE_FLAGS, FILE_MODE, dir_fd=parent_fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _why_refused(error, path) from error
    with undoing(partial(os.close, fd)):
        require_own_regular(stat_open(fd, path), path)
    return fd


def open_foreign_file(path: str) -> int:
    """Open a file of the user's to read it, anywhere: links and owners are the user's choice.

    Raises:
        StoreIoError: it is not there, may not be read, or is a folder, a FIFO or a device.
    """
    try:
        fd = os.open(whole_path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise io_error(error, "open", path) from error
    if not stat.S_ISREG(stat_open(fd, path).st_mode):
        os.close(fd)
        raise StoreIoError(f"{path} is not a file.", path=path, action="read", errno=0)
    return fd


def read_small(folder_fd: int, name: str, max_bytes: int, path: str) -> bytes:
    """A whole file, or `max_bytes` of it and one more. Raises FileNotFoundError, UnsafePath, StoreIoError."""
    with closing_fd(open_file(folder_fd, name, os.O_RDONLY, path)) as fd:
        return read_up_to(fd, max_bytes + 1, path)


def read_up_to(fd: int, max_bytes: int, path: str) -> bytes:
    """The bytes that follow in an open file, `max_bytes` at most. Raises StoreIoError."""
    chunks, left = [], max_bytes
    try:
        while left and (chunk := os.read(fd, min(left, _READ_BYTES))):
            chunks.append(chunk)
            left -= len(chunk)
    except OSError as error:
        raise io_error(error, "read", path) from error
    return b"".join(chunks)


def read_at(fd: int, offset: int, size_bytes: int, path: str) -> bytes:
    """The bytes at a place of an open file, fewer at its end. Raises StoreIoError."""
    try:
        return os.pread(fd, size_bytes, offset)
    except OSError as error:
        raise io_error(error, "read", path) from error


def list_names(folder_fd: int, path: str) -> list[str]:
    """The names in a folder, sorted. Raises StoreIoError. Copies of a descriptor share one position, and a thread that
    lists beside another would miss names: so it opens its own."""
    try:
        with closing_fd(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder_fd)) as own_fd:
            return sorted(os.listdir(own_fd))
    except OSError as error:
        raise io_error(error, "list", path) from error


def stat_name(folder_fd: int, name: str, path: str) -> os.stat_result:
    """The status of a name in a folder, of a link itself. Raises FileNotFoundError, StoreIoError."""
    try:
        return os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise io_error(error, "look at", path) from error


def plain_status(folder_fd: int | None, name: str) -> os.stat_result | None:
    """The status of a plain file; None for anything else, and where the system does not tell."""
    with contextlib.suppress(OSError):
        status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
        return status if stat.S_ISREG(status.st_mode) else None
    return None


def plain_bytes(folder_fd: int | None, name: str) -> int:
    """The bytes of a plain file; 0 for anything else, and where the system does not tell."""
    status = plain_status(folder_fd, name)
    return status.st_size if status is not None else 0


def stat_open(fd: int, path: str) -> os.stat_result:
    """The status of an open file. Raises StoreIoError."""
    try:
        return os.fstat(fd)
    except OSError as error:
        raise io_error(error, "look at", path) from error


def is_named(folder_fd: int, name: str, fd: int, path: str) -> bool:
    """Whether a folder has an open file or folder under this name. Raises StoreIoError."""
    try:
        named = stat_name(folder_fd, name, path)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, stat_open(fd, path))


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file: another file of the same name has another, and so has this one after a write."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def require_own_regular(status: os.stat_result, path: str) -> None:
    """Raise UnsafePath unless this is a regular file of our own that has no second name."""
    if not stat.S_ISREG(status.st_mode):
        raise _unsafe(path, "it is not a regular file", _PUT_THE_FILE)
    if status.st_uid != os.geteuid():
        raise _unsafe(path, f"it belongs to user {status.st_uid}", _give_to_you(path, status))
    if status.st_nlink > 1:  # 0 is a file that was deleted after we opened it
        advice = (
            "A process that has another of its names can change it. Make it a file of its own: cp -p FILE FILE.copy && "
            "mv FILE.copy FILE"
        )
        raise _unsafe(path, f"it has {status.st_nlink} hard links", advice)


def _require_private_folder(fd: int, path: str, otherwise: str = "") -> int:
    with undoing(partial(os.close, fd)):
        status = stat_open(fd, path)
        if status.st_uid != os.geteuid():
            raise _unsafe(path, f"it belongs to user {status.st_uid}", otherwise or _give_to_you(path, status))
        if status.st_mode & _OTHERS_MAY_WRITE:
            raise _unsafe(
                path, "others may write in it", otherwise or f"Take that away, from all in it too: chmod -R go-w {path}"
            )
    return fd


def _give_to_you(path: str, status: os.stat_result) -> str:
    """Advice to make a file usable for the present user. Its right owner is unknown here."""
    return f"Work as user {status.st_uid}, or, if it should be yours: sudo chown {os.geteuid()} {path}"


def _shut_out(error: PermissionError, path: str) -> UnsafePath | StoreIoError:
    """The error for the store's own folder that may not be opened: whose it is, as far as that can be seen."""
    with contextlib.suppress(OSError):
        owner = os.stat(path).st_uid
        if owner != os.geteuid():
            return _unsafe(path, f"it belongs to user {owner}, who alone may open it", f"Work as user {owner}.")
    refused = io_error(error, "open", path)
    advice = f"Give user {os.geteuid()}, as whom this runs, the right to read there."
    return StoreIoError(f"{refused.message} {advice}", **refused.details)


def _why_refused(error: OSError, path: str) -> Exception:
    """The error for a refused open: a link or a wrong kind of file is unsafe."""
    if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENOTDIR, errno.ENXIO, errno.EISDIR):
        return _unsafe(path, "it is a link, or not the kind of file that belongs there", _PUT_THE_FILE)
    return io_error(error, "open", path)


def io_error(error: OSError, action: str, path: str) -> StoreIoError:
    """The error for a failure of the operating system, with the action and the path."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return StoreIoError(
        f"Cannot {action} {path}: {reason}.", path=path, action=action, errno=error.errno or 0, reason=reason
    )


def _unsafe(path: str, why: str, advice: str) -> UnsafePath:
    return UnsafePath(f"{path} is refused: {why}. {advice}", path=path, reason=why)
