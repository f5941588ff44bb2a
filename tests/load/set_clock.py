"""The command line of torpor in a process whose wall clock is set from outside, as somebody sets that of a machine.

    python -m torpor.tests.load.set_clock FILE serve …

FILE has the seconds by which the clock is off, eight bytes, a double of this machine. They count at each reading of
`time.time` and `time.time_ns`, which is what the daemon reads the date by. What measures, CLOCK_BOOTTIME and
`time.monotonic`, goes on, as it does where a clock is set; and so do the dates of files, which the kernel writes.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from pathlib import Path
from typing import Final

OFFSET: Final = struct.Struct("=d")


def set_clock(file: Path, offset_s: float) -> None:
    """From now on a process with this file reads its date off by so many seconds. The file is made if it is not
    there."""
    if not file.exists():
        file.write_bytes(OFFSET.pack(offset_s))
    with file.open("r+b") as written:
        written.write(OFFSET.pack(offset_s))


def read_clock_by(file: Path) -> None:
    """Let this process read its date so. The file stays open, and is in memory."""
    with file.open("rb") as opened:
        held = mmap.mmap(opened.fileno(), OFFSET.size, access=mmap.ACCESS_READ)
    right, right_ns = time.time, time.time_ns

    def offset_s() -> float:
        found: float = OFFSET.unpack(held[:])[0]
        return found

    time.time = lambda: right() + offset_s()
    time.time_ns = lambda: right_ns() + int(offset_s() * 1e9)


if __name__ == "__main__":
    read_clock_by(Path(sys.argv.pop(1)))
    from torpor.cli.main import main

    main()
