"""Promise 1: an acknowledged sleep survives SIGKILL at any step; any other one leaves the version before (T1)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).parent / "crash_child.py"


@pytest.mark.skipif(sys.platform != "linux", reason="forks without exec, which macOS does not like")
@pytest.mark.parametrize(
    ("scenario", "tearing", "at_least"),
    [
        ("new", "whole", 40),
        ("new", "torn", 40),
        ("delete", "whole", 20),
        ("prune", "whole", 20),
        ("rebuild", "whole", 15),
        ("create", "whole", 40),
    ],
)
def test_t1_a_process_killed_at_any_step_loses_nothing_that_was_acknowledged(
    tmp_path: Path, scenario: str, tearing: str, at_least: int
) -> None:
    command = [sys.executable, str(CHILD), str(tmp_path), scenario, tearing]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    print(f"{scenario}, {tearing}: killed at {result['points']} points")
    assert result["wrong"] == []
    assert result["points"] >= at_least
