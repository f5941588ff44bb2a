"""Where the time of a sleep or a wake goes: seconds in hashing, in each kind of system call, and in what remains.

Wraps what `torpor.memvid` calls (`os`, BLAKE3, the index) while it is measured, so it holds for whatever order the
store does things in. The wrapping itself costs about a microsecond a call: shares are for reading, not for quoting.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torpor.memvid.index.index
from blake3 import blake3

_WRITES = ("write", "writev", "pwrite", "pwritev", "ftruncate", "posix_fallocate", "copy_file_range", "sendfile")
_READS = ("read", "readv", "pread", "preadv")
_NAMES = ("open", "close", "rename", "unlink", "mkdir", "stat", "fstat", "lstat", "listdir", "scandir")


class Parts:
    """Seconds and calls by part. What other threads did is counted apart, because it does not add up to the whole."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.whole = 0.0
        self._flushed = False
        self._thread = threading.get_ident()
        self._adding = threading.Lock()

    def add(self, part: str, seconds: float) -> None:
        """Note one call. Before the first flush a sleep writes, after it the sleep reads back what it wrote."""
        if part == "flush":
            part, self._flushed = ("later flushes" if self._flushed else "flush"), True
        elif part in ("hash", "read") and self._flushed:
            part += " after the flush"
        if threading.get_ident() != self._thread:
            part += " (other threads)"
        with self._adding:
            self.seconds[part] += seconds
            self.calls[part] += 1

    def lines(self) -> list[str]:
        """For a person, the largest first."""
        own = sum(seconds for part, seconds in self.seconds.items() if not part.endswith("threads)"))
        rows = [(part, seconds, f"{self.calls[part]} calls") for part, seconds in self._largest_first()]
        rows.append(("everything else (Python)", self.whole - own, ""))
        return [
            f"    {part:34} {1000 * seconds:9.2f} ms {100 * seconds / self.whole:5.1f} %  {calls}"
            for part, seconds, calls in rows
        ]

    def _largest_first(self) -> list[tuple[str, float]]:
        return sorted(self.seconds.items(), key=lambda item: -item[1])

    def as_data(self) -> dict[str, Any]:
        """For the JSON file."""
        return {"whole": self.whole, "seconds": dict(self.seconds), "calls": dict(self.calls)}


@contextlib.contextmanager
def timed_parts() -> Iterator[Parts]:
    """Take the time of everything inside, by part."""
    parts = Parts()
    with contextlib.ExitStack() as undo:
        for part, names in (("write", _WRITES), ("read", _READS), ("names", _NAMES), ("flush", ("fsync",))):
            for name in names:
                if hasattr(os, name):
                    _replace(undo, os, name, _timed(getattr(os, name), part, parts))
        if sys.platform == "darwin":
            import fcntl

            _replace(undo, fcntl, "fcntl", _timed(fcntl.fcntl, "flush", parts))  # F_FULLFSYNC; fsync is not used there
        for module in [module for name, module in sys.modules.items() if name.startswith("torpor.memvid")]:
            if getattr(module, "blake3", None) is blake3:
                _replace(undo, module, "blake3", lambda *args, **options: _TimedHasher(parts, *args, **options))
        index = torpor.memvid.index.index.Index
        for name in ("add", "add_pack"):
            _replace(undo, index, name, _timed(getattr(index, name), "index", parts))
        started = time.perf_counter()
        yield parts
        parts.whole = time.perf_counter() - started


class _TimedHasher:
    """BLAKE3 with a clock."""

    def __init__(self, parts: Parts, *args: Any, **options: Any) -> None:
        self._parts = parts
        self._hasher: Any = self._timed(blake3, *args, **options)

    def update(self, data: Any, *args: Any, **options: Any) -> _TimedHasher:
        self._timed(self._hasher.update, data, *args, **options)
        return self

    def digest(self, *args: Any, **options: Any) -> bytes:
        return bytes(self._timed(self._hasher.digest, *args, **options))

    def hexdigest(self) -> str:
        return self.digest().hex()

    def _timed(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return _timed(call, "hash", self._parts)(*args, **options)


def _timed(call: Callable[..., Any], part: str, parts: Parts) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*args, **options)
        finally:
            parts.add(part, time.perf_counter() - started)

    return timed


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, value: object) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
