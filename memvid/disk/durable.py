"""The one place that writes durably: complete writes, flushes, renames, and the errors for their failures.

Owns temporary files and the order write → flush → rename → flush folder. Knows nothing of the content.

Rules: a file once published is never changed. A failed write leaves only a temporary file, which is removed. A failed
flush is never tried again, for nothing tells what the disk holds: DurabilityLost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from ...errors import TorporError
from ...places import NO_LINKS_ERRNOS
from ..errors import DurabilityLost, NoSpace, StoreError, StoreIoError
from ..limits import MAX_IOVECS
from ..units import format_bytes
from .paths import FILE_MODE, FOLDER_MODE, Closing, io_error, list_names, plain_status

TEMP_SUFFIX: Final = ".tmp"
TEMP_NAME: Final = re.compile(r"[0-9a-f]{16}\.tmp", re.ASCII)
"""The names that `TempFile` gives: only these are taken for leftovers."""

NO_SPACE_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_STAT_BLOCK_BYTES: Final = 512
"""The unit of `st_blocks`, on every filesystem, in bytes."""

_WRITTEN: Final[set[str]] = set()
"""The names of the temporary files that this process writes now. A name is as good as unique."""

_TEMP_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_error(
    error: OSError, action: str, path: str, otherwise: str = "", *, fd: int | None = None, needed_bytes: int = 0
) -> StoreError:
    """The typed error for a failed write; a failed flush has its own. otherwise: another way out where writing is
    forbidden. fd: the file being written. needed_bytes: its planned length."""
    if error.errno in NO_SPACE_ERRNOS:
        details = _room(error, fd, needed_bytes)
        return NoSpace(
            f"No room to {action} {path}: {os.strerror(error.errno or 0)}.{describe_room(details)} Free some space "
            "(`torpor rm` works on a full disk) and try again; the store is as it was.",
            path=path,
            action=action,
            errno=error.errno,
            **details,
        )
    return writable_advised(io_error(error, action, path), otherwise)


def _room(error: OSError, fd: int | None, needed_bytes: int) -> dict[str, int]:
    """The free bytes of a full disk once this file is gone, and the bytes it needs; nothing for a quota or a file
    limit."""
    if error.errno != errno.ENOSPC or fd is None:
        return {}
    try:
        disk, written_bytes = os.fstatvfs(fd), os.fstat(fd).st_blocks * _STAT_BLOCK_BYTES
    except OSError:
        return {}
    return {"free_bytes": disk.f_bavail * disk.f_frsize + written_bytes, "needed_bytes": needed_bytes}


def describe_room(details: Mapping[str, Any]) -> str:
    """The room that a `NoSpace` tells, as a sentence after a space; "" if it tells none."""
    if "free_bytes" not in details:
        return ""
    free, needed = format_bytes(details["free_bytes"]), format_bytes(details["needed_bytes"])
    return f" This needs about {needed}, and {free} are free there."


def writable_advised(error: StoreIoError, otherwise: str = "") -> StoreIoError:
    """The error, with advice if writing is forbidden there. otherwise: another way out."""
    number = error.details.get("errno")
    if number == errno.EROFS:
        advice = "Mount its file system for writing"
    elif number in (errno.EACCES, errno.EPERM):
        advice = f"Give user {os.geteuid()}, as whom this runs, the right to write there"
    else:
        return error
    return StoreIoError(f"{error.message} {advice}{otherwise}.", **error.details)


def sync_file(fd: int, path: str) -> None:
    """Flush a file to the disk itself. Raises DurabilityLost."""
    _sync(fd, path)


def sync_folder(fd: int, path: str) -> None:
    """Flush a folder, so that the names in it survive. Raises DurabilityLost."""
    _sync(fd, path)


def _sync(fd: int, path: str) -> None:
    try:
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # fsync on macOS stops at the drive's cache
        else:
            os.fsync(fd)
    except OSError as error:
        raise DurabilityLost(
            f"Flushing {path} to the disk failed: {os.strerror(error.errno or 0)}. What the disk holds of it is "
            "unknown; nothing more is written until the store is opened again. Check the disk first.",
            path=path,
            errno=error.errno,
        ) from error


def write_at(fd: int, offset: int, data: bytes, path: str) -> None:
    """Write all of `data` at a place of a file, however often the system takes only a part. Raises NoSpace,
    StoreIoError."""
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(fd, data[done:], offset + done)
        except OSError as error:
            raise write_error(error, "write", path, fd=fd, needed_bytes=len(data)) from error


class TempFile(Closing):
    """A file being written, private until `publish`. One thread at a time.

    It has a descriptor of its own of the folder that it lies in: so it can be removed, also once the store is closed.
    changing: is entered around each change of a name in that folder.
    """

    def __init__(
        self,
        folder_fd: int,
        folder_path: str,
        prefix: str = "",
        changing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """prefix: of its name, in a folder that is not the store's."""
        self._changing = changing
        self._folder_path = folder_path
        self._name = f"{prefix}{os.urandom(8).hex()}{TEMP_SUFFIX}"
        self.path = f"{folder_path}/{self._name}"
        self.size_bytes = 0
        self.whole_bytes: Callable[[], int] = lambda: 0  # how long it is to be; asked only where the disk is full
        _WRITTEN.add(self._name)  # before the file exists, or it is taken for a leftover
        with contextlib.ExitStack() as stack:
            stack.callback(_WRITTEN.discard, self._name)
            try:
                self._folder_fd = os.dup(folder_fd)
                stack.callback(os.close, self._folder_fd)
                with changing():
                    self.fd = os.open(self._name, _TEMP_FLAGS, FILE_MODE, dir_fd=self._folder_fd)
            except OSError as error:
                raise write_error(error, "create", self.path) from error
            stack.pop_all()
        self._published = False
        self._behind: threading.Thread | None = None
        self._failed: list[BaseException] = []

    def append(self, buffers: Sequence[memoryview | bytes]) -> None:
        """Write all buffers at the end, with short writes continued. Raises NoSpace, StoreIoError."""
        waiting = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        done = 0  # buffers written in full; the one after them may have been cut
        while done < len(waiting):
            try:
                written = os.writev(self.fd, waiting[done : done + MAX_IOVECS])
            except OSError as error:
                left = sum(buffer.nbytes for buffer in waiting[done:])
                raise self._write_error(error, self.size_bytes + left) from error
            self.size_bytes += written
            while done < len(waiting) and written >= waiting[done].nbytes:
                written -= waiting[done].nbytes
                done += 1
            if written:
                waiting[done] = waiting[done][written:]

    def write_at(self, offset: int, buffers: Sequence[memoryview | bytes]) -> None:
        """Write buffers one after the other from an offset on, for a file with a layout known before its content."""
        for buffer in buffers:
            left = memoryview(buffer).cast("B")
            while left.nbytes:
                try:
                    written = os.pwrite(self.fd, left, offset)
                except OSError as error:
                    raise self._write_error(error, offset + left.nbytes) from error
                left, offset = left[written:], offset + written
        self.size_bytes = max(self.size_bytes, offset)

    def _write_error(self, error: OSError, end: int) -> StoreError:
        """end: the offset at which the failed write would have ended."""
        if error.errno != errno.ENOSPC:
            return write_error(error, "write", self.path)
        try:
            needed = max(self.whole_bytes(), self.size_bytes, end)
        except TorporError:  # the source cannot even be read: its length stays unsaid
            return write_error(error, "write", self.path)
        return write_error(error, "write", self.path, fd=self.fd, needed_bytes=needed)

    def sync_behind(self, then: Callable[[], None]) -> bool:
        """Flush what is written so far, and then do `then`, on a thread, while more is appended; what goes wrong is
        raised by `sync`. False: an earlier one is under way, or has failed, and nothing was begun."""
        if self._behind is not None and (self._behind.is_alive() or self._failed):
            return False

        def work() -> None:
            try:
                sync_file(self.fd, self.path)
                then()
            except BaseException as error:  # noqa: BLE001 - it belongs to who writes
                self._failed.append(error)

        thread = threading.Thread(target=work, name="torpor-sync")
        try:
            thread.start()
        except RuntimeError:  # the system has none left, or the process ends: `sync` does it
            return False
        self._behind = thread
        return True

    def sync(self) -> None:
        """Flush all that is written, once nothing is under way behind it. Raises DurabilityLost, and what `then` has
        raised: after a failed flush there is no other."""
        self._wait_behind()
        if self._failed:
            raise self._failed[0]
        sync_file(self.fd, self.path)

    def _wait_behind(self) -> None:
        if self._behind is not None:
            self._behind.join()

    def duplicate(self) -> int:
        """Another descriptor of the file, to read it back. Raises StoreIoError."""
        try:
            return os.dup(self.fd)
        except OSError as error:
            raise io_error(error, "open", self.path) from error

    def publish(self, name: str, *, replacing: bool = False, flushing: bool = True) -> None:
        """Give the flushed file its name and flush the folder: from then on it survives power loss. Without `flushing`
        it may not.

        Raises:
            NoSpace, StoreIoError
            DurabilityLost: the folder could not be flushed. The name is taken back as far as possible, but not with
                `replacing`: the old file is gone, and nothing would be left of either.
        """
        try:
            with self._changing():
                os.rename(self._name, name, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
        except OSError as error:
            raise write_error(error, "rename", f"{self._folder_path}/{name}") from error
        self._published = True
        if not flushing:
            return
        try:
            sync_folder(self._folder_fd, self._folder_path)
        except DurabilityLost:
            if not replacing:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._folder_fd)
            raise

    def publish_new(self, name: str) -> None:
        """Give the flushed file a name in its own folder that nothing has, and flush the folder.

        A link fails if the name is taken, unlike a rename. Without hard links an empty file takes the name first; only
        a crash can leave it behind.

        Raises:
            FileExistsError: the name is taken; nothing was changed.
            DurabilityLost: the folder could not be flushed; the name is taken back as far as possible.
        """
        path = f"{self._folder_path}/{name}"
        try:
            self._link(name)
        except FileExistsError:
            raise
        except OSError as error:
            raise write_error(error, "create", path) from error
        try:
            os.unlink(self._name, dir_fd=self._folder_fd)
            self._published = True
        except FileNotFoundError:
            self._published = True  # renamed
        except OSError:
            pass  # the file has its name; a second one is no reason to fail, and `close` tries again
        try:
            sync_folder(self._folder_fd, self._folder_path)
        except DurabilityLost:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self._folder_fd)
            raise

    def _link(self, name: str) -> None:
        folder = self._folder_fd
        try:
            os.link(self._name, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno not in NO_LINKS_ERRNOS:
                raise
            os.close(os.open(name, _TEMP_FLAGS, FILE_MODE, dir_fd=folder))
            try:
                os.rename(self._name, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
                raise

    def close(self) -> None:
        """Close, and remove the file unless it was published. Never raises; leftovers are removed at the next open."""
        self._wait_behind()
        with contextlib.suppress(OSError):
            os.close(self.fd)
        if not self._published:
            with contextlib.suppress(OSError), self._changing():
                os.unlink(self._name, dir_fd=self._folder_fd)
        with contextlib.suppress(OSError):
            os.close(self._folder_fd)
        _WRITTEN.discard(self._name)


def write_file(folder_fd: int, name: str, data: bytes, folder_path: str, *, replacing: bool = False) -> None:
    """Write a small file durably and atomically.

    With `replacing` a file of that name is replaced: at any failure, the old or the new one is there.
    """
    with TempFile(folder_fd, folder_path) as temp:
        temp.append([data])
        temp.sync()
        temp.publish(name, replacing=replacing)


def write_unflushed(folder_fd: int, name: str, data: bytes, folder_path: str) -> None:
    """Replace a small file atomically, but not durably: after a power cut the old one, the new one, a torn one or none
    may be there. Raises NoSpace, StoreIoError."""
    with TempFile(folder_fd, folder_path) as temp:
        temp.append([data])
        temp.publish(name, flushing=False)


def make_folder(parent_fd: int, name: str, parent_path: str) -> None:
    """Create a folder durably, unless it exists."""
    try:
        os.mkdir(name, FOLDER_MODE, dir_fd=parent_fd)
    except FileExistsError:
        return
    except OSError as error:
        raise write_error(error, "create", f"{parent_path}/{name}") from error
    sync_folder(parent_fd, parent_path)


def move(from_fd: int, name: str, from_path: str, to_fd: int, new: str, to_path: str) -> None:
    """Move a file into another folder, durably. Raises FileNotFoundError as it is, NoSpace, StoreIoError,
    DurabilityLost."""
    try:
        os.rename(name, new, src_dir_fd=from_fd, dst_dir_fd=to_fd)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise write_error(error, "move", f"{from_path}/{name}") from error
    sync_folder(to_fd, to_path)  # the new folder first: a power cut may leave two names, but not none
    sync_folder(from_fd, from_path)


def leftovers(folder_fd: int, path: str) -> list[str]:
    """The names of what unfinished writes left in a folder: plain files with a name that `TempFile` gives, but those
    that this process writes. All others belong to a user. Only under the store's lock. Raises StoreIoError."""
    names = filter(TEMP_NAME.fullmatch, list_names(folder_fd, path))
    return [name for name in names if name not in _WRITTEN and plain_status(folder_fd, name) is not None]


def being_written(folder_fd: int, path: str) -> set[str]:
    """The names of the temporary files in a folder that this process writes now. Raises StoreIoError."""
    return _WRITTEN.intersection(list_names(folder_fd, path))


def remove(folder_fd: int, name: str, folder_path: str) -> bool:
    """Remove a name, if it is there; durable after the next `sync_folder`. Says whether it was."""
    try:
        os.unlink(name, dir_fd=folder_fd)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise io_error(error, "remove", f"{folder_path}/{name}") from error
    return True
