"""A daemon behind a front, for each client."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from front import Front
from serving import Daemon

# Nothing is to be fetched from anywhere.
os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
}


class Stage:
    """A daemon behind a front, in a folder with a short name. options: of the daemon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.options: tuple[str, ...] = ()
        self.front = Front(folder)

    def begin(self, *options: str) -> Front:
        """Start the daemon."""
        self.options = options or self.options
        self.front.daemon = Daemon(self.folder / "daemon", *self.options)
        return self.front

    def kill(self) -> None:
        """`kill -9` the daemon, and start another one on its store."""
        self.front.daemon.end(kill=True)
        self.begin()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name."""
    made = Path(tempfile.mkdtemp(prefix="tw"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def stage(folder: Path) -> Iterator[Stage]:
    made = Stage(folder)
    with ExitStack() as ending:
        ending.callback(made.front.stop)
        ending.callback(lambda: made.front.daemon.end())
        yield made
