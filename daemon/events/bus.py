"""Passes events to subscribers, each with a bounded queue of its own.

Rules:
- A publisher never waits for a subscriber. A full queue loses its oldest events, and its subscriber is told how many.
- Without a subscriber an event costs only its record, and its part of the figures and of its request's account.
- A subscription leaves nothing behind when it ends, but for one that may be resumed: past events are kept while it runs
  and for a while after it, and no longer.

Everything here belongs to the event loop; other threads publish through `Bus.from_any_thread`.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Final, Self

from ...errors import TorporError
from ...memvid.uri import SessionUri
from ..errors import TooManySubscribers, UnknownEvent
from .accounts import Account, client, current
from .events import (
    EVENT_NAMES,
    Event,
    FirstToken,
    Lost,
    Notice,
    RequestAccepted,
    RequestFailed,
    RequestFinished,
    Subscribed,
)
from .figures import Figures

MAX_WAITING_EVENTS: Final = 1024
"""Events that wait for one subscriber: some 500 KiB. A generation makes a handful, however many tokens it has."""

MAX_SUBSCRIBERS: Final = 32
"""Each gets every event; more subscribers would slow down the work."""

MAX_OF_NAMESPACE: Final = 8
MAX_OF_NAMESPACES: Final = 24
"""Those who hear of one namespace, and all who hear of one: none shuts out another one, or who hears of everything."""

MAX_PAST_EVENTS: Final = 512
"""Events that are kept for who resumes a subscription: some 250 KiB, and fewer than may wait for a subscriber."""

KEPT_S: Final = 60.0
"""How long they are kept when nobody listens any more: a client that lost its connection is back in seconds."""

_PLACE: Final = re.compile(r"([0-9a-f]{8})-([0-9]{1,18})", re.ASCII)

_request: contextvars.ContextVar[int | None] = contextvars.ContextVar("request", default=None)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A subscriber's choice: events of these names (None: all), and of this session or namespace only. Raises
    UnknownEvent for a name that no event has.
    """

    names: frozenset[str] | None = None
    session: SessionUri | None = None
    namespace: str | None = None

    def __post_init__(self) -> None:
        if strange := sorted((self.names or frozenset()) - EVENT_NAMES):
            raise UnknownEvent(
                f"There is no event {strange[0]!r}. There are: {', '.join(sorted(EVENT_NAMES))}.",
                event=strange[0],
                known=sorted(EVENT_NAMES),
            )

    def has(self, event: Event) -> bool:
        if self.names is not None and event.name not in self.names:
            return False
        if self.session is not None and event.session != self.session:
            return False
        return self.namespace is None or (event.session is not None and event.session.namespace == self.namespace)


class Bus:
    """Passes events to the subscriptions that want them.

    figures: since the beginning. accounts: of the requests under way. on_account: is told of each that has ended.
    """

    def __init__(self) -> None:
        self.figures = Figures()
        self.accounts: set[Account] = set()
        self.on_account: Callable[[Account], None] = lambda _: None
        self._subscriptions: set[Subscription] = set()
        self._past = _Past()
        self._number = 0
        self._requests = itertools.count(1)
        self._closed = False
        self._under_way = 0
        self._last_ended = time.monotonic()

    def quiet_s(self) -> float:
        """Seconds since the last request ended; 0 while one is under way. From any thread."""
        return 0.0 if self._under_way else time.monotonic() - self._last_ended

    @property
    def is_watched(self) -> bool:
        """Whether an event is for anybody: a subscriber, or one that may come back."""
        return bool(self._subscriptions) or self._past.is_kept

    def publish(self, event: Event) -> None:
        self.figures.take(event)
        if (account := current.get()) is not None:
            account.take(event)
        if self.is_watched:
            self._number += 1
            notice = self._notice(event)
            self._past.keep(notice)
            for subscription in self._subscriptions:
                subscription.put(notice)

    def from_any_thread(self) -> Callable[[Event], None]:
        """A function that publishes from any thread, on behalf of the current request."""
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()

        def publish(event: Event) -> None:
            if self.is_watched or isinstance(event, FirstToken):
                loop.call_soon_threadsafe(self.publish, event, context=context)

        return publish

    def subscribe(self, wanted: Wanted, *, most_waiting: int = MAX_WAITING_EVENTS) -> Subscription:
        """Subscribe to events from now on; the first is `subscribed`. most_waiting: how many are kept for a slow
        reader. Raises TooManySubscribers.
        """
        self._require_room(wanted)
        subscription = self._begun(wanted, most_waiting)
        subscription.put(self._notice(Subscribed(None)), always=True)
        return subscription

    def resume(self, wanted: Wanted, after: str | None) -> Resumable:
        """A subscription that can be resumed. after: a `place` of it or of an earlier one, behind which it goes on.
        None: it begins now. The first event is `subscribed`; or `lost`, if not all behind that place is kept. Raises
        TooManySubscribers.
        """
        self._require_room(wanted)
        is_whole, missed = (True, []) if after is None else self._past.behind(after)
        first = replace(
            self._notice(Subscribed(None) if is_whole else Lost(None, None)),
            number=missed[0].number - 1 if missed else self._number,
        )
        run = self._past.hold(self._number)
        subscription = Resumable(
            wanted,
            MAX_WAITING_EVENTS,
            self._end_resumable,
            lambda number: f"{run}-{self._number if number is None else number}",
            goes_on=after is not None,
        )
        self._enter(subscription)
        subscription.put(first, always=True)
        for notice in missed:
            subscription.put(notice, always=wanted.has(notice.event))
        return subscription

    def _require_room(self, wanted: Wanted) -> None:
        namespaces = [each.wanted.namespace for each in self._subscriptions]
        limits = [(len(namespaces), MAX_SUBSCRIBERS)]
        if (own := wanted.namespace) is not None:
            bound = sum(each is not None for each in namespaces)
            limits += [(bound, MAX_OF_NAMESPACES), (namespaces.count(own), MAX_OF_NAMESPACE)]
        for count, most in limits:
            if count >= most:
                raise TooManySubscribers(
                    f"{most} subscribers are told of events already. End one of them, or share its events."
                )

    @contextmanager
    def request(self, verb: str, session: Callable[[], SessionUri | None]) -> Iterator[None]:
        """Publish the events of a request, from its acceptance to its end. session: gives its session; called only if
        there is a subscriber."""
        about, begun = session() if self.is_watched else None, time.monotonic()
        number = next(self._requests)
        token, account = _request.set(number), Account(number, verb, client.get())
        of_account = current.set(account)
        self.accounts.add(account)
        self._under_way += 1
        self.publish(RequestAccepted(about, verb))
        try:
            yield
        except BaseException as error:
            account.code = code_of(error)
            self.publish(RequestFailed(about, verb, code_of(error), time.monotonic() - begun))
            raise
        else:
            self.publish(RequestFinished(about, verb, time.monotonic() - begun))
        finally:
            self._under_way, self._last_ended = self._under_way - 1, time.monotonic()
            _request.reset(token)
            current.reset(of_account)
            self.accounts.discard(account)
            self.on_account(account)

    @asynccontextmanager
    async def telling(self, name: str, tell: Callable[[Event], None]) -> AsyncIterator[None]:
        """Meanwhile have a function called with each event of a name; it takes no subscriber's place."""

        async def pass_on() -> None:
            async for notice in subscription:
                tell(notice.event)

        with self._begun(Wanted(frozenset({name})), MAX_WAITING_EVENTS) as subscription:
            passing = asyncio.ensure_future(pass_on())
            try:
                yield
            finally:
                subscription.end()
                await passing

    def close(self) -> None:
        """End every subscription, once its reader has taken the waiting events. Idempotent."""
        self._closed = True
        for subscription in tuple(self._subscriptions):
            subscription.end()

    def _begun(self, wanted: Wanted, most_waiting: int) -> Subscription:
        subscription = Subscription(wanted, most_waiting, self._subscriptions.discard)
        self._enter(subscription)
        return subscription

    def _enter(self, subscription: Subscription) -> None:
        self._subscriptions.add(subscription)
        if self._closed:
            subscription.end()

    def _end_resumable(self, subscription: Subscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.discard(subscription)
            self._past.let_go()

    def _notice(self, event: Event) -> Notice:
        return Notice(self._number, time.monotonic(), time.time_ns(), _request.get(), event)


class Subscription:
    """Events as they happen: iterate over it, inside `with`, which ends it."""

    def __init__(self, wanted: Wanted, most_waiting: int, on_end: Callable[[Subscription], None]) -> None:
        self.wanted = wanted
        self._most_waiting = most_waiting
        self._on_end = on_end
        self._waiting: deque[Notice] = deque()
        self._dropped = 0
        self._dropped_at: Notice | None = None
        self._news = asyncio.Event()
        self._ended = False
        self.delivered = 0
        self.lost = 0

    def put(self, notice: Notice, *, always: bool = False) -> None:
        """Keep an event for the reader, if it is wanted. always: keep it in any case."""
        if not always and (self._ended or not self.wanted.has(notice.event)):
            return
        if len(self._waiting) >= self._most_waiting:
            self._dropped += 1
            self._dropped_at = self._waiting.popleft()
        self._waiting.append(notice)
        self._news.set()

    def end(self) -> None:
        """Take no more events. Waiting ones may still be read."""
        self._ended = True
        self._on_end(self)
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Notice:
        while not self._waiting:
            if self._ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        self.delivered += 1
        return self._tell_of_loss() if self._dropped else self._waiting.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()
        self._waiting.clear()

    def _tell_of_loss(self) -> Notice:
        """The event in place of all dropped ones, at the time of the last of them."""
        assert self._dropped_at is not None
        count, last = self._dropped, self._dropped_at
        self._dropped, self._dropped_at = 0, None
        self.lost += count
        return Notice(last.number, last.monotonic_s, last.time_ns, None, Lost(None, count))


class Resumable(Subscription):
    """A subscription that another one may go on from, also on another connection."""

    def __init__(
        self,
        wanted: Wanted,
        most_waiting: int,
        on_end: Callable[[Subscription], None],
        place: Callable[[int | None], str],
        *,
        goes_on: bool,
    ) -> None:
        """place: of an event by its number, or of the last of all. goes_on: behind a place that its reader has."""
        super().__init__(wanted, most_waiting, on_end)
        self._place = place
        self._goes_on = goes_on
        self._taken = 0

    async def __anext__(self) -> Notice:
        notice = await super().__anext__()
        self._taken = notice.number
        return notice

    def id_of(self, notice: Notice) -> str | None:
        """The place of an event, the same each time it is told. None for `subscribed` on another connection: the reader
        has that place already, as the id of the event that it got last."""
        is_again = self._goes_on and isinstance(notice.event, Subscribed)
        return None if is_again else self._place(notice.number)

    @property
    def place(self) -> str:
        """Behind all that was taken, and before all that waits."""
        return self._place(self._taken if self._waiting else None)


class _Past:
    """The last events, while somebody listens who may come back, or has just left."""

    def __init__(self) -> None:
        self._run = ""  # of events without a gap; a new one begins where none were kept for a while
        self._notices: deque[Notice] = deque()
        self._before = 0
        self._holders = 0
        self._kept_until_s = 0.0

    @property
    def is_kept(self) -> bool:
        return self._holders > 0 or time.monotonic() < self._kept_until_s

    def hold(self, number: int) -> str:
        """Keep events from now on, behind that number. The name of the run."""
        if not self.is_kept:
            self._run, self._before = secrets.token_hex(4), number
            self._notices.clear()
        self._holders += 1
        return self._run

    def let_go(self) -> None:
        """Keep events for a while only, unless another holds them."""
        self._holders -= 1
        self._kept_until_s = time.monotonic() + KEPT_S

    def keep(self, notice: Notice) -> None:
        if not self.is_kept:
            return
        if len(self._notices) >= MAX_PAST_EVENTS:
            self._before = self._notices.popleft().number
        self._notices.append(notice)

    def behind(self, place: str) -> tuple[bool, list[Notice]]:
        """The kept events behind a place, and whether none is missing between."""
        found = _PLACE.fullmatch(place)
        if not self.is_kept:
            return False, []
        if found is None or found[1] != self._run or int(found[2]) < self._before:
            return False, list(self._notices)
        return True, [each for each in self._notices if each.number > int(found[2])]


def code_of(error: BaseException) -> str:
    """An error's name in an event: never its message, which may hold more."""
    if isinstance(error, TorporError):
        return error.code
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "internal_error"
