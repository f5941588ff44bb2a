"""The time of day as it is stored, and a clock to measure by."""

from __future__ import annotations

import sys
import time
from typing import Final

_RUNNING: Final = time.CLOCK_MONOTONIC_RAW if sys.platform == "darwin" else time.CLOCK_BOOTTIME


def now_ns() -> int:
    """Nanoseconds since 1970. A clock before 1970 counts as 0: a reader of a stored time refuses a negative one."""
    return max(time.time_ns(), 0)


def running_s() -> float:
    """Seconds since a moment of this boot. They run on while the machine is suspended, and nobody sets them:
    `time.monotonic` stands still then."""
    return time.clock_gettime(_RUNNING)
