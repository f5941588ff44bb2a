"""One writer for each store: a flock on STORE/lock, and the check that the lock file is still the one we locked.

The kernel frees the lock when its owner dies, so no lock is ever stale; the pid in the file only helps a person. A
second owner could lock a file that was unlinked and made anew: so the inode is compared after locking and before each
write.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from functools import partial
from typing import Final

from ..errors import LockLost, StoreIoError, StoreLocked
from .durable import writable_advised
from .paths import Closing, io_error, is_named, open_file, undoing

LOCK_NAME: Final = "lock"
_OTHERWISE: Final = (
    ", or choose another store (--store, $TORPOR_STORE). Without that it can be looked at (torpor ls, show, verify, "
    "du) and copied from (torpor export), but neither served nor changed"
)
WITHOUT_LOCKS: Final = (
    "A file system without locks (flock), as some that lie on a network, keeps no two daemons apart. Choose a folder "
    "on a disk of this machine (--store, or $TORPOR_STORE)."
)
_ATTEMPTS: Final = 16
_MAX_PID_BYTES: Final = 32


class StoreLock(Closing):
    """Held from construction until `close`. Raises StoreLocked if another process, or another Store, has it."""

    def __init__(self, root_fd: int, store_path: str) -> None:
        self._root_fd = root_fd
        self._path = f"{store_path}/{LOCK_NAME}"
        self._pid = os.getpid()
        self._fd = self._acquire()
        self._write_pid()

    def _acquire(self) -> int:
        for _ in range(_ATTEMPTS):
            try:
                fd = open_file(self._root_fd, LOCK_NAME, os.O_RDWR | os.O_CREAT, self._path)
            except StoreIoError as error:  # every writer begins here
                raise writable_advised(error, _OTHERWISE) from error
            with undoing(partial(os.close, fd)):  # or this process would lock itself out
                self._lock(fd)
                if is_named(self._root_fd, LOCK_NAME, fd, self._path):
                    return fd
            os.close(fd)
        raise LockLost(f"{self._path} keeps being replaced. Stop whatever removes it.", path=self._path)

    def _lock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _read_pid(fd)
            who = f"process {holder}" if holder else "another process"
            kill = f"kill {holder}" if holder else "kill PID"
            raise StoreLocked(
                f"The store is in use by {who}: {self._path} is locked. Stop that daemon, or talk to it; if its "
                f"socket is gone, `{kill}` puts its sessions to sleep and ends it.",
                path=self._path,
                holder_pid=holder,
            ) from error
        except OSError as error:
            failed = io_error(error, "lock", self._path)
            raise StoreIoError(f"{failed.message} {WITHOUT_LOCKS}", **failed.details) from error

    def _write_pid(self) -> None:
        with contextlib.suppress(OSError):  # information only; on a full disk the lock still holds
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def require_held(self) -> None:
        """Raise LockLost unless this process has the lock, and the file that we locked is still the store's."""
        if os.getpid() != self._pid:
            raise LockLost(
                f"{self._path} is locked by process {self._pid}, from which this one was forked: it writes nothing. "
                "Open the store again once that one has closed it.",
                path=self._path,
            )
        if self._fd < 0 or not is_named(self._root_fd, LOCK_NAME, self._fd, self._path):
            raise LockLost(
                f"{self._path} was removed or replaced while it was locked. This store writes no more; stop the "
                "daemon, see that no other one runs, and start it again.",
                path=self._path,
            )

    def close(self) -> None:
        """Let go. The file stays: unlinking it would allow two owners. A forked child only closes its copy; the lock is
        its parent's."""
        if self._fd >= 0:
            if os.getpid() == self._pid:
                with contextlib.suppress(OSError):  # or a child that is being forked would keep the lock
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1


def find_holder(root_fd: int, store_path: str) -> int | None:
    """The pid of the process that has the store for writing; None if there is none, or it could not write its pid.

    The lock is tried only if that process exists: a trial turns away a writer that opens the store at that instant.

    Raises:
        UnsafePath, StoreIoError: the lock file cannot be looked at.
    """
    path = f"{store_path}/{LOCK_NAME}"
    try:
        fd = open_file(root_fd, LOCK_NAME, os.O_RDONLY, path)
    except FileNotFoundError:
        return None
    try:
        holder = _read_pid(fd)
        if holder is None or not _is_there(holder):
            return None
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return holder
    except OSError as error:
        raise io_error(error, "look at", path) from error
    finally:
        os.close(fd)
    return None


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, _MAX_PID_BYTES, 0).strip()
    return int(text) if text.isdigit() else None


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return pid > 0
