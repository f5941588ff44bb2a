"""`torpor logs`: what the daemon has written to its log, and what it writes from now on."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, Final, Self

from ...errors import TorporError
from ...places import default_log_path
from ..errors import NothingToDo, UnreadableInput
from ..reach.daemon_link import find_daemon
from ..reach.options import JsonOption, SocketOption, option
from ..view.output import Output, neutralise, plain
from ..view.streams import require_reader

_MOST_LINES: Final = 10_000
_MOST_BYTES: Final = 4 << 20
"""So much of a log's end is read for its last lines."""

_PIECE_BYTES: Final = 64 << 10
_POLL_S: Final = 0.25
_TIMEOUT_S: Final = 5.0  # a daemon that hangs has a log, too
_JOURNAL: Final = "journalctl --user -u torpor"

LogOption = Annotated[
    Path | None, option("--log PATH", "Another log than that of the daemon here, as --log of serve named it.")
]
LinesOption = Annotated[int, option("-n COUNT", "How many of the last lines.", min=0, max=_MOST_LINES)]
FollowOption = Annotated[bool, option("--follow -f", "Go on with what is written from now on, until Ctrl-C.")]


def logs(
    lines: LinesOption = 50,
    follow: FollowOption = False,
    log: LogOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """A daemon in the background writes to a file, and this is its end. It has starts, stops, warnings and faults, and
    no text of a session. For a daemon that writes elsewhere, as one that systemd started, this says where. With --json,
    each line is one document.

    [bold]Examples[/]

    [cyan]torpor logs[/]
    [cyan]torpor logs -f -n 10[/]
    """
    output = Output(as_json=as_json)
    path = log or _log_of_daemon(socket)
    descriptor = _opened(path)
    output.remark(f"[dim]{plain(path)}[/]")
    with suppress(KeyboardInterrupt):
        _tell(output, path, descriptor, lines, follow=follow)


def _tell(output: Output, path: Path, descriptor: int, lines: int, *, follow: bool) -> None:
    with Log(path, descriptor) as log:
        last, cut = log.last(lines, whole=follow)
        if cut:
            output.remark("[dim]what stands before these lines is not read: a log may be long[/]")
        for line in chain(last, log.following(_POLL_S) if follow else ()):
            text = neutralise(line.decode(errors="replace"))
            if output.as_json:
                output.document("logs", {"path": str(path), "line": text})
            else:
                output.whole_line(plain(text))
            sys.stdout.flush()
            require_reader()


class Log:
    """A log that another process writes: its last lines, and then the next ones. It may be cut, or replaced by a new
    file of its name, at any time."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._at = 0
        self._part = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)

    def last(self, count: int, *, whole: bool = False) -> tuple[list[bytes], bool]:
        """So many of the last lines, of the last 4 MiB at most; and whether that left some out. whole: the beginning of
        a line that is still written is left to `following`."""
        size = os.fstat(self._descriptor).st_size
        start = max(0, size - _MOST_BYTES)
        end = os.pread(self._descriptor, size - start, start)
        if whole:
            end = end[: end.rfind(b"\n") + 1]
        self._at = start + len(end)
        lines = end.removesuffix(b"\n").split(b"\n")[1 if start else 0 :] if end else []
        return lines[max(0, len(lines) - count) :], start > 0 and len(lines) < count

    def following(self, poll_s: float) -> Iterator[bytes]:
        """The lines from here on, each once it is whole or long. Looks at the file's size a few times a second."""
        while True:
            piece = os.pread(self._descriptor, _PIECE_BYTES, self._at)
            self._at += len(piece)
            *whole, self._part = (self._part + piece).split(b"\n")
            yield from whole
            if len(self._part) > _PIECE_BYTES:
                yield self._part
                self._part = b""
            if not piece and not self._begins_anew():
                require_reader()
                time.sleep(poll_s)

    def _begins_anew(self) -> bool:
        """Whether the file was cut, or another has its name now."""
        here = os.fstat(self._descriptor)
        if here.st_size < self._at:
            self._at, self._part = 0, b""
            return True
        with suppress(OSError):
            named = os.stat(self._path)
            if (named.st_dev, named.st_ino) != (here.st_dev, here.st_ino):
                new = _opened(self._path)
                os.close(self._descriptor)
                self._descriptor, self._at, self._part = new, 0, b""
                return True
        return False


def _log_of_daemon(socket: Path | None) -> Path:
    """The file to which the daemon writes its standard error; the default one if none answers, or the system does not
    tell. Raises NothingToDo: it writes to something else."""
    target, pid = "", None
    with suppress(TorporError, OSError):
        daemon = find_daemon(socket, timeout_s=_TIMEOUT_S)
        if daemon is not None:
            with daemon:
                pid = daemon.peer_pid
            target = os.readlink(f"/proc/{pid}/fd/2")
    if target.startswith("socket:"):
        raise NothingToDo(f"The daemon (pid {pid}) writes to the journal of systemd. Ask `{_JOURNAL}`.")
    if target.startswith(("/dev/", "pipe:")) and not target.startswith("/dev/shm/"):  # noqa: S108 - a disk in memory
        raise NothingToDo(f"The daemon (pid {pid}) writes to {target}, which keeps nothing. Look there.", target=target)
    return Path(target.removesuffix(" (deleted)")) if target else default_log_path()


def _opened(path: Path) -> int:
    """Open a log. Raises NothingToDo: there is none; UnreadableInput: it cannot be read, or is no file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise NothingToDo(
            f"There is no log {path}. `torpor ensure` and `torpor serve --detach` write one. What a service of systemd"
            f" has written, `{_JOURNAL}` tells.",
            path=str(path),
        ) from None
    except OSError as error:
        raise UnreadableInput(f"The log {path} cannot be read: {error.strerror}.", path=str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnreadableInput(f"{path} is no file. Name the log of a daemon.", path=str(path))
    return descriptor
