"""Which share of a sweep is done where not all of it is: another one at each commit, so that many prove more than one.

`TORPOR_SHARE=NUMBER` chooses it, to run again what failed.
"""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


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


def rotating(values: Iterable[Any], count: int) -> list[Any]:
    """Values for `parametrize`: `count` of them are this commit's, and the others heavy."""
    all_of_them = list(values)
    first = share() % len(all_of_them)
    chosen = {(first + number) % len(all_of_them) for number in range(count)}
    return [
        value if number in chosen else pytest.param(*_together(value), marks=pytest.mark.heavy)
        for number, value in enumerate(all_of_them)
    ]


def _together(value: Any) -> tuple[Any, ...]:
    """What one case takes, for one parameter or several."""
    return value if isinstance(value, tuple) else (value,)
