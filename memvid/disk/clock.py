"""The time of day as it is stored: a clock that shows a time before 1970 counts as one that shows 1970."""

from __future__ import annotations

import time


def now_ns() -> int:
    """Nanoseconds since 1970, never below 0: a reader of a stored time refuses a negative one."""
    return max(time.time_ns(), 0)
