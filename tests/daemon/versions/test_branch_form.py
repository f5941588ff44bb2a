"""A session that was a branch goes on as a branch, bit for bit, after a sleep and after its tokens are read again; no
other session changes its form."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from torpor.daemon.engine.generation import read, replay
from torpor.daemon.models.models import LoadedModel
from torpor.snapshot.forking import fork
from torpor.snapshot.kinds import holds_shared
from torpor.snapshot.passes import SEGMENTED, UNREPEATABLE
from torpor.snapshot.state import LiveState
from torpor.tests.daemon.session_rig import Rigged, all_begun, fingerprint_of, tokens_of, writing

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS


async def make_branch(rig: Rigged, name: str) -> None:
    """From now on the session is one that was kept from a branch."""
    session = rig.live(name)

    def keep() -> None:
        session.state = fork(session.state, session.model.branch_caches())

    await rig.service._parts.models.engine.call(keep)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("written", [1, 40])
async def test_a_session_kept_from_a_branch_sleeps_and_goes_on_as_if_it_had_not(open_rig: Any, written: int) -> None:
    async with open_rig() as rig:
        await rig.read("slept", tokens_of(1, 150))
        await make_branch(rig, "slept")
        first = await rig.write("slept", written)
        await rig.sleep("slept")
    async with open_rig() as rig:
        woken = await rig.wake("slept")
        assert woken.tokens_prefilled == 0
        assert woken.canary == "same_bits"
        assert holds_shared(rig.live("slept").state.caches)
        rest = await rig.write("slept", 30)
        await rig.read("control", tokens_of(1, 150))
        await make_branch(rig, "control")
        whole = await rig.write("control", written + 30)
        assert (first[0] + rest[0], first[1] + rest[1], rest[2]) == whole
        assert (await rig.fingerprint("slept")).kv == (await rig.fingerprint("control")).kv
        assert list(rig.live("slept").state.passes)[-30:] == [SEGMENTED] * 30


@pytest.mark.one_in(1)
@pytest.mark.parametrize("at", [149, 150, 151, 170])
async def test_a_wake_at_an_earlier_token_takes_the_form_that_the_session_had_there(rig: Rigged, at: int) -> None:
    await rig.read("a", tokens_of(1, 150))
    await make_branch(rig, "a")
    tokens, _, _ = await rig.write("a", 40)
    await rig.sleep("a")
    await rig.wake("a", at_token=at)
    state = rig.live("a").state
    assert holds_shared(state.caches) == (at > 150)
    if at > 150:
        assert (await rig.write("a", 190 - at))[0] == tokens[at - 150 :]


async def test_an_ordinary_session_keeps_its_form_beside_branches(rig: Rigged) -> None:
    await rig.read_each(("before", "after", "branch"), tokens_of(1, 150))
    wanted = await rig.write("before", 30)
    await make_branch(rig, "branch")
    assert await rig.write("branch", 30) != wanted, "a branch has other last bits"
    assert await rig.write("after", 30) == wanted
    assert not holds_shared(rig.live("after").state.caches)
    assert SEGMENTED not in list(rig.live("after").state.passes)


@pytest.mark.one_in(1)
async def test_sessions_kept_from_branches_write_in_rounds_and_each_as_alone(open_rig: Any) -> None:
    async with open_rig(batch=8) as rig:
        for name in ("a", "b", "a-alone", "b-alone"):
            await rig.read(name, tokens_of(ord(name[0]), 100 + ord(name[0])))
            await make_branch(rig, name)
        rig.network.reset()
        tasks = await all_begun(rig, [writing(rig, name, 20) for name in ("a", "b")])
        written = [result.tokens for result in await asyncio.gather(*tasks)]
        assert (await rig.service.status()).batched_tokens >= 38
        for name, tokens in zip(("a", "b"), written, strict=True):
            assert (await rig.write(f"{name}-alone", 20))[0] == tokens
            assert await rig.fingerprint(f"{name}-alone") == await rig.fingerprint(name)
            assert UNREPEATABLE not in list(rig.live(name).state.passes)


async def test_tokens_of_a_branch_are_read_again_to_the_same_bits(rig: Rigged) -> None:
    model, engine = rig.model, rig.service._parts.models.engine
    state = await engine.call(lambda: grown(model))
    again = await engine.call(lambda: replayed(model, state))
    assert fingerprint_of(again) == fingerprint_of(state)
    assert list(again.passes) == list(state.passes)


def drain(steps: Any) -> None:
    for _ in steps:
        pass


def grown(model: LoadedModel) -> LiveState:
    state = model.new_state(mx.random.key(0))
    drain(read(model, state, tokens_of(1, 100), lambda *_: None))
    drain(read(model, state, tokens_of(2, 1), lambda *_: None))
    state = fork(state, model.branch_caches())
    for count in (1, 1, 80, 1):
        drain(read(model, state, tokens_of(count, count), lambda *_: None))
    return state


def replayed(model: LoadedModel, state: LiveState) -> LiveState:
    again = model.new_state(state.random_key)
    drain(replay(model, again, list(state.tokens), list(state.passes.between(0, len(state.tokens)))))
    return again


async def test_a_branch_without_a_token_of_its_own_becomes_a_session_of_the_ordinary_form(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 150))
    before = await rig.fingerprint("a")
    await make_branch(rig, "a")
    live = rig.live("a")
    assert await rig.fingerprint("a") == before
    await rig.service._parts.models.engine.call(lambda: live.model.settle_form(live.state))
    assert not holds_shared(live.state.caches)
    assert await rig.fingerprint("a") == before
