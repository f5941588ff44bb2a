"""A session in memory, what is kept of it, and turn-taking."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from torpor.daemon.errors import InvalidSampling, SessionBusy
from torpor.daemon.sessions.sessions import MAX_WAITING, Session, Turns
from torpor.daemon.versions.version import map_of
from torpor.memvid.format.records import Receipt
from torpor.memvid.uri import SessionUri
from torpor.snapshot.errors import MalformedSnapshot
from torpor.tests.daemon.session_rig import HELD, SAMPLED, Rigged, tokens_of

DURABLE = Receipt(SessionUri("default", "a"), 1, "00" * 32, None, 1, 0, ())
A, B = SessionUri("default", "a"), SessionUri("default", "b")


async def test_turns_of_one_session_are_taken_in_order() -> None:
    turns, log = Turns(), []

    async def take(number: int) -> None:
        async with turns.take(A):
            log.append(number)
            await asyncio.sleep(0)
            log.append(number)

    await asyncio.gather(*map(take, range(5)))
    assert log == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert turns.in_use() == set()


async def test_turns_of_different_sessions_do_not_wait_for_each_other() -> None:
    turns = Turns()
    async with turns.take(A), turns.take(B):
        assert turns.in_use() == {A, B}


async def test_a_turn_ends_with_whatever_its_body_raises() -> None:
    turns = Turns()
    with pytest.raises(KeyError):
        async with turns.take(A):
            raise KeyError
    async with turns.take(A):
        pass


async def test_only_so_many_wait_for_one_session_qx18() -> None:
    turns = Turns()

    async def queue(*, always: bool = False) -> None:
        async with turns.take(A, always=always):
            pass

    async with turns.take(A):
        waiting = [asyncio.ensure_future(queue()) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(SessionBusy, match="default/a"):
            await queue()
        async with turns.take(B):
            pass
        patient = asyncio.ensure_future(queue(always=True))
        waiting.pop().cancel()
        waiting.pop().cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.append(asyncio.ensure_future(queue()))
        await asyncio.sleep(0)
    await asyncio.gather(patient, *waiting)
    assert turns.in_use() == set()


async def test_what_is_kept_of_a_session_makes_it_again(rig: Rigged) -> None:
    await rig.woken("a", tokens_of(1, 10), sampling=SAMPLED, labels=["x"], system="S")
    live = rig.live("a")
    entries = map_of(live)
    again = Session.woken(live.uri, live.model, live.state, live.durable, entries, 10)
    assert again == live
    assert again.durable_by == entries["backend"] == live.model.backend
    assert (again.dirty, again.unchanged_tokens) == (False, 10)


async def test_a_map_of_another_form_than_is_written_is_refused(rig: Rigged) -> None:
    """Otherwise a session wakes that can never sleep again, or an error without a name comes up."""
    await rig.read("a", [1])
    live = rig.live("a")

    def woken(kept: Any) -> Session:
        return Session.woken(live.uri, live.model, live.state, DURABLE, kept, 1)

    wrong: dict[str, tuple[Any, ...]] = {
        "created_ns": (float("inf"), 1e300, 1.0, "5", True, -1, 2**63),
        "elsewhere": ("7", 7.0, True, -1, 2**40),
        "labels": ("ab", {"a": 1}, [1]),
        "system": (5, b"text"),
        "turn_open": (1, None),
        "chat_opened_at": (True, -1, 0.0),
        "sampling": (None, [], {}, {**SAMPLED.to_map(), "seed": "1"}),
    }
    for field, values in wrong.items():
        for value in values:
            with pytest.raises((MalformedSnapshot, InvalidSampling)):
                woken({**live.to_map(), field: value})
    with pytest.raises(MalformedSnapshot, match="turn_open"):
        woken({name: value for name, value in live.to_map().items() if name != "turn_open"})
    for time_ns in (0, 2**63 - 1):
        assert woken({**live.to_map(), "created_ns": time_ns}).created_ns == time_ns


async def test_resident_bytes_are_the_bytes_of_the_arrays(rig: Rigged) -> None:
    await rig.service.create("a")
    assert rig.live("a").resident_bytes == 0
    await rig.read("b", [1])
    assert rig.live("b").resident_bytes == HELD
