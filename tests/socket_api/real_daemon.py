"""A real daemon in a process of its own, on the demo model, for tests that look at it as a client does.

Run as a script it is such a daemon with doors: `real_daemon.py DOORS ARGUMENTS...`. A file in the folder DOORS makes
one call behind the door of its name fail; it holds how many calls go well before. See `Doors`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torpor.daemon.api.events import WorkEvent
from torpor.daemon.api.verbs import VERBS
from torpor.socket_api.client.blocking import wait
from torpor.socket_api.client.link import Link
from torpor.socket_api.wire.asking import Call
from torpor.socket_api.wire.messages import ErrorMessage, EventMessage, ResultMessage

DEADLINE_S = 60.0


class RealDaemon:
    """A running daemon: its socket, its store, its process, and its doors if it has any. watched: it tells the gaps of
    its loop in the file `gaps` (`loop_gaps.py`)."""

    def __init__(self, folder: Path, *options: str, doors: bool = False, watched: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.socket = folder / "t.sock"
        self.store = folder / "store"
        self.doors = Doors(folder / "doors")
        self.gaps = folder / "gaps"
        # -P: this file's folder has one called `http`, which is not the library's.
        program = ["-P", __file__, str(self.doors.folder)] if doors else ["-m", "torpor.cli.main", "serve"]
        if watched:
            program = ["-P", str(Path(__file__).with_name("loop_gaps.py")), str(self.gaps)]
        homes = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("CACHE", "DATA", "STATE", "CONFIG")}
        self.process = subprocess.Popen(
            [sys.executable, *program, "--store", str(self.store), "--socket", str(self.socket), *options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **homes},
        )
        assert self.process.stdout is not None
        if "serves" not in self.process.stdout.readline():
            self.end()
            raise AssertionError("the daemon did not begin to serve")

    def end(self, *, kill: bool = False) -> None:
        """Stop it in order, or as a crash would. Idempotent."""
        if self.process.poll() is None:
            if kill:
                self.process.kill()
            else:
                self.process.terminate()
        self.process.communicate(timeout=DEADLINE_S)


@contextlib.contextmanager
def served(folder: Path, *options: str, doors: bool = False, watched: bool = False) -> Iterator[RealDaemon]:
    """A daemon with its store in a folder; a store that is there already is served on."""
    daemon = RealDaemon(folder, *options, doors=doors, watched=watched)
    try:
        yield daemon
    finally:
        daemon.end()


class Doors:
    """What can be made to fail inside a daemon: `network` (a model call), `state` (the memory of a new session) and
    `write` (to a bundle: no room); `hold` stops the thread that writes, for ever."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def fail(self, door: str, *, after: int = 0) -> None:
        """Make one call fail, when so many more have gone well."""
        told = self.folder / f"{door}.told"
        told.write_text(str(after))
        told.rename(self.folder / door)

    def is_armed(self, door: str) -> bool:
        """Whether that failure has not come yet."""
        return (self.folder / door).exists()

    def falls(self, door: str) -> bool:
        """Inside the daemon: whether this call is the one that fails."""
        file = self.folder / door
        try:
            left = int(file.read_text())
        except FileNotFoundError:
            return False
        if left:
            self.fail(door, after=left - 1)
            return False
        file.unlink()
        return True


def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.005)


def tokens_of(seed: int, count: int) -> list[int]:
    """Plain tokens of the demo model, the same for the same seed."""
    return random.Random(seed).choices(range(300, 4000), k=count)


class Asked:
    """A request as the wire has it, and what has come back; `answer` waits for the end."""

    def __init__(self, link: Link, method: str, params: Mapping[str, Any]) -> None:
        self._link = link
        self._id = wait(link.begin(Call(VERBS[method], params)))
        self.events: list[WorkEvent] = []

    def event(self) -> WorkEvent:
        """Wait for the next event."""
        message = wait(self._link.wait_for(self._id))
        assert isinstance(message, EventMessage), message
        assert isinstance(message.event, WorkEvent)
        self.events.append(message.event)
        return message.event

    def cancel(self) -> None:
        self._link.cancel(self._id)

    def answer(self) -> ResultMessage | ErrorMessage:
        while isinstance(message := wait(self._link.wait_for(self._id)), EventMessage):
            assert isinstance(message.event, WorkEvent)
            self.events.append(message.event)
        assert isinstance(message, ResultMessage | ErrorMessage)
        return message


def main() -> None:
    doors = Doors(Path(sys.argv[1]))
    from torpor.cli.registry import run
    from torpor.daemon.models.models import LoadedModel

    def guard(owner: Any, name: str, door: str, fall: Callable[[], object]) -> None:
        behind = getattr(owner, name)

        def guarded(*args: Any, **options: Any) -> Any:
            if doors.falls(door):
                fall()
            return behind(*args, **options)

        setattr(owner, name, guarded)

    def broken() -> None:
        raise RuntimeError("the model broke")

    def no_memory() -> None:
        raise RuntimeError("[malloc] Unable to allocate")

    def no_room() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    guard(LoadedModel, "run", "network", broken)
    guard(LoadedModel, "run_batch", "network", broken)
    guard(LoadedModel, "new_state", "state", no_memory)
    guard(os, "writev", "write", no_room)
    guard(os, "writev", "hold", threading.Event().wait)
    sys.exit(run(["serve", *sys.argv[2:]]))


if __name__ == "__main__":
    main()
