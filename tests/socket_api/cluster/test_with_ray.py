"""A cluster under Ray itself: by the bench, which compares each session's cached tokens with its ledger."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench" / "cluster.py"


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'torpor[ray]'")
def test_each_answered_turn_is_there_after_a_kill_in_mid_answer_and_after_an_upgrade(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCH), "--count", "15", "--turns", "48", "--kills", "2", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1700)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    told = json.loads(figures.read_text())
    assert told["killed"]["stream_cut"]
    assert any(each["moved"] for each in told["killed"]["sessions"].values())
    assert any(each["moved"] for each in told["replaced"]["sessions"].values())
    assert (told["history"]["turns"], told["history"]["kills"]) == (48, 2)
