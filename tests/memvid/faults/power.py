"""T2: what a power cut can leave of a recorded scenario, each such disk opened and checked.

The model of the disk, pessimistic within POSIX:
- A file's bytes, and its size, are on the disk for certain only once the file was flushed; a name only once its
  folder was. Flushing a folder covers its own names and no other folder's.
- Of everything else, any subset may be there: whole operations in any combination, and a write torn at sectors of 512
  or 4,096 bytes, each sector there or not, with the file's size extended over the missing ones (they read as zeros)
  or not. A sector itself is never torn, and a missing one holds what it held before.
- A rename is one stroke: never both names, never neither, the target never absent if it was there. It is certain
  once the new name's folder was flushed; flushing the old one says nothing.

Beyond the model: a disk that lies about flushes, bytes that rot, and filesystems that lose flushed data.

Small sets of unflushed operations are tried in all combinations; of larger ones the empty and the full set, each
prefix, each operation alone and each left out, and random subsets with random tears from a fixed seed.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from torpor.memvid.store import Store
from torpor.tests.memvid.faults.beginnings import Scenario, Swept, prepare
from torpor.tests.memvid.faults.recording import (
    ROOT,
    Cut,
    Disk,
    Inode,
    Link,
    Operation,
    Recording,
    Step,
    Sync,
    Unlink,
    Write,
    record,
)
from torpor.tests.memvid.faults.worlds import NOTHING_ELSE, Allowed, Broken, Sees, Tape, check

SECTORS: Final = (512, 4096)
_ALL_SUBSETS_UP_TO: Final = 6
_THOROUGH_EVERY: Final = 64


@dataclass(frozen=True, slots=True)
class Torn:
    """A write of which only the sectors with a set bit arrived; `full_size`: the file's size did."""

    sector: int
    present: int
    full_size: bool


Fate = bool | Torn
"""What became of an unflushed operation: it arrived, it did not, or in parts."""


@dataclass
class Effort:
    """How many states to make at a cut, beyond those that are always made."""

    subsets: int
    tears: int


@dataclass
class _Cursor:
    """The disk at a cut: what is on it for certain, and what may be."""

    disk: Disk
    allowed: Allowed
    step: int = 0
    pending: list[Link | Unlink | Write | Cut] = field(default_factory=list)

    def advance(self, operation: Operation) -> None:
        if isinstance(operation, Step):
            self.allowed, self.step = operation.allowed, self.step + 1
        elif isinstance(operation, Sync):
            waiting, self.pending = self.pending, []
            for earlier in waiting:
                if _target(earlier) == operation.inode:
                    _apply(self.disk, earlier, fate=True)
                    self._forget_former_name(earlier)
                else:
                    self.pending.append(earlier)
        else:
            self.pending.append(operation)

    def _forget_former_name(self, operation: Operation) -> None:
        """What a rename that is certain took away cannot come about any more by an older operation."""
        if isinstance(operation, Link) and operation.gone is not None:
            self.pending = [
                earlier
                for earlier in self.pending
                if not (isinstance(earlier, Link | Unlink) and (earlier.folder, earlier.name) == operation.gone)
            ]


def _target(operation: Operation) -> Inode:
    """The inode whose flush makes this operation certain."""
    if isinstance(operation, Link | Unlink):
        return operation.folder
    assert isinstance(operation, Write | Cut)
    return operation.inode


def _apply(disk: Disk, operation: Operation, fate: Fate) -> None:
    match operation:
        case Link(folder, name, inode, is_folder, gone):
            if is_folder:
                disk.folders.setdefault(inode, {})
            else:
                disk.files.setdefault(inode, b"")
            names = dict(disk.folders.get(folder, {}))  # a copy: other states share it
            names[name] = inode
            disk.folders[folder] = names
            if gone is not None:
                _apply(disk, Unlink(*gone), fate=True)
        case Unlink(folder, name):
            names = dict(disk.folders.get(folder, {}))
            names.pop(name, None)
            disk.folders[folder] = names
        case Write(inode, offset, data):
            disk.files[inode] = _written(disk.files.get(inode, b""), offset, data, fate)
        case Cut(inode, size):
            disk.files[inode] = disk.files.get(inode, b"")[:size].ljust(size, b"\0")


def _written(old: bytes, offset: int, data: bytes, fate: Fate) -> bytes:
    new = bytearray(old)
    end = offset + len(data)
    if not isinstance(fate, Torn):
        new.extend(bytes(max(0, end - len(new))))
        new[offset:end] = data
        return bytes(new)
    if fate.full_size:
        new.extend(bytes(max(0, end - len(new))))
    first = offset // fate.sector
    for sector in range(first, (end - 1) // fate.sector + 1):
        if fate.present >> (sector - first) & 1:
            start, stop = max(offset, sector * fate.sector), min(end, (sector + 1) * fate.sector)
            new.extend(bytes(max(0, stop - len(new))))
            new[start:stop] = data[start - offset : stop - offset]
    return bytes(new)


def _state(cursor: _Cursor, fates: Sequence[Fate]) -> Disk:
    """The disk on which each pending operation met its fate."""
    disk = cursor.disk.copy()
    for operation, fate in zip(cursor.pending, fates, strict=True):
        if fate:
            _apply(disk, operation, fate)
    return disk


# --- which fates


def _fates(pending: Sequence[Operation], effort: Effort, chance: random.Random) -> Iterator[list[Fate]]:
    count = len(pending)
    yield [False] * count
    yield [True] * count
    if count <= _ALL_SUBSETS_UP_TO:
        yield from (list(fates) for fates in itertools.product((False, True), repeat=count))
    else:
        yield from _plain_fates(count)
        for _ in range(effort.subsets):
            likely = chance.choice((0.2, 0.5, 0.8))
            yield [chance.random() < likely for _ in range(count)]
    yield from _torn_fates(pending, effort, chance)


def _plain_fates(count: int) -> Iterator[list[Fate]]:
    for index in range(count):
        yield [True] * index + [False] * (count - index)
        yield [at == index for at in range(count)]
        yield [at != index for at in range(count)]


def _torn_fates(pending: Sequence[Operation], effort: Effort, chance: random.Random) -> Iterator[list[Fate]]:
    writes = [(index, operation) for index, operation in enumerate(pending) if isinstance(operation, Write)]
    for index, write in writes:
        for torn in _tears(write, effort, chance):
            yield [True] * index + [torn] + [False] * (len(pending) - index - 1)
            yield [True] * index + [torn] + [True] * (len(pending) - index - 1)
    for _ in range(effort.tears if writes else 0):
        fates: list[Fate] = [chance.random() < 0.7 for _ in pending]
        for index, write in writes:
            if chance.random() < 0.5:
                fates[index] = _random_tear(write, chance)
        yield fates


def _tears(write: Write, effort: Effort, chance: random.Random) -> Iterator[Torn]:
    for sector in SECTORS:
        sectors = _sectors(write, sector)
        if sectors < 2:
            continue
        most = min(sectors, effort.tears + 1)
        for full_size in (False, True):
            for at in chance.sample(range(sectors), most):
                yield Torn(sector, (1 << at) - 1, full_size)  # a prefix
                yield Torn(sector, ~(1 << at) & ((1 << sectors) - 1), full_size)  # a hole
    for _ in range(effort.tears):
        yield _random_tear(write, chance)


def _sectors(write: Write, sector: int) -> int:
    return (write.offset + len(write.data) - 1) // sector - write.offset // sector + 1


def _random_tear(write: Write, chance: random.Random) -> Torn:
    sector = chance.choice(SECTORS)
    return Torn(sector, chance.getrandbits(_sectors(write, sector)), chance.random() < 0.5)


# --- states as folders


def _paths(disk: Disk, folder: Inode = ROOT, above: str = "") -> Iterator[tuple[str, Inode, bool]]:
    """Everything that a name leads to: path, inode, whether it is a folder."""
    for name, inode in sorted(disk.folders[folder].items()):
        path = f"{above}/{name}" if above else name
        is_folder = inode in disk.folders
        yield path, inode, is_folder
        if is_folder:
            yield from _paths(disk, inode, path)


@functools.lru_cache(maxsize=4096)
def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


def _fingerprint(disk: Disk) -> tuple[bytes, bytes]:
    """Digests of a state, the first of all but the pid in the lock, the second without the bytes of temporary files."""
    whole, beyond = blake2b(digest_size=16), blake2b(digest_size=16)
    seen: dict[Inode, str] = {}
    for path, inode, is_folder in _paths(disk):
        label = f"{path}\0{is_folder}\0{seen.setdefault(inode, path)}\0".encode()
        content = b"" if is_folder or path.endswith("/lock") else _digest(disk.files[inode])
        whole.update(label + content)
        beyond.update(label + (b"" if path.endswith(".tmp") else content))
    return whole.digest(), beyond.digest()


def materialise(disk: Disk, base: Path) -> None:
    """Make the state under `base`, an inode with two names as two links."""
    shutil.rmtree(base, ignore_errors=True)
    base.mkdir(parents=True, mode=0o700)
    made: dict[Inode, str] = {}
    for path, inode, is_folder in _paths(disk):
        target = f"{base}/{path}"
        if is_folder:
            os.mkdir(target, 0o700)
        elif inode in made:
            os.link(made[inode], target)
        else:
            fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            if disk.files[inode]:
                os.write(fd, disk.files[inode])
            os.close(fd)
            made[inode] = target


# --- replay


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where the power is cut: after which operation, and what became of each that was not flushed."""

    position: int
    operation: Operation | None
    fates: Sequence[Fate]


@dataclass
class Replay:
    """Makes and checks the states of one recording from the operation number `begin` on. Counts those that differ in
    more than bytes of temporary files as `beyond_temps`.

    Every `one_in`-th cut is made, others in another `part`. After every `recoveries_every`-th check the recovery is
    recorded and replayed too.
    """

    name: str
    recording: Recording
    work: Path
    effort: Effort
    begin: int = 0
    part: int = 0
    most_failures: int = 3
    recoveries_every: int = 0
    one_in: int = 1
    sees: Sees = NOTHING_ELSE

    def run(self) -> Swept:
        result = Swept(self.name)
        known: set[bytes] = set()
        beyond: set[bytes] = set()
        checked: set[tuple[bytes, int]] = set()
        numbers = range(sum(1 for _ in self._cuts()))
        chosen = result.choose("cuts", numbers, self.one_in, self.part)
        for number, (cursor, cut) in enumerate(self._cuts()):
            if number not in chosen:
                continue
            result.counts["cuts"] += 1
            disk = _state(cursor, cut.fates)
            whole, other = _fingerprint(disk)
            known.add(whole)
            beyond.add(other)
            if (whole, cursor.step) in checked:
                continue
            checked.add((whole, cursor.step))
            result.counts["checks"] += 1
            self._check(disk, cursor, cut, result)
            if len(result.failures) >= self.most_failures:
                break
        result.counts += Counter(states=len(known), beyond_temps=len(beyond))
        return result

    def _cuts(self) -> Iterator[tuple[_Cursor, _Cut]]:
        """Every cut with the disk at it, which changes from one to the next."""
        cursor = _Cursor(self.recording.before.copy(), self.recording.world)
        seed = self.part // self.one_in
        for position, operation in enumerate((None, *self.recording.operations)):
            if operation is not None:
                cursor.advance(operation)
            if position >= self.begin:
                chance = random.Random(f"{seed} {self.name} {position}")
                for fates in _fates(cursor.pending, self.effort, chance):
                    yield cursor, _Cut(position, operation, fates)

    def _check(self, disk: Disk, cursor: _Cursor, cut: _Cut, result: Swept) -> None:
        materialise(disk, self.work)
        checks = result.counts["checks"]
        try:
            check(self.work / "store", cursor.allowed, thorough=checks % _THOROUGH_EVERY == 0, sees=self.sees)
        except Exception as error:
            result.counts["lost"] += isinstance(error, Broken) and error.lost
            told = [f"{_brief(waiting)}: {fate}" for waiting, fate in zip(cursor.pending, cut.fates, strict=True)]
            after = f"{cut.position} ({_brief(cut.operation)})"
            with result.blaming(f"cut after operation {after}, unflushed [{'; '.join(told)}]"):
                raise
            return
        if self.recoveries_every and checks % self.recoveries_every == 0:
            result.add(self._recover_and_cut(disk, cursor.allowed, checks))

    def _recover_and_cut(self, disk: Disk, allowed: Allowed, number: int) -> Swept:
        """Cut the power again while the store recovers from a state."""
        materialise(disk, self.work)
        recording = record(_open, self.work / "store", Tape(frozenset()))
        recording.world = allowed
        name = f"{self.name}, recovery from state {number}"
        inner = Replay(name, recording, self.work, Effort(4, 0), sees=self.sees)
        return inner.run()


def _open(path: Path, tape: Tape) -> None:
    Store.open(path, writable=True).close()


def _brief(operation: Operation | None) -> str:
    match operation:
        case Link(_, name, _, is_folder, gone):
            return f"{'mkdir' if is_folder else 'name'} {name}" + (f" from {gone[1]}" if gone else "")
        case Unlink(_, name):
            return f"unlink {name}"
        case Write(inode, offset, data):
            return f"write {len(data)} at {offset} of #{inode}"
        case Cut(inode, size):
            return f"cut #{inode} to {size}"
        case Sync(inode):
            return f"flush #{inode}"
        case Step():
            return "step"
        case _:
            return "start"


def sweep(scenario: Scenario, base: Path, **settings: Any) -> Swept:
    """Record a scenario, and replay what it did."""
    path = base / "recorded" / "store"
    recording = record(scenario.run, path, Tape(prepare(scenario, path)))
    result = Replay(scenario.name, recording, base / "work", sees=scenario.sees, **settings).run()
    shutil.rmtree(base, ignore_errors=True)
    return result
