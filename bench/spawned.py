"""A daemon in a process of its own that a benchmark has changed: what it counts, or what it leaves out."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from torpor.errors import TorporError
from torpor.socket_api import Client

SPAWN: Final = multiprocessing.get_context("spawn")
START_S: Final = 120.0


def serve(store: Path, socket: Path) -> None:
    """Become the daemon, and say nothing."""
    from torpor.socket_api.main import run

    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the process runs
    run({"store": store, "socket": socket, "prefix_reuse": "off"}, as_json=True)


@contextmanager
def answering(
    target: Callable[..., None], store: Path, socket: Path, *given: Any, **more: Any
) -> Iterator[BaseProcess]:
    """A process in which `target` becomes a daemon, from when that answers to the end of the block, which kills it."""
    daemon = SPAWN.Process(target=target, args=(store, socket, *given), kwargs=more)
    daemon.start()
    try:
        deadline = time.monotonic() + START_S
        while True:
            with suppress(TorporError, OSError), Client(socket) as client:
                client.status()
                break
            if not daemon.is_alive() or time.monotonic() > deadline:
                raise TimeoutError("the daemon did not start")
            time.sleep(0.05)
        yield daemon
    finally:
        daemon.kill()
        daemon.join()
