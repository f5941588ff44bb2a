"""The clock to measure by runs on in a suspend, which `time.monotonic` does not."""

from __future__ import annotations

import sys
import time

from torpor.memvid.disk.clock import running_s


def test_the_clock_is_the_one_that_counts_a_suspend() -> None:
    name = "CLOCK_MONOTONIC_RAW" if sys.platform == "darwin" else "CLOCK_BOOTTIME"
    before = time.clock_gettime(getattr(time, name))
    assert before <= running_s() <= time.clock_gettime(getattr(time, name))
