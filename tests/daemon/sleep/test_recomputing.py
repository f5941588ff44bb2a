"""A wake that computes the tokens again: what comes of it is what would have been restored, or is told, or not used."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from torpor.daemon.api.session import Recomputed
from torpor.snapshot.passes import UNREPEATABLE, Passes
from torpor.tests.daemon.recompute_rig import teach
from torpor.tests.daemon.session_rig import SAMPLED, Rigged, tokens_of

KINDS = ["plain", "gemma3_text", "lfm2", "quantised"]
TEXT = tokens_of(1, 700)


async def slept(rig: Rigged, name: str = "a") -> Any:
    """A session that has read and written in several requests, asleep; and what it was."""
    await rig.read(name, TEXT, sampling=SAMPLED)
    await rig.write(name, 9)
    await rig.service.append(name, tokens=tokens_of(2, 40))
    await rig.write(name, 3)
    before = await rig.fingerprint(name)
    await rig.sleep(name)
    return before


async def goes_on(rig: Rigged, name: str = "a") -> Any:
    await rig.service.append(name, tokens=tokens_of(3, 30))
    return await rig.write(name, 12)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_that_is_recomputed_goes_on_to_the_bit_as_one_that_is_restored(
    open_kind: Any, kind: str
) -> None:
    async with open_kind(kind, recompute="exact") as rig:
        before = await slept(rig)
        await rig.service.fork("a", name="restored")
        teach(rig, slow_disk=True)
        plan = await rig.service.plan_wake("a")
        assert plan.way == "recompute"
        rig.network.reset()
        woken = await rig.wake("a")
        assert sum(rig.network.calls) == woken.tokens_prefilled == plan.token_count
        assert woken.bytes_read < plan.bytes_to_read
        assert (woken.canary, woken.recomputed) == ("same_bits", None)
        assert await rig.fingerprint("a") == before
        again = await rig.sleep("a")
        assert (again.version, again.bytes_written) == (1, 0), "nothing has happened in it, so nothing is written"
        teach(rig, slow_disk=True)
        assert (await rig.wake("a")).tokens_prefilled > 0
        teach(rig, slow_disk=False)
        assert (await rig.wake("restored")).tokens_prefilled == 0
        assert await goes_on(rig) == await goes_on(rig, "restored")
        receipt = await rig.sleep("a")
        assert receipt.blocks_reused >= 2, "its blocks are those of the version that it was computed from"
        await rig.sleep("restored")
        teach(rig, slow_disk=False)
        travels = [await rig.wake(name, at_token=600) for name in ("a", "restored")]
        assert travels[0].tokens_prefilled == travels[1].tokens_prefilled, "its checkpoints are still there"
        assert await goes_on(rig) == await goes_on(rig, "restored")


@pytest.mark.one_in(2)
async def test_the_same_calls_read_afresh_give_the_same(open_rig: Any) -> None:
    """A control that never sleeps, in the same requests."""
    async with open_rig(recompute="exact") as rig:
        await slept(rig)
        teach(rig, slow_disk=True)
        assert (await rig.wake("a")).tokens_prefilled > 0
        await rig.read("control", TEXT, sampling=SAMPLED)
        await rig.write("control", 9)
        await rig.service.append("control", tokens=tokens_of(2, 40))
        await rig.write("control", 3)
        assert await rig.fingerprint("a") == await rig.fingerprint("control")
        assert await goes_on(rig) == await goes_on(rig, "control")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", ["off", "exact", "fastest"])
async def test_which_way_a_wake_goes_follows_the_rates_and_the_policy(open_rig: Any, policy: str) -> None:
    async with open_rig(recompute=policy) as rig:
        await slept(rig)
        for slow_disk in (True, False, True):
            teach(rig, slow_disk=slow_disk)
            recomputes = slow_disk and policy != "off"
            plan = await rig.service.plan_wake("a")
            assert plan.way == ("recompute" if recomputes else "restore")
            assert plan.recompute == policy
            assert bool((await rig.wake("a")).tokens_prefilled) is recomputes
            await rig.sleep("a")


async def test_a_request_that_wakes_a_session_chooses_too_and_nothing_else_does(
    open_rig: Any, quantisable_model: Any
) -> None:
    async with open_rig(quantisable_model, recompute="fastest") as rig:
        await slept(rig)
        teach(rig, slow_disk=True)
        result = await rig.service.generate("a", max_tokens=1)
        assert result.woken.tokens_prefilled > 0
        await rig.sleep("a")
        forked = await rig.service.fork("a", name="b", at_token=512)
        assert forked.tokens_prefilled <= 1, "a fork is of what is stored"
        teach(rig, slow_disk=True)
        rig.network.reset()
        await rig.service.maintain(operation="quantise", session="a", bits=8)
        assert sum(rig.network.calls) < 10, "what is kept in fewer bits is what is stored"
        plan = await rig.service.plan_wake("a")
        assert (plan.way, "fewer bits" in plan.reason) == ("restore", True)


async def test_an_earlier_token_is_restored(open_rig: Any) -> None:
    async with open_rig(recompute="fastest") as rig:
        await slept(rig)
        teach(rig, slow_disk=True)
        plan = await rig.service.plan_wake("a", at_token=300)
        assert (plan.way, "beginning" in plan.reason) == ("restore", True)
        assert (await rig.wake("a", at_token=300)).tokens_prefilled == 1


async def test_tokens_decoded_beside_others_are_not_said_to_be_exact(open_rig: Any) -> None:
    async with open_rig(recompute="exact") as rig:
        await rig.read("a", TEXT)
        state = rig.live("a").state
        state.passes = Passes.from_bytes(state.passes.tobytes(), len(TEXT))
        beside = Passes()
        for size in [*list(state.passes)[:-1], UNREPEATABLE]:
            beside.add(size)
        state.passes = beside
        await rig.sleep("a")
        teach(rig, slow_disk=True)
        plan = await rig.service.plan_wake("a")
        assert (plan.way, "beside other sessions" in plan.reason) == ("restore", True)
        assert (await rig.wake("a")).tokens_prefilled == 0


def other_bits(rig: Rigged, by: float) -> None:
    """From now on the model computes something else for the last token."""
    rig.network.after = lambda _, logits: logits + by * mx.arange(logits.shape[-1]) / logits.shape[-1]


@pytest.mark.one_in(2)
async def test_where_other_bits_are_let_pass_the_session_says_so_from_then_on(open_rig: Any) -> None:
    async with open_rig(recompute="fastest") as rig:
        before = await slept(rig)
        teach(rig, slow_disk=True)
        other_bits(rig, 1e-4)
        woken = await rig.wake("a")
        count = woken.token_count
        assert (woken.tokens_prefilled, woken.canary) == (count, "within_tolerance")
        assert woken.recomputed == Recomputed(1, count - 1, 1, same_logits=False, damaged=False)
        found = await rig.fingerprint("a")
        assert (found.kv, found.logits == before.logits) == (before.kv, False)
        rig.network.reset()
        kept = await rig.sleep("a")
        assert kept.version == 1, "of what nobody has used, the version that is stored is what there is"
        other_bits(rig, 1e-4)
        await rig.wake("a")
        rig.network.reset()
        await rig.service.append("a", tokens=tokens_of(5, 3))
        await rig.sleep("a")
        teach(rig, slow_disk=False)
        assert (await rig.wake("a")).recomputed == woken.recomputed


async def test_a_model_that_fails_on_the_way_costs_nothing(open_rig: Any) -> None:
    async with open_rig(recompute="exact") as rig:
        before = await slept(rig)
        teach(rig, slow_disk=True)
        rig.network.fail_at(2)
        woken = await rig.wake("a")
        assert woken.tokens_prefilled == 0
        assert await rig.fingerprint("a") == before


async def test_blocks_with_other_bits_are_written_again(open_rig: Any) -> None:
    """Where keys and values differ from some block on, the next sleep refers to those before it and to no others."""
    async with open_rig(recompute="fastest") as rig:
        await slept(rig)
        teach(rig, slow_disk=True)
        rig.network.before = disturb(rig, block=1)
        woken = await rig.wake("a")
        rig.network.reset()
        assert woken.recomputed is not None
        assert woken.recomputed.start == 256
        await rig.service.append("a", tokens=tokens_of(5, 3))
        slept_again = await rig.sleep("a")
        assert slept_again.blocks_reused == 1
        teach(rig, slow_disk=False)
        assert (await rig.wake("a")).recomputed == woken.recomputed


def disturb(rig: Rigged, *, block: int) -> Any:
    """Change the keys of the first token of a block by a little, once they are there."""
    done: list[bool] = []

    def change(_number: int, _tokens: Any, cache: Any) -> None:
        if not done and cache[0].offset > 256 * block:
            done.append(True)
            keys = cache[0].keys
            keys[..., 256 * block, :] = keys[..., 256 * block, :] * (1 + 2**-20)

    return change
