"""examples/embedded.py does what its first sentence says, in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "examples" / "embedded.py"


@pytest.mark.one_in(1)
@pytest.mark.timeout(180)
def test_the_surest_line_is_kept_and_goes_on_after_a_second_opening(tmp_path: Path) -> None:
    homes = {f"XDG_{name}_HOME": str(tmp_path / name.lower()) for name in ("CACHE", "DATA", "STATE", "CONFIG")}
    told = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={**os.environ, **homes, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    ).stdout
    surest, goes_on = told.splitlines()
    assert surest == "surest:  value = value"
    assert goes_on.startswith("goes on: '")
    assert len(goes_on) > len("goes on: ''")
    assert not any(path.name.startswith("tmp") for path in tmp_path.iterdir()), "it leaves nothing behind"
