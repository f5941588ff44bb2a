"""A store without room lets go first what the remote has, and a wake fetches it back: nothing is read again."""

from __future__ import annotations

import pytest
from torpor.memvid.errors import RemoteUnreachable
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.machines import OpenMachine, freed
from torpor.tests.daemon.session_rig import Fingerprint, Rigged, listening, tokens_of

ROOM_OF_TWO = 400_000
"""For two sessions of 300 tokens, and not for three."""

NAMES = ("a", "b", "c", "d")


def of(name: str) -> SessionUri:
    return SessionUri("default", name)


def stripped(rig: Rigged) -> list[str]:
    disk = rig.service._parts.store.disk
    return [name for name in NAMES if disk.marks(of(name)).stripped]


async def sleep(rig: Rigged, name: str) -> None:
    """Sleep, and be in the remote."""
    await rig.sleep(name)
    await freed(rig, of(name))


async def test_what_the_remote_has_goes_from_the_store_and_comes_back_to_the_bit(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and sessions that were named, too; by a wake, and by a fork. What cannot come is computed."""
    states: dict[str, Fingerprint] = {}
    async with machine("one", store_budget=ROOM_OF_TWO, prefix_reuse="off") as one, listening(one) as heard:
        for number, name in enumerate(NAMES):
            await one.read(name, tokens_of(number, 300))
            states[name] = await one.fingerprint(name)
            await sleep(one, name)
        assert {"a", "b"} <= set(stripped(one))
        plan = await one.service.maintain(operation="strip", dry_run=True)
        assert {each.reason.partition(",")[0] for each in plan.actions} == {"the remote has it"}
        for name in (*NAMES, "a"):
            planned = await one.service.plan_wake(name)
            told = (planned.is_fetched, planned.restored_tokens, planned.computed_tokens)
            assert told == (name in stripped(one), 300, 0)
            woken = await one.wake(name)
            assert (woken.tokens_prefilled, woken.recomputed_because) == (0, None)
            assert (woken.bytes_fetched > 0) == planned.is_fetched
            assert await one.fingerprint(name) == states[name]
            assert one.service._parts.store.disk.held_bytes <= ROOM_OF_TWO
            await sleep(one, name)
        assert len(heard.of("version_pulled")) >= len(NAMES)
        forked = await one.service.fork(gone := stripped(one)[0], "fork")
        assert forked.tokens_prefilled == 0
        await one.wake("fork")
        assert await one.fingerprint("fork") == states[gone]

        def away(*_: object) -> int:
            raise RemoteUnreachable("No answer.")

        monkeypatch.setattr(RemoteSessions, "fetch_back", away)
        woken = await one.wake(stripped(one)[0])
        assert (woken.tokens_prefilled, woken.recomputed_because, woken.bytes_fetched) == (300, "stripped", 0)
