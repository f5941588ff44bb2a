"""A session in memory, what is kept of it, and turn-taking."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from session_rig import SAMPLED, tokens_of
from torpor.daemon.errors import InvalidSampling, SessionBusy
from torpor.daemon.sessions.sessions import MAX_WAITING, Durable, Session, Turns
from torpor.memvid.uri import SessionUri
from torpor.snapshot.errors import MalformedSnapshot

DURABLE = Durable(1, bytes(32), None, 1, 0, ())
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


async def test_what_is_kept_of_a_session_makes_it_again(open_rig: Any) -> None:
    async with open_rig() as rig:
        await rig.read("a", tokens_of(1, 10), sampling=SAMPLED, labels=["x"], system="S")
        await rig.sleep("a")
        await rig.wake("a")
        live = rig.live("a")
        again = Session.woken(live.uri, live.model, live.state, live.durable, live.to_map())
        again.slept_by = live.slept_by  # it is not in the map, but beside it
        assert again == live
        assert (again.dirty, again.unchanged_tokens) == (False, 10)


async def test_a_map_without_what_a_session_needs_is_named(open_rig: Any) -> None:
    async with open_rig() as rig:
        await rig.read("a", [1])
        live = rig.live("a")
        kept = live.to_map()
        del kept["turn_open"]
        with pytest.raises(MalformedSnapshot, match="turn_open"):
            Session.woken(live.uri, live.model, live.state, live.durable, kept)  # type: ignore[arg-type]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("created_ns", float("inf")),
        ("created_ns", 1e300),
        ("created_ns", 1.0),
        ("created_ns", "5"),
        ("created_ns", True),
        ("created_ns", -1),
        ("created_ns", 2**63),
        ("labels", "ab"),
        ("labels", {"a": 1}),
        ("labels", [1]),
        ("system", 5),
        ("system", b"text"),
        ("turn_open", 1),
        ("turn_open", None),
        ("chat_opened_at", True),
        ("chat_opened_at", -1),
        ("chat_opened_at", 0.0),
        ("sampling", None),
        ("sampling", []),
        ("sampling", {}),
        ("sampling", {**SAMPLED.to_map(), "seed": "1"}),
    ],
)
async def test_a_field_of_another_type_than_is_written_is_refused(open_rig: Any, field: str, value: object) -> None:
    """Otherwise a session wakes that can never sleep again, or an error without a name comes up."""
    async with open_rig() as rig:
        await rig.read("a", [1])
        live = rig.live("a")
        kept = {**live.to_map(), field: value}
        with pytest.raises((MalformedSnapshot, InvalidSampling)):
            Session.woken(live.uri, live.model, live.state, DURABLE, kept)


async def test_the_last_time_that_64_bits_hold_is_taken(open_rig: Any) -> None:
    async with open_rig() as rig:
        await rig.read("a", [1])
        live = rig.live("a")
        for time_ns in (0, 2**63 - 1):
            kept = {**live.to_map(), "created_ns": time_ns}
            assert Session.woken(live.uri, live.model, live.state, DURABLE, kept).created_ns == time_ns


async def test_resident_bytes_are_the_bytes_of_the_arrays(open_rig: Any) -> None:
    async with open_rig() as rig:
        await rig.service.create(session="a")
        assert rig.live("a").resident_bytes == 0
        await rig.read("b", [1])
        assert rig.live("b").resident_bytes == 256 * 3 * 2 * 2 * 16 * 4 + 259 * 4
