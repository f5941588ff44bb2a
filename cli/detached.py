"""The process behind `torpor serve --detach`: `torpor serve --json` with its output in the log.

`python -m torpor.cli.detached PIPE LOG ARGUMENT...`: until the daemon is ready, its output also goes into the pipe.
Only the starter reads that pipe, so two starts at once never mix their output. Each line of the log begins with a time:
that of its `logging` record, or that of its writing. Owns the log's size: a log that has grown is set aside once the
start has succeeded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TextIO

from .errors import DaemonStartFailed
from .reach.background import open_log
from .view.streams import leave

MAX_LOG_BYTES = 1 << 20  # a larger log becomes LOG.1 when a daemon starts

_UNTIMED = re.compile(r"^(?!\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?=[\s\S])", re.MULTILINE)  # a line without a time


class Announcer:
    """Repeats the daemon's output for its starter, until the daemon is ready."""

    def __init__(self, pipe: int, log: Path) -> None:
        os.set_inheritable(pipe, False)
        self._pipe: int | None = pipe
        self._log = log

    def repeat(self, text: str) -> None:
        """Repeat a piece. The line that says ready is the last; then a log that has grown is set aside."""
        if self._pipe is None:
            return
        ready = _says_ready(text)
        if ready:
            with contextlib.suppress(OSError, DaemonStartFailed):  # an old log that stays is no reason not to serve
                set_aside(self._log)
        with contextlib.suppress(OSError):  # the starter is gone: the daemon goes on without it
            os.write(self._pipe, text.encode("utf-8", errors="backslashreplace"))
        if ready:
            os.close(self._pipe)
            self._pipe = None


class Repeated:
    """A text stream that an announcer repeats, with the time before each line."""

    def __init__(self, stream: TextIO, announcer: Announcer) -> None:
        self._stream = stream
        self._announcer = announcer
        self._line = ""

    def write(self, text: str) -> int:
        """Write with times; repeat whole lines without them."""
        begun, end, rest = text.partition("\n") if self._line else ("", "", text)
        self._stream.write(begun + end + _UNTIMED.sub(_now(), rest))
        self._line += text
        whole, end, self._line = self._line.rpartition("\n")
        if end:
            self._stream.flush()
            self._announcer.repeat(whole + end)
        return len(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def set_aside(log: Path) -> None:
    """If this process's log has grown past its limit, rename it to LOG.1 and go on in a new one."""
    if os.fstat(1).st_size <= MAX_LOG_BYTES:
        return
    log.rename(log.with_name(log.name + ".1"))
    descriptor = open_log(log)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _now() -> str:
    """The time as records of `logging` have it."""
    now_s = time.time()
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now_s))},{int(now_s % 1 * 1000):03d} "


def _says_ready(text: str) -> bool:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            document = json.loads(line)
            if isinstance(document, dict) and document.get("event") == "ready":
                return True
    return False


def main() -> int:
    """Serve as the arguments say, and give the exit status."""
    pipe, log, *arguments = sys.argv[1:]
    announcer = Announcer(int(pipe), Path(log))
    sys.stdout = Repeated(sys.stdout, announcer)
    sys.stderr = Repeated(sys.stderr, announcer)
    from .registry import run  # after the streams are replaced, so that nothing keeps the old ones

    return run(["serve", "--json", *arguments])


if __name__ == "__main__":
    leave(main())
