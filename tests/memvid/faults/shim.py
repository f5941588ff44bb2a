"""The layer under the store at which faults are put in: every system call it makes by `os`, and every SQL statement.

Owns the interposition and nothing of what a fault means: a handler gets each `Call` and decides. Works on every
platform, without root, because the store does its input and output in Python; SQLite only works in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from unittest import mock

READS: Final = ("close", "pread", "preadv", "read", "listdir", "stat", "fstat", "dup", "fcntl.flock")
WRITES: Final = (
    *("open", "write", "writev", "pwrite", "pwritev", "fsync", "fdatasync", "rename", "replace", "link", "unlink"),
    *("mkdir", "rmdir", "truncate", "ftruncate", "sendfile", "copy_file_range", "fchmod", "chmod"),
)
"""Calls that may change something on the disk. `open` does with O_CREAT or O_TRUNC."""

_FULL_SYNC: Final = getattr(fcntl, "F_FULLFSYNC", None)


@dataclass(slots=True)
class Call:
    """One call on its way to the system: `run` performs it."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: Callable[[], Any]
    by_hand: bool = False  # the scenario's own, not the store's

    @property
    def changes_state(self) -> bool:
        if self.name == "open":
            return bool(self.args[1] & (os.O_CREAT | os.O_TRUNC))
        return self.name in WRITES

    def __str__(self) -> str:
        shown = [f"{len(arg)} bytes" if isinstance(arg, bytes) else str(arg)[:80] for arg in self.args]
        return f"{self.name}({', '.join(shown)})"


Handler = Callable[[Call], Any]


_by_hand = False


@contextlib.contextmanager
def by_hand() -> Iterator[None]:
    """What is done in here to a store's files others do, and not the store: it may be killed, but it is not refused."""
    global _by_hand
    _by_hand = True
    try:
        yield
    finally:
        _by_hand = False


@contextlib.contextmanager
def files_up_to(most_bytes: int | None) -> Iterator[None]:
    """The system lets no file of this process grow beyond that; None: beyond what it would anyway."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if most_bytes is None else most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class _Connection(sqlite3.Connection):
    """A connection to memory that asks the handler before each statement: the system may have no memory for it."""

    handler: Handler | None = None

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        return self._ask(sql, lambda: sqlite3.Connection.execute(self, sql, *args))

    def executemany(self, sql: str, *args: Any) -> sqlite3.Cursor:
        return self._ask(sql, lambda: sqlite3.Connection.executemany(self, sql, *args))

    def _ask(self, sql: str, run: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        if self.handler is None:
            return run()
        cursor: sqlite3.Cursor = self.handler(Call("sql", (sql,), {}, run))
        return cursor


@dataclass
class Shim:
    """Sends every call to `handler` while it is installed."""

    handler: Handler
    _connections: list[_Connection] = field(default_factory=list)
    _handling: threading.local = field(default_factory=threading.local)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Shim:
        for name in (*READS, *WRITES):
            owner, _, plain = (fcntl, *name.split(".")) if name.startswith("fcntl.") else (os, "", name)
            if hasattr(owner, plain):
                self._patch(owner, plain, name)
        if _FULL_SYNC is not None:  # what an fsync is on macOS
            real = fcntl.fcntl

            def full_sync(fd: int, command: int, *args: Any) -> Any:
                if command != _FULL_SYNC:
                    return real(fd, command, *args)
                return self._ask(Call("fsync", (fd,), {}, lambda: real(fd, command, *args)))

            self._replace(fcntl, "fcntl", full_sync)
        connect = sqlite3.connect

        def connect_watched(database: Any, *args: Any, **kwargs: Any) -> Any:
            connection: Any = connect(database, *args, factory=_Connection, **kwargs)
            connection.handler = self._ask
            self._connections.append(connection)
            return connection

        self._replace(sqlite3, "connect", connect_watched)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()
        for connection in self._connections:
            connection.handler = None

    def _patch(self, owner: Any, plain: str, name: str) -> None:
        real = getattr(owner, plain)

        def watched(*args: Any, **kwargs: Any) -> Any:
            return self._ask(Call(name, args, kwargs, lambda: real(*args, **kwargs)))

        self._replace(owner, plain, watched)

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._stack.enter_context(mock.patch.object(owner, name, new))

    def _ask(self, call: Call) -> Any:
        if hasattr(self._handling, "call"):  # what a handler does itself is no fault point
            return call.run()
        self._handling.call = call  # of this thread: another may wait in its call for as long as it likes
        call.by_hand = _by_hand
        try:
            return self.handler(call)
        finally:
            del self._handling.call


@contextlib.contextmanager
def repeatable(seed: int = 0) -> Iterator[None]:
    """Clock, temporary names and uuids the same in each run, so that a point is the same step each time."""
    count = seed * 1_000_000

    def number() -> int:
        nonlocal count
        count += 1
        return count

    fakes: dict[str, Callable[..., Any]] = {
        "time.time_ns": lambda: 1_700_000_000_000_000_000 + number(),
        "os.urandom": lambda size: number().to_bytes(size),
        "uuid.uuid4": lambda: uuid.UUID(int=number(), version=4),
    }
    with contextlib.ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch(name, fake))
        yield
