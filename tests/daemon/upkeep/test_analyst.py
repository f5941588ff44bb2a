"""Analyses beside what is served: of what is stored, whoever is awake, and stopped when nobody waits for them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.events import ProgressEvent
from torpor.daemon.errors import ServiceClosed
from torpor.daemon.upkeep import analyst
from torpor.memvid.errors import AmbiguousVersion, BundleMismatch, SessionNotFound
from torpor.tests.daemon.session_rig import Gate, Rigged, cancelled, hold_calls, manifest_of, tokens_of, until


def document(result: Any) -> dict[str, Any]:
    return dict(json.loads(result.artifact))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Analyses that stop, on their thread, before their first byte, until the gate is opened."""
    return hold_calls(monkeypatch, analyst, "analyze")


async def test_a_sleeping_session_is_analysed_and_stays_asleep(rig: Rigged) -> None:
    receipt = await rig.asleep("a", tokens_of(1, 300), labels=["long"])
    told: list[Any] = []
    found = await rig.service.analyze("a", on_event=told.append)
    await until(lambda: bool(told))
    assert (found.session, found.version, found.bundle_id) == ("torpor://default/a", 1, receipt.bundle_id)
    assert (found.token_count, found.awake_tokens) == (300, None)
    assert {type(event) for event in told} == {ProgressEvent}
    assert {event.stage for event in told} == {"analyze"}
    assert not rig.is_awake("a")
    made = document(found)
    assert (made["bundle_id"], made["labels"]) == (receipt.bundle_id, ["long", "tiny", "v1"])
    assert made["drift"]["why"] == "it has no parent"
    assert [array["tokens"] for layer in made["layers"] for array in layer["arrays"]] == [300] * 4
    assert (await rig.service.analyze("a")).artifact == found.artifact


async def test_of_an_awake_session_it_is_what_last_slept_gm12(rig: Rigged) -> None:
    """The snapshot owns its bytes: what the session has read since does not change the figures."""
    await rig.asleep("a", tokens_of(1, 300))
    asleep = await rig.service.analyze("a")
    await rig.wake("a")
    await rig.service.append("a", tokens=tokens_of(2, 50))
    awake = await rig.service.analyze("a")
    assert (awake.version, awake.token_count, awake.awake_tokens) == (1, 300, 350)
    assert awake.artifact == asleep.artifact


async def test_a_session_that_has_never_slept_has_nothing_to_analyse_yet(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 9))
    with pytest.raises(SessionNotFound, match="`torpor save torpor://default/a` makes one"):
        await rig.service.analyze("a")
    with pytest.raises(SessionNotFound):
        await rig.service.analyze("nobody")


async def test_a_version_is_named_and_compared_with_its_parent(rig: Rigged) -> None:
    first = await rig.asleep("a", tokens_of(1, 600))
    await rig.wake("a")
    await rig.service.append("a", tokens=tokens_of(2, 50))
    await rig.sleep("a")
    earlier = document(await rig.service.analyze("a@1"))
    newest = document(await rig.service.analyze("a", kind="probe", labels=["x"]))
    assert (earlier["version"], earlier["drift"]["blocks"]) == (1, None)
    assert (newest["version"], newest["kind"], newest["labels"]) == (2, "probe", ["x"])
    assert newest["drift"]["parent"]["bundle_id"] == first.bundle_id
    assert newest["drift"]["blocks"] == {"common": 3, "same": 2, "same_share": 0.666667}
    with pytest.raises(SessionNotFound):
        await rig.service.analyze("a@9")
    with pytest.raises((SessionNotFound, AmbiguousVersion)):
        await rig.service.analyze("a@no-such-tag")


async def test_a_parent_that_was_pruned_is_told(rig: Rigged) -> None:
    await rig.woken("a", tokens_of(1, 300))
    await rig.service.append("a", tokens=tokens_of(2, 5))
    await rig.sleep("a")
    await rig.service.maintain(operation="prune", keep_last=1)
    drift = document(await rig.service.analyze("a"))["drift"]
    assert drift["why"] == "its parent is not in the store any more"


async def test_a_bundle_that_is_not_the_one_of_the_index_is_not_analysed_gm2_gm3(rig: Rigged, store: Path) -> None:
    first, second = [manifest_of(store, (await rig.asleep(name, tokens_of(1, 300))).bundle_id) for name in "ab"]
    second.write_bytes(first.read_bytes())
    with pytest.raises(BundleMismatch):
        await rig.service.analyze("b")


async def test_sessions_are_served_while_one_is_analysed(rig: Rigged, held: Gate) -> None:
    await rig.asleep("a", tokens_of(1, 300))
    running = asyncio.ensure_future(rig.service.analyze("a"))
    await held.reached()
    await rig.wake("a")
    assert len((await rig.write("a", 3))[0]) == 3
    await rig.sleep("a")
    held.open()
    assert (await running).version == 1


async def test_an_analysis_that_nobody_waits_for_ends_at_its_next_step(rig: Rigged, held: Gate) -> None:
    await rig.asleep("a", tokens_of(1, 300))
    told: list[Any] = []
    left = asyncio.ensure_future(rig.service.analyze("a", on_event=told.append))
    await held.reached()
    left.cancel()
    await cancelled(left)
    held.open()
    assert (await rig.service.analyze("a")).version == 1  # the thread is free again
    assert told == []


async def test_a_daemon_that_stops_does_not_wait_for_an_analysis_to_end(open_rig: Any, held: Gate) -> None:
    async with open_rig() as rig:
        await rig.asleep("a", tokens_of(1, 300))
        running = asyncio.ensure_future(rig.service.analyze("a"))
        await held.reached()
        waiting = asyncio.ensure_future(rig.service.analyze("a"))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(rig.service.close())
        await until(rig.service._parts.upkeep.analyst._closing.is_set)
        held.open()
        for analysis in (running, waiting):
            with pytest.raises((ServiceClosed, asyncio.CancelledError)):
                await analysis
        await closing
