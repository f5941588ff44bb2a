"""The README's examples, run as they stand, by a new user: an empty home, and `torpor` on the path."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.cli.reach.background import is_running

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(marker: str) -> str:
    """The fenced block that follows a marker comment."""
    found = re.search(rf"<!-- {marker}: .*?-->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no block marked {marker!r}"
    return found.group(1)


@pytest.fixture
def home() -> Iterator[dict[str, str]]:
    """The environment of somebody who has just installed torpor; whatever they left running is ended."""
    # Short, because a socket's path has to fit into 104 bytes on macOS.
    folder = Path(tempfile.mkdtemp(prefix="torpor-"))
    (folder / "run").mkdir(mode=0o700)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "TORPOR_", "PYTHON"))},
        "HOME": str(folder),
        "XDG_RUNTIME_DIR": str(folder / "run"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "NO_COLOR": "1",
    }
    try:
        yield environment
    finally:
        subprocess.run(["torpor", "stop"], env=environment, check=False, capture_output=True, timeout=60)
        shutil.rmtree(folder)


def run(script: str, interpreter: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a block with its text as standard input, in the folder that the README is in."""
    return subprocess.run(
        interpreter, input=script, text=True, env=environment, cwd=ROOT, capture_output=True, timeout=240, check=False
    )


@pytest.mark.timeout(600)
def test_the_shell_block_runs_as_it_stands_and_again(home: dict[str, str]) -> None:
    for _ in range(2):
        done = run(block("shell"), ["bash", "-e", "-o", "pipefail"], home)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "torpor://default/notes" in done.stdout
        assert "asleep" in done.stdout


@pytest.mark.timeout(600)
def test_the_lines_that_look_after_a_store_run_and_quantise_something(home: dict[str, str]) -> None:
    script = block("upkeep").replace("/mnt/disk", home["HOME"])
    done = run(script.replace(" book.", f" {home['HOME']}/book."), ["bash", "-e", "-o", "pipefail"], home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^quantised\b.*default/book@2", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.timeout(600)
def test_the_python_block_runs_as_it_stands_and_again_and_starts_the_daemon(home: dict[str, str]) -> None:
    for _ in range(2):
        done = run(block("python"), [sys.executable, "-"], home)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "0 tokens prefilled" in done.stdout


def test_stop_puts_agents_to_sleep_and_leaves_no_process(home: dict[str, str]) -> None:
    started = run("torpor serve --detach --json", ["bash"], home)
    assert started.returncode == 0, started.stdout + started.stderr
    pid = int(re.search(r'"pid": ?(\d+)', started.stdout)[1])  # type: ignore[index]
    assert run("torpor append kept 'a line to remember'", ["bash"], home).returncode == 0
    assert run("torpor stop", ["bash"], home).returncode == 0
    assert not is_running(pid)
    listed = run("torpor ls --json", ["bash"], home)
    assert '"torpor://default/kept"' in listed.stdout
