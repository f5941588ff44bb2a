"""Servers of `http_rig.py` that end with a test, or with a file of them, and a real daemon's addresses."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from torpor.socket_api.http.connections import HttpLimits
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread
from torpor.tests.socket_api.real_daemon import RealDaemon

if TYPE_CHECKING:
    from torpor.tests.socket_api.http.serving import Served


@pytest.fixture
def begin(short_path: Path) -> Iterator[Begin]:
    """Starts servers with the given limits; they end with the test. seen_as: what the server sees of the service."""
    running: list[HttpThread] = []

    def start(**limits: Any) -> HttpThread:
        more = {name: limits.pop(name) for name in ("find_peer_uid", "seen_as", "inspector") if name in limits}
        folder = short_path / str(len(running))
        running.append(HttpThread(folder, limits=HttpLimits(**{"goodbye_timeout_s": 0.5, **limits}), **more))
        return running[-1]

    yield start
    for each in running:
        each.stop()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[HttpThread]:
    """One for all tests of a file: to stop it takes longer than most of them."""
    folder = Path(tempfile.mkdtemp(prefix="tw"))
    running = HttpThread(folder, limits=HttpLimits(goodbye_timeout_s=0.5))
    yield running
    running.stop()
    shutil.rmtree(folder)


@pytest.fixture
def server(shared_server: HttpThread) -> HttpThread:
    """A server whose service is as new. Who stops it, or changes its tokens, begins one of its own."""
    shared_server.renew()
    return shared_server


@pytest.fixture(scope="session")
def served(daemon: RealDaemon) -> Served:
    """The real daemon's addresses. A module that does not ask for them does not wait for the clients' imports."""
    from torpor.tests.socket_api.http.serving import addresses_of

    return addresses_of(daemon)
