"""Objects in a folder that several machines share: a mounted share, or a folder of one machine.

Owns a compare-and-swap, which no file system has: who changes an object on a condition holds a lock (`flock`) on one
file of the folder, looks at what is there, and gives the new content its name. An object's tag is the digest of its
content, and its length; so two writes of one content look alike, and what is changed by condition holds a token that is
new each time.

Rules:
- A content is written and flushed under a name of its own in `.unfinished`, and named then. So no object is ever half
  there, whenever a process or a machine ends. A writer keeps a lock on what it writes, which ends with it: what nobody
  has locked is removed when the folder is opened.
- The folder is opened by its path for each use, and nothing keeps it open between two: what is gone, unmounted or
  another one by then is noticed, and what came back is used.
- No link is followed below the folder, and nothing but a plain file is read: others may write there.
- Who may read it follows from the umask and the mount, as with all that people share.

What the file system has to do: `flock` that holds between all machines that use the folder, and a rename that replaces
in one step. A local disk does. NFS does from version 4 on, not with the mount options `nolock` and `local_lock`; a
reader may see an older head for as long as its machine keeps names (`lookupcache=none`: not at all), and loses a try by
it, not a change. SMB does where the server grants locks (not with `nobrl`). No machine can see alone that locks do not
hold between two: try it with both. And a machine that NFS takes its locks from, as it sleeps in the moment between its
look and its rename, renames all the same when it goes on: an object store has no such moment.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn

from blake3 import blake3

from ...places import NO_LINKS_ERRNOS
from ..disk.durable import NO_SPACE_ERRNOS
from ..disk.paths import closing_fd, undoing
from ..errors import RemoteError, RemoteRefused, RemoteTooLarge, RemoteUnclear, RemoteUnreachable
from .objects import Entry, Object, Part, Span, is_key, parts_of

_UNFINISHED: Final = ".unfinished"
_LOCK: Final = ".lock"
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_OPEN_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""Of what is to be locked: NFS locks only what may be written."""
_READ_BYTES: Final = 16 << 20
_MOST_PARTS: Final = 8
"""Of a key in a listing: folders within folders have no end."""
_LOCK_S: Final = 20.0
"""How long a lock is waited for. It is held for a look, a rename and a flush."""
_LOOKS_S: Final = (0.001, 0.05)
"""Between two tries to get a lock: at first, and at most."""
_ATTEMPTS: Final = 16
_BETWEEN: Final = "."
"""Of the two halves of a tag."""

_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOTDIR, errno.EISDIR})
_NO_FLUSH: Final = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY})
_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


@dataclass(frozen=True, slots=True)
class _Trying:
    """A block of system calls: what the system raises within becomes an error of ours. naming: a name is given or taken
    away there, which may have happened all the same."""

    url: str
    action: str
    key: str
    naming: bool = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError):
            return
        what = f"{self.action} {self.key}".strip()
        why = os.strerror(error.errno) if error.errno else "no reason is told"
        facts = {"url": self.url, "key": self.key, "action": self.action, "errno": error.errno}
        refusal: type[RemoteError] = RemoteRefused
        if error.errno in NO_SPACE_ERRNOS:
            told = f"{self.url} has no room to {what}: {why}. Make room there, and try again."
        elif error.errno in _FORBIDDEN:
            told = f"{self.url} refuses to {what}: {why}. See that user {os.geteuid()} may read and write all in it."
        elif self.naming:
            refusal = RemoteUnclear
            told = f"{self.url} did not say whether it could {what}: {why}. What it has now must be read back."
        else:
            refusal = RemoteUnreachable
            told = f"{self.url} could not {what}: {why}. See that it is there, and mounted; then try again."
        raise refusal(told, **facts) from error


class FolderObjects:
    """The objects in a folder. Raises RemoteUnreachable: it is not there, or another one is; RemoteRefused: it cannot
    be written in."""

    keeps_old = False

    def __init__(self, path: str, url: str) -> None:
        self.url = url
        self._path = path
        self._was_open = self._is_closed = False

    def place(self) -> object:
        with self._open() as folder:
            return folder.identity

    def get(self, key: str, most_bytes: int) -> Object | None:
        with self._open() as folder:
            return folder.get(key, most_bytes)

    def size(self, key: str) -> int | None:
        with self._open() as folder:
            return folder.size(key)

    def get_ranges(self, spans: Sequence[Span]) -> Iterator[Part | None]:
        with self._open() as folder:
            yield from folder.get_ranges(spans)

    def create(self, key: str, data: bytes) -> str | None:
        with self._open() as folder:
            return folder.create(key, data)

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        with self._open() as folder:
            return folder.replace(key, data, tag)

    def put(self, key: str, parts: Iterable[bytes], size_bytes: int) -> None:
        with self._open() as folder:
            folder.put(key, parts, size_bytes)

    def remove(self, key: str) -> None:
        with self._open() as folder:
            folder.remove(key)

    def entries(self, prefix: str) -> Iterator[Entry]:
        with self._open() as folder:
            yield from folder.entries(prefix)

    def close(self) -> None:
        self._is_closed = True

    @contextlib.contextmanager
    def _open(self) -> Iterator[_OpenFolder]:
        """What is at the path now, for one use."""
        with contextlib.ExitStack() as stack:
            with _Trying(self.url, "open", ""):
                if self._is_closed:
                    raise OSError(errno.EBADF, os.strerror(errno.EBADF))
                try:
                    root = stack.enter_context(closing_fd(os.open(self._path, _FOLDER_FLAGS & ~os.O_NOFOLLOW)))
                except NotADirectoryError as error:
                    raise RemoteRefused(
                        f"{self.url} is no folder. Name a folder that is there (--remote).", url=self.url
                    ) from error
                unfinished = stack.enter_context(closing_fd(self._unfinished_in(root)))
            if not self._was_open:
                _remove_unlocked(unfinished)
                self._was_open = True
            yield _OpenFolder(self.url, root, unfinished)

    def _unfinished_in(self, root: int) -> int:
        """It is made once. Without it, what is at the path is another folder: where nothing is mounted, say."""
        if not self._was_open:
            return _made_folder(root, _UNFINISHED)
        try:
            return _open_folder(root, _UNFINISHED)
        except FileNotFoundError as error:
            raise RemoteUnreachable(
                f"{self.url} is another folder than before: {_UNFINISHED} is missing there. Mount the one of before, "
                "or put it back whole. If this one is to be used as it is, restart the daemon.",
                url=self.url,
            ) from error


class _OpenFolder:
    """The folder while it is open: whatever is at its path meanwhile, one use is of one folder."""

    def __init__(self, url: str, root: int, unfinished: int) -> None:
        self.url = url
        self._root = root
        self._unfinished = unfinished

    @property
    def identity(self) -> tuple[int, int]:
        with self._trying("look at", _UNFINISHED):
            status = os.fstat(self._unfinished)
        return status.st_dev, status.st_ino

    def get(self, key: str, most_bytes: int) -> Object | None:
        with self._trying("read", key), self._opened(key) as fd:
            if fd is None:
                return None
            data = _read_at(fd, 0, most_bytes + 1) if os.fstat(fd).st_size <= most_bytes else None
        if data is None or len(data) > most_bytes:
            raise RemoteTooLarge(
                f"{key} in {self.url} is larger than the {most_bytes} bytes that Torpor writes there at most. "
                "Something else wrote it: see what it is, and remove it.",
                url=self.url,
                key=key,
                limit=most_bytes,
            )
        return Object(data, _tag(data))

    def size(self, key: str) -> int | None:
        with self._trying("look at", key), self._opened(key) as fd:
            return None if fd is None else os.fstat(fd).st_size

    def get_ranges(self, spans: Sequence[Span]) -> Iterator[Part | None]:
        for key, of_key in itertools.groupby(spans, key=lambda span: span[0]):
            with self._trying("read", key), self._opened(key) as fd:
                for _, first, size in of_key:
                    yield None if fd is None else _pieces_at(fd, first, size)

    def create(self, key: str, data: bytes) -> str | None:
        with self._written(key, [data], len(data)) as new, self._locked(key):
            return _tag(data) if self._name_new(new, key) else None

    def _name_new(self, new: str, key: str) -> bool:
        """Give it a name that nothing has. A link does in one step, and where there is none, the lock helps."""
        with self._trying("create", key, naming=True), self._folder_of(key, making=True) as folder:
            assert folder is not None
            name = parts_of(key)[-1]
            try:
                os.link(new, name, src_dir_fd=self._unfinished, dst_dir_fd=folder, follow_symlinks=False)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in NO_LINKS_ERRNOS:
                    raise
                if _status(folder, name) is not None:
                    return False
                os.rename(new, name, src_dir_fd=self._unfinished, dst_dir_fd=folder)
            _flush(folder)
            return True

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        with self._written(key, [data], len(data)) as new, self._locked(key):
            if not self._has_tag(key, tag):
                return None
            self._rename(new, key)
            return _tag(data)

    def put(self, key: str, parts: Iterable[bytes], size_bytes: int) -> None:
        with self._written(key, parts, size_bytes) as new, self._locked(key):
            self._rename(new, key)

    def _rename(self, new: str, key: str) -> None:
        """Give it a name, whatever has that."""
        with self._trying("write", key, naming=True), self._folder_of(key, making=True) as folder:
            assert folder is not None
            os.rename(new, parts_of(key)[-1], src_dir_fd=self._unfinished, dst_dir_fd=folder)
            _flush(folder)

    def remove(self, key: str) -> None:
        parts_of(key)
        with self._locked(key), self._trying("remove", key, naming=True), self._folder_of(key) as folder:
            if folder is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(parts_of(key)[-1], dir_fd=folder)
                _flush(folder)

    def entries(self, prefix: str) -> Iterator[Entry]:
        with self._trying("list", prefix), self._folder_of(f"{prefix}-") as top:
            if top is None:
                return
            for path, folders, files, folder in os.fwalk(".", dir_fd=top, onerror=_raise):
                within = prefix + "".join(f"{part}/" for part in path.split("/")[1:])
                folders[:] = sorted(each for each in folders if is_key(each)) if within.count("/") < _MOST_PARTS else []
                for name in sorted(each for each in files if is_key(each)):
                    status = _status(folder, name)
                    if status is not None:
                        yield Entry(within + name, status.st_size, status.st_mtime_ns)

    def _trying(self, action: str, key: str, *, naming: bool = False) -> _Trying:
        return _Trying(self.url, action, key, naming)

    @contextlib.contextmanager
    def _folder_of(self, key: str, *, making: bool = False) -> Iterator[int | None]:
        """The folder that an object lies in, part by part, for a link is not followed. None: it is not there."""
        with contextlib.ExitStack() as stack:
            fd = stack.enter_context(closing_fd(os.dup(self._root)))
            for part in parts_of(key)[:-1]:
                try:
                    fd = stack.enter_context(closing_fd(_made_folder(fd, part) if making else _open_folder(fd, part)))
                except FileNotFoundError:
                    yield None
                    return
            yield fd

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[int | None]:
        """An object, open to be read. None: it is not there."""
        with self._folder_of(key) as folder:
            try:
                fd = None if folder is None else os.open(parts_of(key)[-1], _READ_FLAGS, dir_fd=folder)
            except FileNotFoundError:
                fd = None
        if fd is None:
            yield None
            return
        with closing_fd(fd):
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
            yield fd

    def _has_tag(self, key: str, tag: str) -> bool:
        """Nothing of another length is read: others may have put anything there, and all wait for the lock."""
        with self._trying("read", key), self._opened(key) as fd:
            if fd is None or tag.partition(_BETWEEN)[2] != str(size_bytes := os.fstat(fd).st_size):
                return False
            return _tag(_read_at(fd, 0, size_bytes)) == tag

    @contextlib.contextmanager
    def _written(self, key: str, parts: Iterable[bytes], size_bytes: int) -> Iterator[str]:
        """A content, flushed under a name in `.unfinished`. It is removed at the end, unless it has got another."""
        parts_of(key)
        with self._trying("write", key):
            name, fd = self._new_file()
        try:
            written = 0
            for part in parts:
                written += len(part)
                if written > size_bytes:
                    break
                with self._trying("write", key):
                    _write(fd, part)
            if written != size_bytes:
                raise ValueError(f"{size_bytes} bytes were to come, and not {written}")
            with self._trying("write", key):
                _flush(fd)
            yield name
        finally:
            self._drop(name, fd)

    def _drop(self, name: str, fd: int) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._unfinished)
        os.close(fd)

    def _new_file(self) -> tuple[str, int]:
        """A name in `.unfinished`, and the file, locked. Who opens the folder may have found it before the lock did."""
        for _ in range(_ATTEMPTS):
            name = os.urandom(16).hex()
            fd = os.open(name, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=self._unfinished)
            with undoing(partial(self._drop, name, fd)):
                if self._lock(fd) and os.fstat(fd).st_nlink:
                    return name, fd
            os.close(fd)
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """While this holds, nobody else gives a name or takes one away: no process, and no other thread of this one."""
        with self._trying("lock", key):
            fd = self._take_lock()
        with closing_fd(fd):  # which lets the lock go
            yield

    def _take_lock(self) -> int:
        until, pause = time.monotonic() + _LOCK_S, _LOOKS_S[0]
        while True:
            fd = os.open(_LOCK, _OPEN_FLAGS | os.O_CREAT, 0o666, dir_fd=self._root)
            with undoing(partial(os.close, fd)):
                while not self._lock(fd):
                    if time.monotonic() > until:
                        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                    time.sleep(pause)
                    pause = min(2 * pause, _LOOKS_S[1])
                named = _status(self._root, _LOCK)
                if named is not None and os.path.samestat(named, os.fstat(fd)):
                    return fd
            os.close(fd)  # somebody removed the file that we locked

    def _lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            raise RemoteRefused(
                f"{self.url} keeps no locks (flock): two machines could take one session there. Mount it with locks, "
                "or choose another place.",
                url=self.url,
                errno=error.errno,
            ) from error
        return True


def _tag(data: bytes) -> str:
    return f"{blake3(data).hexdigest()}{_BETWEEN}{len(data)}"


def _open_folder(parent: int, name: str) -> int:
    return os.open(name, _FOLDER_FLAGS, dir_fd=parent)


def _made_folder(parent: int, name: str) -> int:
    try:
        return _open_folder(parent, name)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=parent)
            _flush(parent)
        return _open_folder(parent, name)


def _status(folder: int, name: str) -> os.stat_result | None:
    """Of a plain file; None for all else."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _read_at(fd: int, first: int, size_bytes: int) -> bytes:
    """So many bytes from a place on, or up to the end."""
    return b"".join(_pieces_at(fd, first, size_bytes))


def _pieces_at(fd: int, first: int, size_bytes: int) -> list[bytes]:
    """The same, piece by piece."""
    pieces = []
    while size_bytes > 0 and (piece := os.pread(fd, min(size_bytes, _READ_BYTES), first)):
        pieces.append(piece)
        first, size_bytes = first + len(piece), size_bytes - len(piece)
    return pieces


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left.nbytes:
        left = left[os.write(fd, left) :]


def _flush(fd: int) -> None:
    """To the disk of whoever has it. A file system that cannot flush a folder keeps its names without that."""
    try:
        if sys.platform == "darwin":
            with contextlib.suppress(OSError):  # a share may know no more than fsync
                fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
                return
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise


def _remove_unlocked(folder: int) -> None:
    """Remove what writers left that are no more: nobody has a lock on it. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError), closing_fd(os.open(name, _OPEN_FLAGS, dir_fd=folder)) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=folder)


def _raise(error: OSError) -> NoReturn:
    raise error
