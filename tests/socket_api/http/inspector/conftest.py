"""A browser for the tests that look at the page; without one they are skipped, but by `make test-all`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.tests.socket_api.http.inspector.browser import Browser, program


@pytest.fixture(scope="session")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    if program() is None:
        whole = "heavy" not in request.config.getoption("markexpr")
        (pytest.fail if whole else pytest.skip)("there is no Chromium on this machine: apt-get install chromium")
    folder = Path(tempfile.mkdtemp(prefix="tb"))
    found = Browser(folder)
    yield found
    found.end()
    shutil.rmtree(folder, ignore_errors=True)
