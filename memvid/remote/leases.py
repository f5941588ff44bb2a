"""Leases: for how long a machine may answer for a session, and how the session comes to another one.

Rules:
- No date of another machine is compared. A lease counts for its holder until `lease_s`, less a margin, after the start
  of the last renewal that landed. Somebody else may take the session once its head says that it is free or asleep, or
  once they have seen the same pulse for `lease_s` and a margin. Each uses a clock of its own that runs on in a suspend.
  The margins make up for clocks that run at different rates.
- Each taking raises the epoch. Whoever finds another epoch in the head, or a pulse of others, has lost the session.
- The same store in the same place takes its own session back at once: whoever held it there is dead, or the lock of the
  store would still be theirs. A machine that was copied as a whole while it ran, with its name, breaks this.
- A release ends the lease before it is written.
- Whoever asks for a session writes that into its head. The holder finds it with the next renewal, and puts the session
  to sleep, or declines. Requests leave the pulse as it is: they make no lease longer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import threading
from collections.abc import Callable
from typing import Final

from ..errors import LeaseHeld, LeaseLost, SessionNotFound
from ..limits import MAX_VERSION
from ..uri import SessionUri
from .heads import TOKEN_BYTES, Head, Heads, Holder, Party, Seen

LEASE_S: Final = 60
"""Seconds for which a renewal counts, where nobody says. One request every 20 seconds for each awake session; and a
session whose machine has died may be taken after 66."""

_MARGIN: Final = 0.1
"""By which share of a lease its holder ends early, and others wait longer. Two clocks may then differ by a fifth in
rate; a sound one is off by a thousandth at most."""

_RENEWALS: Final = 3
"""How many renewals a lease leaves time for."""

_TRIES: Final = 12
"""How many tries, while the object store does not answer."""

_MOST_PULSES: Final = 256
"""Own pulses that are remembered: the one that landed last, and those sent behind it, whose answers were lost perhaps.
While the object store is away, each renewal that fails adds some."""

Clock = Callable[[], float]
"""Seconds since any moment, on in a suspend, and never set: `disk.clock.running_s`."""


class Watch:
    """What a store has seen of a session's head: since when its holder gave no sign of life. For one taker, and one
    session."""

    def __init__(self, me: Party, clock: Clock) -> None:
        self.me = me
        self.clock = clock
        self._sign: tuple[int, bytes] | None = None
        self._since_s = 0.0

    def wait_s(self, head: Head) -> float:
        """For how many seconds the session may not be taken; 0: it may. head: was just read."""
        holder = head.holder
        if holder is None or holder.asleep or holder.party == self.me:
            return 0
        now_s, sign = self.clock(), (head.epoch, holder.pulse)
        if sign != self._sign:
            self._sign, self._since_s = sign, now_s
        return max(self._since_s + head.lease_s * (1 + _MARGIN) - now_s, 0)


def take(heads: Heads, uri: SessionUri, watch: Watch, *, lease_s: int = LEASE_S) -> Lease:
    """Take a session; its head is made if it has none. Whoever calls this has let go of an earlier lease of it.

    watch: the same one each time that it is tried: a holder without a sign of life is waited out.

    Raises:
        LeaseHeld: another machine has it. Try again after `wait_s`, or ask for it.
        As `Heads.change`: it was not taken, as far as is known. If it was, the next try takes it back.
    """
    pulses: dict[bytes, float] = {}
    before: list[Party] = []

    def taken(head: Head | None) -> Head:
        if head is not None and (wait_s := watch.wait_s(head)):
            raise _held(head, watch.me, wait_s)
        before[:] = [] if head is None or head.holder is None else [head.holder.party]
        holder = Holder(watch.me, _new_pulse(pulses, watch.clock))
        if head is None:
            return Head(uri, 1, lease_s, holder)
        epoch = min(head.epoch + 1, MAX_VERSION)  # a forged one has it: pulses tell leases apart still
        return dataclasses.replace(head, epoch=epoch, lease_s=lease_s, holder=holder, request=None)

    seen = heads.change(uri, taken)
    return Lease(heads, seen, watch.me, watch.clock, pulses, next(iter(before), None))


def ask(heads: Heads, uri: SessionUri, me: Party) -> None:
    """Ask the holder of a session for it. He answers at his next renewal: try to take it until then. It is declined
    once LeaseHeld says `is_asked` no more.

    Raises:
        SessionNotFound: it has no head. As `Heads.change`.
    """

    def asked(head: Head | None) -> Head:
        return dataclasses.replace(_there(uri, head), request=me)

    heads.change(uri, asked)


def withdraw(heads: Heads, uri: SessionUri, me: Party) -> None:
    """Take a request back; nothing happens if it is answered. Raises as `ask`."""

    def withdrawn(head: Head | None) -> Head:
        head = _there(uri, head)
        return dataclasses.replace(head, request=None if head.request == me else head.request)

    heads.change(uri, withdrawn)


class Lease:
    """A session that is held, made by `take`. Safe from several threads; a renewal waits for the one before. before:
    who had it; None: nobody, or who had it removed what the remote had of it."""

    def __init__(
        self, heads: Heads, seen: Seen, me: Party, clock: Clock, pulses: dict[bytes, float], before: Party | None
    ) -> None:
        self.before = before
        self.uri = seen.head.uri
        self.epoch = seen.head.epoch
        self.lease_s = seen.head.lease_s
        self._heads = heads
        self._me = me
        self._clock = clock
        self._changing = threading.Lock()
        self._pulses = pulses  # that were sent, and when; the newest last
        self._renewed_s = self._tried_s = -math.inf
        self._is_released = False
        self._seen, self._pulse = seen, b""
        self._landed(seen)

    @property
    def head(self) -> Head:
        """The head, as it was last seen."""
        return self._seen.head

    @property
    def is_lost(self) -> bool:
        """Whether no renewal brings it back: it was released, or another machine has taken the session."""
        return self._is_released

    @property
    def request(self) -> Party | None:
        """Who asked for the session when its head was last seen; None: nobody."""
        return self._seen.head.request

    def require(self) -> None:
        """Call it before anything is acknowledged; it asks nobody. Raises LeaseLost: the session is not ours at this
        moment. A renewal tells whether it is lost for good."""
        if self.left_s <= 0:
            raise LeaseLost(
                f"{self.uri} is not this machine's at the moment: its lease was not renewed in time. Another machine "
                "may have it. Try again: if none has, it is renewed.",
                session=str(self.uri),
                machine=None,
            )

    @property
    def left_s(self) -> float:
        """For how many seconds the lease counts still."""
        return self._renewed_s + self.lease_s * (1 - _MARGIN) - self._clock()

    @property
    def due_s(self) -> float:
        """In how many seconds it is to be renewed; 0: now. A try that failed is repeated soon."""
        due_s = max(self._renewed_s + self.lease_s / _RENEWALS, self._tried_s + self.lease_s / _TRIES)
        return max(due_s - self._clock(), 0)

    def renew(self) -> None:
        """Renew the lease, and look who asks for the session. If the lease has run out, and nobody has taken the
        session, it counts again.

        Raises:
            LeaseLost: for good. As `Heads.change`: it counts for as long as it did.
        """
        self.change(lambda head: head)

    def decline(self) -> None:
        """Keep the session, whoever asks. Raises as `renew`."""
        self.change(lambda head: dataclasses.replace(head, request=None))

    def change(self, edit: Callable[[Head], Head]) -> Head:
        """Change the head as its holder, which renews the lease; the head that landed. edit: may be called several
        times, as by `Heads.change`, and leaves epoch and holder as they are. Raises as `renew`, and what `edit`
        raises."""

        def changed(head: Head | None) -> Head:
            own, holder = self._own(head)
            return dataclasses.replace(
                edit(own), holder=dataclasses.replace(holder, pulse=_new_pulse(self._pulses, self._clock))
            )

        with self._changing:
            if self._is_released:
                raise self._lost(None)
            while len(self._pulses) > _MOST_PULSES:
                oldest, older = itertools.islice(self._pulses, 2)
                del self._pulses[older if oldest == self._pulse else oldest]
            self._tried_s = self._clock()
            seen = self._heads.change(self.uri, changed, self._seen)
            self._landed(seen)
            return seen.head

    def release(self, *, asleep: bool, edit: Callable[[Head], Head] = lambda head: head) -> None:
        """Let others have the session. From the call on it is not ours, whatever comes of it; it may be repeated.

        asleep: it sleeps in this store, and the head goes on to say so. edit: as of `change`. Raises as `Heads.change`.
        """

        def released(head: Head | None) -> Head:
            own, holder = self._own(head)
            return dataclasses.replace(edit(own), holder=dataclasses.replace(holder, asleep=True) if asleep else None)

        with self._changing:
            self._is_released, self._renewed_s = True, -math.inf
            with contextlib.suppress(LeaseLost):
                self._heads.change(self.uri, released, self._seen)

    def _own(self, head: Head | None) -> tuple[Head, Holder]:
        """The head and its holder, if that is this lease. Raises LeaseLost."""
        holder = None if head is None else head.holder
        if head is None or holder is None or head.epoch != self.epoch:
            raise self._lost(head)
        if holder.party != self._me or holder.pulse not in self._pulses:
            raise self._lost(head)
        return head, holder

    def _lost(self, head: Head | None) -> LeaseLost:
        """The session is not ours any more: no renewal brings it back."""
        self._is_released, self._renewed_s = True, -math.inf
        other = None if head is None else head.awake_at
        place = "is not this machine's any more" if other is None else f"is on {other.machine} now"
        return LeaseLost(
            f"{self.uri} {place}: it was released, or another machine has taken it after its lease was not renewed "
            f"here in time. `torpor wake {self.uri}` asks for it.",
            session=str(self.uri),
            machine=None if other is None else other.machine,
        )

    def _landed(self, seen: Seen) -> None:
        if seen.head.holder is not None:
            self._pulse = seen.head.holder.pulse
            self._seen, self._renewed_s = seen, self._pulses[self._pulse]


def _new_pulse(pulses: dict[bytes, float], clock: Clock) -> bytes:
    """A new pulse, and since when the renewal with it counts: now, before it is sent."""
    pulse = os.urandom(TOKEN_BYTES)
    pulses[pulse] = clock()
    return pulse


def _there(uri: SessionUri, head: Head | None) -> Head:
    if head is None:
        raise SessionNotFound(f"The remote has no session {uri}.", session=str(uri), suggestions=[])
    return head


def _held(head: Head, me: Party, wait_s: float) -> LeaseHeld:
    party = head.awake_at or me
    return LeaseHeld(
        f"{head.uri} is awake on {party.machine}. `torpor wake {head.uri}` here asks that machine for it, and has it "
        "once no request uses it there. With `--fork NAME` it goes on here as a fork of its newest version. If that "
        "machine has died, or cannot reach the remote, the session is free in "
        f"{math.ceil(wait_s)} seconds.",
        session=str(head.uri),
        machine=party.machine,
        store=party.store,
        wait_s=wait_s,
        is_asked=head.request == me,
    )
