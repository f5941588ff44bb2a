"""T1: SIGKILL at every call that changes something, then a second one during the recovery.

For n = 1, 2, 3, … up to the number of such calls a forked child runs the scenario and kills itself before its n-th
(in the torn sweep: after half of a write); the parent recovers and checks. A kill keeps what the page cache has, so a
missing flush cannot be seen here: `power.py` is for that.
"""

from __future__ import annotations

import os
import signal
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torpor.memvid.store import Store
from torpor.tests.memvid.faults.beginnings import Scenario, Swept, begun, fresh, run_through
from torpor.tests.memvid.faults.shim import Call, Handler, Shim, repeatable
from torpor.tests.memvid.faults.worlds import Allowed, Broken, Tape, World, check

_WRITERS = frozenset({"write", "writev", "pwrite", "pwritev"})
_tell_parent = os.write
"""The real call: one through the shim would count as a point, and the last points would never be killed at."""


@dataclass
class _Killer:
    """Handler of a shim: dies before the call number `point` that changes something."""

    point: int
    torn: bool = False
    seen: int = 0

    def __call__(self, call: Call) -> Any:
        if call.changes_state:
            self.seen += 1
            if self.seen == self.point:
                if self.torn:
                    write_half(call)
                os.kill(os.getpid(), signal.SIGKILL)
        return call.run()


def write_half(call: Call) -> None:
    if call.name in _WRITERS:
        fd, data = call.args[0], call.args[1]
        whole = b"".join(bytes(part) for part in data) if call.name.endswith("v") else bytes(data)
        half = whole[: len(whole) // 2]
        if call.name.startswith("p"):
            os.pwrite(fd, half, call.args[2])
        else:
            os.write(fd, half)


def events_of(
    scenario: Scenario,
    original: Path,
    work: Path,
    world: World,
    handler: Handler = lambda call: call.run(),
) -> list[Allowed]:
    """What may be found from each event of the scenario on when nothing goes wrong; the first of all is the start."""
    tape = run_through(scenario, original, work, world, handler)
    if tape.unsure:
        raise Broken(f"{scenario.name} may have left undone, though nothing went wrong: {tape.unsure}")
    return [Allowed(world, world), *tape.events]


def run_and_kill(scenario: Scenario, path: Path, world: World, killer: _Killer, *, seed: int = 2) -> tuple[bool, int]:
    """Whether the child outlived its scenario, and how many events of its steps it told."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            tape = Tape(world, lambda allowed: _say(writer))
            with repeatable(seed), Shim(killer):
                scenario.run(path, tape)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        events = len(pipe.read())
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise AssertionError(f"{scenario.name}: the child failed by itself at point {killer.point}")
    return os.WIFEXITED(status), events


def _say(writer: int) -> None:
    _tell_parent(writer, b".")


def sweep(
    scenario: Scenario, base: Path, *, stride: int = 1, torn_stride: int = 0, second_stride: int = 0, first: int = 0
) -> Swept:
    """Kill at every `stride`-th point, and at every `torn_stride`-th after half of a write; during the recovery from
    each, again at every `second_stride`-th. 0: never."""
    original, work, world = begun(scenario, base)
    again = base / "again" / "store"
    counting = _Killer(0)
    worlds = events_of(scenario, original, work, world, counting)
    result = Swept(scenario.name)
    with result.blaming("not killed at all"):
        check(work, worlds[-1], thorough=True, sees=scenario.sees)
    fresh(original, work)
    if not run_and_kill(scenario, work, world, _Killer(counting.seen + 1))[0]:
        raise AssertionError(f"{scenario.name}: the child makes more calls than {counting.seen}, which were counted")
    calls = range(1, counting.seen + 1)
    points = [(point, False) for point in result.choose("points", calls, stride, first)]
    if torn_stride:
        points += [(point, True) for point in result.choose("points", calls, torn_stride, first)]
    for point, torn in points:
        if result.has_seen_enough:
            break
        fresh(original, work)
        survived, events = run_and_kill(scenario, work, world, _Killer(point, torn))
        if survived:
            raise AssertionError(f"{scenario.name}: the child has made fewer than {point} calls")
        result.counts["points"] += 1
        if second_stride and not torn:
            seconds = range(1 + point % second_stride, 10_000, second_stride)
            _kill_recoveries(scenario, work, again, worlds[events], seconds, (result, point))
        with result.blaming(f"killed at point {point}"):
            check(work, worlds[events], thorough=True, sees=scenario.sees)
    return result


def _kill_recoveries(
    scenario: Scenario, crashed: Path, work: Path, allowed: Allowed, points: range, report: tuple[Swept, int]
) -> None:
    """Kill the recovery of one crashed store at these points, each time from the same state."""
    recovery = Scenario("recovery", None, lambda path, tape: Store.open(path, writable=True).close())
    result, first = report
    for point in points:
        fresh(crashed, work)
        survived, _ = run_and_kill(recovery, work, frozenset(), _Killer(point), seed=3)
        if survived:
            return
        result.counts["second_points"] += 1
        with result.blaming(f"killed at point {first}, then at {point} of the recovery"):
            check(work, allowed, thorough=True, sees=scenario.sees)
    raise AssertionError("a recovery of 10,000 calls")
