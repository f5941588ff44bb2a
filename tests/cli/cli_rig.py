"""What the tests of the command line are made of: how it is run, a daemon without a model, stores made of arithmetic.

What other test folders have made (a service without a model, small stores) is brought in by path.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torpor.socket_api.limits import ServerLimits
from torpor.socket_api.server.server import ApiServer

TESTS = Path(__file__).parent.parent
WAIT_S = 20.0  # for another thread to do what takes milliseconds


def load_module(path: str) -> ModuleType:
    """Import a module of another test folder."""
    return importlib.import_module("torpor.tests." + path.replace("/", ".").removesuffix(".py"))


@dataclass(frozen=True, slots=True)
class Ran:
    """What one command line wrote and how it ended."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """The JSON error object on stderr."""
        return json.loads(self.err)


Torpor = Callable[..., Ran]


def pretend_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Let what this test runs believe that it writes to a terminal of that width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)


def unstyled(text: str) -> str:
    """What a terminal shows of it, without colours and moves of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


class FakeDaemon:
    """A FakeService behind a real server on a real socket, on an event loop of its own."""

    def __init__(self, socket_path: Path) -> None:
        self.socket_path = socket_path
        self.service: Any = None
        self._server: ApiServer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.do(self._start)

    def do(self, action: Callable[[], Any]) -> Any:
        """Run a function or coroutine function on the loop."""

        async def act() -> Any:
            result = action()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(act(), self._loop).result(timeout=WAIT_S)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on the service holds; fails the test if it never does."""

        async def poll() -> None:
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    await asyncio.sleep(0.002)

        self.do(poll)

    def stop(self) -> None:
        self.do(self._server.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=WAIT_S)
        self._loop.close()

    async def _start(self) -> None:
        self.service = load_module("socket_api/fake_service.py").FakeService()
        self._server = ApiServer(self.service, self.socket_path, limits=ServerLimits(goodbye_timeout_s=0.5))
        await self._server.start()


@dataclass(frozen=True, slots=True)
class MadeStore:
    """A store on disk with two sessions, the first of which slept twice; nobody has it open."""

    path: Path
    bundles: tuple[Path, ...]
