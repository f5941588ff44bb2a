"""Machines that take a session from each other over an object store, under everything that may happen to them.

One thread a process, of which one runs at a time: each request to the object store hands over to the world, which lets
time pass, lets others run, lets requests land, wait, get lost or answer wrongly, and machines crash and be suspended.
All of it follows from one random generator, so a history happens again from its seed.

The world looks after each step: never two valid leases at one moment of true time, no version lost from a head that
was answered, no epoch twice. At the end, without further faults, somebody gets the session.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final
from unittest import mock

from torpor.memvid.errors import LeaseLost, RemoteError, RemoteUnclear, RemoteUnreachable, SessionNotFound
from torpor.memvid.folder.seen_heads import SeenHeads
from torpor.memvid.remote import heads as real_heads
from torpor.memvid.remote import leases as real_leases
from torpor.memvid.remote.objects import Entry, Object
from torpor.memvid.uri import SessionUri

URI: Final = SessionUri("work", "Notes")
LEASE_S: Final = 30
RATES: Final = (0.93, 1.0, 1.07)
"""Seconds of a machine's clock in one of true time: further apart than any that work."""


class Violated(AssertionError):
    """What must never be."""


class Killed(BaseException):
    """Raised in a process that has crashed."""


@dataclass(frozen=True)
class Code:
    """The modules that are tried."""

    heads: Any = real_heads
    leases: Any = real_leases


@dataclass(frozen=True)
class Change:
    """A text of a module, and what takes its place."""

    module: str
    before: str
    after: str


def changed_code(changes: Iterable[Change]) -> Code:
    """The modules with a fault in them, beside the sound ones."""
    made: dict[str, Any] = {}
    for name, real in (("heads", real_heads), ("leases", real_leases)):
        source = inspect.getsource(real)
        for change in changes:
            if change.module == name:
                assert source.count(change.before) == 1, f"the code of {name} has changed: {change.before}"
                source = source.replace(change.before, change.after)
        module = types.ModuleType(real.__name__)
        module.__package__ = real.__name__.rpartition(".")[0]
        with mock.patch.dict(sys.modules, {f"{module.__package__}.{each}": made[each] for each in made}):
            exec(compile(source, str(real.__file__), "exec"), module.__dict__)
        made[name] = module
    return Code(**made)


class Seen(SeenHeads):
    """What a store has seen, without a disk: `saved` outlives a crash."""

    def __init__(self, saved: dict[Any, int]) -> None:
        super().__init__(mock.Mock())
        self._saved = saved
        self._loaded = dict(saved)

    def save(self) -> None:
        self._saved.update(self._revisions)


@dataclass
class Call:
    """A request to the object store: not there yet, then with an answer on its way. work: the number of that which it
    is part of."""

    kind: str
    data: bytes = b""
    tag: str = ""
    work: int = 0
    answer: Any = None
    is_answered: bool = False


@dataclass
class Machine:
    """A machine with one store. steps_s: by how much its wall clock was set; asleep_s: how long it was suspended."""

    party: Any
    rate: float
    steps_s: float = 0.0
    asleep_s: float = 0.0
    suspended_at: float | None = None
    saved: dict[Any, int] = field(default_factory=dict)
    process: Process | None = None


class Process:
    """A daemon on a machine, with one session. It is an object store's client, too: each request waits for the world.

    lease: of the session; None: it has none. may_take_at: when it has tried in vain, the true time from which it may
    take the session as far as it knows.
    """

    url = "world:"

    def __init__(self, world: World, machine: Machine) -> None:
        self.world = world
        self.machine = machine
        self.lease: Any = None
        self.may_take_at = 0.0
        self.call: Call | None = None
        self.is_killed = False
        self._works = 0
        self._watch = world.code.leases.Watch(machine.party, lambda: world.clock(machine))
        self._heads = world.code.heads.Heads(self, Seen(machine.saved))
        self._go, self._gone = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # --- the world's side

    def resume(self) -> None:
        """Let it run up to its next request."""
        if self._thread.is_alive():
            self._go.release()
            self._gone.acquire()

    def kill(self) -> None:
        self.is_killed = True
        self.resume()
        self._thread.join()

    # --- its own side

    def _run(self) -> None:
        self._go.acquire()
        try:
            while not self.is_killed:
                self._work()
                self._pause(None)
        except Killed:
            pass
        except BaseException as error:
            self.world.failure = error
        self._gone.release()

    def _pause(self, call: Call | None) -> None:
        self.call = call
        self._gone.release()
        self._go.acquire()
        if self.is_killed:
            raise Killed

    def _work(self) -> None:
        chance = self.world.random
        try:
            if self.lease is None:
                work = chance.choices((self._take, self._ask, self._withdraw), (8, 1, 1))[0]
            else:
                work = chance.choices(
                    (self._renew, self._push, self._decline, self._release, self._sleep), (4, 4, 1, 1, 1)
                )[0]
            self.world.tell(self, work.__name__.strip("_"))
            self.world.works += 1
            self._works = self.world.works
            work()
        except LeaseLost:
            self.lease = None
        except (RemoteError, SessionNotFound) as error:
            self.world.tell(self, error.code)
            if (wait_s := error.details.get("wait_s")) is not None:
                self.may_take_at = self.world.now + wait_s / self.machine.rate

    def _take(self) -> None:
        self.lease = self.world.code.leases.take(self._heads, URI, self._watch, lease_s=LEASE_S)
        self.world.taken(self.lease)

    def _ask(self) -> None:
        self.world.code.leases.ask(self._heads, URI, self.machine.party)

    def _withdraw(self) -> None:
        self.world.code.leases.withdraw(self._heads, URI, self.machine.party)

    def _renew(self) -> None:
        self.lease.renew()

    def _push(self) -> None:
        bundle_id = self.world.random.randbytes(32).hex()
        self.lease.change(lambda head: head.with_version(bundle_id))
        self.world.promised.add(bundle_id)

    def _decline(self) -> None:
        self.lease.decline()

    def _release(self, *, asleep: bool = False) -> None:
        lease = self.lease
        try:
            lease.release(asleep=asleep)
        finally:
            self.lease = None

    def _sleep(self) -> None:
        self._release(asleep=True)

    # --- as an object store

    def _asked(self, call: Call) -> Any:
        call.work = self._works
        while not call.is_answered:
            self._pause(call)
        self.call = None
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer

    def get(self, key: str, most_bytes: int) -> Object | None:
        answer: Object | None = self._asked(Call("get"))
        return answer

    def create(self, key: str, data: bytes) -> str | None:
        answer: str | None = self._asked(Call("create", data))
        return answer

    def replace(self, key: str, data: bytes, tag: str) -> str | None:
        answer: str | None = self._asked(Call("replace", data, tag))
        return answer

    def put(self, key, data):
        return self._asked(Call("put", data))

    def entries(self, prefix: str) -> Iterator[Entry]:
        raise NotImplementedError


class World:
    """One history. clock_kind: which clock the machines measure by; a sound one is "running"."""

    def __init__(self, seed: int, code: Code | None = None, clock_kind: str = "running") -> None:
        self.random = Random(seed)
        self.code = code or Code()
        self.now = 1000.0
        self.told: list[str] = []
        self.promised: set[str] = set()
        self.failure: BaseException | None = None
        self._clock_kind = clock_kind
        self._contents: list[bytes] = []  # of the head, the present one last
        self._flying: list[Call] = []
        self._epochs: set[int] = set()
        self.works = 0
        self._landed_last = 0
        party = self.code.heads.Party
        stores = [f"00000000-0000-4000-8000-00000000000{number}" for number in range(3)]
        parties = [party(stores[0], "a"), party(stores[1], "b")]
        if self.random.random() < 0.5:
            parties.append(self.random.choice((party(stores[2], "c"), party(stores[0], "copy of a"))))
        self.machines = [Machine(each, self.random.choice(RATES)) for each in parties]
        self._busy = self.machines[0]  # that runs while others stand still
        for machine in self.machines:
            machine.process = Process(self, machine)

    # --- what processes see

    def clock(self, machine: Machine) -> float:
        if self._clock_kind == "wall":
            return self.now * machine.rate + machine.steps_s
        if self._clock_kind == "awake":
            suspended_s = 0.0 if machine.suspended_at is None else self.now - machine.suspended_at
            return (self.now - machine.asleep_s - suspended_s) * machine.rate
        return self.now * machine.rate

    def tell(self, process: Process, what: str) -> None:
        self.told.append(f"{self.now:.2f} {process.machine.party.machine}: {what}")

    def taken(self, lease: Any) -> None:
        if lease.epoch in self._epochs:
            raise Violated(f"epoch {lease.epoch} twice")
        self._epochs.add(lease.epoch)

    # --- what happens

    def run(self, steps: int) -> None:
        """Raises Violated."""
        try:
            for _ in range(steps):
                self._let_time_pass()
                self._step()
                self._require_right()
            self._heal()
        finally:
            for machine in self.machines:
                if machine.process is not None:
                    machine.process.kill()
        self._require_right()

    def _processes(self) -> list[Process]:
        return [machine.process for machine in self.machines if machine.process is not None]

    def _let_time_pass(self) -> None:
        chance = self.random
        kind = chance.choices(("no", "little", "some", "moment", "hour"), (40, 25, 10, 24, 1))[0]
        if kind == "little":
            self.now += chance.random()
        elif kind == "some":
            self.now += chance.random() * LEASE_S
        elif kind == "hour":
            self.now += 3600
        elif kind == "moment":  # just before or behind one at which something changes
            moments = [each.may_take_at for each in self._processes()]
            moments += [
                self.now + each.lease.left_s / each.machine.rate
                for each in self._processes()
                if each.lease is not None and each.lease.left_s > 0
            ]
            coming = [moment for moment in moments if moment > self.now]
            if coming:
                self.now = max(chance.choice(coming) + chance.choice((-0.01, 0.01)), self.now)

    def _step(self) -> None:
        chance = self.random
        kind = chance.choices(("run", "land", "crash", "suspend", "set"), (90, 4, 2, 3, 1))[0]
        if chance.random() < 0.15:
            self._busy = chance.choice(self.machines)
        machine = self._busy if chance.random() < 0.8 else chance.choice(self.machines)
        if kind == "run" and machine.suspended_at is None:
            self._run(machine)
        elif kind == "land" and self._flying:
            self._land(self._flying.pop(chance.randrange(len(self._flying))))
        elif kind == "crash" and machine.process is not None:
            self.told.append(f"{self.now:.2f} {machine.party.machine} crashes")
            call = machine.process.call
            if call is not None and call.kind != "get" and not call.is_answered and chance.random() < 0.5:
                self._flying.append(call)
            machine.process.kill()
            machine.process = None
        elif kind == "suspend":
            if machine.suspended_at is None:
                machine.suspended_at = self.now
            else:
                machine.asleep_s += self.now - machine.suspended_at
                machine.suspended_at = None
        elif kind == "set":
            machine.steps_s += chance.choice((-3600, 3600))

    def _run(self, machine: Machine) -> None:
        if machine.process is None:
            machine.process = Process(self, machine)
        call = machine.process.call
        if call is not None and not call.is_answered:
            self._serve(call)
        else:
            machine.process.resume()

    def _serve(self, call: Call) -> None:
        """The request arrives, or does not; its answer is on its way."""
        chance = self.random
        if call.kind == "get":
            how = chance.choices(("sound", "stale", "unreachable"), (94, 3, 3))[0]
            at = len(self._contents) - 1
            if how == "stale" and self._contents:
                at = chance.randrange(len(self._contents))
            call.answer = Object(self._contents[at], str(at)) if self._contents else None
            if how == "unreachable":
                call.answer = RemoteUnreachable("no answer")
        else:
            how = chance.choices(
                ("sound", "lost", "late", "unclear", "no", "twice", "unreachable"), (76, 4, 5, 4, 4, 4, 3)
            )[0]
            call.answer = RemoteUnclear("the answer was lost")
            if how in ("sound", "lost", "twice"):
                landed = self._land(call)
                call.answer = {"sound": landed, "lost": call.answer, "twice": None}[how]
            elif how == "late":
                self._flying.append(call)
            elif how == "no":  # a 409 that says nothing
                call.answer = None
            elif how == "unreachable":
                call.answer = RemoteUnreachable("503")
        self.told.append(f"{self.now:.2f} {call.kind} {how}")
        call.is_answered = True

    def _land(self, call: Call) -> str | None:
        """The tag of what has landed."""
        now = str(len(self._contents) - 1) if self._contents else ""
        if (call.kind == "create" and self._contents) or (call.kind == "replace" and call.tag != now):
            return None
        if call.work == self._landed_last:
            self.failure = Violated("one change landed twice")
        self._landed_last = call.work
        self._contents.append(call.data)
        head = self.code.heads.Head.decode(call.data, "the head")
        self.told.append(f"{self.now:.2f} landed: epoch {head.epoch}, {head.holder}")
        return str(len(self._contents) - 1)

    def _require_right(self) -> None:
        if self.failure is not None:
            raise self.failure
        valid = [each for each in self._processes() if each.lease is not None and each.lease.left_s > 0]
        if len(valid) > 1:
            raise Violated(f"two valid leases: {[each.machine.party.machine for each in valid]}")
        if self._contents:
            lost = self.promised - set(self.code.heads.Head.decode(self._contents[-1], "the head").versions)
            if lost:
                raise Violated(f"{len(lost)} versions are lost from the head")

    def _heal(self) -> None:
        """All that is under way comes to an end, and all machines but one are gone: that one gets the session."""
        *others, last = self.machines
        for machine in others:
            if machine.process is not None:
                machine.process.kill()
                machine.process = None
        while self._flying:
            self._land(self._flying.pop())
        last.suspended_at = None
        if last.process is None:
            last.process = Process(self, last)
        with mock.patch.object(self, "_serve", self._serve_well):
            for _ in range(60):
                if last.process.lease is not None and last.process.lease.left_s > 0:
                    return
                self.now += LEASE_S / 4
                for _ in range(4):
                    self._run(last)
                self._require_right()
        raise Violated("nobody gets the session any more")

    def _serve_well(self, call: Call) -> None:
        at = len(self._contents) - 1
        got = Object(self._contents[at], str(at)) if self._contents else None
        call.answer = got if call.kind == "get" else self._land(call)
        call.is_answered = True


def find(seeds: Sequence[int], steps: int, make: Callable[[int], World]) -> tuple[int, str] | None:
    """The first seed whose history goes wrong, and how; None if none does."""
    for seed in seeds:
        try:
            make(seed).run(steps)
        except Violated as violated:
            return seed, str(violated)
    return None
