"""Which share of a sweep is done where not all of it is: another one at each commit, so that many prove more than one.

`TORPOR_SHARE=NUMBER` chooses it, to run again what failed.
"""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path


@functools.cache
def share() -> int:
    """A number that follows from the commit, at which a sweep begins, modulo its step; 0 where there is no git."""
    chosen = os.environ.get("TORPOR_SHARE")
    if chosen is not None:
        return int(chosen)
    try:
        command = ["git", "rev-parse", "--short=6", "HEAD"]
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 0
    return int(done.stdout, 16) if done.returncode == 0 else 0
