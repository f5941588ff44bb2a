"""Who is told of events: in order, within bounds, and nothing is left of who has gone."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest
from torpor.daemon.errors import EmptyContext, TooManySubscribers, UnknownEvent
from torpor.daemon.events.bus import (
    MAX_OF_NAMESPACE,
    MAX_OF_NAMESPACES,
    MAX_SUBSCRIBERS,
    Bus,
    Resumable,
    Subscription,
    Wanted,
)
from torpor.daemon.events.events import (
    EVENT_NAMES,
    EVENTS,
    Event,
    FirstToken,
    PrefillProgress,
    RequestFailed,
    SleepBegan,
)
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.session_rig import until

A = SessionUri("default", "a")
B = SessionUri("lab", "b")


def told(subscription: Subscription) -> list[Any]:
    """What waits for a subscriber, but for the word that it is one."""

    async def take() -> list[Any]:
        found = []
        while subscription._waiting:
            found.append(await anext(subscription))
        return found

    coroutine = take()
    with pytest.raises(StopIteration) as done:  # it never has to wait
        coroutine.send(None)
    return [notice for notice in done.value.value if notice.event.name != "subscribed"]


def events(subscription: Subscription) -> list[Event]:
    return [notice.event for notice in told(subscription)]


def test_every_event_has_a_name_of_its_own_and_plain_facts() -> None:
    assert len(EVENT_NAMES) == len(EVENTS) == len(set(EVENTS))
    assert SleepBegan(A, "idle", 3).facts() == {"cause": "idle", "tokens": 3}


async def test_a_subscriber_is_told_in_order_with_numbers_without_gaps() -> None:
    bus = Bus()
    bus.publish(FirstToken(A, 0.0))
    with bus.subscribe(Wanted()) as subscription:
        first = await anext(subscription)
        for number in range(5):
            bus.publish(PrefillProgress(A, number, 5))
        found = told(subscription)
    assert (first.event.name, first.number) == ("subscribed", 0)
    assert [notice.event.done_tokens for notice in found] == [0, 1, 2, 3, 4]
    assert [notice.number for notice in found] == [1, 2, 3, 4, 5]
    assert [notice.monotonic_s for notice in found] == sorted(notice.monotonic_s for notice in found)
    assert all(notice.request is None for notice in found)


async def test_each_is_told_what_it_asked_for() -> None:
    bus = Bus()
    wanted = [Wanted(frozenset({"first_token"})), Wanted(session=A), Wanted(namespace="lab"), Wanted()]
    subscriptions = [bus.subscribe(each) for each in wanted]
    published = [FirstToken(A, 1.0), FirstToken(B, 2.0), PrefillProgress(A, 1, 2), RequestFailed(None, "x", "y", 0.1)]
    for event in published:
        bus.publish(event)
    one, two, three, four = published
    assert [events(each) for each in subscriptions] == [[one, two], [one, three], [two], [one, two, three, four]]


def test_an_event_that_does_not_exist_is_no_wish() -> None:
    with pytest.raises(UnknownEvent) as caught:
        Wanted(frozenset({"sleep_ended", "sleeps"}))
    assert caught.value.details["event"] == "sleeps"
    assert "sleep_ended" in caught.value.message


async def test_a_slow_subscriber_loses_the_oldest_and_is_told_how_many() -> None:
    bus = Bus()
    slow, quick = bus.subscribe(Wanted(), most_waiting=4), bus.subscribe(Wanted())
    for number in range(10):
        bus.publish(PrefillProgress(A, number, 10))
    found = told(slow)
    assert found[0].event.name == "lost"
    assert found[0].event.count == 7, "six of the ten, and the word that it is a subscriber"
    assert [notice.event.done_tokens for notice in found[1:]] == [6, 7, 8, 9]
    assert found[0].number == found[1].number - 1
    assert (slow.lost, quick.lost) == (7, 0)
    assert len(events(quick)) == 10
    bus.publish(FirstToken(A, 1.0))
    assert events(slow) == [FirstToken(A, 1.0)], "once told, it is not told again"


async def test_nothing_is_left_of_a_subscriber_that_has_gone() -> None:
    bus = Bus()

    async def watch() -> None:
        with bus.subscribe(Wanted()) as subscription:
            ends.append(weakref.ref(subscription))
            async for _ in subscription:
                pass

    ends: list[weakref.ref[Subscription]] = []
    task = asyncio.create_task(watch())
    await until(lambda: bus.is_watched)
    task.cancel()
    await asyncio.wait({task})
    del task
    gc.collect()
    assert not bus.is_watched
    assert ends[0]() is None


async def test_a_bus_that_is_closed_ends_its_subscriptions_once_they_are_read() -> None:
    bus = Bus()
    subscription = bus.subscribe(Wanted())
    bus.publish(FirstToken(A, 1.0))
    bus.close()
    bus.publish(FirstToken(A, 2.0))
    assert [notice.event.name async for notice in subscription] == ["subscribed", "first_token"]
    late = bus.subscribe(Wanted())
    assert [notice.event.name async for notice in late] == ["subscribed"]
    assert subscription.delivered == 2


async def test_there_is_a_bound_on_subscribers() -> None:
    bus = Bus()
    subscriptions = [bus.subscribe(Wanted()) for _ in range(MAX_SUBSCRIBERS)]
    with pytest.raises(TooManySubscribers):
        bus.subscribe(Wanted())
    subscriptions[3].end()
    bus.subscribe(Wanted())


async def test_no_namespace_takes_the_places_of_another_one_or_of_who_hears_of_all() -> None:
    bus = Bus()
    for name in ("one", "two", "three"):
        for number in range(MAX_OF_NAMESPACE):
            if number:
                bus.subscribe(Wanted(namespace=name))
            else:
                bus.resume(Wanted(namespace=name), None)
        with pytest.raises(TooManySubscribers):
            bus.subscribe(Wanted(namespace=name))
    with pytest.raises(TooManySubscribers):
        bus.subscribe(Wanted(namespace="four"))
    for _ in range(MAX_SUBSCRIBERS - MAX_OF_NAMESPACES):
        bus.subscribe(Wanted())
    with pytest.raises(TooManySubscribers):
        bus.resume(Wanted(), None)


async def test_what_another_thread_tells_keeps_its_order_and_its_request() -> None:
    bus = Bus()
    with bus.subscribe(Wanted()) as subscription:
        with bus.request("append", lambda: A):
            tell = bus.from_any_thread()
        thread = threading.Thread(target=lambda: [tell(PrefillProgress(A, number, 3)) for number in range(3)])
        thread.start()
        await until(lambda: len(subscription._waiting) == 6)
        thread.join()
        found = told(subscription)
    assert [notice.event.name for notice in found[:2]] == ["request_accepted", "request_finished"]
    assert [notice.event.done_tokens for notice in found[2:]] == [0, 1, 2]
    assert {notice.request for notice in found} == {1}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EmptyContext("the words of a client"), "empty_context"),
        (asyncio.CancelledError(), "cancelled"),
        (ValueError("the words of a client"), "internal_error"),
    ],
)
async def test_a_request_that_fails_is_told_by_its_code_and_no_word_more(error: BaseException, code: str) -> None:
    bus = Bus()
    with bus.subscribe(Wanted()) as subscription:
        with pytest.raises(type(error)), bus.request("chat", lambda: A):
            raise error
        accepted, failed = events(subscription)
    assert accepted.facts() == {"verb": "chat"}
    assert isinstance(failed, RequestFailed)
    assert (failed.session, failed.verb, failed.code) == (A, "chat", code)


async def test_nobody_asks_for_a_session_that_nobody_is_told_of() -> None:
    def never() -> SessionUri:
        raise AssertionError("nobody is told")

    with Bus().request("chat", never):
        pass


async def taken(subscription: Resumable, count: int) -> list[tuple[str, int]]:
    return [(notice.event.name, notice.number) for notice in [await anext(subscription) for _ in range(count)]]


async def test_a_subscription_goes_on_behind_its_place_without_a_gap() -> None:
    bus = Bus()
    with bus.resume(Wanted(session=A), None) as first:
        bus.publish(FirstToken(A, 1.0))
        bus.publish(FirstToken(A, 2.0))
        assert await taken(first, 2) == [("subscribed", 0), ("first_token", 1)]
        place = first.place
    assert bus.is_watched, "its reader may be back soon"
    for event in (FirstToken(B, 3.0), FirstToken(A, 4.0)):
        bus.publish(event)
    with bus.resume(Wanted(session=A), place) as second:
        assert await taken(second, 3) == [("subscribed", 1), ("first_token", 2), ("first_token", 4)]
        bus.publish(FirstToken(B, 5.0))
        assert second.place.endswith("-5"), "what it does not want is behind it, too"
        bus.publish(FirstToken(A, 6.0))
        assert await taken(second, 1) == [("first_token", 6)]


async def test_an_event_has_the_same_id_each_time_that_it_is_told() -> None:
    bus = Bus()
    with bus.resume(Wanted(session=A), None) as first:
        for event in (FirstToken(A, 1.0), FirstToken(A, 2.0), FirstToken(B, 3.0)):
            bus.publish(event)
        ids = [first.id_of(await anext(first)) for _ in range(3)]
    with bus.resume(Wanted(session=A), ids[1]) as second:
        assert [second.id_of(await anext(second)) for _ in range(2)] == [None, ids[2]]
    with bus.resume(Wanted(), "00000000-7") as third:
        assert third.id_of(await anext(third)) == ids[0], "what was lost stood before all that is kept"


async def test_who_was_away_for_too_many_events_is_told_so_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.daemon.events.bus.MAX_PAST_EVENTS", 3)
    bus = Bus()
    with bus.resume(Wanted(), None) as first:
        place = first.place
    for number in range(5):
        bus.publish(PrefillProgress(A, number, 5))
    with bus.resume(Wanted(), place) as second:
        assert await taken(second, 4) == [("lost", 2), *(("prefill_progress", number) for number in (3, 4, 5))]
        assert (await taken_facts(bus, place)) == {"count": None}


async def taken_facts(bus: Bus, place: str) -> dict[str, Any]:
    with bus.resume(Wanted(), place) as again:
        return (await anext(again)).event.facts()


@pytest.mark.parametrize("place", ["", "x", "00000000-0", "00000000-99999999999999999999", "\u0661"])
async def test_a_place_that_this_daemon_never_told_misses_events(place: str) -> None:
    bus = Bus()
    with bus.resume(Wanted(), place) as subscription:
        assert await taken(subscription, 1) == [("lost", 0)]


async def test_nothing_is_kept_for_who_does_not_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = Bus()
    with bus.subscribe(Wanted()):
        bus.publish(FirstToken(A, 0.5))
        assert not bus._past._notices, "nobody may resume that one"
    with bus.resume(Wanted(), None) as first:
        place = first.place
        with bus.resume(Wanted(), None):
            pass
        bus.publish(FirstToken(A, 1.0))
    monkeypatch.setattr(bus._past, "_kept_until_s", 0.0)
    assert not bus.is_watched
    bus.publish(FirstToken(A, 2.0))
    with bus.resume(Wanted(), place) as second:
        assert await taken(second, 1) == [("lost", 2)]
        assert second.place != place
