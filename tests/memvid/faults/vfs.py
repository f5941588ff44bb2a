"""SQLite's own calls to the system, asked one by one: a VFS that stands before the one of the system.

Owns the C side and nothing of what a fault means: `ask` gets each call with a way to perform it, and either performs it
or raises the OSError that the system would have given. Works without root and without a tracer, wherever Python's
SQLite is a library of its own.
"""

from __future__ import annotations

import _sqlite3
import contextlib
import ctypes
import errno
import functools
import os
from collections.abc import Callable, Iterator
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_int64, c_void_p
from typing import Any, Final

Ask = Callable[[str, tuple[Any, ...], Callable[[], Any]], Any]

_OK: Final = 0
_FULL: Final = 13
_CANTOPEN: Final = 14
_IOERR: Final = 10
_CODES: Final = {
    "read": _IOERR | 1 << 8,
    "write": _IOERR | 3 << 8,
    "fsync": _IOERR | 4 << 8,
    "truncate": _IOERR | 6 << 8,
    "unlink": _IOERR | 10 << 8,
    "access": _IOERR | 13 << 8,
    "open": _CANTOPEN,
}
"""What the VFS of Unix answers where the system refuses such a call."""

# A name goes through as the very address: SQLite keeps it while the file is open.
_Opened: Final = CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_int, c_void_p)
_Deleted: Final = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int)
_Accessed: Final = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_void_p)
_Moved: Final = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int, c_int64)
_Cut: Final = CFUNCTYPE(c_int, c_void_p, c_int64)
_Synced: Final = CFUNCTYPE(c_int, c_void_p, c_int)


class _Vfs(Structure):
    _fields_ = (
        *((name, c_int) for name in ("iVersion", "szOsFile", "mxPathname")),
        *((name, c_void_p) for name in ("pNext", "zName", "pAppData")),
        ("xOpen", _Opened),
        ("xDelete", _Deleted),
        ("xAccess", _Accessed),
        ("rest", c_void_p * 12),
    )


class _Methods(Structure):
    _fields_ = (
        ("iVersion", c_int),
        ("xClose", c_void_p),
        ("xRead", _Moved),
        ("xWrite", _Moved),
        ("xTruncate", _Cut),
        ("xSync", _Synced),
        ("rest", c_void_p * 13),
    )


class _File(Structure):
    _fields_ = (("pMethods", POINTER(_Methods)),)


_ask: Ask | None = None


@functools.cache
def unavailable() -> str:
    """Why SQLite's calls cannot be asked here; empty if they can."""
    try:
        _library()
    except (OSError, AttributeError) as error:
        return f"Python's SQLite cannot be reached: {error}"
    return ""


@contextlib.contextmanager
def asking(ask: Ask) -> Iterator[None]:
    """From now on each of SQLite's calls is asked first: those of files that are opened in here."""
    global _ask
    if unavailable():
        yield
        return
    _ask, library = ask, _library()
    library.sqlite3_vfs_register(ctypes.byref(_watched()), 1)
    try:
        yield
    finally:
        _ask = None
        library.sqlite3_vfs_register(_real(), 1)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(_sqlite3.__file__)
    library.sqlite3_vfs_find.restype = POINTER(_Vfs)
    library.sqlite3_vfs_find.argtypes = [c_char_p]
    library.sqlite3_vfs_register.argtypes = [c_void_p, c_int]
    return library


@functools.cache
def _real() -> Any:
    return _library().sqlite3_vfs_find(b"unix")


def _text(name: int | None) -> str:
    return os.fsdecode(ctypes.string_at(name)) if name else "a temporary file"


def _asked(name: str, args: tuple[Any, ...], run: Callable[[], int]) -> int:
    """What SQLite is answered: what the system gave, or the code for what `ask` raises. No error may leave this: C
    would drop it."""
    try:
        return run() if _ask is None else int(_ask(name, args, run))
    except OSError as error:
        if name == "write" and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return _FULL
        return _CODES[name]


@functools.cache
def _watched() -> _Vfs:
    """Kept for good, as what is opened by it may outlive whoever asks."""
    real = _real()

    def opened(_: int, name: int | None, file: int, flags: int, out: int) -> int:
        def run() -> int:
            code = int(real.contents.xOpen(ctypes.addressof(real.contents), name, file, flags, out))
            held = _File.from_address(file)
            if code == _OK and held.pMethods:
                held.pMethods = ctypes.pointer(_methods(ctypes.addressof(held.pMethods.contents)))
            return code

        return _asked("open", (_text(name), flags), run)

    def deleted(_: int, name: int, sync: int) -> int:
        address = ctypes.addressof(real.contents)
        return _asked("unlink", (_text(name),), lambda: real.contents.xDelete(address, name, sync))

    def accessed(_: int, name: int, flags: int, out: int) -> int:
        return _asked(
            "access", (_text(name),), lambda: real.contents.xAccess(ctypes.addressof(real.contents), name, flags, out)
        )

    copy = _Vfs.from_buffer_copy(real.contents)
    copy.zName = ctypes.cast(c_char_p(b"watched"), c_void_p)
    copy.pNext = None
    copy.xOpen, copy.xDelete, copy.xAccess = _Opened(opened), _Deleted(deleted), _Accessed(accessed)
    return copy


@functools.cache
def _methods(address: int) -> _Methods:
    """The same functions of a file, each asked first where it touches the disk."""
    real = _Methods.from_address(address)

    def moved(name: str, function: Callable[..., int]) -> Any:
        return _Moved(lambda file, data, size, at: _asked(name, (size, at), lambda: function(file, data, size, at)))

    copy = _Methods.from_buffer_copy(real)
    copy.xRead, copy.xWrite = moved("read", real.xRead), moved("write", real.xWrite)
    copy.xTruncate = _Cut(lambda file, size: _asked("truncate", (size,), lambda: real.xTruncate(file, size)))
    copy.xSync = _Synced(lambda file, flags: _asked("fsync", (flags,), lambda: real.xSync(file, flags)))
    return copy
