"""A look gives its memory up like any session, and its next use finds it where it stood, to the bit."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon import errors
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.session import Look
from torpor.daemon.engine.generation import PREFILL_CHUNK_TOKENS
from torpor.errors import TorporError
from torpor.memvid.errors import Corruption, SessionNotFound
from torpor.snapshot.errors import NoSuchPosition
from torpor.tests.daemon.damage_rig import damage, mend
from torpor.tests.daemon.session_rig import Rigged, given_up, listening, manifests, packs, reply_with, tokens_of, until
from torpor.tests.daemon.turns_rig import KINDS, TOKENS, look_at_the_first_of_two_versions

OTHERS = 700
"""Tokens of the session that the others' request makes."""

Use = Callable[[Rigged], Awaitable[Any]]


async def crowd_out(rig: Rigged, name: str = "s") -> None:
    """Another session takes all that the budget leaves beside the model."""
    await rig.service.create("other")
    residency, needed = rig.service.residency, rig.live("other").growth_of(PREFILL_CHUNK_TOKENS)(OTHERS)
    before = residency.memory.budget
    await residency.resize(rig.model.weights_bytes + needed)
    await rig.service.append("other", tokens=tokens_of(9, OTHERS))
    assert not rig.is_awake(name)
    await rig.service.delete("other")
    await residency.resize(before)


async def told(rig: Rigged, name: str = "s") -> Any:
    """What is said of a session, but for whether it is in memory."""
    (listed,) = [info for info in await rig.service.list_sessions() if info.name == name]
    shown = await rig.service.show(name)
    same = {"state": "", "resident_bytes": 0, "sampling": None}
    return dataclasses.replace(listed, **same), dataclasses.replace(shown, info=dataclasses.replace(shown.info, **same))


def receipt(slept: Any) -> Any:
    """A sleep's receipt, but for what is another one in each store."""
    return slept.version, slept.token_count, slept.bytes_written, slept.looked_at, slept.already_asleep


async def append(rig: Rigged) -> Any:
    read = await rig.service.append("s", tokens=[7])
    return read.token_count, read.branched, await rig.write("s", 5), receipt(await rig.sleep("s"))


async def generate(rig: Rigged) -> Any:
    return await rig.write("s", 5), receipt(await rig.sleep("s"))


async def chat(rig: Rigged) -> Any:
    said = await rig.service.chat("s", message="And then?", max_tokens=5, prove=True)
    return said.tokens, said.logits_blake3, said.token_count, said.branched


async def fork(rig: Rigged) -> Any:
    made = await rig.service.fork("s", name="f")
    await rig.wake("f")
    return made.token_count, made.forked_from.version, await rig.fingerprint("f"), (await rig.wake("s")).look


async def fork_at_an_earlier_token(rig: Rigged) -> Any:
    made = await rig.service.fork("s", name="f", at_token=100)
    await rig.wake("f")
    return made.token_count, made.forked_from.version, await rig.fingerprint("f"), (await rig.wake("s")).look


async def fold(rig: Rigged) -> Any:
    made = await rig.service.fold("s", name="f", summary="A tale.")
    return made.folded_from.version, made.folded_from.tokens, made.token_count, await rig.write("f", 5)


async def wake(rig: Rigged) -> Any:
    report = await rig.wake("s")
    return report.version, report.token_count, report.look, await rig.fingerprint("s")


async def plan(rig: Rigged) -> Any:
    planned = await rig.service.plan_wake("s")
    return planned.version, planned.token_count


async def warm(rig: Rigged) -> Any:
    (warmed,) = (await rig.service.warm(sessions=["s"])).sessions
    return warmed.left, warmed.info.look, await rig.fingerprint("s")


async def settings(rig: Rigged) -> Any:
    with pytest.raises(errors.SessionAwake) as refusal:
        await rig.service.set("s", sampling=Sampling(temperature=0.5))
    return refusal.value.message


async def sleep(rig: Rigged) -> Any:
    return receipt(await rig.sleep("s")), receipt(await rig.sleep("s")), (await rig.wake("s")).token_count


async def save(rig: Rigged) -> Any:
    saved = await rig.service.save("s")
    return receipt(saved)[:-1], (await rig.wake("s")).look


async def end(rig: Rigged) -> Any:
    return (await rig.service.close()).slept


USES = [
    *(append, generate, chat, fork, fork_at_an_earlier_token, fold, wake, plan, warm, settings, told, sleep, save, end),
]
STANDS = [(None, 280), (1, None), (1, 280)]


@pytest.mark.one_in(29)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize(("version", "at"), STANDS)
async def test_a_look_that_made_room_is_used_as_if_it_had_stayed(
    open_kind: Any, tmp_path: Path, use: Use, version: int | None, at: int | None
) -> None:
    answers = []
    for crowded in (False, True):
        async with open_kind("qwen3", store=tmp_path / f"crowded-{crowded}") as rig:
            await look_at_the_first_of_two_versions(rig, None)
            await rig.sleep("s")
            await rig.wake("s", version, at_token=at)
            if crowded:
                await crowd_out(rig)
            answers.append(await use(rig))
    # Bundles have other ids in each store, and were made at other times.
    alone, again = (_timeless(answer) for answer in answers)
    assert again == alone


@pytest.mark.one_in(18)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("version", "at"), STANDS)
async def test_a_look_of_each_kind_of_cache_gives_way_and_is_back_to_the_bit_qx1(
    open_kind: Any, kind: str, version: int | None, at: int | None
) -> None:
    async with open_kind(kind) as rig:
        await look_at_the_first_of_two_versions(rig, None)
        await rig.sleep("s")
        look = (await rig.wake("s", version, at_token=at)).look
        assert look is not None
        before = await rig.fingerprint("s")
        for _ in range(2):
            await crowd_out(rig)
            assert (await rig.wake("s")).look == look
            assert await rig.fingerprint("s") == before
        await rig.service.fork("s", name="alone")
        await crowd_out(rig)
        went_on = await rig.write("s", 8)
        await rig.wake("alone")
        assert await rig.write("alone", 8) == went_on
        assert (await rig.sleep("s")).version == 3


async def test_nothing_is_written_when_a_look_gives_way_and_why_it_went_is_told(rig: Rigged, store: Path) -> None:
    async with listening(rig) as heard:
        await look_at_the_first_of_two_versions(rig, None)
        files = [*manifests(store), *packs(store)]
        await crowd_out(rig)
        assert [*manifests(store), *packs(store)] == files
        assert (await rig.service.status()).memory.slept_by_pressure == 1
        (info,) = await rig.service.list_sessions()
        assert (info.state, info.version, info.look) == ("asleep", 1, Look(1, 300, 2, 350))
        ended = heard.of("sleep_ended", "s")[-1]
        assert (ended["cause"], ended["version"], ended["bytes_written"]) == ("pressure", 1, 0)


async def test_a_look_that_nobody_uses_sleeps_and_comes_back_where_it_stood(open_rig: Any) -> None:
    async with open_rig(idle_sleep=0.01) as rig:
        await look_at_the_first_of_two_versions(rig, 280)
        await until(lambda: not rig.is_awake("s"))
        assert (await rig.service.append("s", tokens=[7])).branched == Look(1, 280, 2, 350)


async def test_a_look_does_not_keep_its_model_from_being_unloaded(rig: Rigged) -> None:
    await look_at_the_first_of_two_versions(rig, 280)
    assert not (await rig.service.unload_model(model="tiny")).resident
    assert (await rig.wake("s")).look == Look(1, 280, 2, 350)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("order", [{"version": 2}, {"at_token": 100}, {"version": 1, "at_token": 100}])
async def test_a_look_that_made_room_is_left_by_a_wake_that_asks_for_another_place(
    rig: Rigged, order: dict[str, int]
) -> None:
    await look_at_the_first_of_two_versions(rig, 280)
    await crowd_out(rig)
    held = (await rig.wake("s", **order)).token_count
    assert held == order.get("at_token", 350)
    await crowd_out(rig)
    assert (await rig.wake("s")).token_count == held


@pytest.mark.one_in(2)
@pytest.mark.parametrize("at_token", [280, 100])
async def test_a_token_alone_is_one_of_the_version_that_a_look_stood_at(rig: Rigged, at_token: int) -> None:
    """As it is while the look is in memory: what left in between changes nothing."""
    await look_at_the_first_of_two_versions(rig, 280)
    await crowd_out(rig)
    woken = await rig.wake("s", at_token=at_token)
    assert (woken.version, woken.token_count) == (1, at_token)


async def test_a_wake_elsewhere_that_fails_leaves_a_look_where_it_stood(rig: Rigged) -> None:
    await look_at_the_first_of_two_versions(rig, 280)
    await crowd_out(rig)
    for order in ({"version": 3}, {"at_token": 351}):
        with pytest.raises(TorporError):
            await rig.wake("s", **order)
    assert (await rig.wake("s")).look == Look(1, 280, 2, 350)


async def test_a_look_that_made_room_ends_with_the_daemon_as_one_in_memory_does(open_rig: Any) -> None:
    async with open_rig() as rig:
        await look_at_the_first_of_two_versions(rig, 280)
        await crowd_out(rig)
    async with open_rig() as rig:
        report = await rig.wake("s")
        assert (report.version, report.token_count, report.look) == (2, 350, None)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", ["rm", "clear", "forget"])
async def test_a_session_that_is_deleted_leaves_no_look_to_the_next_of_its_name(rig: Rigged, how: str) -> None:
    await rig.asleep("s", TOKENS[:300], labels=["x"])
    await rig.wake("s", at_token=20)
    await crowd_out(rig)
    if how == "rm":
        await rig.service.delete("s")
    elif how == "clear":
        await rig.service.clear(label="x")
    else:
        await rig.service.maintain(operation="forget", session="s")
    await rig.asleep("s", TOKENS[:30])
    assert (await rig.wake("s")).token_count == 30


# --- the version is not there any more


@pytest.mark.one_in(2)
@pytest.mark.parametrize("at", [None, 280])
async def test_what_needs_a_look_whose_version_was_pruned_is_refused_until_a_sleep_ends_it(
    open_kind: Any, at: int | None
) -> None:
    """Nothing goes on from another place than the one that was asked for."""
    async with open_kind("qwen3") as rig:
        await look_at_the_first_of_two_versions(rig, at)
        await crowd_out(rig)
        await rig.service.maintain(operation="prune", session="s", keep_last=1)
        (info,) = await rig.service.list_sessions()
        assert info.look == Look(1, at or 300, 2, 350)
        service = rig.service
        for ask in (
            lambda: service.append("s", tokens=[7]),
            lambda: service.generate("s", max_tokens=1),
            lambda: service.fork("s", name="f"),
            lambda: service.fold("s", name="f", summary="A tale."),
            lambda: service.wake("s"),
            lambda: service.plan_wake("s"),
            lambda: service.show("s"),
        ):
            with pytest.raises(SessionNotFound, match=r"look at version 1, token \d+, which is not stored any more"):
                await ask()
        (warmed,) = (await service.warm(sessions=["s"])).sessions
        assert warmed.left == "session_not_found"
        slept = await rig.sleep("s")
        assert (slept.version, slept.token_count, slept.looked_at) == (2, 350, at or 300)
        assert (await rig.wake("s")).token_count == 350


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


async def test_a_look_whose_version_was_damaged_since_is_refused_and_stays(rig: Rigged, store: Path) -> None:
    await look_at_the_first_of_two_versions(rig, None)
    await crowd_out(rig)
    await asyncio.to_thread(damage, store, "s", span=0)
    for _ in range(2):
        with pytest.raises(Corruption):
            await rig.service.append("s", tokens=[7])
    (info,) = await rig.service.list_sessions()
    assert info.look == Look(1, 300, 2, 350)


@pytest.mark.one_in(2)
async def test_a_look_at_a_version_that_is_healed_is_one_at_the_version_that_takes_its_place(
    rig: Rigged, store: Path
) -> None:
    await rig.asleep("s", tokens_of(1, 1300))
    await rig.wake("s", at_token=300)
    before = await rig.fingerprint("s")
    await crowd_out(rig)
    await asyncio.to_thread(damage, store, "s", span=0)
    await mend(rig, "s")
    look = (await rig.wake("s")).look
    assert look is not None
    assert (look.token_count, look.version, look.newest_tokens) == (300, look.newest_version, 1300)
    assert look.version > 1
    assert await rig.fingerprint("s") == before


@pytest.mark.one_in(2)
@pytest.mark.parametrize("left", [False, True])
async def test_a_look_at_what_a_heal_makes_a_ledger_of_stays_in_memory_or_is_refused_with_advice_that_works(
    open_rig: Any, store: Path, left: bool
) -> None:
    async with open_rig(stop_within=0) as rig:
        await rig.asleep("s", tokens_of(1, 600))
        await rig.service.append("s", tokens=tokens_of(2, 40))
        assert (await rig.service.close()).ledgers
    async with open_rig() as rig:
        await rig.wake("s", at_token=550)
        before = await rig.fingerprint("s")
        if left:
            await crowd_out(rig)
        await asyncio.to_thread(damage, store, "s", kind="state")
        await mend(rig, "s")
        look = Look(3, 550, 3, 640)
        assert (await rig.service.list_sessions())[0].look == look
        if not left:
            with pytest.raises(errors.MemoryBudgetExceeded) as refusal:
                await crowd_out(rig)
            assert list(refusal.value.unslept) == ["torpor://default/s"]
            assert await rig.fingerprint("s") == before
        else:
            with pytest.raises(NoSuchPosition, match=r"Put the session to sleep: that ends the look\. Then wake it"):
                await rig.service.append("s", tokens=[7])
            assert (await rig.sleep("s")).looked_at == 550
            assert (await rig.wake("s")).token_count == 640
            await rig.sleep("s")
            assert (await rig.wake("s", at_token=550)).token_count == 550
        assert (await rig.service.append("s", tokens=[7])).branched is not None


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", ["wake", "look", "fork"])
async def test_an_early_token_takes_the_memory_of_what_is_read_for_it_where_all_is_cut_by_token(
    rig: Rigged, how: str
) -> None:
    await rig.asleep("s", tokens_of(1, 1800))
    if how == "look":
        await rig.wake("s", at_token=100)
        await crowd_out(rig)
    needed = rig.model.layout.most_bytes(600, PREFILL_CHUNK_TOKENS)
    await rig.service.residency.resize(rig.model.weights_bytes + needed)
    if how == "wake":
        assert (await rig.service.plan_wake("s", at_token=100)).memory_bytes <= needed
        assert (await rig.wake("s", at_token=100)).token_count == 100
    elif how == "look":
        assert (await rig.service.append("s", tokens=[7])).token_count == 101
    else:
        assert (await rig.service.fork("s", name="f", at_token=100)).token_count == 100
    assert sum(each.resident_bytes for each in rig.service.residency.awake.values()) <= needed


# --- a fold that does not come to its end


@pytest.mark.one_in(8)
@pytest.mark.parametrize("at", ["summary", "no summary", "no room", "new session"])
@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_a_look_stays_where_it_stood_when_its_fold_does_not_come_to_its_end(
    open_rig: Any, at: str, how: str
) -> None:
    """Nothing goes on from the newest version untold."""
    async with open_rig(endless=False) as rig:
        await rig.asleep("s", tokens_of(1, 600))
        await rig.service.append("s", tokens=tokens_of(2, 1448))
        await rig.sleep("s")
        look = (await rig.wake("s", 2, at_token=2000) if at == "no room" else await rig.wake("s", 1, at_token=500)).look
        assert look is not None
        before = await rig.fingerprint("s")
        order = {"summary": "A tale. " * 10} if at == "new session" else {"summarise": 100, "tail": 300}
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
        assert (info.state, info.look) == ("asleep", look)
        assert (await rig.wake("s")).look == look
        assert await rig.fingerprint("s") == before
        assert (await rig.service.append("s", tokens=[7])).branched == look


def _timeless(answer: Any) -> Any:
    """An answer without ids of bundles and times, wherever they stand in it."""
    if dataclasses.is_dataclass(answer) and not isinstance(answer, type):
        return {
            each.name: _timeless(getattr(answer, each.name))
            for each in dataclasses.fields(answer)
            if each.name not in {"bundle_id", "parent", "created_ns", "slept_ns", "lineage"}
        }
    return [_timeless(each) for each in answer] if isinstance(answer, list | tuple) else answer
