"""Servers of the wire's tests: over a service without a model, and a real daemon."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from torpor.socket_api import Client
from torpor.tests.socket_api.real_daemon import RealDaemon, served, until
from torpor.tests.socket_api.server_rig import Running, ServerThread, quick, running


@pytest.fixture
def state(short_path: Path, request: pytest.FixtureRequest) -> AbstractAsyncContextManager[Running]:
    """A server on the loop of a test; `serving` says with which limits."""
    given = dict(getattr(request, "param", {}))
    more = {name: given.pop(name) for name in ("find_peer_uid",) if name in given}
    return running(short_path, quick(**given), **more)


@pytest.fixture
def server_thread(short_path: Path, request: pytest.FixtureRequest) -> Iterator[ServerThread]:
    running = ServerThread(short_path / "run" / "t.sock", quick(**getattr(request, "param", {})))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealDaemon]:
    """A real one, for the tests of all files that ask for no other option: each has sessions and trees of its own, and
    arms a door for its own request alone."""
    folder = tmp_path_factory.mktemp("d")
    with served(folder, "--http", "0", "--http-socket", str(folder / "h.sock"), doors=True) as running:
        yield running


@pytest.fixture
def torpor(daemon: RealDaemon) -> Iterator[Client]:
    """The blocking client: what both do alike, `fronts` shows. What it holds is gone at the end."""
    with Client(daemon.socket) as client:
        yield client
    with Client(daemon.socket) as other:
        until(lambda: other.status().memory.branches_bytes == 0)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A session for one test."""
    return f"s{abs(hash(request.node.nodeid)):x}"
