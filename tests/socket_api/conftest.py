"""What the tests of the wire share: a short folder for sockets, and servers on a thread for the blocking client."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.socket_api import Client
from torpor.socket_api.limits import ServerLimits
from torpor.socket_api.server.server import ApiServer

from .branch_rig import connected
from .fake_service import FakeService
from .real_daemon import RealDaemon, served, until


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose name leaves room for a socket's: pytest's own are too long for the 107 bytes of the kernel."""
    folder = Path(tempfile.mkdtemp(prefix="tw"))
    yield folder
    shutil.rmtree(folder)


class ServerThread:
    """A server with a FakeService on an event loop of its own."""

    def __init__(self, socket_path: Path, **arguments: Any) -> None:
        self.socket_path = socket_path
        self.service: FakeService
        self.server: ApiServer
        self._arguments = arguments
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.do(self._start)

    def do(self, action: Callable[[], Any]) -> Any:
        """Run a function or coroutine function on the loop."""

        async def run() -> Any:
            result = action()
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(timeout=20)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        self.do(lambda: poll(condition))

    def stop(self) -> None:
        self.do(self.server.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=20)
        self._loop.close()

    async def _start(self) -> None:
        self.service = FakeService()
        self.server = ApiServer(self.service, self.socket_path, **self._arguments)
        await self.server.start()


async def poll(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait until a condition holds; fails the test if it never does."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
def server_thread(short_path: Path) -> Iterator[ServerThread]:
    running = ServerThread(short_path / "run" / "t.sock", limits=ServerLimits(goodbye_timeout_s=0.5))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealDaemon]:
    """A real one, for the tests of all files that ask for no option: each has sessions and trees of its own."""
    with served(tmp_path_factory.mktemp("d")) as running:
        yield running


@pytest.fixture(params=["blocking", "awaited"])
def torpor(daemon: RealDaemon, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each client in turn. What it holds is gone at the end."""
    with connected(daemon.socket, request.param) as client:
        yield client
    with Client(daemon.socket) as other:
        until(lambda: other.status().memory.branches_bytes == 0)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A session for one test."""
    return f"s{abs(hash(request.node.nodeid)):x}"
