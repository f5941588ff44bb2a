"""How long an event loop did nothing else, and where its thread stood meanwhile.

A callback comes each `TICK_S`; what it is late by is a gap. Another thread looks where the loop's thread stands while a
tick is late. On Linux the time for which the kernel let that thread wait for a core does not count, for a machine with
much to do would find gaps everywhere.

Run as a script it is a daemon whose loop is watched: `loop_gaps.py FILE ARGUMENTS...`. Each gap is a line of the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

TICK_S: Final = 0.005
LEAST_S: Final = 0.02
"""Of a gap that is told."""


@dataclass(frozen=True)
class Gap:
    """at: when it ended, in seconds of the monotonic clock. seconds: how late a tick was, without the wait for a core.
    computed_s: for how much of that the loop's thread computed. stack: where it stood, from the call that the
    loop made to the innermost; empty if it let no other thread look."""

    at: float
    seconds: float
    computed_s: float
    stack: tuple[str, ...] = ()


@contextlib.contextmanager
def watched(tell: Callable[[Gap], object], *, least_s: float = LEAST_S) -> Iterator[None]:
    """Watch the running loop, and tell of each gap of so many seconds or more, on the loop's thread."""
    watch = _Watch(tell, least_s)
    looker = threading.Thread(target=watch.look, name="loop-gaps", daemon=True)
    watch.begin()
    looker.start()
    try:
        yield
    finally:
        watch.end()
        looker.join()


def gaps_in(file: Path, *, since: float = 0.0) -> list[Gap]:
    """The gaps that a watched daemon has told in a file, the longest first. since: a time of the monotonic clock."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    found = [Gap(**json.loads(line)) for line in lines if line.endswith("\n")]
    return sorted((each for each in found if each.at >= since), key=lambda each: -each.seconds)


class _Watch:
    def __init__(self, tell: Callable[[Gap], object], least_s: float) -> None:
        self._tell, self._least_s = tell, least_s
        self._thread = threading.get_ident()
        self._over = threading.Event()
        self._seen: tuple[float, tuple[str, ...]] = (0.0, ())
        try:
            self._scheduled: int | None = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self._scheduled = None

    def begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._note()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def end(self) -> None:
        self._timer.cancel()
        self._over.set()
        if self._scheduled is not None:
            os.close(self._scheduled)

    def _note(self) -> None:
        self._last, self._waited_s, self._computed_s = time.monotonic(), self._waited(), time.thread_time()

    def _waited(self) -> float:
        """For how long the kernel has let this thread wait for a core."""
        return 0.0 if self._scheduled is None else int(os.pread(self._scheduled, 100, 0).split()[1]) / 1e9

    def _tick(self) -> None:
        last, waited, computed = self._last, self._waited_s, self._computed_s
        self._note()
        late = self._last - last - TICK_S - (self._waited_s - waited)
        if late >= self._least_s:
            seen_in, stack = self._seen
            self._tell(Gap(self._last, late, self._computed_s - computed, stack if seen_in == last else ()))
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def look(self) -> None:
        """Until the end: where the loop's thread stands, once in each gap."""
        while not self._over.wait(TICK_S):
            last = self._last
            if time.monotonic() - last > TICK_S + self._least_s / 2 and self._seen[0] != last:
                frame = sys._current_frames().get(self._thread)
                self._seen = last, _within_the_loop(traceback.extract_stack(frame)) if frame is not None else ()


def _within_the_loop(stack: traceback.StackSummary) -> tuple[str, ...]:
    runs = max((at for at, each in enumerate(stack) if each.name == "_run_once"), default=-1)
    return tuple(f"{each.filename}:{each.lineno} {each.name}" for each in stack[runs + 1 :])


def main() -> None:
    file = Path(sys.argv[1])
    from torpor.cli.registry import run

    run_alone = asyncio.run

    def run_watched(main: Any, **options: Any) -> Any:
        async def within() -> Any:
            with file.open("a", buffering=1) as lines, watched(lambda gap: lines.write(json.dumps(asdict(gap)) + "\n")):
                return await main

        return run_alone(within(), **options)

    asyncio.run = run_watched
    sys.exit(run(["serve", *sys.argv[2:]]))


if __name__ == "__main__":
    main()
