"""The standard streams of this process: each is open, takes every character, and outlives its reader.

Imports nothing heavy: it is at work before anything else is imported.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Any, TextIO


class ReaderGone(Exception):
    """The reader of our standard output is gone, so more output is of no use."""


class PatientFile(io.FileIO):
    """A stream's file that drops output once its reader is gone, so that a run still ends with the status of its
    work."""

    is_unread = False

    def write(self, data: Any, /) -> int:
        if not self.is_unread:
            try:
                return super().write(data)
            except BrokenPipeError:
                self.is_unread = True
        return memoryview(data).nbytes


def prepare_streams() -> None:
    """Make each standard stream open, able to take every character, and independent of its reader.

    A closed stream becomes the null device; otherwise the next opened file would take its number.
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
    """Raise ReaderGone if the last output on standard output had no reader."""
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
    """End the process. Output that a stream cannot write is dropped, without a message of the interpreter."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interpreter drops its handlers before it ends
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
