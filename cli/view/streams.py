"""The standard streams of this process: each has a place, takes every character, and outlives its reader.

Imports nothing heavy: it is at work before anything else is imported.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Any, TextIO


class ReaderGone(Exception):
    """The reader of our standard output has seen enough, so there is no use in making more of it."""


class PatientFile(io.FileIO):
    """A stream's file that drops what is no longer read, so that a run ends with the status of its work whether
    or not its reader has hung up before the end."""

    is_unread = False

    def write(self, data: Any, /) -> int:
        if not self.is_unread:
            try:
                return super().write(data)
            except BrokenPipeError:
                self.is_unread = True
        return memoryview(data).nbytes


def prepare_streams() -> None:
    """Give each standard stream a place, let no character be one that it cannot take, and no reader end the run.

    A stream that was closed becomes the null device; otherwise the next file that is opened would take its number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115 - it stays open as long as the process
    sys.stdout = _patient(sys.stdout, 1)
    sys.stderr = _patient(sys.stderr, 2)


def require_reader() -> None:
    """Raise ReaderGone if what was written to standard output last went nowhere."""
    if getattr(getattr(sys.stdout.buffer, "raw", None), "is_unread", False):
        raise ReaderGone


def _patient(stream: TextIO | None, number: int) -> TextIO:
    encoding = "utf-8" if stream is None else stream.encoding
    if stream is not None:
        stream.flush()
    raw = PatientFile(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=number == 2 or raw.isatty()
    )


def leave(status: int) -> None:
    """End the process. What a stream still holds and cannot write is dropped, without a word from the interpreter."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interpreter gives every handler up before it is gone
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    if "mlx.core" in sys.modules:
        # MLX's threads still run, and its own end races with them: once in some dozens of ends on a busy machine it
        # aborted a process that had stopped in order ("terminate called without an active exception").
        os._exit(status)
    sys.exit(status)
