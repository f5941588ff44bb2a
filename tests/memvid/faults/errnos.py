"""T4: every call of a scenario refused, in each way a system refuses it, once and from then on for ever.

After the n-th call the fault strikes (for ever: it and all later calls that can fail so). The scenario must end in
success or in a StoreError, never in a bare OSError. Then the fault is lifted, and:
- a store object that lost a flush, or its lock, must refuse to write with the same error; any other one must be able to
  sleep again at once;
- the store is opened again and must be whole. After a refusal that is no lost flush, a sleep must have left nothing.

A flush that fails is told: the operation ends with an error.

SQLite works in memory alone: a statement fails where there is none. `size_limits` makes real errors.
"""

from __future__ import annotations

import errno
import inspect
import itertools
import os
import sqlite3
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from torpor.memvid.errors import DurabilityLost, LockLost, StoreError
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.faults.beginnings import Scenario, Swept, begun, fresh, run_through
from torpor.tests.memvid.faults.shim import Call, Shim, files_up_to, repeatable
from torpor.tests.memvid.faults.worlds import (
    Allowed,
    Broken,
    Tape,
    Version,
    World,
    check,
    require_right,
    sleep,
    take_marks_away,
)

_GROWS: Final = frozenset({"write", "writev", "pwrite", "mkdir"})
_FLUSHES: Final = frozenset({"fsync", "fdatasync"})
_NAMES: Final = frozenset({"rename", "replace", "link", "unlink", "rmdir"})
_READS: Final = frozenset({"read", "pread", "preadv", "listdir", "stat", "fstat", "dup"})
_SINCE: Final = SessionUri("default", "since-the-fault")
_SIZES: Final = range(0, 45_000, 512)
_POISONS: Final = (DurabilityLost, LockLost)
_STORE: Final = f"{Path(inspect.getfile(Store)).parent}{os.sep}"


def _makes_a_file(call: Call) -> bool:
    if call.name != "open" or not call.args[1] & os.O_CREAT:
        return False
    try:
        os.stat(call.args[0], dir_fd=call.kwargs.get("dir_fd"), follow_symlinks=False)
    except FileNotFoundError:
        return True
    return False


def _grows(call: Call) -> bool:
    return call.name in _GROWS or _makes_a_file(call)


def _frees(call: Call) -> bool:
    return call.name == "unlink" and str(call.args[0]).endswith((".mvm", ".mvp"))


@dataclass(frozen=True, slots=True)
class Fault:
    """A way to fail: which calls it can hit, and the error (None: the call does a part of its work)."""

    name: str
    number: int | None
    hits: Callable[[Call], bool]


FAULTS: Final = (
    Fault("ENOSPC", errno.ENOSPC, _grows),
    Fault("EDQUOT", errno.EDQUOT, lambda call: _grows(call) or call.name in ("rename", "fsync")),
    Fault("EIO", errno.EIO, lambda call: call.name not in ("close", "sql", "fcntl.flock")),
    Fault("EMFILE", errno.EMFILE, lambda call: call.name in ("open", "dup")),
    Fault("EROFS", errno.EROFS, lambda call: _makes_a_file(call) or call.name in _NAMES or call.name == "mkdir"),
    Fault("EACCES", errno.EACCES, lambda call: call.name in _NAMES | {"open", "stat", "listdir", "mkdir"}),
    Fault("EINTR", errno.EINTR, lambda call: call.name in _READS or call.name in ("open", "fsync", "writev", "pwrite")),
    Fault("short", None, lambda call: call.name in ("write", "writev", "pwrite", "preadv")),
    Fault("ENOMEM", errno.ENOMEM, lambda call: call.name == "sql" and call.args[0] not in ("ROLLBACK",)),
)


@dataclass
class _Faulty:
    """Handler of a shim: lets the call number `point` fail, and all after it if `for_ever`."""

    fault: Fault | None
    point: int
    for_ever: bool
    seen: int = 0
    struck: int = 0
    lifted: bool = False
    until_freed: bool = False  # a full disk has room again once a file goes
    flush: tuple[str, ...] = ()  # from the outside in, the store's functions around the first flush that failed

    def __call__(self, call: Call) -> Any:
        self.seen += 1
        if self.until_freed and self.struck and _frees(call):
            self.lifted = True
        due = self.seen == self.point or (self.for_ever and self.seen > self.point)
        if self.lifted or not due or self.fault is None or call.by_hand or not self.fault.hits(call):
            return call.run()
        self.struck += 1
        if call.name in _FLUSHES and not self.flush:
            self.flush = _functions_of_the_store()
        if self.fault.number is None:
            return _do_a_part(call)
        if call.name == "sql":
            raise sqlite3.OperationalError(f"injected {self.fault.name}")
        raise OSError(self.fault.number, os.strerror(self.fault.number))


def _functions_of_the_store() -> tuple[str, ...]:
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(_STORE)]
    return tuple(f"{Path(frame.filename).stem}.{frame.name}" for frame in frames)


def _do_a_part(call: Call) -> int:
    """A short read or write: half of the bytes, at least one."""
    fd, data, *rest = call.args
    views = [memoryview(part).cast("B") for part in (data if call.name.endswith("v") else [data])]
    wanted = max(1, sum(view.nbytes for view in views) // 2)
    if call.name == "preadv":
        given = os.pread(fd, wanted, *rest)
        left = memoryview(given)
        for view in views:
            view[: len(left)] = left[: view.nbytes]
            left = left[view.nbytes :]
        return len(given)
    half = b"".join(views)[:wanted]
    return os.pwrite(fd, half, *rest) if rest else os.write(fd, half)


@dataclass
class _Run:
    """One run under one fault."""

    scenario: Scenario
    path: Path
    tape: Tape
    handler: _Faulty
    added: set[Version] = field(default_factory=set)
    error: BaseException | None = None
    told: bool = False  # an operation ended with an error, even if the scenario went on

    def __call__(self) -> None:
        self.tape.on_failure = self._after_failure
        with repeatable(seed=2), Shim(self.handler):
            try:
                self.scenario.run(self.path, self.tape)
            except StoreError as error:
                self.error = error

    def _after_failure(self, store: Store, error: BaseException, is_outside: bool) -> None:
        """With the fault lifted, the same object goes on, or refuses for good if it was the store's own flush."""
        if not self.handler.struck:  # a failure that the scenario makes itself
            return
        self.handler.lifted = self.told = True
        version = Version(_SINCE, 0, 24, seed=4)
        with repeatable(seed=4):  # the same wherever the fault was, so that many runs leave the same store
            if isinstance(error, _POISONS) and not is_outside:
                try:
                    sleep(store, version)
                except type(error):
                    return
                raise Broken(f"a store that failed with {error.code} wrote again")
            if isinstance(error, StoreError):
                number = sleep(store, version).version
                require_right(store, replace(version, number=number))
                self.added.add(version)

    def require_told(self) -> None:
        """Raise Broken where a flush failed, and whoever asked for it was told that all is well."""
        flush = self.handler.flush
        if flush and self.error is None and not self.told:
            raise Broken(f"a flush failed in {' → '.join(flush)}, and nobody was told")

    def allowed(self, start: World) -> Allowed:
        """What may be found now. A sleep that was refused, its flushes not in doubt, has left nothing."""
        last = self.tape.events[-1] if self.tape.events else Allowed(start, start)
        after = last.after
        is_refused = self.error is not None and not isinstance(self.error, _POISONS)
        if is_refused and last.before <= last.after and not self.scenario.sees.is_gradual:
            after = last.before
        return Allowed(last.before | self.added, after | self.added)


def sweep(scenario: Scenario, base: Path, *, stride: int = 1, first: int = 0) -> Swept:
    """Every `stride`-th of: each fault at each call that it can hit, once and for ever.

    A fault that begins at a call which it cannot hit is the one that begins at the next call which it can.
    """
    original, work, world = begun(scenario, base)
    calls = _calls(scenario, original, work, world)
    result = Swept(scenario.name)
    runs = [
        (f"{fault.name} {'from' if for_ever else 'at'} call {point} ({name})", _Faulty(fault, point, for_ever))
        for point, (name, faults) in enumerate(calls, start=1)
        for fault, for_ever in itertools.product(faults, (False, True))
    ]
    for what, faulty in result.choose("runs", runs, stride, first):
        if result.has_seen_enough:
            break
        fresh(original, work)
        _try(_Run(scenario, work, Tape(world), faulty), world, what, result)
    return result


def _try(run: _Run, world: World, what: str, result: Swept) -> None:
    with result.blaming(what):
        run()
        if not run.handler.struck:
            return
        result.counts["runs"] += 1
        result.counts["refused"] += run.error is not None
        result.counts["poisoned"] += isinstance(run.error, DurabilityLost)
        run.require_told()
        if run.tape.marks_stay:
            take_marks_away(run.path)
        check(run.path, run.allowed(world), thorough=False, sees=run.scenario.sees)


def _calls(scenario: Scenario, original: Path, work: Path, world: World) -> list[tuple[str, list[Fault]]]:
    """The scenario's calls when none fails, each with the faults that can hit it."""
    calls: list[tuple[str, list[Fault]]] = []

    def note(call: Call) -> Any:
        calls.append((str(call), [fault for fault in FAULTS if not call.by_hand and fault.hits(call)]))
        return call.run()

    run_through(scenario, original, work, world, note)
    return calls


def deletes_when_full(scenario: Scenario, base: Path) -> Swept:
    """A full disk from each call on, until a file goes: the scenario, which only deletes, must succeed every time."""
    original, work, world = begun(scenario, base)
    calls = _calls(scenario, original, work, world)
    result = Swept(scenario.name)
    result.out_of = len(calls)
    hit = [(point, name) for point, (name, faults) in enumerate(calls, start=1) if FAULTS[0] in faults]
    for point, name in result.choose("runs", hit, 1, 0):
        fresh(original, work)
        run = _Run(scenario, work, Tape(world), _Faulty(FAULTS[0], point, for_ever=True, until_freed=True))
        _try(run, world, f"a full disk from call {point} ({name})", result)
        if run.error is not None:
            result.failures.append(f"{scenario.name}, a full disk from call {point}: {run.error}")
    return result


def size_limits(scenario: Scenario, base: Path, *, stride: int, first: int) -> Swept:
    """The system itself refuses to let a file grow beyond every `stride`-th size (RLIMIT_FSIZE)."""
    original, work, world = begun(scenario, base)
    result = Swept(scenario.name)
    for limit in result.choose("runs", _SIZES, stride, first):
        fresh(original, work)
        run = _Run(scenario, work, Tape(world), _SizeLimit(limit))
        _try(run, world, f"files of at most {limit} bytes", result)
    return result


class _SizeLimit(_Faulty):
    """Handler of a shim: the limit holds during each call, until it is lifted."""

    def __init__(self, limit: int) -> None:
        super().__init__(None, 0, for_ever=False)
        self._limit = limit
        self.struck = 1

    def __call__(self, call: Call) -> Any:
        if self.lifted:
            return call.run()
        with files_up_to(self._limit):
            return call.run()
