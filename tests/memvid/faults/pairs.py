"""Two faults at once: each pair of (kill, error, damaged file, missing file, removed index) at each step of a scenario.

The first fault strikes before one call of the scenario, the second before a later one, or in the recovery from a kill.
A kill is played in this process: from it on every call that would change something fails, and what is in memory is let
go of. That is as good as a real one, which `kill.py` has, and twenty times faster.

What may be found then is what `worlds.py` and `damage.py` allow together.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from torpor.memvid.errors import DurabilityLost, StoreError
from torpor.memvid.store import Store
from torpor.tests.memvid.faults.beginnings import Scenario, Swept, fresh, prepare
from torpor.tests.memvid.faults.damage import MISSING, Damage, check_damaged, files_of, strike
from torpor.tests.memvid.faults.shim import Call, Shim, repeatable
from torpor.tests.memvid.faults.worlds import INDEX, Allowed, Renumbered, Tape, World, check

_DESCRIPTORS: Final = "/proc/self/fd"
_FLIPS: Final = ("start", "middle", "end")
_NEVER_REFUSED: Final = ("close", "sql", "fcntl.flock")


class Killed(BaseException):
    """The process is no more."""


@dataclass(frozen=True, slots=True)
class Fault:
    """At which call something happens: "kill", "error", or what becomes of the file `name` (see `damage.HOWS`).
    `in_recovery`: it is a call of the opening that follows a kill."""

    what: str
    point: int
    name: str = ""
    in_recovery: bool = False

    def __str__(self) -> str:
        return f"{self.what} {self.name[:14]}".strip() + f" at {'recovery ' * self.in_recovery}{self.point}"


@dataclass
class Striker:
    """Handler of a shim: lets faults happen, each before its call. Notes calls: whether each one changes something, and
    which files there were before it."""

    path: Path
    faults: list[Fault]
    seen: int = 0
    is_dead: bool = False
    damages: list[Damage] = field(default_factory=list)
    calls: list[tuple[Call, list[str]]] | None = None

    def __call__(self, call: Call) -> Any:
        if self.is_dead:
            if call.changes_state:
                raise Killed
            return call.run()
        self.seen += 1
        if self.calls is not None:
            self.calls.append((call, files_of(self.path)))
        due, self.faults = (
            [fault for fault in self.faults if (fault.point <= self.seen) is is_due] for is_due in (True, False)
        )
        for fault in due:
            self._strike(fault, call)
        return call.run()

    def _strike(self, fault: Fault, call: Call) -> None:
        if fault.what == "kill":
            self.is_dead = True
            if call.changes_state:
                raise Killed
        elif fault.what == "error" and (call.by_hand or call.name in _NEVER_REFUSED):
            self.faults.append(fault)  # the next call
        elif fault.what == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        else:
            self.damage(fault)

    def damage(self, fault: Fault) -> None:
        if fault.name in files_of(self.path):
            self.damages.append(strike(self.path, fault.name, fault.what))


def sweep(scenario: Scenario, base: Path, *, stride: int = 1, first: int = 0) -> Swept:
    """Every `stride`-th of all pairs."""
    original, work = base / "original" / "store", base / "work" / "store"
    world = prepare(scenario, original)
    pairs = list(_pairs(scenario, original, work, world))
    result, known = Swept(scenario.name), set[bytes]()
    for pair in result.choose("pairs", pairs, stride, first):
        if result.has_seen_enough:
            break
        result.counts["pairs"] += 1
        with result.blaming(" and ".join(map(str, pair))):
            fresh(original, work)
            tape = Tape(world)
            try:
                allowed, damages = _run(scenario, work, tape, pair)
            except Renumbered:  # one fault took the manifest, and the other one the index
                result.counts["renumbered"] += 1
                continue
            state = _state(work, allowed, damages)
            if state not in known:
                result.counts["states"] += 1
                ever = world.union(*(event.after for event in tape.events))
                _check(scenario, work, allowed, damages, ever)
            known.add(state)
    return result


def _run(scenario: Scenario, path: Path, tape: Tape, pair: tuple[Fault, Fault]) -> tuple[Allowed, list[Damage]]:
    striker = Striker(path, [fault for fault in pair if not fault.in_recovery])
    is_refused = False
    with as_a_process(), repeatable(seed=2), Shim(striker):
        try:
            scenario.run(path, tape)
        except StoreError as error:
            is_refused = not isinstance(error, DurabilityLost)
        except Killed:
            pass
    for fault in striker.faults:
        if fault.what not in ("kill", "error"):
            striker.damage(fault)
    allowed = tape.allowed
    is_refused &= not striker.damages and not striker.is_dead and not scenario.sees.is_gradual
    if is_refused and allowed.before <= allowed.after:
        allowed = Allowed(allowed.before, allowed.before)  # a sleep that was refused has left nothing
    if later := [fault for fault in pair if fault.in_recovery]:
        again = Striker(path, later)
        with as_a_process(), repeatable(seed=3), Shim(again), contextlib.suppress(StoreError, Killed):
            Store.open(path, writable=True).close()
        striker.damages += again.damages
    return allowed, striker.damages


@contextlib.contextmanager
def as_a_process() -> Iterator[None]:
    """What is still open at the end is closed, as the system does for a process that has ended."""
    before = open_descriptors()
    try:
        yield
    finally:
        close_all_but(before)


def open_descriptors() -> set[str]:
    return set(os.listdir(_DESCRIPTORS))


def close_all_but(before: set[str]) -> None:
    for fd in open_descriptors() - before:
        with contextlib.suppress(OSError):
            os.close(int(fd))


def _check(scenario: Scenario, path: Path, allowed: Allowed, damages: list[Damage], ever: World) -> None:
    lasting = [damage for damage in damages if damage.name != INDEX]
    if lasting:
        check_damaged(path, allowed, lasting, scenario.sees, ever)
    else:
        check(path, allowed, thorough=False, sees=scenario.sees)


def _state(path: Path, allowed: Allowed, damages: list[Damage]) -> bytes:
    hasher = blake2b(digest_size=16)
    for file in sorted(path.parent.rglob("*")):
        if file.is_file() and file.name != "lock":
            hasher.update(f"{file.relative_to(path.parent)}\0".encode() + blake2b(file.read_bytes()).digest())
    hasher.update(repr((sorted(map(str, allowed.before)), sorted(map(str, allowed.after)), damages)).encode())
    return hasher.digest()


# --- which pairs


def _pairs(scenario: Scenario, original: Path, work: Path, world: World) -> Iterator[tuple[Fault, Fault]]:
    fresh(original, work)
    striker = Striker(work, [], calls=[])
    with repeatable(seed=2), Shim(striker):
        scenario.run(work, Tape(world))
    calls = striker.calls or []
    end = len(calls) + 1
    if scenario.sees.is_damaged:  # its marks are damaged as it is
        calls = [(call, [name for name in names if name != "marks.json"]) for call, names in calls]
    changes = [point for point, (call, _) in enumerate(calls, start=1) if call.changes_state]
    errors = [point for point, (call, _) in enumerate(calls, start=1) if call.name not in _NEVER_REFUSED]
    damages = [fault for point in (1, *(point + 1 for point in changes)) for fault in _damages(calls, point)]
    for one in damages:
        yield from ((one, Fault("kill", point)) for point in changes if point >= one.point)
        yield from ((one, Fault("error", point)) for point in errors if point >= one.point)
        yield from ((one, other) for other in damages if other.point == one.point and other.name > one.name)
        yield from ((one, other) for other in _damages(calls, end) if one.point < end and other.name != one.name)
    for point in errors:
        for later in (one for one in errors if one > point):
            yield Fault("error", point), Fault("error", later)
        yield from ((Fault("error", point), Fault("kill", later)) for later in changes if later > point)
        yield from ((Fault("error", point), other) for other in _damages(calls, end))
    for point in changes:
        yield from ((Fault("kill", point), Fault("error", later, in_recovery=True)) for later in range(1, 80))
        for other in _damages(calls, point):
            yield Fault("kill", point), Fault(other.what, 1, other.name, in_recovery=True)


def _damages(calls: list[tuple[Call, list[str]]], point: int) -> Iterator[Fault]:
    """Each file that is there before a call, missing or with a bit flipped: at another place of each file and call."""
    names = calls[min(point, len(calls)) - 1][1]
    for number, name in enumerate(names):
        yield Fault(MISSING, point, name)
        if name != INDEX:
            yield Fault(_FLIPS[(number + point) % len(_FLIPS)], point, name)
