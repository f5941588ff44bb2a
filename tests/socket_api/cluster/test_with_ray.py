"""A cluster under Ray itself: by the bench, which compares each session's cached tokens with its ledger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench" / "cluster.py"


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'torpor[ray]'")
def test_each_answered_turn_is_there_after_a_kill_in_mid_answer_and_after_an_upgrade(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    environment = {**os.environ, "RAY_agent_register_timeout_ms": "120000"}  # a busy machine takes long to start it
    command = [sys.executable, str(BENCH), "--count", "10", "--json", str(figures)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(figures.read_text())
    assert told["killed"]["stream_cut"]
    assert any(each["moved"] for each in told["killed"]["sessions"].values())
    assert any(each["moved"] for each in told["replaced"]["sessions"].values())
