"""A plan of a wake says what the wake then does, and changes nothing."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.errors import ModelChanged, ModelNotLoaded, SessionAwake
from torpor.memvid.errors import BundleMissing, SessionNotFound
from torpor.snapshot.errors import NoSuchPosition
from torpor.tests.daemon.session_rig import MODEL, Rigged, listening, manifest_of, tokens_of

KINDS = ["plain", "gemma3_text", "lfm2"]
TEXT = tokens_of(1, 700)


def all_files(store: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(store.rglob("*"))
        if path.is_file() and "index.sqlite" not in path.name
    }


async def test_a_plan_has_no_side_effect(rig: Rigged, store: Path) -> None:
    await rig.asleep("a", TEXT)
    rig.network.reset()
    files = all_files(store)
    before = await rig.service.status()
    async with listening(rig) as heard:
        for order in ({}, {"version": 1}, {"at_token": 300}, {"strict": True}):
            plan = await rig.service.plan_wake("a", **order)
            assert (plan.already_awake, plan.version, plan.model_loaded) == (False, 1, True)
        assert [notice.event.name for notice in heard] == ["subscribed"]
    assert rig.network.calls == [], "nothing was computed"
    assert not rig.is_awake("a")
    assert all_files(store) == files
    after = await rig.service.status()
    # Whatever else runs here changes the time and the room of the disk.
    told = [dataclasses.replace(each, uptime_s=0, models=(), disk=None) for each in (before, after)]
    assert told[0] == told[1]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [None, 512, 300, 1])
async def test_the_tokens_and_bytes_of_a_plan_are_what_the_wake_then_reports(
    open_kind: Any, kind: str, at: int | None
) -> None:
    async with open_kind(kind) as rig:
        await rig.read("a", TEXT)
        await rig.write("a", 6)
        await rig.sleep("a")
        plan = await rig.service.plan_wake("a", at_token=at)
        woken = await rig.wake("a", at_token=at)
        assert plan.bytes_to_read == woken.bytes_read
        assert (plan.token_count, plan.computed_tokens) == (woken.token_count, woken.tokens_prefilled)
        assert plan.restored_tokens <= plan.token_count


async def test_a_plan_counts_the_blocks_of_the_version_that_is_meant(rig: Rigged) -> None:
    await rig.asleep("a", TEXT)
    await rig.service.append("a", tokens=tokens_of(2, 400), on_event=lambda _: None)
    await rig.sleep("a")
    assert (await rig.service.plan_wake("a")).blocks == 6
    earlier = await rig.service.plan_wake("a@1")
    assert (earlier.version, earlier.blocks) == (1, 4)


async def test_of_a_session_that_is_awake_there_is_nothing_to_plan(rig: Rigged) -> None:
    await rig.read("a", TEXT)
    plan = await rig.service.plan_wake("a")
    assert (plan.already_awake, plan.blocks, plan.token_count) == (True, 0, len(TEXT))
    await rig.sleep_and_wake("a")
    with pytest.raises(SessionAwake):
        await rig.service.plan_wake("a", at_token=5)


async def test_a_plan_is_refused_as_the_wake_would_be(rig: Rigged, store: Path) -> None:
    receipt = await rig.asleep("a", TEXT)
    damage: list[Any] = []
    rig.service._parts.store.versions.waking._on_damage = damage.append
    with pytest.raises(SessionNotFound):
        await rig.service.plan_wake("b")
    with pytest.raises(NoSuchPosition):
        await rig.service.plan_wake("a", at_token=len(TEXT) + 1)
    rig.service._parts.models.shelf.places[MODEL].changed = ("weights",)
    with pytest.raises(ModelChanged):
        await rig.service.plan_wake("a")
    rig.service._parts.models.shelf.places[MODEL].changed = ()
    manifest_of(store, receipt.bundle_id).unlink()
    with pytest.raises(BundleMissing):
        await rig.service.plan_wake("a")
    assert damage == [], "nobody is told of what a plan finds"


async def test_a_plan_loads_no_model(rig: Rigged) -> None:
    await rig.asleep("a", TEXT)
    await rig.service.unload_model(model=MODEL)
    plan = await rig.service.plan_wake("a")
    assert (plan.model_loaded, plan.blocks) == (False, 4)
    place = rig.service._parts.models.shelf.places[MODEL]
    assert place.model is None
    place.facts = None
    with pytest.raises(ModelNotLoaded, match="torpor models load tiny"):
        await rig.service.plan_wake("a")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["plain", "lfm2"])
async def test_a_plan_counts_what_a_stop_had_no_time_to_write(open_kind: Any, kind: str) -> None:
    async with open_kind(kind, stop_within=0) as rig:
        await rig.read("new", TEXT)
        await rig.asleep("more", TEXT)
        await rig.service.append("more", tokens=tokens_of(2, 300), on_event=lambda _: None)
    async with open_kind(kind) as rig:
        for name in ("new", "more"):
            plan = await rig.service.plan_wake(name)
            woken = await rig.wake(name)
            assert (plan.token_count, plan.computed_tokens) == (woken.token_count, woken.tokens_prefilled)
            assert plan.bytes_to_read == woken.bytes_read
            assert (plan.blocks == 0) is (name == "new")
