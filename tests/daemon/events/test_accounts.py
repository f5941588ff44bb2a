"""What a request cost is counted from the events that it causes, and from no others."""

from __future__ import annotations

import asyncio
import contextvars

import pytest
from torpor.daemon.events import events
from torpor.daemon.events.accounts import Account, client, current, timed
from torpor.daemon.events.bus import Bus
from torpor.memvid.uri import SessionUri

A = SessionUri("default", "a")
B = SessionUri("default", "b")


async def test_each_request_is_told_what_it_caused_alone() -> None:
    bus, ended, both = Bus(), list[Account](), asyncio.Barrier(2)
    bus.on_account = ended.append

    async def carried_out(session: SessionUri, tokens: int, who: str) -> None:
        client.set(who)
        with bus.request("chat", lambda: session):
            await both.wait()
            bus.publish(events.PrefillEnded(session, tokens, 0.5))
            bus.publish(events.PrefillEnded(session, 1, 0.25))
            bus.publish(events.MemoryGranted(session, 1, True, 0.125))
            bus.publish(events.SleepEnded(session, "pressure", 1, 1, 1, 1, 1, 0, 9.0))
            bus.publish(events.SleepEnded(session, "save", 1, 1, 1, 1, 1, 0, 2.0))
            bus.publish(events.DecodeEnded(session, 7, 4.0))

    await asyncio.gather(carried_out(A, 10, "x"), carried_out(B, 20, "y"))
    bus.publish(events.PrefillEnded(A, 1000, 1.0))
    spent = {"read_seconds": 0.75, "written_tokens": 7, "write_seconds": 4.0, "waited_seconds": 0.125}
    told = {each.session: (each.client, each.spent) for each in ended}
    assert told == {
        A: ("x", {"read_tokens": 11, "durable_seconds": 2.0} | spent),
        B: ("y", {"read_tokens": 21, "durable_seconds": 2.0} | spent),
    }
    assert not bus.accounts
    assert current.get() is None


def test_a_request_that_fails_is_told_with_its_code() -> None:
    bus, ended = Bus(), list[Account]()
    bus.on_account = ended.append

    def fail() -> None:
        with bus.request("chat", lambda: A), timed("waited_seconds"):
            bus.publish(events.WakeEnded(A, "asked", 1, 5, 0, 100, "same_bits", 0.0, 1.5))
            bus.publish(events.WakeEnded(B, "prefix", 1, 5, 0, 100, "same_bits", 0.0, 1.5))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    (account,) = ended
    assert (account.code, account.session, account.was_woken) == ("internal_error", A, True)
    assert account.spent["wake_seconds"] == 1.5
    assert account.spent["waited_seconds"] > 0


async def test_the_first_token_is_counted_from_any_thread_and_though_nobody_listens() -> None:
    bus, ended = Bus(), list[Account]()
    bus.on_account = ended.append
    with bus.request("chat", lambda: A):
        tell = bus.from_any_thread()
        await asyncio.to_thread(lambda: contextvars.Context().run(tell, events.FirstToken(A, 0.5)))
        await asyncio.to_thread(lambda: contextvars.Context().run(tell, events.FirstToken(A, 0.75)))
        await asyncio.sleep(0)
    assert [each.first_token_s for each in ended] == [0.5]


def test_sleeps_and_wakes_of_no_request_are_figures_too() -> None:
    bus = Bus()
    bus.publish(events.SleepEnded(A, "idle", 1, 1, 5000, 1, 1, 0, 0.3))
    bus.publish(events.WakeEnded(A, "warm", 1, 5, 0, 100, "same_bits", 0.0, 0.02))
    told = {
        name: {label: (sum(one.counts), one.total) for label, one in kind.of.items()}
        for name, kind in bus.figures.histograms.items()
        if kind.of
    }
    assert told == {
        "sleep_seconds": {"idle": (1, 0.3)},
        "wake_seconds": {"warm": (1, 0.02)},
        "sleep_written_bytes": {"": (1, 5000)},
        "wake_read_bytes": {"": (1, 100)},
    }
