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
    """A daemon behind a front, in a folder with a short name. options: of the daemon. kills: so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.options: tuple[str, ...] = ()
        self.front = Front(folder)
        self.kills = 0

    def begin(self, *options: str) -> Front:
        """Start the daemon."""
        self.options = options or self.options
        self.front.daemon = Daemon(self.folder / "daemon", *self.options)
        return self.front

    def kill(self) -> None:
        """`kill -9` the daemon, and start another one on its store."""
        self.front.daemon.end(kill=True)
        self.kills += 1
        self.begin()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name."""
    made = Path(tempfile.mkdtemp(prefix="tw"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def stage(folder: Path, request: pytest.FixtureRequest) -> Iterator[Stage]:
    made = Stage(folder)
    with ExitStack() as ending:
        ending.callback(made.front.stop)
        ending.callback(lambda: made.front.daemon.end())
        yield made
    if made.kills:
        _TOLD.append((request.node.name.partition("[")[2].rstrip("]") or request.node.name, costs(made)))


_TOLD: list[tuple[str, str]] = []


def costs(stage: Stage) -> str:
    """Cached, recomputed and prefilled tokens: of all requests before the kill, of the first one behind it, and of the
    others."""
    answered = [each for each in stage.front.exchanges if each.status == 200]
    before = [each for each in answered if each.daemon is answered[0].daemon]
    behind = answered[len(before) :]
    cells = []
    for part in (before, behind[:1], behind[1:]):
        usages = [each.usage for each in part]
        sums = [sum(getattr(usage, name) for usage in usages) for name in ("cached", "recomputed", "read")]
        cells.append("".join(f"{each:>9,}" for each in sums))
    return " |".join(cells)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each client cost."""
    if _TOLD:
        columns = "".join(f"{name:>9}" for name in ("cached", "again", "read"))
        terminalreporter.section("tokens before a kill, of the first request behind it, and of the others")
        terminalreporter.write_line(" " * 34 + " |".join([columns] * 3))
    for name, cells in _TOLD:
        terminalreporter.write_line(f"{name[:34]:<34}{cells}")
