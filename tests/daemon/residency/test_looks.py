"""A look ends when its session leaves memory: the next use finds the newest version. Within one request it stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon import errors
from torpor.daemon.api.session import Look
from torpor.daemon.engine.generation import PREFILL_CHUNK_TOKENS
from torpor.tests.daemon.damage_rig import damage, mend
from torpor.tests.daemon.session_rig import Rigged, given_up, listening, manifests, packs, reply_with, tokens_of, until
from torpor.tests.daemon.turns_rig import KINDS, look_at_the_first_of_two_versions

OTHERS = 700
"""Tokens of the session that the others' request makes."""


async def crowd_out(rig: Rigged, name: str = "s") -> None:
    """Another session takes all that the budget leaves beside the model."""
    await rig.service.create("other")
    residency, needed = rig.service._parts.sessions.residency, rig.live("other").growth_of(PREFILL_CHUNK_TOKENS)(OTHERS)
    before = residency.memory.budget
    await residency.memory.resize(rig.model.weights_bytes + needed)
    await rig.service.append("other", tokens=tokens_of(9, OTHERS))
    assert not rig.is_awake(name)
    await rig.service.delete("other")
    await residency.memory.resize(before)


STANDS = [(None, 280), (1, None), (1, 280)]


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("version", "at"), STANDS)
@pytest.mark.parametrize("how", ["sleep", "pressure", "unload"])
async def test_a_look_ends_when_it_leaves_memory_and_nothing_is_written(
    rig: Rigged, store: Path, version: int | None, at: int | None, how: str
) -> None:
    await look_at_the_first_of_two_versions(rig, None)
    await rig.sleep("s")
    files = [*manifests(store), *packs(store)]
    assert (await rig.wake("s", version, at_token=at)).look == Look(version or 2, at or 300, 2, 350)
    if how == "sleep":
        assert (await rig.sleep("s")).looked_at == (at or 300)
    elif how == "pressure":
        await crowd_out(rig)
    else:
        assert not (await rig.service.unload_model(model="tiny")).resident
    assert [*manifests(store), *packs(store)] == files
    (info,) = await rig.service.list_sessions()
    assert (info.state, info.version, info.token_count, info.look) == ("asleep", 2, 350, None)
    assert (await rig.service.show("s")).info.token_count == (await rig.service.plan_wake("s")).token_count == 350
    report = await rig.wake("s")
    assert (report.version, report.token_count, report.look) == (2, 350, None)


async def test_a_look_that_nobody_uses_ends_and_the_next_use_goes_on_at_the_end(open_rig: Any) -> None:
    async with open_rig(idle_sleep=0.01) as rig:
        await look_at_the_first_of_two_versions(rig, 280)
        await until(lambda: not rig.is_awake("s"))
        read = await rig.service.append("s", tokens=[7])
        assert (read.token_count, read.branched) == (351, None)


async def test_why_a_look_went_is_told(rig: Rigged) -> None:
    async with listening(rig) as heard:
        await look_at_the_first_of_two_versions(rig, None)
        await crowd_out(rig)
        assert (await rig.service.status()).memory.slept_by_pressure == 1
        ended = heard.of("sleep_ended", "s")[-1]
        assert (ended["cause"], ended["version"], ended["bytes_written"]) == ("pressure", 1, 0)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("version", "at"), STANDS)
async def test_a_request_whose_look_gives_way_has_it_back_to_the_bit_qx1(
    open_kind: Any, monkeypatch: pytest.MonkeyPatch, kind: str, version: int | None, at: int | None
) -> None:
    """What a request was asked at one place it never does at another: others that need the memory first change
    nothing."""
    async with open_kind(kind) as rig:
        await look_at_the_first_of_two_versions(rig, None)
        await rig.sleep("s")
        look = (await rig.wake("s", version, at_token=at)).look
        assert look is not None
        await rig.service.fork("s", name="alone")
        memory = rig.service._parts.models.memory
        reserve, ways = memory.reserve, []

        async def not_at_first(*claim: Any, **options: Any) -> bool:
            ways.append(rig.is_awake("s"))
            return len(ways) > 1 and await reserve(*claim, **options)

        monkeypatch.setattr(memory, "reserve", not_at_first)
        read = await rig.service.append("s", tokens=[7])
        monkeypatch.undo()
        assert (ways[:2], read.branched, read.token_count) == ([True, False], look, look.token_count + 1)
        await rig.service.append("alone", tokens=[7])
        assert await rig.write("s", 8) == await rig.write("alone", 8)
        assert (await rig.sleep("s")).version == 3


@pytest.mark.parametrize("trouble", ["pruned", "damaged"])
async def test_a_look_that_could_not_be_had_back_stays_and_a_refusal_says_why(
    rig: Rigged, store: Path, trouble: str
) -> None:
    """All that there is of it may be in memory."""
    await look_at_the_first_of_two_versions(rig, None)
    before = await rig.fingerprint("s")
    if trouble == "pruned":
        await rig.service.maintain(operation="prune", session="s", keep_last=1)
    else:
        await asyncio.to_thread(damage, store, "s", span=0, head=True)
    with pytest.raises(errors.MemoryBudgetExceeded) as refusal:
        await crowd_out(rig)
    assert list(refusal.value.unslept) == ["torpor://default/s"]
    assert ("a look at version 1, which is not stored" in refusal.value.message) == (trouble == "pruned")
    assert await rig.fingerprint("s") == before


@pytest.mark.one_in(2)
async def test_a_look_at_a_version_that_is_healed_is_one_at_the_version_that_takes_its_place(
    rig: Rigged, store: Path
) -> None:
    await rig.asleep("s", tokens_of(1, 1300))
    before = await rig.woken_fingerprint("s", at_token=300)
    await asyncio.to_thread(damage, store, "s", span=0)
    await mend(rig, "s")
    look = (await rig.wake("s")).look
    assert look is not None
    assert (look.token_count, look.version, look.newest_tokens) == (300, look.newest_version, 1300)
    assert look.version > 1
    assert await rig.fingerprint("s") == before


async def test_a_look_at_what_a_heal_makes_a_ledger_of_gives_way_and_has_lost_nothing(
    open_rig: Any, store: Path
) -> None:
    async with open_rig(stop_within=0) as rig:
        await rig.asleep("s", tokens_of(1, 600))
        await rig.service.append("s", tokens=tokens_of(2, 40))
        assert (await rig.service.close()).ledgers
    async with open_rig() as rig:
        await rig.wake("s", at_token=550)
        await asyncio.to_thread(damage, store, "s", kind="state")
        await mend(rig, "s")
        assert (await rig.service.list_sessions())[0].look == Look(3, 550, 3, 640)
        await crowd_out(rig)
        assert (await rig.wake("s")).token_count == 640
        await rig.sleep("s")
        assert (await rig.wake("s", at_token=550)).token_count == 550
        assert (await rig.service.append("s", tokens=[7])).branched is not None


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["wake", "fork"])
async def test_an_early_token_takes_the_memory_of_what_is_read_for_it_where_all_is_cut_by_token(
    rig: Rigged, how: str
) -> None:
    await rig.asleep("s", tokens_of(1, 1800))
    needed = rig.model.layout.most_bytes(600, PREFILL_CHUNK_TOKENS)
    await rig.service._parts.models.memory.resize(rig.model.weights_bytes + needed)
    if how == "wake":
        assert (await rig.service.plan_wake("s", at_token=100)).memory_bytes <= needed
        assert (await rig.wake("s", at_token=100)).token_count == 100
    else:
        assert (await rig.service.fork("s", name="f", at_token=100)).token_count == 100
    assert sum(each.resident_bytes for each in rig.service._parts.sessions.residency.awake.values()) <= needed


@pytest.mark.one_in(8)
@pytest.mark.parametrize("at", ["summary", "no summary", "no room", "new session"])
@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_a_look_ends_with_its_fold_also_where_that_does_not_come_to_its_end(
    open_rig: Any, at: str, how: str
) -> None:
    async with open_rig(endless=False) as rig:
        await rig.asleep("s", tokens_of(1, 600))
        await rig.service.append("s", tokens=tokens_of(2, 1448))
        slept = await rig.sleep("s")
        await (rig.wake("s", 2, at_token=2000) if at == "no room" else rig.wake("s", 1, at_token=500))
        order = {"summary": "A tale. " * 10} if at == "new session" else {"summarize": 100, "tail": 300}
        reply_with(rig, "")
        folding = rig.service.fold("s", name="f", **order)
        if how == "is cancelled":
            with pytest.raises(asyncio.CancelledError):
                await given_up(rig, folding)
        else:
            if at != "no summary":
                rig.network.fail_at(1)
            with pytest.raises(errors.InvalidFold if at == "no summary" else errors.GenerationFailed):
                await folding
        rig.network.reset()
        (info,) = await rig.service.list_sessions()
        assert (info.state, info.look, info.version) == ("asleep", None, slept.version)
        assert (await rig.wake("s")).token_count == 2048
