"""Penalties and biases beside a plain reading of OpenAI's definition: the same tokens, wherever they are drawn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torpor.daemon.api.branching import BranchCommit, BranchReading
from torpor.daemon.api.constraints import Constraint
from torpor.daemon.api.sampling import Sampling, TokenBias
from torpor.daemon.engine.sampler import number_at
from torpor.daemon.errors import InvalidSampling
from torpor.tests.daemon.session_rig import Rigged, as_killed, tokens_of

COUNT = 16
FEW = [*(TokenBias(token, 20.0) for token in range(64, 69)), TokenBias(69)]
GREEDY = Sampling(presence_penalty=0.4, frequency_penalty=0.3, logit_bias=FEW)
DRAWN = [
    GREEDY,
    Sampling(0.3, seed=3, presence_penalty=1.5, frequency_penalty=0.2, logit_bias=FEW),
    Sampling(0.7, seed=4, frequency_penalty=2.0),
    Sampling(0.5, seed=5, presence_penalty=-0.5, frequency_penalty=-2.0),
]
NAMES = ("a", "b", "c", "d")
OTHERS = [TokenBias(token) for token in range(256, 259)]
"""Tokens that are no bytes, each never drawn."""


def penalised(mu: Any, answer: list[int], sampling: Sampling) -> Any:
    """`mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence`, and the biases before."""
    mu = np.array(mu, np.float64)
    for each in sampling.logit_bias:
        mu[each.token] += -np.inf if each.bias is None else each.bias
    for token in range(len(mu)):
        times = answer.count(token)
        mu[token] -= times * sampling.frequency_penalty + float(times > 0) * sampling.presence_penalty
    return mu


async def plainly(rig: Rigged, name: str, sampling: Sampling, allowed: Sequence[int] = range(256)) -> tuple[int, ...]:
    """What a session would write, token by token: each is drawn here, and then read by the session."""
    answer: list[int] = []
    for _ in range(COUNT):
        state = rig.live(name).state
        mu = np.full(259, -np.inf)
        mu[allowed] = penalised(state.last_logits, answer, sampling)[allowed]
        token = int(mu.argmax())
        if sampling.temperature:
            sums = np.exp((mu - mu.max()) / sampling.temperature).cumsum()
            number = number_at(sampling.seed, len(state.tokens))
            token = int(np.searchsorted(sums, number * sums[-1], side="right"))
        answer.append(token)
        await rig.service.append(name, tokens=[token])
    return tuple(answer)


async def begin(rig: Rigged, name: str, sampling: Sampling) -> None:
    """A session that draws bytes alone. Those whose names begin alike have read the same."""
    own = Sampling(**vars(sampling) | {"logit_bias": [*sampling.logit_bias, *OTHERS]})
    await rig.read(name, tokens_of(ord(name[0]), 20 + 7 * ord(name[0]) % 30), sampling=own)


@pytest.mark.one_in(1)
async def test_an_answer_is_as_openai_defines_it_alone_in_a_batch_and_behind_a_kill_and_a_wake(
    open_rig: Any, store: Path
) -> None:
    expected: dict[str, list[tuple[int, ...]]] = {}
    async with open_rig(store=store.parent / "control") as rig:
        for name, sampling in zip(NAMES, DRAWN, strict=True):
            await begin(rig, name, sampling)
            expected[name] = [await plainly(rig, name, sampling) for _ in range(2)]
            await begin(rig, f"{name}-unlike", Sampling(sampling.temperature, seed=sampling.seed))
            unlike = (await rig.service.generate(f"{name}-unlike", max_tokens=COUNT)).tokens
            assert unlike != expected[name][0], "else it would prove nothing"

    async def answers(rig: Rigged, at: int, *, together: bool = False) -> None:
        asking = [rig.service.generate(name, max_tokens=COUNT) for name in NAMES]
        told = await asyncio.gather(*asking) if together else [await each for each in asking]
        assert [each.tokens for each in told] == [expected[name][at] for name in NAMES]

    async with open_rig(batch=4) as rig:
        for name, sampling in zip(NAMES, DRAWN, strict=True):
            await begin(rig, name, sampling)
        rig.network.reset()
        await answers(rig, 0, together=True)
        assert 4 in rig.network.rows
        killed = as_killed(store)
        for name in NAMES:
            await rig.sleep_and_wake(name)
        await answers(rig, 1, together=True)
    async with open_rig(store=killed) as rig:
        assert not any(map(rig.is_awake, NAMES))
        await answers(rig, 1)


async def test_within_a_grammar_too(rig: Rigged) -> None:
    often = Sampling(frequency_penalty=2.0, presence_penalty=1.0)
    for name in ("a", "as-plain"):
        await begin(rig, name, often)
    letters = rig.model.encode("xyz ", opening=False)
    expected = await plainly(rig, "as-plain", often, letters)
    told = await rig.service.generate("a", max_tokens=COUNT, constraint=Constraint(regex="[xyz ]{99}"))
    assert told.tokens == expected
    assert len(set(expected)) == 4, "none may come each time"
    barred = Sampling(logit_bias=[TokenBias(letters[0])])
    told = await rig.service.generate("a", max_tokens=9, sampling=barred, constraint=Constraint(regex="[xyz ]{99}"))
    assert "x" not in told.text


@pytest.mark.one_in(1)
@pytest.mark.parametrize("sampling", DRAWN[:2], ids=["greedy", "drawn"])
async def test_a_branch_counts_what_was_committed_since_the_root_or_what_was_read_last(
    open_rig: Any, sampling: Sampling
) -> None:
    async with open_rig() as rig:
        service = rig.service
        for name in ("a", "as-plain"):
            await begin(rig, name, sampling)
        expected = await plainly(rig, "as-plain", sampling)
        root = (await service.tree("a")).branch
        await service.advance([root], max_tokens=4)
        (one, other) = (each.branch for each in (await service.branch(root, count=2)).branches)
        for _ in range(8):
            (drawn,) = (await service.produce([one])).produced
            await service.commit([BranchCommit(one, drawn.token, drawn.step)])
        await service.keep(root, "kept", subtree=True)
        again = await service.branches((await service.tree("kept")).branch)
        woken = max(again.branches, key=lambda each: each.position)
        (told,) = (await service.advance([woken.branch], max_tokens=4)).written
        assert told.tokens == expected[12:]
        (told,) = (await service.advance([other], max_tokens=12)).written
        assert told.tokens == expected[4:]
        await service.append("as-plain", tokens=tokens_of(9, 5))
        await service.prefill([BranchReading(other, tokens=tokens_of(9, 5))])
        (told,) = (await service.advance([other], max_tokens=COUNT)).written
        assert told.tokens == await plainly(rig, "as-plain", sampling)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("asked", ["create", "set", "generate", "chat", "guide"])
async def test_a_token_that_the_model_has_not_is_refused_by_name(rig: Rigged, asked: str) -> None:
    await begin(rig, "a", GREEDY)
    before, wrong = await rig.fingerprint("a"), Sampling(logit_bias=[TokenBias(3, 1.0), TokenBias(259, 1.0)])
    root = (await rig.service.tree("a")).branch
    requests: dict[str, Any] = {
        "create": lambda: rig.service.create("new", sampling=wrong),
        "set": lambda: rig.service.set("a", sampling=wrong),
        "generate": lambda: rig.service.generate("a", text="more", sampling=wrong),
        "chat": lambda: rig.service.chat("a", message="more", sampling=wrong),
        "guide": lambda: rig.service.guide([root], sampling=wrong),
    }
    with pytest.raises(InvalidSampling, match="token 259, but the model's tokens are 0 to 258") as refused:
        await requests[asked]()
    assert refused.value.details == {"field": "logit_bias", "token": 259, "vocabulary": 259}
    assert await rig.fingerprint("a") == before
    assert [each.name for each in await rig.service.list_sessions()] == ["a"]
