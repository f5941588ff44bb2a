"""A session woken at an earlier token is what it was then, bit for bit, and the report says what that took."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.session import Look
from torpor.daemon.engine import generation
from torpor.daemon.errors import GenerationFailed, SessionAwake
from torpor.errors import TorporError
from torpor.memvid.errors import BlockMissing, SessionNotFound, StoreIoError
from torpor.memvid.format.blocks import BLOCK_TOKENS
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.snapshot.checkpoints import CHECKPOINT_TOKENS
from torpor.snapshot.errors import NoSuchPosition
from torpor.tests.daemon.damage_rig import damage
from torpor.tests.daemon.session_rig import SAMPLED, Rigged, manifest_of
from torpor.tests.daemon.turns_rig import KINDS, TOKENS, look_at_the_first_of_two_versions, read_turns

BY_TOKEN = {"qwen3", "quantised"}


async def control_at(rig: Rigged, name: str, turns: list[int], more: int) -> tuple[Any, Any]:
    """A session that reads turn by turn and never sleeps: its state, and what it then writes."""
    await read_turns(rig, name, turns)
    return await rig.fingerprint(name), await rig.write(name, more)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_woken_where_a_turn_ended_is_what_it_was_then(open_kind: Any, kind: str) -> None:
    """MS2, MS4: a longer stored state is taken only where it can be cut back, else what is missing is computed.

    Turns end inside and outside of windows (32 tokens), of blocks (256), and of the distance of checkpoints.
    """
    turns = [20, 15, 221, 300, 144]
    async with open_kind(kind) as rig:
        await read_turns(rig, "s", turns)
        await rig.sleep("s")
        for ended in range(1, len(turns) + 1):
            at = sum(turns[:ended])
            wanted = await control_at(rig, f"c{at}", turns[:ended], 8)
            report = await rig.wake("s", at_token=at, version=1)
            assert report.token_count == at
            computed = report.tokens_prefilled
            if at == sum(turns):
                assert computed == 0
            else:
                assert computed == (1 if kind in BY_TOKEN else at % CHECKPOINT_TOKENS)
            assert (await rig.fingerprint("s"), await rig.write("s", 8)) == wanted
            await rig.sleep("s")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_woken_inside_a_turn_is_one_that_read_no_further(open_kind: Any, kind: str) -> None:
    async with open_kind(kind) as rig:
        await rig.read("s", TOKENS[:700])
        whole = await rig.fingerprint("s")
        await rig.sleep("s")
        for at in (1, 30, 33, 255, 256, 257, CHECKPOINT_TOKENS, 640, 700):
            state, written = await control_at(rig, f"c{at}", [at], 8)
            report = await rig.wake("s", at_token=at, version=1)
            if kind not in BY_TOKEN:
                assert report.tokens_prefilled == (at % CHECKPOINT_TOKENS if at < 700 else 0)
                assert await rig.fingerprint("s") == state
                assert await rig.write("s", 8) == written
            else:
                assert report.tokens_prefilled == (1 if at < 700 else 0)
                assert (await rig.write("s", 8))[0] == written[0]
            await rig.sleep("s")
        assert await rig.woken_fingerprint("s", version=1) == whole, "the later tokens are not lost"


async def test_what_is_read_behind_an_earlier_token_sleeps_as_a_version_of_its_own(open_kind: Any) -> None:
    async with open_kind("lfm2") as rig:
        first = await rig.asleep("s", TOKENS[:1100])
        await rig.wake("s", at_token=600)
        await rig.service.append("s", tokens=[7] * 30)
        state = await rig.fingerprint("s")
        receipt = await rig.sleep("s")
        assert (first.version, receipt.version, receipt.token_count) == (1, 2, 630)
        assert receipt.blocks_reused == 3, "two full blocks and the checkpoint at their end"
        report = await rig.wake("s")
        assert (report.version, report.tokens_prefilled) == (2, 0)
        assert await rig.fingerprint("s") == state


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
async def test_what_was_computed_again_is_written_again(open_kind: Any, kind: str) -> None:
    """Inside a turn the calls that compute it are cut, and may give other bits than those that lie in the blocks."""
    async with open_kind(kind) as rig:
        for first, at in ((20, 257), (46, 290), (100, 311)):
            name = f"s{first}"
            await read_turns(rig, name, [first, 300])
            await rig.sleep(name)
            state = await rig.woken_fingerprint(name, at_token=at)
            rig.live(name).dirty = True  # as if it had been changed: its state is written as it is
            report = await rig.sleep_and_wake(name)
            assert (report.tokens_prefilled, report.canary) == (0, "same_bits")
            assert await rig.fingerprint(name) == state


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_mere_look_at_an_earlier_token_makes_no_version(open_kind: Any, kind: str) -> None:
    """It would be the newest one, and a prune would then remove what it was cut from."""
    async with open_kind(kind) as rig:
        await rig.read("s", TOKENS[:700])
        whole = await rig.fingerprint("s")
        first = await rig.sleep("s")
        await rig.wake("s", 1, at_token=200)
        with pytest.raises(SessionAwake):
            await rig.wake("s", 1)
        receipt = await rig.sleep("s")
        assert (receipt.bundle_id, receipt.token_count, receipt.bytes_written) == (first.bundle_id, 700, 0)
        assert (receipt.looked_at, receipt.already_asleep) == (200, False)
        again = await rig.sleep("s")
        assert (again.bundle_id, again.looked_at, again.already_asleep) == (first.bundle_id, None, True)
        assert (await rig.wake("s")).token_count == 700
        assert await rig.fingerprint("s") == whole
        await rig.sleep("s")
        await rig.wake("s", at_token=200)
        await rig.service.append("s", tokens=[1])
        assert (await rig.sleep("s")).token_count == 201, "what is read there is kept"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("ending", ["stop", "sleep", "fork"])
@pytest.mark.parametrize("trouble", ["damaged", "out of reach for now"])
async def test_a_mere_look_never_stands_before_the_version_that_it_looks_at(
    open_rig: Any, store: Path, monkeypatch: pytest.MonkeyPatch, ending: str, trouble: str
) -> None:
    """Nor where that cannot be read just now: what is left of it could be, or be healed or saved."""

    def out_of_reach(*_: Any) -> Any:
        raise StoreIoError("Cannot open: too many open files.", path="x", action="open", errno=errno.EMFILE)

    async with open_rig(close=False) as rig:
        await rig.asleep("s", TOKENS[:1300])
        await rig.wake("s", at_token=300)
        with monkeypatch.context() as patched:
            if trouble == "damaged":
                await asyncio.to_thread(damage, store, "s", span=4, head=True)
            else:
                patched.setattr(Store, "open_session", out_of_reach)
            if ending == "fork":
                with contextlib.suppress(TorporError):
                    await rig.service.fork("s", name="f")
            elif ending == "sleep":
                await rig.sleep("s")
            await rig.service.close()
    with Store.open(store, writable=False) as opened:
        row = opened.find_session(SessionUri("default", "s"))
        assert row is not None
        assert (row.version, row.block_tokens) == (1, 1300)


@pytest.mark.one_in(2)
async def test_a_look_at_a_version_that_is_gone_is_kept_for_it_is_all_there_is(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        first = await rig.asleep("s", TOKENS[:1300])
        await rig.wake("s", at_token=300)
        manifest_of(store, first.bundle_id).unlink()
    async with open_rig() as rig:
        assert (await rig.wake("s")).token_count == 300


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [None, 200, 199])
async def test_an_earlier_version_is_looked_at_until_something_is_read_from_whichever_token_of_it(
    open_kind: Any, kind: str, at: int | None
) -> None:
    """A look leaves the newest version the newest; what is read from there makes another, and says where."""
    async with open_kind(kind) as rig:
        await rig.asleep("s", TOKENS[:200])
        await rig.service.append("s", tokens=TOKENS[200:300])
        await rig.sleep("s")
        held = (await rig.wake("s", 1, at_token=at)).token_count
        woken = await rig.fingerprint("s")
        dropped = await rig.sleep("s")
        assert (dropped.version, dropped.token_count, dropped.looked_at) == (2, 300, held)
        assert (dropped.bytes_written, (await rig.sleep("s")).bundle_id) == (0, dropped.bundle_id)
        assert (await rig.wake("s", 1, at_token=at)).look == Look(1, held, 2, 300)
        assert await rig.fingerprint("s") == woken
        read = await rig.service.append("s", tokens=[7])
        assert read.branched == Look(1, held, 2, 300)
        assert (await rig.service.append("s", tokens=[8])).branched is None, "it was said"
        went_on = await rig.fingerprint("s")
        receipt = await rig.sleep("s")
        assert (receipt.version, receipt.token_count, receipt.looked_at) == (3, held + 2, None)
        report = await rig.wake("s")
        assert (report.version, report.token_count, report.look) == (3, held + 2, None)
        assert await rig.fingerprint("s") == went_on


@pytest.mark.parametrize("at", [None, 280])
async def test_what_begins_with_a_look_refuses_one_whose_version_was_pruned(open_kind: Any, at: int | None) -> None:
    """Nothing begins with another version than the one that is looked at; what is in memory can still be kept."""
    async with open_kind("qwen3") as rig:
        await look_at_the_first_of_two_versions(rig, at)
        woken = await rig.fingerprint("s")
        await rig.service.maintain(operation="prune", session="s", keep_last=1)
        with pytest.raises(SessionNotFound, match="a look at version 1, which is not stored any more"):
            await rig.service.fork("s", name="f")
        with pytest.raises(SessionNotFound, match="a look at version 1"):
            await rig.service.fold("s", name="f", summary="A tale.")
        assert [each.name for each in await rig.service.list_sessions()] == ["s"]
        assert await rig.fingerprint("s") == woken, "it is looked at still"
        await rig.service.append("s", tokens=[7])
        await rig.service.fork("s", name="f")
        assert (await rig.wake("f")).token_count == len(woken.tokens) + 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("at", [None, 280])
async def test_a_look_whose_version_was_pruned_is_dropped_by_a_sleep_and_by_a_stop(
    open_kind: Any, open_rig: Any, at: int | None
) -> None:
    async with open_kind("qwen3") as rig:
        await look_at_the_first_of_two_versions(rig, at)
        await rig.service.maintain(operation="prune", session="s", keep_last=1)
        dropped = await rig.sleep("s")
        assert (dropped.version, dropped.token_count, dropped.looked_at) == (2, 350, at or 300)
        await rig.wake("s")
        await rig.service.append("s", tokens=[7])
        await rig.sleep("s")
        await rig.wake("s", 2, at_token=at)
        await rig.service.maintain(operation="prune", session="s", keep_last=1)
        assert (await rig.service.close()).slept == ()
    async with open_kind("qwen3") as rig:
        assert (await rig.wake("s")).token_count == 351


@pytest.mark.parametrize(("version", "at"), [(1, None), (None, 280)])
async def test_a_look_takes_no_settings_for_those_would_make_a_version(
    open_kind: Any, version: int | None, at: int | None
) -> None:
    async with open_kind("qwen3") as rig:
        await look_at_the_first_of_two_versions(rig, None)
        await rig.sleep("s")
        await rig.wake("s", version, at_token=at)
        with pytest.raises(SessionAwake, match=r"a look at version \d, token \d+.* or fork it"):
            await rig.service.set("s", sampling=Sampling(temperature=0.5))
        assert not rig.live("s").dirty
        assert (await rig.sleep("s")).version == 2
        await rig.service.set("s", sampling=Sampling(temperature=0.5))
        assert (await rig.sleep("s")).version == 3


async def test_a_fold_of_a_look_names_the_version_that_is_looked_at(open_kind: Any) -> None:
    async with open_kind("qwen3") as rig:
        await look_at_the_first_of_two_versions(rig, None)
        made = await rig.service.fold("s", name="f", summary="A tale.")
        assert (made.folded_from.version, made.folded_from.tokens) == (1, 300)
        assert (await rig.service.show("s")).info.token_count == 350


async def test_a_refused_token_is_told_by_what_holds_too_few_and_what_is_offered_works(rig: Rigged) -> None:
    """Of an awake session with a changed end, of a version of its own, and of one whose first version is gone."""

    async def refused(at: int, version: int | None = None) -> str:
        with pytest.raises(NoSuchPosition) as refusal:
            await rig.wake("s", version, at_token=at)
        return refusal.value.message

    await rig.read("s", TOKENS[:20])
    assert "torpor://default/s, which is awake, holds 20 tokens, and" in await refused(21)
    await rig.sleep("s")
    await rig.service.append("s", tokens=TOKENS[20:26])
    await rig.sleep("s")
    await rig.service.maintain(operation="prune", keep_last=1)
    assert "Version 2 of torpor://default/s holds 26 tokens" in await refused(30)
    await rig.service.append("s", tokens=TOKENS[26:29])
    told = await refused(30)
    assert "torpor://default/s, which is awake, holds 29 tokens, and there is no position 30 in it" in told
    assert told.endswith("put the session to sleep, and give one from 1 to 29.")
    assert "Version 2 of torpor://default/s holds 26 tokens" in await refused(28, 2)
    with pytest.raises(SessionNotFound, match="has no version 1; it has version 2"):
        await rig.wake("s", 1, at_token=40)
    await rig.sleep("s")
    assert (await rig.wake("s", at_token=28)).token_count == 28


async def test_a_token_that_a_session_does_not_have_is_refused_with_both_numbers(rig: Rigged) -> None:
    """Awake, too: putting it to sleep first would not help. An earlier token that it has takes a sleep."""

    async def refused(at: int, version: int | None = None) -> tuple[int, int]:
        with pytest.raises(NoSuchPosition) as refusal:
            await rig.wake("s", version, at_token=at)
        return refusal.value.token_count, refusal.value.at

    await rig.read("s", TOKENS[:300])
    assert await refused(301) == (300, 301)
    with pytest.raises(SessionAwake, match="token 20"):
        await rig.wake("s", at_token=20)
    assert (await rig.wake("s", at_token=300)).already_awake
    await rig.sleep("s")
    for at in (301, 10**6):
        assert await refused(at) == (300, at)
        assert not rig.is_awake("s")
    await rig.wake("s", at_token=200)
    assert await refused(301) == (300, 301)
    with pytest.raises(SessionAwake, match="token 250"):
        await rig.wake("s", at_token=250)
    await rig.service.append("s", tokens=[1])
    assert await refused(202) == (201, 202), "it would sleep with 201"
    assert await refused(301, 1) == (300, 301)
    with pytest.raises(SessionAwake, match="token 250 of version 1"):
        await rig.wake("s", 1, at_token=250)


async def test_checkpoints_stay_within_their_budget_and_wakes_compute_what_lies_behind_them(open_kind: Any) -> None:
    async with open_kind("lfm2") as rig:
        await rig.service.create("s")
        await rig.service.append("s", tokens=[1])
        state = rig.live("s").state
        await rig.service.append("s", tokens=TOKENS[1:CHECKPOINT_TOKENS])
        assert len(list(state.checkpoints)) == 1
        state.checkpoints.budget_bytes = state.checkpoints.record_bytes * 3 // 2
        await rig.service.append("s", tokens=TOKENS[CHECKPOINT_TOKENS:1800])
        assert state.checkpoints.positions == (2 * CHECKPOINT_TOKENS,)
        await rig.sleep("s")
        assert (await rig.wake("s", at_token=1100)).tokens_prefilled == 1100 - 2 * CHECKPOINT_TOKENS


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
async def test_woken_at_a_checkpoint_and_slept_at_once_it_wakes_again(open_kind: Any, kind: str) -> None:
    """Where the checkpoint stood stands the record of the end now; two at one token would be no chain."""
    async with open_kind(kind) as rig:
        await rig.asleep("s", TOKENS[: CHECKPOINT_TOKENS + 100])
        state = await rig.woken_fingerprint("s", at_token=CHECKPOINT_TOKENS)
        rig.live("s").dirty = True  # as if it had been changed: its state is written as it is
        assert (await rig.sleep("s")).version == 2
        report = await rig.wake("s")
        assert (report.version, report.token_count, report.tokens_prefilled) == (2, CHECKPOINT_TOKENS, 0)
        assert await rig.fingerprint("s") == state


@pytest.mark.usefixtures("short_calls")
async def test_a_model_that_fails_on_the_way_to_an_earlier_token_is_told_as_that(open_kind: Any) -> None:
    async with open_kind("lfm2") as rig:
        await rig.asleep("s", TOKENS[:400])
        rig.network.fail_at(3)  # behind the canary
        with pytest.raises(GenerationFailed, match="the model broke"):
            await rig.wake("s", at_token=390)
        assert not rig.is_awake("s")


# --- where later blocks, or the version, are lost


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kind", ["plain", "lfm2", "gemma3_text", "mamba2"])
@pytest.mark.parametrize("checkpointed", [True, False], ids=["with a checkpoint", "without"])
async def test_what_stands_before_damage_is_woken_and_goes_on(
    open_kind: Any, store: Path, kind: str, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of 600 tokens are lost: the first 512 are there, at the end of which there is a checkpoint, or none."""
    monkeypatch.setattr(generation, "PREFILL_CHUNK_TOKENS", BLOCK_TOKENS)
    async with open_kind(kind) as rig:
        await rig.read("s", TOKENS[:600], sampling=SAMPLED)
        if not checkpointed:
            rig.live("s").state.checkpoints.cut(0)
        await rig.read("control", TOKENS[:512], sampling=SAMPLED)
        wanted = await rig.fingerprint("control")
        await rig.sleep("s")
    damage(store, "s", head=True)
    with Store.open(store, writable=True) as opened:
        assert [action.kind for action in opened.repair().actions] == ["copy", "move"]
    async with open_kind(kind) as rig:
        with pytest.raises(BlockMissing, match="--at 512"):
            await rig.wake("s")
        woken = await rig.wake("s", at_token=512)
        assert woken.token_count == 512
        if kind != "plain":
            assert woken.tokens_prefilled == (0 if checkpointed else 512)
            assert await rig.fingerprint("s") == wanted
        await rig.service.append("s", tokens=[1, 2, 3])
        again = await rig.fingerprint("s")
        assert (await rig.sleep("s")).version == 2
        assert (await rig.wake("s")).tokens_prefilled == 0
        assert await rig.fingerprint("s") == again


async def test_a_session_that_was_rolled_back_is_not_rolled_forward_where_its_version_is_lost(
    open_rig: Any, store: Path
) -> None:
    async with open_rig() as rig:
        await rig.asleep("s", TOKENS[:300])
        await rig.service.append("s", tokens=TOKENS[300:600])
        await rig.sleep("s")
        await rig.wake("s", 1)
        rig.live("s").dirty = True  # as if it had been changed: it goes on from there
        lost = (await rig.sleep("s")).bundle_id
        await rig.wake("s")
        manifest_of(store, lost).unlink()
        assert (await rig.service.close()).slept == ("torpor://default/s",)
    async with open_rig() as rig:
        assert (await rig.wake("s")).token_count == 300
