"""examples/search.py does what its first sentence says, as a program beside a daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torpor.socket_api import Client
from torpor.tests.socket_api.real_daemon import RealDaemon

PROGRAM = Path(__file__).parents[2] / "examples" / "search.py"


@pytest.mark.one_in(1)
@pytest.mark.timeout(180)
def test_the_search_finds_the_names_that_greedy_decoding_does_not(daemon: RealDaemon) -> None:
    with Client(daemon.socket) as torpor:
        before = {info.name for info in torpor.list_sessions()}
    told = subprocess.run(
        [sys.executable, str(PROGRAM), "--socket", str(daemon.socket)],
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    ).stdout
    greedy, search, _ = told.splitlines()
    assert search.startswith("search:  subtract, square (perplexity ")
    assert greedy.startswith("greedy:  ")
    assert "subtract, square" not in greedy
    with Client(daemon.socket) as torpor:
        assert torpor.status().memory.branches_bytes == 0, "the program has ended"
        assert "def square(value):" in torpor.show("search/found").tail_text
        left = {info.name for info in torpor.list_sessions()} - before
        assert left == {"found"}, "it leaves nothing else behind"
