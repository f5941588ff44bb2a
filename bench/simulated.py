"""A simulation of machines that share a remote: turns that wait, read and write; sessions that wake, sleep and move.

Time is in seconds, sizes in tokens and bytes. Nothing is drawn by lot but what a traffic draws (`traffic.py`).

What is in it:
- An engine a machine. Texts are read in turns, sessions write in common rounds, and both share the time as
  `docs/explanation/scheduling.md` says: writing has a quarter at least.
- Memory: the session that was used longest ago sleeps where another needs its place; without room a turn waits.
- A disk, a line to the remote and a line from it, each first come, first served.
- Write behind, versions, turns that are sent, leases and their renewals: as requests and bytes of the remote.
- The disk's budget: the keys and values that were used longest ago go, as the remote has them, and are fetched if they
  are wanted.

What is not: machines that die, lines that fail, prefixes that sessions share, the memory of checkpoints, and any time
that a remote under load takes.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from stated import BLOCK_TOKENS, DUE_TOKENS, LOOK_S, PART_BYTES, PIECE_BYTES, Rates, Settings, requests_of

Act = Callable[[], None]


class Clock:
    """Acts in the order of their times; those of one time in the order in which they were told."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._acts: list[tuple[float, int, Act]] = []
        self._numbers = itertools.count()

    def at(self, when_s: float, act: Act) -> None:
        heapq.heappush(self._acts, (when_s, next(self._numbers), act))

    def run(self, until_s: float = math.inf) -> None:
        """All acts up to a time; those that they tell, too."""
        while self._acts and self._acts[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._acts)
            act()


@dataclass
class Line:
    """What does one thing after the other."""

    free_s: float = 0.0
    busy_s: float = 0.0

    def takes(self, now_s: float, seconds: float) -> float:
        """When it has done what takes so long."""
        self.free_s = max(now_s, self.free_s) + seconds
        self.busy_s += seconds
        return self.free_s

    def wait_s(self, now_s: float) -> float:
        return max(self.free_s - now_s, 0.0)


class Engine:
    """Texts that are read, and sessions that write. A text has its seconds alone, a session its rounds, and what its
    row adds to a round."""

    def __init__(self, clock: Clock, rates: Rates) -> None:
        self._clock, self._rates = clock, rates
        self._numbers = itertools.count()
        self._texts: list[tuple[float, int, Act]] = []
        self._writing: list[tuple[float, int, float, Act]] = []
        self._read = self._rounds = self._rows_s = 0.0  # how far each text is, and each session, since the beginning
        self._since_s, self._plan = 0.0, 0
        self.busy_s = 0.0

    def read(self, seconds: float, done: Act) -> None:
        self._advance()
        heapq.heappush(self._texts, (self._read + seconds, next(self._numbers), done))
        self._look_ahead()

    def write(self, rounds: int, row_s: float, done: Act) -> None:
        self._advance()
        heapq.heappush(self._writing, (self._rounds + rounds, next(self._numbers), row_s, done))
        self._rows_s += row_s
        self._look_ahead()

    @property
    def round_s(self) -> float:
        """Seconds of a round of all that write now."""
        return self._rates.write_s + self._rows_s

    def backlog_s(self) -> float:
        """For how long a text would wait that came now."""
        self._advance()
        left_s = sum(end - self._read for end, *_ in self._texts)
        return left_s * (4 / 3 if self._writing else 1)

    def _paces(self) -> tuple[float, float]:
        """Seconds of its own that each text is read a second, and rounds a second."""
        texts, writing = len(self._texts), len(self._writing)
        if not writing:
            return 1 / texts if texts else 0.0, 0.0
        share = min(0.75, texts / (texts + 1))
        return share / texts if texts else 0.0, (1 - share) / self.round_s

    def settle(self) -> float:
        """For how many seconds it has worked up to now."""
        self._advance()
        return self.busy_s

    def _advance(self) -> None:
        seconds, self._since_s = self._clock.now_s - self._since_s, self._clock.now_s
        if seconds > 0 and (self._texts or self._writing):
            read, rounds = self._paces()
            self._read += seconds * read
            self._rounds += seconds * rounds
            self.busy_s += seconds

    def _look_ahead(self) -> None:
        self._plan += 1
        plan, (read, rounds), ends = self._plan, self._paces(), []
        if self._texts:
            ends.append((self._texts[0][0] - self._read) / read)
        if self._writing:
            ends.append((self._writing[0][0] - self._rounds) / rounds)
        if ends:
            self._clock.at(self._clock.now_s + max(min(ends), 0.0), lambda: self._end(plan))

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        ended: list[Act] = []
        while self._texts and self._texts[0][0] - self._read < 1e-6:
            ended.append(heapq.heappop(self._texts)[2])
        while self._writing and self._writing[0][0] - self._rounds < 1e-6:
            _, _, row_s, done = heapq.heappop(self._writing)
            self._rows_s -= row_s
            ended.append(done)
        self._look_ahead()
        for done in ended:
            done()


class Session:
    """tokens: that it has. written: those in full blocks of its versions. awake_at: a machine, or None. on_disk: tokens
    in each machine's store, whose keys and values are there. slept_at: the machine that has it until the remote has all
    of it (free_s)."""

    __slots__ = ("awake_at", "busy", "free_s", "left", "on_disk", "renewed_s", "sent", "sent_due_s", "slept_at",
                 "tokens", "used_s", "written")  # fmt: skip

    def __init__(self) -> None:
        self.tokens = self.written = self.sent = self.left = 0
        self.awake_at: Machine | None = None
        self.busy = False
        self.on_disk: dict[int, int] = {}
        self.slept_at: Machine | None = None
        self.used_s = self.renewed_s = self.free_s = 0.0
        self.sent_due_s = math.inf


class Machine:
    """busy_bytes, idle_bytes: of memory, of sessions in a turn and of others; idle: those, in the order of their use.
    stored: sessions on its disk, in that order. waiting: turns for which memory has no room. seen: sessions whose heads
    it has read."""

    def __init__(self, number: int, clock: Clock, rates: Rates) -> None:
        self.number = number
        self.engine = Engine(clock, rates)
        self.disk, self.coming, self.going = Line(), Line(), Line()
        self.busy_bytes = self.idle_bytes = self.disk_bytes = 0
        self.idle: OrderedDict[Session, None] = OrderedDict()
        self.stored: OrderedDict[Session, None] = OrderedDict()
        self.waiting: deque[tuple[int, Act]] = deque()
        self.seen: set[Session] = set()


@dataclass
class Told:
    """What happened since `since_s`. found: how each turn found its session. first_s: seconds to the first token, by
    that. requests: of the remote, `writes` and `reads`. begun: sessions, without sub-agents."""

    since_s: float = 0.0
    found: Counter[str] = field(default_factory=Counter)
    first_s: dict[str, list[float]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    came_bytes: int = 0
    read_tokens: int = 0
    again_tokens: int = 0
    written_tokens: int = 0
    begun: int = 0

    @property
    def turns(self) -> int:
        return self.found.total()

    @property
    def firsts(self) -> list[float]:
        """Seconds to the first token, of all turns."""
        return list(itertools.chain.from_iterable(self.first_s.values()))


class Simulation:
    """The machines, and what happens to sessions there. keeps: False where what leaves memory is lost, as without
    Torpor. pace: by how much a turn is slower than by the rates; it is asked for each."""

    def __init__(
        self,
        rates: Rates,
        settings: Settings,
        machines: int,
        *,
        keeps: bool = True,
        pace: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.clock = Clock()
        self.rates, self.settings, self.keeps, self._pace = rates, settings, keeps, pace
        self.machines = [Machine(number, self.clock, rates) for number in range(machines)]
        self.told = Told()

    # --- what a traffic asks for

    def turn(self, session: Session, machine: Machine, read: int, write: int, ended: Act) -> None:
        """A turn that comes now. The session is in no other one."""
        assert not session.busy, "it is in a turn"
        assert write > 0
        session.busy = True
        begun_s = self.clock.now_s
        for each in {machine, session.awake_at or machine}:
            self._sleep_idle(each)
        has_left = session.awake_at is None and (session.slept_at is machine or session.free_s <= begun_s)
        if session.awake_at is not machine and not has_left and self.keeps:
            free_s = self._ask_for(session)
            self.clock.at(free_s, lambda: self._begin(session, machine, read, write, begun_s, ended))
        else:
            self._begin(session, machine, read, write, begun_s, ended)

    def sleep(self, session: Session) -> float:
        """Put a session to sleep that is in no turn, and send it; when the remote has it."""
        machine = session.awake_at
        assert machine is not None, "it sleeps"
        assert not session.busy, "it is in a turn"
        return self._sleep(session, machine, self.clock.now_s)

    def empty(self, session: Session) -> None:
        """Begin a session that is in no turn anew: it has no tokens, and no machine has its old ones."""
        if session.awake_at is not None:
            session.awake_at.idle_bytes -= session.tokens * self.rates.token_bytes
        for number, tokens in session.on_disk.items():
            self.machines[number].disk_bytes -= tokens * self.rates.token_bytes
            self.machines[number].stored.pop(session, None)
        session.on_disk.clear()
        session.tokens = session.written = session.sent = 0

    def place(self, session: Session, read: int) -> Machine:
        """Where a turn would have its first token soonest; where it is awake, if it is."""
        if session.awake_at is not None:
            self._sleep_idle(session.awake_at)
        if session.awake_at is not None:
            return session.awake_at
        need = (session.tokens + read) * self.rates.token_bytes
        return min(self.machines, key=lambda each: (self._ready_s(session, each, need), each.busy_bytes, each.number))

    def _ready_s(self, session: Session, machine: Machine, need: int) -> float:
        now_s, lacking = self.clock.now_s, self._lacking(session, machine)
        seconds = machine.engine.backlog_s()
        if machine.busy_bytes + need > self.rates.memory_bytes:
            seconds += self.settings.waiting_s * (1 + len(machine.waiting))
        if session.tokens == 0:
            return seconds
        if not self.keeps:
            return seconds + self.rates.reading_s(session.tokens, 0)
        if lacking:
            seconds += machine.coming.wait_s(now_s) + self.rates.ask_s + lacking / self.rates.fetch_bytes_s
        return seconds + machine.disk.wait_s(now_s) + self.rates.waking_s(session.tokens)

    # --- a turn

    def _begin(self, session: Session, machine: Machine, read: int, write: int, begun_s: float, ended: Act) -> None:
        size = (session.tokens + read + write) * self.rates.token_bytes
        if machine is session.awake_at:
            machine.idle_bytes -= session.tokens * self.rates.token_bytes
            machine.idle.pop(session)
        room_s = self._make_room(machine, size)
        if room_s is None:  # it keeps what it has, and waits for the rest
            if machine is session.awake_at:
                self._rest(session, machine)
            machine.waiting.append((size, lambda: self._begin(session, machine, read, write, begun_s, ended)))
            return
        machine.busy_bytes += size
        found, ready_s, again = self._bring(session, machine, room_s)
        reads = read + again
        pace = self._pace()
        seconds = pace * (self.rates.turn_s + self.rates.reading_s(reads, session.tokens - again))
        self._count(found, again, read, write)

        def first() -> None:
            row_s = pace * self.rates.row_s(session.tokens + read)
            # The first token comes with the reading; a row of its own, and the round that it waits for, are behind it.
            self._note_first(found, begun_s)
            machine.engine.write(write, row_s, last)

        def last() -> None:
            machine.busy_bytes -= size
            session.tokens += read + write
            self._rest(session, machine)
            session.busy = False
            self._end_turn(session, machine)
            ended()
            self._let_in(machine)

        self.clock.at(ready_s, lambda: machine.engine.read(seconds, first))

    def _bring(self, session: Session, machine: Machine, room_s: float) -> tuple[str, float, int]:
        """How a session is found, when it is awake, and how many of its tokens are to be read again."""
        now_s = max(self.clock.now_s, room_s)
        if session.awake_at is machine:
            return "awake", now_s, 0
        session.awake_at, session.renewed_s = machine, now_s
        machine.seen.add(session)
        if session.tokens == 0:
            self._ask("take", now_s)
            return "new", now_s + (self.rates.ask_s if self.keeps else 0.0), 0
        if not self.keeps:
            return "read again", now_s, session.tokens
        lacking = self._lacking(session, machine)
        if lacking:
            self._ask("wake", now_s, reads=-(-lacking // PIECE_BYTES))
            now_s = machine.coming.takes(now_s, self.rates.fetch_s + lacking / self.rates.fetch_bytes_s)
            self._came(lacking)
            self._store(session, machine)
        else:
            self._ask("take", now_s)
            now_s += self.rates.ask_s
        waking_s = self.rates.waking_s(session.tokens)
        return ("remote" if lacking else "disk"), machine.disk.takes(now_s, waking_s), 0

    def _lacking(self, session: Session, machine: Machine) -> int:
        """Bytes of a session that a machine's store does not have."""
        there = session.on_disk.get(machine.number, 0)
        if there < session.tokens:  # what fills no block comes again
            there -= there % BLOCK_TOKENS
        return (session.tokens - there) * self.rates.token_bytes

    def _rest(self, session: Session, machine: Machine) -> None:
        session.used_s = self.clock.now_s
        machine.idle[session] = None
        machine.idle_bytes += session.tokens * self.rates.token_bytes

    def _end_turn(self, session: Session, machine: Machine) -> None:
        """Write behind, and what is sent of it."""
        if not self.keeps:
            return
        now_s, full = self.clock.now_s, session.tokens - session.tokens % BLOCK_TOKENS
        self._send_due(session, now_s)
        if session.sent_due_s == math.inf:
            session.sent_due_s = now_s + self.settings.turns_s
        if full - session.written >= DUE_TOKENS:
            self._version(session, machine, full, now_s)

    def _let_in(self, machine: Machine) -> None:
        while machine.waiting and machine.busy_bytes + machine.waiting[0][0] <= self.rates.memory_bytes:
            before = len(machine.waiting)
            machine.waiting.popleft()[1]()
            if len(machine.waiting) >= before:
                return

    # --- memory and disk

    def _make_room(self, machine: Machine, size: int) -> float | None:
        """When there is room for so many bytes; None: not before another turn ends."""
        rates, ready_s = self.rates, self.clock.now_s
        if machine.busy_bytes and machine.busy_bytes + size > rates.memory_bytes:
            return None
        while machine.idle and machine.busy_bytes + machine.idle_bytes + size > rates.memory_bytes:
            oldest = next(iter(machine.idle))
            ready_s = max(ready_s, self._put_away(oldest, machine, self.clock.now_s))
        return ready_s

    def _sleep_idle(self, machine: Machine) -> None:
        """What has not been used for long enough sleeps since then."""
        for session in list(itertools.takewhile(self._is_idle, machine.idle)):
            self._put_away(session, machine, session.used_s + self.settings.idle_s)

    def _is_idle(self, session: Session) -> bool:
        return session.used_s + self.settings.idle_s <= self.clock.now_s

    def _put_away(self, session: Session, machine: Machine, now_s: float) -> float:
        """Free the memory of a session; when that is done."""
        if self.keeps:
            self._sleep(session, machine, now_s)
            return now_s + self.rates.sleeping_s(session.tokens % BLOCK_TOKENS)
        machine.idle.pop(session)
        machine.idle_bytes -= session.tokens * self.rates.token_bytes
        session.awake_at = None
        return now_s

    def _sleep(self, session: Session, machine: Machine, now_s: float) -> float:
        machine.idle.pop(session)
        machine.idle_bytes -= session.tokens * self.rates.token_bytes
        session.awake_at = None
        self._send_due(session, now_s)
        session.sent_due_s = math.inf
        written_s = machine.disk.takes(now_s, self.rates.sleeping_s(session.tokens - session.written))
        self._store(session, machine)
        there_s = self._version(session, machine, session.tokens, written_s)
        session.written -= session.written % BLOCK_TOKENS  # what fills no block is written again
        self._renew(session, there_s)
        self._ask("release", there_s)
        session.slept_at, session.free_s = machine, there_s + self.rates.ask_s
        return session.free_s

    def _store(self, session: Session, machine: Machine) -> None:
        """All of a session is in a machine's store; what was used longest ago goes for it."""
        machine.disk_bytes += (session.tokens - session.on_disk.get(machine.number, 0)) * self.rates.token_bytes
        session.on_disk[machine.number] = session.tokens
        machine.stored.pop(session, None)
        machine.stored[session] = None
        while machine.disk_bytes > self.rates.disk_bytes and len(machine.stored) > 1:
            oldest = next(
                (each for each in machine.stored if each.awake_at is not machine and each is not session), None
            )
            if oldest is None:
                return
            del machine.stored[oldest]
            machine.disk_bytes -= oldest.on_disk.pop(machine.number) * self.rates.token_bytes
            self._note("strip", self.clock.now_s)

    # --- the remote

    def _ask_for(self, session: Session) -> float:
        """Ask for a session that is awake elsewhere; when it is free. Its holder learns of it at his next renewal, or
        as he sends turns, or puts it to sleep for itself; and whoever asks looks now and then."""
        now_s, free_s = self.clock.now_s, session.free_s
        self._send_due(session, now_s)
        self._ask("ask", now_s)
        if session.awake_at is not None:
            every_s = self.settings.lease_s / 3
            told_s = session.renewed_s + every_s * (1 + math.floor((now_s - session.renewed_s) / every_s))
            told_s = max(now_s, min(told_s, session.sent_due_s, session.used_s + self.settings.idle_s))
            free_s = self._sleep(session, session.awake_at, told_s)
        looks = math.ceil((free_s - now_s) / LOOK_S)
        self._ask("look", now_s, reads=looks)
        return now_s + looks * LOOK_S + self.rates.ask_s

    def _version(self, session: Session, machine: Machine, tokens: int, now_s: float) -> float:
        """A version has so many tokens, and is sent; when it is there."""
        if tokens <= session.sent:
            session.written = max(session.written, tokens)
            return now_s
        size = (tokens - session.written) * self.rates.token_bytes
        session.written, session.sent = tokens, tokens
        there_s = machine.going.takes(now_s, self.rates.send_s + size / self.rates.send_bytes_s)
        self._renew(session, there_s)
        self._ask("version", there_s, writes=1 - (-size // PART_BYTES) if size > PART_BYTES else 0)
        if now_s >= self.told.since_s:
            self.told.sent_bytes += size
        return there_s

    def _send_due(self, session: Session, now_s: float) -> None:
        if session.sent_due_s <= now_s:
            self._renew(session, session.sent_due_s)
            self._ask("turn", session.sent_due_s)
            session.sent_due_s = math.inf

    def _renew(self, session: Session, now_s: float) -> None:
        """A change of its head renews the lease of a session; before that it was renewed as often as it was due."""
        every_s = self.settings.lease_s / 3
        if now_s > session.renewed_s:
            self._ask("renewal", now_s, times=int((now_s - session.renewed_s) / every_s))
            session.renewed_s = now_s

    def settle(self, sessions: Iterable[Session]) -> None:
        """Do what is due by now, at the end."""
        for machine in self.machines:
            self._sleep_idle(machine)
        for session in sessions:
            if session.awake_at is not None:
                self._send_due(session, self.clock.now_s)
                self._renew(session, self.clock.now_s)

    # --- what is told

    def _ask(self, act: str, now_s: float, *, writes: int = 0, reads: int = 0, times: int = 1) -> None:
        if now_s < self.told.since_s or not self.keeps or not times:
            return
        asked = requests_of(act)
        self.told.acts[act] += times
        self.told.requests["writes"] += times * asked[0] + writes
        self.told.requests["reads"] += times * asked[1] + reads

    def _note(self, act: str, now_s: float) -> None:
        if now_s >= self.told.since_s:
            self.told.acts[act] += 1

    def _came(self, size: int) -> None:
        if self.clock.now_s >= self.told.since_s:
            self.told.came_bytes += size

    def _count(self, found: str, again: int, read: int, write: int) -> None:
        if self.clock.now_s >= self.told.since_s:
            self.told.found[found] += 1
            self.told.read_tokens += read
            self.told.again_tokens += again
            self.told.written_tokens += write

    def _note_first(self, found: str, begun_s: float) -> None:
        if begun_s >= self.told.since_s:
            self.told.first_s.setdefault(found, []).append(self.clock.now_s - begun_s)
