"""A browser and a daemon for the tests that look at the page: one of each in a process. Without a browser the tests
are skipped, but by `make test-all`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.socket_api.client.client import Client
from torpor.tests.socket_api.http.inspector import scene
from torpor.tests.socket_api.http.inspector.browser import Browser, Tab, program
from torpor.tests.socket_api.http.inspector.views import signed_in
from torpor.tests.socket_api.http.serving import Served, serving


def is_whole(config: pytest.Config) -> bool:
    """Whether the tests that take long are asked for, too: then nothing may be left out."""
    return "heavy" not in config.getoption("markexpr")


@pytest.fixture(scope="session")
def program_of_all(request: pytest.FixtureRequest) -> Iterator[Browser]:
    if program() is None:
        (pytest.fail if is_whole(request.config) else pytest.skip)(
            "there is no Chromium on this machine: apt-get install chromium"
        )
    folder = Path(tempfile.mkdtemp(prefix="tb"))
    found = Browser(folder)
    yield found
    found.end()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def browser(program_of_all: Browser) -> Iterator[Browser]:
    """Its tabs are of one test: each asks the daemon again and again, and a live view is one of few readers."""
    yield program_of_all
    program_of_all.close_tabs()


@pytest.fixture(scope="session")
def there(program_of_all: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A daemon with the scene. A tree ends with its connection, so that stays."""
    with serving(tmp_path_factory.mktemp("i"), "--keep-free", "0") as found, Client(found.daemon.socket) as client:
        scene.made(found, client)
        scene.others_made(found, client)
        yield found


@pytest.fixture
def page(browser: Browser, there: Served) -> Tab:
    return signed_in(browser, there)
