"""The time of day as it is stored."""

from __future__ import annotations

import time


def now_ns() -> int:
    """Nanoseconds since 1970. A clock before 1970 counts as 0: a reader of a stored time refuses a negative one."""
    return max(time.time_ns(), 0)
