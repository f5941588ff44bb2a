"""Two faults at once: each pair of (kill, error, damaged file, missing file, removed index) at each step of a scenario.

The first fault strikes before one call of the scenario. What follows from it is run once, and its calls are noted: the
second fault strikes before one of these, or in the recovery from a kill. So each pair is one that can be. A file that
is damaged before the next call that reads it, or its folder, is as good as one that was damaged any earlier: only the
former is tried.

A kill is played in this process: from it on every call that would change something fails, and what is in memory is let
go of. That is as good as a real one, which `kill.py` has, and twenty times faster.

What may be found then is what `worlds.py` and `damage.py` allow together.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from torpor.memvid.disk import durable
from torpor.memvid.errors import DurabilityLost, StoreError
from torpor.memvid.store import Store
from torpor.tests.memvid.faults.beginnings import Scenario, Swept, begun, fresh
from torpor.tests.memvid.faults.damage import MISSING, Damage, check_damaged, files_of, place_of, strike
from torpor.tests.memvid.faults.shim import Call, Shim, repeatable
from torpor.tests.memvid.faults.worlds import INDEX, Allowed, Renumbered, Tape, World, check

_DESCRIPTORS: Final = "/proc/self/fd"
_FLIPS: Final = ("start", "middle", "end")
_NEVER_REFUSED: Final = ("close", "sql", "fcntl.flock")
_BY_NAME: Final = ("open", "stat", "rename", "replace", "link", "unlink")


class Killed(BaseException):
    """The process is no more."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Before which call something happens: "kill", "error", or what becomes of the file `name` (see `damage.HOWS`).
    `in_recovery`: it is a call of the opening that follows a kill."""

    what: str
    point: int
    name: str = ""
    in_recovery: bool = False

    def __str__(self) -> str:
        return f"{self.what} {self.name[:14]}".strip() + f" at {'recovery ' * self.in_recovery}{self.point}"


@dataclass(frozen=True, slots=True)
class Noted:
    """A call that was made: whether it changes something, whether it may be refused, and which damage of which file it
    may tell of."""

    point: int
    changes_state: bool
    may_fail: bool
    sees: tuple[tuple[str, str], ...]


@dataclass
class Striker:
    """Handler of a shim: lets faults happen, each before its call, and an error before the next call that may be
    refused. Notes the calls if `notes` is a list, and which of `files` each may tell of."""

    path: Path
    faults: list[Fault]
    notes: list[Noted] | None = None
    files: Callable[[], list[str]] = list
    seen: int = 0
    is_dead: bool = False
    damages: list[Damage] = field(default_factory=list)

    def __call__(self, call: Call) -> Any:
        if self.is_dead:
            if call.changes_state:
                raise Killed
            return call.run()
        self.seen += 1
        may_fail = call.name not in _NEVER_REFUSED and not call.by_hand
        while self.faults and self.faults[0].point <= self.seen and (may_fail or self.faults[0].what != "error"):
            self._strike(self.faults.pop(0), call)
        if self.notes is not None and not call.by_hand:
            self.notes.append(Noted(self.seen, call.changes_state, may_fail, tuple(self._seen_by(call))))
        return call.run()

    def _strike(self, fault: Fault, call: Call) -> None:
        if fault.what == "kill":
            self.is_dead = True
            if call.changes_state:
                raise Killed
        elif fault.what == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        else:
            self.damage(fault)

    def damage(self, fault: Fault) -> None:
        self.damages.append(strike(self.path, fault.name, fault.what))

    def damage_at_the_end(self) -> None:
        """What is left strikes when nothing runs any more."""
        if not self.is_dead and any(fault.point <= self.seen for fault in self.faults):
            raise AssertionError(f"{self.faults[0]} did not strike: a run is not like the one before")
        for fault in self.faults:
            self.damage(fault)

    def _seen_by(self, call: Call) -> Iterator[tuple[str, str]]:
        """Each file that this call may tell of, and what of it: that it is missing, or where a bit is wrong."""
        named = [_path_of(arg) for arg in call.args[:2] if isinstance(arg, (int, str, bytes, os.PathLike))]
        for name in self.files():
            file = self.path / name
            is_it = any(path.name == file.name for path in named)
            if (is_it and call.name in _BY_NAME) or (call.name == "listdir" and file.parent in named):
                yield name, MISSING
            if is_it and name != INDEX:
                yield from ((name, how) for how in _FLIPS if _reads(call, place_of(how, file.stat().st_size)))


def _reads(call: Call, place: int) -> bool:
    """Whether a call tells of a byte there: by reading it, or by the time of the last change."""
    if call.name in ("pread", "preadv"):
        size = call.args[1] if call.name == "pread" else sum(map(len, call.args[1]))
        offset = call.args[2]
        return bool(offset <= place < offset + size)
    return call.name in ("read", "sendfile", "copy_file_range", "stat", "fstat")


def _path_of(arg: Any) -> Path:
    """What an argument of a call names, as a whole path or as a name; a number that is no descriptor names nothing."""
    if not isinstance(arg, int):
        return Path(os.fsdecode(arg))
    try:
        return Path(os.readlink(f"{_DESCRIPTORS}/{arg}"))
    except OSError:
        return Path()


def sweep(scenario: Scenario, base: Path, *, stride: int = 1, second_stride: int = 1, first: int = 0) -> Swept:
    """Every `stride`-th first fault, with every `second_stride`-th of those that may follow it."""
    original, work, world = begun(scenario, base)
    one_fault = _Runs(scenario, original, work, world)
    result, known = Swept(scenario.name), set[bytes]()
    for at, one in enumerate(result.choose("firsts", list(one_fault.firsts()), stride, first)):
        result.counts["firsts"] += 1
        for other in result.choose("pairs", list(one_fault.seconds(one)), second_stride, first + 7 * at):
            if result.has_seen_enough:
                return result
            result.counts["pairs"] += 1
            with result.blaming(f"{one} and {other}"):
                _try(one_fault, one, other, known, result)
    return result


def _try(runs: _Runs, one: Fault, other: Fault, known: set[bytes], result: Swept) -> None:
    try:
        tape, allowed, damages = runs.run([one, other])
    except Renumbered:  # one fault took the manifest, and the other one the index
        result.counts["renumbered"] += 1
        return
    state = _state(runs.work, allowed, damages)
    if state not in known:
        result.counts["states"] += 1
        ever = runs.world.union(*(event.after for event in tape.events))
        _check(runs.scenario, runs.work, allowed, damages, ever)
    known.add(state)


@dataclass
class _Runs:
    """Runs of one scenario, each on a fresh copy of its store. Marks that are damaged as they are stay so."""

    scenario: Scenario
    original: Path
    work: Path
    world: World

    def run(
        self, faults: Sequence[Fault], notes: list[Noted] | None = None, recovery: list[Noted] | None = None
    ) -> tuple[Tape, Allowed, list[Damage]]:
        """With these faults. The calls go to `notes`, and those of the recovery from a kill to `recovery`. Raises
        Renumbered."""
        fresh(self.original, self.work)
        tape = Tape(self.world)
        striker = Striker(self.work, [fault for fault in faults if not fault.in_recovery], notes, self._files)
        is_refused = False
        with as_a_process(), repeatable(seed=2), Shim(striker):
            try:
                self.scenario.run(self.work, tape)
            except StoreError as error:
                is_refused = not isinstance(error, DurabilityLost)
            except Killed:
                pass
        striker.damage_at_the_end()
        allowed = tape.allowed
        is_refused &= not striker.damages and not striker.is_dead and not self.scenario.sees.is_gradual
        if is_refused and allowed.before <= allowed.after:
            allowed = Allowed(allowed.before, allowed.before)  # a sleep that was refused has left nothing
        later = [fault for fault in faults if fault.in_recovery]
        if later or recovery is not None:
            striker.damages += self._recover(later, recovery)
        return tape, allowed, striker.damages

    def _recover(self, faults: list[Fault], notes: list[Noted] | None) -> list[Damage]:
        striker = Striker(self.work, faults, notes, self._files)
        with as_a_process(), repeatable(seed=3), Shim(striker), contextlib.suppress(StoreError, Killed):
            Store.open(self.work, writable=True).close()
        striker.damage_at_the_end()
        return striker.damages

    def firsts(self) -> Iterator[Fault]:
        """Each fault that the run can be struck with."""
        notes: list[Noted] = []
        self.run([], notes)
        yield from _faults(notes, self._end_of(notes, 0))

    def seconds(self, one: Fault) -> Iterator[Fault]:
        """Each fault that can follow this one."""
        notes: list[Noted] = []
        recovery: list[Noted] | None = [] if one.what == "kill" else None
        with contextlib.suppress(Renumbered):  # the run ends there
            self.run([one], notes, recovery)
        if recovery is None:
            after, end = [note for note in notes if note.point >= one.point], self._end_of(notes, one.point)
        else:
            after, end = recovery, self._end_of(recovery, 0)
        for fault in _faults(after, end, in_recovery=recovery is not None):
            is_other_file = fault.name != one.name and (fault.point, fault.name) > (one.point, one.name)
            if not (one.name and fault.name) or is_other_file:  # two files: in one order where it is all the same
                yield fault

    def _end_of(self, notes: list[Noted], least: int) -> Noted:
        """When all is done any file may be damaged."""
        last = max([least, *(note.point for note in notes)])
        names = self._files()
        flips = [(name, _FLIPS[at % len(_FLIPS)]) for at, name in enumerate(names) if name != INDEX]
        return Noted(last + 1, changes_state=False, may_fail=False, sees=(*((name, MISSING) for name in names), *flips))

    def _files(self) -> list[str]:
        found = files_of(self.work)
        return [name for name in found if name != "marks.json"] if self.scenario.sees.is_damaged else found


def _faults(notes: Iterable[Noted], end: Noted, *, in_recovery: bool = False) -> Iterator[Fault]:
    """What can happen before each call, and when all is done."""
    for note in (*notes, end):
        if note.changes_state:
            yield Fault("kill", note.point, in_recovery=in_recovery)
        if note.may_fail:
            yield Fault("error", note.point, in_recovery=in_recovery)
        for name, how in note.sees:
            yield Fault(how, note.point, name, in_recovery)


@contextlib.contextmanager
def as_a_process() -> Iterator[None]:
    """What is still open at the end is closed, and nothing is being written, as of a process that has ended."""
    before = open_descriptors()
    try:
        yield
    finally:
        close_all_but(before)
        durable._WRITTEN.clear()


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
