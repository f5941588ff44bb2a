"""The service of this folder's tests, and the fronts to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.tests.socket_api.fronts.fronts_rig import Front, Whole, front_of


@pytest.fixture(scope="session")
def whole() -> Iterator[Whole]:
    """One for all: each test has a session of its own."""
    folder = Path(tempfile.mkdtemp(prefix="tf"))  # short, for the path of a socket
    running = Whole(folder)
    yield running
    running.stop()
    shutil.rmtree(folder)


@pytest.fixture
def front(whole: Whole, request: pytest.FixtureRequest) -> Iterator[Front]:
    """The front that a contract is tested over."""
    with front_of(request.param, whole) as found:
        yield found


@pytest.fixture
def there(whole: Whole) -> Iterator[Front]:
    """The service itself: to prepare what is asked for, and to look at what came of it."""
    with front_of("service", whole) as found:
        yield found


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A session for one test over one front."""
    return f"s{abs(hash(request.node.nodeid)):x}"
